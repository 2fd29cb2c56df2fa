"""Samplers: free functions over a `denoise` callable (Algo. 2)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from emoe.diffusion.masking import unmask_step
from emoe.diffusion.schedule import Schedule
from emoe.diffusion.times import grid_times
from emoe.rng import Rng
from emoe.types import Denoised, StepEvent

Denoise = Callable[[Int[Tensor, "B L"], Float[Tensor, " B"], Rng], Denoised]
"""(x_t, t, rng) -> log x_theta under a latent drawn from the prior: one network call, one NFE."""


@torch.no_grad()
def ancestral(
    denoise: Denoise,
    x: Int[Tensor, "B L"],
    schedule: Schedule,
    steps: int,
    rng: Rng,
    *,
    mask_id: int,
    on_step: Callable[[StepEvent], None] | None = None,
) -> Int[Tensor, "B L"]:
    """Run the T-step reverse chain from x (masks where tokens are wanted) on the grid t_i = i / T (Algo. 2).

    A fresh latent is drawn at every step. Tokens that are given stay as they are. Exactly `steps` network calls.
    """
    times = grid_times(steps)
    for i in range(steps, 0, -1):
        rng.at(i)
        t = torch.full((len(x),), times[i], device=x.device)
        out = denoise(x, t, rng)
        # t_0 = 0 means alpha_s = 1: the last step reveals everything, whatever the schedule's rounding says.
        alpha_s = 1.0 if i == 1 else float(schedule.alpha(torch.tensor(times[i - 1], dtype=torch.float64)))
        alpha_t = float(schedule.alpha(torch.tensor(times[i], dtype=torch.float64)))
        x, revealed = unmask_step(
            out.log_x_theta, x, alpha_s, alpha_t, mask_id, reveal=rng.stream("reveal"), token=rng.stream("token")
        )
        if on_step is not None:
            on_step(StepEvent(i, times[i], x, revealed, out.latent))
    return x
