"""Validity and overlap against hand-made cases and plain loops."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from emoe.domains import metrics
from emoe.domains.metrics import nearest_distance, overlap, pair_overlap, position_pairs, support_radius, validity


def rows(*values: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor(values)


def test_nearest_distance_is_exact():
    generator = torch.Generator().manual_seed(1)
    points = torch.randint(60_000, (70, 5), generator=generator)
    support = torch.randint(60_000, (40, 5), generator=generator)
    support[7] = points[3]
    plain = [min(math.dist(p, s) for s in support.tolist()) for p in points.tolist()]
    result = nearest_distance(points, support)
    assert result[3] == 0.0  # exactly: a float32 product would be off by hundreds here
    np.testing.assert_allclose(result.numpy(), plain, rtol=1e-12)


def test_radius_excludes_the_point_itself_but_not_its_twin():
    # nearest neighbours: 0 and 0 (twins), 3 for (0, 3) and 5 for (4, 6)
    support = rows((0, 0), (0, 0), (0, 3), (4, 6))
    assert nearest_distance(support, support, rank=2).tolist() == [0.0, 0.0, 3.0, 5.0]
    assert support_radius(support) == pytest.approx(np.percentile([0, 0, 3, 5], 90))
    assert support_radius(support[:1]) == 0.0


def test_validity_counts_samples_within_the_radius_inclusively():
    support = rows((0, 0), (10, 10))
    samples = rows((0, 0), (3, 4), (10, 16), (5, 5))
    result = validity(samples, support, 5.0)
    assert (result.metric, result.value, result.n) == ("validity", 50.0, 4)
    assert result.stderr == pytest.approx(100 * math.sqrt(0.25 / 4))
    assert validity(samples, support, 0.0).value == 25.0
    many = torch.cat([support[:1].expand(3_000, -1), samples[3:].expand(500, -1)])
    result = validity(many, support, 0.0)  # of the first 3,000
    assert (result.value, result.stderr, result.n) == (100.0, 0.0, 3_000)


def test_overlap_is_one_minus_total_variation_of_whole_rows():
    generator = torch.Generator().manual_seed(2)
    a, b = torch.randint(3, (2, 500, 3), generator=generator)
    distance = 0.0
    for row in itertools.product(range(3), repeat=3):
        counts = [(pool == torch.tensor(row)).all(1).sum().item() for pool in (a, b)]
        distance += abs(counts[0] - counts[1]) / 500 / 2
    assert overlap(a, b).value == pytest.approx(100 * (1 - distance))


def test_bootstrap_error_is_seeded_and_of_the_right_size():
    generator = torch.Generator().manual_seed(3)
    pools = torch.randint(4, (60, 2, 1_000, 1), generator=generator)
    shift = (torch.rand(60, 1_000, 1, generator=generator) < 0.5).long()
    pools[:, 0] *= shift  # half of the samples moved to symbol 0: an overlap far from both ends
    result = [overlap(a, b, seed=7) for a, b in pools]
    spread = np.std([m.value for m in result])
    assert np.mean([m.stderr for m in result]) == pytest.approx(spread, rel=0.3)
    assert overlap(*pools[0], seed=7) == result[0]
    assert overlap(*pools[0], seed=8).stderr != result[0].stderr


def test_pair_overlap_sees_positions_that_do_not_agree():
    # Data: all positions equal. Samples: the same marginals, but independent positions.
    generator = torch.Generator().manual_seed(4)
    data = torch.randint(2, (4_000, 1), generator=generator).expand(-1, 6)
    samples = torch.randint(2, (4_000, 6), generator=generator)
    result = pair_overlap(samples, data)
    assert result.metric == "pair_overlap" and result.n == 4_000
    assert result.value == pytest.approx(50, abs=2)
    again = torch.randint(2, (4_000, 1), generator=generator).expand(-1, 6)
    assert pair_overlap(again, data).value > 97


def test_pair_overlap_is_the_mean_over_pairs_and_equals_overlap_for_two_positions():
    generator = torch.Generator().manual_seed(5)
    a, b = torch.randint(5, (2, 300, 4), generator=generator)
    plain = [overlap(a[:, [i, j]], b[:, [i, j]]).value for i, j in itertools.combinations(range(4), 2)]
    assert pair_overlap(a, b).value == pytest.approx(np.mean(plain))
    assert pair_overlap(a[:, :2], b[:, :2], seed=1).value == overlap(a[:, :2], b[:, :2], seed=1).value


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.long])
def test_copied_rows_are_found_among_many(dtype, monkeypatch):
    monkeypatch.setattr(metrics, "CHUNK", 64)
    trained = torch.randint(0, 250, (1000, 12), generator=torch.Generator().manual_seed(0)).to(dtype)
    samples = trained[[0, 63, 64, 999]].long()
    other = samples + (torch.arange(12) == 5)
    result = metrics.copied(torch.cat([samples, other[:1]]), trained)
    assert (result.value, result.stderr, result.n) == pytest.approx((80, 100 * 0.4 / 5**0.5, 5))


def test_position_pairs():
    assert position_pairs(3, 0) == [(0, 1), (0, 2), (1, 2)]
    assert len(position_pairs(16, 0)) == 120
    many = position_pairs(1_024, 3)
    assert len(set(many)) == 120 and all(0 <= i < j < 1_024 for i, j in many)
    assert many == position_pairs(1_024, 3) != position_pairs(1_024, 4)
    assert position_pairs(1, 0) == []


def test_pools_of_different_size_and_empty_pools_are_refused():
    with pytest.raises(ValueError, match="3 samples against 2 data rows"):
        overlap(torch.zeros(3, 2, dtype=torch.long), torch.zeros(2, 2, dtype=torch.long))
    nothing = torch.zeros(0, 2, dtype=torch.long)
    for measure in (lambda: validity(nothing, rows((0, 0)), 0.0), lambda: overlap(nothing, nothing)):
        with pytest.raises(ValueError, match="no samples"):
            measure()
