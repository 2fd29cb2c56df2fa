"""Names of recipes in recorded rows, and the paper's numbers that compare with them.

`toy-8modes-emoe train.steps=50` is a recipe and the fields changed in it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from emoe.reporting.results import Row

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
    """Split a name; values may contain spaces."""
    name, *changes = re.split(r"\s+(?=[\w.-]+=)", str(recipe))
    return Recipe(name, dict(change.split("=", 1) for change in changes))


def without(changes: Mapping[str, str], fields: Container[str]) -> dict[str, str]:
    """Return changed fields except some."""
    return {field: value for field, value in changes.items() if field not in fields}


def as_typed(changes: Mapping[str, str]) -> str:
    """Return changed fields in the form of the command line: `train.steps=50 optim.lr=1e-3`."""
    return " ".join(f"{field}={value}" for field, value in changes.items())


def with_changes(row: Row, changes: Mapping[str, str]) -> Row:
    """Return a row whose recipe has other changed fields."""
    return dataclasses.replace(row, recipe=f"{parse(row.recipe).name} {as_typed(changes)}".strip())


def common_changes(recipes: Iterable[str | None]) -> dict[str, str]:
    """Return the changes that all recipes share: they are written once, not in every label."""
    first, *others = [parse(recipe).changes for recipe in recipes] or [{}]
    return {field: value for field, value in first.items() if all(other.get(field) == value for other in others)}


def reference_name(changes: Mapping[str, str]) -> str:
    """Return the recipe of real data for models with these changes: it has their changes of the data."""
    data = {field: value for field, value in changes.items() if field.startswith("domain.")}
    return f"reference {as_typed(data)}".strip()


@functools.cache
def paper_numbers() -> dict[tuple[Any, ...], float]:
    """Return the numbers of `paper.json` by data, method, metric, NFE and variant, under our names.

    The NFE is None for metrics that do not depend on it. The variant is None for the main comparison; `route_tau=0` and
    `route_tau=1` for the collapse ablation of E-MoE, `official` for perplexities that the paper quotes from elsewhere.
    """
    key, text = ("data", "method", "metric", "nfe", "variant"), Path(__file__).with_name("paper.json").read_bytes()
    return {tuple(row[name] for name in key): row["value"] for row in json.loads(text)["rows"]}


def comparable(rows: Iterable[Row]) -> str:
    """Return the paper's data set if its numbers compare with the recipe of one of the rows."""
    for task, recipe, own in {(row.task, row.recipe, row.data) for row in rows}:
        data, prefixes, fields = COMPARABLE.get(task, ("", (), ()))
        name, changes = parse(recipe)
        if name.startswith(prefixes) and all(field.startswith(fields) for field in changes):
            return data or own
    return ""
