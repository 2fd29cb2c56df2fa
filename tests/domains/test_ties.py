"""Tied rows: exact supports, closed forms against enumeration, measures that see broken ties and collapse."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from enumeration import ALPHA, all_rows, chi_square, factorised_chain

from emoe.config import ConfigError, from_dict
from emoe.domains.base import DomainConfig
from emoe.domains.ties import Ties, TiesConfig, layout
from emoe.types import Measurement

FAMILIES = ["pairs", "copies", "sums", "permutations", "blocks"]
LENGTHS = [2, 4, 16, 64]
# Small enough to list all S^L rows.
SIZES = {family: [(2, 3), (4, 3), (4, 4), (6, 3)] for family in ("pairs", "copies", "blocks")}
SIZES |= {"sums": [(2, 3), (4, 3), (4, 4)], "permutations": [(2, 3), (3, 4), (4, 4), (6, 3)]}
SMALL = [(family, *sizes) for family in FAMILIES for sizes in SIZES[family]]


def build(family: str, length: int = 16, symbols: int = 8, *, points: int = 50, seed: int = 0) -> Ties:
    return TiesConfig(family=family, length=length, symbols=symbols, points=points).build(seed)


def measured(domain: Ties, samples: torch.Tensor, seed: int = 0) -> dict[str, Measurement]:
    return {item.metric: item for item in domain.measure(samples, seed)}


def allowed(family: str, row: Sequence[int], symbols: int) -> list[bool]:
    """Which ties of a row hold, in words of plain Python."""
    length = len(row)
    if family == "pairs":
        return [row[i] == row[i + 1] for i in range(0, length, 2)]
    if family == "copies":
        return [row[i] == row[i + length // 2] for i in range(length // 2)]
    if family == "sums":
        size = 2 if length == 2 else 4
        return [sum(row[i : i + size]) % symbols == 0 for i in range(0, length, size)]
    if family == "permutations":
        size = min(length, symbols)
        return [len(set(row[i : i + size])) == size for i in range(0, length, size)]
    tie, groups = layout("blocks", length, symbols)
    second = tie.last(np.tile(np.arange(symbols)[:, None, None], (1, len(groups), 1)))  # after each first symbol
    return [row[b] == second[row[a], i] for i, (a, b) in enumerate(groups.tolist())]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_row_is_in_the_support(family: str, length: int) -> None:
    domain = build(family, length, points=300)
    assert (domain.space.size, domain.space.mask_id, domain.space.length) == (9, 8, length)
    assert (domain.task, domain.name) == ("ties", f"{family}-L{length}")
    rows = domain.rows.clone()
    rows[:, domain.groups[0]] = domain.space.mask_id  # a mask breaks its tie
    assert not domain.kept(rows)[:, 0].any() and domain.kept(rows)[:, 1:].all()
    for rows in (domain.rows, domain.fresh(300, 1)):
        assert rows.shape == (300, length) and rows.dtype == torch.long
        assert all(all(allowed(family, row, 8)) for row in rows.tolist())
    measures = measured(domain, domain.fresh(300, 2))
    assert (measures["ties"].value, measures["rows_valid"].value) == (100.0, 100.0)
    assert (measures["ties"].stderr, measures["rows_valid"].stderr) == (0.0, 0.0)


@pytest.mark.parametrize("family,length,symbols", SMALL)
def test_the_law_is_uniform_over_the_support(family: str, length: int, symbols: int) -> None:
    domain = build(family, length, symbols)
    every = all_rows(range(symbols), length)
    kept = domain.kept(every)
    assert kept.tolist() == [allowed(family, row, symbols) for row in every.tolist()]
    assert domain.ideal(1) == pytest.approx(100 * kept.double().mean().item(), rel=1e-12)
    support = kept.all(1)
    numbers = (domain.fresh(60 * int(support.sum()), 3) * symbols ** torch.arange(length).flip(0)).sum(1)
    assert chi_square(torch.bincount(numbers, minlength=len(every)), support / support.sum()) > ALPHA
    marginals = [column.bincount(minlength=symbols) for column in every[support].T]
    assert all((marginal * symbols == support.sum()).all() for marginal in marginals)


@pytest.mark.parametrize(
    "family,length,symbols",
    [("pairs", 2, 3), ("blocks", 2, 3), ("sums", 4, 2), ("permutations", 3, 3), ("permutations", 3, 4)],
)
def test_the_ideal_factorised_chain(family: str, length: int, symbols: int) -> None:
    domain = build(family, length, symbols)
    support = [r for r in itertools.product(range(symbols), repeat=length) if all(allowed(family, r, symbols))]
    for steps in (1, 2, 3):
        chain = factorised_chain(dict.fromkeys(support, 1 / len(support)), steps)
        assert domain.ideal(steps) == pytest.approx(100 * sum(chain.get(row, 0) for row in support), rel=1e-12)
    shares = [domain.ideal(steps) for steps in (1, 2, 4, 16, 5_000)]
    assert shares == sorted(shares) and 99.8 < shares[-1] < 100
    if family != "permutations":  # the closed form of pairs of eight symbols
        assert [build("pairs").ideal(steps) for steps in (1, 2, 4)] == pytest.approx([12.5, 56.25, 78.125])
    with pytest.raises(ValueError, match="steps: must be >= 1"):
        domain.ideal(0)


def test_blocks_are_a_matching_without_pattern_that_no_seed_changes() -> None:
    one, other = build("blocks", 64, seed=0), build("blocks", 64, seed=1)
    assert torch.equal(one.groups, other.groups)
    assert sorted(one.groups.flatten().tolist()) == list(range(64))
    assert len(set((one.groups[:, 1] - one.groups[:, 0]).tolist())) > 10
    assert one.kept(other.rows).all()
    bijections = one.tie.last(np.tile(np.arange(8)[:, None, None], (1, 32, 1))).T
    assert (np.sort(bijections, axis=1) == np.arange(8)).all() and len(set(map(tuple, bijections.tolist()))) == 32
    # Rows drawn by an older version must stay valid: the law is part of a run's data.
    small = build("blocks", 4, 4)
    assert small.groups.tolist() == [[0, 3], [1, 2]]
    assert small.tie.last(np.tile(np.arange(4)[:, None, None], (1, 2, 1))).T.tolist() == [[1, 3, 2, 0], [1, 2, 0, 3]]


def test_ties_and_valid_rows_by_hand() -> None:
    domain = build("pairs", 4)
    rows = torch.tensor([[1, 1, 2, 2], [1, 1, 2, 3], [5, 4, 3, 2], [7, 7, 0, 0]])
    measures = measured(domain, rows)
    assert (measures["ties"].value, measures["rows_valid"].value, measures["ties"].n) == (62.5, 50.0, 4)
    assert measures["ties"].stderr == pytest.approx(100 * np.std([1, 0.5, 0, 1]) / 2)
    assert measures["rows_valid"].stderr == pytest.approx(25.0)
    # Position laws (S = 8): {1: 1/2, 5, 7}, {1: 1/2, 4, 7}, {2: 1/2, 3, 0}, {2: 1/2, 3, 0}.
    assert measures["coverage"].value == pytest.approx(3 * 12.5)
    assert measures["entropy"].value == pytest.approx(1.5 * math.log(2))
    assert domain.heat_map(rows)[:2].tolist() == [[1, 1, 2, 2], [1, 1, 8, 8]]  # broken ties are masked
    with pytest.raises(ValueError, match="no samples"):
        domain.measure(rows[:0])


@pytest.mark.parametrize("family", FAMILIES)
def test_collapse_is_seen_although_every_tie_holds(family: str) -> None:
    domain = build(family)
    real = measured(domain, domain.fresh(4_000, 1), seed=1)
    # Below 100: even with the same seed, rows are compared with others than themselves.
    assert real["coverage"].value > 97 and 90 < real["pair_overlap"].value < 97
    assert real["entropy"].value == pytest.approx(math.log(8), abs=5e-3)
    one = measured(domain, domain.rows[:1].expand(4_000, -1))
    assert (one["ties"].value, one["rows_valid"].value) == (100.0, 100.0)
    assert one["coverage"].value == pytest.approx(12.5) and one["entropy"].value == 0.0
    assert one["pair_overlap"].value < 10
    few = measured(domain, domain.rows[:20].repeat(200, 1))  # 20 rows: nearly uniform symbols, but few pairs of them
    assert few["rows_valid"].value == 100.0 and few["pair_overlap"].value < 50 < few["coverage"].value < 90


@pytest.mark.parametrize(
    "fields,message",
    [
        ({"family": "pairs", "length": 5}, "length: pairs cannot cut 5 positions into groups of 2; .*even"),
        ({"family": "sums", "length": 6}, "length: sums .*groups of 4; choose 2 or a multiple of 4"),
        ({"family": "permutations", "length": 12}, "length: permutations .*at most 8 or a multiple of 8"),
    ],
)
def test_config_errors_name_the_field_and_the_remedy(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_dict(DomainConfig, {"kind": "ties", **fields})
