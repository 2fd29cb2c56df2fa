"""Rows to be completed, read from a file or from the command line.

Faults in a file are a `DataError`, faults in typed text a `ConfigError`; both name the position and the remedy.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from emoe.config import ConfigError
from emoe.domains import DataError
from emoe.domains.rows.reading import Table, parse, read_csv, read_numpy
from emoe.types import TokenSpace

HOLES = ("?", "")  # cells of a text that stand for a token to be filled in; -1 does too
NO_TOKEN = "neither a token nor ?"
TYPED = re.compile(r"[\d\s,;?+-]+")  # a row that is written out, which is no name of a file


def read_given(source: str, space: TokenSpace) -> Int[Tensor, "m L"]:
    """Rows with the mask where a token is wanted, from a .npy or .csv file of rows, or one such row, `12,?`.

    `?`, an empty cell, NaN and -1 mark positions to fill in.
    """
    path, ending = Path(source), Path(source).suffix.lower()
    if TYPED.fullmatch(source):
        try:
            return _tokens(parse([source], NO_TOKEN, HOLES), space)
        except DataError as error:
            raise ConfigError([f"given: {source!r}: {error}"]) from None
    if ending not in (".npy", ".csv"):
        raise ConfigError([f"given: {source!r} is neither a .npy or .csv file nor a row such as 12,?"])
    if not path.is_file():
        raise DataError(f"{path}: {'is a folder' if path.is_dir() else 'does not exist'}; --given takes a file of rows")
    try:
        return _tokens(read_numpy(path) if ending == ".npy" else read_csv(path, NO_TOKEN, HOLES), space)
    except DataError as error:
        raise DataError(f"{path}: {error}") from None


def _tokens(table: Table, space: TokenSpace) -> Int[Tensor, "m L"]:
    x = table.values
    if not x.size:
        raise DataError("holds no rows; write tokens, and ? where one is wanted")
    if x.dtype.kind not in "biuf":
        raise DataError(f"holds values of type {x.dtype}; save whole numbers, -1 where a token is wanted")
    x = x[None] if x.ndim == 1 else x
    if x.ndim != 2 or x.shape[1] != space.length:
        raise DataError(f"has shape {x.shape}; rows of {space.length} tokens are needed")
    table = Table(x, table.lines)
    wanted = np.isnan(x := x.astype(np.float64)) | (x == -1)
    if (broken := ~wanted & (x != np.floor(x))).any():
        raise DataError(f"{table.first(broken)}, not a whole number; write ? where a token is wanted")
    if (strange := ~wanted & ((x < 0) | (x >= space.size) | (x == space.mask_id))).any():
        top = f"0..{space.size - 2}" if space.mask_id == space.size - 1 else f"0..{space.size - 1} but {space.mask_id}"
        raise DataError(f"{table.first(strange)}, but tokens are {top}; write ? where one is wanted")
    return torch.from_numpy(np.where(wanted, space.mask_id, x).astype(np.int64))


def read_positions(text: str, length: int) -> Bool[Tensor, " L"]:
    """Positions counted from 0, `0-9,20`, or none."""
    kept = torch.zeros(length, dtype=torch.bool)
    if text == "all":
        raise ConfigError(["keep: all leaves nothing to fill in; name what is to stay"])
    for part in text.split(",") if text != "none" else ():
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        if match is None:
            raise ConfigError([f"keep: {text!r} is not known; write positions such as 0-9,20, or none"])
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last >= length:
            raise ConfigError([f"keep: {part.strip()!r} is outside 0..{length - 1}, the positions of a row"])
        kept[first : last + 1] = True
    return kept
