"""Sample pools: many rows of a method at a number of steps, with the function evaluations counted, not assumed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from emoe.config import ConfigError
from emoe.methods.base import MaskedDiffusion, Method, SamplerConfig
from emoe.rng import Rng, derive_seed


class CallCount:
    """Number of calls a module has made since counting began, and of rows in all of them."""

    def __init__(self) -> None:
        self.calls = 0
        self.rows = 0


@contextmanager
def count_calls(module: nn.Module) -> Iterator[CallCount]:
    """Count the forward calls of a module by a hook; of a backbone every evaluation of the network, see `counted`."""
    count = CallCount()

    def hook(_: nn.Module, inputs: tuple[Any, ...], __: object) -> None:
        count.calls += 1
        count.rows += len(inputs[0]) if inputs else 0

    counted: nn.Module = getattr(module, "counted", module)
    handle = counted.register_forward_hook(hook)
    try:
        yield count
    finally:
        handle.remove()


@dataclass(frozen=True)
class Pool:
    """Samples on the CPU and the network calls each of them took."""

    samples: Int[Tensor, "n L"]
    nfe: int  # steps: the calls of a plain sampler, and the most that a row took with another one
    calls: float  # calls that a row was part of, in the mean; `nfe` with a plain sampler


def draw_pool(
    method: Method,
    n: int,
    steps: int,
    seed: int,
    *,
    batch: int = 5_000,
    given: Int[Tensor, "n L"] | None = None,
    sampler: SamplerConfig | None = None,
) -> Pool:
    """Draw n rows in batches; a pure function of (weights, n, steps, seed, batch, given, sampler).

    Tokens of `given` that are not the mask stay as they are. A `sampler` other than plain leaves rows out of calls
    that they do not need; the pool says how many calls a row took.

    Raises:
        RuntimeError: The sampler made another number of network calls than `steps` says, or more if it is not plain.
        ConfigError: The method cannot draw by this sampler.
    """
    sampler = sampler or SamplerConfig()
    draw: Callable[..., Int[Tensor, "n L"]] = method.sample
    if sampler != SamplerConfig():
        if not isinstance(method, MaskedDiffusion):
            raise ConfigError([f"sampler: {type(method).__name__} has a sampler of its own; use plain with nucleus 1"])
        draw = functools.partial(method.sample, sampler=sampler)
    device = next(method.parameters()).device
    rng = Rng(derive_seed(seed, "pool", steps), device=device)
    parts, rows = [], 0
    for start in range(0, n, batch):
        with count_calls(method.backbone) as count:
            part = None if given is None else given[start : start + batch]
            parts.append(draw(min(batch, n - start), steps, rng.fork(start), given=part).cpu())
        if count.calls > steps or (sampler.kind == "plain" and count.calls != steps):
            raise RuntimeError(f"nfe: {steps} steps made {count.calls} network calls")
        rows += count.rows
    return Pool(torch.cat(parts), steps, steps if sampler.kind == "plain" else rows / n)
