"""Small sizes of recipes, training on a CPU without output, and single steps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from emoe.domains.base import Domain
from emoe.engine.stepper import Stepper
from emoe.experiment import Experiment
from emoe.methods.base import Method
from emoe.rng import Rng
from emoe.runs.run import Run
from emoe.runs.train import train

Settings = dict[str, object]


def network(**sizes: object) -> Settings:
    """Settings of a backbone."""
    return {f"backbone.{name}": size for name, size in sizes.items()}


TRANSFORMER = network(width=8, hidden=16, heads=2, time_size=8) | {"train.batch": 8}
TOY = TRANSFORMER | {"domain.points": 300, "train.log_every": 1}
UNET: Settings = {"domain": "digits", "backbone": "unet", "train.batch": 8}
UNET |= network(channels=8, hidden=8, time_size=8, time_hidden=8, groups=2)


def trained(recipe: str | Experiment, folder: Path, settings: Mapping[str, object], **options: Any) -> Run:
    """`train` without a progress bar."""
    return train(recipe, folder, settings=settings, device="cpu", callbacks=[], **options)


def stepper_of(experiment: Experiment, domain: Domain, method: Method, rng: Rng) -> Stepper:
    """The training steps of an experiment."""
    batches = domain.batches(experiment.train.batch, experiment.seed, device=rng.device)
    return Stepper(method, batches, method.ramps, optim=experiment.optim, train=experiment.train, rng=rng)
