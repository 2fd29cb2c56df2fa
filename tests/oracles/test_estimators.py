"""Learning the posterior by comparing draws, against sums over all routes: gradients, objectives and bounds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from enumeration import Enumeration, Routes, routes_bound, routes_of, turns_of
from steps import batch_of, flat, generator, gradients, loss_at, noised, randn, recorded
from torch import Tensor

from emoe.backbones.layers import Router
from emoe.config import ConfigError
from emoe.exact.laws import chain_law
from emoe.methods.emoe import EMoE, EMoEConfig
from emoe.rng import Rng
from emoe.routing.compare import CompareConfig, leave_one_out, vimco, wake_sleep, wake_sleep_weights
from emoe.routing.routes import takes_turn
from emoe.types import Likelihood

SIGMAS = 4.5
BETA = 0.6
RAMP = {name: torch.tensor(value, dtype=torch.float64) for name, value in (("relax_tau", 0.7), ("kl_weight", BETA))}


def distance(draws: Tensor, want: Tensor) -> float:
    """Largest distance of the mean over the first axis from its expectation, in standard errors."""
    error = draws.std(0) / math.sqrt(len(draws))
    return ((draws.mean(0) - want).abs() / (error + 1e-12)).max().item()


def many_draw_bound(f: Tensor, r: Tensor, s: Tensor, draws: int, beta: float) -> Tensor:
    """-E over z_1..z_K of beta log 1/K sum_k exp(f / beta + r - s), by all E^K tuples."""
    z = torch.tensor(list(itertools.product(range(len(f)), repeat=draws)))
    bound = beta * ((f / beta + r - s)[z].logsumexp(1) - math.log(draws))
    return -(s[z].sum(1).exp() * bound).sum()


def test_learning_signals_have_their_baselines():
    """The factor of grad log q of draw k: any baseline is unbiased, these are the published ones."""
    f, r, s, beta = randn(1, 3, 1, seed=40), randn(1, 3, 1, seed=41), randn(1, 3, 1, seed=42).requires_grad_(), 0.5
    value = [v.item() for v in (f + beta * (r - s)).flatten()]
    (single_scores,) = torch.autograd.grad(leave_one_out(f, r, s, beta).sum(), s)
    (many_scores,) = torch.autograd.grad(vimco(f, r, s, beta).sum(), s)
    cold = [v / beta for v in value]
    bound = math.log(sum(math.exp(v) for v in cold) / 3)
    for k in range(3):
        mean = sum(v for j, v in enumerate(value) if j != k) / 2
        assert single_scores[0, k].item() == pytest.approx(-(value[k] - mean) / 3, abs=1e-13)
        others = [v for j, v in enumerate(cold) if j != k]
        without = math.log((math.exp(sum(others) / 2) + sum(math.exp(v) for v in others)) / 3)
        share = math.exp(cold[k] - bound) / 3  # of the bound's own dependence on log q
        assert many_scores[0, k].item() == pytest.approx(beta * (share - (bound - without)), abs=1e-13)


def test_weights_effective_draws_and_groups():
    f, r, s = (3 * randn(4, 5, 2, seed=seed) for seed in (12, 13, 14))
    for loss in (wake_sleep, vimco, leave_one_out):
        apart = sum(loss(f[..., g : g + 1], r[..., g : g + 1], s[..., g : g + 1], 0.5) for g in range(2))
        assert torch.allclose(loss(f, r, s, 0.5), apart, rtol=1e-13)
    weights = wake_sleep_weights(f.requires_grad_(), r, s, 0.5)
    by_hand = (f / 0.5 + r - s).exp()
    assert torch.allclose(weights, by_hand / by_hand.sum(1, keepdim=True), atol=1e-14) and not weights.requires_grad
    assert torch.equal(wake_sleep_weights(f, r, s, 0.0), wake_sleep_weights(f, r, s, 0.01))  # beta may start at 0


FORMS = [(sum_last, in_turn) for sum_last in (False, True) for in_turn in (False, True)]
FORM_IDS = ["plain", "in turn", "sum last", "both"]
ROW = [0, 2], [1, 1]


def compared(estimator: str, form: tuple[bool, bool] = (False, False), draws: int = 2, **more: object) -> EMoEConfig:
    experts = more.pop("experts", 2)
    compare = CompareConfig(estimator=estimator, draws=draws, sum_last=form[0], in_turn=form[1], **more)
    return EMoEConfig(experts=experts, compare=compare)


def is_router(method: EMoE) -> Tensor:
    """Which entries of `flat` belong to routers."""
    return torch.cat([torch.full((p.numel(),), ".router." in name) for name, p in method.named_parameters()])


def drawn_slopes(method: EMoE, row: tuple[list[int], list[int]], *, each: int, groups: int = 40) -> Tensor:
    """Independent means of the training gradient of a row (x0, xt) at t = 1/2, (groups, parameters)."""
    x0, xt = (torch.tensor([one]).expand(each, -1) for one in row)
    t, rng = torch.full((each,), 0.5).double(), Rng(1)
    losses = (loss_at(method, x0, xt, t, RAMP, rng.at(group)).total for group in range(groups))
    return torch.stack([flat(gradients(method, method.space.length * loss), method) for loss in losses])


def routes_at(method: EMoE, row: tuple[list[int], list[int]]) -> Routes:
    return routes_of(method, *(torch.tensor([one]) for one in row), 0.5)


def assert_exact(method: EMoE, value: Callable[[Routes], Tensor], row: tuple[list[int], list[int]]) -> None:
    """The mean training gradient is that of an enumerated objective, in every parameter."""
    want = flat(gradients(method, value(routes_at(method, row))), method)
    got, routers = drawn_slopes(method, row, each=150), is_router(method)
    assert want[routers].norm() > 10 * (got[:, routers].var(0).sum() / len(got)).sqrt()  # a bias would show
    assert distance(got, want) < SIGMAS


@pytest.mark.parametrize("row", [ROW, ([2, 2], [1, 2])], ids=["all masked", "one masked"])
@pytest.mark.parametrize("form", FORMS, ids=FORM_IDS)
def test_leave_one_out_has_the_exact_gradient_of_every_parameter(tiny, form, row):
    method = tiny(compared("leave-one-out", form, 3))
    assert_exact(method, lambda routes: routes.elbo(2.0, BETA).sum(), row)


@pytest.mark.parametrize(("form", "draws"), [*((form, 2) for form in FORMS), (FORMS[-1], 3)])
def test_vimco_has_the_exact_gradient_of_every_parameter(tiny, form, draws: int):
    def value(routes: Routes) -> Tensor:
        return many_draw_bound(2 * routes.log_x[0], routes.log_p[0], routes.log_q[0], draws, BETA)

    assert_exact(tiny(compared("vimco", form, draws)), value, ROW)


@pytest.mark.parametrize("form", FORMS, ids=FORM_IDS)
def test_wake_sleep_tends_to_the_enumerated_gradient(tiny, form):
    """-beta log sum_z p(z) exp(f / beta) for network and prior, KL(p(z | x0, xt) || q) for the posterior."""
    method = tiny(compared("wake-sleep", form, draws=1_000))
    routes, routers = routes_at(method, ROW), is_router(method)
    score = routes.log_p + 2 * routes.log_x / BETA
    value = -BETA * score.logsumexp(-1).sum() - (torch.softmax(score, -1).detach() * routes.log_own).sum()
    want = flat(gradients(method, value), method)
    mean = drawn_slopes(method, ROW, each=4, groups=10).mean(0)
    assert (mean - want).norm() < 0.03 * want.norm()
    assert (mean - want)[routers].norm() < 0.05 * want[routers].norm()
    other = flat(gradients(method, routes_at(method, ROW).elbo(2.0, BETA).sum()), method)
    assert (other - want).norm() > 0.1 * want.norm()  # not the gradient of the bound
    few = drawn_slopes(tiny(compared("wake-sleep", form)), ROW, each=1_000, groups=10).mean(0)
    assert (few - want)[routers].norm() > 3 * (mean - want)[routers].norm()  # biased for few draws


def test_straight_through_is_biased_in_the_routers_only(tiny):
    """Without comparisons: the head's mean gradient is the exact one, that of the routers points the same way."""
    method = tiny(EMoEConfig(experts=2))
    want = flat(gradients(method, routes_at(method, ROW).elbo(2.0, BETA).sum()), method)
    head = torch.cat([torch.full((p.numel(),), ".head." in name) for name, p in method.named_parameters()])
    slopes, routers = drawn_slopes(method, ROW, each=400), is_router(method)
    assert distance(slopes[:, head], want[head]) < SIGMAS < distance(slopes[:, routers], want[routers])
    mean = slopes.mean(0)[routers]
    assert torch.dot(mean, want[routers]) > 0.5 * mean.norm() * want[routers].norm()


