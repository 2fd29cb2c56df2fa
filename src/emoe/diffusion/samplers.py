"""Samplers: free functions over a `denoise` callable (Algo. 2), and two that do less work for the same law."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as nnf

from emoe.diffusion.categorical import draw_categorical
from emoe.diffusion.masking import NEG_INF, draw_revealed, unmask_step
from emoe.diffusion.schedule import Schedule
from emoe.diffusion.times import grid_times
from emoe.rng import Rng
from emoe.types import Denoised, StepEvent

Denoise = Callable[[Int[Tensor, "B L"], Float[Tensor, " B"], Rng], Denoised]
"""(x_t, t, rng) -> log x_theta under a latent drawn from the prior: one network call, one NFE."""

Draft = Callable[[Int[Tensor, "B L"], Float[Tensor, " B"], Rng], Float[Tensor, "B L K"]]
"""The same up to the head: features of every position."""

Read = Callable[[Float[Tensor, "N K"]], Float[Tensor, "N V"]]
"""The head: features of any positions to logits, the mask's at -inf."""

OnStep = Callable[[StepEvent], None]
READ_AT_ONCE = 4096  # positions whose logits are made, and drawn from in float64, at a time


@torch.no_grad()
def ancestral(
    denoise: Denoise,
    x: Int[Tensor, "B L"],
    schedule: Schedule,
    steps: int,
    rng: Rng,
    *,
    mask_id: int,
    nucleus: float = 1.0,
    on_step: OnStep | None = None,
) -> Int[Tensor, "B L"]:
    """Run the T-step reverse chain from x (masks where tokens are wanted) on the grid t_i = i / T (Algo. 2).

    A fresh latent is drawn at every step. Tokens that are given stay as they are. Exactly `steps` network calls. With
    `nucleus` below 1 tokens are drawn from the most likely ones only, see `top_p`; that is another law.
    """
    times = grid_times(steps)
    for i in range(steps, 0, -1):
        rng.at(i)
        t = torch.full((len(x),), times[i], device=x.device)
        out = denoise(x, t, rng)
        x, revealed = unmask_step(
            top_p(out.log_x_theta, nucleus),
            x,
            *_alphas(schedule, times, i),
            mask_id,
            reveal=rng.stream("reveal"),
            token=rng.stream("token"),
        )
        if on_step is not None:
            on_step(StepEvent(i, times[i], x, revealed, out.latent))
    return x


@torch.no_grad()
def cached(
    denoise: Denoise,
    x: Int[Tensor, "B L"],
    schedule: Schedule,
    steps: int,
    rng: Rng,
    *,
    mask_id: int,
    nucleus: float = 1.0,
    on_step: OnStep | None = None,
) -> Int[Tensor, "B L"]:
    """`ancestral`, where a row that a step left as it was keeps its prediction: only changed rows are run again.

    For networks that do not read the time. Without a latent the prediction is then a function of the row, and equal
    streams give the samples of `ancestral`. With a latent z the law is the same: that nothing was revealed depends on
    the reveal noise alone, so given that event z is still a draw of p(z | x), and it is dropped once a token was
    drawn under it. Rows without masks are run no more. It holds B * L * V numbers.
    """
    times = grid_times(steps)
    held: Tensor | None = None
    changed = torch.ones(len(x), dtype=torch.bool, device=x.device)
    for i in range(steps, 0, -1):
        rng.at(i)
        run = changed & (x == mask_id).any(-1)
        if run.any():
            part = x[run]
            out = top_p(denoise(part, torch.full((len(part),), times[i], device=x.device), rng).log_x_theta, nucleus)
            held = out.new_zeros(len(x), *out.shape[1:]) if held is None else held
            held[run] = out
        revealed = torch.zeros_like(x, dtype=torch.bool)
        if held is not None:
            x, revealed = unmask_step(
                held,
                x,
                *_alphas(schedule, times, i),
                mask_id,
                reveal=rng.stream("reveal"),
                token=rng.stream("token"),
            )
        changed = revealed.any(-1)
        if on_step is not None:
            on_step(StepEvent(i, times[i], x, revealed, None))
    return x


@torch.no_grad()
def reveal_first(
    draft: Draft,
    read: Read,
    x: Int[Tensor, "B L"],
    schedule: Schedule,
    steps: int,
    rng: Rng,
    *,
    mask_id: int,
    nucleus: float = 1.0,
    on_step: OnStep | None = None,
) -> Int[Tensor, "B L"]:
    """`ancestral` in another order: which positions are revealed, then the network, then the head and tokens there.

    Whether a position is revealed does not depend on logits or latent, so the law is that of `ancestral`, also where
    the network reads the time. Equal streams reveal the same positions as there; the tokens differ, since their noise
    is drawn for revealed positions alone. Over a run every position is read once, whatever the number of steps, and a
    row of which a step reveals nothing is not run in it.
    """
    times = grid_times(steps)
    for i in range(steps, 0, -1):
        rng.at(i)
        revealed = draw_revealed(x, *_alphas(schedule, times, i), mask_id, rng.stream("reveal"))
        run = revealed.any(-1)
        if run.any():
            part = x[run]
            h = draft(part, torch.full((len(part),), times[i], device=x.device), rng)
            tokens = [
                draw_categorical(top_p(read(some), nucleus), rng.stream("token"))
                for some in h[revealed[run]].split(READ_AT_ONCE)
            ]
            x = x.masked_scatter(revealed, torch.cat(tokens))
        if on_step is not None:
            on_step(StepEvent(i, times[i], x, revealed, None))
    return x


def top_p(logits: Float[Tensor, "*S V"], p: float) -> Float[Tensor, "*S V"]:
    """Log-probabilities of the nucleus: the most likely symbols, up to the one with which their sum reaches p.

    The others get -inf; what is left is not normalised again. Sums are in float64, of equals the first comes first,
    and the most likely symbol always stays. p = 1 returns its argument.
    """
    if p >= 1:
        return logits
    log_probs = torch.log_softmax(logits.double(), -1)
    ranked, order = log_probs.sort(stable=True, dim=-1, descending=True)
    before = nnf.pad(ranked.exp().cumsum(-1)[..., :-1], (1, 0))  # probability of those that come earlier
    outside = torch.zeros_like(log_probs, dtype=torch.bool).scatter(-1, order, before >= p)
    return log_probs.masked_fill(outside, NEG_INF)


def _alphas(schedule: Schedule, times: list[float], i: int) -> tuple[float, float]:
    """alpha_s and alpha_t of step i."""
    # t_0 = 0 means alpha_s = 1: the last step reveals everything, whatever the schedule's rounding says.
    alpha_s = 1.0 if i == 1 else float(schedule.alpha(torch.tensor(times[i - 1], dtype=torch.float64)))
    return alpha_s, float(schedule.alpha(torch.tensor(times[i], dtype=torch.float64)))
