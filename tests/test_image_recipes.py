"""Recipes for binary images: the published settings and sizes, and digits that train on a CPU."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import emoe
from emoe.backbones.base import active_parameters, total_parameters
from emoe.config import override
from emoe.domains.images import Digits
from emoe.engine import checkpoint
from emoe.engine.stepper import Stepper
from emoe.evaluation.likelihood import estimate_nll, factorised_nll
from emoe.experiment import customise
from emoe.methods.base import MaskedDiffusion
from emoe.methods.emoe import EMoEConfig
from emoe.recipes import get_recipe
from emoe.rng import Rng, derive_seed
from emoe.runs import train
from emoe.types import Convention, TokenSpace

MNIST = TokenSpace(size=3, mask_id=2, length=1024)
METHODS = ("mdlm", "vadd", "emoe", "emoe-plus")
STEPS = 200_000
TINY = {
    "backbone.channels": "8",
    "backbone.hidden": "16",
    "backbone.time-size": "16",
    "backbone.time-hidden": "32",
    "train.batch": "32",
    "optim.lr": "5e-3",
}


# --- MNIST: App. B.2 ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("mnist-mdlm", 2_074_346, 2_074_346),
        ("mnist-vadd", 2_500_066, 2_500_066),
        ("mnist-emoe", 2_494_886, 2_180_606),
        ("mnist-emoe-plus", 2_494_886, 2_180_606),
    ],
)
def test_networks_have_the_published_sizes(name: str, total: int, active: int) -> None:
    method = get_recipe(name).build_method(MNIST)
    assert (total_parameters(method), active_parameters(method)) == (total, active)


def test_all_methods_share_the_published_training() -> None:
    recipes = [get_recipe(f"mnist-{method}") for method in METHODS]
    for recipe in recipes:
        assert (recipe.domain, recipe.backbone, recipe.optim, recipe.train, recipe.eval) == (
            recipes[0].domain, recipes[0].backbone, recipes[0].optim, recipes[0].train, recipes[0].eval
        )  # fmt: skip
    optim, training = recipes[0].optim, recipes[0].train
    assert (training.steps, training.batch, training.ema, training.precision) == (STEPS, 64, 0.9999, "bf16")
    assert (optim.algorithm, optim.betas, optim.weight_decay, optim.clip) == ("adamw", (0.9, 0.99), 0.01, 1.0)
    rates = [optim.lr_at(step, STEPS) for step in (0, 2_499, 4_999, 5_000, 102_500, STEPS)]
    assert rates == pytest.approx([2e-4 / 5_000, 1e-4, 2e-4, 2e-4, 1.1e-4, 2e-5])


def test_weights_and_temperature_over_training() -> None:
    vadd, routed = (get_recipe(f"mnist-{name}").build_method(MNIST).ramps for name in ("vadd", "emoe"))
    assert [vadd["kl_weight"](step, STEPS) for step in (0, 25_000, 50_000, STEPS)] == [0, 0.5, 1, 1]
    assert [routed["kl_weight"](step, STEPS) for step in (0, 25_000, 100_000, STEPS)] == [0, 0.25, 1, 1]
    for step in (0, 10_000, 34_000, 35_000, STEPS):
        assert routed["relax_tau"](step, STEPS) == pytest.approx(max(0.5, math.exp(-2e-5 * step)))
    config = get_recipe("mnist-emoe").method
    assert isinstance(config, EMoEConfig)
    assert (config.experts, config.top_k, config.balance, config.balance_form) == (4, 2, 1e-2, "switch")


def test_checkpoints_of_the_largest_network_come_in_small_files(tmp_path: Path) -> None:
    method = get_recipe("mnist-emoe").build_method(MNIST)
    limit = get_recipe("mnist-emoe").train.max_file_mb
    assert limit == 16
    moments = {f"{name}/{k}": p for name, p in method.named_parameters() for k in ("exp_avg", "exp_avg_sq")}
    groups = {"model": method.state_dict(), "optim": moments}
    path = checkpoint.save(tmp_path, 1, groups, {}, 2, max_file_bytes=limit * 10**6)
    sizes = [file.stat().st_size for file in path.glob("*.safetensors")]
    assert len(sizes) == 3 and max(sizes) <= 16 * 10**6 and sum(sizes) > 4 * 3 * total_parameters(method)


def test_where_data_lies_and_how_it_is_saved_does_not_make_another_recipe() -> None:
    recipe = get_recipe("mnist-mdlm")
    moved = customise(recipe, {"domain.root": "elsewhere", "train.max-file-mb": "8"})
    assert moved != recipe and moved.name == recipe.name
    assert customise(recipe, {"domain.side": "28"}).name == "mnist-mdlm domain.side=28"


# --- Digits ------------------------------------------------------------------------------------------------------


def test_the_digits_recipes_differ_in_their_method_alone() -> None:
    first, *others = (get_recipe(f"digits-{method}") for method in METHODS)
    for recipe in others:
        assert (recipe.domain, recipe.backbone, recipe.optim, recipe.train, recipe.eval) == (
            first.domain, first.backbone, first.optim, first.train, first.eval
        )  # fmt: skip
        total_parameters(recipe.build_method(recipe.domain.build(0).space))
    assert first.train.precision == "fp32" and first.eval.samples == 1_000


class Trained:
    """A tiny model of digits after some steps of its recipe, with the bound on held-out rows before and after."""

    def __init__(self, name: str, steps: int):
        experiment = override(get_recipe(name), TINY | {"train.steps": str(steps), "optim.warmup": "5"})
        domain = experiment.domain.build(0)
        assert isinstance(domain, Digits)
        method = experiment.build_method(domain.space)
        assert isinstance(method, MaskedDiffusion)
        self.domain, self.method = domain, method
        self.before = self.bound()
        stepper = Stepper(
            method, domain.batches(experiment.train.batch, 0), method.ramps, experiment.optim,
            total=steps, rng=Rng(derive_seed(0, "train")), ema=0.0, precision="fp32", graph=False,
        )  # fmt: skip
        for step in range(steps):
            stepper(step)
        assert stepper.optimizer.skipped == 0
        self.after = self.bound()

    def bound(self) -> float:
        """bound@1 of held-out rows, in nats per row."""
        rows = self.domain.fresh(100, 0)
        return estimate_nll(self.method, rows, Convention.parse("bound@1"), repeats=2).value


@pytest.mark.parametrize("name", ["digits-vadd", "digits-emoe", "digits-emoe-plus"])
def test_the_bound_of_one_step_falls(name: str) -> None:
    trained = Trained(name, 40)
    assert trained.before > 0.95 * 64 * math.log(2)  # a fair coin for each pixel
    assert trained.after < 0.75 * trained.before


@pytest.fixture(scope="module")
def mdlm() -> Trained:
    return Trained("digits-mdlm", 220)


@pytest.fixture(scope="module")
def pools(mdlm: Trained) -> dict[str, torch.Tensor]:
    """Samples of the trained model, and pixels that have the right frequencies and know nothing of each other."""
    generator = torch.Generator().manual_seed(3)
    frequencies = mdlm.domain.rows.float().mean(0)
    independent = (torch.rand(300, 64, generator=generator) < frequencies).long()
    return {"model": mdlm.method.sample(300, 16, Rng(5)), "independent": independent}


def test_the_bound_of_one_step_ends_near_the_best_product_of_marginals(mdlm: Trained) -> None:
    best = factorised_nll(mdlm.domain.rows, mdlm.domain.fresh(100, 0), 3)
    assert mdlm.before > 1.5 * best and best - 0.5 < mdlm.after < 1.1 * best


def covariances(rows: torch.Tensor) -> torch.Tensor:
    """Covariance of every pair of pixels."""
    centred = rows.double() - rows.double().mean(0)
    return centred.T @ centred / len(rows)


def test_samples_have_the_ties_between_pixels_that_real_digits_have(
    mdlm: Trained, pools: dict[str, torch.Tensor]
) -> None:
    off = ~torch.eye(64, dtype=torch.bool)
    target = covariances(mdlm.domain.test_rows)[off]
    alike = {
        name: torch.corrcoef(torch.stack([target, covariances(rows)[off]]))[0, 1].item() for name, rows in pools.items()
    }
    assert alike["model"] > 0.55 and abs(alike["independent"]) < 0.1


def test_a_classifier_finds_samples_closer_to_real_digits(mdlm: Trained, pools: dict[str, torch.Tensor]) -> None:
    found = {name: {item.metric: item.value for item in mdlm.domain.measure(rows)} for name, rows in pools.items()}
    assert found["model"]["frechet"] < 0.6 * found["independent"]["frechet"]
    assert found["model"]["coverage"] > found["independent"]["coverage"]


def newest(run: Path) -> dict[str, bytes]:
    """All bytes of the newest checkpoint, and the log."""
    folder = max((run / "checkpoints").glob("step-*"))
    found = {f"{folder.name}/{file.name}": file.read_bytes() for file in folder.iterdir()}
    return found | {"metrics.jsonl": (run / "metrics.jsonl").read_bytes()}


def test_a_killed_run_on_digits_ends_with_the_same_bits(tmp_path: Path) -> None:
    settings = TINY | {"train.steps": "5", "train.save-every": "3", "train.log-every": "1"}
    train("digits-emoe", tmp_path / "whole", settings=settings, device="cpu", quiet=True)
    words = [word for name, value in settings.items() for word in (f"--{name}", value)]
    command = [sys.executable, "-m", "emoe", "train", "digits-emoe", "--run", str(tmp_path / "run")]
    environment = os.environ | {"PYTHONPATH": str(Path(emoe.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    environment |= {"EMOE_FAULT": "save:after-rename"}  # dies once step 3 is saved
    done = subprocess.run([*command, "--device", "cpu", "--quiet", *words], env=environment, timeout=120)
    assert done.returncode == 137 and list(newest(tmp_path / "run"))[0].startswith("step-000000003")
    resumed = train("digits-emoe", tmp_path / "run", settings=settings, device="cpu", quiet=True, resume=True)
    assert resumed.step == 5 and newest(tmp_path / "run") == newest(tmp_path / "whole")
