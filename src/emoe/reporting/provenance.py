"""Device, versions, date and commit of a run."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path

GIT_SECONDS = 5  # a slow disk must not hold up an evaluation


def describe_machine(device: object) -> dict[str, str]:
    """Return the fields of `RunInfo` that describe the machine and the source, for the device in use."""
    import torch

    kind, name = str(device), ""
    if kind.startswith("cuda"):
        name = torch.cuda.get_device_name(kind)
    elif kind.startswith("mps"):
        name = f"{platform.processor() or 'Apple'} GPU (mps)"
    affinity = getattr(os, "sched_getaffinity", None)  # what a container may use, where the system can tell
    cores = len(affinity(0)) if affinity else os.cpu_count()
    return {
        "device": name or f"cpu ({cores} cores)",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": source_commit(),
    }


def source_commit() -> str:
    """Return the commit of this source tree: EMOE_COMMIT, or that of git; with `-dirty` if src/ differs from it."""
    return os.environ.get("EMOE_COMMIT") or git_commit()


@functools.cache
def git_commit() -> str:
    """Return the commit as git reports it, called once in a process; `unknown` without git."""
    here = Path(__file__).resolve()

    def git(*words: str) -> str:
        command = ["git", "-C", str(here.parent), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=GIT_SECONDS).stdout.strip()

    try:
        root, commit = git("rev-parse", "--show-toplevel", "HEAD").splitlines()
        source = Path(root).resolve() / "src"
        if source in here.parents:
            return commit + "-dirty" * bool(git("status", "--porcelain", "--", str(source)))
    except (OSError, subprocess.SubprocessError):
        pass
    return "unknown"  # also for an installed copy inside some other repository
