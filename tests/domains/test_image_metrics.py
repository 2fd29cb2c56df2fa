"""The classifiers of digits and the measures built on them: closed forms, plain definitions, and pools that cheat."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import scipy.linalg
import torch
from scipy.spatial.distance import cdist

from emoe.domains.images import Digits, DigitsConfig, Images
from emoe.domains.images.classifier import load_classifier
from emoe.domains.images.metrics import fold_means, frechet_distance, jackknife, neighbour_measures, radii
from emoe.types import Measurement

OF_FEATURES = ["frechet", "frechet_real", "precision", "recall", "density", "coverage", "confidence", "class_entropy"]
OF_FEATURES += ["class_tv", "judge_accuracy"]
OF_PIXELS = ["ink", "distinct", "copied", "pixel_tv"]


@pytest.fixture(scope="module")
def digits() -> Digits:
    return DigitsConfig().build(0)


@pytest.fixture(scope="module")
def halves(digits: Digits) -> tuple[Digits, torch.Tensor]:
    """The digits with every other test row, and the test rows left out."""
    kept = digits.test_rows[::2], digits.labels, digits.test_labels[::2]
    return Digits("digits", digits.rows, *kept), digits.test_rows[1::2].long()


def measured(samples: torch.Tensor, domain: Images, seed: int = 0) -> dict[str, Measurement]:
    return {item.metric: item for item in domain.measure(samples, seed)}


def independent(domain: Digits, n: int) -> torch.Tensor:
    """Pixels that have the right frequencies and know nothing of each other."""
    generator = torch.Generator().manual_seed(3)
    return (torch.rand(n, domain.space.length, generator=generator) < domain.rows.float().mean(0)).long()


def normal(n: int, size: int, seed: int) -> torch.Tensor:
    return torch.randn(n, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_classifier_knows_held_out_digits(digits: Digits) -> None:
    classifier = load_classifier("digits")
    assert classifier is load_classifier("digits")
    features, probabilities = classifier.read(digits.test_rows)
    assert classifier.hits(digits.test_rows, digits.test_labels).double().mean() == 0.97
    assert probabilities.shape == (300, 10) and features.shape == (300, 64)
    torch.testing.assert_close(probabilities.sum(1), torch.ones(300, dtype=torch.float64))
    # The scale makes the total variance of the training features 100.
    assert classifier.read(digits.rows)[0].var(0, correction=0).sum().item() == pytest.approx(100, rel=1e-4)
    parts = [classifier.read(part) for part in digits.test_rows.long().split(7)]
    torch.testing.assert_close(torch.cat([part for part, _ in parts]), features, rtol=1e-4, atol=1e-4)


def test_training_is_a_function_of_the_seed(digits: Digits, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "research"))
    train = pytest.importorskip("classifier").train  # research/ is not in a source distribution
    before, rows, labels = torch.get_rng_state(), digits.rows[:100], digits.labels[:100]
    first, again, other = (train(rows, labels, 8, seed=seed, shown=300).state_dict() for seed in (0, 0, 1))
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(value, again[name]) for name, value in first.items())
    assert not torch.equal(first["head.weight"], other["head.weight"])


def test_frechet_distance_of_gaussians() -> None:
    a, b = normal(60, 5, 1) @ normal(5, 5, 3), normal(80, 5, 2) @ normal(5, 5, 4) + 1
    c, d, gap = np.cov(a.numpy().T), np.cov(b.numpy().T), (a.mean(0) - b.mean(0)).square().sum().item()
    expected = gap + np.trace(c + d - 2 * scipy.linalg.sqrtm(c @ d).real)
    assert frechet_distance(a, b) == pytest.approx(expected, rel=1e-9)
    assert frechet_distance(b, a) == pytest.approx(expected, rel=1e-9)
    assert frechet_distance(a, a) == pytest.approx(0, abs=1e-9)
    assert frechet_distance(a[:4], a[:4]) == pytest.approx(0, abs=1e-6)  # rank 3
    single = frechet_distance(torch.zeros_like(b), b)
    assert single == pytest.approx(b.mean(0).square().sum().item() + np.trace(d), rel=1e-9)
    assert frechet_distance(a[:, :1], a[:, :1] + 2) == pytest.approx(4)


def plain(samples: np.ndarray, real: np.ndarray, k: int = 5) -> list[float]:
    """The definitions, with all distances at once."""
    real_balls, sample_balls = (np.sort(cdist(own, own), axis=1)[:, k] for own in (real, samples))
    distances = cdist(samples, real)
    inside, reached = distances <= real_balls, distances <= sample_balls[:, None]
    shares = [inside.any(1).mean(), reached.any(0).mean(), inside.sum() / (k * len(samples)), inside.any(0).mean()]
    return [100 * share for share in shares]


@pytest.mark.parametrize(("n", "m", "shift", "twins"), [(37, 29, 0.0, 0), (30, 30, 1.2, 4), (12, 45, 0.5, 0)])
def test_neighbour_measures_equal_their_definitions(n: int, m: int, shift: float, twins: int) -> None:
    real, samples = normal(m, 3, 1), normal(n, 3, 2) + shift
    samples[:twins] = real[:twins]  # exact copies lie at distance 0
    samples[twins : 2 * twins] = samples[:twins]
    measures = neighbour_measures(samples, real)
    assert [item.metric for item in measures] == ["precision", "recall", "density", "coverage"]
    np.testing.assert_allclose([item.value for item in measures], plain(samples.numpy(), real.numpy()), rtol=1e-12)


def test_balls_worked_out_by_hand() -> None:
    real = torch.arange(6).double()[:, None]
    assert radii(real).tolist() == [5, 4, 3, 3, 4, 5]
    precision, recall, density, coverage = neighbour_measures(torch.tensor([[8.0], [20.0]]).double(), real)
    assert precision.value == 50 and density.value == 100 * (2 + 0) / 2 / 5  # 8 is within 4 of 4, just so, and 5 of 5
    assert coverage.value == pytest.approx(100 * 2 / 6) and coverage.stderr is None  # 2 samples make no folds
    assert recall.value == 100  # the only neighbour of 8 is 12 away
    assert radii(torch.zeros(7, 2).double()).tolist() == [0.0] * 7  # twins count, the point itself does not


def test_standard_errors_are_as_large_as_the_spread_over_draws() -> None:
    real = normal(100, 4, 0)
    draws = [neighbour_measures(normal(100, 4, seed) + 0.5, real) for seed in range(1, 61)]
    for items in zip(*draws, strict=True):
        spread = np.std([item.value for item in items])
        assert 0.6 < np.mean([item.stderr for item in items]) / spread < 1.8, items[0].metric


def test_jackknife_of_a_mean_is_the_error_of_a_mean_of_folds() -> None:
    rows = normal(50, 1, 5)
    values = [mean.item() for mean in fold_means(rows)]
    folds = [rows[fold::10].mean().item() for fold in range(10)]
    assert values[0] == pytest.approx(rows.mean().item()) and len(values) == 11
    assert jackknife("x", values, 50).stderr == pytest.approx(np.std(folds, ddof=1) / math.sqrt(10))
    assert len(list(fold_means(rows[:3]))) == 1 and jackknife("x", values[:1], 3).stderr is None


def test_measures_and_their_order(halves: tuple[Digits, torch.Tensor]) -> None:
    domain, held_out = halves
    measures = domain.measure(held_out, 0)
    assert [item.metric for item in measures] == OF_FEATURES + OF_PIXELS
    assert measures == domain.measure(held_out, 0) != domain.measure(held_out, 1)
    assert all(
        math.isfinite(item.value) and item.n == (75 if item.metric == "frechet_real" else 150) for item in measures
    )
    assert [item.metric for item in measures if item.stderr is None] == ["distinct"]
    for n in (2, 3, 4, 7):
        for item in domain.measure(held_out[:n]):
            assert math.isfinite(item.value) and (item.stderr is None or math.isfinite(item.stderr)), item


def test_measures_of_real_digits_and_of_independent_pixels(halves: tuple[Digits, torch.Tensor]) -> None:
    domain, held_out = halves
    real, noise = measured(held_out, domain), measured(independent(domain, 150), domain)
    assert real["judge_accuracy"].value >= 95 and real["confidence"].value > 90
    assert min(real[name].value for name in ("precision", "recall", "coverage")) > 90
    assert 85 < real["density"].value < 115 and real["class_tv"].value < 20 and real["class_entropy"].value > 2.25
    assert real["frechet"].value < real["frechet_real"].value  # the pools are twice as large as the halves
    assert noise["frechet"].value > 3 * real["frechet"].value
    assert noise["confidence"].value < real["confidence"].value - 15
    assert noise["coverage"].value < real["coverage"].value / 2
    assert noise["pixel_tv"].value < real["pixel_tv"].value + 1  # which alone would call them real
    for name in ("frechet", "confidence", "coverage"):
        gap = abs(noise[name].value - real[name].value)
        assert gap > 5 * math.hypot(noise[name].stderr or 0, real[name].stderr or 0)
    many = measured(independent(domain, 3_000), domain)  # more samples do not buy coverage
    assert many["coverage"].n == many["precision"].n == 150 and many["frechet"].n == 3_000
    assert many["coverage"].value < noise["coverage"].value + 15


def test_a_repeated_digit_and_repeated_training_rows_are_found_out(halves: tuple[Digits, torch.Tensor]) -> None:
    domain, held_out = halves
    best = load_classifier("digits").read(held_out)[1].max(1).values.argmax()
    measures = {name: item.value for name, item in measured(held_out[best].repeat(150, 1), domain).items()}
    assert measures["confidence"] > 99 and measures["precision"] == 100
    assert measures["coverage"] < 10 and measures["recall"] < 10 and measures["class_tv"] == pytest.approx(90, abs=5)
    assert measures["class_entropy"] < 0.1 and measures["distinct"] == pytest.approx(100 / 150)
    copies = measured(domain.rows[:150].long(), domain)
    assert copies["copied"].value == 100 and measured(held_out, domain)["copied"].value < 10
    assert copies["confidence"].value > 90 and copies["precision"].value > 90


def test_pixel_measures_worked_out_by_hand() -> None:
    rows = torch.zeros(4, 16, dtype=torch.uint8)
    rows[1, :8], rows[2, 8:], rows[3] = 1, 1, 1
    domain = Images("tiny", rows, rows[[0, 1, 1, 1]])  # images of one's own have no classifier
    samples = domain.rows[[1, 1, 2, 0]].long()
    samples[3, 0] = 1  # in no training row
    measures = domain.measure(samples)
    assert [item.metric for item in measures] == OF_PIXELS
    ink, distinct, copied, pixel_tv = measures
    assert ink.value == pytest.approx(100 * (8 + 8 + 8 + 1) / 64)
    assert ink.stderr == pytest.approx(100 * np.std([0.5, 0.5, 0.5, 1 / 16], ddof=1) / 2)
    assert (distinct.value, copied.value, copied.stderr) == (75, 75, pytest.approx(100 * math.sqrt(0.75 * 0.25 / 4)))
    # Ink in the test rows: 3/4 of the upper half. In samples: 3/4 of pixel 0, 1/2 of 1..7, 1/4 of 8..15.
    assert pixel_tv.value == pytest.approx(100 * (0 + 7 * 0.25 + 8 * 0.25) / 16)
    assert all(item.n == 4 for item in measures)


def test_what_cannot_be_measured_is_refused(digits: Digits) -> None:
    samples = digits.test_rows[:5].long()
    masked, strange = samples.clone(), samples.clone()
    masked[2, 3], strange[2, 3] = digits.space.mask_id, -1
    for wrong, message in [(samples[:1], "1 samples"), (masked, "masks"), (strange, "0 or 1"), (samples[:, 1:], "63")]:
        with pytest.raises(ValueError, match=message):
            digits.measure(wrong)
