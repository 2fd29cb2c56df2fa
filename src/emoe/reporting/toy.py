"""Tables of the toy study (`emoe reproduce toy`), from samples."""

from __future__ import annotations

from collections.abc import Sequence

from emoe.reporting.cells import DASH, measure
from emoe.reporting.grid import grid_note, main_rows, metric_tables, sampled
from emoe.reporting.render import markdown
from emoe.reporting.results import Results
from emoe.reporting.table import Table, with_note

METRICS = ("validity", "overlap")  # samples that repeat one good mode raise validity; only overlap shows it


def toy_tables(results: Results, metric: str) -> list[Table]:
    """The paper's toy table of a metric with our numbers, from samples as in the paper; the last has the note."""
    results = sampled(results)
    tables = metric_tables(results, "toy", metric)
    return with_note(tables, grid_note(main_rows(results, task="toy", metric=metric), metric, tables))


def toy_page(results: Results) -> str:
    """`results/toy.md`: validity and overlap, which belong together, each with its densities side by side."""
    tables = {f"**{measure(metric).label}**": toy_tables(results, metric) for metric in METRICS}
    return "\n".join(f"{title}\n\n{markdown([side_by_side(own)])}" for title, own in tables.items() if own)


def side_by_side(tables: Sequence[Table]) -> Table:
    """One table of the columns of all."""
    header = ["Method"]
    rows = {row[0]: [row[0]] for table in tables for row in table.rows}
    for table in tables:
        name, first, *others = table.header
        header += [f"{name}, {first}", *(heading.removeprefix("NFE ") for heading in others)]
        cells = {row[0]: row[1:] for row in table.rows}
        for label, row in rows.items():
            row += cells.get(label, [DASH] * (len(table.header) - 1))
    return Table(header, list(rows.values()), note=tables[-1].note)
