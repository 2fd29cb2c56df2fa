"""Files of MNIST: where they lie, whether they are whole, how they are read and fetched.

Every fault is a `DataError` that names the file, what is wrong with it and the remedy.
"""

from __future__ import annotations

import gzip
import hashlib
import http.client
import io
import math
import os
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
from jaxtyping import UInt8

from emoe.domains.base import DataError

MIRROR = "https://ossci-datasets.s3.amazonaws.com/mnist/"
LARGEST = 2**30  # bytes a file may hold when it is unpacked
UNSIGNED_BYTE = 0x08  # the only type of an IDX file that images and labels have
GZIP = b"\x1f\x8b"
FOLDERS = ("mnist", "binarized_mnist", "")  # below the data root
LOCAL = Path("data")  # in the current folder
PACKED_BYTES = 28 * 28 // 8
TIMEOUT = 60  # seconds without an answer
BLOCK = 1 << 16
BROKEN = (OSError, ValueError, EOFError, zlib.error)
AGAIN = "delete it and download it again: emoe data mnist"
BY_HAND = "delete it and put a whole copy in its place"


@dataclass(frozen=True)
class Known:
    """What a published file looks like, as a .gz file and unpacked."""

    size: int
    sha256: str
    raw_size: int
    raw_sha256: str


TRAIN_IMAGES, TRAIN_LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
TEST_IMAGES, TEST_LABELS = "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"
ORIGINAL = (TRAIN_IMAGES, TRAIN_LABELS, TEST_IMAGES, TEST_LABELS)
STATIC_TRAIN, STATIC_TEST = "binarized_mnist_train.packed.npy", "binarized_mnist_test.packed.npy"
STATIC = (STATIC_TRAIN, STATIC_TEST)

# Name without .gz -> sizes and checksums. The first four are LeCun, Cortes and Burges's own files.
KNOWN: dict[str, Known] = {
    TRAIN_IMAGES: Known(
        9_912_422,
        "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        47_040_016,
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    ),
    TRAIN_LABELS: Known(
        28_881,
        "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        60_008,
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    ),
    TEST_IMAGES: Known(
        1_648_877,
        "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        7_840_016,
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    ),
    TEST_LABELS: Known(
        4_542,
        "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        10_008,
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    ),
    STATIC_TRAIN: Known(
        1_605_742,
        "bb879584eabcaae0f57a6e9a6ee45af8f69268913cb6c5db687542099a042a58",
        4_900_128,
        "960df2997954f75d07eee650834f00234308defe3939a16ae09904ee9dbca284",
    ),
    STATIC_TEST: Known(
        298_921,
        "c4c8d0fd01570149e20c9b6290d9bbdb99ab8504b8376494b38cd8d9ff14a0d6",
        980_128,
        "512d4a657eb7493259a243b6b89bdf36293cd94928d9a2fad9cfab22e790a489",
    ),
}


def data_root(explicit: str | None = None) -> Path | None:
    """The folder that holds data: the one given, else $EMOE_DATA, else ./data where that exists, else None."""
    named = explicit or os.environ.get("EMOE_DATA")
    if named:
        return Path(named).expanduser()
    return LOCAL if LOCAL.is_dir() else None


def places(root: Path, name: str) -> list[Path]:
    """Where a file may lie below the data root, in the order of the search; a gzipped copy is called name.gz."""
    return [root / folder / (name + ending) for folder in FOLDERS for ending in (".gz", "")]


def find(root: Path | None, names: Sequence[str]) -> dict[str, Path]:
    """Name -> path of every file.

    Args:
        root: The data root, see `data_root`.
        names: File names without .gz.

    Raises:
        DataError: Files are missing; it says which ones and where they were looked for.
    """
    found = {name: next((path for path in places(root, name) if path.is_file()), None) for name in names if root}
    missing = [name for name in names if found.get(name) is None]
    if not missing:
        return {name: path for name, path in found.items() if path is not None}
    if root is None:
        where = f"no data folder is named and ./{LOCAL} does not exist"
    else:
        where = "looked in " + ", ".join(str(root / folder) for folder in FOLDERS)
    remedy = "name the folder that holds them with --data-root, --domain.root or EMOE_DATA"
    if set(names) <= set(ORIGINAL):
        remedy += ", or download them: emoe data mnist"
    raise DataError(f"missing {', '.join(f'{name}[.gz]' for name in missing)}: {where}; {remedy}")


def verify(path: Path) -> None:
    """Compare a published file, told by its name, with its known size and checksum; other names pass.

    Raises:
        DataError: The file is not the published one.
    """
    known = KNOWN.get(path.name.removesuffix(".gz"))
    if known is None:
        return
    zipped = path.name.endswith(".gz")
    size, sha256 = (known.size, known.sha256) if zipped else (known.raw_size, known.raw_sha256)
    remedy = AGAIN if path.name.removesuffix(".gz") in ORIGINAL else BY_HAND
    try:
        with path.open("rb") as file:
            length = os.fstat(file.fileno()).st_size
            if length != size:
                raise DataError(f"{path}: has {length:,} bytes, but the published file has {size:,}; {remedy}")
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise _unreadable(path, error) from None
    if digest != sha256:
        raise DataError(f"{path}: sha256 is {digest}, but that of the published file is {sha256}; {remedy}")


def _unreadable(path: Path, error: Exception) -> DataError:
    if not path.exists():
        return DataError(f"{path}: does not exist; check the path")
    return DataError(f"{path}: cannot be read, damaged or cut off ({error}); {BY_HAND}")


