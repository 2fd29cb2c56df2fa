"""Estimators of the latent against sums over all routes: gradients, draws, and the objectives that they belong to."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from enumeration import ALPHA, Enumeration, chi_square, single
from torch import Tensor

from emoe.backbones.layers import Router
from emoe.config import ConfigError
from emoe.diffusion.categorical import gumbel
from emoe.diffusion.masking import masked_nll, subs
from emoe.exact import chain_law
from emoe.methods.emoe import EMoE, EMoEConfig
from emoe.ramps import Constant
from emoe.rng import Rng
from emoe.routing import routes
from emoe.routing.estimators import effective_draws, leave_one_out, vimco, wake_sleep, wake_sleep_weights
from emoe.routing.experts import RoutedExperts
from emoe.routing.kl import compare, usage_shortfall
from emoe.routing.routes import carried, carries, draw, gumbel_rao_weights, reinmax_weights, straight_through
from emoe.types import BackboneOut, Convention, Gate
from emoe.verify import exact_terms

SIGMAS = 4.5
BETA = 0.6
KNOBS = {"relax_tau": torch.tensor(0.7, dtype=torch.float64), "kl_weight": torch.tensor(BETA, dtype=torch.float64)}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=generator(seed), dtype=torch.float64)


def far(draws: Tensor, want: Tensor) -> float:
    """Largest distance of the mean over the first axis from what it should be, in standard errors."""
    error = draws.std(0) / math.sqrt(len(draws))
    return ((draws.mean(0) - want).abs() / (error + 1e-12)).max().item()


# --- Losses over several draws, with a single categorical z ------------------------------------------------------

EXPERTS = 3
REWARD, PRIOR, POST = randn(EXPERTS, seed=1), randn(EXPERTS, seed=2), randn(EXPERTS, seed=39)


def estimated(loss: Callable[..., Tensor], rows: int, draws: int, beta: float, seed: int) -> list[Tensor]:
    """Gradients in the rewards f, the prior's logits and the posterior's, for each of many independent rows."""
    leaves = [one.expand(rows, -1).clone().requires_grad_() for one in (REWARD, PRIOR, POST)]
    z = torch.multinomial(torch.softmax(POST, 0), rows * draws, replacement=True, generator=generator(seed))
    z = z.view(rows, draws)
    f, r, s = leaves[0], torch.log_softmax(leaves[1], -1), torch.log_softmax(leaves[2], -1)
    loss(*(one.gather(1, z)[..., None] for one in (f, r, s)), beta).sum().backward()
    return [leaf.grad for leaf in leaves]


def enumerated(value: Callable[[Tensor, Tensor, Tensor], Tensor]) -> list[Tensor]:
    """The same gradients of a function of (f, log p, log q) over all z."""
    leaves = [one.clone().requires_grad_() for one in (REWARD, PRIOR, POST)]
    return list(
        torch.autograd.grad(
            value(leaves[0], torch.log_softmax(leaves[1], -1), torch.log_softmax(leaves[2], -1)), leaves
        )
    )


@pytest.mark.parametrize("beta", [1.0, 0.5])
def test_wake_sleep_tends_to_the_likelihood_and_the_true_posterior(beta: float):
    """Network and prior: -beta log sum_z p(z) exp(f / beta); posterior: KL(p(z | x) || q)."""

    def value(f: Tensor, r: Tensor, s: Tensor) -> Tensor:
        target = torch.log_softmax(r + f / beta, 0).detach()
        return -beta * (r + f / beta).logsumexp(0) + (target.exp() * (target - s)).sum()

    want = enumerated(value)
    assert all(one.abs().max() > 0.05 for one in want)
    for got, exact in zip(estimated(wake_sleep, 50, 4_000, beta, 4), want, strict=True):
        assert far(got, exact) < SIGMAS
        assert torch.allclose(got.mean(0), exact, atol=0.01)


def many_draw_bound(f: Tensor, r: Tensor, s: Tensor, draws: int, beta: float) -> Tensor:
    """-E over z_1..z_K of beta log 1/K sum_k exp(f / beta + r - s), by all E^K tuples."""
    z = torch.tensor(list(itertools.product(range(len(f)), repeat=draws)))
    bound = beta * ((f / beta + r - s)[z].logsumexp(1) - math.log(draws))
    return -(s[z].sum(1).exp() * bound).sum()


@pytest.mark.parametrize("draws", [2, 3])
@pytest.mark.parametrize("beta", [1.0, 0.5])
def test_vimco_is_unbiased_for_its_bound(draws: int, beta: float):
    want = enumerated(lambda f, r, s: many_draw_bound(f, r, s, draws, beta))
    for got, exact in zip(estimated(vimco, 100_000, draws, beta, 5), want, strict=True):
        assert far(got, exact) < SIGMAS
        assert exact.abs().max() > 10 * got.std() / math.sqrt(len(got))


@pytest.mark.parametrize("draws", [2, 4])
@pytest.mark.parametrize("beta", [1.0, 0.5])
def test_leave_one_out_is_unbiased_for_the_elbo(draws: int, beta: float):
    want = enumerated(lambda f, r, s: -(s.exp() * (f + beta * (r - s))).sum())
    for got, exact in zip(estimated(leave_one_out, 100_000, draws, beta, 6), want, strict=True):
        assert far(got, exact) < SIGMAS
        assert exact.abs().max() > 10 * got.std() / math.sqrt(len(got))


def test_a_single_draw_teaches_wake_sleeps_posterior_nothing():
    """Its weight is 1 whatever its reward, and the score has mean zero."""
    one = randn(5, 1, 2, seed=7)
    assert (wake_sleep_weights(one, 2 * one, 3 * one, 0.5) == 1).all()
    got = estimated(wake_sleep, 100_000, 1, 1.0, 8)[2]
    assert far(got, torch.zeros(EXPERTS).double()) < SIGMAS
    assert got.std() > 0.1


def test_learning_signals_have_their_baselines():
    """What multiplies grad log q of draw k: any baseline is unbiased, these are the ones that are meant."""
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


def test_groups_are_judged_apart_and_summed():
    f, r, s = (randn(4, 3, 2, seed=seed) for seed in (9, 10, 11))
    for loss in (wake_sleep, vimco, leave_one_out):
        apart = sum(loss(f[..., g : g + 1], r[..., g : g + 1], s[..., g : g + 1], 0.5) for g in range(2))
        assert torch.allclose(loss(f, r, s, 0.5), apart, atol=1e-14)


def test_weights_and_effective_draws():
    f, r, s = (3 * randn(4, 5, 2, seed=seed) for seed in (12, 13, 14))
    weights = wake_sleep_weights(f.requires_grad_(), r, s, 0.5)
    by_hand = (f / 0.5 + r - s).exp()
    assert torch.allclose(weights, by_hand / by_hand.sum(1, keepdim=True), atol=1e-14) and not weights.requires_grad
    assert torch.allclose(weights.sum(1), torch.ones(4, 2).double(), atol=1e-14)
    assert 1 < effective_draws(weights) < 5
    assert effective_draws(torch.full((2, 5, 3), 0.2)).item() == pytest.approx(5)
    assert effective_draws(torch.eye(5)[:2, :, None]).item() == 1
    half = torch.tensor([0.5, 0.5, 0, 0, 0])[None, :, None]
    assert effective_draws(torch.cat([half, torch.eye(5)[:1, :, None]])).item() == pytest.approx(1.5)
    assert torch.equal(wake_sleep_weights(f, r, s, 0.0), wake_sleep_weights(f, r, s, 0.01))  # beta may start at 0


# --- Gradients of a drawn expert ---------------------------------------------------------------------------------

LOGITS, SLOPE, BEND = randn(4, seed=15), randn(4, seed=16), randn(4, 4, seed=17)
BEND = BEND + BEND.T
EVERY_GRADIENT = ("top-k", "selected", "all", "reinmax", "gumbel-rao", "none")


def exact_slope() -> Tensor:
    """Gradient in the logits of sum_e rho_e f(onehot e), f(z) = a z + z B z / 2."""
    logits = LOGITS.clone().requires_grad_()
    value = torch.softmax(logits, 0) @ (SLOPE + BEND.diagonal() / 2)
    return torch.autograd.grad(value, logits)[0]


def gate_slopes(gradient: str, tau: float, n: int, seed: int) -> Tensor:
    """Gradients in the logits of f(z) for n draws, z the one-hot vector of the gate with its surrogate gradient."""
    logits = LOGITS.expand(1, n, 4).clone().requires_grad_()
    source = generator(seed)
    noise = gumbel((1, n, 4), source)
    gate = straight_through(torch.log_softmax(logits, -1), noise, tau, gradient=gradient, generator=source)
    z = torch.zeros(1, n, 4).double().scatter(-1, gate.expert, gate.weight)
    (z @ SLOPE + (z @ BEND * z).sum(-1) / 2).sum().backward()
    return logits.grad[0]


def test_reinmax_is_exact_for_quadratic_losses_and_straight_through_is_not():
    """The mean over draws is a sum over the four experts: no sampling error."""
    rho = torch.softmax(LOGITS, 0)
    mean = {1.0: torch.zeros(4).double(), 2.0: torch.zeros(4).double()}
    for tau in mean:
        for e in range(4):
            logits = LOGITS.clone().requires_grad_()
            weight = reinmax_weights(torch.log_softmax(logits, -1)[None, None], torch.tensor([[e]]), tau)[0, 0]
            value = weight @ (SLOPE + BEND[e])
            mean[tau] += rho[e] * torch.autograd.grad(value, logits)[0]
    assert torch.allclose(mean[1.0], exact_slope(), atol=1e-13)
    assert not torch.allclose(mean[2.0], exact_slope(), atol=0.02)
    n = 50_000
    assert far(gate_slopes("reinmax", 1.0, n, 18), exact_slope()) < SIGMAS
    for gradient in ("top-k", "selected", "all"):
        assert far(gate_slopes(gradient, 1.0, n, 18), exact_slope()) > 3 * SIGMAS


@pytest.mark.parametrize("tau", [1.0, 0.3])
def test_gumbel_rao_averages_straight_through_over_the_noise_of_the_drawn_expert(tau: float):
    n = 20_000
    plain, rao = gate_slopes("all", tau, n, 19), gate_slopes("gumbel-rao", tau, n, 20)
    error = ((plain.var(0) + rao.var(0)) / n).sqrt()
    assert ((plain.mean(0) - rao.mean(0)).abs() / error).max() < SIGMAS
    assert (rao.var(0) < 0.9 * plain.var(0)).all()


def test_conditional_noise_of_gumbel_rao_has_the_law_of_noise_given_the_drawn_expert(monkeypatch: pytest.MonkeyPatch):
    """With one conditional draw, (z, weights) has the joint law of (arg max, softmax) of unconditional noise."""
    monkeypatch.setattr(routes, "RAO_DRAWS", 1)
    n, tau = 50_000, 0.8
    log_rho = torch.log_softmax(LOGITS, 0).expand(1, n, 4)
    z = torch.multinomial(log_rho[0, 0].exp(), n, replacement=True, generator=generator(21))[None]
    given = gumbel_rao_weights(log_rho, z, tau, generator(22))
    assert torch.equal(given.argmax(-1), z)
    assert torch.allclose(given.sum(-1), torch.ones(1, n).double(), atol=1e-13)
    free = torch.softmax((log_rho + gumbel((1, n, 4), generator(23))) / tau, -1)
    for moment in (
        lambda w: w,
        lambda w: w**2,
        lambda w: w * (w == w.amax(-1, keepdim=True)),
        lambda w: w * w.roll(1, -1),
    ):
        a, b = moment(given)[0], moment(free)[0]
        error = ((a.var(0) + b.var(0)) / n).sqrt()
        assert ((a.mean(0) - b.mean(0)).abs() / error).max() < SIGMAS


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gradient", EVERY_GRADIENT)
def test_gates_have_the_values_of_a_hard_choice(gradient: str, dtype: torch.dtype):
    logits = (30 * randn(6, 5, 4, seed=24)).to(dtype).requires_grad_()  # some experts are all but impossible
    noise = gumbel((6, 5, 4), generator(25))
    gate = straight_through(torch.log_softmax(logits, -1), noise, 0.1, gradient=gradient, generator=generator(26))
    assert torch.equal(gate.expert[..., 0], (torch.log_softmax(logits, -1) + noise.to(dtype)).argmax(-1))
    hard = torch.zeros_like(gate.weight)
    hard[..., 0] = 1
    assert torch.equal(gate.weight, hard) and gate.weight.dtype == dtype
    assert gate.weight.requires_grad == (gradient != "none")
    if gradient != "none":
        (slope,) = torch.autograd.grad((gate.weight * randn(6, 5, gate.expert.shape[-1], seed=27)).sum(), logits)
        assert slope.isfinite().all() and (slope.any() or gradient == "selected")


# --- Several draws in one call -----------------------------------------------------------------------------------


@pytest.mark.parametrize("gradient", EVERY_GRADIENT)
def test_draws_that_share_their_rows_are_those_that_run_by_themselves(scramble, gradient: str):
    rows, draws, positions, experts = 3, 4, 2, 5
    shared, alone = (scramble(RoutedExperts(6, 8, experts, "loop").double(), 1) for _ in range(2))
    logits, cotangent = randn(rows * draws, positions, experts, seed=28), randn(rows, draws, positions, 6, seed=29)
    noise = gumbel((rows * draws, positions, experts), generator(30))
    found = []
    for module, together in ((shared, True), (alone, False)):
        x, at = randn(rows, positions, 6, seed=31).requires_grad_(), logits.clone().requires_grad_()
        gate = straight_through(torch.log_softmax(at, -1), noise, 0.6, gradient=gradient, generator=generator(32))
        if together:
            out = module(x, dataclasses.replace(gate, draws=draws)).unflatten(0, (rows, draws))
        else:
            expert, weight = (part.unflatten(0, (rows, draws)) for part in (gate.expert, gate.weight))
            out = torch.stack([module(x, Gate(expert[:, k], weight[:, k])) for k in range(draws)], 1)
        slopes = torch.autograd.grad((out * cotangent).sum(), [x, at, *module.parameters()], allow_unused=True)
        found.append((out, slopes))
    (got, got_slopes), (want, want_slopes) = found
    assert torch.allclose(got, want, atol=1e-13)
    assert (got_slopes[1] is None) == (want_slopes[1] is None) == (gradient == "none")
    for a, b in zip(got_slopes, want_slopes, strict=True):
        assert a is b is None or (torch.allclose(a, b, atol=1e-12) and b.any())


@pytest.mark.parametrize("redraw", ["all", "block", "positions"])
def test_every_draw_follows_the_router(redraw: str):
    rho, n, draws, blocks = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3]]).double(), 20_000, 3, 2
    policy = draw(generator(33), 1.0, gradient="none", draws=draws, redraw=redraw, blocks=blocks)
    for block in range(blocks):
        logits = rho.log().expand(n if block == 0 else n * draws, 2, 3)
        gate = policy(block, logits)
        assert gate.draws == (draws if block == 0 else 1) and gate.expert.shape == (n * draws, 2, 1)
        z = gate.expert.view(n, draws, 2)
        for k in range(draws):
            both = torch.bincount(z[:, k, 0] * 3 + z[:, k, 1], minlength=9)
            assert chi_square(both, rho[0][:, None] * rho[1]) > ALPHA, (block, k)
        pair = torch.bincount(z[:, 0, 0] * 3 + z[:, 2, 0], minlength=9)
        fresh = {"all": 1.0, "block": 1 / blocks, "positions": 0.25}[redraw]
        joint = fresh * rho[0][:, None] * rho[0] + (1 - fresh) * rho[0].diag()
        assert chi_square(pair, joint) > ALPHA, block


def noises(monkeypatch: pytest.MonkeyPatch, redraw: str, rows: int, draws: int, blocks: int) -> Tensor:
    """Whether the noise of a row's draws differs, (blocks, rows, positions)."""
    seen: list[Tensor] = []

    def spy(log_rho: Tensor, noise: Tensor, tau: float, **_: object) -> Gate:
        seen.append(noise.unflatten(0, (rows, draws)))
        return Gate(noise.argmax(-1, keepdim=True), torch.ones(*noise.shape[:2], 1))

    monkeypatch.setattr(routes, "straight_through", spy)
    policy = draw(generator(34), 1.0, draws=draws, redraw=redraw, blocks=blocks)
    for block in range(blocks):
        policy(block, torch.zeros(rows if block == 0 else rows * draws, 5, 4))
    differs = torch.stack([noise != noise[:, :1] for noise in seen])[:, :, 1:]  # (blocks, rows, draws - 1, 5, 4)
    assert torch.equal(differs.any(2).any(-1), differs.all(2).all(-1))  # all draws and experts of it, or none
    return differs.all(2).all(-1)


