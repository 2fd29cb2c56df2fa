"""Recipes for binary images: the published settings and sizes, and digits that train on a CPU."""

from __future__ import annotations

import math

import pytest
import torch
from small import network, stepper_of

from emoe.backbones.base import active_parameters, total_parameters
from emoe.domains.images import Digits
from emoe.evaluation.measure import estimate_nll, factorised_nll
from emoe.methods.emoe import EMoEConfig
from emoe.overrides import override
from emoe.recipes import get_recipe
from emoe.rng import Rng, derive_seed
from emoe.runs.sampling import draw
from emoe.types import Likelihood, TokenSpace

MNIST = TokenSpace(size=3, mask_id=2, length=1024)
STEPS = 200_000
TINY = network(channels=8, hidden=16, time_size=16, time_hidden=32)
TINY |= {"train.batch": 32, "optim.lr": 5e-3, "optim.warmup": 5}


def test_networks_have_the_published_sizes() -> None:
    sizes = {"mdlm": (2_074_346, 2_074_346), "vadd": (2_500_066, 2_500_066), "emoe": (2_494_886, 2_180_606)}
    for name, size in (sizes | {"emoe-floor": sizes["emoe"]}).items():
        method = get_recipe(f"mnist-{name}").build_method(MNIST)
        assert (total_parameters(method), active_parameters(method)) == size, name


def test_mnist_is_trained_as_published() -> None:
    """Constants of recipes are compared with stored ones in test_golden.py."""
    recipe = get_recipe("mnist-emoe")
    optim, config = recipe.optim, recipe.method
    rates = [optim.lr_at(step, STEPS) for step in (0, 2_499, 4_999, 5_000, 102_500, STEPS)]
    assert rates == pytest.approx([2e-4 / 5_000, 1e-4, 2e-4, 2e-4, 1.1e-4, 2e-5])
    assert isinstance(config, EMoEConfig)
    assert [config.kl_weight(step, STEPS) for step in (0, 25_000, 100_000, STEPS)] == [0, 0.25, 1, 1]
    for step in (0, 10_000, 34_000, 35_000, STEPS):
        assert config.relax_tau(step, STEPS) == pytest.approx(max(0.5, math.exp(-2e-5 * step)))
    vadd = get_recipe("mnist-vadd").build_method(MNIST).ramps
    assert [vadd["kl_weight"](step, STEPS) for step in (0, 25_000, 50_000, STEPS)] == [0, 0.5, 1, 1]


class Trained:
    """A tiny model of digits after some steps of its recipe, with the bound on held-out rows before and after."""

    def __init__(self, name: str, steps: int):
        experiment = override(get_recipe(name), TINY | {"train.steps": steps})
        domain = experiment.domain.build(0)
        assert isinstance(domain, Digits)
        self.domain, self.method = domain, experiment.build_method(domain.space)
        self.before = self.bound()
        stepper = stepper_of(experiment, domain, self.method, Rng(derive_seed(0, "train")))
        for step in range(steps):
            stepper(step)
        assert stepper.optimizer.skipped == 0
        self.after = self.bound()

    def bound(self) -> float:
        """bound@1 of held-out rows, in nats per row."""
        return estimate_nll(self.method, self.domain.fresh(100, 0), Likelihood("bound", 1), repeats=2).value


@pytest.mark.parametrize("name", ["digits-vadd", "digits-emoe", "digits-emoe-vimco"])
def test_the_bound_of_one_step_falls(name: str) -> None:
    trained = Trained(name, 40)
    assert trained.before > 0.95 * 64 * math.log(2)  # a fair coin for each pixel
    assert trained.after < 0.75 * trained.before


def covariances(rows: torch.Tensor) -> torch.Tensor:
    """Covariance of every pair of different pixels."""
    centred = rows.double() - rows.double().mean(0)
    return (centred.T @ centred / len(rows))[~torch.eye(64, dtype=torch.bool)]


def test_mdlm_learns_digits() -> None:
    """One step ends near the best product of marginals; samples of many steps have the ties of real digits."""
    mdlm = Trained("digits-mdlm", 220)
    best = factorised_nll(mdlm.domain.rows, mdlm.domain.fresh(100, 0), 3)
    assert mdlm.before > 1.5 * best and best - 0.5 < mdlm.after < 1.1 * best
    frequencies = mdlm.domain.rows.float().mean(0)
    independent = (torch.rand(300, 64, generator=torch.Generator().manual_seed(3)) < frequencies).long()
    pools = {"model": draw(mdlm.method, 300, 16, seed=5).samples, "independent": independent}
    target = covariances(mdlm.domain.test_rows)
    alike = {
        name: torch.corrcoef(torch.stack([target, covariances(rows)]))[0, 1].item() for name, rows in pools.items()
    }
    assert alike["model"] > 0.55 and abs(alike["independent"]) < 0.1
