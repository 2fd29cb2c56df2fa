"""Signals: the first sets a flag, the second ends the process, and the former handlers come back."""

from __future__ import annotations

import os
import signal
import threading

import pytest
from processes import Server

from emoe.engine.callbacks import StopSignal

LOOP = """
import signal, time
from emoe.engine.callbacks import StopSignal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # as a parent process may have done
with StopSignal() as stop:
    print("ready", flush=True)
    while stop.requested is None:
        time.sleep(0.01)
    print("flag", stop.requested, flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_sets_a_flag_and_the_second_ends_the_process(second: signal.Signals, server: Server) -> None:
    pid = server.start(LOOP, {})
    server.until(pid, "ready")
    os.kill(pid, signal.SIGTERM)
    server.until(pid, "flag 15")
    assert "safe point" in server.text(pid)
    os.kill(pid, second)
    assert server.wait(pid) == 128 + second


def test_former_handlers_come_back_even_after_an_error() -> None:
    def own(number: int, frame: object) -> None: ...

    before = signal.signal(signal.SIGTERM, own)
    try:
        interrupt = signal.getsignal(signal.SIGINT)
        with pytest.raises(KeyError), StopSignal() as stop:
            assert signal.getsignal(signal.SIGTERM) != own and stop.requested is None
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.requested == signal.SIGTERM
            raise KeyError
        assert signal.getsignal(signal.SIGTERM) is own
        assert signal.getsignal(signal.SIGINT) is interrupt
    finally:
        signal.signal(signal.SIGTERM, before)


def test_outside_the_main_thread_it_does_nothing() -> None:
    untouched: list[bool] = []

    def work() -> None:
        before = signal.getsignal(signal.SIGINT)
        with StopSignal() as stop:
            untouched.append(signal.getsignal(signal.SIGINT) is before and stop.requested is None)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert untouched == [True]
