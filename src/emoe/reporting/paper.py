"""The numbers that the paper reports, looked up by the names of our results."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from importlib import resources
from typing import Any

from emoe.reporting.recipes import parse
from emoe.reporting.results import Row

# Task of rows -> data set of the paper ("": the same), recipes that its numbers compare with, fields that may differ.
COMPARABLE: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "toy": ("", ("toy-",), ()),
    "mnist": ("binarized-mnist", ("mnist-",), ()),
    "text": ("lm1b", ("news-small-", "lm1b-"), ("train.", "optim.")),
}


@functools.cache
def paper_numbers() -> dict[tuple[Any, ...], float]:
    """The numbers of `paper.json` by data, method, metric, NFE and variant.

    The NFE is None for metrics that do not depend on it. The variant is None for the main comparison; `greedy` and
    `route_tau=1` for the collapse ablation of E-MoE, `official` for perplexities that the paper quotes from elsewhere.
    """
    text = resources.files("emoe.reporting").joinpath("paper.json").read_text(encoding="utf-8")
    key = ("data", "method", "metric", "nfe", "variant")
    return {tuple(row[name] for name in key): row["value"] for row in json.loads(text)["rows"]}


def paper_methods() -> set[str]:
    """The methods of the paper, under our names."""
    return {key[1] for key in paper_numbers()}


def comparable(rows: Iterable[Row]) -> str:
    """The paper's data set, if its numbers compare with the recipe of one of the rows."""
    for task, recipe, own in {(row.task, row.recipe, row.data) for row in rows}:
        data, names, fields = COMPARABLE.get(task, ("", (), ()))
        name, changes = parse(recipe)
        if name.startswith(names) and all(field.startswith(fields) for field in changes):
            return data or own
    return ""
