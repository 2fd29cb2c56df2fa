"""Several processes train one run: the same weights as one process, stops and losses of a process, resumption."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import emoe
from emoe.config import ConfigError
from emoe.engine import checkpoint, distributed
from emoe.engine.distributed import World, launched, timeout_seconds
from emoe.engine.optim import OptimConfig
from emoe.engine.trainer import TrainConfig, fit
from emoe.rng import Rng

SMALL = {
    "domain.points": "300",
    "backbone.width": "8",
    "backbone.hidden": "16",
    "backbone.heads": "2",
    "backbone.time-size": "8",
    "train.batch": "8",
    "train.ema": "0.9",
    "train.log-every": "1",
    "train.save-every": "7",
}
STEPS = 60
LONG = 100_000

# One process pays for the import of torch; each rank is a fork of it. A job is a command line, or a script to run.
SERVER = """
import json, os, signal, sys
import torch, torch._dynamo, torch.distributed
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
        signal.alarm(120)
        log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(log, stream)
        os.environ.update(job["environment"])
        code = 0
        if "script" in job:
            exec(job["script"], {"arguments": job["arguments"]})
        else:
            code = main(job["words"])
        sys.stdout.flush()
        os._exit(code)
    print(pid, flush=True)
"""

# Training in double precision, which no recipe offers. With `spoil`, parts of rank 1 alone use a parameter, and their
# loss, but not their gradient, is not a number at step 1.
EXACT = """
from pathlib import Path
import torch
from emoe.config import override
from emoe.engine.distributed import joined
from emoe.engine.optim import OptimConfig
from emoe.engine.trainer import fit
from emoe.recipes import get_recipe
from emoe.rng import Rng
kind, folder, settings, spoil = arguments
experiment = override(get_recipe("toy-8modes-" + kind), settings)
domain = experiment.domain.build(0)
method = experiment.build_method(domain.space).double()
with torch.no_grad():
    for name, p in method.named_parameters():
        if ".router." in name and p.ndim == 1:
            p.copy_(torch.linspace(0, 4, len(p)))  # loads that are far from equal
if spoil:
    method.idle, method.extra = (torch.nn.Parameter(torch.ones(3).double()) for _ in range(2))
    inner = method.forward
    def forward(rows, knobs, rng):
        loss = inner(rows, knobs, rng)
        if rng.rank == 1:
            wrong = float("nan") if rng.step == 1 else 0.0
            loss = type(loss)(loss.total + method.extra.square().sum() + wrong, loss.log)
        return loss
    method.forward = forward
with joined(torch.device("cpu")) as world:
    share = dict(rank=world.rank, world=world.size)
    fit(
        method, domain.batches(experiment.train.batch, 0, **share), method.ramps, optim=experiment.optim,
        train=experiment.train, rng=Rng(4, **share), run_dir=Path(folder), quiet=True, world=world,
    )