def test_redraw_says_where_noise_differs(monkeypatch: pytest.MonkeyPatch):
    rows, blocks = 6_000, 3
    assert noises(monkeypatch, "all", 100, 3, blocks).all()
    block = noises(monkeypatch, "block", rows, 3, blocks)
    assert torch.equal(block.any(-1), block.all(-1)) and (block.any(-1).sum(0) == 1).all()
    assert chi_square(block.any(-1).sum(1), torch.full((blocks,), 1 / blocks)) > ALPHA
    some = noises(monkeypatch, "positions", rows, 3, blocks)
    error = math.sqrt(0.25 * 0.75 / (rows * 5))
    assert ((some.double().mean((1, 2)) - 0.25).abs() < SIGMAS * error).all()
    pairs = (some[0] & some[1]).double().mean().item()  # independent over blocks
    assert abs(pairs - 0.0625) < SIGMAS * math.sqrt(0.0625 * 0.9375 / (rows * 5))


# --- Enumerated truth of a whole method --------------------------------------------------------------------------


@dataclass(frozen=True)
class Latents:
    """For each of B rows (x0, xt) and each of R routes that training draws."""

    log_q: Tensor  # (B, R) log q(z | x0, xt)
    log_own: Tensor  # (B, R) of the positions that carry alone
    log_p: Tensor  # (B, R) log p(z | xt)
    log_x: Tensor  # (B, R) log p(x0 | xt, z) of the masked positions

    def elbo(self, weight: float, beta: float) -> Tensor:
        """E_q[weight * NLL] + beta KL(q || p), for each row."""
        return (self.log_q.exp() * (beta * (self.log_q - self.log_p) - weight * self.log_x)).sum(-1)


