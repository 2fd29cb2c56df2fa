"""BD3-LM: its attention, its loss and bounds against sums over all rows, its sampler with and without a cache."""

from __future__ import annotations

import functools
import itertools
import math

import pytest
import torch
from enumeration import ALPHA, all_rows, chi_square, predict
from steps import counts_of, generator, masks, scramble, small_dit
from torch import Tensor

from emoe.backbones.transformer import TransformerConfig
from emoe.config import ConfigError
from emoe.diffusion.schedule import CosineSchedule, LogLinearSchedule
from emoe.evaluation.measure import estimate_nll
from emoe.methods.bd3lm import BD3LM, BD3LMConfig, block_mask
from emoe.methods.mdlm import MDLMConfig
from emoe.rng import Rng
from emoe.runs.sampling import draw
from emoe.types import Likelihood, StepEvent, TokenSpace

SPACE = TokenSpace(size=3, mask_id=1, length=4)
MASK = SPACE.mask_id
CLEAN = all_rows([0, 2], SPACE.length)
Row = tuple[int, ...]


def build(block: int, *, space: TokenSpace = SPACE, seed: int = 5, **other: object) -> BD3LM:
    """Equal seeds give equal weights, whatever the block."""
    return scramble(BD3LMConfig(block=block, **other).build(space, small_dit()).double(), seed)


class Exact:
    """Sums over rows, masks and orders, by a network call for each block behind its clean prefix."""

    def __init__(self, method: BD3LM):
        self.method, self.block = method, method.config.block
        self.tokens = functools.cache(self._tokens)
        self.blocks = [tuple(row) for row in all_rows(range(SPACE.size), self.block).tolist()]

    @torch.no_grad()
    def _tokens(self, prefix: Row, noisy: Row) -> list[list[float]]:
        """p(x^l | noisy block, clean prefix) for each position of the block and symbol."""
        x = torch.tensor([[*prefix, *noisy]])
        part = torch.arange(x.shape[1]) // self.block
        logits = predict(self.method.backbone, x, torch.zeros(1), attend=part[:, None] >= part).logits[0, len(prefix) :]
        return torch.softmax(logits, -1).tolist()

    def step(self, prefix: Row, noisy: Row, reveal: float) -> dict[Row, float]:
        """p(x_s | x_t) of a block for a chance of being revealed."""
        probs = self.tokens(prefix, noisy)
        moves = [
            {v: reveal * p for v, p in enumerate(row) if v != MASK} | {MASK: 1 - reveal} if old == MASK else {old: 1.0}
            for row, old in zip(probs, noisy, strict=True)
        ]
        return {
            after: math.prod(m[v] for m, v in zip(moves, after, strict=True)) for after in itertools.product(*moves)
        }

    def law(self, steps: int, given: Row = (MASK,) * 4) -> Tensor:
        """Law of the sampler with `steps` in each block, over CLEAN; the linear schedule reveals 1 in i at t = i/T."""
        rows: dict[Row, float] = {(): 1.0}
        for start in range(0, SPACE.length, self.block):
            grown: dict[Row, float] = {}
            for prefix, mass in rows.items():
                block = {given[start : start + self.block]: mass}
                for i in range(steps, 0, -1):
                    after: dict[Row, float] = {}
                    for noisy, weight in block.items():
                        for new, p in self.step(prefix, noisy, 1 / i).items():
                            after[new] = after.get(new, 0.0) + weight * p
                    block = after
                grown |= {(*prefix, *new): weight for new, weight in block.items() if MASK not in new}
            rows = grown
        return torch.tensor([rows.get(tuple(row), 0.0) for row in CLEAN.tolist()], dtype=torch.float64)

    def sums(self, weight) -> Tensor:
        """Sum over blocks and mask patterns of weight(number of masks) * masked NLL, for every clean row."""
        return torch.tensor([self.sum(tuple(row), weight) for row in CLEAN.tolist()], dtype=torch.float64)

    def sum(self, row: Row, weight) -> float:
        total = 0.0
        for start in range(0, SPACE.length, self.block):
            prefix, block = row[:start], row[start : start + self.block]
            for pattern in itertools.product((False, True), repeat=self.block):
                noisy = tuple(MASK if hidden else v for v, hidden in zip(block, pattern, strict=True))
                probs = self.tokens(prefix, noisy)
                nll = -sum(math.log(probs[at][v]) for at, v in enumerate(block) if pattern[at])
                total += weight(sum(pattern)) * nll
        return total

    def bound(self, steps: int) -> Tensor:
        """bound@T of every clean row."""
        size = self.block

        def weight(k: int) -> float:
            return sum((i / steps) ** k * (1 - i / steps) ** (size - k) / i for i in range(1, steps + 1))

        return self.sums(weight)

    def nelbo(self) -> Tensor:
        """The integral over t of t^k (1 - t)^(S - k) / t is the Beta function at (k, S - k + 1)."""

        def weight(k: int) -> float:
            return math.gamma(k) * math.gamma(self.block - k + 1) / math.gamma(self.block + 1) if k else 0.0

        return self.sums(weight)

    def limit(self) -> Tensor:
        """-log p of every clean row for many steps: tokens of a block one by one, in every order alike."""
        totals = []
        for row in CLEAN.tolist():
            total = 0.0
            for start in range(0, SPACE.length, self.block):
                prefix, block = tuple(row[:start]), row[start : start + self.block]
                orders = list(itertools.permutations(range(self.block)))
                mean = 0.0
                for order in orders:
                    noisy, p = [MASK] * self.block, 1.0
                    for position in order:
                        p *= self.tokens(prefix, tuple(noisy))[position][block[position]]
                        noisy[position] = block[position]
                    mean += p / len(orders)
                total -= math.log(mean)
            totals.append(total)
        return torch.tensor(totals, dtype=torch.float64)