"""


class Server:
    """Starts ranks and waits for them."""

    def __init__(self, folder: Path):
        environment = os.environ | {"PYTHONPATH": str(Path(emoe.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
        self.folder = folder
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER], env=environment, stdin=pipe, stdout=pipe, text=True
        )

    def ask(self, **job: Any) -> int:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def start(self, ranks: int, jobs: list[dict[str, Any]], **environment: str) -> list[int]:
        """Begin one process for each rank, with the jobs in turn; their process numbers."""
        port = str(free_port())
        found = []
        for rank in range(ranks):
            names = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_PORT": port}
            names |= {"MASTER_ADDR": "127.0.0.1", **environment}
            found.append(self.ask(**jobs[rank % len(jobs)], log=str(self.log(rank)), environment=names))
        return found

    def log(self, rank: int) -> Path:
        return self.folder / f"log{rank}"

    def text(self, rank: int) -> str:
        return self.log(rank).read_text()

    def train(self, run: Path, *words: str, ranks: int = 2, steps: int = STEPS, **environment: str) -> list[int]:
        return self.start(ranks, [command(run, *words, steps=steps)], **environment)

    def wait(self, pids: list[int]) -> list[int]:
        """Exit codes, negative for a signal that killed."""
        return [self.ask(wait=pid) for pid in pids]


def command(run: Path, *words: str, steps: int = STEPS) -> dict[str, Any]:
    settings = [word for name, value in SMALL.items() for word in (f"--{name}", value)]
    start = ["train", "toy-8modes-emoe", "--run", str(run), "--quiet", "--device", "cpu", "--train.steps", str(steps)]
    return {"words": [*start, *settings, *words]}


def free_port() -> int:
    with socket.socket() as some:
        some.bind(("127.0.0.1", 0))
        return int(some.getsockname()[1])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server"))
    yield server
    with server.process:  # which closes its pipes and waits
        pass


def state(run: Path) -> dict[str, Tensor]:
    saved = checkpoint.load_latest(run / "checkpoints")
    assert saved is not None
    return {f"{group}/{name}": value for group, some in saved.tensors.items() for name, value in some.items()}


def logged(run: Path) -> list[dict[str, Any]]:
    with contextlib.suppress(FileNotFoundError):
        return [json.loads(line) for line in (run / "metrics.jsonl").read_bytes().split(b"\n")[:-1]]
    return []


def until_step(run: Path, step: int) -> None:
    deadline = time.monotonic() + 30
    while max((record["step"] for record in logged(run)), default=0) < step:
        assert time.monotonic() < deadline, f"{run} does not reach step {step}"
        time.sleep(0.005)


def outcome(run: Path) -> dict[str, bytes]:
    newest = max((run / "checkpoints").glob("step-*"))
    files = {f"{newest.name}/{path.name}": path.read_bytes() for path in newest.iterdir()}
    return {"metrics.jsonl": (run / "metrics.jsonl").read_bytes(), **files}


@pytest.mark.parametrize("kind", ["emoe", "mdlm", "vadd"])
def test_two_processes_equal_two_parts(kind: str, server: Server, tmp_path: Path) -> None:
    settings = SMALL | {"train.steps": "8", "train.batch": "24", "optim.eps": "1e-6", "train.precision": "fp32"}
    if kind == "emoe":
        settings |= {"method.balance": "0.1"}
    cases = {"processes": (2, "2"), "parts": (1, "4")}
    for name, (ranks, accumulate) in cases.items():
        arguments = [kind, str(tmp_path / name), settings | {"train.accumulate": accumulate}, False]
        pids = server.start(ranks, [{"script": EXACT, "arguments": arguments}])
        assert server.wait(pids) == [0] * ranks, server.text(0)
    found, expected = (state(tmp_path / name) for name in cases)
    assert found.keys() == expected.keys() and found["model/backbone.head.weight"].dtype == torch.float64
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=0, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
        )
    for one, other in zip(*(logged(tmp_path / name) for name in cases), strict=True):
        assert one.keys() == other.keys()
        for name, value in other.items():
            assert one[name] == pytest.approx(value, rel=1e-6, abs=1e-9), name
    if kind == "emoe":
        usage = torch.tensor([record["usage/block1"] for record in logged(tmp_path / "parts")])
        assert usage.max() > 0.3 and (usage.min(1).values == 0).any()


def test_what_only_one_rank_sees(server: Server, tmp_path: Path) -> None:
    """A parameter that one rank uses is updated with the mean, one that nobody uses is left alone.

    A loss that is not finite in one rank is a step that all refuse.
    """
    settings = SMALL | {"train.steps": "4", "optim.algorithm": "adamw", "optim.weight-decay": "0.1"}
    for name, ranks, parts in (("processes", 2, "1"), ("parts", 1, "2")):
        arguments = ["mdlm", str(tmp_path / name), settings | {"train.accumulate": parts}, True]
        assert server.wait(server.start(ranks, [{"script": EXACT, "arguments": arguments}])) == [0] * ranks
    found, expected = state(tmp_path / "processes"), state(tmp_path / "parts")
    assert found.keys() == expected.keys()
    assert found["optim/skipped"] == 1 and found["optim/extra/step"] == 3
    assert torch.equal(found["model/idle"], torch.ones(3).double()) and (found["model/extra"] < 1).all()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)


@pytest.fixture(scope="module")
def whole(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An unbroken run of two processes."""
    run = tmp_path_factory.mktemp("whole") / "run"
    assert server.wait(server.train(run)) == [0, 0], server.text(0) + server.text(1)
    assert [record["step"] for record in logged(run)] == list(range(1, STEPS + 1))
    return run


