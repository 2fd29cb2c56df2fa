"""Text to packed rows of tokens, in parallel, never with the corpus in memory, and never half a set.

The text is read in slices of a few MB; processes turn them into parts (see `work`) in a folder beside the target.
A run that was stopped finds its parts there. When all are made, they are put together: the tokens of all lines, each
followed by [CLS], are one stream for each split, which is cut into rows of L tokens. The target appears in one move.

    chunks   rows are L tokens of the stream
    wrap     rows are [CLS], L - 2 tokens of the stream, [CLS]

The tokens that fill no row at the end of a split are dropped. Nothing here imports torch.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import numpy as np

import emoe
from emoe.config import Config, ConfigError, option
from emoe.domains.text import work
from emoe.domains.text.detokenise import STYLES
from emoe.domains.text.reading import SPLITS, Note, Slice, Source, Split, find_sources, slices
from emoe.domains.text.tokens import Fault, Vocabulary, load_library, read_vocabulary
from emoe.domains.text.work import TOKEN, Counts, Settings

SCHEMA = 1
MANIFEST = "manifest.json"
Packing = Literal["chunks", "wrap"]
Errors = Literal["strict", "replace"]
Detokenise = Literal["auto", "lm1b", "wikitext", "none"]
AGAIN = "free space and run the same command again, it goes on where it stopped"
Progress = Callable[[int, int, int], None]
"""Told of every slice that is done: bytes of the files, the bytes of all files, bytes of the slice's text (0: kept)."""


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
    made: int = 0  # parts that were made


def prepare(
    out: Path,
    tokenizer: Path,
    inputs: Sequence[Path] = (),
    *,
    train: Sequence[Path] = (),
    valid: Sequence[Path] = (),
    test: Sequence[Path] = (),
    config: PrepareConfig | None = None,
    on_progress: Progress | None = None,
    note: Note | None = None,
) -> Prepared:
    """Write a set of rows: `train.bin`, `valid.bin`, `test.bin`, the tokenizer's file and `manifest.json`.

    Args:
        out: The folder of the set; it is made, and must not hold anything else.
        tokenizer: `vocab.txt`, `tokenizer.json`, or the folder of one.
        inputs: Files, archives and folders whose names tell the split; files whose names do not are for training.
        train: Files, archives and folders to train on.
        valid: Those to validate with.
        test: Those to test with.
        config: Everything else.
        on_progress: Told of every slice that is done.
        note: Told, in a line of text, what is left out or made again.

    Raises:
        ConfigError: Arguments that do not go together, or a library that is missing.
        DataError: Files that cannot be used; names the place and the remedy.
        SpaceError: The disk is full.
    """
    config = config or PrepareConfig()
    named: dict[str, Sequence[Path]] = {"": inputs, "train": train, "valid": valid, "test": test}
    try:
        return _prepare(out, tokenizer, named, config, on_progress or (lambda *_: None), note or (lambda _: None))
    except Fault as fault:
        from emoe.domains.base import DataError  # imports torch

        raise DataError(str(fault)) from None
    except OSError as error:
        if work.is_full(error):
            raise SpaceError(f"{error.filename or out}: the disk is full ({error.strerror}); {AGAIN}") from None
        raise


