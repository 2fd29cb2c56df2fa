"""Plain references of the process: its distributions written out as probabilities, and the masked likelihood."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from emoe.diffusion.masking import log_chosen, reveal_probability


def forward_distribution(x: Tensor, keep: float, mask_id: int, size: int) -> Tensor:
    """q(x_t^l | x_s^l) = Cat(keep * x_s + (1 - keep) * m) of Eq. 1 and 12, as probabilities (B, L, V) in float64."""
    stay = torch.nn.functional.one_hot(x, size).double() * keep
    stay[..., mask_id] += 1 - keep
    return stay


def reverse_distribution(log_x_theta: Tensor, xt: Tensor, alpha_s: float, alpha_t: float, mask_id: int) -> Tensor:
    """p(x_s^l | x_t) of Eq. 2-3 and 13-14 as probabilities (B, L, V).

    A masked position keeps the mask with probability (1 - alpha_s) / (1 - alpha_t) and takes the tokens of x_theta
    with the remaining probability; a clean one stays.
    """
    reveal = reveal_probability(alpha_s, alpha_t)
    masked = (xt == mask_id)[..., None]
    probs = torch.where(masked, reveal * log_x_theta.exp(), log_x_theta.exp())
    probs[..., mask_id] += masked[..., 0].to(probs.dtype) * (1 - reveal)
    return probs


def masked_nll(log_x_theta: Tensor, x0: Tensor) -> Tensor:
    """-sum over masked l of log <x_theta^l, x_0^l> (the sum of Eq. 17 and 19), nats per row.

    Clean positions contribute exactly 0, because SUBS copies them.
    """
    return -log_chosen(log_x_theta, x0).sum(-1)


def tweedie_distribution(log_s: Tensor, xt: Tensor, sigma_s: float, sigma_t: float, mask_id: int) -> Tensor:
    """p(x_s^l | x_t) of SEDD's analytic step as probabilities (B, L, V), in its authors' notation.

    With d = sigma_t - sigma_s: [exp(-d Q) s]_y * exp(d Q)(x_t, y), Q the generator of the absorbing process.
    At a masked position this is (e^d - 1) s_y for a symbol and 1 - (e^d - 1) sum_y s_y for the mask (at least 0, and
    then normalised); a clean one stays. sigma_s = 0 is the last step: the mask's probability is removed.
    """
    d = sigma_t - sigma_s
    s = log_s.double().exp()
    staggered = math.exp(d) * s
    staggered[..., mask_id] += (1 - math.exp(d)) * s.sum(-1)
    one_hot = torch.nn.functional.one_hot(xt, log_s.shape[-1]).double()
    masked = (xt == mask_id)[..., None]
    transition = math.exp(-d) * one_hot + torch.where(masked, 1 - math.exp(-d), 0.0)
    probs = (staggered * transition).clamp(min=0)
    if sigma_s == 0:
        probs[..., mask_id] = 0
    return probs / probs.sum(-1, keepdim=True)
