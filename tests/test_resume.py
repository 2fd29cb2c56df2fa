"""Runs that are killed, stopped, damaged or looked at on the way end as if nothing had happened, bit for bit."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import emoe
from emoe.config import ConfigError
from emoe.engine.lock import RunBusy, RunLock
from emoe.engine.stepper import Stepper
from emoe.evaluation.evaluate import evaluate
from emoe.experiment import Experiment
from emoe.recipes import get_recipe
from emoe.rng import Rng, derive_seed
from emoe.runs import Run, load_run, train

STEPS = 90
SMALL = {
    "domain.points": "300",
    "backbone.width": "8",
    "backbone.hidden": "16",
    "backbone.heads": "2",
    "backbone.time-size": "8",
    "train.batch": "8",
    "train.ema": "0.9",
    "train.log-every": "1",
    "eval.nfe": "1,2",
    "eval.samples": "50",
}
SMALL_WORDS = [word for name, value in SMALL.items() for word in (f"--{name}", value)]

# One process pays for the import of torch; each training is a fork of it, a process of its own that can be killed.
SERVER = """
import json, os, signal, sys
import torch, torch._dynamo
import emoe.commands, emoe.runs
from emoe.cli import main
torch.set_num_threads(1)
for line in sys.stdin:
    job = json.loads(line)
    if "wait" in job:
        status = os.waitpid(job["wait"], 0)[1]
        print(os.waitstatus_to_exitcode(status), flush=True)
        continue
    pid = os.fork()
    if pid == 0:
        signal.alarm(120)  # if the tests die, it does not go on for ever
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit that it is ignored
        log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(log, stream)
        os.environ.update(job["environment"])
        os._exit(main(job["words"]))
    print(pid, flush=True)
"""


class Server:
    """Starts trainings and waits for them."""

    def __init__(self, folder: Path):
        environment = os.environ | {"PYTHONPATH": str(Path(emoe.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
        environment |= {"PYTHONHASHSEED": "7", "TZ": "Asia/Kathmandu", "LC_ALL": "C"}  # none of which may matter
        self.log = folder / "log"
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER], env=environment, stdin=pipe, stdout=pipe, text=True
        )

    def ask(self, **job: Any) -> int:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def start(self, run: Path, *words: str, method: str = "emoe", steps: int = STEPS, **environment: str) -> int:
        """Begin a training; returns its process number."""
        self.log.write_text("")
        command = ["train", f"toy-8modes-{method}", "--run", str(run), *SMALL_WORDS, "--train.steps", str(steps)]
        command += ["--train.save-every", "11", "--quiet", "--device", "cpu", *words]
        return self.ask(words=command, log=str(self.log), environment=environment)

    def wait(self, pid: int) -> int:
        """Exit code, negative for the signal that killed it."""
        return self.ask(wait=pid)

    def run(self, run: Path, *words: str, **options: Any) -> int:
        return self.wait(self.start(run, *words, **options))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server"))
    with server.process:
        yield server
    assert server.process.returncode == 0


@pytest.fixture(scope="module")
def whole(server: Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An uninterrupted run of each method."""
    runs = {}
    for method in ("mdlm", "vadd", "emoe"):
        runs[method] = tmp_path_factory.mktemp("whole") / method
        assert server.run(runs[method], method=method) == 0, server.log.read_text()
    return runs


def logged(run: Path) -> list[int]:
    """Steps in the log; a torn last line is left out."""
    with contextlib.suppress(FileNotFoundError):
        return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_bytes().split(b"\n")[:-1]]
    return []


def until_step(run: Path, step: int) -> None:
    deadline = time.monotonic() + 60
    while max(logged(run), default=0) < step:
        assert time.monotonic() < deadline, f"{run} does not reach step {step}"
        time.sleep(0.001)


def outcome(run: Path) -> dict[str, bytes]:
    """All bytes of the newest checkpoint, and the log."""
    newest = max((run / "checkpoints").glob("step-*"))
    files = {f"{newest.name}/{path.name}": path.read_bytes() for path in newest.iterdir()}
    return {"metrics.jsonl": (run / "metrics.jsonl").read_bytes(), **files}


