"""Rows of tied symbols whose support is known exactly: can one step keep positions in agreement?"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from emoe.config import option
from emoe.domains.base import Domain, DomainConfig, random_state
from emoe.domains.metrics import OVERLAP_ROWS, RESAMPLES, not_empty, pair_overlap, proportion
from emoe.rng import derive_seed
from emoe.types import Measurement, TokenSpace

TieFamily = Literal["pairs", "copies", "sums", "permutations", "blocks"]

SYMBOLS = 8  # the default, which a domain's name leaves out
SUMMED = 4  # positions of a group of "sums"


@dataclass(frozen=True, kw_only=True)
class TiesConfig(DomainConfig, kind="ties"):
    """Rows of L symbols in groups of tied positions, uniform over all rows that keep every tie.

    pairs: x[2i] = x[2i+1]. copies: x[i] = x[i + L/2]. sums: each four neighbours (both, if L = 2) add up to 0
    modulo S. permutations: each S neighbours (all, if L < S) differ. blocks: a fixed random matching of positions,
    each two of them tied by a fixed random bijection of the symbols.
    """

    family: TieFamily = option("pairs", doc="which ties: pairs, copies, sums, permutations or blocks")
    length: int = option(16, doc="symbols in a row, L", low=2)
    symbols: int = option(SYMBOLS, doc="values of a symbol without the mask, S", low=2, high=65_535)
    points: int = option(100_000, doc="training rows", low=2)

    def conflicts(self) -> Iterator[str]:
        """Rows must be made of whole groups."""
        fault = f"length: {self.family} cannot cut {self.length} positions into groups of"
        if self.family in ("pairs", "copies", "blocks") and self.length % 2:
            yield f"{fault} 2; choose an even length"
        elif self.family == "sums" and self.length != 2 and self.length % SUMMED:
            yield f"{fault} {SUMMED}; choose 2 or a multiple of {SUMMED}"
        elif self.family == "permutations" and self.length > self.symbols and self.length % self.symbols:
            s = self.symbols
            yield f"{fault} symbols = {s}; choose at most {s} or a multiple of {s}, or symbols that divide the length"

    def build(self, seed: int) -> Ties:
        """Draw the training rows."""
        return Ties(self, seed)


class Ties(Domain):
    """Rows made of G independent groups of g tied positions; every position is uniform over the S symbols."""

    task: ClassVar[str] = "ties"

    def __init__(self, config: TiesConfig, seed: int):
        length, symbols = config.length, config.symbols
        self.name = f"{config.family}-L{length}" + (f"-S{symbols}" if symbols != SYMBOLS else "")
        self.seed = seed
        self.space = TokenSpace(size=symbols + 1, mask_id=symbols, length=length)
        self.tie, self.groups = layout(config.family, length, symbols)
        self.rows = self._draw(config.points, "train")

    def _draw(self, n: int, *stream: object) -> Int[Tensor, "n L"]:
        """n rows from the random stream of that name."""
        state = random_state(derive_seed(self.seed, "ties", self.name, *stream))
        rows = torch.empty(n, self.space.length, dtype=torch.long)
        rows[:, self.groups] = torch.from_numpy(self.tie.draw(n, len(self.groups), state)).long()
        return rows

    def fresh(self, n: int, seed: int) -> Int[Tensor, "n L"]:
        """`n` further rows of the same law; of a small support they may well repeat training rows."""
        return self._draw(n, "fresh", seed)

    @property
    def chance(self) -> float:
        """Share of ties (0..1) that independent uniform symbols keep; 1/S for pairs, copies, sums and blocks."""
        return self.tie.choices() / self.tie.symbols**self.tie.size

    def ideal(self, steps: int) -> float:
        """The metric `ties` of the best factorised T-step chain, in percent: 100 * (1 - 1/T + 1/(T S)) for pairs."""
        return 100 * self.tie.ideal(steps)

    def entropy(self) -> float:
        """Entropy of a row in nats, log |support|: no model has a lower mean NLL."""
        return len(self.groups) * math.log(self.tie.choices())

    @property
    def factorised_nll(self) -> float:
        """L log S, the NLL in nats per row of independent uniform symbols: the best without coordination."""
        return self.space.length * math.log(self.space.mask_id)

    def kept(self, samples: Int[Tensor, "n L"]) -> Bool[Tensor, "n G"]:
        """Which ties hold in each row; one with a mask in its group does not."""
        content = samples.cpu().long()[:, self.groups]
        known = content < self.space.mask_id
        return self.tie.holds(content.where(known, 0)) & known.all(2)

    def measure(self, samples: Int[Tensor, "n L"], seed: int = 0) -> list[Measurement]:
        """How many ties and rows are right, and whether the symbols are as varied as those of the data.

        ties: 100 * share of ties that hold, the mean over rows of the share in the row.
        rows_valid: 100 * share of rows in which all do.
        coverage: mean over positions of 100 * (1 - TV) between the law of the symbol and the uniform one,
            100 * sum_v min(p_i(v), 1/S): 100/S for a single repeated row, short of 100 by about
            40 * sqrt((S - 1) / n) for n real ones.
        entropy: mean over positions of the entropy of the symbol in nats, at most log S.
        pair_overlap: against fresh rows; low for samples that repeat few rows, or tie what should be free.
        """
        kept = self.kept(not_empty(samples))
        shares, n, uniform = kept.double().mean(1), len(samples), 1 / self.space.mask_id
        pool = samples[:OVERLAP_ROWS]
        return [
            Measurement("ties", 100 * shares.mean().item(), 100 * shares.std(correction=0).item() / math.sqrt(n), n),
            proportion("rows_valid", kept.all(1)),
            self._of_symbols("coverage", samples, lambda p: 100 * np.minimum(p[:, :-1], uniform).sum(1).mean(), seed),
            self._of_symbols("entropy", samples, lambda p: -(p * np.log(np.maximum(p, 1e-300))).sum(1).mean(), seed),
            pair_overlap(pool, self._draw(len(pool), "measure", seed), seed),
        ]

    def _of_symbols(
        self, name: str, samples: Int[Tensor, "n L"], value: Callable[[Float[np.ndarray, "L V"]], float], seed: int
    ) -> Measurement:
        """A number computed from the symbol law of every position, with the error of a bootstrap over whole rows."""
        length, size = self.space.length, self.space.size
        cells = samples.cpu().numpy().astype(np.int64) + size * np.arange(length)

        def of(rows: Int[np.ndarray, "n L"]) -> float:
            counts = np.bincount(rows.ravel(), minlength=length * size)
            return float(value(counts.reshape(length, size) / len(rows)))

        draw = np.random.default_rng(seed)
        resampled = [of(cells[draw.integers(len(cells), size=len(cells))]) for _ in range(RESAMPLES)]
        return Measurement(name, of(cells), float(np.std(resampled, ddof=1)), len(cells))

    def heat_map(self, rows: Int[Tensor, "n L"]) -> np.ndarray:
        """Tied positions side by side; groups whose tie is broken are masked."""
        broken = ~self.kept(rows)[..., None].expand(-1, *self.groups.shape)
        return np.ma.masked_array(rows[:, self.groups].flatten(1).numpy(), broken.flatten(1).numpy())


class Tie(ABC):
    """A uniform law over the contents of a group of `size` positions with symbols 0..S-1.

    By default any size - 1 symbols fix the last one and are themselves independent and uniform.
    """

    def __init__(self, symbols: int, size: int):
        self.symbols, self.size = symbols, size

    @abstractmethod
    def draw(self, n: int, groups: int, state: np.random.RandomState) -> Int[np.ndarray, "n G g"]:
        """Contents of n rows of G groups, independent of each other."""

    @abstractmethod
    def holds(self, content: Int[Tensor, "n G g"]) -> Bool[Tensor, "n G"]:
        """Which groups keep their tie; all symbols are in 0..S-1."""

    def choices(self) -> int:
        """Number of contents that keep the tie, all equally likely."""
        return int(self.symbols ** (self.size - 1))

    def agreement(self, known: int, drawn: int) -> float:
        """P(the tie is not broken yet) after `drawn` symbols were drawn independently given the same `known` ones."""
        # Several that are drawn at once and complete the group are uniform and agree by chance.
        return 1 / self.symbols if drawn > 1 and known + drawn == self.size else 1.0

    def ideal(self, steps: int) -> float:
        """Probability that the best factorised T-step chain keeps the tie (Eq. 2-3 with exact conditionals).

        On the grid t_i = i/T with alpha(t) = 1 - t, each position still masked at t_i is revealed in that step with
        probability 1/i, independently. With h_i(m) the probability of an unbroken end, given m known symbols and i
        steps to go, and f = size - m:

            h_i(m) = sum_k C(f, k) (1/i)^k (1 - 1/i)^(f - k) agreement(m, k) h_{i-1}(m + k),   h_0(size) = 1.
        """
        if steps < 1:
            raise ValueError(f"steps: must be >= 1, got {steps}")
        ends = [0.0] * self.size + [1.0]
        for left in range(1, steps + 1):
            reveal = 1 / left
            ends = [
                sum(
                    math.comb(free, k) * reveal**k * (1 - reveal) ** (free - k)
                    * self.agreement(self.size - free, k) * ends[self.size - free + k]
                    for k in range(free + 1)
                )
                for free in range(self.size, -1, -1)
            ]  # fmt: skip
        return ends[0]


class _Match(Tie):
    """Two symbols, the second a bijection of the first: x' = b_i(x), with a bijection for each group i."""

    def __init__(self, bijections: Int[np.ndarray, "G S"]):
        super().__init__(bijections.shape[1], 2)
        self.bijections = bijections

    def draw(self, n: int, groups: int, state: np.random.RandomState) -> Int[np.ndarray, "n G 2"]:
        first = state.randint(self.symbols, size=(n, groups))
        return np.stack([first, self.bijections[np.arange(groups), first]], axis=2)

    def holds(self, content: Int[Tensor, "n G 2"]) -> Bool[Tensor, "n G"]:
        partner = torch.from_numpy(self.bijections)[torch.arange(content.shape[1]), content[..., 0]]
        return content[..., 1] == partner


