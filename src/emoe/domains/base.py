"""What a domain is: rows of integers to train on, fresh rows to compare with, and the measures of its samples."""

from __future__ import annotations

import functools
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Int, Integer
from torch import Tensor

from emoe.config import ConfigError, Family
from emoe.rng import derive_seed
from emoe.types import Measurement, TokenSpace

Ink = Literal["auto", "dark", "light"]


class DataError(ValueError):
    """Data that cannot be used, with the place and the remedy."""

    exit_code: ClassVar[int] = 3


class Domain(ABC):
    """A source of rows together with what makes a sample good."""

    task: ClassVar[str]  # results/<task>.json
    name: str  # the `data` column of results, for instance "8-modes"
    space: TokenSpace
    rows: Integer[Tensor, "N L"]  # training rows
    fresh_rows: int | None = None  # how many rows `fresh` can give; None = any number

    @abstractmethod
    def fresh(self, n: int, seed: int) -> Int[Tensor, "n L"]:
        """`n` rows that were not trained on, drawn by `seed`."""

    @abstractmethod
    def measure(self, samples: Int[Tensor, "n L"], seed: int = 0) -> list[Measurement]:
        """All metrics of a pool of samples; `seed` picks the fresh rows they are compared with."""

    @abstractmethod
    def picture(self, pools: dict[str, Int[Tensor, "n L"]], path: Path, *, title: str = "") -> None:
        """Draw pools side by side (name -> samples), one panel each, into an image file."""

    @functools.cached_property
    def sha256(self) -> str:
        """Hash of the training rows; a run is resumed with equal rows only."""
        return hashlib.sha256(self.rows.contiguous().numpy().data).hexdigest()

    def batches(
        self, batch: int, seed: int, *, device: torch.device | str = "cpu", rank: int = 0, world: int = 1
    ) -> Callable[[int], Int[Tensor, "B L"]]:
        """The training batch of every step, as a function of the step."""
        return ShuffledRows(self.rows, batch, seed, device=device, rank=rank, world=world)


@dataclass(frozen=True, kw_only=True)
class DomainConfig(Family, package="emoe.domains"):
    """Where the rows come from. `build(seed)` makes the domain; equal configs and seeds give equal rows."""

    has_words: ClassVar[bool] = False  # `write` gives text, not numbers

    def build(self, seed: int) -> Domain:
        """Make the domain."""
        raise NotImplementedError

    # What follows reads and shows rows. It needs the config alone: a trained model draws and completes rows where its
    # training data are not.

    def write(self, rows: Integer[Tensor, "n L"]) -> list[str]:
        """Rows for people to read, one line each: their tokens, unless the domain has words for them."""
        return [" ".join(map(str, row)) for row in rows.tolist()]

    def read_given(self, source: str, space: TokenSpace, *, ink: Ink = "auto") -> Int[Tensor, "m L"]:
        """Rows to be completed, with the mask where a token is wanted: from a file, or written out as `12,?`.

        `ink` is for domains of pictures.
        """
        from emoe.domains.rows.given import read_given

        if ink != "auto":
            raise ConfigError([f"ink: is for pictures, but {self.kind!r} has none; leave it out"])
        return read_given(source, space)

    def read_keep(self, text: str, space: TokenSpace) -> Bool[Tensor, " L"]:
        """Positions that keep their tokens: `0-9,20`, or none."""
        from emoe.domains.rows.given import read_positions

        return read_positions(text, space.length)

    def draw_completions(
        self, rows: Int[Tensor, "m L"], given: Int[Tensor, "m L"], samples: Int[Tensor, "m n L"], space: TokenSpace,
        path: Path,
    ) -> None:  # fmt: skip
        """Draw into an image file the rows as they were read, what was kept of them, and their completions."""
        from emoe.domains.rows.given import draw_completions

        draw_completions(rows, given, samples, space, path)


class ShuffledRows:
    """Batches cut from an endless sequence of shuffles of the rows; a pure function of (seed, step).

    Batch h of the whole job holds places h * B .. (h + 1) * B - 1 of that sequence, so a batch that runs over the
    end of one shuffle is filled from the next and every row is seen equally often. Ranks take equal slices of it.
    Rows given as uint8 stay so on the device, an eighth of the memory; batches are int64 in any case.
    """

    def __init__(
        self,
        rows: Integer[Tensor, "N L"],
        batch: int,
        seed: int,
        *,
        device: torch.device | str = "cpu",
        rank: int = 0,
        world: int = 1,
    ):
        if batch % world:
            raise ValueError(f"train.batch: {batch} rows cannot be split evenly over {world} ranks")
        self.rows = rows.to(device=device, dtype=torch.uint8 if rows.dtype == torch.uint8 else torch.long)
        self.batch, self.seed, self.rank, self.world = batch, seed, rank, world
        self._orders: dict[int, Tensor] = {}

    def _order(self, epoch: int) -> Tensor:
        if epoch not in self._orders:
            generator = torch.Generator().manual_seed(derive_seed(self.seed, "data", epoch))
            order = torch.randperm(len(self.rows), generator=generator).to(self.rows.device)
            self._orders = {e: o for e, o in self._orders.items() if abs(e - epoch) <= 1} | {epoch: order}
        return self._orders[epoch]

    def __call__(self, step: int) -> Int[Tensor, "B L"]:
        """Rows of step h for this rank."""
        count = self.batch // self.world
        start = step * self.batch + self.rank * count
        parts = []
        while count:
            epoch, place = divmod(start, len(self.rows))
            part = self._order(epoch)[place : place + count]
            parts.append(part)
            start, count = start + len(part), count - len(part)
        return self.rows[parts[0] if len(parts) == 1 else torch.cat(parts)].long()
