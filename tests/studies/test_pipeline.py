"""The pipeline of studies, on the toy: recorded rows, continuation after a kill, deadlines, failures, options."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from emoe import studies
from emoe.commands import reproduce
from emoe.config import ConfigError
from emoe.domains.base import DataError
from emoe.recipes import get_recipe
from emoe.reporting.results import Results
from emoe.runs.train import load_run
from emoe.studies import demo, held_out, images, likelihood, pipeline, scaling, stages, text, toy
from emoe.studies.pools import Archive, PoolKey, digest
from emoe.studies.stages import Stage, Trained, run_name, steps_done

SMALL = {"domain.points": "200", "eval.samples": "300", "eval.nfe": "1,2"}


def options(folder: Path, settings: dict[str, str], **fields: Any) -> toy.Options:
    fields = {"seeds": (0,), "densities": ("8-modes",), "methods": ("mdlm", "emoe"), "jobs": 1} | fields
    places = {"runs": folder / "runs", "results": folder / "results", "device": "cpu", "quiet": True}
    return toy.Options(**places, **fields, settings={**settings, **SMALL})


def study_of(given: toy.Options, trained: Any, measure: Any = lambda run: []) -> pipeline.Study:
    """A study that writes nothing."""

    class Small(pipeline.Study):
        experiments = staticmethod(lambda: trained)
        stages = staticmethod(measure)
        write = staticmethod(lambda results: None)

    return Small(given)


def values(folder: Path) -> dict[Any, float]:
    rows = Results.load(folder / "results/toy.json").rows
    return {row.identity: row.value for row in rows if row.metric not in ("train_s", "step_ms")}


def test_the_toy_study_gives_the_recorded_rows(tmp_path: Path, tiny, recorded, untouched, capsys) -> None:
    given = options(tmp_path, tiny, methods=("mdlm", "emoe", "emoe-plus"), exact=True, jobs=2)
    assert studies.run("toy", given) == 0
    results = Results.load(tmp_path / "results/toy.json")
    recorded("toy", results)
    assert [row.n for row in results.select(method="mdlm", metric=("train_s", "step_ms"))] == [30, 30]
    assert results.methods["emoe-vimco"].label == "E-MoE (VIMCO)" and results.label("mdlm") == "MDLM"
    (run,) = results.runs.values()
    assert run.command.startswith("emoe reproduce toy --seeds 0 --methods mdlm,emoe,emoe-plus --densities 8-modes")
    assert "--exact" in run.command and "--train.steps 30" in run.command and "runs" not in run.command
    assert "largest gap" in capsys.readouterr().out
    drawn = {path.name for path in (tmp_path / "results/figures").iterdir()}
    assert drawn == {"toy-8-modes.png", "toy-summary.png"} and "| MDLM |" in (tmp_path / "results/toy.md").read_text()
    (path,) = (tmp_path / "runs").glob("toy-8modes-mdlm-*")
    trained = load_run(path, device="cpu")
    pool = Archive.open(tmp_path / f"runs/pools/{path.name}.npz")
    assert (pool.tokens(PoolKey(2)) == trained.sample(300, 2)).all() and pool.manifest["method"] == "mdlm"
    untouched(tmp_path, lambda: studies.run("toy", given))


def test_a_killed_study_continues_with_the_same_command(tmp_path: Path, tiny, monkeypatch) -> None:
    """Killed before the fourth stage is recorded; finished by two jobs."""
    record, calls = pipeline.record, iter(range(3))

    def record_three(*given: Any) -> Results:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return record(*given)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(pipeline, "record", record_three)
        studies.run("toy", options(tmp_path / "killed", tiny))
    rows = Results.load(tmp_path / "killed/results/toy.json").rows
    assert len({(row.method, row.nfe) for row in rows}) == 3
    assert studies.run("toy", options(tmp_path / "killed", tiny, jobs=2)) == 0
    assert studies.run("toy", options(tmp_path / "whole", tiny)) == 0
    assert values(tmp_path / "killed") == values(tmp_path / "whole")


def test_without_time_nothing_starts_and_the_same_command_continues(tmp_path: Path, tiny, capsys) -> None:
    assert studies.run("toy", options(tmp_path, tiny, budget=0)) == 0
    said = capsys.readouterr()
    assert "emoe reproduce toy: 2 runs not trained, 0 measurements not made: the budget is used up" in said.err
    assert said.out == "nothing is measured yet\n" and not list(tmp_path.rglob("step-*"))
    assert studies.run("toy", options(tmp_path, tiny)) == 0
    more = options(tmp_path, tiny, budget=0, methods=("mdlm", "emoe", "vadd"))
    assert studies.run("toy", more) == 0  # what is measured is shown, what is not is counted
    said = capsys.readouterr()
    assert "1 runs not trained, 0 measurements" in said.err and "E-MoE" in said.out


@pytest.mark.parametrize("budget", [0.02, None])
def test_a_run_is_stopped_and_saved_at_the_deadline_or_by_a_signal(tmp_path: Path, tiny, budget, capsys) -> None:
    experiment = get_recipe("demo-mdlm")
    train = dataclasses.replace(experiment.train, steps=1_000_000, batch=8)
    given = options(tmp_path, tiny, budget=budget)
    study = study_of(given, [dataclasses.replace(experiment, train=train)])
    if budget is None:
        threading.Timer(1.0, study.stop.ask).start()
        assert study.run() == 143
        assert "stopped and saved; the same command continues" in capsys.readouterr().err
    else:
        assert study.run() == 0 and study.untrained == 1
    (run,) = study.runs
    assert 0 < steps_done(run.path) < 1_000_000 and not study.failed
    assert (run.path / "times.jsonl").read_text().count("\n") == 1


def test_failures_are_reported_and_stop_nothing(tmp_path: Path, tiny, capsys) -> None:
    """A run and a stage that fail; two runs of one label stay apart."""

    def broken() -> list:
        raise RuntimeError("no room")

    good = get_recipe("demo-mdlm")
    good = dataclasses.replace(good, train=dataclasses.replace(good.train, steps=25, batch=8))
    optim = dataclasses.replace(good.optim, lr=1e30)
    other = [dataclasses.replace(good, seed=7), dataclasses.replace(good, optim=optim)]
    experiments = dict.fromkeys([good, *other], "same")

    def measure(run: Trained) -> list[Stage]:
        return [Stage("bad", broken, [run.fields(metric="bad")]), stages.pool(run, 1, 20), *stages.times(run)]

    assert study_of(options(tmp_path, {}), experiments, measure).run() == 1
    said = capsys.readouterr().err
    assert "emoe reproduce toy: same failed: step 2" in said and "same, bad [1/3] failed: no room" in said
    rows = Results.load(tmp_path / "results/toy.json").select(metric="validity", nfe=1)
    assert sorted(row.seed for row in rows) == [1, 7] and len({run_name(one) for one in experiments}) == 3


def test_the_demo_writes_its_report(tmp_path: Path, monkeypatch, capsys) -> None:
    settings = {"train.steps": "5", "train.batch": "8", "domain.points": "100", "eval.samples": "50", "eval.nfe": "1"}
    monkeypatch.setattr(demo, "RELEASED_NFE", (1,))
    given = demo.Options(out=tmp_path / "demo", device="cpu", jobs=2, quiet=True, settings=settings)
    assert studies.run("demo", given) == 0
    assert {"report.html", "figure.png", "results.json"} <= {path.name for path in (tmp_path / "demo").iterdir()}
    said = capsys.readouterr().out
    assert f"report:  {tmp_path / 'demo/report.html'}" in said and "ideal factorised" in said
    assert "data:image/png" in (tmp_path / "demo/report.html").read_text()


# --- Options and files


def test_options_as_a_command_for_the_record() -> None:
    settings = {"eval.nfe": "1,2", "optim.lr": "1e-3"}
    given = toy.Options(seeds=(3,), exact=True, runs=Path("x"), jobs=3, settings=settings)
    assert given.command_line() == "emoe reproduce toy --seeds 3 --exact --eval.nfe 1,2 --optim.lr 1e-3"
    assert toy.Options().command_line() == "emoe reproduce toy" and demo.Options().command_line() == "emoe demo"
    assert toy.Options().run_folder == Path("runs/toy") and likelihood.Options().run_folder == Path("runs/demo")
    assert text.Options(size="text-tiny").run_folder == Path("runs/text-tiny")
    for name in [*studies.STUDIES, "demo", "sweep"]:
        fields = dataclasses.fields(studies.module(name).Options)
        assert all(field.metadata["doc"] or field.metadata.get("hidden") for field in fields)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: toy.Options(seeds=(-1,)), "seeds: must be >= 0 .*, got -1"),
        (lambda: toy.Options(seeds=()), "seeds: give at least one"),
        (lambda: toy.Options(densities=("moons",)), "densities: 'moons' is not known; allowed: 8-modes, swiss-roll"),
        (lambda: toy.Options(jobs=99), "jobs: must be >= 0 and <= 64, got 99"),
        (lambda: studies.run("toy", toy.Options(methods=("gan",))), "methods: 'gan' is not known; allowed: emoe, em"),
        (lambda: reproduce.main(["digits", "--methods", "gan"]), "is not known; allowed: emoe, emoe-vimco, mdlm, vadd"),
        (lambda: studies.run("toy", toy.Options(settings={"train.stps": "1"})), "did you mean 'train.steps'"),
        (lambda: images.Options(settings={"eval.nfe": "1"}), "eval.nfe: the study sets it; use --nfe"),
        (lambda: images.Options(settings={"domain.root": "x"}), "domain.root: the study sets it; use --data-root"),
        (lambda: images.Options(only="paint"), "only: 'paint' is not known; allowed: train, score, draw"),
        (lambda: scaling.Options(settings={"backbone.depth": "4"}), "backbone.depth: the study sets it; use --depth"),
        (lambda: held_out.Options(settings={"domain.density": "x"}), "the study sets it; use --densities"),
        (lambda: text.Options(settings={"domain.path": "x"}), "domain.path: the study sets it; use --set"),
        (lambda: text.Options(settings={"eval.sampler.kind": "x"}), "eval.sampler.kind: .* use --sampler"),
        (lambda: studies.run("text", text.Options(merge=(Path("none.json"),))), "merge: none.json does not exist"),
    ],
)
def test_options_that_are_refused(make, message: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        make()
    assert not list(tmp_path.iterdir())


def test_archives_of_pools(tmp_path: Path) -> None:
    for key in (PoolKey(4), PoolKey(128, "route_tau=0")):
        assert PoolKey.parse(str(key)) == key
    archive = Archive.open(tmp_path / "a.npz")
    archive.manifest["x"] = 1
    archive.arrays |= {name: np.arange(6, dtype="<u2").reshape(3, 2) for name in ("nfe16", "nfe2 route_tau=0", "nfe2")}
    archive.save()
    again = Archive.open(tmp_path / "a.npz")
    assert again.manifest == {"x": 1} and again.keys() == [PoolKey(2), PoolKey(16), PoolKey(2, "route_tau=0")]
    assert again.rows(PoolKey(3)) == 0 and again.tokens(PoolKey(2)).tolist() == [[0, 1], [2, 3], [4, 5]]
    (tmp_path / "a.npz").write_bytes((tmp_path / "a.npz").read_bytes()[:100])
    with pytest.raises(DataError, match="cannot be read, damaged .*; remove it, or copy it again"):
        Archive.open(tmp_path / "a.npz")
    array = np.arange(6, dtype=np.uint16).reshape(2, 3)
    assert digest(array) == digest(array.copy()) != digest(array.reshape(3, 2)) != digest(array.astype(np.int32))
