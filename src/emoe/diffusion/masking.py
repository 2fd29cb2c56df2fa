"""The absorbing process and its reverse: masking, SUBS, the reverse step, the masked likelihood (Section 2, App. A.1).

Alphas are given per sequence, `(B,)`, or as one number for the whole batch.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from emoe.kernels import compiled
from emoe.types import Logits, PerRow, Positions, Tokens

NEG_INF = float("-inf")
FEW = 16  # number of symbols up to which a sum over all is faster than an index, whose gradient is a scatter


def mask_tokens(x: Tokens, keep: PerRow, mask_id: int, generator: torch.Generator) -> Tokens:
    """Draw x_t ~ q(x_t | x_s) (Eq. 1), or q(x_t | x_0) (Eq. 12) with keep = alpha_t.

    Each token stays with probability keep = alpha_t / alpha_s and becomes the mask otherwise; a mask stays a mask.
    At keep = 0 all tokens are masked, at keep = 1 none is.
    """
    u = torch.rand(x.shape, generator=generator, device=x.device, dtype=torch.float64)
    return _masked_where(x, u, keep, mask_id)


@compiled
def _masked_where(x: Tokens, u: Float[Tensor, "B L"], keep: PerRow, mask_id: int) -> Tokens:
    return torch.where(u < keep.double()[:, None], x, mask_id)


@compiled
def subs(logits: Logits, xt: Tokens, mask_id: int) -> Logits:
    """Return log x_theta: zero mass on the mask, and clean tokens are copied (Eq. 15).

    At masked positions log_softmax over all symbols but the mask; elsewhere 0 at x_t and -inf at the rest.
    """
    symbol = torch.arange(logits.shape[-1], device=logits.device)
    predicted = torch.log_softmax(logits.masked_fill(symbol == mask_id, NEG_INF), dim=-1)
    copied = torch.where(symbol == xt[..., None], 0.0, NEG_INF).to(predicted.dtype)
    return torch.where((xt == mask_id)[..., None], predicted, copied)


@compiled
def log_chosen(log_x_theta: Float[Tensor, "*B L V"], x: Int[Tensor, "*B L"]) -> Float[Tensor, "*B L"]:
    """Return log <x_theta^l, x^l> at every position (the terms of the sums in Eq. 17 and 19)."""
    if log_x_theta.shape[-1] > FEW:
        return log_x_theta.gather(-1, x[..., None]).squeeze(-1)
    symbol = torch.arange(log_x_theta.shape[-1], device=x.device)
    return torch.where(symbol == x[..., None], log_x_theta, 0.0).sum(-1)


def reveal_probability(alpha_s: Tensor | float, alpha_t: Tensor | float) -> Tensor | float:
    """Return a = (alpha_s - alpha_t) / (1 - alpha_t), the chance that t to s reveals a masked token (Eq. 14)."""
    return (alpha_s - alpha_t) / (1 - alpha_t)


def draw_revealed(
    xt: Tokens, chance: Float[Tensor, "B 1"] | float, mask_id: int, generator: torch.Generator
) -> Positions:
    """Draw the masked positions that a reverse step reveals, each with chance `reveal_probability` (Eq. 2, 13-14).

    It depends on no logits, so a step draws it first; then the tokens of these positions from x_theta (Eq. 3).
    """
    u = torch.rand(xt.shape, generator=generator, device=xt.device, dtype=torch.float64)
    return (xt == mask_id) & (u < chance)
