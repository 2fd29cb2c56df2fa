"""`emoe reproduce text`: the chain, its stages alone and elsewhere, what it keeps, tables, figures, the judge."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from emoe.backbones.base import active_parameters, total_parameters
from emoe.cli import main
from emoe.config import ConfigError
from emoe.domains.base import DataError
from emoe.domains.text.data import Text, TextConfig, sets_at
from emoe.domains.text.metrics import measure_rows
from emoe.domains.text.prepare import PrepareConfig, prepare
from emoe.engine.signals import StopSignal
from emoe.evaluation.likelihood import estimate_nll
from emoe.evaluation.pools import draw_pool
from emoe.experiment import customise
from emoe.judges import RunJudge, score
from emoe.methods.base import SamplerConfig
from emoe.recipes import get_recipe
from emoe.reporting.cells import Line
from emoe.reporting.docs import BLOCKS
from emoe.reporting.render import markdown
from emoe.reporting.results import Results, Row, RunInfo, record
from emoe.reporting.table import Table, conventions_of
from emoe.reporting.text import AVERAGED, GREEDY, TABLES, VARIANTS, data_of, eval_lm_notes, text_page, text_tables
from emoe.rng import derive_seed
from emoe.runs import Run, load_run
from emoe.studies import base, text, text_judge
from emoe.studies.base import Study, run_name, steps_done
from emoe.studies.text_files import PCA, Archive, PoolKey, digest
from emoe.studies.text_judge import JudgeRun
from emoe.studies.text_pages import escape, with_earlier
from emoe.studies.text_training import network_passes, training_rows
from emoe.types import Convention, Measurement

LENGTH = 8
WORDS = "the a cat dog bird sees hears small old .".split()
SIZES = (
    "--size text-tiny --nfe 1,2 --samples 40 --rows 20 --iw-rows 4 --train.steps 12 --train.log-every 2 "
    "--train.batch 8 --eval.batch 30 --judge-steps 15 --device cpu --jobs 1 --quiet"
)
BOTH = "--methods mdlm,emoe"
REVEAL_FIRST = SamplerConfig(kind="reveal-first")
OTHERS = {f"nfe1 {GREEDY.name}", f"nfe2 {GREEDY.name}", f"nfe2 {AVERAGED.name}"}
POOLS = {"mdlm": {"nfe1", "nfe2"}, "emoe": {"nfe1", "nfe2", *OTHERS}}


def write_lines(path: Path, seed: int, count: int) -> Path:
    draw = random.Random(seed)
    lines = (
        f"The {draw.choice(['small', 'old'])} {draw.choice(['cat', 'dog'])} {draw.choice(['sees', 'hears'])} a bird."
        for _ in range(count)
    )
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`set`, `judge` (other training text, the same test rows) and `else`, and `strange` with other words."""
    pytest.importorskip("tokenizers")
    root = tmp_path_factory.mktemp("sets")
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    (root / "vocab.txt").write_text("\n".join([*special, *WORDS]) + "\n")
    (root / "other.txt").write_text("\n".join([*special, *reversed(WORDS)]) + "\n")
    names = {"train": 60, "valid": 30, "test": 40, "judge-train": 80, "judge-valid": 30, "else": 30}
    files = {name: write_lines(root / f"{name}.txt", seed, count) for seed, (name, count) in enumerate(names.items())}
    config = PrepareConfig(length=LENGTH, jobs=1)
    for name, parts in {
        "set": ("train", "valid", "test"),
        "judge": ("judge-train", "judge-valid", "test"),
        "else": ("valid", "valid", "else"),
        "known": ("train", "judge-valid", "test"),
        "strange": ("judge-train", "judge-valid", "test"),
    }.items():
        vocabulary = root / ("other.txt" if name == "strange" else "vocab.txt")
        train, valid, test = (files[part] for part in parts)
        some = {"train": [train], "test": [test]} | ({} if name == "else" else {"valid": [valid]})
        prepare(root / name, vocabulary, [], config=config, **some)
    return root


def study(folder: Path, words: str = "", sizes: str = SIZES) -> int:
    places = ["--runs", str(folder / "runs"), "--results", str(folder / "results")]
    return main(["reproduce", "text", *sizes.split(), *words.split(), *places])


def with_sets(sets: Path, *names: str) -> str:
    options = {"set": "--set", "judge": "--judge-set", "else": "--zero-shot"}
    return " ".join(f"{options[name]} {sets / name}" for name in names or options)


@pytest.fixture(scope="module", autouse=True)
def few_looks():
    """Five looks at the judge's validation rows, not eight."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "CHECKS", 5)
        yield


@pytest.fixture(scope="module")
def finished(sets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole study of two methods, by one command."""
    folder = tmp_path_factory.mktemp("study")
    assert study(folder, f"{BOTH} {with_sets(sets)}") == 0
    return folder


@pytest.fixture(scope="module")
def results(finished: Path) -> Results:
    return Results.load(finished / "results/text-tiny.json").only(task="text")


def run_of(folder: Path, method: str) -> Path:
    return next((folder / "runs").glob(f"text-tiny-{method}-seed0-????????"))


def opened(folder: Path, method: str, sets: Path, **settings: str) -> Run:
    domain = TextConfig(path=str(sets / "set")).build(0)
    return load_run(run_of(folder, method), device="cpu", domain=domain, settings=settings)


def values(results: Results, *, timed: bool = False) -> dict[tuple[Any, ...], float]:
    """All numbers but times, which are another each time."""
    return {row.identity: row.value for row in results.rows if timed or row.metric not in ("train_s", "step_ms")}


def times(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in sorted(folder.rglob("*")) if path.is_file()}


# --- the chain


def test_every_model_is_measured_under_its_own_names(results: Results, finished: Path, sets: Path) -> None:
    names = {"mdlm": ["nelbo", "bound@1", "bound@4"], "emoe": ["objective", "bound@1", "bound@4", "iw@1,16"]}
    for method, wanted in names.items():
        mine = results.only(method=method, data="text")
        assert {row.recipe for row in mine.rows} == {f"text-tiny-{method} train.batch=8 train.steps=12"}
        assert conventions_of([Line((), mine.rows)], "ppl") == wanted
        for row in mine.select(metric="nll_token"):
            (ppl,) = mine.select(metric="ppl", convention=row.convention)
            assert ppl.value == pytest.approx(math.exp(row.value)) and row.stderr is not None
            assert row.n == (4 if str(row.convention).startswith("iw") else 20)
        gains = mine.select(metric="coordination_gain")
        assert [row.convention for row in gains] == (["bound@1"] if method == "emoe" else [])
        elsewhere = results.only(method=method, data="else")
        assert conventions_of([Line((), elsewhere.rows)], "zero_shot_ppl") == [
            n for n in wanted if n[:2] in ("ne", "bo")
        ]
        assert {row.metric for row in elsewhere.rows} == {"zero_shot_ppl", "zero_shot_nll_token"}
        run = opened(finished, method, sets)
        (total,), (active,) = (mine.select(metric=name) for name in ("params", "params_active"))
        assert (total.value, active.value) == (total_parameters(run.method), active_parameters(run.method.backbone))
        assert mine.select(metric="train_s")[0].n == 12 and mine.select(metric="step_ms")[0].value > 0
    assert data_of(results) == ["text"]


