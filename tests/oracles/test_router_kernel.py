"""The kernels of `emoe.kernels.router` against the plain router; on a GPU, or on a CPU by Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from interpreter import DEVICE, unchecked
from torch import Tensor

from emoe.backbones import layers
from emoe.backbones.unet import as_rows

kernel: Any = unchecked("emoe.kernels.router")


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(kernel, "PROGRAMS", 2)
    kernel._blocks.cache_clear()
    yield
    kernel._blocks.cache_clear()


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def router(width: int, experts: int, **options: Any) -> layers.Router:
    """A router whose parameters are all far from where they start."""
    made = layers.Router(width, experts, **options).to(DEVICE)
    for i, parameter in enumerate(made.parameters()):
        parameter.data.add_(0.5 * normal(*parameter.shape, seed=100 + i))
    return made


def found(
    module: layers.Router, x: Tensor, slope: Tensor, kernels: Any, monkeypatch: pytest.MonkeyPatch
) -> list[Tensor]:
    """Logits, and gradients of x and all parameters."""
    monkeypatch.setattr(layers, "_fused", lambda x: kernels)
    x = x.detach().requires_grad_()
    logits = module(x)
    return [logits, *torch.autograd.grad((logits * slope).sum(), [x, *module.parameters()])]


def assert_near(mine: list[Tensor], wanted: list[Tensor], tolerance: float = 2e-5) -> None:
    """Agreement in proportion to the largest entry."""
    for a, b in zip(mine, wanted, strict=True):
        assert a.shape == b.shape and (a - b).abs().max() <= tolerance * b.abs().max()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("logit_norm", [False, True])
@pytest.mark.parametrize(("width", "experts"), [(72, 4), (24, 3), (10, 8)])
def test_logits_and_gradients(
    width: int, experts: int, logit_norm: bool, cap: float | None, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = router(width, experts, logit_norm=logit_norm, cap=cap, bias=bias)
    x, slope = normal(2, 35, width, seed=0), normal(2, 35, experts, seed=1)  # 70 rows: the last block is not full
    mine, wanted = (found(module, x, slope, kernels, monkeypatch) for kernels in (kernel, None))
    assert mine[0].dtype == torch.float32
    assert_near(mine, wanted)


@pytest.mark.parametrize(("width", "experts"), [(72, 4), (24, 8)])
def test_half_precision(width: int, experts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    module = router(width, experts, logit_norm=True, cap=5.0)
    x, slope = normal(2, 35, width, seed=0).bfloat16(), normal(2, 35, experts, seed=1)
    mine, wanted = found(module, x, slope, kernel, monkeypatch), found(module, x.float(), slope, None, monkeypatch)
    logits, dx, *others = mine
    assert (logits.dtype, dx.dtype) == (torch.float32, torch.bfloat16)
    assert_near([logits, *others], [wanted[0], *wanted[2:]])
    assert_near([dx], [wanted[1]], 2**-7)  # one bit: the interpreter cuts, where a GPU rounds


def test_programs_of_several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "PROGRAMS", 1)
    module = router(72, 4, logit_norm=True, cap=5.0)
    x, slope = normal(2, 150, 72, seed=0), normal(2, 150, 4, seed=1)
    programs, blocks = kernel._blocks(300, 72, 4)
    assert (programs, blocks["ROWS"] // blocks["BLOCK"]) == (2, 2)
    mine, wanted = (found(module, x, slope, kernels, monkeypatch) for kernels in (kernel, None))
    assert_near(mine, wanted)


def test_equal_inputs_give_equal_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    module = router(72, 4, logit_norm=True, cap=5.0)
    x, slope = normal(2, 80, 72, seed=0), normal(2, 80, 4, seed=1)
    first, second = (found(module, x, slope, kernel, monkeypatch) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_maps_and_rows_that_do_not_lie_together(monkeypatch: pytest.MonkeyPatch) -> None:
    module = router(24, 4, logit_norm=True, cap=5.0)
    h, slope = normal(2, 24, 4, 4, seed=0), normal(2, 16, 4, seed=1)
    for x in (as_rows(h.contiguous(memory_format=torch.channels_last)), as_rows(h)):
        mine, wanted = (found(module, x, slope, kernels, monkeypatch) for kernels in (kernel, None))
        assert_near(mine, wanted)


def test_small_logits_under_a_large_cap_keep_their_digits() -> None:
    x, weight = normal(1, 200, 8, seed=0), normal(4, 8, seed=1)
    for size in (1e-3, 1.0, 100.0, 1000.0):
        mine = kernel.logits(size * x, weight, cap=500.0)
        wanted = 500 * torch.tanh((size * x).double() @ weight.double().mT / 500)
        assert (mine - wanted).abs().max() <= 2e-6 * wanted.abs().max()


def test_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = router(72, 4, logit_norm=True, cap=5.0), normal(2, 20, 72, seed=0)
    monkeypatch.setattr(layers, "_fused", lambda x: kernel)
    with_gradients = module(x)
    with torch.no_grad():
        assert torch.equal(module(x), with_gradients)


def test_what_the_kernels_are_not_for(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = normal(4, 72, seed=0)
    assert kernel.fits(normal(2, 3, 72, seed=1), weight)
    assert not kernel.fits(normal(2, 3, 72, seed=1).double(), weight.double())
    assert not kernel.fits(normal(2, 0, 72, seed=1), weight)
    assert not kernel.fits(normal(2, 3, 512, seed=1), normal(4, 512, seed=2))
    assert not kernel.fits(normal(2, 3, 8, seed=1), normal(32, 8, seed=2))
    assert not kernel.fits(normal(2, 3, 256, seed=1), normal(16, 256, seed=2))
    module, x = router(8, 4, norm=True, cap=1.5), normal(2, 3, 8, seed=1)
    monkeypatch.setattr(kernel, "logits", None)  # a norm before the linear layer: plain
    mine, wanted = (found(module, x, normal(2, 3, 4, seed=2), kernels, monkeypatch) for kernels in (kernel, None))
    assert all(torch.equal(a, b) for a, b in zip(mine, wanted, strict=True))
