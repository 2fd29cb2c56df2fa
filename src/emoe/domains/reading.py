"""Reading rows: to train on, and to be completed; every fault names its position and the remedy.

Faults in a file are a `DataError`, faults in typed text a `ConfigError`.
"""

from __future__ import annotations

import csv
import re
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from emoe.config import ConfigError
from emoe.domains import DataError, check_file, naming
from emoe.types import TokenSpace

MOST_SYMBOLS = 65_535
RENUMBER = "renumber them with np.unique(x, return_inverse=True)[1].reshape(x.shape)"
NO_NUMBER = "which is not a number; write the rows alone, without row names and with at most one header line"
HOLES = ("?", "")  # cells of a text that stand for a token to be filled in; -1 does too
TYPED = re.compile(r"[\d\s,;?+-]+")  # a row that is written out, which is no name of a file
AS_INTEGERS = "np.save(path, x.astype(np.int64))"
BROKEN = (OSError, ValueError, EOFError, csv.Error, zipfile.BadZipFile, zlib.error, NotImplementedError)


class Table(NamedTuple):
    """The values of a file before they are checked."""

    values: np.ndarray
    lines: list[int] | None = None  # line of the text file each row came from

    def check(self, wrong: Bool[np.ndarray, "..."], problem: str) -> None:
        """Raise if any value is marked in `wrong` (the shape of the values), with the first one and its position."""
        if wrong.any():
            row, column = np.argwhere(wrong)[0].tolist()
            position = f"row {row}, column {column} (counted from 0)"
            if self.lines is not None:
                position = f"line {self.lines[row]}, column {column + 1}"
            raise DataError(f"{position} holds {self.values[row, column]}, {problem}")


def read_symbols(path: Path, key: str | None = None) -> Int[np.ndarray, "N L"]:
    """Rows of symbols 0..max, every one of which occurs, from a .npy, .npz (the array `key`) or .csv file."""
    if path == Path():
        raise DataError("domain.path: give the file to train on: --domain.path data.npy (.npy, .npz or .csv)")
    check_file(path, "--domain.path takes a .npy, .npz or .csv file, one row per example")
    ending = path.suffix.lower()
    with naming(str(path)):
        if ending not in (".npy", ".npz", ".csv"):
            what = f"{ending} files" if ending else "a file without an ending"
            raise DataError(f"cannot read {what}; save the rows as .npy, .npz or .csv")
        table = read_table(path, key)
        _check_symbols(table)
    return table.values.astype(np.int64)


def read_table(path: Path, key: str | None = None, holes: Sequence[str] = ()) -> Table:
    """The values of a .npy, .npz (the array `key`) or .csv file, see `parse`. Here and below, errors do not name it."""
    is_text = path.suffix.lower() == ".csv"
    try:
        if is_text:
            with path.open(newline="", encoding="utf-8-sig") as file:
                return parse(file, holes)
        with path.open("rb") as binary:  # np.load would leave a damaged archive open
            loaded: Any = np.load(binary, allow_pickle=False)
            if not isinstance(loaded, np.ndarray):
                names = loaded.files
                listed = ", ".join(names) or "none"
                if key is None and len(names) != 1:
                    raise DataError(f"holds {len(names)} arrays ({listed}); choose one with --domain.key")
                if key is not None and key not in names:
                    raise DataError(f"has no array {key!r}; --domain.key can be: {listed}")
                loaded = loaded[key or names[0]]
            if loaded.dtype.kind not in "biuf":
                raise DataError(f"holds values of type {loaded.dtype}; save whole numbers: {AS_INTEGERS}")
            return Table(loaded)
    except DataError:
        raise
    except BROKEN as error:
        if is_text:
            raise DataError(f"cannot be read as text ({error}); save it as UTF-8 or as .npy") from None
        if "pickle" in str(error):
            raise DataError(
                "holds pickled objects or is no NumPy file; pickles can run code and are not opened. "
                f"Save a plain array: {AS_INTEGERS}"
            ) from None
        raise DataError(f"cannot be read, damaged or cut off ({error}); write it again") from None


