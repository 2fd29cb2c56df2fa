"""Runs on disk: train an experiment into a folder, open a folder as a trained model.

A run folder holds `experiment.json`, `metrics.jsonl` and `checkpoints/`; the experiment alone rebuilds the model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from emoe.config import ConfigError, override
from emoe.domains.base import Domain
from emoe.engine import checkpoint
from emoe.engine.signals import StopSignal
from emoe.engine.trainer import FitResult, fit
from emoe.experiment import Experiment, differences
from emoe.methods.base import Method
from emoe.recipes import get_recipe
from emoe.rng import Rng, derive_seed

Weights = Literal["auto", "ema", "model"]
# A resumed run may change these without changing what it computes.
ELASTIC = ("train.log_every", "train.save_every", "train.keep", "train.cuda_graph")


@dataclass(frozen=True)
class Run:
    """An opened run: the experiment, its domain, and the method with trained weights in evaluation mode."""

    path: Path
    experiment: Experiment
    domain: Domain
    method: Method
    step: int
    result: FitResult | None = None

    def sample(self, n: int, nfe: int, seed: int = 0) -> torch.Tensor:
        """Draw `n` rows with `nfe` network calls."""
        device = next(self.method.parameters()).device
        return self.method.sample(n, nfe, Rng(derive_seed(seed, "sample"), device=device))


def pick_device(name: str = "auto") -> torch.device:
    """`auto` is a GPU if there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError([f"device: {name!r} was asked for, but torch sees no GPU; allowed here: cpu"])
    try:
        return torch.device(name)
    except RuntimeError:
        raise ConfigError([f"device: {name!r} is not known; allowed: auto, cpu, cuda, cuda:N"]) from None


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
) -> Run:
    """Train a recipe (with fields overridden by `settings`) into `run_dir`.

    `resume=True` continues from the newest checkpoint, or starts if there is none; the experiment must be the one
    the folder was started with. `stop` is for callers that watch for signals themselves.
    """
    path = Path(run_dir)
    experiment = get_recipe(recipe) if isinstance(recipe, str) else recipe
    experiment = override(experiment, settings or {})
    where = pick_device(device)
    domain = experiment.domain.build(experiment.seed)
    method = experiment.build_method(domain.space).to(where)
    _claim(path, experiment, resume)
    result = fit(
        method,
        domain.batches(experiment.train.batch, experiment.seed, device=where),
        method.ramps,
        optim=experiment.optim,
        train=experiment.train,
        rng=Rng(derive_seed(experiment.seed, "train"), device=where),
        run_dir=path,
        resume=resume,
        label=f"{experiment.name} seed {experiment.seed}",
        quiet=quiet,
        tensorboard=tensorboard,
        stop=stop,
        meta={"experiment": experiment.name, "rows": len(domain.rows)},
    )
    opened = load_run(path, device=str(where), domain=domain)
    return dataclasses.replace(opened, result=result)


def _claim(path: Path, experiment: Experiment, resume: bool) -> None:
    """Write the experiment into a new folder, or check that a folder to resume holds the same one."""
    saved = path / "experiment.json"
    has_checkpoint = checkpoint.latest(path / "checkpoints") is not None
    if has_checkpoint and not resume:
        raise ConfigError([f"run: {path} already holds a trained run; add --resume to continue it, or choose another"])
    if has_checkpoint and saved.exists():
        frozen = [line for line in differences(Experiment.load(saved), experiment) if line.split(":")[0] not in ELASTIC]
        if frozen:
            raise ConfigError(
                [f"resume: {path} was started with another experiment"]
                + [f"  {line}" for line in frozen]
                + ["  resume with the same fields, or train into a new folder"]
            )
    path.mkdir(parents=True, exist_ok=True)
    experiment.save(saved)


def load_run(
    path: str | Path,
    *,
    device: str = "auto",
    weights: Weights = "auto",
    settings: Mapping[str, str] | None = None,
    domain: Domain | None = None,
) -> Run:
    """Open a run folder with its newest valid checkpoint.

    Args:
        path: The run folder.
        device: auto, cpu, cuda or cuda:N.
        weights: `ema` for the moving average, `model` for the raw weights; auto prefers the average.
        settings: Overrides that do not change the weights, such as `{"method.route-tau": "0"}`.
        domain: The domain, if the caller has built it already.
    """
    path = Path(path)
    if not (path / "experiment.json").exists():
        raise ConfigError([f"run: {path} is no run folder (no experiment.json); make one with: emoe train RECIPE"])
    experiment = override(Experiment.load(path / "experiment.json"), settings or {})
    saved = checkpoint.load_latest(path / "checkpoints")
    if saved is None:
        raise ConfigError([f"run: {path} has no checkpoint yet; train it with: emoe train ... --resume"])
    domain = domain or experiment.domain.build(experiment.seed)
    method = experiment.build_method(domain.space)
    state = dict(saved.tensors["model"])
    if weights == "ema" and "ema" not in saved.tensors:
        raise ConfigError([f"weights: {path} was trained without a moving average; allowed: auto, model"])
    if weights != "model":
        state |= saved.tensors.get("ema", {})
    try:
        method.load_state_dict(state)
    except RuntimeError as error:
        raise ConfigError([f"run: the weights in {path} do not fit its experiment: {error}"]) from None
    return Run(path, experiment, domain, method.to(pick_device(device)).eval(), saved.step)
