"""Several processes train one run: the same weights as one process, stops and losses of a process, resumption."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import TRAIN, Server, logged, outcome, until_step
from small import TOY
from torch import Tensor

from emoe.config import ConfigError
from emoe.engine import checkpoint, distributed
from emoe.engine.distributed import launched, timeout_seconds
from emoe.engine.fit import TrainConfig, fit
from emoe.engine.optim import OptimConfig
from emoe.rng import Rng

SMALL = TOY | {"train.ema": 0.9, "train.save_every": 7}
STEPS = 60
LONG = 100_000

# Training in double precision, which no recipe offers, with gradients in several buckets. With `spoil`, parts of rank 1
# alone use a parameter, and their loss, but not their gradient, is not a number at step 1.
EXACT = """
from pathlib import Path
import torch
from emoe.engine import distributed
from emoe.engine.distributed import joined
from emoe.engine.fit import fit
from emoe.overrides import override
from emoe.recipes import get_recipe
from emoe.rng import Rng
kind, folder, settings, spoil = arguments
distributed.BUCKET_BYTES = 4096
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
    def forward(rows, ramp, rng):
        loss = inner(rows, ramp, rng)
        if rng.rank == 1:
            wrong = float("nan") if rng.step == 1 else 0.0
            loss = type(loss)(loss.total + method.extra.square().sum() + wrong, loss.log)
        return loss
    method.forward = forward
with joined(torch.device("cpu")) as world:
    share = dict(rank=world.rank, world=world.size)
    fit(
        method, domain.batches(experiment.train.batch, 0, **share), method.ramps, optim=experiment.optim,
        train=experiment.train, rng=Rng(4, **share), run_dir=Path(folder), world=world,
    )
"""


def job(run: Path, steps: int = STEPS, *, resume: bool = False, **settings: object) -> dict[str, Any]:
    """Arguments of a training; in names of settings `__` is a dot."""
    more = {name.replace("__", "."): value for name, value in settings.items()}
    own = SMALL | {"train.steps": steps} | more
    return {"recipe": "toy-8modes-emoe", "folder": str(run), "settings": own, "resume": resume}


def begin(server: Server, run: Path, *, ranks: int = 2, steps: int = STEPS, **options: Any) -> list[int]:
    return server.ranks(TRAIN, [job(run, steps, **options)] * ranks)


def wait(server: Server, pids: list[int]) -> list[int]:
    return [server.wait(pid) for pid in pids]


def state(run: Path) -> dict[str, Tensor]:
    saved = checkpoint.load_latest(run / "checkpoints")
    assert saved is not None
    return {f"{group}/{name}": value for group, some in saved.tensors.items() for name, value in some.items()}


@pytest.mark.parametrize("kind", ["emoe", "mdlm", "vadd"])
def test_two_processes_equal_two_parts(kind: str, server: Server, tmp_path: Path) -> None:
    settings = SMALL | {"train.steps": 8, "train.batch": 24, "optim.eps": 1e-6, "train.precision": "fp32"}
    if kind == "emoe":
        settings |= {"method.balance": 0.1}
    cases = {"processes": (2, 2), "parts": (1, 4)}
    for name, (ranks, accumulate) in cases.items():
        arguments = [kind, str(tmp_path / name), settings | {"train.accumulate": accumulate}, False]
        pids = server.ranks(EXACT, [arguments] * ranks)
        assert wait(server, pids) == [0] * ranks, server.text(pids[0])
    actual, expected = (state(tmp_path / name) for name in cases)
    assert actual.keys() == expected.keys() and actual["model/backbone.head.weight"].dtype == torch.float64
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=0, atol=1e-12, msg=f"{name}: {actual[name]} {value}")
    for record, other in zip(*(logged(tmp_path / name) for name in cases), strict=True):
        assert record.keys() == other.keys()
        for name, value in other.items():
            assert record[name] == pytest.approx(value, rel=1e-6, abs=1e-9), name
    if kind == "emoe":
        usage = torch.tensor([record["usage/block1"] for record in logged(tmp_path / "parts")])
        assert usage.max() > 0.3 and (usage.min(1).values == 0).any()


def test_what_only_one_rank_sees(server: Server, tmp_path: Path) -> None:
    """A parameter that one rank uses is updated with the mean, one that nobody uses is left alone.

    A loss that is not finite in one rank is a step that all refuse.
    """
    settings = SMALL | {"train.steps": 4, "optim.algorithm": "adamw", "optim.weight_decay": 0.1}
    for name, ranks, parts in (("processes", 2, 1), ("parts", 1, 2)):
        arguments = ["mdlm", str(tmp_path / name), settings | {"train.accumulate": parts}, True]
        assert wait(server, server.ranks(EXACT, [arguments] * ranks)) == [0] * ranks
    actual, expected = state(tmp_path / "processes"), state(tmp_path / "parts")
    assert actual.keys() == expected.keys()
    assert actual["optim/skipped"] == 1 and actual["optim/extra/step"] == 3
    assert torch.equal(actual["model/idle"], torch.ones(3).double()) and (actual["model/extra"] < 1).all()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=0, atol=1e-12)


@pytest.fixture(scope="module")
def whole(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An unbroken run of two processes."""
    run = tmp_path_factory.mktemp("whole") / "run"
    pids = begin(server, run)
    assert wait(server, pids) == [0, 0], server.text(pids[0]) + server.text(pids[1])
    assert [record["step"] for record in logged(run)] == list(range(1, STEPS + 1))
    return run


