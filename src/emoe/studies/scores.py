"""Scores of pools of text under the evaluation LM, in two kinds of stages that can run on different machines.

A score is the perplexity under each setting and the features of the samples, reduced to 100 principal components of the
held-out rows. MAUVE is computed from the stored features and needs neither the samples nor the evaluation LM.
"""

from __future__ import annotations

import functools
import json
import math
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
from emoe.evaluation.likelihood import estimate_nll, held_out_rows, in_units
from emoe.evaluation.mauve import SCALING, SEEDS, mauve
from emoe.files import replace_file
from emoe.reporting.results import Results, Row
from emoe.reporting.text import in_setting
from emoe.runs.train import load_run
from emoe.studies.eval_lm import EvalLMRun
from emoe.studies.pools import Archive, PoolKey, digest
from emoe.studies.stages import Stage, recorded
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


def in_tokens(nll: Measurement, length: int) -> list[Measurement]:
    """An NLL in nats per row as nats per token and as perplexity."""
    error = None if nll.stderr is None else nll.stderr / length
    return [Measurement("nll_token", nll.value / length, error, nll.n), in_units(nll, length)[2]]


def manifest_row(
    manifest: Mapping[str, Any], item: Measurement, nfe: int | None = None, name: str | None = None
) -> Row:
    """A measurement as a row of the run that a manifest describes; `name` is the convention."""
    data, method, recipe, seed = (manifest[key] for key in ("data", "method", "recipe", "seed"))
    return Row(
        task="text", data=data, method=method, recipe=recipe, seed=seed, nfe=nfe, metric=item.metric, convention=name,
        value=item.value, stderr=item.stderr, n=item.n,
    )  # fmt: skip


def reference_row(data: str, item: Measurement, name: str | None = None) -> Row:
    """A measurement of held-out text."""
    return manifest_row({"data": data, "method": "data", "recipe": "reference", "seed": None}, item, name=name)


def describe_text(text: Text) -> dict[str, Any]:
    """The held-out rows of a set and its tokens, by checksum."""
    manifest, space = text.manifest, text.space
    return {
        "data": text.name, "split": text.held_out, "split_sha256": manifest["splits"][text.held_out]["sha256"],
        "tokenizer": manifest["tokenizer"]["sha256"], "length": space.length, "size": space.size, "mask": space.mask_id,
        "packing": manifest.get("packing"),
    }  # fmt: skip


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
        """Of the held-out rows first, then of every pool."""
        return [self.reference_stage(), *(self.score_stage(pool, key) for pool in pools for key in pool.keys())]

    def reference_stage(self) -> Stage:
        """The evaluation LM on held-out rows: its likelihood, its best step, principal components of its features."""
        data, recipe, seed = self.text.name, self.lm_run.experiment.name, self.lm_run.experiment.seed
        manifest = {"data": data, "method": "judge", "recipe": recipe, "seed": seed}
        made_of = {"judge": self.lm.sha256, "split": describe_text(self.text)["split_sha256"]}

        def run() -> list[Row]:
            rows, best = held_out_rows(self.text, None, 0), self.lm_run.best()
            features = self.lm.features(self.text, rows)
            mean, directions, share = principal_components(features)
            exact = estimate_nll(self.lm.run.method, held_out_rows(self.text, self.rows, 0), Likelihood("exact"))
            values: dict[str, float] = {"judge_step": self.lm.run.step, "pca_dimensions": directions.shape[1]}
            values |= {} if best is None else {"judge_valid_ppl": math.exp(best[1])}
            items = [Measurement(metric, value, None, None) for metric, value in values.items()]
            items.append(Measurement("pca_share", 100 * share, None, len(rows)))
            real = {setting: score(self.lm, self.text, rows, setting).perplexity() for setting in SETTINGS}
            self.reference.arrays = {"mean": mean.numpy(), "directions": directions.numpy()}
            self.reference.arrays["features"] = reduce(features, mean, directions)
            components = {
                "dimensions": directions.shape[1],
                "of": directions.shape[0],
                "variance_kept": round(share, 4),
            }
            fitted = {"fitted_on": f"{self.text.held_out} rows of {data}", "rows": len(rows), "stored_as": "float16"}
            self.reference.manifest = describe_text(self.text) | {
                "judge": self.lm.describe(), "made_of": made_of, "rows": len(rows), "settings": list(SETTINGS),
                "pca": components | fitted,
                "mauve": {"seeds": list(SEEDS), "scaling": SCALING, "clusters": "a tenth of the rows"},
            }  # fmt: skip
            self.reference.save()
            replace_file(self.page, json.dumps(self.reference.manifest, indent=1, sort_keys=True) + "\n")
            named = [manifest_row(manifest, item, name="exact") for item in in_tokens(exact, self.lm.context)]
            others = [manifest_row(manifest, item) for item in items]
            return named + others + [reference_row(data, item, setting) for setting, item in real.items()]

        def done(results: Results) -> bool:
            same = self.reference.manifest.get("made_of") == made_of and self.page.exists()
            own = recorded(results, n=self.rows, method="judge", metric="ppl", data=data, recipe=recipe)
            return same and own and recorded(results, method="data", metric="gen_ppl", data=data)

        return Stage(f"held-out rows of {data}", done, run)

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
            return [manifest_row(own, item, key.nfe, name) for name, item in items.items()]

        def done(results: Results) -> bool:
            same = {k: own[k] for k in ("data", "recipe", "seed")} | {"metric": "gen_ppl", "nfe": key.nfe}
            scored = Archive.open(path).manifest.get("scored", {}).get(str(key)) == made_of
            return scored and all(recorded(results, convention=name, **same) for name in names)

        return Stage(f"{pool.path.stem}, {key}", done, run)


def mauve_stages(folder: Path) -> list[Stage]:
    """MAUVE of every pool whose features, and those of its held-out rows, are in a folder."""
    archives = [Archive.open(path) for path in sorted(folder.glob("*.npz")) if not path.name.startswith("reference-")]
    pairs = [(one, Archive.open(folder / f"reference-{one.manifest['data']}.npz").arrays) for one in archives]
    return [_mauve_stage(one, key, real["features"]) for one, real in pairs if real for key in one.keys()]


def _mauve_stage(features: Archive, key: PoolKey, real: NDArray[np.float16]) -> Stage:
    """MAUVE in percent, from as many rows of both as the fewer has, and its spread over seeds of k-means."""
    samples = features.arrays[str(key)]
    n = min(len(samples), len(real))
    made_of = digest(samples[:n], real[:n])

    def run() -> list[Row]:
        value = mauve(torch.from_numpy(samples[:n].astype(np.float64)), torch.from_numpy(real[:n].astype(np.float64)))
        items = [Measurement("mauve", 100 * value.mean, None, n)]
        items += [] if value.spread is None else [Measurement("mauve_spread", 100 * value.spread, None, n)]
        features.manifest.setdefault("mauve", {})[str(key)] = made_of
        features.save()
        return [manifest_row(features.manifest, item, key.nfe, key.variant) for item in items]

    def done(results: Results) -> bool:
        same = {name: features.manifest[name] for name in ("data", "recipe", "seed")}
        known = recorded(results, metric="mauve", nfe=key.nfe, convention=key.variant, **same)
        return known and features.manifest.get("mauve", {}).get(str(key)) == made_of

    return Stage(f"MAUVE of {features.path.stem}, {key}", done, run)
