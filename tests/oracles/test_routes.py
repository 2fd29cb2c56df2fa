"""Routes, their divergence and gradients, experts and the fused pass against plain references (Section 3.2-3.3)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from enumeration import ALPHA, Enumeration, chi_square, predict
from steps import batch_of, generator, loss_at, masks, noised, ramp_of, randn
from torch import Tensor

from emoe.diffusion.categorical import categorical_kl
from emoe.methods.emoe import EMoEConfig
from emoe.ramps import Constant
from emoe.rng import Rng
from emoe.routing.compare import CompareConfig
from emoe.routing.latent import RouteLatent
from emoe.routing.routes import draw, greedy, replay, sharpened
from emoe.types import Gate, Route

RAMP = {name: torch.tensor(value, dtype=torch.float64) for name, value in (("relax_tau", 0.7), ("kl_weight", 1.0))}


def route_kl(post: Sequence[Tensor], prior: Sequence[Tensor]) -> Tensor:
    """KL of each row and block, (B, D)."""
    routes = tuple(torch.zeros(block.shape[:2], dtype=torch.int64) for block in post)
    return RouteLatent(tuple(post), tuple(prior), routes).stats.kl


@pytest.mark.parametrize(("experts", "length", "depth"), [(2, 2, 2), (3, 2, 2), (2, 3, 2), (3, 3, 1)])
def test_kl_along_the_route_averages_to_the_kl_of_whole_routes(tiny, experts: int, length: int, depth: int):
    """Eq. 7-8: E over z ~ q of the sum of the routers' KLs is KL(q(z | x0) || p(z | xt)) over all E^(D L) routes."""
    method = tiny(EMoEConfig(experts=experts), length=length, depth=depth)
    exact, t = Enumeration(method), 0.6
    with torch.no_grad():
        for x0, xt in zip(*(rows.tolist() for rows in batch_of(method, 6)[:2]), strict=True):
            log_q, _, post = exact.read(torch.tensor([x0]), t)
            log_p, _, prior = exact.read(torch.tensor([xt]), t)
            assert log_q.exp().sum().item() == pytest.approx(1, abs=1e-13)
            assert log_p.exp().sum().item() == pytest.approx(1, abs=1e-13)
            whole = (log_q.exp() * (log_q - log_p)).sum()
            each = route_kl([block[0] for block in post], [block[0] for block in prior])  # (R, D)
            assert each.shape == (len(exact.routes), depth) and (each > -1e-15).all()
            assert (log_q[0].exp() @ each.sum(-1)).item() == pytest.approx(whole.item(), abs=1e-12)
            assert (each == 0).all() if x0 == xt else whole > 1e-4


def test_categorical_kl_by_hand():
    q, p = torch.tensor([0.5, 0.25, 0.25]).double(), torch.tensor([0.25, 0.5, 0.25]).double()
    by_hand = 0.5 * math.log(2) - 0.25 * math.log(2)
    assert categorical_kl(q.log(), p.log()).item() == pytest.approx(by_hand, abs=1e-15)
    rows = [torch.log_softmax(randn(50, 6, seed=seed), -1) for seed in (3, 4)]
    kl, reverse = categorical_kl(*rows), categorical_kl(*rows[::-1])
    assert (kl > 0).all() and not torch.allclose(kl, reverse) and (categorical_kl(rows[0], rows[0]) == 0).all()


RHOS = [
    [0.5, 0.5],
    [0.999, 0.001],
    [1 - 1e-4, 1e-4],
    [0.2, 0.3, 0.5],
    [0.98, 0.01, 0.01],
    [0.5, 0.3, 0.15, 0.05],
    [0.9985, 0.0005, 0.0005, 0.0005],
    [0.4, 0.2, 0.1, 0.1, 0.05, 0.05, 0.05, 0.05],
]


