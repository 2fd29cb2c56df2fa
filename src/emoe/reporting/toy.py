"""Tables of the toy study (`emoe reproduce toy`), from samples."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from emoe.reporting.cells import DASH, MINUS, Line, Number, data_name, data_of, measure, write
from emoe.reporting.grid import grid_note, main_rows, metric_tables, sampled, seeds_and_samples
from emoe.reporting.paper import comparable
from emoe.reporting.render import markdown
from emoe.reporting.results import Results
from emoe.reporting.table import Table, comma, short_commit, with_note

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


def source(results: Results) -> str:
    """One line: commands, commits and devices behind the tables, with seeds and sample counts."""
    rows = {metric: main_rows(sampled(results), task="toy", metric=metric) for metric in METRICS}
    commands: dict[str, list[str]] = {}
    for name in sorted({row.run for group in rows.values() for row in group}):
        run = results.runs[name]
        where = f"at commit `{short_commit(run.commit)}` on {run.device} (torch {run.torch}, Python {run.python})"
        commands.setdefault(where, []).append(f"`{run.command}`")
    sources = "; ".join(f"{comma(dict.fromkeys(own))} {where}" for where, own in commands.items())
    samples = [f"{metric} from {comma(seeds_and_samples(group))}" for metric, group in rows.items() if group]
    return f"Made by {sources}: {'; '.join(samples)}."


def gaps(results: Results) -> str:
    """How far VADD and E-MoE are from the paper at one network call, in points, with the sign."""
    part = sampled(results).only(task="toy", nfe=1, metric=METRICS)
    sentences = []
    for method, data in itertools.product(("vadd", "emoe"), data_of(part)):
        rows = main_rows(part, method=method, data=data)
        line = Line((), rows, method, paper=comparable(rows), nfe=1)
        mean, paper = Number("validity").mean(line), line.reported("validity")
        if mean is not None and paper is not None:
            gap = f"{round(mean.mean, 1) - paper:+.1f}".replace("-", MINUS)
            ours = f"{part.label(method)} on {data_name(data)} at NFE 1: validity {write(mean, '.1f', plain=True)}"
            beside = Number("overlap", error=False)(line)
            sentences.append(f"- {ours}, the paper reports {paper:.1f}: {gap} points (overlap {beside}).")
    return "\n".join(sentences) or "No VADD or E-MoE at NFE 1 to compare."
