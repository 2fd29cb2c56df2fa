"""Rows of integers from a file (.npy, .npz or .csv): the domain for data of one's own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from jaxtyping import Int
from torch import Tensor

from emoe.config import option
from emoe.domains.base import Domain, DomainConfig, permutation, shuffled_batches
from emoe.domains.metrics import OVERLAP_ROWS, overlap, pair_overlap, validity
from emoe.domains.reading import read_symbols
from emoe.rng import derive_seed
from emoe.types import Measurement, TokenSpace


@dataclass(frozen=True, kw_only=True)
class RowsConfig(DomainConfig, kind="rows"):
    """A file with one row of symbols 0..V-2 per example, all of the same length; the mask is added as V-1."""

    path: str = option(doc="file of rows: .npy, .npz or .csv", neutral=True)
    key: str | None = option(None, doc="name of the array inside an .npz file that holds several", neutral=True)
    held_out: float = option(0.1, doc="share of rows kept for evaluation (at least one)", above=0, high=0.9)

    def conflicts(self) -> Iterator[str]:
        if self.key is not None and Path(self.path).suffix.lower() != ".npz":
            yield f"key: only .npz files hold named arrays, but path is {self.path!r}; leave key out"

    def build(self, seed: int) -> Rows:
        return Rows(self, seed)


class Rows(Domain):
    """Rows of a file, split by seed into training and held-out rows."""

    task: ClassVar[str] = "rows"

    def __init__(self, config: RowsConfig, seed: int):
        rows = torch.from_numpy(read_symbols(Path(config.path), config.key))
        size = int(rows.max()) + 2
        self.name, self.seed = Path(config.path).stem, seed
        self.space = TokenSpace(size=size, mask_id=size - 1, length=rows.shape[1])
        order = permutation(len(rows), seed, "rows", "split")
        count = min(max(1, round(config.held_out * len(rows))), len(rows) - 1)
        self.held_out, self.rows = rows[order[:count]], rows[order[count:]]

    def fresh(self, n: int, seed: int) -> Int[Tensor, "n L"]:
        """`n` held-out rows in an order drawn by `seed`; where there are fewer, they repeat equally often."""
        return shuffled_batches(self.held_out, n, derive_seed(self.seed, "rows", "fresh", seed))(0)

    def measure(self, samples: Int[Tensor, "n L"], seed: int = 0) -> list[Measurement]:
        """Validity (Eq. 39), overlap of whole rows and overlap of position pairs with as many held-out rows.

        Neither overlap reaches 100 for finite pools; `measure(domain.rows)` gives the values of real rows.
        """
        pool = samples[: min(OVERLAP_ROWS, len(self.held_out))]
        compared = self.fresh(len(pool), seed)
        measured = [validity(samples, self.support, self.radius), overlap(pool, compared, seed)]
        return measured + ([pair_overlap(pool, compared, seed)] if self.space.length > 1 else [])
