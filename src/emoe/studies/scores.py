"""Scores of pools of text under the evaluation LM, in two kinds of stages that can run on different machines.

A score is the perplexity under each setting and the features of the samples, reduced to 100 principal components of the
held-out rows. MAUVE is computed from the stored features and needs neither the samples nor the evaluation LM.
"""

from __future__ import annotations

import functools
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from emoe.domains.text.data import Text
from emoe.evaluation.eval_lm import RunLM
from emoe.evaluation.gen_ppl import SETTINGS, score
from emoe.evaluation.likelihood import estimate_nll, held_out_rows
from emoe.evaluation.mauve import SCALING, SEEDS, mauve
from emoe.files import replace_file
from emoe.reporting.results import Results, Row
from emoe.reporting.text import in_setting
from emoe.runs.train import load_run
from emoe.studies import stages
from emoe.studies.eval_lm import EvalLMRun
from emoe.studies.pools import Archive, PoolKey, digest
from emoe.studies.sets import describe_text
from emoe.studies.stages import Stage
from emoe.types import Likelihood, Measurement

COMPONENTS = 100  # of stored features
FEATURE_BYTES = 500_000  # of the stored features of a pool


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
    """Features in principal components as they are stored, at most `FEATURE_BYTES` of them."""
    most = FEATURE_BYTES // (2 * directions.shape[1])
    reduced: NDArray[np.float64] = ((features[:most].double() - mean.double()) @ directions.double()).numpy()
    return reduced.astype("<f2")


def manifest_row(
    manifest: Mapping[str, Any], item: Measurement, *, nfe: int | None = None, convention: str | None = None
) -> Row:
    """A measurement as a row of the run that a manifest describes."""
    run = {name: manifest[name] for name in ("data", "method", "recipe", "seed")}
    return Row(task="text", nfe=nfe, convention=convention, **run, **vars(item))


@dataclass
class Scoring:
    """Scores pools that are compared with the held-out rows of one text."""

    lm_run: EvalLMRun
    lm_text: Text | None  # its own text, if it is on this machine: its tokenizer is compared with that of the samples
    text: Text  # the held-out rows
    rows: int  # of them for the perplexity of the evaluation LM
    folder: Path  # of features
    page: Path  # for the manifest of the features

    def __post_init__(self) -> None:
        self.rows = min(self.rows, len(self.text.test_rows))
        self.reference = Archive.open(self.folder / f"reference-{self.text.name}.npz")

    @functools.cached_property
    def lm(self) -> RunLM:
        """The evaluation LM."""
        run = self.lm_run
        return RunLM(load_run(run.best_path, device=run.device, domain=self.lm_text or self.text))

    def stages(self, pools: Sequence[Archive]) -> list[Stage]:
        """Stages of the held-out rows, then of every pool."""
        return [self.reference_stage(), *(self.score_stage(pool, key) for pool in pools for key in pool.keys())]

    def reference_stage(self) -> Stage:
        """The evaluation LM on held-out rows: its likelihood, its best step, principal components of its features."""
        text, reference, experiment = self.text, self.reference, self.lm_run.experiment
        own = {"data": text.name, "method": "judge", "recipe": experiment.name, "seed": experiment.seed}
        made_of = {"judge": self.lm.sha256, "split": describe_text(text)["split_sha256"]}

        def run() -> list[Row]:
            rows, best = held_out_rows(text, None, 0), self.lm_run.best()
            features = self.lm.features(text, rows)
            mean, directions, share = principal_components(features)
            reference.arrays = {"mean": mean.numpy(), "directions": directions.numpy()}
            reference.arrays["features"] = reduce(features, mean, directions)
            pca = {
                "dimensions": directions.shape[1], "of": directions.shape[0], "variance_kept": round(share, 4),
                "fitted_on": f"{text.held_out} rows of {text.name}", "rows": len(rows), "stored_as": "float16",
            }  # fmt: skip
            reference.manifest = describe_text(text) | {
                "judge": self.lm.describe(), "made_of": made_of, "rows": len(rows), "settings": list(SETTINGS),
                "pca": pca, "mauve": {"seeds": list(SEEDS), "scaling": SCALING, "clusters": "a tenth of the rows"},
            }  # fmt: skip
            reference.save()
            replace_file(self.page, json.dumps(reference.manifest, indent=1, sort_keys=True) + "\n")
            exact = estimate_nll(self.lm.run.method, held_out_rows(text, self.rows, 0), Likelihood("exact"))
            named = stages.in_metrics(exact, self.lm.context, ("nll_token", "ppl"))
            values: dict[str, float] = {"judge_step": self.lm.run.step, "pca_dimensions": directions.shape[1]}
            values |= {} if best is None else {"judge_valid_ppl": math.exp(best[1])}
            items = [*stages.numbers(values), *stages.numbers({"pca_share": 100 * share}, len(rows))]
            data = {"data": text.name, "method": "data", "recipe": "reference", "seed": None}
            real = {setting: score(self.lm, text, rows, setting).perplexity() for setting in SETTINGS}
            return [
                *(manifest_row(own, item, convention="exact") for item in named),
                *(manifest_row(own, item) for item in items),
                *(manifest_row(data, item, convention=setting) for setting, item in real.items()),
            ]

        likelihood = stages.recorded(n=self.rows, method="judge", metric="ppl", data=text.name, recipe=experiment.name)
        perplexity = stages.recorded(method="data", metric="gen_ppl", data=text.name)

        def done(results: Results) -> bool:
            same = reference.manifest.get("made_of") == made_of and self.page.exists()
            return same and likelihood(results) and perplexity(results)

        return Stage(f"held-out rows of {text.name}", run, done)

    def score_stage(self, pool: Archive, key: PoolKey) -> Stage:
        """Perplexities and features of a pool."""
        path, own = self.folder / pool.path.name, {k: value for k, value in pool.manifest.items() if k != "pools"}
        names = {in_setting(setting, key.variant): setting for setting in SETTINGS}
        made_of = {"pool": digest(pool.arrays[str(key)]), "judge": self.lm.sha256}

        def run() -> list[Row]:
            tokens, features = pool.tokens(key), Archive.open(path)
            items = {name: score(self.lm, self.text, tokens, setting).perplexity() for name, setting in names.items()}
            mean, directions = (torch.from_numpy(self.reference.arrays[name]) for name in ("mean", "directions"))
            features.arrays[str(key)] = reduce(self.lm.features(self.text, tokens), mean, directions)
            scored = features.manifest.get("scored", {}) | {str(key): made_of}
            features.manifest |= own | {"judge": self.lm.describe(), "scored": scored}
            features.save()
            return [manifest_row(own, item, nfe=key.nfe, convention=name) for name, item in items.items()]

        same = {name: own[name] for name in ("data", "recipe", "seed")} | {"metric": "gen_ppl"}
        checks = [stages.recorded(convention=name, nfe=key.nfe, **same) for name in names]

        def done(results: Results) -> bool:
            scored = Archive.open(path).manifest.get("scored", {}).get(str(key)) == made_of
            return scored and all(check(results) for check in checks)

        return Stage(f"{pool.path.stem}, {key}", run, done)


