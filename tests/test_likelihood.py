"""Named likelihoods: bounds hold, draws converge to enumerated values, ramps are those of the end of training."""

from __future__ import annotations

import math
import random

import pytest
import torch
from enumeration import Enumeration, gauss_legendre, single
from torch import Tensor

from emoe.config import ConfigError
from emoe.diffusion.schedule import LogLinearSchedule
from emoe.evaluation.measure import coordination_gain, estimate_nll, factorised_nll, in_units
from emoe.methods.emoe import EMoEConfig
from emoe.methods.mdlm import MDLMConfig
from emoe.methods.vadd import VADD, VADDConfig
from emoe.ramps import Constant, Decay, Exponential, Linear
from emoe.rng import Rng
from emoe.types import Likelihood, Measurement

# (size with the mask, length, experts, depth): everything up to V = 4, L = 3, E = 3, D = 2 with at most 81 routes.
SIZES = [
    (v, length, e, d)
    for v in (2, 3, 4)
    for length in (1, 2, 3)
    for e in (1, 2, 3)
    for d in (1, 2)
    if e ** (length * d) <= 81 and v**length <= 27
]


NODES = 257  # of the trapezoid rule on [-9, 9]; every second of them is a rule too, and the difference its error


class Quadrature(Enumeration):
    """VADD with one latent number: points of a trapezoid rule in place of routes, `step` 2 for every second of them."""

    def __init__(self, method: VADD, step: int = 1):
        super().__init__(method)
        self.points = torch.linspace(-9, 9, NODES, dtype=torch.float64)[::step]
        self.log_weight = torch.log_softmax(-self.points.square() / 2, 0)
        self.routes = self.points  # as many components as points

    def tokens(self, rows: Tensor, z: Tensor, t: float) -> Tensor:
        """log p(x^l | row, z) at every position as if it were masked, (B, R, L, V), for z (B, R)."""
        many = rows.repeat_interleave(z.shape[1], 0)
        out = self.method.backbone(many, torch.full((len(many),), t).double(), cond=z.reshape(-1, 1))
        return torch.log_softmax(self.method.backbone.read(out.h), -1).view(len(rows), z.shape[1], self.length, -1)

    def read(self, rows, t):
        log_token = self.tokens(rows, self.points.expand(len(rows), -1), t)
        return self.log_weight.expand(len(rows), -1), log_token, []

    def bound(self, steps: int) -> Tensor:
        """Prop. 3.1 with the encoder's Gaussian as posterior, for each clean row."""
        count, weight = len(self.patterns), self.log_weight.exp()
        x0, masked = self.clean.repeat_interleave(count, 0), self.patterns.repeat(len(self.clean), 1)
        xt = torch.where(masked, self.mask_id, x0)
        total = torch.zeros(len(self.clean), dtype=torch.float64)
        for i in range(1, steps + 1):
            t, alpha_s, alpha_t = single(i / steps), self.alpha((i - 1) / steps), self.alpha(i / steps)
            mean, log_std = self.method.encoder(x0, torch.full((len(x0),), t).double(), masked).chunk(2, -1)
            token = self.tokens(xt, mean + log_std.exp() * self.points, t)
            chosen = x0[:, None, :, None].expand(-1, len(self.points), -1, 1)
            nll = -(token.gather(-1, chosen).squeeze(-1) * masked[:, None]).sum(-1) @ weight
            kl = (mean.square() + (2 * log_std).exp() - 1 - 2 * log_std).sum(-1) / 2
            term = (alpha_s - alpha_t) / (1 - alpha_t) * nll + kl
            flags = masked.double()
            prob = (flags * (1 - alpha_t) + (1 - flags) * alpha_t).prod(-1)
            total = total + (prob * term).view(-1, count).sum(-1)
        return total


@pytest.mark.parametrize("chunk", range(8))
@torch.no_grad()
def test_bounds_hold_for_200_random_models(tiny, chunk: int):
    """bound@T >= -log p(x0) for every x0, T in 1..4, and probabilities sum to one; equality where theory says so.

    A quarter each is MDLM and VADD with one latent number, whose integrals are sums over 257 points; what they change
    against every second of these points is their error (below 2e-5 of the bound, largest where the posterior is far
    wider than the prior), and is granted to the bound row by row.
    """
    draw = random.Random(chunk)
    for _ in range(25):
        size, length, experts, depth = draw.choice(SIZES)
        kind = draw.choice(["mdlm", "vadd", "emoe", "emoe"])
        config = {"mdlm": MDLMConfig(), "vadd": VADDConfig(latent=1)}.get(
            kind, EMoEConfig(experts=experts, top_k=min(2, experts))
        )
        method = tiny(
            config, size=size, mask_id=draw.randrange(size), length=length, depth=depth, seed=draw.randrange(10**6)
        )
        exact, steps = (Quadrature if kind == "vadd" else Enumeration)(method), draw.randint(1, 4)
        law = exact.law(steps)
        assert law.sum().item() == pytest.approx(1, abs=1e-10)
        clean = law[exact.index(exact.clean)]
        assert clean.sum().item() == pytest.approx(1, abs=1e-10)
        bound = exact.bound(steps)
        gap, error = bound + clean.log(), torch.zeros(())
        if kind == "vadd":
            coarse = Quadrature(method, step=2)
            error = (gap - coarse.bound(steps) + coarse.nll(steps)).abs()
            assert (error / bound).max() < 2e-5
        assert (gap + error).min() >= -1e-9
        factorised = kind == "mdlm" or (kind == "emoe" and experts == 1)
        if factorised and steps == 1:  # one factorised step has nothing to lose
            assert gap.abs().max() < 1e-9


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("config", [MDLMConfig(), EMoEConfig(experts=2), VADDConfig(latent=1)], ids=lambda c: c.kind)
def test_draws_of_the_bound_converge_to_its_enumerated_value(tiny, config, steps: int):
    method = tiny(config, size=3, mask_id=1, length=2)
    exact = (Quadrature if isinstance(config, VADDConfig) else Enumeration)(method)
    with torch.no_grad():
        wanted = exact.bound(steps).mean().item()
    rows = exact.clean.repeat(500, 1)
    nll = estimate_nll(method, rows, Likelihood("bound", steps), repeats=12, seed=3)
    assert abs(nll.value - wanted) < 4 * nll.stderr + 1e-9 and nll.stderr < 0.05 * wanted


