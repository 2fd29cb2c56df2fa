"""The run lock: one holder, named to the second, freed by the kernel when the holder is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import emoe
from emoe.engine.lock import RunBusy, RunLock
from emoe.files import StorageError

HOLD = """
import sys
from pathlib import Path
from emoe.engine.lock import RunBusy, RunLock
try:
    with RunLock(Path(sys.argv[1])):
        print("held", flush=True)
        sys.stdin.readline()
except RunBusy as error:
    print(error)
    sys.exit(error.exit_code)
"""


def hold(folder: Path) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(Path(emoe.__file__).parents[1])}
    command = [sys.executable, "-c", HOLD, str(folder)]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_the_second_process_is_told_the_pid_of_the_first(tmp_path: Path) -> None:
    folder = tmp_path / "run with spaces"
    with hold(folder) as first:
        assert first.stdout is not None and first.stdout.readline() == "held\n"
        with hold(folder) as second:
            output, _ = second.communicate(timeout=30)
            assert second.returncode == 2 and f"process {first.pid};" in output and str(folder) in output
        with pytest.raises(RunBusy) as caught, RunLock(folder):
            pass
        assert caught.value.pid == first.pid
        first.communicate("\n", timeout=30)
        assert first.returncode == 0
    with RunLock(folder):
        assert (folder / "run.lock").read_text() == f"{os.getpid()}\n"


def test_a_killed_holder_leaves_no_lock(tmp_path: Path) -> None:
    with hold(tmp_path) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        holder.send_signal(signal.SIGKILL)
        holder.wait(timeout=30)
        with RunLock(tmp_path):
            pass


def test_the_same_process_cannot_hold_it_twice_and_frees_it_on_errors(tmp_path: Path) -> None:
    with pytest.raises(KeyError), RunLock(tmp_path):
        with pytest.raises(RunBusy, match=f"process {os.getpid()}"), RunLock(tmp_path):
            pass
        raise KeyError
    with RunLock(tmp_path):
        pass


def test_a_folder_that_cannot_be_made_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="run.lock"), RunLock(tmp_path / "file"):
        pass
