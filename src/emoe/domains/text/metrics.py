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

import torch
from jaxtyping import Float, Int, Integer
from torch import Tensor

from emoe.domains.metrics import copied, mean
from emoe.types import Measurement

RUNS = (1, 2, 3)  # tokens of the runs that are counted
REPEATED = 4  # tokens of a repetition


def measure_rows(rows: Int[Tensor, "n L"], trained: Integer[Tensor, "N L"]) -> list[Measurement]:
    """All measures of a pool; runs longer than a row are left out."""
    rows = rows.cpu()
    n, length = rows.shape
    runs = [size for size in RUNS if size <= length]
    measured = [mean("entropy", unigram_entropy(rows))]
    measured += [mean(f"distinct_{size}", distinct(rows, size)) for size in runs]
    if length >= REPEATED:
        measured.append(mean("repetition", 100 - distinct(rows, REPEATED)))
    measured += [Measurement(f"pool_distinct_{size}", pool_distinct(rows, size), None, n) for size in runs]
    measured.append(Measurement("duplicates", 100 * (1 - len(torch.unique(rows, dim=0)) / n), None, n))
    return [*measured, copied(rows, trained)]


def unigram_entropy(rows: Int[Tensor, "n L"]) -> Float[Tensor, " n"]:
    """Entropy in nats of the tokens of each row: the mean over its positions of log(L / count of the token there)."""
    counts = torch.stack([(row[:, None] == row).sum(1) for row in rows])
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
