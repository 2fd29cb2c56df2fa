"""The one table of the README: every task at few and at many network calls."""

from __future__ import annotations

from functools import partial

from emoe.reporting.cells import Column, Line, Number, Stack
from emoe.reporting.grid import main_rows, sampled
from emoe.reporting.results import Results, methods_of
from emoe.reporting.table import Table, TableSpec, build

VALIDITY, OVERLAP = (Number(metric, form=".1f", error=False) for metric in ("validity", "overlap"))
FRECHET = Number("frechet", form=".1f", error=False)
PERPLEXITY = Number("gen_ppl", {"convention": "paper"}, ",.0f", error=False)
ENTROPY = Number("entropy", {"convention": None}, ".2f", prefix="H ", error=False)
CELLS: dict[str, Stack] = {
    "8-modes, 1 call": Stack([number.at(data="8-modes", nfe=1) for number in (VALIDITY, OVERLAP)]),
    "Swiss-roll, 1 call": Stack([number.at(data="swiss-roll", nfe=1) for number in (VALIDITY, OVERLAP)]),
    "MNIST, 1 call": Stack([FRECHET.at(data="mnist", nfe=1)]),
    "64 calls": Stack([FRECHET.at(data="mnist", nfe=64)]),
    "news, 1 call": Stack([number.at(task="text", nfe=1) for number in (PERPLEXITY, ENTROPY)]),
    "128 calls": Stack([number.at(task="text", nfe=128) for number in (PERPLEXITY, ENTROPY)]),
}


def summary(toy: Results, mnist: Results, text: Results) -> list[Table]:
    """Methods that were measured on the toy, and the other models of text, without errors."""
    rows = main_rows(sampled(toy), task="toy", metric=["validity", "overlap"])
    rows += mnist.select(task="mnist", metric="frechet") + text.select(task="text", metric=["gen_ppl", "entropy"])
    models = [row for row in Results().of(rows).models.rows if row.recipe and " method." not in row.recipe]
    lines = [
        Line((toy.label(name),), [row for row in models if row.method == name], name) for name in methods_of(models)
    ]
    columns: list[Column] = [(heading, partial(_cell, cell)) for heading, cell in CELLS.items()]
    return build(TableSpec(["Method"], lines, columns))


def _cell(cell: Stack, line: Line) -> str:
    """The first number, and the second in parentheses."""
    first, *second = cell(line).split("\n")
    return first + "".join(f" ({text})" for text in second)
