"""Curves with error bars: a metric over NFE, over the length of rows or over training steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from emoe.figures.base import CYCLE, LEGEND, REFERENCE, canvas

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_POINTS = 300  # of one curve; more are averaged


@dataclass(frozen=True)
class Curve:
    """Points (x, y) of one curve with its style; errors are half the length of the bars."""

    points: Sequence[tuple[float, float]]
    errors: Sequence[float | None] = ()
    colour: str | None = None
    style: str = "-"


@dataclass(frozen=True)
class Panel:
    """One panel: curves by label, and horizontal lines for references."""

    title: str
    curves: Mapping[str, Curve]
    xlabel: str = "NFE"
    ylabel: str = ""
    log_x: bool = True
    log_y: bool = False
    levels: Mapping[str, float] = field(default_factory=dict)


def draw(panels: Sequence[Sequence[Panel]], *, width: float = 4.0, height: float = 3.2) -> Figure:
    """Draw a grid of panels with one legend below; rows may have different lengths."""
    columns = max(map(len, panels))
    figure = canvas(width * columns, height * len(panels) + 0.3)
    axes = figure.subplots(len(panels), columns, squeeze=False)
    for line, row in zip(axes, panels, strict=True):
        for axis in line[len(row) :]:
            axis.set_axis_off()
        for axis, panel in zip(line, row, strict=False):
            _draw_panel(axis, panel)
    # Equal labels appear once.
    entries = dict(pair[::-1] for axis in figure.axes for pair in zip(*axis.get_legend_handles_labels(), strict=True))
    if entries:
        figure.legend([*entries.values()], [*entries], ncols=min(6, len(entries)), **LEGEND)
    return figure


def _draw_panel(axis: Any, panel: Panel) -> None:
    for number, (label, curve) in enumerate(panel.curves.items()):
        if points := _thin(curve.points):
            errors = [error or 0.0 for error in curve.errors] if len(points) == len(curve.errors) else None
            colour, marker = curve.colour or CYCLE[number % len(CYCLE)], "o" if len(points) <= 12 else None
            style = {"color": colour, "marker": marker, "markersize": 3.5, "linewidth": 1.2, "capsize": 2}
            axis.errorbar(*zip(*points, strict=True), yerr=errors, label=label, linestyle=curve.style, **style)
    for label, level in panel.levels.items():
        axis.axhline(level, color=REFERENCE, linestyle="--", linewidth=1, label=label)
    if panel.log_x:
        axis.set_xscale("log", base=2)
        marks = sorted({x for curve in panel.curves.values() for x, _ in curve.points})
        if len(marks) <= 12:
            axis.set(xticks=marks, xticklabels=[f"{mark:g}" for mark in marks])
    if panel.log_y:
        axis.set_yscale("log")
    axis.set_title(panel.title, fontsize=10)
    axis.set(xlabel=panel.xlabel, ylabel=panel.ylabel)
    axis.grid(color="0.92")


def _thin(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return at most about 300 finite points: means over groups of neighbours, so that no spike is picked by chance."""
    finite = [(float(x), float(y)) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    size = max(1, math.ceil(len(finite) / MOST_POINTS))
    groups = [finite[start : start + size] for start in range(0, len(finite), size)]
    return [(math.fsum(xs) / len(xs), math.fsum(ys) / len(ys)) for xs, ys in (zip(*g, strict=True) for g in groups)]
