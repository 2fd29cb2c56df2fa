"""Divergence of posterior and prior routes (Eq. 7-8), load balance, and what a router is doing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from emoe.diffusion.categorical import categorical_kl
from emoe.kernels import compiled


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
    at = [
        categorical_kl(torch.log_softmax(post_d, -1), torch.log_softmax(prior_d, -1))
        for post_d, prior_d in zip(post, prior, strict=True)
    ]
    return torch.stack([(kl if positions is None else kl * positions).sum(-1) for kl in at], dim=-1)


class Compared(NamedTuple):
    """Posterior and prior along drawn routes, of D blocks with P positions in all."""

    kl_at: Float[Tensor, "N P"]  # KL(Cat(post) || Cat(prior)) at each position, blocks one after the other
    kl: Float[Tensor, "N D"]  # summed over a block's positions: `route_kl`
    chance: Float[Tensor, "D E"]  # mean probability of each expert under the posterior
    used: Float[Tensor, "D E"]  # share of positions that run each expert
    post_entropy: Float[Tensor, " D"]  # means over positions, without a gradient: `routing_entropy`
    prior_entropy: Float[Tensor, " D"]


def compare(
    post: Sequence[Float[Tensor, "N _P E"]],
    prior: Sequence[Float[Tensor, "N _P E"]],
    routes: Sequence[Int[Tensor, "N _P"]],
) -> Compared:
    """All blocks in one go: a GPU takes as long for each of many small tensors as for one of them all."""
    sizes = tuple(block.shape[1] for block in post)
    return Compared(*_compared(torch.cat(list(post), 1), torch.cat(list(prior), 1), torch.cat(list(routes), 1), sizes))


@compiled
def _compared(
    post: Float[Tensor, "N P E"], prior: Float[Tensor, "N P E"], route: Int[Tensor, "N P"], sizes: tuple[int, ...]
) -> tuple[Tensor, ...]:
    log_q, log_p = torch.log_softmax(post, -1), torch.log_softmax(prior, -1)
    kl_at = categorical_kl(log_q, log_p)
    each = math.gcd(*sizes)  # positions of one block in a row: first they are summed, then what a block has of these
    start = torch.arange(0, sum(sizes), each, device=post.device)
    ends = [sum(sizes[: d + 1]) for d in range(len(sizes))]
    mine = torch.stack([(start >= end - size) & (start < end) for end, size in zip(ends, sizes, strict=True)])

    def by_block(values: Float[Tensor, "N P *M"]) -> Float[Tensor, "N D *M"]:
        parts = values.unflatten(1, (-1, each)).sum(2)
        shape = (1, *mine.shape, *(1 for _ in values.shape[2:]))
        return (parts[:, None] * mine.to(values.dtype).view(shape)).sum(2)

    def mean(values: Float[Tensor, "N P *M"]) -> Float[Tensor, "D *M"]:
        # in two steps: a GPU takes its time over one sum of very many numbers
        counts = (each * mine.sum(1)).to(values.dtype).view(-1, *(1 for _ in values.shape[2:]))
        return by_block(values).mean(0) / counts

    one_hot = torch.nn.functional.one_hot(route, post.shape[-1]).to(post.dtype)
    entropies = (mean(-(log.detach().exp() * log.detach()).sum(-1)) for log in (log_q, log_p))
    return kl_at, by_block(kl_at), mean(log_q.exp()), mean(one_hot), *entropies


def load_balance(chance: Float[Tensor, "*D E"], used: Float[Tensor, "*D E"]) -> Float[Tensor, "*D"]:
    """Switch loss E * sum_e f_e * P_e of a block: f = share of positions sent to e, P = mean router probability.

    1 when experts are used evenly, E when one takes all.
    """
    return chance.shape[-1] * (used * chance).sum(-1)


def usage_shortfall(chance: Float[Tensor, "*D E"], floor: float) -> Float[Tensor, "*D"]:
    """max(0, floor - H(mean router distribution)) of a block, in nats: 0 as long as enough experts are in use."""
    return torch.relu(floor + torch.special.xlogy(chance, chance).sum(-1))


def routing_entropy(logits: Float[Tensor, "B P E"]) -> Float[Tensor, ""]:
    """Mean entropy of the router's distribution over positions, in nats (0: certain, log E: indifferent)."""
    log_rho = torch.log_softmax(logits, -1)
    return -(log_rho.exp() * log_rho).sum(-1).mean()