@pytest.mark.parametrize("rho", RHOS, ids=str)
def test_drawn_routes_follow_the_router_at_every_temperature(rho: list[float]):
    """Eq. 10-11: the executed expert is a draw from rho whatever relax_tau is, and the same one for the same noise."""
    n = 100_000
    logits = torch.tensor(rho).double().log().expand(1, n, -1) + 3.0  # routers are not normalised
    experts = [draw(generator(5), tau, top_k=min(2, len(rho)))(0, logits).expert[0, :, 0] for tau in (0.01, 1.0, 5.0)]
    assert torch.equal(experts[0], experts[1]) and torch.equal(experts[0], experts[2])
    assert chi_square(torch.bincount(experts[0], minlength=len(rho)), torch.tensor(rho)) > ALPHA


@pytest.mark.parametrize("policy", [lambda g: draw(g, 1.0), lambda g: sharpened(g, 1.0)], ids=["draw", "sharpened"])
def test_routes_are_independent_over_positions_blocks_and_rows(policy: Callable[[torch.Generator], Route]):
    n = 50_000
    rho = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3]]).double()
    route = policy(generator(6))
    z = torch.cat([route(d, rho.log().expand(n, 2, 3)).expert[..., 0] for d in range(2)], 1)  # (n, 2 * 2)
    laws = [rho[0], rho[1], rho[0], rho[1]]
    for i in range(4):
        for j in range(i):
            counts = torch.bincount(z[:, i] * 3 + z[:, j], minlength=9)
            assert chi_square(counts, laws[i][:, None] * laws[j]) > ALPHA, (i, j)
    rows = torch.bincount(z[::2, 0] * 3 + z[1::2, 0], minlength=9)
    assert chi_square(rows, laws[0][:, None] * laws[0]) > ALPHA


@pytest.mark.parametrize("tau", [0.25, 0.5, 2.0])
def test_sharpened_routes_follow_the_tempered_router(tau: float):
    rho = torch.tensor([0.5, 0.3, 0.15, 0.05]).double()
    logits = rho.log().expand(1, 100_000, 4) - 1.0
    gate = sharpened(generator(7), tau)(0, logits)
    counts = torch.bincount(gate.expert[0, :, 0], minlength=4)
    assert chi_square(counts, rho ** (1 / tau)) > ALPHA
    assert chi_square(counts, rho) < 1e-9
    assert gate.expert.shape == (1, 100_000, 1) and (gate.weight == 1).all()


def test_route_tau_zero_is_greedy_and_greedy_is_the_arg_max():
    logits = randn(4, 5, 6, seed=8)
    for route in (sharpened(generator(), 0.0), greedy()):
        gate = route(0, logits)
        assert torch.equal(gate.expert[..., 0], logits.argmax(-1)) and (gate.weight == 1).all()


@pytest.mark.parametrize("tau", [1.0, 0.5, 0.0])
def test_sampler_draws_its_routes_at_route_tau(tiny, tau: float):
    """The routes of a step event follow the sharpened router, and the tokens are those of these routes."""
    method, events = tiny(EMoEConfig(experts=3, route_tau=tau), depth=1, length=1), []
    rows = method.sample(masks(method, 30_000), 1, Rng(9), on_step=events.append)
    z = events[0].latent[0].expert[:, 0, 0]
    each = replay([Gate(torch.arange(3)[:, None, None], torch.ones(3, 1, 1).double())])
    with torch.no_grad():
        out = predict(method.backbone, masks(method, 3), torch.ones(3), route=each)
    rho = torch.softmax(out.route_logits[0][0, 0], -1)
    sharp = rho ** (1 / tau) if tau else torch.nn.functional.one_hot(rho.argmax(), 3).double()
    joint = (sharp / sharp.sum())[:, None] * torch.softmax(out.logits[:, 0], -1)
    assert chi_square(torch.bincount(z * 3 + rows[:, 0], minlength=9), joint) > ALPHA


def test_draws_share_their_row_and_follow_the_router():
    rho, n, draws = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3]]).double(), 20_000, 3
    policy = draw(generator(33), 1.0, top_k=0, draws=draws)
    for block in range(2):
        gate = policy(block, rho.log().expand(n if block == 0 else n * draws, 2, 3))
        assert gate.draws == (draws if block == 0 else 1) and gate.expert.shape == (n * draws, 2, 1)
        assert not gate.weight.requires_grad
        z = gate.expert.view(n, draws, 2)
        for k in range(draws):
            both = torch.bincount(z[:, k, 0] * 3 + z[:, k, 1], minlength=9)
            assert chi_square(both, rho[0][:, None] * rho[1]) > ALPHA, (block, k)
        pair = torch.bincount(z[:, 0, 0] * 3 + z[:, 2, 0], minlength=9)
        assert chi_square(pair, rho[0][:, None] * rho[0]) > ALPHA, block


