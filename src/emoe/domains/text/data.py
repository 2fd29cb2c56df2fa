"""The domain of text: rows of tokens of a prepared set, read from the disk as they are needed, and texts to complete.

In a text to complete `[MASK]` is a hole of one token, `{N}` of N tokens, `___` (three underscores or more) of all the
room that is left in the row. The positions behind the text are drawn too, so a text without holes is continued.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Int, Integer, UInt16
from torch import Tensor

from emoe.config import option
from emoe.domains import DataError, check_file, naming, readable
from emoe.domains.base import DomainConfig, Given, Ink, Pools, SplitDomain
from emoe.domains.metrics import measure_variety
from emoe.domains.text.prepare import MANIFEST, SCHEMA, TOKEN
from emoe.domains.text.reading import SPLITS, sha256_of
from emoe.domains.text.tokens import Encoder, Vocabulary, read_vocabulary
from emoe.figures import panels
from emoe.types import Measurement, TokenSpace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

AGAIN = "prepare it again: emoe data prepare"
HeldOut = Literal["auto", "valid", "test"]
# A hole, or a special token by its name; [MASK] alone is a hole.
MARK = re.compile(r"\[MASK\]|\{(?P<count>\d{1,6})\}|(?P<rest>_{3,})|\[(?P<special>CLS|SEP|PAD|UNK)\]")

encoder = functools.lru_cache(maxsize=2)(Encoder)


@dataclass(frozen=True, kw_only=True)
class TextConfig(DomainConfig, kind="text"):
    """Text that `emoe data prepare` made into rows of tokens; the seed plays no role."""

    has_words: ClassVar[bool] = True

    path: str = option(doc="folder of a set that emoe data prepare wrote", neutral=True)
    held_out: HeldOut = option("auto", doc="rows to evaluate with: valid, test, or auto: test where there is one")
    verify: bool = option(True, doc="compare the files with their checksums when they are opened")

    def build(self, seed: int) -> Text:
        return Text(self)

    def read_given(self, source: str, space: TokenSpace, *, ink: Ink = "auto") -> Given:
        """A text with holes, or those in the lines of a .txt file that are not empty; or tokens in .npy, .csv."""
        path, folder = Path(source), Path(self.path)
        if ink != "auto" or path.suffix.lower() in (".npy", ".csv"):
            return super().read_given(source, space, ink=ink)
        vocabulary = read_words(folder)
        first = [vocabulary.special["cls"]] if read_manifest(folder).get("packing") == "wrap" else []
        encoder(vocabulary)  # a tokenizer that cannot be used is no fault of the text
        if not source.lower().endswith(".txt"):
            with naming(source, typed=True):
                return torch.tensor([_read_text(source, vocabulary, space, first)])
        check_file(path, "--given takes a text, or a .txt file with one text in a line")
        with readable(path, "save it as UTF-8", "cannot be read as text"):
            lines = path.read_text(encoding="utf-8-sig").splitlines()
        rows = list[list[int]]()
        for number, line in enumerate(lines, 1):
            with naming(f"{path}: line {number}"):
                rows += [_read_text(line, vocabulary, space, first)] if line.strip() else []
        if not rows:
            marks = "[MASK], {N} or ___"
            raise DataError(f"{path}: holds no text; write one in a line, with {marks} where tokens are wanted")
        return torch.tensor(rows)

    def write(self, rows: Integer[Tensor, "n L"]) -> list[str]:
        vocabulary = read_words(Path(self.path))
        return [vocabulary.decode(row) for row in rows.tolist()]


class Text(SplitDomain):
    """Rows of tokens that stay on the disk: the system keeps in memory what is used and what fits."""

    task: ClassVar[str] = "text"
    stream: ClassVar[str] = "text"
    mapped: ClassVar[bool] = True

    def __init__(self, config: TextConfig):
        folder = Path(config.path)
        manifest = read_manifest(folder)
        splits = manifest["splits"]
        self.config, self.manifest, self.name = config, manifest, folder.resolve().name
        self.space = TokenSpace(manifest["size"], manifest["special"]["mask"], manifest["length"])
        self.held_out = ("test" if "test" in splits else "valid") if config.held_out == "auto" else config.held_out
        for split in ("train", self.held_out):
            if split not in splits:
                problem = f"has no {split} rows, only {', '.join(splits)}"
                raise DataError(f"{folder}: {problem}; give --domain.held-out")
        self.rows, self.test_rows = (
            open_rows(folder, manifest, split, verify=config.verify) for split in ("train", self.held_out)
        )
        self.fresh_rows = len(self.test_rows)
        if config.verify:
            self.sha256 = splits["train"]["sha256"]  # the file was hashed when it was opened

    def decode(self, rows: Integer[Tensor, "n L"]) -> list[str]:
        """Rows as text, special tokens by their names."""
        return self.config.write(rows)

    def measure(self, samples: Int[Tensor, "n L"], seed: int = 0) -> list[Measurement]:
        return measure_variety(samples, self.rows)

    def figure(self, pools: Pools, *, title: str = "") -> Figure:
        return panels.texts({name: self.decode(rows[: panels.MOST_TEXTS]) for name, rows in pools.items()}, title=title)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a prepared set."""
    path = folder / MANIFEST
    if not path.is_file():
        what = "holds no prepared text" if folder.is_dir() else "does not exist"
        raise DataError(
            f"{folder}: {what}; --domain.path takes a folder that emoe data prepare wrote: "
            f"emoe data prepare FILES --tokenizer FILE --out {'DIR' if folder == Path() else folder}"
        )
    with readable(path, AGAIN):
        manifest = dict(json.loads(path.read_bytes()))
        if manifest["schema"] != SCHEMA:
            raise DataError(f"{path}: has schema {manifest['schema']!r}, this version reads {SCHEMA}; {AGAIN}")
        sizes = [manifest["size"], manifest["length"], manifest["special"]["mask"]]
        sizes += [split["rows"] for split in manifest["splits"].values()]
        if not all(isinstance(size, int) and size >= 0 for size in sizes) or set(manifest["splits"]) - set(SPLITS):
            raise ValueError("impossible sizes")
    return manifest


