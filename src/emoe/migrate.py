"""Experiments of earlier schemas in the form of today.

Schema 1 (version 0.1): E-MoE's options for comparing draws lay beside the others, routers had options of their own in
each backbone, and several experimental options existed. Those that are gone are dropped where they have no effect.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from emoe.config import ConfigError

SCHEMA = 2
CONSTANT_0 = {"kind": "constant", "value": 0.0}
# Fields that are gone, with the value at which they have no effect.
DROPPED: dict[str, dict[str, Any]] = {
    "method": {
        "step_aware": False,
        "few_steps": CONSTANT_0,
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
    """The dictionary form of an experiment in the schema of today.

    Raises:
        ConfigError: The schema is not known, or the experiment uses an option that is gone.
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
    names = ("estimator", "draws", "credit", "carriers", "last_block", "gradient")
    old = {name: method.pop(name) for name in names if name in method}
    if "elbo_power" in method:
        method["kl_time_power"] = method.pop("elbo_power")
    if method.pop("balance_form", "switch") == "switch":
        method.pop("usage_floor", None)
    if old.get("estimator", "pathwise") == "pathwise":
        _drop(old, {"gradient": "top-k", "draws": 1, "carriers": "all", "last_block": "drawn"}, "method")
        return
    _drop(old, {"gradient": "none"}, "method")
    method["compare"] = {
        "estimator": old["estimator"],
        "draws": old.get("draws", 1),
        "credit": old.get("credit", "row"),
        "in_turn": old.get("carriers") == "spread",
        "sum_last": old.get("last_block") == "summed",
    }


def _drop(part: dict[str, Any], fields: Mapping[str, Any], section: str) -> None:
    """Remove options that are gone, if they have the values at which they have no effect."""
    values = {name: part.pop(name, neutral) for name, neutral in fields.items()}
    if problems := [name for name, neutral in fields.items() if values[name] != neutral]:
        gone = "the option is gone, and this run has"
        raise ConfigError([f"{section}.{name}: {gone} {values[name]!r}; open it with version 0.1" for name in problems])
