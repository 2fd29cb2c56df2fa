"""Curves of rows of results, for the figures of studies."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from emoe.figures.curves import Curve
from emoe.reporting.results import Row, mean_over_seeds


def mean_curve(rows: Iterable[Row], x: Callable[[Row], float | None], *, colour: str = "", style: str = "-") -> Curve:
    """Means over seeds of rows of one metric against x, with their standard errors; rows without x are left out."""
    groups: dict[float, list[Row]] = {}
    for row in rows:
        if (value := x(row)) is not None:
            groups.setdefault(value, []).append(row)
    means = {value: mean for value in sorted(groups) if (mean := mean_over_seeds(groups[value], measured=True))}
    points = [(value, mean.mean) for value, mean in means.items()]
    return Curve(points, [mean.stderr for mean in means.values()], colour=colour or None, style=style)
