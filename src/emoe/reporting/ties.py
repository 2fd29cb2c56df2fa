"""Tables of the study of row lengths (`emoe reproduce scaling`): rows of tied symbols, for several ways to learn."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import NamedTuple

from emoe.reporting.cells import DASH, Column, Line, Number, Plain
from emoe.reporting.recipes import as_typed, common, parse, without
from emoe.reporting.results import Results, Row, select
from emoe.reporting.table import Table, build, comma, note

Models = dict[str, tuple[str, dict[str, str]]]  # name -> recipe and changed fields
VARIANTS: Models = {
    "mdlm": ("ties-mdlm", {}),
    "vadd": ("ties-vadd", {}),
    "paper": ("ties-emoe", {}),
    "plus": ("ties-emoe-wake-sleep", {}),
    "wake-sleep-row": ("ties-emoe-wake-sleep", {"method.compare.credit": "row"}),
    "all-carry": ("ties-emoe-wake-sleep", {"method.compare.in-turn": "false"}),
}
EARLIER: Models = {  # the same under the names and fields of schema 1, as recorded
    "plus": ("ties-emoe-plus", {}),
    "all-carry": ("ties-emoe-plus", {"method.carriers": "all"}),
}
DEPTHS = {2: 2, 4: 3, 8: 4, 16: 4, 32: 6, 64: 6}  # length of a row -> blocks of the network
RECIPE_DEPTH = "4"  # of the recipes ties-*, whose names do not say it
FIELDS = ("domain.family", "domain.length", "domain.symbols", "backbone.depth")  # no part of a variant
HEALTH = ("coordination_gain", "least_usage_entropy", "effective_draws", "dead_experts")


class TieSetting(NamedTuple):
    """Where a variant was trained: a family of ties (with its number of symbols, if unusual) and a length."""

    family: str
    length: int


def default_depth(length: int) -> int:
    """Blocks of the network for rows of a length: those of the next length that `DEPTHS` has, or of its last."""
    return next((depth for known, depth in DEPTHS.items() if known >= length), max(DEPTHS.values()))


@functools.cache
def setting_of(data: str) -> TieSetting:
    """`pairs-L16`, or `pairs-L16-S4` for an unusual number of symbols."""
    family, length, symbols = re.fullmatch(r"(\w+)-L(\d+)(-S\d+)?", data).groups("")  # type: ignore[union-attr]
    return TieSetting(family + symbols, int(length))


@functools.cache
def variant_of(recipe: str | None) -> tuple[str, dict[str, str]]:
    """The variant behind a recipe's name, and further changes but those of data and depth."""
    name, changes = parse(recipe)
    left, known = without(changes, FIELDS), [*VARIANTS.items(), *EARLIER.items()]
    fitting = [(variant, own) for variant, (base, own) in known if base == name and own.items() <= left.items()]
    variant, own = max(fitting, default=(name, {}), key=lambda fit: len(fit[1]))
    return variant, without(left, own)


def by_variant(results: Results) -> dict[tuple[str, str], list[Row]]:
    """The rows of models by family and variant; a label has what was not changed in all models, and unusual depth."""
    shared = common(variant_of(row.recipe)[1] for row in results.models.rows)
    groups: dict[tuple[str, int, str], list[Row]] = {}
    for row in results.models.rows:
        ties, (variant, changes) = setting_of(row.data), variant_of(row.recipe)
        own, depth = without(changes, shared), parse(row.recipe).changes.get("backbone.depth", RECIPE_DEPTH)
        if depth != str(default_depth(ties.length)):
            own["backbone.depth"] = depth
        label, rank = f"{variant} {as_typed(own)}".strip(), [*VARIANTS, variant].index(variant)
        groups.setdefault((ties.family, rank, label), []).append(row)
    return {(family, label): rows for (family, _, label), rows in sorted(groups.items(), key=lambda item: item[0])}


def scaling_tables(results: Results) -> list[Table]:
    """Ties kept in one step and, in parentheses, coverage against the length of a row, by family and variant."""
    results = results.only(task="ties")
    groups, ideal = by_variant(results), results.select(method="ideal")

    def cell(length: int, line: Line) -> str:
        same = Line((), [row for row in select(line.rows, nfe=1) if setting_of(row.data).length == length])
        coverage = Plain("coverage")(same)
        return Number("ties")(same) + f" ({coverage})" * (coverage != DASH)

    lines = []
    for family in dict.fromkeys(family for family, _ in groups):
        lines += [Line(key, rows) for key, rows in groups.items() if key[0] == family]
        lines.append(Line((family, "chance"), [row for row in ideal if setting_of(row.data).family == family]))
    lengths = sorted({setting_of(row.data).length for row in results.models.rows})
    columns = [(f"L = {length}", functools.partial(cell, length)) for length in lengths]
    return build(["Ties", "Variant"], lines, columns, _note("scaling-table", results, lines))


def health_tables(results: Results) -> list[Table]:
    """The latent at the largest length of each family; variants without a latent are left out."""
    results = results.only(task="ties")
    longest = dict(sorted({setting_of(row.data) for row in results.select(metric=HEALTH)}))  # family -> length
    lines = []
    for (family, label), rows in by_variant(results).items():
        if own := [row for row in select(rows, metric=HEALTH) if setting_of(row.data).length == longest[family]]:
            lines.append(Line((family, str(longest[family]), label), own))

    def dead_experts(line: Line) -> str:
        dead = line.where(metric="dead_experts")
        return f"{Plain(form='.3g')(dead)} of {dead.rows[0].n}" if dead.rows else DASH

    columns: list[Column] = [
        ("coordination gain", Number("coordination_gain", form="+.3f")),
        ("least usage entropy", Number("least_usage_entropy")),
        ("effective draws", Number("effective_draws")),
        ("dead experts", dead_experts),
    ]
    return build(["Ties", "L", "Variant"], lines, columns, _note("scaling-health", results, lines), align="lrl")


def _note(name: str, results: Results, lines: Sequence[Line]) -> str:
    """A note that says which recipe and changes each variant is."""
    words = {}
    for row in (line.rows[0] for line in lines if line.rows and line.labels[-1] != "chance"):
        variant, left = variant_of(row.recipe)
        recipe, changes = parse(row.recipe)
        words[variant] = f"{variant} is `{f'{recipe} {as_typed(without(changes, (*left, *FIELDS)))}'.strip()}`"
    shared = common(variant_of(row.recipe)[1] for row in results.models.rows)
    return note(name, results, shared, variants=comma(words.values()))
