"""Rows of tied symbols with a known support: they show whether positions that are drawn at once agree."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from emoe.config import option
from emoe.domains.base import Domain, DomainConfig, random_state
from emoe.domains.metrics import OVERLAP_ROWS, Picked, bootstrap, not_empty, pair_overlap, proportion
from emoe.rng import derive_seed
from emoe.types import Measurement, TokenSpace

TieFamily = Literal["pairs", "copies", "sums", "permutations", "blocks"]

SYMBOLS = 8  # the default, which a domain's name leaves out
SUMMED = 4  # positions of a group of "sums"

Contents = Int[np.ndarray, "n G g"]  # symbols of G groups of g positions, in n rows
Last = Callable[[Int[np.ndarray, "n G f"]], Int[np.ndarray, "n G"]]


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
        fault = f"length: {self.family} cannot cut {self.length} positions into groups of"
        if self.family in ("pairs", "copies", "blocks") and self.length % 2:
            yield f"{fault} 2; choose an even length"
        elif self.family == "sums" and self.length != 2 and self.length % SUMMED:
            yield f"{fault} {SUMMED}; choose 2 or a multiple of {SUMMED}"
        elif self.family == "permutations" and self.length > self.symbols and self.length % self.symbols:
            s = self.symbols
            yield f"{fault} symbols = {s}; choose at most {s} or a multiple of {s}, or symbols that divide the length"

    def build(self, seed: int) -> Ties:
        return Ties(self, seed)


class Ties(Domain):
    """Rows of G independent groups of g tied positions; every position is uniform over the S symbols."""

    task: ClassVar[str] = "ties"

    def __init__(self, config: TiesConfig, seed: int):
        length, symbols = config.length, config.symbols
        self.name = f"{config.family}-L{length}" + (f"-S{symbols}" if symbols != SYMBOLS else "")
        self.seed = seed
        self.space = TokenSpace(size=symbols + 1, mask_id=symbols, length=length)
        self.tie, self.groups = layout(config.family, length, symbols)
        self.rows = self._draw(config.points, "train")

    def _draw(self, n: int, *stream: object) -> Int[Tensor, "n L"]:
        state = random_state(derive_seed(self.seed, "ties", self.name, *stream))
        rows = torch.empty(n, self.space.length, dtype=torch.long)
        rows[:, self.groups] = torch.from_numpy(self.tie.draw(n, len(self.groups), state)).long()
        return rows

    def fresh(self, n: int, seed: int) -> Int[Tensor, "n L"]:
        """Further rows of the same law; those of a small support may well repeat training rows."""
        return self._draw(n, "fresh", seed)

    def ideal(self, steps: int) -> float:
        """The metric `ties` of the best factorised T-step chain, in percent: 100 * (1 - 1/T + 1/(T S)) for pairs."""
        return 100 * self.tie.ideal(steps)

    def kept(self, samples: Int[Tensor, "n L"]) -> Bool[Tensor, "n G"]:
        """Which ties hold in each row; one with a mask in its group does not."""
        content = samples.cpu().long()[:, self.groups]
        known = content < self.space.mask_id
        return torch.from_numpy(self.tie.holds(content.where(known, 0).numpy())) & known.all(2)

    def measure(self, samples: Int[Tensor, "n L"], seed: int = 0) -> list[Measurement]:
        """How many ties and rows are right, and whether the symbols are as varied as those of the data.

        ties, rows_valid: 100 * share of ties that hold; 100 * share of rows in which all do.
        coverage: mean over positions i of 100 * sum_v min(p_i(v), 1/S), 1 - TV between the law of the symbol and the
            uniform one: 100/S for a single repeated row, short of 100 by about 40 * sqrt((S - 1) / n) for n real ones.
        entropy: mean over positions of the entropy of the symbol in nats, at most log S.
        pair_overlap: against fresh rows; low for samples that repeat few rows, or tie what should be free.
        """
        kept, n = self.kept(not_empty(samples)), len(samples)
        shares, length, size = kept.double().mean(1), self.space.length, self.space.size
        cells = samples.cpu().numpy().astype(np.int64) + size * np.arange(length)
        pool = samples[:OVERLAP_ROWS]

        def law(rows: Picked) -> Float[np.ndarray, "L V"]:
            return np.bincount(cells[rows].ravel(), minlength=length * size).reshape(length, size) / n

        def coverage(rows: Picked) -> float:
            return 100 * float(np.minimum(law(rows)[:, :-1], 1 / (size - 1)).sum(1).mean())

        def entropy(rows: Picked) -> float:
            p = law(rows)
            return -float((p * np.log(np.maximum(p, 1e-300))).sum(1).mean())

        return [
            Measurement("ties", 100 * shares.mean().item(), 100 * shares.std(correction=0).item() / math.sqrt(n), n),
            proportion("rows_valid", kept.all(1)),
            bootstrap("coverage", coverage, n, seed),
            bootstrap("entropy", entropy, n, seed),
            pair_overlap(pool, self._draw(len(pool), "measure", seed), seed),
        ]

    def heat_map(self, rows: Int[Tensor, "n L"]) -> Int[Tensor, "n L"]:
        """Tied positions side by side; groups whose tie is broken are masked."""
        return rows[:, self.groups].where(self.kept(rows)[..., None], self.space.mask_id).flatten(1)


class Tie:
    """A uniform law over the contents of a group of g positions with symbols 0..S-1.

    Any g - 1 symbols are independent and uniform and fix the last one: `last` of the first g - 1.
    """

    def __init__(self, symbols: int, size: int, last: Last):
        self.symbols, self.size, self.last = symbols, size, last

    def draw(self, n: int, groups: int, state: np.random.RandomState) -> Contents:
        free = state.randint(self.symbols, size=(n, groups, self.size - 1))
        return np.concatenate([free, self.last(free)[..., None]], axis=2)

    def holds(self, content: Contents) -> Bool[np.ndarray, "n G"]:
        return np.equal(content[..., -1], self.last(content[..., :-1]))

    def agreement(self, known: int, drawn: int) -> float:
        """P(the tie is not broken yet) after `drawn` symbols were drawn independently given the same `known` ones."""
        # Several that are drawn at once and complete the group are uniform and agree by chance.
        return 1 / self.symbols if drawn > 1 and known + drawn == self.size else 1.0

    def ideal(self, steps: int) -> float:
        """Probability that the best factorised T-step chain keeps the tie (Eq. 2-3 with exact conditionals).

        On the grid t_i = i/T with alpha(t) = 1 - t, each position still masked at t_i is revealed in that step with
        probability 1/i, independently. With h_i(m) the probability of an unbroken end, given m known symbols and i
        steps to go, and f = g - m:

            h_i(m) = sum_k C(f, k) (1/i)^k (1 - 1/i)^(f - k) agreement(m, k) h_{i-1}(m + k),   h_0(g) = 1.
        """
        if steps < 1:
            raise ValueError(f"steps: must be >= 1, got {steps}")
        size, ends = self.size, [0.0] * self.size + [1.0]
        for i in range(1, steps + 1):
            reveal, stay = 1 / i, 1 - 1 / i
            ends = [
                sum(
                    math.comb(size - m, k) * reveal**k * stay ** (size - m - k) * self.agreement(m, k) * ends[m + k]
                    for k in range(size - m + 1)
                )
                for m in range(size + 1)
            ]
        return ends[0]


class _Distinct(Tie):
    """Symbols that all differ: an arrangement of g of the S symbols, a permutation where g = S."""

    def __init__(self, symbols: int, size: int):
        self.symbols, self.size = symbols, size

    def draw(self, n: int, groups: int, state: np.random.RandomState) -> Contents:
        # Symbol k is drawn as its rank among the S - k that the symbols before it leave.
        content = np.stack([state.randint(self.symbols - k, size=(n, groups)) for k in range(self.size)], axis=2)
        for k in range(self.size - 2, -1, -1):  # ranks among what is left become ranks among what was left before k
            content[..., k + 1 :] += content[..., k + 1 :] >= content[..., k : k + 1]
        return content

    def holds(self, content: Contents) -> Bool[np.ndarray, "n G"]:
        return np.all(np.diff(np.sort(content, axis=2), axis=2), axis=2)

    def agreement(self, known: int, drawn: int) -> float:
        left = self.symbols - known  # each is uniform over these
        return math.perm(left, drawn) / left**drawn


def layout(family: TieFamily, length: int, symbols: int) -> tuple[Tie, Int[Tensor, "G g"]]:
    """The tie of a family and the positions of its groups, each position in one group; no seed changes either."""
    positions: Int[np.ndarray, "..."] = np.arange(length)
    size = min(length, {"sums": SUMMED, "permutations": symbols}.get(family, 2))
    if family == "permutations":
        tie: Tie = _Distinct(symbols, size)
    elif family == "blocks":
        state = random_state(derive_seed("ties", "blocks", length, symbols))
        positions = np.array(sorted(sorted(pair) for pair in state.permutation(length).reshape(-1, 2).tolist()))
        bijections = np.stack([state.permutation(symbols) for _ in positions])
        tie = Tie(symbols, 2, lambda free: bijections[np.arange(len(bijections)), free[..., 0]])
    else:
        sign = -1 if family == "sums" else 1
        tie = Tie(symbols, size, lambda free: sign * free.sum(2) % symbols)
        positions = positions.reshape(2, -1).T if family == "copies" else positions
    return tie, torch.from_numpy(positions.reshape(-1, size).copy())
