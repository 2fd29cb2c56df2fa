"""The CUDA kernels `norm_silu.cu` and `norm_silu_backward.cu` against PyTorch's norm and SiLU in double precision.

Where there is a C++ compiler they run on a CPU, by `cuda_emulator.h`; on a Hopper GPU they run as they are.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from emulated import SLACK, emulated, far, on_gpu
from torch import Tensor
from torch.nn import functional as nnf

from emoe.kernels import cuda, norms


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def inputs(batch: int, channels: int, dtype: torch.dtype, device: str, *, mean: float) -> dict[str, Tensor]:
    maps = {
        name: normal(batch, channels, 32, 32, seed=seed).to(device, dtype).contiguous(memory_format=torch.channels_last)
        for seed, name in enumerate(("x", "dy", "dskip"))
    }
    maps["x"] = (maps["x"] + mean).contiguous(memory_format=torch.channels_last)
    singles = {name: normal(channels, seed=10 + i).to(device) for i, name in enumerate(("gamma", "beta", "bias"))}
    # part of a wider product, as the network has it
    films = normal(batch, 4 * channels, seed=20).to(device, dtype)
    return maps | singles | {"film": films[:, channels : 3 * channels]}


def wanted_of(given: dict[str, Tensor], groups: int, *, bias: bool, film: bool, skip: bool) -> tuple[Tensor, ...]:
    """The result, and the gradients of x, gamma, beta, bias and film."""
    leaves = {name: given[name].double().requires_grad_() for name in ("x", "gamma", "beta", "bias", "film")}
    x = leaves["x"] + leaves["bias"][:, None, None] if bias else leaves["x"]
    v = nnf.group_norm(x, groups, leaves["gamma"], leaves["beta"])
    if film:
        scale, shift = leaves["film"][..., None, None].chunk(2, 1)
        v = (1 + scale) * v + shift
    y = nnf.silu(v)
    loss = (y * given["dy"].double()).sum()
    if skip:
        loss = loss + (leaves["x"] * given["dskip"].double()).sum()
    names = ["x", "gamma", "beta", *(["bias"] if bias else []), *(["film"] if film else [])]
    return y.detach(), *torch.autograd.grad(loss, [leaves[name] for name in names])


def found_of(given: dict[str, Tensor], groups: int, *, bias: bool, film: bool, skip: bool) -> tuple[Tensor, ...]:
    x, gamma, beta = given["x"], given["gamma"], given["beta"]
    batch, channels = x.shape[:2]
    y, dx = (torch.full_like(x, float("nan")) for _ in range(2))
    stats, partial = torch.empty(batch, 3, channels), torch.empty(2 + bias, batch, channels)
    stats, partial = (made.fill_(float("nan")).to(x.device) for made in (stats, partial))
    films = given["film"] if film else None
    dfilm = torch.full((batch, 2 * channels), float("nan"), dtype=x.dtype, device=x.device) if film else None
    norms.forward(x, given["bias"] if bias else None, gamma, beta, films, groups, y, stats)
    skips = given["dskip"] if skip else None
    norms.backward(x, gamma, beta, films, groups, stats, given["dy"], skips, dx, dfilm, partial)
    return y, dx, *partial.sum(1), *([] if dfilm is None else [dfilm])


def check(
    batch: int, channels: int, dtype: torch.dtype, device: str, *, bias: bool, film: bool, skip: bool, mean: float = 0
) -> None:
    given = inputs(batch, channels, dtype, device, mean=mean)
    options: dict[str, bool] = {"bias": bias, "film": film, "skip": skip}
    found, wanted = found_of(given, 8, **options), wanted_of(given, 8, **options)
    for i, (mine, right) in enumerate(zip(found, wanted, strict=True)):
        if bias and i == 4:  # the norm takes most of the bias away: its gradient is small beside its terms
            assert (mine.double() - right).abs().max() < 1e-5 * wanted[3].abs().max()
        else:
            assert far(mine, right) < (SLACK[dtype] if mine.dtype == dtype else 1e-5)


@emulated
@pytest.mark.parametrize(
    ("channels", "dtype", "bias", "film", "skip"),
    [
        (72, torch.bfloat16, False, False, True),
        (72, torch.bfloat16, True, True, False),
        (144, torch.float16, False, False, True),
        (144, torch.float16, True, True, True),
    ],
)
def test_norm_on_a_cpu(
    channels: int, dtype: torch.dtype, bias: bool, film: bool, skip: bool, kernels_on_cpu: None
) -> None:
    check(2, channels, dtype, "cpu", bias=bias, film=film, skip=skip)


@emulated
def test_a_large_mean_does_not_drown_the_variance(kernels_on_cpu: None) -> None:
    check(1, 72, torch.float16, "cpu", bias=True, film=True, skip=False, mean=100)


def test_which_maps_they_are_for() -> None:
    shapes = [(64, 72, 32, 32), (64, 144, 32, 32), (64, 72, 16, 16), (64, 64, 32, 32), (64, 72, 64, 16)]
    assert [norms._fit(torch.Size(shape), 8) for shape in shapes] == [True, True, False, False, True]
    assert not norms._fit(torch.Size(shapes[0]), 1)  # a block would have half of the only group
    assert 2 * norms.MAP + norms.SUMS + norms.COEFFICIENTS <= 227 * 1024
    assert not norms.fits(torch.empty(64, 72, 32, 32, dtype=torch.bfloat16), None, 8)  # on a CPU


class TestOnGPU:
    pytestmark = on_gpu

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize(("batch", "channels"), [(64, 72), (5, 144), (200, 72)])
    @pytest.mark.parametrize(("bias", "film", "skip"), [(False, False, True), (True, True, False), (True, False, True)])
    def test_norm(self, batch: int, channels: int, dtype: torch.dtype, bias: bool, film: bool, skip: bool) -> None:
        check(batch, channels, dtype, "cuda", bias=bias, film=film, skip=skip)

    def test_equal_inputs_give_equal_bits(self) -> None:
        given = inputs(64, 72, torch.bfloat16, "cuda", mean=0.5)
        first, second = (found_of(given, 8, bias=True, film=True, skip=True) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))

    def test_a_layer_by_either_kernel(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from emoe.kernels import maps

        given, found = inputs(64, 72, torch.bfloat16, "cuda", mean=0.5), list[Any]()
        for own in (True, False):
            if not own:
                monkeypatch.setattr(cuda, "available", lambda device: False)
            leaves = {name: given[name].detach().requires_grad_() for name in ("x", "gamma", "beta", "bias", "film")}
            assert norms.fits(leaves["x"], leaves["film"], 8) is own
            y, same = maps.norm_silu(leaves["x"], leaves["gamma"], leaves["beta"], 8, bias=leaves["bias"],
                                     film=leaves["film"])  # fmt: skip
            loss = (y * given["dy"]).float().sum() + (same * given["dskip"]).float().sum()
            found.append([y.detach(), *torch.autograd.grad(loss, list(leaves.values()))])
        for name, mine, other in zip(("y", *leaves), *found, strict=True):
            assert mine.dtype == other.dtype
            assert far(mine, other.double()) < (1e-2 if name == "bias" else 2**-6)