def mauve_stages(folder: Path) -> list[Stage]:
    """MAUVE of every pool whose features, and those of its held-out rows, are in a folder."""
    archives = [Archive.open(path) for path in sorted(folder.glob("*.npz")) if not path.name.startswith("reference-")]
    names = {archive.manifest["data"] for archive in archives}
    real = {name: Archive.open(folder / f"reference-{name}.npz").arrays.get("features") for name in names}
    pairs = [(archive, real[archive.manifest["data"]]) for archive in archives]
    return [_mauve_stage(archive, key, rows) for archive, rows in pairs if rows is not None for key in archive.keys()]


def _mauve_stage(archive: Archive, key: PoolKey, real: NDArray[np.float16]) -> Stage:
    """MAUVE in percent, from as many rows of both as the fewer has, and its spread over seeds of k-means."""
    samples, manifest = archive.arrays[str(key)], archive.manifest
    n = min(len(samples), len(real))
    made_of = digest(samples[:n], real[:n])

    def run() -> list[Row]:
        values = mauve(torch.from_numpy(samples[:n].astype(np.float64)), torch.from_numpy(real[:n].astype(np.float64)))
        manifest.setdefault("mauve", {})[str(key)] = made_of
        archive.save()
        percent = {"mauve": 100 * statistics.fmean(values), "mauve_spread": 100 * statistics.stdev(values)}
        items = stages.numbers(percent, n)
        return [manifest_row(manifest, item, nfe=key.nfe, convention=key.variant) for item in items]

    same = {name: manifest[name] for name in ("data", "recipe", "seed")} | {"metric": "mauve"}
    known = stages.recorded(nfe=key.nfe, convention=key.variant, **same)

    def done(results: Results) -> bool:
        return known(results) and manifest.get("mauve", {}).get(str(key)) == made_of

    return Stage(f"MAUVE of {archive.path.stem}, {key}", run, done)
