"""Tables as data (lines of rows, columns that write cells, and notes below), as Markdown and on the terminal."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from emoe.console import console_table
from emoe.reporting.cells import DASH, MINUS, NBSP, Column, Line, Number, data_name, data_of, measure, over
from emoe.reporting.recipes import as_typed, common_changes, comparable, paper_numbers, parse, reference_name, without
from emoe.reporting.results import REFERENCES, Results, Row, method_rank, select

LIKELIHOODS = ("exact", "nelbo", "objective", "bound", "iw")
# A line of a note that begins so is left out where no cell has a match: the paper's number, the best of a column.
MARKS = {"*Italics*": r"(?<!\*)\*[^*]", "**Bold**": r"\*\*", "±": "±", DASH: DASH}


@dataclass
class Table:
    """A table of inline Markdown: `**best**`, `*paper*`, `code` and line ends inside cells."""

    header: Sequence[str]
    rows: Sequence[list[str]]
    title: str = ""
    note: str = ""
    lines: Sequence[Line] = ()  # of the rows, with their methods; a table without lines is one of words


def build(corner: Sequence[str], lines: Sequence[Line], columns: Sequence[Column], note: str = "") -> list[Table]:
    """Return a table, or none without lines or columns; `corner` is the header of the labels."""
    if not lines or not columns:
        return []
    rows = [[*line.labels, *(cell(line) for _, cell in columns)] for line in lines]
    return with_note([Table([*corner, *(heading for heading, _ in columns)], rows, lines=lines)], note)


def with_note(tables: list[Table], note: str) -> list[Table]:
    """Put a note below the last table, without lines about `MARKS` that no cell has."""
    cells = "\n".join(cell for table in tables for row in table.rows for cell in row)
    absent = tuple(mark for mark, pattern in MARKS.items() if not re.search(pattern, cells))
    for table in tables[-1:]:
        table.note = " ".join(line for line in note.splitlines() if line and not line.startswith(absent))
    return tables


def printed(cell: str) -> float | None:
    """Return the number that a cell begins with."""
    match = re.match(r"-?[\d.]+", cell.lstrip("*").replace(MINUS, "-"))
    return float(match[0]) if match else None


def mark_best(table: Table, better: str | None) -> None:
    """Make the best printed number ("high" or "low") of each column bold, where at least two models have one."""
    for column in range(len(table.lines[0].labels), len(table.header) if better else 0):
        models = [row for row, line in zip(table.rows, table.lines, strict=True) if not line.reference]
        values = [value for row in models if (value := printed(row[column])) is not None]
        best = (max if better == "high" else min)(values) if len(values) > 1 else None
        for row in models:
            if best is not None and printed(row[column]) == best:
                row[column] = re.sub(r"^\S+", r"**\g<0>**", row[column])


def models(results: Results, **fields: object) -> list[Line]:
    """Return a line for each method and recipe that has rows with these fields, in the order of methods.

    A label has the changes of this recipe that not all recipes share, and the recipe's name if it is not usual.
    """
    rows = results.models.rows
    shared = common_changes(row.recipe for row in rows)
    families = {parse(row.recipe).name.removesuffix(f"-{row.method}") for row in rows}
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        name, changes = parse(row.recipe)
        usual = name.endswith(f"-{row.method}") and len(families) == 1
        own = f"({name}) " * (not usual) + as_typed(without(changes, shared))
        groups.setdefault((row.method, own.strip()), []).append(row)
    lines = []
    for (method, own), rows in sorted(groups.items(), key=lambda item: (method_rank(item[0][0]), item[0][1])):
        label = f"{results.label(method)} {own}".strip()
        lines.append(Line((label,), rows, method, paper=comparable(rows)))
    return [line for line in lines if line.where(**fields).rows]


def reference(results: Results, method: str) -> Line:
    """Return the line of a reference: for the data of the models or, where it has no such rows, of its first recipe."""
    rows = results.select(method=method)
    usual = reference_name(common_changes(row.recipe for row in results.models.rows))
    recipes = sorted({row.recipe for row in rows}, key=lambda recipe: (recipe != usual, str(recipe)))
    return Line((results.label(method),), select(rows, recipe=recipes[:1]), method, reference=True)


def rivals(results: Results, lines: Iterable[Line], metric: str, nfe: Sequence[int | None] = (None,)) -> list[Line]:
    """Return lines for the methods of the paper's numbers that none of `lines` shows."""
    missing = {method for _, method, *_ in paper_numbers()} - {line.method for line in lines if line.paper}
    paper = comparable(results.models.rows)
    others = [Line((results.label(method),), (), method, paper=paper) for method in sorted(missing, key=method_rank)]
    return [line for line in others if any(line.where(nfe=calls).reported(metric) is not None for calls in nfe)]


def over_nfe(results: Results, metric: str, error: str = "seeds") -> list[Table]:
    """Return a metric of samples over NFE, a table for each data set and convention; the paper's numbers below ours."""
    (label, digits, better), tables = measure(metric), list[Table]()
    for data in data_of(results.only(metric=metric)):
        part = results.only(metric=metric, data=data)
        for convention in sorted({row.convention for row in part.models.rows}, key=str):
            own = part.of(row for row in part.rows if row.convention == convention or row.method in REFERENCES)
            lines, steps = models(own), steps_of(own.models.rows)
            paper = comparable(own.models.rows) == data and convention != "exact"
            lines += rivals(own, lines, metric, steps) if paper else []
            lines.sort(key=lambda line: method_rank(line.method))
            lines += [reference(own, method) for method in REFERENCES if own.select(method=method)]
            cell = Number(metric, error=error, paper=f"{{:.{digits}f}}" if paper else "")
            for table in build([data_name(data)], lines, over("nfe", "NFE {}", steps, cell)):
                table.title = f"**{label}**" if convention is None else f"**{label}**, {convention}"
                mark_best(table, better)
                tables.append(table)
    return tables


def sampled(results: Results) -> Results:
    """Return rows measured on samples, and the references; without those of exact laws."""
    return results.of(row for row in results.rows if row.convention is None or row.method in REFERENCES)


def steps_of(rows: Iterable[Row]) -> list[int]:
    """Return the numbers of network calls of rows."""
    return sorted({row.nfe for row in rows if row.nfe is not None})


def conventions_of(rows: Iterable[Row], kinds: Sequence[str] = LIKELIHOODS) -> list[str]:
    """Return names of likelihoods in the order of their kinds, those of a kind with rising T."""

    def key(name: str) -> tuple[int, list[int]]:
        kind, _, numbers = name.partition("@")
        return [*kinds, kind].index(kind), [int(text) for text in numbers.split(",") if text]

    return sorted({row.convention for row in rows if row.convention is not None}, key=key)


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
