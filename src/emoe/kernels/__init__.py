"""Fast forms of plain functions for a GPU: `torch.compile` and one Triton kernel, chosen once in a process.

The kernel has a plain form next to its only caller, and a test that compares the two. `EMOE_FUSED=0` selects plain
PyTorch everywhere.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
SHAPES = 64  # forms of one function that may be compiled in a process


@functools.cache
def enabled() -> bool:
    """Return whether Triton is installed and EMOE_FUSED is not 0."""
    return importlib.util.find_spec("triton") is not None and os.environ.get("EMOE_FUSED") != "0"


def describe(device: torch.device) -> str:
    """Describe the choice of this process, for a log."""
    if device.type != "cuda":
        return "plain PyTorch"
    return "torch.compile and Triton (norm)" if enabled() else "plain PyTorch (Triton is off or missing)"


def load(name: str) -> ModuleType | None:
    """Return the module `emoe.kernels.NAME` if there is a GPU and kernels are enabled; else None.

    Call it at import time: a compiled function cannot import.
    """
    return importlib.import_module(f"emoe.kernels.{name}") if torch.cuda.is_available() and enabled() else None


def compiled(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Compile a function of tensors for training on a GPU; on a CPU, or without gradients, the plain function runs.

    It is for functions of many small operations, where the number of kernels limits a training step. Evaluation and
    sampling call the plain form with varying shapes and compile nothing.
    """
    return _compiled(function, torch.is_grad_enabled, dynamic=False)


def compiled_always(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Compile a function of large tensors for a GPU, with and without gradients and once for all shapes."""
    return _compiled(function, lambda: True, dynamic=None)


def _compiled(
    function: Callable[Arguments, Result], wanted: Callable[[], bool], *, dynamic: bool | None
) -> Callable[Arguments, Result]:
    made: list[Callable[Arguments, Result]] = []  # the compiled function, from the first call on

    @functools.wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        on_gpu = any(isinstance(value, Tensor) and value.is_cuda for value in args)
        if torch.compiler.is_compiling() or not (on_gpu and wanted() and enabled()):
            return function(*args, **kwargs)  # also as a part of another compiled function
        import torch._dynamo.config as config

        config.recompile_limit = max(config.recompile_limit, SHAPES)  # each thread has a limit of its own
        if not made:
            import torch._inductor.config as inductor

            # Over a handful of numbers the online softmax does not pay, as the compiler warns itself.
            options: dict[str, Any] = {"online_softmax": False} if hasattr(inductor, "online_softmax") else {}
            made.append(torch.compile(function, dynamic=dynamic, fullgraph=True, options=options))
        return made[0](*args, **kwargs)

    return call
