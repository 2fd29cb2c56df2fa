"""Images to be completed: read from PNG files, and partly kept."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from emoe.config import ConfigError, hint
from emoe.domains import DataError, check_file
from emoe.domains.base import Completions, DomainConfig, Given, Ink
from emoe.domains.reading import TYPED
from emoe.figures import panels
from emoe.figures.panels import as_images, side_of
from emoe.types import TokenSpace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INNER, OUTER = 28, 32  # side of MNIST's images, and with two empty pixels all around
HALF = 128  # the lowest of the 256 grey values that is light: value / 255 > 0.5
MOST = 8  # lines, and completions in a line, of a figure of completions

Greys = Float[np.ndarray, "S S"]


@dataclass(frozen=True, kw_only=True)
class ImagesConfig(DomainConfig):
    """Square images, which are completed from PNG files."""

    def read_given(self, source: str, space: TokenSpace, *, ink: Ink = "auto") -> Given:
        """Rows of pixels, or an image of a .png file: of the model's size, or of 28 x 28 for a model of 32 x 32.

        Transparent pixels are paper. `ink` auto takes the border's shade for paper, or, where the border is
        transparent, the shade that most of the rest does not have.
        """
        if Path(source).suffix.lower() in (".npy", ".csv") or TYPED.fullmatch(source):
            return super().read_given(source, space, ink=ink)
        side = side_of(space.length)
        grey, alpha = _pixels(Path(source), side)
        shade = 255 - grey if ink == "dark" or (ink == "auto" and _is_dark_on_light(grey, alpha)) else grey
        return torch.from_numpy(centred(shade * alpha / 255 >= HALF, side)).long().reshape(1, -1)

    def read_keep(self, text: str, space: TokenSpace) -> Bool[Tensor, " L"]:
        """Pixels that stay: a name of `named_regions`, none, positions, or the white of a PNG mask and its margin."""
        side = side_of(space.length)
        if text.lower().endswith(".png"):
            grey, alpha = _pixels(Path(text), side)
            return torch.from_numpy(centred(grey * alpha / 255 >= HALF, side, True)).flatten()
        regions = named_regions(side)
        if text in regions:
            return regions[text].flatten()
        if text and not text[0].isdigit() and text not in ("none", "all"):
            known = hint(text, [*regions, "none"])
            raise ConfigError([f"keep: {text!r} is not known{known} (or a .png mask, or positions such as 0-9,20)"])
        return super().read_keep(text, space)

    def completion_figure(self, rows: Given, given: Given, samples: Completions, space: TokenSpace) -> Figure:
        """One line for each image, the first 8: as it was read, what was kept (the rest is grey), 8 completions."""
        shown = torch.cat([rows[:MOST, None], given[:MOST, None], samples[:MOST, :MOST]], 1)
        images = as_images(shown.flatten(0, 1)).reshape(*shown.shape[:2], *(side_of(space.length),) * 2)
        return panels.image_lines(images, {"given": 0, "kept": 1, "completions": 1 + (images.shape[1] - 1) / 2})


def _pixels(path: Path, side: int) -> tuple[Greys, Greys]:
    """Grey values and opacity, both 0..255."""
    from PIL import Image, UnidentifiedImageError

    check_file(path, "give a .png file")
    edges = [side, INNER] if side == OUTER else [side]
    sizes = " or ".join(f"{edge} x {edge}" for edge in edges)
    try:
        with Image.open(path, formats=["PNG"]) as image:
            if image.size not in {(edge, edge) for edge in edges}:  # from the header: nothing large is unpacked
                width, height = image.size
                raise DataError(f"{path}: is {width} x {height} pixels, but the model's images are {sizes}; resize it")
            if image.mode.startswith("I"):  # 16 bits, which convert() would clip
                deep = np.asarray(image, dtype=np.float64) / 257
                return deep, np.full_like(deep, 255)
            colour = image.convert("RGBA")
    except DataError:
        raise
    except UnidentifiedImageError:
        raise DataError(f"{path}: is no PNG image; save it as one of {sizes} pixels") from None
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        raise DataError(f"{path}: cannot be read, damaged or cut off ({error}); save it again") from None
    return np.asarray(colour.convert("L"), np.float64), np.asarray(colour.getchannel("A"), np.float64)


def _is_dark_on_light(grey: Greys, alpha: Greys) -> bool:
    border = np.pad(np.zeros_like(grey[1:-1, 1:-1], bool), 1, constant_values=True)
    solid = alpha >= HALF
    if (visible := border & solid).sum() * 2 >= border.sum():
        return bool(np.median(grey[visible]) >= HALF)
    return not solid.any() or bool(np.median(grey[solid]) < HALF)


def centred(images: np.ndarray, side: int, margin: int = 0) -> np.ndarray:
    """Images (the last two axes) in the middle of larger ones."""
    width = (side - images.shape[-1]) // 2
    return np.pad(images, [(0, 0)] * (images.ndim - 2) + [(width, width)] * 2, constant_values=margin)


def named_regions(side: int) -> dict[str, Bool[Tensor, "S S"]]:
    """Halves, the middle square of half the edge, and what is around it."""
    line, column = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    half, quarter = side // 2, side // 4
    centre = (line >= quarter) & (line < side - quarter) & (column >= quarter) & (column < side - quarter)
    halves = {"top-half": line < half, "bottom-half": line >= side - half}
    halves |= {"left-half": column < half, "right-half": column >= side - half}
    return halves | {"centre": centre, "border": ~centre}
