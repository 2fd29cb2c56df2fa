"""Tables of the study of row lengths (`emoe reproduce scaling`): rows of tied symbols, for several ways to learn."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable
from typing import NamedTuple

from emoe.reporting.cells import DASH, Column, Line, Number
from emoe.reporting.recipes import all_with, as_typed, common, parse
from emoe.reporting.results import Results, Row
from emoe.reporting.table import Table, TableSpec, build, comma, note

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
    "wake-sleep-row": ("ties-emoe-plus", {"method.credit": "row"}),
    "all-carry": ("ties-emoe-plus", {"method.carriers": "all"}),
    "straight-through-spread": ("ties-emoe", {"method.carriers": "spread", "method.last-block": "summed"}),
}
DEPTHS = {2: 2, 4: 3, 8: 4, 16: 4, 32: 6, 64: 6}  # length of a row -> blocks of the network
RECIPE_DEPTH = 4  # of the recipes ties-*, whose names do not say it
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


def variant_of(recipe: str | None) -> tuple[str, dict[str, str]]:
    """The variant behind a recipe's name, and further changes but those of data and depth."""
    name, changes = parse(recipe)
    left = {field: value for field, value in changes.items() if field not in FIELDS}
    known = [*VARIANTS.items(), *EARLIER.items()]
    fitting = [(variant, own) for variant, (base, own) in known if base == name and own.items() <= left.items()]
    variant, own = max(fitting, default=(name, {}), key=lambda fit: len(fit[1]))
    return variant, {field: value for field, value in left.items() if field not in own}


def common_changes(results: Results) -> dict[str, str]:
    """Further changes that all models share."""
    return common(variant_of(recipe)[1] for recipe in sorted({str(row.recipe) for row in results.models.rows}))


def by_variant(results: Results) -> dict[tuple[TieSetting, str], list[Row]]:
    """The rows of models on tied symbols, by ties and variant.

    A variant's name holds what was changed in it but not in all models. The depth is part of it only where the same
    one was trained on the same ties with several depths, and then only if it is not the usual one.
    """
    shared = common_changes(results)
    groups: dict[tuple[TieSetting, str], dict[int, list[Row]]] = {}
    for row in results.models.rows:
        variant, changes = variant_of(row.recipe)
        own = as_typed({field: value for field, value in changes.items() if field not in shared})
        depth = int(parse(row.recipe).changes.get("backbone.depth", RECIPE_DEPTH))
        groups.setdefault((setting_of(row.data), f"{variant} {own}".strip()), {}).setdefault(depth, []).append(row)
    several = any(len(by_depth) > 1 for by_depth in groups.values())
    return {
        (ties, label + f" backbone.depth={depth}" * (several and depth != default_depth(ties.length))): rows
        for (ties, label), by_depth in groups.items()
        for depth, rows in by_depth.items()
    }


def ordered_variants(labels: Iterable[str]) -> list[str]:
    """Labels in the order of `VARIANTS`, those with further changes after their own variant."""
    order = list(VARIANTS | EARLIER)

    def key(label: str) -> tuple[int, str]:
        first = label.partition(" ")[0]
        return (order.index(first) if first in order else len(order)), label

    return sorted(set(labels), key=key)


def scaling_tables(results: Results) -> list[Table]:
    """Ties kept in one step and, in parentheses, coverage against the length of a row, by family and variant."""
    results = results.only(task="ties")
    groups, ideal = by_variant(results), results.select(method="ideal")

    def cell(length: int, line: Line) -> str:
        same = Line((), [row for row in line.rows if row.nfe == 1 and setting_of(row.data).length == length])
        coverage = Number("coverage").mean(same)
        return Number("ties")(same) + (f" ({coverage.mean:.1f})" if coverage else "")

    lines = []
    for family in sorted({ties.family for ties, _ in groups}):
        own = {key: rows for key, rows in groups.items() if key[0].family == family}
        for label in ordered_variants(label for _, label in own):
            lines.append(Line((family, label), [row for key, rows in own.items() if key[1] == label for row in rows]))
        lines.append(Line((family, "chance"), [row for row in ideal if setting_of(row.data).family == family]))
    columns = [(f"L = {length}", functools.partial(cell, length)) for length in sorted({t.length for t, _ in groups})]
    return _tables("scaling-table", results, TableSpec(["Ties", "Variant"], lines, columns, align="ll"))


def health_tables(results: Results) -> list[Table]:
    """The latent at the largest length of each family; variants without a latent are left out."""
    results = results.only(task="ties")
    groups = {key: rows for key, rows in by_variant(results).items() if any(row.metric in HEALTH for row in rows)}
    largest = {ties.family: ties for ties, _ in sorted(groups)}
    lines = [
        Line((ties.family, str(ties.length), label), groups[ties, label])
        for ties in largest.values()
        for label in ordered_variants(label for other, label in groups if other == ties)
    ]
    columns: list[Column] = [
        ("coordination gain", Number("coordination_gain", form="+.3f")),
        ("least usage entropy", Number("least_usage_entropy")),
        ("effective draws", Number("effective_draws")),
        ("dead experts", _dead_experts),
    ]
    return _tables("scaling-health", results, TableSpec(["Ties", "L", "Variant"], lines, columns, align="lrl"))


def _dead_experts(line: Line) -> str:
    dead = line.where(metric="dead_experts")
    return f"{Number(form='.3g', error=False)(dead)} of {dead.rows[0].n}" if dead.rows else DASH


def _tables(name: str, results: Results, spec: TableSpec) -> list[Table]:
    labels = dict.fromkeys(line.labels[-1].partition(" ")[0] for line in spec.lines if line.labels[-1] != "chance")
    measured = {parse(row.recipe).name for row in results.models.rows}
    known = {label: one for models in (EARLIER, VARIANTS) for label, one in models.items() if one[0] in measured}
    recipes = {label: known.get(label, (label, {})) for label in labels}
    words = (f"{label} is `{f'{recipe} {as_typed(own)}'.strip()}`" for label, (recipe, own) in recipes.items())
    values = {"variants": comma(words), "numbers": comma(results.seeds), "shared": all_with(common_changes(results))}
    return build(dataclasses.replace(spec, note=note(name, results, **values)))
