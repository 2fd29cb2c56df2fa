"""Chain, objective and samplers of whole models against sums over all rows and routes (Eq. 4-6, 9, Algo. 1-2)."""

from __future__ import annotations

import math

import pytest
import torch
from enumeration import ALPHA, Enumeration, chi_square, gauss_legendre, product_of_marginals, single
from steps import masks

from emoe.diffusion.schedule import CosineSchedule
from emoe.methods import masked
from emoe.methods.emoe import EMoEConfig
from emoe.methods.mdlm import MDLMConfig
from emoe.rng import Rng

RAMP = {"relax_tau": torch.tensor(0.7).double(), "kl_weight": torch.tensor(0.6).double()}


def test_one_expert_is_mdlm(twins):
    """Law, samples, loss and every gradient of E-MoE with E = 1 are those of MDLM with the same weights."""
    routed, dense = twins(EMoEConfig(t_low=0.1), length=3, mask_id=0)
    for steps in (1, 3):
        assert torch.allclose(Enumeration(routed).law(steps), Enumeration(dense).law(steps), atol=1e-15)
        samples = [method.sample(masks(method, 500), steps, Rng(4)) for method in (routed, dense)]
        assert torch.equal(*samples)
    x0 = torch.randint(1, 3, (64, 3), generator=torch.Generator().manual_seed(0))
    losses = routed(x0, RAMP, Rng(5).at(2)), dense(x0, {}, Rng(5).at(2))
    assert losses[0].total.item() == pytest.approx(losses[1].total.item(), abs=1e-12)
    assert losses[0].log["kl"] == 0 and losses[0].log["recon"] == losses[0].total
    for loss in losses:
        loss.total.backward()
    want = dict(dense.named_parameters())
    for name, parameter in routed.named_parameters():
        if ".router." in name:
            assert (parameter.grad == 0).all()
        elif ".experts." in name:
            stem, part = name.split("experts.")
            target = want[stem + {"w_in": "0.weight", "b_in": "0.bias", "w_out": "2.weight", "b_out": "2.bias"}[part]]
            grad = target.grad.T if part.startswith("w") else target.grad
            assert torch.allclose(parameter.grad[0], grad, atol=1e-12)
        else:
            assert torch.allclose(parameter.grad, want[name].grad, atol=1e-12), name


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_bound_is_exact_for_one_position_without_latent_and_time(tiny, steps: int):
    exact = Enumeration(tiny(MDLMConfig(), length=1, size=4, timeless=True))
    assert torch.allclose(exact.bound(steps), exact.nll(steps), atol=1e-14)


def test_weight_one_is_no_bound_beyond_one_step(tiny):
    """Trained with weight 1 instead of T, the objective falls below the entropy of the data; Eq. 6 does not."""
    exact = Enumeration(tiny(seed=2, length=1, depth=1, timeless=True))
    optimiser = torch.optim.Adam(exact.method.parameters(), lr=0.02)
    steps, entropy = 3, math.log(2)  # both symbols equally likely
    for _ in range(120):
        optimiser.zero_grad()
        terms = {i: exact.terms(i / steps) for i in range(1, steps + 1)}
        light = sum(term.recon() / i + term.kl() / steps for i, term in terms.items()).mean()
        if light < entropy - 0.1:
            break
        light.backward()
        optimiser.step()
    nll, bound = exact.nll(steps).mean(), exact.bound(steps).mean()
    assert light < entropy - 0.1 and entropy <= nll <= bound


