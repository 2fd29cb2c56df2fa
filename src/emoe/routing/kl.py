"""Divergence of posterior and prior routes (Eq. 7-8), load balance, and what a router is doing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from emoe.compiled import compiled
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
    at = [position_kl(post_d, prior_d) for post_d, prior_d in zip(post, prior, strict=True)]
    return torch.stack([(kl if positions is None else kl * positions).sum(-1) for kl in at], dim=-1)


@compiled
def position_kl(post: Float[Tensor, "B P E"], prior: Float[Tensor, "B P E"]) -> Float[Tensor, "B P"]:
    """KL(Cat(post) || Cat(prior)) at each position of a block, from router logits."""
    return categorical_kl(torch.log_softmax(post, -1), torch.log_softmax(prior, -1))


@compiled
def load_balance(logits: Float[Tensor, "B P E"], route: Int[Tensor, "B P"]) -> Float[Tensor, ""]:
    """Switch loss E * sum_e f_e * P_e of one block: f = share of positions sent to e, P = mean router probability.

    1 when experts are used evenly, E when one takes all.
    """
    probs = torch.softmax(logits, -1).mean(1).mean(0)
    return logits.shape[-1] * (usage(route, logits.shape[-1]).to(probs.dtype) * probs).sum()


@compiled
def usage_shortfall(logits: Float[Tensor, "B P E"], floor: float) -> Float[Tensor, ""]:
    """max(0, floor - H(mean router distribution)) of one block, in nats: 0 as long as enough experts are in use."""
    probs = torch.softmax(logits, -1).mean((0, 1))
    return torch.relu(floor + torch.special.xlogy(probs, probs).sum())


def usage(route: Int[Tensor, "B P"], experts: int) -> Float[Tensor, " E"]:
    """Share of positions that run each expert."""
    # in two steps: a GPU takes its time over one sum of very many numbers
    return torch.nn.functional.one_hot(route, experts).float().mean(1).mean(0)


@compiled
def route_log(
    post: Float[Tensor, "B P E"], prior: Float[Tensor, "B P E"], route: Int[Tensor, "B P"], kl: Float[Tensor, "B P"]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What the log says of a block: mean KL and KL of each position, entropy of both sides, usage."""
    return kl.mean(), kl.mean(0), routing_entropy(post), routing_entropy(prior), usage(route, post.shape[-1])


def routing_entropy(logits: Float[Tensor, "B P E"]) -> Float[Tensor, ""]:
    """Mean entropy of the router's distribution over positions, in nats (0: certain, log E: indifferent)."""
    log_rho = torch.log_softmax(logits, -1)
    return -(log_rho.exp() * log_rho).sum(-1).mean()
