"""Measures of generated digits against held-out real ones. No single number of them is a verdict.

Let f(x) be the 64 features of the judge (a classifier of real digits, `judge.py`), p(c | x) its probabilities, and
B(y) the closed ball around f(y) up to its 5th nearest neighbour f(y') of y's own side. Real rows are those of the
test split, which neither the model nor the judge has seen. The brackets say which direction is good.

With the judge:

- `frechet` (down): |mu - nu|^2 + tr(C + D - 2 (C^1/2 D C^1/2)^1/2) for the means mu, nu and covariances C, D of the
  features of samples and of real rows. Features are scaled to a total variance of 100. Finite sets lie above 0 even
  if their laws are equal, the more the smaller they are: compare pools of one size.
- `frechet_real`: the same between two random halves of the real rows, the mean of ten splits. It is a floor for pools
  as small as these halves; larger pools of a perfect model go below it.
- `precision` (up): share of samples that lie in the ball B(y) of some real y. Are samples real?
- `recall` (up): share of real rows that lie in the ball of some sample. Is all that is real sampled?
- `density` (up, 100 for equal laws, can exceed it): number of real balls a sample lies in, over 5. Unlike precision
  it is not fooled by the large ball of one outlier.
- `coverage` (up, about 97 for equal laws): share of real balls B(y) that hold a sample. Unlike recall it is not fooled
  by the large balls of scattered samples.
- `confidence` (up to that of real rows, not further): mean of max_c p(c | x).
- `class_entropy` (up to that of real rows; log 10 = 2.303 is the most): entropy in nats of the mean of p(c | x).
- `class_tv` (down): 1/2 * sum_c |share of samples - share of real rows| whose likeliest class is c.
- `judge_accuracy`: share of labelled test rows the judge gets right. It says how far to trust all of the above.

Without it:

- `ink`: mean share of ink; compare with real rows.
- `distinct` (up): share of different rows among the samples.
- `copied` (not above that of real rows): share of samples that equal a training row in every pixel.
- `pixel_tv` (down): mean over pixels of |share of ink in samples - in real rows|.

All but the Frechet distances and the entropy are percentages. Precision and recall are of Kynkaanniemi et al. (2019),
density and coverage of Naeem et al. (2020). Those four depend on the sizes of both sides, so both get equally many
rows, at most 5,000: drawing more samples does not help.

What can be gamed, and what shows it:

- `confidence`: one perfect digit, repeated. `coverage`, `recall`, `class_tv` and `distinct` show it.
- `precision`, `density`: the same; also noise. The judge gives much noise nearly the same features, and if those lie in
  the large balls of unusual real digits, precision is high: pixels drawn independently with MNIST's frequencies reach
  over 99. `coverage`, `recall` and `frechet` show it.
- `class_entropy`, `class_tv`: a perfect digit of each class, repeated in the right numbers. `coverage` shows it.
- `ink`, `pixel_tv`: pixels drawn independently with the right frequencies. `frechet`, `coverage`, `confidence` show it.
- everything but `copied`: a model that repeats its training rows. `copied` shows it.
- everything with the judge: pictures made to please this judge. Never train on, or select samples by, its output.

Standard errors tell how a value would change with another draw of samples: of a mean or a proportion where rows
count independently (precision, density, confidence, ink, copied), else by a jackknife over ten folds of the samples,
which is somewhat too large for coverage. Recall has that of a proportion of the real rows, with the samples held fixed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor

from emoe.domains.images.judge import Judge, Pictures, judge_for
from emoe.rng import derive_seed
from emoe.types import Measurement

REAL_ROWS = 10_000  # real rows at most
NEIGHBOUR_ROWS = 5_000  # rows on each side of precision, recall, density and coverage at most
NEIGHBOURS = 5
FOLDS = 10


def measure_images(
    samples: Integer[Tensor, "n L"],
    domain: Pictures,
    seed: int,
    *,
    labelled: Pictures | None = None,
    device: torch.device | str | None = None,
) -> list[Measurement]:
    """All measures of a pool of samples; those of the judge are left out if there are no labels to train it on.

    Args:
        samples: Rows without masks.
        domain: The data they are compared with.
        seed: Picks the rows that are compared where there are too many, and the folds behind standard errors.
        labelled: Data of the same side whose labels train the judge, if `domain` has none.
        device: Where the judge is trained and run; by default a GPU where there is one.
    """
    _check(samples, domain)
    samples = samples.cpu()[_order(len(samples), seed, "samples")]
    real = domain.test_rows.cpu()[_order(len(domain.test_rows), seed, "real")[:REAL_ROWS]]
    source = domain if domain.labels is not None else labelled
    if source is None:
        return _of_pixels(samples, real, domain.rows)
    if source.side != domain.side:
        raise ValueError(f"labelled: pictures of side {source.side} for data of side {domain.side}")
    judge = judge_for(source, device or ("cuda" if torch.cuda.is_available() else "cpu"))
    found = _of_features(judge, samples, real, seed)
    if source.test_labels is not None:
        right = judge.probabilities(source.test_rows).argmax(1) == source.test_labels.cpu()
        found.append(_share("judge_accuracy", right))
    return found + _of_pixels(samples, real, domain.rows)


def _check(samples: Integer[Tensor, "n L"], domain: Pictures) -> None:
    if len(samples) < 2:
        raise ValueError(f"{len(samples)} samples cannot be measured; draw at least 2")
    if samples.shape[1] != domain.side**2:
        raise ValueError(f"samples have {samples.shape[1]} pixels, the data {domain.side**2}")
    if (samples == domain.space.mask_id).any():
        raise ValueError("some samples still hold masks; finish sampling before measuring")
    if ((samples != 0) & (samples != 1)).any():
        raise ValueError("pixels must be 0 or 1")
    if len(domain.test_rows) < 2:
        raise ValueError(f"{len(domain.test_rows)} test rows are too few to compare with")


def _order(n: int, seed: int, purpose: str) -> Int[Tensor, " n"]:
    return torch.randperm(n, generator=torch.Generator().manual_seed(derive_seed(seed, "images", purpose)))


def _of_features(
    judge: Judge, samples: Integer[Tensor, "n L"], real: Integer[Tensor, "m L"], seed: int
) -> list[Measurement]:
    """The measures that need the judge; rows of both sides are in random order."""
    n, m = len(samples), len(real)
    features, probabilities = judge.read(samples)
    real_features, real_probabilities = judge.read(real)
    sure = probabilities.max(1)
    classes = torch.nn.functional.one_hot(sure.indices, probabilities.shape[1]).double()
    real_shares = torch.nn.functional.one_hot(real_probabilities.argmax(1), probabilities.shape[1]).double().mean(0)
    entropies = [torch.special.entr(mean).sum().item() for mean in _means(probabilities)]
    distances = [50 * (mean - real_shares).abs().sum().item() for mean in _means(classes)]
    size = min(n, m, NEIGHBOUR_ROWS)
    return [
        _frechet(features, real_features),
        *_frechet_real(real_features, seed),
        *neighbour_measures(features[:size].to(judge.scale.device), real_features[:size].to(judge.scale.device)),
        _mean("confidence", 100 * sure.values),
        Measurement("class_entropy", entropies[0], _jackknife(entropies[1:]), n),
        Measurement("class_tv", distances[0], _jackknife(distances[1:]), n),
    ]


def _of_pixels(
    samples: Integer[Tensor, "n L"], real: Integer[Tensor, "m L"], trained: Integer[Tensor, "N L"]
) -> list[Measurement]:
    """The measures that need no judge."""
    n = len(samples)
    packed, known = _packed(samples), set(_packed(trained))
    target = real.sum(0).double() / len(real)
    distances = [100 * (mean - target).abs().mean().item() for mean in _means(samples)]
    return [
        _mean("ink", 100 * samples.sum(1).double() / samples.shape[1]),
        Measurement("distinct", 100 * len(set(packed)) / n, None, n),
        _share("copied", torch.tensor([row in known for row in packed])),
        Measurement("pixel_tv", distances[0], _jackknife(distances[1:]), n),
    ]


def _packed(rows: Integer[Tensor, "n L"]) -> list[bytes]:
    """Rows as bytes, equal for equal rows."""
    return [row.tobytes() for row in np.packbits(rows.cpu().numpy().astype(np.uint8), axis=1)]


def _share(name: str, hits: Bool[Tensor, " n"]) -> Measurement:
    share, n = hits.double().mean().item(), len(hits)
    return Measurement(name, 100 * share, 100 * math.sqrt(share * (1 - share) / n), n)


def _mean(name: str, values: Float[Tensor, " n"]) -> Measurement:
    return Measurement(name, values.mean().item(), values.std().item() / math.sqrt(len(values)), len(values))


def _folds(n: int) -> int:
    """Folds of n rows, of two rows at least; row i is in fold i mod that number. None for fewer than two folds."""
    return min(FOLDS, n // 2) if n >= 4 else 0


def _jackknife(values: Sequence[float]) -> float | None:
    """Standard error from the values without each of F folds: sqrt((F - 1) / F * sum of (value - mean)^2)."""
    if len(values) < 2:
        return None
    return math.sqrt((len(values) - 1) * float(np.var(values)))


def _means(rows: Tensor) -> Iterator[Float[Tensor, " d"]]:
    """The mean of all rows, then of all rows without each fold."""
    folds = _folds(len(rows))
    total = rows.sum(0).double()
    yield total / len(rows)
    for fold in range(folds):
        part = rows[fold::folds]
        yield (total - part.sum(0)) / (len(rows) - len(part))


def frechet_distance(first: Float[Tensor, "n F"], second: Float[Tensor, "m F"]) -> float:
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


def _frechet(features: Float[Tensor, "n F"], real: Float[Tensor, "m F"]) -> Measurement:
    folds, places = _folds(len(features)), torch.arange(len(features))
    without = [frechet_distance(features[places % folds != fold], real) for fold in range(folds)]
    return Measurement("frechet", frechet_distance(features, real), _jackknife(without), len(features))


def _frechet_real(real: Float[Tensor, "m F"], seed: int) -> list[Measurement]:
    """Mean of ten random splits in halves, with the standard deviation of one split; none for fewer than 4 rows."""
    half = len(real) // 2
    if half < 2:
        return []
    orders = [_order(len(real), seed, f"split {number}") for number in range(FOLDS)]
    values = [frechet_distance(real[order[:half]], real[order[half:]]) for order in orders]
    return [Measurement("frechet_real", float(np.mean(values)), float(np.std(values, ddof=1)), half)]


class Neighbours(NamedTuple):
    """Who lies in whose ball."""

    balls: Int[Tensor, " n"]  # real balls that each sample lies in
    reached: Bool[Tensor, " m"]  # real rows that lie in the ball of some sample
    hits: Int[Tensor, "m folds"]  # samples of each fold that lie in each real ball


def _distances(points: Float[Tensor, "n F"], others: Float[Tensor, "m F"]) -> Float[Tensor, "n m"]:
    """Euclidean distances without the shortcut by products, in which equal points are not at distance 0."""
    return torch.cdist(points, others, compute_mode="donot_use_mm_for_euclid_dist")


def radii(points: Float[Tensor, "n F"], k: int = NEIGHBOURS, *, chunk: int = 500) -> Float[Tensor, " n"]:
    """Distance of every point to its k-th nearest neighbour, itself left out (to the last one if there are fewer)."""
    if len(points) < 2:
        raise ValueError("a single point has no neighbours")
    found = []
    for start in range(0, len(points), chunk):
        distances = _distances(points[start : start + chunk], points)
        rows = torch.arange(len(distances), device=points.device)
        distances[rows, start + rows] = torch.inf
        found.append(distances.kthvalue(min(k, len(points) - 1), dim=1).values)
    return torch.cat(found)


def neighbours(
    samples: Float[Tensor, "n F"], real: Float[Tensor, "m F"], k: int = NEIGHBOURS, *, folds: int = 1, chunk: int = 500
) -> Neighbours:
    """Place samples and real rows in each other's balls, on their device; sample i is in fold i mod `folds`."""
    samples, real = samples.double(), real.double()
    sample_radii, real_radii = radii(samples, k, chunk=chunk), radii(real, k, chunk=chunk)
    member = torch.nn.functional.one_hot(torch.arange(len(samples), device=real.device) % folds, folds).float()
    balls = torch.zeros(len(samples), dtype=torch.long, device=real.device)
    reached, hits = [], []
    for start in range(0, len(real), chunk):
        distances = _distances(real[start : start + chunk], samples)
        inside = distances <= real_radii[start : start + chunk, None]
        balls += inside.sum(0)
        reached.append((distances <= sample_radii).any(1))
        hits.append((inside.float() @ member).long())  # counts far below 2^24 are exact
    return Neighbours(balls.cpu(), torch.cat(reached).cpu(), torch.cat(hits).cpu())


def neighbour_measures(samples: Float[Tensor, "n F"], real: Float[Tensor, "m F"]) -> list[Measurement]:
    """Precision, recall, density and coverage of points in a feature space, with k = 5."""
    folds = _folds(len(samples))
    found = neighbours(samples, real, folds=max(1, folds))
    total = found.hits.sum(1)
    without = [100 * (total > part).double().mean().item() for part in found.hits.T[:folds]]
    covered = 100 * (total > 0).double().mean().item()
    return [
        _share("precision", found.balls > 0),
        _share("recall", found.reached),
        _mean("density", 100 * found.balls.double() / min(NEIGHBOURS, len(real) - 1)),
        Measurement("coverage", covered, _jackknife(without), len(samples)),
    ]