def test_steps_of_the_proof_of_proposition_3_1(tiny):
    """Eq. 28-29, 31, 33, 36 and 37 at every state, with the routes of every clean row as r(z)."""
    exact = Enumeration(tiny())
    t, alpha_s, alpha_t = 0.75, 0.5, 0.25
    reveal = (alpha_s - alpha_t) / (1 - alpha_t)
    with torch.no_grad():
        log_p, component = exact.component(t, alpha_s, alpha_t)  # (S, R), (S, R, S)
        mixture = exact.step(t, alpha_s, alpha_t)
        log_q, _, _ = exact.read(exact.clean, t)
        _, log_token, _ = exact.read(exact.states, t)
    for c, x0 in enumerate(exact.clean.tolist()):
        q = log_q[c].exp()
        for s, xt in enumerate(exact.states.tolist()):
            if any(b not in (exact.mask_id, a) for a, b in zip(x0, xt, strict=True)):
                continue
            target = torch.ones(len(exact.states)).double()  # q(xs | xt, x0) of Eq. 2
            for position, (a, b) in enumerate(zip(x0, xt, strict=True)):
                factor = torch.zeros(exact.size).double()
                factor[a] += reveal if b == exact.mask_id else 1
                factor[exact.mask_id] += 1 - reveal if b == exact.mask_id else 0
                target = target * factor[exact.states[:, position]]
            on = target > 0
            route_kl = (q * (log_q[c] - log_p[s])).sum()
            log_mixture, log_component = mixture[s, on].log(), component[s][:, on].log()
            assert (log_mixture >= q @ log_component - route_kl - 1e-12).all()  # Eq. 28
            entropy = (target[on] * target[on].log()).sum()
            step_kl = entropy - (target[on] * log_mixture).sum()
            each_kl = entropy - log_component @ target[on]  # KL(q || p(. | z)) for each z
            masked = [p for p in range(exact.length) if xt[p] == exact.mask_id]
            closed = -reveal * sum((log_token[s, :, p, x0[p]] for p in masked), torch.zeros(len(q)).double())
            assert torch.allclose(each_kl, closed, atol=1e-12)  # Eq. 33, 36
            assert step_kl <= q @ each_kl + route_kl + 1e-12  # Eq. 31, 37


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize(
    ("config", "length", "size", "seed"),
    [(EMoEConfig(experts=2), 2, 3, 21), (EMoEConfig(experts=2), 3, 3, 21), (MDLMConfig(), 2, 4, 0)],
    ids=["emoe-2", "emoe-3", "mdlm"],
)
def test_samples_follow_the_enumerated_chain(tiny, config, length: int, size: int, seed: int, steps: int):
    """A chi-square test, which has the power to reject the product of the chain's own marginals."""
    method = tiny(config, length=length, size=size, seed=seed)
    exact = Enumeration(method)
    law = exact.law(steps)
    counts = exact.counts(method.sample(masks(method, 200_000), steps, Rng(1)))
    assert chi_square(counts, law) > ALPHA
    if isinstance(config, EMoEConfig):
        assert chi_square(counts, product_of_marginals(law, size, length)) < 1e-9


def test_every_step_draws_a_fresh_latent(tiny):
    """A route kept over the steps gives another law: the one of the sampler is that of Algo. 2."""
    exact = Enumeration(tiny())
    with torch.no_grad():
        parts = [exact.component(single(t), 1 - t + 0.5, 1 - t) for t in (1.0, 0.5)]
    start = exact.index(torch.tensor([exact.mask_id] * 2))
    kept = sum(
        parts[0][0][start, r].exp() * (parts[0][1][start, r] @ parts[1][1][:, r]) for r in range(len(exact.routes))
    )
    assert (kept - exact.law(2)).abs().max() > 0.01
    counts = exact.counts(exact.method.sample(masks(exact.method, 100_000), 2, Rng(2)))
    assert chi_square(counts, exact.law(2)) > ALPHA and chi_square(counts, kept) < 1e-9


