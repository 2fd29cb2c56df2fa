"""Progress of long work on standard error: how much is done, and how long the rest takes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from emoe.evaluation.likelihood import Tick

LINE_SECONDS = 3.0  # between two lines of progress


@contextmanager
def meter(total: int, label: str, *, quiet: bool = False, patience: float = 0.0) -> Iterator[Tick]:
    """Show how much of `total` is done and how long the rest takes; short work says nothing.

    Args:
        total: Size of the work.
        label: What it is.
        quiet: Show nothing.
        patience: Seconds before a terminal gets a bar; elsewhere the first line comes after `LINE_SECONDS` in any case.
    """
    from emoe.engine.runlog import Progress

    done = 0
    began = shown = time.monotonic()
    progress, started = Progress(total, label=label, quiet=quiet), False

    def tick(size: int, text: str) -> None:
        nonlocal done, shown, started
        done += size
        now = time.monotonic()
        if not started and now - began >= patience:
            started = True
            progress.__enter__()
        progress.update(done)
        if now - shown >= LINE_SECONDS:
            shown = now
            progress.log(done, text)

    try:
        if not patience:
            started = True
            progress.__enter__()
        yield tick
    finally:
        progress.close()


@contextmanager
def watched(module: nn.Module, tick: Tick) -> Iterator[None]:
    """Tell `tick` of every forward call of a module; of a backbone every evaluation of the network."""
    counted: nn.Module = getattr(module, "counted", module)
    handle = counted.register_forward_hook(lambda *_: tick(1, ""))
    try:
        yield
    finally:
        handle.remove()
