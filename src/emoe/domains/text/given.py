"""Text to be completed: words with holes in them, read with the tokenizer that the set was made with.

`[MASK]` is a hole of one token, `{N}` of N tokens, `___` (three underscores or more) of all the room that is left in
the row. What follows the text up to the end of the row is wanted too, so a text without holes is continued.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from emoe.config import ConfigError
from emoe.domains.base import DataError
from emoe.domains.text.tokens import Encoder, Fault, Vocabulary, read_vocabulary
from emoe.types import TokenSpace

AGAIN = "prepare it again: emoe data prepare"
FILE = ".txt"
# A hole, or a special token by its name; [MASK] alone is a hole.
MARK = re.compile(r"\[MASK\]|\{(?P<count>\d{1,6})\}|(?P<rest>_{3,})|\[(?P<special>CLS|SEP|PAD|UNK)\]")

Report = Callable[[str], Exception]


def find_vocabulary(folder: Path, manifest: Mapping[str, Any]) -> Vocabulary:
    """The words of the tokenizer that a set was made with.

    Raises:
        DataError: Its file is missing, damaged or another one.
    """
    told = manifest["tokenizer"]
    try:
        found = read_vocabulary(folder / told["file"])
    except Fault as fault:
        raise DataError(str(fault)) from None
    if found.sha256 != told["sha256"]:
        raise DataError(f"{found.path}: is not the tokenizer the set was made with; {AGAIN}")
    return found


@functools.lru_cache(maxsize=2)
def _encoder(path: Path, sha256: str) -> Encoder:
    """The encoder of a tokenizer's file; `sha256` makes a file that has changed another one."""
    try:
        return Encoder(read_vocabulary(path))
    except Fault as fault:
        raise DataError(str(fault)) from None


def read_texts(source: str, folder: Path, manifest: Mapping[str, Any], space: TokenSpace) -> Int[Tensor, "m L"]:
    """Rows with the mask where a token is wanted.

    Args:
        source: A text with holes, or a .txt file with one such text in each line that is not empty.
        folder: The prepared set.
        manifest: What the set says of itself.
        space: The tokens there are.

    Raises:
        ConfigError: A text that does not fit, or the `tokenizers` package is missing.
        DataError: A file that is missing or holds no fitting text.
    """
    vocabulary = find_vocabulary(folder, manifest)
    encode = _encoder(vocabulary.path, vocabulary.sha256)
    # Rows of a wrapped set begin with [CLS], and a model of it has never seen another beginning.
    first = [vocabulary.special["cls"]] if manifest.get("packing") == "wrap" else []
    rows = []
    for text, report in _lines(source):
        found = [*first, *_pieces(text, vocabulary, encode, report)]
        rows.append(_fill(found, vocabulary, space, report))
    return torch.tensor(rows)


def _lines(source: str) -> list[tuple[str, Report]]:
    """Texts, each with what makes an error out of a complaint about it."""
    if not source.lower().endswith(FILE):
        told = source if len(source) <= 40 else f"{source[:37]}..."
        return [(source, lambda fault: ConfigError([f"given: {told!r}: {fault}"]))]
    path = Path(source)
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise DataError(f"{path}: {what}; --given takes a text, or a {FILE} file with one text in a line")
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as text ({error}); save it as UTF-8") from None

    def reporter(number: int) -> Report:
        return lambda fault: DataError(f"{path}: line {number}: {fault}")

    found = [(line, reporter(number)) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise DataError(
            f"{path}: holds no text; write one in a line, with [MASK], {{N}} or ___ where tokens are wanted"
        )
    return found


def _pieces(text: str, vocabulary: Vocabulary, encode: Encoder, report: Report) -> list[int | None]:
    """Tokens of the words, the mask for each token of a hole, and None for all the room that is left."""
    found: list[int | None] = []
    place = 0
    for mark in MARK.finditer(text):
        found += encode([text[place : mark.start()]])[0]
        place = mark.end()
        if mark["rest"]:
            found.append(None)
        elif name := mark["special"]:
            if name.lower() not in vocabulary.special:
                raise report(f"the tokenizer has no [{name}]")
            found.append(vocabulary.special[name.lower()])
        else:
            found += [vocabulary.special["mask"]] * int(mark["count"] or 1)
    found += encode([text[place:]])[0]
    if found.count(None) > 1:
        raise report("has more than one ___, which stands for all the room that is left; write {N} for N tokens")
    return found


def _fill(found: list[int | None], vocabulary: Vocabulary, space: TokenSpace, report: Report) -> list[int]:
    """A row of L tokens: the room that is left is wanted, where the text says or behind it."""
    taken, mask = sum(token is not None for token in found), vocabulary.special["mask"]
    left = space.length - taken
    if left < 0:
        raise report(f"takes {taken} tokens with its holes, but a row has {space.length}; shorten it")
    if None not in found:
        found = [*found, None]
    return [one for token in found for one in ([mask] * left if token is None else [token])]
