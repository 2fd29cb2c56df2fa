"""Prepare rows of tokens from text, in parallel and with bounded memory; a set is written whole or not at all.

The text is read in slices of a few MB. Threads encode them (the library does so without Python's lock) and write each
as a part, a file in a folder beside the target, which a stopped run uses again. Then the tokens of all lines, each
followed by [CLS], are one stream for each split. It is cut into rows of L tokens (`chunks`), or of [CLS], L - 2 tokens
and [CLS] (`wrap`); tokens that fill no row at the end are dropped. The target appears in one move. Nothing here imports
torch.

A part has a SHA-256, a line with the numbers of tokens and documents of each split as JSON, and the tokens of one split
after the other. Its name is a hash of everything that decides the tokens, the text itself included.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import emoe
from emoe import files as storage
from emoe.config import ConfigError, to_dict
from emoe.domains import DataError
from emoe.domains.text import PrepareConfig
from emoe.domains.text.reading import SPLITS, Note, Slice, Source, Split, find_sources, sha256_of, slices
from emoe.domains.text.tokens import Encoder, Vocabulary, detokenise, load_library, read_vocabulary
from emoe.files import StorageError

SCHEMA = 1
MANIFEST = "manifest.json"
TOKEN = np.dtype("<u2")
MOST_JOBS = 16  # more threads than this wait for Python's lock
AGAIN = "run the same command again, it goes on where it stopped"
Progress = Callable[[int, int], None]  # called after every slice: bytes of the files it took, bytes of all files
Paths = Sequence[Path]
Sources = Sequence[Source]


class Prepared(NamedTuple):
    """A set that is written."""

    path: Path
    manifest: dict[str, Any]
    kept: int = 0  # parts of a stopped run that were used
    made: int = 0  # parts that were written


def prepare(
    out: Path,
    tokenizer: Path,
    inputs: Paths = (),
    *,
    train: Paths = (),
    valid: Paths = (),
    test: Paths = (),
    config: PrepareConfig | None = None,
    on_progress: Progress = lambda *_: None,
    note: Note = lambda _: None,
) -> Prepared:
    """Write a set of rows into `out`: `train.bin`, `valid.bin`, `test.bin`, the tokenizer's file and `manifest.json`.

    `inputs` are files, archives and folders whose names give the split (train if they give none); `train`, `valid` and
    `test` are those of one split. `note` gets lines about files that are left out. Faults are a `ConfigError` (of the
    arguments, or a missing library), a `DataError` (of files) or a `StorageError`.
    """
    config = config or PrepareConfig()
    load_library()
    vocabulary = read_vocabulary(tokenizer)
    sources = find_sources({None: inputs, "train": train, "valid": valid, "test": test}, config.detokenise, note)
    _check_splits(sources, config)
    folder = out.with_name(f".{out.name}.parts")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        done = _compare(out, sources, _head(vocabulary, config))
    else:
        storage.prepare(out.parent)
        try:
            with storage.run_lock(folder):
                made = _write_parts(folder, vocabulary, sources, config, on_progress, note)
                manifest = _assemble(out, vocabulary, sources, config)
        except OSError as error:
            problem = f"cannot be written ({error.strerror or error})"
            raise StorageError(Path(error.filename or folder), problem, f"free space and {AGAIN}") from None
        done = Prepared(out, manifest, sum(len(source.parts) for source in sources) - made, made)
    shutil.rmtree(folder, ignore_errors=True)
    return done


def _check_splits(sources: Sources, config: PrepareConfig) -> None:
    splits = {source.split for source in sources}
    if not sources:
        raise ConfigError(["inputs: none are given; name files or folders, or --train, --valid and --test"])
    if None not in splits and "train" not in splits:
        raise ConfigError(["train: no file is for training by its name; give some: --train FILES"])
    if splits == {"train"} and config.split is None:
        raise ConfigError(["split: nothing is held out; give --valid or --test, or shares: --split 0.005,0.005"])


def _write_parts(
    folder: Path, vocabulary: Vocabulary, sources: Sources, config: PrepareConfig, on_progress: Progress, note: Note
) -> int:
    """Write the parts that are missing; returns their number."""
    encoder, total, made = Encoder(vocabulary), sum(source.path.stat().st_size for source in sources), 0
    jobs = config.jobs or min(MOST_JOBS, os.cpu_count() or 1)
    begun, pending = set[Path](), deque[tuple[int, Future[bool]]]()

    def collect(most: int) -> None:
        nonlocal made
        while len(pending) > most:
            cost, future = pending.popleft()
            made += future.result()
            on_progress(cost, total)

    with ThreadPoolExecutor(jobs) as pool:
        for source in sources:
            for part in slices(source, config.slice_bytes, note):
                path = folder / _name(part, vocabulary, config)
                source.parts.append(path)
                if path not in begun:  # equal slices have one part
                    begun.add(path)
                    pending.append((part.cost, pool.submit(_write_part, path, part, vocabulary, encoder, config)))
                    collect(jobs)  # bounds the slices in memory
        collect(0)
    return made


def _name(part: Slice, vocabulary: Vocabulary, config: PrepareConfig) -> str:
    shares, seed = (config.split, config.seed) if part.split == "train" and config.split else (None, 0)
    settings = [vocabulary.sha256, config.encoding_errors, shares, seed, part.split, part.style, part.lone]
    return hashlib.sha256(json.dumps(settings).encode() + b"\n" + part.text).hexdigest()


def _write_part(path: Path, part: Slice, vocabulary: Vocabulary, encoder: Encoder, config: PrepareConfig) -> bool:
    """Encode a slice, each line followed by [CLS], and write its part; returns whether there was something to do."""
    if _read_part(path) is not None:
        return False
    tokens, documents = {split: array("H") for split in SPLITS}, dict.fromkeys(SPLITS, 0)
    lines: list[tuple[Split, str]] = []
    for document in _documents(_decode(part, config.encoding_errors), part.lone):
        split = _choose(document, part.split, config)
        documents[split] += 1
        lines += [(split, detokenise(line, part.style)) for line in document]
    for (split, _), ids in zip(lines, encoder([line for _, line in lines]), strict=True):
        if ids:
            tokens[split].extend([*ids, vocabulary.special["cls"]])
    if any(vocabulary.special["mask"] in stream for stream in tokens.values()):
        remedy = "use one that does not, such as vocab.txt"
        raise DataError(f"{part.name}: the tokenizer makes [MASK] out of a text; {remedy}")
    content = json.dumps([(len(tokens[split]), documents[split]) for split in SPLITS]).encode() + b"\n"
    content += b"".join(np.array(tokens[split], TOKEN).tobytes() for split in SPLITS)
    storage.replace_file(path, hashlib.sha256(content).digest() + content)
    return True


def _read_part(path: Path) -> dict[Split, tuple[int, NDArray[np.uint16]]] | None:
    """Number of documents and tokens of each split in a part; None if it is missing or damaged."""
    data = path.read_bytes() if path.exists() else b""
    if hashlib.sha256(data[32:]).digest() != data[:32]:
        return None
    head, _, content = data[32:].partition(b"\n")
    sizes, documents = zip(*json.loads(head), strict=True)
    tokens = np.split(np.frombuffer(content, TOKEN), np.cumsum(sizes)[:-1])
    return dict(zip(SPLITS, zip(documents, tokens, strict=True), strict=True))


def _decode(part: Slice, errors: str) -> str:
    text = part.text
    if errors == "replace":
        return text.decode("utf-8", errors="replace")
    wrong, reason = text.find(b"\0"), "holds a zero byte, so it is no UTF-8 text (UTF-16?)"
    try:
        if wrong < 0:
            return text.decode("utf-8")
    except UnicodeDecodeError as error:
        wrong, reason = error.start, f"is not UTF-8 ({error.reason}: 0x{text[error.start]:02x})"
    line = part.line + text.count(b"\n", 0, wrong)
    raise DataError(
        f"{part.name}: line {line:,}, byte {part.offset + wrong:,} {reason}; convert the file "
        "(iconv -t utf-8), or let a mark stand in its place: --encoding-errors replace"
    )


def _documents(text: str, lone: bool) -> Iterator[list[str]]:
    """Lists of lines without the blanks around them; empty lines are left out."""
    for has_words, lines in itertools.groupby(map(str.strip, text.split("\n")), bool):
        if has_words and lone:
            yield from ([line] for line in lines)
        elif has_words:
            yield list(lines)


def _choose(document: list[str], split: Split, config: PrepareConfig) -> Split:
    """The split of a document: that of its file, or for training files one that a hash of the document decides."""
    if split != "train" or config.split is None:
        return split
    text = "\n".join([str(config.seed), *document, ""]).encode("utf-8", errors="replace")
    draw = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") / 2**64
    valid, test = config.split
    return "valid" if draw < valid else "test" if draw < valid + test else "train"


def _head(vocabulary: Vocabulary, config: PrepareConfig) -> dict[str, Any]:
    """The part of a manifest that does not depend on the text."""
    # A tokenizer.json brings rules of its own.
    lowercase = vocabulary.lowercase if vocabulary.path.suffix != ".json" else None
    tokenizer = {"file": vocabulary.path.name, "sha256": vocabulary.sha256, "lowercase": lowercase}
    head = {"schema": SCHEMA, "tokenizer": tokenizer, "size": len(vocabulary.words), "special": vocabulary.special}
    names = ("length", "packing", "split", "seed", "encoding_errors", "detokenise")
    return head | {name: to_dict(config)[name] for name in names}


def _compare(out: Path, sources: Sources, head: dict[str, Any]) -> Prepared:
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


def _assemble(out: Path, vocabulary: Vocabulary, sources: Sources, config: PrepareConfig) -> dict[str, Any]:
    """Put the parts together in a temporary folder, which becomes the target; returns the manifest."""
    size = sum(path.stat().st_size for source in sources for path in source.parts)
    with storage.new_folder(out, size) as draft:
        entries = {split: _write_rows(draft, split, sources, vocabulary, config) for split in SPLITS}
        splits = {split: entry for split, entry in entries.items() if entry}
        _check_rows(splits, config)
        inputs = [
            {"path": str(source.path), "size": source.size, "sha256": source.sha256, "starts": source.starts}
            | {"detokenise": sorted(source.styles)}
            for source in sources
        ]
        shutil.copyfile(vocabulary.path, draft / vocabulary.path.name)
        versions = {"emoe": emoe.__version__, "tokenizers": str(load_library().__version__)}
        manifest = _head(vocabulary, config) | versions | {"splits": splits, "inputs": inputs}
        (draft / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        for path in draft.iterdir():
            storage.sync_folder(path)
    return manifest


def _write_rows(
    folder: Path, split: Split, sources: Sources, vocabulary: Vocabulary, config: PrepareConfig
) -> dict[str, Any]:
    """Write the rows of a split and note where each source starts; returns an entry of the manifest, {} if empty."""
    path, special, margin = folder / f"{split}.bin", vocabulary.special, int(config.packing == "wrap")
    width, rest, counts = config.length - 2 * margin, np.zeros(0, TOKEN), Counter[str]()
    with path.open("wb") as file:
        for source, part in ((one, part) for one in sources for part in one.parts):
            content = _read_part(part)
            if content is None:
                raise DataError(f"{part}: is damaged; {AGAIN}")
            documents, tokens = content[split]
            if len(tokens):
                source.starts.setdefault(split, counts["tokens"])
            lines, unknown = (int(np.count_nonzero(tokens == special[word])) for word in ("cls", "unk"))
            stream = np.concatenate([rest, tokens])
            rows = stream[: len(stream) // width * width].reshape(-1, width)
            rest = stream[rows.size :]
            file.write(np.pad(rows, ((0, 0), (margin, margin)), constant_values=special["cls"]).astype(TOKEN).tobytes())
            counts.update(rows=len(rows), tokens=len(tokens), lines=lines, documents=documents, unknown=unknown)
    if not counts["tokens"]:
        path.unlink()
        return {}
    share = {"dropped": len(rest), "unknown_share": counts["unknown"] / counts["tokens"]}
    return {"file": path.name, "sha256": sha256_of(path), **counts, **share}


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
