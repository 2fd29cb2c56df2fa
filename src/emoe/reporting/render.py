"""Tables as Markdown, on the terminal and as HTML."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterable, Sequence

from emoe.console import console_table
from emoe.reporting.cells import NBSP, Line
from emoe.reporting.results import Results
from emoe.reporting.table import Table, over_nfe


def markdown(tables: Iterable[Table]) -> str:
    """Return tables with their titles and notes as Markdown, an empty line between them; nothing without tables.

    `|` and line ends inside cells are escaped.
    """

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", "<br>") for cell in cells) + " |"

    pieces = []
    for table in tables:
        labels = len(table.lines[0].labels) if table.lines else 1
        rule = "|" + "---|" * labels + "---:|" * (len(table.header) - labels)
        cells = "\n".join([line(table.header), rule, *map(line, table.rows)])
        pieces += [piece for piece in (table.title, cells, table.note) if piece]
    return "\n\n".join(pieces) + "\n" if pieces else ""


def plain(text: str) -> str:
    """Return inline Markdown without its signs: `**87.6**` becomes `87.6*`, and `*(85.0)*` becomes `(85.0)`."""
    text = re.sub(r"^\*\*([-\d.]+)\*\*", "\\1\0", text)
    text = re.sub(r"\*\*([^*]+)\*\*|\*([^*]+)\*|`([^`]+)`", r"\1\2\3", text)
    return text.replace("\0", "*").replace(NBSP, " ")


def print_table(table: Table) -> None:
    """Print a table to the terminal; the best of a column has a star."""
    rows = [list(map(plain, row)) for row in table.rows]
    console_table(list(map(plain, table.header)), rows, title=plain(table.title))


def print_metrics(results: Results, task: str, metrics: Iterable[str]) -> None:
    """Print metrics over NFE to the terminal, a table for each data set."""
    for metric in metrics:
        for table in over_nfe(results.only(task=task), metric):
            print_table(table)


def html_table(table: Table, colour: Callable[[str], str]) -> str:
    """Return a table in HTML, with the colours of methods."""
    head = "".join(f'<th scope="col">{inline(name)}</th>' for name in table.header)
    lines = []
    for number, row in enumerate(table.rows):
        line = table.lines[number] if table.lines else Line(())
        key = f'<i class="key" style="background:{colour(line.method)}"></i>' if line.method else ""
        cells = [_html_cell(cell, key * (column == 0)) for column, cell in enumerate(row)]
        lines.append(f'<tr class="{"reference" * line.reference}">{"".join(cells)}</tr>')
    kind, body = "numbers" if table.lines else "words", "\n".join(lines)
    return (
        f'<div class="scroll"><table class="{kind}"><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>'
    )


def _html_cell(cell: str, key: str) -> str:
    first, *below = cell.split("\n")
    value, error, size = first.partition(f"{NBSP}±")
    small = [f"±{size}"] * bool(error) + below
    kind = ' class="best"' if cell.startswith("**") else ""
    return f"<td{kind}>{key}{inline(value)}{''.join(f'<small>{inline(text)}</small>' for text in small)}</td>"


def inline(text: str) -> str:
    """Return inline Markdown as HTML, escaped."""
    text = html.escape(text)
    for pattern, tag in ((r"\*\*(.+?)\*\*", "b"), (r"\*(.+?)\*", "em"), (r"`([^`]+)`", "code")):
        text = re.sub(pattern, rf"<{tag}>\1</{tag}>", text)
    return text.replace("\n", "<br>")
