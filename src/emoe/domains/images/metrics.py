"""Measures of generated digits against held-out real ones; `docs/images.md` says how to read them together.

f(x) are the 64 features of the classifier of real digits, p(c | x) its probabilities. The ball B(y) around f(y) reaches
up to its 5th nearest neighbour on y's own side. Real rows are those of the test split. (+) more is better, (-) less is.

- `frechet` (-): Frechet distance of the features. It is above 0 for equal laws too, the more the smaller the sets are.
- `frechet_real`: the same between two random halves of the real rows, the mean of ten splits.
- `precision` (+): share of samples in the ball of some real row. `recall` (+): share of real rows in that of a sample.
- `density` (+): real balls that a sample lies in, over 5; 100 for equal laws.
- `coverage` (+): share of real balls that hold a sample, about 97 for equal laws.
- `confidence` (+ up to that of real rows): mean of max_c p(c | x).
- `class_entropy` (+ up to that of real rows): entropy in nats of the mean of p(c | x).
- `class_tv` (-): 1/2 * sum_c |share of samples - share of real rows| whose likeliest class is c.
- `judge_accuracy`: share of labelled test rows that the classifier gets right.
- `ink` (as that of real rows): mean share of ink. `distinct` (+): share of different rows among the samples.
- `copied` (not above that of real rows): share of samples that equal a training row in every pixel.
- `pixel_tv` (-): mean over pixels of |share of ink in samples - in real rows|.

All but the Frechet distances and the entropy are percentages. Precision and recall are of Kynkaanniemi et al. (2019),
density and coverage of Naeem et al. (2020). Those four depend on the sizes of both sides, so both get equally many
rows, at most 5,000. Standard errors are those of another draw of samples: of a mean or a proportion where rows count
independently, else by a jackknife over ten folds of the samples; that of recall is over the real rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from jaxtyping import Float, Integer
from torch import Tensor
from torch.nn.functional import one_hot

from emoe.domains.base import permutation
from emoe.domains.images.classifier import Classifier
from emoe.domains.metrics import copied, mean, proportion, row_bytes
from emoe.types import Measurement

REAL_ROWS = 10_000  # real rows at most
NEIGHBOUR_ROWS = 5_000  # rows on each side of precision, recall, density and coverage at most
NEIGHBOURS = 5
FOLDS = 10

Rows = Integer[Tensor, "n L"]
Real = Integer[Tensor, "m L"]
Trained = Integer[Tensor, "N L"]
Points = Float[Tensor, "n F"]
Others = Float[Tensor, "m F"]


def of_features(classifier: Classifier, samples: Rows, real: Real, seed: int) -> list[Measurement]:
    """The measures by a classifier; rows of both sides are in random order."""
    features, probabilities = classifier.read(samples)
    real_features, real_probabilities = classifier.read(real)
    confidence = probabilities.max(1)
    classes = one_hot(confidence.indices, probabilities.shape[1]).double()
    real_shares = one_hot(real_probabilities.argmax(1), probabilities.shape[1]).double().mean(0)
    entropies = [torch.special.entr(part).sum().item() for part in fold_means(probabilities)]
    distances = [50 * (part - real_shares).abs().sum().item() for part in fold_means(classes)]
    size, device = min(len(samples), len(real), NEIGHBOUR_ROWS), classifier.scale.device
    return [
        _frechet(features, real_features),
        _frechet_real(real_features, seed),
        *neighbour_measures(features[:size].to(device), real_features[:size].to(device)),
        mean("confidence", 100 * confidence.values),
        jackknife("class_entropy", entropies, len(samples)),
        jackknife("class_tv", distances, len(samples)),
    ]


def of_pixels(samples: Rows, real: Real, trained: Trained) -> list[Measurement]:
    """The measures without a classifier."""
    n, target = len(samples), real.sum(0).double() / len(real)
    distances = [100 * (part - target).abs().mean().item() for part in fold_means(samples)]
    return [
        mean("ink", 100 * samples.sum(1).double() / samples.shape[1]),
        Measurement("distinct", 100 * len(set(row_bytes(samples))) / n, None, n),
        copied(samples, trained),
        jackknife("pixel_tv", distances, n),
    ]


def _folds(n: int) -> int:
    """Number of folds of n rows, of two rows at least, or 0; row i is in fold i mod that number."""
    return min(FOLDS, n // 2) if n >= 4 else 0


def jackknife(metric: str, values: Sequence[float], n: int) -> Measurement:
    """The value of all rows; those without each of F folds give its error sqrt((F - 1) / F * sum (value - mean)^2)."""
    without = values[1:]
    stderr = math.sqrt((len(without) - 1) * float(np.var(without))) if without else None
    return Measurement(metric, values[0], stderr, n)


def fold_means(rows: Tensor) -> Iterator[Float[Tensor, " d"]]:
    """The mean of all rows, then of all rows without each fold."""
    folds = _folds(len(rows))
    total = rows.sum(0).double()
    yield total / len(rows)
    for fold in range(folds):
        part = rows[fold::folds]
        yield (total - part.sum(0)) / (len(rows) - len(part))


def frechet_distance(first: Points, second: Others) -> float:
    """Squared Frechet distance between the Gaussians with the means and covariances of two sets of points.

    |mu - nu|^2 + tr C + tr D - 2 * sum_i sqrt(lambda_i), with the eigenvalues lambda_i of C^1/2 D C^1/2; all float64.
    """
    mu, nu = first.double().mean(0), second.double().mean(0)
    c, d = (points.double().T.cov(correction=1).reshape(len(mu), len(mu)) for points in (first, second))
    values, vectors = torch.linalg.eigh(c)
    root = (vectors * values.clamp(min=0).sqrt()) @ vectors.T
    product = root @ d @ root
    shared = torch.linalg.eigvalsh((product + product.T) / 2).clamp(min=0).sqrt().sum()
    return max(0.0, ((mu - nu).square().sum() + c.trace() + d.trace() - 2 * shared).item())


def _frechet(features: Points, real: Others) -> Measurement:
    folds, rows = _folds(len(features)), torch.arange(len(features))
    without = [frechet_distance(features[rows % folds != fold], real) for fold in range(folds)]
    return jackknife("frechet", [frechet_distance(features, real), *without], len(features))


def _frechet_real(real: Others, seed: int) -> Measurement:
    """Mean of ten random splits in halves, with the standard deviation of one split."""
    half = len(real) // 2
    orders = [permutation(len(real), seed, "images", f"split {number}") for number in range(FOLDS)]
    values = [frechet_distance(real[order[:half]], real[order[half:]]) for order in orders]
    return Measurement("frechet_real", float(np.mean(values)), float(np.std(values, ddof=1)), half)


def _distances(points: Points, others: Others) -> Float[Tensor, "n m"]:
    """Euclidean distances without the shortcut by products, in which equal points are not at distance 0."""
    return torch.cdist(points, others, compute_mode="donot_use_mm_for_euclid_dist")


def radii(points: Points) -> Float[Tensor, " n"]:
    """Distance of every point to its 5th nearest neighbour, itself left out (to the last one if there are fewer)."""
    rank = 1 + min(NEIGHBOURS, len(points) - 1)  # the point itself has rank 1
    return _distances(points, points).kthvalue(rank, dim=1).values


def neighbour_measures(samples: Points, real: Others) -> list[Measurement]:
    """Precision, recall, density and coverage of points in a feature space, with k = 5, computed on their device."""
    samples, real, folds = samples.double(), real.double(), _folds(len(samples))
    distances = _distances(real, samples)
    inside = distances <= radii(real)[:, None]  # real row x sample: does the ball of the row hold the sample?
    balls, total = inside.sum(0).cpu(), inside.sum(1)
    counts = [total, *(total - inside[:, fold::folds].sum(1) for fold in range(folds))]
    covered = [100 * (count > 0).double().mean().item() for count in counts]
    return [
        proportion("precision", balls > 0),
        proportion("recall", (distances <= radii(samples)).any(1).cpu()),
        mean("density", 100 * balls.double() / min(NEIGHBOURS, len(real) - 1)),
        jackknife("coverage", covered, len(samples)),
    ]
