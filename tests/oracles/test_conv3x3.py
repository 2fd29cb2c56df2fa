"""The CUDA convolutions `conv3x3.cu` and `conv3x3_weights.cu` against PyTorch's.

Where there is a C++ compiler they run on a CPU, by `cuda_emulator.h`; on a Hopper GPU they run as they are.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from emulated import SLACK, emulated, far, on_gpu
from torch import Tensor
from torch.nn import functional as nnf

from emoe.kernels import conv3x3, cuda


def normal(*shape: int, seed: int, dtype: torch.dtype, device: str) -> Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)
    return made.contiguous(memory_format=torch.channels_last)


def check_results(batch: int, outputs: int, side: int, dtype: torch.dtype, device: str, *, turned: bool, extra: bool):
    make = functools.partial(normal, dtype=dtype, device=device)
    x, weight = make(batch, 72, side, side, seed=0), make(*((72, outputs) if turned else (outputs, 72)), 3, 3, seed=1)
    skip = make(batch, outputs, side, side, seed=2) if extra else None
    bias = torch.randn(outputs, generator=torch.Generator().manual_seed(3)).to(device) if extra else None
    y = torch.full_like(make(batch, outputs, side, side, seed=0), float("nan"))
    conv3x3.forward(x, weight, bias, skip, y, turned=turned)
    wanted = (nnf.conv_transpose2d if turned else nnf.conv2d)(x.double(), weight.double(), padding=1)
    if bias is not None and skip is not None:
        wanted = wanted + bias.double()[:, None, None] + skip.double()
    assert far(y, wanted) < SLACK[dtype]


def check_gradients(batch: int, outputs: int, side: int, dtype: torch.dtype, device: str) -> Tensor:
    make = functools.partial(normal, batch, dtype=dtype, device=device)
    x, dy = make(72, side, side, seed=0), make(outputs, side, side, seed=1)
    partial = conv3x3.partial_weight_gradients(x, dy)
    found = partial.double().sum(0)
    wanted = torch.nn.grad.conv2d_weight(x.double(), (outputs, 72, 3, 3), dy.double(), padding=1)
    assert far(found[:-1], wanted.permute(2, 3, 1, 0).reshape(9 * 72, outputs)) < 1e-5
    assert far(found[-1], dy.double().sum((0, 2, 3))) < 1e-5
    return partial


@emulated
@pytest.mark.parametrize(
    ("batch", "outputs", "side", "dtype", "turned", "extra"),
    [
        (1, 72, 32, torch.bfloat16, False, True),
        (1, 72, 32, torch.bfloat16, True, False),
        (3, 144, 16, torch.float16, True, False),
        (3, 144, 16, torch.float16, False, True),
        (3, 72, 16, torch.bfloat16, True, True),
    ],
)
def test_results_on_a_cpu(
    batch: int, outputs: int, side: int, dtype: torch.dtype, turned: bool, extra: bool,
    kernels_on_cpu: None, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(conv3x3, "BLOCKS", 2)  # a block goes through several bands
    check_results(batch, outputs, side, dtype, "cpu", turned=turned, extra=extra)


@emulated
@pytest.mark.parametrize(
    ("batch", "outputs", "side", "dtype", "blocks"),
    [(2, 72, 32, torch.bfloat16, 6), (3, 144, 16, torch.float16, 6), (2, 72, 16, torch.bfloat16, 132)],
)
def test_gradients_on_a_cpu(
    batch: int,
    outputs: int,
    side: int,
    dtype: torch.dtype,
    blocks: int,
    kernels_on_cpu: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(conv3x3, "BLOCKS", blocks)
    check_gradients(batch, outputs, side, dtype, "cpu")


def test_which_maps_have_bands() -> None:
    assert [conv3x3._lines(side, side, conv3x3.FORWARD) for side in (64, 32, 16, 8, 28)] == [4, 8, 16, 0, 0]
    assert [conv3x3._lines(side, side, conv3x3.BACKWARD) for side in (32, 16, 8)] == [4, 8, 0]
    assert conv3x3._forward_memory(8, 32) <= conv3x3.BLOCK and conv3x3._weights_memory(4, 32) <= conv3x3.BLOCK
    assert not conv3x3.fits(torch.empty(64, 72, 32, 32, dtype=torch.bfloat16), 72)  # on a CPU


class TestOnGPU:
    pytestmark = on_gpu

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("turned", [False, True])
    @pytest.mark.parametrize(("batch", "outputs", "side"), [(64, 72, 32), (5, 144, 32), (128, 72, 16), (3, 72, 64)])
    def test_results(self, batch: int, outputs: int, side: int, turned: bool, dtype: torch.dtype) -> None:
        check_results(batch, outputs, side, dtype, "cuda", turned=turned, extra=not turned)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize(("batch", "outputs", "side"), [(64, 72, 32), (7, 144, 32), (64, 72, 16)])
    def test_gradients(self, batch: int, outputs: int, side: int, dtype: torch.dtype) -> None:
        first = check_gradients(batch, outputs, side, dtype, "cuda")
        assert torch.equal(first, check_gradients(batch, outputs, side, dtype, "cuda"))

    def test_a_layer_by_either_kernel(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from emoe.kernels import maps

        found: list[Any] = []
        for own in (True, False):
            if not own:
                monkeypatch.setattr(cuda, "available", lambda device: False)
            x = normal(64, 72, 32, 32, seed=0, dtype=torch.bfloat16, device="cuda").requires_grad_()
            weight = normal(72, 72, 3, 3, seed=1, dtype=torch.bfloat16, device="cuda").requires_grad_()
            bias = torch.randn(72, generator=torch.Generator().manual_seed(3)).cuda().requires_grad_()
            assert conv3x3.fits(x, 72) is own
            y = maps.convolution(x, weight, bias, x)
            found.append([y.detach(), *torch.autograd.grad((y * y.detach().roll(1, 0)).sum(), [x, weight, bias])])
        for mine, other in zip(*found, strict=True):
            assert mine.dtype == other.dtype and far(mine, other.double()) < 2**-6
