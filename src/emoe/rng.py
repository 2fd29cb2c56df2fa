"""Random streams that are a pure function of (seed, rank, step, purpose); a part of a batch is like a rank.

Resumption needs only the step; a fused and a sequential pass draw the same noise; an evaluation during training changes
nothing. Each purpose has its own generator, reseeded at every step.
"""

from __future__ import annotations

import hashlib
from typing import Literal

import torch

Purpose = Literal["time", "mask", "route", "latent", "data", "reveal", "token", "init", "dropout", "steps"]


def derive_seed(*keys: object) -> int:
    """A 63-bit seed from any printable keys; independent of process, platform and Python's hash seed."""
    digest = hashlib.blake2b("/".join(map(str, keys)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class Rng:
    """Named random streams at a step: `rng.at(step)` moves all of them, `rng.stream("mask")` is a `torch.Generator`.

    Streams of different ranks differ, except with `shared=True`.
    """

    def __init__(self, seed: int, *, device: torch.device | str = "cpu", rank: int = 0, world: int = 1):
        self.seed, self.rank, self.world, self.step = seed, rank, world, 0
        self.device = torch.device(device)
        self._streams: dict[tuple[str, bool], torch.Generator] = {}

    def at(self, step: int) -> Rng:
        """Move all streams to `step` and return self."""
        self.step = step
        for key, generator in self._streams.items():
            generator.manual_seed(self._seed_of(*key))
        return self

    def stream(self, purpose: Purpose, *, shared: bool = False) -> torch.Generator:
        """The generator of a purpose; it continues where its last draw of this step ended."""
        key = (purpose, shared)
        if key not in self._streams:
            self._streams[key] = torch.Generator(device=self.device).manual_seed(self._seed_of(*key))
        return self._streams[key]

    def fork(self, *keys: object) -> Rng:
        """An independent Rng named by `keys`, for instance one for each chunk of a large sample pool."""
        return Rng(derive_seed(self.seed, "fork", *keys), device=self.device, rank=self.rank, world=self.world)

    def part(self, number: int, parts: int) -> Rng:
        """Streams of a part of this rank's rows: those of rank r * parts + number.

        The draws of a step are thus a function of (seed, step, position of the part in the whole batch): two ranks of
        one part each have the draws of one rank with two parts.
        """
        rank, world = self.rank * parts + number, self.world * parts
        return Rng(self.seed, device=self.device, rank=rank, world=world).at(self.step)

    def generators(self) -> list[torch.Generator]:
        """Every generator opened so far (a CUDA graph must register them)."""
        return list(self._streams.values())

    def _seed_of(self, purpose: str, shared: bool) -> int:
        return derive_seed(self.seed, "all" if shared else self.rank, self.step, purpose)
