"""Conversion of experiments of earlier schemas.

In schema 1 (version 0.1) E-MoE's options for comparing draws were fields of the method, the options of routers were
fields of the backbone, and there were several experimental options, which are dropped where they have no effect.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from emoe.config import ConfigError

SCHEMA = 2
CONSTANT_0 = {"kind": "constant", "value": 0.0}
# Removed fields, with the value at which they have no effect.
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
    """The dictionary form of an experiment in the current schema.

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
