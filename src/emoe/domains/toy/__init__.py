"""The toy densities: token pairs whose law is known exactly. App. B.1 has the first two, the others are ours."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from jaxtyping import Float, Int
from torch import Tensor

from emoe.config import option
from emoe.domains.base import Domain, DomainConfig, random_state
from emoe.domains.metrics import OVERLAP_ROWS, overlap, validity
from emoe.domains.toy.densities import CELLS, DENSITIES, Modes, tokenise
from emoe.rng import derive_seed
from emoe.types import Measurement, TokenSpace

Density = Literal[
    "8-modes", "swiss-roll", "checkerboard", "moons", "25-modes", "two-rings", "pinwheel", "three-rings",
    "diagonal-grid", "two-spirals", "letter",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ToyConfig(DomainConfig, kind="toy"):
    """Points of a planar density, each coordinate cut into 50 tokens.

    The paper's densities are 8-modes and swiss-roll. Settings may be chosen on checkerboard, moons, 25-modes and
    two-rings; the others, `densities.HELD_OUT`, are kept for testing a choice.
    """

    density: Density = option(doc="which density; the first two are the paper's, the last five are held out")
    points: int = option(20_000, doc="training points", low=2)

    def conflicts(self) -> Iterator[str]:
        if self.density not in get_args(Density):  # of a script, which does not pass through `from_dict`
            yield f"density: {self.density!r} is not known; allowed: {', '.join(get_args(Density))}"

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

    def cell_probabilities(self) -> Float[Tensor, "50 50"]:
        """Exact law p(first token, second token) of the density, float64."""
        return self.density.law()

    def measure(self, samples: Int[Tensor, "n 2"], seed: int = 0) -> list[Measurement]:
        """Validity (Eq. 39) of the first 3,000 samples, overlap of up to 20,000 with as many fresh rows.

        These have a stream of their own: measuring `fresh(n, seed)` with the same seed gives the ceiling of the
        overlap (about 96 on 8-modes, 94 on swiss-roll, 88 to 93 on the others), not a set's overlap with itself.
        """
        pool = samples[:OVERLAP_ROWS]
        compared = self._draw(len(pool), "measure", seed)
        return [validity(samples, self.support, self.radius), overlap(pool, compared, seed)]
