"""Callbacks of a run: progress, TensorBoard, W&B, signals, deadlines, early stopping, posterior collapse."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable as Function
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, NamedTuple

import torch

from emoe.config import ConfigError
from emoe.console import Progress
from emoe.engine.metricslog import read_metrics
from emoe.rng import derive_seed

_SHOW_CURSOR = b"\x1b[?25h"
GRACE, PATIENCE = 0.1, 0.04  # shares of training: without checks for collapse at first, and for which it must last


class Stop(NamedTuple):
    """A request to end a run after the current step."""

    reason: str
    signal: int = 0  # its number; 0: no signal
    failed: bool = False  # whether the run ends with an error after it is saved


class FitInfo(NamedTuple):
    """A run at its start."""

    total: int
    start: int
    run_dir: Path
    device: torch.device
    notes: tuple[str, ...] = ()  # for the log: kernels in use, disabled settings

    def records(self) -> list[dict[str, Any]]:
        """The log records of a resumed run up to its first step."""
        path = self.run_dir / "metrics.jsonl"
        return [record for record in read_metrics(path) if record["step"] <= self.start] if self.start else []


class FitResult(NamedTuple):
    """The end of a call of `fit`."""

    step: int
    seconds: float
    stop: Stop | None  # the request that ended it early

    @property
    def signal(self) -> int | None:
        """The signal that ended it, or None."""
        return (self.stop and self.stop.signal) or None


class Callback:
    """Base of callbacks, whose methods do nothing; an exception in one ends the run, which can be resumed.

    With several processes only rank 0 calls them, except for `should_stop`.
    """

    def on_start(self, info: FitInfo) -> None:
        """Called before the first step."""

    def on_step(self, step: int) -> None:
        """Called after every step; must be cheap."""

    def on_log(self, record: dict[str, Any]) -> None:
        """Called with every log record before it is written; may add keys."""

    def on_checkpoint(self, step: int, folder: Path) -> None:
        """Called after a checkpoint was written."""

    def on_end(self, result: FitResult | None) -> None:
        """Called once after the last step; None if an exception ended the run."""

    def should_stop(self, step: int) -> Stop | None:
        """Ask for the end of the run after this step. Any process can stop all."""
        return None


class ProgressBar(Callback):
    """A bar on a terminal, elsewhere a line for each log record, on standard error."""

    def __init__(self, label: str, *, quiet: bool = False):
        self.label, self.quiet = label, quiet
        self.progress = Progress(0, quiet=True)

    def on_start(self, info: FitInfo) -> None:
        self.progress = Progress(info.total, info.start, self.label, quiet=self.quiet)
        self.progress.update(info.start)
        for note in info.notes:
            self.progress.note(note)

    def on_step(self, step: int) -> None:
        self.progress.update(step)

    def on_log(self, record: dict[str, Any]) -> None:
        if "warning" in record:
            self.progress.note(f"warning: step {record['step']}: {record['warning']}")
        self.progress.log(record["step"], f"loss {record['loss']:.4f}")

    def on_end(self, result: FitResult | None) -> None:
        self.progress.close()


class TensorBoard(Callback):
    """Writes all scalars of log records as TensorBoard events into the run folder."""

    def on_start(self, info: FitInfo) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ConfigError(["tensorboard: the package is missing; pip install emoe[track]"]) from None
        # `purge_step` hides what a killed run wrote after the step it resumes from.
        self.writer: Any = SummaryWriter(str(info.run_dir / "tensorboard"), purge_step=info.start + 1)

    def on_log(self, record: dict[str, Any]) -> None:
        for name, value in scalars(record).items():
            self.writer.add_scalar(name, value, record["step"])

    def on_end(self, result: FitResult | None) -> None:
        if hasattr(self, "writer"):
            self.writer.close()


class WandB(Callback):
    """Logs all scalars to Weights & Biases, if the package is installed; a resumed run continues its log."""

    def on_start(self, info: FitInfo) -> None:
        try:
            import wandb
        except ImportError:
            raise ConfigError(["wandb: the package is missing; pip install wandb"]) from None
        # Folders of several sweeps have the same name: the id is that of the whole path.
        id_ = f"{derive_seed(info.run_dir.resolve()):016x}"
        self.run: Any = wandb.init(dir=str(info.run_dir), name=info.run_dir.name, id=id_, resume="allow")

    def on_log(self, record: dict[str, Any]) -> None:
        self.run.log(scalars(record), step=record["step"])

    def on_end(self, result: FitResult | None) -> None:
        if hasattr(self, "run"):
            self.run.finish(exit_code=int(result is None))


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """The single numbers of a log record, without the step."""
    return {name: value for name, value in record.items() if name != "step" and type(value) in (int, float)}


class StopSignal(Callback):
    """In its `with` block the first SIGINT or SIGTERM only sets `requested`, the number of the signal.

    As a callback it ends a run after the current step. Outside the main thread, where Python allows no handlers, the
    block does nothing.
    """

    def __init__(self) -> None:
        self.requested: int | None = None
        self._former: dict[int, Any] = {}

    def ask(self) -> None:
        """Ask for a stop like a SIGTERM."""
        self.requested = self.requested or signal.SIGTERM

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


class Deadline(Callback):
    """Ends the run at a moment of `time.monotonic()`."""

    def __init__(self, moment: float):
        self.moment = moment

    def should_stop(self, step: int) -> Stop | None:
        return Stop("the time is up") if time.monotonic() >= self.moment else None


class EarlyStopping(Callback):
    """Ends the run when a number of the log has not fallen for `patience` records that contain it."""

    def __init__(self, metric: str, patience: int):
        self.metric, self.patience = metric, patience
        self.best, self.best_step, self._since = math.inf, 0, 0

    def on_start(self, info: FitInfo) -> None:
        for record in info.records():
            self.on_log(record)

    def on_log(self, record: dict[str, Any]) -> None:
        if self.metric in record:
            self._since += 1
            if record[self.metric] < self.best:
                self.best, self.best_step, self._since = record[self.metric], record["step"], 0

    def should_stop(self, step: int) -> Stop | None:
        if self._since < self.patience:
            return None
        return Stop(f"{self.metric} has not improved since step {self.best_step}")


class CollapseError(RuntimeError):
    """Posterior collapse ended the run; the last step is saved."""

    exit_code: ClassVar[int] = 4


class CollapseWarning(Callback):
    """Warns once, or ends the run, when `describe` finds posterior collapse in all records over a 25th of all steps.

    The first tenth of training is not checked. A resumed run reads the earlier records again.
    """

    def __init__(self, describe: Function[[Mapping[str, Any]], str | None], *, stop: bool = False):
        self.describe, self.stop = describe, stop
        self.verdict: str | None = None
        self._total, self._since, self._warned = 0, math.inf, False

    def on_start(self, info: FitInfo) -> None:
        self._total = info.total
        for record in info.records():
            self.on_log(record)

    def on_log(self, record: dict[str, Any]) -> None:
        step = record["step"]
        text = self.describe(record) if step > GRACE * self._total else None
        self._since = math.inf if text is None else min(self._since, step)
        self.verdict = text if step - self._since >= PATIENCE * self._total else None
        if self.verdict is not None and not self._warned:
            self._warned, record["warning"] = True, self.verdict

    def should_stop(self, step: int) -> Stop | None:
        if not self.stop or self.verdict is None:
            return None
        return Stop(f"{self.verdict}. It is saved; resume with --train.stop-on-collapse false to continue", failed=True)
