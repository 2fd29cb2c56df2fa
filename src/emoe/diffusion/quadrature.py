"""Sums over the values of a latent: all of them, a few at a time, or points in place of a Gaussian."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor

from emoe.config import ConfigError
from emoe.types import Tokens

NODES = {1: 2_000, 2: 60}  # points of the trapezoid rule in each dimension of a latent of that size
AT_ONCE = {"cpu": 256, "cuda": 16_384}  # rows of a network call


def each_component(
    xt: Tokens, count: int, *, budget: int, what: str
) -> Iterator[tuple[Int[Tensor, "N L"], Int[Tensor, " N"]]]:
    """All pairs of a row of xt and one of `count` components, row by row, in batches for the network.

    Raises:
        ConfigError: There are more than `budget` pairs; `what` says what there is too much of.
    """
    if count * len(xt) > budget:
        raise ConfigError(
            f"budget: {what}, times {len(xt)} rows; that is more than {budget}, and too many to enumerate; ask for "
            "bound@T or iw@T,K, which need no enumeration"
        )
    pairs = torch.cartesian_prod(torch.arange(len(xt), device=xt.device), torch.arange(count, device=xt.device))
    for row, component in (part.unbind(1) for part in pairs.split(AT_ONCE.get(xt.device.type, 256))):
        yield xt[row], component


def gaussian_grid(size: int, nodes: int) -> tuple[Float[Tensor, "R Z"], Float[Tensor, " R"]]:
    """Points and log-weights of the trapezoid rule on [-9, 9]^Z for the mean over N(0, I), `nodes` in each dimension.

    Under a Gaussian it converges as fast as Gauss-Hermite, and its points can be put as close as a sharp function
    needs; those of Gauss-Hermite cannot (128 of them left errors of 5e-4 where 2,000 of these left 1e-14).
    """
    x = torch.linspace(-9, 9, nodes, dtype=torch.float64)
    log_weight = torch.log_softmax(-x.square() / 2, 0)
    points = torch.cartesian_prod(*[x] * size).view(-1, size)
    return points, torch.cartesian_prod(*[log_weight] * size).view(-1, size).sum(-1)


def gaussian_points(count: int, size: int, seed: int) -> Float[Tensor, "R Z"]:
    """`count` scrambled Sobol points mapped to N(0, I): each is a fair draw, together they are spread evenly."""
    uniform = torch.quasirandom.SobolEngine(size, scramble=True, seed=seed).draw(count, dtype=torch.float64)
    return torch.special.ndtri(uniform.clamp(1e-12, 1 - 1e-12))
