"""An experiment: all settings of a run as one frozen config."""

from __future__ import annotations

import copy
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
from emoe.overrides import as_text, differences, override
from emoe.rng import derive_seed
from emoe.types import TokenSpace

SCHEMA = 2
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
    words = []
    for name in sorted(settings):
        group = f"{name.replace('-', '_').removesuffix('.kind')}."
        if any(f"{path}.".startswith(group) for path in moved):
            words.append(f"{name.replace('_', '-')}={as_text(settings[name])}")
    if not words or "name" in settings:
        return changed
    return dataclasses.replace(changed, name=" ".join([experiment.name, *words]))


# Fields of schema 1 that are removed, with the value at which they have no effect.
DROPPED: dict[str, dict[str, Any]] = {
    "method": {
        "step_aware": False,
        "few_steps": {"kind": "constant", "value": 0.0},
        "redraw": "all",
        "kl_positions": "all",
        "mask_aware": False,
        "mean_below": 0.0,
    },
    "optim": {"scaled": None, "scale": 1.0},
    "domain": {"centres_seed": None, "variant": "threshold"},
}
ROUTER = ("std", "norm", "logit_norm", "cap", "bias")


def migrate(data: Mapping[str, Any], schema: object) -> dict[str, Any]:
    """The dictionary form of an experiment in the current schema.

    In schema 1 (version 0.1) E-MoE's options for comparing draws were fields of the method, the options of routers were
    fields of the backbone, and there were several experimental options, which are dropped where they have no effect.

    Raises:
        ConfigError: The schema is unknown, or the experiment uses a removed option.
    """
    if schema == SCHEMA:
        return dict(data)
    if schema != 1:
        raise ConfigError([f"schema {schema!r} is not known to this version (it reads 1 to {SCHEMA})"])
    tree = copy.deepcopy(dict(data))
    sections = {name: part for name, part in tree.items() if isinstance(part, dict)}  # `from_dict` refuses others
    for section, fields in DROPPED.items():
        _drop(sections.get(section, {}), fields, section)
    method, backbone, train = (sections.get(name, {}) for name in ("method", "backbone", "train"))
    if method.get("kind") == "emoe":
        _emoe(method)
    router = {name: backbone.pop(f"router_{name}") for name in ROUTER if f"router_{name}" in backbone}
    if router:
        backbone["router"] = {"bias": backbone.get("kind") != "dit"} | router
    sampler = sections.get("eval", {}).get("sampler")
    if isinstance(sampler, dict) and sampler.get("kind") == "cached":  # the same law, with less work
        sampler["kind"] = "plain"
    if "stop_when_dead" in train:
        train["stop_on_collapse"] = train.pop("stop_when_dead")
    return tree


def _emoe(method: dict[str, Any]) -> None:
    """E-MoE's options of schema 1, in place."""
    compare = {name: method.pop(name, default) for name, default in (("estimator", "pathwise"), ("credit", "row"))}
    if "elbo_power" in method:
        method["kl_time_power"] = method.pop("elbo_power")
    if method.pop("balance_form", "switch") == "switch":
        method.pop("usage_floor", None)
    if compare["estimator"] == "pathwise":
        _drop(method, {"gradient": "top-k", "draws": 1, "carriers": "all", "last_block": "drawn"}, "method")
        return
    _drop(method, {"gradient": "none"}, "method")
    in_turn, sum_last = method.pop("carriers", "") == "spread", method.pop("last_block", "") == "summed"
    method["compare"] = compare | {"draws": method.pop("draws", 1), "in_turn": in_turn, "sum_last": sum_last}


def _drop(part: dict[str, Any], fields: Mapping[str, Any], section: str) -> None:
    """Remove fields that no longer exist, if they have the values at which they have no effect."""
    values = {name: part.pop(name, neutral) for name, neutral in fields.items()}
    if problems := [name for name, neutral in fields.items() if values[name] != neutral]:
        gone = "the option is gone, and this run has"
        raise ConfigError([f"{section}.{name}: {gone} {values[name]!r}; open it with version 0.1" for name in problems])