def test_a_likelihood_is_that_of_the_moving_average_on_the_test_rows(
    results: Results, finished: Path, sets: Path
) -> None:
    run = opened(finished, "emoe", sets)
    assert isinstance(run.domain, Text)
    rows = run.domain.fresh(20, derive_seed(0, "held out"))
    nll = estimate_nll(run.method, rows, Convention.parse("bound@4"), seed=0)
    (row,) = results.select(method="emoe", metric="nll_token", convention="bound@4")
    assert row.value == pytest.approx(nll.value / LENGTH, rel=1e-9)
    counts = torch.bincount(run.domain.rows.long().flatten(), minlength=15).double() + 0.5
    pooled = -(counts / counts.sum()).log()[rows].sum(1).mean().item()
    assert text.best_factorised(run.domain, rows) <= pooled + 1e-9


def test_pools_are_the_samples_of_the_run_and_small(results: Results, finished: Path, sets: Path) -> None:
    for method, keys in POOLS.items():
        archive = Archive.open(finished / "runs/pools" / f"{run_of(finished, method).name}.npz")
        assert set(archive.arrays) == keys
        assert all(array.dtype == np.uint16 and array.shape == (40, LENGTH) for array in archive.arrays.values())
        assert (archive.manifest["method"], archive.manifest["data"]) == (method, "text")
        for key in archive.keys():
            changed = VARIANTS[key.variant].settings if key.variant else {}
            run = opened(finished, method, sets, **changed)
            pool = draw_pool(run.method, 40, key.nfe, 0, batch=30, sampler=REVEAL_FIRST)
            assert torch.equal(archive.tokens(key), pool.samples)
            assert archive.manifest["pools"][str(key)] == {"calls": pool.calls, "step": 12, "sampler": "reveal-first"}
            (calls,) = results.select(method=method, metric="network_calls", nfe=key.nfe, convention=key.variant)
            assert calls.value == pool.calls <= key.nfe
            entropy = next(item for item in measure_rows(pool.samples) if item.metric == "entropy")
            (row,) = results.select(method=method, metric="entropy", nfe=key.nfe, convention=key.variant)
            assert (row.value, row.n) == (pytest.approx(entropy.value), 40)
    real = {row.metric: row for row in results.select(method="data", convention=None)}
    assert real["entropy"].n == len(TextConfig(path=str(sets / "set")).build(0).test_rows) and "repetition" in real


def test_scores_are_those_of_the_judge(results: Results, finished: Path, sets: Path) -> None:
    (best,) = (finished / "runs").glob("text-tiny-judge-*-best")
    domain = TextConfig(path=str(sets / "set")).build(0)
    judge = RunJudge(load_run(best, device="cpu", domain=domain))
    for method in POOLS:
        archive = Archive.open(finished / "runs/pools" / f"{run_of(finished, method).name}.npz")
        for key in archive.keys():
            for setting in ("paper", "duo"):
                wanted = score(judge, domain, archive.tokens(key), setting).perplexity()
                name = setting if key.variant is None else f"{setting} {key.variant}"
                (row,) = results.select(method=method, metric="gen_ppl", nfe=key.nfe, convention=name)
                assert (row.value, row.stderr, row.n) == (wanted.value, wanted.stderr, wanted.n)
    rows = domain.fresh(20, derive_seed(0, "held out"))
    exact = estimate_nll(judge.run.method, rows, Convention.parse("exact"))
    (own,) = results.select(method="judge", metric="ppl", convention="exact")
    assert own.value == pytest.approx(math.exp(exact.value / LENGTH)) and own.n == 20
    assert results.select(method="data", metric="gen_ppl", convention="paper")[0].nfe is None
    told = json.loads((finished / "results/text-tiny-judge.json").read_text())
    assert told["judge"]["sha256"] == judge.sha256 and told["judge"]["trained_on"] == "text-judge"
    assert told["pca"]["fitted_on"] == "test rows of text" and told["pca"]["dimensions"] <= 100


def test_the_page_of_tables_and_samples_and_the_figures(results: Results, finished: Path, sets: Path) -> None:
    page = (finished / "results/text-tiny.md").read_text()
    assert page == text_page(results)
    has_mauve = importlib.util.find_spec("mauve") is not None
    for title, *_ in TABLES.values():
        assert (f"## {title}\n" in page) == (has_mauve or title != "MAUVE")
    assert "*Italics*" not in page and "643.8" not in page  # the recipes were changed: nothing to set beside the paper
    samples = (finished / "results/text-tiny-samples.md").read_text()
    archive = Archive.open(finished / "runs/pools" / f"{run_of(finished, 'emoe').name}.npz")
    domain = TextConfig(path=str(sets / "set")).build(0)
    for key in archive.keys():
        assert all(f"- {escape(one)}\n" in samples for one in domain.decode(archive.tokens(key)[:2]))
    assert samples.index("NFE 1\n") < samples.index("NFE 2\n") and "**E\\-MoE, greedy routes**" in samples
    assert samples.count("**E\\-MoE, averaged routes**") == 1  # from two calls on
    assert samples.count("train.steps=12") == 1 and "All with `train.batch=8 train.steps=12`." in samples
    assert "read them beside `text-tiny.md`" in samples
    drawn = {path.name for path in (finished / "results/figures").iterdir()}
    assert drawn == {"text-tiny-gen-ppl.png", "text-tiny-latent.png"}
    assert all(path.stat().st_size > 10_000 for path in (finished / "results/figures").iterdir())


def test_mauve_is_measured_from_what_was_stored(results: Results, finished: Path) -> None:
    pytest.importorskip("mauve")
    reference = Archive.open(finished / "runs/features/reference-text.npz").arrays["features"]
    for method, keys in POOLS.items():
        features = Archive.open(finished / "runs/features" / f"{run_of(finished, method).name}.npz")
        assert set(features.arrays) == keys and all(part.dtype == np.float16 for part in features.arrays.values())
        for key in features.keys():
            (row,) = results.select(method=method, metric="mauve", nfe=key.nfe, convention=key.variant)
            assert 0 < row.value <= 100 and row.n == min(40, len(reference))
    known = json.loads((finished / "runs/features/mauve.json").read_text())
    assert len(known) == 6 and all(len(found["values"]) == 3 for found in known.values())
    assert all(math.isfinite(row.value) for row in results.select(metric="mauve_spread"))


