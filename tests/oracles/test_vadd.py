"""VADD's importance-weighted objective against integrals over its latent."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from emoe.methods.vadd import VADD, VADDConfig
from emoe.ramps import Constant
from emoe.rng import Rng

ROWS = 20_000


def integrals(model: VADD, x0: torch.Tensor, xt: torch.Tensor, t: float, beta: float) -> tuple[float, float]:
    """E over pairs of draws of -beta log 1/2 sum_k exp(f_k / beta) p(z_k) / q(z_k), and -beta log E_p exp(f / beta)."""
    points = torch.linspace(-8, 8, 401, dtype=torch.float64)
    log_weight = torch.log_softmax(-points.square() / 2, 0)
    times = torch.full((1,), t, dtype=torch.float64)
    mean, log_std = model.encoder(x0, times, xt == model.space.mask_id).chunk(2, dim=-1)

    def f(z: torch.Tensor) -> torch.Tensor:
        logits = model.backbone(xt.expand(len(z), -1), times.expand(len(z)), cond=z[:, None]).logits
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
    knobs = {"kl_weight": torch.tensor(beta, dtype=torch.float64)}

    def drawn(draws: int, rows: int) -> torch.Tensor:
        model = tiny(dataclasses.replace(config, draws=draws), size=4, mask_id=3)
        times = torch.full((rows,), t, dtype=torch.float64)
        with torch.no_grad():
            return model.objective(x0.expand(rows, -1), xt.expand(rows, -1), times, knobs, Rng(5)).loss

    weight = beta / t if elbo_weighted else beta
    with torch.no_grad():
        two, limit = integrals(tiny(config, size=4, mask_id=3), x0, xt, t, weight)
    loss = drawn(2, ROWS)
    assert abs(loss.mean() - two) < 4 * loss.std() / ROWS**0.5
    assert two > limit + 0.1  # a bound, far from tight with an encoder that never learned
    assert drawn(4_000, 20).mean().item() == pytest.approx(limit, abs=0.05)


def test_gradient_reaches_the_encoder_and_the_network(tiny):
    model = tiny(VADDConfig(draws=3), size=4, mask_id=3)
    x0 = torch.tensor([[2, 1], [0, 0]])
    loss = model(x0, {"kl_weight": torch.tensor(1.0, dtype=torch.float64)}, Rng(0)).total
    loss.backward()
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in model.encoder.parameters())
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in model.backbone.parameters())
