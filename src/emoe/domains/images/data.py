"""Binary images as rows of pixels: MNIST and scikit-learn's small digits.

A row lists the pixels of an image line by line, 0 for paper and 1 for ink; the mask is 2, so V = 3 and L = side^2.

The digits are the test part of "Optical Recognition of Handwritten Digits" (E. Alpaydin and C. Kaynak, UCI Machine
Learning Repository, CC BY 4.0) as scikit-learn ships it: 1,797 images of 8 x 8 values 0..16. `digits.npz` beside this
file holds them binarised (value >= 8) and packed, with their labels, in scikit-learn's order.
"""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, get_args

import numpy as np
import torch
from jaxtyping import Bool, Int, Integer, UInt8
from torch import Tensor

from emoe.config import option
from emoe.domains.base import DataError, Domain, DomainConfig, Ink
from emoe.domains.images import files, pictures
from emoe.domains.images.given import draw_completions, read_picture, read_region
from emoe.domains.rows.given import TYPED
from emoe.domains.toy.data import random_state
from emoe.domains.toy.figures import truth_first
from emoe.rng import derive_seed
from emoe.types import Measurement, TokenSpace

Variant = Literal["threshold", "static"]

MASK = 2
INNER, OUTER = 28, 32  # side of MNIST's images, and with two empty pixels all around
INK = 128  # value / 255 > 0.5
TRAIN_ROWS: dict[str, int] = {"threshold": 60_000, "static": 50_000}
CLASSES = 10
DIGITS = Path(__file__).with_name("digits.npz")
DIGITS_TESTED = 30  # images of each class in the test split
PACKED = "mnist-packed.npz"


class Images(Domain):
    """Binary images with a fixed test split; rows are kept as uint8, batches and fresh rows are int64.

    Args:
        name: The `data` column of results.
        rows: Training rows.
        test_rows: Rows of the test split.
        labels: Classes of the training rows, where they are known.
        test_labels: Classes of the test rows.
    """

    side: int
    labels: Int[Tensor, " N"] | None
    test_rows: UInt8[Tensor, "M L"]
    test_labels: Int[Tensor, " M"] | None

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

    def fresh(self, n: int, seed: int) -> Int[Tensor, "n L"]:
        """`n` rows of the test split, drawn by `seed` without replacement.

        Raises:
            DataError: The test split has fewer rows; repeating them would make errors look smaller than they are.
        """
        if n > len(self.test_rows):
            raise DataError(
                f"{self.name}: {n:,} rows that were not trained on are asked for, but the test split has "
                f"{len(self.test_rows):,}; ask for at most so many (emoe eval --rows {len(self.test_rows)})"
            )
        generator = torch.Generator().manual_seed(derive_seed("images", "fresh", seed))
        return self.test_rows[torch.randperm(len(self.test_rows), generator=generator)[:n]].long()

    def measure(self, samples: Int[Tensor, "n L"], seed: int = 0) -> list[Measurement]:
        """How much the samples look like the test split, see `emoe.domains.images.metrics`."""
        from emoe.domains.images.metrics import measure_images

        return measure_images(samples, self, seed)

    def picture(self, pools: Mapping[str, Int[Tensor, "_n L"]], path: Path, *, title: str = "") -> None:
        """The first 64 (or 16) images of each pool, the ground truth first; ink is black, masked pixels are grey."""
        images = {name: as_images(rows) for name, rows in truth_first(pools).items()}
        pictures.picture(images, path, title=title)


class MNIST(Images):
    """MNIST in black and white: 60,000 (static: 50,000) images to train on, 10,000 to test with."""

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

    def read_given(self, source: str, space: TokenSpace, *, ink: Ink = "auto") -> Int[Tensor, "m L"]:
        """One image of a .png file, of the model's size or, for a model of 32 x 32, of 28 x 28; or rows of pixels."""
        side = side_of(space.length)
        if Path(source).suffix.lower() in (".npy", ".csv") or TYPED.fullmatch(source):
            return super().read_given(source, space, ink=ink)
        bits = read_picture(Path(source), side, _inner(side), ink=ink)
        return torch.from_numpy(bits.reshape(1, -1)).long()

    def read_keep(self, text: str, space: TokenSpace) -> Bool[Tensor, " L"]:
        """Halves, the centre, the border, none, a .png mask (white stays), or positions, line by line."""
        side = side_of(space.length)
        return read_region(text, side, _inner(side))

    def draw_completions(
        self, rows: Int[Tensor, "m L"], given: Int[Tensor, "m L"], samples: Int[Tensor, "m n L"],
        space: TokenSpace, path: Path,
    ) -> None:  # fmt: skip
        """A line of images for each given one."""
        draw_completions(rows, given, samples, side_of(space.length), path)


def _inner(side: int) -> int | None:
    """The edge of images without the margin that they were given."""
    return INNER if side == OUTER else None