def test_without_its_package_mauve_is_left_out_and_the_extra_is_named(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(finished, tmp_path / "copy")
    (tmp_path / "copy/runs/features/mauve.json").unlink(missing_ok=True)
    monkeypatch.setitem(__import__("sys").modules, "mauve", None)
    before = Results.load(tmp_path / "copy/results/text-tiny.json").rows
    assert study(tmp_path / "copy", "--only draw", SIZES.replace("--quiet", "")) == 0
    assert "MAUVE is left out: mauve-text: the package is missing; pip install emoe[judge]" in capsys.readouterr().err
    assert Results.load(tmp_path / "copy/results/text-tiny.json").rows == before


def test_a_second_call_does_nothing(finished: Path, sets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = times(finished)
    assert study(finished, f"{BOTH} {with_sets(sets)}", SIZES.replace("--quiet", "")) == 0
    assert times(finished) == before
    said = capsys.readouterr()
    assert "2 models, 2 of them done before" in said.err and "nothing, all is up to date" in said.err
    assert "Generative perplexity, and entropy (H)" in said.out and "perplexity of the test rows" in said.out


# --- stages alone, elsewhere, continued


@pytest.fixture
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are drawn and looked at elsewhere; they take most of the time of a small study."""
    for name in ("curves", "latent_curves"):
        monkeypatch.setattr(text, name, lambda results, path: False)


@pytest.mark.usefixtures("no_figures")
def test_stages_on_different_machines_give_the_same_numbers(
    finished: Path, results: Results, sets: Path, tmp_path: Path
) -> None:
    """Models in two places, the judge in a third that has nothing but their pools and a text of its own."""
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    assert study(first, f"--methods mdlm --only train {with_sets(sets, 'set', 'else')}") == 0
    assert study(second, f"--methods emoe --only train {with_sets(sets, 'set', 'else')}") == 0
    assert not (first / "runs/features").exists() and not (first / "results/text-tiny.md").exists()
    for place in (first, second):
        shutil.copytree(place / "runs/pools", third / "runs/pools", dirs_exist_ok=True)
    assert study(third, f"--only judge {with_sets(sets, 'judge')}") == 0
    assert not (third / "results/text-tiny.json").exists()
    assert study(third, f"--only score {with_sets(sets, 'judge')}") == 0
    assert {row.metric for row in Results.load(third / "results/text-tiny.json").rows if row.nfe} == {"gen_ppl"}
    merged = f"--merge {first / 'results/text-tiny.json'} {second / 'results/text-tiny.json'}"
    assert study(third, f"--only draw {merged} {with_sets(sets, 'judge')}") == 0
    after = Results.load(third / "results/text-tiny.json").only(task="text")
    assert values(after) == values(results)
    samples = [(place / "results/text-tiny-samples.md").read_text() for place in (finished, third)]
    assert samples[0] == samples[1]


@pytest.mark.usefixtures("no_figures")
def test_of_two_pools_of_one_recipe_the_youngest_counts(finished: Path, sets: Path, tmp_path: Path) -> None:
    """A recipe that was changed leaves a pool behind, whose folder has another name and whose rows have the same."""
    place = tmp_path / "place"
    shutil.copytree(finished, place)
    page = place / "results/text-tiny-samples.md"
    before = page.read_text()
    pool = place / "runs/pools" / f"{run_of(place, 'mdlm').name}.npz"
    other = dataclasses.replace(Archive.open(pool), path=pool.with_name("text-tiny-mdlm-seed0-00000000.npz"))
    other.arrays.update({name: rows[::-1].copy() for name, rows in other.arrays.items()})
    other.save()
    for age, same in ((-60, True), (60, False)):
        moment = pool.stat().st_mtime + age
        os.utime(other.path, (moment, moment))
        page.unlink()
        assert study(place, f"--only draw {with_sets(sets)}") == 0
        assert (page.read_text() == before) is same and page.read_text().count("**MDLM**") == before.count("**MDLM**")


def test_samples_of_pools_that_are_elsewhere_stay_on_the_page() -> None:
    def page(head: str, **sections: dict[str, str]) -> str:
        lines = [f"# Samples\n\n{head}\n"]
        for number, entries in sections.items():
            lines.append(f"## news, NFE {number[1:]}\n")
            lines += [f"**{title}**\n\n- {shown}\n" for title, shown in entries.items()]
        return "\n".join(lines)

    earlier = page("All.", n1={"MDLM": "a", "E-MoE": "old \\*\\*b"}, n16={"MDLM": "c"})
    new = page("All.", n1={"E-MoE": "new", "VADD": "d"}, n2={"E-MoE": "e"})
    both = page("All.", n1={"MDLM": "a", "E-MoE": "new", "VADD": "d"}, n2={"E-MoE": "e"}, n16={"MDLM": "c"})
    assert with_earlier(new, earlier) == both
    assert with_earlier(both, both) == both and with_earlier(new, "") == new
    assert with_earlier(new, page("All with another field.", n1={"MDLM": "a"})) == new  # titles would not say it
    twice = new.replace("VADD", "E-MoE")  # two runs of one title
    assert with_earlier(twice, twice) == twice


@pytest.mark.usefixtures("no_figures")
def test_a_chain_that_is_killed_goes_on_where_it_was(
    results: Results, sets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped after one pool, then after one score, then finished: the numbers are those of a chain in one go."""
    drawn, scored = list[int](), list[str]()

    def draw(method: Any, n: int, steps: int, *more: Any, **options: Any) -> Any:
        if len(drawn) == 1:
            raise KeyboardInterrupt
        drawn.append(steps)
        return draw_pool(method, n, steps, *more, **options)

    def judge(*given: Any) -> Any:
        if len(scored) == 5:  # both settings of held-out rows and of the first pool
            raise KeyboardInterrupt
        scored.append(given[-1])
        return score(*given)

    words = f"--methods mdlm {with_sets(sets)}"
    with monkeypatch.context() as patch:
        patch.setattr(text, "draw_pool", draw)
        assert study(tmp_path, words) == 130
    (pools,) = (tmp_path / "runs/pools").iterdir()
    assert list(Archive.open(pools).arrays) == ["nfe1"] and not (tmp_path / "runs/features").exists()
    with monkeypatch.context() as patch:
        patch.setattr(text, "score", judge)
        assert study(tmp_path, words) == 130
    half = Results.load(tmp_path / "results/text-tiny.json")
    assert len(half.select(metric="gen_ppl", method="mdlm")) == 2
    assert study(tmp_path, words) == 0
    after = Results.load(tmp_path / "results/text-tiny.json")
    assert values(after) == values(results.only(method=("mdlm", "judge", "data")))


def test_a_stage_that_fails_does_not_stop_the_others(
    sets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        assert torch.get_float32_matmul_precision() == "highest"
        raise RuntimeError("no room")

    words = f"--methods ar --only train {with_sets(sets, 'set')}"
    with monkeypatch.context() as patch:
        patch.setattr(text, "network_passes", fail)
        assert study(tmp_path, words) == 1
    assert "text-tiny-ar seed 0, sizes [1/4] failed: no room" in capsys.readouterr().err
    results = Results.load(tmp_path / "results/text-tiny.json")
    assert results.select(metric="entropy", nfe=LENGTH, method="ar") and conventions_of(
        [Line((), results.rows)], "ppl"
    ) == ["exact"]
    assert study(tmp_path, words) == 0
    after = Results.load(tmp_path / "results/text-tiny.json")
    assert [row.value for row in after.select(metric="passes_train")] == [1]


def test_without_time_nothing_starts_and_the_same_command_continues(
    sets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert study(tmp_path, f"--methods mdlm --budget 0 {with_sets(sets)}") == 0
    said = capsys.readouterr().err
    assert "2 runs not finished, 0 measurements not made: the budget is used up" in said
    assert not list(tmp_path.glob("runs/*/checkpoints/step-*"))


def test_a_run_is_stopped_and_saved_at_the_deadline(sets: Path, tmp_path: Path) -> None:
    experiment = customise(get_recipe("text-tiny-mdlm"), {"train.steps": "1000000", "train.batch": "8"})
    place = Study(tmp_path / "runs", tmp_path / "text.json", "emoe", torch.device("cpu"), quiet=True)
    place.sampled, place.stops, place.deadline = False, True, time.monotonic() + 1.0
    with sets_at({"sets/text": sets / "set"}):
        place.run([experiment])
    name = run_name(experiment)
    assert place.skipped == [name] and not place.failed and not place.runs
    assert 0 < steps_done(tmp_path / "runs" / name) < 1_000_000 and place.seconds[name] < 30


def test_time_that_was_spent_in_parts_is_added_up(tmp_path: Path) -> None:
    assert text.training_times(tmp_path) == []
    lines = [{"from": 0, "to": 6, "seconds": 3.0}, {"from": 6, "to": 10, "seconds": 1.0}]
    (tmp_path / text.TIMES).write_text("".join(json.dumps(line) + "\n" for line in lines))
    seconds, step = text.training_times(tmp_path)
    assert (seconds.metric, seconds.value, seconds.n) == ("train_s", 4.0, 10)
    assert (step.metric, step.value) == ("step_ms", 400.0)


def test_more_samples_are_drawn_anew_and_fewer_replace_nothing(finished: Path, sets: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "copy")
    words = f"--methods mdlm --only train {with_sets(sets)}"
    before = Results.load(tmp_path / "copy/results/text-tiny.json")
    assert study(tmp_path / "copy", words, SIZES.replace("--samples 40", "--samples 10")) == 0
    assert Results.load(tmp_path / "copy/results/text-tiny.json").rows == before.rows
    assert study(tmp_path / "copy", words, SIZES.replace("--samples 40", "--samples 50")) == 0
    after = Results.load(tmp_path / "copy/results/text-tiny.json")
    assert {row.n for row in after.select(method="mdlm", metric="entropy")} == {50}
    assert study(tmp_path / "copy", f"--only score {with_sets(sets)}") == 0  # other samples: other scores
    again = Results.load(tmp_path / "copy/results/text-tiny.json").select(
        method="mdlm", metric="gen_ppl", convention="paper"
    )
    assert {row.n for row in again} == {50}


@pytest.mark.usefixtures("no_figures")
def test_another_judge_scores_anew(finished: Path, results: Results, sets: Path, tmp_path: Path) -> None:
    for name in ("runs/pools", "runs/features", "results"):
        shutil.copytree(finished / name, tmp_path / name)
    other = SIZES.replace("--judge-steps 15", "--judge-steps 5")
    for stage in ("judge", "score", "draw"):
        assert study(tmp_path, f"--only {stage} {with_sets(sets, 'judge')}", other) == 0
    after = Results.load(tmp_path / "results/text-tiny.json").only(task="text")
    old, new = (values(one.only(metric=("gen_ppl", "mauve"))) for one in (results, after))
    assert old.keys() == new.keys()
    assert all(old[key] != new[key] for key in old if "gen_ppl" in key)
    judges = {row.recipe: row.value for row in after.select(method="judge", metric="ppl")}
    last = judges["text-tiny-judge train.batch=8 train.steps=5"]
    assert len(judges) == 2 and f"of the test rows is {last:.2f};" in eval_lm_notes(after)[0]


# --- the judge


def judge_of(folder: Path, steps: int = 15) -> JudgeRun:
    settings = {"train.batch": "8", "train.log-every": "2", "eval.batch": "30", "method.experts": "3"}
    experiment = text.judge_experiment("text-tiny", settings, steps)
    return JudgeRun(experiment, folder, torch.device("cpu"), quiet=True)


def test_the_judge_is_the_ar_recipe_on_text_of_its_own() -> None:
    experiment = judge_of(Path()).experiment
    assert experiment.name == "text-tiny-judge train.batch=8 train.steps=15"
    assert experiment.domain == TextConfig(path="sets/text-judge", held_out="valid")
    assert (experiment.method, experiment.backbone) == (
        get_recipe("text-tiny-ar").method,
        get_recipe("text-tiny-ar").backbone,
    )
    assert experiment.train.save_every == 3


def test_the_judge_stops_early_and_keeps_its_best_step(
    sets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = iter([4.0, 5.0, 4.5, 4.2, 1.0])
    monkeypatch.setattr(
        text_judge, "estimate_nll", lambda *_: Measurement("nll", LENGTH * next(losses), None, None)
    )  # fmt: skip
    judge = judge_of(tmp_path, 30)
    with sets_at({"sets/text-judge": sets / "judge"}):
        assert judge.train(judge.experiment.domain.build(0))
    assert [(look.step, look.nll) for look in judge.looks] == [(6, 4.0), (12, 5.0), (18, 4.5), (24, 4.2)]
    assert judge.finished and steps_done(judge.run) < 30
    assert steps_done(judge.best_run) == 6 and len(list(judge.best_run.glob("checkpoints/*"))) == 1
    again = judge_of(tmp_path, 30)
    assert again.finished and again.best == judge.best
    with sets_at({"sets/text-judge": sets / "judge"}):
        run = load_run(judge.best_run, device="cpu")
    assert run.step == 6


def test_the_judge_is_looked_at_in_single_precision(
    finished: Path, sets: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A run that trains in bf16 lets products be shorter, and a look comes in the middle of it."""
    shutil.copytree(finished / "runs", tmp_path / "runs")
    judge, seen = judge_of(tmp_path / "runs"), list[str]()
    looks, judge.looks = judge.looks, []

    def nll(*given: Any) -> Measurement:
        seen.append(torch.get_float32_matmul_precision())
        return estimate_nll(*given)

    monkeypatch.setattr(text_judge, "estimate_nll", nll)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        judge.look(TextConfig(path=str(sets / "judge"), held_out="valid").build(0))
        assert seen == ["highest"] and torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
    assert judge.looks == looks[-1:]


def test_a_judge_that_is_interrupted_finds_the_same_best_step(
    finished: Path, sets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped by a deadline, killed between a look and the keeping of its step, then continued."""
    (whole,) = [path for path in (finished / "runs").glob("text-tiny-judge-*") if not path.name.endswith("-best")]
    reads, kept = list[int](), list[Path]()

    class Soon(base.Until):
        @property
        def requested(self) -> int | None:
            reads.append(1)
            return int(signal.SIGTERM) if len(reads) > 8 else None

    def keep(judge: JudgeRun, newest: Path) -> None:
        if len(kept) == 1:
            raise KeyboardInterrupt
        kept.append(newest)
        real(judge, newest)

    real = JudgeRun._keep
    with sets_at({"sets/text-judge": sets / "judge"}):
        domain = judge_of(tmp_path).experiment.domain.build(0)
        with monkeypatch.context() as patch:
            patch.setattr(text_judge, "Until", Soon)
            assert not judge_of(tmp_path).train(domain)
        half = judge_of(tmp_path)
        assert 0 < len(half.looks) < 5 and not half.finished
        assert steps_done(half.run) % 3  # in the middle between two looks
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(JudgeRun, "_keep", keep)
            judge_of(tmp_path).train(domain)
        broken = judge_of(tmp_path)
        assert broken.best is not None and steps_done(broken.best_run) < broken.best.step
        assert judge_of(tmp_path).train(domain)
    looks = half.run / text_judge.LOOKS
    assert half.run.name == whole.name
    assert looks.read_text() == (whole / text_judge.LOOKS).read_text()
    ends = [path.name for path in half.best_run.glob("checkpoints/*")]
    assert ends == [path.name for path in (finished / "runs" / half.best_run.name).glob("checkpoints/*")]


def test_a_best_step_that_is_lost_is_not_made_up(finished: Path, sets: Path, tmp_path: Path) -> None:
    shutil.copytree(finished / "runs", tmp_path / "runs")
    (best,) = (tmp_path / "runs").glob("text-tiny-judge-*-best")
    shutil.rmtree(best)
    judge = judge_of(tmp_path / "runs")
    looks = judge.run / text_judge.LOOKS
    first = json.loads(looks.read_text().splitlines()[0])
    looks.write_text(json.dumps(first | {"nll": 0.0}) + "\n" + "".join(looks.read_text().splitlines(keepends=True)[1:]))
    lost = judge_of(tmp_path / "runs")  # the first step is the best now, and its checkpoint is gone
    assert not lost.finished
    with pytest.raises(DataError, match="is not whole; remove it and"):
        lost.train(TextConfig(path=str(sets / "judge"), held_out="valid").build(0))


# --- what is refused


def refused(capsys: pytest.CaptureFixture[str], code: int, words: str, *told: str) -> None:
    assert main(["reproduce", "text", *words.split()]) == code
    said = capsys.readouterr().err
    assert all(part in said for part in told), said


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--methods mdlm,gan", "methods: 'gan' is not known; allowed: "),
        ("--only paint", "only: 'paint' is not known; allowed: train, judge, score, draw"),
        ("--size huge", "size: 'huge' is not known; allowed: news-small, text-tiny, lm1b"),
        ("--eval.nfe 5", "eval.nfe: the study sets it; use --nfe"),
        ("--eval.samples 5", "eval.samples: the study sets it; use --samples"),
        ("--domain.path x", "domain.path: the study sets it; use --set"),
        ("--samples 1", "samples: must be >= 4"),
        ("--sampler best", "sampler: 'best' is not known; allowed: reveal-first, plain, cached"),
        ("--eval.sampler.kind plain", "eval.sampler.kind: the study sets it; use --sampler"),
        ("--judge-steps 0", "judge-steps: must be >= 1"),
        ("--merge none.json", "merge: none.json does not exist"),
        ("--train.stps 5", "train.stps"),
    ],
)
def test_bad_words_are_refused(
    words: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    refused(capsys, 2, words, told)
    assert not list(tmp_path.iterdir())


def test_missing_data_are_named_with_a_remedy_before_anything_is_trained(
    sets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    size, own = "--size text-tiny --device cpu --quiet", f"--set {sets / 'set'}"
    refused(
        capsys,
        3,
        f"{size} {own}",
        "judge-set: sets/text-judge: does not exist; give --judge-set FOLDER",
        "--only train",
    )
    refused(capsys, 3, f"{size} --only train", "set: sets/text: does not exist; give --set FOLDER")
    refused(capsys, 3, f"{size} --only judge --judge-set {sets / 'else'}", "has no validation rows", "--split")
    refused(capsys, 3, f"{size} {own} --judge-set {sets / 'strange'}", "another tokenizer or length than --set")
    refused(capsys, 3, f"{size} {own} --judge-set {sets / 'known'}", "trains on", "train.txt, which is in --set too")
    elsewhere = f"--zero-shot {sets / 'strange'}"
    refused(capsys, 3, f"{size} {own} --only train {elsewhere}", "zero-shot: ", "prepare it with the same")
    refused(capsys, 3, f"{size} --only score", "runs/text-tiny/pools: holds no pools; draw them with --only train")
    refused(capsys, 3, "--only score --device cpu --quiet", "runs/text/pools: holds no pools")
    assert not list(tmp_path.rglob("step-*"))


def test_pools_without_a_judge_or_without_their_text_or_damaged(
    finished: Path, sets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(finished / "runs/pools", tmp_path / "runs/pools")
    places = f"--runs {tmp_path / 'runs'} --results {tmp_path / 'results'} {SIZES}"
    refused(
        capsys, 2, f"--only score {places}", "judge: text-tiny-judge-seed0-", "is not trained in", "--only judge first"
    )
    (best,) = (finished / "runs").glob("text-tiny-judge-*-best")
    shutil.copytree(best, tmp_path / "runs" / best.name)
    refused(capsys, 3, f"--only score {places}", "which no set here holds; give --set FOLDER, or a --judge-set")
    pool = next((tmp_path / "runs/pools").iterdir())
    pool.write_bytes(pool.read_bytes()[:200])
    refused(capsys, 3, f"--only score {places}", f"{pool}: cannot be read, damaged", "remove it, or copy it again")


# --- parts


def test_where_data_lie_is_no_part_of_a_run(sets: Path) -> None:
    config = TextConfig(path="sets/text")
    with sets_at({"sets/text": sets / "set"}):
        assert config.folder == sets / "set" and config.build(0).name == "text"
        assert config.write(torch.tensor([[5, 7, 14]])) == ["the cat."]
        with sets_at({"sets/text": sets / "judge"}):
            assert config.folder == sets / "judge"
        assert config.folder == sets / "set"
    assert config.folder == Path("sets/text")
    assert TextConfig(path=str(sets / "set")).build(0).name == "set"
    words = "--set a --merge b c --samples 5 --judge-set=x --zero-shot y --quiet --train.steps 3".split()
    assert text._without_places(words) == "--samples 5 --quiet --train.steps 3".split()


def test_the_numbers_of_calls_that_a_method_can_make() -> None:
    plan = text.Plan(nfe=(1, 2, 4, 8), samples=5, rows=5, weighted_rows=5)
    found = {name: plan.steps(get_recipe(f"text-tiny-{name}"), 16) for name in ("mdlm", "ar", "bd3lm")}
    assert found == {"mdlm": (1, 2, 4, 8), "ar": (16,), "bd3lm": (4, 8)}
    own = text.Plan(nfe=None, samples=5, rows=5, weighted_rows=5)
    assert own.steps(get_recipe("news-small-emoe"), 128) == (1, 2, 4, 8, 16, 32, 64, 128)
    for name in text.recipes_of("news-small"):
        stages = own.stages(get_recipe(f"news-small-{name}"), 128, zero_shot=True)
        pools = [stage.pool for stage in stages if stage.pool is not None]
        for variant, steps in ((GREEDY, [1, 2, 4, 8, 16]), (AVERAGED, [2, 4, 8, 16])):
            found = [pool.nfe for pool in pools if pool.variant == variant.name]
            assert found == (steps if name.startswith("emoe") else [])
        assert all(stage.convention[:2] in ("ex", "ne", "bo") for stage in stages if stage.kind == "zero-shot")


def test_other_routes_only_where_a_recipe_can_take_them() -> None:
    emoe = get_recipe("text-tiny-emoe")
    assert text.variants_of(emoe) == [GREEDY, AVERAGED]
    assert text.variants_of(get_recipe("text-tiny-mdlm")) == []
    compared = {"method.estimator": "leave-one-out", "method.gradient": "none", "method.draws": "2"}
    assert text.variants_of(customise(emoe, compared)) == [GREEDY]


def test_pools_can_be_drawn_by_another_sampler(finished: Path, sets: Path, tmp_path: Path) -> None:
    run = run_of(finished, "mdlm")
    shutil.copytree(run, tmp_path / "runs" / run.name)
    assert study(tmp_path, f"--methods mdlm --only train --sampler plain {with_sets(sets, 'set')}") == 0
    archive = Archive.open(tmp_path / "runs/pools" / f"{run.name}.npz")
    pool = draw_pool(opened(finished, "mdlm", sets).method, 40, 2, 0, batch=30)
    assert torch.equal(archive.tokens(PoolKey(2)), pool.samples)
    assert archive.manifest["pools"]["nfe2"] == {"calls": 2, "step": 12, "sampler": "plain"}
    assert not Results.load(tmp_path / "results/text-tiny.json").select(metric="network_calls")


def test_a_gpu_measures_with_the_expert_that_is_used_alone(sets: Path) -> None:
    """In single precision "auto" would run all experts everywhere there; what is chosen changes no number."""
    gpu, recipe = torch.device("cuda"), get_recipe("text-tiny-emoe")
    assert text.measuring(recipe, gpu) == {"backbone.dispatch": "loop"} and not text.measuring(
        recipe, torch.device("cpu")
    )
    assert not text.measuring(get_recipe("text-tiny-mdlm"), gpu)
    assert not text.measuring(customise(recipe, {"backbone.dispatch": "dense"}), gpu)  # chosen by hand
    domain = TextConfig(path=str(sets / "set")).build(0)
    rows, found = domain.fresh(20, 0), []
    for settings in ({"backbone.dispatch": "dense"}, text.measuring(recipe, gpu)):
        method = customise(recipe, settings).build_method(domain.space).eval()
        found.append(estimate_nll(method, rows, Convention.parse("bound@1"), repeats=2).value)
    assert found[0] == pytest.approx(found[1], rel=1e-5)


@pytest.mark.parametrize(
    ("method", "entered", "inside"),
    [
        ("ar", 1, 1),
        ("mdlm", 1, 1),
        ("sedd", 1, 1),
        ("bd3lm", 2, 2),
        ("vadd", 2, 2),
        ("emoe", 2, 2),
        ("emoe-plus", 2, 2),
        ("emoe of four draws", 2, 5),
    ],
)
def test_passes_are_counted(method: str, entered: float, inside: float, sets: Path) -> None:
    """[x0; xt] counts twice, an encoder too; four draws of E-MoE part in the first of two blocks: (2 + 8) / 2."""
    domain = TextConfig(path=str(sets / "set")).build(0)
    name, _, four = method.partition(" of ")
    draws = {"method.draws": "4", "method.estimator": "wake-sleep", "method.gradient": "none"}
    experiment = customise(get_recipe(f"text-tiny-{name}"), draws if four else {})
    built = experiment.build_method(domain.space).eval()
    found = network_passes(Run(Path(), experiment, domain, built, 0), domain)
    assert found == {"passes_train": entered, "calls_step": 1, "passes_block": inside}


def test_an_encoder_is_no_active_part_of_a_model(sets: Path) -> None:
    """VADD's is left behind when samples are drawn; of the experts of E-MoE each token uses one."""
    domain, active, total = TextConfig(path=str(sets / "set")).build(0), {}, {}
    for method in ("mdlm", "vadd", "emoe"):
        experiment = get_recipe(f"text-tiny-{method}")
        run = Run(Path(), experiment, domain, experiment.build_method(domain.space).eval(), 0)
        found = {item.metric: item.value for item in text.sizes(run, domain)}
        active[method], total[method] = found["params_active"], found["params"]
        encoder = getattr(run.method, "encoder", None)
        assert (active[method] < total[method]) == (method != "mdlm")
        if encoder is not None:
            assert total[method] - active[method] == total_parameters(encoder)
    assert active["mdlm"] < active["emoe"] < 1.1 * active["mdlm"]


def test_the_course_of_training_is_read_from_the_log(tmp_path: Path) -> None:
    lines = [
        {"step": step, "loss": 3.0, "recon": 2.0 + step, "kl": 1.0, "route_kl/block1": 0.25, "post_entropy/block1": 0.5,
         "prior_entropy/block1": 0.75, "route_kl_at/block1": [0.1, 0.4],
         "usage/block1": [1.0, 0.0] if step % 2 else [0.0, 1.0], "lr": 0.1}
        for step in range(1, 41)
    ]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = training_rows(tmp_path)
    assert sorted({step for step, _ in found}) == list(range(2, 41, 2))
    last = {item.metric: item.value for step, item in found if step == 40}
    assert last == {
        "train_loss": 3.0, "train_recon": 41.5, "train_kl": 1.0, "route_kl/block1": 0.25, "routing_entropy/block1": 0.5,
        "prior_entropy/block1": 0.75, "usage_entropy/block1": pytest.approx(math.log(2)),
    }  # fmt: skip


def test_features_are_reduced_by_the_components_of_held_out_rows() -> None:
    draw = torch.Generator().manual_seed(0)
    low = torch.randn(50, 3, generator=draw, dtype=torch.float64)
    features = low @ torch.randn(3, 20, generator=draw, dtype=torch.float64) + 5
    pca = PCA.fit(features)
    assert pca.share == pytest.approx(1) and pca.directions.shape == (20, 20)
    stored = torch.from_numpy(pca(features).astype(np.float64))
    assert stored[:, 3:].abs().max() < 1e-3
    assert torch.allclose(torch.cdist(stored, stored), torch.cdist(features, features), atol=0.05)
    few = PCA.fit(features[:3])
    assert few.directions.shape == (20, 2)
    assert len(PCA.fit(features, 2)(torch.zeros(200_000, 20, dtype=torch.float64))) * 2 * 2 <= 500_000


def test_keys_and_checksums_of_pools() -> None:
    for key in (PoolKey(4), PoolKey(128, GREEDY.name)):
        assert PoolKey.parse(str(key)) == key
    array = np.arange(6, dtype=np.uint16).reshape(2, 3)
    assert digest(array) == digest(array.copy()) != digest(array.reshape(3, 2))
    assert digest(array) != digest(array.astype(np.int32))


def test_markdown_shows_samples_as_they_are() -> None:
    assert escape("[CLS] a*b <i> & `c` #1 - x|y") == r"\[CLS\] a\*b &lt;i&gt; &amp; \`c\` \#1 \- x\|y"


# --- tables


INFO = RunInfo(
    command="c", commit="0" * 40, device="cpu", torch="2", python="3", date="2026-01-01T00:00:00+00:00", wall_s=1
)


def row(method: str, metric: str, value: float, **more: Any) -> Row:
    recipe = more.pop("recipe", f"news-small-{method}")
    place = {"task": "text", "data": "news", "seed": 0, "nfe": None, "n": 100, "stderr": None} | more
    return Row(method=method, recipe=recipe, metric=metric, value=value, **place)


def table_rows() -> list[Row]:
    rows = [row("data", "entropy", 4.28, recipe="reference", seed=None)]
    rows += [row("data", "gen_ppl", 90.0, recipe="reference", seed=None, convention="paper")]
    rows += [row("judge", "ppl", 80.0, recipe="news-small-judge", convention="exact")]
    rows += [row("judge", "judge_step", 4000, recipe="news-small-judge")]
    rows += [row("ar", "ppl", 85.0, convention="exact")]
    for method, value in (("mdlm", 900.0), ("emoe", 500.0)):
        rows += [
            row(method, "gen_ppl", value, nfe=1, convention="paper", stderr=3.0),
            row(method, "entropy", 4.4, nfe=1),
        ]
        rows += [row(method, "mauve", 3.25, nfe=1), row(method, "mauve_spread", 0.5, nfe=1)]
        rows += [row(method, "passes_train", 2 if method == "emoe" else 1), row(method, "params", 85.7e6)]
    rows += [row("emoe", "gen_ppl", 50.0, nfe=1, convention=f"paper {GREEDY.name}")]
    rows += [row("emoe", "entropy", 3.9, nfe=1, convention=GREEDY.name)]
    rows += [row("emoe", "gen_ppl", 400.0, nfe=1, convention=f"paper {AVERAGED.name}")]
    rows += [row("emoe", "entropy", 4.3, nfe=1, convention=AVERAGED.name)]
    rows += [row("emoe", "train_kl", kl, convention=f"step {step}") for step, kl in ((100, 0.4), (200, 0.5))]
    rows += [row("emoe", "usage_entropy/block1", 1.5, convention="step 200")]
    return rows


def one(name: str, rows: list[Row]) -> Table:
    """The only table of a kind."""
    (table,) = text_tables(name, Results().add(INFO, rows))
    return table


def cells(table: Table, column: int = 1) -> dict[str, str]:
    """Label -> a cell of each line."""
    return {line[0]: line[column].replace("\N{NO-BREAK SPACE}", " ") for line in table.rows}


def test_entropy_and_the_papers_numbers_stand_beside_generative_perplexity() -> None:
    table = one("gen-ppl", table_rows())
    assert table.header == ["news", "NFE 1"]
    assert cells(table) == {
        "MDLM": "900.0 ±3.0\nH 4.40\n*(1433.8, H 4.37)*",
        "E-MoE": "500.0 ±3.0\nH 4.40\n*(643.8, H 4.35)*",
        "held-out text": "90.0\nH 4.28\n*(H 4.32)*",
    }
    assert "*Italics*: the paper" in table.note and "**" not in markdown([table])  # no winner is marked
    assert "perplexity of the test rows is 80.00, below that of the AR row, 85.00; kept from step 4,000" in table.note
    low = [*table_rows(), row("ar", "ppl", 79, convention="exact")]
    assert ", not below that" in eval_lm_notes(Results().add(INFO, low))[0]


def test_notes_say_whether_errors_are_over_seeds() -> None:
    def note(seeds: tuple[int, ...]) -> str:
        rows = [row("mdlm", "gen_ppl", 900.0 + s, nfe=1, convention="paper", stderr=3.0, seed=s) for s in seeds]
        return one("gen-ppl", rows).note

    assert "Seed 0. " in note((0,)) and "over these" not in note((0,))
    assert "Seeds 0, 1: means, and where a row has several, errors are over these." in note((0, 1))


def test_the_paper_stands_beside_a_shorter_run_but_not_beside_another_network() -> None:
    for changed, shown in (
        ("train.steps=1200 optim.warmup=150", True),
        ("eval.sampler.nucleus=0.9", False),
        ("backbone.depth=3", False),
        ("train.steps=1200 method.top-k=1", False),
    ):
        recipe = f"news-small-mdlm {changed}"
        rows = [row("mdlm", "gen_ppl", 900.0, nfe=1, convention="paper", recipe=recipe)]
        table = one("gen-ppl", [*rows, row("mdlm", "entropy", 4.4, nfe=1, recipe=recipe)])
        assert ("*(1433.8, H 4.37)*" in cells(table)["MDLM"]) == shown == ("*Italics*" in table.note)
        assert f"All with `{changed}`" in table.note


def test_the_collapse_table_has_all_kinds_of_routes() -> None:
    table = one("collapse", table_rows())
    shown = cells(table)
    assert list(shown) == ["MDLM", *(f"E-MoE, {kind} routes" for kind in ("drawn", "greedy", "averaged"))]
    assert shown["E-MoE, averaged routes"] == "400.0\nH 4.30\nMAUVE —"  # the paper has none of it
    assert shown["E-MoE, greedy routes"] == "50.0\nH 3.90\nMAUVE —\n*(1079.5, H 4.34)*"
    assert shown["E-MoE, drawn routes"].endswith("H 4.40\nMAUVE 3.25 ±0.50\n*(626.1, H 4.35)*")
    assert "Averaged routes are drawn" in table.note
    few = [each for each in table_rows() if AVERAGED.name not in str(each.convention)]
    assert "Averaged routes are drawn" not in one("collapse", few).note


def test_the_other_tables() -> None:
    shown = cells(one("mauve", table_rows()))
    assert shown == {"MDLM": "3.25 ±0.50\n*(0.93)*", "E-MoE": "3.25 ±0.50\n*(4.67)*"}
    table = one("likelihood", table_rows())
    assert table.header == ["news", "paper", "exact", "coordination gain"]
    assert [line[:3] for line in table.rows] == [
        ["AR", "*22.83*", "85.00\n—"], ["the judge (other text)", "—", "80.00\n—"],
    ]  # fmt: skip
    design = one("design", table_rows())
    assert (cells(design)["E-MoE"], cells(design, 4)["E-MoE"]) == ("2\n*(2)*", "85.70M\n*(536.1M)*")
    assert one("latent", table_rows()).rows == [
        ["E-MoE", "1", "1.5000", "—", "—", "—"], ["E-MoE", "all", "—", "—", "—", "0.5000\n*(0.65)*"],
    ]  # fmt: skip
    assert text_tables("zero-shot", Results().add(INFO, table_rows())) == []


def test_two_sizes_on_one_text_stay_apart() -> None:
    names = ("news-small-mdlm", "lm1b-mdlm")
    table = one("gen-ppl", [row("mdlm", "gen_ppl", 1, nfe=1, convention="paper", recipe=name) for name in names])
    assert list(cells(table)) == ["MDLM (lm1b-mdlm)", "MDLM (news-small-mdlm)"]


@pytest.mark.parametrize("study", ["text", "text-tiny"])
def test_blocks_of_the_docs_read_the_files_of_their_study(study: str, tmp_path: Path) -> None:
    other = "text" if study == "text-tiny" else "text-tiny"
    record(tmp_path / f"{other}.json", INFO, table_rows())
    (tmp_path / f"{other}-samples.md").write_text("no page of this study")
    blocks = [BLOCKS[f"{study}-{name}"] for name in (*TABLES, "figures")]
    assert all("here yet: run `emoe reproduce text" in block(tmp_path) for block in blocks)
    record(tmp_path / f"{study}.json", INFO, table_rows())
    (tmp_path / f"{study}-samples.md").write_text("a page")
    filled = "\n".join(block(tmp_path) for block in blocks)
    assert "643.8" in filled and filled.count("No numbers here yet") == 1  # nothing from elsewhere was read
    assert f"[{study}-samples.md](../{tmp_path.name}/{study}-samples.md)" in filled


def test_what_a_latent_is_for_is_told_with_numbers() -> None:
    rows = table_rows() + [row("mdlm", "gen_ppl", 300.0, nfe=2, convention="paper"), row("mdlm", "entropy", 4.3, nfe=2)]
    rows += [row("emoe", "gen_ppl", 200.0, nfe=2, convention="paper"), row("emoe", "entropy", 4.2, nfe=2)]
    rows += [row("emoe", "coordination_gain", -0.25, convention="bound@1")]
    blocks = {1: (1.3, 0.3), 2: (1.3, 0.01), 3: (0.9, 0.3), 4: (1.1, 0.03)}
    for block, (usage, kl) in blocks.items():
        for step, times in ((100, 0.0), (300, 1.0)):  # the end of training counts
            rows += [row("emoe", f"usage_entropy/block{block}", times * usage, convention=f"step {step}")]
            rows += [row("emoe", f"route_kl/block{block}", times * kl, convention=f"step {step}")]
    table = one("checks", rows)
    assert table.header[3:] == ["below MDLM at NFE 1, equal H", "below MDLM at NFE 2, equal H"]
    assert table.rows == [
        ["E-MoE", "yes: 2 of 4", "no: \N{MINUS SIGN}0.250",
         "yes: 500.0 against 900.0\na factor of 1.80 *(2.23)*\nH +0.000",
         "not at equal H\n200.0 against 300.0\na factor of 1.50 *(2.60)*\nH \N{MINUS SIGN}0.100"]
    ]  # fmt: skip
    tiny = [dataclasses.replace(each, recipe=str(each.recipe).replace("news-small", "text-tiny")) for each in rows]
    nothing = "yes: 500.0 against 900.0\na factor of 1.80\nH +0.000"  # of the paper beside it
    assert cells(one("checks", tiny), 3)["E-MoE"] == nothing
    few = [each for each in rows if each.metric not in ("route_kl/block1", "usage_entropy/block1")]
    few += [row("emoe", "usage_entropy/block1", 1.3, convention="step 300")]
    few += [row("emoe", "route_kl/block1", 0.02, convention="step 300")]
    assert cells(one("checks", few))["E-MoE"] == "no: 1 of 4"
    for value, verdict in ((893.0, "level"), (907.0, "level"), (890.0, "yes"), (910.0, "no")):  # both errors are 3
        close = [each for each in rows if (each.method, each.metric, each.convention) != ("emoe", "gen_ppl", "paper")]
        close += [row("emoe", "gen_ppl", value, nfe=1, convention="paper", stderr=3.0)]
        assert cells(one("checks", close), 3)["E-MoE"].startswith(f"{verdict}: {value} against 900.0\n")


# --- emoe eval --judge


def test_eval_scores_fresh_samples_under_a_judge(
    finished: Path, sets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run_of(finished, "mdlm"), tmp_path / "run")
    (best,) = (finished / "runs").glob("text-tiny-judge-*-best")
    words = (
        f"eval {tmp_path / 'run'} --judge {best} --domain.path {sets / 'set'} --nfe 1,2 --samples 20 --likelihood none"
    )
    assert main([*words.split(), "--device", "cpu"]) == 0
    said = capsys.readouterr()
    assert "Generative perplexity" in said.out and "Entropy (nats)" in said.out
    assert f"judge {best.name}: perplexity" in said.err and "held-out rows of set" in said.err
    rows = Results.load(tmp_path / "run/eval.json")
    run = opened(finished, "mdlm", sets)
    assert isinstance(run.domain, Text)
    judge = RunJudge(load_run(best, device="cpu", domain=run.domain))
    for nfe in (1, 2):
        pool = draw_pool(run.method, 20, nfe, 0, batch=30)
        (found,) = rows.select(metric="gen_ppl", nfe=nfe, convention="paper")
        assert found.value == pytest.approx(score(judge, run.domain, pool.samples).perplexity().value, rel=1e-9)
    assert len(rows.select(metric="judge_ppl")) == 1 and rows.select(metric="entropy", nfe=2)


def test_eval_refuses_a_judge_that_cannot_judge(
    finished: Path, sets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(finished, "mdlm")
    words = ["eval", str(run), "--domain.path", str(sets / "set"), "--device", "cpu", "--judge"]
    for folder, told in (
        (tmp_path / "none", "does not exist; give the folder of a run of 'ar'"),
        (run, "holds 'mdlm'"),
    ):
        assert main([*words, str(folder)]) == 2
        assert f"judge: {folder} {told}" in capsys.readouterr().err
    np.save(tmp_path / "rows.npy", np.arange(60).reshape(20, 3) % 6)
    toy = f"train rows-mdlm --domain.path {tmp_path / 'rows.npy'} --run {tmp_path / 'rows'} --train.steps 1 --quiet"
    assert main([*toy.split(), "--device", "cpu"]) == 0
    assert main(["eval", str(tmp_path / "rows"), "--judge", str(run), "--device", "cpu"]) == 2
    assert "was not trained on text" in capsys.readouterr().err


def test_the_study_needs_no_signal_of_its_own() -> None:
    """`Until` asks for what another stop asks for, and for a stop of its own at a moment that has come."""
    stop = StopSignal()
    assert base.Until(stop, None).requested is None and base.Until(stop, time.monotonic() + 60).requested is None
    assert base.Until(stop, time.monotonic() - 1).requested == signal.SIGTERM
    stop.ask()
    assert base.Until(stop, None).requested == signal.SIGTERM
    with pytest.raises(ConfigError):
        text.main(["--only", "x"])
