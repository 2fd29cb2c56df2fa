"""Tables as Markdown and on the terminal."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from emoe.console import console_table
from emoe.reporting.cells import NBSP
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
