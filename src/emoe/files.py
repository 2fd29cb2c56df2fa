"""Files that are whole or absent after a kill at any moment: synced writes, sealed JSON, folder locks, clean-up."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

DAMAGED = "use an older checkpoint or restore this one from a copy"


class StorageError(RuntimeError):
    """Files that cannot be written or are damaged; names the path and the remedy."""

    exit_code: ClassVar[int] = 5

    def __init__(self, path: Path, problem: str, remedy: str):
        super().__init__(f"{path}: {problem}; {remedy}")


class NewerSchemaError(RuntimeError):
    """An intact file of a later version, which must not be replaced by falling back to an older file."""

    exit_code: ClassVar[int] = 5


class RunBusy(RuntimeError):  # noqa: N818 - names a state of the folder
    """Another process works in the run folder."""

    exit_code: ClassVar[int] = 2


def fault(stage: str) -> None:
    """Exit if a test has set `EMOE_FAULT=save:<stage>`; a stage is a file name or a moment."""
    if os.environ.get("EMOE_FAULT") == f"save:{stage}":
        os._exit(137)


def write_synced(path: Path, data: bytes) -> None:
    """Write a file and wait until it is on the disk."""
    with open(path, "wb") as stream:
        stream.write(data)
        fault(path.name)
        stream.flush()
        os.fsync(stream.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder (new files, renames) are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: str | Path, data: bytes | str) -> None:
    """Write a file, as UTF-8 if it is text, so that after a crash at any moment it has the old content or the new."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".tmp-{path.name}-{os.getpid()}")
    try:
        write_synced(temporary, data.encode() if isinstance(data, str) else data)
        os.replace(temporary, path)
        sync_folder(path.parent)  # without it the rename may be lost in a power cut
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def new_folder(path: Path, size: int) -> Iterator[Path]:
    """A temporary folder for `size` bytes, which is renamed to `path` at the end, and removed after an error."""
    temporary = path.with_name(f".tmp-{path.name}-{os.getpid()}")
    try:
        temporary.mkdir()
        yield temporary
        sync_folder(temporary)
        fault("before-rename")
        temporary.rename(path)
        sync_folder(path.parent)
    except OSError as error:
        problem = f"cannot be written, {size} bytes needed ({error})"
        raise StorageError(path, problem, "free space or make the folder writable, then try again") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def locked(folder: str | Path) -> Iterator[None]:
    """Lock a folder for a read-change-write, without a file; others that lock it wait."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)  # closing releases the lock


@contextlib.contextmanager
def run_lock(run_dir: Path) -> Iterator[None]:
    """Lock `run.lock` in a run folder, which is made when missing; the file contains the pid of this process.

    The lock belongs to the open file, so a killed process leaves none. The file stays: if it were removed, a third
    process could lock a new file of the same name.
    """
    path = run_dir / "run.lock"
    with contextlib.ExitStack() as stack:
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
        yield


def write_sealed(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON whose first line is the SHA-256 of all bytes after it."""
    rest = json.dumps(content, indent=1, sort_keys=True).encode()[1:].lstrip()
    write_synced(path, _seal(rest) + b"\n" + rest)


def read_sealed(path: Path, schema: int, remedy: str = DAMAGED) -> dict[str, Any]:
    """Read a file of `write_sealed` in a schema up to this one; a single changed bit is an error."""
    head, _, rest = _read(path, remedy).partition(b"\n")
    if head != _seal(rest):
        raise StorageError(path, "is damaged: its SHA-256 does not match", remedy)
    try:
        content = dict(json.loads(b"{" + rest))
        newer = content["schema"] > schema
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise StorageError(path, f"is no JSON object with a schema ({error!r})", remedy) from error
    if newer:
        raise NewerSchemaError(
            f"{path}: has schema {content['schema']}, this version reads up to {schema}; update emoe"
        )
    return content


def _seal(rest: bytes) -> bytes:
    # Later schemas must keep this line, or they would be reported as damage instead of as a newer version.
    return b'{"sha256": "%s",' % hashlib.sha256(rest).hexdigest().encode()


def read_verified(path: Path, sha256: str, remedy: str = DAMAGED) -> bytes:
    """The bytes of a file, whose SHA-256 is checked."""
    data = _read(path, remedy)
    if hashlib.sha256(data).hexdigest() != sha256:
        raise StorageError(path, "is damaged: its SHA-256 does not match", remedy)
    return data


def _read(path: Path, remedy: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StorageError(path, f"cannot be read ({error.strerror})", remedy) from error


def prepare(root: Path) -> None:
    """Make a folder, remove temporary files and folders of dead processes, and raise an error if it is not writable."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        for entry in root.glob(".tmp-*-*"):
            pid = entry.name.rpartition("-")[2]
            if pid.isdecimal() and (int(pid) == os.getpid() or not _is_alive(int(pid))):
                if entry.is_dir():
                    shutil.rmtree(entry, ignore_errors=True)
                else:
                    entry.unlink(missing_ok=True)
        with tempfile.TemporaryFile(dir=root) as probe:
            probe.write(b"probe")
    except OSError as error:
        problem = f"cannot be written to ({error.strerror})"
        raise StorageError(root, problem, "free space or give a folder that is writable") from error


def discard(folder: Path) -> None:
    """Remove a folder, which is renamed first: a kill leaves no part of it under its name."""
    doomed = folder.with_name(f".tmp-old-{folder.name}-{os.getpid()}")
    folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True
