"""Experts behind a gate: the straight-through gradients, and every dispatch against a mixture written out."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from steps import batch_of, generator, gradients, loss_at, randn, scramble
from torch import Tensor
from torch.nn import functional as nnf

from emoe.diffusion.categorical import gumbel
from emoe.methods import emoe as emoe_method
from emoe.methods.emoe import EMoEConfig
from emoe.rng import Rng
from emoe.routing.experts import RoutedExperts
from emoe.routing.routes import draw
from emoe.types import Gate, Route

RAMP = {name: torch.tensor(value, dtype=torch.float64) for name, value in (("relax_tau", 0.7), ("kl_weight", 1.0))}


def run(experts: RoutedExperts, expert: int, x: Tensor) -> Tensor:
    """One expert on all of x."""
    hidden = nnf.gelu(x @ experts.w_in[expert] + experts.b_in[expert])
    return hidden @ experts.w_out[expert] + experts.b_out[expert]


@pytest.mark.parametrize("tau", [0.1, 0.7, 2.0])
@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_gate_gradient_is_the_formula_and_the_finite_difference(tau: float, top_k: int):
    """dw_j / d logit_e = w_j (1[j = e] - w_e) / tau over the kept experts, w = renormalised relaxed weights."""
    logits, noise = randn(2, 3, 4, seed=9).requires_grad_(), gumbel((2, 3, 4), generator(10))
    gate = draw(generator(10), tau, top_k=top_k)(0, logits)
    order = (logits.detach() + noise).argsort(-1, descending=True)[..., :top_k]
    hard = torch.zeros(2, 3, top_k).double()
    hard[..., 0] = 1
    assert torch.equal(gate.expert, order) and torch.equal(gate.weight, hard)

    def relaxed(at: Tensor) -> Tensor:
        return torch.softmax(((at + noise) / tau).gather(-1, order), -1)  # frozen noise and frozen choice

    w, cotangent = relaxed(logits.detach()), randn(2, 3, top_k, seed=11)
    (cotangent * gate.weight).sum().backward()
    on_kept = w * (cotangent - (cotangent * w).sum(-1, keepdim=True)) / tau
    by_hand = torch.zeros(2, 3, 4).double().scatter(-1, order, on_kept)
    assert torch.allclose(logits.grad, by_hand, atol=1e-13)
    step = 1e-6
    for index in [(0, 0, 0), (0, 2, 3), (1, 1, 1), (1, 2, 2)]:
        bump = torch.zeros(2, 3, 4).double()
        bump[index] = step
        change = relaxed(logits.detach() + bump) - relaxed(logits.detach() - bump)
        assert ((cotangent * change).sum() / (2 * step)).item() == pytest.approx(by_hand[index].item(), abs=1e-7)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_straight_through_output_is_bit_equal_to_hard_routing(dtype: torch.dtype):
    logits = (10 * randn(3, 5, 4, seed=12)).to(dtype).requires_grad_()  # some experts are all but impossible
    x = randn(3, 5, 8, seed=13, dtype=dtype)
    paths = ["loop", "dense"] if dtype == torch.float64 else ["loop", "dense", "grouped"]
    for tau in (0.1, 0.37, 1.0):
        for seed in range(3):
            gate = draw(generator(seed), tau)(0, logits)
            assert gate.weight.dtype == dtype and gate.weight.requires_grad
            hard = Gate(gate.expert[..., :1], torch.ones(3, 5, 1, dtype=dtype))
            assert torch.equal(gate.weight[..., 0], hard.weight[..., 0]) and (gate.weight[..., 1:] == 0).all()
            for path in paths:
                experts = scramble(RoutedExperts(8, 16, 4, path).to(dtype), seed)
                with torch.no_grad():
                    expected = experts(x, hard)
                assert torch.equal(experts(x, gate), expected), (path, tau)


def test_whole_training_gradient_is_the_finite_difference_of_the_surrogate(tiny, monkeypatch: pytest.MonkeyPatch):
    """The network with noise, choices and outputs of experts that were not drawn frozen, differentiated by differences.

    Loss = NLL + KL of `infer`, in every parameter tensor: nothing is detached that should not be, and reverse.
    """
    method = tiny(EMoEConfig(experts=3))
    x0, xt, t = batch_of(method, 8)

    def loss() -> Tensor:
        return loss_at(method, x0, xt, t, RAMP, Rng(2)).total * 16

    want = gradients(method, loss())
    frozen: list[tuple[Tensor, Tensor]] = []  # of each block: the kept experts, their relaxed weights
    outputs: list[Tensor] = []  # of each block: the outputs of the kept experts
    recording, calls = True, [0]

    def surrogate_draw(source: torch.Generator, tau: Tensor, **_: object) -> Route:
        def policy(block: int, logits: Tensor) -> Gate:
            perturbed = torch.log_softmax(logits, -1) + gumbel(tuple(logits.shape), source)
            if recording:
                order = perturbed.topk(2, -1).indices
                frozen.append((order, torch.softmax((perturbed / tau).gather(-1, order), -1)))
            order, start = frozen[block]
            weight = torch.softmax((perturbed / tau).gather(-1, order), -1)
            return Gate(order, weight - start + torch.tensor([1.0, 0.0]).double())

        return policy

    def surrogate_experts(self: RoutedExperts, x: Tensor, gate: Gate) -> Tensor:
        every = torch.stack([run(self, e, x) for e in range(3)], -2)
        values = every.gather(-2, gate.expert[..., None].expand(*gate.expert.shape, x.shape[-1]))
        block = calls[0] % 2
        calls[0] += 1
        if recording:
            outputs.append(values)
        values = torch.cat([values[..., :1, :], outputs[block][..., 1:, :]], -2)
        return (gate.weight[..., None] * values).sum(-2)

    monkeypatch.setattr(emoe_method, "draw", surrogate_draw)
    monkeypatch.setattr(RoutedExperts, "forward", surrogate_experts)
    with torch.no_grad():
        loss()
        recording = False
        step = 1e-5
        for number, (name, parameter) in enumerate(method.named_parameters()):
            way = randn(*parameter.shape, seed=100 + number)
            way /= way.norm()
            values = []
            for sign in (1, -1):
                parameter.add_(way, alpha=sign * step)
                values.append(loss().item())
                parameter.add_(way, alpha=-sign * step)
            slope = (values[0] - values[1]) / (2 * step)
            assert slope == pytest.approx((want[name] * way).sum().item(), abs=2e-6, rel=1e-6), name
    routers = [name for name in want if ".router." in name]
    assert routers and all(want[name].abs().max() > 1e-3 for name in routers)


def one_hot_mixture(experts: RoutedExperts, x: Tensor, gate: Gate) -> Tensor:
    """sum_e mix_e f_e(x) over all experts; those that are not drawn give only the gradient of their weight."""
    out = torch.zeros_like(x)
    for e in range(experts.experts):
        f = run(experts, e, x)
        f = torch.where(gate.expert[..., :1] == e, f, f.detach())
        out = out + ((gate.expert == e) * gate.weight).sum(-1, keepdim=True) * f
    return out


# Three of five experts without rows, one with a single row; all rows on one expert; all experts in use.
LOADS = {
    "empty and single": [3, 3, 1, 3, 3, 3, 3, 3, 3, 3, 3, 3],
    "collapsed": [2] * 12,
    "even": [0, 1, 2, 3, 4, 4, 3, 2, 1, 0, 2, 2],
}


@pytest.mark.parametrize("load", LOADS, ids=list(LOADS))
@pytest.mark.parametrize(
    ("dispatch", "dtype"),
    [("loop", torch.float64), ("dense", torch.float64), ("grouped", torch.float32), ("auto", torch.float32)],
)
@pytest.mark.parametrize("k", [1, 2])
def test_every_dispatch_is_the_one_hot_mixture(load: str, dispatch: str, dtype: torch.dtype, k: int):
    experts = scramble(RoutedExperts(8, 16, 5, dispatch).to(dtype), 2)
    first = torch.tensor(LOADS[load]).view(3, 4)
    expert = torch.stack([first, (first + 1) % 5], -1)[..., :k]
    logits = randn(3, 4, k, seed=18, dtype=dtype).requires_grad_()
    soft = torch.softmax(logits, -1)
    gate = Gate(expert, soft - soft.detach() + torch.eye(k, dtype=dtype)[0])
    x, cotangent = randn(3, 4, 8, seed=19, dtype=dtype).requires_grad_(), randn(3, 4, 8, seed=20, dtype=dtype)
    inputs = [x, logits, *experts.parameters()]
    got, want = experts(x, gate), one_hot_mixture(experts, x, gate)
    tolerance = 1e-12 if dtype == torch.float64 else 2e-6
    assert torch.allclose(got, want, atol=tolerance)
    slopes, expected = (torch.autograd.grad((out * cotangent).sum(), inputs, retain_graph=True) for out in (got, want))
    for a, b in zip(slopes, expected, strict=True):
        assert torch.allclose(a, b, atol=10 * tolerance)
    idle = [e for e in range(5) if e not in first]
    for slope in slopes[2:]:
        assert (slope[idle] == 0).all()  # exactly, and not None: an idle expert still takes part
    expanded = torch.autograd.grad(experts(x, gate).sum(), inputs)  # a gradient with zero strides
    assert all(slope.isfinite().all() for slope in expanded)
    with torch.no_grad():
        assert torch.allclose(experts(x, gate), want, atol=tolerance)


@pytest.mark.parametrize("top_k", [0, 2, 4])
def test_draws_that_share_their_rows_are_those_that_run_by_themselves(top_k: int):
    rows, draws, positions, count = 3, 4, 2, 5
    experts = scramble(RoutedExperts(6, 8, count, "loop").double(), 1)
    logits, cotangent = randn(rows * draws, positions, count, seed=28), randn(rows, draws, positions, 6, seed=29)
    results = []
    for together in (True, False):
        x, at = randn(rows, positions, 6, seed=31).requires_grad_(), logits.clone().requires_grad_()
        gate = draw(generator(30), 0.6, top_k=top_k)(0, at)
        if together:
            out = experts(x, dataclasses.replace(gate, draws=draws)).unflatten(0, (rows, draws))
        else:
            expert, weight = (part.unflatten(0, (rows, draws)) for part in (gate.expert, gate.weight))
            out = torch.stack([experts(x, Gate(expert[:, k], weight[:, k])) for k in range(draws)], 1)
        slopes = torch.autograd.grad((out * cotangent).sum(), [x, at, *experts.parameters()], allow_unused=True)
        results.append((out, slopes))
    (got, got_slopes), (want, want_slopes) = results
    assert torch.allclose(got, want, atol=1e-13)
    assert (got_slopes[1] is None) == (want_slopes[1] is None) == (top_k == 0)
    for a, b in zip(got_slopes, want_slopes, strict=True):
        assert a is b is None or (torch.allclose(a, b, atol=1e-12) and b.any())


def test_activations_differ_by_the_approximation_only():
    exact, near = (scramble(RoutedExperts(8, 16, 3, "loop", name).double(), 1) for name in ("gelu", "gelu-tanh"))
    x, gate = 3 * randn(2, 5, 8), Gate(torch.randint(3, (2, 5, 1), generator=generator()), torch.ones(2, 5, 1).double())
    assert 1e-6 < (exact(x, gate) - near(x, gate)).abs().max() < 1e-2


def test_experts_agree_under_autocast():
    x, gate = randn(3, 5, 16, dtype=torch.float32), Gate(torch.arange(15).view(3, 5, 1) % 4, torch.ones(3, 5, 1))
    want, slopes = scramble(RoutedExperts(16, 32, 4, "loop"), 3)(x, gate), []
    for dispatch in ("loop", "dense", "grouped"):
        experts = scramble(RoutedExperts(16, 32, 4, dispatch), 3)
        with torch.autocast("cpu", torch.bfloat16):
            out = experts(x, gate)
        assert (out - want).abs().max() < 0.02 * want.abs().max()
        out.float().square().sum().backward()
        slopes.append(experts.w_in.grad)
    assert all((slope - slopes[0]).norm() < 0.02 * slopes[0].norm() for slope in slopes)
