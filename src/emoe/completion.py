"""Completion: fill in rows of which some tokens are given, with any trained method.

`Method.sample(given=...)` does the work. Here rows come from files, arrays, words or text with holes, a part of them is
kept, several completions are drawn of each, and it is checked that what was kept has stayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from emoe.config import ConfigError
from emoe.domains.base import DomainConfig, Ink
from emoe.evaluation.pools import draw_pool
from emoe.experiment import Experiment
from emoe.figures.base import save
from emoe.methods.base import Method
from emoe.types import TokenSpace

Source = str | Path
Given = Source | Sequence[Source] | Tensor | np.ndarray
Keep = str | Tensor | np.ndarray | None


@runtime_checkable
class Trained(Protocol):
    """An opened run, as `emoe.load_run` gives it; the data it was trained on are not needed."""

    @property
    def experiment(self) -> Experiment:
        """What was trained."""

    @property
    def method(self) -> Method:
        """The trained method."""


@dataclass(frozen=True)
class Completion:
    """Rows, what was kept of them, and n completions of each."""

    rows: Int[Tensor, "m L"]  # as they were read; the mask where they had no token
    given: Int[Tensor, "m L"]  # the mask where tokens were wanted
    samples: Int[Tensor, "m n L"]
    nfe: int
    space: TokenSpace
    domain: DomainConfig

    @property
    def kept(self) -> Bool[Tensor, "m L"]:
        """Where tokens stayed."""
        return self.given != self.space.mask_id

    @property
    def pool(self) -> Int[Tensor, "N L"]:
        """All completions as one list of rows, those of the first given row first."""
        return self.samples.flatten(0, 1)

    @property
    def texts(self) -> list[list[str]]:
        """The completions of each given row, written out as the domain does: as text if it is one."""
        return [self.domain.write(found) for found in self.samples]

    def picture(self, path: Source) -> None:
        """Draw the rows as they were read, what was kept, and completions."""
        save(self.domain.completion_figure(self.rows, self.given, self.samples, self.space), Path(path))


def complete(
    run: Trained,
    given: Given,
    n: int,
    nfe: int,
    seed: int = 0,
    *,
    keep: Keep = None,
    ink: Ink = "auto",
) -> Completion:
    """Draw `n` completions of every given row with `nfe` network calls each.

    Args:
        run: An opened run.
        given: One or several files (.png for images; .txt for text; .npy, .csv), rows written out (`12,?`), or texts
            with holes (`The cat ___ a bird.`, see `emoe.domains.text.given`); or rows as an array of shape (L,) or
            (m, L) with -1 or the mask where a token is wanted.
        n: Completions of each row.
        nfe: Network calls.
        seed: Seed of the draw.
        keep: Which of the given tokens stay: a name that the domain knows (`top-half` for images), positions
            (`0-9,20`), none, or an array of booleans of shape (L,) or (m, L). By default all that are given.
        ink: For image files: whether the ink is dark or light; auto looks at the border.

    Raises:
        ConfigError: Arguments that cannot be used, or nothing to fill in.
        DataError: A file that cannot be used.
    """
    rows, masked = prepare(run.method.space, run.experiment.domain, given, keep=keep, ink=ink)
    return fill_in(run, rows, masked, n, nfe, seed)


def prepare(
    space: TokenSpace,
    domain: DomainConfig,
    given: Given,
    *,
    keep: Keep = None,
    ink: Ink = "auto",
) -> tuple[Int[Tensor, "m L"], Int[Tensor, "m L"]]:
    """The rows as they were given, and with the mask where tokens are wanted; see `complete`."""
    if isinstance(given, Tensor | np.ndarray):
        rows = _checked(given, space)
    else:
        sources = [given] if isinstance(given, str | Path) else given
        rows = torch.cat([domain.read_given(str(source), space, ink=ink) for source in sources])
    wanted = rows == space.mask_id
    if keep is not None:
        kept = domain.read_keep(keep, space) if isinstance(keep, str) else torch.as_tensor(keep).cpu()
        if kept.dtype != torch.bool or kept.shape not in (rows.shape, rows.shape[1:]):
            raise ConfigError([f"keep: expected booleans of shape {tuple(rows.shape[1:])} or {tuple(rows.shape)}"])
        if (empty := kept & wanted).any():
            row, place = empty.nonzero()[0].tolist()
            raise ConfigError([f"keep: position {place} is to stay, but given row {row} has no token there"])
        wanted = ~kept.expand_as(rows)
    full = (~wanted.any(1)).nonzero().flatten().tolist()
    if full:
        told = "all tokens stay" if keep is not None else "all tokens are given; say with --keep which of them stay"
        raise ConfigError([f"given: nothing to fill in, in row {full[0]} {told}"])
    return rows, rows.masked_fill(wanted, space.mask_id)


def check_beginnings(given: Int[Tensor, "m L"], space: TokenSpace) -> None:
    """Make sure that the given tokens of each row come before all that are wanted.

    Raises:
        ConfigError: A row has a hole in it.
    """
    wanted = given == space.mask_id
    for row in (wanted[:, :-1] & ~wanted[:, 1:]).any(1).nonzero().flatten().tolist()[:1]:
        raise ConfigError([f"continue: row {row} has a hole before its last word; use --given to fill holes"])


def _checked(given: Tensor | np.ndarray, space: TokenSpace) -> Int[Tensor, "m L"]:
    rows = torch.as_tensor(given).cpu()
    if rows.ndim == 1:
        rows = rows[None]
    if rows.ndim != 2 or rows.shape[1] != space.length or not len(rows) or rows.is_floating_point():
        raise ConfigError([f"given: expected whole numbers of shape (m, {space.length}), got {tuple(rows.shape)}"])
    rows = rows.long()
    rows = rows.masked_fill(rows == -1, space.mask_id)
    if rows.min() < 0 or rows.max() >= space.size:
        raise ConfigError([f"given: tokens must be in 0..{space.size - 1} (-1 or {space.mask_id} where one is wanted)"])
    return rows


def fill_in(
    run: Trained, rows: Int[Tensor, "m L"], given: Int[Tensor, "m L"], n: int, nfe: int, seed: int = 0
) -> Completion:
    """Draw the completions of what `prepare` gave; kept tokens are compared afterwards."""
    if n < 1 or nfe < 1:
        raise ConfigError([f"{'n' if n < 1 else 'nfe'}: must be >= 1"])
    many = given.repeat_interleave(n, 0)
    config = run.experiment.eval
    pool = draw_pool(run.method, len(many), nfe, seed, batch=config.batch, given=many, sampler=config.sampler)
    kept = many != run.method.space.mask_id
    if not torch.equal(pool.samples[kept], many[kept]):
        raise AssertionError("the sampler changed tokens that were given")
    samples = pool.samples.unflatten(0, (len(rows), n))
    return Completion(rows, given, samples, pool.nfe, run.method.space, run.experiment.domain)
