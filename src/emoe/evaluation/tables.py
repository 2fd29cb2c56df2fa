"""Tables of results in Markdown, LaTeX and on the console, with the paper's figure beside ours."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from emoe.console import console_table
from emoe.evaluation.grid import DATA, REFERENCES, Cell, Grid, measure, table_rows, toy_grid
from emoe.evaluation.results import Results, Row

Rows = Sequence[Sequence[str]]


def toy_table(
    results: Results, metric: str = "validity", *, seeds: Collection[int] | None = None, split: bool = False
) -> str:
    """The paper's toy table in Markdown, with our numbers.

    A cell reads `87.6 ±0.6`, the mean and the standard error over seeds, and below it the paper's figure in
    parentheses. Never show validity without overlap: `toy_tables` writes both.

    Args:
        results: The toy results.
        metric: The metric to show.
        seeds: Seeds to average over; None for all.
        split: Write a table for each density: twelve columns are wider than most pages.
    """
    grid = toy_grid(results, metric, seeds=seeds)
    return "\n".join(map(grid_markdown, grid.split() if split else [grid]))


def toy_tables(results: Results, *, seeds: Collection[int] | None = None, split: bool = False) -> str:
    """Validity and overlap, one below the other, and what the cells mean."""
    parts = []
    for metric in ("validity", "overlap"):
        table = toy_table(results, metric, seeds=seeds, split=split)
        parts.append(f"**{measure(metric).label}**\n\n{table}\n{toy_note(results, metric, seeds=seeds)}\n")
    return "\n".join(parts)


def toy_note(results: Results, metric: str, *, seeds: Collection[int] | None = None) -> str:
    """One line below a table: what the cells are, and from how many seeds and samples."""
    rows = [row for row in table_rows(results, metric) if seeds is None or row.seed in {None, *seeds}]
    grid = toy_grid(results, metric, seeds=seeds)
    cells = [cell for line in grid.lines for cell in line.cells]
    words = ["mean ± standard error over seeds"] * any(cell.stderr is not None for cell in cells)
    words += seeds_and_samples(rows)
    words += ["*(italics)*: the paper"] * any(cell.paper is not None for cell in cells)
    words += ["**bold**: best model of a column"] * bool(grid.best())
    words += ["—: not measured"] * any(cell.value is None for cell in cells)
    return f"{measure(metric).label}: {'; '.join(words)}."


def seeds_and_samples(rows: list[Row]) -> list[str]:
    """How many seeds and samples stand behind rows: `3 seeds (0, 1, 2)` and `3,000 samples each`."""
    models = [row for row in rows if row.method not in REFERENCES] or rows
    cells: dict[tuple[str, str, int | None], set[int]] = {}
    for row in models:
        if row.seed is not None:
            cells.setdefault((row.data, row.method, row.nfe), set()).add(row.seed)
    words = []
    if cells:
        names = ", ".join(map(str, sorted(set.union(*cells.values()))))
        number = _span({len(found) for found in cells.values()})
        words.append(f"{number} seed{'s' * (number != '1')} ({names})")
    counts = {row.n for row in models if row.n is not None}
    return words + ([f"{_span(counts)} samples each"] if counts else [])


def _span(numbers: Collection[int]) -> str:
    """`3`, or `1 to 3` where cells differ: a table must not claim more seeds than its poorest cell has."""
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def markdown_table(header: Sequence[str], rows: Rows, *, align: str = "") -> str:
    """A Markdown table; `|` and line ends inside cells are made harmless.

    Args:
        header: Names of the columns.
        rows: Cells, already in Markdown.
        align: A letter per column, l or r; by default the first is left and the others right.
    """
    align = align or "l" + "r" * (len(header) - 1)

    def line(cells: Sequence[str]) -> str:
        if len(cells) != len(header):
            raise ValueError(f"a row of {len(cells)} cells under {len(header)} columns: {cells}")
        return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", "<br>") for cell in cells) + " |"

    rule = "|" + "|".join("---:" if letter == "r" else "---" for letter in align) + "|"
    return "\n".join([line(header), rule, *map(line, rows)]) + "\n"


def grid_markdown(grid: Grid) -> str:
    """A grid in Markdown."""
    return markdown_table(*_strings(grid, _markdown_cell), align="l" * (1 + grid.conventions) + "r" * len(grid.columns))


def print_grid(grid: Grid) -> None:
    """Print a grid to the terminal, a table for each data set; the best of a column has a star."""
    for part in grid.split():
        console_table(*_strings(part, _plain_cell), title=measure(grid.metric).label)


def _strings(grid: Grid, write: Callable[[Cell, int, bool], str]) -> tuple[list[str], list[list[str]]]:
    """Header and cells of a grid as text; `write` gets a cell, its decimals and whether it is the best."""
    best, digits = grid.best(), measure(grid.metric).digits
    extra = ["Convention"] if grid.conventions else []
    header = _header(grid)
    rows = []
    for number, line in enumerate(grid.lines):
        cells = [write(cell, digits, (number, place) in best) for place, cell in enumerate(line.cells)]
        rows.append([line.label, *([line.convention or ""] if extra else []), *cells])
    return [header[0], *extra, *header[1:]], rows


def _header(grid: Grid) -> list[str]:
    """Names of the columns; a data set that is alone stands in the corner, else before its first number."""
    names = [DATA.get(column.data, column.data) for column in grid.columns]
    alone = len(set(names)) == 1 and all(column.nfe is not None for column in grid.columns)
    header = [names[0] if alone else "Method"]
    for place, (name, column) in enumerate(zip(names, grid.columns, strict=True)):
        if column.nfe is None:
            header.append(name)
        elif alone:
            header.append(f"NFE {column.nfe}")
        else:
            header.append(f"{name}, NFE {column.nfe}" if names.index(name) == place else f"{column.nfe}")
    return header


def _ours(cell: Cell, digits: int) -> tuple[str, str]:
    """Our mean and, if there is one, its standard error with a leading ±."""
    if cell.value is None:
        return "—", ""
    return f"{cell.value:.{digits}f}", "" if cell.stderr is None else f" ±{cell.stderr:.{digits}f}"


def _markdown_cell(cell: Cell, digits: int, best: bool) -> str:
    mean, error = _ours(cell, digits)
    paper = "" if cell.paper is None else f"<br>*({cell.paper:.{digits}f})*"
    # A no-break space: a mean torn from its error by a narrow window reads as two numbers.
    return (f"**{mean}**" if best else mean) + error.replace(" ", "\N{NO-BREAK SPACE}") + paper


def _plain_cell(cell: Cell, digits: int, best: bool) -> str:
    mean, error = _ours(cell, digits)
    return mean + ("*" if best else "") + error + ("" if cell.paper is None else f"\n({cell.paper:.{digits}f})")
