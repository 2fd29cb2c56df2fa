"""Panels side by side, one for each pool of samples: histograms, heat maps, mosaics of images, texts."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, Integer

from emoe.figures.base import canvas

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TRUTH = ("ground truth", "data", "truth", "real data")  # names of pools that come first
INCHES = 1.7  # edge of a panel
MOST_BINS = 128  # finer histograms than this are not visible in a panel
MOST_ROWS = 64  # rows of a heat map
MOST_TEXTS, CHARACTERS, LINES = 6, 80, 5  # texts of a panel, characters of a line, lines of a text
IMAGE_DPI = 200  # of figures of binary images
SHADES = np.array([0.0, 1.0, 0.5])  # of the tokens 0 (paper), 1 (ink) and 2 (mask)


def truth_first(pools: Mapping[str, Any]) -> dict[str, Any]:
    """The same pools with real data in front."""
    return dict(sorted(pools.items(), key=lambda item: item[0].casefold() not in TRUTH))


def panel_grid(lines: int, columns: int, *, title: str = "") -> tuple[Figure, np.ndarray]:
    """A figure with a grid of empty square panels."""
    if not lines or not columns:
        raise ValueError("there are no pools to draw")
    figure = canvas(INCHES * columns + 0.3, INCHES * lines + (0.55 if title else 0.3), title=title)
    axes = figure.subplots(lines, columns, squeeze=False)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[], box_aspect=1)
        axis.spines[:].set(color="0.75", linewidth=0.6)
    return figure, axes


def histogram(pairs: Integer[np.ndarray, "n 2"], size: int) -> Float[np.ndarray, "bins bins"]:
    """Share of pairs in cell [first token, second token]; beyond 128 tokens neighbours share a bin."""
    bins = min(size, MOST_BINS)
    cells = pairs[(pairs < size).all(1)].astype(np.int64) * bins // size
    counts = np.bincount(cells[:, 0] * bins + cells[:, 1], minlength=bins * bins)
    return counts.reshape(bins, bins) / max(1, len(pairs))


def histograms(pools: Mapping[str, Integer[np.ndarray, "_n 2"]], size: int, *, title: str = "") -> Figure:
    """A row of histograms of token pairs 0..size-1."""
    return histogram_grid({"": pools}, size, title=title)


def histogram_grid(
    rows: Mapping[str, Mapping[str, Integer[np.ndarray, "_n 2"]]], size: int, *, title: str = ""
) -> Figure:
    """A line of histograms for each method, one column for each heading; missing cells stay blank.

    All have one colour scale, the square root of the share: a linear scale hides samples off the support, a
    logarithmic one shows a single sample like a mode.
    """
    from matplotlib.colors import LinearSegmentedColormap, PowerNorm

    columns = list(dict.fromkeys(column for cells in rows.values() for column in cells))
    figure, axes = panel_grid(len(rows), len(columns), title=title)
    shares = [[histogram(cells[name], size) if name in cells else None for name in columns] for cells in rows.values()]
    top = max(float(share.max()) for line in shares for share in line if share is not None)
    scale = PowerNorm(0.5, vmin=0.0, vmax=top or 1.0, clip=True)
    # The lightest blue differs from white: a single sample off the support must be visible.
    blues = LinearSegmentedColormap.from_list("rows", ["#dbe8f4", "#4a90c4", "#08306b"])
    for axis, share in zip(axes.flat, (share for line in shares for share in line), strict=True):
        if share is None:
            axis.set_axis_off()
        else:  # the first token runs to the right, the second upwards
            axis.imshow(
                np.ma.masked_equal(share.T, 0.0), origin="lower", norm=scale, cmap=blues, interpolation="nearest"
            )
    for axis, name in zip(axes[0], columns, strict=True):
        axis.set_title(name, fontsize=9)
    for line, method in zip(axes, rows, strict=True):
        line[0].text(-0.06, 0.5, method, fontsize=9, rotation=90, ha="right", va="center", transform=line[0].transAxes)
    return figure


def heat_maps(pools: Mapping[str, np.ndarray], top: int, *, title: str = "") -> Figure:
    """The first 64 rows of each pool, a line each, with colours for the tokens 0..top; masked cells stay white."""
    figure, axes = panel_grid(1, len(pools), title=title)
    for axis, (name, rows) in zip(axes[0], pools.items(), strict=True):
        axis.imshow(
            rows[:MOST_ROWS], aspect="auto", interpolation="nearest", cmap="viridis", vmin=0, vmax=max(1, top)
        )  # fmt: skip
        axis.set_title(name, fontsize=9)
    return figure


def mosaic(
    images: Integer[np.ndarray, "n S S"], columns: int, lines: int | None = None
) -> Float[np.ma.MaskedArray, "H W"]:
    """The first lines * columns images, row by row, as shades 0 (paper) to 1 (ink), masked pixels 0.5.

    Lines one pixel wide between images, around them, and the cells of missing images are masked in NumPy's sense.
    """
    step, lines = images.shape[1] + 1, lines or columns
    shown = np.ma.array(np.zeros((lines * step + 1, columns * step + 1)), mask=True)  # masked_all holds random numbers
    for number, image in enumerate(images[: lines * columns]):
        top, left = (1 + step * i for i in divmod(number, columns))
        shown[top : top + step - 1, left : left + step - 1] = SHADES[image]
    return shown


def show_mosaic(axis: Any, shades: np.ma.MaskedArray) -> None:
    """Draw a mosaic: ink is black, lines between images are light grey."""
    from matplotlib import colormaps

    colours = colormaps["gray_r"].with_extremes(bad="0.85")
    axis.imshow(shades, cmap=colours, vmin=0.0, vmax=1.0, interpolation="nearest")


def mosaics(pools: Mapping[str, Integer[np.ndarray, "_n S S"]], *, title: str = "") -> Figure:
    """A row of mosaics of 8 x 8 images where every pool has that many, otherwise of 4 x 4."""
    if not pools:
        raise ValueError("there are no pools to draw")
    edge, inches = (8, 3.2) if min(map(len, pools.values())) >= 64 else (4, 1.8)
    figure = canvas(inches * len(pools) + 0.2, inches + (0.6 if title else 0.35), title=title, dpi=IMAGE_DPI)
    for axis, (name, images) in zip(figure.subplots(1, len(pools), squeeze=False)[0], pools.items(), strict=True):
        show_mosaic(axis, mosaic(images, edge))
        axis.set_title(name, fontsize=9)
        axis.set_axis_off()
    return figure


def image_lines(images: Integer[np.ndarray, "lines columns S S"], headings: Mapping[str, float]) -> Figure:
    """A table of images; `headings` stand above it, each centred at a column counted from 0."""
    lines, columns, side = images.shape[:3]
    figure = canvas(0.8 * columns + 0.2, 0.8 * lines + 0.35, dpi=IMAGE_DPI)
    axis = figure.subplots()
    show_mosaic(axis, mosaic(images.reshape(-1, side, side), columns, lines))
    axis.set_xticks([(column + 0.5) * (side + 1) for column in headings.values()], list(headings), fontsize=9)
    axis.xaxis.tick_top()
    axis.tick_params(length=0)
    axis.set_yticks([])
    axis.spines[:].set_visible(False)
    return figure


def texts(pools: Mapping[str, list[str]], *, title: str = "") -> Figure:
    """The beginnings of the first 6 texts of each pool."""
    figure, axes = panel_grid(1, len(pools), title=title)
    figure.set_size_inches(4.2 * len(pools), 0.11 * MOST_TEXTS * (LINES + 1) + (0.6 if title else 0.4))
    for axis, (name, pool) in zip(axes[0], pools.items(), strict=True):
        shown = "\n\n".join("\n".join(textwrap.wrap(text, CHARACTERS)[:LINES]) for text in pool[:MOST_TEXTS])
        label = axis.text(
            0.01, 0.99, shown.replace("$", r"\$"),  # a pair of dollars would be a formula
            va="top", fontsize=6, family="monospace", transform=axis.transAxes,
        )  # fmt: skip
        label.set_in_layout(False)
        axis.set_title(name, fontsize=9)
        axis.set_box_aspect(None)
    return figure
