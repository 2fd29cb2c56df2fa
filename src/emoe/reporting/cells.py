"""Cells of tables as data: which rows a number is the mean of, and in which form it and the paper's are written."""

from __future__ import annotations

import dataclasses
import functools
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, Literal, NamedTuple

from emoe.reporting.paper import paper_value
from emoe.reporting.results import Row, SeedMean, mean_over_seeds

DASH, NBSP, MINUS = "—", "\N{NO-BREAK SPACE}", "\N{MINUS SIGN}"  # a mean and its error stay on one line


class Measure(NamedTuple):
    """How a metric is printed: its name, decimals, and which direction is better ("high", "low", None: neither)."""

    label: str
    digits: int
    better: Literal["high", "low"] | None = None


@functools.cache
def names(table: str) -> dict[str, Any]:
    """A table of `names.toml`: data, metrics, figures or notes."""
    text = resources.files("emoe.reporting").joinpath("names.toml").read_text(encoding="utf-8")
    return dict(tomllib.loads(text)[table])


def measure(metric: str) -> Measure:
    """How to print a metric; an unknown one gets two decimals and no best value."""
    return Measure(**names("metrics").get(metric, {"label": metric, "digits": 2}))


def data_name(data: str) -> str:
    """A data set in tables."""
    return str(names("data").get(data, data))


def data_order(data: Iterable[str]) -> list[str]:
    """Data sets, the known ones first."""
    order = list(names("data"))
    return sorted(set(data), key=lambda name: (order.index(name) if name in order else len(order), name))


@dataclass(frozen=True)
class Line:
    """A line of a table: its labels, and the rows that its cells are written from."""

    labels: tuple[str, ...]
    rows: Sequence[Row] = ()
    method: str = ""
    reference: bool = False  # no model: never marked as the best
    paper: tuple[str, str] | None = None  # task and data set whose numbers of the paper compare with this line
    variant: str | None = None  # of sampling, by its name among the paper's numbers

    @property
    def label(self) -> str:
        """The first label."""
        return self.labels[0]

    def where(self, **fields: object) -> Line:
        """The same line with some of its rows."""
        same = [row for row in self.rows if all(getattr(row, name) == value for name, value in fields.items())]
        return dataclasses.replace(self, rows=same)

    def reported(self, metric: str, nfe: int | None = None) -> float | None:
        """The paper's number beside this line."""
        return self.paper and paper_value(*self.paper, self.method, metric, nfe, variant=self.variant)


def write(mean: SeedMean | None, form: str, *, unit: str = "", plain: bool = False) -> str:
    """`87.6 ±0.6`: a mean and its standard error in a form such as "+.3f"; `plain` without typographic signs."""
    if mean is None:
        return DASH
    text = f"{mean.mean:{form}}{unit}"
    if mean.stderr is not None:
        text += f"{NBSP}±{mean.stderr:{form.lstrip('+')}}{unit}"
    return text.replace(NBSP, " ") if plain else text.replace("-", MINUS)


@dataclass(frozen=True)
class Number:
    """A number of a cell: the rows that it is the mean over seeds of, and its form."""

    metric: str = ""  # default: the one metric of the line
    where: dict[str, Any] = field(default_factory=dict)  # further fields of the rows
    form: str = ""  # default: the decimals of the metric
    prefix: str = ""
    unit: str = ""
    per: float = 1.0  # what it is divided by
    error: bool = True  # print the standard error
    measured: bool = False  # of a single seed print the error of its measurement
    spread: str = ""  # the metric that is printed as the error
    plain: bool = False  # only signs and spaces of a keyboard

    def at(self, **where: object) -> Number:
        """The same of rows with these fields."""
        return dataclasses.replace(self, where={**self.where, **where})

    def mean(self, line: Line) -> SeedMean | None:
        """The mean over the seeds of a line."""
        wanted = self.where | ({"metric": self.metric} if self.metric else {})
        mean = mean_over_seeds(line.where(**wanted).rows, measured=self.measured)
        if mean is None:
            return None
        spread = mean_over_seeds(line.where(**wanted | {"metric": self.spread}).rows)
        error = spread and spread.mean if self.spread else mean.stderr if self.error else None
        return SeedMean(mean.mean / self.per, error and error / self.per)

    def __call__(self, line: Line) -> str:
        """The text of the cell of a line."""
        metric = self.metric or next((row.metric for row in line.rows), "")
        form = self.form or f".{measure(metric).digits}f"
        return self.prefix + write(self.mean(line), form, unit=self.unit, plain=self.plain)


@dataclass(frozen=True)
class Stack:
    """A cell of several numbers, one below the other, and the paper's in italics below them."""

    numbers: Sequence[Number]
    paper: str = ""  # form of the paper's numbers, for as many of ours as it has fields: "{:.1f}, H {:.2f}"

    def at(self, **where: object) -> Stack:
        """The same of rows with these fields."""
        return dataclasses.replace(self, numbers=[number.at(**where) for number in self.numbers])

    def __call__(self, line: Line) -> str:
        """The text of the cell of a line."""
        texts = [number(line) for number in self.numbers]
        if len(texts) > 1 and texts[0] == DASH:
            return DASH
        shown = self.numbers[: self.paper.count("{")]
        values = [line.reported(number.metric, number.where.get("nfe")) for number in shown]
        if shown and None not in values:
            scaled = (value / number.per for value, number in zip(values, shown, strict=True) if value is not None)
            texts.append(f"*({self.paper.format(*scaled)})*")
        return "\n".join(texts)


@dataclass(frozen=True)
class Reported:
    """The paper's number in a cell of its own."""

    metric: str
    form: str

    def __call__(self, line: Line) -> str:
        """The text of the cell of a line."""
        value = line.reported(self.metric)
        return DASH if value is None else f"*{value:{self.form}}*"


Column = tuple[str, Callable[[Line], str]]  # a heading, and how cells are written


def over(name: str, heading: str, values: Iterable[object], cell: Number | Stack) -> list[Column]:
    """A column for each value of a field of rows."""
    return [(heading.format(value), cell.at(**{name: value})) for value in values]
