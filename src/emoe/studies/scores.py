"""Scores of pools of text under the evaluation LM, in two kinds of stages that can run on different machines.

A score is the perplexity under each setting and the features of the samples, reduced to 100 principal components of the
held-out rows. MAUVE is computed from the stored features and needs neither the samples nor the evaluation LM.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from emoe.domains.text.data import Text
from emoe.evaluation.eval_lm import RunLM, import_extra
from emoe.evaluation.gen_ppl import SETTINGS, score
from emoe.evaluation.measure import fields_of, held_out_rows, measure_nll, rows_of
from emoe.files import replace_file
from emoe.reporting.results import Row
from emoe.reporting.text import in_setting
from emoe.studies.eval_lm import EvalLMRun, describe_text
from emoe.studies.pools import Archive, PoolKey, digest
from emoe.studies.stages import Stage, numbers, stage
from emoe.types import Likelihood, Measurement

COMPONENTS = 100  # of stored features
FEATURE_BYTES = 500_000  # of the stored features of a pool
SEEDS = (1, 2, 3)  # of k-means, on which MAUVE depends
SCALING = 5.0  # of divergences, in MAUVE
Features = Tensor | NDArray[Any]


def principal_components(features: Float[Tensor, "n F"], count: int = COMPONENTS) -> tuple[Tensor, Tensor, float]:
    """Mean, directions (F, D) and their share of the variance: at most one fewer directions than rows.

    The largest entry of each direction is positive.
    """
    x = features.double()
    mean = x.mean(0)
    _, values, rows = torch.linalg.svd(x - mean, full_matrices=False)
    kept = rows[: max(1, min(count, len(x) - 1, x.shape[1]))]
    signs = kept.gather(1, kept.abs().argmax(1, keepdim=True)).sign()
    energy = values.square()
    share = (energy[: len(kept)].sum() / energy.sum()).item() if energy.sum() else 1.0
    return mean.float(), (kept * signs).T.float().contiguous(), share


def reduce(features: Float[Tensor, "n F"], mean: Tensor, directions: Tensor) -> NDArray[np.float16]:
    """Features in principal components in half precision, at most `FEATURE_BYTES`."""
    most = FEATURE_BYTES // (2 * directions.shape[1])
    reduced: NDArray[np.float64] = ((features[:most].double() - mean.double()) @ directions.double()).numpy()
    return reduced.astype("<f2")


def score_stages(run: EvalLMRun, text: Text, pools: Sequence[Archive], rows: int, page: Path) -> list[Stage]:
    """Stages of the held-out rows of a text, then of every pool that is compared with them.

    `rows` of them are for the likelihood of the evaluation LM; the manifest of their features goes into `page`.
    """
    lm, folder = run.scorer(text), run.path.parent / "features"
    reference = Archive.open(folder / f"reference-{text.name}.npz")
    work = [_reference_stage(run, lm, text, reference, min(rows, len(text.test_rows)), page)]
    for pool in pools:
        features = Archive.open(folder / pool.path.name)
        work += [_score_stage(lm, text, reference, pool, features, key) for key in pool.keys()]
    return work


def _reference_stage(run: EvalLMRun, lm: RunLM, text: Text, reference: Archive, count: int, page: Path) -> Stage:
    """The evaluation LM on held-out rows: its likelihood, its best step, principal components of its features."""
    own = run.fields(text, method="judge")
    made_of = {"judge": lm.sha256, "split": describe_text(text)["split_sha256"]}

    def work() -> list[Row]:
        rows, best = held_out_rows(text, None, 0), run.best()
        features = lm.features(text, rows)
        mean, directions, share = principal_components(features)
        (size, components), reduced = directions.shape, reduce(features, mean, directions)
        reference.arrays = {"mean": mean.numpy(), "directions": directions.numpy(), "features": reduced}
        pca: dict[str, Any] = {"dimensions": components, "of": size, "variance_kept": round(share, 4)}
        pca |= {"fitted_on": f"{text.held_out} rows of {text.name}", "rows": len(rows), "stored_as": "float16"}
        clustering = {"seeds": list(SEEDS), "scaling": SCALING, "clusters": "a tenth of the rows"}
        made = {"judge": lm.describe(), "made_of": made_of, "rows": len(rows), "settings": list(SETTINGS)}
        reference.manifest = describe_text(text) | made | {"pca": pca, "mauve": clustering}
        reference.save()
        replace_file(page, json.dumps(reference.manifest, indent=1, sort_keys=True) + "\n")
        values: dict[str, float] = {"judge_step": lm.run.step, "pca_dimensions": components}
        values |= {} if best is None else {"judge_valid_ppl": math.exp(best[1])}
        items = {
            "exact": measure_nll(lm.run.method, text, Likelihood("exact"), count, metrics=("nll_token", "ppl")),
            None: [*numbers(values), *numbers({"pca_share": 100 * share}, len(rows))],
        }
        real = {setting: [score(lm, text, rows, setting).perplexity()] for setting in SETTINGS}
        return rows_of(own, items) + rows_of(fields_of(text), real)

    wanted, name = [own | {"metric": "ppl", "convention": "exact"}], f"held-out rows of {text.name}"
    return Stage(name, work, wanted, count, lambda: reference.manifest.get("made_of") == made_of and page.exists())


def _score_stage(lm: RunLM, text: Text, reference: Archive, pool: Archive, features: Archive, key: PoolKey) -> Stage:
    """Perplexities and features of a pool."""
    names = {in_setting(setting, key.variant): setting for setting in SETTINGS}
    made_of = {"pool": digest(pool.arrays[str(key)]), "judge": lm.sha256}
    fields = pool.fields(key)

    def work() -> list[Row]:
        tokens = pool.tokens(key)
        items = {name: [score(lm, text, tokens, setting).perplexity()] for name, setting in names.items()}
        mean, directions = (torch.from_numpy(reference.arrays[name]) for name in ("mean", "directions"))
        features.arrays[str(key)] = reduce(lm.features(text, tokens), mean, directions)
        scored = features.manifest.get("scored", {}) | {str(key): made_of}
        own = {name: value for name, value in pool.manifest.items() if name != "pools"}
        features.manifest |= own | {"judge": lm.describe(), "scored": scored}
        features.save()
        return rows_of(fields, items)

    wanted, name = [fields | {"metric": "gen_ppl", "convention": name} for name in names], f"{pool.path.stem}, {key}"
    return Stage(name, work, wanted, current=lambda: features.manifest.get("scored", {}).get(str(key)) == made_of)


def mauve_stages(folder: Path) -> list[Stage]:
    """MAUVE of every pool whose features, and those of its held-out rows, are in a folder."""
    archives = [Archive.open(path) for path in sorted(folder.glob("*.npz")) if not path.name.startswith("reference-")]
    names = {archive.manifest["data"] for archive in archives}
    real = {name: Archive.open(folder / f"reference-{name}.npz").arrays.get("features") for name in names}
    pairs = [(archive, real[archive.manifest["data"]]) for archive in archives]
    return [_mauve_stage(archive, key, rows) for archive, rows in pairs if rows is not None for key in archive.keys()]


def _mauve_stage(archive: Archive, key: PoolKey, real: NDArray[np.float16]) -> Stage:
    """MAUVE in percent, from as many rows of both as the fewer has, and its spread over seeds of k-means."""
    n = min(len(archive.arrays[str(key)]), len(real))
    pair = archive.arrays[str(key)][:n], real[:n]
    done, made_of = archive.manifest.setdefault("mauve", {}), digest(*pair)

    def measure() -> list[Measurement]:
        values = mauve(*pair)
        done[str(key)] = made_of
        archive.save()
        return numbers({"mauve": 100 * statistics.fmean(values), "mauve_spread": 100 * statistics.stdev(values)}, n)

    name = f"MAUVE of {archive.path.stem}, {key}"
    return stage(name, archive.fields(key), measure, "mauve", current=lambda: done.get(str(key)) == made_of)


def mauve(samples: Float[Features, "n F"], real: Float[Features, "m F"]) -> list[float]:
    """MAUVE (Pillutla et al., 2021), from 0 to 1, of features of samples and of real rows, for each of the `SEEDS`.

    Both sets are put into k-means clusters together, a tenth of the smaller set; p and q are their shares, and the
    value is the area under (exp(-c KL(q | r)), exp(-c KL(p | r))) for the mixtures r of p and q, with c = 5.
    """
    if min(len(samples), len(real)) < 4:
        raise ValueError("MAUVE needs at least 4 rows on each side")
    points = [np.asarray(features, np.float64) for features in (samples, real)]
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
