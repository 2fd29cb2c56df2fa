"""An experiment: all settings of a run as one frozen config."""

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
from emoe.config import Config, ConfigError, from_dict, option, prefixed, to_dict
from emoe.domains.base import DomainConfig
from emoe.engine.fit import TrainConfig
from emoe.engine.optim import OptimConfig
from emoe.files import replace_file
from emoe.methods.base import Method, MethodConfig, SamplerConfig
from emoe.migrate import SCHEMA, migrate
from emoe.overrides import as_text, differences, override
from emoe.rng import derive_seed
from emoe.types import TokenSpace

# Layers are initialised from torch's global generator, so only one thread at a time may build a model.
_GLOBAL_RANDOMNESS = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class EvalConfig(Config):
    """Samples that `emoe eval` draws."""

    nfe: tuple[int, ...] = option((1, 2, 4, 8, 16, 32), doc="numbers of function evaluations", low=1, neutral=True)
    samples: int = option(20_000, doc="rows drawn for each NFE", low=2, neutral=True)
    batch: int = option(5_000, doc="rows drawn at a time", low=1, neutral=True)
    sampler: SamplerConfig = option(SamplerConfig(), doc="how masked diffusion methods draw")

    def conflicts(self) -> Iterator[str]:
        if not self.nfe:
            yield "nfe: must hold at least one number, such as 1,2,4"


@dataclass(frozen=True, kw_only=True)
class Experiment(Config):
    """Data, network, method, optimisation, evaluation and seed of a run."""

    name: str = option(doc="name of the recipe it came from", neutral=True)
    seed: int = option(0, doc="seed of data, initialisation, training and sampling", low=0)
    domain: DomainConfig = option(doc="the data")
    backbone: BackboneConfig = option(doc="the network")
    method: MethodConfig = option(doc="the method")
    optim: OptimConfig = option(OptimConfig(), doc="the optimiser")
    train: TrainConfig = option(TrainConfig(), doc="the training run")
    eval: EvalConfig = option(EvalConfig(), doc="the evaluation")

    def conflicts(self) -> Iterator[str]:
        for line in self.backbone.unsupported(self.method.needs()):
            yield f"{line} (method: {self.method.kind!r})"

    @property
    def method_name(self) -> str:
        """Name of the method in results: kind and variant, such as `emoe-vimco`."""
        return self.method.kind + self.method.variant()[0]

    def build_method(self, space: TokenSpace) -> Method:
        """The method with initial weights, which depend on the seed alone."""
        with _GLOBAL_RANDOMNESS, torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(self.seed, "init"))
            return self.method.build(space, self.backbone)

    def save(self, path: Path) -> None:
        """Write as JSON, whole or not at all."""
        replace_file(path, json.dumps({"schema": SCHEMA, **to_dict(self)}, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Experiment:
        """Read what `save` wrote; strict."""
        try:
            data = json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            raise ConfigError([f"{path}: not readable as JSON ({error})"]) from None
        with prefixed(f"{path}: "):
            if not isinstance(data, dict):
                raise ConfigError(["does not hold an experiment"])
            return cls.from_tree(data, data.pop("schema", None))

    @classmethod
    def from_tree(cls, data: Mapping[str, Any], schema: object) -> Experiment:
        """An experiment from its dictionary form in the current or an earlier schema."""
        return from_dict(cls, migrate(data, schema))


def customise(experiment: Experiment, settings: Mapping[str, object]) -> Experiment:
    """A copy with fields set (see `override`), which are added to the name.

    `toy-8modes-emoe` with 50 steps becomes `toy-8modes-emoe train.steps=50`, so that the results of a changed recipe
    never replace those of the recipe. Neutral fields and the seed are not added.
    """
    changed = override(experiment, settings)
    moved = differences(experiment, changed).keys() - {"seed"}
    groups = {name: f"{name.replace('-', '_').removesuffix('.kind')}." for name in sorted(settings)}
    words = [
        f"{name.replace('_', '-')}={as_text(settings[name])}"
        for name, group in groups.items()
        if any(f"{path}.".startswith(group) for path in moved)
    ]
    if not words or "name" in settings:
        return changed
    return dataclasses.replace(changed, name=" ".join([experiment.name, *words]))
