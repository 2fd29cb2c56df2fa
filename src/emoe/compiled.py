"""Small functions of tensors that a GPU runs as few kernels: `torch.compile` where it pays, as written elsewhere."""

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
def kernels_wanted() -> bool:
    """Whether there is Triton to make kernels with, and EMOE_FUSED=0 does not ask for plain PyTorch."""
    return importlib.util.find_spec("triton") is not None and os.environ.get("EMOE_FUSED") != "0"


@functools.cache
def kernels(name: str) -> ModuleType | None:
    """A module of `emoe.kernels`, where kernels are wanted."""
    return importlib.import_module(f"emoe.kernels.{name}") if kernels_wanted() else None


@functools.cache
def _options() -> dict[str, Any]:
    """Softmax as it is written: over a handful of numbers the compiler's own form does not pay, as it warns itself."""
    import torch._inductor.config as config

    return {"online_softmax": False} if hasattr(config, "online_softmax") else {}


def compiled(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Compile a function of tensors for training on a GPU; with a CPU, or without gradients, it runs as written.

    For functions that are many tiny operations: a training step is then bound by the number of its kernels. What is
    measured and sampled comes from the plain form, in whatever shape, and pays no compilation.
    """
    made: list[Callable[Arguments, Result]] = []

    @functools.wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        on_gpu = any(isinstance(value, Tensor) and value.is_cuda for value in args)
        if not (on_gpu and torch.is_grad_enabled() and kernels_wanted()):
            return function(*args, **kwargs)
        import torch._dynamo.config as config

        config.recompile_limit = max(config.recompile_limit, SHAPES)  # each thread has a limit of its own
        if not made:
            made.append(torch.compile(function, dynamic=False, fullgraph=True, options=_options()))
        return made[0](*args, **kwargs)

    return call
