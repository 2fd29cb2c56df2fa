"""Tables as data: lines of rows, columns that write cells, and what notes below tables say of the rows."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from emoe.reporting.cells import MINUS, Column, Line, names
from emoe.reporting.recipes import as_typed, common_changes, comparable, parse, without
from emoe.reporting.results import Results, Row, method_rank

LIKELIHOODS = ("exact", "nelbo", "objective", "bound", "iw")


@dataclass
class Table:
    """A table of inline Markdown: `**best**`, `*the paper*`, `code` and line ends inside cells."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    note: str = ""
    align: str = "l"  # a letter for each column, l or r; the columns beyond are aligned to the right
    references: Collection[int] = ()  # numbers of rows that are no models
    methods: Sequence[str] = ()  # of the rows, for their colours


def build(
    corner: Sequence[str], lines: Sequence[Line], columns: Sequence[Column], note: str = "",
    *, title: str = "", align: str = "", better: str | None = None,
) -> list[Table]:  # fmt: skip
    """A table, or none without lines or columns.

    `corner` and `align` are of the labels. With `better` ("high" or "low") the best model of every column is marked.
    """
    if not lines or not columns:
        return []
    rows = [[*line.labels, *(cell(line) for _, cell in columns)] for line in lines]
    references = {number for number, line in enumerate(lines) if line.reference}
    mark_best(rows, len(corner), better, references)
    header, methods = [*corner, *(heading for heading, _ in columns)], [line.method for line in lines]
    return with_note([Table(header, rows, title, "", align or "l" * len(corner), references, methods)], note)


def with_note(tables: list[Table], note: str) -> list[Table]:
    """Put a note below the last table; its sentences about italics only if that shows the paper's numbers."""
    for table in tables[-1:]:
        italics = any("*" in cell for row in table.rows for cell in row)
        lines = [line for line in note.splitlines() if line and (italics or not line.startswith("*Italics*"))]
        table.note = " ".join(lines)
    return tables


def printed(cell: str) -> float | None:
    """The number that a cell begins with."""
    match = re.match(r"-?[\d.]+", cell.lstrip("*").replace(MINUS, "-"))
    return float(match[0]) if match else None


def mark_best(rows: list[list[str]], first: int, better: str | None, references: Collection[int] = ()) -> None:
    """Make the best printed numbers of every column from the `first` on bold, where at least two models have one."""
    for column in range(first, len(rows[0]) if better else 0):
        cells = {number: printed(row[column]) for number, row in enumerate(rows) if number not in references}
        values = [value for value in cells.values() if value is not None]
        best = (max if better == "high" else min)(values) if len(values) > 1 else None
        for number, value in cells.items():
            if value is not None and value == best:
                rows[number][column] = re.sub(r"^\S+", r"**\g<0>**", rows[number][column])


def models(results: Results, **fields: object) -> list[Line]:
    """A line for each method and recipe that has rows with these fields, in the order of methods.

    A label holds what was changed in this recipe but not in all of them, and the recipe's name if it is not usual.
    """
    rows = results.models.rows
    shared = common_changes(rows)
    families = {parse(row.recipe).name.removesuffix(f"-{row.method}") for row in rows}
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        name, changes = parse(row.recipe)
        usual = name.endswith(f"-{row.method}") and len(families) == 1
        own = f"({name}) " * (not usual) + as_typed(without(changes, shared))
        groups.setdefault((row.method, own.strip()), []).append(row)
    lines = []
    for (method, own), rows in sorted(groups.items(), key=lambda item: (method_rank(item[0][0]), item[0])):
        label = f"{results.label(method)} {own}".strip()
        lines.append(Line((label,), rows, method, paper=comparable(rows)))
    return [line for line in lines if line.where(**fields).rows]


def steps_of(lines: Iterable[Line], metric: str = "") -> list[int]:
    """Numbers of network calls that a metric was measured at."""
    rows = [row for line in lines for row in line.rows if metric in ("", row.metric)]
    return sorted({row.nfe for row in rows if row.nfe is not None})


def conventions_of(lines: Iterable[Line], metric: str, kinds: Sequence[str] = LIKELIHOODS) -> list[str]:
    """Names of likelihoods in the order of their kinds, those of a kind with rising T."""

    def key(name: str) -> tuple[int, list[int]]:
        kind, _, numbers = name.partition("@")
        return [*kinds, kind].index(kind), [int(text) for text in numbers.split(",") if text]

    rows = [row for line in lines for row in line.rows if row.metric == metric]
    return sorted({row.convention for row in rows if row.convention is not None}, key=key)


def note(name: str, results: Results, changes: Mapping[str, str] | None = None, **values: object) -> str:
    """A note of `names.toml` with `values`, and with the seeds, shared changes and sources of the models."""
    models = results.models
    several, shared = len(models.seeds) > 1, common_changes(models.rows) if changes is None else changes
    words = {
        "numbers": comma(models.seeds),
        "seeds": f"Seed{'s' * several} {comma(models.seeds)}",
        "errors": "over seeds" if several else "of the measurement",
        "over_seeds": ": means, and where a row has several, errors are over these." if several else ".",
        "changes": f" All with `{as_typed(shared)}`." if shared else "",
        "source": source_of(results),
    }
    return str(names("notes")[name]).format_map(words | values)


def source_of(results: Results) -> str:
    """Commits and devices of all runs behind results."""
    runs = sorted({(short_commit(run.commit), run.device) for run in results.runs.values()})
    return "; ".join(f"commit `{commit}` on {device}" for commit, device in runs)


def short_commit(commit: str) -> str:
    """12 digits name a commit beyond doubt; the mark of a changed tree must survive the cut."""
    return commit[:12] + "-dirty" * commit.endswith("-dirty")


def span(counts: Iterable[int | None]) -> str:
    """`300`, or `300 to 500` where counts differ; nothing without any."""
    known = sorted({count for count in counts if count})
    return " to ".join(dict.fromkeys(f"{count:,}" for count in (*known[:1], *known[-1:])))


def comma(values: Iterable[object]) -> str:
    """`0, 1, 2`."""
    return ", ".join(map(str, values))
