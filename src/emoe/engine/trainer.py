"""The training loop: steps, log lines, checkpoints, a clean stop on signals, exact resumption."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from emoe.config import Config, option
from emoe.engine import checkpoint
from emoe.engine.durable import prepare
from emoe.engine.lock import RunLock
from emoe.engine.optim import OptimConfig
from emoe.engine.runlog import MetricsLog, Progress, TensorBoardLog
from emoe.engine.signals import StopSignal
from emoe.engine.stepper import Precision, Stepper
from emoe.ramps import Ramp
from emoe.rng import Rng

MAX_SKIPPED_IN_ROW = 20


class NumericFailure(RuntimeError):
    """Training cannot go on: too many steps in a row had a loss or gradient that is not finite."""

    exit_code: ClassVar[int] = 4


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Config):
    """How long and how training runs, and what it leaves behind."""

    steps: int = option(24_000, doc="number of updates", low=1)
    batch: int = option(512, doc="rows per update, over all ranks", low=1)
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
) -> FitResult:
    """Train `module` to `train.steps` updates in `run_dir`.

    SIGINT and SIGTERM end it after the step that is under way, with a checkpoint; `stop` is the flag to watch when
    the caller handles signals itself (signal handlers live in the main thread only). `progress` replaces the
    display of this one run, for callers that show several.

    Every random number is a function of (seed, step, purpose) and every batch of the step, so a run that is killed
    at any moment and resumed ends with the same weights, bit for bit, as one that was not (on a CPU; on a GPU if
    it is `deterministic`).

    Raises:
        checkpoint.StorageError: A checkpoint cannot be written or read.
        NumericFailure: The loss stays non-finite; the parameters are those of the last good step.
    """
    set_arithmetic(train)
    folder = run_dir / "checkpoints"
    watched = contextlib.nullcontext(stop) if stop is not None else StopSignal()
    with RunLock(run_dir), watched as stop:
        prepare(folder)
        stepper = Stepper(
            module, batches, ramps, optim,
            total=train.steps, rng=rng, ema=train.ema, precision=train.precision, graph=train.cuda_graph,
        )  # fmt: skip
        start = _restore(stepper, folder) if resume else 0
        metrics = MetricsLog.resume(run_dir / "metrics.jsonl", start)
        board = TensorBoardLog(run_dir / "tensorboard", start) if tensorboard else None
        began = time.monotonic()
        step = start
        saved = start if start else -1  # a run that is stopped before its first step leaves a checkpoint too

        def save() -> None:
            nonlocal saved
            if saved != step:
                metrics.sync()
                groups = {"model": module.state_dict(), **stepper.optimizer.state()}
                limit = None if train.max_file_mb is None else train.max_file_mb * 10**6
                checkpoint.save(folder, step, groups, dict(meta or {}), keep=train.keep, max_file_bytes=limit)
                saved = step

        with metrics, progress or Progress(train.steps, start=start, label=label, quiet=quiet) as shown:
            shown.update(start)
            while step < train.steps and stop.requested is None:
                stepper(step)
                step += 1
                if step % train.log_every == 0 or step == train.steps:
                    record = _record(stepper, step)
                    metrics.write(record)
                    if board is not None:
                        board.write(record)
                    shown.log(step, f"loss {record['loss']:.4f}")
                    _check_health(stepper, step)
                else:
                    shown.update(step)
                if step % train.save_every == 0:
                    save()
            save()
            if board is not None:
                board.close()
        return FitResult(step, time.monotonic() - began, stop.requested)


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


def _check_health(stepper: Stepper, step: int) -> None:
    in_row = int(stepper.optimizer.skipped_in_row.item())
    if in_row >= MAX_SKIPPED_IN_ROW:
        raise NumericFailure(
            f"step {step}: the last {in_row} steps had a loss or gradient that is not finite and were skipped. "
            "Lower optim.lr, set optim.clip, or look at metrics.jsonl for where it began."
        )
