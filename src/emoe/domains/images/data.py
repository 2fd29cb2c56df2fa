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
from jaxtyping import Int, UInt8
from torch import Tensor

from emoe.config import option
from emoe.domains.base import Pools, SplitDomain, random_state
from emoe.domains.images import files
from emoe.domains.images.classifier import SIDES, load_classifier
from emoe.domains.images.given import HALF, INNER, OUTER, ImagesConfig, centred
from emoe.domains.images.metrics import measure_images
from emoe.figures import panels
from emoe.figures.panels import as_images, side_of
from emoe.rng import derive_seed
from emoe.types import Measurement, TokenSpace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DIGITS = Path(__file__).with_name("digits.npz")

Pixels = UInt8[Tensor, "_N L"]
Classes = Int[Tensor, " _N"] | None


class Images(SplitDomain):
    """Binary images with a fixed test split, kept as uint8.

    Features and classes are measured where a classifier of the task is in the package, and pixels always.
    """

    task: ClassVar[str] = "images"
    stream: ClassVar[str] = "images"

    def __init__(self, name: str, rows: Pixels, test_rows: Pixels, labels: Classes = None, test_labels: Classes = None):
        self.name, self.side, self.fresh_rows = name, side_of(rows.shape[1]), len(test_rows)
        self.rows, self.labels, self.test_rows, self.test_labels = rows, labels, test_rows, test_labels
        self.space = TokenSpace(size=3, mask_id=2, length=rows.shape[1])

    def measure(self, samples: Int[Tensor, "n L"], seed: int = 0) -> list[Measurement]:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        classifier = load_classifier(self.task, device) if self.task in SIDES else None
        return measure_images(samples, self.test_rows, self.rows, seed, classifier, self.test_labels)

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
