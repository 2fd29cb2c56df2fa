"""The terminal: progress that breaks no run, with and without a terminal or rich, and plain tables."""

from __future__ import annotations

import io
import os
import pty
import select
import sys

import pytest
import torch

from emoe import console
from emoe.console import Progress, console_table, meter, tick_calls


def test_plain_lines_when_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [50.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    with Progress(10_000, start=1000, label="train") as progress:
        progress.log(1000)
        now[0] += 10
        progress.update(1010)
        progress.log(1020, "x")
        progress.note("saved")
        now[0] += 10
        progress.log(10_000)
    assert capsys.readouterr().err.splitlines() == [
        "train: step 1000/10000 (10.0%), ? steps/s, ETA ?",
        "train: step 1020/10000 (10.2%), 2.00 steps/s, ETA 1:14:50 | x",
        "train: saved",
        "train: step 10000/10000 (100.0%), 450.00 steps/s, ETA 0:00:00",
    ]


def test_quiet_and_lost_streams_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with Progress(3, quiet=True) as progress, Progress(3) as lost:
        progress.log(1, "loss 1")
        progress.note("hello")
        assert stream.getvalue() == ""
        stream.close()
        lost.log(1)


def on_terminal(text: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a terminal receives from a run that ends with an error."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    master, slave = pty.openpty()
    with open(slave, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        with pytest.raises(KeyError), Progress(10, start=2, label="train") as progress:
            progress.update(3)
            progress.log(5, text)
            progress.note("[bold]saved")
            raise KeyError
        stream.flush()
        received = b""
        while select.select([master], [], [], 0.3)[0]:  # the kernel delivers it in pieces
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


@pytest.mark.parametrize("terminal", [False, True])
def test_calls_of_a_network_are_shown_after_a_while(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As lines, or as a bar."""
    if terminal:
        pytest.importorskip("rich")
    network = torch.nn.Linear(1, 1)
    monkeypatch.setenv("TERM", "xterm")
    for seconds, shown in ((1e9, False), (0.0, True)):
        stream = io.StringIO()
        stream.isatty = lambda: terminal  # type: ignore[method-assign]
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setattr(console, "LINE_SECONDS", seconds)
        with meter(3, "drawing") as tick, tick_calls(network, tick):
            for _ in range(3):
                network(torch.zeros(1))
        network(torch.zeros(1))  # not counted any more
        assert ("drawing" in stream.getvalue()) == shown
        assert terminal or stream.getvalue().count("drawing: step ") == 3 * shown


def test_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    console_table(["name", "value"], [["a\nb", "1.5"], ["long name", "10"]], title="Title")
    lines = ["", "Title", "name       value", "---------  -----", "a b          1.5", "long name     10"]
    assert capsys.readouterr().out.splitlines() == lines