def steps_saved(run: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*"))


def assert_same(run: Path, reference: Path) -> None:
    found, expected = outcome(run), outcome(reference)
    assert found.keys() == expected.keys() and {"manifest.json", "model.safetensors", "optim.safetensors"} <= {
        Path(name).name for name in found
    }
    assert [name for name in expected if found[name] != expected[name]] == []
    assert logged(run) == list(range(1, max(logged(reference)) + 1))
    assert not list((run / "checkpoints").glob(".tmp*"))


@pytest.mark.parametrize("method", ["emoe", "vadd", "mdlm"])
def test_killed_at_random_steps(method: str, server: Server, whole: dict[str, Path], tmp_path: Path) -> None:
    draw, run, at, kills = random.Random(f"kill {method}"), tmp_path / "run", 0, 0
    while at < STEPS:
        at += draw.randint(1, STEPS // 3)
        pid = server.start(run, "--resume", method=method)
        if at < STEPS:
            until_step(run, at)
            time.sleep(draw.random() * 0.01)
            os.kill(pid, signal.SIGKILL)
            code = server.wait(pid)
            assert code in (-signal.SIGKILL, 0)  # a slow test may find that it is through already
            kills += code != 0
        else:
            assert server.wait(pid) == 0, server.log.read_text()
    assert kills >= 2
    assert_same(run, whole[method])


def test_killed_at_every_stage_of_a_save(server: Server, whole: dict[str, Path], tmp_path: Path) -> None:
    files = ["ema.safetensors", "model.safetensors", "optim.safetensors", "manifest.json"]
    for stage in ("after-rename", *files, "before-manifest", "after-rename", "before-rename"):
        assert server.run(tmp_path / "run", "--resume", EMOE_FAULT=f"save:{stage}") == 137
    assert steps_saved(tmp_path / "run") == [11, 22]  # the two that were complete
    assert server.run(tmp_path / "run", "--resume") == 0
    assert_same(tmp_path / "run", whole["emoe"])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stopped_by_a_signal(number: signal.Signals, server: Server, whole: dict[str, Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    pid = server.start(run)
    until_step(run, 15)
    os.kill(pid, number)
    assert server.wait(pid) == 128 + number
    text = server.log.read_text()
    assert "stopped by a signal and saved" in text and "--resume" in text and "Traceback" not in text
    stop = logged(run)[-1]
    assert 15 <= stop < STEPS and steps_saved(run)[-1] == stop
    assert outcome(run)["metrics.jsonl"] == b"".join(outcome(whole["emoe"])["metrics.jsonl"].splitlines(True)[:stop])
    assert server.run(run, "--resume") == 0
    assert_same(run, whole["emoe"])


def test_stopped_before_the_first_step(server: Server, whole: dict[str, Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(get_recipe("toy-8modes-emoe"), run, settings=settings(STEPS), device="cpu", quiet=True, stop=stopped())
    assert steps_saved(run) == [0]
    assert server.run(run, "--resume") == 0
    assert_same(run, whole["emoe"])


@pytest.mark.parametrize("command", [["eval", "--samples", "1000000"], ["sample", "--n", "1000000"]])
def test_stopped_while_measuring_or_sampling(command: list[str], server: Server, whole: dict[str, Path]) -> None:
    before = outcome(whole["emoe"])
    for number, code in {signal.SIGINT: 130, signal.SIGTERM: -signal.SIGTERM}.items():
        server.log.write_text("")
        words = [command[0], str(whole["emoe"]), *command[1:], "--nfe", "1000", "--device", "cpu"]
        pid = server.ask(words=words, log=str(server.log), environment={})
        time.sleep(0.5)
        os.kill(pid, number)
        assert server.wait(pid) == code
        assert server.log.read_text() == (f"emoe {command[0]}: stopped\n" if code == 130 else "")
    assert outcome(whole["emoe"]) == before


def test_one_trainer_for_each_folder(server: Server, tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = server.start(run, steps=100_000)
    until_step(run, 1)
    before = (run / "experiment.json").read_bytes()
    assert server.run(run, "--resume", "--seed", "7", steps=50) == 2
    assert f"in use by process {first}" in server.log.read_text()
    assert server.run(run, steps=50) == 2 and f"process {first}" in server.log.read_text()
    assert (run / "experiment.json").read_bytes() == before
    os.kill(first, signal.SIGKILL)
    assert server.wait(first) == -signal.SIGKILL
    last = logged(run)[-1]
    third = server.start(run, "--resume", steps=100_000)  # nothing of the dead process stands in the way
    until_step(run, last + 1)
    os.kill(third, signal.SIGTERM)
    assert server.wait(third) == 143


def settings(steps: int, **more: str) -> dict[str, str]:
    return SMALL | {"train.steps": str(steps), "train.save-every": "1"} | more


def stopped() -> Any:
    from emoe.engine.signals import StopSignal

    stop = StopSignal()
    stop.ask()
    return stop


def fit(run: Path, *, resume: bool = True, recipe: str = "toy-8modes-emoe", **more: str) -> Run:
    return train(recipe, run, settings=settings(12, **more), resume=resume, device="cpu", quiet=True)


@pytest.fixture(scope="module")
def twelve(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 12 steps with a checkpoint at each."""
    run = tmp_path_factory.mktemp("twelve") / "run"
    fit(run, resume=False, **{"train.keep": "20"})
    assert steps_saved(run) == list(range(1, 13))
    return run


def cut(whole_run: Path, run: Path, step: int) -> Path:
    """A copy of a run as it was after `step`, killed a little later: the log is ahead of the checkpoints."""
    shutil.copytree(whole_run, run)
    for path in (run / "checkpoints").glob("step-*"):
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)
    lines = (run / "metrics.jsonl").read_bytes().splitlines(True)
    (run / "metrics.jsonl").write_bytes(b"".join(lines[: step + 2])[:-9])  # the last line is torn
    return run


def test_another_process_ends_with_the_same_bits(server: Server, twelve: Path, tmp_path: Path) -> None:
    assert server.run(tmp_path / "run", "--train.keep", "20", "--train.save-every", "1", steps=12) == 0
    assert_same(tmp_path / "run", twelve)


@pytest.mark.parametrize("step", range(12))
def test_resumed_after_every_step(step: int, twelve: Path, tmp_path: Path) -> None:
    run = cut(twelve, tmp_path / "run", step)
    assert fit(run, **{"train.keep": "20"}).step == 12
    assert_same(run, twelve)


def test_a_finished_run_stays_as_it_is(twelve: Path, tmp_path: Path) -> None:
    shutil.copytree(twelve, tmp_path / "run")
    result = fit(tmp_path / "run", **{"train.keep": "20"}).result
    assert result is not None and (result.step, result.signal) == (12, None)
    assert_same(tmp_path / "run", twelve)


@pytest.mark.parametrize("name", ["model.safetensors", "optim.safetensors", "ema.safetensors", "manifest.json"])
def test_a_damaged_checkpoint_is_passed_over(name: str, twelve: Path, tmp_path: Path) -> None:
    run = cut(twelve, tmp_path / "run", 8)
    newest = max((run / "checkpoints").glob("step-*")) / name
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 4
    newest.write_bytes(data)
    assert load_run(run, device="cpu").step == 7
    fit(run, **{"train.keep": "20"})
    assert_same(run, twelve)


def test_nothing_but_damaged_checkpoints(twelve: Path, tmp_path: Path) -> None:
    run = cut(twelve, tmp_path / "run", 2)
    for path in (run / "checkpoints").glob("*/model.safetensors"):
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(RuntimeError, match="no checkpoint can be read"):
        fit(run)
    with pytest.raises(ConfigError, match="add --resume"):  # nor is it started anew unasked
        fit(run, resume=False)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seed", "1"),
        ("train.batch", "16"),
        ("train.steps", "13"),
        ("train.ema", "0.5"),
        ("optim.lr", "0.1"),
        ("domain.points", "301"),
        ("backbone.depth", "1"),
        ("method.experts", "4"),
        ("method.relax-tau", "0.5"),
        ("method", "mdlm"),
    ],
)
def test_another_experiment_is_refused(name: str, value: str, twelve: Path) -> None:
    before = outcome(twelve)
    with pytest.raises(ConfigError) as caught:
        fit(twelve, **{name: value})
    fields = [line.split(":")[0].strip() for line in caught.value.problems[1:-1]]
    assert any(field.startswith(name.replace("-", "_")) for field in fields)
    assert "another experiment" in caught.value.problems[0] and outcome(twelve) == before


def test_elastic_fields_may_change(twelve: Path, tmp_path: Path) -> None:
    run = cut(twelve, tmp_path / "run", 5)
    changes = {"train.log-every": "4", "train.save-every": "5", "train.keep": "3", "train.cuda-graph": "false"}
    fit(run, **changes, **{"eval.nfe": "4", "eval.samples": "9", "eval.batch": "3"})
    found, expected = outcome(run), outcome(twelve)
    del found["metrics.jsonl"], expected["metrics.jsonl"]
    assert found == expected and steps_saved(run)[-3:] == [5, 10, 12]
    assert logged(run) == [1, 2, 3, 4, 5, 8, 12]
    assert Experiment.load(run / "experiment.json").eval.samples == 9


def test_the_folder_is_claimed_under_its_lock(twelve: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    fit(run, resume=False)
    before = (run / "experiment.json").read_bytes()
    with RunLock(run), pytest.raises(RunBusy, match=f"process {os.getpid()}"):
        fit(run, **{"eval.samples": "9"})
    assert (run / "experiment.json").read_bytes() == before


def stepper_of(experiment: Experiment) -> tuple[Any, Any, Stepper]:
    domain = experiment.domain.build(experiment.seed)
    method = experiment.build_method(domain.space)
    rng = Rng(derive_seed(experiment.seed, "train"))
    batches = domain.batches(experiment.train.batch, experiment.seed)
    stepper = Stepper(
        method, batches, method.ramps, experiment.optim,
        total=12, rng=rng, ema=0.9, precision="fp32", graph=False,
    )  # fmt: skip
    return domain, method, stepper


def state_of(method: Any, stepper: Stepper) -> dict[str, torch.Tensor]:
    groups = {"model": method.state_dict(), **stepper.optimizer.state()}
    return {f"{group}/{name}": value.clone() for group, members in groups.items() for name, value in members.items()}


@pytest.mark.parametrize("kind", ["mdlm", "vadd", "emoe"])
def test_an_evaluation_on_the_way_changes_nothing(kind: str) -> None:
    from emoe.config import override

    experiment = override(get_recipe(f"toy-8modes-{kind}"), SMALL)
    _, plain, plain_stepper = stepper_of(experiment)
    domain, method, stepper = stepper_of(experiment)
    for step in range(8):
        plain_stepper(step)
        stepper(step)
        before, randomness, threads = state_of(method, stepper), torch.get_rng_state(), method.training
        rows = evaluate(method, domain, experiment)
        assert len(rows) == 4
        after = state_of(method, stepper)
        assert all(torch.equal(after[name], before[name]) for name in before) and before.keys() == after.keys()
        assert torch.equal(torch.get_rng_state(), randomness) and method.training == threads
        torch.rand(3)  # nor does anything else that draws from the global generator
    found, expected = state_of(method, stepper), state_of(plain, plain_stepper)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_an_evaluated_run_goes_on_as_before(twelve: Path, tmp_path: Path) -> None:
    run = cut(twelve, tmp_path / "run", 6)
    opened = load_run(run, device="cpu")
    first = evaluate(opened.method, opened.domain, opened.experiment)
    assert evaluate(opened.method, opened.domain, opened.experiment) == first
    opened.sample(5, 2)
    fit(run, **{"train.keep": "20"})
    assert_same(run, twelve)
