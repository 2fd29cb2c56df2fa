"""Loss from logits over a large vocabulary: only at scored positions, and only some positions at a time."""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as nnf

from emoe.kernels import compiled_always
from emoe.types import PerToken, Positions, Tokens

ALIGNED = 8  # symbols; rows of 16-bit logits that are not aligned make products on a GPU three times as slow
MIN_ROWS = 64  # from which on the masked share of a batch is close enough to a half to be relied on


def has_room(scored: Positions, room: float, draws: int = 1) -> Bool[Tensor, ""] | None:
    """Return whether `total_and_target` has room for K draws of all scored positions; None if it computes them all."""
    if room == 1 or len(scored) * draws < MIN_ROWS:
        return None
    return scored.sum() <= math.ceil(room * draws * scored.numel()) // draws


def total_and_target(
    h: Float[Tensor, "B L K"],
    weight: Float[Tensor, "V K"],
    bias: Float[Tensor, " V"],
    target: Tokens,
    scored: Positions,
    chunk: int,
    room: float,
) -> tuple[PerToken, PerToken]:
    """Return log sum_y exp(a_y) and a_target of the logits a = W h + b, at scored positions; 0 at the others.

    Logits are computed for `chunk` positions at a time, in the forward and again in the backward pass: memory holds
    chunk * V numbers instead of several times B * L * V. Values and gradients are those of all at once, in the
    precision of autocast if it is on. Entries of -inf in the bias do not count in the sum.

    With `room` < 1 and from `MIN_ROWS` rows on, logits are computed for that share of all positions, into which the
    scored ones are moved (docs/decisions/0023-masked-logits.md); a step without `has_room` must be refused.
    """
    if room == 1 or len(target) < MIN_ROWS:
        values = _TotalAndTarget.apply(h.flatten(0, 1), weight, bias, target.flatten(), chunk)
        total, chosen = (torch.where(scored, value.view(target.shape), 0.0) for value in values)
        return total, chosen
    here = scored.flatten()
    count, size = len(here), math.ceil(room * len(here))
    rank = here.cumsum(0) - 1  # of each scored position among them
    fits = here & (rank < size)
    # One more slot takes the positions that do not fit. Unfilled slots read position 0, and nothing reads them.
    slots = torch.zeros(size + 1, dtype=torch.int64, device=h.device)
    taken = slots.scatter(0, torch.where(fits, rank, size), torch.arange(count, device=h.device))[:-1]
    filled = torch.arange(size, device=h.device) < here.sum()
    rank = rank.clamp(0, size - 1)
    moved = _Moved.apply(h.flatten(0, 1), taken, filled, rank, fits)
    values = _TotalAndTarget.apply(moved, weight, bias, target.flatten()[taken], chunk)
    total, chosen = (_Moved.apply(value, rank, fits, taken, filled).view(target.shape) for value in values)
    return total, chosen


class _Moved(torch.autograd.Function):
    """y[i] = x[at[i]] where real[i], else 0; its gradient has the same form, since no position is read twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, at: Tensor, real: Tensor, back: Tensor, was_read: Tensor) -> Tensor:
        ctx.save_for_backward(back, was_read)
        return _moved(x, at, real)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return _moved(dy, *ctx.saved_tensors), None, None, None, None


def _moved(x: Tensor, at: Tensor, real: Tensor) -> Tensor:
    return torch.where(real.view(-1, *(1 for _ in x.shape[1:])), x.index_select(0, at), 0)


class _TotalAndTarget(torch.autograd.Function):
    """d total / d a = softmax(a), d a_target / d a = one-hot; the logits are computed again for it."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor, bias: Tensor, target: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
        dtype = product_dtype(h)
        w, b = _aligned(weight, bias, dtype)
        parts = zip(h.split(chunk), target.split(chunk), strict=True)
        both = [_read(nnf.linear(part.to(dtype), w, b), y) for part, y in parts]
        total, chosen = (torch.cat(values) for values in zip(*both, strict=True))
        ctx.save_for_backward(h, weight, bias, target, total)
        ctx.chunk, ctx.dtype = chunk, dtype
        return total, chosen

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, by_total: Tensor, by_chosen: Tensor) -> tuple[Tensor | None, ...]:
        h, weight, bias, target, total = ctx.saved_tensors
        w, b = _aligned(weight, bias, ctx.dtype)
        grad_h, size = torch.empty_like(h), len(weight)
        grad_weight, grad_bias = weight.new_zeros(w.shape), bias.new_zeros(b.shape)
        for start in range(0, len(h), ctx.chunk):
            here = slice(start, start + ctx.chunk)
            part = h[here].to(ctx.dtype)
            slopes = (value[here] for value in (target, total, by_total, by_chosen))
            by_logits = _by_logits(nnf.linear(part, w, b), *slopes)
            grad_bias += by_logits.sum(0, dtype=grad_bias.dtype)
            grad_h[here] = by_logits @ w
            grad_weight += by_logits.T @ part
        return grad_h, grad_weight[:size], grad_bias[:size], None, None


@compiled_always
def _read(logits: Float[Tensor, "N V"], target: Int[Tensor, " N"]) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
    """Return log sum_y exp(a_y) and a_target, in at least single precision."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits.logsumexp(-1), logits.gather(-1, target[:, None]).squeeze(-1)


@compiled_always
def _by_logits(
    logits: Float[Tensor, "N V"],
    target: Int[Tensor, " N"],
    total: Float[Tensor, " N"],
    by_total: Float[Tensor, " N"],
    by_chosen: Float[Tensor, " N"],
) -> Float[Tensor, "N V"]:
    """Return by_total * softmax(a) + by_chosen * one-hot(target), in the precision of the logits."""
    here = torch.arange(logits.shape[1], device=logits.device) == target[:, None]
    slope = (logits - total[:, None]).exp() * by_total[:, None]
    return (slope + torch.where(here, by_chosen[:, None], 0.0)).to(logits.dtype)


def _aligned(
    weight: Float[Tensor, "V K"], bias: Float[Tensor, " V"], dtype: torch.dtype
) -> tuple[Float[Tensor, "W K"], Float[Tensor, " W"]]:
    """Cast both, and append symbols of probability 0 up to the next multiple of `ALIGNED`."""
    more = -len(weight) % ALIGNED
    return nnf.pad(weight.to(dtype), (0, 0, 0, more)), nnf.pad(bias.to(dtype), (0, more), value=-math.inf)


def product_dtype(x: Tensor) -> torch.dtype:
    """Return the precision of a matrix product with x: that of autocast, if it is on and applies to x."""
    kind = x.device.type
    cast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind) and x.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if cast else x.dtype
