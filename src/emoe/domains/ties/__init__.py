"""Rows of tied symbols whose support is known exactly: can one step keep positions in agreement?"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from emoe.config import option
from emoe.domains.base import Domain, DomainConfig
from emoe.domains.rows import ROWS_DRAWN
from emoe.domains.ties.laws import Distinct, Match, Sum, Tie
from emoe.domains.toy import figures
from emoe.domains.toy.data import random_state
from emoe.metrics import OVERLAP_ROWS, RESAMPLES, pair_overlap
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
        self.name, self.seed = f"{config.family}-L{length}", seed
        if symbols != SYMBOLS:
            self.name += f"-S{symbols}"
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
        return self.tie.chance()

    def ideal(self, steps: int) -> float:
        """What `ties` measures, in percent, on samples of the best factorised T-step chain; 100 * chance for T = 1.

        For pairs, copies and blocks it is 100 * (1 - 1/T + 1/(T S)).
        """
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
        pair_overlap: against fresh rows; it sees samples that repeat few rows, or tie what should be free.
        """
        if not len(samples):
            raise ValueError("there are no samples to measure")
        n, held = len(samples), self.kept(samples).double()
        shares, right = held.mean(1), held.min(1).values.mean().item()
        uniform = 1 / self.space.mask_id
        pool = samples[:OVERLAP_ROWS]
        return [
            Measurement("ties", 100 * shares.mean().item(), 100 * shares.std(correction=0).item() / math.sqrt(n), n),
            Measurement("rows_valid", 100 * right, 100 * math.sqrt(right * (1 - right) / n), n),
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
        again = [of(cells[draw.integers(len(cells), size=len(cells))]) for _ in range(RESAMPLES)]
        return Measurement(name, of(cells), float(np.std(again, ddof=1)), len(cells))

    def picture(self, pools: Mapping[str, Int[Tensor, "_n L"]], path: Path, *, title: str = "") -> None:
        """Two-dimensional histograms for L = 2, otherwise heat maps of the first rows of each pool.

        Tied positions stand side by side, and groups whose tie is broken are white.
        """
        if self.space.length == 2:
            figures.picture(pools, path, size=self.space.mask_id, title=title)
            return
        pools = figures.truth_first(pools)
        figure, panels = figures.blank(1, len(pools), title=title)
        for panel, (name, samples) in zip(panels[0], pools.items(), strict=True):
            rows = samples[:ROWS_DRAWN].cpu()
            broken = ~self.kept(rows)[..., None].expand(-1, *self.groups.shape)
            shown = np.ma.masked_array(rows[:, self.groups].flatten(1).numpy(), broken.flatten(1).numpy())
            top = self.space.mask_id - 1
            panel.imshow(shown, aspect="auto", interpolation="nearest", cmap="viridis", vmin=0, vmax=top)
            panel.set_title(name, fontsize=9)
        figures.save(figure, path)


def layout(family: TieFamily, length: int, symbols: int) -> tuple[Tie, Int[Tensor, "G g"]]:
    """The tie of a family and the positions of its groups, each position in one group; no seed changes either."""
    places = np.arange(length)
    if family == "sums":
        size = min(length, SUMMED)
        return Sum(symbols, size), torch.from_numpy(places.reshape(-1, size))
    if family == "permutations":
        size = min(length, symbols)
        return Distinct(symbols, size), torch.from_numpy(places.reshape(-1, size))
    if family == "blocks":
        state = random_state(derive_seed("ties", "blocks", length, symbols))
        pairs = np.array(sorted(sorted(pair) for pair in state.permutation(length).reshape(-1, 2).tolist()))
        return Match(np.stack([state.permutation(symbols) for _ in pairs])), torch.from_numpy(pairs)
    pairs = places.reshape(-1, 2) if family == "pairs" else places.reshape(2, -1).T.copy()
    return Match(np.tile(np.arange(symbols), (len(pairs), 1))), torch.from_numpy(pairs)
