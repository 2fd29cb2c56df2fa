"""VADD: its latent, the weight of its KL, and the importance-weighted objective against integrals over the latent."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from enumeration import Enumeration, predict
from steps import loss_at, noised, randn
from torch import Tensor

from emoe.diffusion.masking import subs
from emoe.diffusion.schedule import CosineSchedule
from emoe.methods.masked import ReverseStep
from emoe.methods.vadd import VADD, GaussianLatent, VADDConfig
from emoe.ramps import Constant
from emoe.rng import Rng


def gaussian_kl(mean: Tensor, log_std: Tensor) -> Tensor:
    return GaussianLatent(mean, log_std, torch.zeros_like(mean)).kl()


def test_gaussian_kl_is_the_closed_form():
    mean, log_std = randn(3, 2, seed=26), 0.5 * randn(3, 2, seed=27)
    q = torch.distributions.Normal(mean, log_std.exp())
    p = torch.distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean))
    assert torch.allclose(gaussian_kl(mean, log_std), torch.distributions.kl_divergence(q, p).sum(-1), atol=1e-14)
    assert (gaussian_kl(torch.zeros(1, 4), torch.zeros(1, 4)) == 0).all()


def test_latent_is_drawn_from_the_encoder_and_in_the_sampler_from_the_prior(tiny):
    """z = mean + std * noise of the clean row and the mask pattern; the prediction is that of the network under z."""
    method = tiny(VADDConfig(latent=3))
    x0, xt, t = torch.tensor([[0, 2], [2, 2]]), torch.tensor([[0, 1], [1, 1]]), torch.tensor([0.3, 0.8]).double()
    out = method.infer(noised(method, x0, xt, t), {}, Rng(11))
    mean, log_std = method.encoder(x0, t, xt == 1).chunk(2, -1)
    noise = torch.randn(2, 3, generator=Rng(11).stream("latent"), dtype=torch.float64)
    z = mean + log_std.exp() * noise
    log_x_theta = subs(predict(method.backbone, xt, t, cond=z).logits, xt, 1)
    assert torch.equal(out.log_token, log_x_theta.gather(-1, x0[..., None]).squeeze(-1))
    assert torch.equal(out.latent.kl(), gaussian_kl(mean, log_std)) and torch.equal(out.latent.z, z)
    q, p = torch.distributions.Normal(mean, log_std.exp()), torch.distributions.Normal(0.0, 1.0)
    assert torch.allclose(out.latent.log_ratio(), (p.log_prob(z) - q.log_prob(z)).sum(-1), atol=1e-12)
    assert torch.equal(method.prior(ReverseStep(xt, t, xt == 1), Rng(11))["cond"], noise)
    other = method.encoder(x0, t, torch.zeros_like(xt, dtype=torch.bool))
    assert not torch.allclose(other, torch.cat([mean, log_std], -1))  # the encoder sees the mask pattern


@pytest.mark.parametrize("schedule", [None, CosineSchedule()], ids=["linear", "cosine"])
def test_kl_is_weighted_by_lambda_or_by_lambda_times_the_elbo_weight(tiny, schedule):
    more = {} if schedule is None else {"schedule": schedule}
    plain, weighted = tiny(VADDConfig(**more)), tiny(VADDConfig(elbo_weighted=True, **more))
    x0, ramp = Enumeration(plain).clean, {"kl_weight": torch.tensor(0.4, dtype=torch.float64)}
    for t in (0.25, 0.5):
        factor = 1 / t if schedule is None else schedule.elbo_weight(torch.tensor(t).double()).item()
        for method, weight in ((plain, 0.4), (weighted, 0.4 * factor)):
            xt, times = torch.full_like(x0, 1), torch.full((len(x0),), t).double()
            loss = loss_at(method, x0, xt, times, ramp, Rng(12))
            expected = (loss.log["recon"] + weight * loss.log["kl"]).item()
            assert loss.total.item() == pytest.approx(expected, rel=1e-13) and loss.log["kl"] > 0


def integrals(model: VADD, x0: Tensor, xt: Tensor, t: float, beta: float) -> tuple[float, float]:
    """E over pairs of draws of -beta log 1/2 sum_k exp(f_k / beta) p(z_k) / q(z_k), and -beta log E_p exp(f / beta)."""
    points = torch.linspace(-8, 8, 401, dtype=torch.float64)
    log_weight = torch.log_softmax(-points.square() / 2, 0)
    times = torch.full((1,), t, dtype=torch.float64)
    mean, log_std = model.encoder(x0, times, xt == model.space.mask_id).chunk(2, dim=-1)

    def f(z: Tensor) -> Tensor:
        logits = predict(model.backbone, xt.expand(len(z), -1), times.expand(len(z)), cond=z[:, None]).logits
        token = torch.log_softmax(logits[..., :-1], -1).gather(-1, x0.expand(len(z), -1)[..., None]).squeeze(-1)
        return (token * (xt == model.space.mask_id)).sum(-1) / t

    z = (mean + log_std.exp() * points).flatten()
    value = f(z) / beta + points.square() / 2 - z.square() / 2 + log_std.flatten()
    pairs = -beta * (torch.logaddexp(value[:, None], value) - math.log(2))
    two = (pairs * (log_weight[:, None] + log_weight).exp()).sum()
    return two.item(), -beta * torch.logsumexp(log_weight + f(points) / beta, 0).item()


@pytest.mark.parametrize("row", [[3, 3], [3, 1]])  # the mask is the last symbol
@pytest.mark.parametrize(("t", "beta", "elbo_weighted"), [(1.0, 1.0, False), (0.5, 0.7, False), (0.5, 1.0, True)])
def test_objective_of_two_draws_is_the_integral_and_many_draws_reach_the_likelihood(
    tiny, row: list[int], t: float, beta: float, elbo_weighted: bool
):
    config = VADDConfig(latent=1, draws=2, kl_weight=Constant(value=beta), elbo_weighted=elbo_weighted)
    x0, xt = torch.tensor([[2, 1]]), torch.tensor([row])
    ramp = {"kl_weight": torch.tensor(beta, dtype=torch.float64)}

    @torch.no_grad()
    def drawn(draws: int, rows: int) -> Tensor:
        model = tiny(dataclasses.replace(config, draws=draws), size=4, mask_id=3)
        times = torch.full((rows,), t, dtype=torch.float64)
        step = noised(model, x0.expand(rows, -1), xt.expand(rows, -1), times)
        return model.objective(step, ramp, Rng(5))[0]

    with torch.no_grad():
        two, limit = integrals(tiny(config, size=4, mask_id=3), x0, xt, t, beta / t if elbo_weighted else beta)
    loss = drawn(2, 20_000)
    assert abs(loss.mean() - two) < 4 * loss.std() / math.sqrt(len(loss))
    assert two > limit + 0.1  # a bound, far from tight with an encoder that never learned
    assert drawn(4_000, 20).mean().item() == pytest.approx(limit, abs=0.05)
