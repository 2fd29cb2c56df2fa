"""The terminal: progress with an ETA, and tables. The only module that imports `rich`, which is optional."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

LINE_SECONDS = 3.0  # before the first line or bar of a meter, and between two lines
Tick = Callable[[int, str], None]  # called after a piece of work with its size and what it belongs to


class Progress(AbstractContextManager["Progress"]):
    """Progress of a loop from step `start` to `total` on standard error.

    On a terminal it is a bar, which appears with the first call; elsewhere a line for each `log`.
    """

    def __init__(self, total: int, start: int = 0, label: str = "", *, quiet: bool = False):
        self.total, self.label = total, label
        self._stream = None if quiet else sys.stderr
        # Speed over the last calls, not since the start: a slow first step (compilation) would spoil the ETA.
        self._marks = deque([(time.monotonic(), start)], maxlen=20)
        self._bar = None if self._stream is None else _rich_bar(self._stream)
        self._task = self._bar and self._bar.add_task(label, total=total, completed=start, status="")

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the bar and restore the terminal; a second call does nothing."""
        if self._bar is not None:
            with contextlib.suppress(OSError, ValueError):
                self._bar.stop()
            self._bar = None

    def update(self, step: int, **fields: str) -> None:
        """Move the bar; cheap enough for every step. Without a bar it does nothing."""
        if self._bar is not None:
            self._bar.start()
            self._bar.update(self._task, completed=step, **fields)

    def log(self, step: int, text: str = "") -> None:
        """Show that `step` is done, with the speed and a text such as the loss."""
        now, (then, before) = time.monotonic(), self._marks[0]
        self._marks.append((now, step))
        pace = _pace(step - before, now - then, self.total - step)
        if self._bar is not None:
            self.update(step, status=f"{pace}  {text}")
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


def _pace(done: int, seconds: float, left: int) -> str:
    if done <= 0 or seconds <= 0:
        return "? steps/s, ETA ?"
    return f"{done / seconds:.2f} steps/s, ETA {timedelta(seconds=round(max(left, 0) * seconds / done))}"


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


@contextlib.contextmanager
def meter(total: int, label: str, *, quiet: bool = False) -> Iterator[Tick]:
    """Show the progress towards `total` and the remaining time.

    A terminal gets a bar after `LINE_SECONDS`; elsewhere there is a line every `LINE_SECONDS`.
    """
    done, progress = 0, Progress(total, label=label, quiet=quiet)
    began = shown = time.monotonic()

    def tick(size: int, text: str) -> None:
        nonlocal done, shown
        done, now = done + size, time.monotonic()
        if now - began >= LINE_SECONDS:
            progress.update(done)
        if now - shown >= LINE_SECONDS:
            shown = now
            progress.log(done, text)

    with progress:
        yield tick


def tick_calls(module: nn.Module, tick: Tick) -> AbstractContextManager[object]:
    """Call `tick` after every forward call of a module; of a backbone every evaluation of the network."""
    return module.register_forward_hook(lambda *_: tick(1, ""))


def console_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "") -> None:
    """Print a table whose columns are aligned, the first to the left; a line end in a cell becomes a space."""
    lines = [[cell.replace("\n", " ") for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    if title:
        print(f"\n{title}")
    for first, *others in lines:
        cells = [first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]
        print("  ".join(cells).rstrip())
