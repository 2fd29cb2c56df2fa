"""Which times a training batch sees (Algo. 1, line 3) and which times a sampler visits (Algo. 2)."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def stratified_times(
    batch: int, generator: torch.Generator, *, low: float = 0.0, rank: int = 0, world: int = 1
) -> Float[Tensor, " B"]:
    """One t ~ U(low, 1] for each row, one row in each of n = batch * world equal strata (Algo. 1, line 3).

    t_j = low + (1 - low) * (1 - (s_j + u_j) / n), with s a random permutation of the strata 0..n-1 and
    u_j ~ U[0, 1). The permutation is drawn over the whole job, so that no rank sees only one end of the noise; the
    generator must therefore be the same on all ranks, and each rank takes its slice.
    """
    count = batch * world
    noise = torch.rand(2, count, generator=generator, device=generator.device, dtype=torch.float64)
    strata = noise[0].argsort()
    u = (strata + noise[1]) / count
    t = low + (1 - low) * (1 - u)
    return t[rank * batch : (rank + 1) * batch].to(torch.float32)


def grid_times(steps: int) -> list[float]:
    """t_i = i / T for i = 0..T (Algo. 2); it ends at alpha = 1, so no clean-up pass is needed."""
    if steps < 1:
        raise ValueError(f"nfe: must be >= 1, got {steps}")
    return [i / steps for i in range(steps + 1)]
