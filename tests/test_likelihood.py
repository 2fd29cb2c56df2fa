"""Named likelihoods are what they say: bounds bound, draws converge to enumerated values, weight 1 is no bound."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from enumeration import Enumeration, gauss_legendre

from emoe.config import ConfigError
from emoe.diffusion.schedule import LogLinearSchedule
from emoe.evaluation.likelihood import (
    coordination_gain,
    default_conventions,
    estimate_nll,
    factorised_nll,
    in_units,
    likelihoods,
)
from emoe.methods.emoe import EMoEConfig
from emoe.methods.mdlm import MDLMConfig
from emoe.methods.vadd import VADDConfig
from emoe.rng import Rng
from emoe.types import Convention, Measurement

# (size with the mask, length, experts, depth): everything up to V = 4, L = 3, E = 3, D = 2 with at most 81 routes.
SIZES = [
    (v, length, e, d)
    for v in (2, 3, 4)
    for length in (1, 2, 3)
    for e in (1, 2, 3)
    for d in (1, 2)
    if e ** (length * d) <= 81 and v**length <= 27
]


@pytest.mark.parametrize("chunk", range(8))
@torch.no_grad()
def test_bounds_hold_for_200_random_models(tiny, chunk: int):
    """bound@T >= -log p(x0) for every x0, T in 1..4, and probabilities sum to one; equality where theory says so."""
    draw = random.Random(chunk)
    for _ in range(25):
        size, length, experts, depth = draw.choice(SIZES)
        config = MDLMConfig() if draw.random() < 0.25 else EMoEConfig(experts=experts, top_k=min(2, experts))
        method = tiny(
            config, size=size, mask_id=draw.randrange(size), length=length, depth=depth, seed=draw.randrange(10**6)
        )
        exact, steps = Enumeration(method), draw.randint(1, 4)
        law = exact.law(steps)
        assert law.sum().item() == pytest.approx(1, abs=1e-10)
        clean = law[exact.index(exact.clean)]
        assert clean.sum().item() == pytest.approx(1, abs=1e-10)
        gap = exact.bound(steps) + clean.log()
        assert gap.min() >= -1e-9
        factorised = isinstance(config, MDLMConfig) or experts == 1
        if factorised and steps == 1:  # one factorised step has nothing to lose
            assert gap.abs().max() < 1e-9


def test_vadd_bound_by_quadrature(tiny):
    """One latent number: p by Gauss-Hermite under the prior, bound@1 by Gauss-Hermite under the posterior."""
    nodes, weights = (torch.tensor(a) for a in np.polynomial.hermite_e.hermegauss(60))
    weights = weights / weights.sum()
    for seed in range(2):
        method = tiny(VADDConfig(latent=1), size=3, mask_id=2, seed=seed)
        x0 = Enumeration(method).clean
        xt, t = torch.full_like(x0, 2), torch.ones(len(x0)).double()
        with torch.no_grad():
            mean, log_std = method.encoder(x0, t, xt == 2).chunk(2, -1)
            token = {}
            draws = {"prior": nodes[None].expand(len(x0), -1), "post": mean + log_std.exp() * nodes[None]}
            for name, z in draws.items():
                many, times = xt.repeat_interleave(60, 0), t.repeat_interleave(60)
                logits = method.backbone(many, times, cond=z.reshape(-1, 1).double()).logits
                log_p = torch.log_softmax(logits, -1).view(len(x0), 60, 2, 3)
                token[name] = log_p.gather(-1, x0[:, None, :, None].expand(-1, 60, -1, 1)).squeeze(-1).sum(-1)
        nll = -(token["prior"].exp() @ weights).log()
        kl = 0.5 * (mean.square() + (2 * log_std).exp() - 1 - 2 * log_std).sum(-1)
        bound = -(token["post"] @ weights) + kl
        assert (bound - nll).min() >= -1e-9
        drawn = torch.stack([method.nll_bound(x0, Convention.parse("bound@1"), Rng(7).at(k)) for k in range(300)])
        assert ((drawn.mean(0) - bound).abs() < 4 * drawn.std(0) / math.sqrt(300) + 1e-9).all()
        tight = torch.stack([method.nll_bound(x0, Convention.parse("iw@1,64"), Rng(8).at(k)) for k in range(60)])
        assert (tight.mean(0) > nll - 4 * tight.std(0) / math.sqrt(60)).all() and (tight.mean(0) < bound + 1e-6).all()


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("config", [MDLMConfig(), EMoEConfig(experts=2), EMoEConfig(experts=2, kl_positions="masked")])
def test_draws_of_the_bound_converge_to_its_enumerated_value(tiny, config, steps: int):
    method = tiny(config, size=3, mask_id=1, length=2)
    exact = Enumeration(method)
    with torch.no_grad():
        wanted = exact.bound(steps).mean().item()
    rows = exact.clean.repeat(500, 1)
    seen = estimate_nll(method, rows, Convention("bound", steps), repeats=12, seed=3)
    assert abs(seen.value - wanted) < 4 * seen.stderr + 1e-9 and seen.stderr < 0.05 * wanted


def test_objective_ignores_how_the_recipe_trains(tiny):
    """Weight 1, all positions, t ~ U(0, 1]: against a quadrature over t, for a recipe that trains otherwise."""
    method = tiny(
        EMoEConfig(experts=2, kl_positions="masked", kl_weight=EMoEConfig().kl_weight, t_low=0.3), timeless=True
    )
    exact, wanted = Enumeration(method), 0.0
    with torch.no_grad():
        for t, w in gauss_legendre(0.0, 1.0, 12):
            terms = exact.terms(t)
            wanted += w * (terms.recon() / t + terms.kl()).mean().item()
    seen = estimate_nll(method, exact.clean.repeat(500, 1), Convention.parse("objective"), repeats=16, seed=5)
    assert abs(seen.value - wanted) < 4 * seen.stderr and seen.stderr < 0.02 * wanted


@torch.no_grad()
def test_importance_weighting_tightens_the_bound(tiny):
    """iw@T,1 is bound@T; it falls with K; for T = 1 it ends at the exact NLL, for T > 1 not below it."""
    method = tiny(EMoEConfig(experts=2), size=3, mask_id=1, length=2)
    exact = Enumeration(method)
    rows = exact.clean.repeat(150, 1)
    for steps in (1, 2):
        nll, bound = exact.nll(steps).mean().item(), exact.bound(steps).mean().item()
        seen = [estimate_nll(method, rows, Convention("iw", steps, k), repeats=8, seed=k) for k in (1, 4, 32)]
        assert abs(seen[0].value - bound) < 4 * seen[0].stderr
        for looser, tighter in zip(seen, seen[1:], strict=False):
            assert tighter.value < looser.value - 2 * (tighter.stderr + looser.stderr) or looser.value - nll < 0.02
        assert seen[-1].value > nll - 4 * seen[-1].stderr
        if steps == 1:
            assert seen[-1].value - nll < 0.15 * (bound - nll)


@pytest.mark.parametrize(("power", "share", "seeds"), [(0, 1 / 3, (14, 2)), (1, 1 / 2, (2, 3))])
def test_two_equal_bits_fall_below_their_entropy_under_weight_one(
    tiny, power: int, share: float, seeds: tuple[int, ...]
):
    """Optimised exactly, the objective reaches log(2)/3 and VADD's weighting log(2)/2; the entropy is log(2).

    Both positions are masked with probability t^2; then the latent's bit costs log 2, once (weight 1) or 1/t times.
    """
    for seed in seeds:
        exact = Enumeration(tiny(size=3, mask_id=2, seed=seed, timeless=True))
        pairs = [i for i, row in enumerate(exact.clean.tolist()) if row[0] == row[1]]
        optimiser = torch.optim.Adam(exact.method.parameters(), lr=0.03)
        for _ in range(150):
            optimiser.zero_grad()
            loss = torch.zeros(())
            for t, w in gauss_legendre(0.0, 1.0, 4):
                terms = exact.terms(t)
                loss = loss + w * (terms.recon() / t + terms.kl() / t**power)[pairs].mean()
            if loss < math.log(2) * share + 0.006:
                break
            loss.backward()
            optimiser.step()
        if loss < math.log(2) * share + 0.006:
            break
    assert math.log(2) * share - 1e-6 <= loss.item() < math.log(2) * share + 0.006
    with torch.no_grad():
        for steps in (1, 2, 4):  # the same model under bounds that are bounds
            assert exact.bound(steps)[pairs].mean() >= exact.nll(steps)[pairs].mean() >= math.log(2) - 1e-9


def test_conventions_read_and_print():
    for text in ("objective", "nelbo", "bound@64", "iw@4,64", "exact"):
        assert str(Convention.parse(text)) == text and Convention.parse(text).bounds
    for text in ("bound", "bound@0", "iw@4", "iw@1,0", "elbo", "bound@-1", ""):
        with pytest.raises(ValueError, match="no likelihood"):
            Convention.parse(text)


def test_conventions_that_do_not_exist_are_refused(tiny):
    x0 = torch.zeros(4, 2, dtype=torch.long)
    with pytest.raises(ConfigError, match="nelbo is defined without a latent only"):
        tiny().nll_bound(x0, Convention.parse("nelbo"), Rng(0))
    with pytest.raises(ConfigError, match="not estimated by draws"):
        tiny().nll_bound(x0, Convention.parse("exact"), Rng(0))
    with pytest.raises(ConfigError, match="all tokens masked"):
        tiny(EMoEConfig(experts=2, schedule=LogLinearSchedule())).nll_bound(x0, Convention.parse("bound@2"), Rng(0))


def test_units_and_coordination_gain(tiny):
    nll, bpd, ppl = in_units(Measurement("nll", 2 * math.log(8), 0.02, 10), length=2)
    assert (bpd.value, ppl.value) == (pytest.approx(3.0), pytest.approx(8.0)) and nll.metric == "nll"
    assert bpd.stderr == pytest.approx(0.01 / math.log(2)) and ppl.stderr == pytest.approx(0.08)
    train = torch.tensor([[0, 0], [1, 1]]).repeat(5000, 1)
    factorised = factorised_nll(train, train[:10], symbols=3)
    assert factorised == pytest.approx(2 * math.log(2), abs=1e-3)
    perfect = Measurement("nll", math.log(2), 0.0, 10)
    assert coordination_gain(perfect, factorised, 2).value == pytest.approx(0.5 * math.log(2), abs=1e-3)
    names = [str(c) for c in default_conventions(tiny())]
    assert "nelbo" not in names and "nelbo" in [str(c) for c in default_conventions(tiny(MDLMConfig()))]
    found = likelihoods(tiny(), train, train[:100] * 2, [Convention.parse("bound@1")])
    assert [item.metric for _, item in found] == ["nll", "bpd", "ppl", "coordination_gain"]
