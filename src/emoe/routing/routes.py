"""Route policies: how a router's logits become a choice of experts (Eq. 10-11, App. B.1).

A policy is called once per routed block, in order. Posterior, prior, sampling and the collapse ablation are
policies handed to one network, not code paths inside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from emoe.diffusion.categorical import gumbel
from emoe.types import Gate, Route

Gradient = Literal["top-k", "selected", "all"]


def straight_through(
    log_rho: Float[Tensor, "B P E"],
    noise: Float[Tensor, "B P E"],
    relax_tau: Tensor | float,
    *,
    top_k: int = 2,
    gradient: Gradient = "top-k",
) -> Gate:
    """The drawn expert, with the gradient of the relaxed weights (Eq. 10-11).

    z~ = softmax((log rho + g) / tau) (Eq. 10); the k largest weights are kept and renormalised (Eq. 11); the first
    is executed alone. Values are (1, 0, ...), gradients those of the renormalised weights:

    - "top-k": all k weights get a gradient; the others run forward only.
    - "selected": only the weight of the drawn expert does (it collapsed in measurements; kept for the record).
    - "all": all E weights, without renormalisation.
    """
    perturbed = log_rho + noise.to(log_rho.dtype)
    k = log_rho.shape[-1] if gradient == "all" else top_k
    expert = perturbed.topk(k, dim=-1).indices
    relaxed = torch.softmax(perturbed / relax_tau, dim=-1).gather(-1, expert)
    weight = relaxed / relaxed.sum(-1, keepdim=True)
    if gradient == "selected":
        expert, weight = expert[..., :1], weight[..., :1]
    hard = torch.zeros_like(weight)
    hard[..., 0] = 1
    # This order of operations gives exactly 1 and 0 in every precision; 1 + w - w.detach() does not.
    return Gate(expert, (weight - weight.detach()) + hard)


def draw(
    generator: torch.Generator, relax_tau: Tensor | float, *, top_k: int = 2, gradient: Gradient = "top-k"
) -> Route:
    """Draw each route from the router: arg max of (log rho + Gumbel), exact at every relax_tau (Eq. 10-11)."""

    def policy(block: int, logits: Float[Tensor, "B P E"]) -> Gate:
        noise = gumbel(tuple(logits.shape), generator)
        return straight_through(torch.log_softmax(logits, -1), noise, relax_tau, top_k=top_k, gradient=gradient)

    return policy


def replay(gates: Sequence[Gate]) -> Route:
    """Force the routes of an earlier pass (the noisy pass of Algo. 1 runs the posterior's z)."""

    def policy(block: int, logits: Float[Tensor, "B P E"]) -> Gate:
        return gates[block]

    return policy


def paired(inner: Route, blocks: int) -> Route:
    """Both passes of Algo. 1 in one call on [x0; xt]: the clean half chooses by `inner`, both halves run its choice.

    In the last routed block only the noisy half runs on (`Gate.keep_from`): the clean half has no further use once
    its last router has spoken.
    """

    def policy(block: int, logits: Float[Tensor, "B P E"]) -> Gate:
        half = len(logits) // 2
        gate = inner(block, logits[:half])
        if block == blocks - 1:
            return Gate(gate.expert, gate.weight, keep_from=half)
        return Gate(torch.cat([gate.expert, gate.expert]), torch.cat([gate.weight, gate.weight]))

    return policy


def sharpened(generator: torch.Generator, route_tau: float) -> Route:
    """Draw from the router sharpened by tau_s: arg max of (log rho / tau_s + Gumbel) (App. C.3).

    route_tau = 1 is the model's prior; route_tau = 0 is `greedy`.
    """
    if route_tau == 0:
        return greedy()

    def policy(block: int, logits: Float[Tensor, "B P E"]) -> Gate:
        return _hard(
            torch.log_softmax(logits.double(), -1) / route_tau + gumbel(tuple(logits.shape), generator), logits
        )

    return policy


def greedy() -> Route:
    """Always the most probable expert: the mixture collapses to one factorised step (App. C.3)."""

    def policy(block: int, logits: Float[Tensor, "B P E"]) -> Gate:
        return _hard(logits, logits)

    return policy


def _hard(scores: Float[Tensor, "B P E"], logits: Float[Tensor, "B P E"]) -> Gate:
    expert = scores.argmax(-1, keepdim=True)
    return Gate(expert, torch.ones_like(expert, dtype=logits.dtype))
