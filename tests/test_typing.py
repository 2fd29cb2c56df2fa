"""Types as a user's checker sees them: the public names have their real signatures."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import emoe

SNIPPET = """
import emoe
from pathlib import Path
from emoe.engine.callbacks import EarlyStopping

run = emoe.train("toy-8modes-emoe", Path("runs/a"), settings={"train.steps": 3, "eval.nfe": [1, 2]}, resume=True,
                 device="cpu", callbacks=[EarlyStopping("loss", 3)])
run = emoe.load_run("runs/a", weights="ema", settings={"method.route_tau": 0})
run = emoe.from_pretrained("mnist-emoe", device="cpu")
rows = run.sample(10, 2, seed=3, given=[[1, -1]])
completion = run.complete(["12,?"], 5, nfe=2, keep="0")
log = run.log_probs(rows, routes="greedy")
nll = run.nll(likelihood="bound@4").value
generator = emoe.Rng(3).stream("mask")
reveal_type(run)
reveal_type(nll)
reveal_type(completion.texts)
emoe.train("toy-8modes-emoe")
emoe.load_run("runs/a", weights="average")
run.complete("12,?", ink="blue")
run.sample(ten=10)
emoe.no_such_name
"""
# The heavy packages are not followed: what is tested are the signatures of this one.
CONFIG = """
[mypy]
follow_imports = silent
[mypy-torch.*,numpy.*,matplotlib.*,rich.*,PIL.*,jaxtyping.*,safetensors.*]
follow_imports = skip
ignore_missing_imports = True
"""
EXPECTED = {
    14: 'Revealed type is "emoe.runs.run.Run"',
    15: 'Revealed type is "float"',
    16: 'Revealed type is "list[list[str]]"',
    17: 'Missing positional argument "folder" in call to "train"',
    18: 'Argument "weights" to "load_run" has incompatible type',
    19: 'Argument "ink" to "complete" of "Run" has incompatible type',
    20: 'Unexpected keyword argument "ten" for "sample" of "Run"',
    21: 'Module has no attribute "no_such_name"',
}


def test_a_users_script_is_checked_against_the_real_signatures(tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="mypy is not installed")
    (tmp_path / "script.py").write_text(SNIPPET.strip() + "\n")
    (tmp_path / "mypy.ini").write_text(CONFIG)
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--cache-dir", "cache", "script.py"]
    environment = os.environ | {"MYPYPATH": str(Path(emoe.__file__).parents[1])}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    lines = [line for line in done.stdout.splitlines() if ": error: " in line or "Revealed type" in line]
    messages = {int(line.split(":")[1]): line for line in lines}
    assert len(messages) == len(lines) and messages.keys() == EXPECTED.keys(), done.stdout + done.stderr
    assert all(text in messages[number] for number, text in EXPECTED.items()), done.stdout
