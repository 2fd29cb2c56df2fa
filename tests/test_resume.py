"""Runs that are killed, stopped, damaged or evaluated meanwhile end with the same bits as others."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import TRAIN, Server, logged, outcome, until_step
from small import TOY, trained

from emoe.config import ConfigError
from emoe.engine.callbacks import Callback, StopSignal
from emoe.experiment import Experiment
from emoe.files import StorageError
from emoe.runs.run import Run
from emoe.runs.train import load_run, train

STEPS = 90
SMALL = TOY | {"train.ema": 0.9, "eval.nfe": [1, 2], "eval.samples": 50}


class Trainings(Server):
    """Trainings as processes of their own, which can be killed."""

    def begin(self, run: Path, *, method: str = "emoe", resume: bool = False, fault: str = "", **more: object) -> int:
        settings = SMALL | {"train.steps": STEPS, "train.save_every": 11} | more
        arguments = {"recipe": f"toy-8modes-{method}", "folder": str(run), "settings": settings, "resume": resume}
        return self.start(TRAIN, arguments, EMOE_FAULT=fault)

    def run(self, run: Path, **options: Any) -> int:
        return self.wait(self.begin(run, **options))


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainings]:
    with Trainings(tmp_path_factory.mktemp("server")) as trainings:
        yield trainings


@pytest.fixture(scope="module")
def whole(trainings: Trainings, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An uninterrupted run of each method."""
    runs = {method: tmp_path_factory.mktemp("whole") / method for method in ("mdlm", "vadd", "emoe")}
    assert [trainings.run(folder, method=method) for method, folder in runs.items()] == [0, 0, 0]
    return runs


