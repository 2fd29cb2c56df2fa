"""The toy densities: token pairs whose law is known exactly.

8-modes and swiss-roll are those of App. B.1, the others are ours. Most are curves plus isotropic Gaussian noise, the
checkerboard is a set of uniform squares. All lie in about [-2.8, 2.8]^2, where the 49 edges of the tokens resolve
them, and none is a product of its marginals. `draw` gives points of a density, `law` the law over token pairs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, get_args

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from emoe.config import option
from emoe.domains.base import Domain, DomainConfig, random_state
from emoe.domains.metrics import OVERLAP_ROWS, nearest_distance, overlap, validity
from emoe.rng import derive_seed
from emoe.types import Measurement, TokenSpace

HeldOut = Literal["pinwheel", "three-rings", "diagonal-grid", "two-spirals", "letter"]
Density = Literal["8-modes", "swiss-roll", "checkerboard", "moons", "25-modes", "two-rings", HeldOut]
HELD_OUT = get_args(HeldOut)  # densities that no setting is chosen on
EDGES = np.linspace(-3.0, 3.0, 49)
CELLS = len(EDGES) + 1  # tokens per coordinate; the outermost two take the tails

Numbers = Float[np.ndarray, " n"]
Points = Float[np.ndarray, "n 2"]
Law = Float[Tensor, "cells cells"]  # p(first token, second token), float64
Curve = Callable[[Numbers], Points]  # points of a curve at parameters u in [0, 1]


@dataclass(frozen=True, kw_only=True)
class ToyConfig(DomainConfig, kind="toy"):
    """Points of a planar density, each coordinate cut into 50 tokens."""

    density: Density = option(doc="which density; the first two are the paper's, the last five are held out")
    points: int = option(20_000, doc="training points", low=2)

    def build(self, seed: int) -> Toy:
        return Toy(self, seed)


class Toy(Domain):
    """Rows of L = 2 tokens in 0..49; the mask is 50 and V = 51. Only the centres of 8-modes depend on the seed."""

    task: ClassVar[str] = "toy"

    def __init__(self, config: ToyConfig, seed: int):
        self.name, self.seed = config.density, seed
        self.space = TokenSpace(size=CELLS + 1, mask_id=CELLS, length=2)
        centres = random_state(derive_seed(seed, "toy", "centres")).uniform(-2.5, 2.5, size=(8, 2))
        self.density = Modes(centres) if self.name == "8-modes" else DENSITIES[self.name]
        self.rows = self._draw(config.points, "train")

    def _draw(self, n: int, *stream: object) -> Int[Tensor, "n 2"]:
        return tokenise(self.density.draw(n, random_state(derive_seed(self.seed, "toy", self.name, *stream))))

    def fresh(self, n: int, seed: int) -> Int[Tensor, "n 2"]:
        return self._draw(n, "fresh", seed)

    def measure(self, samples: Int[Tensor, "n 2"], seed: int = 0) -> list[Measurement]:
        """Validity (Eq. 39) of the first 3,000 samples, and overlap with rows of a stream of their own.

        `measure(fresh(n, seed))` shows the ceiling of the overlap: 96 on 8-modes, 94 on swiss-roll, 88 to 93 on others.
        """
        pool = samples[:OVERLAP_ROWS]
        compared = self._draw(len(pool), "measure", seed)
        return [validity(samples, self.support, self.radius), overlap(pool, compared, seed)]


def tokenise(points: Points) -> Int[Tensor, "n 2"]:
    """Token of a coordinate = number of edges at or below it, 0..49."""
    return torch.from_numpy(np.digitize(points, EDGES)).long()


def between(below: Float[Tensor, "*m edges"]) -> Float[Tensor, "*m cells"]:
    """P(token) from the distribution function at the edges."""
    shape = (*below.shape[:-1], 1)
    return torch.cat([below.new_zeros(shape), below, below.new_ones(shape)], dim=-1).diff(dim=-1)


def mixture_law(points: Points, weights: Numbers, deviation: float) -> Law:
    """Law of a mixture of isotropic Gaussians: sum_k w_k P_k(i) P_k(j)."""
    distance = torch.from_numpy(EDGES) - torch.from_numpy(points.T.copy())[..., None]
    first, second = between(0.5 * (1 + torch.erf(distance / (deviation * math.sqrt(2)))))
    return (first * torch.from_numpy(weights)[:, None]).T @ second


def quadrature(panels: int) -> tuple[Numbers, Numbers]:
    """Nodes and weights of Gauss-Legendre over [0, 1], 16 nodes in each of `panels` equal panels."""
    nodes, weights = np.polynomial.legendre.leggauss(16)
    u = ((np.arange(panels)[:, None] + (nodes + 1) / 2) / panels).ravel()
    return u, np.tile(weights / (2 * panels), panels)


def validity_of_law(law: Law, support: Int[Tensor, "m 2"], radius: float) -> float:
    """Eq. 39 in expectation: 100 * sum of law(i, j) over the cells within `radius` of the support."""
    cells = torch.cartesian_prod(torch.arange(law.shape[0]), torch.arange(law.shape[1]))
    valid = nearest_distance(cells, support) <= radius
    return 100 * law.cpu().double().flatten()[valid].sum().item()


def overlap_of_law(law: Law, data: Law) -> float:
    """100 * (1 - TV) = 100 * sum of min(law, data), whose ceiling is 100, unlike that of finite pools."""
    return 100 * torch.minimum(law.cpu().double(), data.cpu().double()).sum().item()


def ideal_factorised(cells: Float[Tensor, "J K"], steps: int) -> Float[Tensor, "J K"]:
    """Law of the best factorised T-step chain (Eq. 2-3 with exact conditionals) for rows with the law `cells`.

    On the grid t_i = i/T with alpha(t) = 1 - t, the step in which a position is revealed is uniform over T, ..., 1. The
    steps of the two coincide with probability 1/T; then each is drawn from its marginal. Otherwise the second is drawn
    given the first, which together is a draw from the joint law: p_T(i, j) = (1 - 1/T) p(i, j) + 1/T p(i) p(j).
    """
    if steps < 1:
        raise ValueError(f"steps: must be >= 1, got {steps}")
    product = cells.sum(1)[:, None] * cells.sum(0)[None, :]
    return (1 - 1 / steps) * cells + product / steps


@dataclass(frozen=True)
class Modes:
    """Equal clusters with isotropic Gaussian noise; those of 8-modes have centres uniform in [-2.5, 2.5]^2."""

    centres: Float[np.ndarray, "M 2"]
    noise: float = 0.09

    def draw(self, n: int, state: np.random.RandomState) -> Points:
        cluster = state.randint(len(self.centres), size=n)
        return self.centres[cluster] + self.noise * state.standard_normal((n, 2))

    def law(self) -> Law:
        return mixture_law(self.centres, np.full(len(self.centres), 1 / len(self.centres)), self.noise)


@dataclass(frozen=True)
class SwissRoll:
    """First and third coordinate of scikit-learn's Swiss roll, divided by 7.5."""

    noise: float = 0.45

    def curve(self, u: Numbers) -> Points:
        """The roll before it is divided: (s cos s, s sin s) with s = 3 pi / 2 * (1 + 2u), u in [0, 1]."""
        s = 1.5 * np.pi * (1 + 2 * u)
        return polar(s, s)

    def draw(self, n: int, state: np.random.RandomState) -> Points:
        """The points of `make_swiss_roll(n, noise=..., random_state=state)`, whose second coordinate is dropped."""
        points = self.curve(state.uniform(size=n))
        state.uniform(size=n)  # along the roll's axis
        return (points + self.noise * state.standard_normal((3, n))[[0, 2]].T) / 7.5

    def law(self) -> Law:
        u, weights = quadrature(512)
        return mixture_law(self.curve(u) / 7.5, weights, self.noise / 7.5)


