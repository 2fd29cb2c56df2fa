"""SEDD: score entropy, its bound and the analytic sampler against sums over all rows, and closed forms."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from enumeration import ALPHA, all_rows, chi_square, gauss_legendre, single
from references import tweedie_distribution
from steps import masks, randn
from torch import Tensor

from emoe.backbones.base import Backbone, BackboneConfig
from emoe.config import ConfigError
from emoe.diffusion.masking import reveal_probability
from emoe.diffusion.times import GridStep
from emoe.methods import sedd
from emoe.methods.sedd import SEDD, SEDDConfig, log_scale, score_entropy, tweedie_step
from emoe.rng import Rng
from emoe.types import Features, Likelihood, StepEvent, TokenSpace

EPS = 1e-3
MASK = 1
SPACE = TokenSpace(size=3, mask_id=MASK, length=2)
SYMBOLS = [0, 2]
STATES, CLEAN = all_rows(range(3), 2), all_rows(SYMBOLS, 2)
NELBO = Likelihood.parse("nelbo")


def sigma(t: float) -> float:
    return -math.log(1 - (1 - EPS) * t)


def index(rows: Tensor) -> Tensor:
    return rows[:, 0] * 3 + rows[:, 1]


def test_loss_is_the_published_formula_and_clean_positions_take_no_part(tiny):
    """d sigma/dt * [sum_y s_y - log(s_x0) / (e^sigma - 1) + r (log r - 1)] at each masked position, in plain loops."""
    method = tiny(SEDDConfig(), size=5, length=3, mask_id=2)
    x0, xt = torch.tensor([[0, 4, 3], [1, 1, 4]]), torch.tensor([[2, 4, 2], [2, 2, 2]])
    t = torch.tensor([0.3, 0.9], dtype=torch.float64)
    h = method.backbone(xt, t).h.detach().requires_grad_()
    logits = method.backbone.read(h)
    method.backbone.forward = lambda *_: Features(h)
    log_s = method.log_score(xt, t)
    loss, recon = method.score_loss(x0, xt, t)
    for row in range(2):
        level = sigma(t[row].item())
        r, want, plain = 1 / (math.exp(level) - 1), 0.0, 0.0
        for position in range(3):
            assert log_s[row, position, xt[row, position]] == 0
            if xt[row, position] != 2:
                continue
            scale = math.log(math.exp(level) - 1) + math.log(4)
            s = {y: math.exp(logits[row, position, y].item() - scale) for y in (0, 1, 3, 4)}
            assert all(log_s[row, position, y].item() == pytest.approx(math.log(s[y]), abs=1e-12) for y in s)
            target = x0[row, position].item()
            want += sum(s.values()) - r * math.log(s[target]) + r * (math.log(r) - 1)
            plain -= math.log(s[target] / sum(s.values()))
        slope = (1 - EPS) / (1 - (1 - EPS) * t[row].item())
        assert slope * r == pytest.approx(1 / t[row].item(), rel=1e-12)
        assert loss[row].item() == pytest.approx(slope * want, rel=1e-11)
        assert recon[row].item() == pytest.approx(plain / t[row].item(), rel=1e-11)
    (slopes,) = torch.autograd.grad(loss.sum(), h)
    assert (slopes[0, 1] == 0).all() and (slopes[xt == 2].abs().sum(-1) > 0).all()


def test_score_entropy_is_zero_at_the_true_ratio_and_exact_at_small_noise():
    level = torch.tensor([1e-9, 0.5, 7.0], dtype=torch.float64)
    log_r = -torch.log(torch.expm1(level))[:, None]
    assert torch.allclose(score_entropy(log_r, log_r, level), torch.zeros(3, 1).double(), atol=1e-12)
    double = score_entropy(log_r + math.log(2), log_r, level)  # scores sum to 2 r: r (2 - 1 - log 1)
    assert torch.allclose(double, log_r.exp(), rtol=1e-6)
    small = score_entropy((log_r + 0.3).float(), (log_r - 2).float(), level.float())
    assert torch.allclose(small.double(), log_r.exp() * (math.exp(0.3) - 1 + 2), rtol=1e-5)


def test_times_are_between_t_low_and_one_and_parts_of_the_loss_add_up(tiny, monkeypatch: pytest.MonkeyPatch):
    method = tiny(SEDDConfig(t_low=0.4))
    times: list[Tensor] = []
    forward = method.backbone.forward
    monkeypatch.setattr(method.backbone, "forward", lambda x, t: times.append(t) or forward(x, t))
    loss = method(CLEAN.repeat(50, 1), {}, Rng(0))
    assert times[0].min() > 0.4 and times[0].max() <= 1 and times[0].min() < 0.42 and times[0].max() > 0.98
    assert loss.total.item() == pytest.approx((loss.log["recon"] + loss.log["excess"]).item(), abs=1e-14)
    assert loss.log["excess"] > 0


def generator_matrix(size: int, mask_id: int) -> Tensor:
    """Q of dp/dsigma = Q p: every symbol leaves for the mask at rate 1."""
    matrix = -torch.eye(size, dtype=torch.float64)
    matrix[mask_id] += 1
    return matrix


@pytest.mark.parametrize("mask_id", [0, 2, 3])
def test_analytic_step_is_tweedies_formula(mask_id: int):
    """(exp(-d Q) s)_y * exp(d Q)(x, y) by matrix exponentials, where it has no negative entry."""
    x = torch.arange(4)[None]
    low, high = 0.3, 0.8
    log_s = 0.3 * randn(1, 4, 4) - 1.7
    log_s = log_s.scatter(-1, x[..., None], 0.0)
    matrix = (high - low) * generator_matrix(4, mask_id)
    back, forth = torch.matrix_exp(-matrix), torch.matrix_exp(matrix)
    want = torch.stack([(back @ log_s[0, symbol].exp()) * forth[symbol] for symbol in range(4)])
    assert (want > -1e-15).all() and torch.allclose(want.sum(-1), torch.ones(4).double(), atol=1e-14)
    got = tweedie_distribution(log_s, x, low, high, mask_id)[0]
    assert torch.allclose(got, want, atol=1e-14)
    assert 0.05 < got[mask_id, mask_id] < 0.95 and (got[x[0] != mask_id].max(-1).values - 1).abs().max() < 1e-14
    last = tweedie_distribution(log_s, x, 0.0, high, mask_id)[0, mask_id]
    others = [y for y in range(4) if y != mask_id]
    assert last[mask_id] == 0 and torch.allclose(last[others], torch.softmax(log_s[0, mask_id, others], -1), atol=1e-14)


@pytest.mark.parametrize("shift", [0.0, 1.2], ids=["open", "surely revealed"])
@pytest.mark.parametrize("alpha_s", [0.6, 1.0])
@pytest.mark.parametrize("at_once", [7_000, 10**6], ids=["in parts", "together"])
def test_drawn_steps_follow_the_analytic_distribution(
    alpha_s: float, shift: float, at_once: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sedd, "AT_ONCE", at_once)
    n, alpha_t, xt = 60_000, 0.3, torch.tensor([[2, 0]])
    scaled = randn(1, 2, 4, seed=1) + shift - log_scale(torch.tensor([-math.log(alpha_t)]).double(), 4)
    log_s = scaled.scatter(-1, xt[..., None], 0.0)
    probs = tweedie_distribution(log_s, xt, -math.log(alpha_s), -math.log(alpha_t), 2)[0, 0]
    many = log_s.expand(n, -1, -1), xt.expand(n, -1)
    xs, revealed = tweedie_step(*many, GridStep(1, 1.0, alpha_t, reveal_probability(alpha_s, alpha_t)), 2, Rng(2))
    assert (xs[:, 1] == 0).all() and torch.equal(revealed, torch.stack([xs[:, 0] != 2, torch.zeros(n).bool()], 1))
    assert (probs[2] == 0) == (alpha_s == 1 or shift > 0)
    assert chi_square(torch.bincount(xs[:, 0], minlength=4), probs) > ALPHA


def step_matrices(method: SEDD, steps: int) -> list[Tensor]:
    """p(x_s | x_t) over all pairs of states for the steps i = T..1."""
    times = [single(i / steps) for i in range(steps, 0, -1)]
    with torch.no_grad():
        t = torch.tensor(times).repeat_interleave(len(STATES))
        log_s = method.log_score(STATES.repeat(steps, 1), t).view(steps, len(STATES), 2, 3)
    matrices = []
    for k, i in enumerate(range(steps, 0, -1)):
        low = sigma((i - 1) / steps) if i > 1 else 0.0
        move = tweedie_distribution(log_s[k], STATES, low, sigma(i / steps), MASK)
        matrices.append(move[:, 0, STATES[:, 0]] * move[:, 1, STATES[:, 1]])
    return matrices


def law_of(method: SEDD, steps: int, start: tuple[int, int] = (MASK, MASK)) -> Tensor:
    law = torch.zeros(len(STATES), dtype=torch.float64)
    law[index(torch.tensor([start]))] = 1
    for matrix in step_matrices(method, steps):
        law = law @ matrix
    return law


@pytest.mark.parametrize("start", [(MASK, MASK), (2, MASK)])
@pytest.mark.parametrize("steps", [1, 3])
def test_samples_follow_the_enumerated_chain_and_given_tokens_stay(tiny, steps: int, start: tuple[int, int]):
    method, n = tiny(SEDDConfig(), seed=5), 60_000
    law = law_of(method, steps, start)
    assert law[index(CLEAN)].sum().item() == pytest.approx(1, abs=1e-12)
    events: list[StepEvent] = []
    rows = method.sample(torch.tensor([start]).repeat(n, 1), steps, Rng(1), on_step=events.append)
    assert chi_square(torch.bincount(index(rows), minlength=9), law) > ALPHA
    assert [event.step for event in events] == list(range(steps, 0, -1)) and torch.equal(events[-1].x, rows)
    if start[0] != MASK:
        assert (rows[:, 0] == start[0]).all() and not any(event.revealed[:, 0].any() for event in events)
    else:
        assert torch.equal(rows, method.sample(masks(method, n), steps, Rng(1)))


def integral(method: SEDD, low: float, share: float, nodes: int = 24) -> Tensor:
    """Integral over t in [low, 1] of E[loss] for each clean row, where a token is masked with probability share * t."""
    total = torch.zeros(len(CLEAN), dtype=torch.float64)
    patterns = all_rows([0, 1], 2).bool()
    for t, weight in gauss_legendre(low, 1.0, nodes):
        prob = (patterns.double() * share * t + (~patterns).double() * (1 - share * t)).prod(-1)
        times = torch.full((len(CLEAN),), t, dtype=torch.float64)
        for pattern, p in zip(patterns, prob, strict=True):
            with torch.no_grad():
                loss, _ = method.score_loss(CLEAN, torch.where(pattern, MASK, CLEAN), times)
            total += weight * p * loss
    return total


def test_nelbo_bounds_the_chain_of_many_steps(tiny):
    """At every row, by sums over all masks and states; and what is drawn is that number."""
    method = tiny(SEDDConfig(), seed=3)
    with torch.no_grad():
        method.backbone.head.weight.mul_(0.3)  # a sum of scores near its true value, and steps short enough for 1,000
    bound = integral(method, 0.0, 1.0, 60)
    coarse, fine = (-law_of(method, steps)[index(CLEAN)].log() for steps in (500, 1_000))
    assert (fine - coarse).abs().max() < 1e-3
    gap = bound - fine
    assert (gap > 0).all() and 0.005 < gap.min() and gap.max() < 1
    rows, calls = CLEAN.repeat(2_000, 1), 10
    drawn = torch.stack([method.nll(rows, NELBO, Rng(4).at(call)).view(2_000, 4).mean(0) for call in range(calls)])
    error = drawn.std(0) / math.sqrt(calls)
    assert ((drawn.mean(0) - bound).abs() < 5 * error).all() and error.max() < 0.03


def test_other_likelihoods_are_refused(tiny):
    method = tiny(SEDDConfig())
    assert method.likelihoods() == ("nelbo",)
    for name in ("objective", "bound@2", "iw@2,3", "exact"):
        with pytest.raises(ConfigError, match="likelihood: sedd has nelbo only"):
            method.nll(CLEAN, Likelihood.parse(name), Rng(0))


class Known(Backbone):
    """The true ratios of a law over two symbols and two positions."""

    def __init__(self, law: Tensor):
        super().__init__()
        self.routed_blocks, self.mask_id, self.law = 0, MASK, law

    def forward(self, x, t, *, cond=None, marks=None, route=None):
        """log(V - 1) + log p(x0^l = y | clean tokens), which `read` leaves as it is."""
        known = torch.ones(len(x), 2, 2, dtype=torch.float64)  # rows, position, symbol: whether the row allows it
        for position in range(2):
            for number, symbol in enumerate(SYMBOLS):
                known[:, position, number] = ((x[:, position] == MASK) | (x[:, position] == symbol)).double()
        logits = torch.full((len(x), 2, 3), -math.inf, dtype=torch.float64)
        for position, table in enumerate((self.law, self.law.T)):
            probs = torch.einsum("nb,ab->na", known[:, 1 - position], table)
            logits[:, position, SYMBOLS] = (probs / probs.sum(-1, keepdim=True)).log() + math.log(2)
        return Features(logits)

    def read(self, h):
        return h


@dataclass(frozen=True, kw_only=True)
class KnownConfig(BackboneConfig):
    """Makes `Known` of one law."""

    supports: ClassVar[frozenset[str]] = frozenset({"time"})

    def build(self, space, needs):
        return Known(LAW)


LAW = torch.tensor([[0.5, 0.05], [0.15, 0.3]], dtype=torch.float64)


def entropy(p: Tensor) -> float:
    return -(p * p.log()).sum().item()


def masked_entropy(m: float) -> float:
    """G(m): mean entropy of x0 given x with each token masked with probability m."""
    joint, sides = entropy(LAW), entropy(LAW.sum(0)) + entropy(LAW.sum(1))
    return m**2 * joint + m * (1 - m) * (2 * joint - sides)  # H(a | b) + H(b | a) = 2 H(a, b) - H(a) - H(b)


@pytest.mark.parametrize("low", [0.0, 0.2])
def test_true_ratios_have_the_entropy_of_the_data(low: float):
    """Integrals: G(1 - eps) - G((1 - eps) t_low) over [t_low, 1] with the masks of training, H with those of nelbo."""
    method = SEDDConfig(t_low=low).build(SPACE, KnownConfig())
    weights = LAW.flatten()
    train = (weights * integral(method, low, 1 - EPS)).sum().item()
    assert train == pytest.approx(masked_entropy(1 - EPS) - masked_entropy((1 - EPS) * low), abs=1e-12)
    assert (weights * integral(method, 0.0, 1.0)).sum().item() == pytest.approx(entropy(LAW), abs=1e-12)
    rows = CLEAN.repeat_interleave((weights * 20_000).round().long(), dim=0)
    losses = torch.tensor([method(rows, {}, Rng(6).at(call)).total.item() * 2 * (1 - low) for call in range(10)])
    assert abs(losses.mean() - train) < 5 * losses.std() / math.sqrt(10) and losses.std() < 0.02
    bounds = torch.tensor([method.nll(rows, NELBO, Rng(7).at(call)).mean().item() for call in range(10)])
    assert abs(bounds.mean() - entropy(LAW)) < 5 * bounds.std() / math.sqrt(10) and bounds.std() < 0.02