def latents(exact: Enumeration, x0: Tensor, xt: Tensor, t: float, own: list[list[int]], summed: bool) -> Latents:
    """By the plain network on all routes; `own` names the positions that carry in each block.

    Summed: log sum over all routes of the last block of p(z_D | z_<D, xt) p(x0 | xt, z).
    """
    rows, where = torch.cat([x0, xt]).unique(dim=0, return_inverse=True)
    clean, noisy = where.chunk(2)
    _, log_token, log_rho = exact.read(rows, t)
    z = exact.routes.expand(len(x0), *exact.routes.shape)  # (B, R, D, L)
    log_q, log_own, log_p, last = (torch.zeros(z.shape[:2]).double() for _ in range(4))
    for d, rho in enumerate(log_rho):
        q, p = (rho[side].gather(-1, z[:, :, d, :, None]).squeeze(-1) for side in (clean, noisy))  # (B, R, L)
        if summed and d == exact.blocks - 1:
            last = p.sum(-1)
            continue
        carry = torch.tensor([place in own[d] for place in range(exact.length)])
        log_q, log_p = log_q + torch.where(carry, q, p).sum(-1), log_p + p.sum(-1)
        log_own = log_own + (q * carry).sum(-1)
    chosen = x0[:, None, :, None].expand(-1, z.shape[1], -1, 1)
    log_x = (log_token[noisy].gather(-1, chosen).squeeze(-1) * (xt == exact.mask_id)[:, None]).sum(-1)
    if summed:
        inner = exact.method.config.experts**exact.length  # routes of the last block vary fastest
        log_x = (last + log_x).unflatten(1, (-1, inner)).logsumexp(-1)
        log_q, log_own, log_p = (one.unflatten(1, (-1, inner))[..., 0] for one in (log_q, log_own, log_p))
    return Latents(log_q, log_own, log_p, log_x)


