"""`emoe sweep`: which trials there are, how they are ranked, what is trained again, what a failure or a budget does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from emoe.cli import main
from emoe.config import ConfigError
from emoe.console import Progress
from emoe.evaluation.exact_toy import exact_rows
from emoe.recipes import get_recipe
from emoe.reporting.results import Results
from emoe.runs import load_run
from emoe.studies.base import Shares, steps_done
from emoe.studies.sweep import (
    Mean,
    Place,
    Rank,
    Standing,
    better_half,
    layered,
    make_trials,
    parse_ranks,
    parse_trials,
    rank_all,
)

TINY = (
    "--train.steps 4 --train.batch 8 --domain.points 60 --backbone.width 8 --backbone.hidden 8 --backbone.heads 2 "
    "--backbone.time-size 8 --device cpu --jobs 1 --quiet"
).split()
FOLDER = Path("runs/sweep/s")

Sweep = Callable[..., dict[str, Any]]


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands run in an empty folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def sweep(capsys: pytest.CaptureFixture[str]) -> Sweep:
    """Runs a tiny sweep named s; gives ranking.json with the exit code and what was printed."""

    def run(*words: str, recipe: str = "demo-mdlm", settings: list[str] = TINY) -> dict[str, Any]:
        capsys.readouterr()
        code = main(["sweep", recipe, "--name", "s", *words, *settings])
        shown = capsys.readouterr()
        tree = json.loads((FOLDER / "ranking.json").read_text()) if (FOLDER / "ranking.json").exists() else {}
        return tree | {"code": code, "out": shown.out, "err": shown.err}

    return run


def trained_files() -> dict[str, int]:
    """Times of everything that training writes."""
    return {str(path): path.stat().st_mtime_ns for path in FOLDER.glob("runs/*/checkpoints/*/*")} | {
        str(path): path.stat().st_mtime_ns for path in FOLDER.glob("runs/*/metrics.jsonl")
    }


def test_grid_and_picked_trials() -> None:
    asked = [
        ("also", "optim.betas=0.9,0.95  optim.lr=1e-3"),
        ("vary", "optim.lr=1,2"),
        ("also", 'method.kl_weight={"kind": "linear", "start": 0, "end": 1} method.kind=emoe'),
        ("vary", "optim.betas=0.9,0.99|0.8,0.9"),
    ]
    assert parse_trials(asked) == [
        {},
        {"optim.betas": "0.9,0.95", "optim.lr": "1e-3"},
        {"optim.lr": "1", "optim.betas": "0.9,0.99"},
        {"optim.lr": "1", "optim.betas": "0.8,0.9"},
        {"optim.lr": "2", "optim.betas": "0.9,0.99"},
        {"optim.lr": "2", "optim.betas": "0.8,0.9"},
        {"method.kl-weight": '{"kind": "linear", "start": 0, "end": 1}', "method": "emoe"},
    ]
    assert parse_trials([]) == [{}]


def test_experiments_of_trials() -> None:
    recipe = get_recipe("demo-emoe")  # optim.lr is 1e-3
    places = [Place({"domain.density": name}, seed) for name in ("8-modes", "swiss-roll") for seed in (3, 4)]
    changes = [{}, {"optim.lr": "0.001"}, {"optim.lr": "0.01"}, {"optim.lr": "1e-2"}, {"method": "mdlm"}]
    trials = make_trials(recipe, {"method.experts": "4"}, changes, places)
    assert [trial.label for trial in trials] == ["base", "optim.lr=0.01", "method=mdlm"]  # equal ones once
    made = trials[1].experiments
    assert [(one.domain.density, one.seed) for one in made] == [  # type: ignore[attr-defined]
        ("8-modes", 3), ("8-modes", 4), ("swiss-roll", 3), ("swiss-roll", 4)
    ]  # fmt: skip
    assert {one.optim.lr for one in made} == {0.01} and {one.method.experts for one in made} == {4}  # type: ignore[attr-defined]
    assert trials[2].experiments[0].method.kind == "mdlm"
    names = [one.name for trial in trials for one in trial.experiments]
    assert names[4] == "demo-emoe method.experts=4 optim.lr=0.01" and len(set(names)) == 6  # one for trial and density


def test_a_switched_family_drops_earlier_fields_of_it() -> None:
    assert layered({"method.experts": "4", "optim.lr": "1"}, {"method": "mdlm"}) == {"optim.lr": "1", "method": "mdlm"}
    assert layered({"optim.lr": "1"}, {"optim.lr": "2"}) == {"optim.lr": "2"}


def test_ranks() -> None:
    ranks = parse_ranks("kl@1,validity@16, coordination_gain,entropy@2,balanced@4:high")
    assert [(str(rank), rank.better) for rank in ranks] == [
        ("kl@1", "low"), ("validity@16", "high"), ("coordination_gain", "high"), ("entropy@2", None),
        ("balanced@4", "high"),
    ]  # fmt: skip
    for text, told in (("kl", "write kl@1"), ("kl@0", "expected METRIC@NFE"), ("entropy@2", "entropy@2:high")):
        with pytest.raises(ConfigError, match=told):
            parse_ranks(text)


def standing(name: str, value: float | None, *, status: str = "done", rung: int = 0) -> Standing:
    mean = None if value is None else Mean(value, None, 1)
    settings = {} if name == "base" else {"x": name}
    return Standing(name, settings, rung, 1, status, {"kl@1": mean}, None, None, ())  # type: ignore[arg-type]


def test_order_of_a_ranking() -> None:
    everyone = [
        standing("dead", None, status="failed"), standing("b", 2), standing("half", 0, status="partial"),
        standing("a", 1), standing("base", 3), standing("long", 9, rung=1), standing("d", 4),
    ]  # fmt: skip
    ranking = rank_all(everyone, Rank("kl", 1, "low"))
    assert [one.trial for one in ranking] == ["long", "a", "b", "base", "d", "dead", "half"]
    assert [one.rank for one in ranking] == [1, 2, 3, 4, 5, None, None]
    assert better_half(ranking) == [{}, {"x": "long"}, {"x": "a"}, {"x": "b"}]
    ranking = rank_all(everyone, Rank("kl", 1, "high"))
    assert [one.trial for one in ranking] == ["long", "d", "base", "b", "a", "dead", "half"]


def test_a_sweep_from_end_to_end(sweep: Sweep) -> None:
    words = "--vary optim.lr=1e-3,1e-2 --on domain.density=8-modes,swiss-roll --seeds 1,2 --rank kl@1,overlap@2".split()
    done = sweep(*words)
    assert done["code"] == 0 and not done["err"]
    assert {trial["trial"] for trial in done["trials"]} == {"base", "optim.lr=1e-2"}
    means = [trial["metrics"]["kl@1"]["mean"] for trial in done["trials"]]
    assert means[0] < means[1]
    for number, trial in enumerate(done["trials"], 1):
        assert f"{number}. {trial['trial']}" in done["out"]
        assert f"| {number}. {trial['trial']} |" in (FOLDER / "ranking.md").read_text()
    assert (FOLDER / "ranking.png").stat().st_size > 1000

    trial = next(trial for trial in done["trials"] if trial["trial"] == "optim.lr=1e-2")
    base = next(trial for trial in done["trials"] if not trial["settings"])
    mine, theirs = ([one["metrics"]["kl@1"] for one in each["outcomes"]] for each in (trial, base))
    assert [(one["task"]["domain.density"], one["seed"]) for one in trial["outcomes"]] == [
        ("8-modes", 1), ("8-modes", 2), ("swiss-roll", 1), ("swiss-roll", 2)
    ]  # fmt: skip
    assert trial["metrics"]["kl@1"]["mean"] == pytest.approx(np.mean(mine))
    assert trial["metrics"]["kl@1"]["stderr"] == pytest.approx(np.std(mine, ddof=1) / 2)
    gaps = np.subtract(mine, theirs)
    assert trial["minus_base"] == pytest.approx({"mean": gaps.mean(), "stderr": gaps.std(ddof=1) / 2, "n": 4})
    assert base["minus_base"] is None

    run = load_run(FOLDER / "runs" / trial["outcomes"][2]["run"], device="cpu")
    assert run.domain.name == "swiss-roll" and run.experiment.optim.lr == 1e-2
    rows = exact_rows(run.method, run.domain, run.experiment, [1, 2])
    exact = {f"{row.metric}@{row.nfe}": row.value for row in rows}
    assert trial["outcomes"][2]["metrics"] == pytest.approx({name: exact[name] for name in ("kl@1", "overlap@2")})
    results = Results.load(FOLDER / "results.json")
    assert len(results.select(metric="kl", nfe=1, convention="exact")) == 8  # no trial hides another
    assert len(results.select(metric="step_ms")) == 8 and trial["step_ms"] > 0

    before = trained_files()
    again = sweep(*words, "--json")
    assert trained_files() == before and json.loads(again["out"])["trials"] == done["trials"]

    # What is finished is ranked even after the time is up; what is not is said.
    more = sweep(*words[:-3], "1,2,3", *words[-2:], "--budget", "0")
    assert more["code"] == 0 and "4 runs not run" in more["err"] and trained_files() == before
    assert {trial["status"] for trial in more["trials"]} == {"partial"}
    assert all(trial["rank"] is None and trial["metrics"]["kl@1"]["n"] == 4 for trial in more["trials"])


def test_an_interrupted_sweep_goes_on(sweep: Sweep) -> None:
    words = ("--also", "optim.lr=1e-2", "--also", "backbone.depth=1", "--rank", "overlap@1")
    first = sweep(*words)
    before = trained_files()
    lost = FOLDER / "runs" / first["trials"][0]["outcomes"][0]["run"]
    for path in sorted(lost.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    second = sweep(*words)
    changed = {name for name, when in trained_files().items() if before[name] != when}
    assert changed == {name for name in before if name.startswith(f"{lost}/")}
    assert [(one["trial"], one["metrics"]) for one in second["trials"]] == [
        (one["trial"], one["metrics"]) for one in first["trials"]
    ]
    values = [one["metrics"]["overlap@1"]["mean"] for one in first["trials"]]
    assert values == sorted(values, reverse=True) and len(set(values)) == 3


def test_failures_are_recorded_and_stop_nothing(sweep: Sweep) -> None:
    dead = "optim.lr=1e30 train.steps=25"
    done = sweep("--also", dead, "--also", "domain=rows domain.path=none.npy", "--also", "optim.lr=1e-2")
    assert done["code"] == 0
    found = {trial["trial"]: trial for trial in done["trials"]}
    assert [trial["rank"] for trial in done["trials"]] == [1, 2, None, None]
    assert found["base"]["status"] == found["optim.lr=1e-2"]["status"] == "done"
    assert "not finite" in found[dead]["outcomes"][0]["error"] and found[dead]["status"] == "failed"
    assert "none.npy" in found["domain=rows domain.path=none.npy"]["outcomes"][0]["error"]
    assert "failed: step 25" in done["out"] and "none.npy" in (FOLDER / "ranking.md").read_text()


def test_nothing_but_failures(sweep: Sweep) -> None:
    done = sweep("--optim.lr", "1e30", settings=[*TINY, "--train.steps", "25"])
    assert done["code"] == 1 and "every trial failed" in done["err"]
    assert not (FOLDER / "ranking.png").exists()


def test_no_time_at_all(sweep: Sweep) -> None:
    done = sweep("--vary", "optim.lr=1e-2,1e-4", "--budget", "0")
    assert done["code"] == 0 and "3 runs not run: the budget of 0 minutes is used up" in done["err"]
    assert [trial["status"] for trial in done["trials"]] == ["not run"] * 3
    assert not list(FOLDER.glob("runs/*"))


def test_halving(sweep: Sweep) -> None:
    done = sweep("--vary", "optim.lr=1e-4,3e-3,1e-2,3e-2", "--halving", "2,5")
    assert done["code"] == 0
    steps = [trial["steps"] for trial in done["trials"]]
    assert steps == [5, 5, 5, 2, 2] or steps == [5, 5, 5, 5, 2]  # the better three of five, and the base
    early = {row.recipe: row.value for row in Results.load(FOLDER / "results.json").select(metric="kl", nfe=1)}
    first = sorted((value, name) for name, value in early.items() if "train.steps=2" in str(name))
    for trial in done["trials"]:
        kept = any(trial["trial"] in str(name) for _, name in first[:3]) or trial["trial"] == "base"
        assert trial["steps"] == (5 if kept else 2)
    assert [steps_done(FOLDER / "runs" / one["outcomes"][0]["run"]) for one in done["trials"]] == steps


def test_data_of_ones_own(sweep: Sweep) -> None:
    np.save("rows.npy", np.random.default_rng(0).integers(4, size=(100, 3)))
    settings = [word for word in TINY if word not in ("--domain.points", "60")]
    words = "--domain.path rows.npy --eval.samples 30 --vary method.experts=2,4 --rank pair_overlap@2,coordination_gain"
    done = sweep(*words.split(), recipe="rows-emoe", settings=settings)
    assert done["code"] == 0 and len(done["trials"]) == 3
    for trial in done["trials"]:
        assert 0 <= trial["metrics"]["pair_overlap@2"]["mean"] <= 100
        assert trial["metrics"]["coordination_gain"]["n"] == 1
    refused = sweep("--domain.path", "rows.npy", "--rank", "kl@1", recipe="rows-emoe", settings=settings)
    assert refused["code"] == 2 and "rows has no 'kl'" in refused["err"] and "pair_overlap" in refused["err"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--vary", "optim.lrr=1,2"], "trial optim.lrr=1: optim.lrr: no such field; did you mean 'optim.lr'?"),
        (["--vary", "optim.lr=1e-3,-1"], "trial optim.lr=-1: optim.lr: must be > 0"),
        (["--also", "optim.lr"], "also: expected FIELD=VALUE"),
        (["--vary", "optim.lr="], "vary: expected FIELD=VALUE"),
        (["--vary", "optim.lr=1", "--vary", "optim.lr=2"], "optim.lr: given twice"),
        (["--vary", "train.keep=2,3"], "trial train.keep=3: changes nothing that is trained"),
        (["--vary", "seed=1,2"], "use --seeds"),
        (["--vary", "train.steps=1,2", "--halving", "1,2"], "train.steps: is set by --on or --halving"),
        (["--also", "domain=rows", "--on", "domain.density=8-modes"], "domain: is set by --on"),
        (["--on", "domain.density=9-modes"], "density"),
        (["--optim.lrr", "1"], "optim.lrr: no such field"),
        (["--halving", "4,2"], "halving: numbers of steps must rise"),
        (["--budget", "soon"], "budget: expected minutes"),
        (["--rank", "vallidity@1:high"], "8-modes has no 'vallidity'; did you mean 'validity'?"),  # codespell:ignore
        (["--rank", "sharpness@1"], "write sharpness@1:high or sharpness@1:low"),
        (["--seeds", "x"], "seeds: expected whole numbers"),
        (["--name", "../up"], "name: expected letters"),
    ],
)
def test_refused_before_anything_is_written(words: list[str], told: str, sweep: Sweep) -> None:
    done = sweep(*words)
    assert done["code"] == 2 and told in done["err"] and "Traceback" not in done["err"]
    assert list(Path.cwd().iterdir()) == []


def test_runs_that_are_called_alike_count_apart() -> None:
    whole = Progress(20, quiet=True)
    shares = Shares(whole)
    for steps in (4, 7):
        shares.of("demo-emoe seed 1").update(steps)
    assert sum(shares.steps.values()) == 11
