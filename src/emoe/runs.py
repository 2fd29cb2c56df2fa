"""Runs on disk: train an experiment into a folder, open a folder as a trained model.

A run folder holds `experiment.json`, `metrics.jsonl` and `checkpoints/`; the experiment alone rebuilds the model.
"""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch
from jaxtyping import Int
from torch import Tensor

from emoe.completion import Completion, Given, Keep, complete
from emoe.config import ConfigError, to_dict
from emoe.console import Progress
from emoe.domains.base import Domain, Ink
from emoe.engine import checkpoint
from emoe.engine.distributed import joined, launched
from emoe.engine.lock import RunLock
from emoe.engine.signals import StopSignal
from emoe.engine.trainer import FitResult, fit
from emoe.experiment import Experiment, customise, differences
from emoe.methods.base import Method
from emoe.recipes import get_recipe
from emoe.rng import Rng, derive_seed
from emoe.types import TokenSpace

Weights = Literal["auto", "ema", "model"]
# A resumed run may change these without changing what it computes.
ELASTIC = (
    "name",  # says what was changed, which the other fields say better
    "domain.root",  # the rows themselves are compared
    "train.log_every",
    "train.save_every",
    "train.keep",
    "train.max_file_mb",
    "train.cuda_graph",
    "train.accumulate",  # the number of parts of an update is compared
    "train.stop_when_dead",
    "eval.nfe",
    "eval.samples",
    "eval.batch",
    "eval.sampler.kind",
    "eval.sampler.nucleus",
)


@dataclass(frozen=True)
class Run:
    """An opened run: the experiment, its domain, and the method with trained weights in evaluation mode."""

    path: Path
    experiment: Experiment
    domain: Domain
    method: Method
    step: int
    result: FitResult | None = None

    @property
    def eval_file(self) -> Path | None:
        """Where `emoe eval` keeps the rows of this run; None if its folder is not to be written to."""
        return self.path / "eval.json"

    def sample(self, n: int, nfe: int, seed: int = 0, *, given: Int[Tensor, "n L"] | None = None) -> Int[Tensor, "n L"]:
        """Draw `n` rows with `nfe` network calls; tokens of `given` that are not the mask stay as they are."""
        device = next(self.method.parameters()).device
        return self.method.sample(n, nfe, Rng(derive_seed(seed, "sample"), device=device), given=given)

    def complete(
        self, given: Given, n: int, nfe: int, seed: int = 0, *, keep: Keep = None, ink: Ink = "auto"
    ) -> Completion:
        """Draw `n` completions of each given row or image, which may be files: see `emoe.completion.complete`."""
        return complete(self, given, n, nfe, seed, keep=keep, ink=ink)


class OpenedRun(Run):
    """A run whose data are read on first use, if ever: to sample it takes the weights and the experiment alone.

    Args:
        path: Its folder.
        experiment: What it was trained as.
        method: The method with trained weights in evaluation mode.
        step: Training steps behind the weights.
        domain: The domain, if the caller has built it already.
    """

    def __init__(self, path: Path, experiment: Experiment, method: Method, step: int, domain: Domain | None = None):
        fields = {"path": path, "experiment": experiment, "method": method, "step": step, "result": None}
        vars(self).update(fields)  # the base class is frozen
        if domain is not None:
            vars(self)["domain"] = domain

    @cached_property
    def domain(self) -> Domain:
        """The data, measures and pictures of the experiment.

        Raises:
            DataError: The data are not here; sampling does without them.
            ConfigError: They have other symbols or another length than the model.
        """
        domain = self.experiment.domain.build(self.experiment.seed)
        if domain.space != self.method.space:
            raise ConfigError([f"domain: the data have {domain.space}, but {self.called} has {self.method.space}"])
        return domain

    @property
    def called(self) -> str:
        """What messages call it."""
        return str(self.path)


