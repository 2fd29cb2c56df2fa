"""Divergence of posterior and prior routes (Eq. 7-8), load balance, and what a router is doing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from emoe.diffusion.categorical import categorical_kl


def route_kl(
    post: Sequence[Float[Tensor, "B _P E"]],
    prior: Sequence[Float[Tensor, "B _P E"]],
    positions: Float[Tensor, "B _P"] | None = None,
) -> Float[Tensor, "B D"]:
    """KL_route of Eq. 8 for each block: sum over positions of KL(Cat(post_d) || Cat(prior_d)), nats per sequence.

    Both sets of logits must come from passes that ran the posterior's routes at all positions; then the sum over
    blocks, averaged over z ~ q, is the KL of the whole route distributions of Eq. 7.

    Args:
        post: Router logits of the clean pass, block by block.
        prior: Router logits of the noisy pass along the same routes.
        positions: Optional weight of each position (1 counts, 0 does not).
    """
    per_block = []
    for post_d, prior_d in zip(post, prior, strict=True):
        kl = position_kl(post_d, prior_d)
        per_block.append((kl if positions is None else kl * positions).sum(-1))
    return torch.stack(per_block, dim=-1)


def position_kl(post: Float[Tensor, "B P E"], prior: Float[Tensor, "B P E"]) -> Float[Tensor, "B P"]:
    """KL(Cat(post) || Cat(prior)) at each position of a block, from router logits."""
    return categorical_kl(torch.log_softmax(post, -1), torch.log_softmax(prior, -1))


def load_balance(logits: Float[Tensor, "B P E"], route: Int[Tensor, "B P"]) -> Float[Tensor, ""]:
    """Switch loss E * sum_e f_e * P_e of one block: f = share of positions sent to e, P = mean router probability.

    1 when experts are used evenly, E when one takes all.
    """
    probs = torch.softmax(logits, -1).mean((0, 1))
    return logits.shape[-1] * (usage(route, logits.shape[-1]).to(probs.dtype) * probs).sum()


def usage_shortfall(logits: Float[Tensor, "B P E"], floor: float) -> Float[Tensor, ""]:
    """max(0, floor - H(mean router distribution)) of one block, in nats: 0 as long as enough experts are in use."""
    probs = torch.softmax(logits, -1).mean((0, 1))
    return torch.relu(floor + torch.special.xlogy(probs, probs).sum())


def usage(route: Int[Tensor, "B P"], experts: int) -> Float[Tensor, " E"]:
    """Share of positions that run each expert."""
    return torch.nn.functional.one_hot(route, experts).float().mean((0, 1))


def routing_entropy(logits: Float[Tensor, "B P E"]) -> Float[Tensor, ""]:
    """Mean entropy of the router's distribution over positions, in nats (0: certain, log E: indifferent)."""
    log_rho = torch.log_softmax(logits, -1)
    return -(log_rho.exp() * log_rho).sum(-1).mean()