def owners(method: EMoE) -> list[list[int]]:
    """What the options say of who carries where."""
    length, blocks = method.space.length, method.backbone.routed_blocks
    if method.config.carriers == "all":
        return [list(range(length))] * blocks
    return [[place for place in range(length) if place % max(1, blocks - 1) == d] for d in range(blocks)]


def latents_of(method: EMoE, x0: Tensor, xt: Tensor, t: float) -> Latents:
    return latents(Enumeration(method), x0, xt, t, owners(method), method.config.last_block == "summed")


def bound(exact: Enumeration, steps: int, own: list[list[int]], summed: bool) -> Tensor:
    """bound@T of every clean row, by all mask patterns and routes."""
    total = torch.zeros(len(exact.clean)).double()
    count = len(exact.patterns)
    x0 = exact.clean.repeat_interleave(count, 0)
    pattern = exact.patterns.repeat(len(exact.clean), 1)
    for i in range(1, steps + 1):
        alpha_s, alpha_t = exact.alpha((i - 1) / steps), exact.alpha(i / steps)
        prob = torch.where(pattern, 1 - alpha_t, alpha_t).prod(-1)
        terms = latents(exact, x0, torch.where(pattern, exact.mask_id, x0), single(i / steps), own, summed)
        value = prob * terms.elbo((alpha_s - alpha_t) / (1 - alpha_t), 1.0)
        total = total + value.view(-1, count).sum(1)
    return total


def flat(value: Tensor, method: EMoE) -> Tensor:
    """Gradient in all parameters as one vector."""
    parameters = list(method.parameters())
    found = torch.autograd.grad(value, parameters, allow_unused=True)
    return torch.cat(
        [torch.zeros_like(p).flatten() if g is None else g.flatten() for g, p in zip(found, parameters, strict=True)]
    )


def part(method: EMoE, name: str) -> Tensor:
    """Which entries of `flat` belong to parameters with this in their names."""
    return torch.cat([torch.full((p.numel(),), name in n) for n, p in method.named_parameters()])


def drawn_slopes(
    method: EMoE, row: tuple[list[int], list[int]], t: float, *, each: int, groups: int = 40, seed: int = 1
) -> Tensor:
    """Independent means of the training gradient at one (x0, xt, t), (groups, parameters)."""
    x0, xt = (torch.tensor([one]).expand(each, -1) for one in row)
    rng = Rng(seed)
    times = torch.full((each,), t).double()
    return torch.stack(
        [flat(method.objective(x0, xt, times, KNOBS, rng.at(g)).loss.mean(), method) for g in range(groups)]
    )


def batch_of(exact: Enumeration, rows: int = 12) -> tuple[Tensor, Tensor, Tensor]:
    """Clean rows, noisy rows and times that mix all mask patterns."""
    x0 = exact.clean[torch.arange(rows) % len(exact.clean)]
    pattern = exact.patterns[(torch.arange(rows) * 5 + 1) % len(exact.patterns)]
    return x0, torch.where(pattern, exact.mask_id, x0), torch.linspace(0.1, 1, rows).double()


@contextmanager
def recorded(method: EMoE) -> Iterator[list[BackboneOut]]:
    """What the network returned, call by call."""
    seen: list[BackboneOut] = []
    handle = method.backbone.register_forward_hook(lambda module, inputs, out: seen.append(out))
    try:
        yield seen
    finally:
        handle.remove()


def test_enumerated_truth_is_the_same_two_ways(tiny):
    method = tiny(EMoEConfig(experts=2))
    x0, xt, _ = batch_of(Enumeration(method), 8)
    t = torch.full((8,), 0.4).double()
    recon, kl = exact_terms(method, x0, xt, t)
    assert torch.allclose(latents_of(method, x0, xt, 0.4).elbo(2.0, 0.5), 2 * recon + 0.5 * kl, atol=1e-12)


# --- The last block summed out -----------------------------------------------------------------------------------


