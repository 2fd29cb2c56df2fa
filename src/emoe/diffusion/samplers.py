"""Parts of the reverse chain: the steps of the grid, and tokens drawn from the most likely symbols."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as nnf

from emoe.diffusion.masking import NEG_INF
from emoe.diffusion.schedule import Schedule
from emoe.diffusion.times import grid_times
from emoe.types import StepEvent

OnStep = Callable[[StepEvent], None]
READ_AT_ONCE = 4096  # positions whose logits are computed, and drawn from in float64, at a time


class GridStep(NamedTuple):
    """A step of a chain, from t_i to t_{i-1}."""

    number: int  # i
    time: float  # t_i
    alpha_s: float
    alpha_t: float


def grid(schedule: Schedule, nfe: int) -> Iterator[GridStep]:
    """The steps i = T..1 on the grid t_i = i / T (Algo. 2).

    alpha_s of the last step is 1, whatever the schedule's rounding says: it reveals every token.
    """
    times = grid_times(nfe)
    alpha: list[float] = schedule.alpha(torch.tensor(times, dtype=torch.float64)).tolist()
    alpha[0] = 1.0
    for i in range(nfe, 0, -1):
        yield GridStep(i, times[i], alpha[i - 1], alpha[i])


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
