"""Text to be completed: words with holes in them, read with the tokenizer that the set was made with.

`[MASK]` is a hole of one token, `{N}` of N tokens, `___` (three underscores or more) of all the room that is left in
the row. The positions behind the text are wanted too, so a text without holes is continued.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor

from emoe.config import ConfigError
from emoe.domains.base import DataError
from emoe.domains.text.tokens import Encoder, Fault, Vocabulary
from emoe.types import TokenSpace

FILE = ".txt"
# A hole, or a special token by its name; [MASK] alone is a hole.
MARK = re.compile(r"\[MASK\]|\{(?P<count>\d{1,6})\}|(?P<rest>_{3,})|\[(?P<special>CLS|SEP|PAD|UNK)\]")

Fail = Callable[[str], Exception]  # makes an error of a message


@functools.lru_cache(maxsize=2)
def _encoder(vocabulary: Vocabulary) -> Encoder:
    try:
        return Encoder(vocabulary)
    except Fault as fault:
        raise DataError(str(fault)) from None


def read_texts(source: str, vocabulary: Vocabulary, space: TokenSpace, *, wrap: bool) -> Int[Tensor, "m L"]:
    """Rows with the mask where a token is wanted, of a text or of each line in a .txt file that is not empty.

    With `wrap` they begin with [CLS], as those of a wrapped set: its models have never seen another beginning.
    """
    first: list[int | None] = [vocabulary.special["cls"]] if wrap else []
    return torch.tensor(
        [_fill(first + _pieces(text, vocabulary, fail), vocabulary, space, fail) for text, fail in _lines(source)]
    )


def _lines(source: str) -> list[tuple[str, Fail]]:
    """Texts, each with a function that makes an error of a message about it."""
    if not source.lower().endswith(FILE):
        shown = source if len(source) <= 40 else f"{source[:37]}..."
        return [(source, lambda fault: ConfigError([f"given: {shown!r}: {fault}"]))]
    path = Path(source)
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise DataError(f"{path}: {what}; --given takes a text, or a {FILE} file with one text in a line")
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as text ({error}); save it as UTF-8") from None

    def fail(number: int) -> Fail:
        return lambda fault: DataError(f"{path}: line {number}: {fault}")

    texts = [(line, fail(number)) for number, line in enumerate(lines, 1) if line.strip()]
    if not texts:
        marks = "[MASK], {N} or ___"
        raise DataError(f"{path}: holds no text; write one in a line, with {marks} where tokens are wanted")
    return texts


def _pieces(text: str, vocabulary: Vocabulary, fail: Fail) -> list[int | None]:
    """Tokens of the words, the mask for each token of a hole, and None for all the room that is left."""
    encode, tokens = _encoder(vocabulary), list[int | None]()
    start = 0
    for mark in MARK.finditer(text):
        tokens += encode([text[start : mark.start()]])[0]
        start = mark.end()
        if mark["rest"]:
            tokens.append(None)
        elif name := mark["special"]:
            if name.lower() not in vocabulary.special:
                raise fail(f"the tokenizer has no [{name}]")
            tokens.append(vocabulary.special[name.lower()])
        else:
            tokens += [vocabulary.special["mask"]] * int(mark["count"] or 1)
    tokens += encode([text[start:]])[0]
    if tokens.count(None) > 1:
        raise fail("has more than one ___, which stands for all the room that is left; write {N} for N tokens")
    return tokens


def _fill(tokens: list[int | None], vocabulary: Vocabulary, space: TokenSpace, fail: Fail) -> list[int]:
    """A row of L tokens: the room that is left is wanted, where the text says or behind it."""
    taken, mask = sum(token is not None for token in tokens), vocabulary.special["mask"]
    left = space.length - taken
    if left < 0:
        raise fail(f"takes {taken} tokens with its holes, but a row has {space.length}; shorten it")
    if None not in tokens:
        tokens = [*tokens, None]
    return [one for token in tokens for one in ([mask] * left if token is None else [token])]
