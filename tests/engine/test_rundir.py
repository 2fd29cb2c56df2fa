"""The run lock: one holder; two starts at once never mix.

A second process and one that is killed are in test_resume.py.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from processes import TRAIN, Server, outcome
from small import TOY

from emoe.experiment import Experiment
from emoe.files import RunBusy, StorageError, run_lock

WAIT = """
import os, time
import emoe.engine.fit as module
stepper, go = module.Stepper, arguments.pop("go")
def late(*args, **options):
    time.sleep(0.1)  # between the claim and the training, where a second process must not come in
    return stepper(*args, **options)
module.Stepper = late
while not os.path.exists(go):
    time.sleep(0.0005)
"""


def test_a_folder_is_locked_once_and_free_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyError), run_lock(tmp_path):
        assert (tmp_path / "run.lock").read_text() == f"{os.getpid()}\n"
        with pytest.raises(RunBusy, match=f"in use by process {os.getpid()}; wait"), run_lock(tmp_path / "." / ""):
            pass
        raise KeyError
    with run_lock(tmp_path):
        pass
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="run.lock"), run_lock(tmp_path / "file"):
        pass


def test_two_starts_at_once_never_mix(server: Server, tmp_path: Path) -> None:
    """One of them has the folder from its claim to its end; the experiment, log and weights are all its own."""

    def begin(folder: Path, seed: int, go: Path) -> int:
        arguments: dict[str, Any] = {"recipe": "toy-8modes-mdlm", "folder": str(folder), "go": str(go)}
        return server.start(WAIT + TRAIN, arguments | {"settings": TOY | {"train.steps": 6, "seed": seed}})

    alone = [tmp_path / "alone0", tmp_path / "alone1"]
    assert [server.wait(begin(folder, seed, tmp_path)) for seed, folder in enumerate(alone)] == [0, 0]
    for trial in range(4):
        folder, go = tmp_path / f"run{trial}", tmp_path / f"go{trial}"
        pids = [begin(folder, seed, go) for seed in (0, 1)]
        time.sleep(0.02)
        go.touch()
        codes = [server.wait(pid) for pid in pids]
        assert sorted(codes) == [0, 2], [server.text(pid) for pid in pids]
        winner = codes.index(0)
        refusal = server.text(pids[1 - winner])
        assert "in use by" in refusal or "already holds a trained run" in refusal
        assert Experiment.load(folder / "experiment.json").seed == winner
        assert outcome(folder) == outcome(alone[winner])
