"""Text as tokens and back, by WordPiece vocabularies from a `vocab.txt` or `tokenizer.json`.

Only encoding needs the `tokenizers` library. Before it the spacing of released corpora is undone, in two styles.
`lm1b`: the One Billion Word benchmark has a space around every sign (`" I ca n't , " she said .`). The rules are those
that papers on diffusion language models use, in their order; some signs keep their space. `wikitext`: joins what
WikiText cut inside numbers and compounds (`1 @,@ 000`, `well @-@ known`). Nothing here imports torch.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from emoe.config import ConfigError
from emoe.domains import DataError, check_file, readable

Style = Literal["lm1b", "wikitext", "none"]

FILES = ("tokenizer.json", "vocab.txt")
BATCH = 512  # lines that the library gets at a time
LARGEST = 1 << 16  # symbols a uint16 can tell apart
SPECIAL = ("pad", "unk", "cls", "sep", "mask")  # written [PAD] and so on
NEEDED = ("unk", "cls", "mask")
# Replacements of Hugging Face's clean_up_tokenization, in its order.
CLEAN_UP = [(f" {mark}", mark) for mark in ".?!,"] + [(" ' ", "'")]
CLEAN_UP += [(f" {end}", end) for end in ("n't", "'m", "'s", "'ve", "'re")]
# Patterns and their replacements, in order. A sign takes the space after it along; the last one of a line has none.
RULES: dict[Style, list[tuple[str, str]]] = {
    "lm1b": [
        (r"(https?) : / / ", r"\1://"),
        (r" '(?=\w)", "'"),
        (r"( \w+) \. ", r"\1. "),
        (r"( \w+) \.$", r"\1."),
        (r" \? ", "? "),
        (r" \?$", "?"),
        (" ! ", "! "),
        (" !$", "!"),
        *((f" {sign} ", f"{sign} ") for sign in ",:;"),
        (" / ", "/"),
        (r'" ([^"]+) "', r'"\1"'),
        (r"' ([^']+) '", r"'\1'"),
        (r"\( ([^()]+) \)", r"(\1)"),
        (r"\[ ([^][]+) \]", r"[\1]"),
        (r"([$£]) ", r"\1"),
    ],
    "wikitext": [(r" @([-,.])@ ", r"\1")],
    "none": [],
}
_COMPILED = {style: [(re.compile(old), new) for old, new in rules] for style, rules in RULES.items()}


@dataclass(frozen=True)
class Vocabulary:
    """The words of a tokenizer by number, with the numbers of its special ones."""

    path: Path
    sha256: str
    words: tuple[str, ...]
    special: dict[str, int] = field(hash=False)  # of "pad", "unk", "cls", "sep", "mask": those that there are

    @property
    def lowercase(self) -> bool:
        """Whether no word has a capital letter, apart from names in brackets: text is then lower-cased first."""
        return not any(word != word.lower() for word in self.words if not re.fullmatch(r"\[.*\]", word))

    def decode(self, ids: list[int]) -> str:
        """Tokens as text, equal to that of Hugging Face's BertTokenizer with special tokens kept."""
        text = " ".join(self.words[i] for i in ids).replace(" ##", "")
        for old, new in CLEAN_UP:
            text = text.replace(old, new)
        return text


def read_vocabulary(path: Path) -> Vocabulary:
    """Read and check a `vocab.txt` with one word a line, a `tokenizer.json` with a WordPiece model, or its folder."""
    if path.is_dir():
        files = [path / name for name in FILES if (path / name).is_file()]
        if not files:
            raise DataError(f"{path}: holds neither {' nor '.join(FILES)}; give the file or folder of a BERT tokenizer")
        path = files[0]
    check_file(path, "--tokenizer takes a vocab.txt, a tokenizer.json or their folder")
    with readable(path, "give a whole copy"):
        content = path.read_bytes()
        words = _from_json(path, content) if path.suffix == ".json" else _from_lines(path, content)
    if min(words, default=0) < 0 or max(words, default=0) >= LARGEST:
        problem = f"numbers words from {min(words):,} to {max(words):,}"
        raise DataError(f"{path}: {problem}; tokens are stored in 16 bits, so 0..{LARGEST - 1:,} are allowed")
    listed = tuple(words.get(number, f"[no word {number}]") for number in range(max(words, default=-1) + 1))
    special = {name: listed.index(tag) for name in SPECIAL if (tag := f"[{name.upper()}]") in listed}
    if missing := [f"[{name.upper()}]" for name in NEEDED if name not in special]:
        raise DataError(f"{path}: has no {', '.join(missing)}; give the vocabulary of a BERT tokenizer")
    return Vocabulary(path, hashlib.sha256(content).hexdigest(), listed, special)


def _from_lines(path: Path, content: bytes) -> dict[int, str]:
    numbers: dict[str, int] = {}
    for number, line in enumerate(content.decode("utf-8").removesuffix("\n").split("\n")):
        word = line.rstrip("\r")
        if numbers.setdefault(word, number) != number:
            raise DataError(f"{path}: line {number + 1} repeats {word!r}; a vocabulary has one word a line, each once")
    return dict(enumerate(numbers))


def _from_json(path: Path, content: bytes) -> dict[int, str]:
    data = json.loads(content)
    model = data["model"]
    if (kind := model.get("type", "WordPiece")) != "WordPiece":
        raise DataError(f"{path}: holds a {kind} model; only WordPiece is known")
    words = {int(number): str(word) for word, number in model["vocab"].items()}
    return words | {int(token["id"]): str(token["content"]) for token in data.get("added_tokens") or ()}


def detokenise(line: str, style: Style) -> str:
    """A line with the spacing of a style undone."""
    for pattern, new in _COMPILED[style]:
        line = pattern.sub(new, line)
    return line


class Encoder:
    """Encodes lines without special tokens: `[MASK]` in a text is three tokens, like any other word."""

    def __init__(self, vocabulary: Vocabulary):
        library = load_library()
        if vocabulary.path.suffix == ".json":
            try:
                self._model = library.Tokenizer.from_file(str(vocabulary.path))
            except Exception as error:  # the library raises plain Exceptions
                remedy = "give a whole copy, or vocab.txt"
                raise DataError(f"{vocabulary.path}: cannot be used ({error}); {remedy}") from None
            self._model.no_truncation()
            self._model.no_padding()
            self._model.encode_special_tokens = True
        else:
            words = {word: number for number, word in enumerate(vocabulary.words)}
            model = library.models.WordPiece(words, unk_token="[UNK]", max_input_chars_per_word=100)
            self._model = library.Tokenizer(model)
            self._model.normalizer = library.normalizers.BertNormalizer(lowercase=vocabulary.lowercase)
            self._model.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()

    def __call__(self, lines: list[str]) -> Iterator[list[int]]:
        for start in range(0, len(lines), BATCH):
            batch = self._model.encode_batch_fast(lines[start : start + BATCH], add_special_tokens=False)
            yield from (encoding.ids for encoding in batch)


def load_library() -> Any:
    """The `tokenizers` library, or an error with the remedy."""
    try:
        import tokenizers
    except ImportError:
        raise ConfigError(["tokenizers: the package is missing; pip install emoe[text]"]) from None
    return tokenizers