def logits_of(method: BD3LM, xt: Tensor, x0: Tensor) -> Tensor:
    """Logits of xt in the training pass on [xt ; x0]."""
    both, t = torch.cat([xt, x0], 1), torch.zeros(len(x0))
    logits = predict(method.backbone, both, t, attend=method.attend, positions=method.positions).logits
    return logits[:, : xt.shape[1]]


def without_cache(method: BD3LM) -> BD3LM:
    """The method, whose sampler runs the network of training on [x ; x], whole rows at every step."""
    method._read_block = lambda x, block, cache: logits_of(method, x, x)[:, block]
    return method


@pytest.mark.parametrize(("length", "block"), [(4, 1), (4, 2), (4, 4), (6, 3), (1, 1)])
def test_the_mask_is_its_definition(length: int, block: int):
    mask = block_mask(length, block)
    assert mask.shape == (2 * length, 2 * length)
    for q, k in itertools.product(range(2 * length), repeat=2):
        b_q, b_k = q % length // block, k % length // block
        if q < length:
            want = b_q == b_k if k < length else b_k < b_q
        else:
            want = k >= length and b_k <= b_q
        assert mask[q, k].item() == want, (q, k)


def test_blocks_depend_on_their_noisy_self_and_clean_earlier_blocks_only():
    """Blocks of two: logits of a block move with its own xt and with x0 of earlier blocks, and with nothing else."""
    space = TokenSpace(size=3, mask_id=1, length=6)
    method = build(2, space=space)
    xt, x0 = torch.tensor([[1, 0, 2, 1, 1, 1]]), torch.tensor([[2, 0, 2, 2, 0, 2]])
    start = logits_of(method, xt, x0)[..., [0, 2]]
    for half, position in itertools.product(range(2), range(6)):
        rows = [xt.clone(), x0.clone()]
        rows[half][0, position] = (rows[half][0, position] + 1) % 3
        moved = (logits_of(method, *rows)[..., [0, 2]] - start).abs().amax((0, 2)).view(3, 2).amax(-1)
        for block in range(3):
            attended = position // 2 == block if half == 0 else position // 2 < block
            assert moved[block] > 1e-9 if attended else moved[block] == 0, (half, position, block)


def test_one_block_is_mdlm():
    """With block = L: loss, gradients, likelihoods and samples of MDLM with the same weights and streams."""
    for schedule in (None, CosineSchedule()):
        more = {"t_low": 0.1} | ({} if schedule is None else {"schedule": schedule})
        method = build(4, **more)
        plain = scramble(MDLMConfig(**more).build(SPACE, small_dit()).double(), 5)
        losses = [one(CLEAN, {}, Rng(3).at(2)).total for one in (method, plain)]
        assert losses[0].item() == pytest.approx(losses[1].item(), abs=1e-12)
        for loss in losses:
            loss.backward()
        want = dict(plain.named_parameters())
        assert {name for name, _ in method.named_parameters()} == set(want)
        for name, parameter in method.named_parameters():
            assert torch.allclose(parameter.grad, want[name].grad, atol=1e-12), name
        for likelihood in map(Likelihood.parse, ("nelbo", "bound@1", "bound@3")):
            a, b = (one.nll(CLEAN, likelihood, Rng(4)) for one in (method, plain))
            assert torch.allclose(a, b, atol=1e-12)
        x = masks(method, 200)
        assert torch.equal(method.sample(x, 3, Rng(5)), plain.sample(x, 3, Rng(5).fork("block", 0)))


