"""Recipes: each one has a name and a description, builds, takes steps and samples; names are given once."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from small import TRANSFORMER, network, stepper_of

import emoe.recipes
from emoe.config import ConfigError
from emoe.experiment import Experiment
from emoe.overrides import override
from emoe.recipes import EARLIER, all_recipes, get_recipe, recipe, register
from emoe.rng import Rng
from emoe.runs.sampling import draw

RECIPES = all_recipes()
NETWORKS: dict[str, dict[str, object]] = {
    "transformer": TRANSFORMER,
    "unet": network(channels=8, hidden=16, time_size=8, time_hidden=16),
    "dit": TRANSFORMER | network(depth=2, cond_size=8, latent_hidden=8),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    """Settings of small data by kind of domain; the mask of the text is not its last symbol."""
    folder = tmp_path_factory.mktemp("data")
    np.save(folder / "rows.npy", np.arange(60).reshape(12, 5) % 4)
    rows = np.arange(96).reshape(12, 8) % 7
    splits = {name: {"rows": 12, "sha256": ""} for name in ("train", "test")}
    for name in splits:
        np.where(rows == 4, 7, rows).astype("<u2").tofile(folder / f"{name}.bin")
    manifest = {"schema": 1, "size": 9, "length": 8, "special": {"mask": 4}, "splits": splits}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return {
        "rows": {"domain.path": str(folder / "rows.npy")},
        "text": {"domain.path": str(folder), "domain.verify": False},
        "mnist": {"domain": "digits"},  # its files need not be here
        "toy": {"domain.points": 50},
        "ties": {"domain.points": 50},
    }


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_takes_steps_and_samples(name: str, data: dict[str, dict[str, object]]) -> None:
    assert RECIPES[name].doc.endswith(".") and RECIPES[name].build() == get_recipe(name)
    experiment = get_recipe(name)
    assert experiment.name == name
    settings = NETWORKS[experiment.backbone.kind] | data.get(experiment.domain.kind, {}) | {"train.batch": 6}
    if experiment.method.kind == "bd3lm":
        settings |= {"method.block": 4}
    experiment = override(experiment, settings | {"optim.warmup": 0, "train.steps": 4, "train.precision": "fp32"})
    domain = experiment.domain.build(experiment.seed)
    method = experiment.build_method(domain.space)
    before = [parameter.detach().clone() for parameter in method.parameters()]
    stepper = stepper_of(experiment, domain, method, Rng(1))
    for step in range(4 if experiment.backbone.kind == "dit" else 1):  # whose head and gates start at zero
        stepper(step)
    assert stepper.loss is not None and math.isfinite(stepper.loss.total.item()) and stepper.optimizer.skipped == 0
    moved = [not torch.equal(old, new) for old, new in zip(before, method.parameters(), strict=True)]
    assert sum(moved) > len(moved) // 2
    space = domain.space
    (nfe, *_) = experiment.method.allowed_nfe((2, 4, space.length), space.length)
    samples = draw(method, 7, nfe).samples
    assert samples.shape == (7, space.length) and samples.max() < space.size and (samples != space.mask_id).all()


def test_earlier_names_still_work() -> None:
    for old, name in EARLIER.items():
        assert get_recipe(old) == get_recipe(name) and old not in RECIPES


@pytest.fixture
def own_recipes() -> Iterator[None]:
    """Recipes as they were before the test, whatever it registers."""
    before = dict(emoe.recipes._RECIPES)
    yield
    emoe.recipes._RECIPES.clear()
    emoe.recipes._RECIPES.update(before)


def test_a_name_is_given_once_and_a_definition_may_be_repeated(own_recipes: None) -> None:
    def define(seed: int) -> Callable[[], Experiment]:
        @recipe
        def my_emoe() -> Experiment:
            """Mine, in one line."""
            return override(get_recipe("toy-8modes-emoe"), {"name": "my-emoe", "seed": seed})

        return my_emoe

    define(1)
    assert define(2)() == get_recipe("my-emoe") and get_recipe("my-emoe").seed == 2  # a cell of a notebook, run again
    assert all_recipes()["my-emoe"].doc == "Mine, in one line."
    for name, home in {"my-emoe": f"{__name__}.test_a_name_is", "toy-8modes-emoe": "emoe.recipes.toy"}.items():
        experiment = override(get_recipe("toy-8modes-emoe"), {"name": name})
        with pytest.raises(ConfigError, match=f"recipe: '{name}' is in both {home}.* and another.module; choose"):
            register("another.module", "The same name.", experiment)
    with pytest.raises(ConfigError, match="recipe: 'toy-8mode-emoe' is not known; did you mean 'toy-8modes-emoe'"):
        get_recipe("toy-8mode-emoe")
