"""Tokens of a slice of text, written as a part: what each of the processes that prepare text does.

A part is `KEY.bin`, the tokens of the slice for each split, one split after the other, and `KEY.json` with their
numbers and the SHA-256 of the tokens. KEY is a hash of everything that decides the tokens, the text itself included:
a part that is there and whole need not be made again, wherever its text now lies. Nothing here imports torch.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import sys
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from emoe.config import ConfigError
from emoe.domains.text.detokenise import rule
from emoe.domains.text.reading import SPLITS, Slice, Split
from emoe.domains.text.tokens import Encoder, Fault, Vocabulary, read_vocabulary

LUMP = 1 << 18  # characters the tokenizer gets at a time
TOKEN = np.dtype("<u2")


@dataclass(frozen=True)
class Settings:
    """What decides the tokens of a text, besides the text."""

    tokenizer: str  # path of its file
    sha256: str  # of that file
    errors: str  # "strict" or "replace": bytes that are not UTF-8
    shares: tuple[float, float] | None  # of documents of training files that go to valid and test
    seed: int  # of that choice

    def key(self, part: Slice) -> str:
        """The name of a slice's part."""
        shares = self.shares if part.split == "train" else None
        told = [self.sha256, self.errors, shares, self.seed if shares else 0, part.split, part.style, part.lone]
        return hashlib.sha256(json.dumps(told).encode() + b"\n" + part.text).hexdigest()


@dataclass(frozen=True)
class Counts:
    """How much of a split a slice holds."""

    tokens: int = 0
    lines: int = 0
    documents: int = 0
    unknown: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


def encode(part: Slice, settings: Settings, vocabulary: Vocabulary, encoder: Encoder) -> dict[Split, tuple[array, int]]:
    """Split -> tokens, each line followed by [CLS], and the number of documents.

    Raises:
        Fault: Bytes that are no text.
    """
    tokens = {split: array("H") for split in SPLITS}
    documents = dict.fromkeys(SPLITS, 0)
    separator, mask = vocabulary.special["cls"], vocabulary.special["mask"]
    detokenise = rule(part.style)
    lump: list[tuple[Split, str]] = []

    def flush() -> None:
        for (split, _), ids in zip(lump, encoder([line for _, line in lump]), strict=True):
            if ids:
                tokens[split].extend(ids)
                tokens[split].append(separator)
        lump.clear()

    held = 0
    for document in _documents(_decode(part, settings), part.lone):
        split = _choose(document, part.split, settings)
        documents[split] += 1
        for line in document:
            lump.append((split, detokenise(line) if detokenise else line))
            held += len(line)
            if held >= LUMP:
                flush()
                held = 0
    flush()
    if any(mask in found for found in tokens.values()):
        raise Fault(f"{part.name}: the tokenizer makes [MASK] out of a text; use one that does not, such as vocab.txt")
    return {split: (tokens[split], documents[split]) for split in SPLITS}


def _decode(part: Slice, settings: Settings) -> str:
    text = part.text
    if settings.errors == "strict":
        wrong = text.find(b"\0")
        reason = "holds a zero byte, so it is no UTF-8 text (UTF-16?)"
        try:
            if wrong < 0:
                return text.decode("utf-8")
        except UnicodeDecodeError as error:
            wrong, reason = error.start, f"is not UTF-8 ({error.reason}: 0x{text[error.start]:02x})"
        line = part.line + text.count(b"\n", 0, wrong)
        raise Fault(
            f"{part.name}: line {line:,}, byte {part.offset + wrong:,} {reason}; convert the file "
            "(iconv -t utf-8), or let a mark stand in its place: --encoding-errors replace"
        )
    return text.decode("utf-8", errors="replace")


def _documents(text: str, lone: bool) -> Iterator[list[str]]:
    """Lists of lines without the blanks around them; empty lines are left out."""
    document: list[str] = []
    for line in text.split("\n"):
        line = line.strip()
        if line:
            document.append(line)
        if document and (lone or not line):
            yield document
            document = []
    if document:
        yield document


def _choose(document: list[str], split: Split, settings: Settings) -> Split:
    """The split of a document: that of its file, or for training files one that a hash of the document decides."""
    if split != "train" or settings.shares is None:
        return split
    digest = hashlib.blake2b(f"{settings.seed}\n".encode(), digest_size=8)
    for line in document:
        digest.update(line.encode("utf-8", errors="replace") + b"\n")
    place = int.from_bytes(digest.digest(), "big") / 2**64
    valid, test = settings.shares
    return "valid" if place < valid else "test" if place < valid + test else "train"


def write_part(part: Slice, key: str, settings: Settings, tools: tuple[Vocabulary, Encoder], folder: Path) -> None:
    """Encode a slice and write its part; the part has its name only when it is whole.

    Raises:
        Fault: Bytes that are no text.
        OSError: It cannot be written; nothing is left of it.
    """
    found = encode(part, settings, *tools)
    unknown, separator = (tools[0].special[name] for name in ("unk", "cls"))
    content, counts = [], {}
    for split, (tokens, documents) in found.items():
        ids = np.frombuffer(tokens, np.uint16) if tokens else np.zeros(0, np.uint16)
        content.append(ids.astype(TOKEN).tobytes())
        lines, strange = (int(np.count_nonzero(ids == word)) for word in (separator, unknown))
        counts[split] = vars(Counts(len(ids), lines, documents, strange))
    data = b"".join(content)
    sidecar = {"sha256": hashlib.sha256(data).hexdigest(), "counts": counts}
    write_whole(folder / f"{key}.bin", data)
    write_whole(folder / f"{key}.json", json.dumps(sidecar).encode())


def read_counts(folder: Path, key: str) -> dict[Split, Counts] | None:
    """What a part holds; None if it is not there or not whole."""
    try:
        sidecar = json.loads((folder / f"{key}.json").read_bytes())
        with (folder / f"{key}.bin").open("rb") as file:
            whole = hashlib.file_digest(file, "sha256").hexdigest() == sidecar["sha256"]
        return {split: Counts(**sidecar["counts"][split]) for split in SPLITS} if whole else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that has its name only when it is whole; what was written before an error is removed."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_bytes(data)
        os.replace(draft, path)
    except OSError as error:
        raise type(error)(error.errno, error.strerror, str(path)) from None
    finally:
        draft.unlink(missing_ok=True)


def is_full(error: OSError) -> bool:
    """Whether a disk or a quota is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def make_tools(settings: Settings) -> tuple[Vocabulary, Encoder]:
    """The tokenizer, made sure to be the one that was meant."""
    vocabulary = read_vocabulary(Path(settings.tokenizer))
    if vocabulary.sha256 != settings.sha256:
        raise Fault(f"{settings.tokenizer}: changed while it was in use; run again")
    return vocabulary, Encoder(vocabulary)


def serve(connection: Connection) -> None:
    """Answer (slice, key) with None or an error until the other end is gone, for whatever reason."""
    tools = None
    try:
        settings, folder = connection.recv()
        while True:
            part, key = connection.recv()
            failure: Exception | None = None
            try:
                tools = tools or make_tools(settings)
                write_part(part, key, settings, tools, Path(folder))
            except (Fault, OSError, ConfigError) as error:
                failure = error
            connection.send(failure)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one decides
    serve(Connection(int(sys.argv[1])))
