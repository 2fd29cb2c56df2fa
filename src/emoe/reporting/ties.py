"""Tables of the study of row lengths (`emoe reproduce scaling`): rows of tied symbols, for several ways to learn."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from typing import NamedTuple

from emoe.reporting.cells import DASH, Column, Line, Number, Plain
from emoe.reporting.notes import note
from emoe.reporting.recipes import parse, with_changes, without
from emoe.reporting.results import Results, select
from emoe.reporting.table import Table, build, models

DEPTHS = {2: 2, 4: 3, 8: 4, 16: 4, 32: 6, 64: 6}  # length of a row -> blocks of the network
RECIPE_DEPTH = "4"  # of the recipes ties-*, whose names do not contain it
FIELDS = ("domain.family", "domain.length", "domain.symbols", "backbone.depth")  # of the data, and the depth
HEALTH = ("coordination_gain", "least_usage_entropy", "effective_draws", "dead_experts")


class TieSetting(NamedTuple):
    """Data of a run: a family of ties (with its number of symbols, if unusual) and a length."""

    family: str
    length: int


def default_depth(length: int) -> int:
    """Return the blocks of the network for rows of a length: those of the next length in `DEPTHS`, or of the last."""
    return next((depth for known, depth in DEPTHS.items() if known >= length), max(DEPTHS.values()))


@functools.cache
def setting_of(data: str) -> TieSetting:
    """Parse `pairs-L16`, or `pairs-L16-S4` for an unusual number of symbols."""
    family, length, symbols = re.fullmatch(r"(\w+)-L(\d+)(-S\d+)?", data).groups("")  # type: ignore[union-attr]
    return TieSetting(family + symbols, int(length))


def across_data(results: Results) -> Results:
    """Remove the fields of the data, and the depth unless it is unusual, from the recipes of rows."""
    rows = []
    for row in results.rows:
        changes = parse(row.recipe).changes
        depth = changes.get("backbone.depth", RECIPE_DEPTH)
        usual = depth == str(default_depth(setting_of(row.data).length))
        rows.append(with_changes(row, without(changes, FIELDS) | ({} if usual else {"backbone.depth": depth})))
    return results.of(rows)


def by_family(results: Results) -> dict[str, list[Line]]:
    """Return for each family a line for each model, over all lengths, and a line of chance."""
    chance = Line(("chance",), results.select(method="ideal"), reference=True)
    lines, data = [*models(across_data(results)), chance], {row.data for row in results.models.rows}
    families: dict[str, list[Line]] = {}
    for family in sorted({setting_of(name).family for name in data}):
        own = [line.where(data=[name for name in data if setting_of(name).family == family]) for line in lines]
        families[family] = [line for line in own if line.rows]
    return families


def scaling_tables(results: Results) -> list[Table]:
    """Return a table of ties kept in one step and, in parentheses, coverage against the length of a row."""
    results, lines = results.only(task="ties"), list[Line]()

    def cell(length: int, line: Line) -> str:
        same = replace(line, rows=[row for row in select(line.rows, nfe=1) if setting_of(row.data).length == length])
        coverage = Plain("coverage")(same)
        return Number("ties")(same) + f" ({coverage})" * (coverage != DASH)

    for family, own in by_family(results).items():
        lines += [replace(line, labels=(family, *line.labels)) for line in own]
    lengths = sorted({setting_of(row.data).length for row in results.models.rows})
    columns = [(f"L = {length}", functools.partial(cell, length)) for length in lengths]
    return build(["Ties", "Model"], lines, columns, note("scaling-table", across_data(results)))


def health_tables(results: Results) -> list[Table]:
    """Return a table of the latent at the largest length of each family; models without a latent are left out."""
    results, lines = results.only(task="ties"), list[Line]()
    longest = dict(sorted({setting_of(row.data) for row in results.select(metric=HEALTH)}))  # family -> length
    for family, own in by_family(results).items():
        for line in own:
            rows = select(line.rows, metric=HEALTH)
            if rows := [row for row in rows if setting_of(row.data).length == longest[family]]:
                lines.append(replace(line, labels=(family, str(longest[family]), *line.labels), rows=rows))

    def dead_experts(line: Line) -> str:
        dead = line.where(metric="dead_experts")
        return f"{Plain(form='.3g')(dead)} of {dead.rows[0].n}" if dead.rows else DASH

    columns: list[Column] = [
        ("coordination gain", Number("coordination_gain", form="+.3f")),
        ("least usage entropy", Number("least_usage_entropy")),
        ("effective draws", Number("effective_draws")),
        ("dead experts", dead_experts),
    ]
    return build(["Ties", "L", "Model"], lines, columns, note("scaling-health", across_data(results)))
