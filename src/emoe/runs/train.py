"""Training of an experiment in a run folder, and opening of run folders.

A run folder holds `experiment.json`, `metrics.jsonl` and `checkpoints/`; the model is built from the experiment alone.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from emoe.config import ConfigError, to_dict
from emoe.domains.base import Domain
from emoe.engine import checkpoint
from emoe.engine.callbacks import Callback, CollapseWarning, ProgressBar, StopSignal
from emoe.engine.distributed import joined, launched
from emoe.engine.fit import fit
from emoe.engine.stepper import TrainConfig
from emoe.experiment import Experiment, customise
from emoe.overrides import differences
from emoe.recipes import get_recipe
from emoe.rng import Rng, derive_seed
from emoe.runs.run import Run
from emoe.types import TokenSpace

Weights = Literal["auto", "ema", "model"]
NO_RUN = "is no run folder (no experiment.json); make one with: emoe train RECIPE"


def pick_device(name: str = "auto") -> torch.device:
    """The device of a name; `auto` is a GPU if there is one."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        name = "cuda" if gpus else "cpu"
    if not re.fullmatch(r"(cpu|cuda|mps)(:\d\d?)?", name):
        raise ConfigError([f"device: {name!r} is not known; allowed: auto, cpu, cuda, cuda:N"])
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= gpus:
        here = ", ".join(["cpu", *(f"cuda:{i}" for i in range(gpus))])
        raise ConfigError([f"device: {name!r} was asked for, but torch sees {gpus or 'no'} GPU; allowed here: {here}"])
    return device


def train(
    recipe: str | Experiment,
    folder: str | Path,
    *,
    settings: Mapping[str, object] | None = None,
    resume: bool = False,
    device: str = "auto",
    callbacks: Sequence[Callback] | None = None,
    stop: StopSignal | None = None,
    domain: Domain | None = None,
) -> Run:
    """Train a recipe in a folder and return the run.

    The processes of `torchrun` train the run together (see `emoe.engine.distributed`); all must call this with the same
    arguments and see the same folder.

    Args:
        recipe: The name of a recipe, or an experiment.
        folder: The run folder.
        settings: Fields to change, such as `{"train.steps": 2000}`.
        resume: Continue the same experiment from the newest checkpoint, or start if there is none.
        device: auto, cpu, cuda or cuda:N.
        callbacks: Callbacks; default: a progress bar.
        stop: The flag of signals, for callers that handle signals themselves.
        domain: The domain, if it is already built.
    """
    path = Path(folder)
    experiment = customise(get_recipe(recipe) if isinstance(recipe, str) else recipe, settings or {})
    where, config, parts = _own_device(device), experiment.train, _parts(experiment.train)
    if callbacks is None:
        callbacks = [ProgressBar(f"{experiment.name.partition(' ')[0]} seed {experiment.seed}")]
    with joined(where) as world, contextlib.ExitStack() as stack:
        domain = experiment.domain.build(experiment.seed) if domain is None else domain
        method = experiment.build_method(domain.space).to(where)
        data = domain.sha256
        everything = json.dumps([to_dict(experiment), data, resume, torch.__version__])
        world.check_same(everything, "they were started with other fields, data or versions; use the same command")
        if stop is None:
            stop = stack.enter_context(StopSignal())
        meta = {"experiment": experiment.name, "rows": len(domain.rows), "data": data, "space": vars(domain.space)}
        meta |= {"parts": parts} if parts > 1 else {}
        result = fit(
            method,
            domain.batches(config.batch, experiment.seed, device=where, rank=world.rank, world=world.size),
            method.ramps,
            optim=experiment.optim,
            train=config,
            rng=Rng(derive_seed(experiment.seed, "train"), device=where, rank=world.rank, world=world.size),
            run_dir=path,
            resume=resume,
            claim=lambda: _claim(path, experiment, resume, data, parts),
            meta=meta,
            # Callbacks that show records see the warning in them.
            callbacks=[CollapseWarning(method.collapse, stop=config.stop_on_collapse), *callbacks, stop],
            world=world,
        )
    run = load_run(path, device=str(where), domain=domain)
    run.result = result
    return run


def _own_device(name: str) -> torch.device:
    """The device of this process; one of several has the GPU of its local rank."""
    where, (_, size, local) = pick_device(name), launched()
    if size > 1 and threading.current_thread() is not threading.main_thread():
        raise ConfigError("ranks: several processes train one run at a time, not several in threads; unset WORLD_SIZE")
    if size == 1 or where.type != "cuda":
        return where
    if where.index is not None:
        raise ConfigError(f"device: each of {size} processes has a GPU of its own, so {name!r} cannot be; give cuda")
    if local >= (gpus := torch.cuda.device_count()):
        raise ConfigError(f"ranks: process {local} of this machine has no GPU, there are {gpus}; start fewer")
    where = torch.device("cuda", local)
    torch.cuda.set_device(where)
    return where