def cycle(exact: Enumeration, rows: int) -> torch.Tensor:
    """Each clean row equally often."""
    return exact.clean.repeat(rows // len(exact.clean), 1)


def test_loss_is_an_unbiased_estimate_of_the_continuous_objective(tiny):
    """Times, masks and routes as `forward` draws them, against an integral over t and sums over xt and z (Eq. 9)."""
    low, rows, calls = 0.05, 20_000, 10
    method = tiny(EMoEConfig(experts=2, t_low=low), length=2, timeless=True)
    exact = Enumeration(method)
    weight = RAMP["kl_weight"].item()
    expected, square = {"loss": 0.0, "recon": 0.0, "kl": 0.0}, {"loss": 0.0, "recon": 0.0, "kl": 0.0}
    with torch.no_grad():
        for t, w in gauss_legendre(low, 1.0, 24):
            terms = exact.terms(t)
            for name, weights in {"loss": (1 / t, weight), "recon": (1 / t, 0.0), "kl": (0.0, 1.0)}.items():
                expected[name] += w / (1 - low) * terms.moment(*weights, 1).mean().item() / 2
                square[name] += w / (1 - low) * terms.moment(*weights, 2).mean().item() / 4
        logs = [method(cycle(exact, rows), RAMP, Rng(7).at(call)).log for call in range(calls)]
    for name in expected:
        mean = sum(log[name].item() for log in logs) / calls
        error = math.sqrt((square[name] - expected[name] ** 2) / (rows * calls))
        assert abs(mean - expected[name]) < 4 * error, name
        assert error < 0.01 * expected[name]  # small enough to find a wrong weight


@pytest.mark.parametrize(
    "config",
    [
        EMoEConfig(experts=2),
        EMoEConfig(experts=3, schedule=CosineSchedule()),
        MDLMConfig(schedule=CosineSchedule()),
    ],
    ids=["emoe", "emoe-cosine", "mdlm-cosine"],
)
def test_loss_is_an_unbiased_estimate_of_the_discrete_objective(tiny, config, monkeypatch: pytest.MonkeyPatch):
    """On the grid t_i = i/T, where the network sees the time, row by row (Algo. 1, Eq. 9)."""
    steps, rows = 3, 60_000
    method = tiny(config)
    exact = Enumeration(method)
    grid = torch.tensor([(i + 1) / (steps + 1) for i in range(steps)])  # inside, where every schedule has a weight
    monkeypatch.setattr(masked, "stratified_times", lambda n, *_, **__: grid.repeat_interleave(n // steps))
    schedule, kl_weight = config.schedule, RAMP["kl_weight"].item()
    first, second = 0.0, 0.0
    with torch.no_grad():
        for t in grid.tolist():
            weights = float(schedule.elbo_weight(torch.tensor(t))), kl_weight
            terms = exact.terms(t)
            assert torch.allclose(terms.moment(0.0, 1.0, 1), terms.kl(), atol=1e-12)
            first += terms.moment(*weights, 1).mean().item() / 2 / steps
            second += terms.moment(*weights, 2).mean().item() / 4 / steps
        x0 = cycle(exact, rows // steps).repeat(steps, 1)
        losses = [method(x0, RAMP, Rng(8).at(call)).total.item() for call in range(3)]
    error = math.sqrt((second - first**2) / (3 * len(x0)))
    assert abs(sum(losses) / 3 - first) < 4 * error and error < 0.01 * first


def test_parts_of_the_loss_add_up_per_token(tiny):
    """total = mean of [weight * NLL + lambda * KL] / L + aux, the parts logged apart."""
    method = tiny(EMoEConfig(experts=2, balance=0.5), length=3)
    x0 = Enumeration(method).clean
    loss = method(x0, RAMP, Rng(9))
    parts = loss.log["recon"] + RAMP["kl_weight"] * loss.log["kl"] + loss.log["aux"]
    assert loss.total.item() == pytest.approx(parts.item(), abs=1e-14) and loss.log["loss"] is loss.total
    plain = tiny(EMoEConfig(experts=2), length=3)(x0, RAMP, Rng(9))
    assert plain.total.item() == pytest.approx((loss.total - loss.log["aux"]).item(), abs=1e-14)


def test_loss_without_any_masked_position_is_finite(tiny, monkeypatch: pytest.MonkeyPatch):
    method = tiny(EMoEConfig(experts=2))
    monkeypatch.setattr(masked, "stratified_times", lambda n, *_, **__: torch.full((n,), 1e-12))
    loss = method(torch.tensor([[0, 2], [2, 2]]), RAMP, Rng(0))
    assert loss.log["recon"] == 0 and loss.total.isfinite()
    loss.total.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in method.parameters())