class _Sum(Tie):
    """Symbols that add up to 0 modulo S."""

    def draw(self, n: int, groups: int, state: np.random.RandomState) -> Int[np.ndarray, "n G g"]:
        free = state.randint(self.symbols, size=(n, groups, self.size - 1))
        return np.concatenate([free, -free.sum(2, keepdims=True) % self.symbols], axis=2)

    def holds(self, content: Int[Tensor, "n G g"]) -> Bool[Tensor, "n G"]:
        return content.sum(2) % self.symbols == 0


class _Distinct(Tie):
    """Symbols that all differ: an arrangement of `size` of the S symbols, a permutation where size = S."""

    def draw(self, n: int, groups: int, state: np.random.RandomState) -> Int[np.ndarray, "n G g"]:
        # Symbol k is drawn as its rank among the S - k that the symbols before it leave.
        content = np.stack([state.randint(self.symbols - k, size=(n, groups)) for k in range(self.size)], axis=2)
        for k in range(self.size - 2, -1, -1):  # ranks among what is left become ranks among what was left before k
            content[..., k + 1 :] += content[..., k + 1 :] >= content[..., k : k + 1]
        return content

    def holds(self, content: Int[Tensor, "n G g"]) -> Bool[Tensor, "n G"]:
        return (content.sort(2).values.diff(dim=2) != 0).all(2)

    def choices(self) -> int:
        return math.perm(self.symbols, self.size)

    def agreement(self, known: int, drawn: int) -> float:
        left = self.symbols - known  # each is uniform over these
        return math.perm(left, drawn) / left**drawn


def layout(family: TieFamily, length: int, symbols: int) -> tuple[Tie, Int[Tensor, "G g"]]:
    """The tie of a family and the positions of its groups, each position in one group; no seed changes either."""
    positions = np.arange(length)
    if family in ("sums", "permutations"):
        size = min(length, SUMMED if family == "sums" else symbols)
        tie = _Sum(symbols, size) if family == "sums" else _Distinct(symbols, size)
        return tie, torch.from_numpy(positions.reshape(-1, size))
    if family == "blocks":
        state = random_state(derive_seed("ties", "blocks", length, symbols))
        pairs = np.array(sorted(sorted(pair) for pair in state.permutation(length).reshape(-1, 2).tolist()))
        return _Match(np.stack([state.permutation(symbols) for _ in pairs])), torch.from_numpy(pairs)
    pairs = positions.reshape(-1, 2) if family == "pairs" else positions.reshape(2, -1).T.copy()
    return _Match(np.tile(np.arange(symbols), (len(pairs), 1))), torch.from_numpy(pairs)
