"""`metrics.jsonl`: a JSON object per line, appended; later lines are dropped on resumption."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from emoe.files import StorageError, replace_file

_NOT_FINITE = ("nan", "inf", "-inf")
_log = logging.getLogger(__name__)


class MetricsLog:
    """Appends records to the log of a run that starts after `step`.

    Later lines and a torn one are dropped first, so that no step is logged twice after a kill. Each line reaches the
    kernel before `write` returns.
    """

    def __init__(self, path: Path, step: int):
        self.path = path
        with self._checked():
            data = path.read_bytes() if path.is_file() else b""
            before = b"".join(line + b"\n" for line in data.split(b"\n") if _step_of(line) <= step)
            if before != data:
                replace_file(path, before)
            self._file = open(path, "ab", buffering=0)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a `step` with numbers, texts, lists or small tensors; nan and inf are written as texts."""
        line = json.dumps({key: _plain(value) for key, value in record.items()}, allow_nan=False).encode() + b"\n"
        with self._checked():
            while line:
                line = line[self._file.write(line) :]

    def sync(self) -> None:
        """Wait until all lines are on the disk; before a checkpoint, so that a power cut loses none."""
        os.fsync(self._file.fileno())

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @contextmanager
    def _checked(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StorageError(self.path, f"cannot be written ({error.strerror})", "free space, then resume") from error


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All records of a metrics file, with nan and inf as numbers; a torn line is left out."""
    records = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if _step_of(line) < math.inf:
            record = json.loads(line)
            records.append(record | {key: float(value) for key, value in record.items() if value in _NOT_FINITE})
        elif line.strip():
            _log.warning("%s: line %d is damaged and left out", path, number)
    return records


def _step_of(line: bytes) -> float:
    """The step of a line, infinite when it is not a whole record."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # of torch or NumPy
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
