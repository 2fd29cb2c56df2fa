"""An experiment: everything that decides a run, as one frozen config that JSON can hold."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from emoe.backbones.base import BackboneConfig
from emoe.config import Config, ConfigError, from_dict, option, override, to_dict
from emoe.domains.base import DomainConfig
from emoe.engine.optim import OptimConfig
from emoe.engine.trainer import TrainConfig
from emoe.files import replace_file
from emoe.methods.base import Method, MethodConfig, SamplerConfig
from emoe.rng import derive_seed
from emoe.types import TokenSpace

SCHEMA = 2
# Layers initialise from torch's global generator; threads that build models at once must take turns.
_GLOBAL_RANDOMNESS = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class EvalConfig(Config):
    """What `emoe eval` draws and measures."""

    nfe: tuple[int, ...] = option((1, 2, 4, 8, 16, 32), doc="numbers of function evaluations", low=1)
    samples: int = option(20_000, doc="rows drawn for each NFE", low=2)
    batch: int = option(5_000, doc="rows drawn at a time", low=1)
    sampler: SamplerConfig = option(SamplerConfig(), doc="how masked diffusion methods draw")

    def conflicts(self) -> Iterator[str]:
        """There must be something to measure."""
        if not self.nfe:
            yield "nfe: must hold at least one number, such as 1,2,4"


@dataclass(frozen=True, kw_only=True)
class Experiment(Config):
    """A whole run: data, network, method, optimisation, evaluation, seed."""

    name: str = option(doc="name of the recipe it came from")
    seed: int = option(0, doc="seed of data, initialisation, training and sampling", low=0)
    domain: DomainConfig = option(doc="the data")
    backbone: BackboneConfig = option(doc="the network")
    method: MethodConfig = option(doc="the method")
    optim: OptimConfig = option(OptimConfig(), doc="the optimiser")
    train: TrainConfig = option(TrainConfig(), doc="the training run")
    eval: EvalConfig = option(EvalConfig(), doc="the evaluation")

    def conflicts(self) -> Iterator[str]:
        """The backbone must have what the method wants."""
        for line in self.backbone.refusals(self.method.wants()):
            yield f"{line} (method: {self.method.kind!r})"

    def build_method(self, space: TokenSpace) -> Method:
        """The method with freshly initialised networks; the same for the same seed, whatever was drawn before."""
        with _GLOBAL_RANDOMNESS, torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(self.seed, "init"))
            return self.method.build(space, self.backbone)

    def save(self, path: Path) -> None:
        """Write as JSON, whole or not at all."""
        replace_file(path, (json.dumps({"schema": SCHEMA, **to_dict(self)}, indent=1) + "\n").encode())

    @classmethod
    def load(cls, path: Path) -> Experiment:
        """Read what `save` wrote; strict."""
        try:
            data = json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            raise ConfigError([f"{path}: not readable as JSON ({error})"]) from None
        if not isinstance(data, dict):
            raise ConfigError([f"{path}: does not hold an experiment"])
        schema = data.pop("schema", None)
        if schema not in (1, SCHEMA):
            raise ConfigError([f"{path}: schema {schema!r} is not known to this version (it reads 1 to {SCHEMA})"])
        try:
            return from_dict(cls, migrate(data) if schema == 1 else data)
        except ConfigError as error:
            raise ConfigError([f"{path}: {line}" for line in error.problems]) from None


# Fields of schema 1 that are gone, with the value at which nothing is lost.
DROPPED: dict[str, dict[str, Any]] = {
    "optim": {"scaled": None, "scale": 1.0},
    "domain": {"centres_seed": None, "variant": "threshold"},
}
LAST_SCHEMA_1 = "0.1.0"


def migrate(data: Mapping[str, Any]) -> dict[str, Any]:
    """An experiment of schema 1 in the form of today.

    Raises:
        ConfigError: It uses an option that is gone.
    """
    tree = {name: dict(part) if isinstance(part, Mapping) else part for name, part in data.items()}
    problems = []
    for section, fields in DROPPED.items():
        for name, neutral in fields.items():
            value = tree.get(section, {}).pop(name, neutral)
            if value != neutral:
                problems.append(f"{section}.{name}: the option is gone, and the run has {value!r}; use {LAST_SCHEMA_1}")
    if problems:
        raise ConfigError(problems)
    return tree


# Fields that do not change what is trained, or of which results have a column of their own.
NEUTRAL = (
    "name",
    "seed",
    "domain.path",
    "domain.key",
    "domain.root",
    "eval.nfe",
    "eval.samples",
    "eval.batch",
    "train.log-",
    "train.save-",
    "train.keep",
    "train.max-file-",
    "train.cuda-",
)


def customise(experiment: Experiment, settings: Mapping[str, str]) -> Experiment:
    """A copy with fields set from text (see `override`); its name says what was changed.

    `toy-8modes-emoe` with 50 steps becomes `toy-8modes-emoe train.steps=50`, so that the results of a changed recipe
    never pass for the recipe's own, nor replace them.
    """
    changed = override(experiment, settings)
    moved = [line.partition(":")[0] for line in differences(experiment, changed)]
    told = [
        f"{name.replace('_', '-')}={text}"
        for name, text in sorted(settings.items())
        if not name.replace("_", "-").startswith(NEUTRAL)
        and any(f"{field}.".startswith(f"{name.replace('-', '_')}.") for field in moved)
    ]
    if not told or "name" in settings:
        return changed
    return dataclasses.replace(changed, name=" ".join([experiment.name, *told]))


def differences(old: Config, new: Config) -> list[str]:
    """Fields in which two experiments differ, as `field: old -> new`."""

    def flat(tree: Any, path: str = "") -> dict[str, Any]:
        if not isinstance(tree, dict):
            return {path: tree}
        return {k: v for name, sub in tree.items() for k, v in flat(sub, f"{path}.{name}" if path else name).items()}

    a, b = flat(to_dict(old)), flat(to_dict(new))
    return [
        f"{key}: {a.get(key)!r} -> {b.get(key)!r}" for key in sorted(a.keys() | b.keys()) if a.get(key) != b.get(key)
    ]