def test_summed_last_block_is_the_sum_over_its_routes(tiny):
    """log_x_theta of `infer` at every token against all routes of a plain pass, along the routes it drew before."""
    method = tiny(EMoEConfig(experts=3, last_block="summed"))
    exact = Enumeration(method)
    x0, xt, t = batch_of(exact)
    z: list[Tensor] = []
    handle = method.backbone.trunk.blocks[0].register_forward_hook(
        lambda m, i, out: z.append(out[2].expert[: len(x0), :, 0])
    )
    out = method.infer(x0, xt, t, KNOBS, Rng(2))
    handle.remove()
    assert len(z) == 1
    for row in range(len(x0)):
        _, log_token, log_rho = exact.read(xt[row : row + 1], t[row].item())
        same = (exact.routes[:, 0] == z[0][row]).all(-1)
        log_last = log_rho[1][0].gather(-1, exact.routes[:, 1, :, None]).sum((1, 2))[same]
        assert log_last.exp().sum().item() == pytest.approx(1, abs=1e-13)
        law = (log_last[:, None, None] + log_token[0][same]).logsumexp(0).exp()
        masked = xt[row] == exact.mask_id
        assert torch.allclose(out.log_x_theta[row].exp()[masked], law[masked], atol=1e-13)
        copied = torch.nn.functional.one_hot(xt[row], exact.size).double()
        assert torch.equal(out.log_x_theta[row].exp()[~masked], copied[~masked])


def test_masked_nll_of_a_summed_block_agrees_with_the_objective(tiny):
    """recon = w(t) * masked NLL of the mixture."""
    one = tiny(EMoEConfig(experts=2, last_block="summed"))
    x0, xt, t = batch_of(Enumeration(one))
    with torch.no_grad():
        out = one.infer(x0, xt, t, KNOBS, Rng(13))
        objective = one.objective(x0, xt, t, KNOBS, Rng(13))
    assert torch.allclose(objective.recon, masked_nll(out.log_x_theta, x0) / t, atol=1e-13)


@pytest.mark.parametrize("carriers", ["all", "spread"])
def test_summing_the_last_block_tightens_the_bound(tiny, carriers: str):
    """exact NLL <= summed <= drawn from the prior, at every row; and `nll_bound` draws the enumerated number."""
    method = tiny(EMoEConfig(experts=3, last_block="summed", carriers=carriers))
    exact = Enumeration(method)
    rows = exact.clean.repeat(1_500, 1)
    rows = rows[torch.randperm(len(rows), generator=generator(3))]
    kind = exact.index(rows)
    with torch.no_grad():
        for steps in (1, 2):
            summed = bound(exact, steps, [[0, 1], []], summed=True)
            drawn = bound(exact, steps, [[0, 1], []], summed=False)
            assert (summed >= exact.nll(steps) - 1e-12).all() and (summed < drawn - 1e-3).all()
            values = method.nll_bound(rows, Convention("bound", steps), Rng(4))
            for row, want in zip(exact.clean, summed, strict=True):
                assert far(values[kind == exact.index(row)], want) < SIGMAS


def test_training_options_do_not_change_the_sampler(tiny):
    plain = tiny(EMoEConfig(experts=3))
    other = tiny(EMoEConfig(experts=3, last_block="summed", carriers="spread", estimator="wake-sleep", draws=4))
    xt, t = torch.tensor([[1, 1], [1, 0], [2, 1]]), torch.tensor([0.3, 0.6, 0.9]).double()
    for steps in (1, 2):
        assert torch.equal(chain_law(plain, steps), chain_law(other, steps))
        assert torch.equal(plain.sample(50, steps, Rng(5)), other.sample(50, steps, Rng(5)))
    assert torch.equal(plain.denoise(xt, t, Rng(6)).log_x_theta, other.denoise(xt, t, Rng(6)).log_x_theta)


# --- Positions that carry in turn --------------------------------------------------------------------------------


def test_carriers_are_a_partition_of_the_positions():
    for blocks, positions in ((2, 3), (3, 5), (4, 7)):
        table = torch.stack([carries(d, blocks - 1, positions, torch.device("cpu")) for d in range(blocks)])
        assert (table.sum(0) == 1).all() and not table[-1].any()
    post, prior = randn(2, 5, 3, seed=35), randn(2, 5, 3, seed=36)
    mixed = carried(post, prior, 1, 2)
    assert torch.equal(mixed[:, 1::2], post[:, 1::2]) and torch.equal(mixed[:, ::2], prior[:, ::2])
    assert torch.equal(carried(post, prior, 1, None), post) and torch.equal(carried(post, prior, 2, 2), prior)
    some = carried(post.repeat_interleave(3, 0), prior.repeat_interleave(3, 0), 1, None, torch.tensor([True, False]))
    assert torch.equal(some[:3], post[:1].expand(3, -1, -1)) and torch.equal(some[3:], prior[1:].expand(3, -1, -1))


@pytest.mark.parametrize("draws", [1, 2])
def test_rows_with_few_masks_run_the_mean_of_all_experts(tiny, draws: int):
    """Above `mean_below` nothing changes; at or below it experts are weighed by the router of xt, and the KL is 0."""
    plain, method = (tiny(EMoEConfig(experts=3, draws=draws, mean_below=share)) for share in (0.0, 0.5))
    x0, xt, t = batch_of(Enumeration(plain))
    coded = (xt == 1).double().mean(1) > 0.5
    assert coded.any() and not coded.all()
    mine, theirs = (one.objective(x0, xt, t, KNOBS, Rng(3)) for one in (method, plain))
    assert (mine.kl[~coded].abs() < 1e-12).all() and (theirs.kl > 1e-3)[(xt == 1).any(1)].all()
    for a, b in ((mine.kl, theirs.kl), (mine.recon, theirs.recon)):
        assert torch.allclose(a[coded], b[coded], atol=1e-12)

    def by_hand(block: int, logits: Tensor) -> Gate:
        """A loop over experts."""
        probability = torch.softmax(logits, -1)
        return Gate(torch.arange(3).expand(*logits.shape[:2], 3), probability, mixed=True)

    mean = subs(plain.backbone(xt, t, route=by_hand).logits, xt, 1)
    layer = next(part for part in plain.modules() if isinstance(part, RoutedExperts))
    x = randn(2, 4, layer.w_in.shape[1], seed=1)
    weight = torch.softmax(randn(2, 4, 3, seed=2), -1)
    each = [layer(x, Gate(torch.full((2, 4, 1), e), torch.ones(2, 4, 1).double())) for e in range(3)]
    mix = layer(x, Gate(torch.arange(3).expand(2, 4, 3), weight, mixed=True))
    assert torch.allclose(mix, sum(weight[..., e, None] * each[e] for e in range(3)), atol=1e-12)
    if draws == 1:
        assert torch.allclose(method.infer(x0, xt, t, KNOBS, Rng(3)).log_x_theta[~coded], mean[~coded], atol=1e-12)
    for seed in (4, 5):
        out = method.denoise(xt, t, Rng(seed)).log_x_theta
        assert torch.allclose(out[~coded], mean[~coded], atol=1e-12)
        assert torch.equal(out[coded], plain.denoise(xt, t, Rng(seed)).log_x_theta[coded])
    mine.loss.sum().backward()
    assert all(torch.isfinite(p.grad).all() and p.grad.any() for p in method.parameters() if p.grad is not None)


