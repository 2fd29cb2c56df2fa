"""Binary images: rows of pixels line by line, 0 for paper and 1 for ink; the mask is 2, so V = 3 and L = side^2.

The digits are the test part of "Optical Recognition of Handwritten Digits" (E. Alpaydin and C. Kaynak, UCI Machine
Learning Repository, CC BY 4.0) as scikit-learn ships it: 1,797 images of 8 x 8 values 0..16. `digits.npz` beside this
file holds them binarised (value >= 8) and packed, with their labels, in scikit-learn's order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from emoe.config import ConfigError, hint, option
from emoe.domains import DataError, check_file, readable
from emoe.domains.base import Completions, DomainConfig, Given, Ink, Pools, SplitDomain, permutation, random_state
from emoe.domains.images import files
from emoe.domains.images.classifier import SIDES, load_classifier
from emoe.domains.images.metrics import REAL_ROWS, of_features, of_pixels
from emoe.domains.metrics import proportion
from emoe.domains.reading import TYPED
from emoe.figures import panels
from emoe.figures.panels import as_images, side_of
from emoe.rng import derive_seed
from emoe.types import Measurement, TokenSpace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DIGITS = Path(__file__).with_name("digits.npz")
INNER, OUTER = 28, 32  # side of MNIST's images, and with two empty pixels all around
HALF = 128  # the lowest of the 256 grey values that is light: value / 255 > 0.5
MOST = 8  # lines, and completions in a line, of a figure of completions

Greys = Float[np.ndarray, "S S"]
Pixels = UInt8[Tensor, "_N L"]
Classes = Int[Tensor, " _N"] | None


class Images(SplitDomain):
    """Binary images with a fixed test split, kept as uint8."""

    task: ClassVar[str] = "images"
    stream: ClassVar[str] = "images"

    def __init__(self, name: str, rows: Pixels, test_rows: Pixels, labels: Classes = None, test_labels: Classes = None):
        self.name, self.side, self.fresh_rows = name, side_of(rows.shape[1]), len(test_rows)
        self.rows, self.labels, self.test_rows, self.test_labels = rows, labels, test_rows, test_labels
        self.space = TokenSpace(size=3, mask_id=2, length=rows.shape[1])

    def measure(self, samples: Int[Tensor, "n L"], seed: int = 0) -> list[Measurement]:
        """Measure pixels, and features if the package has a classifier of the task; `seed` orders the rows."""
        if len(samples) < 2:
            raise ValueError(f"{len(samples)} samples cannot be measured; draw at least 2")
        if samples.shape[1] != self.space.length:
            raise ValueError(f"samples have {samples.shape[1]} pixels, the data {self.space.length}")
        if (samples == self.space.mask_id).any():
            raise ValueError("some samples still hold masks; finish sampling before measuring")
        if ((samples != 0) & (samples != 1)).any():
            raise ValueError("pixels must be 0 or 1")
        samples = samples.cpu()[permutation(len(samples), seed, "images", "samples")]
        real = self.test_rows[permutation(len(self.test_rows), seed, "images", "real")[:REAL_ROWS]]
        measured = list[Measurement]()
        if self.task in SIDES:
            classifier = load_classifier(self.task, "cuda" if torch.cuda.is_available() else "cpu")
            measured += of_features(classifier, samples, real, seed)
            if self.test_labels is not None:
                measured.append(proportion("judge_accuracy", classifier.hits(self.test_rows, self.test_labels)))
        return measured + of_pixels(samples, real, self.rows)

    def figure(self, pools: Pools, *, title: str = "") -> Figure:
        return panels.mosaics({name: as_images(rows) for name, rows in pools.items()}, title=title)


class MNIST(Images):
    """MNIST in black and white: 60,000 images to train on, 10,000 to test with."""

    task: ClassVar[str] = "mnist"


class Digits(Images):
    """Images of 8 x 8 pixels, 1,497 to train on and 300 to test with, 30 of each class.

    The 30 are drawn by a fixed seed and both parts keep scikit-learn's order. Writers may be in both parts, and some
    images are equal once they are binarised: 12 of the 300 also occur in training.
    """

    task: ClassVar[str] = "digits"


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


@dataclass(frozen=True, kw_only=True)
class MNISTConfig(ImagesConfig, kind="mnist"):
    """MNIST from its four original files, ink where value / 255 > 0.5; the seed plays no role."""

    root: str | None = option(None, doc="folder with the data; none = EMOE_DATA, then ./data", neutral=True)
    side: int = option(OUTER, doc="pixels along an edge: 28, or 32 with an empty margin of 2", low=INNER, high=OUTER)
    points: int | None = option(None, doc="only the first so many training rows; none = all", low=2, high=60_000)

    def conflicts(self) -> Iterator[str]:
        if self.side not in (INNER, OUTER):
            yield f"side: must be {INNER} or {OUTER}, got {self.side}"

    def build(self, seed: int) -> MNIST:
        paths = files.find(files.data_root(self.root))
        greys, labels, test_greys, test_labels = (files.read_idx(paths[name]) for name in files.ORIGINAL)
        rows, test_rows = (
            torch.from_numpy(centred((values >= HALF).astype(np.uint8), self.side)).flatten(1)
            for values in (greys[: self.points], test_greys)
        )
        classes, test_classes = (torch.from_numpy(x.astype(np.int64)) for x in (labels[: self.points], test_labels))
        name = "mnist" if self.side == OUTER else f"mnist-{self.side}"
        return MNIST(name, rows, test_rows, classes, test_classes)


@dataclass(frozen=True, kw_only=True)
class DigitsConfig(ImagesConfig, kind="digits"):
    """Small digits of 8 x 8 pixels that come with the package; the seed plays no role."""

    def build(self, seed: int) -> Digits:
        with np.load(DIGITS, allow_pickle=False) as archive:
            rows = torch.from_numpy(np.unpackbits(archive["bits"], axis=1))
            labels = torch.from_numpy(archive["labels"].astype(np.int64))
        state, tested = random_state(derive_seed("digits", "split")), torch.zeros(len(labels), dtype=torch.bool)
        for digit in range(10):
            tested[state.permutation(np.flatnonzero(labels == digit))[:30]] = True
        return Digits("digits", rows[~tested], rows[tested], labels[~tested], labels[tested])


def _pixels(path: Path, side: int) -> tuple[Greys, Greys]:
    """Grey values and opacity, both 0..255."""
    from PIL import Image, UnidentifiedImageError

    check_file(path, "give a .png file")
    edges = [side, INNER] if side == OUTER else [side]
    sizes = " or ".join(f"{edge} x {edge}" for edge in edges)
    with readable(path, "save it again"):
        try:
            image = Image.open(path, formats=["PNG"])
        except UnidentifiedImageError:
            raise DataError(f"{path}: is no PNG image; save it as one of {sizes} pixels") from None
        with image:
            if image.size not in {(edge, edge) for edge in edges}:  # from the header: nothing large is unpacked
                width, height = image.size
                raise DataError(f"{path}: is {width} x {height} pixels, but the model's images are {sizes}; resize it")
            if image.mode.startswith("I"):  # 16 bits, which convert() would clip
                deep = np.asarray(image, dtype=np.float64) / 257
                return deep, np.full_like(deep, 255)
            colour = image.convert("RGBA")
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
