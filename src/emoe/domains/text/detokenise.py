"""Undo the spacing of released corpora.

`lm1b`: the One Billion Word benchmark has a space around every sign (`" I ca n't , " she said .`). The rules are those
that papers on diffusion language models use, in their order; some signs keep their space.
`wikitext`: joins what WikiText cut inside numbers and compounds (`1 @,@ 000`, `well @-@ known`).
"""

from __future__ import annotations

import re
from typing import Literal

Style = Literal["lm1b", "wikitext", "none"]
Detokenise = Literal["auto", "lm1b", "wikitext", "none"]  # auto: by the name of the file

SHARD = re.compile(r"news\.en(\.heldout)?-(\d+)-of-(\d+)")  # of the One Billion Word benchmark
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


def detokenise(line: str, style: Style) -> str:
    """A line with the spacing of a style undone."""
    for pattern, new in _COMPILED[style]:
        line = pattern.sub(new, line)
    return line


def style_of(name: str) -> Style:
    """The style by the name of a file: shards of the One Billion Word benchmark and WikiText's `.tokens` are known."""
    base = name.replace("\\", "/").rpartition("/")[2].lower()
    if SHARD.match(base):
        return "lm1b"
    return "wikitext" if re.match(r"wiki\.(train|valid|test)\.(tokens|raw)", base) else "none"