def test_one_process_goes_on_where_two_were_stopped(server: Server, whole: Path, tmp_path: Path) -> None:
    """The product of processes and parts decides what is drawn; the sums differ by rounding."""
    run = tmp_path / "run"
    pids = begin(server, run)
    until_step(run, 20)
    os.kill(pids[1], signal.SIGTERM)  # the one that writes nothing
    assert wait(server, pids) == [143, 143]
    last = logged(run)[-1]["step"]
    assert 20 <= last < STEPS and max((run / "checkpoints").glob("step-*")).name == f"step-{last:09d}"
    assert outcome(run)["metrics.jsonl"] == b"".join(outcome(whole)["metrics.jsonl"].splitlines(True)[:last])
    pids = begin(server, run, ranks=1, resume=True)
    assert wait(server, pids) == [2]
    assert "cut into 2 parts (processes x train.accumulate), not 1" in server.text(pids[0])
    assert wait(server, begin(server, run, resume=True, train__accumulate=2)) == [2, 6]
    assert wait(server, begin(server, run, ranks=1, resume=True, train__accumulate=2)) == [0]
    actual, expected = state(run), state(whole)
    for name, value in expected.items():
        if name.startswith(("model/", "ema/")):
            torch.testing.assert_close(actual[name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_ends_the_others_and_the_run_goes_on(
    victim: int, server: Server, whole: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    pids = begin(server, run)
    until_step(run, 15)
    os.kill(pids[victim], signal.SIGKILL)
    began = time.monotonic()
    codes = wait(server, pids)
    assert time.monotonic() - began < 5 * distributed.ANSWER_SECONDS
    assert codes[victim] == -signal.SIGKILL and codes[1 - victim] == 6
    text = server.text(pids[1 - victim])
    assert f"lost rank {victim}," in text and "--resume" in text and "Traceback" not in text
    assert wait(server, begin(server, run, resume=True)) == [0, 0]
    assert outcome(run) == outcome(whole)  # the same number of processes: the same bits


def test_a_process_that_does_not_answer(server: Server, tmp_path: Path) -> None:
    run = tmp_path / "run"
    pids = server.ranks(TRAIN, [job(run, LONG, train__batch=9)] * 3, EMOE_RANK_TIMEOUT="3")
    until_step(run, 2)
    os.kill(pids[2], signal.SIGSTOP)
    try:
        began = time.monotonic()
        assert wait(server, pids[:2]) == [6, 6]
        assert time.monotonic() - began < 3 + 5 * distributed.ANSWER_SECONDS
        for pid in pids[:2]:
            assert "lost rank 2, which has ended or did not answer in 3 s" in server.text(pid)
    finally:
        os.kill(pids[2], signal.SIGKILL)
        wait(server, pids[2:])
    assert not list((run / "checkpoints").glob(".tmp*"))


def test_starts_that_are_refused_for_all(server: Server, whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    pids = server.ranks(TRAIN, [job(run), job(run, optim__lr=0.5)])
    assert wait(server, pids) == [2, 2] and not run.exists()
    assert all("started with other fields" in server.text(pid) for pid in pids)
    assert "(rank 1 differs from rank 0)" in server.text(pids[0])
    before = outcome(whole)
    pids = begin(server, whole)
    assert wait(server, pids) == [2, 6] and outcome(whole) == before
    assert "add --resume" in server.text(pids[0]) and "rank 0 could not begin" in server.text(pids[1])
    pids = begin(server, run, train__accumulate=8)
    assert wait(server, pids) == [2, 2] and "8 rows cannot be cut into 2 (processes) x 8" in server.text(pids[1])


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
    own, rng = {"optim": OptimConfig(), "train": TrainConfig(), "run_dir": tmp_path}, Rng(0, rank=1, world=2)
    with pytest.raises(ValueError, match="rng is of rank 1 of 2, the world of 0 of 1"):
        fit(torch.nn.Linear(1, 1), lambda step: torch.zeros(1), {}, rng=rng, **own)  # type: ignore[arg-type]
