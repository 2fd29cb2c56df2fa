"""The absorbing process, its times, schedules and ramps against enumeration and closed forms (Section 2, App. A.1)."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from enumeration import ALPHA, Enumeration, all_rows, chi_square, gauss_legendre
from references import forward_distribution, masked_nll, reverse_distribution
from scipy import stats
from steps import generator

from emoe.diffusion.categorical import draw_categorical
from emoe.diffusion.masking import draw_revealed, mask_tokens, reveal_probability, subs
from emoe.diffusion.schedule import CosineSchedule, LinearSchedule, LogLinearSchedule
from emoe.diffusion.times import grid_times, stratified_times
from emoe.domains.toy import ideal_factorised
from emoe.engine.optim import OptimConfig
from emoe.methods.mdlm import MDLMConfig
from emoe.ramps import Constant, Decay, Exponential, Linear
from emoe.rng import Rng

SIZE, MASK = 4, 1
SCHEDULES = [LinearSchedule(), LogLinearSchedule(eps=0.01), CosineSchedule()]


def kernel(keep: float) -> torch.Tensor:
    """q(x_t | x_s) of a single position as a matrix (x_s, x_t)."""
    return forward_distribution(all_rows(range(SIZE), 1), keep, MASK, SIZE)[:, 0]


def alpha_at(schedule, t: float) -> float:
    return float(schedule.alpha(torch.tensor(t, dtype=torch.float64)))


@pytest.mark.parametrize("alphas", [(0.37,), (0.8, 0.3)], ids=["once", "twice"])
def test_masking_draws_from_the_forward_law(alphas: tuple[float, ...]):
    """Positions are independent, a mask stays, and masking in two steps has the law of one."""
    n, xt, before = 100_000, torch.tensor([[0, MASK, 3]]).repeat(100_000, 1), 1.0
    for number, alpha in enumerate(alphas):
        xt = mask_tokens(xt, torch.full((n,), alpha / before), MASK, generator(number))
        before = alpha
    counts = torch.bincount(xt[:, 0] * SIZE + xt[:, 2], minlength=SIZE**2)
    law = kernel(alphas[-1])
    assert (xt[:, 1] == MASK).all() and chi_square(counts, law[0, :, None] * law[3]) > ALPHA


def test_each_row_is_masked_by_its_own_alpha():
    n = 20_000
    keep = torch.tensor([0.0, 1.0, 0.25]).repeat(n)
    xt = mask_tokens(torch.zeros(3 * n, 2, dtype=torch.long), keep, MASK, generator(2)).view(n, 3, 2)
    assert (xt[:, 0] == MASK).all() and (xt[:, 1] == 0).all()
    assert stats.binomtest(int((xt[:, 2] == 0).sum()), 2 * n, 0.25).pvalue > ALPHA


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.kind)
@pytest.mark.parametrize(("s", "t"), [(0.2, 0.7), (0.0, 0.4), (0.5, 1.0)])
def test_reverse_posterior_is_bayes_rule_on_the_enumerated_joint(schedule, s: float, t: float):
    """Eq. 2, 13-14: q(xs | xt, x0) = q(xt | xs) q(xs | x0) / q(xt | x0), with x_theta = x0."""
    alpha_s, alpha_t = alpha_at(schedule, s), alpha_at(schedule, t)
    joint = kernel(alpha_s)[:, :, None] * kernel(alpha_t / alpha_s)[None]  # (x0, xs, xt)
    for x0, xt in itertools.product(range(SIZE), range(SIZE)):
        if x0 == MASK or joint[x0, :, xt].sum() == 0:
            continue
        bayes = joint[x0, :, xt] / joint[x0, :, xt].sum()
        certain = torch.full((1, 1, SIZE), -math.inf).double()
        certain[..., x0] = 0
        closed = reverse_distribution(certain, torch.tensor([[xt]]), alpha_s, alpha_t, MASK)
        assert torch.allclose(closed[0, 0], bayes, atol=1e-14)


def test_reveal_probability_of_the_linear_grid_is_one_over_i():
    for steps in (1, 3, 7):
        times = grid_times(steps)
        assert times[0] == 0 and times[-1] == 1
        for i in range(1, steps + 1):
            assert reveal_probability(1 - times[i - 1], 1 - times[i]) == pytest.approx(1 / i, abs=1e-14)


def test_grid_without_steps_is_refused():
    with pytest.raises(ValueError, match="nfe"):
        grid_times(0)


def test_subs_puts_nothing_on_the_mask_and_copies_clean_tokens():
    logits = torch.randn(3, 4, SIZE, generator=generator(3)).double() * 5
    xt = torch.tensor([[MASK, 0, 2, MASK], [MASK] * 4, [3, 2, 0, 0]])
    log_x_theta = subs(logits, xt, MASK)
    probs = log_x_theta.exp()
    assert (probs[..., MASK] == 0).all()
    assert torch.allclose(probs.sum(-1), torch.ones(3, 4).double(), atol=1e-14)
    for row, position in itertools.product(range(3), range(4)):
        symbol = int(xt[row, position])
        if symbol == MASK:
            weight = logits[row, position].exp()
            weight[MASK] = 0
            assert torch.allclose(probs[row, position], weight / weight.sum(), atol=1e-14)
        else:
            assert probs[row, position, symbol] == 1 and log_x_theta[row, position, symbol] == 0


def test_reconstruction_sums_over_masked_positions_only_and_leaves_others_no_gradient():
    """The sum of Eq. 17 and 19; a clean position has exactly no gradient."""
    logits = torch.randn(2, 3, SIZE, generator=generator(4)).double().requires_grad_()
    x0 = torch.tensor([[0, 2, 3], [3, 0, 0]])
    xt = torch.tensor([[MASK, 2, MASK], [3, 0, 0]])
    nll = masked_nll(subs(logits, xt, MASK), x0)
    others = [v for v in range(SIZE) if v != MASK]
    by_hand = torch.zeros(2).double()
    for position in (0, 2):
        by_hand[0] -= logits[0, position, x0[0, position]] - logits[0, position, others].logsumexp(-1)
    assert torch.allclose(nll, by_hand, atol=1e-14) and nll[1] == 0
    nll.sum().backward()
    assert (logits.grad[0, 1] == 0).all() and (logits.grad[1] == 0).all()
    assert (logits.grad[0, 0, others] != 0).all() and logits.grad[0, 0, MASK] == 0


def test_step_kl_is_reveal_probability_times_masked_nll():
    """Eq. 17: KL(q(xs | xt, x0) || p(xs | xt)) = -a * sum over masked of log <x_theta, x0>."""
    logits = torch.randn(1, 3, SIZE, generator=generator(5)).double()
    x0, xt, alpha_s, alpha_t = torch.tensor([[0, 2, 3]]), torch.tensor([[MASK, 2, MASK]]), 0.6, 0.1
    certain = torch.where(torch.nn.functional.one_hot(x0, SIZE).bool(), 0.0, -math.inf).double()
    q = reverse_distribution(certain, xt, alpha_s, alpha_t, MASK)
    log_x_theta = subs(logits, xt, MASK)
    p = reverse_distribution(log_x_theta, xt, alpha_s, alpha_t, MASK)
    kl = torch.where(q > 0, q * (q / p).log(), 0.0).sum()
    closed = reveal_probability(alpha_s, alpha_t) * masked_nll(log_x_theta, x0)
    assert kl == pytest.approx(closed.item(), abs=1e-14)


@pytest.mark.parametrize("alpha_s", [0.6, 1.0])
def test_reverse_step_draws_from_the_reverse_law(alpha_s: float):
    """Eq. 2-3: positions and then their tokens, against `reverse_distribution`, jointly over both positions."""
    n, alpha_t = 100_000, 0.2
    logits = torch.tensor([[[1.0, 0.0, -1.0, 0.5], [0.3, 9.0, 0.2, -2.0], [0.0, 0.0, 0.0, 0.0]]]).double()
    xt = torch.tensor([[MASK, MASK, 2]])
    law = reverse_distribution(subs(logits, xt, MASK), xt, alpha_s, alpha_t, MASK)[0]
    many = xt.repeat(n, 1)
    log_x_theta = subs(logits.repeat(n, 1, 1), many, MASK)
    revealed = draw_revealed(many, reveal_probability(alpha_s, alpha_t), MASK, generator(6))
    xs = torch.where(revealed, draw_categorical(log_x_theta, generator(7)), many)
    assert (xs[:, 2] == 2).all() and not revealed[:, 2].any()
    counts = torch.bincount(xs[:, 0] * SIZE + xs[:, 1], minlength=SIZE**2)
    joint = (law[0, :, None] * law[1]).flatten()
    assert chi_square(counts, joint) > ALPHA


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.kind)
def test_elbo_weight_is_minus_the_derivative_over_the_masked_share(schedule):
    t = torch.linspace(0.05, 0.95, 19, dtype=torch.float64)
    h = 1e-6
    slope = (schedule.alpha(t + h) - schedule.alpha(t - h)) / (2 * h)
    assert torch.allclose(schedule.elbo_weight(t), -slope / (1 - schedule.alpha(t)), rtol=1e-8)
    grid = schedule.alpha(torch.linspace(0, 1, 101, dtype=torch.float64))
    assert grid[0] == pytest.approx(1, abs=1e-15) and (grid.diff() < 0).all() and grid[-1] >= 0


def test_loglinear_leaves_eps_clean_and_the_others_nothing():
    assert [alpha_at(s, 1.0) for s in SCHEDULES] == pytest.approx([0, 0.01, 0], abs=1e-15)


@pytest.mark.parametrize("batch", [1, 2, 7, 64, 96, 512])
@pytest.mark.parametrize("low", [0.0, 1 / 64])
def test_every_stratum_has_exactly_one_row(batch: int, low: float):
    for seed in range(20):
        t = stratified_times(batch, Rng(seed), low).double()
        assert (t > low).all() and (t <= 1).all()
        stratum = ((1 - (t - low) / (1 - low)) * batch - 1e-4).floor().clamp(min=0).long()
        near = ((1 - (t - low) / (1 - low)) * batch + 1e-4).floor().clamp(max=batch - 1).long()
        clear = stratum == near  # single precision can move a time over the edge of its stratum
        assert clear.sum() >= batch - 2
        assert len(stratum[clear].unique()) == clear.sum()


@pytest.mark.parametrize("row", [0, 5])
@pytest.mark.parametrize("low", [0.0, 0.25])
def test_time_of_a_row_is_uniform(row: int, low: float):
    rng = Rng(8)
    t = torch.stack([stratified_times(8, rng, low)[row] for _ in range(4000)])
    assert stats.kstest(t.numpy(), stats.uniform(low, 1 - low).cdf).pvalue > ALPHA


@pytest.mark.parametrize(("batch", "world"), [(64, 8), (100, 3), (128, 8), (512, 4)])
def test_the_slice_of_each_rank_is_spread_evenly(batch: int, world: int):
    """Kolmogorov distance of a slice from the uniform law; independent times would have about 0.87 / sqrt(batch)."""
    for rank in range(world):
        t = stratified_times(batch, Rng(10, rank=rank, world=world)).double()
        assert stats.kstest(t.numpy(), "uniform").statistic < 0.5 / math.sqrt(batch)


def test_noise_takes_the_times_of_its_rank(tiny):
    """Two ranks with half the batch each have the times of one process with the whole batch."""
    method, rows = tiny(MDLMConfig(t_low=0.2)), torch.zeros(6, 2, dtype=torch.long)
    whole = method.noise(rows, Rng(3)).t
    parts = [method.noise(rows[:3], Rng(3, rank=rank, world=2)).t for rank in range(2)]
    assert torch.equal(whole, torch.cat(parts)) and whole.min() > 0.2


PAIRS = torch.tensor([[0, 0], [1, 1]])  # the data {00, 11}


def pair_indices(exact: Enumeration) -> list[int]:
    return [exact.clean.tolist().index(pair) for pair in PAIRS.tolist()]


def test_best_factorised_step_makes_half_of_the_pairs_invalid(tiny):
    method = tiny(MDLMConfig(), size=3, mask_id=2)
    with torch.no_grad():
        method.backbone.head.weight.zero_()
        method.backbone.head.bias.zero_()
    exact = Enumeration(method)
    loss = exact.bound(1)[pair_indices(exact)].mean()
    assert loss.item() == pytest.approx(2 * math.log(2), abs=1e-15)
    loss.backward()  # cross entropy is convex in the logits, so a stationary point is the optimum
    assert all(p.grad is None or p.grad.abs().max() < 1e-15 for p in method.parameters())
    law = exact.law(1)[exact.index(exact.clean)]
    assert 1 - law[pair_indices(exact)].sum() == 0.5
    best = ideal_factorised(torch.eye(2).double() / 2, 1)
    assert torch.equal(best.flatten(), law)


def test_emoe_learns_two_equal_bits_in_one_step(tiny):
    """Trained on the exact bound at T = 1, it reaches the entropy of the data, which no factorised step can.

    From most starts it stays at the best factorised step; one start that leaves it shows what the model can hold.
    """
    for seed in (23, 26, 20):
        exact = Enumeration(tiny(size=3, mask_id=2, seed=seed))
        optimiser = torch.optim.Adam(exact.method.parameters(), lr=0.02)
        for _ in range(200):
            optimiser.zero_grad()
            loss = exact.bound(1)[pair_indices(exact)].mean()
            if loss < math.log(2) + 0.01:
                break
            loss.backward()
            optimiser.step()
        if loss < math.log(2) + 0.01:
            break
    nll = exact.nll(1)[pair_indices(exact)].mean()
    assert math.log(2) <= nll <= loss < math.log(2) + 0.01
    law = exact.law(1)[exact.index(exact.clean)]
    assert 1 - law[pair_indices(exact)].sum() < 0.01


@pytest.mark.parametrize("size", [3, 4])
def test_uniform_model_has_one_bit_per_binary_pixel_and_perplexity_of_its_symbols(tiny, size: int):
    method = tiny(MDLMConfig(), size=size)
    with torch.no_grad():
        method.backbone.head.weight.zero_()
        method.backbone.head.bias.zero_()
    exact = Enumeration(method)
    nats = 0.0  # continuous time, Eq. 22
    for t, weight in gauss_legendre(0.0, 1.0, 4):
        nats += weight * float(method.config.schedule.elbo_weight(torch.tensor(t))) * exact.terms(t).recon()[0].item()
    per_token = nats / method.space.length
    assert math.exp(per_token) == pytest.approx(size - 1, abs=1e-6)
    if size == 3:
        assert per_token / math.log(2) == pytest.approx(1.0, abs=1e-6)
    for steps in (1, 2, 3):
        assert exact.bound(steps).tolist() == pytest.approx([2 * math.log(size - 1)] * len(exact.clean), abs=1e-12)


def test_ramps_follow_their_closed_forms():
    total = 200
    assert [Constant(value=0.7)(h, total) for h in (0, 1, 200)] == [0.7] * 3
    linear = Linear(start=0.001, end=1.0, share=0.3)
    assert linear(0, total) == 0.001 and linear(60, total) == linear(61, total) == linear(200, total) == 1.0
    assert linear(1, total) == pytest.approx(0.001 + 0.999 / 60, abs=1e-15)
    assert linear(59, total) == pytest.approx(0.001 + 0.999 * 59 / 60, abs=1e-15)
    assert Linear(start=2.0, end=0.0, steps=4)(1, total) == 1.5
    falling = Exponential(start=1.0, end=0.1)
    assert falling(0, total) == 1.0 and falling(200, total) == pytest.approx(0.1, abs=1e-15)
    assert falling(1, total) == pytest.approx(math.exp(math.log(0.1) / 200), abs=1e-15)
    assert falling(100, total) == pytest.approx(math.sqrt(0.1), abs=1e-15)
    decay = Decay(start=2.0, rate=0.01, floor=0.5)
    assert decay(0, total) == 2.0 and decay(200, total) == 0.5
    assert decay(1, total) == pytest.approx(2 * math.exp(-0.01), abs=1e-15)


def test_learning_rate_follows_its_closed_form():
    config = OptimConfig(lr=0.5, warmup=10, schedule="cosine", floor=0.2)
    total = 110
    assert config.lr_at(0, total) == pytest.approx(0.05) and config.lr_at(1, total) == pytest.approx(0.1)
    assert config.lr_at(9, total) == pytest.approx(0.5) and config.lr_at(10, total) == pytest.approx(0.5)
    assert config.lr_at(60, total) == pytest.approx(0.5 * (0.2 + 0.8 / 2))
    last = 0.5 * (0.2 + 0.8 * (1 + math.cos(math.pi * 99 / 100)) / 2)
    assert config.lr_at(109, total) == pytest.approx(last)
    assert config.lr_at(110, total) == pytest.approx(0.1)
    assert OptimConfig(lr=1.0).lr_at(0, 5) == 1.0
    assert [OptimConfig(lr=1.0, schedule="constant").lr_at(h, 5) for h in range(5)] == [1.0] * 5
