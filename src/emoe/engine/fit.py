"""The training loop: steps, log records, checkpoints, clean stops, exact resumption."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

from emoe.engine import checkpoint
from emoe.engine.arithmetic import arithmetic
from emoe.engine.callbacks import Callback, CollapseError, FitInfo, FitResult, Stop
from emoe.engine.distributed import ALONE, World
from emoe.engine.metricslog import MetricsLog
from emoe.engine.optim import OptimConfig
from emoe.engine.stepper import Stepper, TrainConfig
from emoe.files import prepare, run_lock
from emoe.ramps import Ramp
from emoe.rng import Rng

MAX_SKIPPED_IN_ROW = 20


class NumericFailure(RuntimeError):
    """Training cannot continue: too many steps in a row were refused."""

    exit_code: ClassVar[int] = 4


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
    claim: Callable[[], object] = lambda: None,
    meta: Mapping[str, Any] = {},
    callbacks: Sequence[Callback] = (),
    world: World = ALONE,
) -> FitResult:
    """Train `module` to `train.steps` updates in `run_dir`, which is locked from `claim()` to the end.

    A run that is killed at any moment and resumed ends with the same weights, bit for bit, as one that was not (on a
    CPU; on a GPU if it is `deterministic`).

    All processes of a `world` call this with the same arguments, except for the rank of `rng` and its part of the
    batches. They stop at the same step when one of them is asked to. Rank 0 calls `claim` and writes all files.

    Raises:
        StorageError: A checkpoint cannot be written or read.
        NumericFailure: The loss stays non-finite; the parameters are those of the last good step.
        CollapseError: Posterior collapse, if a callback stops the run for it.
        LostRank: Another process has ended or does not answer; the run can be resumed from its last checkpoint.
    """
    if (rng.rank, rng.world) != (world.rank, world.size):
        raise ValueError(f"rng is of rank {rng.rank} of {rng.world}, the world of {world.rank} of {world.size}")
    folder, watching = run_dir / "checkpoints", callbacks if world.leads else ()
    with ExitStack() as stack:
        stack.enter_context(arithmetic(train.precision, deterministic=train.deterministic))

        def begin() -> None:
            stack.enter_context(run_lock(run_dir))
            claim()
            prepare(folder)

        world.lead(begin)
        stepper = Stepper(module, batches, ramps, optim=optim, train=train, rng=rng, world=world)
        step = start = _restore(stepper, folder) if resume else 0
        world.check_same(str(start), "they read different checkpoints; all must see the same run folder")
        log = stack.enter_context(MetricsLog(run_dir / "metrics.jsonl", start)) if world.leads else None
        saved = start or -1  # a run that is stopped before its first step has a checkpoint too

        def save() -> None:
            nonlocal saved
            if saved != step and log is not None:
                log.sync()
                groups = {"model": module.state_dict(), **stepper.optimizer.state()}
                limit = 1e6 * (train.max_file_mb or math.inf)
                path = checkpoint.save(folder, step, groups, meta, keep=train.keep, max_file_bytes=limit)
                for callback in watching:
                    callback.on_checkpoint(step, path)
            saved = step
            world.agree(0)  # wait: the end of one process before the checkpoint is written could end all

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
                if log is not None:
                    record = _record(stepper, step)
                    for callback in watching:
                        callback.on_log(record)
                    log.write(record)
                _check_refused(stepper, step)
            if step % train.save_every == 0:
                save()
            stop = _asked(callbacks, step, world)
        save()
        if stop is not None and stop.failed:
            raise CollapseError(f"step {step}: {stop.reason}")
        result = FitResult(step, time.monotonic() - began, stop)
        return result


def _restore(stepper: Stepper, folder: Path) -> int:
    saved = checkpoint.load_latest(folder)
    if saved is None:
        return 0
    stepper.module.load_state_dict(saved.tensors["model"])
    stepper.optimizer.load(saved.tensors)
    return saved.step


def _asked(callbacks: Sequence[Callback], step: int, world: World) -> Stop | None:
    """The request of a callback of any rank to stop, with the same signal and failure on all ranks."""
    own = next((stop for callback in callbacks if (stop := callback.should_stop(step))), None)
    asked, signal, failed = world.agree(*((1, own.signal, own.failed) if own else (0, 0, 0)))
    return Stop("another rank stopped", signal, bool(failed)) if asked and not own else own


def _record(stepper: Stepper, step: int) -> dict[str, Any]:
    """A log record, with numbers of this step alone: interruptions of the run do not change it."""
    assert stepper.loss is not None
    optimizer = stepper.optimizer
    return {
        "step": step,
        "loss": stepper.loss.total.item(),
        **{name: value.tolist() for name, value in stepper.loss.log.items()},
        "grad_norm": optimizer.grad_norm.item(),
        "skipped": int(optimizer.skipped.item()),
        **stepper.numbers_at(step - 1),
    }


def _check_refused(stepper: Stepper, step: int) -> None:
    in_row, loss = int(stepper.optimizer.skipped_in_row.item()), stepper.loss
    if in_row >= MAX_SKIPPED_IN_ROW:
        reason = "had a loss or gradient that is not finite and were skipped. Lower optim.lr, set optim.clip, or look "
        reason += "at metrics.jsonl for where it began."
        if loss is not None and loss.valid is not None and not bool(loss.valid):
            reason = f"were refused: {loss.refusal}"
        raise NumericFailure(f"step {step}: the last {in_row} steps {reason}")