class Piece(NamedTuple):
    """A part of a density: a curve, traversed with u uniform in [0, 1], and its mass relative to other pieces."""

    curve: Curve
    mass: float = 1.0


class Strokes:
    """Curves blurred by a Gaussian: curve_k(u) + noise * N(0, I) with P(k) proportional to the mass of piece k."""

    def __init__(self, noise: float, *pieces: Piece):
        self.noise, self.pieces = noise, pieces
        self.shares = np.array([piece.mass for piece in pieces]) / sum(piece.mass for piece in pieces)

    def draw(self, n: int, state: np.random.RandomState) -> Points:
        chosen = state.choice(len(self.pieces), size=n, p=self.shares)
        u = state.uniform(size=n)
        points = np.empty((n, 2))
        for k, piece in enumerate(self.pieces):
            points[chosen == k] = piece.curve(u[chosen == k])
        return points + self.noise * state.standard_normal((n, 2))

    def law(self) -> Law:
        # Within a panel the longest curve moves by less than two standard deviations of its noise. Over that range 16
        # nodes integrate a Gaussian box to machine precision.
        u, weight = quadrature(128)
        points = np.concatenate([piece.curve(u) for piece in self.pieces])
        return mixture_law(points, np.concatenate([share * weight for share in self.shares]), self.noise)


