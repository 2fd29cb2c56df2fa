"""Pictures of pools of binary images: one panel for each pool, its first images in a square grid."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from jaxtyping import Float, UInt8

FEW, MANY = 4, 8  # images along the edge of a panel
PANEL = {FEW: 1.8, MANY: 3.2}  # inches
DOTS = 200  # per inch
SHADES = np.array([0.0, 1.0, 0.5])  # paper, ink, mask


def mosaic(images: UInt8[np.ndarray, "n S S"], edge: int) -> Float[np.ma.MaskedArray, "H H"]:
    """The first edge * edge images, row by row, as shades 0 (paper) to 1 (ink), masked pixels 0.5.

    Lines one pixel wide between images, around them, and the cells of missing images are masked in NumPy's sense.
    """
    side = images.shape[1]
    size = edge * (side + 1) + 1
    canvas = np.ma.array(np.zeros((size, size)), mask=True)  # masked_all leaves random numbers, which may overflow
    for place, image in enumerate(images[: edge * edge]):
        top, left = (1 + (side + 1) * i for i in divmod(place, edge))
        canvas[top : top + side, left : left + side] = SHADES[image]
    return canvas


def picture(pools: Mapping[str, UInt8[np.ndarray, "_n S S"]], path: Path, *, title: str = "") -> None:
    """A row of panels titled with the pools' names.

    Each shows 8 x 8 images where every pool has so many, otherwise 4 x 4.

    Args:
        pools: Name -> images of 0 (paper), 1 (ink) and 2 (mask).
        path: Image file; its ending chooses the format, missing folders are made.
        title: Heading of the whole picture.
    """
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if not pools:
        raise ValueError("there are no pools to draw")
    edge = MANY if min(map(len, pools.values())) >= MANY * MANY else FEW
    inches = PANEL[edge]
    figure = Figure(figsize=(inches * len(pools) + 0.2, inches + (0.6 if title else 0.35)), layout="constrained")
    FigureCanvasAgg(figure)
    if title:
        figure.suptitle(title, fontsize=10)
    shades = colormaps["gray_r"].with_extremes(bad="0.85")
    for panel, (name, images) in zip(figure.subplots(1, len(pools), squeeze=False)[0], pools.items(), strict=True):
        panel.imshow(mosaic(images, edge), cmap=shades, vmin=0.0, vmax=1.0, interpolation="nearest")
        panel.set_title(name, fontsize=9)
        panel.set_axis_off()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DOTS)