@pytest.mark.parametrize("form", FORMS, ids=FORM_IDS)
@pytest.mark.parametrize("estimator", ["wake-sleep", "vimco", "leave-one-out"])
@pytest.mark.parametrize("credit", ["row", "position"])
def test_every_estimator_trains(tiny, estimator: str, credit: str, form):
    method = tiny(compared(estimator, form, 3, experts=3, credit=credit))
    out = method(Enumeration(method).clean.repeat(4, 1), RAMP, Rng(9))
    recon, kl = out.log["recon"].item(), out.log["kl"].item()
    assert out.total.item() == pytest.approx(recon + BETA * kl, rel=1e-12) and kl > 0
    slopes = gradients(method, out.total)
    assert all(slopes[f"backbone.trunk.blocks.{d}.mlp.router.weight"].abs().max() > 1e-5 for d in range(2))
    assert all(slope is None or slope.isfinite().all() for slope in slopes.values())
    assert 1 <= out.log["effective_draws"] <= 3


@pytest.mark.parametrize("form", [None, *FORMS], ids=["straight-through", *FORM_IDS])
def test_inference_is_that_of_the_drawn_route(tiny, form):
    """`infer` gives log p(x0 | xt, z), the log ratio and the KL along the z that it drew (Eq. 8)."""
    method = tiny(EMoEConfig(experts=3) if form is None else compared("vimco", form, experts=3))
    exact, (x0, xt, t) = Enumeration(method), batch_of(method)
    routes_drawn = exact.routes[::9, :1] if form and form[0] else exact.routes
    with torch.no_grad():
        out = method.infer(noised(method, x0, xt, t), RAMP, Rng(2))
        for row in range(len(x0)):
            routes = routes_of(method, x0[row : row + 1], xt[row : row + 1], t[row].item())
            z = torch.stack([route[row] for route in out.latent.routes])
            r = int((routes_drawn == z).all((1, 2)).nonzero())
            assert out.log_token[row].sum().item() == pytest.approx(routes.log_x[0, r].item(), abs=1e-12)
            ratio = (routes.log_p - routes.log_q)[0, r].item()
            assert out.latent.log_ratio()[row].item() == pytest.approx(ratio, abs=1e-12)
    kl = torch.zeros(len(x0)).double()
    for post, prior, own in zip(out.latent.post, out.latent.prior, turns_of(method), strict=False):
        q, p = (torch.log_softmax(side, -1) for side in (post, prior))
        kl += (q.exp() * (q - p)).sum(-1)[:, own].sum(-1)  # 0 where it is not a position's turn
    assert torch.allclose(out.latent.kl(), kl, atol=1e-13) and kl.max() > 0.05


