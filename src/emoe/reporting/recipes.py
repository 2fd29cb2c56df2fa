"""Names of recipes in recorded rows, and the paper's numbers that compare with them.

`toy-8modes-emoe train.steps=50` is a recipe and the fields changed in it.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from emoe.reporting.results import REFERENCES, ResultsError, Row

# Task of rows -> data set of the paper ("": the same), recipes that its numbers compare with, fields that may differ.
COMPARABLE: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "toy": ("", ("toy-",), ()),
    "mnist": ("binarized-mnist", ("mnist-",), ()),
    "text": ("lm1b", ("news-small-", "lm1b-"), ("train.", "optim.")),
}


class Recipe(NamedTuple):
    """A recipe's name and the changed fields."""

    name: str
    changes: Mapping[str, str]


@functools.cache
def parse(recipe: str | None) -> Recipe:
    """The parts of a name; values may hold spaces."""
    name, *changes = re.split(r"\s+(?=[\w.-]+=)", str(recipe))
    return Recipe(name, dict(change.split("=", 1) for change in changes))


def without(changes: Mapping[str, str], fields: Container[str]) -> dict[str, str]:
    """Changed fields but some."""
    return {field: value for field, value in changes.items() if field not in fields}


def as_typed(changes: Mapping[str, str]) -> str:
    """Changed fields as they are typed: `train.steps=50 optim.lr=1e-3`."""
    return " ".join(f"{field}={value}" for field, value in changes.items())


def common(several: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """The changes that all of several recipes share: written once, not in every label."""
    first, *others = list(several) or [{}]
    return {field: value for field, value in first.items() if all(other.get(field) == value for other in others)}


def common_changes(rows: Iterable[Row]) -> dict[str, str]:
    """The changes that the recipes of all rows share."""
    return common(parse(row.recipe).changes for row in rows)


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
    if method in REFERENCES:  # the same beside every recipe it was measured with
        plain = names[:1]
    else:
        own = {name: len(parse(name).changes) for name in names if parse(name).name.endswith(f"-{method}")}
        plain = [name for name, changes in own.items() if changes == min(own.values())]
    if len(plain) != 1:
        raise ResultsError(f"cannot tell the main recipe of {method} from {', '.join(recipes)}")
    return [row for row in rows if str(row.recipe) == plain[0]]


@functools.cache
def paper_numbers() -> dict[tuple[Any, ...], float]:
    """The numbers of `paper.json` by data, method, metric, NFE and variant, under our names.

    The NFE is None for metrics that do not depend on it. The variant is None for the main comparison; `greedy` and
    `route_tau=1` for the collapse ablation of E-MoE, `official` for perplexities that the paper quotes from elsewhere.
    """
    key, text = ("data", "method", "metric", "nfe", "variant"), Path(__file__).with_name("paper.json").read_bytes()
    return {tuple(row[name] for name in key): row["value"] for row in json.loads(text)["rows"]}


def paper_methods() -> set[str]:
    """The methods of the paper, under our names."""
    return {key[1] for key in paper_numbers()}


def comparable(rows: Iterable[Row]) -> str:
    """The paper's data set, if its numbers compare with the recipe of one of the rows."""
    for task, recipe, own in {(row.task, row.recipe, row.data) for row in rows}:
        data, prefixes, fields = COMPARABLE.get(task, ("", (), ()))
        name, changes = parse(recipe)
        if name.startswith(prefixes) and all(field.startswith(fields) for field in changes):
            return data or own
    return ""