@pytest.mark.parametrize("seed", [21, 4, 5])
def test_spread_carriers_keep_the_bound(tiny, seed: int):
    """bound@T by enumeration >= the exact NLL of the T-step chain at every row, and `nll_bound` draws that number."""
    methods = {
        last_block: tiny(EMoEConfig(experts=2, carriers="spread", last_block=last_block), length=3, depth=3, seed=seed)
        for last_block in ("drawn", "summed")
    }
    exact = Enumeration(methods["drawn"])
    rows = exact.clean.repeat(50, 1)
    with torch.no_grad():
        for steps in (1, 2):
            nll = exact.nll(steps)
            law = chain_law(methods["drawn"], steps).flatten()
            assert torch.allclose(nll, -law.log(), atol=1e-6)  # both ways to the truth agree
            for last_block, method in methods.items():
                want = bound(exact, steps, [[0, 2], [1], []], last_block == "summed")
                assert (want > nll - 1e-12).all()
                draws = [method.nll_bound(rows, Convention("bound", steps), Rng(k)).mean() for k in range(20)]
                assert far(torch.stack(draws), want.mean()) < SIGMAS


def test_kl_is_zero_where_nobody_carries(tiny):
    method = tiny(EMoEConfig(experts=2, carriers="spread"), length=3, depth=3)
    x0, xt, t = batch_of(Enumeration(method))
    with recorded(method) as seen:
        out = method.infer(x0, xt, t, KNOBS, Rng(7))
    total = torch.zeros(len(x0)).double()
    for d, own in enumerate(owners(method)):
        post, prior = (torch.log_softmax(half, -1) for half in seen[0].route_logits[d].chunk(2))
        kl = (post.exp() * (post - prior)).sum(-1)[:, own].sum(-1)
        assert torch.allclose(out.log[f"route_kl/block{d + 1}"] * 3, kl.mean(), atol=1e-13)
        total += kl
    assert torch.allclose(out.kl, total, atol=1e-13) and total.max() > 0.1
    assert out.log["route_kl/block3"] == 0


def test_wake_sleep_teaches_the_posterior_only_where_it_carries(tiny):
    config = EMoEConfig(experts=2, carriers="spread", estimator="wake-sleep", draws=4, gradient="none")
    method = tiny(config, length=3, depth=3)
    x0, _, t = batch_of(Enumeration(method), 8)
    with recorded(method) as seen:
        loss = method.objective(x0, torch.full_like(x0, 1), t, KNOBS, Rng(8)).loss.sum()
    slopes = torch.autograd.grad(loss, seen[0].route_logits)
    for slope, own in zip(slopes, owners(method), strict=True):
        clean, noisy = slope.chunk(2)
        idle = [place for place in range(3) if place not in own]
        assert (clean[:, idle] == 0).all() and (not own or clean[:, own].abs().amax((0, 2)).min() > 1e-3)
        assert noisy.abs().amax((0, 2)).min() > 1e-3


# --- The whole training objective --------------------------------------------------------------------------------

SIGNALS = {
    "pathwise, 1 draw": {},
    "pathwise, 3 draws": {"draws": 3},
    "mask aware": {"draws": 3, "mask_aware": True},
    "reinmax": {"draws": 2, "gradient": "reinmax"},
    "gumbel-rao": {"draws": 2, "gradient": "gumbel-rao"},
    "wake-sleep by row": {"estimator": "wake-sleep", "draws": 3, "gradient": "none"},
    "wake-sleep by position": {"estimator": "wake-sleep", "draws": 3, "gradient": "none", "credit": "position"},
    "vimco": {"estimator": "vimco", "draws": 3, "gradient": "none", "redraw": "block"},
    "leave-one-out": {"estimator": "leave-one-out", "draws": 3, "gradient": "none", "redraw": "positions"},
}


@pytest.mark.parametrize("carriers", ["all", "spread"])
@pytest.mark.parametrize("last_block", ["drawn", "summed"])
@pytest.mark.parametrize("signal", SIGNALS, ids=list(SIGNALS))
def test_every_estimator_trains(tiny, signal: str, last_block: str, carriers: str):
    method = tiny(EMoEConfig(experts=3, last_block=last_block, carriers=carriers, **SIGNALS[signal]))
    out = method(Enumeration(method).clean.repeat(4, 1), KNOBS, Rng(9))
    recon, kl = out.log["recon"].item(), out.log["kl"].item()
    assert out.total.item() == pytest.approx(recon + BETA * kl, rel=1e-12) and kl > 0
    slope = flat(out.total, method)
    assert slope.isfinite().all()
    assert all(slope[part(method, f"blocks.{d}.mlp.router.weight")].abs().max() > 1e-5 for d in range(2))
    if method.config.estimator != "pathwise":
        assert 1 <= out.log["effective_draws"] <= 3


