"""An animated GIF of sampling: images that appear step by step, beside the expert of every position in each block."""

from __future__ import annotations

import colorsys
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jaxtyping import Integer, UInt8
from torch import Tensor

from emoe.figures.base import CYCLE
from emoe.files import replace_file
from emoe.types import StepEvent

if TYPE_CHECKING:
    from PIL.Image import Image

LARGEST = 1_500_000  # bytes of a file
CELL = 128  # pixels along the edge of an image, at most
GAP, MARGIN, BAR = 4, 10, 16  # pixels between images, around panels, of a line of text
FIRST, EACH, LAST = 600, 250, 2_500  # milliseconds

# The palette: paper, ink and mask have the numbers of their tokens; then the ground, shades of text, experts.
MASK, GROUND, TEXT, SHADES, EXPERTS = 2, 3, 4, 8, 16
LIGHT = 238
MOST_EXPERTS = 256 - EXPERTS


class Frame(NamedTuple):
    """Images after a step, and the experts that the step ran: an array for each routed block."""

    images: UInt8[np.ndarray, "n S S"]
    experts: tuple[UInt8[np.ndarray, "n _P _P"], ...] = ()


class Recorder:
    """Stores the steps of a sampler: `method.sample(..., on_step=recorder)`. The first frame is all masked."""

    def __init__(self, n: int, side: int):
        self.frames = [Frame(np.full((n, side, side), MASK, np.uint8))]

    def __call__(self, event: StepEvent) -> None:
        """Add a frame; a latent that is no tuple of gates has no experts."""
        gates = event.latent if isinstance(event.latent, tuple) else ()
        self.frames.append(Frame(_square(event.x), tuple(_square(gate.expert[..., 0]) for gate in gates)))


def _square(rows: Integer[Tensor, "n L"]) -> UInt8[np.ndarray, "n S S"]:
    side = math.isqrt(rows.shape[1])
    return rows.cpu().numpy().astype(np.uint8).reshape(-1, side, side)


def write_gif(frames: Sequence[Frame], experts: int, path: Path, *, largest: int = LARGEST) -> None:
    """Write an animated GIF, made smaller until it has at most `largest` bytes, where that is possible.

    Args:
        frames: The frames of a `Recorder`.
        experts: Experts in each block, for the legend.
        path: The file; missing folders are made.
        largest: Bytes it may have.
    """
    if not frames:
        raise ValueError("there are no frames")
    if experts > MOST_EXPERTS:
        raise ValueError(f"an animation shows at most {MOST_EXPERTS} experts, got {experts}")
    scale = max(1, CELL // frames[0].images.shape[1])
    data = encode(frames, experts, scale)
    while len(data) > largest and scale > 1:
        scale -= max(1, scale // 4)
        data = encode(frames, experts, scale)
    replace_file(path, data)


def encode(frames: Sequence[Frame], experts: int, scale: int) -> bytes:
    """The animation as bytes, `scale` pixels for each pixel of an image."""
    blocks = [maps.shape[1] for maps in frames[-1].experts]
    pages = [_page(frame, blocks, experts, scale, step, len(frames) - 1) for step, frame in enumerate(frames)]
    times = [FIRST, *[EACH] * (len(pages) - 2), LAST][: len(pages)]
    file = io.BytesIO()
    pages[0].save(
        file, "GIF", save_all=True, append_images=pages[1:], duration=times, loop=0, optimize=False, disposal=1
    )
    return file.getvalue()


def palette(experts: int) -> list[int]:
    """Red, green and blue of every number that a page holds."""
    greys = [255, 0, 160, LIGHT, *(round(LIGHT * (1 - shade / (SHADES - 1))) for shade in range(SHADES))]
    colours: list[tuple[int, ...]] = [(grey,) * 3 for grey in [*greys, *[0] * (EXPERTS - len(greys))]]
    if experts <= len(CYCLE):
        colours += [tuple(bytes.fromhex(colour[1:])) for colour in CYCLE[:experts]]
    else:
        shades = (colorsys.hsv_to_rgb(i / experts, 0.6, (0.95, 0.65)[i % 2]) for i in range(experts))
        colours += [tuple(round(255 * part) for part in shade) for shade in shades]
    return [part for colour in colours for part in colour]


def tile(cells: UInt8[np.ndarray, "n S S"], size: int) -> UInt8[np.ndarray, "H H"]:
    """Images in a square grid, each enlarged to `size` pixels; the rest is ground."""
    edge = math.isqrt(len(cells) - 1) + 1
    grid = np.full((edge * (size + GAP) - GAP,) * 2, GROUND, np.uint8)
    for number, cell in enumerate(cells):
        top, left = (i * (size + GAP) for i in divmod(number, edge))
        grid[top : top + size, left : left + size] = np.kron(cell, np.ones((size // len(cell),) * 2, np.uint8))
    return grid


def _page(frame: Frame, blocks: Sequence[int], experts: int, scale: int, step: int, steps: int) -> Image:
    """One frame: the images, a panel for each routed block (its side in `blocks`), and the colours of experts."""
    from PIL import Image, ImageDraw

    n, side = frame.images.shape[:2]
    panels = [(f"step {step} of {steps}", tile(frame.images, scale * side))]
    for number, positions in enumerate(blocks):
        cells = frame.experts[number] + EXPERTS if frame.experts else np.full((n, positions, positions), GROUND)
        panels.append((f"block {number + 1}, {positions} x {positions}", tile(cells.astype(np.uint8), scale * side)))
    columns = math.isqrt(len(panels) - 1) + 1
    edge = len(panels[0][1])
    height, width = (edge + BAR + MARGIN) * -(-len(panels) // columns) + MARGIN, (edge + MARGIN) * columns + MARGIN
    page = np.full((height + bool(blocks) * (BAR + MARGIN), width), GROUND, np.uint8)
    ink = Image.new("L", page.shape[::-1])
    pen = ImageDraw.Draw(ink)
    for number, (name, panel) in enumerate(panels):
        line, column = divmod(number, columns)
        top, left = MARGIN + line * (edge + BAR + MARGIN), MARGIN + column * (edge + MARGIN)
        pen.text((left, top), name, fill=255)
        page[top + BAR : top + BAR + edge, left : left + edge] = panel
    if blocks:
        pen.text((MARGIN, height), "expert", fill=255)
        start, room = MARGIN + 44, min(48, (width - 2 * MARGIN - 44) // experts)
        for expert in range(experts):
            left = start + expert * room
            page[height : height + BAR - 4, left : left + max(1, min(12, room - 1))] = EXPERTS + expert
            if room >= 28:
                pen.text((left + 15, height), str(expert + 1), fill=255)
    shade = (np.asarray(ink).astype(np.uint16) * (SHADES - 1) + 127) // 255
    image = Image.fromarray(np.where(shade > 0, TEXT + shade, page).astype(np.uint8))
    image.putpalette(palette(experts))
    return image