def parse(lines: Iterable[str], holes: Sequence[str] = ()) -> Table:
    """Numbers separated by semicolons, commas or white space; a first line without any number is a header.

    `holes` are cells that become NaN.
    """
    separator, numbers, rows = "", list[int](), list[list[float | None]]()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        is_first = not separator
        separator = separator or next((sign for sign in ";," if sign in line), " ")
        cells = line.split() if separator == " " else next(csv.reader([line], delimiter=separator))
        values = [_number(cell.strip(), holes) for cell in cells]
        if is_first and set(values) == {None}:
            continue
        if None in values:
            column, remedy = values.index(None), "neither a token nor ?" if holes else NO_NUMBER
            raise DataError(f"line {number}, column {column + 1} holds {cells[column].strip()!r}, {remedy}")
        if rows and len(values) != len(rows[0]):
            problem = f"line {number} has {len(values)} values, but line {numbers[0]} has {len(rows[0])}"
            raise DataError(f"{problem}; all rows must be equally long")
        numbers.append(number)
        rows.append(values)
    return Table(np.array(rows, np.float64), numbers)


def _number(cell: str, holes: Sequence[str]) -> float | None:
    try:
        return np.nan if cell in holes else float(cell)
    except ValueError:
        return None


def _check_symbols(table: Table) -> None:
    """Raise unless the values are rows of symbols 0, 1, ..., max, every one of which occurs."""
    x = table.values
    if x.size == 0:
        raise DataError(f"is empty (shape {x.shape}); it needs at least two rows")
    if x.ndim != 2:
        remedy = "x[:, None] for rows of one symbol" if x.ndim == 1 else "x.reshape(len(x), -1)"
        raise DataError(f"has {x.ndim} axes (shape {x.shape}), not rows x positions; save {remedy}")
    if len(x) == 1:
        raise DataError("has one row; it needs at least two, one of them to be held out")
    table.check(~np.isfinite(x), "not a number; remove such rows or give missing values a symbol of their own")
    table.check(x % 1 != 0, "not a whole number; cut real values into bins first: np.digitize(x, edges)")
    table.check(x < 0, f"but symbols start at 0; {RENUMBER}")
    used = np.unique(x)
    if len(used) > MOST_SYMBOLS:
        remedy = "merge rare values or cut the range into fewer bins"
        raise DataError(f"has {len(used):,} different values, at most {MOST_SYMBOLS:,} are allowed; {remedy}")
    top = int(used[-1])
    if count := top + 1 - len(used):
        unused = np.setdiff1d(np.arange(min(top, len(used) + 5)), used)[:5]
        more = f" and {count - 5:,} more" if count > 5 else ""
        raise DataError(f"symbols go up to {top}, but {', '.join(map(str, unused))}{more} never occur; {RENUMBER}")


def read_given(source: str, space: TokenSpace) -> Int[Tensor, "m L"]:
    """Rows with the mask where a token is wanted, from a .npy or .csv file of rows, or one such row, `12,?`.

    `?`, an empty cell, NaN and -1 mark positions to fill in.
    """
    if TYPED.fullmatch(source):
        with naming(source, typed=True):
            return _tokens(parse([source], HOLES), space)
    path = Path(source)
    if path.suffix.lower() not in (".npy", ".csv"):
        raise ConfigError([f"given: {source!r} is neither a .npy or .csv file nor a row such as 12,?"])
    check_file(path, "--given takes a file of rows")
    with naming(source):
        return _tokens(read_table(path, holes=HOLES), space)


def _tokens(table: Table, space: TokenSpace) -> Int[Tensor, "m L"]:
    x = table.values
    if x.size == 0:
        raise DataError("holds no rows; write tokens, and ? where one is wanted")
    x = x[None] if x.ndim == 1 else x
    if x.ndim != 2 or x.shape[1] != space.length:
        raise DataError(f"has shape {x.shape}; rows of {space.length} tokens are needed")
    table = Table(x, table.lines)
    wanted = np.isnan(x := x.astype(np.float64)) | (x == -1)
    table.check(~wanted & (x != np.floor(x)), "not a whole number; write ? where a token is wanted")
    top = f"0..{space.size - 2}" if space.mask_id == space.size - 1 else f"0..{space.size - 1} but {space.mask_id}"
    strange = ~wanted & ((x < 0) | (x >= space.size) | (x == space.mask_id))
    table.check(strange, f"but tokens are {top}; write ? where one is wanted")
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
