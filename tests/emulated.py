"""CUDA kernels in tests: on a Hopper GPU as they are, on a CPU by `cuda_emulator.h` where there is a C++ compiler."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

import emoe.kernels
from emoe.kernels import cuda

HERE, KERNELS = Path(__file__).parent / "oracles", Path(emoe.kernels.__file__).parent
COMPILER = shutil.which("g++")
GPU = torch.cuda.is_available() and cuda.available(0)
emulated = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler here (g++) to emulate a GPU with")
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not GPU, reason="no Hopper GPU here")]
SLACK = {torch.bfloat16: 2**-7, torch.float16: 2**-10}  # of the largest number: one rounding of the result


class Emulated:
    """A kernel on a CPU, in place of `cuda.Kernel`."""

    def __init__(self, file: str, shared: int, macros: tuple[tuple[str, int], ...], folder: Path):
        name = Path(file).stem
        declared = re.search(rf"\n{name}\((.*?)\) {{", (KERNELS / file).read_text("utf-8"), re.DOTALL)
        assert declared is not None
        types = ["void*" if "*" in argument else "int" for argument in declared[1].split(",")]
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


def far(mine: Tensor, wanted: Tensor) -> float:
    """The largest difference, in proportion to the largest number that is wanted."""
    assert mine.shape == wanted.shape
    return float((mine.double() - wanted).abs().max() / wanted.abs().max())
