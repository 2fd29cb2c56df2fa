"""The CUDA convolutions `conv3x3.cu` and `conv3x3_weights.cu` against PyTorch's.

Where there is a C++ compiler they run on a CPU, by `cuda_emulator.h`; on a Hopper GPU they run as they are.
"""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as nnf

import emoe.kernels
from emoe.kernels import conv3x3, cuda

HERE, KERNELS = Path(__file__).parent, Path(emoe.kernels.__file__).parent
COMPILER = shutil.which("g++")
GPU = torch.cuda.is_available() and cuda.available(0)
emulated = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler here (g++) to emulate a GPU with")
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not GPU, reason="no Hopper GPU here")]
POINTERS = {"conv3x3": 5, "conv3x3_weights": 3}
SLACK = {torch.bfloat16: 2**-7, torch.float16: 2**-10}  # of the largest number: one rounding of the result


class Emulated:
    """A kernel on a CPU, in place of `cuda.Kernel`."""

    def __init__(self, file: str, shared: int, macros: tuple[tuple[str, int], ...], folder: Path):
        name = Path(file).stem
        types = ["void*"] * POINTERS[name] + ["int"] * (1 if name == "conv3x3" else 2)
        given = ", ".join(f"{kind} a{i}" for i, kind in enumerate(types))
        # A pointer of any kind: what each stands for is the kernel's own affair.
        source = f"""
            #include "cuda_emulator.h"
            #include "{file}"
            struct Any {{ void* p; template <class T> operator T*() const {{ return (T*)p; }} }};
            extern "C" void run(int x, int y, int z, int shared, {given}) {{
                emulator::launch(x, y, z, THREADS, shared, [=] {{
                    {name}({", ".join(f"Any{{a{i}}}" if "*" in kind else f"a{i}" for i, kind in enumerate(types))});
                }});
            }}"""
        made = folder / f"{name}-{len(list(folder.iterdir()))}.so"
        defined = [f"-D{macro}={int(value)}" for macro, value in macros]
        assert COMPILER is not None
        command = [COMPILER, "-O1", "-std=c++17", "-shared", "-fPIC", f"-I{HERE}", f"-I{KERNELS}", *defined]
        subprocess.run([*command, "-x", "c++", "-", "-o", str(made)], input=source, text=True, check=True)
        self._run, self._shared = ctypes.CDLL(str(made)).run, shared

    def __call__(self, grid: tuple[int, int, int], threads: int, *args: Tensor | int) -> None:
        values = [ctypes.c_void_p(a.data_ptr()) if isinstance(a, Tensor) else a for a in args]
        self._run(*grid, self._shared, *values)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Kernels are emulated."""

    def kernel(file: str, device: int, shared: int, macros: tuple[tuple[str, int], ...]) -> Emulated:
        return Emulated(file, shared, macros, tmp_path)

    monkeypatch.setattr(cuda, "kernel", kernel)


def normal(*shape: int, seed: int, dtype: torch.dtype, device: str) -> Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)
    return made.contiguous(memory_format=torch.channels_last)


def far(mine: Tensor, wanted: Tensor) -> float:
    assert mine.shape == wanted.shape
    return float((mine.double() - wanted).abs().max() / wanted.abs().max())


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
    on_cpu: None, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(conv3x3, "BLOCKS", 2)  # a block goes through several bands
    check_results(batch, outputs, side, dtype, "cpu", turned=turned, extra=extra)


@emulated
@pytest.mark.parametrize(
    ("batch", "outputs", "side", "dtype", "blocks"),
    [(2, 72, 32, torch.bfloat16, 6), (3, 144, 16, torch.float16, 6), (2, 72, 16, torch.bfloat16, 132)],
)
def test_gradients_on_a_cpu(
    batch: int, outputs: int, side: int, dtype: torch.dtype, blocks: int, on_cpu: None, monkeypatch: pytest.MonkeyPatch
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
