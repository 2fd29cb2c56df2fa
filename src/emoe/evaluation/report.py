"""A report as one HTML file that needs nothing else: styles, charts and pictures are inside."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Literal

from emoe.evaluation.curves import Curves, curves_html
from emoe.evaluation.grid import Cell, best_places
from emoe.files import replace_file

__all__ = ["Beside", "Curves", "Picture", "Section", "Table", "Text", "write_report"]

_PICTURES = {
    b"\x89PNG": "png",
    b"\xff\xd8\xff": "jpeg",
    b"GIF8": "gif",
    b"RIFF": "webp",
    b"<svg": "svg+xml",
    b"<?xml": "svg+xml",
}


@dataclass(frozen=True)
class Text:
    """Paragraphs of plain text under a heading; `code` in backticks is set as code."""

    paragraphs: Sequence[str]
    title: str = ""


@dataclass(frozen=True)
class Table:
    """A table of text or `Cell`s; `better` says which number of a column to highlight."""

    header: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]
    title: str = ""
    note: str = ""
    better: Literal["high", "low"] | None = None
    reference: Sequence[int] = ()  # rows that are yardsticks: greyed and outside the contest
    digits: int = 1  # decimals of `Cell`s
    words: bool = False  # a table of words: all columns to the left


@dataclass(frozen=True)
class Picture:
    """A picture from a file or from its bytes (PNG, JPEG, GIF, WebP or SVG)."""

    source: Path | str | bytes
    caption: str
    alt: str = ""
    title: str = ""


@dataclass(frozen=True)
class Beside:
    """Sections next to each other where the window is wide enough."""

    items: Sequence[Text | Table | Picture | Curves]
    title: str = ""


Section = Text | Table | Picture | Curves | Beside


def write_report(path: str | Path, title: str, sections: Sequence[Section]) -> None:
    """Write the report; a browser opens it without a network and without scripts."""
    style = resources.files("emoe.evaluation").joinpath("report.css").read_text(encoding="utf-8")
    # The policy makes "nothing is loaded" a fact the browser enforces.
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    page = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title>
<style>
{style}</style>
</head>
<body>
<main>
<h1>{html.escape(title)}</h1>
{"".join(_section(section) for section in sections)}</main>
</body>
</html>
"""
    replace_file(path, page)


def _section(section: Section) -> str:
    head = f"<h2>{html.escape(section.title)}</h2>\n" if section.title else ""
    if isinstance(section, Text):
        return head + "".join(f"<p>{_prose(text)}</p>\n" for text in section.paragraphs)
    if isinstance(section, Beside):
        return f'{head}<div class="beside">\n{"".join(_card(item) for item in section.items)}</div>\n'
    return _card(section)


def _card(item: Text | Table | Picture | Curves) -> str:
    head = f"<h3>{html.escape(item.title)}</h3>" if item.title else ""
    note = ""
    if isinstance(item, Text):
        body = "".join(f"<p>{_prose(text)}</p>" for text in item.paragraphs)
    elif isinstance(item, Picture):
        caption = f"<figcaption>{_prose(item.caption)}</figcaption>" if item.caption else ""
        alt = html.escape(item.alt or item.caption)
        body = f'<figure><img src="{_data_uri(item.source)}" alt="{alt}">{caption}</figure>'
    else:
        body = _table(item) if isinstance(item, Table) else curves_html(item)
        note = f'<p class="note">{_prose(item.note)}</p>' if item.note else ""
    return f'<div class="card">{head}{body}{note}</div>\n'


def _prose(text: str) -> str:
    """Escaped text in which `code` between backticks becomes code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))


def _data_uri(source: Path | str | bytes) -> str:
    data = source if isinstance(source, bytes) else Path(source).read_bytes()
    kind = next((name for magic, name in _PICTURES.items() if data.startswith(magic)), None)
    if kind is None:
        name = "bytes" if isinstance(source, bytes) else source
        raise ValueError(f"not a PNG, JPEG, GIF, WebP or SVG picture: {name}")
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def _table(table: Table) -> str:
    numbers = [[_number(cell, table.digits) for cell in row] for row in table.rows]
    for number, line in enumerate(numbers):
        # The first column names the rows and is no contest; nor do yardsticks take part.
        line[0] = None
        if number in table.reference:
            line[:] = [None] * len(line)
    best = best_places(map(list, zip(*numbers, strict=True)), table.better)
    lines = []
    for number, row in enumerate(table.rows):
        kinds = ["reference"] * (number in table.reference)
        kinds += ["first-reference"] * (number in table.reference and number - 1 not in table.reference)
        cells = [_cell(cell, table.digits, (number, place) in best) for place, cell in enumerate(row)]
        lines.append(f'<tr class="{" ".join(kinds)}">{"".join(cells)}</tr>')
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in table.header)
    kind = "words" if table.words else "numbers"
    return (
        f'<div class="scroll"><table class="{kind}"><thead><tr>{head}</tr></thead>\n'
        f"<tbody>{chr(10).join(lines)}</tbody></table></div>"
    )


def _number(cell: str | Cell, digits: int) -> float | None:
    """What a cell brings to the contest: its value as printed."""
    if isinstance(cell, Cell):
        return None if cell.value is None else round(cell.value, digits)
    match = re.match(r"\s*([-+]?\d+(?:\.\d+)?)", cell)
    return float(match[1]) if match else None


def _cell(cell: str | Cell, digits: int, best: bool) -> str:
    if isinstance(cell, Cell):
        text = "—" if cell.value is None else f"{cell.value:.{digits}f}"
        text = f"<b>{text}</b>" if best else text
        text += "" if cell.stderr is None else f"<small>±{cell.stderr:.{digits}f}</small>"
        text += "" if cell.paper is None else f'<small class="paper">({cell.paper:.{digits}f})</small>'
    else:
        text = f"<b>{_prose(cell)}</b>" if best else _prose(cell)
    return f'<td class="best">{text}</td>' if best else f"<td>{text}</td>"
