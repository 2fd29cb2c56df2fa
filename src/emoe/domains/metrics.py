"""Measures of a pool of rows: validity (Eq. 39), overlaps with data, and how varied the rows are."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor

from emoe.types import Measurement

VALIDITY_ROWS = 3_000  # n of Eq. 39 and the size of its set X
OVERLAP_ROWS = 20_000  # rows on each side of an overlap
MOST_PAIRS = 120  # all position pairs up to L = 16
RESAMPLES = 20  # bootstrap draws behind the standard error of an overlap
CHUNK = 1 << 16  # training rows that are read at a time
RUNS = (1, 2, 3)  # tokens of the runs that are counted
REPEATED = 4  # tokens of a repetition

Rows = Int[Tensor, "n L"]
Other = Int[Tensor, "m L"]
Picked = Int[np.ndarray, " n"] | slice


def nearest_distance(points: Rows, support: Other, rank: int = 1) -> Float[Tensor, " n"]:
    """Distance ||point - x||_2 of each point to the nearest x in the support, or to that of another rank.

    Rows are vectors of tokens. |a|^2 + |b|^2 - 2 ab is exact in float64, so a distance of 0 comes out as 0,
    which the radius r = 0 of the toy densities depends on.
    """
    a, b = points.cpu().double(), support.cpu().double()
    squared = a.square().sum(1, keepdim=True) + b.square().sum(1) - 2.0 * a @ b.T
    return squared.kthvalue(rank, dim=1).values.sqrt()


def support_radius(support: Other) -> float:
    """r of Eq. 39: the 90th percentile of the nearest-neighbour distances within the support; 0 for a single row."""
    if len(support) < 2:
        return 0.0
    return float(np.percentile(nearest_distance(support, support, rank=2), 90))  # the row itself has rank 1


def validity(samples: Rows, support: Other, radius: float) -> Measurement:
    """Eq. 39 for the first 3,000 samples: 100/n * #{i : min_x ||sample_i - x||_2 <= r}."""
    return proportion("validity", nearest_distance(not_empty(samples)[:VALIDITY_ROWS], support) <= radius)


def overlap(samples: Rows, data: Other, seed: int = 0) -> Measurement:
    """100 * (1 - TV) between two equally large pools, each a histogram over whole rows.

    TV = 1/2 * sum over rows x of |count_samples(x) - count_data(x)| / n. Unlike validity it shows missing modes. Two
    finite pools of one law stay below 100: read it against the overlap of data with data.
    """
    ids = torch.unique(torch.cat([not_empty(samples).cpu(), data.cpu()]), dim=0, return_inverse=True)[1]
    return _overlap("overlap", ids.numpy()[None], len(samples), seed)


def pair_overlap(samples: Rows, data: Other, seed: int = 0) -> Measurement:
    """Mean over position pairs (i, j) of 100 * (1 - TV) between the laws of (x_i, x_j).

    Long rows hardly ever repeat, so their overlap says nothing; pairs do, and show whether positions agree with each
    other. All pairs up to L = 16, otherwise 120 picked by `seed`.
    """
    both = torch.cat([not_empty(samples).cpu(), data.cpu()]).long()
    size = int(both.max()) + 1
    codes = (both[:, i] * size + both[:, j] for i, j in position_pairs(both.shape[1], seed))
    ids = np.stack([torch.unique(code, return_inverse=True)[1].numpy() for code in codes])
    return _overlap("pair_overlap", ids, len(samples), seed)


def position_pairs(length: int, seed: int) -> list[tuple[int, int]]:
    """All pairs i < j of positions, or 120 different ones picked by `seed` where there are more."""
    if length * (length - 1) // 2 <= MOST_PAIRS:
        return list(itertools.combinations(range(length), 2))
    draw, pairs = random.Random(seed), set[tuple[int, int]]()
    while len(pairs) < MOST_PAIRS:
        first, second = sorted(draw.sample(range(length), 2))
        pairs.add((first, second))
    return sorted(pairs)


def copied(samples: Integer[Tensor, "n L"], trained: Integer[Tensor, "m L"]) -> Measurement:
    """Share of samples that equal a training row in every token, in percent."""
    rows = row_bytes(samples)
    wanted, known = set(rows), set[bytes]()
    for part in trained.split(CHUNK):
        known |= wanted.intersection(row_bytes(part))
    return proportion("copied", torch.tensor([row in known for row in rows]))


def row_bytes(rows: Integer[Tensor, "n L"]) -> list[bytes]:
    """Each row as the bytes of its tokens."""
    return [row.tobytes() for row in rows.cpu().numpy().astype(np.uint16)]


