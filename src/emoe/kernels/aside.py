"""Work beside the rest, on a stream of its own: what is needed only later.

In a backward pass these are the gradients of parameters (`Aside`), in a forward pass what only depends on the time
(`ahead`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
_SIDES: dict[tuple[str, torch.device, int], torch.cuda.Stream] = {}


def _beside(stream: torch.cuda.Stream, use: str) -> torch.cuda.Stream:
    """The stream beside a stream for a use; always the same one, for streams come from a small pool.

    Not one of each thread: PyTorch runs the backward passes of all threads in one thread of its own.
    """
    key = use, stream.device, stream.cuda_stream
    if key not in _SIDES:
        _SIDES[key] = torch.cuda.Stream(stream.device)
    return _SIDES[key]


def _read_by(stream: torch.cuda.Stream, result: object) -> None:
    """Tensors of another stream will be read by this one: until it has done so, their memory is not to be taken."""
    for tensor in result if isinstance(result, tuple) else (result,):
        if isinstance(tensor, Tensor):
            tensor.record_stream(stream)


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
        side = _beside(current, "gradients")
        side.wait_stream(current)
        with torch.cuda.stream(side):
            result = function(*args, **more)
        _read_by(current, result)
        return result

    def join(self) -> None:
        """What follows waits for all calls."""
        if self._held:
            current = torch.cuda.current_stream()
            current.wait_stream(_beside(current, "gradients"))
        self._held.clear()


def ahead(function: Callable[..., Tensor], *args: Tensor | None) -> Callable[[], Tensor]:
    """Call a function of tensors beside what follows; what is returned waits for its result, and gives it.

    Its backward pass runs beside the rest, too: PyTorch gives each part of it the stream of its forward pass. That is
    not the stream of `Aside`, where it would have to wait for the gradients of all other parameters.
    """
    if not any(isinstance(value, Tensor) and value.is_cuda for value in args):
        made = function(*args)
        return lambda: made
    current = torch.cuda.current_stream()
    side = _beside(current, "ahead")
    side.wait_stream(current)
    with torch.cuda.stream(side):
        result = function(*args)

    def ready() -> Tensor:
        reader = torch.cuda.current_stream()
        reader.wait_stream(side)
        _read_by(reader, result)
        return result

    return ready
