"""Ties: laws over a group of positions whose symbols constrain each other, uniform over what the tie allows."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor


class Tie(ABC):
    """A uniform law over the contents of a group of `size` positions with symbols 0..S-1.

    Any size - 1 symbols fix the last one and are themselves independent and uniform, so S^(size - 1) contents are
    allowed. A subclass for which this does not hold replaces `choices` and `agreement`.
    """

    def __init__(self, symbols: int, size: int):
        self.symbols, self.size = symbols, size

    @abstractmethod
    def draw(self, n: int, groups: int, state: np.random.RandomState) -> Int[np.ndarray, "n G g"]:
        """Contents of n rows of G groups, independent of each other."""

    @abstractmethod
    def holds(self, content: Int[Tensor, "n G g"]) -> Bool[Tensor, "n G"]:
        """Which groups keep their tie; all symbols are in 0..S-1."""

    def choices(self) -> int:
        """Number of contents that keep the tie, all equally likely."""
        return int(self.symbols ** (self.size - 1))

    def chance(self) -> float:
        """Probability that independent uniform symbols keep the tie: choices / S^size."""
        return self.choices() / self.symbols**self.size

    def agreement(self, known: int, drawn: int) -> float:
        """P(nothing is broken yet) after `drawn` symbols were drawn independently, each given the same `known` ones.

        Only the last symbol is fixed by the others: where several are drawn at once and complete the group, they are
        uniform and agree by chance.
        """
        return 1 / self.symbols if drawn > 1 and known + drawn == self.size else 1.0

    def ideal(self, steps: int) -> float:
        """Probability that the best factorised T-step chain keeps the tie (Eq. 2-3 with exact conditionals).

        On the grid t_i = i/T with alpha(t) = 1 - t, each position still masked at t_i is revealed in that step with
        probability 1/i, independently. With h_i(m) the probability of an unbroken end, given m known symbols and i
        steps to go, and f = size - m:

            h_i(m) = sum_k C(f, k) (1/i)^k (1 - 1/i)^(f - k) agreement(m, k) h_{i-1}(m + k),   h_0(size) = 1.
        """
        if steps < 1:
            raise ValueError(f"steps: must be >= 1, got {steps}")
        ends = [0.0] * self.size + [1.0]
        for left in range(1, steps + 1):
            reveal = 1 / left
            ends = [
                sum(
                    math.comb(free, k) * reveal**k * (1 - reveal) ** (free - k)
                    * self.agreement(self.size - free, k) * ends[self.size - free + k]
                    for k in range(free + 1)
                )
                for free in range(self.size, -1, -1)
            ]  # fmt: skip
        return ends[0]


class Match(Tie):
    """Two symbols, the second a bijection of the first: x' = b_i(x), with a bijection for each group i."""

    def __init__(self, bijections: Int[np.ndarray, "G S"]):
        super().__init__(bijections.shape[1], 2)
        self.bijections = bijections

    def draw(self, n: int, groups: int, state: np.random.RandomState) -> Int[np.ndarray, "n G 2"]:
        """The first symbol is uniform."""
        first = state.randint(self.symbols, size=(n, groups))
        return np.stack([first, self.bijections[np.arange(groups), first]], axis=2)

    def holds(self, content: Int[Tensor, "n G 2"]) -> Bool[Tensor, "n G"]:
        """x' = b_i(x)."""
        partner = torch.from_numpy(self.bijections)[torch.arange(content.shape[1]), content[..., 0]]
        return content[..., 1] == partner


class Sum(Tie):
    """Symbols that add up to 0 modulo S."""

    def draw(self, n: int, groups: int, state: np.random.RandomState) -> Int[np.ndarray, "n G g"]:
        """All but the last symbol are uniform."""
        free = state.randint(self.symbols, size=(n, groups, self.size - 1))
        return np.concatenate([free, -free.sum(2, keepdims=True) % self.symbols], axis=2)

    def holds(self, content: Int[Tensor, "n G g"]) -> Bool[Tensor, "n G"]:
        """Sum of the symbols = 0 mod S."""
        return content.sum(2) % self.symbols == 0


class Distinct(Tie):
    """Symbols that all differ: an arrangement of `size` of the S symbols, a permutation where size = S."""

    def draw(self, n: int, groups: int, state: np.random.RandomState) -> Int[np.ndarray, "n G g"]:
        """Symbol k is drawn as its place among the S - k that the symbols before it leave."""
        content = np.stack([state.randint(self.symbols - k, size=(n, groups)) for k in range(self.size)], axis=2)
        for k in range(self.size - 2, -1, -1):  # places among what is left become places among what was left before k
            content[..., k + 1 :] += content[..., k + 1 :] >= content[..., k : k + 1]
        return content

    def holds(self, content: Int[Tensor, "n G g"]) -> Bool[Tensor, "n G"]:
        """No symbol comes twice."""
        return (content.sort(2).values.diff(dim=2) != 0).all(2)

    def choices(self) -> int:
        """S! / (S - size)!."""
        return math.perm(self.symbols, self.size)

    def agreement(self, known: int, drawn: int) -> float:
        """Each is uniform over the S - known symbols that are left; they must differ."""
        left = self.symbols - known
        return math.perm(left, drawn) / left**drawn
