"""Categorical distributions: exact draws in float64, and their divergence."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from emoe.kernels import compiled

# Uniforms of 0 and 1 would give infinite noise; 53 bits hold everything in between.
_SMALLEST, _LARGEST = 2.0**-1000, 1 - 2.0**-53


@compiled
def gumbel_from_uniform(u: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Standard Gumbel noise g = -log(-log u) in float64, finite for every u in [0, 1]."""
    return -torch.log(-torch.log(u.double().clamp(_SMALLEST, _LARGEST)))


def gumbel(shape: tuple[int, ...], generator: torch.Generator) -> Float[Tensor, "..."]:
    """Standard Gumbel noise in float64.

    Single precision would cut the right tail at 16.6 (uniforms of 24 bits), which makes tokens of small
    probability impossible instead of rare; 53 bits reach 36.7.
    """
    return gumbel_from_uniform(torch.rand(shape, generator=generator, device=generator.device, dtype=torch.float64))


def draw_categorical(log_probs: Float[Tensor, "*S V"], generator: torch.Generator) -> Int[Tensor, "*S"]:
    """Exact draws from (unnormalised) log-probabilities: arg max of (log p + Gumbel) in float64.

    Entries of -inf are never drawn.
    """
    return (log_probs.double() + gumbel(tuple(log_probs.shape), generator)).argmax(-1)


def categorical_kl(log_q: Float[Tensor, "*S E"], log_p: Float[Tensor, "*S E"]) -> Float[Tensor, "*S"]:
    """KL(q || p) = sum_e q_e (log q_e - log p_e) of normalised log-probabilities (inner sum of Eq. 8)."""
    return (log_q.exp() * (log_q - log_p)).sum(-1)
