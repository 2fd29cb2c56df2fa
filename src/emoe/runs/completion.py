"""Completion of rows with given tokens: from files, arrays, rows as text, or text with holes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from emoe.config import ConfigError
from emoe.domains.base import DomainConfig, Ink
from emoe.figures.base import save
from emoe.runs.sampling import Rows, token_rows
from emoe.types import TokenSpace

Source = str | Path
Given = Source | Sequence[Source] | Tensor | np.ndarray
Keep = str | Tensor | np.ndarray | None


@dataclass(frozen=True)
class Completion:
    """Rows, the tokens of them that stay, and n completions of each."""

    rows: Rows  # as read, with the mask for tokens that are not given
    given: Rows  # with the mask for all tokens that are drawn
    samples: Int[Tensor, "m n L"]
    nfe: int
    space: TokenSpace
    domain: DomainConfig

    @property
    def kept(self) -> Bool[Tensor, "m L"]:
        """Positions whose tokens stay."""
        return self.given != self.space.mask_id

    @property
    def pool(self) -> Int[Tensor, "N L"]:
        """All completions as rows, those of the first given row first."""
        return self.samples.flatten(0, 1)

    @property
    def texts(self) -> list[list[str]]:
        """The completions of each given row as text of the domain."""
        return [self.domain.write(rows) for rows in self.samples]

    def picture(self, path: Source) -> None:
        """Write an image of the rows as read, the tokens that stay, and the completions."""
        save(self.domain.completion_figure(self.rows, self.given, self.samples, self.space), Path(path))


def prepare(
    space: TokenSpace, domain: DomainConfig, given: Given, *, keep: Keep = None, ink: Ink = "auto"
) -> tuple[Rows, Rows]:
    """The rows as given, and with the mask for all tokens that are drawn; see `Run.complete`."""
    if isinstance(given, Tensor | np.ndarray):
        rows = token_rows(given, space)
    else:
        sources = [given] if isinstance(given, str | Path) else given
        rows = torch.cat([domain.read_given(str(source), space, ink=ink) for source in sources])
    wanted = rows == space.mask_id
    if keep is not None:
        kept = domain.read_keep(keep, space) if isinstance(keep, str) else torch.as_tensor(keep).cpu()
        if kept.dtype != torch.bool or kept.shape not in (rows.shape, rows.shape[1:]):
            raise ConfigError([f"keep: expected booleans of shape {tuple(rows.shape[1:])} or {tuple(rows.shape)}"])
        if (empty := kept & wanted).any():
            row, position = empty.nonzero()[0].tolist()
            raise ConfigError([f"keep: position {position} is to stay, but given row {row} has no token there"])
        wanted = ~kept.expand_as(rows)
    if full := (~wanted.any(1)).nonzero().flatten().tolist():
        reason = "all tokens stay" if keep is not None else "all tokens are given; say with --keep which of them stay"
        raise ConfigError([f"given: nothing to fill in, in row {full[0]} {reason}"])
    return rows, rows.masked_fill(wanted, space.mask_id)


def check_beginnings(given: Rows, space: TokenSpace) -> None:
    """Raise a ConfigError unless the given tokens of each row come before all masks."""
    masked = given == space.mask_id
    if rows := (masked[:, :-1] & ~masked[:, 1:]).any(1).nonzero().flatten().tolist():
        raise ConfigError([f"continue: row {rows[0]} has a hole before its last word; use --given to fill holes"])
