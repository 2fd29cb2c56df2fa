"""Ctrl-C and SIGTERM as a flag that a loop reads at its safe points; a second signal ends the process."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import FrameType
from typing import Any

from emoe.engine.callbacks import Callback, Stop

_SHOW_CURSOR = b"\x1b[?25h"


class StopSignal(Callback):
    """While the `with` block runs, the first SIGINT or SIGTERM only sets `requested`, the number of the signal.

    As a callback it ends a run after the step under way. Outside the main thread, where Python allows no handlers, the
    block does nothing.
    """

    def __init__(self) -> None:
        self.requested: int | None = None
        self._former: dict[int, Any] = {}

    def ask(self) -> None:
        """Ask for a stop from within, as a SIGTERM from outside would."""
        if self.requested is None:
            self.requested = signal.SIGTERM

    def should_stop(self, step: int) -> Stop | None:
        return None if self.requested is None else Stop(f"signal {self.requested}", self.requested)

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._former[number] = signal.signal(number, self._handle)
            # A parent process may have blocked signals, and a blocked one is never handled.
            signal.pthread_sigmask(signal.SIG_UNBLOCK, self._former)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former.items():
            # None stands for a handler that was not set from Python and that Python cannot give back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._former.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # os.write and not print: the handler may run in the middle of another print to the same stream.
        with contextlib.suppress(OSError):
            if self.requested is None:
                os.write(2, b"\nstopping at the next safe point; a second signal ends the run at once\n")
            elif os.isatty(2):
                os.write(2, _SHOW_CURSOR)
        if self.requested is not None:
            os._exit(128 + number)
        self.requested = number
