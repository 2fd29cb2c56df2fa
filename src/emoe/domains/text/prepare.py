"""Text to packed rows of tokens, in parallel, never with the corpus in memory, and never half a set.

The text is read in slices of a few MB; worker processes turn them into parts (see `parts`) in a folder beside the
target. A run that was stopped uses its parts again. Once all are written, the tokens of all lines, each followed by
[CLS], are one stream for each split, which is cut into rows of L tokens. The target appears in one move.

    chunks   rows are L tokens of the stream
    wrap     rows are [CLS], L - 2 tokens of the stream, [CLS]

The tokens that fill no row at the end of a split are dropped. Nothing here imports torch.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import numpy as np
from numpy.typing import NDArray

import emoe
from emoe.config import Config, ConfigError, option
from emoe.domains.text.detokenise import STYLES
from emoe.domains.text.parts import TOKEN, Counts, Settings, read_part, write_part
from emoe.domains.text.reading import SPLITS, Note, Slice, Source, Split, find_sources, sha256_of, slices
from emoe.domains.text.tokens import Fault, Vocabulary, load_library, read_vocabulary
from emoe.files import replace_file, sync_folder

SCHEMA = 1
MANIFEST = "manifest.json"
Packing = Literal["chunks", "wrap"]
Errors = Literal["strict", "replace"]
Detokenise = Literal["auto", "lm1b", "wikitext", "none"]
AGAIN = "run the same command again, it goes on where it stopped"
Progress = Callable[[int, int, int], None]
"""Called after every slice: bytes of the files, the bytes of all files, bytes of the slice's text (0: kept)."""


class SpaceError(RuntimeError):
    """The disk is full."""

    exit_code: ClassVar[int] = 5


@dataclass(frozen=True, kw_only=True)
class PrepareConfig(Config):
    """How text becomes rows."""

    length: int = option(128, doc="tokens of a row", low=3, high=65_536)
    packing: Packing = option("chunks", doc="chunks, or wrap: [CLS] at both ends of a row")
    split: tuple[float, ...] | None = option(
        None, doc="shares of the documents of training files for valid and test", low=0, high=0.5
    )
    detokenise: Detokenise = option("auto", doc="undo the spacing of lm1b or wikitext; auto: by the names of the files")
    encoding_errors: Errors = option("strict", doc="bytes that are not UTF-8: an error, or replace them by a mark")
    seed: int = option(0, doc="seed of the split", low=0)
    jobs: int | None = option(None, doc="processes; none = one for each core", low=1, high=256)
    slice_bytes: int = option(4 << 20, doc="bytes of text that are worked on at a time", low=16, high=1 << 28)

    def conflicts(self) -> Iterator[str]:
        """Choices that are not known, and shares that are no pair."""
        for name, allowed in (
            ("packing", get_args(Packing)),
            ("detokenise", ("auto", *STYLES)),
            ("encoding_errors", get_args(Errors)),
        ):
            if getattr(self, name) not in allowed:
                yield f"{name}: {getattr(self, name)!r} is not known; allowed: {', '.join(allowed)}"
        if self.split is not None and (len(self.split) != 2 or not any(self.split)):
            yield "split: give two shares, of valid and of test, one of them above 0: 0.005,0.005"


@dataclass(frozen=True)
class Prepared:
    """A finished set."""

    path: Path
    manifest: dict[str, Any]
    kept: int = 0  # parts of a stopped run that were used
    made: int = 0  # parts that were written


def prepare(
    out: Path,
    tokenizer: Path,
    inputs: Sequence[Path] = (),
    *,
    train: Sequence[Path] = (),
    valid: Sequence[Path] = (),
    test: Sequence[Path] = (),
    config: PrepareConfig | None = None,
    on_progress: Progress = lambda *_: None,
    note: Note = lambda _: None,
) -> Prepared:
    """Write a set of rows: `train.bin`, `valid.bin`, `test.bin`, the tokenizer's file and `manifest.json`.

    Args:
        out: The folder of the set; it is made, and must not hold anything else.
        tokenizer: `vocab.txt`, `tokenizer.json`, or the folder of one.
        inputs: Files, archives and folders whose names say the split; files whose names do not are for training.
        train: Files, archives and folders to train on.
        valid: Those to validate with.
        test: Those to test with.
        config: Everything else.
        on_progress: Called after every slice.
        note: Gets lines about files that are left out or read again.

    Raises:
        ConfigError: Arguments that do not go together, or a library that is missing.
        DataError: Files that cannot be used; names the position and the remedy.
        SpaceError: The disk is full.
    """
    config = config or PrepareConfig()
    try:
        load_library()
        vocabulary = read_vocabulary(tokenizer)
        sources = find_sources({"": inputs, "train": train, "valid": valid, "test": test}, config.detokenise, note)
        _check_splits(sources, config)
        folder = out.with_name(f".{out.name}.parts")
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            done = _compare(out, sources, _head(vocabulary, config), config)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            with _alone(folder):
                _note_changes(folder, sources, note)
                keys, kept = _write_parts(folder, vocabulary, sources, config, on_progress, note)
                manifest = _assemble(out, folder, vocabulary, dict(zip(sources, keys, strict=True)), config)
            done = Prepared(out, manifest, kept, sum(map(len, keys)) - kept)
        shutil.rmtree(folder, ignore_errors=True)
        return done
    except Fault as fault:
        from emoe.domains.base import DataError  # imports torch

        raise DataError(str(fault)) from None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            full = f"{error.filename or out}: the disk is full ({error.strerror}); free space and {AGAIN}"
            raise SpaceError(full) from None
        raise