def not_empty(samples: Rows) -> Rows:
    """The samples, of which there must be some."""
    if not len(samples):
        raise ValueError("there are no samples to measure")
    return samples


def proportion(metric: str, hits: Bool[Tensor, " n"]) -> Measurement:
    """Share of hits in percent, with the standard error of a proportion."""
    share, n = hits.double().mean().item(), len(hits)
    return Measurement(metric, 100 * share, 100 * math.sqrt(share * (1 - share) / n), n)


def mean(metric: str, values: Float[Tensor, " n"]) -> Measurement:
    """The mean with its standard error, which a single value does not have."""
    n = len(values)
    return Measurement(metric, values.mean().item(), values.std().item() / math.sqrt(n) if n > 1 else None, n)


def _overlap(metric: str, ids: Int[np.ndarray, "pairs both"], n: int, seed: int) -> Measurement:
    """Mean overlap over the rows of `ids` (cells of the samples, then of the data)."""
    if ids.shape[1] != 2 * n:
        raise ValueError(f"{metric}: {n} samples against {ids.shape[1] - n} data rows; take equally many")

    def value(samples: Picked, data: Picked) -> float:
        shares = []
        for cells in ids:
            size = int(cells.max()) + 1
            counts = [np.bincount(side, minlength=size) for side in (cells[:n][samples], cells[n:][data])]
            shares.append(np.minimum(*counts).sum() / n)  # 1 - TV of histograms of equal mass
        return 100 * float(np.mean(shares))

    return bootstrap(metric, value, n, seed, sides=2)


def bootstrap(metric: str, value: Callable[..., float], n: int, seed: int, *, sides: int = 1) -> Measurement:
    """`value` of all n rows of each side, with its standard deviation over 20 draws of whole rows.

    All positions of a row are drawn together: they share rows, so their errors are correlated.
    """
    draw = np.random.default_rng(seed)
    resampled = [value(*(draw.integers(n, size=n) for _ in range(sides))) for _ in range(RESAMPLES)]
    return Measurement(metric, value(*[slice(None)] * sides), float(np.std(resampled, ddof=1)), n)


def measure_variety(rows: Rows, trained: Integer[Tensor, "N L"]) -> list[Measurement]:
    """Measures of how varied rows are, not whether they are good; runs of tokens longer than a row are left out.

    Means over rows, with their standard errors:

    - `entropy`: -sum_v c_v/L log(c_v/L) in nats, with the count c_v of token v in the row (Eq. 42), at most log L.
    - `distinct_1`, `distinct_2`, `distinct_3`: different runs of n tokens in the row, in percent of its L - n + 1 runs.
    - `repetition`: runs of four tokens that the row had before, in percent of all of them: 100 - distinct_4.
    - `copied`: rows that equal a training row in every token, in percent.

    Of the pool as a whole, without standard errors, since they fall as the pool grows (compare pools of one size):

    - `pool_distinct_1`, `pool_distinct_2`, `pool_distinct_3`: different runs of n tokens in all rows, in percent.
    - `duplicates`: rows that equal an earlier one, in percent.

    None has a best value: a pool with fewer repetitions than held-out rows is as wrong as one with more.
    """
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


def unigram_entropy(rows: Rows) -> Float[Tensor, " n"]:
    """Entropy in nats of the tokens of each row: the mean over its positions of log(L / count of the token there)."""
    counts = torch.stack([(row[:, None] == row).sum(1) for row in rows])
    return (rows.shape[1] / counts.double()).log().mean(1)


def distinct(rows: Rows, size: int) -> Float[Tensor, " n"]:
    """Different runs of `size` tokens in each row, in percent of its L - size + 1 runs."""
    runs = _numbered(rows, size).sort(dim=1).values
    return 100 * ((runs[:, 1:] != runs[:, :-1]).sum(1) + 1).double() / runs.shape[1]


def pool_distinct(rows: Rows, size: int) -> float:
    """Different runs of `size` tokens in all rows together, in percent of their n (L - size + 1) runs."""
    runs = _numbered(rows, size)
    return 100 * len(torch.unique(runs)) / runs.numel()


def _numbered(rows: Rows, size: int) -> Int[Tensor, "n M"]:
    """A number for every run of `size` tokens, equal for equal runs and for these alone; M = L - size + 1."""
    tokens = numbers = torch.unique(rows, return_inverse=True)[1]
    for shift in range(1, size):
        # Numbered anew after every token: products of at most (n L)^2 fit in 64 bits, whatever the vocabulary.
        joined = numbers[:, :-1] * (int(tokens.max()) + 1) + tokens[:, shift:]
        numbers = torch.unique(joined, return_inverse=True)[1]
    return numbers
