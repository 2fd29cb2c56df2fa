"""Cells of tables: means over rows in a format, with the paper's numbers."""

from __future__ import annotations

import dataclasses
import functools
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from emoe.reporting.recipes import paper_numbers
from emoe.reporting.results import Results, Row, SeedMean, mean_over_seeds, select

DASH, NBSP, MINUS = "—", "\N{NO-BREAK SPACE}", "\N{MINUS SIGN}"  # a mean and its error stay on one line


@functools.cache
def names(table: str) -> dict[str, Any]:
    """Return a table of `names.toml`: data, metrics, notes or pages."""
    return dict(tomllib.loads(Path(__file__).with_name("names.toml").read_text(encoding="utf-8"))[table])


class Measure(NamedTuple):
    """Format of a metric: its label, decimals, and the better direction (None: neither)."""

    label: str
    digits: int
    better: Literal["high", "low"] | None = None


def measure(metric: str) -> Measure:
    """Return the format of a metric; an unknown one has two decimals and no best value."""
    return Measure(**names("metrics").get(metric, {"label": metric, "digits": 2}))


def data_name(data: str) -> str:
    """Return the name of a data set in tables."""
    return str(names("data").get(data, data))


def data_of(results: Results) -> list[str]:
    """Return the data sets that models were measured on, the known ones first."""
    measured = {row.data for row in results.models.rows}
    return sorted(measured, key=lambda data: ([*names("data"), data].index(data), data))


@dataclass(frozen=True)
class Line:
    """A line of a table: its labels and the rows of its cells."""

    labels: tuple[str, ...]
    rows: Sequence[Row] = ()
    method: str = ""
    reference: bool = False  # no model: never marked as the best
    paper: str = ""  # data set whose numbers of the paper compare with this line
    variant: str | None = None  # of sampling, by its name among the paper's numbers
    nfe: int | None = None  # of the paper's numbers

    def where(self, **fields: Any) -> Line:
        """Return the line with the rows that fit; a reference measured without NFE has the same rows for each."""
        rows = select(self.rows, **fields)
        if self.reference and not rows:
            rows = select(self.rows, **fields | {"nfe": None})
        return dataclasses.replace(self, rows=rows, nfe=fields.get("nfe", self.nfe))

    def reported(self, metric: str) -> float | None:
        """Return the paper's number for this line."""
        return paper_numbers().get((self.paper, self.method, metric, self.nfe, self.variant))


def write(mean: SeedMean | None, form: str, *, unit: str = "") -> str:
    """Format a mean and its standard error as in `87.6 ±0.6`."""
    if mean is None:
        return DASH
    text = f"{mean.mean:{form}}{unit}"
    if mean.stderr is not None:
        text += f"{NBSP}±{mean.stderr:{form.lstrip('+')}}{unit}"
    return text.replace("-", MINUS)


@dataclass(frozen=True)
class Number:
    """A cell: the mean over seeds of some rows of a line, further numbers below it, then the paper's in italics."""

    metric: str = ""  # default: the one metric of the line
    where: dict[str, Any] = field(default_factory=dict)  # further fields of the rows
    form: str = ""  # default: the decimals of the metric; "+": these, with the sign
    prefix: str = ""
    unit: str = ""
    per: float = 1.0  # divisor
    error: str = "seeds"  # standard error over seeds; "measured": of a single seed its own; a metric; "": no error
    below: Sequence[Number] = ()  # if there is this number
    paper: str = ""  # form of the paper's numbers, for as many of ours as it has fields: "{:.1f}, H {:.2f}"

    def mean(self, line: Line) -> SeedMean | None:
        wanted = self.where | ({"metric": self.metric} if self.metric else {})
        mean = mean_over_seeds(select(line.rows, **wanted), measured=self.error == "measured")
        if mean is None:
            return None
        error = mean.stderr
        if self.error not in ("seeds", "measured"):
            spread = mean_over_seeds(select(line.rows, **wanted | {"metric": self.error}))
            error = spread and spread.mean
        return SeedMean(mean.mean / self.per, error and error / self.per)

    def __call__(self, line: Line) -> str:
        metric = self.metric or next((row.metric for row in line.rows), "")
        form = self.form if self.form.strip("+") else f"{self.form}.{measure(metric).digits}f"
        texts = [self.prefix + write(self.mean(line), form, unit=self.unit)]
        if self.below:
            if texts == [DASH]:
                return DASH
            texts += [number(line) for number in self.below]
        shown = [self, *self.below][: self.paper.count("{")]
        values = [value / number.per for number in shown if (value := line.reported(number.metric)) is not None]
        if shown and len(values) == len(shown):
            texts.append(f"*({self.paper.format(*values)})*")
        return "\n".join(texts)


Measured, Plain = functools.partial(Number, error="measured"), functools.partial(Number, error="")
Millions = functools.partial(Plain, form=".2f", unit="M", per=1e6)
Cell = Callable[[Line], str]  # writes the cell of a line
Column = tuple[str, Cell]  # with its heading


def reported(metric: str, form: str) -> Cell:
    """Return a cell of the paper's number alone."""
    return lambda line: DASH if (value := line.reported(metric)) is None else f"*{value:{form}}*"


def over(name: str, heading: str, values: Iterable[object], cell: Cell) -> list[Column]:
    """Return a column for each value of a field of rows."""

    def column(value: object) -> Column:
        return heading.format(value), lambda line: cell(line.where(**{name: value}))

    return [column(value) for value in values]
