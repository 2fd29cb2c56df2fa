"""Rows to be completed: read from a file or from the command line, and drawn beside their completions.

Faults in a file are a `DataError`, faults in what was typed a `ConfigError`; both name the place and the remedy.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from emoe.config import ConfigError
from emoe.domains.base import DataError
from emoe.domains.rows.reading import Table, cells, is_number, read_cells, read_numpy
from emoe.domains.toy import figures
from emoe.types import TokenSpace

WANTED = ("?", "")  # cells of a text that stand for a token to be filled in; -1 does too
TYPED = re.compile(r"[\d\s,;?+-]+")  # a row that is written out, which no file is called
SHOWN = 64  # rows in a picture

Fault = Callable[[str], Exception]


def read_given(source: str, space: TokenSpace) -> Int[Tensor, "m L"]:
    """Rows with the mask where a token is wanted.

    Args:
        source: A .npy or .csv file of rows of L tokens, or one such row, `12,?`. `?`, an empty cell, NaN and -1 mark
            what is wanted.
        space: The tokens there are.

    Raises:
        DataError: A file that is missing, damaged, or holds something else.
        ConfigError: Words that are neither a row nor a file.
    """
    if TYPED.fullmatch(source):
        fault: Fault = lambda text: ConfigError([f"given: {source!r}: {text}"])  # noqa: E731
        return _tokens(_from_cells(list(cells([source])), fault), space, fault)
    path = Path(source)
    ending = path.suffix.lower()
    if ending not in (".npy", ".csv"):
        raise ConfigError([f"given: {source!r} is neither a .npy or .csv file nor a row such as 12,?"])
    if not path.is_file():
        raise DataError(f"{path}: {'is a folder' if path.is_dir() else 'does not exist'}; --given takes a file of rows")
    fault = lambda text: DataError(f"{path}: {text}")  # noqa: E731
    return _tokens(read_numpy(path) if ending == ".npy" else _from_cells(read_cells(path), fault), space, fault)


def _from_cells(found: list[tuple[int, list[str]]], fault: Fault) -> Table:
    """Numbers with NaN where a token is wanted; a first line of words is a header."""
    if found and not any(is_number(cell) or cell in WANTED for cell in found[0][1]):
        found = found[1:]
    if not found:
        raise fault("holds no rows; write tokens, and ? where one is wanted")
    first, width = found[0][0], len(found[0][1])
    for number, line in found:
        wrong = next((i for i, cell in enumerate(line) if cell not in WANTED and not is_number(cell)), None)
        if wrong is not None:
            raise fault(f"line {number}, column {wrong + 1} holds {line[wrong]!r}, neither a token nor ?")
        if len(line) != width:
            raise fault(f"line {number} has {len(line)} values, but line {first} has {width}")
    values = np.array([[np.nan if cell in WANTED else float(cell) for cell in line] for _, line in found])
    return Table(values, [number for number, _ in found])


def _tokens(table: Table, space: TokenSpace, fault: Fault) -> Int[Tensor, "m L"]:
    x = table.values
    if x.dtype.kind not in "biuf":
        raise fault(f"holds values of type {x.dtype}; save whole numbers, -1 where a token is wanted")
    if x.ndim == 1:
        x = x[None]
    if x.ndim != 2 or x.shape[1] != space.length or not len(x):
        raise fault(f"has shape {x.shape}; rows of {space.length} tokens are needed")
    table = Table(x, table.lines)
    x = x.astype(np.float64)
    wanted = np.isnan(x) | (x == -1)
    x = np.where(wanted, space.mask_id, x)
    if (broken := x != np.floor(x)).any():
        raise fault(f"{table.place(broken)}, not a whole number; write ? where a token is wanted")
    if (strange := ((x < 0) | (x >= space.size) | (x == space.mask_id)) & ~wanted).any():
        top = f"0..{space.size - 2}" if space.mask_id == space.size - 1 else f"0..{space.size - 1} but {space.mask_id}"
        raise fault(f"{table.place(strange)}, but tokens are {top}; write ? where one is wanted")
    return torch.from_numpy(x.astype(np.int64))


def read_positions(text: str, length: int) -> Bool[Tensor, " L"]:
    """Positions counted from 0, `0-9,20`, or none.

    Raises:
        ConfigError: Something else, a position that there is not, or all of them.
    """
    kept = torch.zeros(length, dtype=torch.bool)
    if text == "none":
        return kept
    if text == "all":
        raise ConfigError(["keep: all leaves nothing to fill in; name what is to stay"])
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        if found is None:
            raise ConfigError([f"keep: {text!r} is not known; write positions such as 0-9,20, or none"])
        first, last = int(found[1]), int(found[2] or found[1])
        if last < first or last >= length:
            raise ConfigError([f"keep: {part.strip()!r} is outside 0..{length - 1}, the positions of a row"])
        kept[first : last + 1] = True
    return kept


def draw_completions(
    rows: Int[Tensor, "m L"], given: Int[Tensor, "m L"], samples: Int[Tensor, "m n L"], space: TokenSpace, path: Path
) -> None:
    """Heat maps with one line for each completion: the row as it was read, what was kept, the completion."""
    count = samples.shape[1]
    pools = {
        "given": rows.repeat_interleave(count, 0),
        "kept": given.repeat_interleave(count, 0),
        "completions": samples.flatten(0, 1),
    }
    figure, panels = figures.blank(1, len(pools))
    tokens = [token for token in range(space.size) if token != space.mask_id]
    for panel, (name, pool) in zip(panels[0], pools.items(), strict=True):
        shown = np.ma.masked_equal(pool[:SHOWN].cpu().numpy(), space.mask_id)
        panel.imshow(
            shown, aspect="auto", interpolation="nearest", cmap="viridis", vmin=0, vmax=max(1, tokens[-1])
        )  # fmt: skip
        panel.set_title(name, fontsize=9)
    figures.save(figure, path)