@dataclass(frozen=True, kw_only=True)
class MNISTConfig(ImagesConfig, kind="mnist"):
    """MNIST in black and white; the seed plays no role.

    threshold: ink where value / 255 > 0.5, from the four original files or from `mnist-packed.npz`.
    static: the fixed binarisation of Salakhutdinov and Murray (each pixel drawn once with its grey value as the
    probability), its training and test parts; its 10,000 validation images are left out, and it has no labels.
    """

    variant: Variant = option("threshold", doc="threshold (ink = value over half) or static (drawn once, no labels)")
    root: str | None = option(None, doc="folder with the data; none = EMOE_DATA, then ./data", neutral=True)
    side: int = option(OUTER, doc="pixels along an edge: 28, or 32 with an empty margin of 2", low=INNER, high=OUTER)
    points: int | None = option(None, doc="only the first so many training rows; none = all", low=2)

    def conflicts(self) -> Iterator[str]:
        """A variant that is not known, a side in between, more rows than there are."""
        if self.variant not in get_args(Variant):
            yield f"variant: {self.variant!r} is not known; allowed: {', '.join(get_args(Variant))}"
        elif self.points is not None and self.points > TRAIN_ROWS[self.variant]:
            yield f"points: {self.variant} has {TRAIN_ROWS[self.variant]:,} training rows; ask for at most so many"
        if self.side not in (INNER, OUTER):
            yield f"side: must be {INNER} or {OUTER}, got {self.side}"

    def build(self, seed: int) -> MNIST:
        """Read and check the files."""
        root = files.data_root(self.root)
        parts = load_static(root) if self.variant == "static" else load_threshold(root)
        name = "mnist" if self.variant == "threshold" else "mnist-static"
        if self.side == OUTER:
            parts = parts.padded()
        else:
            name += f"-{self.side}"
        return MNIST(name, *parts.tensors(self.points))


@dataclass(frozen=True, kw_only=True)
class DigitsConfig(ImagesConfig, kind="digits"):
    """Small digits of 8 x 8 pixels that come with the package; the seed plays no role."""

    def build(self, seed: int) -> Digits:
        """Unpack and split."""
        return Digits("digits", *load_digits().tensors())


