"""Route policies: how router logits become a choice of experts (Eq. 10-11, App. B.1).

A policy is called once per routed block, in order. Posterior, prior, enumeration and the collapse ablation are
policies of one network, not code paths inside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from emoe.diffusion.categorical import gumbel, gumbel_from_uniform
from emoe.kernels import compiled, compiled_always
from emoe.types import Gate, Route, RouterLogits


def draw(generator: torch.Generator, relax_tau: Tensor | float, *, top_k: int = 2, draws: int = 1) -> Route:
    """Draw each route from the router: arg max of (log rho + Gumbel), exact at every relax_tau (Eq. 10-11).

    z~ = softmax((log rho + g) / tau) (Eq. 10); the k largest weights are kept and renormalised (Eq. 11); the first is
    executed alone. Values are (1, 0, ..., 0), gradients those of the renormalised weights. With `top_k` = 0 the gate
    has no gradient. With `draws` = K the first block draws K times for every row, and later blocks get K times as many
    rows.
    """

    def policy(block: int, logits: RouterLogits) -> Gate:
        repeat = draws if block == 0 else 1
        logits = logits.repeat_interleave(repeat, dim=0) if repeat > 1 else logits
        noise = gumbel(tuple(logits.shape), generator)
        if top_k:
            return Gate(*_relaxed(logits, noise, relax_tau, top_k), draws=repeat)
        return replace(_hard(logits + noise.to(logits.dtype), logits), draws=repeat)

    return policy


@compiled
def _relaxed(
    logits: RouterLogits, noise: RouterLogits, tau: Tensor | float, count: int
) -> tuple[Int[Tensor, "B P k"], Float[Tensor, "B P k"]]:
    """Return the `count` experts of largest weight; weights (1, 0, ..., 0) with renormalised gradients (Eq. 10-11)."""
    perturbed = logits + noise.to(logits.dtype)
    expert = largest(perturbed, count)
    relaxed = torch.softmax(perturbed / tau, dim=-1).gather(-1, expert)
    weight = relaxed / relaxed.sum(-1, keepdim=True)
    hard = (torch.arange(count, device=weight.device) == 0).to(weight.dtype)
    # This order of operations gives exactly 1 and 0 in every precision; 1 + w - w.detach() does not.
    return expert, (weight - weight.detach()) + hard


def largest(scores: Float[Tensor, "*N E"], count: int) -> Int[Tensor, "*N k"]:
    """Return indices of the `count` largest scores, the largest first."""
    if count > 2:
        return scores.topk(count, dim=-1).indices
    first = scores.argmax(-1, keepdim=True)  # two passes over few numbers are faster than a sort
    if count == 1:
        return first
    is_first = torch.arange(scores.shape[-1], device=scores.device) == first
    return torch.cat([first, scores.masked_fill(is_first, float("-inf")).argmax(-1, keepdim=True)], -1)


def replay(gates: Sequence[Gate]) -> Route:
    """Return the gates of an earlier pass (the noisy pass of Algo. 1 runs the posterior's z)."""

    def policy(block: int, logits: RouterLogits) -> Gate:
        return gates[block]

    return policy


def paired(inner: Route, blocks: int, turns: int = 0) -> Route:
    """Run both passes of Algo. 1 in one call on [x0; xt]: the clean half draws by `inner`, both halves run its gate.

    In the last of the `blocks` only the noisy half continues (`Gate.keep_from`), because nothing reads the clean half
    after its last router. With `turns`, positions whose turn it is not (`takes_turn`) draw by the noisy half's router.
    """

    def policy(block: int, logits: RouterLogits) -> Gate:
        half = len(logits) // 2
        chosen = logits[:half]
        if turns:
            chosen = torch.where(takes_turn(block, turns, logits)[:, None], chosen, logits[half:])
        gate = inner(block, chosen)
        if block == blocks - 1:
            return replace(gate, keep_from=half)
        return replace(gate, expert=torch.cat([gate.expert] * 2), weight=torch.cat([gate.weight] * 2))

    return policy


def takes_turn(block: int, turns: int, values: Float[Tensor, "N P *_"]) -> Bool[Tensor, " P"]:
    """Return which of the P positions choose a route of their own in a block: position l in block l mod `turns`."""
    return torch.arange(values.shape[1], device=values.device) % turns == block


def each_expert(inner: Route, last: int) -> Route:
    """Use `inner` in the blocks before `last`; in that block run every expert, as E draws of each row in order."""

    def policy(block: int, logits: RouterLogits) -> Gate:
        if block < last:
            return inner(block, logits)
        rows, positions, experts = logits.shape
        expert = torch.arange(experts, device=logits.device).repeat(rows)[:, None, None].expand(-1, positions, 1)
        return Gate(expert, torch.ones_like(expert, dtype=logits.dtype), draws=experts)

    return policy


def sharpened(generator: torch.Generator, route_tau: float) -> Route:
    """Draw from the router sharpened by tau_s: arg max of (log rho / tau_s + Gumbel) (App. C.3).

    route_tau = 1 is the model's prior; route_tau = 0 is `greedy`.
    """
    if route_tau == 0:
        return greedy()

    def policy(block: int, logits: RouterLogits) -> Gate:
        u = torch.rand(logits.shape, generator=generator, device=logits.device, dtype=torch.float64)
        return _hard(_perturbed(logits, u, route_tau), logits)

    return policy


@compiled_always
def _perturbed(logits: RouterLogits, u: RouterLogits, route_tau: float) -> RouterLogits:
    """Return log rho / tau_s + Gumbel in float64, up to a constant in each row."""
    return logits.double() / route_tau + gumbel_from_uniform(u)


def greedy() -> Route:
    """Choose the most probable expert: the mixture collapses to one factorised step (App. C.3)."""

    def policy(block: int, logits: RouterLogits) -> Gate:
        return _hard(logits, logits)

    return policy


def _hard(scores: RouterLogits, logits: RouterLogits) -> Gate:
    expert = scores.argmax(-1, keepdim=True)
    return Gate(expert, torch.ones_like(expert, dtype=logits.dtype))
