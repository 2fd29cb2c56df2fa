"""Scores of pools of text under the evaluation LM, in two kinds of stages that can run on different machines.

A score is the perplexity under each setting and the features of the samples, reduced to 100 principal components of the
held-out rows. MAUVE is computed from the stored features and needs neither the samples nor the evaluation LM.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
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
from emoe.evaluation.likelihood import estimate_nll, held_out_rows, in_units
from emoe.evaluation.mauve import SCALING, SEEDS, mauve
from emoe.files import replace_file
from emoe.reporting.results import Results, Row
from emoe.reporting.text import in_setting
from emoe.runs.train import load_run
from emoe.studies.eval_lm import EvalLMRun
from emoe.studies.pools import Archive, PoolKey, digest
from emoe.studies.stages import Stage
from emoe.types import Likelihood, Measurement

COMPONENTS = 100  # of stored features
FEATURE_BYTES = 500_000  # of the stored features of a pool
EXACT = Likelihood("exact")


def principal_components(features: Float[Tensor, "n F"], count: int = COMPONENTS) -> tuple[Tensor, Tensor, float]:
    """Mean, directions (F, D) and their share of the variance: at most one fewer directions than rows.

    The largest entry of each direction is positive.
    """
    x = features.double()
    mean = x.mean(0)
    _, values, rows = torch.linalg.svd(x - mean, full_matrices=False)
    count = max(1, min(count, len(x) - 1, x.shape[1]))
    kept = rows[:count]
    signs = kept.gather(1, kept.abs().argmax(1, keepdim=True)).sign()
    total = values.square().sum().item()
    share = values[:count].square().sum().item() / total if total else 1.0
    return mean.float(), (kept * signs).T.float().contiguous(), share


def reduce(features: Float[Tensor, "n F"], mean: Tensor, directions: Tensor) -> NDArray[np.float16]:
    """Features in principal components as they are stored, at most `FEATURE_BYTES` of them."""
    most = FEATURE_BYTES // (2 * directions.shape[1])
    reduced: NDArray[np.float16] = ((features[:most].double() - mean.double()) @ directions.double()).numpy()
    return reduced.astype("<f2")


def in_tokens(nll: Measurement, length: int) -> list[Measurement]:
    """An NLL in nats per row as nats per token and as perplexity."""
    error = None if nll.stderr is None else nll.stderr / length
    ppl = next(item for item in in_units(nll, length) if item.metric == "ppl")
    return [Measurement("nll_token", nll.value / length, error, nll.n), ppl]


def manifest_row(
    manifest: Mapping[str, Any], item: Measurement, *, nfe: int | None = None, convention: str | None = None
) -> Row:
    """A measurement as a row of the run that a manifest describes."""
    names = ("data", "method", "recipe", "seed")
    return Row(
        task="text", nfe=nfe, metric=item.metric, convention=convention, value=item.value, stderr=item.stderr, n=item.n,
        **{name: manifest[name] for name in names},
    )  # fmt: skip


def reference_row(data: str, item: Measurement, convention: str | None = None) -> Row:
    """A measurement of held-out text."""
    manifest = {"data": data, "method": "data", "recipe": "reference", "seed": None}
    return manifest_row(manifest, item, convention=convention)


def describe_text(text: Text) -> dict[str, Any]:
    """The held-out rows of a set and its tokens, by checksum."""
    return {
        "data": text.name,
        "split": text.held_out,
        "split_sha256": text.manifest["splits"][text.held_out]["sha256"],
        "tokenizer": text.manifest["tokenizer"]["sha256"],
        "length": text.space.length,
        "size": text.space.size,
        "mask": text.space.mask_id,
        "packing": text.manifest.get("packing"),
    }


class Scoring:
    """Scores pools that are compared with the held-out rows of one text.

    Args:
        lm_run: The run of the evaluation LM.
        lm_text: Its own text where that is on this machine: its tokenizer is compared with that of the samples.
        text: The held-out rows.
        rows: How many of them its perplexity is measured on.
        folder: Where features are kept.
        page: Where the manifest of the features is written.
    """

    def __init__(self, lm_run: EvalLMRun, lm_text: Text | None, text: Text, rows: int, folder: Path, page: Path):
        self.lm_run, self.lm_text, self.text, self.folder, self.page = lm_run, lm_text, text, folder, page
        self.rows = min(rows, len(text.test_rows))
        self.reference = Archive.open(folder / f"reference-{text.name}.npz")

    @functools.cached_property
    def lm(self) -> RunLM:
        """The evaluation LM."""
        run = self.lm_run
        return RunLM(load_run(run.best_path, device=run.device, domain=self.lm_text or self.text))

    @property
    def made_of(self) -> dict[str, str]:
        """What the reference features depend on."""
        return {"judge": self.lm.sha256, "split": describe_text(self.text)["split_sha256"]}

    def stages(self, pools: Sequence[Archive]) -> list[Stage]:
        """Of the held-out rows first, then of every pool."""
        return [self.reference_stage(), *(self.score_stage(pool, key) for pool in pools for key in pool.keys())]

    def reference_stage(self) -> Stage:
        """The evaluation LM on held-out rows: its likelihood, its best step, principal components of its features."""
        recipe, seed = self.lm_run.experiment.name, self.lm_run.experiment.seed
        manifest = {"data": self.text.name, "method": "judge", "recipe": recipe, "seed": seed}

        def run() -> list[Row]:
            rows = held_out_rows(self.text, None, 0)
            features = self.lm.features(self.text, rows)
            mean, directions, share = principal_components(features)
            exact = estimate_nll(self.lm.run.method, held_out_rows(self.text, self.rows, 0), EXACT)
            best = [Measurement("judge_valid_ppl", math.exp(one.nll), None, None) for one in [self.lm_run.best] if one]
            items = [
                Measurement("judge_step", self.lm.run.step, None, None), *best,
                Measurement("pca_dimensions", directions.shape[1], None, None),
                Measurement("pca_share", 100 * share, None, len(rows)),
            ]  # fmt: skip
            found = [manifest_row(manifest, item, convention="exact") for item in in_tokens(exact, self.lm.context)]
            found += [manifest_row(manifest, item) for item in items]
            found += [
                reference_row(self.text.name, score(self.lm, self.text, rows, setting).perplexity(), setting)
                for setting in SETTINGS
            ]
            arrays = {"mean": mean.numpy(), "directions": directions.numpy()}
            self.reference.arrays = arrays | {"features": reduce(features, mean, directions)}
            self.reference.manifest = describe_text(self.text) | {
                "judge": self.lm.describe(), "made_of": self.made_of, "rows": len(rows), "settings": list(SETTINGS),
                "pca": {
                    "dimensions": directions.shape[1], "of": directions.shape[0], "variance_kept": round(share, 4),
                    "fitted_on": f"{self.text.held_out} rows of {self.text.name}", "rows": len(rows),
                    "stored_as": "float16",
                },
                "mauve": {"seeds": list(SEEDS), "scaling": SCALING, "clusters": "a tenth of the rows"},
            }  # fmt: skip
            self.reference.save()
            replace_file(self.page, json.dumps(self.reference.manifest, indent=1, sort_keys=True) + "\n")
            return found

        def done(results: Results) -> bool:
            exact = results.select(method="judge", metric="ppl", data=self.text.name, recipe=recipe)
            real = results.select(method="data", metric="gen_ppl", data=self.text.name)
            same = self.reference.manifest.get("made_of") == self.made_of and self.page.exists()
            return same and bool(real) and any((row.n or 0) >= self.rows for row in exact)

        return Stage(f"held-out rows of {self.text.name}", done, run)

    def score_stage(self, pool: Archive, key: PoolKey) -> Stage:
        """Perplexities and features of a pool."""
        path = self.folder / pool.path.name
        names = {in_setting(setting, key.variant): setting for setting in SETTINGS}
        made_of = {"pool": digest(pool.arrays[str(key)]), "judge": self.lm.sha256}

        def run() -> list[Row]:
            tokens = pool.tokens(key)
            items = {name: score(self.lm, self.text, tokens, setting).perplexity() for name, setting in names.items()}
            mean, directions = (torch.from_numpy(self.reference.arrays[name]) for name in ("mean", "directions"))
            features = Archive.open(path)
            scored = features.manifest.get("scored", {}) | {str(key): made_of}
            own = {name: value for name, value in pool.manifest.items() if name != "pools"}
            features.manifest |= own | {"judge": self.lm.describe(), "scored": scored}
            features.arrays[str(key)] = reduce(self.lm.features(self.text, tokens), mean, directions)
            features.save()
            return [manifest_row(own, item, nfe=key.nfe, convention=name) for name, item in items.items()]

        def done(results: Results) -> bool:
            same = {name: pool.manifest[name] for name in ("data", "recipe", "seed")}
            rows = results.select(metric="gen_ppl", nfe=key.nfe, convention=tuple(names), **same)
            return len(rows) == len(names) and Archive.open(path).manifest.get("scored", {}).get(str(key)) == made_of

        return Stage(f"{pool.path.stem}, {key}", done, run)


def mauve_stages(folder: Path) -> list[Stage]:
    """MAUVE of every pool whose features, and those of its held-out rows, are in a folder."""
    archives = [Archive.open(path) for path in sorted(folder.glob("*.npz")) if not path.name.startswith("reference-")]
    stages = []
    for features in archives:
        reference = Archive.open(folder / f"reference-{features.manifest['data']}.npz")
        stages += [
            _mauve_stage(features, key, reference.arrays["features"]) for key in features.keys() if reference.arrays
        ]
    return stages


def _mauve_stage(features: Archive, key: PoolKey, real: NDArray[np.float16]) -> Stage:
    """MAUVE in percent, from as many rows of both as the fewer has, and its spread over seeds of k-means."""
    samples = features.arrays[str(key)]
    n = min(len(samples), len(real))
    made_of = digest(samples[:n], real[:n])

    def run() -> list[Row]:
        value = mauve(*(torch.from_numpy(part[:n].astype(np.float64)) for part in (samples, real)))
        items = [Measurement("mauve", 100 * value.mean, None, n)]
        items += [] if value.spread is None else [Measurement("mauve_spread", 100 * value.spread, None, n)]
        features.manifest.setdefault("mauve", {})[str(key)] = made_of
        features.save()
        return [manifest_row(features.manifest, item, nfe=key.nfe, convention=key.variant) for item in items]

    def done(results: Results) -> bool:
        same = {name: features.manifest[name] for name in ("data", "recipe", "seed")}
        rows = results.select(metric="mauve", nfe=key.nfe, convention=key.variant, **same)
        return bool(rows) and features.manifest.get("mauve", {}).get(str(key)) == made_of

    return Stage(f"MAUVE of {features.path.stem}, {key}", done, run)
