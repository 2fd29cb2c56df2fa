"""CUDA C++ kernels of this folder: compiled on first use by NVIDIA's runtime compiler, launched on the current stream.

Compiler and driver are reached through `cuda.bindings`, which PyTorch's builds for CUDA bring along with the compiler
itself: no toolkit is needed. Numbers that a kernel is compiled for are given as macros.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FOLDER = Path(__file__).parent
HOPPER = (9, 0)  # the compute capability that has products by warpgroups; later ones have others


@functools.cache
def available(device: int) -> bool:
    """Whether the kernels can be compiled for a GPU; Triton's are there for the rest."""
    try:
        from cuda.bindings import driver, nvrtc  # noqa: F401

        nvrtc.nvrtcVersion()  # looks for the library
    except (ImportError, OSError, RuntimeError):
        return False
    return torch.cuda.get_device_capability(device) == HOPPER


def _checked(result: tuple[Any, ...]) -> Any:
    """What a call of the driver or the compiler gave; without its status, which must be success."""
    status, *values = result
    if status != 0:
        raise RuntimeError(f"CUDA: {status}")
    return values[0] if values else None


class Kernel:
    """A compiled function of pointers and integers."""

    def __init__(self, name: str, cubin: bytes, shared: int):
        from cuda.bindings import driver

        self._driver, self._shared = driver, shared
        torch.cuda.current_stream().synchronize()  # makes the device's context this thread's
        self._context = _checked(driver.cuCtxGetCurrent())
        self._function = _checked(driver.cuModuleGetFunction(_checked(driver.cuModuleLoadData(cubin)), name.encode()))
        limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _checked(driver.cuFuncSetAttribute(self._function, limit, shared))

    def __call__(self, grid: tuple[int, int, int], threads: int, *args: Tensor | int) -> None:
        """Launch it on the current stream."""
        _checked(self._driver.cuCtxSetCurrent(self._context))  # PyTorch runs backward passes in threads of its own
        values = tuple(arg.data_ptr() if isinstance(arg, Tensor) else arg for arg in args)
        stream = torch.cuda.current_stream().cuda_stream
        launch = self._driver.cuLaunchKernel
        types = tuple(ctypes.c_void_p if isinstance(arg, Tensor) else ctypes.c_int for arg in args)
        _checked(launch(self._function, *grid, threads, 1, 1, self._shared, stream, (values, types), 0))


def _compiled(file: str, macros: tuple[tuple[str, int], ...]) -> bytes:
    """Machine code of a file."""
    from cuda.bindings import nvrtc

    options = ["--gpu-architecture=sm_90a", "--std=c++17", f"-I{FOLDER}"]
    options += [f"-D{name}={int(value)}" for name, value in macros]
    program = _checked(nvrtc.nvrtcCreateProgram((FOLDER / file).read_bytes(), file.encode(), 0, [], []))
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    if status != 0:
        log = b" " * _checked(nvrtc.nvrtcGetProgramLogSize(program))
        _checked(nvrtc.nvrtcGetProgramLog(program, log))
        raise RuntimeError(f"{file} does not compile with {dict(macros)}:\n{log.decode()}")
    code = b" " * _checked(nvrtc.nvrtcGetCUBINSize(program))
    _checked(nvrtc.nvrtcGetCUBIN(program, code))
    return code


@functools.cache
def kernel(file: str, device: int, shared: int, macros: tuple[tuple[str, int], ...]) -> Kernel:
    """The function of a file, which has the file's name, with `shared` bytes of shared memory for each block."""
    return Kernel(Path(file).stem, _compiled(file, macros), shared)