def pick_device(name: str = "auto") -> torch.device:
    """`auto` is a GPU if there is one."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        name = "cuda" if gpus else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda", "mps"):
        raise ConfigError([f"device: {name!r} is not known; allowed: auto, cpu, cuda, cuda:N"])
    if device.type == "cuda" and (device.index or 0) >= gpus:
        here = ", ".join(["cpu", *(f"cuda:{i}" for i in range(gpus))])
        raise ConfigError([f"device: {name!r} was asked for, but torch sees {gpus or 'no'} GPU; allowed here: {here}"])
    return device


def train(
    recipe: str | Experiment,
    run_dir: str | Path,
    *,
    settings: Mapping[str, str] | None = None,
    resume: bool = False,
    device: str = "auto",
    quiet: bool = False,
    tensorboard: bool = False,
    stop: StopSignal | None = None,
    progress: Progress | None = None,
    domain: Domain | None = None,
) -> Run:
    """Train a recipe (with fields overridden by `settings`) into `run_dir`.

    `resume=True` continues from the newest checkpoint, or starts if there is none; the experiment must be the one
    the folder was started with. `stop` and `progress` are for callers that watch for signals, or
    show progress, over several runs. `domain` is the domain, if the caller has built it already.

    In a process that `torchrun` started, this is one of several that train the run together (see
    `emoe.engine.distributed`); all must call it with the same arguments and see the same folder.
    """
    path = Path(run_dir)
    experiment = get_recipe(recipe) if isinstance(recipe, str) else recipe
    experiment = customise(experiment, settings or {})
    where = _own_device(device)
    parts = _parts(experiment)
    with joined(where) as world:
        domain = domain or experiment.domain.build(experiment.seed)
        method = experiment.build_method(domain.space).to(where)
        data = domain.sha256
        told = json.dumps([to_dict(experiment), data, resume, torch.__version__])
        world.check_same(told, "they were started with other fields, data or versions; give all the same command")
        world.lead(lambda: _claim(path, experiment, resume, data, parts))
        result = fit(
            method,
            domain.batches(
                experiment.train.batch, experiment.seed, device=where, rank=world.rank, world=world.size
            ),
            method.ramps,
            optim=experiment.optim,
            train=experiment.train,
            rng=Rng(derive_seed(experiment.seed, "train"), device=where, rank=world.rank, world=world.size),
            run_dir=path,
            resume=resume,
            label=f"{experiment.name.partition(' ')[0]} seed {experiment.seed}",
            quiet=quiet,
            tensorboard=tensorboard,
            stop=stop,
            progress=progress,
            meta={
                "experiment": experiment.name, "rows": len(domain.rows), "data": data,
                "space": dataclasses.asdict(domain.space),
                **({"parts": parts} if parts > 1 else {}),
            },
            health=method.health,
            world=world,
        )  # fmt: skip
        opened = load_run(path, device=str(where), domain=domain)
    return Run(opened.path, opened.experiment, domain, opened.method, opened.step, result)


def _own_device(name: str) -> torch.device:
    """The device of this process: with several of them, each has the GPU of its number on this machine."""
    where, (_, size, local) = pick_device(name), launched()
    if size == 1:
        return where
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError(
            ["ranks: several processes train one run at a time, not several in threads; unset WORLD_SIZE"]
        )
    if where.type != "cuda":
        return where
    gpus = torch.cuda.device_count()
    if where.index is not None:
        raise ConfigError([f"device: each of {size} processes has a GPU of its own, so {name!r} cannot be; give cuda"])
    if local >= gpus:
        raise ConfigError([f"ranks: process {local} of this machine has no GPU, there are {gpus}; start fewer"])
    where = torch.device("cuda", local)
    torch.cuda.set_device(where)
    return where


def _parts(experiment: Experiment) -> int:
    """Equal parts that the rows of an update are cut into: of all processes, with `accumulate` each."""
    (_, size, _), train = launched(), experiment.train
    if train.batch % (size * train.accumulate):
        raise ConfigError(
            [
                f"train.batch: {train.batch} rows cannot be cut into {size} (processes) x {train.accumulate} "
                "(train.accumulate) equal parts; choose a multiple"
            ]
        )
    return size * train.accumulate


def _claim(path: Path, experiment: Experiment, resume: bool, data: str, parts: int) -> None:
    """`_check_claim` under the lock of the folder."""
    with RunLock(path):
        _check_claim(path, experiment, resume, data, parts)


def _check_claim(path: Path, experiment: Experiment, resume: bool, data: str, parts: int) -> None:
    """Write the experiment into a new folder, or check that a folder to resume holds the same one and its data."""
    saved = path / "experiment.json"
    used = any((path / "checkpoints").glob("step-*"))  # damaged ones count: nothing is overwritten unasked
    if used and not resume:
        raise ConfigError([f"run: {path} already holds a trained run; add --resume to continue it, or choose another"])
    if used and not saved.exists():
        raise ConfigError([f"run: {path} has checkpoints but no experiment.json; choose another folder"])
    if used:
        frozen = [line for line in differences(Experiment.load(saved), experiment) if line.split(":")[0] not in ELASTIC]
        if frozen:
            raise ConfigError(
                [f"resume: {path} was started with another experiment"]
                + [f"  {line}" for line in frozen]
                + ["  resume with the same fields, or train into a new folder"]
            )
        newest = checkpoint.latest(path / "checkpoints")
        meta = {} if newest is None else checkpoint.load(newest, groups=()).meta
        if meta.get("data", data) != data:
            raise ConfigError(
                [f"resume: the training rows are not those {path} was started with; train into a new folder"]
            )
        if newest is not None and meta.get("parts", 1) != parts:
            raise ConfigError(
                [
                    f"resume: the updates of {path} are cut into {meta.get('parts', 1)} parts (processes x "
                    f"train.accumulate), not {parts}, and each draws its own noise; keep the product"
                ]
            )
    experiment.save(saved)


def load_run(
    path: str | Path,
    *,
    device: str = "auto",
    weights: Weights = "auto",
    settings: Mapping[str, str] | None = None,
    domain: Domain | None = None,
) -> Run:
    """Open a run folder with its newest valid checkpoint, or a released model (see `emoe.pretrained`).

    No training data are needed until `.domain` is asked for.

    Args:
        path: The run folder; where there is none, the folder or the name of a released model.
        device: auto, cpu, cuda or cuda:N.
        weights: `ema` for the moving average, `model` for the raw weights; auto prefers the average.
        settings: Overrides that do not change the weights, such as `{"method.route-tau": "0"}`.
        domain: The domain, if the caller has built it already.
    """
    path, where = Path(path), pick_device(device)
    if not (path / "experiment.json").exists():
        from emoe import pretrained  # which builds on this module

        if pretrained.find(path) is not None:
            return pretrained.from_pretrained(path, device, settings=settings, weights=weights, domain=domain)
        problem = f"run: {path} is no run folder (no experiment.json); make one with: emoe train RECIPE"
        names = ", ".join(sorted(pretrained.released()))
        raise ConfigError([problem, *([f"run: nor is it a released model; there are: {names}"] if names else [])])
    experiment = customise(Experiment.load(path / "experiment.json"), settings or {})
    saved = checkpoint.load_latest(path / "checkpoints")
    if saved is None:
        raise ConfigError([f"run: {path} has no checkpoint yet; train it with: emoe train ... --resume"])
    if domain is None and "space" not in saved.meta:  # a run of an earlier version
        domain = experiment.domain.build(experiment.seed)
    method = experiment.build_method(TokenSpace(**saved.meta["space"]) if domain is None else domain.space)
    state = dict(saved.tensors["model"])
    if weights == "ema" and "ema" not in saved.tensors:
        raise ConfigError([f"weights: {path} was trained without a moving average; allowed: auto, model"])
    if weights != "model":
        state |= saved.tensors.get("ema", {})
    try:
        method.load_state_dict(state)
    except RuntimeError as error:
        faults = [line.strip() for line in str(error).splitlines()[1:]]
        raise ConfigError([f"run: the weights in {path} do not fit these fields or this data", *faults[:5]]) from None
    return OpenedRun(path, experiment, method.to(where).eval(), saved.step, domain)
