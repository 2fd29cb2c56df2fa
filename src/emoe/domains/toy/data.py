"""The two planar densities of App. B.1: drawing points, turning them into tokens, and their exact laws."""

from __future__ import annotations

import math

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

EDGES = np.linspace(-3.0, 3.0, 49)
CELLS = len(EDGES) + 1  # tokens per coordinate; the outermost two take the tails
MODES = 8
CENTRE_RANGE = 2.5  # centres lie in [-2.5, 2.5]^2
MODE_NOISE = 0.09
ROLL_NOISE = 0.45
ROLL_SCALE = 7.5

Points = Float[np.ndarray, "n 2"]


def random_state(seed: int) -> np.random.RandomState:
    """A generator whose stream NumPy has promised never to change, seeded with all 63 bits."""
    return np.random.RandomState(np.random.MT19937(seed))


def tokenise(points: Points) -> Int[Tensor, "n 2"]:
    """Token of a coordinate = number of edges at or below it, 0..49."""
    return torch.from_numpy(np.digitize(points, EDGES)).long()


def mode_centres(draw: np.random.RandomState) -> Float[np.ndarray, "M 2"]:
    """Eight cluster centres, uniform in [-2.5, 2.5]^2."""
    return draw.uniform(-CENTRE_RANGE, CENTRE_RANGE, size=(MODES, 2))


def eight_modes(n: int, centres: Float[np.ndarray, "M 2"], draw: np.random.RandomState) -> Points:
    """n points: a cluster chosen uniformly plus isotropic Gaussian noise of standard deviation 0.09."""
    cluster = draw.randint(len(centres), size=n)
    return centres[cluster] + MODE_NOISE * draw.standard_normal((n, 2))


def spiral(u: Float[np.ndarray, " n"]) -> Points:
    """The noiseless roll before scaling: (s cos s, s sin s) with s = 3 pi / 2 * (1 + 2u), u in [0, 1]."""
    s = 1.5 * np.pi * (1 + 2 * u)
    return np.stack([s * np.cos(s), s * np.sin(s)], axis=1)


def swiss_roll(n: int, draw: np.random.RandomState) -> Points:
    """n points of the Swiss roll: first and third coordinate of scikit-learn's, noise 0.45, divided by 7.5.

    The draws come in scikit-learn's order, so `make_swiss_roll(n, noise=0.45, random_state=draw)` gives the
    same points; its second coordinate (along the roll's axis) is drawn and dropped.
    """
    curve = spiral(draw.uniform(size=n))
    draw.uniform(size=n)
    noise = draw.standard_normal((3, n))
    return (curve + ROLL_NOISE * noise[[0, 2]].T) / ROLL_SCALE


def coordinate_law(means: Float[Tensor, " m"], deviation: float) -> Float[Tensor, "m cells"]:
    """P(token) of a Gaussian coordinate, for each mean: differences of its distribution function."""
    edges = torch.from_numpy(EDGES)
    below = 0.5 * (1 + torch.erf((edges - means[:, None]) / (deviation * math.sqrt(2))))
    ends = below.new_zeros(len(means), 1), below.new_ones(len(means), 1)
    return torch.cat([ends[0], below, ends[1]], dim=1).diff(dim=1)


def mixture_law(points: Points, weights: Float[Tensor, " n"], deviation: float) -> Float[Tensor, "cells cells"]:
    """Law over token pairs of a mixture of isotropic Gaussians: sum_k w_k P_k(i) P_k(j)."""
    first, second = (coordinate_law(torch.from_numpy(points[:, axis].copy()), deviation) for axis in (0, 1))
    return (first * weights[:, None]).T @ second


def quadrature(panels: int) -> tuple[Float[np.ndarray, " m"], Float[np.ndarray, " m"]]:
    """Nodes and weights of Gauss-Legendre over [0, 1], 16 nodes in each of so many equal panels."""
    nodes, weights = np.polynomial.legendre.leggauss(16)
    u = ((np.arange(panels)[:, None] + (nodes + 1) / 2) / panels).ravel()
    return u, np.tile(weights / (2 * panels), panels)


def eight_modes_law(centres: Float[np.ndarray, "M 2"]) -> Float[Tensor, "cells cells"]:
    """Exact law of `eight_modes` over token pairs."""
    weights = torch.full((len(centres),), 1 / len(centres), dtype=torch.float64)
    return mixture_law(centres, weights, MODE_NOISE)


def swiss_roll_law(panels: int = 512) -> Float[Tensor, "cells cells"]:
    """Law of `swiss_roll` over token pairs: the integral over u in [0, 1] of Gaussian boxes around spiral(u).

    Gauss-Legendre with 16 nodes in each panel. A panel spans about half a standard deviation of the noise, so
    the integrand is a polynomial to machine precision there and more panels change nothing.
    """
    u, weights = quadrature(panels)
    return mixture_law(spiral(u) / ROLL_SCALE, torch.from_numpy(weights), ROLL_NOISE / ROLL_SCALE)
