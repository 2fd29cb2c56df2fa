"""Losses over several draws of a latent, whose gradients need no relaxation of the draws; their values mean nothing.

Shapes: B rows, K draws of each, G groups of positions that are judged apart (1: the row as a whole). For draw k

    f_k = log p(x0 | xt, z_k) (weighted by w(t)),  r_k = log p(z_k | xt),  s_k = log q(z_k | x0),

and beta is the weight of the KL (a number, or one for each row as (B, 1, 1)): the objective is
E_q[f] - beta KL(q || p), its best posterior p(z) exp(f / beta).
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

Draws = Float[Tensor, "B K G"]
Beta = Float[Tensor, "..."] | float
SMALLEST_BETA = 0.01  # comparisons of draws divide by beta


def wake_sleep_weights(f: Draws, r: Draws, s: Draws, beta: Beta) -> Draws:
    """w_k proportional to exp(f_k / beta) p(z_k) / q(z_k), which sum to one over the draws; no gradient."""
    return torch.softmax((f / torch.as_tensor(beta).clamp(min=SMALLEST_BETA) + r - s).detach(), dim=1)


def wake_sleep(f: Draws, r: Draws, s: Draws, beta: Beta) -> Float[Tensor, " B"]:
    """Reweighted wake-sleep (Bornschein & Bengio 2015): -sum_k w_k (f_k + beta r_k + s_k), summed over groups.

    Network and prior follow the gradient of beta log sum_z p(z) exp(f / beta) (the log-likelihood itself for
    beta = 1 and t = 1), the posterior that of KL(p(z | x0, xt) || q); both are consistent as K grows. With K = 1
    the weights are 1 and the posterior learns nothing.
    """
    return -(wake_sleep_weights(f, r, s, beta) * (f + beta * r + s)).sum((1, 2))


def vimco(f: Draws, r: Draws, s: Draws, beta: Beta) -> Float[Tensor, " B"]:
    """VIMCO (Mnih & Rezende 2016): for independent draws unbiased for -beta log 1/K sum_k exp(f_k / beta + r_k - s_k).

    The learning signal of draw k is the bound minus the bound with draw k replaced by the mean of the others.
    """
    draws = f.shape[1]
    value = f / torch.as_tensor(beta).clamp(min=SMALLEST_BETA) + r - s
    bound = value.logsumexp(1, keepdim=True) - math.log(draws)
    fixed = value.detach()
    others = (fixed.sum(1, keepdim=True) - fixed) / (draws - 1)
    own = torch.eye(draws, device=f.device, dtype=torch.bool)[..., None]
    swapped = torch.where(own, others[:, :, None], fixed[:, None])
    signal = bound.detach() - (swapped.logsumexp(2) - math.log(draws))
    return -(beta * ((signal * s).sum(1, keepdim=True) + bound)).sum((1, 2))


def leave_one_out(f: Draws, r: Draws, s: Draws, beta: Beta) -> Float[Tensor, " B"]:
    """Score function with the mean of the other draws as baseline: unbiased for -E_q[f + beta (r - s)].

    Draws that share some of their noise (`redraw` other than "all") are not independent, and bias it.
    """
    value = (f + beta * (r - s)).detach()
    others = (value.sum(1, keepdim=True) - value) / (value.shape[1] - 1)
    return -(f + beta * r + (value - others) * s).mean(1).sum(-1)


def effective_draws(weights: Draws) -> Float[Tensor, ""]:
    """Mean effective sample size 1 / sum_k w_k^2 of normalised weights, between 1 and K."""
    return (1 / weights.square().sum(1)).mean()
