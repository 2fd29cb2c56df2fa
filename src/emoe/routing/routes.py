"""Route policies: how a router's logits become a choice of experts (Eq. 10-11, App. B.1).

A policy is called once per routed block, in order. Posterior, prior, sampling and the collapse ablation are
policies handed to one network, not code paths inside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from emoe.diffusion.categorical import gumbel
from emoe.kernels import compiled
from emoe.types import Gate, Route

Gradient = Literal["top-k", "selected", "all", "reinmax", "gumbel-rao", "none"]
Redraw = Literal["all", "block", "positions"]
Carriers = Literal["all", "spread"]
RAO_DRAWS = 16  # conditional Gumbels that Gumbel-Rao averages over
REDRAWN = 0.25  # share of positions that differ between draws where only some positions are drawn anew


def straight_through(
    logits: Float[Tensor, "B P E"],
    noise: Float[Tensor, "B P E"],
    relax_tau: Tensor | float,
    *,
    top_k: int = 2,
    gradient: Gradient = "top-k",
    generator: torch.Generator | None = None,
) -> Gate:
    """The drawn expert, with the gradient of relaxed weights (Eq. 10-11) or of another estimator.

    z~ = softmax((log rho + g) / tau) (Eq. 10); the k largest weights are kept and renormalised (Eq. 11); the first
    is executed alone. Logits stand for log rho, where a constant makes no difference. Values are (1, 0, ...), gradients
    those of the renormalised weights:

    - "top-k": all k weights get a gradient; the others run forward only.
    - "selected": only the weight of the drawn expert does (it collapsed in measurements; kept for the record).
    - "all": all E weights, without renormalisation.
    - "reinmax": all E weights; second-order accurate (Liu et al. 2023), see `reinmax_weights`.
    - "gumbel-rao": all E weights, averaged over noise given the drawn expert (Paulus et al. 2021); needs `generator`.
    - "none": no gradient; for estimators that look at whole draws.
    """
    if gradient in ("top-k", "selected", "all"):
        count = logits.shape[-1] if gradient == "all" else top_k
        return Gate(*_relaxed(logits, noise, relax_tau, count, 1 if gradient == "selected" else count))
    perturbed = logits + noise.to(logits.dtype)
    expert = largest(perturbed, 1 if gradient == "none" else logits.shape[-1])
    if gradient == "none":
        return Gate(expert, torch.ones_like(expert, dtype=logits.dtype))
    log_rho = torch.log_softmax(logits, -1)
    if gradient == "reinmax":
        weight = reinmax_weights(log_rho, expert[..., 0], relax_tau).gather(-1, expert)
    else:
        assert generator is not None
        weight = gumbel_rao_weights(log_rho, expert[..., 0], relax_tau, generator).gather(-1, expert)
    return Gate(expert, _hardened(weight))


@compiled
def _relaxed(
    logits: Float[Tensor, "B P E"], noise: Float[Tensor, "B P E"], tau: Tensor | float, count: int, kept: int
) -> tuple[Int[Tensor, "B P k"], Float[Tensor, "B P k"]]:
    """The first `kept` of `count` experts by relaxed weight, with weights renormalised over `count` (Eq. 10-11)."""
    perturbed = logits + noise.to(logits.dtype)
    expert = largest(perturbed, count)
    relaxed = torch.softmax(perturbed / tau, dim=-1).gather(-1, expert)
    weight = relaxed / relaxed.sum(-1, keepdim=True)
    return expert[..., :kept], _hardened(weight[..., :kept])


def _hardened(weight: Float[Tensor, "B P k"]) -> Float[Tensor, "B P k"]:
    """(1, 0, ..., 0) with the gradient of the weights."""
    hard = (torch.arange(weight.shape[-1], device=weight.device) == 0).to(weight.dtype)
    # This order of operations gives exactly 1 and 0 in every precision; 1 + w - w.detach() does not.
    return (weight - weight.detach()) + hard


def largest(scores: Float[Tensor, "*N E"], count: int) -> Int[Tensor, "*N k"]:
    """Indices of the `count` largest scores, the largest first."""
    if count > 2:
        return scores.topk(count, dim=-1).indices
    first = scores.argmax(-1, keepdim=True)  # two passes over few numbers are quicker than a sort
    if count == 1:
        return first
    is_first = torch.arange(scores.shape[-1], device=scores.device) == first
    return torch.cat([first, scores.masked_fill(is_first, float("-inf")).argmax(-1, keepdim=True)], -1)


def reinmax_weights(
    log_rho: Float[Tensor, "B P E"], drawn: Int[Tensor, "B P"], tau: Tensor | float
) -> Float[Tensor, "B P E"]:
    """Weights whose gradient is ReinMax's: 2 * that of pi_1 at log rho minus half that of pi_0 = softmax(log rho).

    pi_D = (onehot(z) + softmax(log rho / tau)) / 2 is held fixed; pi_1 = softmax(log pi_D + (log rho - [log rho])),
    with [.] held fixed, equals it and moves with the logits (Algo. 2 of "Bridging Discrete and Backpropagation").
    For tau = 1 the mean of the gradient is exact where the loss is quadratic in the one-hot vector.
    """
    one_hot = torch.nn.functional.one_hot(drawn, log_rho.shape[-1]).to(log_rho.dtype)
    middle = (one_hot + torch.softmax(log_rho / tau, -1)).detach() / 2
    return 2 * torch.softmax(middle.log() + (log_rho - log_rho.detach()), -1) - torch.softmax(log_rho, -1) / 2


def gumbel_rao_weights(
    log_rho: Float[Tensor, "B P E"], drawn: Int[Tensor, "B P"], tau: Tensor | float, generator: torch.Generator
) -> Float[Tensor, "B P E"]:
    """Mean over noise g given arg max = z of softmax((log rho + g) / tau); the noise is held fixed in the backward.

    Given z, the largest perturbed logit is -log(e_z) for e ~ Exp(1) (rho sums to one) and the others are
    -log(e_i / rho_i + e_z).
    """
    shape = (RAO_DRAWS, *log_rho.shape)
    exponential = (-gumbel(shape, generator)).exp().to(log_rho.dtype)
    one_hot = torch.nn.functional.one_hot(drawn, log_rho.shape[-1]).bool().expand(shape)
    top = exponential.gather(-1, drawn[..., None].expand(*shape[:-1], 1))
    perturbed = torch.where(one_hot, -top.log(), -(exponential / log_rho.exp() + top).log()).detach()
    return torch.softmax((perturbed + (log_rho - log_rho.detach())) / tau, -1).mean(0)


def draw(
    generator: torch.Generator,
    relax_tau: Tensor | float,
    *,
    top_k: int = 2,
    gradient: Gradient = "top-k",
    draws: int = 1,
    redraw: Redraw = "all",
    blocks: int = 1,
) -> Route:
    """Draw each route from the router: arg max of (log rho + Gumbel), exact at every relax_tau (Eq. 10-11).

    With `draws` = K the first block makes K draws of every row, and later blocks go on with B * K rows. `redraw` says
    where they may differ: "all" draws everything K times; "block" only one of the `blocks`, another for each row;
    "positions" a random quarter of the positions of each block. The rest shares its noise, so that it is the same as
    long as the logits are; every single draw still follows the router.
    """
    chosen: list[Tensor] = []  # the block that each row draws anew

    def noise_of(block: int, rows: int, positions: int, experts: int) -> Float[Tensor, "B P E"]:
        fresh = gumbel((rows * draws, positions, experts), generator)
        if draws == 1 or redraw == "all":
            return fresh
        held = gumbel((rows, positions, experts), generator)
        if redraw == "block":
            if block == 0:
                chosen.append(torch.randint(blocks, (rows, 1), generator=generator, device=generator.device))
            anew = (chosen[-1] == block).expand(-1, positions)
        else:
            anew = torch.rand(rows, positions, generator=generator, device=generator.device) < REDRAWN
        first = torch.arange(rows * draws, device=fresh.device) // draws
        return torch.where(anew[first, :, None], fresh, held[first])

    def policy(block: int, logits: Float[Tensor, "B P E"]) -> Gate:
        repeat = draws if block == 0 else 1
        logits = logits.repeat_interleave(repeat, dim=0) if repeat > 1 else logits
        noise = noise_of(block, len(logits) // draws, *logits.shape[1:])
        gate = straight_through(logits, noise, relax_tau, top_k=top_k, gradient=gradient, generator=generator)
        return replace(gate, draws=repeat)

    return policy


def replay(gates: Sequence[Gate]) -> Route:
    """Force the routes of an earlier pass (the noisy pass of Algo. 1 runs the posterior's z)."""

    def policy(block: int, logits: Float[Tensor, "B P E"]) -> Gate:
        return gates[block]

    return policy


def paired(inner: Route, blocks: int, coding: int | None = None, coded: Bool[Tensor, " B"] | None = None) -> Route:
    """Both passes of Algo. 1 in one call on [x0; xt]: the clean half chooses by `inner`, both halves run its choice.

    In the last of the `blocks` only the noisy half runs on (`Gate.keep_from`): the clean half has no further use once
    its last router has spoken. With `coding` blocks, positions that do not carry choose by the router of the noisy
    half (see `carried`). Rows that are not `coded` choose nothing: both halves run the mean by the noisy half's router.
    """

    def policy(block: int, logits: Float[Tensor, "B P E"]) -> Gate:
        half = len(logits) // 2
        gate = inner(block, carried(logits[:half], logits[half:], block, coding, coded))
        if coded is not None:
            gate = averaged(gate, logits[half:], coded)
        if block == blocks - 1:
            return replace(gate, keep_from=half)
        return replace(gate, expert=torch.cat([gate.expert] * 2), weight=torch.cat([gate.weight] * 2))

    return policy


def carried(
    post: Float[Tensor, "N P E"],
    prior: Float[Tensor, "N P E"],
    block: int,
    coding: int | None,
    coded: Bool[Tensor, " B"] | None = None,
) -> Float[Tensor, "N P E"]:
    """The posterior's logits: those of the clean half where a position carries in this block, else the prior's.

    None: all positions carry in every block. A number C: position l carries in block l mod C alone, and nobody in
    later blocks. Routes of one block are independent given the earlier blocks, and the prior of a block reads those,
    so positions of different blocks are coded one after the other: what an earlier one has said costs a later one
    nothing. In rows that are not `coded` nobody carries, so that their KL is 0. N = B, or K draws of each row.
    """
    if coding is not None:
        post = torch.where(carries(block, coding, post.shape[1], post.device)[:, None], post, prior)
    if coded is not None:
        post = torch.where(coded.repeat_interleave(len(post) // len(coded))[:, None, None], post, prior)
    return post


def averaged(gate: Gate, prior: Float[Tensor, "N P E"], coded: Bool[Tensor, " B"]) -> Gate:
    """The gate where rows are `coded`, and all experts with the prior's probabilities where they are not.

    There the step has no latent: it is one factorised step, as that of `greedy`, but close to the mean of the mixture.
    """
    mean = torch.softmax(prior, -1)
    again = len(gate.expert) // len(mean)
    drawn = mean.new_zeros(len(gate.expert), *mean.shape[1:]).scatter(-1, gate.expert, gate.weight.to(mean.dtype))
    here = coded.repeat_interleave(len(gate.expert) // len(coded))[:, None, None]
    mix = torch.where(here, drawn, mean.repeat_interleave(again, dim=0) if again > 1 else mean)
    weight, expert = mix.sort(dim=-1, descending=True, stable=True)  # the first is what pictures show
    return replace(gate, expert=expert, weight=weight, mixed=True)


def averaging(inner: Route, coded: Bool[Tensor, " B"]) -> Route:
    """`inner` where rows are coded, and the mean of all experts elsewhere (see `averaged`)."""

    def policy(block: int, logits: Float[Tensor, "B P E"]) -> Gate:
        return averaged(inner(block, logits), logits, coded)

    return inner if bool(coded.all()) else policy


def carries(block: int, coding: int, positions: int, device: torch.device) -> Bool[Tensor, " P"]:
    """Which positions carry in a block, if they are spread over the first `coding` blocks."""
    return torch.arange(positions, device=device) % coding == block


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