def read_words(folder: Path) -> Vocabulary:
    """The words of the tokenizer that a set was made with."""
    wanted = read_manifest(folder)["tokenizer"]
    vocabulary = read_vocabulary(folder / wanted["file"])
    if vocabulary.sha256 != wanted["sha256"]:
        raise DataError(f"{vocabulary.path}: is not the tokenizer the set was made with; {AGAIN}")
    return vocabulary


def open_rows(folder: Path, manifest: Mapping[str, Any], split: str, *, verify: bool) -> UInt16[Tensor, "N L"]:
    """Rows of a split, mapped into memory: nothing is read before it is used, but for the checksum."""
    entry = manifest["splits"][split]
    path, shape = folder / f"{split}.bin", (entry["rows"], manifest["length"])
    with readable(path, AGAIN):
        size = path.stat().st_size
        if size != shape[0] * shape[1] * TOKEN.itemsize:
            raise DataError(f"{path}: has {size:,} bytes, not those of {shape[0]:,} rows of {shape[1]}; {AGAIN}")
        if verify and sha256_of(path) != entry["sha256"]:
            raise DataError(f"{path}: is damaged, its sha256 is not that of {MANIFEST}; {AGAIN}")
        # Private pages: the file may be read-only, and changes of the tensor do not reach it.
        return torch.from_numpy(np.memmap(path, TOKEN, mode="c", shape=shape))


def _read_text(text: str, vocabulary: Vocabulary, space: TokenSpace, first: list[int]) -> list[int]:
    """A row of L tokens, the `first` included; masks fill the room that is left, at `___` or at the end of the row."""
    encode, special = encoder(vocabulary), vocabulary.special
    tokens, room, start = list(first), list[int](), 0  # room: index of ___
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
