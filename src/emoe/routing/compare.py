"""Learning the posterior by comparing several draws of the latent, instead of through relaxed gates.

Three estimators (reweighted wake-sleep, VIMCO, leave-one-out) whose gradients need no relaxation of the draws and whose
values mean nothing, positions that choose routes in turn, and a last block that is summed out. Shapes: B rows, K draws
of each (N = B * K rows, the draws of a row one after the other), G groups of positions that are compared separately (1:
the row as a whole). For draw k

    f_k = w(t) log p(x0 | xt, z_k),  r_k = log p(z_k | xt),  s_k = log q(z_k | x0),

and beta is the weight of the KL (a number, or one for each row as (B, 1, 1)): the objective is
E_q[f] - beta KL(q || p), and its best posterior is proportional to p(z) exp(f / beta).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from emoe.config import Config, ConfigError, option
from emoe.diffusion.masking import log_chosen, subs
from emoe.rng import Rng
from emoe.routing.latent import RouteLatent
from emoe.routing.routes import draw, each_expert, paired, takes_turn
from emoe.types import Noised, PerRow

Draws = Float[Tensor, "B K G"]
Beta = Float[Tensor, "..."] | float
SMALLEST_BETA = 0.01  # comparisons divide by beta


@dataclass(frozen=True, kw_only=True)
class CompareConfig(Config):
    """Options of learning by comparison."""

    estimator: Literal["wake-sleep", "vimco", "leave-one-out"] = option("vimco", doc="how the posterior learns")
    draws: int = option(4, doc="routes K drawn from the posterior for each row and step, in one batched call", low=2)
    credit: Literal["row", "position"] = option(
        "row", doc="unit of comparison: whole rows, or each position (of the coarsest block)"
    )
    in_turn: bool = option(False, doc="position l chooses its route in block l mod (D - 1) only; false: in every block")
    sum_last: bool = option(
        False, doc="in training the E routes of the last block are summed out (the sampler always draws)"
    )


def wake_sleep_weights(f: Draws, r: Draws, s: Draws, beta: Beta) -> Draws:
    """Return w_k proportional to exp(f_k / beta) p(z_k) / q(z_k), which sum to one over the draws; no gradient."""
    return torch.softmax((f / torch.as_tensor(beta).clamp(min=SMALLEST_BETA) + r - s).detach(), dim=1)


def wake_sleep(f: Draws, r: Draws, s: Draws, beta: Beta) -> PerRow:
    """Reweighted wake-sleep (Bornschein & Bengio 2015): -sum_k w_k (f_k + beta r_k + s_k), summed over groups.

    As K grows, network and prior follow the gradient of beta log sum_z p(z) exp(f / beta) (the log-likelihood itself
    for beta = 1 and t = 1), the posterior that of KL(p(z | x0, xt) || q).
    """
    return -(wake_sleep_weights(f, r, s, beta) * (f + beta * r + s)).sum((1, 2))


def vimco(f: Draws, r: Draws, s: Draws, beta: Beta) -> PerRow:
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


def leave_one_out(f: Draws, r: Draws, s: Draws, beta: Beta) -> PerRow:
    """Score function with the mean of the other draws as baseline: unbiased for -E_q[f + beta (r - s)]."""
    value = (f + beta * (r - s)).detach()
    others = (value.sum(1, keepdim=True) - value) / (value.shape[1] - 1)
    return -(f + beta * r + (value - others) * s).mean(1).sum(-1)


ESTIMATORS = {"wake-sleep": wake_sleep, "vimco": vimco, "leave-one-out": leave_one_out}


def compare_draws(
    method: Any, noised: Noised, log_token: Float[Tensor, "N L"], latent: RouteLatent, beta: Tensor
) -> tuple[PerRow, PerRow, PerRow, Float[Tensor, ""]]:
    """Return recon + beta * KL per row with the estimator's gradient; recon; KL; effective draws 1 / sum_k w_k^2."""
    config: CompareConfig = method.config.compare
    rows = len(noised.x0)
    f = noised.weight[:, None, None] * log_token.unflatten(0, (rows, config.draws))
    recon, kl = -f.sum(-1).mean(1), latent.kl().view(rows, -1).mean(1)
    r, s = (value.unflatten(0, (rows, config.draws)) for value in _log_routes(method, latent))
    f = method.backbone.grouped(f, r.shape[-1])
    if config.credit == "row":
        f, r, s = (value.sum(-1, keepdim=True) for value in (f, r, s))
    weight = beta[:, None, None] if beta.ndim else beta
    surrogate = ESTIMATORS[config.estimator](f, r, s, weight)
    loss = (recon + beta * kl).detach() + (surrogate - surrogate.detach())
    return loss, recon, kl, (1 / wake_sleep_weights(f, r, s, weight).square().sum(1)).mean()


