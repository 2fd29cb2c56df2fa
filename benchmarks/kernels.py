"""Times of a UNet's layers on a GPU by PyTorch, by Triton's kernels and by the CUDA kernels, in microseconds.

    PYTHONPATH=src python benchmarks/kernels.py

Each is captured as a CUDA graph of many calls: what is timed is the device. For maps that the CUDA kernels are not for,
or not faster for, their column says what Triton's take: it is the way `emoe.kernels` goes.
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
Ways = dict[str, tuple[Callable[[], Any], Callable[[], Any]]]  # what is computed -> by PyTorch, by our kernels


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


def convolution(x: Tensor, weight: Tensor, dy: Tensor) -> Ways:
    """A 3x3 convolution and its gradients; PyTorch's are cuDNN's."""
    from emoe.kernels import convs

    def back(mask: list[bool]) -> Callable[[], Any]:
        rest = None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, mask
        return lambda: torch.ops.aten.convolution_backward(dy, x, weight, *rest)

    return {
        "convolution": (lambda: nnf.conv2d(x, weight, padding=1), lambda: convs.forward(x, weight)),
        "its input's gradient": (back([True, False, False]), lambda: convs.forward(dy, weight, turned=True)),
        "its weights' gradient": (back([False, True, False]), lambda: convs.weight_gradient(x, dy, torch.bfloat16)),
    }


def norm(x: Tensor, dy: Tensor) -> Ways:
    """Norm, film and SiLU, without and with the gradients of all they read; their difference is the backward pass."""
    from emoe.kernels import maps

    batch, channels = x.shape[:2]
    x, film = x.detach().requires_grad_(), torch.randn(batch, 2 * channels, device="cuda").bfloat16().requires_grad_()
    gamma, beta = (torch.randn(channels, device="cuda").requires_grad_() for _ in range(2))

    def plain() -> Tensor:
        scale, shift = film[..., None, None].chunk(2, 1)
        return nnf.silu((1 + scale) * nnf.group_norm(x, 8, gamma.bfloat16(), beta.bfloat16()) + shift)

    def own() -> Tensor:
        return maps.norm_silu(x, gamma, beta, 8, film=film)[0]

    def both(call: Callable[[], Tensor]) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(call(), (x, gamma, beta, film), dy)

    return {"norm, film, SiLU": (plain, own), "and gradients": (both(plain), both(own))}


def main() -> int:
    """Print a line for each shape and direction."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="replays of each graph")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("kernels: needs a GPU", file=sys.stderr)
        return 1
    from emoe.kernels import cuda

    def made(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda").bfloat16().contiguous(memory_format=torch.channels_last)

    torch.backends.cudnn.benchmark = True
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16, us")
    print(f"{'batch, channels, side':<26}{'':<23}{'PyTorch':>8}{'Triton':>8}{'CUDA':>8}")
    for batch, inputs, outputs, side in SHAPES:
        x, weight, dy = made(batch, inputs, side, side), made(outputs, inputs, 3, 3), made(batch, outputs, side, side)
        for name, (theirs, ours) in (convolution(x, weight, dy) | norm(x, torch.randn_like(x))).items():
            times = [microseconds(theirs, args.rounds)]
            with mock.patch.object(cuda, "available", lambda device: False):
                times.append(microseconds(ours, args.rounds))
            times.append(microseconds(ours, args.rounds))
            shape = f"{batch}, {inputs} -> {outputs}, {side} x {side}"
            print(f"{shape:<26}{name:<23}" + "".join(f"{value:>8.1f}" for value in times), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
