"""Times of a 3x3 convolution on a GPU by cuDNN, by Triton's kernels and by the CUDA kernels, in microseconds.

    PYTHONPATH=src python benchmarks/convolutions.py

Each is captured as a CUDA graph of many calls: what is timed is the device. For maps that the CUDA kernels are not for,
or not faster for, their column says what Triton's take: it is the way `emoe.kernels.convs` goes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as nnf

CALLS = 20  # in one graph
SHAPES = [(64, 72, 72, 32), (128, 72, 72, 32), (64, 144, 72, 32), (64, 72, 72, 16), (128, 72, 72, 16), (64, 72, 72, 8)]


def microseconds(call: Callable[[], Any], rounds: int) -> float:
    """The median time of one call."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        call()  # compiles, and asks for memory
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(CALLS):
                call()
    found = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(1000 * begin.elapsed_time(end) / CALLS)
    return statistics.median(found)


def ways(x: Tensor, weight: Tensor, dy: Tensor) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """What a convolution computes, by cuDNN and by our kernels."""
    from emoe.kernels import convs

    def back(mask: list[bool]) -> Callable[[], Any]:
        rest = None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, mask
        return lambda: torch.ops.aten.convolution_backward(dy, x, weight, *rest)

    return {
        "result": (lambda: nnf.conv2d(x, weight, padding=1), lambda: convs.forward(x, weight)),
        "input's gradient": (back([True, False, False]), lambda: convs.forward(dy, weight, turned=True)),
        "weights' gradient": (back([False, True, False]), lambda: convs.weight_gradient(x, dy, torch.bfloat16)),
    }


def main() -> int:
    """Print a line for each shape and direction."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="replays of each graph")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("convolutions: needs a GPU", file=sys.stderr)
        return 1
    from emoe.kernels import cuda

    def made(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda").bfloat16().contiguous(memory_format=torch.channels_last)

    torch.backends.cudnn.benchmark = True
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16, us")
    print(f"{'batch, channels, side':<26}{'':<18}{'cuDNN':>8}{'Triton':>8}{'CUDA':>8}")
    for batch, inputs, outputs, side in SHAPES:
        x, weight, dy = made(batch, inputs, side, side), made(outputs, inputs, 3, 3), made(batch, outputs, side, side)
        for name, (theirs, ours) in ways(x, weight, dy).items():
            times = [microseconds(theirs, args.rounds)]
            with mock.patch.object(cuda, "available", lambda device: False):
                times.append(microseconds(ours, args.rounds))
            times.append(microseconds(ours, args.rounds))
            shape = f"{batch}, {inputs} -> {outputs}, {side} x {side}"
            print(f"{shape:<26}{name:<18}" + "".join(f"{value:>8.1f}" for value in times), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
