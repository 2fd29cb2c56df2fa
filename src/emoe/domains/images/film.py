"""Films of sampling: images that appear step by step, and beside them the expert of every position, block by block."""

from __future__ import annotations

import colorsys
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jaxtyping import UInt8

from emoe.domains.images.data import MASK, as_images
from emoe.types import StepEvent

if TYPE_CHECKING:
    from PIL.Image import Image

LARGEST = 1_500_000  # bytes of a film
CELL = 128  # pixels along the edge of an image, at most
GAP = 4  # pixels between images
MARGIN = 10  # around panels
BAR = 16  # height of a line of text
FIRST, EACH, LAST = 600, 250, 2_500  # milliseconds

# The palette: paper, ink and mask keep the numbers of their tokens; then the ground, shades of text, experts.
GROUND, TEXT, SHADES, EXPERTS = 3, 4, 8, 16
LIGHT = 238
MOST_EXPERTS = 256 - EXPERTS
COLOURS = ("4e79a7", "f28e2b", "59a14f", "e15759", "b07aa1", "edc948", "76b7b2", "ff9da7", "9c755f", "79706e")


class Frame(NamedTuple):
    """Images after a step, and the experts that the step ran: an array for each routed block."""

    images: UInt8[np.ndarray, "n S S"]
    experts: tuple[UInt8[np.ndarray, "n _P _P"], ...] = ()


class Recorder:
    """Keeps what a sampler shows of its steps: `method.sample(..., on_step=recorder)`.

    `frames` has one frame more than there are steps: it begins with images all masked.
    """

    def __init__(self, n: int, side: int):
        self.frames = [Frame(np.full((n, side, side), MASK, np.uint8))]

    def __call__(self, event: StepEvent) -> None:
        """Take in a step; a latent that is no tuple of gates has no experts to show."""
        gates = event.latent if isinstance(event.latent, tuple) else ()
        self.frames.append(Frame(as_images(event.x), tuple(as_images(gate.expert[..., 0]) for gate in gates)))


def write_film(frames: Sequence[Frame], experts: int, path: Path, *, largest: int = LARGEST) -> None:
    """Write an animated GIF, a frame for each frame; it is made smaller until it has at most `largest` bytes.

    Args:
        frames: What a `Recorder` kept.
        experts: Experts in each block, for the legend.
        path: Where the film goes; missing folders are made.
        largest: Bytes it may have, where that is possible at all.
    """
    if not frames:
        raise ValueError("there are no frames")
    if experts > MOST_EXPERTS:
        raise ValueError(f"a film shows at most {MOST_EXPERTS} experts, got {experts}")
    scale = max(1, CELL // frames[0].images.shape[1])
    data = encode(frames, experts, scale)
    while len(data) > largest and scale > 1:
        scale -= max(1, scale // 4)
        data = encode(frames, experts, scale)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def encode(frames: Sequence[Frame], experts: int, scale: int) -> bytes:
    """The film as bytes, `scale` pixels for each pixel of an image."""
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
    colours = [(255,) * 3, (0,) * 3, (160,) * 3, (LIGHT,) * 3]
    colours += [(round(LIGHT * (1 - shade / (SHADES - 1))),) * 3 for shade in range(SHADES)]
    colours += [(0,) * 3] * (EXPERTS - len(colours))
    if experts <= len(COLOURS):
        colours += [(int(c[:2], 16), int(c[2:4], 16), int(c[4:], 16)) for c in COLOURS[:experts]]
    else:
        for expert in range(experts):
            bright = (0.95, 0.65)[expert % 2]
            red, green, blue = colorsys.hsv_to_rgb(expert / experts, 0.6, bright)
            colours.append((round(255 * red), round(255 * green), round(255 * blue)))
    return [part for colour in colours for part in colour]


def tile(cells: UInt8[np.ndarray, "n S S"], size: int) -> UInt8[np.ndarray, "H H"]:
    """Square pictures of the palette in a square grid, each blown up to `size` pixels; the rest is ground."""
    edge = math.isqrt(len(cells) - 1) + 1
    canvas = np.full((edge * (size + GAP) - GAP,) * 2, GROUND, np.uint8)
    for place, one in enumerate(cells):
        top, left = (i * (size + GAP) for i in divmod(place, edge))
        canvas[top : top + size, left : left + size] = np.kron(one, np.ones((size // len(one),) * 2, np.uint8))
    return canvas


def _page(frame: Frame, blocks: Sequence[int], experts: int, scale: int, step: int, steps: int) -> Image:
    """One frame: the images, a panel for each routed block (its side in `blocks`), and the colours of experts."""
    from PIL import Image

    n, side = frame.images.shape[:2]
    size = scale * side
    panels = [(f"step {step} of {steps}", tile(frame.images, size))]
    for number, positions in enumerate(blocks):
        seen = frame.experts[number] + EXPERTS if frame.experts else np.full((n, positions, positions), GROUND)
        panels.append((f"block {number + 1}, {positions} x {positions}", tile(seen.astype(np.uint8), size)))
    columns = math.isqrt(len(panels) - 1) + 1
    lines = -(-len(panels) // columns)
    edge = len(panels[0][1])
    height, width = (edge + BAR + MARGIN) * lines + MARGIN, (edge + MARGIN) * columns + MARGIN
    legend = bool(blocks) * (BAR + MARGIN)
    canvas = np.full((height + legend, width), GROUND, np.uint8)
    texts: list[tuple[int, int, str]] = []
    for place, (name, picture) in enumerate(panels):
        line, column = divmod(place, columns)
        top, left = MARGIN + line * (edge + BAR + MARGIN), MARGIN + column * (edge + MARGIN)
        texts.append((left, top, name))
        canvas[top + BAR : top + BAR + edge, left : left + edge] = picture
    if blocks:
        texts.append((MARGIN, height, "expert"))
        start, room = MARGIN + 44, min(48, (width - 2 * MARGIN - 44) // experts)
        for expert in range(experts):
            left = start + expert * room
            canvas[height : height + BAR - 4, left : left + max(1, min(12, room - 1))] = EXPERTS + expert
            if room >= 28:
                texts.append((left + 15, height, str(expert + 1)))
    image = Image.fromarray(_written(canvas, texts))
    image.putpalette(palette(experts))
    return image


def _written(canvas: UInt8[np.ndarray, "H W"], texts: Sequence[tuple[int, int, str]]) -> UInt8[np.ndarray, "H W"]:
    """The page with texts at (left, top), in shades of the palette."""
    from PIL import Image, ImageDraw

    ink = Image.new("L", (canvas.shape[1], canvas.shape[0]))
    pen = ImageDraw.Draw(ink)
    for left, top, text in texts:
        pen.text((left, top), text, fill=255)
    shade = (np.asarray(ink).astype(np.uint16) * (SHADES - 1) + 127) // 255
    return np.where(shade > 0, TEXT + shade, canvas).astype(np.uint8)
