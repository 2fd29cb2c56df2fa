"""Rows of integers from a file (.npy, .npz or .csv): the domain for data of one's own."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from jaxtyping import Int
from torch import Tensor

from emoe.config import option
from emoe.domains.base import Domain, DomainConfig, ShuffledRows
from emoe.domains.rows.reading import as_symbols, read
from emoe.domains.toy import figures
from emoe.metrics import OVERLAP_ROWS, VALIDITY_ROWS, overlap, pair_overlap, support_radius, validity
from emoe.rng import derive_seed
from emoe.types import Measurement, TokenSpace

ROWS_DRAWN = 64  # rows of a pool in a heat map


@dataclass(frozen=True, kw_only=True)
class RowsConfig(DomainConfig, kind="rows"):
    """A file with one row of symbols 0..V-2 per example, all of the same length; the mask is added as V-1."""

    path: str = option(doc="file of rows: .npy, .npz or .csv", neutral=True)
    key: str | None = option(None, doc="name of the array inside an .npz file that holds several", neutral=True)
    held_out: float = option(0.1, doc="share of rows kept for evaluation (at least one)", above=0, high=0.9)

    def conflicts(self) -> Iterator[str]:
        """A key needs a file with named arrays."""
        if self.key is not None and Path(self.path).suffix.lower() != ".npz":
            yield f"key: only .npz files hold named arrays, but path is {self.path!r}; leave key out"

    def build(self, seed: int) -> Rows:
        """Read and check the file; `seed` splits it."""
        return Rows(self, seed)


class Rows(Domain):
    """Rows of a file, split by seed into training and held-out rows."""

    task: ClassVar[str] = "rows"

    def __init__(self, config: RowsConfig, seed: int):
        path = Path(config.path)
        rows = torch.from_numpy(as_symbols(read(path, config.key), path))
        size = int(rows.max()) + 2
        self.name, self.seed = path.stem, seed
        self.space = TokenSpace(size=size, mask_id=size - 1, length=rows.shape[1])
        generator = torch.Generator().manual_seed(derive_seed(seed, "rows", "split"))
        order = torch.randperm(len(rows), generator=generator)
        held = min(max(1, round(config.held_out * len(rows))), len(rows) - 1)
        self.held_out, self.rows = rows[order[:held]], rows[order[held:]]

    def fresh(self, n: int, seed: int) -> Int[Tensor, "n L"]:
        """`n` held-out rows in an order drawn by `seed`; where there are fewer, they repeat equally often."""
        return ShuffledRows(self.held_out, n, derive_seed(self.seed, "rows", "fresh", seed))(0)

    @functools.cached_property
    def support(self) -> Int[Tensor, "m L"]:
        """The set X of Eq. 39: the first 3,000 training rows."""
        return self.rows[:VALIDITY_ROWS]

    @functools.cached_property
    def radius(self) -> float:
        """r of Eq. 39, distances between rows taken in symbol numbers."""
        return support_radius(self.support)

    def measure(self, samples: Int[Tensor, "n L"], seed: int = 0) -> list[Measurement]:
        """Validity (Eq. 39), overlap of whole rows and overlap of position pairs with as many held-out rows.

        Neither overlap reaches 100 for finite pools; `measure(domain.rows)` shows what real rows score.
        """
        found = [validity(samples, self.support, self.radius)]
        pool = samples[: min(OVERLAP_ROWS, len(self.held_out))]
        compared = self.fresh(len(pool), seed)
        found.append(overlap(pool, compared, seed))
        if self.space.length > 1:
            found.append(pair_overlap(pool, compared, seed))
        return found

    def picture(self, pools: Mapping[str, Int[Tensor, "_n L"]], path: Path, *, title: str = "") -> None:
        """Two-dimensional histograms for L = 2, otherwise heat maps of the first rows of each pool."""
        if self.space.length == 2:
            figures.picture(pools, path, size=self.space.size - 1, title=title)
            return
        pools = figures.truth_first(pools)
        figure, panels = figures.blank(1, len(pools), title=title)
        for panel, (name, samples) in zip(panels[0], pools.items(), strict=True):
            shown = samples[:ROWS_DRAWN].cpu().numpy()
            top = max(1, self.space.size - 2)
            panel.imshow(shown, aspect="auto", interpolation="nearest", cmap="viridis", vmin=0, vmax=top)
            panel.set_title(name, fontsize=9)
        figures.save(figure, path)