def steps_saved(run: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*"))


def assert_same(run: Path, reference: Path) -> None:
    actual, expected = outcome(run), outcome(reference)
    names = {Path(name).name for name in actual}
    assert {"manifest.json", "model.safetensors", "ema.safetensors", "optim.safetensors"} <= names
    assert actual.keys() == expected.keys() and [name for name in expected if actual[name] != expected[name]] == []
    steps = [record["step"] for record in logged(run)]
    assert steps == list(range(1, len(steps) + 1)) and not list((run / "checkpoints").glob(".tmp*"))


@pytest.mark.parametrize("method", ["emoe", "vadd", "mdlm"])
def test_killed_at_random_steps(method: str, trainings: Trainings, whole: dict[str, Path], tmp_path: Path) -> None:
    draw, run, at, kills = random.Random(f"kill {method}"), tmp_path / "run", 0, 0
    while at < STEPS:
        at += draw.randint(1, STEPS // 3)
        pid = trainings.begin(run, resume=True, method=method)
        if at < STEPS:
            until_step(run, at)
            time.sleep(draw.random() * 0.01)
            os.kill(pid, signal.SIGKILL)
            code = trainings.wait(pid)
            assert code in (-signal.SIGKILL, 0)  # a slow test may find that it is through already
            kills += code != 0
        else:
            assert trainings.wait(pid) == 0, trainings.text(pid)
    assert kills >= 2
    assert_same(run, whole[method])


def test_killed_at_every_stage_of_a_save(trainings: Trainings, whole: dict[str, Path], tmp_path: Path) -> None:
    files = ["ema.safetensors", "model.safetensors", "optim.safetensors", "manifest.json"]
    for stage in ("after-rename", *files, "before-manifest", "after-rename", "before-rename"):
        assert trainings.run(tmp_path / "run", resume=True, fault=f"save:{stage}") == 137
    assert steps_saved(tmp_path / "run") == [11, 22]  # the two that were complete
    assert trainings.run(tmp_path / "run", resume=True) == 0
    assert_same(tmp_path / "run", whole["emoe"])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stopped_by_a_signal(
    number: signal.Signals, trainings: Trainings, whole: dict[str, Path], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    pid = trainings.begin(run)
    until_step(run, 15)
    os.kill(pid, number)
    assert trainings.wait(pid) == 128 + number and "Traceback" not in trainings.text(pid)
    stop = logged(run)[-1]["step"]
    assert 15 <= stop < STEPS and steps_saved(run)[-1] == stop
    assert outcome(run)["metrics.jsonl"] == b"".join(outcome(whole["emoe"])["metrics.jsonl"].splitlines(True)[:stop])
    assert trainings.run(run, resume=True) == 0
    assert_same(run, whole["emoe"])


def test_stopped_before_the_first_step(trainings: Trainings, whole: dict[str, Path], tmp_path: Path) -> None:
    run, stop = tmp_path / "run", StopSignal()
    stop.ask()
    result = trained("toy-8modes-emoe", run, SMALL | {"train.steps": STEPS}, stop=stop).result
    assert result is not None and (result.step, result.signal) == (0, signal.SIGTERM) and steps_saved(run) == [0]
    assert trainings.run(run, resume=True) == 0
    assert_same(run, whole["emoe"])


def test_one_trainer_for_each_folder(trainings: Trainings, tmp_path: Path) -> None:
    run, long = tmp_path / "run", {"train.steps": 100_000}
    first = trainings.begin(run, **long)
    until_step(run, 1)
    before = (run / "experiment.json").read_bytes()
    for options in ({"resume": True, "seed": 7}, {}):
        pid = trainings.begin(run, **options)  # type: ignore[arg-type]
        assert trainings.wait(pid) == 2 and f"in use by process {first}" in trainings.text(pid)
    assert (run / "experiment.json").read_bytes() == before
    os.kill(first, signal.SIGKILL)
    assert trainings.wait(first) == -signal.SIGKILL
    last = logged(run)[-1]["step"]
    third = trainings.begin(run, resume=True, **long)  # nothing of the dead process stands in the way
    until_step(run, last + 1)
    os.kill(third, signal.SIGTERM)
    assert trainings.wait(third) == 143


def fit(run: Path, *, resume: bool = True, **more: object) -> Run:
    settings = SMALL | {"train.steps": 12, "train.save_every": 1, "train.keep": 20} | more
    return trained("toy-8modes-emoe", run, settings, resume=resume)


@pytest.fixture(scope="module")
def twelve(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 12 steps with a checkpoint at each."""
    run = tmp_path_factory.mktemp("twelve") / "run"
    fit(run, resume=False)
    assert steps_saved(run) == list(range(1, 13))
    return run


def cut(whole_run: Path, run: Path, step: int) -> Path:
    """A copy of a run as it was after `step`, killed a little later: the log is ahead of the checkpoints."""
    shutil.copytree(whole_run, run)
    for path in (run / "checkpoints").glob("step-*"):
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)
    lines = (run / "metrics.jsonl").read_bytes().splitlines(True)
    if step < len(lines):
        (run / "metrics.jsonl").write_bytes(b"".join(lines[: step + 2])[:-9])  # the last line is torn
    return run


@pytest.mark.parametrize("step", [*range(0, 12, 2), 11, 12])
def test_resumed_after_a_step_and_evaluated_before(step: int, twelve: Path, tmp_path: Path) -> None:
    run = cut(twelve, tmp_path / "run", step)
    if step:
        opened = load_run(run, device="cpu")
        assert opened.step == step and opened.evaluate() == opened.evaluate()
        opened.sample(5, 2)
    result = fit(run).result
    assert result is not None and (result.step, result.signal) == (12, None)
    assert_same(run, twelve)


@pytest.mark.parametrize("name", ["model.safetensors", "optim.safetensors", "ema.safetensors", "manifest.json"])
def test_a_damaged_checkpoint_is_passed_over(name: str, twelve: Path, tmp_path: Path) -> None:
    run = cut(twelve, tmp_path / "run", 8)
    newest = max((run / "checkpoints").glob("step-*")) / name
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 4
    newest.write_bytes(data)
    assert load_run(run, device="cpu").step == (8 if name.startswith("optim") else 7)  # which is not read for weights
    fit(run)
    assert_same(run, twelve)


def test_nothing_but_damaged_checkpoints(twelve: Path, tmp_path: Path) -> None:
    run = cut(twelve, tmp_path / "run", 2)
    for path in (run / "checkpoints").glob("*/model.safetensors"):
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(StorageError, match="no checkpoint can be read"):
        fit(run)
    with pytest.raises(ConfigError, match="add --resume"):  # nor is it started anew unasked
        fit(run, resume=False)


def test_another_experiment_is_refused(twelve: Path) -> None:
    before = outcome(twelve)
    changes: dict[str, object] = {"seed": 1, "train.batch": 16, "train.steps": 13, "train.ema": 0.5, "method": "mdlm"}
    changes |= {"optim.lr": 0.1, "domain.points": 301, "backbone.depth": 1, "method.relax_tau": 0.5}
    for name, value in changes.items():
        with pytest.raises(ConfigError) as caught:
            fit(twelve, **{name: value})
        fields = [line.split(":")[0].strip() for line in caught.value.problems[1:-1]]
        assert any(field.startswith(name) for field in fields)
        assert "another experiment" in caught.value.problems[0] and outcome(twelve) == before


def test_neutral_fields_may_change(twelve: Path, tmp_path: Path) -> None:
    run = cut(twelve, tmp_path / "run", 5)
    changes: dict[str, object] = {"train.log_every": 4, "train.save_every": 5, "train.keep": 3}
    changes |= {"train.cuda_graph": False, "eval.nfe": [4], "eval.samples": 9}
    fit(run, **changes)
    actual, expected = outcome(run), outcome(twelve)
    del actual["metrics.jsonl"], expected["metrics.jsonl"]
    assert actual == expected and steps_saved(run)[-3:] == [5, 10, 12]
    assert [record["step"] for record in logged(run)] == [1, 2, 3, 4, 5, 8, 12]
    fit(run, **changes, **{"eval.sampler.nucleus": 0.5})
    assert Experiment.load(run / "experiment.json").eval.sampler.nucleus == 0.5
    with pytest.raises(ConfigError, match="cut into 1 parts .processes x train.accumulate., not 2"):
        fit(run, **{"train.accumulate": 2})


def test_data_that_have_moved_are_compared_by_their_rows(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).integers(5, size=(40, 3))
    np.save(tmp_path / "a.npy", rows)
    np.savez(tmp_path / "b.npz", first=rows, other=rows[::-1])
    network = {name: value for name, value in SMALL.items() if name != "domain.points"}

    def go(run: str, **settings: object) -> Run:
        own = network | {"train.steps": 6, "train.save_every": 3} | settings
        return trained("rows-mdlm", tmp_path / run, own, resume=True)

    whole = go("run", **{"domain.path": str(tmp_path / "a.npy")})
    assert whole.experiment.name.startswith("rows-mdlm backbone") and "domain" not in whole.experiment.name
    cut(tmp_path / "run", tmp_path / "moved", 3)
    moved = {"domain.path": str(tmp_path / "b.npz"), "domain.key": "first"}
    go("moved", **moved)
    assert_same(tmp_path / "moved", tmp_path / "run")
    with pytest.raises(ConfigError, match="the training rows are not those"):
        go("moved", **moved | {"domain.key": "other"})


class Evaluate(Callback):
    """Measures each checkpoint, and draws from torch's global generator."""

    def on_checkpoint(self, step: int, folder: Path) -> None:
        assert len(load_run(folder.parents[1], device="cpu").evaluate()) == 4
        torch.rand(3)


@pytest.mark.parametrize("method", ["mdlm", "vadd", "emoe"])
def test_an_evaluation_on_the_way_changes_nothing(method: str, whole: dict[str, Path], tmp_path: Path) -> None:
    settings = SMALL | {"train.steps": STEPS, "train.save_every": 11}
    train(f"toy-8modes-{method}", tmp_path, settings=settings, device="cpu", callbacks=[Evaluate()])
    assert_same(tmp_path, whole[method])
