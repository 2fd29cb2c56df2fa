"""The fused expert layer against the plain form; on a GPU, or on a CPU by Triton's interpreter where there is one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from interpreter import DEVICE, unchecked
from torch import Tensor
from torch.nn import functional as nnf

from emoe.routing import experts as module
from emoe.routing.experts import RoutedExperts
from emoe.types import Gate

# The interpreter's numpy speaks of what is meant to be infinite.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning")
gates: Any = unchecked("emoe.kernels.gates")

# experts, hidden width, model width, rows (which fill no block), experts that take part
SIZES = [(4, 144, 72, 45, 2), (3, 40, 16, 130, 3), (2, 16, 24, 37, 1), (5, 50, 10, 70, 2)]
NAMES = [f"{size[0]}x{size[1]}" for size in SIZES]


def leaves(size: tuple[int, ...], *, hard: bool, seed: int = 0) -> tuple[Tensor, list[Tensor]]:
    """The experts (N, k) of a gate, all of a row different, and the tensors that have a gradient."""
    count, hidden, width, rows, kept = size
    generator = torch.Generator().manual_seed(seed)
    expert = torch.rand(rows, count, generator=generator).argsort(-1)[:, :kept].contiguous()
    shapes = [(rows, width), (count, width, hidden), (count, hidden), (count, hidden, width), (count, width)]
    found = [torch.randn(shape, generator=generator) for shape in shapes]
    found[1], found[3] = 3 * found[1] / width**0.5, found[3] / hidden**0.5
    weight = torch.eye(rows, kept)[:1].expand(rows, -1) if hard else torch.rand(rows, kept, generator=generator)
    found.insert(1, weight)
    return expert.to(DEVICE), [tensor.detach().clone().to(DEVICE).requires_grad_() for tensor in found]


def plain(expert: Tensor, parts: list[Tensor], approximate: str) -> Tensor:
    return module._all_experts.__wrapped__(parts[0], expert, *parts[1:], approximate)  # type: ignore[attr-defined]


def fused(expert: Tensor, parts: list[Tensor], approximate: str, dtype: torch.dtype) -> Tensor:
    return gates.all_experts(parts[0], expert, *parts[1:], approximate, dtype)


def with_gradients(out: Tensor, parts: list[Tensor]) -> list[Tensor]:
    """The result, and the gradients of a weighted sum of it."""
    slope = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(out.device)
    return [out, *torch.autograd.grad((out * slope).sum(), parts)]


def assert_near(found: list[Tensor], wanted: list[Tensor], tolerance: float) -> None:
    """All agree, in proportion to the largest entry."""
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.shape == theirs.shape
        far = (mine.double() - theirs.double()).abs().max()
        assert far <= tolerance * theirs.abs().max().double(), f"{far} of {theirs.abs().max()}"


@pytest.mark.parametrize("size", SIZES, ids=NAMES)
@pytest.mark.parametrize(("approximate", "hard"), [("none", True), ("tanh", False)], ids=["exact-hard", "tanh-soft"])
def test_the_layer_is_the_plain_form(size, approximate: str, hard: bool):
    expert, parts = leaves(size, hard=hard)
    exact = [part.detach().double().requires_grad_() for part in parts]
    found = with_gradients(fused(expert, parts, approximate, torch.float32), parts)
    assert_near(found, with_gradients(plain(expert, exact, approximate), exact), 1e-5)


@pytest.mark.parametrize(("size", "approximate"), [(SIZES[0], "none"), (SIZES[1], "tanh")], ids=NAMES[:2])
def test_half_precision_is_no_further_from_the_truth_than_the_plain_form(size, approximate: str):
    expert, parts = leaves(size, hard=False)
    found = with_gradients(fused(expert, parts, approximate, torch.bfloat16), parts)
    exact = [part.detach().double().requires_grad_() for part in parts]
    wanted = with_gradients(plain(expert, exact, approximate), exact)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        theirs = with_gradients(plain(expert, parts, approximate), parts)
    assert [tensor.dtype for tensor in found] == [tensor.dtype for tensor in theirs]
    slack = 1.1 if DEVICE.type == "cuda" else 2.5  # where a GPU rounds, the interpreter cuts off
    for mine, other, truth in zip(found, theirs, wanted, strict=True):
        far, allowed = ((value.double() - truth).norm() / truth.norm() for value in (mine, other))
        assert far < slack * allowed


@pytest.mark.parametrize("tanh", [False, True], ids=["exact", "tanh"])
def test_the_activation_everywhere(tanh: bool):
    z = torch.cat([torch.linspace(-12, 12, 1001), torch.tensor([-1e4, -0.0, 0.0, 1e-20, 1e4])]).to(DEVICE)
    u = torch.zeros(len(z), 16, device=DEVICE)
    u[:, 3] = z
    expert, ones = torch.zeros(len(z), 1, dtype=torch.int64, device=DEVICE), torch.ones(len(z), 1, device=DEVICE)
    bias = torch.zeros(1, 16, device=DEVICE)
    y = gates.gated(u, bias, expert, ones, tanh=tanh)
    exact = z.double().requires_grad_()
    wanted = nnf.gelu(exact, approximate="tanh" if tanh else "none")
    (slope,) = torch.autograd.grad(wanted.sum(), exact)
    assert ((y[:, 3] - wanted).abs() <= 4e-7 * z.abs() + 1e-30).all()
    dy = torch.zeros_like(y)
    dy[:, 3] = 1
    du, dweight, _ = gates.gated_backward(u, bias, expert, ones, dy, tanh=tanh)
    assert ((du[:, 3] - slope).abs() <= (1e-5 if tanh else 5e-7)).all()
    assert ((dweight[:, 0] - wanted).abs() <= 4e-7 * z.abs() + 1e-30).all()


@pytest.mark.parametrize("hidden", [16, 50, 2100])
@pytest.mark.parametrize("tanh", [False, True], ids=["exact", "tanh"])
def test_a_bias_by_expert_and_the_activation_in_one_pass(hidden: int, tanh: bool):
    generator = torch.Generator().manual_seed(3)
    expert = torch.tensor([0, 0, 2, 2, 2, 3, 0], device=DEVICE)  # nobody has expert 1
    parts = [torch.randn(n, hidden, generator=generator).to(DEVICE).requires_grad_() for n in (len(expert), 4)]
    exact = [part.detach().double().requires_grad_() for part in parts]
    wanted = nnf.gelu(exact[0] + exact[1][expert], approximate="tanh" if tanh else "none")
    truth = with_gradients(wanted, exact)
    assert_near(with_gradients(gates.biased_gelu(*parts, expert, tanh=tanh), parts), truth, 1e-5)
    half, biases = parts[0].detach().bfloat16().requires_grad_(), parts[1].detach()
    found = with_gradients(gates.biased_gelu(half, biases, expert, tanh=tanh), [half])
    assert all(one.dtype == torch.bfloat16 for one in found)
    assert_near(found, truth[:2], 2e-2)


def test_beside_the_hidden_layer_stand_the_gates_and_zeros():
    expert, parts = leaves(SIZES[0], hard=False)
    u = torch.randn(len(expert), 4 * 144, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    y = gates.gated(u, parts[3].detach(), expert, parts[1].detach(), tanh=False)
    mix = torch.zeros(len(expert), 4, device=DEVICE).scatter(1, expert, parts[1].detach())
    assert y.shape[1] % 16 == 0
    assert torch.equal(y[:, 4 * 144 : 4 * 145], mix) and not y[:, 4 * 145 :].any()


def test_an_expert_that_has_no_weight_is_not_read_and_gets_a_gradient_of_zero():
    size = (4, 40, 16, 50, 2)
    _, parts = leaves(size, hard=True)
    expert = torch.tensor([2, 0], device=DEVICE).expand(50, 2)
    parts[3].data[1] = float("nan")
    out = fused(expert, parts, "none", torch.float32)
    grads = with_gradients(out, parts)
    assert all(tensor.isfinite().all() for tensor in [out, *grads])
    for grad in grads[3:]:
        assert grad[2].any() and not grad[[0, 1, 3]].any()
    assert grads[2].abs().min() > 0  # of the weights: those of value 0 have one too


def test_a_gradient_without_strides_and_parameters_that_have_none():
    expert, parts = leaves(SIZES[1], hard=False)
    wanted = torch.autograd.grad(plain(expert, parts, "none").sum(), parts)
    assert_near(list(torch.autograd.grad(fused(expert, parts, "none", torch.float32).sum(), parts)), list(wanted), 1e-5)
    frozen = [*parts[:2], *(part.detach() for part in parts[2:])]
    found = torch.autograd.grad(fused(expert, frozen, "none", torch.float32).sum(), frozen[:2])
    assert_near(list(found), list(wanted[:2]), 1e-5)


def test_equal_bits():
    def once() -> list[Tensor]:
        expert, parts = leaves(SIZES[2], hard=False)
        return with_gradients(fused(expert, parts, "none", torch.bfloat16), parts)

    first = once()
    assert all(torch.equal(a, b) for _ in range(2) for a, b in zip(first, once(), strict=True))


def test_programs_that_have_several_rounds(monkeypatch: pytest.MonkeyPatch):
    for name in ("FORWARD", "BACKWARD"):
        monkeypatch.setattr(gates, name, gates.Plan(tile=256, programs=4, rows=32))  # 4 rounds of 8 rows
    expert, parts = leaves((3, 40, 16, 150, 2), hard=False)
    exact = [part.detach().double().requires_grad_() for part in parts]
    found = with_gradients(fused(expert, parts, "none", torch.float32), parts)
    assert_near(found, with_gradients(plain(expert, exact, "none"), exact), 1e-5)


def test_routed_experts_by_the_kernels(monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    experts = RoutedExperts(16, 40, 3, "dense", "gelu-tanh").to(DEVICE)
    x, weight = torch.randn(2, 9, 16, device=DEVICE), torch.rand(2, 9, 2, device=DEVICE)
    expert = torch.rand(2, 9, 3, device=DEVICE).argsort(-1)
    gate = Gate(expert[..., :2], weight)  # no contiguous rows
    found = []
    for used in (gates, None):
        monkeypatch.setattr(module, "_fused", lambda _, used=used: used)
        found.append(with_gradients(experts(x, gate), list(experts.parameters())))
    assert_near(found[0], found[1], 1e-5)
