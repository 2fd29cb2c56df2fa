"""An animated GIF of sampling: images after each step, beside the expert of every position in each block."""

from __future__ import annotations

import colorsys
import io
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import UInt8

from emoe.figures.base import CYCLE, LEGEND, canvas
from emoe.figures.panels import as_images, mosaic, show_mosaic, tile
from emoe.files import replace_file
from emoe.types import StepEvent

if TYPE_CHECKING:
    from PIL.Image import Image

LARGEST = 1_500_000  # bytes of a file
RESOLUTIONS = (110, 80, 60, 45, 30)  # dots per inch
INCHES = 2.4  # edge of a panel
FIRST, EACH, LAST = 600, 250, 2_500  # milliseconds
MASK = 2


class Frame(NamedTuple):
    """Images after a step, and the experts of the step: an array for each routed block."""

    images: UInt8[np.ndarray, "n S S"]
    experts: tuple[UInt8[np.ndarray, "n _P _P"], ...] = ()


class Recorder:
    """Store the steps of a sampler: `method.sample(..., on_step=recorder)`. The first frame is all masked."""

    def __init__(self, n: int, side: int):
        self.frames = [Frame(np.full((n, side, side), MASK, np.uint8))]

    def __call__(self, event: StepEvent) -> None:
        gates = event.latent if isinstance(event.latent, tuple) else ()  # other latents have no experts
        self.frames.append(Frame(as_images(event.x), tuple(as_images(gate.expert[..., 0]) for gate in gates)))


def write_gif(frames: Sequence[Frame], experts: int, path: Path) -> None:
    """Write an animated GIF with `experts` colours, in the best resolution of at most 1.5 MB, or the lowest."""
    times = [FIRST, *[EACH] * (len(frames) - 2), LAST][: len(frames)]
    for dpi in RESOLUTIONS:
        file, (first, *pages) = io.BytesIO(), draw_pages(frames, experts, dpi)
        first.save(file, "GIF", save_all=True, append_images=pages, duration=times, loop=0)
        if file.tell() <= LARGEST:
            break
    replace_file(path, file.getvalue())


def draw_pages(frames: Sequence[Frame], experts: int, dpi: int) -> Iterator[Image]:
    """Draw a page for each frame: its images, a panel for each routed block, and the colours of the experts."""
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch
    from PIL import Image

    count, side = frames[0].images.shape[:2]
    edge, panels = math.isqrt(count - 1) + 1, 1 + len(frames[-1].experts)
    columns = math.isqrt(panels - 1) + 1
    lines = -(-panels // columns)
    figure = canvas(INCHES * columns, (INCHES + 0.2) * lines + 0.3, dpi=dpi)
    axes = figure.subplots(lines, columns, squeeze=False).ravel()
    for axis in axes:
        axis.set_axis_off()
    wheel = [colorsys.hsv_to_rgb(i / experts, 0.6, (0.95, 0.65)[i % 2]) for i in range(experts)]
    colours: Sequence[Any] = CYCLE[:experts] if experts <= len(CYCLE) else wheel
    palette, shown = ListedColormap(["white", *colours]), [show_mosaic(axes[0], frames[0].images, edge)]
    for block, maps in enumerate(frames[-1].experts, 1):
        axes[block].set_title(f"block {block}, {maps.shape[1]} x {maps.shape[1]}", fontsize=9)
        shown.append(axes[block].imshow(_enlarged(maps, side, edge) * 0, palette, vmin=0, vmax=experts))
    if panels > 1:
        handles = [Patch(color=colour, label=str(expert + 1)) for expert, colour in enumerate(colours)]
        figure.legend(handles=handles, title="expert", ncols=16, **LEGEND)
    for step, frame in enumerate(frames):
        axes[0].set_title(f"step {step} of {len(frames) - 1}", fontsize=9)
        shown[0].set_data(mosaic(frame.images, edge))
        for image, maps in zip(shown[1:], frame.experts, strict=False):
            image.set_data(_enlarged(maps, side, edge))
        figure.canvas.draw()
        yield Image.fromarray(np.asarray(figure.canvas.buffer_rgba())[..., :3])  # type: ignore[attr-defined]


def _enlarged(maps: UInt8[np.ndarray, "n _P _P"], side: int, edge: int) -> UInt8[np.ndarray, "H W"]:
    """Return maps in a grid, each as large as an image; 0 is no expert."""
    scale = side // maps.shape[1]
    return tile(np.kron(maps + 1, np.ones((1, scale, scale), np.uint8)), edge, edge, empty=0)
