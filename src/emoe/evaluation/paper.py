"""The numbers the paper reports, looked up by the names our results use."""

from __future__ import annotations

import functools
import json
from importlib import resources
from typing import Any


@functools.cache
def paper_rows() -> tuple[dict[str, Any], ...]:
    """All rows of `paper.json`: table, task, data, method, metric, nfe, variant, value, std."""
    text = resources.files("emoe.evaluation").joinpath("paper.json").read_text(encoding="utf-8")
    return tuple(json.loads(text)["rows"])


@functools.cache
def _index() -> dict[tuple[Any, ...], float]:
    names = ("task", "data", "method", "metric", "nfe", "variant")
    return {tuple(row[name] for name in names): row["value"] for row in paper_rows()}


def paper_value(
    task: str, data: str, method: str, metric: str, nfe: int | None, *, variant: str | None = None
) -> float | None:
    """The paper's figure, or None where it gives none.

    Args:
        task: toy, mnist or lm1b.
        data: The `data` of a row, for instance 8-modes.
        method: The `method` of a row.
        metric: The `metric` of a row.
        nfe: Network calls per sample; None for what does not depend on it (bpd, ppl, params).
        variant: None for the main comparison; `greedy` and `route_tau=1` for the collapse ablation of E-MoE,
            `official` for perplexities the paper quotes from elsewhere.
    """
    return _index().get((task, data, method, metric, nfe, variant))
