"""`metrics.jsonl`: one JSON object a line, appended, cut back on resume, read with non-finite numbers restored."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from emoe.files import StorageError, replace_file

_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_log = logging.getLogger(__name__)


class MetricsLog:
    """Appends one JSON object for each call to a file; each line reaches the kernel before `write` returns.

    A run that goes on after a kill opens the file with `MetricsLog.resume`, so that no step is logged twice.
    """

    def __init__(self, path: Path):
        self.path = path
        self._descriptor: int | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise self._failure(error) from error

    @classmethod
    def resume(cls, path: Path, step: int) -> MetricsLog:
        """Open the log of a run that restarts after `step`: later lines and a torn one are dropped."""
        try:
            data = path.read_bytes() if path.exists() else b""
            before = b"".join(line + b"\n" for line in data.split(b"\n") if _step_of(line) <= step)
            if before != data:
                replace_file(path, before)
        except OSError as error:
            raise StorageError(path, f"cannot be rewritten ({error.strerror})", "free space, then resume") from error
        return cls(path)

    def write(self, record: Mapping[str, Any]) -> None:
        """Log a `step` and its numbers, texts, lists or small tensors; nan and inf become texts."""
        if self._descriptor is None:
            raise ValueError(f"{self.path}: the log is closed")
        line = json.dumps(_plain(record), allow_nan=False).encode() + b"\n"
        try:
            while line:
                line = line[os.write(self._descriptor, line) :]
        except OSError as error:
            raise self._failure(error) from error

    def sync(self) -> None:
        """Wait until all lines are on the disk: done before a checkpoint, none is lost in a power cut."""
        if self._descriptor is not None:
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _failure(self, error: OSError) -> StorageError:
        return StorageError(self.path, f"cannot be written ({error.strerror})", "free space, then resume")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All records of a metrics file, numbers that are not finite restored; a torn line is left out."""
    records = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if _step_of(line) < math.inf:
            record = json.loads(line)
            records.append({key: _number(value) for key, value in record.items()})
        elif line.strip():
            _log.warning("%s: line %d is damaged and left out", path, number)
    return records


def _step_of(line: bytes) -> float:
    """The step of a line, infinite when it is not a whole record."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def _number(value: Any) -> Any:
    return _NOT_FINITE.get(value, value) if isinstance(value, str) else value


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor | np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
