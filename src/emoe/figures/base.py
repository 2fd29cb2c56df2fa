"""A canvas without pyplot, which is safe in threads and servers, and constants of all figures."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 120
REFERENCE = "0.4"  # colour of references: real data, the ideal factorised chain
LEGEND: dict[str, Any] = {"loc": "outside lower center", "fontsize": 8, "frameon": False}
CYCLE = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1", "#9c755f", "#76b7b2", "#edc948", "#ff9da7", "#79706e")


def canvas(width: float, height: float, *, title: str = "", dpi: int = DPI) -> Figure:
    """Return an empty figure of a size in inches, with a heading over all panels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=dpi, layout="constrained")
    FigureCanvasAgg(figure)
    if title:
        figure.suptitle(title, fontsize=10)
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write an image in the format of the file's suffix; create missing folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # characters missing in the font are drawn as boxes
        figure.savefig(path, dpi="figure")
