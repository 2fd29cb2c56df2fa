"""Files of MNIST: their folders, checksums, format and download."""

from __future__ import annotations

import gzip
import hashlib
import http.client
import os
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from emoe.domains import DataError, readable
from emoe.files import replace_file

MIRROR = "https://ossci-datasets.s3.amazonaws.com/mnist/"
TIMEOUT = 60  # seconds without an answer
BLOCK = 1 << 16
AGAIN = "delete it and download it again: emoe data mnist"

Progress = Callable[[int, str], None]  # called with the bytes of each block and the name of its file

KNOWN = {  # sizes and SHA-256 of LeCun, Cortes and Burges's own files, packed and unpacked
    "train-images-idx3-ubyte.gz": (9_912_422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
    "train-images-idx3-ubyte": (47_040_016, "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"),
    "train-labels-idx1-ubyte.gz": (28_881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
    "train-labels-idx1-ubyte": (60_008, "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"),
    "t10k-images-idx3-ubyte.gz": (1_648_877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
    "t10k-images-idx3-ubyte": (7_840_016, "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"),
    "t10k-labels-idx1-ubyte.gz": (4_542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
    "t10k-labels-idx1-ubyte": (10_008, "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"),
}
ORIGINAL = tuple(name for name in KNOWN if not name.endswith(".gz"))  # images and labels to train on, then to test with


def data_root(explicit: str | None = None) -> Path:
    """The folder that holds data: the one given, else $EMOE_DATA, else ./data."""
    return Path(explicit or os.environ.get("EMOE_DATA") or "data").expanduser()


def find(root: Path, names: Sequence[str] = ORIGINAL) -> dict[str, Path]:
    """Name -> path of every file, `name.gz` or `name`, in mnist/ below the data root or else in the root itself."""
    folders = [root, root / "mnist"]
    candidates = [(name, folder / (name + end)) for name in names for folder in folders for end in ("", ".gz")]
    paths = {name: path for name, path in candidates if path.is_file()}
    if absent := [f"{name}[.gz]" for name in names if name not in paths]:
        where = f"looked in {', '.join(map(str, folders))}"
        remedy = "name the folder that holds them with --data-root, --domain.root or EMOE_DATA, or download them"
        raise DataError(f"missing {', '.join(absent)}: {where}; {remedy}: emoe data mnist")
    return paths


def read_published(path: Path) -> bytes:
    """The content of a published file, unpacked, once its size and checksum are the known ones."""
    size, sha256 = KNOWN[path.name]
    with readable(path, "delete it and put a whole copy in its place"):
        content = path.read_bytes()
    if len(content) != size:
        raise DataError(f"{path}: has {len(content):,} bytes, but the published file has {size:,}; {AGAIN}")
    digest = hashlib.sha256(content).hexdigest()
    if digest != sha256:
        raise DataError(f"{path}: sha256 is {digest}, but that of the published file is {sha256}; {AGAIN}")
    return gzip.decompress(content) if path.suffix == ".gz" else content


def read_idx(path: Path) -> UInt8[np.ndarray, "..."]:
    """The values of a published IDX file.

    Header: two zero bytes, the type (0x08: bytes), the number of axes, then the length of each as a big-endian 32-bit
    number; the values follow, last axis fastest.
    """
    content = read_published(path)
    axes = content[3]
    shape = np.frombuffer(content, ">u4", axes, offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * axes).reshape(shape)


def missing(root: Path) -> list[Path]:
    """Paths in `root`/mnist of the files that must be downloaded: missing below the data root, or not as published."""
    paths = []
    for name in ORIGINAL:
        try:
            read_published(find(root, [name])[name])
        except DataError:
            paths.append(root / "mnist" / f"{name}.gz")
    return paths


def download(path: Path, on_progress: Progress = lambda *_: None) -> None:
    """Download an original file to a path that ends in its name."""
    url, data, (size, sha256) = MIRROR + path.name, bytearray(), KNOWN[path.name]
    remedy = f"try again later, or put {', '.join(f'{name}.gz' for name in ORIGINAL)} into {path.parent} by hand"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{path.parent}: cannot be made ({error}); choose another --data-root") from None
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT) as source:
            # One block past the known size is enough to see that the content is another.
            while len(data) <= size and (block := source.read(BLOCK)):
                data += block
                on_progress(len(block), path.name)
        if hashlib.sha256(data).hexdigest() != sha256:
            what = "another sha256" if len(data) == size else f"{len(data):,} bytes in place of {size:,}"
            raise DataError(f"{url}: the download is not the published file ({what}); {remedy}")
        replace_file(path, bytes(data))
    except (OSError, http.client.HTTPException) as error:
        raise DataError(f"{url}: cannot be downloaded to {path.parent} ({error}); {remedy}") from None