def _parts(train: TrainConfig) -> int:
    """Number of equal parts of the rows of an update: `accumulate` of each process."""
    (_, size, _), count = launched(), train.accumulate
    if train.batch % (size * count):
        parts = f"{size} (processes) x {count} (train.accumulate)"
        raise ConfigError(f"train.batch: {train.batch} rows cannot be cut into {parts} equal parts; choose a multiple")
    return size * count


def _claim(path: Path, experiment: Experiment, resume: bool, data: str, parts: int) -> None:
    """Write the experiment into a new folder, or check that a folder to resume has the same experiment and data."""
    saved = path / "experiment.json"
    if any((path / "checkpoints").glob("step-*")):  # also damaged ones: nothing is overwritten unasked
        if not resume:
            raise ConfigError(f"run: {path} already holds a trained run; add --resume to go on, or choose another")
        if not saved.exists():
            raise ConfigError(f"run: {path} has checkpoints but no experiment.json; choose another folder")
        changes = differences(Experiment.load(saved), experiment).items()
        if frozen := [f"  {field}: {change}" for field, change in changes if not field.startswith("eval.")]:
            first, last = f"resume: {path} was started with another experiment", "  resume with the same fields"
            raise ConfigError([first, *frozen, f"{last}, or train into a new folder"])
        newest = checkpoint.load_latest(path / "checkpoints", groups=())
        meta = newest.meta if newest is not None else {}
        if meta.get("data", data) != data:
            raise ConfigError(f"resume: the training rows are not those {path} was started with; use a new folder")
        if (before := meta.get("parts", 1)) != parts:
            cut = f"the updates of {path} are cut into {before} parts (processes x train.accumulate), not {parts}"
            raise ConfigError(f"resume: {cut}, and each draws its own noise; keep the product")
    experiment.save(saved)


def load_run(
    folder_or_name: str | Path,
    *,
    device: str = "auto",
    weights: Weights = "auto",
    settings: Mapping[str, object] | None = None,
    domain: Domain | None = None,
) -> Run:
    """Open a run folder with its newest valid checkpoint, or released weights (see `emoe.runs.pretrained`).

    The training data are read on the first use of `.domain`, the state of the optimiser never.

    Args:
        folder_or_name: The run folder, or the folder or name of released weights.
        device: auto, cpu, cuda or cuda:N.
        weights: `ema` for the moving average, `model` for the raw weights; auto prefers the average.
        settings: Fields that do not change the weights, such as `{"method.route-tau": 0}`.
        domain: The domain, if it is already built.
    """
    path, where = Path(folder_or_name), pick_device(device)
    if not (path / "experiment.json").exists():
        from emoe.runs.pretrained import from_pretrained  # which imports this module

        return from_pretrained(path, device=device, settings=settings, weights=weights, domain=domain)
    experiment = customise(Experiment.load(path / "experiment.json"), settings or {})
    saved = checkpoint.load_latest(path / "checkpoints", groups=checkpoint.WEIGHTS)
    if saved is None:
        raise ConfigError([f"run: {path} has no checkpoint yet; train it with: emoe train ... --resume"])
    if domain is None and "space" not in saved.meta:  # a run of an earlier version
        domain = experiment.domain.build(experiment.seed)
    space = TokenSpace(**saved.meta["space"]) if domain is None else domain.space
    if weights == "ema" and "ema" not in saved.tensors:
        raise ConfigError([f"weights: {path} was trained without a moving average; allowed: auto, model"])
    state = saved.tensors["model"] | ({} if weights == "model" else saved.tensors.get("ema", {}))
    run = Run(path, experiment, experiment.build_method(space), saved.step)
    return with_weights(run, state, f"run: the weights in {path} do not fit these fields or this data", where, domain)


def with_weights(
    run: Run, state: Mapping[str, Tensor], problem: str, where: torch.device, domain: Domain | None
) -> Run:
    """Load weights into the method of a run; if they do not fit, raise a ConfigError that begins with `problem`."""
    try:
        run.method.load_state_dict(state)
    except RuntimeError as error:
        faults = [f"  {line.strip()}" for line in str(error).splitlines()[1:]]
        more = [f"  and {len(faults) - 5} more"] if len(faults) > 5 else []
        raise ConfigError([problem, *faults[:5], *more]) from None
    run.method.to(where).eval()
    if domain is not None:
        run.domain = domain
    return run
