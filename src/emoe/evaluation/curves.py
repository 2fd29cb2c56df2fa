"""Line charts as inline SVG: they follow the page's colours, stay sharp and need no library."""

from __future__ import annotations

import html
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

Points = Sequence[tuple[float | int, float | int]]
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640.0, 310.0, 64.0, 16.0, 14.0, 50.0
# A method keeps its colour in every chart; yardsticks are dashed. Other names take the colours in turn.
COLOURS = {"MDLM": 0, "VADD": 1, "E-MoE": 2, "E-MoE+": 3, "SEDD": 4, "BD3-LM": 5, "AR": 6}
DASHES = {"ideal factorised": "7 4", "real data": "2 4"}


@dataclass(frozen=True)
class Curves:
    """Named series of (x, y) points in one chart; `log_x` suits numbers of steps that double."""

    series: Mapping[str, Points]
    title: str = ""
    ylabel: str = ""
    xlabel: str = "step"
    note: str = ""
    log_x: bool = False


def read_curve(path: str | Path, key: str, *, x: str = "step") -> list[tuple[float, float]]:
    """The points (x, key) of a metrics.jsonl file; lines without them, or cut by a crash, are skipped."""
    points = []
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        here, there = (entry.get(x), entry.get(key)) if isinstance(entry, dict) else (None, None)
        if isinstance(here, int | float) and isinstance(there, int | float):
            points.append((float(here), float(there)))
    return points


def thin(points: Points, limit: int = 300) -> list[tuple[float, float]]:
    """At most about `limit` points: means over runs of neighbours, so that no spike is picked by chance."""
    finite = [(float(x), float(y)) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    size = max(1, math.ceil(len(finite) / limit))
    groups = [finite[start : start + size] for start in range(0, len(finite), size)]
    return [(math.fsum(xs) / len(xs), math.fsum(ys) / len(ys)) for xs, ys in (zip(*g, strict=True) for g in groups)]


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers between low and high, about `count` of them."""
    span = (high - low) or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span / count))
    step = next(power * factor for factor in (1, 2, 5, 10) if span / (power * factor) <= count)
    first = math.ceil(low / step - 1e-9)
    return [step * place for place in range(first, math.floor(high / step + 1e-9) + 1)]


@dataclass(frozen=True)
class _Frame:
    """Where data lie on the drawing."""

    xs: list[float]  # all x, ascending
    low: float
    high: float
    log_x: bool

    def across(self, x: float) -> float:
        low, high, x = (math.log(v) if self.log_x else v for v in (self.xs[0], self.xs[-1], x))
        return LEFT + (WIDTH - LEFT - RIGHT) * ((x - low) / (high - low) if high > low else 0.5)

    def down(self, y: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (y - self.low) / (self.high - self.low)

    def axes(self, xlabel: str, ylabel: str) -> str:
        """Grid lines with their numbers, and the names of the axes."""
        # Numbers of steps are few and known: mark exactly those. Elsewhere mark round numbers.
        marks = self.xs if self.log_x and len(self.xs) <= 12 else ticks(self.xs[0], self.xs[-1])
        floor, middle = HEIGHT - BOTTOM, (HEIGHT - BOTTOM + TOP) / 2
        parts = [_text(self.across(x), floor + 20, f"{x:g}") for x in marks]
        for y in ticks(self.low, self.high):
            level = f"{self.down(y):.1f}"
            parts.append(f'<line x1="{LEFT:g}" x2="{WIDTH - RIGHT:g}" y1="{level}" y2="{level}"/>')
            parts.append(_text(LEFT - 8, self.down(y) + 4, f"{y:g}", "end"))
        parts.append(_text((WIDTH + LEFT - RIGHT) / 2, HEIGHT - 6, xlabel))
        parts.append(f'<g transform="translate(15 {middle:.0f}) rotate(-90)">{_text(0.0, 0.0, ylabel)}</g>')
        return "".join(parts)


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'


def _pens(names: Iterable[str]) -> dict[str, str]:
    """How to draw each series, as SVG attributes."""
    names = list(names)
    unused = [colour for name, colour in COLOURS.items() if name not in names] or list(COLOURS.values())
    turn = itertools.cycle(unused)
    return {
        name: f'class="ref" stroke-dasharray="{DASHES[name]}"'
        if name in DASHES
        else f'class="s{COLOURS[name] if name in COLOURS else next(turn)}"'
        for name in names
    }


def curves_html(curves: Curves) -> str:
    """The chart with its legend; without a single finite point, a line that says so."""
    series = {name: thin(points) for name, points in curves.series.items()}
    if curves.log_x:
        series = {name: [(x, y) for x, y in points if x > 0] for name, points in series.items()}
    series = {name: points for name, points in series.items() if points}
    if not series:
        return '<p class="note">Nothing to draw.</p>'
    ys = [y for points in series.values() for _, y in points]
    pad = 0.05 * (max(ys) - min(ys)) or 0.5
    xs = sorted({x for points in series.values() for x, _ in points})
    frame = _Frame(xs, min(ys) - pad, max(ys) + pad, curves.log_x)
    parts = [frame.axes(curves.xlabel, curves.ylabel)]
    pens = _pens(series)
    for name, points in series.items():
        places = [(frame.across(x), frame.down(y)) for x, y in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline {pens[name]} points="{path}"/>')
        if len(places) <= 12 and name not in DASHES:
            parts += [f'<circle {pens[name]} cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in places]
    label = html.escape(", ".join(filter(None, (curves.title, curves.ylabel))) or "curves")
    chart = f'<svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" aria-label="{label}">{"".join(parts)}</svg>'
    swatch = '<svg class="key" viewBox="0 0 22 8"><line {pen} x1="1" x2="21" y1="4" y2="4"/></svg>'
    legend = [f"<li>{swatch.format(pen=pens[name])}{html.escape(name)}</li>" for name in series]
    return f'{chart}<ul class="legend">{"".join(legend)}</ul>'
