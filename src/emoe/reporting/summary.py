"""The one table of the README: every task at few and at many network calls."""

from __future__ import annotations

from functools import partial

from emoe.reporting.cells import Line, Number, Stack
from emoe.reporting.grid import main_rows, sampled
from emoe.reporting.results import Results, methods_of, select
from emoe.reporting.table import Table, build

Plain = partial(Number, error=False)
TOY = Stack([Plain("validity", form=".1f"), Plain("overlap", form=".1f")])
FRECHET = Stack([Plain("frechet", form=".1f")])
TEXT = Stack([Plain("gen_ppl", {"convention": "paper"}, ",.0f"), Plain("entropy", {"convention": None}, ".2f", "H ")])
COLUMNS = {  # heading -> cell, data set or task, network calls
    "8-modes, 1 call": (TOY, {"data": "8-modes", "nfe": 1}),
    "Swiss-roll, 1 call": (TOY, {"data": "swiss-roll", "nfe": 1}),
    "MNIST, 1 call": (FRECHET, {"data": "mnist", "nfe": 1}),
    "64 calls": (FRECHET, {"data": "mnist", "nfe": 64}),
    "news, 1 call": (TEXT, {"task": "text", "nfe": 1}),
    "128 calls": (TEXT, {"task": "text", "nfe": 128}),
}


def summary(toy: Results, mnist: Results, text: Results) -> list[Table]:
    """Methods that were measured on the toy, and the other models of text, without errors."""
    rows = main_rows(sampled(toy), task="toy", metric=["validity", "overlap"])
    rows += mnist.select(task="mnist", metric="frechet") + text.select(task="text", metric=["gen_ppl", "entropy"])
    rows = [row for row in Results(rows).models.rows if " method." not in str(row.recipe)]
    lines = [Line((toy.label(name),), select(rows, method=name), name) for name in methods_of(rows)]
    return build(["Method"], lines, [(heading, partial(_cell, *column)) for heading, column in COLUMNS.items()])


def _cell(cell: Stack, where: dict[str, object], line: Line) -> str:
    """The first number, and the second in parentheses."""
    first, *second = cell(line.where(**where)).split("\n")
    return first + "".join(f" ({text})" for text in second)