@pytest.mark.parametrize("last_block", ["drawn", "summed"])
def test_several_pathwise_draws_are_the_mean_of_single_ones(tiny, last_block: str):
    row, t = ([0, 2], [1, 1]), 0.5
    slopes = []
    for draws in (1, 3):
        method = tiny(EMoEConfig(experts=2, last_block=last_block, draws=draws))
        slopes.append(drawn_slopes(method, row, t, each=50)[:, part(method, ".router.")])
    one, three = slopes
    error = ((one.var(0) + three.var(0)) / len(one)).sqrt()
    assert ((one.mean(0) - three.mean(0)).abs() / (error + 1e-12)).max() < SIGMAS
    assert three.var(0).sum() < 0.5 * one.var(0).sum()


FORMS = [
    pytest.param("drawn", "all", id="drawn, all"),
    pytest.param("summed", "all", id="summed, all"),
    pytest.param("summed", "spread", id="summed, spread"),
    pytest.param("drawn", "spread", id="drawn, spread"),
]


def assert_exact(method: EMoE, value: Callable[[Latents, float], Tensor], row: tuple[list[int], list[int]]) -> None:
    """The mean training gradient is that of an enumerated objective, in every parameter."""
    t = 0.5
    want = flat(value(latents_of(method, *(torch.tensor([one]) for one in row), t), 1 / t), method)
    got = drawn_slopes(method, row, t, each=150)
    routers = part(method, ".router.")
    assert want[routers].norm() > 10 * (got[:, routers].var(0).sum() / len(got)).sqrt()  # the test can see a bias
    assert far(got, want) < SIGMAS


@pytest.mark.parametrize("row", [([0, 2], [1, 1]), ([2, 2], [1, 2])], ids=["all masked", "one masked"])
@pytest.mark.parametrize(("last_block", "carriers"), FORMS)
def test_leave_one_out_has_the_exact_gradient_of_every_parameter(tiny, last_block: str, carriers: str, row):
    options = {"estimator": "leave-one-out", "draws": 2, "gradient": "none"}
    method = tiny(EMoEConfig(experts=2, last_block=last_block, carriers=carriers, **options))
    assert_exact(method, lambda truth, weight: truth.elbo(weight, BETA).sum(), row)


@pytest.mark.parametrize(("last_block", "carriers"), FORMS)
def test_vimco_has_the_exact_gradient_of_every_parameter(tiny, last_block: str, carriers: str):
    options = {"estimator": "vimco", "draws": 2, "gradient": "none"}
    method = tiny(EMoEConfig(experts=2, last_block=last_block, carriers=carriers, **options))

    def value(truth: Latents, weight: float) -> Tensor:
        return many_draw_bound(weight * truth.log_x[0], truth.log_p[0], truth.log_q[0], 2, BETA)

    assert_exact(method, value, ([0, 2], [1, 1]))


@pytest.mark.parametrize("carriers", ["all", "spread"])
@pytest.mark.parametrize("last_block", ["drawn", "summed"])
def test_wake_sleep_tends_to_the_enumerated_gradient(tiny, last_block: str, carriers: str):
    """-beta log sum_z p(z) exp(f / beta) for network and prior, KL(p(z | x0, xt) || q) for the posterior."""
    row, t = ([0, 2], [1, 1]), 0.5
    options = {"estimator": "wake-sleep", "draws": 1_000, "gradient": "none"}
    method = tiny(EMoEConfig(experts=2, last_block=last_block, carriers=carriers, **options))
    truth = latents_of(method, *(torch.tensor([one]) for one in row), t)
    score = truth.log_p + truth.log_x / (t * BETA)
    share = torch.softmax(score, -1).detach()
    want = flat(-BETA * score.logsumexp(-1).sum() - (share * truth.log_own).sum(), method)
    mean = drawn_slopes(method, row, t, each=4, groups=10).mean(0)
    assert (mean - want).norm() < 0.03 * want.norm()
    routers = part(method, ".router.")
    assert (mean - want)[routers].norm() < 0.05 * want[routers].norm()
    other = flat(latents_of(method, *(torch.tensor([one]) for one in row), t).elbo(1 / t, BETA).sum(), method)
    assert (other - want).norm() > 0.1 * want.norm()  # not the gradient of the bound


# --- Options -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"estimator": "wake-sleep"}, "draws"),
        ({"estimator": "vimco", "draws": 1}, "draws"),
        ({"estimator": "leave-one-out", "draws": 1}, "draws"),
        ({"gradient": "none"}, "gradient"),
        ({"estimator": "wake-sleep", "draws": 2, "free_nats": 0.1}, "free_nats"),
        ({"estimator": "wake-sleep", "draws": 2, "mean_below": 0.1}, "mean_below"),
        ({"last_block": "summed", "mean_below": 0.1}, "mean_below"),
        ({"estimator": "vimco", "draws": 2, "kl_positions": "masked"}, "kl_positions"),
        ({"draws": 0}, "draws"),
        ({"experts": 1, "top_k": 2}, "top_k"),
    ],
)
def test_options_that_contradict_each_other_are_refused_by_name(options: dict[str, object], field: str):
    with pytest.raises(ConfigError) as caught:
        EMoEConfig(**options)
    assert [line.split(":")[0] for line in caught.value.problems] == [field]


