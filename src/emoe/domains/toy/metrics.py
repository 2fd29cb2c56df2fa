"""Measures of an exact law over token pairs, and the law a factorised sampler is bound to at best."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from emoe.metrics import nearest_distance


def validity_of_law(law: Float[Tensor, "K K"], support: Int[Tensor, "m 2"], radius: float) -> float:
    """Eq. 39 in expectation: 100 * sum of law(i, j) over the cells within `radius` of the support."""
    cells = torch.cartesian_prod(torch.arange(law.shape[0]), torch.arange(law.shape[1]))
    valid = nearest_distance(cells, support) <= radius
    return 100 * law.cpu().double().flatten()[valid].sum().item()


def overlap_of_law(law: Float[Tensor, "K K"], data: Float[Tensor, "K K"]) -> float:
    """100 * (1 - TV) = 100 * sum of min(law, data), whose ceiling is 100, unlike that of finite pools."""
    return 100 * torch.minimum(law.cpu().double(), data.cpu().double()).sum().item()


def ideal_factorised(cells: Float[Tensor, "J K"], steps: int) -> Float[Tensor, "J K"]:
    """Law of the best factorised T-step chain (Eq. 2-3 with exact conditionals) for rows of length 2.

    On the grid t_i = i/T with alpha(t) = 1 - t, a position still masked at t_i is revealed on the way to
    t_{i-1} with probability (t_i - t_{i-1}) / t_i = 1/i. Its step is therefore uniform over T, ..., 1:
    P(step i) = prod_{j>i} (1 - 1/j) * 1/i = i/T * 1/i = 1/T. The two positions choose independently, so they
    coincide with probability 1/T. Then both are drawn given the fully masked row, each from its marginal;
    otherwise the second is drawn given the first, which together is a draw from the joint law:

        p_T(i, j) = (1 - 1/T) p(i, j) + 1/T p(i) p(j).

    Args:
        cells: The data law p(i, j).
        steps: T, the number of network calls.
    """
    if steps < 1:
        raise ValueError(f"steps: must be >= 1, got {steps}")
    product = cells.sum(1)[:, None] * cells.sum(0)[None, :]
    return (1 - 1 / steps) * cells + product / steps
