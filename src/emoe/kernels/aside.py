"""Work that nothing waits for until a backward pass ends: the gradients of parameters, on a stream of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
_OF_THREAD = threading.local()


def _stream() -> torch.cuda.Stream:
    """One for each thread: streams come from a small pool, and a new one each time would soon be another thread's."""
    if not hasattr(_OF_THREAD, "stream"):
        _OF_THREAD.stream = torch.cuda.Stream()
    return _OF_THREAD.stream


class Aside:
    """Calls that run beside what follows them; `join` before their results are read.

    A chain of small kernels leaves much of a GPU idle. What only the optimiser reads can fill it: within a CUDA graph
    the calls become a branch of their own.
    """

    def __init__(self) -> None:
        # A tensor that nobody holds any more may be written to by the stream that made it.
        self._held: list[object] = []

    def __call__(
        self, function: Callable[Arguments, Result], *args: Arguments.args, **more: Arguments.kwargs
    ) -> Result:
        """Call a function of tensors; on a CPU at once."""
        if not any(isinstance(value, Tensor) and value.is_cuda for value in args):
            return function(*args, **more)
        self._held.append(args)
        stream = _stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            return function(*args, **more)

    def join(self) -> None:
        """What follows waits for all calls."""
        if self._held:
            torch.cuda.current_stream().wait_stream(_stream())
        self._held.clear()
