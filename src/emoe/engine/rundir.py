"""One trainer for each run folder: a lock that the kernel frees when its holder dies."""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path
from typing import ClassVar

from emoe.files import StorageError


class RunBusy(RuntimeError):  # noqa: N818 - names a state of the folder
    """Another process works in the run folder."""

    exit_code: ClassVar[int] = 2

    def __init__(self, run_dir: Path, pid: int | None):
        holder = "another process" if pid is None else f"process {pid}"
        super().__init__(f"{run_dir}: in use by {holder}; wait until it ends, stop it, or choose another folder")
        self.pid = pid


class RunLock:
    """Holds `run.lock` in a run folder for the length of a `with` block; the file contains the holder's pid.

    The thread that holds a folder can enter it again. The lock belongs to the open file, not to the file's existence:
    nothing stale is left after SIGKILL. The file itself stays, since removing it would let a third process lock a new
    file of the same name.
    """

    _held: ClassVar[dict[Path, int]] = {}  # folder -> thread

    def __init__(self, run_dir: Path):
        self.run_dir = run_dir
        self._descriptor: int | None = None

    def __enter__(self) -> RunLock:
        path = self.run_dir / "run.lock"
        try:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            if self._held.get(self.run_dir.resolve()) == threading.get_ident():
                return self
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise StorageError(path, f"cannot be opened ({error.strerror})", "give a writable folder") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        except BlockingIOError:
            pid = os.pread(descriptor, 32, 0).strip()
            os.close(descriptor)
            raise RunBusy(self.run_dir, int(pid) if pid.isdigit() else None) from None
        except OSError as error:
            os.close(descriptor)
            raise StorageError(path, f"cannot be locked ({error.strerror})", "use a disk that has locks") from error
        self._descriptor = descriptor
        self._held[self.run_dir.resolve()] = threading.get_ident()
        return self

    def __exit__(self, *_: object) -> None:
        if self._descriptor is not None:
            self._held.pop(self.run_dir.resolve(), None)
            os.close(self._descriptor)
            self._descriptor = None
