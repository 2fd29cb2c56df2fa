"""Measures of rows of tokens: constant and uniform rows, counts by hand, rows that were seen before."""

from __future__ import annotations

import math

import pytest
import torch

from emoe.domains.metrics import distinct, measure_variety, pool_distinct, unigram_entropy
from emoe.types import Measurement


def measured(rows: list[list[int]], trained: list[list[int]] | None = None) -> dict[str, Measurement]:
    return {item.metric: item for item in measure_variety(torch.tensor(rows), torch.tensor(trained or rows))}


def test_entropy_is_that_of_the_counts():
    rows = torch.stack([torch.full((128,), 7), torch.arange(128)])
    assert unigram_entropy(rows).tolist() == pytest.approx([0.0, math.log(128)], abs=1e-12)
    rows = torch.randint(0, 9, (20, 40), generator=torch.Generator().manual_seed(0))
    shares = torch.stack([torch.bincount(row, minlength=9) / 40 for row in rows]).double()
    assert torch.allclose(unigram_entropy(rows), -torch.special.xlogy(shares, shares).sum(1))


def plain(row: list[int], size: int) -> list[tuple[int, ...]]:
    return [tuple(row[i : i + size]) for i in range(len(row) - size + 1)]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_runs_are_counted_as_sets_of_tuples(size):
    rows = torch.randint(0, 4, (30, 17), generator=torch.Generator().manual_seed(size)) * 16_000  # large tokens too
    expected = [100 * len(set(plain(row, size))) / (18 - size) for row in rows.tolist()]
    assert distinct(rows, size).tolist() == pytest.approx(expected)
    together = {run for row in rows.tolist() for run in plain(row, size)}
    assert pool_distinct(rows, size) == pytest.approx(100 * len(together) / (30 * (18 - size)))


def test_repetition_is_the_share_of_runs_that_came_before():
    row = [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]  # 3 of its 7 runs of four
    measures = measured([row, list(range(10))])
    assert measures["repetition"].value == pytest.approx((100 * 3 / 7 + 0) / 2)
    assert measures["repetition"].stderr == pytest.approx(100 * 3 / 7 / 2)  # of two values


def test_pool_measures():
    rows = [[1, 2, 3, 4], [1, 2, 3, 4], [5, 6, 7, 8], [1, 2, 3, 4], [4, 3, 2, 1]]
    measures = measured(rows, [[4, 3, 2, 1], [9, 9, 9, 9], [4, 3, 2, 1]])
    assert measures["duplicates"].value == pytest.approx(40)
    assert (measures["copied"].value, measures["copied"].stderr) == pytest.approx((20, 100 * 0.4 / 5**0.5))
    assert measures["pool_distinct_1"].value == pytest.approx(40)
    assert measures["pool_distinct_3"].value == pytest.approx(60)
    assert measures["distinct_3"].value == 100 and measures["repetition"].value == 0


def test_rows_too_short_for_runs():
    names = {"entropy", "distinct_1", "distinct_2", "pool_distinct_1", "pool_distinct_2", "duplicates", "copied"}
    assert measured([[1, 2], [2, 1]]).keys() == names
    assert all(item.stderr is None for name, item in measured([[1]]).items() if name != "copied")
