"""The times of a training batch (Algo. 1, line 3), and the steps of a sampler (Algo. 2)."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from emoe.config import ConfigError
from emoe.diffusion.masking import reveal_probability
from emoe.diffusion.schedule import Schedule
from emoe.kernels import compiled
from emoe.rng import Rng
from emoe.types import PerRow


def stratified_times(batch: int, rng: Rng, low: float = 0.0) -> PerRow:
    """Draw t ~ U(low, 1] for each row, one row in each of n = batch * world equal strata (Algo. 1, line 3).

    t_j = low + (1 - low) * (1 - (s_j + u_j) / n), u_j ~ U[0, 1), with s_j = (a j + b) mod n for a random b and a fixed
    stride a, which spreads any run of rows evenly over all times (docs/decisions/0013-stratified-times.md). All ranks
    draw the same numbers, and each takes its slice.
    """
    count, generator = batch * rng.world, rng.stream("time", shared=True)
    noise = torch.rand(count + 1, generator=generator, device=generator.device, dtype=torch.float64)
    return _in_strata(noise, _spread_stride(count), low)[rng.rank * batch : (rng.rank + 1) * batch]


@compiled
def _in_strata(noise: Float[Tensor, " more"], stride: int, low: float) -> Float[Tensor, " n"]:
    """Return times of all strata from n + 1 numbers of U[0, 1): first that of the shift, then one for each."""
    count = len(noise) - 1
    shift = (noise[0] * count).floor()
    strata = torch.arange(count, device=noise.device, dtype=torch.float64) * stride
    u = ((strata + shift) % count + noise[1:]) / count
    return (low + (1 - low) * (1 - u)).to(torch.float32)


@functools.cache
def _spread_stride(count: int) -> int:
    """Return the whole number nearest to count * 0.618... that is coprime to count."""
    target = count * (math.sqrt(5) - 1) / 2
    return min((a for a in range(1, count + 1) if math.gcd(a, count) == 1), key=lambda a: abs(a - target))


def weighted_times(schedule: Schedule, t: Float[Tensor, "*B"], steps: int) -> tuple[Tensor, Tensor]:
    """Return times and the weights of their masked NLL, from t ~ U(0, 1].

    With 0 steps t itself and w(t). With T steps, which must start from masks alone, a time i / T, i uniform in 1..T,
    and T times the chance that this step reveals a token, a_i = (alpha_{i-1} - alpha_i) / (1 - alpha_i) (Eq. 37).
    """
    if not steps:
        return t, schedule.elbo_weight(t)
    if float(schedule.alpha(torch.ones(1))) > 0:
        raise ConfigError(
            f"likelihood: a bound for T steps needs all tokens masked at t = 1; schedule {schedule.kind!r} keeps some"
        )
    i = (t * steps).ceil().clamp(1, steps)
    alpha_s, alpha_t = torch.where(i == 1, 1.0, schedule.alpha((i - 1) / steps)), schedule.alpha(i / steps)
    return i / steps, steps * torch.as_tensor(reveal_probability(alpha_s, alpha_t))


def grid_times(steps: int) -> list[float]:
    """Return t_i = i / T for i = 0..T (Algo. 2). The grid ends at alpha = 1, so no clean-up pass is needed."""
    if steps < 1:
        raise ValueError(f"nfe: must be >= 1, got {steps}")
    return [i / steps for i in range(steps + 1)]


class GridStep(NamedTuple):
    """A step of a chain, from t_i to t_{i-1}."""

    number: int  # i
    time: float  # t_i
    alpha: float  # at t_i
    reveal: float  # probability that a masked token is revealed


def grid(schedule: Schedule, nfe: int) -> Iterator[GridStep]:
    """Yield the steps i = T..1 on the grid t_i = i / T (Algo. 2).

    alpha at 0 is exactly 1, without the schedule's rounding: the last step reveals every token.
    """
    times = grid_times(nfe)
    alpha: list[float] = schedule.alpha(torch.tensor(times, dtype=torch.float64)).tolist()
    alpha[0] = 1.0
    for i in range(nfe, 0, -1):
        yield GridStep(i, times[i], alpha[i], float(reveal_probability(alpha[i - 1], alpha[i])))
