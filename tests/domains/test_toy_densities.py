"""The planar densities beyond the paper's two: drawing and exact law agree, and one-step coordination matters."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
import torch
from scipy import stats

from emoe.config import ConfigError, from_dict
from emoe.domains.base import DomainConfig
from emoe.domains.toy import Density, Toy, ToyConfig, data, densities
from emoe.domains.toy.densities import HELD_OUT, PLANAR, SELECTION, Squares, Strokes
from emoe.domains.toy.metrics import ideal_factorised, overlap_of_law, validity_of_law

NEW = [*SELECTION, *HELD_OUT]
STROKES = {name: density for name, density in PLANAR.items() if isinstance(density, Strokes)}


@pytest.fixture(scope="module", params=NEW)
def toy(request: pytest.FixtureRequest) -> Toy:
    return ToyConfig(density=request.param).build(0)


# --- names


def test_names_are_those_of_the_config_and_no_density_is_in_two_roles():
    assert get_args(Density) == ("8-modes", "swiss-roll", *SELECTION, *HELD_OUT)
    assert list(PLANAR) == NEW and len(set(NEW)) == 9


@pytest.mark.parametrize("name", ["square", "", 3])
def test_a_wrong_name_is_answered_with_the_allowed_ones(name):
    with pytest.raises(ConfigError) as error:
        from_dict(DomainConfig, {"kind": "toy", "density": name})
    (line,) = error.value.problems
    assert line.startswith("density: ") and all(known in line for known in get_args(Density))


def test_a_wrong_name_in_a_script_is_no_other_density():
    config = ToyConfig(density="moons")
    assert list(config.conflicts()) == []
    object.__setattr__(config, "density", "moon")  # the constructor's types are checked here, not in a user's script
    (line,) = config.conflicts()
    assert line.startswith("density: 'moon' is not known; allowed: 8-modes, swiss-roll, ")


def test_help_lists_the_names(capsys: pytest.CaptureFixture[str]):
    from emoe.cli import main

    assert main(["train", "toy-8modes-emoe", "--help"]) == 0
    assert "|".join(get_args(Density)) in capsys.readouterr().out


# --- drawing


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("8-modes", [[27, 23], [25, 30], [25, 30], [29, 16]]),
        ("swiss-roll", [[15, 20], [28, 21], [34, 35], [38, 28]]),
        ("checkerboard", [[37, 41], [7, 11], [41, 42], [11, 14]]),
        ("moons", [[10, 34], [23, 17], [30, 28], [46, 24]]),
        ("25-modes", [[18, 37], [19, 4], [27, 19], [18, 4]]),
        ("two-rings", [[15, 42], [44, 23], [31, 44], [32, 20]]),
        ("pinwheel", [[13, 23], [22, 21], [27, 7], [33, 30]]),
        ("three-rings", [[39, 14], [34, 11], [26, 14], [25, 19]]),
        ("diagonal-grid", [[28, 38], [14, 13], [6, 23], [27, 40]]),
        ("two-spirals", [[32, 28], [39, 29], [38, 30], [21, 35]]),
        ("letter", [[14, 33], [33, 40], [14, 30], [24, 44]]),
    ],
)
def test_stored_results_stay_valid_since_streams_do_not_change(name, rows):
    assert ToyConfig(density=name).build(0).rows[:4].tolist() == rows


@pytest.mark.parametrize("name", NEW)
def test_equal_seeds_give_equal_points_and_other_seeds_others(name):
    first, again, other = (ToyConfig(density=name, points=500).build(seed) for seed in (1, 1, 2))
    assert torch.equal(first.rows, again.rows) and torch.equal(first.fresh(100, 5), again.fresh(100, 5))
    assert not torch.equal(first.rows, other.rows) and not torch.equal(first.rows[:100], first.fresh(100, 5))
    assert not torch.equal(first.fresh(100, 5), first.fresh(100, 6))
    assert torch.equal(first.cell_probabilities(), other.cell_probabilities())  # only the points are random


def test_moons_are_those_of_scikit_learn():
    from sklearn.datasets import make_moons

    curves = [piece.curve(np.linspace(0, 1, 40)) for piece in STROKES["moons"].pieces]
    points, moon = make_moons(80, shuffle=False, noise=0.0)
    expected = 1.75 * (points - [0.5, 0.25])
    np.testing.assert_allclose(curves[0], expected[moon == 0], atol=1e-12)
    np.testing.assert_allclose(curves[1], expected[moon == 1], atol=1e-12)


def test_noise_and_shares_of_the_modes():
    modes = STROKES["25-modes"]
    centres = np.concatenate([piece.curve(np.zeros(1)) for piece in modes.pieces])
    points = modes.draw(40_000, data.random_state(4))
    nearest = np.linalg.norm(points[:, None] - centres, axis=2).argmin(1)
    assert stats.chisquare(np.bincount(nearest, minlength=25)).pvalue > 1e-3
    assert stats.kstest((points - centres[nearest]).ravel() / modes.noise, "norm").pvalue > 1e-3


def test_pieces_are_drawn_by_mass():
    uneven = Strokes(0.01, (densities.segment((-2, 0), (-2, 1)), densities.segment((2, 0), (2, 3))))
    np.testing.assert_allclose(uneven.shares, [0.25, 0.75])
    left = (uneven.draw(10_000, data.random_state(1))[:, 0] < 0).mean()
    assert abs(left - 0.25) < 4 * (0.25 * 0.75 / 10_000) ** 0.5
    assert uneven.law()[:25].sum().item() == pytest.approx(0.25, abs=1e-12)


# --- exact laws


def test_law_sums_to_one_and_matches_200_000_fresh_rows(toy: Toy):
    law = toy.cell_probabilities()
    assert law.shape == (50, 50) and law.dtype == torch.float64
    assert law.min() >= 0 and abs(law.sum().item() - 1) < 1e-12
    rows = toy.fresh(200_000, 11)
    found = np.bincount((rows[:, 0] * 50 + rows[:, 1]).numpy(), minlength=2_500)
    expected = 200_000 * law.flatten().numpy()
    assert found[expected == 0].sum() == 0
    common = expected >= 5
    assert common.sum() > 300
    rare = expected[~common].sum() > 0  # all rare cells as one; the checkerboard has none
    found, expected = (np.append(x[common], x[~common].sum() if rare else []) for x in (found, expected))
    assert stats.chisquare(found, expected * found.sum() / expected.sum()).pvalue > 1e-3


@pytest.mark.parametrize("name", STROKES)
def test_quadrature_has_converged(name):
    law = STROKES[name].law()
    assert (law - STROKES[name].law(panels=256)).abs().max() < 1e-12
    u = (np.arange(1 << 12) + 0.5) / (1 << 12)  # an independent rule: midpoints
    places = np.concatenate([piece.curve(u) for piece in STROKES[name].pieces])
    weights = torch.from_numpy(np.repeat(STROKES[name].shares / len(u), len(u)))
    assert (law - data.mixture_law(places, weights, STROKES[name].noise)).abs().max() < 1e-7


def test_law_of_a_square_is_its_overlap_with_the_cells():
    law = Squares(0.25, ((0.0, -0.0625),)).law()  # two whole cells; half, whole and half
    expected = torch.zeros(50, 50, dtype=torch.float64)
    expected[25:27, 24:27] = torch.tensor([0.125, 0.25, 0.125], dtype=torch.float64)
    assert (law - expected).abs().max() < 1e-15
    outside = Squares(0.25, ((3.0, -3.25),)).law()  # the outermost cells take what lies beyond the edges
    assert outside[49, 0] == 1 and outside.sum() == 1


def test_densities_lie_within_the_edges(toy: Toy):
    law = toy.cell_probabilities()
    assert 1 - law[1:49, 1:49].sum().item() < 1e-3


# --- what they test


def test_one_step_coordination_matters(toy: Toy):
    law = toy.cell_probabilities()
    product = ideal_factorised(law, 1)
    assert torch.special.xlogy(law, law / product.clamp_min(1e-300)).sum().item() > 0.6  # nats
    assert overlap_of_law(product, law) < 55
    assert validity_of_law(product, toy.support, toy.radius) < 65


def test_a_grid_along_the_axes_would_not_do():
    """The turn is what makes the 25 modes a test: without it they are the product of their marginals."""
    law = densities._modes(angle=0.0).law()
    assert (law - ideal_factorised(law, 1)).abs().max() < 1e-12


def test_ceilings_of_fresh_data(toy: Toy):
    valid, shared = toy.measure(toy.fresh(20_000, 0))
    assert toy.radius == 0.0 and valid.value > 95
    assert 95 < validity_of_law(toy.cell_probabilities(), toy.support, toy.radius) < 98.5
    assert shared.value == pytest.approx(90.8, abs=3.2)
