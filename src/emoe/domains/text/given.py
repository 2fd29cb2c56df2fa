"""Text to be completed: words with holes in them, read with the tokenizer that the set was made with.

`[MASK]` is a hole of one token, `{N}` of N tokens, `___` (three underscores or more) of all the room that is left in
the row. The positions behind the text are wanted too, so a text without holes is continued.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor

from emoe.domains import DataError, check_file, naming
from emoe.domains.text.tokens import Encoder, Vocabulary
from emoe.types import TokenSpace

# A hole, or a special token by its name; [MASK] alone is a hole.
MARK = re.compile(r"\[MASK\]|\{(?P<count>\d{1,6})\}|(?P<rest>_{3,})|\[(?P<special>CLS|SEP|PAD|UNK)\]")

encoder = functools.lru_cache(maxsize=2)(Encoder)


def read_texts(source: str, vocabulary: Vocabulary, space: TokenSpace, *, wrap: bool) -> Int[Tensor, "m L"]:
    """Rows with the mask where a token is wanted, of a text or of each line in a .txt file that is not empty.

    With `wrap` they begin with [CLS], as those of a wrapped set do.
    """
    encoder(vocabulary)  # a tokenizer that cannot be used is no fault of the text
    if not source.lower().endswith(".txt"):
        with naming(source, typed=True):
            return torch.tensor([_read_text(source, vocabulary, space, wrap)])
    path, rows = Path(source), []
    check_file(path, "--given takes a text, or a .txt file with one text in a line")
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as text ({error}); save it as UTF-8") from None
    for number, line in enumerate(lines, 1):
        with naming(f"{path}: line {number}"):
            rows += [_read_text(line, vocabulary, space, wrap)] if line.strip() else []
    if not rows:
        marks = "[MASK], {N} or ___"
        raise DataError(f"{path}: holds no text; write one in a line, with {marks} where tokens are wanted")
    return torch.tensor(rows)


def _read_text(text: str, vocabulary: Vocabulary, space: TokenSpace, wrap: bool) -> list[int]:
    """A row of L tokens; `___` takes the room that is left, without it the end of the row does."""
    encode, special = encoder(vocabulary), vocabulary.special
    tokens, room, start = [special["cls"]] * wrap, list[int](), 0  # room: index of ___
    for mark in MARK.finditer(text):
        tokens += next(encode([text[start : mark.start()]]))
        start = mark.end()
        if mark["rest"]:
            room.append(len(tokens))
        elif name := mark["special"]:
            if name.lower() not in special:
                raise DataError(f"the tokenizer has no [{name}]")
            tokens.append(special[name.lower()])
        else:
            tokens += [special["mask"]] * int(mark["count"] or 1)
    tokens += next(encode([text[start:]]))
    if len(room) > 1:
        raise DataError("has more than one ___, which stands for all the room that is left; write {N} for N tokens")
    left = space.length - len(tokens)
    if left < 0:
        raise DataError(f"takes {len(tokens)} tokens with its holes, but a row has {space.length}; shorten it")
    at = room[0] if room else len(tokens)
    return tokens[:at] + [special["mask"]] * left + tokens[at:]
