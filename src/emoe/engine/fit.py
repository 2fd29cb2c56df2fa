"""The training loop: steps, log records, checkpoints, a clean stop, exact resumption."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

from emoe.config import Config, option
from emoe.engine import checkpoint
from emoe.engine.arithmetic import Precision, arithmetic
from emoe.engine.callbacks import Callback, CollapseError, FitInfo, FitResult, Stop
from emoe.engine.distributed import World
from emoe.engine.metricslog import MetricsLog
from emoe.engine.optim import OptimConfig
from emoe.engine.rundir import RunLock
from emoe.engine.stepper import Stepper
from emoe.files import prepare
from emoe.ramps import Ramp
from emoe.rng import Rng

MAX_SKIPPED_IN_ROW = 20
STOP, FAIL = 64, 65  # agreed between ranks beside the numbers of signals


class NumericFailure(RuntimeError):
    """Training cannot continue: too many steps in a row were refused."""

    exit_code: ClassVar[int] = 4


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Config):
    """How long and how training runs, and what it leaves behind."""

    steps: int = option(24_000, doc="number of updates", low=1)
    batch: int = option(512, doc="rows per update, over all ranks", low=1)
    accumulate: int = option(
        1, doc="equal parts that each process cuts its rows of an update into, to save memory", low=1, neutral=True
    )
    ema: float = option(0.0, doc="decay of the moving average of the weights; 0 = none", low=0, high=0.999999)
    precision: Precision = option("tf32", doc="arithmetic of matrix products; CPUs know fp32 and bf16 only")
    cuda_graph: bool = option(True, doc="capture the step as a CUDA graph where there is a GPU", neutral=True)
    deterministic: bool = option(
        False, doc="only kernels that give equal bits each time: resumption is then exact on a GPU too, and slower"
    )
    log_every: int = option(100, doc="steps between two log records", low=1, neutral=True)
    save_every: int = option(2_000, doc="steps between two checkpoints", low=1, neutral=True)
    keep: int = option(2, doc="checkpoints kept", low=2, neutral=True)
    max_file_mb: int | None = option(
        None,
        doc="largest file of a checkpoint in 10^6 bytes, except for a single larger tensor; none = no limit",
        low=1,
        neutral=True,
    )
    stop_on_collapse: bool = option(
        False, doc="end a run whose log shows posterior collapse; without it, there is a warning only", neutral=True
    )

    def conflicts(self) -> Iterator[str]:
        """Equal parts."""
        if self.batch % self.accumulate:
            yield f"accumulate: must divide batch = {self.batch}, got {self.accumulate}"


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
    meta: Mapping[str, Any] | None = None,
    callbacks: Sequence[Callback] = (),
    world: World | None = None,
) -> FitResult:
    """Train `module` to `train.steps` updates in `run_dir`, whose lock is held meanwhile.

    With a `world` of several processes all of them call this with the same arguments, except for the rank of `rng` and
    its part of the batches. They stop at the same step when one of them is asked to; rank 0 writes everything.

    Every random number is a function of (seed, step, purpose) and every batch of the step, so a run that is killed
    at any moment and resumed ends with the same weights, bit for bit, as one that was not (on a CPU; on a GPU if
    it is `deterministic`).

    Raises:
        StorageError: A checkpoint cannot be written or read.
        NumericFailure: The loss stays non-finite; the parameters are those of the last good step.
        CollapseError: Posterior collapse, if a callback stops the run for it.
        LostRank: Another process has ended or does not answer; the run can be resumed from its last checkpoint.
    """
    world = world or World()
    if (rng.rank, rng.world) != (world.rank, world.size):
        raise ValueError(f"rng is of rank {rng.rank} of {rng.world}, the world of {world.rank} of {world.size}")
    folder, watching = run_dir / "checkpoints", callbacks if world.leads else ()
    with ExitStack() as stack:
        stack.enter_context(arithmetic(train.precision, deterministic=train.deterministic))
        if world.leads:
            stack.enter_context(RunLock(run_dir))
            prepare(folder)
        stepper = Stepper(
            module, batches, ramps, optim,
            total=train.steps, rng=rng, ema=train.ema, precision=train.precision, graph=train.cuda_graph,
            accumulate=train.accumulate, world=world,
        )  # fmt: skip
        step = start = _restore(stepper, folder) if resume else 0
        world.check_same(str(start), "they read different checkpoints; all must see the same run folder")
        log = stack.enter_context(MetricsLog.resume(run_dir / "metrics.jsonl", start)) if world.leads else None
        saved = start or -1  # a run that is stopped before its first step leaves a checkpoint too

        def save() -> None:
            nonlocal saved
            if saved != step and log is not None:
                log.sync()
                groups = {"model": module.state_dict(), **stepper.optimizer.state()}
                limit = None if train.max_file_mb is None else train.max_file_mb * 10**6
                path = checkpoint.save(folder, step, groups, dict(meta or {}), keep=train.keep, max_file_bytes=limit)
                for callback in watching:
                    callback.on_checkpoint(step, path)
            saved = step
            world.agree(0)  # the others wait: whoever ends before it is written may end all

        def write_record() -> None:
            if log is not None:
                record = _record(stepper, step)
                for callback in watching:
                    callback.on_log(record)
                log.write(record)
            _check_refused(stepper, step)

        began, result = time.monotonic(), None
        for callback in watching:
            stack.callback(lambda callback=callback: callback.on_end(result))  # type: ignore[misc]
            callback.on_start(FitInfo(train.steps, start, run_dir, stepper.device, stepper.notes))
        stop = _asked(callbacks, step, world)
        while step < train.steps and stop is None:
            stepper(step)
            step += 1
            for callback in watching:
                callback.on_step(step)
            if step % train.log_every == 0 or step == train.steps:
                write_record()
            if step % train.save_every == 0:
                save()
            stop = _asked(callbacks, step, world)
        save()
        if stop is not None and stop.failed:
            raise CollapseError(f"step {step}: {stop.reason}")
        result = FitResult(step, time.monotonic() - began, stop)
        return result


def _asked(callbacks: Sequence[Callback], step: int, world: World) -> Stop | None:
    """The stop that a callback of any rank asks for; all ranks get one of the same kind."""
    own = next((stop for callback in callbacks if (stop := callback.should_stop(step)) is not None), None)
    code = world.agree(0 if own is None else own.signal or (FAIL if own.failed else STOP))
    if not code or own is not None:
        return own
    return Stop("another rank stopped", 0 if code in (STOP, FAIL) else code, code == FAIL)


def _restore(stepper: Stepper, folder: Path) -> int:
    saved = checkpoint.load_latest(folder)
    if saved is None:
        return 0
    stepper.module.load_state_dict(saved.tensors["model"])
    stepper.optimizer.load(saved.tensors)
    return saved.step


def _record(stepper: Stepper, step: int) -> dict[str, Any]:
    """One log record: the numbers of this step alone, so that it does not depend on when a run was interrupted."""
    assert stepper.loss is not None
    values = {name: value.tolist() for name, value in stepper.loss.log.items()}
    optimizer = stepper.optimizer
    return {
        "step": step,
        "loss": stepper.loss.total.item(),
        **values,
        "grad_norm": optimizer.grad_norm.item(),
        "skipped": int(optimizer.skipped.item()),
        **stepper.numbers_at(step - 1),
    }


def _check_refused(stepper: Stepper, step: int) -> None:
    in_row = int(stepper.optimizer.skipped_in_row.item())
    if in_row < MAX_SKIPPED_IN_ROW:
        return
    loss = stepper.loss
    if loss is not None and loss.valid is not None and not bool(loss.valid):
        raise NumericFailure(f"step {step}: the last {in_row} steps were refused: {loss.refusal}")
    raise NumericFailure(
        f"step {step}: the last {in_row} steps had a loss or gradient that is not finite and were skipped. "
        "Lower optim.lr, set optim.clip, or look at metrics.jsonl for where it began."
    )
