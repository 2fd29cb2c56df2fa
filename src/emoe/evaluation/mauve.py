"""MAUVE (Pillutla et al., 2021) of two sets of features, by the `mauve-text` package (extra `judge`)."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Iterator

import numpy as np
from jaxtyping import Float
from torch import Tensor

from emoe.evaluation.eval_lm import import_extra

SEEDS = (1, 2, 3)  # of k-means, on which the value depends
SCALING = 5.0  # of divergences


def mauve(samples: Float[Tensor, "n F"], real: Float[Tensor, "m F"]) -> list[float]:
    """MAUVE, from 0 to 1, of features of samples and of as many real rows, for each of the `SEEDS`.

    Both sets are put into k-means clusters together, a tenth of the smaller set; p and q are their shares, and the
    value is the area under (exp(-c KL(q | r)), exp(-c KL(p | r))) for the mixtures r of p and q, with c = 5.
    """
    if min(len(samples), len(real)) < 4:
        raise ValueError("MAUVE needs at least 4 rows on each side")
    points = [features.double().cpu().numpy() for features in (samples, real)]
    if not all(np.isfinite(part).all() for part in points):
        raise ValueError("some features are not finite")
    library, options = import_extra("mauve"), {"num_buckets": "auto", "mauve_scaling_factor": SCALING, "verbose": False}
    with warnings.catch_warnings(), _silent_stderr():
        warnings.simplefilter("ignore")
        outs = [library.compute_mauve(p_features=points[0], q_features=points[1], seed=s, **options) for s in SEEDS]
    return [float(out.mauve) for out in outs]


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