@dataclass(frozen=True)
class Parts:
    """Bits of the training and the test images, with their classes where they are known."""

    train: UInt8[np.ndarray, "N L"]
    test: UInt8[np.ndarray, "M L"]
    labels: UInt8[np.ndarray, " N"] | None = None
    test_labels: UInt8[np.ndarray, " M"] | None = None

    def padded(self) -> Parts:
        """The same images with an empty margin of 2 pixels: 28 x 28 become 32 x 32."""
        return Parts(pad(self.train), pad(self.test), self.labels, self.test_labels)

    def tensors(self, points: int | None = None) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Rows, test rows, labels and test labels; of the training rows the first `points`."""
        labels, test_labels = (
            None if x is None else torch.from_numpy(x.astype(np.int64)) for x in (self.labels, self.test_labels)
        )
        labels = None if labels is None else labels[:points]
        return torch.from_numpy(self.train[:points].copy()), torch.from_numpy(self.test), labels, test_labels


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
    """Eight pixels in a byte, the first one in the highest bit; L must be a multiple of 8.

    Raises:
        ValueError: L is no multiple of 8, or a pixel is neither 0 nor 1, for instance masked.
    """
    if rows.shape[1] % 8:
        raise ValueError(f"rows of {rows.shape[1]} pixels do not fill whole bytes")
    if ((rows != 0) & (rows != 1)).any():
        raise ValueError("only pixels 0 and 1 can be packed; unmask the rows first")
    return np.packbits(rows.cpu().numpy().astype(np.uint8), axis=1)


def unpack_rows(packed: UInt8[np.ndarray, "n _B"]) -> UInt8[Tensor, "n L"]:
    """Inverse of `pack_rows`."""
    return torch.from_numpy(np.unpackbits(packed, axis=1))


def pad(bits: UInt8[np.ndarray, "n 784"]) -> UInt8[np.ndarray, "n 1024"]:
    """28 x 28 pixels with two of paper on every side."""
    margin = (OUTER - INNER) // 2
    images = bits.reshape(-1, INNER, INNER)
    return np.pad(images, ((0, 0), (margin, margin), (margin, margin))).reshape(-1, OUTER * OUTER)


def crop(bits: UInt8[np.ndarray, "n 1024"]) -> UInt8[np.ndarray, "n 784"]:
    """Inverse of `pad`."""
    margin = (OUTER - INNER) // 2
    inner = slice(margin, margin + INNER)
    return bits.reshape(-1, OUTER, OUTER)[:, inner, inner].reshape(-1, INNER * INNER)


def load_threshold(root: Path | None) -> Parts:
    """MNIST from the original files, or from `mnist-packed.npz` where those are not all there.

    Raises:
        DataError: Neither is there, or a file is damaged.
    """
    try:
        paths = files.find(root, files.ORIGINAL)
    except DataError:
        packed = [] if root is None else [root / folder / PACKED for folder in ("", "mnist")]
        for path in packed:
            if path.is_file():
                return read_mnist_packed(path)
        raise
    return _from_originals(paths)


def _from_originals(paths: Mapping[str, Path]) -> Parts:
    images, found = {}, {}
    for part, name, labelled in (
        ("train", files.TRAIN_IMAGES, files.TRAIN_LABELS),
        ("test", files.TEST_IMAGES, files.TEST_LABELS),
    ):
        for path in (paths[name], paths[labelled]):
            files.verify(path)
        images[part], found[part] = files.read_idx(paths[name]), files.read_idx(paths[labelled])
        if images[part].shape[1:] != (INNER, INNER):
            raise DataError(f"{paths[name]}: has shape {images[part].shape}, not (N, {INNER}, {INNER}); {files.AGAIN}")
        if found[part].shape != images[part].shape[:1]:
            raise DataError(f"{paths[labelled]}: has shape {found[part].shape}, not one label an image; {files.AGAIN}")
    train, test = ((x >= INK).astype(np.uint8).reshape(len(x), -1) for x in (images["train"], images["test"]))
    return Parts(train, test, found["train"], found["test"])


def load_static(root: Path | None) -> Parts:
    """The statically binarised MNIST, its training and test parts.

    Raises:
        DataError: A file is missing or damaged.
    """
    paths = files.find(root, files.STATIC)
    for path in paths.values():
        files.verify(path)
    return Parts(files.read_packed(paths[files.STATIC_TRAIN]), files.read_packed(paths[files.STATIC_TEST]))


def write_packed(root: Path | None, target: Path) -> Path:
    """Write MNIST (threshold, 32 x 32) with its labels as one small file, to be carried to another machine.

    Args:
        root: Data root with the original files.
        target: Folder for `mnist-packed.npz`; it can be the `root` of a `MNISTConfig`.

    Returns:
        The path of the file, which has its name only once it is complete.
    """
    parts = _from_originals(files.find(root, files.ORIGINAL)).padded()
    target.mkdir(parents=True, exist_ok=True)
    path = target / PACKED
    draft = target / f".{PACKED}.{os.getpid()}.part"
    try:
        with draft.open("wb") as file:
            np.savez_compressed(
                file,
                train=np.packbits(parts.train, axis=1),
                test=np.packbits(parts.test, axis=1),
                train_labels=np.asarray(parts.labels),
                test_labels=np.asarray(parts.test_labels),
            )
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    return path


def read_mnist_packed(path: Path) -> Parts:
    """What `write_packed` wrote, at 28 x 28.

    Raises:
        DataError: The file is damaged or holds other arrays.
    """
    remedy = "write it again (emoe data pack), or use the original files"
    names = ("train", "test", "train_labels", "test_labels")
    try:
        with path.open("rb") as file:  # np.load would leave a damaged archive open
            archive = np.load(file, allow_pickle=False)
            if isinstance(archive, np.ndarray):
                raise ValueError("a single array, no archive")
            found = {name: archive[name] for name in names}
    except (*files.BROKEN, KeyError, zipfile.BadZipFile, NotImplementedError) as error:
        raise DataError(f"{path}: cannot be read, damaged or cut off ({error}); {remedy}") from None
    for name in names[:2]:
        bits, labels = found[name], found[f"{name}_labels"]
        if bits.dtype != np.uint8 or bits.shape[1:] != (OUTER * OUTER // 8,) or not len(bits):
            raise DataError(
                f"{path}: {name} is {bits.dtype} of shape {bits.shape}, not uint8 of shape (N, {OUTER * OUTER // 8}); "
                f"{remedy}"
            )
        if labels.dtype != np.uint8 or labels.shape != bits.shape[:1] or labels.max() >= CLASSES:
            raise DataError(
                f"{path}: {name}_labels is {labels.dtype} of shape {labels.shape}, not a class 0..9 for each of the "
                f"{len(bits):,} images; {remedy}"
            )
    train, test = (crop(np.unpackbits(found[name], axis=1)) for name in names[:2])
    return Parts(train, test, found["train_labels"], found["test_labels"])


def load_digits() -> Parts:
    """The digits of the package, split into 1,497 and 300 images."""
    with np.load(DIGITS, allow_pickle=False) as archive:
        bits, labels = np.unpackbits(archive["bits"], axis=1), archive["labels"]
    state = random_state(derive_seed("digits", "split"))
    tested = np.zeros(len(labels), bool)
    for digit in range(CLASSES):
        tested[state.permutation(np.flatnonzero(labels == digit))[:DIGITS_TESTED]] = True
    return Parts(bits[~tested], bits[tested], labels[~tested], labels[tested])
