"""The toy densities: drawing and exact law agree, laws have converged, ceilings of the measures."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from enumeration import ALPHA, chi_square, factorised_chain

from emoe.config import ConfigError, from_dict
from emoe.domains import toy as toys
from emoe.domains.base import DomainConfig
from emoe.domains.toy import DENSITIES, Density, Squares, Strokes, SwissRoll, Toy, ToyConfig, ideal_factorised

PAPER = ["8-modes", "swiss-roll"]
STROKES = {name: density for name, density in DENSITIES.items() if isinstance(density, Strokes)}


@pytest.fixture(scope="module", params=get_args(Density))
def toy(request: pytest.FixtureRequest) -> Toy:
    return ToyConfig(density=request.param).build(0)


def test_kinds_and_densities() -> None:
    toy = ToyConfig(density="8-modes", points=100).build(3)
    assert (toy.space.size, toy.space.mask_id, toy.task) == (51, 50, "toy") and toy.rows.shape == (100, 2)
    assert np.abs(toy.density.centres).max() <= 2.5
    assert DomainConfig.known_kinds() == ["digits", "mnist", "rows", "text", "ties", "toy"]
    assert get_args(Density) == ("8-modes", *DENSITIES) and get_args(Density)[-5:] == toys.HELD_OUT
    with pytest.raises(ConfigError, match="density: .*swiss-roll"):
        from_dict(DomainConfig, {"kind": "toy", "density": "swiss-rol"})


def test_tokens_count_the_edges_at_or_below() -> None:
    points = np.array([[-9.0, -3.0], [-3.0001, -2.876], [0.0, 2.9999], [3.0, 9.0]])
    assert toys.tokenise(points).tolist() == [[0, 1], [0, 1], [25, 48], [49, 49]]


@pytest.mark.parametrize("noise", [0.0, 0.45])
def test_swiss_roll_is_that_of_scikit_learn(noise: float) -> None:
    from sklearn.datasets import make_swiss_roll

    points, along = make_swiss_roll(3_000, noise=noise, random_state=np.random.RandomState(5))
    np.testing.assert_array_equal(SwissRoll(noise).draw(3_000, np.random.RandomState(5)), points[:, [0, 2]] / 7.5)
    if not noise:
        np.testing.assert_allclose(SwissRoll().curve((along / (1.5 * np.pi) - 1) / 2), points[:, [0, 2]], atol=1e-12)


def test_moons_are_those_of_scikit_learn() -> None:
    from sklearn.datasets import make_moons

    curves = [piece.curve(np.linspace(0, 1, 40)) for piece in STROKES["moons"].pieces]
    points, moon = make_moons(80, shuffle=False, noise=0.0)
    for number, curve in enumerate(curves):
        np.testing.assert_allclose(curve, 1.75 * (points - [0.5, 0.25])[moon == number], atol=1e-12)


def test_law_sums_to_one_and_matches_200_000_fresh_rows(toy: Toy) -> None:
    law = toy.density.law()
    assert law.shape == (50, 50) and law.dtype == torch.float64
    assert law.min() >= 0 and abs(law.sum().item() - 1) < 1e-12
    rows = toy.fresh(200_000, 11)
    assert chi_square(torch.bincount(rows[:, 0] * 50 + rows[:, 1], minlength=2_500), law) > ALPHA


def test_fresh_points_come_from_another_stream_than_training_points(toy: Toy) -> None:
    """Equal rows at equal positions are as frequent as for independent draws: the collision rate of the law."""
    rate, fresh = toy.density.law().square().sum().item(), toy.fresh(20_000, 0)
    for mine, other in ((fresh, toy.rows), (fresh, toy.fresh(20_000, 1)), (fresh[1:], toy.rows[:-1])):
        assert abs((mine == other).all(1).double().mean().item() - rate) < 5 * (rate / 20_000) ** 0.5


@pytest.mark.parametrize("name", [*STROKES, "swiss-roll"])
def test_quadrature_has_converged(name: str) -> None:
    density = DENSITIES[name]
    pieces = density.pieces if name in STROKES else [toys.Piece(lambda u: density.curve(u) / 7.5)]
    shares, noise = (density.shares, density.noise) if name in STROKES else (np.ones(1), 0.06)
    midpoints = (np.arange(1 << 14) + 0.5) / (1 << 14), np.full(1 << 14, 1 / (1 << 14))  # an independent rule
    for (u, weights), error in ((toys.quadrature(1_024), 1e-12), (midpoints, 1e-7)):
        points = np.concatenate([piece.curve(u) for piece in pieces])
        law = toys.mixture_law(points, np.concatenate([share * weights for share in shares]), noise)
        assert (density.law() - law).abs().max() < error


def test_law_of_a_square_is_its_overlap_with_the_cells() -> None:
    law = Squares(0.25, np.array([(0.0, -0.0625)])).law()  # two whole cells; half, whole and half
    expected = torch.zeros(50, 50, dtype=torch.float64)
    expected[25:27, 24:27] = torch.tensor([0.125, 0.25, 0.125], dtype=torch.float64)
    assert (law - expected).abs().max() < 1e-15


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_ideal_factorised_is_the_law_of_the_chain(size: int, steps: int) -> None:
    joint = torch.rand(size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(size)) ** 3
    joint /= joint.sum()
    chain = factorised_chain({cell: joint[cell].item() for cell in np.ndindex(size, size)}, steps)
    assert {cell: ideal_factorised(joint, steps)[cell].item() for cell in chain} == pytest.approx(chain, abs=1e-12)
    assert len(chain) == size**2
    with pytest.raises(ValueError, match="steps"):
        ideal_factorised(joint, 0)


def test_one_step_coordination_matters_and_more_steps_regain_it(toy: Toy) -> None:
    law = toy.density.law()
    product = ideal_factorised(law, 1)
    assert torch.special.xlogy(law, law / product.clamp_min(1e-300)).sum().item() > 0.6  # nats
    assert toys.overlap_of_law(product, law) < 55
    scores = [toys.validity_of_law(ideal_factorised(law, steps), toy.support, toy.radius) for steps in (1, 2, 8, 32)]
    assert scores == sorted(scores) and scores[0] < 65 and scores[-1] > 93
    straight = toys.grid_of_modes(0.0).law()  # without the turn 25 modes are the product of their marginals
    assert (straight - ideal_factorised(straight, 1)).abs().max() < 1e-12


def test_ceilings_of_fresh_data(toy: Toy) -> None:
    valid, shared = toy.measure(toy.fresh(20_000, 0))
    assert (valid.metric, valid.n, shared.metric, shared.n) == ("validity", 3_000, "overlap", 20_000)
    wanted = {"8-modes": (99.0, 96.0), "swiss-roll": (98.6, 94.0)}.get(toy.name, (97.0, 90.8))
    width = (0.7, 1.0) if toy.name in PAPER else (2.0, 3.2)
    assert valid.value == pytest.approx(wanted[0], abs=width[0])
    assert shared.value == pytest.approx(wanted[1], abs=width[1])
    assert toy.radius == 0.0 and toy.measure(toy.rows)[0].value == 100.0
    assert toy.measure(toy.rows[:500], seed=1) == toy.measure(toy.rows[:500], seed=1) != toy.measure(toy.rows[:500])


@pytest.mark.parametrize("name", PAPER)
def test_exact_measures_agree_with_measured_pools(name: str) -> None:
    toy = ToyConfig(density=name).build(0)
    law = toy.density.law()
    one_step = ideal_factorised(law, 1)
    drawn = torch.multinomial(one_step.flatten(), 20_000, True, generator=torch.Generator().manual_seed(1))
    valid, shared = toy.measure(torch.stack([drawn // 50, drawn % 50], dim=1))
    assert toys.validity_of_law(one_step, toy.support, toy.radius) == pytest.approx(valid.value, abs=5 * valid.stderr)
    # The bias of finite pools, 4 to 6 points between equal laws, is small between laws this far apart.
    assert toys.overlap_of_law(one_step, law) == pytest.approx(shared.value, abs=1.5)
    assert toys.overlap_of_law(law, law) == pytest.approx(100, abs=1e-9)
    assert toys.validity_of_law(law, toy.support, 100.0) == pytest.approx(100, abs=1e-9)


def test_pictures_put_the_truth_first(tmp_path: Path) -> None:
    toy = ToyConfig(density="moons").build(0)
    pools = {"MDLM": toy.fresh(5_000, 1), "Ground truth": toy.rows}
    assert [axis.get_title() for axis in toy.figure(pools).axes] == ["Ground truth", "MDLM"]
    toy.picture(pools, tmp_path / "deep" / "row.png", title=toy.name)
    assert 5_000 < (tmp_path / "deep" / "row.png").stat().st_size < 120_000
