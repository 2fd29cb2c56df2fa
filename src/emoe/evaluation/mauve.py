"""MAUVE (Pillutla et al., 2021) of two sets of features, by the `mauve-text` package (extra `judge`)."""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from torch import Tensor

from emoe.evaluation.eval_lm import import_extra

SEEDS = (1, 2, 3)  # of k-means, on which the value depends
SCALING = 5.0  # of divergences


class Mauve(NamedTuple):
    """MAUVE for each k-means seed, from 0 to 1, and the number of clusters."""

    values: tuple[float, ...]
    clusters: int

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return statistics.fmean(self.values)

    @property
    def spread(self) -> float | None:
        """Standard deviation over the seeds; None for a single one. It is no error of having drawn these samples."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None


def mauve(samples: Float[Tensor, "n F"], real: Float[Tensor, "m F"], seeds: Sequence[int] = SEEDS) -> Mauve:
    """MAUVE of features of samples and of real rows, of which the same number should be given.

    Both sets are put into k-means clusters together, a tenth of the smaller set; p and q are their shares, and the
    value is the area under (exp(-c KL(q | r)), exp(-c KL(p | r))) for the mixtures r of p and q, with c = 5.
    """
    if min(len(samples), len(real)) < 4 or not seeds:
        raise ValueError("MAUVE needs at least 4 rows on each side, and a seed")
    points = [features.double().cpu().numpy() for features in (samples, real)]
    if not all(np.isfinite(part).all() for part in points):
        raise ValueError("some features are not finite")
    library = import_extra("mauve")
    outs = []
    for seed in seeds:
        with warnings.catch_warnings(), _silent_stderr():
            warnings.simplefilter("ignore")
            outs.append(
                library.compute_mauve(
                    p_features=points[0], q_features=points[1], num_buckets="auto", mauve_scaling_factor=SCALING,
                    seed=seed, verbose=False,
                )
            )  # fmt: skip
    return Mauve(tuple(float(out.mauve) for out in outs), int(outs[-1].num_buckets))


@contextlib.contextmanager
def _silent_stderr() -> Iterator[None]:
    """Discard standard error: k-means writes a line of advice there for every seed."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
