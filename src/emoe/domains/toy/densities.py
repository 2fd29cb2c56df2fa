"""More planar densities than App. B.1 has: one description of each serves both for drawing and for its exact law.

Nearly all are pieces of curves plus isotropic Gaussian noise, the checkerboard is a set of uniform squares. All lie
in about [-2.8, 2.8]^2, where the 49 edges of the tokens resolve them, and none is a product of its marginals.
Nothing but the draw of points depends on a seed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from emoe.domains.toy.data import EDGES, Points, mixture_law, quadrature

SELECTION = ("checkerboard", "moons", "25-modes", "two-rings")  # for choosing settings
HELD_OUT = ("pinwheel", "three-rings", "diagonal-grid", "two-spirals", "letter")  # never looked at in choosing them

Curve = Callable[[Float[np.ndarray, " n"]], Points]
"""Places of a curve at parameters u in [0, 1]."""


class Planar(Protocol):
    """A density of the plane that can be drawn from and whose law over token pairs is known."""

    def draw(self, n: int, draw: np.random.RandomState) -> Points:
        """n independent points."""
        ...

    def law(self) -> Float[Tensor, "cells cells"]:
        """Exact law p(first token, second token), float64."""
        ...


@dataclass(frozen=True)
class Piece:
    """A part of a density: a curve, traversed with u uniform in [0, 1], and its mass relative to other pieces."""

    curve: Curve
    mass: float = 1.0


@dataclass(frozen=True)
class Strokes:
    """Curves blurred by a Gaussian: curve_k(u) + noise * N(0, I) with P(k) proportional to the mass of piece k."""

    noise: float
    pieces: tuple[Piece, ...]

    @property
    def shares(self) -> Float[np.ndarray, " K"]:
        """P(k) of each piece."""
        masses = np.array([piece.mass for piece in self.pieces])
        return masses / masses.sum()

    def draw(self, n: int, draw: np.random.RandomState) -> Points:
        """n points: a piece, a place on it, noise; in this order from the random stream."""
        chosen = draw.choice(len(self.pieces), size=n, p=self.shares)
        u = draw.uniform(size=n)
        places = np.empty((n, 2))
        for k, piece in enumerate(self.pieces):
            places[chosen == k] = piece.curve(u[chosen == k])
        return places + self.noise * draw.standard_normal((n, 2))

    def law(self, panels: int = 128) -> Float[Tensor, "cells cells"]:
        """sum_k P(k) * integral over u in [0, 1] of the Gaussian box around curve_k(u), by Gauss-Legendre.

        Within a panel the longest curve moves by less than two standard deviations of its noise. Over that
        range 16 nodes integrate a Gaussian box to machine precision: more panels change nothing.
        """
        u, weight = quadrature(panels)
        places = np.concatenate([piece.curve(u) for piece in self.pieces])
        weights = np.concatenate([share * weight for share in self.shares])
        return mixture_law(places, torch.from_numpy(weights), self.noise)


@dataclass(frozen=True)
class Squares:
    """Squares with sides along the axes, one chosen uniformly and a point uniform in it; without noise."""

    side: float
    corners: tuple[tuple[float, float], ...]  # lower left

    def draw(self, n: int, draw: np.random.RandomState) -> Points:
        """n points: a square, then a place in it."""
        corners = np.array(self.corners)[draw.randint(len(self.corners), size=n)]
        return corners + self.side * draw.uniform(size=(n, 2))

    def law(self) -> Float[Tensor, "cells cells"]:
        """1/K * sum_k P_k(i) P_k(j), where P_k(i) is the share of square k's side that lies in cell i."""
        corners = torch.tensor(self.corners, dtype=torch.float64)
        below = ((torch.from_numpy(EDGES) - corners[..., None]) / self.side).clamp(0, 1)  # distribution at the edges
        ends = below.new_zeros(*corners.shape, 1), below.new_ones(*corners.shape, 1)
        first, second = torch.cat([ends[0], below, ends[1]], dim=-1).diff(dim=-1).unbind(1)
        return first.T @ second / len(corners)


def _polar(
    centre: tuple[float, float], radius: Float[np.ndarray, " n"] | float, angle: Float[np.ndarray, " n"]
) -> Points:
    return np.stack([centre[0] + radius * np.cos(angle), centre[1] + radius * np.sin(angle)], axis=1)


def mode(x: float, y: float) -> Piece:
    """A single place."""
    return Piece(lambda u: np.tile([x, y], (len(u), 1)))


def segment(start: tuple[float, float], end: tuple[float, float]) -> Piece:
    """A straight stroke, its mass the length."""
    a, b = np.array(start), np.array(end)
    return Piece(lambda u: a + u[:, None] * (b - a), math.dist(start, end))


