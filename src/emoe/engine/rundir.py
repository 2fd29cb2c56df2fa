"""One trainer for each run folder: a lock that the kernel frees when its holder dies."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from emoe.files import StorageError

_HELD: dict[Path, int] = {}  # folder -> the thread of this process that holds it


class RunBusy(RuntimeError):  # noqa: N818 - names a state of the folder
    """Another process works in the run folder."""

    exit_code: ClassVar[int] = 2


@contextlib.contextmanager
def run_lock(run_dir: Path) -> Iterator[None]:
    """Hold `run.lock` in a run folder, made when missing; the file contains the holder's pid.

    The thread that holds a folder can enter it again. The lock belongs to the open file, not to the file's existence:
    nothing stale is left after SIGKILL. The file itself stays, since removing it would let a third process lock a new
    file of the same name.
    """
    folder, thread = run_dir.resolve(), threading.get_ident()
    if _HELD.get(folder) == thread:
        yield
        return
    descriptor = _lock(run_dir)
    _HELD[folder] = thread
    try:
        yield
    finally:
        del _HELD[folder]
        os.close(descriptor)


def _lock(run_dir: Path) -> int:
    path = run_dir / "run.lock"
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise StorageError(path, f"cannot be opened ({error.strerror})", "give a writable folder") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    except OSError as error:
        pid = os.pread(descriptor, 32, 0).decode().strip()
        os.close(descriptor)
        if not isinstance(error, BlockingIOError):
            raise StorageError(path, f"cannot be locked ({error.strerror})", "use a disk that has locks") from error
        holder = f"process {pid}" if pid.isdigit() else "another process"
        message = f"{run_dir}: in use by {holder}; wait until it ends, stop it, or choose another folder"
        raise RunBusy(message) from None
    return descriptor
