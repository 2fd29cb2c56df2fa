"""Times of the UNet's norm with scale, shift and SiLU on a GPU, by PyTorch and by the Triton kernel, in microseconds.

    PYTHONPATH=src python benchmarks/kernels.py

Each is captured as a CUDA graph of many calls, so that only the device is timed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as nnf

CALLS = 20  # in one graph
GROUPS = 8
SHAPES = [(64, 72, 32), (128, 72, 32), (64, 72, 16), (128, 72, 16), (64, 72, 8)]  # batch, channels, side


def microseconds(call: Callable[[], Any], rounds: int) -> float:
    """Return the median time of one call."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        call()  # compiles, and allocates memory
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(CALLS):
                call()
    times = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1000 * begin.elapsed_time(end) / CALLS)
    return statistics.median(times)


def norm(batch: int, channels: int, side: int) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """Return calls of the forward pass, and with the gradients of all inputs; by PyTorch and by the kernel."""
    from emoe.kernels import norm as kernel

    shape = batch, channels, side, side
    x, dy = (torch.randn(shape, device="cuda").bfloat16().contiguous(memory_format=torch.channels_last) for _ in "xy")
    x, modulation = x.requires_grad_(), torch.randn(batch, 2 * channels, device="cuda").bfloat16().requires_grad_()
    gamma, beta = (torch.randn(channels, device="cuda").requires_grad_() for _ in range(2))

    def plain() -> Tensor:
        scale, shift = modulation[..., None, None].chunk(2, 1)
        return nnf.silu((1 + scale) * nnf.group_norm(x, GROUPS, gamma.bfloat16(), beta.bfloat16()) + shift)

    def fused() -> Tensor:
        return kernel.norm_silu(x, gamma, beta, GROUPS, modulation)

    def both(call: Callable[[], Tensor]) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(call(), (x, gamma, beta, modulation), dy)

    return {"forward": (plain, fused), "and gradients": (both(plain), both(fused))}


def main() -> int:
    """Print a line for each shape and direction."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="replays of each graph")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("kernels: needs a GPU", file=sys.stderr)
        return 1
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16, us")
    print(f"{'batch, channels, side':<24}{'':<16}{'PyTorch':>8}{'Triton':>8}")
    for shape in SHAPES:
        for name, calls in norm(*shape).items():
            times = [microseconds(call, args.rounds) for call in calls]
            print(f"{', '.join(map(str, shape)):<24}{name:<16}" + "".join(f"{value:>8.1f}" for value in times))
    return 0


if __name__ == "__main__":
    sys.exit(main())
