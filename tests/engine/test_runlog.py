"""Metrics lines exactly once after a kill, a progress display that breaks no run, TensorBoard on demand."""

from __future__ import annotations

import io
import json
import math
import os
import pty
import select
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from emoe.config import ConfigError
from emoe.console import Progress
from emoe.engine.metricslog import MetricsLog, read_metrics
from emoe.engine.tensorboard import TensorBoardLog
from emoe.files import StorageError


def write(path: Path, first: int, last: int) -> None:
    with MetricsLog.resume(path, first - 1) as log:
        for step in range(first, last + 1):
            log.write({"step": step, "loss": 1 / step})


def test_lines_are_on_file_at_once_and_valid_json(tmp_path: Path) -> None:
    path = tmp_path / "not" / "yet" / "metrics.jsonl"
    with MetricsLog(path) as log:
        values = {"a": math.nan, "b": math.inf, "c": -math.inf, "d": torch.tensor(0.5), "e": np.float32(2)}
        log.write({"step": 1, **values, "f": torch.tensor([1.0, math.inf]), "g": "text", "h": None, "i": True})
        line = path.read_text()
        log.sync()

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    assert json.loads(line, parse_constant=refuse)["a"] == "nan"
    (record,) = read_metrics(path)
    assert math.isnan(record["a"]) and record["b"] == math.inf and record["c"] == -math.inf
    assert {key: record[key] for key in "defghi"} == {
        "d": 0.5, "e": 2.0, "f": [1.0, "inf"], "g": "text", "h": None, "i": True
    }  # fmt: skip
    with pytest.raises(ValueError, match="closed"):
        log.write({"step": 2})


@pytest.mark.parametrize("cut", [1, 5, 12, 25])
def test_after_a_kill_each_step_is_there_once(tmp_path: Path, cut: int) -> None:
    path, whole = tmp_path / "metrics.jsonl", tmp_path / "whole.jsonl"
    write(whole, 1, 9)
    write(path, 1, 6)
    path.write_bytes(path.read_bytes()[:-cut])  # torn in the middle of the last line
    assert [record["step"] for record in read_metrics(path)] == [1, 2, 3, 4, 5, 6][: 6 if cut == 1 else 5]
    write(path, 5, 9)  # a checkpoint of step 4
    assert path.read_bytes() == whole.read_bytes()
    write(path, 10, 9)  # nothing to drop
    assert path.read_bytes() == whole.read_bytes()


def test_a_restart_from_step_zero_empties_the_log(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n\xff\xfe garbage\n[3]\n{"loss": 1}\n{"step": 2')
    assert [record["step"] for record in read_metrics(path)] == [1]
    MetricsLog.resume(path, 0).close()
    assert path.read_bytes() == b"" and [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_log_that_cannot_be_written_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="metrics.jsonl"):
        MetricsLog(tmp_path / "file" / "metrics.jsonl")
    if Path("/dev/full").exists():
        with MetricsLog(Path("/dev/full")) as log, pytest.raises(StorageError, match="No space left"):
            log.write({"step": 1})


# ---- progress


def test_plain_lines_when_there_is_no_terminal() -> None:
    stream = io.StringIO()
    with Progress(400, start=100, label="train", stream=stream) as progress:
        progress.update(150)
        progress.log(200, "loss 1.5")
        progress.note("saved")
        progress.log(400)
    first, note, last = stream.getvalue().splitlines()
    assert first.startswith("train: step 200/400 (50.0%), ") and first.endswith(" | loss 1.5")
    assert "steps/s, ETA 0:00:00" in first and note == "train: saved" and "400/400 (100.0%)" in last


def test_speed_and_eta_follow_the_monotonic_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    now = [50.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    progress = Progress(10_000, start=1000, stream=stream)
    progress.log(1000)
    now[0] += 10
    progress.log(1020, "x")
    assert stream.getvalue().splitlines() == [
        "step 1000/10000 (10.0%), ? steps/s, ETA ?",
        "step 1020/10000 (10.2%), 2.00 steps/s, ETA 1:14:50 | x",
    ]


def test_quiet_and_lost_streams_do_not_matter(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(3, quiet=True) as progress:
        progress.log(1, "loss 1")
        progress.note("hello")
    closed = io.StringIO()
    with Progress(3, stream=closed) as progress:
        closed.close()
        progress.log(1)
    assert capsys.readouterr() == ("", "")


def on_terminal(show: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a terminal receives from a run that ends with an error."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    master, slave = pty.openpty()
    with open(slave, "w") as stream:
        with pytest.raises(KeyError), Progress(10, start=2, label="train", stream=stream) as progress:
            progress.update(3)
            progress.log(5, show)
            progress.note("[bold]saved")
            raise KeyError
        stream.flush()
        received = b""
        while select.select([master], [], [], 0.3)[0]:  # the kernel hands it over in pieces
            received += os.read(master, 1 << 16)
    os.close(master)
    return received.decode()


def test_a_bar_on_a_terminal_is_taken_down_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    received = on_terminal("loss [1.5]", monkeypatch)
    assert "5/10" in received and "loss [1.5]" in received and "ETA" in received and "[bold]saved" in received
    assert received.rindex("\x1b[?25h") > received.rindex("\x1b[?25l")  # the cursor is back
    assert sys.stderr is not None and not type(sys.stderr).__module__.startswith("rich")


def test_plain_lines_on_a_terminal_without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    received = on_terminal("loss 1.5", monkeypatch)
    assert "\x1b" not in received and "train: step 5/10 (50.0%)" in received


# ---- TensorBoard


def test_a_missing_tensorboard_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"pip install emoe\[track\]"):
        TensorBoardLog(tmp_path)


@pytest.mark.filterwarnings("ignore")  # of tensorboard's own making
def test_numbers_reach_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with TensorBoardLog(tmp_path, step=3) as log:
        log.write({"step": 4, "loss": torch.tensor(0.5), "grad": 1.5, "note": "text", "list": [1, 2]})
    events = EventAccumulator(str(tmp_path)).Reload()
    assert sorted(events.Tags()["scalars"]) == ["grad", "loss"]
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(4, 0.5)]
