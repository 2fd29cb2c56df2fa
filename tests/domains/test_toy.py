"""The toy densities: data as in App. B.1, exact laws, ceilings of the measures, pictures."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from scipy import stats

from emoe.config import ConfigError, from_dict, override, to_dict
from emoe.domains.base import DomainConfig
from emoe.domains.toy import Toy, ToyConfig, data
from emoe.domains.toy.figures import grid_picture, histogram, truth_first
from emoe.domains.toy.metrics import ideal_factorised, overlap_of_law, validity_of_law

DENSITIES = ["8-modes", "swiss-roll"]


@pytest.fixture(scope="module", params=DENSITIES)
def toy(request: pytest.FixtureRequest) -> Toy:
    return ToyConfig(density=request.param).build(0)


def counts(tokens: torch.Tensor) -> np.ndarray:
    return np.bincount((tokens[:, 0] * 50 + tokens[:, 1]).numpy(), minlength=2_500)


# --- data


def test_space_and_rows(toy: Toy):
    assert (toy.space.size, toy.space.mask_id, toy.space.length) == (51, 50, 2)
    assert toy.task == "toy" and toy.name in DENSITIES
    assert toy.rows.shape == (20_000, 2) and toy.rows.dtype == torch.long
    assert toy.rows.min() >= 0 and toy.rows.max() <= 49


def test_tokens_count_the_edges_at_or_below():
    points = np.array([[-9.0, -3.0], [-3.0001, -2.876], [0.0, 2.9999], [3.0, 9.0]])
    assert data.tokenise(points).tolist() == [[0, 1], [0, 1], [25, 48], [49, 49]]
    assert len(data.EDGES) == 49 and data.EDGES[0] == -3 and data.EDGES[-1] == 3
    assert np.diff(data.EDGES) == pytest.approx(0.125)


def test_eight_modes_points():
    centres = data.mode_centres(data.random_state(3))
    assert centres.shape == (8, 2) and np.abs(centres).max() <= 2.5
    far = np.array(list(itertools.product([-2.0, 2.0], [-2.0, -0.5, 0.5, 2.0])))
    points = data.eight_modes(40_000, far, data.random_state(4))
    cluster = np.linalg.norm(points[:, None] - far, axis=2).argmin(1)
    assert stats.chisquare(np.bincount(cluster, minlength=8)).pvalue > 1e-3
    noise = (points - far[cluster]).ravel()
    assert stats.kstest(noise / 0.09, "norm").pvalue > 1e-3


@pytest.mark.parametrize("noise", [0.0, 0.45])
def test_swiss_roll_is_that_of_scikit_learn(noise: float, monkeypatch: pytest.MonkeyPatch):
    from sklearn.datasets import make_swiss_roll

    monkeypatch.setattr(data, "ROLL_NOISE", noise)
    points, _ = make_swiss_roll(3_000, noise=noise, random_state=np.random.RandomState(5))
    np.testing.assert_array_equal(data.swiss_roll(3_000, np.random.RandomState(5)), points[:, [0, 2]] / 7.5)


def test_spiral_is_the_noiseless_curve_of_scikit_learn():
    from sklearn.datasets import make_swiss_roll

    points, along = make_swiss_roll(500, noise=0.0, random_state=6)
    u = (along / (1.5 * np.pi) - 1) / 2
    np.testing.assert_allclose(data.spiral(u), points[:, [0, 2]], atol=1e-12)


# --- random streams


@pytest.mark.parametrize("density", DENSITIES)
def test_equal_seeds_give_equal_data_and_other_seeds_other_data(density):
    first, again, other = (ToyConfig(density=density).build(seed) for seed in (1, 1, 2))
    assert torch.equal(first.rows, again.rows) and np.array_equal(first.centres, again.centres)
    assert not torch.equal(first.rows, other.rows) and not np.array_equal(first.centres, other.centres)
    assert torch.equal(first.fresh(100, 5), again.fresh(100, 5))
    assert not torch.equal(first.fresh(100, 5), first.fresh(100, 6))
    assert not torch.equal(first.fresh(100, 5), other.fresh(100, 5))


def test_centres_can_be_held_while_points_change():
    one, two = (ToyConfig(density="8-modes", centres_seed=9).build(seed) for seed in (1, 2))
    assert np.array_equal(one.centres, two.centres) and not torch.equal(one.rows, two.rows)
    assert np.array_equal(ToyConfig(density="8-modes").build(9).centres, one.centres)


def test_fresh_points_come_from_another_stream_than_training_points(toy: Toy):
    """Equal rows at equal places are as frequent as for independent draws: the collision rate of the law."""
    rate = toy.cell_probabilities().square().sum().item()
    error = (rate / 20_000) ** 0.5
    fresh = toy.fresh(20_000, 0)
    for other in (toy.rows, toy.fresh(20_000, 1), ToyConfig(density=toy.name, centres_seed=0).build(1).rows):
        assert abs((fresh == other).all(1).double().mean().item() - rate) < 5 * error
    points = toy.rows[:-1] == toy.fresh(20_000, 0)[1:]  # nor is one the other shifted by a draw
    assert abs(points.all(1).double().mean().item() - rate) < 5 * error


# --- exact laws


def test_law_sums_to_one_and_matches_200_000_fresh_rows(toy: Toy):
    law = toy.cell_probabilities()
    assert law.shape == (50, 50) and law.dtype == torch.float64
    assert law.min() >= 0 and abs(law.sum().item() - 1) < 1e-12
    expected = 200_000 * law.flatten().numpy()
    found = counts(toy.fresh(200_000, 11))
    common = expected >= 5
    expected = np.append(expected[common], expected[~common].sum())
    found = np.append(found[common], found[~common].sum())
    assert len(expected) > 150
    assert stats.chisquare(found, expected * found.sum() / expected.sum()).pvalue > 1e-3


def test_outermost_cells_take_the_tails():
    law = data.coordinate_law(torch.tensor([-50.0, 50.0, 3.0], dtype=torch.float64), 0.09)
    assert law[0, 0] == 1 and law[1, 49] == 1 and law[2, 49] == pytest.approx(0.5)
    assert law.sum(1).tolist() == pytest.approx([1, 1, 1], abs=1e-15)


def test_swiss_roll_quadrature_has_converged():
    law = data.swiss_roll_law()
    assert (law - data.swiss_roll_law(panels=1_024)).abs().max() < 1e-12
    u = (np.arange(1 << 17) + 0.5) / (1 << 17)  # an independent rule: fine midpoints
    weight = torch.full((1 << 17,), 2.0**-17, dtype=torch.float64)
    assert (law - data.mixture_law(data.spiral(u) / 7.5, weight, 0.06)).abs().max() < 1e-9


# --- the best factorised chain


def chain_law(joint: torch.Tensor, steps: int) -> torch.Tensor:
    """Brute force: propagate the law over {0..V-1, mask}^2 through all steps of the factorised chain."""
    size = len(joint)
    state = {(size, size): 1.0}
    for i in range(steps, 0, -1):
        after: dict[tuple[int, int], float] = {}
        for (a, b), mass in state.items():
            first = joint.sum(1) if b == size else joint[:, b] / joint[:, b].sum()
            second = joint.sum(0) if a == size else joint[a] / joint[a].sum()
            options = []
            for token, law in ((a, first), (b, second)):
                drawn = [(v, law[v].item() / i) for v in range(size)] + [(size, 1 - 1 / i)]
                options.append(drawn if token == size else [(token, 1.0)])
            for (x, p), (y, q) in itertools.product(*options):
                after[x, y] = after.get((x, y), 0.0) + mass * p * q
        state = after
    assert state.pop((size, size), 0.0) == 0.0
    law = torch.zeros(size + 1, size + 1, dtype=torch.float64)
    for place, mass in state.items():
        law[place] = mass
    assert law[size].sum() == 0 and law[:, size].sum() == 0
    return law[:size, :size]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_ideal_factorised_is_the_law_of_the_chain(size: int, steps: int):
    joint = torch.rand(size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(size)) ** 3
    joint /= joint.sum()
    assert (ideal_factorised(joint, steps) - chain_law(joint, steps)).abs().max() < 1e-12


def test_ideal_factorised_ends():
    joint = torch.tensor([[0.5, 0.0], [0.0, 0.5]], dtype=torch.float64)
    assert ideal_factorised(joint, 1).tolist() == [[0.25, 0.25], [0.25, 0.25]]
    assert (ideal_factorised(joint, 10**6) - joint).abs().max() < 1e-6
    with pytest.raises(ValueError, match="steps"):
        ideal_factorised(joint, 0)


# --- measures


def test_radius_is_zero_and_training_rows_are_valid(toy: Toy):
    assert toy.radius == 0.0
    assert toy.measure(toy.rows)[0].value == 100.0


@pytest.mark.parametrize("density,expected,ceiling", [("8-modes", 99.0, 96.0), ("swiss-roll", 98.6, 94.0)])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_ceilings_of_fresh_data(density: str, expected: float, ceiling: float, seed: int):
    toy = ToyConfig(density=density).build(seed)
    valid, shared = toy.measure(toy.fresh(20_000, 0))
    assert (valid.metric, valid.n, shared.metric, shared.n) == ("validity", 3_000, "overlap", 20_000)
    assert valid.value == pytest.approx(expected, abs=0.7)
    assert shared.value == pytest.approx(ceiling, abs=1)
    assert 0.1 < valid.stderr < 0.3 and 0.1 < shared.stderr < 0.6


def test_measures_are_seeded_and_take_small_pools(toy: Toy):
    pool = toy.fresh(500, 3)
    assert toy.measure(pool, seed=1) == toy.measure(pool, seed=1) != toy.measure(pool, seed=2)
    assert [m.n for m in toy.measure(pool)] == [500, 500]


def test_exact_measures_agree_with_measured_pools(toy: Toy):
    law = toy.cell_probabilities()
    one_step = ideal_factorised(law, 1)
    drawn = torch.multinomial(one_step.flatten(), 20_000, True, generator=torch.Generator().manual_seed(1))
    valid, shared = toy.measure(torch.stack([drawn // 50, drawn % 50], dim=1))
    assert validity_of_law(one_step, toy.support, toy.radius) == pytest.approx(valid.value, abs=5 * valid.stderr)
    # The bias of finite pools, 4 to 6 points between equal laws, is small between laws this far apart.
    assert overlap_of_law(one_step, law) == pytest.approx(shared.value, abs=1.5)
    assert overlap_of_law(law, law) == pytest.approx(100, abs=1e-9)
    assert validity_of_law(law, toy.support, 100.0) == pytest.approx(100, abs=1e-9)
    assert validity_of_law(law, toy.support, toy.radius) == pytest.approx(98.9, abs=0.7)


def test_factorised_sampler_loses_validity_and_more_steps_regain_it(toy: Toy):
    law = toy.cell_probabilities()
    scores = [validity_of_law(ideal_factorised(law, steps), toy.support, toy.radius) for steps in (1, 2, 8, 32)]
    assert scores == sorted(scores) and scores[0] < 60 and scores[-1] > 95


# --- pictures and configs


def test_histogram_drops_nothing_but_masks():
    tokens = torch.tensor([[0, 0], [0, 0], [49, 3], [50, 50]])
    shares = histogram(tokens, 50)
    assert shares[0, 0] == 0.5 and shares[49, 3] == 0.25 and shares.sum() == 0.75
    coarse = histogram(torch.tensor([[0, 999], [999, 0]]), 1_000)
    assert coarse.shape == (128, 128) and coarse[0, 127] == coarse[127, 0] == 0.5


def test_pictures_are_small_and_put_the_truth_first(toy: Toy, tmp_path):
    from matplotlib.image import imread

    pools = {"MDLM": toy.fresh(5_000, 1), "VADD": toy.rows, "E-MoE": toy.rows, "Ground truth": toy.rows}
    assert list(truth_first(pools)) == ["Ground truth", "MDLM", "VADD", "E-MoE"]
    path = tmp_path / "deep" / "row.png"
    toy.picture(pools, path, title=toy.name)
    height, width, _ = imread(path).shape
    assert 5_000 < path.stat().st_size < 120_000 and width > 3 * height
    path = tmp_path / "grid.png"
    grid_picture({"MDLM": {"NFE 1": toy.rows, "NFE 2": toy.rows}, "E-MoE": {"NFE 2": toy.rows}}, path)
    assert path.stat().st_size > 5_000
    with pytest.raises(ValueError, match="no pools"):
        toy.picture({}, path)


def test_config_joins_the_family_by_its_name():
    config = from_dict(DomainConfig, {"kind": "toy", "density": "swiss-roll", "points": 100})
    assert config == ToyConfig(density="swiss-roll", points=100)
    assert from_dict(DomainConfig, to_dict(config)) == config
    assert override(config, {"centres-seed": "4"}) == ToyConfig(density="swiss-roll", points=100, centres_seed=4)
    assert len(config.build(0).rows) == 100
    assert {"toy", "rows"} <= set(DomainConfig.known_kinds())
    with pytest.raises(ConfigError, match="swiss-roll"):
        from_dict(DomainConfig, {"kind": "toy", "density": "swiss-rol"})
    with pytest.raises(ConfigError, match="points: must be >= 2"):
        ToyConfig(density="8-modes", points=1)
