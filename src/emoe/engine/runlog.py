"""What a run tells while it goes: metrics as JSON lines, a progress bar or log lines, TensorBoard."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import sys
import time
from collections import deque
from collections.abc import Mapping
from io import TextIOBase
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from torch import Tensor

from emoe.config import ConfigError
from emoe.engine.durable import StorageError, replace_file

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
            kept = b"".join(line + b"\n" for line in data.split(b"\n") if _step_of(line) <= step)
            if kept != data:
                replace_file(path, kept)
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


class Progress:
    """Shows how far a loop is: a bar on a terminal, one line for each `log` call elsewhere.

    Args:
        total: Last step.
        start: Step the loop begins at; speed is measured from there.
        label: First word of the display.
        stream: Where it goes; standard error unless told.
        quiet: Show nothing.
    """

    def __init__(
        self,
        total: int,
        start: int = 0,
        label: str = "",
        *,
        stream: TextIO | TextIOBase | None = None,
        quiet: bool = False,
    ):
        self.total, self.label = total, label
        self._stream = None if quiet else stream or sys.stderr
        # Speed over the last calls, not since the start: a slow first step (compilation) would spoil the ETA.
        self._marks = deque([(time.monotonic(), start)], maxlen=20)
        self._shown = 0.0
        self._bar = _rich_bar(self._stream) if self._stream is not None else None
        self._task = self._bar.add_task(label, total=total, completed=start, status="") if self._bar else None

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def update(self, step: int) -> None:
        """Move the bar; cheap enough for every step. Without a bar it does nothing."""
        if self._bar is not None and time.monotonic() - self._shown >= 0.1:
            self._shown = time.monotonic()
            self._bar.update(self._task, completed=step)

    def log(self, step: int, text: str = "") -> None:
        """Show that `step` is done, with a text such as the loss."""
        now, (then, before) = time.monotonic(), self._marks[0]
        self._marks.append((now, step))
        pace = _pace(step - before, now - then, self.total - step)
        if self._bar is not None:
            self._bar.update(self._task, completed=step, status=f"{pace}  {text}")
        else:
            percent = 100.0 * step / self.total if self.total else 100.0
            self.note(f"step {step}/{self.total} ({percent:.1f}%), {pace}" + (f" | {text}" if text else ""))

    def note(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        line = f"{self.label}: {text}" if self.label else text
        with contextlib.suppress(OSError, ValueError):  # a terminal that is gone must not end a run
            if self._bar is not None:
                self._bar.console.print(line, markup=False, highlight=False)
            elif self._stream is not None:
                print(line, file=self._stream, flush=True)

    def close(self) -> None:
        """Take the bar down and give the terminal back; a second call does nothing."""
        if self._bar is not None:
            with contextlib.suppress(OSError, ValueError):
                self._bar.stop()
            self._bar = None


def _pace(done: int, seconds: float, left: int) -> str:
    if done <= 0 or seconds <= 0:
        return "? steps/s, ETA ?"
    minutes, second = divmod(round(max(left, 0) * seconds / done), 60)
    return f"{done / seconds:.2f} steps/s, ETA {minutes // 60}:{minutes % 60:02d}:{second:02d}"


def _rich_bar(stream: Any) -> Any:
    """A `rich` bar that is not started yet; None when the stream is no terminal or the package is missing."""
    if not stream.isatty():
        return None
    try:
        from rich import progress
        from rich.console import Console
    except ImportError:
        return None
    console = Console(file=stream)
    if not console.is_interactive:  # a terminal without cursor movement
        return None
    return progress.Progress(
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        progress.TextColumn("{task.fields[status]}", markup=False),
        console=console,
    )


class TensorBoardLog:
    """Sends the numbers of a step to TensorBoard; `step` hides what a killed run wrote after it."""

    def __init__(self, folder: Path, step: int | None = None):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ConfigError(["tensorboard: the package is missing; pip install emoe[track]"]) from None
        purge = None if step is None else step + 1
        self._writer: Any = SummaryWriter(str(folder), purge_step=purge)

    def __enter__(self) -> TensorBoardLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, record: Mapping[str, Any]) -> None:
        """Send every value of a record that is a single number."""
        for name, value in record.items():
            number = value.tolist() if isinstance(value, Tensor) else value
            if name != "step" and isinstance(number, int | float):
                self._writer.add_scalar(name, number, record["step"])

    def close(self) -> None:
        """Write out what is buffered."""
        self._writer.close()