def both_passes(method: Any, noised: Noised, rng: Rng, *, draws: int) -> tuple[Float[Tensor, "N L"], RouteLatent]:
    """Return log p(x0^l | xt, z) at scored positions and the latent, by one call on [x0; xt] with K draws per row.

    With `sum_last` nothing is drawn in the last block, and its router gives the prior only:
    log p(x^l | xt, z_<D) = log sum_e p(z_D^l = e | z_<D, xt) p(x^l | xt, z_<D, e).
    """
    config, backbone, mask_id = method.config.compare, method.backbone, method.space.mask_id
    turns, blocks = turns_of(method), backbone.routed_blocks - config.sum_last
    route = paired(draw(rng.stream("route"), 1.0, top_k=0, draws=draws), blocks, turns)
    rows, times, last = torch.cat([noised.x0, noised.xt]), torch.cat([noised.t, noised.t]), None
    if config.sum_last:
        out = backbone(rows, times, route=each_expert(route, blocks))
        last, many = out.route_logits[-1], noised.repeated(draws)
        logits = _mixture(backbone.read(out.h).unflatten(0, (len(last), -1)), last, mask_id)
        log_token = torch.where(many.scored, log_chosen(subs(logits, many.xt, mask_id), many.x0), 0.0)
    else:
        log_token, out = method.predict(noised, rows, times, route=route)
    post, prior = list[Tensor](), list[Tensor]()
    for d, logits in enumerate(out.route_logits[:blocks]):
        clean, noisy = logits.chunk(2)
        clean = torch.where(takes_turn(d, turns, clean)[:, None], clean, noisy) if turns else clean
        if d == 0 and draws > 1:  # the first router reads each row once
            clean, noisy = (side.repeat_interleave(draws, dim=0) for side in (clean, noisy))
        post.append(clean)
        prior.append(noisy)
    routes = tuple(gate.expert[-len(log_token) :, :, 0] for gate in out.gates[:blocks])
    return log_token, RouteLatent(tuple(post), tuple(prior), routes, last)


def turns_of(method: Any) -> int:
    """Return the number of blocks with turns (docs/decisions/0017-positions-code-in-turn.md), or 0."""
    return max(1, method.backbone.routed_blocks - 1) if method.config.compare.in_turn else 0


def _log_routes(method: Any, latent: RouteLatent) -> tuple[Float[Tensor, "N G"], Float[Tensor, "N G"]]:
    """Return log p and log q of the drawn routes at each position of the coarsest block, summed over blocks.

    At a position whose turn it is not, q is p. Wake-sleep has a term for each of them, of which that of p suffices;
    score functions need the gradient of the law that was drawn from.
    """
    log_p, log_q = latent.log_probs(latent.prior), latent.log_probs(latent.post)
    if (turns := turns_of(method)) and method.config.compare.estimator == "wake-sleep":
        log_q = [torch.where(takes_turn(d, turns, s), s, s.detach()) for d, s in enumerate(log_q)]
    groups = min(block.shape[-1] for block in log_p)
    r, s = (torch.stack([method.backbone.grouped(block, groups) for block in side]).sum(0) for side in (log_p, log_q))
    return r, s


def check_sum_last(backbone: Any, kind: str) -> None:
    """Raise a `ConfigError` if the last block of a backbone cannot be summed out."""
    if backbone.routed_blocks < 2:
        raise ConfigError("compare.sum_last: a network of one routed block has nothing left to draw; use false")
    if not backbone.local_last_block:
        raise ConfigError(f"compare.sum_last: routes in the last block of a {kind} move other positions; use false")


def _mixture(each: Float[Tensor, "N E L V"], router: Float[Tensor, "N L E"], mask_id: int) -> Float[Tensor, "N L V"]:
    """Return log sum_e rho_e softmax(logits_e), with any number in the mask's column (its -inf gives no gradient)."""
    is_mask = torch.arange(each.shape[-1], device=each.device) == mask_id
    log_token = torch.log_softmax(each, -1).masked_fill(is_mask, 0.0)
    return torch.logsumexp(torch.log_softmax(router, -1).transpose(1, 2)[..., None] + log_token, 1)
