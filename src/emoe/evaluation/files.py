"""Small text files that several processes may write: whole or not at all, one writer at a time."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


def write_atomically(path: str | Path, text: str) -> None:
    """Write a text file so that a reader, or a crash at any moment, sees the old bytes or the new ones."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        # newline="" keeps "\n" on every platform: equal results must be equal bytes.
        with open(temporary, "w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # without it the rename itself may be lost with the power
    finally:
        os.close(folder)


@contextlib.contextmanager
def locked(folder: str | Path) -> Iterator[None]:
    """Hold a folder for a read-change-write; others that lock it wait. It leaves no file behind."""
    import fcntl

    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)  # closing gives the lock back
