"""Text to packed rows of tokens, in parallel, never with the corpus in memory, and never half a set.

The text is read in slices of a few MB; worker processes turn them into parts (see `parts`) in a folder beside the
target. A run that was stopped uses its parts again. Once all are written, the tokens of all lines, each followed by
[CLS], are one stream for each split. It is cut into rows of L tokens (`chunks`), or of [CLS], L - 2 tokens and [CLS]
(`wrap`); tokens that fill no row at the end are dropped. The target appears in one move. Nothing here imports torch.
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
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

import emoe
from emoe.config import Config, ConfigError, option, to_dict
from emoe.domains import DataError
from emoe.domains.text.detokenise import Detokenise
from emoe.domains.text.parts import TOKEN, Counts, Settings, read_part, write_part
from emoe.domains.text.reading import SPLITS, Note, Slice, Source, find_sources, sha256_of, slices
from emoe.domains.text.tokens import Vocabulary, load_library, read_vocabulary
from emoe.files import StorageError, sync_folder

SCHEMA = 1
MANIFEST = "manifest.json"
Packing = Literal["chunks", "wrap"]
Errors = Literal["strict", "replace"]
AGAIN = "run the same command again, it goes on where it stopped"
# Called after every slice: bytes of the files, the bytes of all files, bytes of the slice's text (0: kept).
Progress = Callable[[int, int, int], None]
Paths = Sequence[Path]


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
        choices = {"packing": Packing, "encoding_errors": Errors, "detokenise": Detokenise}
        for name, allowed in choices.items():
            if getattr(self, name) not in get_args(allowed):
                yield f"{name}: {getattr(self, name)!r} is not known; allowed: {', '.join(get_args(allowed))}"
        if self.split is not None and (len(self.split) != 2 or not any(self.split)):
            yield "split: give two shares, of valid and of test, one of them above 0: 0.005,0.005"


class Prepared(NamedTuple):
    """A set that is written."""

    path: Path
    manifest: dict[str, Any]
    kept: int = 0  # parts of a stopped run that were used
    made: int = 0  # parts that were written


def prepare(
    out: Path, tokenizer: Path, inputs: Paths = (), *, train: Paths = (), valid: Paths = (), test: Paths = (),
    config: PrepareConfig | None = None, on_progress: Progress = lambda *_: None, note: Note = lambda _: None,
) -> Prepared:  # fmt: skip
    """Write a set of rows: `train.bin`, `valid.bin`, `test.bin`, the tokenizer's file and `manifest.json`.

    Faults are a `ConfigError` (of the arguments, or a missing library), a `DataError` (of files) or a `StorageError`.

    Args:
        out: The folder of the set; it is made, and must not hold anything else.
        tokenizer: `vocab.txt`, `tokenizer.json`, or the folder of one.
        inputs: Files, archives and folders whose names say the split; files whose names do not are for training.
        train: Files, archives and folders to train on.
        valid: The same to validate with.
        test: The same to test with.
        config: Everything else.
        on_progress: Called after every slice.
        note: Gets lines about files that are left out.
    """
    config = config or PrepareConfig()
    try:
        load_library()
        vocabulary = read_vocabulary(tokenizer)
        sources = find_sources({None: inputs, "train": train, "valid": valid, "test": test}, config.detokenise, note)
        _check_splits(sources, config)
        folder = out.with_name(f".{out.name}.parts")
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            done = _compare(out, sources, _head(vocabulary, config))
        else:
            folder.mkdir(parents=True, exist_ok=True)
            with _alone(folder):
                kept = _write_parts(folder, vocabulary, sources, config, on_progress, note)
                manifest = _assemble(out, vocabulary, sources, config)
            done = Prepared(out, manifest, kept, sum(len(source.parts) for source in sources) - kept)
        shutil.rmtree(folder, ignore_errors=True)
        return done
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        problem = f"the disk is full ({error.strerror})"
        raise StorageError(Path(error.filename or out), problem, f"free space and {AGAIN}") from None


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
            raise DataError(f"{folder}: another run prepares this set; wait until it ends") from None
        yield


def _write_parts(
    folder: Path, vocabulary: Vocabulary, sources: Sequence[Source], config: PrepareConfig, progress: Progress,
    note: Note,
) -> int:  # fmt: skip
    """Write the parts of each file that are not there; returns how many were kept."""
    tokenizer = str(vocabulary.path.resolve())
    settings = Settings(tokenizer, vocabulary.sha256, config.encoding_errors, config.split, config.seed)
    total, kept = sum(source.path.stat().st_size for source in sources), 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    jobs = config.jobs or min(cores, 1 + total // config.slice_bytes)
    pending: dict[Future[None], Slice] = {}

    def collect(most: int) -> None:
        while len(pending) > most:
            for future in wait(pending, return_when=FIRST_COMPLETED).done:
                future.result()
                part = pending.pop(future)
                progress(part.cost, total, len(part.text))

    spawn = multiprocessing.get_context("spawn")
    pool = ThreadPoolExecutor(1) if jobs == 1 else ProcessPoolExecutor(jobs, spawn, _start_worker)
    try:
        for source in sources:
            for part in slices(source, config.slice_bytes, note):
                path = folder / settings.key(part)
                source.parts.append(path)
                if read_part(path) is not None:
                    kept += 1
                    progress(part.cost, total, 0)
                else:
                    pending[pool.submit(write_part, part, path, settings)] = part
                    collect(jobs if jobs > 1 else 0)  # bounds the slices in memory
        collect(0)
    except BrokenProcessPool:
        lost = next(iter(pending.values()), part)  # the oldest one, or the one that no worker took
        raise DataError(
            f"{lost.name}: a worker process died at line {lost.line:,} or after it, perhaps for lack of memory; "
            f"{AGAIN}, with fewer --jobs (a script of your own needs `if __name__ == '__main__':`)"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)
    return kept


def _start_worker() -> None:
    """Leave Ctrl-C to the parent process, and end with it even if it is killed."""

    def end_with_parent() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=end_with_parent, daemon=True).start()


def _head(vocabulary: Vocabulary, config: PrepareConfig) -> dict[str, Any]:
    """The part of a manifest that does not depend on the text."""
    # A tokenizer.json brings rules of its own.
    lowercase = vocabulary.lowercase if vocabulary.path.suffix != ".json" else None
    tokenizer = {"file": vocabulary.path.name, "sha256": vocabulary.sha256, "lowercase": lowercase}
    head = {"schema": SCHEMA, "tokenizer": tokenizer, "size": len(vocabulary.words), "special": vocabulary.special}
    names = ("length", "packing", "split", "seed", "encoding_errors", "detokenise")
    return head | {name: to_dict(config)[name] for name in names}


def _compare(out: Path, sources: Sequence[Source], head: dict[str, Any]) -> Prepared:
    """The set that is there already, if it is the one that was asked for."""
    try:
        manifest = json.loads((out / MANIFEST).read_bytes())
        same = all(manifest[name] == value for name, value in head.items())
        same = same and [item["sha256"] for item in manifest["inputs"]] == [sha256_of(one.path) for one in sources]
    except (OSError, ValueError, KeyError, TypeError):
        same = False
    if not same:
        raise DataError(f"{out}: holds something else; choose another --out, or remove it")
    return Prepared(out, manifest)


def _assemble(out: Path, vocabulary: Vocabulary, sources: Sequence[Source], config: PrepareConfig) -> dict[str, Any]:
    """Put the parts together in a folder beside the target, and give it the target's name."""
    draft = out.with_name(f".{out.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, draft, ignore_errors=True)
        opened = {split: stack.enter_context((draft / f"{split}.bin").open("wb")) for split in SPLITS}
        files = {split: _Rows(file, vocabulary, config) for split, file in opened.items()}
        inputs = []
        for source in sources:
            before = {split: rows.counts.tokens for split, rows in files.items()}
            for path in source.parts:
                part = read_part(path)
                if part is None:
                    raise DataError(f"{path}: is damaged; {AGAIN}")
                for split, (counts, tokens) in part.items():
                    files[split].add(counts, tokens)
            starts = {split: start for split, start in before.items() if files[split].counts.tokens > start}
            entry = {"path": str(source.path), "size": source.size, "sha256": source.sha256}
            inputs.append(entry | {"detokenise": sorted(source.styles), "starts": starts})
        splits = {split: {"file": f"{split}.bin"} | rows.finish() for split, rows in files.items() if any(rows.counts)}
        for split in set(SPLITS) - set(splits):
            (draft / f"{split}.bin").unlink()
        _check_rows(splits, config)
        shutil.copyfile(vocabulary.path, draft / vocabulary.path.name)
        versions = {"emoe": emoe.__version__, "tokenizers": str(load_library().__version__)}
        manifest = _head(vocabulary, config) | versions | {"splits": splits, "inputs": inputs}
        (draft / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        for path in (*draft.iterdir(), draft):
            sync_folder(path)
        os.replace(draft, out)
        sync_folder(out.parent)
    return manifest


def _check_rows(splits: Mapping[Any, dict[str, Any]], config: PrepareConfig) -> None:
    if "train" not in splits:
        raise DataError("train: holds no text; give training files with --train")
    if len(splits) == 1:
        raise DataError("valid and test: both are empty; give --valid or --test, or larger shares: --split 0.05,0.05")
    for name, split in splits.items():
        if not split["rows"]:
            raise DataError(
                f"{name}: {split['tokens']:,} tokens do not fill one row of {config.length}; "
                "give more text, a larger share with --split, or a smaller --length"
            )


class _Rows:
    """A file of rows that a stream of tokens fills."""

    def __init__(self, file: IO[bytes], vocabulary: Vocabulary, config: PrepareConfig):
        self.counts, self.rows, self._file = Counts(), 0, file
        self._separator, self._margin = vocabulary.special["cls"], int(config.packing == "wrap")
        self._width = config.length - 2 * self._margin
        self._rest: NDArray[np.uint16] = np.zeros(0, TOKEN)
        self._digest = hashlib.sha256()

    def add(self, counts: Counts, tokens: NDArray[np.uint16]) -> None:
        """Append the tokens of a part."""
        self.counts = Counts(*map(sum, zip(self.counts, counts, strict=True)))
        stream = np.concatenate([self._rest, tokens])
        whole = len(stream) // self._width
        rows, self._rest = stream[: whole * self._width].reshape(whole, self._width), stream[whole * self._width :]
        data = np.pad(rows, ((0, 0), (self._margin,) * 2), constant_values=self._separator).astype(TOKEN).tobytes()
        self._file.write(data)
        self._digest.update(data)
        self.rows += whole

    def finish(self) -> dict[str, Any]:
        """Close the file; the manifest's entry of it."""
        self._file.close()
        share = {"dropped": len(self._rest), "unknown_share": self.counts.unknown / self.counts.tokens}
        return {"rows": self.rows, "sha256": self._digest.hexdigest(), **self.counts._asdict(), **share}
