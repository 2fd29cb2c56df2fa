"""Recipes: each one builds and trains, and a new method takes one new file and one recipe."""

from __future__ import annotations

import importlib
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import emoe.methods
import emoe.recipes
from emoe.cli import main
from emoe.config import from_dict, override, to_dict
from emoe.engine.stepper import Stepper
from emoe.experiment import Experiment
from emoe.methods.base import MethodConfig
from emoe.recipes import all_recipes, get_recipe
from emoe.rng import Rng
from emoe.runs import load_run, train

RECIPES = all_recipes()
TRANSFORMER = {
    "backbone.width": "8",
    "backbone.hidden": "16",
    "backbone.heads": "2",
    "backbone.time-size": "8",
}
UNET = {
    "backbone.channels": "8",
    "backbone.hidden": "16",
    "backbone.time-size": "8",
    "backbone.time-hidden": "16",
    "optim.warmup": "0",  # the first of many steps would be lost in rounding
}
DIT = {
    **TRANSFORMER,
    "backbone.depth": "2",
    "backbone.cond-size": "8",
    "backbone.latent-hidden": "8",
    "optim.warmup": "0",
}
SHORT = {
    "train.batch": "6",
    "train.steps": "4",
    "train.log-every": "2",
    "eval.nfe": "1,3",
    "eval.samples": "40",
}
SHRUNK = TRANSFORMER | SHORT


@pytest.fixture(scope="module")
def rows_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "rows.npy"
    np.save(path, np.arange(60).reshape(12, 5) % 4)
    return path


@pytest.fixture(scope="module")
def text_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set of rows of 8 tokens, as `emoe data prepare` would write it; the mask is not the last symbol."""
    folder = tmp_path_factory.mktemp("data") / "set"
    folder.mkdir()
    rows = np.arange(96).reshape(12, 8) % 7
    splits = {name: {"rows": 12, "sha256": ""} for name in ("train", "test")}
    for name in splits:
        np.where(rows == 4, 7, rows).astype("<u2").tofile(folder / f"{name}.bin")
    manifest = {"schema": 1, "size": 9, "length": 8, "special": {"mask": 4}, "splits": splits}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def is_text(name: str) -> bool:
    return RECIPES[name]().domain.kind == "text"


def data_of(name: str, rows_file: Path, text_set: Path | None = None) -> dict[str, str]:
    if is_text(name):
        blocks = {"method.block": "4"} if name.endswith("-bd3lm") else {}
        return {"domain.path": str(text_set), "domain.verify": "no", **blocks}
    if name.startswith("mnist-"):  # whose files need not be here
        return {"domain": "digits"}
    if name.startswith("digits-"):
        return {}
    return {"domain.path": str(rows_file)} if name.startswith("rows-") else {"domain.points": "50"}


def shrunk(name: str, rows_file: Path, text_set: Path | None = None) -> Experiment:
    """A recipe with a tiny network and few steps."""
    recipe = get_recipe(name)
    network = {"unet": UNET, "dit": DIT}.get(str(recipe.backbone.kind), TRANSFORMER)
    return override(recipe, SHORT | network | data_of(name, rows_file, text_set))


def test_the_tables_of_the_paper_have_their_recipes() -> None:
    for method in ("mdlm", "vadd", "emoe"):
        for task in ("toy-8modes", "toy-swissroll", "demo", "rows"):
            assert RECIPES[f"{task}-{method}"]().method.kind == method


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_named_after_its_function_and_explained(name: str) -> None:
    build = RECIPES[name]
    experiment = build()
    assert experiment.name == name == build.__name__.replace("_", "-")
    assert build.__doc__ and build.__doc__.strip().endswith(".")
    assert build() == experiment == from_dict(Experiment, json.loads(json.dumps(to_dict(experiment))))


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_takes_a_step(name: str, rows_file: Path, text_set: Path) -> None:
    experiment = shrunk(name, rows_file, text_set)
    domain = experiment.domain.build(experiment.seed)
    method = experiment.build_method(domain.space)
    before = [parameter.detach().clone() for parameter in method.parameters()]
    stepper = Stepper(
        method, domain.batches(experiment.train.batch, experiment.seed), method.ramps, experiment.optim,
        total=experiment.train.steps, rng=Rng(1), ema=experiment.train.ema, precision="fp32", graph=False,
    )  # fmt: skip
    for step in range(4 if experiment.backbone.kind == "dit" else 1):  # whose head and gates start at zero
        stepper(step)
    assert stepper.loss is not None and math.isfinite(stepper.loss.total.item()) and stepper.optimizer.skipped == 0
    moved = [not torch.equal(old, new) for old, new in zip(before, method.parameters(), strict=True)]
    assert sum(moved) > len(moved) // 2
    space = domain.space
    samples = method.eval().sample(7, space.length if experiment.method.kind == "ar" else 2, Rng(2))
    assert samples.shape == (7, space.length) and samples.max() < space.size and (samples != space.mask_id).all()


@pytest.mark.parametrize("name", ["toy-8modes-emoe", "rows-vadd"])
def test_the_full_size_recipe_can_be_built(name: str, rows_file: Path) -> None:
    experiment = override(get_recipe(name), data_of(name, rows_file))
    first, second = (experiment.build_method(experiment.domain.build(0).space).state_dict() for _ in range(2))
    assert all(torch.equal(first[key], second[key]) for key in first)  # the seed alone decides the weights


NEW_METHOD = '''
"""A method of a user's own: masked diffusion with one of two heads, chosen by a fair coin for each sequence."""