def _open(path: Path) -> io.BufferedIOBase:
    """The unpacked content, whatever the file is called."""
    with path.open("rb") as file:
        zipped = file.read(2) == GZIP
    return gzip.open(path, "rb") if zipped else path.open("rb")


def read_idx(path: Path) -> UInt8[np.ndarray, "..."]:
    """Read an IDX file of bytes, gzipped or not.

    Header: two zero bytes, the type (0x08), the number of axes, then the length of each as a big-endian 32-bit
    number; the values follow, last axis fastest. Never more is unpacked than the header promises and one byte.

    Raises:
        DataError: No such file, another format or type, damaged, too short, too long, or over 1 GiB.
    """
    try:
        with _open(path) as file:
            head = file.read(4)
            if len(head) < 4 or head[:2] != b"\0\0":
                raise DataError(f"{path}: is no IDX file, it begins with {head.hex(' ') or 'nothing'}; {BY_HAND}")
            if head[2] != UNSIGNED_BYTE:
                raise DataError(f"{path}: holds values of type 0x{head[2]:02x}, not bytes (0x08); save it as uint8")
            axes = head[3]
            sizes = file.read(4 * axes)
            if not axes or len(sizes) < 4 * axes:
                raise DataError(f"{path}: the header of {axes} axes is cut off; {BY_HAND}")
            shape = struct.unpack(f">{axes}I", sizes)
            count = math.prod(shape)
            if count > LARGEST:
                raise DataError(f"{path}: the header promises {count:,} bytes, more than {LARGEST:,}; {BY_HAND}")
            values = file.read(count + 1)
    except DataError:
        raise
    except BROKEN as error:
        raise _unreadable(path, error) from None
    if len(values) < count:
        raise DataError(f"{path}: holds {len(values):,} values of the {count:,} its header promises; {BY_HAND}")
    if len(values) > count:
        raise DataError(f"{path}: goes on after the {count:,} values its header promises; {BY_HAND}")
    return np.frombuffer(values, np.uint8).reshape(shape)


def read_packed(path: Path) -> UInt8[np.ndarray, "N 784"]:
    """Bits of the statically binarised set: an .npy array (N, 98) of bytes, gzipped or not, eight pixels in each.

    Raises:
        DataError: No such file, damaged, or another array.
    """
    try:
        with _open(path) as file:
            content = io.BytesIO(file.read(LARGEST + 1))
        packed = np.load(content, allow_pickle=False)
    except (*BROKEN, MemoryError) as error:
        raise _unreadable(path, error) from None
    if not isinstance(packed, np.ndarray) or packed.dtype != np.uint8 or packed.shape[1:] != (PACKED_BYTES,):
        what = f"{packed.dtype} of shape {packed.shape}" if isinstance(packed, np.ndarray) else "an archive"
        raise DataError(f"{path}: holds {what}, not uint8 of shape (N, {PACKED_BYTES}); {BY_HAND}")
    if content.read(1):
        raise DataError(f"{path}: goes on after its array; {BY_HAND}")
    return np.unpackbits(packed, axis=1)


Opener = Callable[[str], io.BufferedIOBase]
"""Opens an address for reading, as `urllib.request.urlopen` does."""


def _urlopen(url: str) -> io.BufferedIOBase:
    import urllib.request

    return cast(io.BufferedIOBase, urllib.request.urlopen(url, timeout=TIMEOUT))


def download_mnist(
    root: Path, *, fetch: Opener | None = None, on_progress: Callable[[str, int, int], None] | None = None
) -> list[Path]:
    """Download the four original files into `root`/mnist, those that are there and whole left alone.

    A file gets its name only when its checksum is right; what was fetched before an error is removed.

    Args:
        root: The data root.
        fetch: Opens an address; urllib by default.
        on_progress: Called with the file's name, the bytes fetched so far and their final number.

    Returns:
        The paths of all four files.

    Raises:
        DataError: No network, no such file at the mirror, another content, or a folder that cannot be written.
    """
    folder = Path(root) / "mnist"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{folder}: cannot be made ({error}); choose another --data-root") from None
    done = []
    for name in ORIGINAL:
        path = folder / f"{name}.gz"
        if not _is_whole(path):
            _download(path, KNOWN[name], fetch or _urlopen, on_progress)
        done.append(path)
    return done


def is_complete(root: Path) -> bool:
    """Whether all four original files lie below the data root and are the published ones."""
    try:
        return all(_is_whole(path) for path in find(root, ORIGINAL).values())
    except DataError:
        return False


def _is_whole(path: Path) -> bool:
    try:
        verify(path)
    except DataError:
        return False
    return True


def _download(path: Path, known: Known, fetch: Opener, on_progress: Callable[[str, int, int], None] | None) -> None:
    url = MIRROR + path.name
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    remedy = f"try again later, or put {', '.join(f'{name}.gz' for name in ORIGINAL)} into {path.parent} by hand"
    digest, size = hashlib.sha256(), 0
    try:
        with fetch(url) as source, part.open("wb") as target:
            # One block past the known size is enough to see that the content is another.
            while size <= known.size and (block := source.read(BLOCK)):
                target.write(block)
                digest.update(block)
                size += len(block)
                if on_progress is not None:
                    on_progress(path.name, size, known.size)
        if digest.hexdigest() != known.sha256:
            what = f"{size:,} bytes in place of {known.size:,}" if size != known.size else "another sha256"
            raise DataError(f"{url}: the download is not the published file ({what}); {remedy}")
        os.replace(part, path)
    except (OSError, http.client.HTTPException) as error:
        raise DataError(f"{url}: cannot be downloaded to {path.parent} ({error}); {remedy}") from None
    finally:
        part.unlink(missing_ok=True)
