"""Signals: the first sets a flag, the second ends the process, and the former handlers come back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import emoe
from emoe.engine.signals import StopSignal

LOOP = """
import sys, time
from emoe.engine.signals import StopSignal
with StopSignal() as stop:
    print("ready", flush=True)
    while stop.requested is None:
        time.sleep(0.01)
    print("flag", stop.requested, flush=True)
    time.sleep(float(sys.argv[1]))
sys.exit(stop.exit_code)
"""


def start(linger: float) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(Path(emoe.__file__).parents[1])}
    command = [sys.executable, "-c", LOOP, str(linger)]
    pipe = subprocess.PIPE
    child = subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True)
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    return child


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_sets_a_flag(number: signal.Signals) -> None:
    child = start(linger=0)
    child.send_signal(number)
    output, errors = child.communicate(timeout=30)
    assert (output, child.returncode) == (f"flag {int(number)}\n", 128 + number)
    assert "safe point" in errors and "Traceback" not in errors


def test_a_signal_that_the_parent_had_blocked_is_heard() -> None:
    former = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # a child inherits what is blocked
    try:
        child = start(linger=0)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)
    child.send_signal(signal.SIGTERM)
    output, _ = child.communicate(timeout=30)
    assert (output, child.returncode) == (f"flag {int(signal.SIGTERM)}\n", 128 + signal.SIGTERM)


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_ends_the_process(second: signal.Signals) -> None:
    child = start(linger=60)
    child.send_signal(signal.SIGINT)
    assert child.stdout is not None and child.stdout.readline() == "flag 2\n"
    child.send_signal(second)
    child.communicate(timeout=10)
    assert child.returncode == 128 + second


def test_former_handlers_come_back_even_after_an_error() -> None:
    def mine(number: int, frame: object) -> None: ...

    before = signal.signal(signal.SIGTERM, mine)
    try:
        interrupt = signal.getsignal(signal.SIGINT)
        with pytest.raises(KeyError), StopSignal() as stop:
            assert signal.getsignal(signal.SIGTERM) != mine and stop.requested is None and stop.exit_code == 0
            os.kill(os.getpid(), signal.SIGTERM)
            assert [stop.requested, stop.exit_code] == [signal.SIGTERM, 143]
            raise KeyError
        assert signal.getsignal(signal.SIGTERM) is mine
        assert signal.getsignal(signal.SIGINT) is interrupt
    finally:
        signal.signal(signal.SIGTERM, before)


def test_outside_the_main_thread_it_does_nothing() -> None:
    seen: list[object] = []

    def work() -> None:
        before = signal.getsignal(signal.SIGINT)
        with StopSignal() as stop:
            seen.append(signal.getsignal(signal.SIGINT) is before and stop.requested is None)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [True]