from dataclasses import dataclass

import torch

from emoe.config import option
from emoe.diffusion.masking import subs
from emoe.methods.base import MaskedDiffusion, MaskedDiffusionConfig
from emoe.ramps import Linear, Ramp
from emoe.types import Denoised, Inference, Wants


@dataclass(frozen=True, kw_only=True)
class CoinConfig(MaskedDiffusionConfig, kind="coin"):
    """Options."""

    spread: Ramp = option(Linear(start=0.0, end=1.0), doc="size of the latent", low=0)

    def wants(self):
        return Wants(cond=1)

    def build(self, space, backbone):
        return Coin(self, space, backbone)


class Coin(MaskedDiffusion):
    """z is +1 or -1; posterior and prior are the same coin, so there is no KL."""

    def __init__(self, config, space, backbone):
        super().__init__(config, space, ramps={"spread": config.spread})
        self.backbone = backbone.build(space, config.wants())

    def _step(self, xt, t, spread, rng):
        z = torch.randint(2, (len(xt), 1), generator=rng.stream("latent"), device=xt.device).float() * 2 - 1
        return Denoised(subs(self.backbone(xt, t, cond=spread * z).logits, xt, self.space.mask_id), z)

    def infer(self, x0, xt, t, knobs, rng):
        out = self._step(xt, t, knobs["spread"], rng)
        return Inference(out.log_x_theta, torch.zeros_like(t), log={"heads": (out.latent > 0).float().mean()})

    def denoise(self, xt, t, rng):
        return self._step(xt, t, self.config.spread(1, 1), rng)
'''

NEW_RECIPE = '''
"""The recipe of the new method."""

import dataclasses

from emoe.methods.coin import CoinConfig
from emoe.recipes import get_recipe, recipe


@recipe
def rows_coin():
    """Two heads and a coin on your own rows."""
    return dataclasses.replace(get_recipe("rows-mdlm"), name="rows-coin", method=CoinConfig(t_low=0.1))
'''


@pytest.fixture
def new_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module `emoe.methods.coin` and a recipe of the user; nothing else is changed."""
    for name, text in {"methods/coin.py": NEW_METHOD, "coin_recipes.py": NEW_RECIPE}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text.lstrip())
    monkeypatch.setattr(emoe.methods, "__path__", [*emoe.methods.__path__, str(tmp_path / "methods")])
    monkeypatch.syspath_prepend(tmp_path)
    yield
    MethodConfig.members.pop("coin", None)
    emoe.recipes._RECIPES.pop("rows-coin", None)
    for name in ("emoe.methods.coin", "coin_recipes"):
        sys.modules.pop(name, None)
    vars(emoe.methods).pop("coin", None)


def test_a_new_method_is_one_new_file(new_method: None, rows_file: Path, tmp_path: Path) -> None:
    assert "coin" in MethodConfig.known_kinds()
    settings = SHRUNK | {"domain.path": str(rows_file), "method": "coin", "method.t-low": "0.1"}
    run = train("rows-mdlm", tmp_path / "run", settings=settings, device="cpu", quiet=True)
    assert run.step == 4 and run.method.config.kind == "coin" and len(run.sample(9, 3)) == 9


def test_a_new_method_and_its_recipe(
    new_method: None, rows_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    importlib.import_module("coin_recipes")
    settings = SHRUNK | {"domain.path": str(rows_file), "train.ema": "0.9"}
    words = [word for name, value in settings.items() for word in (f"--{name}", value)]
    run = str(tmp_path / "run")
    assert main(["train", "rows-coin", "--run", run, "--device", "cpu", "--quiet", *words]) == 0
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["spread"] for record in records] == [0.25, 0.75] and all("heads" in record for record in records)
    capsys.readouterr()
    assert main(["eval", run, "--device", "cpu", "--json", "--likelihood", "none"]) == 0
    rows = json.loads(capsys.readouterr().out)
    found = {(row["method"], row["recipe"].partition(" ")[0], row["nfe"]) for row in rows}
    assert found == {("coin", "rows-coin", n) for n in (1, 3)}
    assert main(["train", "rows-coin", "--run", run, "--device", "cpu", "--quiet", *words, "--resume"]) == 0
    assert main(["list"]) == 0 and "Two heads and a coin on your own rows." in capsys.readouterr().out
    opened = load_run(run, device="cpu")
    assert torch.equal(opened.sample(20, 2, seed=3), load_run(run, device="cpu").sample(20, 2, seed=3))


def test_a_run_of_a_method_that_is_not_there(new_method: None, rows_file: Path, tmp_path: Path) -> None:
    settings = SHRUNK | {"domain.path": str(rows_file), "method": "coin"}
    train("rows-mdlm", tmp_path / "run", settings=settings, device="cpu", quiet=True)
    MethodConfig.members.pop("coin")
    (tmp_path / "methods" / "coin.py").unlink()
    with pytest.raises(ValueError, match="method.kind: 'coin' is not known"):
        load_run(tmp_path / "run", device="cpu")
