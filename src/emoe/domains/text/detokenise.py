"""Undo the spacing of released corpora.

`lm1b`: the One Billion Word benchmark has a space around every sign (`" I ca n't , " she said .`). The rules are those
that papers on diffusion language models use, in their order; some signs keep their space.
`wikitext`: joins what WikiText cut inside numbers and compounds (`1 @,@ 000`, `well @-@ known`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal

Style = Literal["lm1b", "wikitext", "none"]
Detokenise = Literal["auto", "lm1b", "wikitext", "none"]  # auto: by the name of the file

SHARD = re.compile(r"news\.en(\.heldout)?-(\d+)-of-(\d+)")  # of the One Billion Word benchmark
_ADDRESSES = tuple((f"{scheme} : / / ", f"{scheme}://") for scheme in ("http", "https"))
# Replacements for a sign between two spaces.
_CLOSE_UP = (*((f" {sign} ", f"{sign} ") for sign in ",:;"), (" / ", "/"))
_APOSTROPHE = re.compile(r" '(?=\w)")
_FULL_STOP = re.compile(r"( \w+) \. ")
_LAST_STOP = re.compile(r"( \w+) \.$")  # a sign takes the space after it along: the last one of a line comes after
# Text between a pair of signs that holds neither of them.
_PAIRS = tuple(
    (re.compile(rf"{re.escape(left)} ([^{re.escape(left + right)}]+) {re.escape(right)}"), rf"{left}\1{right}")
    for left, right in ('""', "''", "()", "[]")
)
_CUT = re.compile(r" @([-,.])@ ")


def lm1b(line: str) -> str:
    """A sentence of the One Billion Word benchmark with its spacing undone."""
    for old, new in _ADDRESSES:
        line = line.replace(old, new)
    line = _APOSTROPHE.sub("'", line)
    line = _FULL_STOP.sub(r"\1. ", line)
    if line.endswith(" ."):
        line = _LAST_STOP.sub(r"\1.", line)
    for sign in "?!":
        line = line.replace(f" {sign} ", f"{sign} ")
        if line.endswith(f" {sign}"):
            line = line[:-2] + sign
    for old, new in _CLOSE_UP:
        line = line.replace(old, new)
    for pattern, new in _PAIRS:
        line = pattern.sub(new, line)
    return line.replace("$ ", "$").replace("£ ", "£")


def wikitext(line: str) -> str:
    """A line of WikiText with numbers and compounds joined."""
    return _CUT.sub(r"\1", line)


RULES: dict[Style, Callable[[str], str]] = {"lm1b": lm1b, "wikitext": wikitext, "none": str}


def style_of(name: str) -> Style:
    """The style by the name of a file: shards of the One Billion Word benchmark and WikiText's `.tokens` are known."""
    base = name.replace("\\", "/").rpartition("/")[2].lower()
    if SHARD.match(base):
        return "lm1b"
    return "wikitext" if re.match(r"wiki\.(train|valid|test)\.(tokens|raw)", base) else "none"
