"""Work that nothing waits for until a backward pass ends: the gradients of parameters, on a stream of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
_SIDES: dict[tuple[torch.device, int], torch.cuda.Stream] = {}


def _beside(stream: torch.cuda.Stream) -> torch.cuda.Stream:
    """The second stream of a stream; always the same one, for streams come from a small pool.

    Not one of each thread: PyTorch runs the backward passes of all threads in one thread of its own.
    """
    key = stream.device, stream.cuda_stream
    if key not in _SIDES:
        _SIDES[key] = torch.cuda.Stream(stream.device)
    return _SIDES[key]


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
        current = torch.cuda.current_stream()
        side = _beside(current)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            return function(*args, **more)

    def join(self) -> None:
        """What follows waits for all calls."""
        if self._held:
            current = torch.cuda.current_stream()
            current.wait_stream(_beside(current))
        self._held.clear()