@pytest.mark.parametrize("in_turn", [False, True])
def test_summing_the_last_block_tightens_the_bound(tiny, in_turn: bool):
    """Exact NLL <= summed <= drawn from the prior in the last block; and `nll` draws the enumerated number."""
    method, drawn = (tiny(compared("vimco", form, experts=3)) for form in ((True, in_turn), (False, True)))
    exact = Enumeration(method)
    rows = exact.clean.repeat(1_500, 1)
    rows = rows[torch.randperm(len(rows), generator=generator(3))]
    with torch.no_grad():
        for steps in (1, 2):
            summed = routes_bound(method, steps)
            assert (summed >= exact.nll(steps) - 1e-12).all()
            assert (summed < routes_bound(drawn, steps) - 1e-3).all()  # with two blocks the last one is drawn from p
            values = method.nll(rows, Likelihood("bound", steps), Rng(4))
            for row, want in zip(exact.clean, summed, strict=True):
                assert distance(values[(rows == row).all(1)], want) < SIGMAS


@pytest.mark.parametrize("seed", [21, 4])
def test_positions_in_turn_keep_the_bound(tiny, seed: int):
    """bound@T by enumeration >= the exact NLL of the T-step chain at every row, and `nll` draws that number."""
    for form in ((False, True), (True, True)):
        method = tiny(compared("wake-sleep", form), length=3, depth=3, seed=seed)
        exact, rows = Enumeration(method), Enumeration(method).clean.repeat(50, 1)
        with torch.no_grad():
            for steps in (1, 2):
                nll, want = -chain_law(method, steps).flatten().log(), routes_bound(method, steps)
                assert torch.allclose(nll, exact.nll(steps), atol=1e-6) and (want > nll - 1e-6).all()
                draws = [method.nll(rows, Likelihood("bound", steps), Rng(k)).mean() for k in range(20)]
                assert distance(torch.stack(draws), want.mean()) < SIGMAS


