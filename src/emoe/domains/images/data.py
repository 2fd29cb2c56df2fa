"""Binary images as rows of pixels: MNIST and scikit-learn's small digits.

A row lists the pixels of an image line by line, 0 for paper and 1 for ink; the mask is 2, so V = 3 and L = side^2.

The digits are the test part of "Optical Recognition of Handwritten Digits" (E. Alpaydin and C. Kaynak, UCI Machine
Learning Repository, CC BY 4.0) as scikit-learn ships it: 1,797 images of 8 x 8 values 0..16. `digits.npz` beside this
file holds them binarised (value >= 8) and packed, with their labels, in scikit-learn's order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Int, Integer, UInt8
from torch import Tensor
from torch.nn import functional as F

from emoe.config import option
from emoe.domains.base import DataError, DomainConfig, Ink, SplitDomain, random_state
from emoe.domains.images import files
from emoe.domains.images.classifier import load_classifier
from emoe.domains.images.given import read_image, read_region
from emoe.domains.images.metrics import measure_images
from emoe.domains.rows.given import TYPED
from emoe.figures import panels
from emoe.rng import derive_seed
from emoe.types import Measurement, TokenSpace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MASK = 2
INNER, OUTER = 28, 32  # side of MNIST's images, and with two empty pixels all around
INK = 128  # value / 255 > 0.5
TRAIN_ROWS = 60_000  # of MNIST
DIGITS = Path(__file__).with_name("digits.npz")
DIGITS_TESTED = 30  # images of each class in the test split
MOST = 8  # lines, and completions in a line, of a figure of completions


class Images(SplitDomain):
    """Binary images with a fixed test split; rows are kept as uint8, batches and fresh rows are int64."""

    stream: ClassVar[str] = "images"
    classifier: ClassVar[str] = ""  # name of a classifier of the package; without one measures are those of pixels

    def __init__(
        self,
        name: str,
        rows: UInt8[Tensor, "N L"],
        test_rows: UInt8[Tensor, "M L"],
        labels: Int[Tensor, " N"] | None = None,
        test_labels: Int[Tensor, " M"] | None = None,
    ):
        self.name, self.side = name, side_of(rows.shape[1])
        self.space = TokenSpace(size=MASK + 1, mask_id=MASK, length=rows.shape[1])
        self.rows, self.labels = rows, labels
        self.test_rows, self.test_labels, self.fresh_rows = test_rows, test_labels, len(test_rows)

    def measure(self, samples: Int[Tensor, "n L"], seed: int = 0) -> list[Measurement]:
        """Comparison of the samples with the test split, see `emoe.domains.images.metrics`."""
        device = "cuda" if torch.cuda.is_available() else "cpu"
        classifier = load_classifier(self.classifier, device) if self.classifier else None
        return measure_images(samples, self.test_rows, self.rows, seed, classifier=classifier, labels=self.test_labels)

    def figure(self, pools: Mapping[str, Int[Tensor, "_n L"]], *, title: str = "") -> Figure:
        """The first 64 (or 16) images of each pool, real data first; ink is black, masked pixels are grey."""
        return panels.mosaics({name: as_images(rows) for name, rows in panels.truth_first(pools).items()}, title=title)


class MNIST(Images):
    """MNIST in black and white: 60,000 images to train on, 10,000 to test with."""

    task: ClassVar[str] = "mnist"
    classifier: ClassVar[str] = "mnist"


class Digits(Images):
    """Images of 8 x 8 pixels, 1,497 to train on and 300 to test with, 30 of each class.

    The 30 are drawn by a fixed seed and both parts keep scikit-learn's order. Writers may be in both parts, and some
    images are equal once they are binarised: 12 of the 300 also occur in training.
    """

    task: ClassVar[str] = "digits"
    classifier: ClassVar[str] = "digits"


@dataclass(frozen=True, kw_only=True)
class ImagesConfig(DomainConfig):
    """Square images, which are completed from PNG files."""

    def read_given(self, source: str, space: TokenSpace, *, ink: Ink = "auto") -> Int[Tensor, "m L"]:
        """One image of a .png file, of the model's size or, for a model of 32 x 32, of 28 x 28; or rows of pixels."""
        side = side_of(space.length)
        if Path(source).suffix.lower() in (".npy", ".csv") or TYPED.fullmatch(source):
            return super().read_given(source, space, ink=ink)
        bits = read_image(Path(source), side, _inner(side), ink=ink)
        return torch.from_numpy(bits.reshape(1, -1)).long()

    def read_keep(self, text: str, space: TokenSpace) -> Bool[Tensor, " L"]:
        """Halves, the centre, the border, none, a .png mask (white stays), or positions, line by line."""
        side = side_of(space.length)
        return read_region(text, side, _inner(side))

    def completion_figure(
        self, rows: Int[Tensor, "m L"], given: Int[Tensor, "m L"], samples: Int[Tensor, "m n L"], space: TokenSpace
    ) -> Figure:
        """One line for each image, the first 8: as it was read, what was kept (the rest is grey), 8 completions."""
        shown = torch.cat([rows[:MOST, None], given[:MOST, None], samples[:MOST, :MOST]], 1)
        images = shown.unflatten(-1, (side_of(space.length),) * 2).cpu().numpy()
        return panels.image_lines(images, {"given": 0, "kept": 1, "completions": 1 + (images.shape[1] - 1) / 2})


