"""Names of recipes in recorded rows: `toy-8modes-emoe train.steps=50` is a recipe and the fields changed in it."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from emoe.reporting.results import REFERENCES, ResultsError, Row


class Recipe(NamedTuple):
    """A recipe's name and the changed fields."""

    name: str
    changes: Mapping[str, str]


@functools.cache
def parse(recipe: str | None) -> Recipe:
    """The parts of a name; values may hold spaces."""
    name, *changes = re.split(r"\s+(?=[\w.-]+=)", str(recipe))
    return Recipe(name, dict(change.split("=", 1) for change in changes))


def as_typed(changes: Mapping[str, str]) -> str:
    """Changed fields as they are typed: `train.steps=50 optim.lr=1e-3`."""
    return " ".join(f"{field}={value}" for field, value in changes.items())


def all_with(changes: Mapping[str, str]) -> str:
    """A sentence of a note about the changes that all recipes share."""
    return f" All with `{as_typed(changes)}`." if changes else ""


def common(several: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """The changes that all of several recipes share."""
    first, *others = list(several) or [{}]
    return {field: value for field, value in first.items() if all(other.get(field) == value for other in others)}


def common_changes(rows: Iterable[Row]) -> dict[str, str]:
    """The changes that the recipes of all rows share: written once, not in every label."""
    return common(parse(recipe).changes for recipe in sorted({str(row.recipe) for row in rows}))


def reference_name(changes: Mapping[str, str]) -> str:
    """The recipe of real data beside models with these changes; changes of the data are part of it."""
    data = {field: value for field, value in changes.items() if field.startswith("domain.")}
    return f"reference {as_typed(data)}".strip()


def main_recipe(rows: list[Row]) -> list[Row]:
    """Of the rows of one method on one data set, those of its main recipe: ablations stay out of a mean.

    The main recipe is the only one there is or, among several, the one whose name begins with the task's name
    and ends in the method's (`toy-8modes-emoe`; neither `demo-emoe` nor `toy-8modes-emoe method.route-tau=0`).
    """
    recipes = sorted({str(row.recipe) for row in rows})
    if len(recipes) < 2:
        return rows
    task, method = rows[0].task, rows[0].method
    names = [name for name in recipes if name.startswith(f"{task}-")] or recipes
    own = sorted((len(parse(name).changes), name) for name in names if parse(name).name.endswith(f"-{method}"))
    plain = [name for changes, name in own if changes == own[0][0]]
    if method in REFERENCES:  # the same beside every recipe it was measured with
        plain = names[:1]
    if len(plain) != 1:
        raise ResultsError(f"cannot tell the main recipe of {method} from {', '.join(recipes)}")
    return [row for row in rows if str(row.recipe) == plain[0]]