def _check_splits(sources: Sequence[Source], config: PrepareConfig) -> None:
    splits = {source.split for source in sources}
    if not sources:
        raise ConfigError(["inputs: none are given; name files or folders, or --train, --valid and --test"])
    if None not in splits and "train" not in splits:
        raise ConfigError(["train: no file is for training by its name; say so: --train FILES"])
    if splits == {"train"} and config.split is None:
        raise ConfigError(["split: nothing is held out; give --valid or --test, or shares: --split 0.005,0.005"])


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Lock the folder of the parts until this process ends in any way."""
    with (folder / "lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Fault(f"{folder}: another run prepares this set; wait until it ends") from None
        yield


def _note_changes(folder: Path, sources: Sequence[Source], note: Note) -> None:
    """Name the files that have changed since a run was stopped; parts of another text are never used."""
    journal = folder / "inputs.json"
    try:
        before = dict(json.loads(journal.read_bytes()))
    except (OSError, ValueError, TypeError):
        before = {}
    stats = {str(source.path.resolve()): source.path.stat() for source in sources}
    now = {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}
    for name, stat in now.items():
        if before.get(name, stat) != stat:
            note(f"{name}: changed since the last run; its parts are made again where the text is another")
    replace_file(journal, json.dumps(before | now))


# --- Parts


def _write_parts(
    folder: Path, vocabulary: Vocabulary, sources: Sequence[Source], config: PrepareConfig, progress: Progress,
    note: Note,
) -> tuple[list[list[str]], int]:  # fmt: skip
    """Write the parts that are not there; returns the keys of each file's parts in order, and how many were kept."""
    shares = None if config.split is None else (config.split[0], config.split[1])
    path = str(vocabulary.path.resolve())
    settings = Settings(path, vocabulary.sha256, config.encoding_errors, shares, config.seed)
    total, kept = sum(source.path.stat().st_size for source in sources), 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    jobs = config.jobs or min(cores, 1 + total // config.slice_bytes)
    keys: list[list[str]] = [[] for _ in sources]
    pending: dict[Future[None], Slice] = {}

    def collect(most: int) -> None:
        while len(pending) > most:
            for future in wait(pending, return_when=FIRST_COMPLETED).done:
                future.result()
                part = pending.pop(future)
                progress(part.cost, total, len(part.text))

    try:
        with _workers(jobs) as executor:
            for source, names in zip(sources, keys, strict=True):
                for part in slices(source, config.slice_bytes, note):
                    names.append(settings.key(part))
                    if read_part(folder, names[-1]) is not None:
                        kept += 1
                        progress(part.cost, total, 0)
                    else:
                        pending[executor.submit(write_part, part, names[-1], settings, folder)] = part
                        collect(jobs if jobs > 1 else 0)  # bounds the slices in memory
            collect(0)
    except BrokenProcessPool:
        lost = next(iter(pending.values()), part)  # the oldest one, or the one that no worker took
        raise Fault(
            f"{lost.name}: a worker process died at line {lost.line:,} or after it, perhaps for lack of memory; "
            f"{AGAIN}, with fewer --jobs (a script of your own needs `if __name__ == '__main__':`)"
        ) from None
    return keys, kept


class _Inline(Executor):
    """Runs calls in this process."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


@contextmanager
def _workers(jobs: int) -> Iterator[Executor]:
    if jobs == 1:
        yield _Inline()
        return
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _start_worker)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker() -> None:
    """Leave Ctrl-C to the parent process, and end with it even if it is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()


# --- The set


def _head(vocabulary: Vocabulary, config: PrepareConfig) -> dict[str, Any]:
    """The part of a manifest that does not depend on the text."""
    return {
        "schema": SCHEMA,
        "tokenizer": {
            "file": vocabulary.path.name,
            "sha256": vocabulary.sha256,
            # A tokenizer.json brings rules of its own.
            "lowercase": vocabulary.lowercase if vocabulary.path.suffix != ".json" else None,
        },
        "size": vocabulary.size,
        "special": vocabulary.special,
        "length": config.length,
        "packing": config.packing,
        "split": None if config.split is None else list(config.split),
        "seed": config.seed,
        "encoding_errors": config.encoding_errors,
    }


def _compare(out: Path, sources: Sequence[Source], head: dict[str, Any], config: PrepareConfig) -> Prepared:
    """The set that is there already, if it is the one that was asked for."""
    wanted = head | {"detokenise": config.detokenise}
    try:
        manifest = json.loads((out / MANIFEST).read_bytes())
        same = all(manifest[name] == value for name, value in wanted.items())
        same = same and [item["sha256"] for item in manifest["inputs"]] == [sha256_of(one.path) for one in sources]
    except (OSError, ValueError, KeyError, TypeError):
        same = False
    if not same:
        raise Fault(f"{out}: holds something else; choose another --out, or remove it")
    return Prepared(out, manifest)


def _assemble(
    out: Path, folder: Path, vocabulary: Vocabulary, keys: Mapping[Source, list[str]], config: PrepareConfig
) -> dict[str, Any]:
    """Put the parts together in a folder beside the target, and give it the target's name."""
    draft = out.with_name(f".{out.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        draft.mkdir(parents=True)
        starts: dict[Source, dict[Split, int]] = {}
        with ExitStack() as stack:
            files = {split: stack.enter_context(_Rows(draft, split, vocabulary, config)) for split in SPLITS}
            for source, names in keys.items():
                before = {split: rows.counts.tokens for split, rows in files.items()}
                for key in names:
                    part = read_part(folder, key)
                    if part is None:
                        raise Fault(f"{folder / key}.bin: is damaged; {AGAIN}")
                    for split, (counts, tokens) in part.items():
                        files[split].add(counts, tokens)
                starts[source] = {split: n for split, n in before.items() if files[split].counts.tokens > n}
        splits = {split: rows.summary() for split, rows in files.items() if rows.counts.tokens}
        for split in set(SPLITS) - set(splits):
            files[split].path.unlink()
        _check_rows(splits, config)
        shutil.copyfile(vocabulary.path, draft / vocabulary.path.name)
        manifest = _head(vocabulary, config) | {
            "detokenise": config.detokenise,
            "emoe": emoe.__version__,
            "tokenizers": str(load_library().__version__),
            "splits": splits,
            "inputs": [
                {
                    "path": str(source.path),
                    "size": source.size,
                    "sha256": source.sha256,
                    "detokenise": sorted(source.styles),
                    "starts": starts[source],
                }
                for source in keys
            ],
        }
        (draft / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        for path in (*draft.iterdir(), draft):
            sync_folder(path)
        os.replace(draft, out)
        sync_folder(out.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return manifest


def _check_rows(splits: Mapping[Split, dict[str, Any]], config: PrepareConfig) -> None:
    if "train" not in splits:
        raise Fault("train: holds no text; give training files with --train")
    if len(splits) == 1:
        raise Fault("valid and test: both are empty; give --valid or --test, or larger shares: --split 0.05,0.05")
    for name, split in splits.items():
        if not split["rows"]:
            raise Fault(
                f"{name}: {split['tokens']:,} tokens do not fill one row of {config.length}; "
                "give more text, a larger share with --split, or a smaller --length"
            )


class _Rows:
    """A file of rows that a stream of tokens fills."""

    def __init__(self, folder: Path, split: Split, vocabulary: Vocabulary, config: PrepareConfig):
        self.path, self.counts, self.rows = folder / f"{split}.bin", Counts(), 0
        self._separator, self._margin = vocabulary.special["cls"], int(config.packing == "wrap")
        self._width = config.length - 2 * self._margin
        self._rest: NDArray[np.uint16] = np.zeros(0, TOKEN)
        self._digest = hashlib.sha256()

    def __enter__(self) -> _Rows:
        self._file = self.path.open("wb")
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, counts: Counts, tokens: NDArray[np.uint16]) -> None:
        """Append the tokens of a part."""
        self.counts += counts
        stream = np.concatenate([self._rest, tokens])
        whole = len(stream) // self._width
        rows, self._rest = stream[: whole * self._width].reshape(whole, self._width), stream[whole * self._width :]
        data = np.pad(rows, ((0, 0), (self._margin,) * 2), constant_values=self._separator).astype(TOKEN).tobytes()
        self._file.write(data)
        self._digest.update(data)
        self.rows += whole

    def summary(self) -> dict[str, Any]:
        """The manifest's entry of the file."""
        return {
            "file": self.path.name,
            "rows": self.rows,
            "sha256": self._digest.hexdigest(),
            **vars(self.counts),
            "dropped": len(self._rest),
            "unknown_share": self.counts.unknown / self.counts.tokens,
        }
