"""`emoe reproduce text`: recorded rows, parts alone and on other machines, what is continued and refused."""

from __future__ import annotations

import json
import math
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from emoe import studies
from emoe.config import ConfigError
from emoe.domains.base import DataError
from emoe.domains.text.data import Text, TextConfig
from emoe.evaluation.eval_lm import RunLM
from emoe.evaluation.gen_ppl import score
from emoe.evaluation.measure import estimate_nll, factorised_nll, held_out_rows
from emoe.experiment import customise
from emoe.recipes import get_recipe
from emoe.reporting.results import Results
from emoe.reporting.text import GREEDY, in_setting
from emoe.runs.run import Run
from emoe.runs.train import load_run
from emoe.studies import eval_lm, scores, text, training
from emoe.studies.pools import Archive, PoolKey, escape
from emoe.studies.stages import steps_done
from emoe.types import Likelihood, Measurement

SMALL = {"train.steps": "12", "train.log-every": "2", "train.batch": "8", "eval.batch": "30"}
SIZES = {"size": "text-tiny", "nfe": (1, 2, 8), "samples": 40, "rows": 20, "eval_lm_steps": 15, "quiet": True}
GREEDY_ONE = PoolKey(1, GREEDY)


def study(folder: Path, *methods: str, settings: dict[str, str] = SMALL, **fields: Any) -> int:
    own = {"runs": folder / "runs", "results": folder / "results", "device": "cpu", "jobs": 1}
    own |= {"methods": methods or ("mdlm", "emoe", "ar")}
    return studies.run("text", text.Options(**own | SIZES | fields, settings=settings))


def where(sets: Path, *names: str) -> dict[str, Path]:
    options = {"set": "set", "judge": "eval_lm_set", "else": "zero_shot"}
    return {options[name]: sets / name for name in names or options}


