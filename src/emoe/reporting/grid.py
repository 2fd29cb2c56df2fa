"""The table of a metric by method and number of network calls, for any task, with the paper's numbers below ours."""

from __future__ import annotations

from collections.abc import Sequence

from emoe.reporting.cells import Line, Number, Stack, data_name, data_order, measure, over
from emoe.reporting.paper import comparable, paper_rows
from emoe.reporting.recipes import main_recipe
from emoe.reporting.results import REFERENCES, Results, Row, method_rank
from emoe.reporting.table import Table, TableSpec, build, comma, repeat, span


def metric_tables(results: Results, task: str, metric: str) -> list[Table]:
    """Means over seeds of a metric by method and NFE, a table for each data set."""
    part = results.only(task=task, metric=metric)
    return build(*(_metric_table(part.only(data=data)) for data in data_order(row.data for row in part.models.rows)))


def _metric_table(part: Results) -> TableSpec:
    lines, models = metric_lines(part), part.models.rows
    metric, data, named = models[0].metric, data_name(models[0].data), len(lines[0].labels) - 1
    steps = sorted({row.nfe for row in models}, key=lambda nfe: nfe or 0)
    form = f".{measure(metric).digits}f"
    columns = over("nfe", "NFE {}", steps, Stack([Number(metric, form=form)], f"{{:{form}}}"))
    columns[:1] = [(data if steps[0] is None else columns[0][0], columns[0][1])]
    corner = ["Method" if steps[0] is None else data, *["Convention"] * named]
    return TableSpec(corner, lines, columns, align="ll"[: 1 + named], better=measure(metric).better)


def metric_lines(part: Results) -> list[Line]:
    """A line for every method that has rows of a metric on a data set, or that the paper reports.

    Where rows name a convention, each convention has its own line and so has the paper, which names none.
    """
    models = part.models.rows
    named = any(row.convention is not None for row in models)
    steps = {row.nfe for row in models}
    lines = []
    methods = {row.method for row in part.rows} | {row["method"] for row in paper_rows() if models}
    for method in sorted(methods, key=lambda method: (method_rank(method), method)):
        rows, label = part.select(method=method), part.label(method)
        beside = comparable(rows or models, models[0].data) if models else None
        for convention in sorted({row.convention or "" for row in rows}):
            own = main_recipe([row for row in rows if (row.convention or "") == convention])
            if method in REFERENCES:  # the same for any NFE if it was measured without
                own += repeat([row for row in own if row.nfe is None], steps - {row.nfe for row in own})
            labels = (label, convention)[: 1 + named]
            lines.append(Line(labels, own, method, method in REFERENCES, None if named else beside))
        paper = Line((label, "paper")[: 1 + named], (), method, paper=beside)
        reported = any(paper.reported(models[0].metric, nfe) is not None for nfe in steps)
        lines += [paper] * (reported and (named or not rows))
    return lines


def sampled(results: Results) -> Results:
    """Rows measured on samples, as the paper has them, and the references; those of exact laws left out."""
    return results.of(row for row in results.rows if row.convention is None or row.method in REFERENCES)


def main_rows(results: Results, **filters: object) -> list[Row]:
    """The rows of main recipes, references included."""
    rows = results.select(**filters)
    groups = sorted({(row.method, row.data) for row in rows})
    return [row for key in groups for row in main_recipe([row for row in rows if (row.method, row.data) == key])]


def grid_note(rows: Sequence[Row], metric: str, tables: Sequence[Table]) -> str:
    """A sentence below tables of a metric: the marks in cells, seeds and samples."""
    cells = [cell for table in tables for row in table.rows for cell in row[1:]]
    words = ["mean ± standard error over seeds"] * any("±" in cell for cell in cells)
    words += seeds_and_samples(rows)
    words += ["*(italics)*: the paper"] * any("*(" in cell for cell in cells)
    words += ["**bold**: best model of a column"] * any(cell.startswith("**") for cell in cells)
    words += ["—: not measured"] * any(cell.startswith("—") for cell in cells)
    return f"{measure(metric).label}: {'; '.join(words)}."


def seeds_and_samples(rows: Sequence[Row]) -> list[str]:
    """Numbers of seeds and samples: `3 seeds (0, 1, 2)` and `3,000 samples each`.

    Where cells differ it is `1 to 3 seeds`: a table must not claim more seeds than its poorest cell has.
    """
    models = [row for row in rows if row.method not in REFERENCES] or rows
    cells: dict[tuple[str, str, int | None], set[int]] = {}
    for row in models:
        if row.seed is not None:
            cells.setdefault((row.data, row.method, row.nfe), set()).add(row.seed)
    number, seeds = span(len(own) for own in cells.values()), sorted(set().union(*cells.values()))
    samples = span(row.n for row in models)
    words = [f"{number} seed{'s' * (number != '1')} ({comma(seeds)})"] * bool(cells)
    return words + [f"{samples} samples each"] * bool(samples)