def test_turns_are_a_partition_of_the_positions(tiny):
    for blocks, positions in ((2, 3), (3, 5), (4, 7)):
        table = torch.stack([takes_turn(d, blocks - 1, torch.zeros(2, positions)) for d in range(blocks)])
        assert (table.sum(0) == 1).all() and not table[-1].any()
    method = tiny(compared("wake-sleep", (False, True), draws=4), length=3, depth=3)
    x0 = Enumeration(method).clean
    with recorded(method) as calls:  # wake-sleep: the posterior learns only in its turn, the prior everywhere
        loss = loss_at(method, x0, torch.full_like(x0, 1), torch.full((8,), 0.5).double(), RAMP, Rng(8))
    for slope, own in zip(torch.autograd.grad(loss.total, calls[0].route_logits), turns_of(method), strict=True):
        clean, noisy = slope.chunk(2)
        idle = [position for position in range(3) if position not in own]
        assert (clean[:, idle] == 0).all() and (not own or clean[:, own].abs().amax((0, 2)).min() > 1e-4)
        assert noisy.abs().amax((0, 2)).min() > 1e-4


def test_a_summed_block_counts_in_usage_and_floor(tiny):
    compare = CompareConfig(estimator="wake-sleep", draws=2, sum_last=True)
    method = tiny(EMoEConfig(experts=3, compare=compare, balance=0.5, usage_floor=1.0))
    last = [module for module in method.backbone.modules() if isinstance(module, Router)][-1]
    x0, xt, t = batch_of(method)

    def usage(bias: list[float]) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            last.weight.zero_()
            last.bias.copy_(torch.tensor(bias))
            log = loss_at(method, x0, xt, t, RAMP, Rng(3)).log
        return log["usage/block2"], log["aux"]

    even, base = usage([0.0, 0.0, 0.0])
    assert torch.allclose(even, torch.full((3,), 1 / 3).double())
    one, more = usage([50.0, 0.0, 0.0])  # entropy 0, 1 nat below the floor, in one of two blocks
    assert one[0] > 0.999 and (more - base).item() == pytest.approx(0.5 * 1.0 / 2, abs=1e-6)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: CompareConfig(draws=1), "draws"),
        (lambda: EMoEConfig(compare=CompareConfig(), free_nats=0.1), "free_nats"),
        (lambda: EMoEConfig(compare=CompareConfig(sum_last=True), head_chunk=8), "head_chunk"),
        (lambda: EMoEConfig(experts=1, top_k=2), "top_k"),
    ],
)
def test_options_that_contradict_each_other_are_refused_by_name(make: Callable[[], object], field: str):
    with pytest.raises(ConfigError) as caught:
        make()
    assert [line.split(":")[0] for line in caught.value.problems] == [field]


def test_free_nats_change_the_counted_kl(tiny):
    """A block whose mean KL is at most the free nats is left out; all others count in full."""
    plain = tiny(EMoEConfig(experts=3))
    x0, xt, t = batch_of(plain)

    def counted(**options: object) -> tuple[float, list[float]]:
        loss = loss_at(tiny(EMoEConfig(experts=3, **options)), x0, xt, t, RAMP, Rng(10))
        kl = 2 * (loss.total - loss.log["recon"]).item() / BETA
        return kl, [loss.log[f"route_kl/block{d}"].item() * 2 for d in (1, 2)]

    total, means = counted()
    low, high = min(means), max(means)
    assert low > 0.01 and high > 1.1 * low and total == pytest.approx(low + high, abs=1e-12)
    for free, kept in ((low / 2, low + high), ((low + high) / 2, high), (2 * high, 0.0)):
        assert counted(free_nats=free) == (pytest.approx(kept, abs=1e-12), means)
    # Every second block from the first on: the second block has nothing free.
    assert counted(free_nats=2 * high, free_every=2)[0] == pytest.approx(means[1], abs=1e-12)
