"""Measures of rows of tokens without a language model. They say how varied text is, not whether it is good.

Means over rows, with their standard errors:

- `entropy`: -sum_v (c_v / L) log(c_v / L) in nats, with the count c_v of token v in the row (Eq. 42); at most log L.
- `distinct_1`, `distinct_2`, `distinct_3`: different runs of n tokens in the row, in percent of its L - n + 1 runs.
- `repetition`: runs of four tokens that the row had before, in percent of all of them: 100 - distinct_4.
- `copied`: rows that equal a training row in every token, in percent.

Of the pool as a whole, without standard errors, since they fall as the pool grows (compare pools of one size):

- `pool_distinct_1`, `pool_distinct_2`, `pool_distinct_3`: different runs of n tokens in all rows, in percent of all.
- `duplicates`: rows that equal an earlier one, in percent.

None has a best value: a pool with fewer repetitions than held-out rows is as wrong as one with more.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Integer
from numpy.typing import NDArray
from torch import Tensor

from emoe.domains.metrics import mean, proportion
from emoe.rng import derive_seed
from emoe.types import Measurement

RUNS = (1, 2, 3)  # tokens of the runs that are counted
REPEATED = 4  # tokens of a repetition
CHUNK = 1 << 16  # training rows that are read at a time


def measure_rows(rows: Int[Tensor, "n L"], trained: KnownRows | None = None) -> list[Measurement]:
    """All measures of a pool; runs longer than a row are left out, and `copied` without training rows."""
    rows = rows.cpu()
    n, length = rows.shape
    runs = [size for size in RUNS if size <= length]
    measured = [mean("entropy", unigram_entropy(rows))]
    measured += [mean(f"distinct_{size}", distinct(rows, size)) for size in runs]
    if length >= REPEATED:
        measured.append(mean("repetition", 100 - distinct(rows, REPEATED)))
    measured += [Measurement(f"pool_distinct_{size}", pool_distinct(rows, size), None, n) for size in runs]
    measured.append(Measurement("duplicates", 100 * (1 - len(torch.unique(rows, dim=0)) / n), None, n))
    return measured if trained is None else [*measured, proportion("copied", trained.holds(rows))]


def unigram_entropy(rows: Int[Tensor, "n L"]) -> Float[Tensor, " n"]:
    """Entropy in nats of the tokens of each row: the mean over its positions of log(L / count of the token there)."""
    counts = torch.stack([(row[:, None] == row).sum(1) for row in rows]) if len(rows) else rows
    return (rows.shape[1] / counts.double()).log().mean(1)


def distinct(rows: Int[Tensor, "n L"], size: int) -> Float[Tensor, " n"]:
    """Different runs of `size` tokens in each row, in percent of its L - size + 1 runs."""
    runs = _numbered(rows, size).sort(dim=1).values
    return 100 * ((runs[:, 1:] != runs[:, :-1]).sum(1) + 1).double() / runs.shape[1]


def pool_distinct(rows: Int[Tensor, "n L"], size: int) -> float:
    """Different runs of `size` tokens in all rows together, in percent of their n (L - size + 1) runs."""
    runs = _numbered(rows, size)
    return 100 * len(torch.unique(runs)) / runs.numel()


def _numbered(rows: Int[Tensor, "n L"], size: int) -> Int[Tensor, "n M"]:
    """A number for every run of `size` tokens, equal for equal runs and for these alone; M = L - size + 1."""
    tokens = numbers = torch.unique(rows, return_inverse=True)[1]
    for shift in range(1, size):
        # Numbered anew after every token: products of at most (n L)^2 fit in 64 bits, whatever the vocabulary.
        joined = numbers[:, :-1] * (int(tokens.max()) + 1) + tokens[:, shift:]
        numbers = torch.unique(joined, return_inverse=True)[1]
    return numbers


class KnownRows:
    """Rows that other rows are looked up in; 8 bytes of each are kept, the row is read again where those agree.

    Row x has the key sum_l a_l x_l mod 2^64 with fixed odd numbers a_l.
    """

    def __init__(self, rows: Integer[Tensor, "N L"]):
        self.rows = rows
        draw = np.random.default_rng(derive_seed("known rows"))
        self._factors = draw.integers(0, 1 << 63, rows.shape[1], dtype=np.uint64) * np.uint64(2) + np.uint64(1)
        keys = np.concatenate([self._keys(part) for part in rows.split(CHUNK)])
        self._order = np.argsort(keys, kind="stable")
        self._sorted = keys[self._order]

    def _keys(self, rows: Integer[Tensor, "n L"]) -> NDArray[np.uint64]:
        return rows.numpy().astype(np.uint64) @ self._factors

    def holds(self, rows: Int[Tensor, "n L"]) -> Bool[Tensor, " n"]:
        """Which of these rows are known."""
        keys = self._keys(rows)
        first, last = (np.searchsorted(self._sorted, keys, side) for side in ("left", "right"))
        known = [
            any(torch.equal(self.rows[int(i)].long(), row) for i in self._order[a:b])
            for row, a, b in zip(rows, first, last, strict=True)
        ]
        return torch.tensor(known, dtype=torch.bool)