def test_objective_ignores_how_the_recipe_trains(tiny):
    """Weight 1, all nats, t ~ U(0, 1]: against a quadrature over t, for a method that trains otherwise."""
    method = tiny(EMoEConfig(experts=2, free_nats=9.0, kl_weight=Constant(value=0.1), t_low=0.3), timeless=True)
    exact, wanted = Enumeration(method), 0.0
    with torch.no_grad():
        for t, w in gauss_legendre(0.0, 1.0, 12):
            terms = exact.terms(t)
            wanted += w * (terms.recon() / t + terms.kl()).mean().item()
    nll = estimate_nll(method, exact.clean.repeat(500, 1), Likelihood.parse("objective"), repeats=16, seed=5)
    assert abs(nll.value - wanted) < 4 * nll.stderr and nll.stderr < 0.02 * wanted


@torch.no_grad()
def test_importance_weighting_tightens_the_bound(tiny):
    """iw@T,1 is bound@T; it falls with K; for T = 1 it ends at the exact NLL, for T > 1 not below it."""
    method = tiny(EMoEConfig(experts=2), size=3, mask_id=1, length=2)
    exact = Enumeration(method)
    rows = exact.clean.repeat(150, 1)
    for steps in (1, 2):
        nll, bound = exact.nll(steps).mean().item(), exact.bound(steps).mean().item()
        values = [estimate_nll(method, rows, Likelihood("iw", steps, k), repeats=8, seed=k) for k in (1, 4, 32)]
        assert abs(values[0].value - bound) < 4 * values[0].stderr
        for looser, tighter in zip(values, values[1:], strict=False):
            assert tighter.value < looser.value - 2 * (tighter.stderr + looser.stderr) or looser.value - nll < 0.02
        assert values[-1].value > nll - 4 * values[-1].stderr
        if steps == 1:
            assert values[-1].value - nll < 0.15 * (bound - nll)


def test_final_ramps_are_the_end_values(tiny):
    tau, power = Exponential(start=1.0, end=0.1, share=0.5), Linear(start=0.0, end=0.25, steps=1000)
    config = EMoEConfig(experts=2, relax_tau=tau, kl_weight=Decay(rate=0.01, floor=0.2), kl_time_power=power)
    values = {name: value.item() for name, value in tiny(config).final_ramp(torch.device("cpu")).items()}
    assert values == pytest.approx({"relax_tau": 0.1, "kl_weight": 0.2, "kl_time_power": 0.25})


def test_likelihoods_use_the_ramps_of_the_end_of_training(tiny):
    method, seen = tiny(EMoEConfig(experts=2, relax_tau=Linear(start=1.0, end=2.0))), []
    inner = method.infer
    method.infer = lambda noised, ramp, rng: seen.append(ramp) or inner(noised, ramp, rng)
    method.nll(Enumeration(method).clean, Likelihood("bound", 1), Rng(0))
    assert seen[0]["relax_tau"] == 2


def test_likelihoods_are_parsed_and_printed():
    for text in ("objective", "nelbo", "bound@64", "iw@4,64", "exact"):
        assert str(Likelihood.parse(text)) == text and Likelihood.parse(text).bounds
    for text in ("bound", "bound@0", "iw@4", "iw@1,0", "elbo", "bound@-1", ""):
        with pytest.raises(ValueError, match="no likelihood"):
            Likelihood.parse(text)


def test_likelihoods_that_do_not_exist_are_refused(tiny):
    x0 = torch.zeros(4, 2, dtype=torch.long)
    with pytest.raises(ConfigError, match="nelbo is defined without a latent only"):
        tiny().nll(x0, Likelihood.parse("nelbo"), Rng(0))
    with pytest.raises(ConfigError, match="not estimated by draws"):
        tiny().nll(x0, Likelihood.parse("exact"), Rng(0))
    with pytest.raises(ConfigError, match="all tokens masked"):
        tiny(EMoEConfig(experts=2, schedule=LogLinearSchedule())).nll(x0, Likelihood.parse("bound@2"), Rng(0))


def test_units_and_coordination_gain(tiny):
    nll, bpd, ppl = in_units(Measurement("nll", 2 * math.log(8), 0.02, 10), length=2)
    assert (bpd.value, ppl.value) == (pytest.approx(3.0), pytest.approx(8.0)) and nll.metric == "nll"
    assert bpd.stderr == pytest.approx(0.01 / math.log(2)) and ppl.stderr == pytest.approx(0.08)
    train = torch.tensor([[0, 0], [1, 1]]).repeat(5000, 1)
    factorised = factorised_nll(train, train[:10], symbols=3)
    assert factorised == pytest.approx(2 * math.log(2), abs=1e-3)
    perfect = Measurement("nll", math.log(2), 0.0, 10)
    assert coordination_gain(perfect, factorised, 2).value == pytest.approx(0.5 * math.log(2), abs=1e-3)
    assert "nelbo" not in tiny().likelihoods() and "nelbo" in tiny(MDLMConfig()).likelihoods()