def test_every_block_has_a_time_of_its_own_in_a_stratum_of_its_own():
    method = build(2)
    t = method.times(50, Rng(0).at(1), 0.2)
    assert t.shape == (50, 2) and ((t > 0.2) & (t <= 1)).all()
    strata = ((t.double().flatten() - 0.2) / 0.8 * 100).ceil().long().sort().values
    assert torch.equal(strata, torch.arange(1, 101))
    halves = torch.cat([method.times(25, Rng(0, rank=rank, world=2).at(1), 0.2) for rank in (0, 1)])
    assert torch.equal(halves, t)


def test_the_loss_is_the_weighted_sum_over_blocks():
    """Against one network call for each block behind its prefix."""
    method, rows = build(2), CLEAN[[3, 9, 14]]
    exact, rng = Exact(method), Rng(7).at(0)
    t = method.times(3, rng)
    xt = method.mask(rows, t, rng)
    want = 0.0
    for row, noisy, times in zip(rows.tolist(), xt.tolist(), t.double().tolist(), strict=True):
        for b, time in enumerate(times):
            probs = exact.tokens(tuple(row[: 2 * b]), tuple(noisy[2 * b : 2 * b + 2]))
            hidden = [at for at in range(2) if noisy[2 * b + at] == MASK]
            want -= sum(math.log(probs[at][row[2 * b + at]]) for at in hidden) / time
    assert (xt == MASK).any() and method(rows, {}, Rng(7).at(0)).total.item() == pytest.approx(want / 12, rel=1e-6)


@pytest.mark.parametrize("block", [1, 2, 4])
def test_bounds_hold_and_are_tight_where_nothing_is_lost(block: int):
    for seed in range(3):
        exact = Exact(build(block, seed=seed))
        for steps in (1, 2, 3):
            law = exact.law(steps)
            assert law.sum().item() == pytest.approx(1, abs=1e-12)
            gap = exact.bound(steps) + law.log()
            assert (gap > -1e-12).all()
            # A block in one step is factorised, and so is a block of one token in any number of them.
            assert gap.max() < 1e-12 if steps == 1 or block == 1 else gap.max() > 1e-6
        gap = exact.nelbo() - exact.limit()
        assert (gap > -1e-12).all() and (gap.max() < 1e-12 if block == 1 else gap.max() > 1e-6)


@pytest.mark.parametrize("block", [2, 4])
def test_estimates_have_the_enumerated_means(block: int):
    method = build(block)
    exact = Exact(method)
    for name, want in (("nelbo", exact.nelbo()), ("bound@1", exact.bound(1)), ("bound@3", exact.bound(3))):
        many = CLEAN.repeat(50, 1)
        draws = torch.stack([method.nll(many, Likelihood.parse(name), Rng(k)).mean() for k in range(30)])
        error = draws.std() / math.sqrt(len(draws))
        assert abs(draws.mean() - want.mean()) < 4 * error + 1e-12, name


def test_unknown_likelihoods_are_refused():
    method = build(2)
    assert method.likelihoods() == ("bound@1", "bound@4", "nelbo")
    assert estimate_nll(method, CLEAN, Likelihood.parse("nelbo"), repeats=3).stderr > 0
    for name in ("objective", "exact", "iw@1,4"):
        with pytest.raises(ConfigError, match=f"'bd3lm' has no {name}; ask for nelbo or bound@T"):
            method.nll(CLEAN, Likelihood.parse(name), Rng(0))
    with pytest.raises(ConfigError, match="needs all tokens masked at t = 1; schedule 'loglinear'"):
        build(2, schedule=LogLinearSchedule()).nll(CLEAN, Likelihood.parse("bound@2"), Rng(0))


