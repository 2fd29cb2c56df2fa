"""A domain: rows of integers to train on, fresh rows to compare with, and the measures of samples."""

from __future__ import annotations

import functools
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Bool, Int, Integer
from torch import Tensor

from emoe.config import ConfigError, Family
from emoe.domains import DataError as DataError
from emoe.domains.metrics import VALIDITY_ROWS, support_radius
from emoe.domains.reading import read_given, read_positions
from emoe.figures import panels
from emoe.figures.base import save
from emoe.rng import derive_seed
from emoe.types import Measurement, TokenSpace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Ink = Literal["auto", "dark", "light"]
Rows = Int[Tensor, "n L"]
Given = Int[Tensor, "m L"]
Pools = Mapping[str, Int[Tensor, "_n L"]]  # name -> samples
Completions = Int[Tensor, "m n L"]  # n of each of m rows
Device = torch.device | str
Batches = Callable[[int], Int[Tensor, "B L"]]


class Domain(ABC):
    """A source of rows together with the measures of samples."""

    task: ClassVar[str]  # results/<task>.json
    name: str  # the `data` column of results, for instance "8-modes"
    space: TokenSpace
    rows: Integer[Tensor, "N L"]  # training rows
    fresh_rows: int | None = None  # how many rows `fresh` can give; None = any number
    mapped: ClassVar[bool] = False  # rows stay on the disk, only batches are copied to the device

    @abstractmethod
    def fresh(self, n: int, seed: int) -> Rows:
        """`n` rows that were not trained on, drawn by `seed`."""

    @abstractmethod
    def measure(self, samples: Rows, seed: int = 0) -> list[Measurement]:
        """All metrics of a pool of samples; `seed` picks the fresh rows they are compared with."""

    @property
    def support(self) -> Integer[Tensor, "m L"]:
        """The set X of Eq. 39: the first 3,000 training rows."""
        return self.rows[:VALIDITY_ROWS]

    @functools.cached_property
    def radius(self) -> float:
        """r of Eq. 39, distances between rows taken in token numbers."""
        return support_radius(self.support.long())

    @functools.cached_property
    def sha256(self) -> str:
        """Hash of the training rows; a run is resumed with equal rows only."""
        return hashlib.sha256(self.rows.contiguous().numpy().data).hexdigest()

    def batches(self, batch: int, seed: int, *, device: Device = "cpu", rank: int = 0, world: int = 1) -> Batches:
        """The training batch of every step, as a function of the step."""
        rows = self.rows if self.mapped else self.rows.to(device)
        return shuffled_batches(rows, batch, seed, device=device, rank=rank, world=world)

    def figure(self, pools: Pools, *, title: str = "") -> Figure:
        """Pools side by side, real data first: histograms of rows of two tokens, else heat maps of the first rows."""
        if self.space.length == 2:
            pairs = {name: rows.cpu() for name, rows in pools.items()}
            return panels.histogram_grid({"": pairs}, self.space.size - 1, title=title)
        maps = {name: self.heat_map(rows[: panels.MOST_ROWS].cpu()) for name, rows in pools.items()}
        return panels.heat_maps(maps, self.space, title=title)

    def heat_map(self, rows: Rows) -> Rows:
        """Rows as a heat map shows them."""
        return rows

    def picture(self, pools: Pools, path: Path, *, title: str = "") -> None:
        """Write the figure of pools into an image file."""
        save(self.figure(pools, title=title), path)


@dataclass(frozen=True, kw_only=True)
class DomainConfig(Family, package="emoe.domains", shared=("base", "metrics", "reading")):
    """Config of a domain. `build(seed)` makes the domain; equal configs and seeds give equal rows.

    The other methods read and write rows without the data, so a trained model works on a machine that lacks them.
    """

    has_words: ClassVar[bool] = False  # `write` gives text, not numbers

    def build(self, seed: int) -> Domain:
        raise NotImplementedError

    def write(self, rows: Integer[Tensor, "n L"]) -> list[str]:
        """Rows as text, one line each: their tokens, or words."""
        return [" ".join(map(str, row)) for row in rows.tolist()]

    def read_given(self, source: str, space: TokenSpace, *, ink: Ink = "auto") -> Given:
        """Rows to be completed, with the mask where a token is wanted: from a file, or written out as `12,?`."""
        if ink != "auto":
            raise ConfigError([f"ink: is for images, but {self.kind!r} has none; leave it out"])
        return read_given(source, space)

    def read_keep(self, text: str, space: TokenSpace) -> Bool[Tensor, " L"]:
        """Positions that keep their tokens: `0-9,20`, or none."""
        return read_positions(text, space.length)

    def completion_figure(self, rows: Given, given: Given, samples: Completions, space: TokenSpace) -> Figure:
        """The rows as they were read, the tokens that were kept, and the completions, a line for each completion."""
        n = samples.shape[1]
        pools = {"given": rows.repeat_interleave(n, 0), "kept": given.repeat_interleave(n, 0)}
        pools["completions"] = samples.flatten(0, 1)
        if self.has_words:
            return panels.texts({name: self.write(pool[: panels.MOST_TEXTS]) for name, pool in pools.items()})
        return panels.heat_maps(pools, space)


def random_state(seed: int) -> np.random.RandomState:
    """A generator whose stream NumPy has promised never to change, seeded with all 63 bits."""
    return np.random.RandomState(np.random.MT19937(seed))


def permutation(n: int, *stream: object) -> Int[Tensor, " n"]:
    """A random order of n rows, from the random stream of that name."""
    return torch.randperm(n, generator=torch.Generator().manual_seed(derive_seed(*stream)))


class SplitDomain(Domain):
    """A domain with a fixed split of held-out rows, of which `fresh` draws without replacement."""

    test_rows: Integer[Tensor, "M L"]
    stream: ClassVar[str]  # of random numbers for `fresh`

    def fresh(self, n: int, seed: int) -> Rows:
        most = len(self.test_rows)
        if n > most:  # repeating rows would make errors look smaller than they are
            raise DataError(
                f"{self.name}: {n:,} rows that were not trained on are asked for, but the held-out split has "
                f"{most:,}; ask for at most that many (emoe eval --rows {most})"
            )
        return self.test_rows[permutation(most, self.stream, "fresh", seed)[:n]].long()


def shuffled_batches(
    rows: Integer[Tensor, "N L"], batch: int, seed: int, *, device: Device = "cpu", rank: int = 0, world: int = 1
) -> Batches:
    """Batches cut from an endless sequence of shuffles of the rows, as a pure function of the step; always int64.

    Batch h of the whole job holds elements h * B .. (h + 1) * B - 1 of that sequence, of which ranks take equal slices.
    """
    if batch % world:
        raise ValueError(f"train.batch: {batch} rows cannot be split evenly over {world} ranks")
    count, n = batch // world, len(rows)

    @functools.lru_cache(maxsize=2)
    def shuffle(epoch: int) -> Int[Tensor, " N"]:
        return permutation(n, seed, "data", epoch).to(rows.device)

    def rows_of(step: int) -> Int[Tensor, "B L"]:
        start = step * batch + rank * count
        epochs = range(start // n, -(-(start + count) // n))
        parts = [shuffle(epoch)[max(0, start - epoch * n) : start + count - epoch * n] for epoch in epochs]
        return rows[torch.cat(parts)].long().to(device)

    return rows_of