@pytest.mark.parametrize("draws", [1, 3])
def test_free_nats_and_masked_positions_change_what_training_counts(tiny, draws: int):
    """A block whose mean KL is at most the free nats is left out; all others count in full."""
    plain = tiny(EMoEConfig(experts=3, draws=draws))
    x0, xt, t = batch_of(Enumeration(plain))
    base = plain.objective(x0, xt, t, KNOBS, Rng(10))
    means = [base.log[f"route_kl/block{d}"].item() * 2 for d in (1, 2)]
    low, high = min(means), max(means)
    assert low > 0.01 and high > 1.1 * low
    assert torch.allclose(base.loss, base.recon + BETA * base.kl, atol=1e-13)
    for free, kept in ((low / 2, low + high), ((low + high) / 2, high), (2 * high, 0.0)):
        out = tiny(EMoEConfig(experts=3, draws=draws, free_nats=free)).objective(x0, xt, t, KNOBS, Rng(10))
        assert torch.equal(out.kl, base.kl) and torch.equal(out.recon, base.recon)
        assert ((out.loss - out.recon) / BETA).mean().item() == pytest.approx(kept, abs=1e-12)
    # Every second block from the first on: the second block has nothing free.
    out = tiny(EMoEConfig(experts=3, draws=draws, free_nats=2 * high, free_every=2)).objective(
        x0, xt, t, KNOBS, Rng(10)
    )
    assert ((out.loss - out.recon) / BETA).mean().item() == pytest.approx(means[1], abs=1e-12)
    masked = tiny(EMoEConfig(experts=3, draws=draws, kl_positions="masked"))
    with recorded(masked) as seen:
        out = masked.objective(x0, xt, t, KNOBS, Rng(10))
    by_hand = torch.zeros(len(x0)).double()
    for logits in seen[0].route_logits:
        post, prior = (torch.log_softmax(half, -1).unflatten(0, (len(x0), -1)) for half in logits.chunk(2))
        by_hand += ((post.exp() * (post - prior)).sum(-1) * (xt == 1)[:, None]).sum(-1).mean(1)
    assert torch.allclose((out.loss - out.recon) / BETA, by_hand, atol=1e-12) and torch.equal(out.kl, base.kl)


def test_usage_floor_counts_the_missing_entropy(tiny):
    share = torch.tensor([0.5, 0.25, 0.25]).double()
    entropy = 1.5 * math.log(2)
    assert usage_shortfall(share, 1.5).item() == pytest.approx(1.5 - entropy, abs=1e-14)
    assert usage_shortfall(share, entropy - 0.01).item() == 0
    certain = 400 * torch.eye(2).double()[None]  # each position is certain, all experts are in use
    chance = compare([certain], [certain], [certain.argmax(-1)]).chance
    assert usage_shortfall(chance, 1.0).item() == pytest.approx(1 - math.log(2), abs=1e-12)
    method = tiny(EMoEConfig(experts=3, balance=0.25, balance_form="floor", usage_floor=1.2))
    x0, xt, t = batch_of(Enumeration(method))
    with recorded(method) as seen:
        out = method.infer(x0, xt, t, KNOBS, Rng(11))
    missing = []
    for block in seen[0].route_logits:
        mean = torch.softmax(block[: len(x0)], -1).mean((0, 1))
        missing.append(max(0.0, 1.2 + (mean * mean.log()).sum().item()))
    assert max(missing) > 0.05
    assert out.aux.item() == pytest.approx(0.25 * sum(missing) / 2, abs=1e-13)


def test_router_options(tiny):
    x = 5 * randn(2, 3, 8, seed=37)
    torch.manual_seed(0)
    plain = Router(8, 4).double()
    assert (plain(x) == 0).all()
    wide = Router(400, 50, std=0.3)
    assert wide.weight.std().item() == pytest.approx(0.3, rel=0.03) and (wide.bias == 0).all()
    router = Router(8, 4, std=2.0, norm=True, cap=1.5).double()
    normed = (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
    linear = normed @ router.weight.T + router.bias
    assert torch.allclose(router(x), 1.5 * torch.tanh(linear / 1.5), atol=1e-13)
    assert linear.abs().max() > 3 and router(x).abs().max() < 1.5
    method = tiny(EMoEConfig(experts=3), router_norm=True, router_cap=0.5)
    x0, xt, t = batch_of(Enumeration(method))
    with recorded(method) as seen:
        method.infer(x0, xt, t, KNOBS, Rng(12))
    assert all(0.2 < logits.abs().max() <= 0.5 for logits in seen[0].route_logits)
    assert sum("router.norm" in name for name, _ in method.named_parameters()) == 4


@pytest.mark.parametrize("estimator", ["pathwise", "wake-sleep", "vimco"])
def test_elbo_power_puts_w_of_t_on_the_kl(tiny, estimator: str):
    """beta(t) = kl_weight * w(t)^p, for each row."""
    several = {} if estimator == "pathwise" else {"gradient": "none", "draws": 3}
    method = tiny(EMoEConfig(experts=2, elbo_power=Constant(value=1.0), estimator=estimator, **several))
    t = torch.tensor([0.25, 0.5], dtype=torch.float64)
    one, half = (KNOBS | {"elbo_power": torch.tensor(p, dtype=torch.float64)} for p in (1.0, 0.5))
    assert torch.allclose(method.kl_weight(t, one), BETA / t)
    assert torch.allclose(method.kl_weight(t, half), BETA / t.sqrt())
    x0 = torch.tensor([[0, 2], [2, 0]])
    xt = torch.full_like(x0, method.space.mask_id)
    out = method.objective(x0, xt, t, one, Rng(3))
    assert torch.allclose(out.loss, out.recon + BETA / t * out.kl) and (out.kl > 0).all()


def test_a_block_that_is_summed_out_counts_in_usage_and_floor(tiny):
    config = EMoEConfig(
        experts=3, estimator="wake-sleep", gradient="none", draws=2, last_block="summed", balance=0.5,
        balance_form="floor", usage_floor=1.0,
    )  # fmt: skip
    method = tiny(config)
    last = [module for module in method.backbone.modules() if isinstance(module, Router)][-1]
    knobs = {name: torch.ones((), dtype=torch.float64) for name in method.ramps}
    x0, t = torch.tensor([[0, 2], [2, 2]]), torch.tensor([1.0, 0.5], dtype=torch.float64)
    xt = torch.tensor([[1, 1], [1, 2]])

    def shares(bias: list[float]) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            for parameter in last.parameters():
                parameter.zero_()
            list(last.parameters())[-1].copy_(torch.tensor(bias, dtype=torch.float64))
            out = method.objective(x0, xt, t, knobs, Rng(3))
        return out.log["usage/block2"], out.aux

    even, base = shares([0.0, 0.0, 0.0])
    assert torch.allclose(even, torch.full((3,), 1 / 3, dtype=torch.float64))
    one, more = shares([50.0, 0.0, 0.0])  # entropy 0, 1 nat below the floor, in one of two blocks
    assert one[0] > 0.999 and more - base == pytest.approx(0.5 * 1.0 / 2, abs=1e-6)
