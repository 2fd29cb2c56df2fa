"""The judge of digits and the measures built on it: closed forms, plain loops, and pools that try to cheat."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import scipy.linalg
import torch

from emoe.domains.images import judge as judges
from emoe.domains.images.data import Digits, DigitsConfig
from emoe.domains.images.judge import Judge, cache_file, judge_for, judge_key, load_judge, save_judge, train_judge
from emoe.domains.images.metrics import (
    _jackknife,
    _means,
    frechet_distance,
    measure_images,
    neighbour_measures,
    neighbours,
    radii,
)
from emoe.types import Measurement

OF_JUDGE = ["frechet", "frechet_real", "precision", "recall", "density", "coverage", "confidence", "class_entropy"]
OF_JUDGE += ["class_tv", "judge_accuracy"]
OF_PIXELS = ["ink", "distinct", "copied", "pixel_tv"]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache folder of this module's own, so that one training serves all its tests."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("EMOE_CACHE", str(folder))
        patch.setattr(judges, "_judges", {})
        yield folder


@pytest.fixture(scope="module")
def digits() -> Digits:
    return DigitsConfig().build(0)


@pytest.fixture(scope="module")
def halves(digits: Digits) -> tuple[Digits, torch.Tensor]:
    """The digits with every other test row, and the test rows left out."""
    kept = digits.test_rows[::2], digits.labels, digits.test_labels[::2]
    return Digits("digits", digits.rows, *kept), digits.test_rows[1::2].long()


@pytest.fixture
def small(digits: Digits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Digits:
    """A few digits whose judge is bad but quickly made, with nothing cached yet."""
    monkeypatch.setenv("EMOE_CACHE", str(tmp_path))
    monkeypatch.setattr(judges, "_judges", {})
    monkeypatch.setattr(judges, "SEEN", 300)
    return Digits("digits", digits.rows[:100], digits.test_rows, digits.labels[:100], digits.test_labels)


def measured(samples: torch.Tensor, domain: Digits, seed: int = 0) -> dict[str, Measurement]:
    return {item.metric: item for item in measure_images(samples, domain, seed, device="cpu")}


def independent(domain: Digits, n: int) -> torch.Tensor:
    """Pixels that have the right frequencies and know nothing of each other."""
    generator = torch.Generator().manual_seed(3)
    return (torch.rand(n, domain.space.length, generator=generator) < domain.rows.float().mean(0)).long()


def normal(n: int, size: int, seed: int) -> torch.Tensor:
    return torch.randn(n, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# The judge.


def test_judge_knows_held_out_digits(digits: Digits) -> None:
    judge = judge_for(digits, "cpu")
    probabilities, features = judge.probabilities(digits.test_rows), judge.features(digits.test_rows)
    assert (probabilities.argmax(1) == digits.test_labels).double().mean() >= 0.95
    assert probabilities.shape == (300, 10) and features.shape == (300, 64)
    torch.testing.assert_close(probabilities.sum(1), torch.ones(300, dtype=torch.float64))
    # The scale makes the total variance of the training features 100.
    assert judge.features(digits.rows).var(0, correction=0).sum().item() == pytest.approx(100, rel=1e-4)


def test_batches_of_the_judge_change_nothing(digits: Digits) -> None:
    judge = judge_for(digits, "cpu")
    for whole, parts in zip(judge.read(digits.test_rows), judge.read(digits.test_rows.long(), batch=7), strict=True):
        torch.testing.assert_close(whole, parts, rtol=1e-4, atol=1e-4)


def test_training_is_a_function_of_the_seed_and_leaves_the_global_state_alone(small: Digits) -> None:
    seen: list[tuple[int, int]] = []
    first = train_judge(small.rows, small.labels, 8, on_progress=lambda done, total: seen.append((done, total)))
    assert seen == [(step, 6) for step in range(1, 7)]  # 3 epochs of 2 batches
    torch.manual_seed(1)
    before = torch.get_rng_state()
    again, other = (train_judge(small.rows, small.labels, 8, seed=seed) for seed in (0, 1))
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in first.state_dict().items())
    assert not torch.equal(first.head.weight, other.head.weight)


@pytest.mark.parametrize("side", [4, 8, 12, 28, 32])
def test_judge_takes_any_side_divisible_by_4(side: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judges, "SEEN", 20)
    rows = torch.randint(2, (10, side * side), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    judge = train_judge(rows, torch.arange(10), side)
    assert judge.features(rows).shape == (10, 64) and judge.features(rows).isfinite().all()


@pytest.mark.parametrize("side", [0, 2, 6, 30])
def test_judge_refuses_other_sides(side: int) -> None:
    with pytest.raises(ValueError, match="multiple of 4"):
        Judge(side)


def test_shifts_move_a_picture_by_one_pixel_and_let_blanks_in() -> None:
    image = torch.zeros(1, 1, 4, 4)
    image[0, 0, 0, 3] = 1
    moved = judges._shifted(image.repeat(3, 1, 1, 1), torch.tensor([[1, -1], [0, 0], [-1, 0]]))[:, 0]
    assert moved[0].nonzero().tolist() == [[1, 2]]  # down and to the left
    assert torch.equal(moved[1], image[0, 0])
    assert moved[2].sum() == 0  # over the upper edge


# Its cache.


def forbid(*_: object, **__: object) -> Judge:
    raise AssertionError("trained again")


def test_judge_comes_back_from_memory_and_from_its_file(small: Digits, monkeypatch: pytest.MonkeyPatch) -> None:
    made = judge_for(small, "cpu")
    path = cache_file(judge_key(small.rows, small.labels, 8))
    assert [file.name for file in path.parent.iterdir()] == [path.name]  # no temporary file is left
    monkeypatch.setattr(judges, "train_judge", forbid)
    assert judge_for(small, "cpu") is made
    judges._judges.clear()
    read = judge_for(small, "cpu")
    assert read is not made and torch.equal(read.features(small.test_rows), made.features(small.test_rows))
    with pytest.raises(AssertionError, match="trained again"):  # other labels need another judge
        judge_for(Digits("digits", small.rows, small.test_rows, (small.labels + 1) % 10, small.test_labels), "cpu")


def test_a_judge_of_the_package_comes_first(small: Digits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = train_judge(small.rows, small.labels, 8, seed=1)
    key = judge_key(small.rows, small.labels, 8)
    made = judge_for(small, "cpu")  # and is in the cache
    assert save_judge(other, tmp_path / f"{key}.safetensors", key)
    monkeypatch.setattr(judges, "PACKAGED", tmp_path)
    judges._judges.clear()
    found = judge_for(small, "cpu").features(small.test_rows)
    assert torch.equal(found, other.features(small.test_rows))
    assert not torch.equal(found, made.features(small.test_rows))


def test_judges_of_the_package_are_whole() -> None:
    files = list(judges.PACKAGED.glob("*.safetensors"))
    assert files and all(load_judge(file, file.stem, 32) is not None for file in files)


@pytest.mark.parametrize("damage", ["empty", "garbage", "cut", "flipped", "other judge", "other side", "folder"])
def test_bad_cache_files_are_ignored_and_made_anew(small: Digits, damage: str) -> None:
    made = judge_for(small, "cpu")
    key = judge_key(small.rows, small.labels, 8)
    path = cache_file(key)
    good = path.read_bytes()
    if damage == "other judge":
        save_judge(train_judge(small.rows, small.labels, 8, seed=1), path, "0" * 32)
    elif damage == "other side":
        save_judge(train_judge(small.rows[:, :16], small.labels, 4), path, key)
    elif damage == "folder":
        path.unlink()
        path.mkdir()
    else:
        flipped = good[:-40] + bytes([good[-40] ^ 64]) + good[-39:]
        path.write_bytes({"empty": b"", "garbage": b"\x80\x04" * 500, "cut": good[:-100], "flipped": flipped}[damage])
    assert load_judge(path, key, 8) is None
    judges._judges.clear()
    again = judge_for(small, "cpu")
    assert torch.equal(again.features(small.test_rows), made.features(small.test_rows))
    assert damage == "folder" or path.read_bytes() == good


def test_a_cache_folder_that_cannot_be_written_is_no_error(
    small: Digits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("EMOE_CACHE", str(tmp_path / "file"))
    judge = judge_for(small, "cpu")
    assert judge_for(small, "cpu") is judge
    assert not save_judge(judge, cache_file("key"), "key")


def test_the_cache_lies_in_the_home_folder_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EMOE_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_file("key") == tmp_path / ".cache" / "emoe" / "judges" / "key.safetensors"


# Frechet distance.


def white(n: int, size: int, seed: int) -> torch.Tensor:
    """Points whose mean is exactly 0 and whose covariance is exactly 1."""
    points = normal(n, size, seed)
    points -= points.mean(0)
    return points @ torch.linalg.inv(torch.linalg.cholesky(points.T.cov())).T


def test_frechet_distance_of_known_gaussians() -> None:
    mu, nu = torch.tensor([1.0, -2.0, 0.5]).double(), torch.tensor([0.0, 1.0, 0.5]).double()
    first, second = torch.tensor([1.0, 2.0, 3.0]).double(), torch.tensor([2.0, 0.0, 5.0]).double()
    a, b = white(50, 3, 1) * first + mu, white(80, 3, 2) * second + nu
    # Covariances that commute: |mu - nu|^2 + sum of (sigma - tau)^2.
    expected = (1 + 9) + (1 + 4 + 4)
    assert frechet_distance(a, b) == pytest.approx(expected, abs=1e-6)
    assert frechet_distance(b, a) == pytest.approx(expected, abs=1e-6)


def test_frechet_distance_of_covariances_that_do_not_commute() -> None:
    a, b = white(60, 5, 1) @ normal(5, 5, 3), white(60, 5, 2) @ normal(5, 5, 4) + 1
    c, d = np.cov(a.numpy().T), np.cov(b.numpy().T)
    expected = 5 + np.trace(c + d - 2 * scipy.linalg.sqrtm(c @ d).real)
    assert frechet_distance(a, b) == pytest.approx(expected, rel=1e-9)


def test_frechet_distance_of_a_set_to_itself_and_of_flat_sets() -> None:
    points = normal(40, 6, 1)
    assert frechet_distance(points, points) == pytest.approx(0, abs=1e-9)
    flat = points[:4]  # rank 3
    assert frechet_distance(flat, flat) == pytest.approx(0, abs=1e-6)
    single = torch.zeros(5, 6, dtype=torch.float64)
    assert frechet_distance(single, white(40, 6, 1)) == pytest.approx(6, abs=1e-6)
    assert frechet_distance(points[:, :1], points[:, :1] + 2) == pytest.approx(4)


# Precision, recall, density, coverage.


def plain(samples: np.ndarray, real: np.ndarray, k: int = 5) -> list[float]:
    """The definitions, point by point."""

    def ball(point: int, own: np.ndarray) -> float:
        return sorted(math.dist(own[point], own[other]) for other in range(len(own)) if other != point)[k - 1]

    real_balls, sample_balls = ([ball(i, own) for i in range(len(own))] for own in (real, samples))
    inside = [[math.dist(s, r) <= radius for r, radius in zip(real, real_balls, strict=True)] for s in samples]
    near = [[math.dist(s, r) <= radius for s, radius in zip(samples, sample_balls, strict=True)] for r in real]
    precision, recall = np.mean([any(row) for row in inside]), np.mean([any(row) for row in near])
    density, coverage = np.sum(inside) / (k * len(samples)), np.mean(np.any(inside, axis=0))
    return [100 * precision, 100 * recall, 100 * density, 100 * coverage]


@pytest.mark.parametrize(("n", "m", "shift", "twins"), [(37, 29, 0.0, 0), (30, 30, 1.2, 4), (12, 45, 0.5, 0)])
def test_neighbour_measures_equal_plain_loops(n: int, m: int, shift: float, twins: int) -> None:
    real, samples = normal(m, 3, 1), normal(n, 3, 2) + shift
    samples[:twins] = real[:twins]  # exact copies lie at distance 0
    samples[twins : 2 * twins] = samples[:twins]
    found = neighbour_measures(samples, real)
    assert [item.metric for item in found] == ["precision", "recall", "density", "coverage"]
    np.testing.assert_allclose([item.value for item in found], plain(samples.numpy(), real.numpy()), rtol=1e-12)
    whole, parts = neighbours(samples, real, folds=3), neighbours(samples, real, folds=3, chunk=7)
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))


def test_balls_worked_out_by_hand() -> None:
    real = torch.arange(6).double()[:, None]
    assert radii(real).tolist() == [5, 4, 3, 3, 4, 5]
    assert radii(real, chunk=4).tolist() == [5, 4, 3, 3, 4, 5]
    found = neighbours(torch.tensor([[8.0], [20.0]]).double(), real, folds=2)
    assert found.balls.tolist() == [2, 0]  # 8 is within 4 of 4, just so, and within 5 of 5
    assert found.hits.tolist() == [[0, 0]] * 4 + [[1, 0]] * 2
    assert found.reached.all()  # the only neighbour of 8 is 12 away
    assert radii(torch.zeros(7, 2).double()).tolist() == [0.0] * 7  # twins count, the point itself does not
    with pytest.raises(ValueError, match="neighbours"):
        radii(real[:1])


def test_a_dropped_mode_costs_recall_and_coverage_but_not_precision() -> None:
    real, samples = normal(200, 2, 1), normal(200, 2, 2)
    real[100:] += 100
    both = {item.metric: item.value for item in neighbour_measures(samples + 100 * (real > 50), real)}
    one = {item.metric: item.value for item in neighbour_measures(samples, real)}
    assert both["precision"] > 90 and both["recall"] > 90 and both["coverage"] > 85
    assert one["precision"] > 90 and 40 < one["recall"] <= 50 and 40 < one["coverage"] <= 50


def test_standard_errors_are_as_large_as_the_spread_over_draws() -> None:
    real = normal(100, 4, 0)
    draws = [neighbour_measures(normal(100, 4, seed) + 0.5, real) for seed in range(1, 61)]
    for items in zip(*draws, strict=True):
        spread = np.std([item.value for item in items])
        claimed = np.mean([item.stderr for item in items])
        assert 0.6 < claimed / spread < 1.8, items[0].metric


def test_jackknife_of_a_mean_is_the_error_of_a_mean_of_folds() -> None:
    rows = normal(50, 1, 5)
    values = [mean.item() for mean in _means(rows)]
    folds = [rows[fold::10].mean().item() for fold in range(10)]
    assert values[0] == pytest.approx(rows.mean().item()) and len(values) == 11
    assert _jackknife(values[1:]) == pytest.approx(np.std(folds, ddof=1) / math.sqrt(10))
    assert _jackknife([mean.item() for mean in _means(rows[:3])][1:]) is None


# All of them on digits.


def test_measures_and_their_order(halves: tuple[Digits, torch.Tensor]) -> None:
    domain, held_out = halves
    found = measure_images(held_out, domain, 0, device="cpu")
    assert [item.metric for item in found] == OF_JUDGE + OF_PIXELS
    assert found == measure_images(held_out, domain, 0, device="cpu")
    assert [item.metric for item in domain.measure(held_out, 0)] == OF_JUDGE + OF_PIXELS
    assert all(math.isfinite(item.value) and item.n == (75 if item.metric == "frechet_real" else 150) for item in found)
    assert [item.metric for item in found if item.stderr is None] == ["distinct"]
    assert found != measure_images(held_out, domain, 1, device="cpu")


def test_real_digits_score_well(halves: tuple[Digits, torch.Tensor]) -> None:
    domain, held_out = halves
    found = {name: item.value for name, item in measured(held_out, domain).items()}
    assert found["judge_accuracy"] >= 95 and found["confidence"] > 90
    assert min(found["precision"], found["recall"], found["coverage"]) > 90 and 85 < found["density"] < 115
    assert found["frechet"] < found["frechet_real"]  # the pools are twice as large as the halves
    assert found["class_tv"] < 20 and found["class_entropy"] > 2.25 and found["copied"] < 10


def test_independent_pixels_are_far_worse_than_real_digits(halves: tuple[Digits, torch.Tensor]) -> None:
    domain, held_out = halves
    real, noise = measured(held_out, domain), measured(independent(domain, 150), domain)
    assert noise["frechet"].value > 3 * real["frechet"].value
    assert noise["confidence"].value < real["confidence"].value - 15
    assert noise["coverage"].value < real["coverage"].value / 2
    assert noise["pixel_tv"].value < real["pixel_tv"].value + 1  # which alone would call them real
    for name in ("frechet", "confidence", "coverage"):
        gap = abs(noise[name].value - real[name].value)
        assert gap > 5 * math.hypot(noise[name].stderr or 0, real[name].stderr or 0)


def test_a_repeated_digit_is_confident_and_covers_nothing(halves: tuple[Digits, torch.Tensor]) -> None:
    domain, held_out = halves
    best = judge_for(domain, "cpu").probabilities(held_out).max(1).values.argmax()
    found = {name: item.value for name, item in measured(held_out[best].repeat(150, 1), domain).items()}
    assert found["confidence"] > 99 and found["precision"] == 100
    assert found["coverage"] < 10 and found["recall"] < 10 and found["class_tv"] == pytest.approx(90, abs=5)
    assert found["class_entropy"] < 0.1 and found["distinct"] == pytest.approx(100 / 150)


def test_more_samples_do_not_buy_coverage(halves: tuple[Digits, torch.Tensor]) -> None:
    domain, _ = halves
    few, many = (measured(independent(domain, n), domain) for n in (150, 3_000))
    assert many["coverage"].n == many["precision"].n == 150 and many["frechet"].n == 3_000
    assert many["coverage"].value < few["coverage"].value + 15


def test_repeated_training_rows_are_seen_by_copied_alone(halves: tuple[Digits, torch.Tensor]) -> None:
    domain, held_out = halves
    real, copies = measured(held_out, domain), measured(domain.rows[:150].long(), domain)
    assert copies["copied"].value == 100 and real["copied"].value < 10
    assert copies["confidence"].value > 90 and copies["precision"].value > 90


# Without labels, and what is refused.


def tiny(labels: torch.Tensor | None = None) -> Digits:
    rows = torch.zeros(4, 16, dtype=torch.uint8)
    rows[1, :8], rows[2, 8:], rows[3] = 1, 1, 1
    return Digits("tiny", rows, rows[[0, 1, 1, 1]], labels)


def test_pixel_measures_worked_out_by_hand() -> None:
    domain = tiny()
    samples = domain.rows[[1, 1, 2, 0]].long()
    samples[3, 0] = 1  # in no training row
    found = measure_images(samples, domain, 0)
    assert [item.metric for item in found] == OF_PIXELS
    ink, distinct, copied, pixel_tv = found
    assert ink.value == pytest.approx(100 * (8 + 8 + 8 + 1) / 64)
    assert ink.stderr == pytest.approx(100 * np.std([0.5, 0.5, 0.5, 1 / 16], ddof=1) / 2)
    assert (distinct.value, copied.value, copied.stderr) == (75, 75, pytest.approx(100 * math.sqrt(0.75 * 0.25 / 4)))
    # Ink in the test rows: 3/4 of the upper half. In samples: 3/4 of pixel 0, 1/2 of 1..7, 1/4 of 8..15.
    assert pixel_tv.value == pytest.approx(100 * (0 + 7 * 0.25 + 8 * 0.25) / 16)
    assert all(item.n == 4 for item in found)


def test_labels_of_other_data_can_train_the_judge(halves: tuple[Digits, torch.Tensor]) -> None:
    domain, held_out = halves
    unlabelled = Digits("unlabelled", domain.rows, domain.test_rows)
    assert [item.metric for item in measure_images(held_out, unlabelled, 0)] == OF_PIXELS
    borrowed = measure_images(held_out, unlabelled, 0, labelled=domain, device="cpu")
    assert borrowed == measure_images(held_out, domain, 0, device="cpu")
    with pytest.raises(ValueError, match="side 8 for data of side 4"):
        measure_images(tiny().test_rows, tiny(), 0, labelled=domain)
    with pytest.raises(ValueError, match="labels"):
        judge_for(unlabelled, "cpu")


@pytest.mark.parametrize("n", [2, 3, 4, 7])
def test_the_smallest_pools_are_measured(n: int, halves: tuple[Digits, torch.Tensor]) -> None:
    domain, held_out = halves
    for item in measure_images(held_out[:n], domain, 0, device="cpu"):
        assert math.isfinite(item.value) and (item.stderr is None or math.isfinite(item.stderr)), item


def test_what_cannot_be_measured_is_refused(digits: Digits) -> None:
    samples = digits.test_rows[:5].long()
    masked, strange = samples.clone(), samples.clone()
    masked[2, 3], strange[2, 3] = digits.space.mask_id, -1
    for wrong, message in [(samples[:1], "1 samples"), (masked, "masks"), (strange, "0 or 1"), (samples[:, 1:], "63")]:
        with pytest.raises(ValueError, match=message):
            measure_images(wrong, digits, 0)