@pytest.mark.parametrize("sizes", [(4,), (4, 4, 4), (8, 2, 6)])
def test_statistics_of_all_blocks_are_those_of_each(sizes: tuple[int, ...]):
    post, prior = (tuple(randn(3, size, 4, seed=s + d) for d, size in enumerate(sizes)) for s in (30, 40))
    routes = tuple(torch.randint(4, (3, size), generator=generator(d)) for d, size in enumerate(sizes))
    latent = RouteLatent(post, prior, routes)
    stats, log = latent.stats, latent.log(by_position=True)
    ratio = torch.zeros(3).double()
    for d, at in enumerate(stats.kl_at.split(sizes, dim=1)):
        q, p = (torch.log_softmax(side[d], -1) for side in (post, prior))
        kl = (q.exp() * (q - p)).sum(-1)
        counts = torch.bincount(routes[d].flatten(), minlength=4)
        ratio += (p - q).gather(-1, routes[d][..., None]).sum((1, 2))
        assert torch.allclose(at, kl, atol=1e-14) and torch.allclose(stats.kl[:, d], kl.sum(1), atol=1e-14)
        assert torch.allclose(stats.chance[d], q.exp().mean((0, 1)), atol=1e-14)
        expected = {
            "usage": counts / counts.sum().double(),
            "post_entropy": -(q.exp() * q).sum(-1).mean(),
            "prior_entropy": -(p.exp() * p).sum(-1).mean(),
            "route_kl": kl.mean(),
            "route_kl_at": kl.mean(0),
        }
        for name, want in expected.items():
            assert torch.allclose(log[f"{name}/block{d + 1}"], want, atol=1e-14), name
    assert torch.allclose(latent.kl(), stats.kl.sum(-1)) and torch.allclose(latent.log_ratio(), ratio, atol=1e-13)


def test_balance_adds_the_mean_over_blocks_of_the_posterior_routers(tiny):
    x0, xt, t = batch_of(tiny(EMoEConfig(experts=3)))
    for floor in (None, 1.2):
        method = tiny(EMoEConfig(experts=3, balance=0.25, usage_floor=floor))
        out = method.infer(noised(method, x0, xt, t), RAMP, Rng(6))
        parts = []
        for post, route in zip(out.latent.post, out.latent.routes, strict=True):
            share = torch.nn.functional.one_hot(route, 3).double().mean((0, 1))
            chance = torch.softmax(post, -1).mean((0, 1))
            missing = (1.2 + (chance * chance.log()).sum()).clamp(min=0)
            parts.append((3 * (share * chance).sum() if floor is None else missing).item())
        assert max(parts) > 0.05 and out.aux.item() == pytest.approx(0.25 * sum(parts) / 2, abs=1e-13)
    assert tiny(EMoEConfig(experts=3)).infer(noised(method, x0, xt, t), RAMP, Rng(6)).aux is None


@pytest.mark.parametrize("compare", [None, CompareConfig(draws=3)], ids=["gates", "compare"])
@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
def test_kl_counts_with_its_weight_times_a_power_of_w(tiny, power: float, compare: CompareConfig | None):
    method = tiny(EMoEConfig(experts=2, kl_time_power=Constant(value=power), compare=compare))
    x0, ramp = torch.tensor([[0, 2], [2, 0]]), ramp_of(method) | {"kl_weight": torch.tensor(0.5, dtype=torch.float64)}
    for t in (0.25, 0.5):
        loss = loss_at(method, x0, torch.full_like(x0, 1), torch.full((2,), t).double(), ramp, Rng(3))
        expected = loss.log["recon"] + 0.5 * t**-power * loss.log["kl"]
        assert loss.total.item() == pytest.approx(expected.item(), rel=1e-12) and loss.log["kl"] > 0.01