def _prepare(
    out: Path, tokenizer: Path, named: dict[str, Sequence[Path]], config: PrepareConfig, progress: Progress, note: Note
) -> Prepared:
    load_library()
    vocabulary = read_vocabulary(tokenizer)
    sources = find_sources(named, config.detokenise, note)
    _check_splits(sources, config)
    shares = None if config.split is None else (config.split[0], config.split[1])
    settings = Settings(
        str(vocabulary.path.resolve()), vocabulary.sha256, config.encoding_errors, shares, config.seed
    )  # fmt: skip
    folder = out.with_name(f".{out.name}.parts")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        same = _compare(out, sources, _head(vocabulary, config), config)
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was stopped in its very last moment
        return same
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder):
        _tell_changes(folder, sources, note)
        maker = _Maker(folder, settings, config, progress, note)
        with maker.at_work(sources):
            found = [maker.make(source) for source in sources]
        manifest = _assemble(out, folder, vocabulary, sources, found, config)
        shutil.rmtree(folder, ignore_errors=True)
    return Prepared(out, manifest, maker.kept, maker.made)


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
    """Hold the folder of the parts; the lock is freed when this process ends in any way."""
    with (folder / "lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Fault(f"{folder}: another run prepares this set; wait until it ends") from None
        yield


def _tell_changes(folder: Path, sources: Sequence[Source], note: Note) -> None:
    """Say which files are not what they were when a run was stopped; parts of another text are never used."""
    journal = folder / "inputs.json"
    try:
        before = dict(json.loads(journal.read_bytes()))
    except (OSError, ValueError, TypeError):
        before = {}
    stats = {str(source.path.resolve()): source.path.stat() for source in sources}
    now = {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}
    for name, seen in now.items():
        if before.get(name, seen) != seen:
            note(f"{name}: changed since the last run; its parts are made again where the text is another")
    work.write_whole(journal, json.dumps(before | now).encode())


class _Maker:
    """Makes the parts of all files: in this process, or with others, each of which has one slice at a time."""

    def __init__(self, folder: Path, settings: Settings, config: PrepareConfig, progress: Progress, note: Note):
        self.folder, self.settings, self.config, self.note = folder, settings, config, note
        self.progress, self.kept, self.made = progress, 0, 0
        self._total = 0
        self._tools: tuple[Any, Any] | None = None
        self._workers: list[Connection] = []
        self._busy: dict[Connection, Slice] = {}

    @contextmanager
    def at_work(self, sources: Sequence[Source]) -> Iterator[None]:
        """Processes at hand, which end with the block; all parts are made when it ends without an error."""
        self._total = sum(source.path.stat().st_size for source in sources)
        jobs = self.config.jobs or min(_cores(), 1 + self._total // self.config.slice_bytes)
        with ExitStack() as stack:
            if jobs > 1:
                self._workers = [stack.enter_context(_worker(self.settings, self.folder)) for _ in range(jobs)]
            yield
            while self._busy:
                self._collect()

    def make(self, source: Source) -> list[str]:
        """The keys of a file's parts, in order; the last ones may still be in the making."""
        keys = []
        for part in slices(source, self.config.slice_bytes, self.note):
            key = self.settings.key(part)
            keys.append(key)
            if work.read_counts(self.folder, key) is not None:
                self.kept += 1
                self.progress(part.cost, self._total, 0)
            else:
                self._make(part, key)
        return keys

    def _make(self, part: Slice, key: str) -> None:
        if not self._workers:
            self._tools = self._tools or work.make_tools(self.settings)
            work.write_part(part, key, self.settings, self._tools, self.folder)
            self._done(part)
            return
        while len(self._busy) == len(self._workers):
            self._collect()
        idle = next(worker for worker in self._workers if worker not in self._busy)
        self._busy[idle] = part
        try:
            idle.send((part, key))
        except OSError:
            raise self._lost(part) from None

    def _collect(self) -> None:
        for worker in wait(list(self._busy)):
            assert isinstance(worker, Connection)
            part = self._busy.pop(worker)
            try:
                failure = worker.recv()
            except (EOFError, OSError):
                raise self._lost(part) from None
            if failure is not None:
                raise failure
            self._done(part)

    def _done(self, part: Slice) -> None:
        self.made += 1
        self.progress(part.cost, self._total, len(part.text))

    def _lost(self, part: Slice) -> Fault:
        return Fault(
            f"{part.name}: a process that worked on line {part.line:,} and after died, perhaps for lack of memory; "
            "run the same command again, with fewer --jobs, it goes on where it stopped"
        )


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def _worker(settings: Settings, folder: Path) -> Iterator[Connection]:
    """A process of its own, which ends when its connection does: even if this process is killed."""
    mine, other = Pipe()
    # Not multiprocessing's own start: that imports the caller's script once more, and with it, perhaps, torch.
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "TOKENIZERS_PARALLELISM": "false",
    }
    with other:
        process = subprocess.Popen(
            [sys.executable, "-m", work.__name__, str(other.fileno())],
            pass_fds=[other.fileno()],
            env=environment,
            stdin=subprocess.DEVNULL,
        )
    try:
        with suppress(OSError):  # dead already: told when it is first given work
            mine.send((settings, str(folder)))
        yield mine
    finally:
        mine.close()
        process.terminate()
        process.wait()


def _head(vocabulary: Vocabulary, config: PrepareConfig) -> dict[str, Any]:
    """What a manifest says of everything but the text."""
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
    """A set that is there already is left alone if it is the one that was asked for."""
    other = Fault(f"{out}: holds something else; choose another --out, or remove it")
    try:
        manifest = json.loads((out / MANIFEST).read_bytes())
    except (OSError, ValueError):
        raise other from None
    for source in sources:
        with source.path.open("rb") as file:
            source.sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    try:
        same = all(manifest[name] == value for name, value in head.items())
        same = same and manifest["detokenise"] == config.detokenise
        same = same and [item["sha256"] for item in manifest["inputs"]] == [source.sha256 for source in sources]
    except (KeyError, TypeError):
        same = False
    if not same:
        raise other
    return Prepared(out, manifest)


def _assemble(
    out: Path,
    folder: Path,
    vocabulary: Vocabulary,
    sources: Sequence[Source],
    found: Sequence[list[str]],
    config: PrepareConfig,
) -> dict[str, Any]:
    """Put the parts together in a folder beside the target, and give it the target's name."""
    draft = out.with_name(f".{out.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        draft.mkdir(parents=True)
        inputs: list[dict[str, Any]] = [
            {
                "path": str(source.path),
                "size": source.size,
                "sha256": source.sha256,
                "detokenise": sorted(source.styles),
                "starts": {},
            }
            for source in sources
        ]
        splits = {}
        for split in SPLITS:
            with _Rows(draft / f"{split}.bin", vocabulary.special["cls"], config) as rows:
                for item, keys in zip(inputs, found, strict=True):
                    start = rows.counts.tokens
                    for key in keys:
                        rows.add(folder, key, split)
                    if rows.counts.tokens > start:
                        item["starts"][split] = start
            if rows.counts.tokens:
                splits[split] = rows.summary(split)
            else:
                rows.path.unlink()
        _check_rows(splits, config)
        shutil.copyfile(vocabulary.path, draft / vocabulary.path.name)
        manifest = _head(vocabulary, config) | {
            "detokenise": config.detokenise,
            "emoe": emoe.__version__,
            "tokenizers": str(load_library().__version__),
            "splits": splits,
            "inputs": inputs,
        }
        (draft / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        for path in (*draft.iterdir(), draft):
            _sync(path)
        os.replace(draft, out)
        _sync(out.parent)
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


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _Rows:
    """A file of rows that a stream of tokens fills."""

    def __init__(self, path: Path, separator: int, config: PrepareConfig):
        self.path, self.counts, self.rows = path, Counts(), 0
        self._separator, self._length, self._wrap = separator, config.length, config.packing == "wrap"
        self._fill = config.length - 2 if self._wrap else config.length
        self._rest = np.zeros(0, TOKEN)
        self._digest = hashlib.sha256()

    def __enter__(self) -> _Rows:
        self._file = self.path.open("wb")
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, folder: Path, key: str, split: Split) -> None:
        """Append what a part holds of a split."""
        counts = work.read_counts(folder, key)
        if counts is None:
            raise Fault(f"{folder / key}.bin: is damaged; run the same command again, it is made anew")
        before = sum(counts[one].tokens for one in SPLITS[: SPLITS.index(split)])
        tokens = np.fromfile(
            folder / f"{key}.bin", TOKEN, count=counts[split].tokens, offset=before * TOKEN.itemsize
        )  # fmt: skip
        self.counts += counts[split]
        stream = np.concatenate([self._rest, tokens])
        whole = len(stream) // self._fill
        rows, self._rest = stream[: whole * self._fill].reshape(whole, self._fill), stream[whole * self._fill :]
        if self._wrap:
            rows = np.pad(rows, ((0, 0), (1, 1)), constant_values=self._separator)
        data = rows.astype(TOKEN).tobytes()
        self._file.write(data)
        self._digest.update(data)
        self.rows += whole

    def summary(self, split: Split) -> dict[str, Any]:
        """What the manifest says of the file."""
        return {
            "file": f"{split}.bin",
            "rows": self.rows,
            "sha256": self._digest.hexdigest(),
            **vars(self.counts),
            "dropped": len(self._rest),
            "unknown_share": self.counts.unknown / self.counts.tokens,
        }
