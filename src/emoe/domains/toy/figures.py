"""Pictures of pools of token pairs: square panels of a two-dimensional histogram."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TRUTH = ("ground truth", "data", "truth")  # pool names that are drawn first
MOST_BINS = 128  # finer histograms than this are not visible in a panel
PANEL = 1.7  # inches
DOTS = 120  # per inch


def histogram(samples: Int[Tensor, "n 2"], size: int) -> Float[np.ndarray, "bins bins"]:
    """Share of samples in cell [first token, second token]; beyond 128 tokens neighbours share a bin."""
    bins = min(size, MOST_BINS)
    pairs = samples.cpu().long()
    pairs = pairs[(pairs < size).all(1)] * bins // size
    counts = np.bincount((pairs[:, 0] * bins + pairs[:, 1]).numpy(), minlength=bins * bins)
    return counts.reshape(bins, bins) / max(1, len(samples))


def truth_first(pools: Mapping[str, Int[Tensor, "_n _L"]]) -> dict[str, Int[Tensor, "_n _L"]]:
    """The same pools with the real data in front."""
    return dict(sorted(pools.items(), key=lambda item: item[0].casefold() not in TRUTH))


def picture(pools: Mapping[str, Int[Tensor, "_n 2"]], path: Path, *, size: int, title: str = "") -> None:
    """A row of panels, one for each pool, titled with its name.

    Args:
        pools: Name -> samples.
        path: Image file; its ending chooses the format.
        size: Tokens per coordinate without the mask; the panel shows 0..size-1 on both axes.
        title: Heading of the whole picture.
    """
    pools = truth_first(pools)
    figure, panels = blank(1, len(pools), title=title)
    draw(panels[0], [histogram(samples, size) for samples in pools.values()])
    for panel, name in zip(panels[0], pools, strict=True):
        panel.set_title(name, fontsize=9)
    save(figure, path)


def grid_picture(
    rows: Mapping[str, Mapping[str, Int[Tensor, "_n 2"]]], path: Path, *, size: int = 50, title: str = ""
) -> None:
    """A sweep: one line of panels for each method, one column for each number of network calls.

    Args:
        rows: Method -> (column heading, for instance "NFE 1", -> samples). A missing cell stays blank.
        path: Image file.
        size: Tokens per coordinate without the mask.
        title: Heading of the whole picture.
    """
    columns = list(dict.fromkeys(column for cells in rows.values() for column in cells))
    figure, panels = blank(len(rows), len(columns), title=title)
    shown = {}
    for line, cells in zip(panels, rows.values(), strict=True):
        for panel, column in zip(line, columns, strict=True):
            if column in cells:
                shown[panel] = histogram(cells[column], size)
            else:
                panel.set_axis_off()
    draw(shown.keys(), list(shown.values()))
    for panel, column in zip(panels[0], columns, strict=True):
        panel.set_title(column, fontsize=9)
    for line, method in zip(panels, rows, strict=True):
        line[0].text(-0.06, 0.5, method, fontsize=9, rotation=90, ha="right", va="center", transform=line[0].transAxes)
    save(figure, path)


def blank(lines: int, columns: int, *, title: str = "") -> tuple[Figure, np.ndarray]:
    """A figure with a grid of empty panels, without pyplot: no global state, safe in threads and servers."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if not lines or not columns:
        raise ValueError("there are no pools to draw")
    height = PANEL * lines + (0.55 if title else 0.3)
    figure = Figure(figsize=(PANEL * columns + 0.3, height), layout="constrained")
    FigureCanvasAgg(figure)
    if title:
        figure.suptitle(title, fontsize=10)
    panels = figure.subplots(lines, columns, squeeze=False)
    for panel in panels.flat:
        panel.set(xticks=[], yticks=[], box_aspect=1)
        panel.spines[:].set(color="0.75", linewidth=0.6)
    return figure, panels


def draw(panels: Any, shares: list[Float[np.ndarray, "bins bins"]]) -> None:
    """Fill panels with histograms on one colour scale, the square root of the share; empty cells stay white.

    A linear scale hides the samples off the support, a logarithmic one shows a single sample like a mode.
    """
    from matplotlib.colors import LinearSegmentedColormap, PowerNorm

    top = max(float(share.max()) for share in shares) or 1.0
    scale = PowerNorm(0.5, vmin=0.0, vmax=top, clip=True)
    # The lightest blue is still told from white: a single sample off the support is what one looks for.
    blues = LinearSegmentedColormap.from_list("rows", ["#dbe8f4", "#4a90c4", "#08306b"])
    for panel, share in zip(panels, shares, strict=True):
        image = np.ma.masked_equal(share.T, 0.0)  # the first token runs to the right, the second upwards
        panel.imshow(image, origin="lower", norm=scale, cmap=blues, interpolation="nearest")


def save(figure: Figure, path: Path) -> None:
    """Write the image; missing folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DOTS)