def test_one_process_goes_on_where_two_were_stopped(server: Server, whole: Path, tmp_path: Path) -> None:
    """The product of processes and parts decides what is drawn; the sums differ by rounding."""
    run = tmp_path / "run"
    pids = server.train(run)
    until_step(run, 20)
    os.kill(pids[1], signal.SIGTERM)  # the one that writes nothing
    assert server.wait(pids) == [143, 143]
    last = logged(run)[-1]["step"]
    assert 20 <= last < STEPS and max((run / "checkpoints").glob("step-*")).name == f"step-{last:09d}"
    assert outcome(run)["metrics.jsonl"] == b"".join(outcome(whole)["metrics.jsonl"].splitlines(True)[:last])
    assert server.wait(server.train(run, "--resume", ranks=1)) == [2]
    assert "cut into 2 parts (processes x train.accumulate), not 1" in server.text(0)
    assert server.wait(server.train(run, "--resume", "--train.accumulate", "2", ranks=2)) == [2, 6]
    assert server.wait(server.train(run, "--resume", "--train.accumulate", "2", ranks=1)) == [0], server.text(0)
    found, expected = state(run), state(whole)
    for name, value in expected.items():
        if name.startswith(("model/", "ema/")):
            torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_ends_the_others_and_the_run_goes_on(
    victim: int, server: Server, whole: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    pids = server.train(run)
    until_step(run, 15)
    os.kill(pids[victim], signal.SIGKILL)
    began = time.monotonic()
    codes = server.wait(pids)
    assert time.monotonic() - began < 5 * distributed.ANSWER_SECONDS
    assert codes[victim] == -signal.SIGKILL and codes[1 - victim] == 6
    told = server.text(1 - victim)
    assert f"lost rank {victim}," in told and "--resume" in told and "Traceback" not in told
    assert server.wait(server.train(run, "--resume")) == [0, 0], server.text(0)
    assert outcome(run) == outcome(whole)  # the same number of processes: the same bits


def test_a_process_that_does_not_answer(server: Server, tmp_path: Path) -> None:
    run = tmp_path / "run"
    pids = server.train(run, "--train.batch", "9", ranks=3, steps=LONG, EMOE_RANK_TIMEOUT="3")
    until_step(run, 2)
    os.kill(pids[2], signal.SIGSTOP)
    try:
        began = time.monotonic()
        assert server.wait(pids[:2]) == [6, 6]
        assert time.monotonic() - began < 3 + 5 * distributed.ANSWER_SECONDS
        assert all("lost rank 2, which has ended or did not answer in 3 s" in server.text(rank) for rank in (0, 1))
    finally:
        os.kill(pids[2], signal.SIGKILL)
        server.wait(pids[2:])
    assert not list((run / "checkpoints").glob(".tmp*"))


def test_processes_with_different_fields(server: Server, tmp_path: Path) -> None:
    run = tmp_path / "run"
    pids = server.start(2, [command(run), command(run, "--optim.lr", "0.5")])
    assert server.wait(pids) == [2, 2]
    assert all("started with other fields" in server.text(rank) for rank in (0, 1))
    assert "(rank 1 differs from rank 0)" in server.text(0) and not run.exists()


def test_a_folder_in_use_is_refused_for_all(server: Server, whole: Path) -> None:
    before = outcome(whole)
    assert server.wait(server.train(whole)) == [2, 6]
    assert "add --resume" in server.text(0) and "rank 0 could not begin" in server.text(1)
    assert outcome(whole) == before


def test_rows_that_cannot_be_shared(server: Server, tmp_path: Path) -> None:
    assert server.wait(server.train(tmp_path / "run", "--train.accumulate", "8")) == [2, 2]
    assert "8 rows cannot be cut into 2 (processes) x 8" in server.text(1)


def test_alone_nothing_is_exchanged() -> None:
    world, tensor = World(), torch.ones(3)
    world.average([tensor])
    world.check_same("a", "b")
    assert world.leads and world.agree(7) == 7 and world.any_of([1, 0]) == [1, 0] and torch.equal(tensor, torch.ones(3))
    done = []
    world.lead(lambda: done.append(1))
    assert done == [1]


def test_what_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    assert launched() == (0, 1, 0)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT is not set; start with torchrun"):
        launched()
    for name, value in zip(names, ("5", "8", "1", "here", "1"), strict=True):
        monkeypatch.setenv(name, value)
    assert launched() == (5, 8, 1)
    monkeypatch.setenv("RANK", "8")
    with pytest.raises(ConfigError, match="RANK '8' of WORLD_SIZE '8'"):
        launched()
    assert timeout_seconds() == distributed.TIMEOUT_SECONDS
    monkeypatch.setenv("EMOE_RANK_TIMEOUT", "soon")
    with pytest.raises(ConfigError, match="EMOE_RANK_TIMEOUT: must be a number of seconds"):
        timeout_seconds()


def test_the_streams_must_be_those_of_the_rank(tmp_path: Path) -> None:
    module = torch.nn.Linear(1, 1)
    with pytest.raises(ValueError, match="rng is of rank 1 of 2, the world of 0 of 1"):
        fit(
            module, lambda step: torch.zeros(1), {}, optim=OptimConfig(), train=TrainConfig(),
            rng=Rng(0, rank=1, world=2), run_dir=tmp_path,
        )  # fmt: skip


def test_buckets_keep_order_and_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "BUCKET_BYTES", 16)
    tensors = [torch.zeros(n, dtype=kind) for n, kind in ((3, torch.float32), (1, torch.float64), (2, torch.float32),
                                                          (9, torch.float32), (1, torch.float32))]  # fmt: skip
    sizes = [[(tensor.numel(), tensor.dtype) for tensor in bucket] for bucket in distributed._buckets(tensors)]
    single, double = torch.float32, torch.float64
    assert sizes == [[(3, single), (2, single)], [(9, single)], [(1, single)], [(1, double)]]