def arc(radius: float, start: float, end: float, centre: tuple[float, float] = (0.0, 0.0)) -> Piece:
    """A part of a circle from angle `start` to angle `end`, its mass the length."""
    return Piece(lambda u: _polar(centre, radius, start + u * (end - start)), radius * abs(end - start))


def ring(radius: float) -> Piece:
    """A full circle about the origin; rings of all sizes have equal mass."""
    return Piece(arc(radius, 0.0, 2 * math.pi).curve)


def _checkerboard(side: float = 1.2) -> Squares:
    """The eight dark squares of a board of 4 x 4; their sides do not fall on edges of tokens."""
    dark = [(i, j) for i, j in itertools.product(range(4), repeat=2) if (i + j) % 2 == 0]
    return Squares(side, tuple((side * (i - 2), side * (j - 2)) for i, j in dark))


def _moons(scale: float = 1.75) -> Strokes:
    """The two half circles of scikit-learn's `make_moons`, about their middle (1/2, 1/4) and enlarged."""
    upper = arc(scale, 0.0, math.pi, (-0.5 * scale, -0.25 * scale))
    lower = arc(scale, math.pi, 2 * math.pi, (0.5 * scale, 0.25 * scale))
    return Strokes(0.1, (upper, lower))


def _modes(spacing: float = 0.94, angle: float = math.radians(27)) -> Strokes:
    """A 5 x 5 grid of equal modes, turned: along the axes it would be the product of its marginals."""
    cos, sin = spacing * math.cos(angle), spacing * math.sin(angle)
    places = itertools.product(range(-2, 3), repeat=2)
    return Strokes(0.08, tuple(mode(i * cos - j * sin, i * sin + j * cos) for i, j in places))


def _pinwheel(arms: int = 5, inner: float = 0.5, outer: float = 2.6) -> Strokes:
    """Arms that bend ever more on the way out: radius r at angle 2 pi k / 5 + 1/4 exp(r / 1.6), r uniform."""

    def arm(k: int) -> Curve:
        def curve(u: Float[np.ndarray, " n"]) -> Points:
            r = inner + u * (outer - inner)
            return _polar((0.0, 0.0), r, 2 * math.pi * k / arms + 0.25 * np.exp(r / 1.6))

        return curve

    return Strokes(0.09, tuple(Piece(arm(k)) for k in range(arms)))


def _diagonal_grid(gap: float = 1.5, reach: float = 2.2) -> Strokes:
    """A net of three and three straight lines that run at 45 degrees to the axes."""

    def turned(x: float, y: float) -> tuple[float, float]:
        return (x - y) / math.sqrt(2), (x + y) / math.sqrt(2)

    rising = [segment(turned(-reach, place), turned(reach, place)) for place in (-gap, 0.0, gap)]
    falling = [segment(turned(place, -reach), turned(place, reach)) for place in (-gap, 0.0, gap)]
    return Strokes(0.07, (*rising, *falling))


def _two_spirals(start: float = math.pi / 2, end: float = 3 * math.pi, scale: float = 3.7) -> Strokes:
    """Two Archimedean arms, radius = angle / 3.7, one turned by 180 degrees.

    The square of the angle is uniform, so that mass is spread nearly evenly over the length.
    """

    def arm(sign: int) -> Curve:
        def curve(u: Float[np.ndarray, " n"]) -> Points:
            s = np.sqrt(start**2 + u * (end**2 - start**2))
            return _polar((0.0, 0.0), sign * s / scale, s)

        return curve

    return Strokes(0.07, (Piece(arm(1)), Piece(arm(-1))))


def _letter() -> Strokes:
    """The letter R: stem, bowl and leg, which gives level, upright, slanted and round strokes."""
    left, top, join, radius = -1.4, 2.4, 0.2, 1.2
    stem = segment((left, -top), (left, top))
    bars = segment((left, top), (join, top)), segment((left, 0.0), (join, 0.0))
    bowl = arc(radius, -math.pi / 2, math.pi / 2, (join, top - radius))
    return Strokes(0.08, (stem, *bars, bowl, segment((join, 0.0), (1.5, -top))))


PLANAR: dict[str, Planar] = {
    "checkerboard": _checkerboard(),
    "moons": _moons(),
    "25-modes": _modes(),
    "two-rings": Strokes(0.07, (ring(1.25), ring(2.5))),
    "pinwheel": _pinwheel(),
    "three-rings": Strokes(0.06, (ring(0.7), ring(1.4), ring(2.1))),
    "diagonal-grid": _diagonal_grid(),
    "two-spirals": _two_spirals(),
    "letter": _letter(),
}
