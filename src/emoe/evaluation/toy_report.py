"""The sections of the toy report: why few steps fail, the numbers, how to read them, where they are from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from emoe.evaluation.curves import Curves
from emoe.evaluation.grid import DATA, Cell, Grid, measure, table_rows, toy_grid
from emoe.evaluation.report import Beside, Picture, Section, Table, Text
from emoe.evaluation.results import Results
from emoe.evaluation.tables import seeds_and_samples

WHY = (
    "A masked diffusion model reveals several tokens in one step, and a factorised step draws each of them "
    "alone: it knows which values are likely at every place, but not which values belong together.",
    "With few steps many tokens are drawn at once, values of different modes get combined, and samples land "
    "where there are no data; more steps repair this, at the price of more network calls (NFE) per sample.",
    "A mixture first draws one latent that all tokens share (in E-MoE the experts that positions take, in "
    "VADD a Gaussian vector) and only then the tokens: each component is still factorised, but their mixture "
    "is not, so a single step can already say which values go together.",
)
READING = (
    "Validity is the share of samples that lie on the data: within a small radius of one of the training "
    "points. It measures precision only: a model that repeats one good mode for ever can score 100.",
    "Overlap is 100 × (1 − total variation) between the histogram of the samples and that of fresh data. It "
    "falls when modes are missing or weighted wrongly, so read validity only together with it. Two finite "
    "sets of real points do not overlap completely either: the row `real data` is the ceiling.",
    "The row `ideal factorised` is no trained model: it is the chain of factorised steps that knows the "
    "exact marginals of the data, and so what a perfectly trained factorised model would sample. A model "
    "well above it in both measures at the same NFE ties tokens together that such a step leaves apart.",
)


def toy_sections(results: Results, *, pictures: Sequence[Picture] = (), curves: Sequence[Curves] = ()) -> list[Section]:
    """All sections of the toy report.

    Args:
        results: The toy results.
        pictures: Samples, training progress and the like, in order.
        curves: Training curves, for instance from `read_curve`.
    """
    pairs = _pairs(results)
    sections: list[Section] = [Text(WHY, "Why few-step samples fall apart, and what a mixture does")]
    for place, grids in enumerate(pairs):
        title = "" if place else "Validity and overlap by number of network calls"
        sections.append(Beside([_table(grid) for grid in grids], title))
    sections.append(Text([_legend(results)]))
    sections += [Beside([_lines(grid) for grid in grids]) for grids in pairs]
    if pictures:
        sections += [Text([], "Samples"), *pictures]
    if curves:
        sections.append(Beside(list(curves), "Training"))
    return [*sections, Text(READING, "How to read the numbers"), *_provenance(results)]


def _pairs(results: Results) -> list[list[Grid]]:
    """For every density its grids of validity and of overlap, without the lines that are empty."""
    found: dict[str, list[Grid]] = {}
    for metric in ("validity", "overlap"):
        for grid in toy_grid(results, metric).split():
            kept = tuple(line for line in grid.lines if any(cell.value is not None for cell in line.cells))
            found.setdefault(grid.columns[0].data, []).append(replace(grid, lines=kept))
    return list(found.values())


def _title(grid: Grid) -> str:
    data = grid.columns[0].data
    return f"{measure(grid.metric).label}, {DATA.get(data, data)}"


def _table(grid: Grid) -> Table:
    header = ["NFE", *(str(column.nfe) for column in grid.columns)]
    rows: list[list[str | Cell]] = [[line.label, *line.cells] for line in grid.lines]
    yardsticks = [place for place, line in enumerate(grid.lines) if line.reference]
    rules = measure(grid.metric)
    return Table(header, rows, _title(grid), better=rules.better, reference=yardsticks, digits=rules.digits)


def _lines(grid: Grid) -> Curves:
    series = {
        line.label: [
            (column.nfe, cell.value)
            for column, cell in zip(grid.columns, line.cells, strict=True)
            if column.nfe is not None and cell.value is not None
        ]
        for line in grid.lines
    }
    return Curves(series, _title(grid), measure(grid.metric).label, "network calls per sample (NFE)", log_x=True)


def _legend(results: Results) -> str:
    counts = [
        f"{metric}: {', '.join(seeds_and_samples(rows))}"
        for metric in ("validity", "overlap")
        if (rows := table_rows(results, metric))
    ]
    grids = [toy_grid(results, metric) for metric in ("validity", "overlap")]
    beside = any(cell.paper is not None for grid in grids for line in grid.lines for cell in line.cells)
    paper = " and, in parentheses, what the paper reports" if beside else ""
    return (
        f"Each number is a mean over seeds, below it the standard error over seeds{paper}. "
        f"The best model of a column is highlighted. Behind it: {'; '.join(counts)}."
    )


def _provenance(results: Results) -> list[Section]:
    """A table of the runs behind the numbers."""
    rows = [row for metric in ("validity", "overlap") for row in table_rows(results, metric)]
    lines = []
    for name in sorted({row.run for row in rows}):
        run, mine = results.runs[name], [row for row in rows if row.run == name]
        seeds = sorted({row.seed for row in mine if row.seed is not None})
        versions = f"torch {run.torch}, Python {run.python}"
        samples = sorted({row.n for row in mine if row.n is not None})
        lines.append(
            [
                f"`{run.command}`",
                f"`{run.commit}`",
                f"{run.device}; {versions}",
                f"{run.date} ({run.wall_s:,.0f} s)",
                ", ".join(map(str, seeds)),
                ", ".join(f"{count:,}" for count in samples),
            ]
        )
    header = ("Command", "Commit", "Machine", "Date (wall time)", "Seeds", "Samples")
    return [Text([], "Where the numbers come from"), Table(header, lines, words=True)]
