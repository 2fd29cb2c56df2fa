"""Panels side by side, one for each pool of samples: histograms, heat maps, mosaics of images, texts."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from jaxtyping import Float, Integer, UInt8
from torch import Tensor

from emoe.figures.base import DPI, canvas
from emoe.types import TokenSpace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TRUTH = ("ground truth", "data", "truth", "real data")  # names of pools that come first
INCHES = 1.7  # edge of a panel
MOST_BINS = 128  # finer histograms than this are not visible in a panel
MOST_ROWS = 64  # rows of a heat map
MOST_TEXTS, CHARACTERS, LINES = 6, 80, 5  # texts of a panel, characters of a line, lines of a text
IMAGE_DPI = 200  # of figures of binary images
SHADES = np.array([0.0, 1.0, 0.5, np.nan])  # of the tokens 0 (paper), 1 (ink) and 2 (mask), and outside images

Pool = TypeVar("Pool")
Pairs = Integer[Tensor, "_n 2"] | Integer[np.ndarray, "_n 2"]
Images = Integer[np.ndarray, "n S S"]


def panel_grid(
    rows: Mapping[str, Mapping[str, Pool]],
    draw: Callable[[Any, Pool], object],
    inches: tuple[float, float] = (INCHES, INCHES),
    title: str = "",
    dpi: int = DPI,
) -> Figure:
    """Draw a line of panels for each method, one column for each pool, real data first; cells may be missing.

    `draw(axis, pool)` fills a panel of `inches` (width, height).
    """
    names = dict.fromkeys(itertools.chain.from_iterable(rows.values()))
    columns = sorted(names, key=lambda name: name.casefold() not in TRUTH)
    if not columns:
        raise ValueError("there are no pools to draw")
    height = inches[1] * len(rows) + (0.55 if title else 0.3)
    figure = canvas(inches[0] * len(columns) + 0.3, height, title=title, dpi=dpi)
    axes = figure.subplots(len(rows), len(columns), squeeze=False)
    for axis, (line, name) in zip(axes.flat, itertools.product(rows, columns), strict=True):
        axis.set(xticks=[], yticks=[], title=name * (line == next(iter(rows))), ylabel=line * (name == columns[0]))
        axis.title.set_fontsize(9)
        axis.spines[:].set(color="0.75", linewidth=0.6, visible=name in rows[line])
        if name in rows[line]:
            draw(axis, rows[line][name])
    return figure


def histogram(pairs: Pairs, size: int) -> Float[np.ndarray, "bins bins"]:
    """Return the share of pairs in cell [first token, second token]; beyond 128 tokens neighbours share a bin."""
    tokens = np.asarray(pairs)
    first, second = tokens[(tokens < size).all(1)].T
    counts = np.histogram2d(first, second, min(size, MOST_BINS), range=((0, size), (0, size)))[0]
    return counts / max(1, len(tokens))


def histogram_grid(rows: Mapping[str, Mapping[str, Pairs]], size: int, *, title: str = "") -> Figure:
    """Draw histograms of tokens 0..size-1: a line for each method, a column for each pool.

    All have one colour scale, the square root of the share: a linear scale hides samples off the support, a
    logarithmic one shows a single sample like a mode.
    """
    from matplotlib.colors import LinearSegmentedColormap, PowerNorm

    shares = {line: {name: histogram(pairs, size) for name, pairs in pools.items()} for line, pools in rows.items()}
    top = max((float(share.max()) for pools in shares.values() for share in pools.values()), default=0.0)
    scale = PowerNorm(0.5, vmin=0.0, vmax=top or 1.0, clip=True)
    # The lightest blue differs from white: a single sample off the support must be visible.
    blues = LinearSegmentedColormap.from_list("rows", ["#dbe8f4", "#4a90c4", "#08306b"])

    def draw(axis: Any, share: np.ndarray) -> None:  # the first token runs to the right, the second upwards
        shown = np.ma.masked_equal(share.T, 0.0)
        axis.imshow(shown, origin="lower", norm=scale, cmap=blues, interpolation="nearest")

    return panel_grid(shares, draw, title=title)


def heat_maps(pools: Mapping[str, Integer[Tensor, "_n L"]], space: TokenSpace, *, title: str = "") -> Figure:
    """Draw the first 64 rows of each pool, a line each, with colours for tokens; masked positions stay white."""

    def draw(axis: Any, rows: Integer[Tensor, "_n L"]) -> None:
        cells = np.ma.masked_equal(rows[:MOST_ROWS].cpu().numpy(), space.mask_id)
        axis.imshow(cells, aspect="auto", interpolation="nearest", vmin=0, vmax=space.size - 1)

    return panel_grid({"": pools}, draw, title=title)


def side_of(length: int) -> int:
    """Return the edge of a square image of `length` pixels."""
    side = math.isqrt(length)
    if side * side != length:
        raise ValueError(f"rows of {length} pixels are no square images")
    return side


def as_images(rows: Integer[Tensor, "n L"]) -> UInt8[np.ndarray, "n S S"]:
    """Return rows as square images, values unchanged."""
    side = side_of(rows.shape[1])
    return rows.cpu().numpy().astype(np.uint8).reshape(-1, side, side)


def tile(images: Images, columns: int, lines: int, *, empty: int) -> Integer[np.ndarray, "H W"]:
    """Put the first lines * columns images in a grid; between and around them, and where one is missing, is `empty`."""
    count, side = lines * columns, images.shape[1] + 1
    cells = np.full((count, side, side), empty, images.dtype)
    cells[: len(images), 1:, 1:] = images[:count]
    grid = cells.reshape(lines, columns, side, side).swapaxes(1, 2).reshape(lines * side, columns * side)
    return np.pad(grid, ((0, 1), (0, 1)), constant_values=empty)


def mosaic(images: Images, columns: int, lines: int | None = None) -> Float[np.ma.MaskedArray, "H W"]:
    """Return tiles in shades 0 (paper) to 1 (ink), masked pixels 0.5; lines between images are masked elements."""
    return np.ma.masked_invalid(SHADES[tile(images, columns, lines or columns, empty=len(SHADES) - 1)])


def show_mosaic(axis: Any, images: Images, columns: int, lines: int | None = None) -> Any:
    """Draw a mosaic: ink is black, lines between images are light grey."""
    from matplotlib import colormaps

    colours = colormaps["gray_r"].with_extremes(bad="0.85")
    return axis.imshow(mosaic(images, columns, lines), cmap=colours, vmin=0.0, vmax=1.0, interpolation="nearest")


def mosaics(pools: Mapping[str, Images], *, title: str = "") -> Figure:
    """Draw mosaics of 8 x 8 images where every pool has that many, otherwise of 4 x 4."""
    edge, inches = (8, 3.2) if min(map(len, pools.values()), default=0) >= 64 else (4, 1.8)
    return panel_grid({"": pools}, partial(show_mosaic, columns=edge), (inches, inches), title, IMAGE_DPI)


def image_lines(images: Integer[np.ndarray, "lines columns S S"], headings: Mapping[str, float]) -> Figure:
    """Draw a table of images; `headings` stand above it, each centred at a column counted from 0."""
    lines, columns, side = images.shape[:3]
    figure = canvas(0.8 * columns + 0.2, 0.8 * lines + 0.35, dpi=IMAGE_DPI)
    axis = figure.subplots()
    show_mosaic(axis, images.reshape(-1, side, side), columns, lines)
    axis.set_xticks([(column + 0.5) * (side + 1) for column in headings.values()], list(headings), fontsize=9)
    axis.tick_params(length=0, left=False, labelleft=False, labeltop=True, labelbottom=False)
    axis.spines[:].set_visible(False)
    return figure


def texts(pools: Mapping[str, list[str]], *, title: str = "") -> Figure:
    """Draw the beginnings of the first 6 texts of each pool."""

    def draw(axis: Any, pool: list[str]) -> None:
        shown = "\n\n".join("\n".join(textwrap.wrap(text, CHARACTERS)[:LINES]) for text in pool[:MOST_TEXTS])
        shown = shown.replace("$", r"\$")  # a pair of dollars would be a formula
        style = {"va": "top", "fontsize": 6, "family": "monospace", "transform": axis.transAxes}
        axis.text(0.01, 0.99, shown, **style).set_in_layout(False)

    return panel_grid({"": pools}, draw, (4.2, 0.11 * MOST_TEXTS * (LINES + 1)), title)
