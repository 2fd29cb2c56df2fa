"""The discrete latent: KL of posterior and prior routes (Eq. 7-8), expert usage, balance losses, collapse."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from emoe.diffusion.categorical import categorical_kl, each_component
from emoe.diffusion.masking import NEG_INF, subs
from emoe.kernels import compiled
from emoe.routing.routes import each_expert
from emoe.types import Gate, Mixture, Tokens


class RouteStats(NamedTuple):
    """Posterior and prior along the drawn routes, for D blocks with P positions in all."""

    kl_at: Float[Tensor, "N P"]  # KL(Cat(post) || Cat(prior)) at each position, blocks one after the other
    kl: Float[Tensor, "N D"]  # summed over the positions of a block (Eq. 8)
    chance: Float[Tensor, "D E"]  # mean probability of each expert under the posterior
    used: Float[Tensor, "D E"]  # share of positions that run each expert
    post_entropy: Float[Tensor, " D"]  # means over positions, without a gradient
    prior_entropy: Float[Tensor, " D"]


@dataclass(frozen=True)
class RouteLatent:
    """Routes z ~ q(z | x0, xt) of N rows with the router logits of both passes along them, block by block.

    Both sets of logits come from passes that ran the posterior's routes at all positions; then the sum over blocks,
    averaged over z ~ q, is the KL of the whole route distributions of Eq. 7.
    """

    post: tuple[Float[Tensor, "N _P E"], ...]
    prior: tuple[Float[Tensor, "N _P E"], ...]
    routes: tuple[Int[Tensor, "N _P"], ...]  # the drawn experts
    last: Float[Tensor, "N P E"] | None = None  # router logits of a last block that is summed out instead of drawn

    @cached_property
    def stats(self) -> RouteStats:
        """Statistics of all blocks at once: on a GPU each small tensor takes as long as a large one."""
        sizes = tuple(block.shape[1] for block in self.post)
        post, prior, routes = (torch.cat(list(blocks), 1) for blocks in (self.post, self.prior, self.routes))
        return RouteStats(*_stats(post, prior, routes, sizes))

    def kl(self) -> Float[Tensor, " N"]:
        """Return KL(q(z | x0, xt) || p(z | xt)) of each row (Eq. 8)."""
        return self.stats.kl.sum(-1)

    def log_probs(self, side: Sequence[Float[Tensor, "N _P E"]]) -> list[Float[Tensor, "N _P"]]:
        """Return log-probabilities of the drawn route at each position, block by block; `side` is `post` or `prior`."""
        pairs = zip(side, self.routes, strict=True)
        return [torch.log_softmax(logits, -1).gather(-1, route[..., None]).squeeze(-1) for logits, route in pairs]

    def log_ratio(self) -> Float[Tensor, " N"]:
        pairs = zip(self.log_probs(self.prior), self.log_probs(self.post), strict=True)
        return torch.stack([(p.double() - q.double()).sum(-1) for p, q in pairs]).sum(0)

    def imbalance(self, floor: float | None) -> Float[Tensor, ""]:
        """Return Switch's loss E sum_e f_e P_e, from 1 to E; f is the share of positions of e, P its mean probability.

        With a `floor` instead max(0, floor - H(P)) in nats, in a last block that is summed out too. Means over blocks.
        """
        chance = self.stats.chance
        if floor is None:
            return (chance.shape[-1] * (self.stats.used * chance).sum(-1)).mean()
        if self.last is not None:
            chance = torch.cat([chance, torch.softmax(self.last, -1).mean((0, 1))[None]])
        return torch.relu(floor + torch.special.xlogy(chance, chance).sum(-1)).mean()

    def log(self, *, by_position: bool) -> dict[str, Tensor]:
        """Return for each block route KL (mean over positions, and at each), entropy of both routers, expert usage."""
        stats, sizes = self.stats, [block.shape[1] for block in self.post]
        kl, log = stats.kl.detach().mean(0), {}
        for d, (size, at) in enumerate(zip(sizes, stats.kl_at.detach().split(sizes, dim=1), strict=True)):
            log[f"route_kl/block{d + 1}"] = kl[d] / size
            if by_position:
                log[f"route_kl_at/block{d + 1}"] = at.mean(0)
            log[f"post_entropy/block{d + 1}"] = stats.post_entropy[d]
            log[f"prior_entropy/block{d + 1}"] = stats.prior_entropy[d]
            log[f"usage/block{d + 1}"] = stats.used[d]
        if self.last is not None:
            number, log_rho = len(self.post) + 1, torch.log_softmax(self.last.detach(), -1)
            log[f"prior_entropy/block{number}"] = -(log_rho.exp() * log_rho).sum(-1).mean()
            log[f"usage/block{number}"] = torch.softmax(self.last.detach(), -1).mean((0, 1))
        return log


@compiled
def _stats(
    post: Float[Tensor, "N P E"], prior: Float[Tensor, "N P E"], route: Int[Tensor, "N P"], sizes: tuple[int, ...]
) -> tuple[Tensor, ...]:
    log_q, log_p = torch.log_softmax(post, -1), torch.log_softmax(prior, -1)
    kl_at = categorical_kl(log_q, log_p)
    each = math.gcd(*sizes)  # positions are summed in runs of this size, then the runs of each block
    start = torch.arange(0, sum(sizes), each, device=post.device)
    ends = [sum(sizes[: d + 1]) for d in range(len(sizes))]
    member = torch.stack([(start >= end - size) & (start < end) for end, size in zip(ends, sizes, strict=True)])

    def by_block(values: Float[Tensor, "N P *M"]) -> Float[Tensor, "N D *M"]:
        parts = values.unflatten(1, (-1, each)).sum(2)
        shape = (1, *member.shape, *(1 for _ in values.shape[2:]))
        return (parts[:, None] * member.to(values.dtype).view(shape)).sum(2)

    def mean(values: Float[Tensor, "N P *M"]) -> Float[Tensor, "D *M"]:
        # in two steps: one sum of very many numbers is slow on a GPU
        counts = (each * member.sum(1)).to(values.dtype).view(-1, *(1 for _ in values.shape[2:]))
        return by_block(values).mean(0) / counts

    one_hot = torch.nn.functional.one_hot(route, post.shape[-1]).to(post.dtype)
    entropies = (mean(-(log.detach().exp() * log.detach()).sum(-1)) for log in (log_q, log_p))
    return kl_at, by_block(kl_at), mean(log_q.exp()), mean(one_hot), *entropies


def describe_collapse(record: Mapping[str, Any], experts: int) -> str | None:
    """Describe posterior collapse, with remedies, from one log record; None if routes are in use.

    Collapsed: in every drawn block the entropy of the usage is below 0.1 nats, or the mean KL of posterior and prior is
    below 1e-4 nats per position.
    """
    blocks = [name.rpartition("/block")[2] for name in record if name.startswith("route_kl/block")]
    if not blocks or experts == 1:
        return None
    shares = [[float(share) for share in record[f"usage/block{block}"]] for block in blocks]
    entropy = [-sum(share * math.log(share) for share in row if share > 0) for row in shares]
    kl = [float(record[f"route_kl/block{block}"]) for block in blocks]
    where = f"in each of the blocks {', '.join(blocks)}" if len(blocks) > 1 else f"in block {blocks[0]}"
    if all(nats < 0.1 for nats in entropy):
        fault = f"one expert does nearly all the work {where} (entropy of usage at most {max(entropy):.2g} nats)"
    elif all(nats < 1e-4 for nats in kl):
        fault = f"routes carry no information about the clean row {where} (KL at most {max(kl):.2g} nats per position)"
    else:
        return None
    return f"posterior collapse: {fault}; try method.balance, a ramp of method.kl_weight, or method.compare"


@torch.no_grad()
def enumerate_routes(method: Any, xt: Tokens, t: float) -> Mixture:
    """Return the law of one step of E-MoE as a mixture over routes of all blocks but the last, R = E^(L (D - 1)).

    Given these, the routes of the last block are independent over positions and are summed out,
    p_r(x^l) = sum_e p(z_D^l = e | z_<D, xt) p(x^l | xt, z_<D, e). The prior is sharpened as in the sampler.
    """
    (rows, length), backbone, experts = xt.shape, method.backbone, method.config.experts
    blocks = backbone.routed_blocks - 1
    count = experts ** (length * blocks)
    digits = experts ** torch.arange(length * blocks, device=xt.device)
    what = f"{experts}^({length} * {blocks}) routes in all blocks but the last"
    weights, tokens = [], []
    for x, number in each_component(xt, count, what):
        z = (number[:, None] // digits % experts).view(len(x), blocks, length, 1)

        def forced(block: int, logits: Tensor, z: Tensor = z) -> Gate:
            return Gate(z[:, block], torch.ones_like(z[:, block], dtype=logits.dtype))

        out = backbone(x, torch.full((len(x),), t, device=x.device), route=each_expert(forced, blocks))
        each = torch.softmax(backbone.read(out.h).unflatten(0, (len(x), experts)).double(), -1)
        *log_rho, last = (_sharpen(logits.double(), method.config.route_tau) for logits in out.route_logits)
        chosen = [rho.gather(-1, z[:, d]).sum((1, 2)) for d, rho in enumerate(log_rho)]
        weights.append(sum(chosen, each.new_zeros(len(x))))
        tokens.append(subs(torch.einsum("nle,nelv->nlv", last.exp(), each).log(), x, method.space.mask_id))
    return Mixture(*(torch.cat(values).unflatten(0, (rows, count)) for values in (weights, tokens)))


def _sharpen(logits: Float[Tensor, "B L E"], route_tau: float) -> Float[Tensor, "B L E"]:
    """Return log p(z) of the routes that the sampler draws: softmax(log rho / tau), or arg max at tau = 0."""
    if route_tau == 0:
        best = logits.argmax(-1, keepdim=True)
        return torch.full_like(logits, NEG_INF).scatter(-1, best, 0.0)
    return torch.log_softmax(torch.log_softmax(logits, -1) / route_tau, -1)