def _inner(side: int) -> int | None:
    """The edge of images without the margin that they were given."""
    return INNER if side == OUTER else None


@dataclass(frozen=True, kw_only=True)
class MNISTConfig(ImagesConfig, kind="mnist"):
    """MNIST from its four original files, ink where value / 255 > 0.5; the seed plays no role."""

    root: str | None = option(None, doc="folder with the data; none = EMOE_DATA, then ./data", neutral=True)
    side: int = option(OUTER, doc="pixels along an edge: 28, or 32 with an empty margin of 2", low=INNER, high=OUTER)
    points: int | None = option(None, doc="only the first so many training rows; none = all", low=2, high=TRAIN_ROWS)

    def conflicts(self) -> Iterator[str]:
        """A side in between."""
        if self.side not in (INNER, OUTER):
            yield f"side: must be {INNER} or {OUTER}, got {self.side}"

    def build(self, seed: int) -> MNIST:
        """Read and check the files."""
        paths = files.find(files.data_root(self.root))
        (rows, labels), (test_rows, test_labels) = (
            read_part(paths[images], paths[labels], self.side) for images, labels in (files.TRAIN, files.TEST)
        )
        name = "mnist" if self.side == OUTER else f"mnist-{self.side}"
        return MNIST(name, rows[: self.points], test_rows, labels[: self.points], test_labels)


@dataclass(frozen=True, kw_only=True)
class DigitsConfig(ImagesConfig, kind="digits"):
    """Small digits of 8 x 8 pixels that come with the package; the seed plays no role."""

    def build(self, seed: int) -> Digits:
        """Unpack and split."""
        with np.load(DIGITS, allow_pickle=False) as archive:
            rows = unpack_rows(archive["bits"])
            labels = torch.from_numpy(archive["labels"].astype(np.int64))
        state, tested = random_state(derive_seed("digits", "split")), torch.zeros(len(labels), dtype=torch.bool)
        for digit in range(10):
            tested[state.permutation(np.flatnonzero(labels == digit))[:DIGITS_TESTED]] = True
        return Digits("digits", rows[~tested], rows[tested], labels[~tested], labels[tested])


def read_part(images: Path, labels: Path, side: int) -> tuple[UInt8[Tensor, "N L"], Int[Tensor, " N"]]:
    """Rows and classes of a training or test part."""
    for path in (images, labels):
        files.verify(path)
    greys, classes = files.read_idx(images), files.read_idx(labels)
    if greys.shape[1:] != (INNER, INNER):
        raise DataError(f"{images}: has shape {greys.shape}, not (N, {INNER}, {INNER}); {files.AGAIN}")
    if classes.shape != greys.shape[:1]:
        raise DataError(f"{labels}: has shape {classes.shape}, not one label an image; {files.AGAIN}")
    rows = torch.from_numpy((greys >= INK).astype(np.uint8).reshape(len(greys), -1))
    return pad(rows) if side == OUTER else rows, torch.from_numpy(classes.astype(np.int64))


def side_of(length: int) -> int:
    """The edge of a square image of so many pixels."""
    side = math.isqrt(length)
    if side * side != length:
        raise ValueError(f"rows of {length} pixels are no square images")
    return side


def as_images(rows: Integer[Tensor, "n L"]) -> UInt8[np.ndarray, "n S S"]:
    """Rows as square images, values unchanged."""
    side = side_of(rows.shape[1])
    return rows.cpu().numpy().astype(np.uint8).reshape(-1, side, side)


def pack_rows(rows: Integer[Tensor, "n L"]) -> UInt8[np.ndarray, "n _B"]:
    """Eight pixels in a byte, the first one in the highest bit."""
    if rows.shape[1] % 8:
        raise ValueError(f"rows of {rows.shape[1]} pixels do not fill whole bytes")
    if ((rows != 0) & (rows != 1)).any():
        raise ValueError("only pixels 0 and 1 can be packed; unmask the rows first")
    return np.packbits(rows.cpu().numpy().astype(np.uint8), axis=1)


def unpack_rows(packed: UInt8[np.ndarray, "n _B"]) -> UInt8[Tensor, "n L"]:
    """Inverse of `pack_rows`."""
    return torch.from_numpy(np.unpackbits(packed, axis=1))


def pad(rows: UInt8[Tensor, "n 784"]) -> UInt8[Tensor, "n 1024"]:
    """28 x 28 pixels with two of paper on every side."""
    margin = (OUTER - INNER) // 2
    return F.pad(rows.reshape(-1, INNER, INNER), (margin,) * 4).flatten(1)
