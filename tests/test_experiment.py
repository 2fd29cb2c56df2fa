"""Experiments: what a changed one is called, which fields are neutral, and experiments of the first schema."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from small import trained

from emoe.config import ConfigError
from emoe.experiment import SCHEMA, Experiment, customise, migrate
from emoe.methods.emoe import EMoEConfig
from emoe.overrides import differences
from emoe.ramps import Constant
from emoe.recipes import get_recipe
from emoe.routing.compare import CompareConfig
from emoe.runs.train import load_run

GOLDEN = Path(__file__).parent / "golden"
SCHEMA_1: dict[str, Any] = json.loads((GOLDEN / "recipes.json").read_text())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"train.steps": "50", "method.top_k": "1", "optim.lr": "3e-4"}, "method.top-k=1 train.steps=50"),
        ({"optim.clip": None, "train.deterministic": True}, "optim.clip=none train.deterministic=true"),
        ({"method.relax_tau": Constant(value=0.5)}, "method.relax-tau={'kind': 'constant', 'value': 0.5}"),
        ({"method.latent": "3", "method": "vadd"}, "method=vadd method.latent=3"),
        ({"seed": 3, "eval.nfe": [1], "train.keep": 5, "train.log_every": 7, "train.accumulate": 2}, ""),
        ({"method.top-k": 2}, ""),  # its own value
    ],
)
def test_a_changed_recipe_is_named_after_the_changes(settings: dict[str, object], words: str) -> None:
    assert customise(get_recipe("toy-8modes-emoe"), settings).name == f"toy-8modes-emoe {words}".strip()


def test_a_name_of_ones_own_stays_and_data_may_lie_anywhere() -> None:
    assert customise(get_recipe("toy-8modes-emoe"), {"train.steps": 50, "name": "own"}).name == "own"
    for recipe, settings in {
        "rows-emoe": {"domain.path": "elsewhere.npz", "domain.key": "rows"},
        "mnist-emoe": {"domain.root": "elsewhere"},
        "lm1b-emoe": {"domain.path": "elsewhere"},
    }.items():
        moved = customise(get_recipe(recipe), settings)
        assert moved != get_recipe(recipe) and moved.name == recipe and not differences(get_recipe(recipe), moved)


def test_experiments_are_stored_in_the_schema_of_today(tmp_path: Path) -> None:
    experiment = get_recipe("toy-8modes-emoe-vimco")
    experiment.save(tmp_path / "x.json")
    assert json.loads((tmp_path / "x.json").read_text())["schema"] == SCHEMA
    assert Experiment.load(tmp_path / "x.json") == experiment
    for text, message in {
        "{": "not readable as JSON",
        "[1]": "does not hold an experiment",
        "{}": "schema None is not known to this version .it reads 1 to 2.",
        '{"schema": 3}': "schema 3 is not known",
        '{"schema": 1, "method": [], "eval": {"sampler": 3}}': "x.json: method: expected the fields of MethodConfig",
        '{"schema": 2, "method": {"kind": "emoe", "gradient": "top-k"}}': "method.gradient: unknown field",
    }.items():
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(ConfigError, match=message):
            Experiment.load(tmp_path / "x.json")


def first_schema(recipe: str, **changes: Any) -> Experiment:
    """A recipe of version 0.1 with fields changed; in their names `__` is a dot."""
    tree = copy.deepcopy(SCHEMA_1[recipe])
    for name, value in changes.items():
        section, _, field = name.partition("__")
        tree[section][field] = value
    return Experiment.from_tree(tree, 1)


def test_options_of_the_first_schema_have_new_homes() -> None:
    vimco = first_schema("toy-8modes-emoe-plus")
    assert isinstance(vimco.method, EMoEConfig) and vimco.method.kl_time_power == Constant(value=1.0)
    assert vimco.method.compare == CompareConfig(estimator="vimco", draws=8, in_turn=True, sum_last=True)
    assert vimco.method_name == "emoe-vimco"
    floor = first_schema("mnist-emoe-plus").method
    assert isinstance(floor, EMoEConfig) and floor.usage_floor == 1.0 and floor.compare is None
    assert first_schema("mnist-emoe").method.usage_floor is None  # type: ignore[attr-defined]
    routers = first_schema("toy-8modes-emoe", backbone__router_cap=3.0, backbone__router_norm=True).backbone.router  # type: ignore[attr-defined]
    assert (routers.cap, routers.norm, routers.bias) == (3.0, True, True)
    assert first_schema("lm1b-mdlm", eval__sampler={"kind": "cached", "nucleus": 0.9}).eval.sampler.kind == "plain"
    assert first_schema("toy-8modes-mdlm", train__stop_when_dead=True).train.stop_on_collapse
    before = copy.deepcopy(SCHEMA_1)
    assert migrate(before["digits-emoe"], 1) != before["digits-emoe"] and before == SCHEMA_1


@pytest.mark.parametrize(
    ("recipe", "field", "value"),
    [
        ("toy-8modes-emoe", "method.gradient", "straight-through"),
        ("toy-8modes-emoe", "method.draws", 4),
        ("toy-8modes-emoe-plus", "method.redraw", "block"),
        ("lm1b-emoe-aware", "method.step_aware", True),
        ("toy-8modes-mdlm", "optim.scaled", "router"),
    ],
)
def test_options_that_are_gone_are_named_where_they_had_an_effect(recipe: str, field: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        first_schema(recipe, **{field.replace(".", "__"): value})
    line = f"{field}: the option is gone, and this run has {value!r}; open it with version 0.1"
    assert line in caught.value.problems


def test_a_run_of_the_first_schema_goes_on_with_the_same_weights(tmp_path: Path) -> None:
    """Compared by predictions: Adam turns the rounding noise of a gradient that is 0, a key's bias, into steps."""
    stored, run = GOLDEN / "schema1" / "toy-8modes-emoe", tmp_path / "run"
    shutil.copytree(stored, run)
    shutil.rmtree(run / "checkpoints" / "step-000000004")
    experiment = Experiment.load(run / "experiment.json")
    assert trained(experiment, run, {}, resume=True).step == 4
    first, now = (load_run(folder, device="cpu") for folder in (stored, run))
    rows = torch.tensor([[first.method.space.mask_id] * 2, [3, first.method.space.mask_id]])
    predictions = [opened.log_probs(rows, routes="greedy") for opened in (first, now)]
    assert torch.allclose(*predictions, atol=1e-4)
    assert json.loads((run / "experiment.json").read_text())["schema"] == SCHEMA
    assert differences(load_run(run, device="cpu").experiment, experiment) == {}
