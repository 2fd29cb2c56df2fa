"""The table of a metric by method and number of network calls, for any task, with the paper's numbers below ours."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from emoe.reporting.cells import Line, Number, data_name, data_of, measure, over
from emoe.reporting.recipes import comparable, main_recipe, paper_methods
from emoe.reporting.results import REFERENCES, Results, Row, method_rank, select
from emoe.reporting.table import Table, build, comma, span, steps_of


def metric_tables(results: Results, task: str, metric: str) -> list[Table]:
    """Means over seeds of a metric by method and NFE, a table for each data set."""
    part, tables = results.only(task=task, metric=metric), []
    label, digits, better = measure(metric)
    cell = Number(metric, paper=f"{{:.{digits}f}}")
    for data in data_of(part):
        own = part.only(data=data)
        lines, steps = metric_lines(own), steps_of([Line((), own.models.rows)])
        corner = [data_name(data), "Convention"][: len(lines[0].labels)]
        tables += build(corner, lines, over("nfe", "NFE {}", steps, cell), title=label, better=better)
    return tables


def metric_lines(part: Results) -> list[Line]:
    """A line for every method that has rows of a metric on a data set, models among them, or that the paper reports.

    Where rows name a convention, each convention has its own line and so has the paper, which names none.
    """
    models = part.models.rows
    metric, data, steps = models[0].metric, models[0].data, {row.nfe for row in models}
    named = any(row.convention is not None for row in models)
    methods, lines = paper_methods() | {row.method for row in part.rows}, []
    for method in sorted(methods, key=lambda method: (method_rank(method), method)):
        rows, label = part.select(method=method), part.label(method)
        paper = data * (comparable(rows or models) == data)
        for convention in sorted({row.convention or "" for row in rows}):
            own = main_recipe(select(rows, convention=convention or None))
            labels = (label, convention)[: 1 + named]
            lines.append(Line(labels, own, method, method in REFERENCES, "" if named else paper))
        alone = Line((label, "paper")[: 1 + named], (), method, paper=paper)
        if (named or not rows) and any(alone.where(nfe=nfe).reported(metric) is not None for nfe in steps):
            lines.append(alone)
    return lines


def sampled(results: Results) -> Results:
    """Rows measured on samples, as the paper has them, and the references; those of exact laws left out."""
    return results.of(row for row in results.rows if row.convention is None or row.method in REFERENCES)


def main_rows(results: Results, **filters: object) -> list[Row]:
    """The rows of main recipes, references included."""
    rows = results.select(**filters)
    groups = sorted({(row.method, row.data) for row in rows})
    return [row for method, data in groups for row in main_recipe(select(rows, method=method, data=data))]


def seeds_and_samples(rows: Sequence[Row]) -> list[str]:
    """`3 seeds (0, 1, 2)` and `3,000 samples each`; `1 to 3 seeds` where cells differ, so that no cell claims more."""
    models = [row for row in rows if row.method not in REFERENCES] or rows
    cells = {(row.seed, row.data, row.method, row.nfe) for row in models if row.seed is not None}
    number, seeds = span(Counter(cell[1:] for cell in cells).values()), sorted({cell[0] for cell in cells})
    samples = span(row.n for row in models)
    words = [f"{number} seed{'s' * (number != '1')} ({comma(seeds)})"] * bool(cells)
    return words + [f"{samples} samples each"] * bool(samples)
