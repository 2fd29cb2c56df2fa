"""The convolutions of `emoe.kernels.convs` against PyTorch's; on a GPU, or on a CPU by Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from interpreter import DEVICE, unchecked
from torch import Tensor
from torch.nn import functional as nnf

HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16  # the interpreter multiplies no bfloat16
convs: Any = unchecked("emoe.kernels.convs")

# Batch, channels in and out, height, width: positions that do not fill a tile, maps within one tile, maps over several
SHAPES = [(2, 72, 72, 4, 8), (3, 8, 24, 5, 3), (1, 24, 8, 13, 11), (2, 16, 144, 1, 6), (1, 40, 64, 3, 1)]


@pytest.fixture(autouse=True)
def whole_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def normal(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE).contiguous(memory_format=torch.channels_last)


def example(batch: int, inputs: int, outputs: int, height: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    x, weight = normal(batch, inputs, height, width, seed=0), normal(outputs, inputs, 3, 3, seed=1)
    return x, weight, normal(batch, outputs, height, width, seed=2)


def far(mine: Tensor, wanted: Tensor) -> float:
    assert mine.shape == wanted.shape and mine.is_contiguous(memory_format=torch.channels_last)
    return float((mine.float() - wanted).abs().max() / wanted.abs().max())


def by_weights(x: Tensor, dy: Tensor, dtype: torch.dtype, stride: int = 1) -> Tensor:
    return convs.weight_gradient(x, dy, dtype, stride)[0]


def options(name: str) -> dict[str, Any]:
    """Numbers of a kernel, with blocks that the interpreter gets through."""
    return getattr(convs, name) | {"BLOCK_P": 16}


@pytest.mark.parametrize("name", ["LARGE", "WIDE", "MEDIUM", "SMALL"])
@pytest.mark.parametrize("shape", SHAPES)
def test_results(shape: tuple[int, int, int, int, int], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convs, "_options", lambda positions, inputs, outputs: options(name))
    x, weight, dy = example(*shape)
    assert far(convs.forward(x, weight), nnf.conv2d(x, weight, padding=1)) < 2e-5
    wanted = torch.nn.grad.conv2d_input(list(x.shape), weight, dy, padding=1)
    assert far(convs.forward(dy, weight, turned=True), wanted) < 2e-5


@pytest.mark.parametrize("outputs", [72, 16])
def test_bias_and_skip(outputs: int) -> None:
    x, weight, skip = example(2, 16, outputs, 5, 6)
    bias = torch.randn(outputs, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    wanted = nnf.conv2d(x, weight, padding=1)
    assert far(convs.forward(x, weight, bias), wanted + bias[:, None, None]) < 2e-5
    assert far(convs.forward(x, weight, skip=skip), wanted + skip) < 2e-5
    assert far(convs.forward(x, weight, bias, skip), wanted + bias[:, None, None] + skip) < 2e-5


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_of_weights(shape: tuple[int, int, int, int, int]) -> None:
    x, weight, dy = example(*shape)
    wanted = torch.nn.grad.conv2d_weight(x, list(weight.shape), dy, padding=1)
    mine = by_weights(x, dy, torch.float32)
    assert far(mine, wanted) < 2e-5
    assert torch.equal(mine, by_weights(x, dy, torch.float32))


@pytest.mark.parametrize(("inputs", "outputs", "height", "width"), [(72, 72, 4, 8), (8, 24, 6, 10)])
def test_every_second_position(inputs: int, outputs: int, height: int, width: int) -> None:
    x, weight, _ = example(3, inputs, outputs, height, width)
    dy = normal(3, outputs, height // 2, width // 2, seed=2)
    bias = torch.randn(outputs, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    wanted = nnf.conv2d(x, weight, bias, stride=2, padding=1)
    assert far(convs.forward(x, weight, bias, stride=2), wanted) < 2e-5
    assert far(convs.forward(x, weight, bias, dy, stride=2), wanted + dy) < 2e-5
    by_weight = torch.nn.grad.conv2d_weight(x, list(weight.shape), dy, stride=2, padding=1)
    assert far(by_weights(x, dy, torch.float32, 2), by_weight) < 2e-5
    by_input = torch.nn.grad.conv2d_input(list(x.shape), weight, dy, stride=2, padding=1)
    assert far(convs.input_gradient(dy, weight), by_input) < 2e-5


@pytest.mark.parametrize("shape", [(2, 144, 72, 4, 8), (3, 8, 24, 5, 3), (2, 72, 2, 6, 4)])
def test_one_tap(shape: tuple[int, int, int, int, int]) -> None:
    x, weight, dy = example(*shape)
    weight = weight[:, :, :1, :1].contiguous(memory_format=torch.channels_last)
    bias = torch.randn(shape[2], generator=torch.Generator().manual_seed(3)).to(DEVICE)
    assert far(convs.forward(x, weight, bias, dy), nnf.conv2d(x, weight, bias) + dy) < 2e-5
    by_input = torch.nn.grad.conv2d_input(list(x.shape), weight, dy)
    assert far(convs.forward(dy, weight, turned=True), by_input) < 2e-5
    mine, no_bias = convs.weight_gradient(x, dy, torch.float32, side=1)
    assert no_bias is None and far(mine, torch.nn.grad.conv2d_weight(x, list(weight.shape), dy)) < 2e-5


def test_channels_as_powers_of_two() -> None:
    found = {outputs: convs._columns(outputs) for outputs in range(8, 400, 8)}
    assert found[72] == (1, {"BLOCK_N": 64, "MORE": 16})
    assert found[144] == (1, {"BLOCK_N": 128, "MORE": 16})
    assert found[64] == (1, {"BLOCK_N": 64, "MORE": 0})
    for outputs, (programs, blocks) in found.items():
        each = blocks["BLOCK_N"] + blocks["MORE"]
        assert (programs - 1) * each < outputs <= programs * each
        assert blocks["MORE"] <= blocks["BLOCK_N"] <= 256


def test_blocks_by_the_size_of_a_map() -> None:
    chosen = [convs._options(64 * side * side, i, o) for side, i, o in ((32, 72, 72), (32, 144, 72), (32, 72, 144))]
    assert chosen == [convs.LARGE, convs.WIDE, convs.WIDE]
    assert [convs._options(64 * side * side, 72, 72) for side in (16, 8)] == [convs.MEDIUM, convs.SMALL]


def test_positions_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convs, "PROGRAMS", 9)
    x, weight, dy = example(3, 24, 16, 5, 7)  # 105 positions
    assert convs._parts(105, 16, 1) == (7, 16)  # the last has 9
    wanted = torch.nn.grad.conv2d_weight(x, list(weight.shape), dy, padding=1)
    for programs, parts in ((3, (3, 48)), (1, (1, 112))):
        monkeypatch.setattr(convs, "PROGRAMS", programs)
        assert convs._parts(105, 16, 1) == parts
        for name in ("WEIGHT", "WEIGHT_WIDE"):  # few programs: these positions are many, or few
            monkeypatch.setattr(convs, name, getattr(convs, name) | {"BLOCK_P": 16})
        assert far(by_weights(x, dy, torch.float32), wanted) < 2e-5


def test_half_precision() -> None:
    x, weight, dy = (t.to(HALF) for t in example(2, 72, 72, 6, 6))
    wanted = nnf.conv2d(x.float(), weight.float(), padding=1)
    by_weight = torch.nn.grad.conv2d_weight(x.float(), list(weight.shape), dy.float(), padding=1)
    # One bit: the interpreter cuts, where a GPU rounds
    assert far(convs.forward(x, weight), wanted) < 2**-7
    assert far(by_weights(x, dy, HALF), by_weight) < 2**-7
    assert far(by_weights(x, dy, torch.float32), by_weight) < 2e-5


def test_what_fits() -> None:
    x, weight, _ = (t.to(HALF) for t in example(1, 16, 8, 2, 2))
    assert convs.fits(x, weight)
    assert not convs.fits(x.float(), weight.float())
    assert not convs.fits(x[:, :12], weight[:, :12])
    assert not convs.fits(x, weight[:4])
    assert convs.fits(x, weight[:4, :, :1, :1]) and not convs.fits(x, weight[:, :, :2, :2])
    assert convs.fits(x, weight, 2) and not convs.fits(x[:, :, :1], weight, 2)
