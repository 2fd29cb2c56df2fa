"""Slices of text as parts: files of tokens that worker processes write and a stopped run uses again.

A part has a SHA-256, a line with the numbers of tokens and documents of each split as JSON, and the tokens of one split
after the other. Its name is a hash of everything that decides the tokens, the text itself included. Nothing here
imports torch.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from emoe.domains import DataError
from emoe.domains.text.detokenise import RULES
from emoe.domains.text.reading import SPLITS, Slice, Split
from emoe.domains.text.tokens import Encoder, Vocabulary, read_vocabulary
from emoe.files import replace_file

TOKEN = np.dtype("<u2")


class Settings(NamedTuple):
    """The settings that decide the tokens of a text."""

    tokenizer: str  # path of its file
    sha256: str  # of that file
    errors: str  # "strict" or "replace": bytes that are not UTF-8
    shares: tuple[float, ...] | None  # of documents of training files that go to valid and test
    seed: int  # of that choice

    def key(self, part: Slice) -> str:
        """The name of a slice's part."""
        shares = self.shares if part.split == "train" else None
        settings = [self.sha256, self.errors, shares, self.seed if shares else 0, part.split, part.style, part.lone]
        return hashlib.sha256(json.dumps(settings).encode() + b"\n" + part.text).hexdigest()


@functools.lru_cache(maxsize=1)
def _tools(settings: Settings) -> tuple[Vocabulary, Encoder]:
    vocabulary = read_vocabulary(Path(settings.tokenizer))
    if vocabulary.sha256 != settings.sha256:
        raise DataError(f"{settings.tokenizer}: changed while it was in use; run again")
    return vocabulary, Encoder(vocabulary)


def write_part(part: Slice, path: Path, settings: Settings) -> None:
    """Encode a slice, each line followed by [CLS], and write its part; an `OSError` leaves nothing of it."""
    vocabulary, encoder = _tools(settings)
    tokens, documents = {split: array("H") for split in SPLITS}, dict.fromkeys(SPLITS, 0)
    lines: list[tuple[Split, str]] = []
    for document in _documents(_decode(part, settings.errors), part.lone):
        split = _choose(document, part.split, settings)
        documents[split] += 1
        lines += [(split, RULES[part.style](line)) for line in document]
    for (split, _), ids in zip(lines, encoder([line for _, line in lines]), strict=True):
        if ids:
            tokens[split].extend([*ids, vocabulary.special["cls"]])
    if any(vocabulary.special["mask"] in stream for stream in tokens.values()):
        remedy = "use one that does not, such as vocab.txt"
        raise DataError(f"{part.name}: the tokenizer makes [MASK] out of a text; {remedy}")
    counts = [(len(tokens[split]), documents[split]) for split in SPLITS]
    content = json.dumps(counts).encode() + b"\n"
    content += b"".join(np.array(tokens[split], TOKEN).tobytes() for split in SPLITS)
    replace_file(path, hashlib.sha256(content).digest() + content)


def read_part(path: Path) -> dict[Split, tuple[int, NDArray[np.uint16]]] | None:
    """Number of documents and tokens of each split in a part; None if it is missing or damaged."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
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


def _choose(document: list[str], split: Split, settings: Settings) -> Split:
    """The split of a document: that of its file, or for training files one that a hash of the document decides."""
    if split != "train" or settings.shares is None:
        return split
    text = "\n".join([str(settings.seed), *document, ""]).encode("utf-8", errors="replace")
    draw = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") / 2**64
    valid, test = settings.shares
    return "valid" if draw < valid else "test" if draw < valid + test else "train"
