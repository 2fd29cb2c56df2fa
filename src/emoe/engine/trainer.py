"""The training loop: steps, log lines, checkpoints, a clean stop on signals, exact resumption."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from emoe.config import Config, option
from emoe.console import Progress
from emoe.engine import checkpoint
from emoe.engine.distributed import World
from emoe.engine.lock import RunLock
from emoe.engine.metricslog import MetricsLog, read_metrics
from emoe.engine.optim import OptimConfig
from emoe.engine.signals import StopSignal
from emoe.engine.stepper import Precision, Stepper
from emoe.engine.tensorboard import TensorBoardLog
from emoe.files import prepare
from emoe.ramps import Ramp
from emoe.rng import Rng

MAX_SKIPPED_IN_ROW = 20
GRACE, PATIENCE = 0.1, 10  # share of training before a run can be found dead, and log lines in a row that must say so

Health = Callable[[Mapping[str, Any]], str | None]
"""What ails the module by a log line, with a remedy; None if it learns."""


class NumericFailure(RuntimeError):
    """Training cannot go on: too many steps in a row had a loss or gradient that is not finite."""

    exit_code: ClassVar[int] = 4


class DeadRun(RuntimeError):  # noqa: N818 - names a state of the run
    """The module has stopped to learn what it is trained for, and the run was to stop then; the last step is saved."""

    exit_code: ClassVar[int] = 4


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Config):
    """How long and how training runs, and what it leaves behind."""

    steps: int = option(24_000, doc="number of updates", low=1)
    batch: int = option(512, doc="rows per update, over all ranks", low=1)
    accumulate: int = option(
        1, doc="equal parts that each process cuts its rows of an update into, to save memory", low=1
    )
    ema: float = option(0.0, doc="decay of the moving average of the weights; 0 = none", low=0, high=0.999999)
    precision: Precision = option("tf32", doc="arithmetic of matrix products; CPUs know fp32 and bf16 only")
    cuda_graph: bool = option(True, doc="capture the step as a CUDA graph where there is a GPU")
    deterministic: bool = option(
        False, doc="only kernels that give equal bits each time: resumption is then exact on a GPU too, and slower"
    )
    log_every: int = option(100, doc="steps between two log lines", low=1)
    save_every: int = option(2_000, doc="steps between two checkpoints", low=1)
    keep: int = option(2, doc="checkpoints kept", low=2)
    max_file_mb: int | None = option(
        None, doc="largest file of a checkpoint in 10^6 bytes, but for a single larger tensor; none = no limit", low=1
    )
    stop_when_dead: bool = option(
        False, doc="end a run whose log shows that it has stopped to learn; without it, there is a warning only"
    )

    def conflicts(self) -> Iterator[str]:
        """Equal parts."""
        if self.batch % self.accumulate:
            yield f"accumulate: must divide batch = {self.batch}, got {self.accumulate}"


@dataclass(frozen=True)
class FitResult:
    """How a call of `fit` ended: the last step done, seconds spent, and the signal that stopped it, if one did."""

    step: int
    seconds: float
    signal: int | None


def fit(
    module: nn.Module,
    batches: Callable[[int], Tensor],
    ramps: Mapping[str, Ramp],
    *,
    optim: OptimConfig,
    train: TrainConfig,
    rng: Rng,
    run_dir: Path,
    resume: bool = False,
    label: str = "train",
    quiet: bool = False,
    tensorboard: bool = False,
    stop: StopSignal | None = None,
    progress: Progress | None = None,
    meta: Mapping[str, Any] | None = None,
    health: Health | None = None,
    world: World | None = None,
) -> FitResult:
    """Train `module` to `train.steps` updates in `run_dir`.

    SIGINT and SIGTERM end it after the step that is under way, with a checkpoint; `stop` is the flag to watch when
    the caller handles signals itself (signal handlers live in the main thread only). `progress` replaces the
    display of this one run, for callers that show several. `health` judges every log line after the first tenth of
    training; what it says ten times in a row becomes a warning, once, or the end of the run if `train.stop_when_dead`.

    With a `world` of several processes all of them call this with the same arguments, but for the rank of `rng` and
    its share of the batches. They stop at the same step when one of them gets a signal; the first writes everything.

    Every random number is a function of (seed, step, purpose) and every batch of the step, so a run that is killed
    at any moment and resumed ends with the same weights, bit for bit, as one that was not (on a CPU; on a GPU if
    it is `deterministic`).

    Raises:
        checkpoint.StorageError: A checkpoint cannot be written or read.
        NumericFailure: The loss stays non-finite; the parameters are those of the last good step.
        DeadRun: The run is dead and was to stop then.
        LostRank: Another process has ended or does not answer; the run goes on from its last checkpoint.
    """
    world = world or World()
    if (rng.rank, rng.world) != (world.rank, world.size):
        raise ValueError(f"rng is of rank {rng.rank} of {rng.world}, the world of {world.rank} of {world.size}")
    set_arithmetic(train)
    folder = run_dir / "checkpoints"
    watched = contextlib.nullcontext(stop) if stop is not None else StopSignal()
    with RunLock(run_dir) if world.leads else contextlib.nullcontext(), watched as stop:
        if world.leads:
            prepare(folder)
        stepper = Stepper(
            module, batches, ramps, optim,
            total=train.steps, rng=rng, ema=train.ema, precision=train.precision, graph=train.cuda_graph,
            accumulate=train.accumulate, world=world,
        )  # fmt: skip
        start = _restore(stepper, folder) if resume else 0
        world.check_same(str(start), "they read different checkpoints; all must see the same run folder")
        book = _Book(run_dir, start, tensorboard, _Watch(health, train.steps)) if world.leads else None
        began = time.monotonic()
        step = start
        saved = start if start else -1  # a run that is stopped before its first step leaves a checkpoint too

        def save() -> None:
            nonlocal saved
            if saved != step and book is not None:
                book.metrics.sync()
                groups = {"model": module.state_dict(), **stepper.optimizer.state()}
                limit = None if train.max_file_mb is None else train.max_file_mb * 10**6
                checkpoint.save(folder, step, groups, dict(meta or {}), keep=train.keep, max_file_bytes=limit)
            saved = step
            world.agree(0)  # the others wait: whoever ends before it is written may end all

        def asked() -> int | None:
            return world.agree(stop.requested or 0) or None

        quiet = quiet or not world.leads
        with (
            book or contextlib.nullcontext(),
            progress or Progress(train.steps, start=start, label=label, quiet=quiet) as shown,
        ):
            shown.update(start)
            while step < train.steps and asked() is None:
                stepper(step)
                step += 1
                if step % train.log_every == 0 or step == train.steps:
                    verdict = None if book is None else book.write(stepper, step, shown)
                    _check_finite(stepper, step)
                    if train.stop_when_dead and world.agree(verdict is not None):
                        save()
                        raise DeadRun(
                            f"step {step}: {verdict or 'rank 0 found the run dead'}. It is saved; resume with "
                            "--train.stop-when-dead false to go on all the same."
                        )
                else:
                    shown.update(step)
                if step % train.save_every == 0:
                    save()
            save()
        return FitResult(step, time.monotonic() - began, asked())


class _Watch:
    """Follows what a judge says of the log: `verdict` is set while it has said so for PATIENCE lines in a row.

    A resumed run shows it the lines that were written before, so that it ends where an unbroken one does.
    """

    def __init__(self, judge: Health | None, total: int):
        self.judge, self.grace = judge, GRACE * total
        self.verdict: str | None = None
        self.told = False  # whether a line has the warning
        self._in_row = 0

    def look(self, record: Mapping[str, Any]) -> None:
        """Judge the next line."""
        said = self.judge(record) if self.judge is not None and record["step"] > self.grace else None
        self._in_row = self._in_row + 1 if said is not None else 0
        self.verdict = said if self._in_row >= PATIENCE else None
        self.told = self.told or "warning" in record


class _Book:
    """What the first process writes while a run goes: metrics, TensorBoard, and a warning if the run is dead."""

    def __init__(self, run_dir: Path, start: int, tensorboard: bool, watch: _Watch):
        self.metrics = MetricsLog.resume(run_dir / "metrics.jsonl", start)
        self.board = TensorBoardLog(run_dir / "tensorboard", start) if tensorboard else None
        self.watch = watch
        for record in read_metrics(self.metrics.path) if start else ():
            watch.look(record)

    def __enter__(self) -> _Book:
        return self

    def __exit__(self, *_: object) -> None:
        self.metrics.close()
        if self.board is not None:
            self.board.close()

    def write(self, stepper: Stepper, step: int, shown: Progress) -> str | None:
        """Log a step; the verdict, if the run is dead."""
        record, watch = _record(stepper, step), self.watch
        watch.look(record)
        if watch.verdict is not None and not watch.told:
            watch.told, record["warning"] = True, watch.verdict
            shown.note(f"warning: step {step}: {watch.verdict}")
        self.metrics.write(record)
        if self.board is not None:
            self.board.write(record)
        shown.log(step, f"loss {record['loss']:.4f}")
        return watch.verdict


def set_arithmetic(train: TrainConfig) -> None:
    """Settings of the whole process: all said in every case, so that no earlier run decides.

    Unless a run is `deterministic`, cuDNN tries its convolutions and takes the fastest, not the same one every time.
    """
    torch.set_float32_matmul_precision("highest" if train.precision == "fp32" else "high")
    if train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it starts
    torch.use_deterministic_algorithms(train.deterministic)
    torch.backends.cudnn.benchmark = not train.deterministic


def _restore(stepper: Stepper, folder: Path) -> int:
    saved = checkpoint.load_latest(folder)
    if saved is None:
        return 0
    stepper.module.load_state_dict(saved.tensors["model"])
    stepper.optimizer.load(saved.tensors)
    return saved.step


def _record(stepper: Stepper, step: int) -> dict[str, Any]:
    """One log line: the numbers of this step alone, so that it does not depend on when a run was interrupted."""
    assert stepper.loss is not None
    values = {name: value.tolist() for name, value in stepper.loss.log.items()}
    optimizer = stepper.optimizer
    return {
        "step": step,
        **values,
        "grad_norm": optimizer.grad_norm.item(),
        "skipped": int(optimizer.skipped.item()),
        **stepper.numbers_at(step - 1),
    }


def _check_finite(stepper: Stepper, step: int) -> None:
    in_row = int(stepper.optimizer.skipped_in_row.item())
    if in_row >= MAX_SKIPPED_IN_ROW:
        told = [
            f"step {step}: the last {in_row} steps had a loss or gradient that is not finite and were skipped.",
            "Lower optim.lr, set optim.clip, or look at metrics.jsonl for where it began.",
            refusals() if (refusals := getattr(stepper.module, "refusals", None)) else None,
        ]
        raise NumericFailure(" ".join(line for line in told if line))
