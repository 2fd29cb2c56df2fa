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
    folder, thread, path = run_dir.resolve(), threading.get_ident(), run_dir / "run.lock"
    with contextlib.ExitStack() as stack:
        if _HELD.get(folder) != thread:
            try:
                run_dir.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context(open(path, "a+"))
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                file.truncate(0)
                print(os.getpid(), file=file, flush=True)
            except BlockingIOError:
                file.seek(0)
                holder = f"process {pid}" if (pid := file.read().strip()) else "another process"
                remedy = "wait until it ends, stop it, or choose another folder"
                raise RunBusy(f"{run_dir}: in use by {holder}; {remedy}") from None
            except OSError as error:
                remedy = "give a writable folder on a disk that has locks"
                raise StorageError(path, f"cannot be locked ({error.strerror})", remedy) from error
            _HELD[folder] = thread
            stack.callback(_HELD.pop, folder)
        yield