@pytest.fixture(scope="module")
def finished(sets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole study of three methods, by one command."""
    folder = tmp_path_factory.mktemp("study")
    assert study(folder, **where(sets), jobs=2) == 0
    return folder


@pytest.fixture(scope="module")
def results(finished: Path) -> Results:
    return Results.load(finished / "results/text-tiny.json").only(task="text")


@pytest.fixture(scope="module")
def domain(sets: Path) -> Text:
    return TextConfig(path=str(sets / "set")).build(0)


def run_of(folder: Path, method: str) -> Path:
    return next((folder / "runs").glob(f"text-tiny-{method}-seed0-????????"))


def values(results: Results) -> dict[Any, float]:
    return {row.identity: row.value for row in results.rows if row.metric not in ("train_s", "step_ms")}


def test_the_study_gives_the_recorded_rows(finished: Path, results: Results, recorded, sets, untouched, capsys) -> None:
    recorded("text", results)
    bounds = {"bound@1", "bound@4"}
    names = {"mdlm": {"nelbo", *bounds}, "emoe": {"objective", *bounds, "iw@1,16"}, "ar": {"exact"}}
    for method, wanted in names.items():
        rows = results.select(method=method, metric="nll_token")
        assert {row.convention for row in rows} == wanted and {row.n for row in rows} == {20}
        gains = results.select(method=method, metric="coordination_gain")
        assert [row.convention for row in gains] == ["bound@1"] * (method == "emoe")
        elsewhere = results.select(method=method, data="else", metric="zero_shot_ppl")
        assert {row.convention for row in elsewhere} == {name for name in wanted if name[:2] in ("ne", "bo", "ex")}
    assert {row.nfe for row in results.select(method="ar", metric="entropy")} == {8}
    capsys.readouterr()
    untouched(finished, lambda: study(finished, **where(sets), quiet=False))
    said = capsys.readouterr()
    assert "3 runs, 3 of them trained" in said.err and "nothing, all is up to date" in said.err
    assert "held-out text" in said.out and "itself on the test rows" in said.out


def test_pools_are_the_samples_of_the_run(finished: Path, results: Results, domain: Text) -> None:
    for method, count in (("mdlm", 3), ("emoe", 6)):
        archive = Archive.open(finished / "runs/pools" / f"{run_of(finished, method).name}.npz")
        assert len(archive.arrays) == count and {array.dtype for array in archive.arrays.values()} == {np.dtype("<u2")}
        for key in archive.keys():
            changed = {"eval.sampler.kind": "reveal-first"} | (text.GREEDY_SETTINGS if key.variant else {})
            run = load_run(run_of(finished, method), device="cpu", domain=domain, settings=changed)
            pool = run.pool(40, key.nfe)
            assert torch.equal(archive.tokens(key), pool.samples)
            entry = archive.manifest["pools"][str(key)]
            assert (entry["calls"], entry["step"], entry["sampler"]) == (pool.calls, 12, "reveal-first")
            (calls,) = results.select(method=method, metric="network_calls", nfe=key.nfe, convention=key.variant)
            assert calls.value == pool.calls <= key.nfe
            assert entry["shown"] == run.domain.decode(pool.samples[:2])
    page = (finished / "results/text-tiny-samples.md").read_text()
    assert all(f"- {escape(text)}\n" in page for text in entry["shown"]) and "**E\\-MoE, greedy routes**" in page
    assert "All with `train.batch=8 train.steps=12`." in page and page.index("NFE 1\n") < page.index("NFE 8\n")
    assert escape("[CLS] a*b <i> & `c` #1 - x|y") == r"\[CLS\] a\*b &lt;i&gt; &amp; \`c\` \#1 \- x\|y"


def test_scores_are_those_of_the_evaluation_lm(finished: Path, results: Results, domain: Text) -> None:
    (best,) = (finished / "runs").glob("text-tiny-judge-*-best")
    lm = RunLM(load_run(best, device="cpu", domain=domain))
    archive = Archive.open(finished / "runs/pools" / f"{run_of(finished, 'emoe').name}.npz")
    for key in (PoolKey(2), GREEDY_ONE):
        for setting in ("paper", "duo"):
            wanted = score(lm, domain, archive.tokens(key), setting).perplexity()
            name = in_setting(setting, key.variant)
            (row,) = results.select(method="emoe", metric="gen_ppl", nfe=key.nfe, convention=name)
            assert (row.value, row.stderr, row.n) == (wanted.value, wanted.stderr, wanted.n)
    exact = estimate_nll(lm.run.method, held_out_rows(domain, 20, 0), Likelihood("exact"))
    (own,) = results.select(method="judge", metric="ppl", convention="exact")
    assert own.value == pytest.approx(math.exp(exact.value / 8)) and own.n == 20
    manifest = json.loads((finished / "results/text-tiny-judge.json").read_text())
    assert manifest["judge"]["sha256"] == lm.sha256 and manifest["judge"]["trained_on"] == "text-judge"
    assert manifest["pca"]["fitted_on"] == "test rows of text" and manifest["pca"]["dimensions"] <= 100
    figures = {path.name: path.stat().st_size for path in (finished / "results/figures").iterdir()}
    assert set(figures) == {"text-tiny-gen-ppl.png", "text-tiny-latent.png"} and min(figures.values()) > 10_000


def test_parts_on_different_machines_give_the_same_numbers(finished, results, sets, tmp_path) -> None:
    """Models in two places, the evaluation LM in a third that has nothing but their pools and a text of its own."""
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    for place, methods in ((first, ("mdlm", "ar")), (second, ("emoe",))):
        assert study(place, *methods, only="train", **where(sets, "set", "else")) == 0
        assert not (place / "runs/features").exists() and not (place / "results/text-tiny.md").exists()
        shutil.copytree(place / "runs/pools", third / "runs/pools", dirs_exist_ok=True)
    for part in ("eval-lm", "score"):
        assert study(third, only=part, **where(sets, "judge")) == 0
    assert {row.metric for row in Results.load(third / "results/text-tiny.json").rows if row.nfe} == {"gen_ppl"}
    merge = tuple(place / "results/text-tiny.json" for place in (first, second))
    assert study(third, only="draw", merge=merge, **where(sets, "judge")) == 0
    assert values(Results.load(third / "results/text-tiny.json").only(task="text")) == values(results)
    pages = [(place / "results/text-tiny-samples.md").read_text() for place in (finished, third)]
    assert pages[0] == pages[1]


def test_mauve_is_measured_from_stored_features(finished: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    """With a package in place of mauve-text; without one its extra is named and nothing is lost."""
    copy = shutil.copytree(finished, tmp_path / "copy")
    monkeypatch.setitem(sys.modules, "mauve", None)
    assert study(copy, only="draw", quiet=False) == 0
    assert "MAUVE is left out: mauve-text: the package is missing; pip install emoe[judge]" in capsys.readouterr().err
    sizes = []

    def compute_mauve(p_features, q_features, seed, **options: Any) -> Any:
        sizes.append((p_features.shape, q_features.shape))
        return types.SimpleNamespace(mauve=0.5 + seed / 100, num_buckets=2)

    monkeypatch.setitem(sys.modules, "mauve", types.SimpleNamespace(compute_mauve=compute_mauve))
    for _ in range(2):  # the second time nothing is measured again
        assert study(copy, only="draw") == 0
        assert len(sizes) == 3 * 10 and len(set(sizes)) == 1
    found = Results.load(copy / "results/text-tiny.json")
    assert {row.value for row in found.select(metric="mauve")} == {52.0}
    assert [row.value for row in found.select(metric="mauve_spread")] == pytest.approx([1.0] * 10)
    keys = [(row.nfe, row.convention) for row in found.select(metric="mauve", method="emoe")]
    assert (2, None) in keys and (1, GREEDY) in keys


def test_other_pools_and_another_lm_are_scored_anew(finished, results, sets, tmp_path) -> None:
    copy = shutil.copytree(finished, tmp_path / "copy")
    assert study(copy, "mdlm", only="train", samples=10, **where(sets)) == 0  # fewer replace nothing
    assert values(Results.load(copy / "results/text-tiny.json")) == values(results)
    assert study(copy, "mdlm", only="train", samples=50, **where(sets)) == 0
    assert study(copy, only="score", **where(sets)) == 0
    after = Results.load(copy / "results/text-tiny.json")
    assert {row.n for row in after.select(method="mdlm", metric="gen_ppl", convention="paper")} == {50}
    for part in ("eval-lm", "score", "draw"):
        assert study(copy, only=part, eval_lm_steps=5, **where(sets, "judge")) == 0
    last = Results.load(copy / "results/text-tiny.json")
    old, new = (values(one.only(metric="gen_ppl", nfe=(1, 2, 8))) for one in (after, last))
    assert old.keys() == new.keys() and all(old[key] != new[key] for key in old)
    assert len(last.select(method="judge", metric="ppl")) == 2


# --- The evaluation LM


def lm_study(folder: Path, sets: Path, steps: int = 15) -> text.Study:
    settings = SMALL | {"method.experts": "3"}  # fields of the models alone are left out
    fields = {"runs": folder, "methods": ("emoe",), "device": "cpu", "eval_lm_set": sets / "judge"}
    return text.Study(text.Options(**SIZES | fields | {"eval_lm_steps": steps}, settings=settings))


def test_the_lm_is_the_ar_recipe_on_text_of_its_own(finished: Path, sets: Path) -> None:
    whole, recipe = lm_study(finished / "runs", sets).lm_run, get_recipe("text-tiny-ar")
    experiment = whole.experiment
    assert experiment.name == "text-tiny-judge train.batch=8 train.steps=15"
    assert experiment.domain == TextConfig(path="sets/text-judge", held_out="valid")
    assert (experiment.method, experiment.backbone) == (recipe.method, recipe.backbone)
    assert whole.steps_left == 0 and whole.is_ready and list(whole.validations()) == [2, 4, 6, 8, 10, 12, 14, 15]
    own = TextConfig(path=str(sets / "judge"), held_out="valid").build(0)
    best = load_run(whole.best_path, device="cpu", domain=own)
    nll = estimate_nll(best.method, best.domain.test_rows.long(), Likelihood("exact")).value / 8
    assert whole.best() == (best.step, pytest.approx(nll)) and nll == min(whole.validations().values())


def test_the_lm_stops_early_keeps_its_best_step_and_resumes(sets: Path, tmp_path: Path, monkeypatch) -> None:
    """Interrupted between a checkpoint and its validation, and between a validation and the keeping of its step."""
    losses = {4: 4.0, 8: 3.0, 12: 5.0, 16: 4.5, 20: 4.2, 24: 1.0}
    keep, trial = eval_lm.KeepBest._keep, lm_study(tmp_path, sets, 32)

    def nll(method: Any, *_: Any) -> Any:
        step = steps_done(run.path)
        if step == broken:
            raise KeyboardInterrupt
        return Measurement("nll", 8 * losses[step], None, 1)

    def keep_some(self: Any, newest: Path) -> None:
        if broken == -8 and newest.name.endswith("8"):
            raise KeyboardInterrupt
        keep(self, newest)

    monkeypatch.setattr(eval_lm, "estimate_nll", nll)
    monkeypatch.setattr(eval_lm.KeepBest, "_keep", keep_some)
    run = trial.lm_run
    broken = 4  # read by the functions above
    for following, steps in ((-8, []), (16, [4, 8]), (0, [4, 8, 12])):
        with pytest.raises(KeyboardInterrupt):
            trial.train_eval_lm()
        assert list(run.validations()) == steps and run.steps_left
        broken = following
    trial.train_eval_lm()
    assert list(run.validations().items()) == [(step, losses[step]) for step in (4, 8, 12, 16, 20)]
    assert run.steps_left == 0 and steps_done(run.best_path) == 8 and steps_done(run.path) == 20
    assert len(list(run.best_path.glob("checkpoints/*"))) == 1
    shutil.rmtree(run.best_path)  # a lost best step is not replaced
    assert run.steps_left
    with pytest.raises(DataError, match="is incomplete; remove it and"):
        trial.train_eval_lm()


# --- What is refused


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"set": "set"}, "eval-lm-set: sets/text-judge: does not exist; give --eval-lm-set FOLDER, .* --only train"),
        ({"only": "train"}, "set: sets/text: does not exist; give --set FOLDER"),
        ({"only": "eval-lm", "eval_lm_set": "else"}, "has no validation rows, .* --split"),
        ({"set": "set", "eval_lm_set": "strange"}, "another tokenizer or length than --set"),
        ({"set": "set", "eval_lm_set": "known"}, "trains on .*train.txt, which is in --set too"),
        ({"set": "set", "only": "train", "zero_shot": "strange"}, "zero-shot: .* prepare it with the same"),
        ({"only": "score"}, "pools: holds no pools; draw them with --only train"),
    ],
)
def test_missing_data_are_named_with_a_remedy(fields, message, sets: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    given = {name: value if name == "only" else sets / value for name, value in fields.items()}
    with pytest.raises(DataError, match=message):
        study(tmp_path, "mdlm", settings=SMALL | {"train.steps": "1"}, **given)
        raise DataError(capsys.readouterr().err)  # what concerns one run is reported at the end


def test_pools_without_an_lm_or_without_their_text(finished: Path, sets: Path, tmp_path: Path) -> None:
    shutil.copytree(finished / "runs/pools", tmp_path / "runs/pools")
    with pytest.raises(ConfigError, match="eval-lm: text-tiny-judge-seed0-.* is not trained in .*--only eval-lm first"):
        study(tmp_path, only="score")
    (best,) = (finished / "runs").glob("text-tiny-judge-*-best")
    shutil.copytree(best, tmp_path / "runs" / best.name)
    with pytest.raises(DataError, match="which no set here holds; give --set FOLDER, or an --eval-lm-set"):
        study(tmp_path, only="score")


# --- Numbers


COMPARED = {"method.compare": '{"estimator": "wake-sleep", "draws": 4}'}
ONCE = [(method, {}, 1, 1) for method in ("ar", "mdlm", "sedd")]
TWICE = [(method, {}, 2, 2) for method in ("bd3lm", "vadd", "emoe", "emoe-free-nats")]


@pytest.mark.parametrize(("method", "settings", "entered", "inside"), [*ONCE, *TWICE, ("emoe", COMPARED, 2, 5)])
def test_passes_are_counted(method: str, settings, entered: float, inside: float, domain: Text) -> None:
    """[x0; xt] counts twice, an encoder too; four draws of E-MoE part in the first of two blocks: (2 + 8) / 2."""
    experiment = customise(get_recipe(f"text-tiny-{method}"), settings)
    run = Run(Path(), experiment, experiment.build_method(domain.space).eval(), 0)
    run.domain = domain
    assert training.network_passes(run) == {"passes_train": entered, "calls_step": 1, "passes_block": inside}


def test_features_are_reduced_by_principal_components() -> None:
    draw = torch.Generator().manual_seed(0)
    low = torch.randn(50, 3, generator=draw, dtype=torch.float64)
    features = low @ torch.randn(3, 20, generator=draw, dtype=torch.float64) + 5
    mean, directions, share = scores.principal_components(features)
    assert share == pytest.approx(1) and directions.shape == (20, 20)
    stored = torch.from_numpy(scores.reduce(features, mean, directions).astype(np.float64))
    assert stored[:, 3:].abs().max() < 1e-3
    assert torch.allclose(torch.cdist(stored, stored), torch.cdist(features, features), atol=0.05)
    assert scores.principal_components(features[:3])[1].shape == (20, 2)
    two = scores.principal_components(features, 2)
    assert len(scores.reduce(torch.zeros(200_000, 20), *two[:2])) * 2 * 2 <= scores.FEATURE_BYTES


def test_the_best_factorised_step_may_ignore_positions(domain: Text) -> None:
    rows = domain.fresh(20, 0)
    counts = torch.bincount(domain.rows.long().flatten(), minlength=15).double() + 0.5
    pooled = -(counts / counts.sum()).log()[rows].sum(1).mean().item()
    best = min(pooled, factorised_nll(domain.rows, rows, 15))
    assert text.best_factorised(domain.rows, rows, 15) == pytest.approx(best)