@pytest.mark.parametrize(("block", "each"), [(1, 1), (1, 2), (2, 1), (2, 2), (2, 3), (4, 2)])
def test_the_sampler_has_the_law(block: int, each: int):
    method = build(block)
    rows = method.sample(masks(method, 10_000), each * SPACE.length // block, Rng(2))
    assert (rows != MASK).all()
    assert chi_square(counts_of(rows), Exact(method).law(each)) > ALPHA


@pytest.mark.parametrize(("block", "each"), [(1, 1), (1, 2), (2, 1), (2, 3), (3, 2), (4, 1), (6, 4), (12, 5)])
def test_the_cache_changes_no_token(block: int, each: int):
    space = TokenSpace(size=5, mask_id=1, length=12)
    cached, plain, steps = build(block, space=space), without_cache(build(block, space=space)), each * 12 // block
    given = torch.tensor([0, 2, 3, 4])[torch.randint(4, (200, 12), generator=generator(1))]
    holes = torch.rand(given.shape, generator=generator(2)) < 0.6
    for x in (masks(cached, 200), given.masked_fill(holes, MASK)):
        rows = cached.sample(x, steps, Rng(4))
        assert torch.equal(rows, plain.sample(x, steps, Rng(4)))
        assert (rows != MASK).all() and len(rows.unique(dim=0)) > 100
        assert not torch.equal(rows, cached.sample(x, steps, Rng(5)))
    assert torch.equal(rows[~holes], given[~holes])


@pytest.mark.parametrize(("block", "steps"), [(2, 2), (2, 6), (4, 1), (4, 3), (1, 4), (1, 8)])
def test_steps_are_network_calls(block: int, steps: int):
    method = build(block)
    assert draw(method, 7, steps, seed=1, batch=3).nfe == steps  # `draw` compares the calls with the steps
    assert draw(method, 2, steps, given=torch.tensor([[0, 2, 1, 1], [0, 0, 2, 2]])).nfe == steps


def test_steps_that_do_not_fit_the_blocks_are_refused():
    method = build(2)
    assert method.config.allowed_nfe(range(1, 7), 4) == (2, 4, 6)
    for steps in (0, 1, 3, 5):
        with pytest.raises(ConfigError, match=f"4 / 2 = 2 blocks, so it must be one of 2, 4, 6, ...; got {steps}"):
            method.sample(masks(method, 1), steps, Rng(0))
    with pytest.raises(ConfigError, match=r"one of 4, 8, 12"):
        build(1).sample(masks(method, 1), 6, Rng(0))


def test_given_tokens_stay_and_blocks_depend_on_those_before_them():
    """A given prefix is continued from the conditional; a token of a later block is kept and not used before it."""
    method, n = build(2), 10_000
    exact = Exact(method)
    for given in ((0, 2, MASK, MASK), (MASK, 2, MASK, MASK), (MASK, MASK, MASK, 0)):
        start = torch.tensor([given]).repeat(n, 1)
        before = start.clone()
        rows = method.sample(start, 4, Rng(6))
        assert torch.equal(start, before) and torch.equal(rows[start != MASK], start[start != MASK])
        assert chi_square(counts_of(rows), exact.law(2, given)) > ALPHA
    whole = exact.law(2)
    prefix = torch.where((CLEAN[:, 0] == 0) & (CLEAN[:, 1] == 2), whole, 0.0)
    assert torch.allclose(exact.law(2, (0, 2, MASK, MASK)), prefix / prefix.sum(), atol=1e-14)
    later = exact.law(2, (MASK, MASK, MASK, 0)).view(4, 4).sum(1)
    assert torch.allclose(later, whole.view(4, 4).sum(1), atol=1e-14)


def test_events_cover_whole_rows():
    events: list[StepEvent] = []
    given = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    rows = build(2).sample(given, 4, Rng(3), on_step=events.append)
    assert [(event.step, event.time) for event in events] == [(4, 1.0), (3, 0.5), (2, 1.0), (1, 0.5)]
    assert all(event.x.shape == event.revealed.shape == (2, 4) for event in events)
    assert torch.equal(sum(event.revealed.long() for event in events), (given == MASK).long())
    expected = torch.cat([rows[:, :2], given[:, 2:]], 1)
    assert torch.equal(events[1].x, expected) and torch.equal(events[3].x, rows)


def test_networks_and_blocks_that_do_not_fit_are_refused():
    for block in (3, 5, 16):
        with pytest.raises(ConfigError, match=f"method.block: must divide the length 4, got {block}; allowed: 1, 2, 4"):
            BD3LMConfig(block=block).build(SPACE, small_dit())
    with pytest.raises(ConfigError, match="block: must be >= 1"):
        BD3LMConfig(block=0)
    with pytest.raises(ConfigError, match="'transformer' has no 'attend'"):
        BD3LMConfig(block=2).build(SPACE, TransformerConfig())


def test_nothing_but_weights_is_saved():
    method = build(2)
    assert set(method.state_dict()) == {name for name, _ in method.named_parameters()}


def test_the_loss_reads_no_value():
    """Forward and backward without data, as a captured CUDA graph needs it: on `meta` a value that is read raises."""
    with torch.device("meta"):
        method, x = BD3LMConfig(block=2).build(SPACE, small_dit()), torch.zeros(5, 4, dtype=torch.long)
        nll = method.block_nll(x, x)
        nll.sum().backward()
    assert nll.shape == (5, 2) and method.backbone.head.weight.grad.shape == (3, 8)
