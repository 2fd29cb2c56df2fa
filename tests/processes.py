"""Processes for tests: forks of one interpreter that has imported the package, which can be killed and waited for."""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

import emoe

# A job is a script and its arguments; the exit code is the script's `code`. Importing torch is paid for once.
SERVER = """
import json, os, signal, sys, traceback
import torch, torch._dynamo, torch.distributed
import emoe.runs.train
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
        log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(log, stream)
        os.environ.update(job["environment"])
        scope = {"arguments": job["arguments"], "code": 0}
        try:
            exec(job["script"], scope)
        except BaseException:
            traceback.print_exc()
            scope["code"] = 1
        sys.stdout.flush()
        os._exit(scope["code"])
    print(pid, flush=True)
"""

TRAIN = """
from emoe.runs.train import train
try:
    run = train(**arguments, device="cpu", callbacks=())
    code = 0 if run.result.signal is None else 128 + run.result.signal
except Exception as error:
    if not hasattr(error, "exit_code"):
        raise
    print(error)
    code = error.exit_code
"""


class Server:
    """Starts jobs and waits for them; `text` is what a job has printed."""

    def __init__(self, folder: Path):
        self.folder, self.logs, self._numbers = folder, dict[int, Path](), itertools.count()
        # Hash seed, time zone and locale must not matter.
        environment = os.environ | {"PYTHONHASHSEED": "7", "TZ": "Asia/Kathmandu", "LC_ALL": "C"}
        paths = [Path(emoe.__file__).parents[1], Path(__file__).parent, Path(__file__).parent / "engine"]
        environment |= {"PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER], env=environment, stdin=pipe, stdout=pipe, text=True
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self.process:  # which closes the pipes and waits
            pass

    def _ask(self, **job: Any) -> int:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def start(self, script: str, arguments: Any, **environment: str) -> int:
        """Begin a job; returns its process number."""
        log = self.folder / f"log{next(self._numbers)}"
        log.touch()
        pid = self._ask(script=script, arguments=arguments, log=str(log), environment=environment)
        self.logs[pid] = log
        return pid

    def ranks(self, script: str, arguments: list[Any], **environment: str) -> list[int]:
        """Begin one process for each of the arguments, as `torchrun` would."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), **environment}
        size = str(len(arguments))
        return [
            self.start(script, own, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=size, **shared)
            for rank, own in enumerate(arguments)
        ]

    def wait(self, pid: int) -> int:
        """Exit code, negative for the signal that killed it."""
        return self._ask(wait=pid)

    def text(self, pid: int) -> str:
        """Standard output and error of a job."""
        return self.logs[pid].read_text()

    def until(self, pid: int, text: str) -> None:
        """Wait until a job has printed a text."""
        deadline = time.monotonic() + 60
        while text not in self.text(pid):
            assert time.monotonic() < deadline, self.text(pid)
            time.sleep(0.002)


def logged(run: Path) -> list[dict[str, Any]]:
    """The records of a log; a torn last line is left out."""
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]] if path.exists() else []


def until_step(run: Path, step: int) -> None:
    """Wait until a run has logged a step."""
    deadline = time.monotonic() + 60
    while max((record["step"] for record in logged(run)), default=0) < step:
        assert time.monotonic() < deadline, f"{run} does not reach step {step}"
        time.sleep(0.001)


def outcome(run: Path) -> dict[str, bytes]:
    """All bytes of the newest checkpoint, and the log."""
    newest = max((run / "checkpoints").glob("step-*"))
    files = {f"{newest.name}/{path.name}": path.read_bytes() for path in newest.iterdir()}
    return {"metrics.jsonl": (run / "metrics.jsonl").read_bytes(), **files}
