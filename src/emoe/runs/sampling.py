"""`draw`: the one function that samples for all callers, with function evaluations counted by a hook."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor, nn

from emoe.config import ConfigError
from emoe.engine.arithmetic import Precision, arithmetic
from emoe.methods.base import PLAIN, Method, SamplerConfig
from emoe.rng import Rng, derive_seed
from emoe.types import TokenSpace

Rows = Int[Tensor, "m L"]


class Pool(NamedTuple):
    """Samples on the CPU with their cost."""

    samples: Int[Tensor, "n L"]
    nfe: int  # network calls of a row with the plain sampler, the most with others
    calls: float  # mean number of calls of a row
    seconds: float


def token_rows(given: Any, space: TokenSpace) -> Rows:
    """Rows of tokens, with the mask in place of -1."""
    rows = torch.atleast_2d(torch.as_tensor(given).cpu())
    if rows.ndim != 2 or rows.shape[1] != space.length or not len(rows) or rows.is_floating_point():
        raise ConfigError([f"given: expected whole numbers of shape (m, {space.length}), got {tuple(rows.shape)}"])
    rows = rows.long()
    rows = rows.masked_fill(rows == -1, space.mask_id)
    if rows.min() < 0 or rows.max() >= space.size:
        raise ConfigError([f"given: tokens must be in 0..{space.size - 1} (-1 or {space.mask_id} where one is wanted)"])
    return rows


@contextlib.contextmanager
def record_calls(*modules: nn.Module) -> Iterator[list[torch.Size]]:
    """Record the shape of the input of every forward call; a call of a backbone is a function evaluation."""
    shapes = list[torch.Size]()
    with contextlib.ExitStack() as stack:
        for module in modules:
            stack.enter_context(module.register_forward_hook(lambda _, inputs, __: shapes.append(inputs[0].shape)))
        yield shapes


@torch.no_grad()
def draw(
    method: Method,
    n: int,
    nfe: int,
    *,
    seed: int = 0,
    batch: int | None = None,
    given: Tensor | np.ndarray | Sequence[Sequence[int]] | None = None,
    sampler: SamplerConfig = PLAIN,
    precision: Precision | None = None,
) -> Pool:
    """Draw n rows with `nfe` network calls each; a pure function of the arguments and the weights.

    Args:
        method: The trained method.
        n: Number of rows.
        nfe: Network calls; with a sampler other than plain a row can take fewer.
        seed: Seed of the draw.
        batch: Rows drawn at a time, which bounds the memory; another size gives other rows. None: all at once.
        given: Rows with -1 or the mask for tokens to be drawn; all other tokens stay.
        sampler: The sampler of masked diffusion methods.
        precision: Arithmetic of the network; bf16 means autocast. None: that of the process. Token probabilities are
            always in float64.

    Raises:
        RuntimeError: The method made another number of network calls.
        ConfigError: Arguments that the method does not support.
    """
    space, device = method.space, next(method.parameters()).device
    method.check_sampler(sampler)
    if n < 1 or nfe < 1:
        raise ConfigError([f"{'n' if n < 1 else 'nfe'}: must be >= 1, got {min(n, nfe)}"])
    empty = torch.full((1, space.length), space.mask_id).expand(n, -1)
    first = empty if given is None else token_rows(given, space)
    if len(first) != n:
        raise ConfigError([f"given: expected {n} rows of {space.length} tokens, got {len(first)}"])
    rng, began = Rng(derive_seed(seed, "pool", nfe), device=device), time.monotonic()
    batch, parts, rows = batch or n, [], 0
    with contextlib.ExitStack() as stack:
        stack.callback(method.train, method.training)
        method.eval()
        if precision is not None:
            stack.enter_context(arithmetic(precision))
        if precision == "bf16":
            stack.enter_context(torch.autocast(device.type, torch.bfloat16))
        for start in range(0, n, batch):
            x = first[start : start + batch].to(device, copy=True)
            with record_calls(method.backbone) as shapes:
                parts.append(method.sample(x, nfe, rng.fork(start), sampler=sampler).cpu())
            if len(shapes) > nfe or (sampler.kind == "plain" and len(shapes) != nfe):
                raise RuntimeError(f"nfe: a sampler of {nfe} steps made {len(shapes)} network calls")
            rows += sum(shape[0] for shape in shapes)
    calls = nfe if sampler.kind == "plain" else rows / n
    return Pool(torch.cat(parts), nfe, calls, time.monotonic() - began)
