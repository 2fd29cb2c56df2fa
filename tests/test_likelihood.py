"""Named likelihoods are what they say: bounds bound, draws converge to enumerated values, weight 1 is no bound."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from enumeration import Enumeration, gauss_legendre, single

from emoe.cli import main
from emoe.config import ConfigError
from emoe.diffusion.schedule import LogLinearSchedule
from emoe.evaluation.likelihood import (
    coordination_gain,
    default_conventions,
    estimate_nll,
    factorised_nll,
    in_units,
    likelihoods,
    passes,
)
from emoe.methods.emoe import EMoEConfig
from emoe.methods.mdlm import MDLMConfig
from emoe.methods.vadd import VADD, VADDConfig
from emoe.reporting.results import Results
from emoe.rng import Rng
from emoe.studies import two_bits
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


NODES = 257  # of the trapezoid rule on [-9, 9]; every second of them is a rule too, and the difference its error


class Quadrature(Enumeration):
    """VADD with one latent number: points of a trapezoid rule in place of routes, `step` 2 for every second of them."""

    def __init__(self, method: VADD, step: int = 1):
        super().__init__(method)
        self.points = torch.linspace(-9, 9, NODES, dtype=torch.float64)[::step]
        self.log_weight = torch.log_softmax(-self.points.square() / 2, 0)
        self.routes = self.points  # as many components as points

    def tokens(self, rows: torch.Tensor, z: torch.Tensor, t: float) -> torch.Tensor:
        """log p(x^l | row, z) at every position as if it were masked, (B, R, L, V), for z (B, R)."""
        many = rows.repeat_interleave(z.shape[1], 0)
        logits = self.method.backbone(many, torch.full((len(many),), t).double(), cond=z.reshape(-1, 1)).logits
        return torch.log_softmax(logits, -1).view(len(rows), z.shape[1], self.length, -1)

    def read(self, rows, t, marks=None):
        log_token = self.tokens(rows, self.points.expand(len(rows), -1), t)
        return self.log_weight.expand(len(rows), -1), log_token, []

    def bound(self, steps: int) -> torch.Tensor:
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
        drawn = method.nll_bound(x0.repeat(300, 1), Convention.parse("bound@1"), Rng(7)).view(300, -1)
        assert ((drawn.mean(0) - bound).abs() < 4 * drawn.std(0) / math.sqrt(300) + 1e-9).all()
        tight = method.nll_bound(x0.repeat(60, 1), Convention.parse("iw@1,64"), Rng(8)).view(60, -1)
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


@pytest.mark.parametrize(("power", "share"), [(0, 1 / 3), (1, 1 / 2)])
def test_two_equal_bits_fall_below_their_entropy(power: int, share: float):
    """Optimised exactly, the objective reaches log(2)/3 and VADD's weighting log(2)/2; the entropy is log(2).

    Both positions are masked with probability t^2; then the latent's bit costs log 2, once (weight 1) or 1/t times.
    The study's sums are held against the enumeration of all routes and a quadrature over t.
    """
    method, least = two_bits.minimise(power, starts=(5,), updates=150)
    assert math.log(2) * share - 1e-9 <= least < math.log(2) * share + 0.006
    exact = Enumeration(method)
    pairs = [i for i, row in enumerate(exact.clean.tolist()) if row[0] == row[1]]
    wanted = 0.0
    with torch.no_grad():
        for t, w in gauss_legendre(0.0, 1.0, 4):
            terms = exact.terms(t)
            wanted += w * (terms.recon() / t + terms.kl() / t**power)[pairs].mean().item()
        assert least == pytest.approx(wanted, abs=1e-10)
        for steps in (1, 2, 4):  # the same model under bounds that are bounds
            bound = exact.bound(steps)[pairs].mean().item()
            assert two_bits.bound(method, steps) == pytest.approx(bound, abs=1e-10)
            assert bound >= exact.nll(steps)[pairs].mean() >= math.log(2) - 1e-9


def test_two_equal_bits_as_a_command(tmp_path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(two_bits, "STARTS", (5,))
    monkeypatch.setattr(two_bits, "UPDATES", 60)
    command = ["reproduce", "likelihood", "--device", "cpu", "--results", str(tmp_path), "--only"]
    assert main([*command, "two-bits"]) == 0
    results = Results.load(tmp_path / "likelihood.json")
    assert [path.name for path in tmp_path.iterdir() if path.suffix] == ["likelihood.json"]
    assert {(row.task, row.data, row.metric) for row in results.rows} == {("likelihood", "two-bits", "nll")}
    (entropy,) = results.select(method="data")
    assert entropy.value == pytest.approx(math.log(2)) and len(results.rows) == 1 + 2 * (1 + 3 + 3)
    assert all(row.value >= math.log(2) for row in results.select(convention=("exact", "bound@1", "bound@2")))
    below = results.select(convention=("objective", "objective, KL/t"))
    assert len(below) == 2 and all(row.value < math.log(2) for row in below)
    capsys.readouterr()
    assert main([*command, "bits"]) == 2 and "only: 'bits' is not known" in capsys.readouterr().err


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
    names, told = [Convention.parse("bound@1"), Convention.parse("iw@2,3")], []
    found = likelihoods(tiny(), train, train[:100] * 2, names, tick=lambda *what: told.append(what))
    assert [item.metric for _, item in found] == ["nll", "bpd", "ppl", "coordination_gain", "nll", "bpd", "ppl"]
    assert told == [(1, "bound@1")] * 8 + [(3, "iw@2,3")] * 4
    assert sum(map(passes, names)) == sum(size for size, _ in told) == 8 + 12
