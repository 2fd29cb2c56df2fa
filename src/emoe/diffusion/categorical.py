"""Categorical distributions: exact draws in float64, the nucleus, the divergence, and mixtures of many components."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as nnf

from emoe.config import ConfigError
from emoe.diffusion.masking import NEG_INF
from emoe.kernels import compiled
from emoe.types import Tokens

AT_ONCE = 4096  # positions that a sampler draws from at a time
ROWS = {"cpu": 256, "cuda": 16_384}  # of a network call where components are enumerated
BUDGET = 200_000  # most components times rows that are enumerated

# Uniforms of 0 and 1 would give infinite noise; 53 bits hold everything in between.
_SMALLEST, _LARGEST = 2.0**-1000, 1 - 2.0**-53


@compiled
def gumbel_from_uniform(u: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return standard Gumbel noise g = -log(-log u) in float64, finite for every u in [0, 1]."""
    return -torch.log(-torch.log(u.double().clamp(_SMALLEST, _LARGEST)))


def gumbel(shape: tuple[int, ...], generator: torch.Generator) -> Float[Tensor, "..."]:
    """Draw standard Gumbel noise in float64.

    Single precision would cut the right tail at 16.6 (uniforms of 24 bits), which makes tokens of small
    probability impossible instead of rare; 53 bits reach 36.7.
    """
    return gumbel_from_uniform(torch.rand(shape, generator=generator, device=generator.device, dtype=torch.float64))


def draw_categorical(log_probs: Float[Tensor, "*S V"], generator: torch.Generator) -> Int[Tensor, "*S"]:
    """Draw exactly from (unnormalised) log-probabilities in float64: arg max of (log p + Gumbel), never one of -inf."""
    return (log_probs.double() + gumbel(tuple(log_probs.shape), generator)).argmax(-1)


def top_p(logits: Float[Tensor, "*S V"], p: float) -> Float[Tensor, "*S V"]:
    """Return log-probabilities of the nucleus: the most likely symbols, up to the one with which their sum reaches p.

    The others get -inf; the rest is not normalised again. Sums are in float64, of equals the first comes first, and the
    most likely symbol always stays. p = 1 returns its argument.
    """
    if p >= 1:
        return logits
    log_probs = torch.log_softmax(logits.double(), -1)
    ranked, order = log_probs.sort(stable=True, dim=-1, descending=True)
    before = nnf.pad(ranked.exp().cumsum(-1)[..., :-1], (1, 0))  # probability of those that come earlier
    outside = torch.zeros_like(log_probs, dtype=torch.bool).scatter(-1, order, before >= p)
    return log_probs.masked_fill(outside, NEG_INF)


def categorical_kl(log_q: Float[Tensor, "*S E"], log_p: Float[Tensor, "*S E"]) -> Float[Tensor, "*S"]:
    """Return KL(q || p) = sum_e q_e (log q_e - log p_e) of normalised log-probabilities (inner sum of Eq. 8)."""
    return (log_q.exp() * (log_q - log_p)).sum(-1)


def each_component(xt: Tokens, count: int, what: str) -> Iterator[tuple[Int[Tensor, "N L"], Int[Tensor, " N"]]]:
    """Yield all pairs of a row of xt and one of `count` components, in batches; more than `BUDGET` are refused."""
    if count * len(xt) > BUDGET:
        raise ConfigError(
            f"budget: {what}, times {len(xt)} rows; that is more than {BUDGET}, and too many to enumerate; ask for "
            "bound@T or iw@T,K, which need no enumeration"
        )
    pairs = torch.cartesian_prod(torch.arange(len(xt), device=xt.device), torch.arange(count, device=xt.device))
    for row, component in (part.unbind(1) for part in pairs.split(ROWS.get(xt.device.type, 256))):
        yield xt[row], component