@dataclass(frozen=True)
class Squares:
    """Squares with sides along the axes, one chosen uniformly and a point uniform in it; without noise."""

    side: float
    corners: Points  # lower left

    def draw(self, n: int, state: np.random.RandomState) -> Points:
        corners = self.corners[state.randint(len(self.corners), size=n)]
        return corners + self.side * state.uniform(size=(n, 2))

    def law(self) -> Law:
        # P_k(i) is the share of square k's side that lies in cell i.
        below = ((torch.from_numpy(EDGES) - torch.from_numpy(self.corners)[..., None]) / self.side).clamp(0, 1)
        first, second = between(below).unbind(1)
        return first.T @ second / len(self.corners)


def polar(radius: Numbers | float, angle: Numbers) -> Points:
    """Points about the origin."""
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)


def segment(start: tuple[float, float], end: tuple[float, float]) -> Piece:
    """A straight stroke, its mass the length."""
    a, b = np.array(start), np.array(end)
    return Piece(lambda u: a + u[:, None] * (b - a), math.dist(start, end))


def arc(radius: float, start: float, end: float, centre: tuple[float, float] = (0.0, 0.0)) -> Piece:
    """A part of a circle from angle `start` to angle `end`, its mass the length."""
    return Piece(lambda u: centre + polar(radius, start + u * (end - start)), radius * abs(end - start))


def ring(radius: float) -> Piece:
    """A full circle about the origin; rings of all sizes have equal mass."""
    return Piece(arc(radius, 0.0, 2 * math.pi).curve)


def grid_of_modes(angle: float) -> Strokes:
    """5 x 5 equal modes, turned by an angle: along the axes they would be the product of their marginals."""
    cos, sin = 0.94 * math.cos(angle), 0.94 * math.sin(angle)
    centres = [(i * cos - j * sin, i * sin + j * cos) for i, j in itertools.product(range(-2, 3), repeat=2)]
    return Strokes(0.08, *(Piece(segment(centre, centre).curve) for centre in centres))


def pinwheel(k: int) -> Piece:
    """An arm that bends more with the radius: radius r at angle 2 pi k / 5 + 1/4 exp(r / 1.6), r uniform."""

    def curve(u: Numbers) -> Points:
        r = 0.5 + u * (2.6 - 0.5)
        return polar(r, 2 * math.pi * k / 5 + 0.25 * np.exp(r / 1.6))

    return Piece(curve)


def turned(x: float, y: float) -> tuple[float, float]:
    """A point turned by 45 degrees about the origin."""
    return (x - y) / math.sqrt(2), (x + y) / math.sqrt(2)


def spiral(sign: int) -> Piece:
    """An Archimedean arm, radius = angle / 3.7; the square of the angle is uniform, so mass is nearly even."""
    start, end = math.pi / 2, 3 * math.pi

    def curve(u: Numbers) -> Points:
        s = np.sqrt(start**2 + u * (end**2 - start**2))
        return polar(sign * s / 3.7, s)

    return Piece(curve)


DENSITIES: dict[str, Modes | SwissRoll | Strokes | Squares] = {
    "swiss-roll": SwissRoll(),
    # The dark squares of a board of 4 x 4; their sides do not fall on edges of tokens.
    "checkerboard": Squares(1.2, 1.2 * (np.argwhere(np.indices((4, 4)).sum(0) % 2 == 0) - 2)),
    # The half circles of scikit-learn's `make_moons`, about their middle (1/2, 1/4) and enlarged by 1.75.
    "moons": Strokes(0.1, arc(1.75, 0.0, math.pi, (-0.875, -0.4375)), arc(1.75, math.pi, 2 * math.pi, (0.875, 0.4375))),
    "25-modes": grid_of_modes(math.radians(27)),
    "two-rings": Strokes(0.07, ring(1.25), ring(2.5)),
    "pinwheel": Strokes(0.09, *map(pinwheel, range(5))),
    "three-rings": Strokes(0.06, ring(0.7), ring(1.4), ring(2.1)),
    "diagonal-grid": Strokes(
        0.07,
        *(segment(turned(-2.2, y), turned(2.2, y)) for y in (-1.5, 0.0, 1.5)),
        *(segment(turned(x, -2.2), turned(x, 2.2)) for x in (-1.5, 0.0, 1.5)),
    ),
    "two-spirals": Strokes(0.07, spiral(1), spiral(-1)),
    # The letter R: stem, two bars, bowl and leg, which gives level, upright, slanted and round strokes.
    "letter": Strokes(
        0.08,
        segment((-1.4, -2.4), (-1.4, 2.4)),
        segment((-1.4, 2.4), (0.2, 2.4)),
        segment((-1.4, 0.0), (0.2, 0.0)),
        arc(1.2, -math.pi / 2, math.pi / 2, (0.2, 2.4 - 1.2)),
        segment((0.2, 0.0), (1.5, -2.4)),
    ),
}
