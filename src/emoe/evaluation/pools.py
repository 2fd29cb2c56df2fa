"""Sample pools: many rows of a method at a number of steps, with the function evaluations counted, not assumed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor, nn

from emoe.methods.base import Method
from emoe.rng import Rng, derive_seed


class CallCount:
    """Number of forward calls a module has made since counting began."""

    def __init__(self) -> None:
        self.calls = 0


@contextmanager
def count_calls(module: nn.Module) -> Iterator[CallCount]:
    """Count the forward calls of a module by a hook."""
    count = CallCount()

    def hook(*_: object) -> None:
        count.calls += 1

    handle = module.register_forward_hook(hook)
    try:
        yield count
    finally:
        handle.remove()


@dataclass(frozen=True)
class Pool:
    """Samples on the CPU and the network calls each of them took."""

    samples: Int[Tensor, "n L"]
    nfe: int


def draw_pool(
    method: Method, n: int, steps: int, seed: int, *, batch: int = 5_000, given: Int[Tensor, "n L"] | None = None
) -> Pool:
    """Draw n rows in batches; a pure function of (weights, n, steps, seed, batch, given).

    Tokens of `given` that are not the mask stay as they are.

    Raises:
        RuntimeError: The sampler made another number of network calls than `steps` says.
    """
    device = next(method.parameters()).device
    rng = Rng(derive_seed(seed, "pool", steps), device=device)
    parts = []
    for start in range(0, n, batch):
        with count_calls(method.backbone) as count:
            part = None if given is None else given[start : start + batch]
            parts.append(method.sample(min(batch, n - start), steps, rng.fork(start), given=part).cpu())
        if count.calls != steps:
            raise RuntimeError(f"nfe: {steps} steps made {count.calls} network calls")
    return Pool(torch.cat(parts), steps)
