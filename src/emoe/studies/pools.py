"""Arrays of a run in one compressed .npz file with a manifest: pools of samples, and features of them.

Tokens have 16 bits, so that the files are small: a machine needs nothing else to score them.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from emoe.domains.base import DataError
from emoe.files import replace_file

MANIFEST = "manifest"
RUN = ("data", "method", "recipe", "seed")  # in the manifest of an archive: the run that it belongs to
Array = NDArray[Any]


class PoolKey(NamedTuple):
    """A pool of a run: network calls, and what was changed in the sampler."""

    nfe: int
    variant: str | None = None

    def __str__(self) -> str:
        return f"nfe{self.nfe}" + ("" if self.variant is None else f" {self.variant}")

    @classmethod
    def parse(cls, text: str) -> PoolKey:
        """The inverse of `str`."""
        name, _, variant = text.partition(" ")
        return cls(int(name.removeprefix("nfe")), variant or None)


@dataclass
class Archive:
    """Arrays by name and a manifest."""

    path: Path
    manifest: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, Array] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path) -> Archive:
        """Read a file; an empty archive where there is none.

        Raises:
            DataError: The file is damaged.
        """
        if not path.exists():
            return cls(path)
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
                arrays = {name: archive[name] for name in archive.files}
            return cls(path, json.loads(arrays.pop(MANIFEST).tobytes()), arrays)
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise DataError(f"{path}: cannot be read, damaged ({error}); remove it, or copy it again") from None

    def save(self) -> None:
        """Write the file, whole or not at all."""
        buffer = io.BytesIO()
        manifest = np.frombuffer(json.dumps(self.manifest, sort_keys=True).encode(), np.uint8)
        np.savez_compressed(buffer, **self.arrays, **{MANIFEST: manifest})  # type: ignore[arg-type]
        replace_file(self.path, buffer.getvalue())

    def fields(self, key: PoolKey) -> dict[str, Any]:
        """Fields of rows of a pool of text."""
        run = {name: self.manifest[name] for name in RUN}
        return {"task": "text", **run, "nfe": key.nfe, "convention": key.variant}

    def keys(self) -> list[PoolKey]:
        """Its pools, by variant and NFE."""
        return sorted(map(PoolKey.parse, self.arrays), key=lambda key: (key.variant or "", key.nfe))

    def rows(self, key: PoolKey) -> int:
        """Rows of a pool; 0 if it is not in it."""
        return len(self.arrays.get(str(key), ()))

    def tokens(self, key: PoolKey) -> Int[Tensor, "n L"]:
        """Samples of a pool."""
        return torch.from_numpy(self.arrays[str(key)].astype(np.int64))


def digest(*arrays: Array) -> str:
    """A checksum of arrays; results with another checksum are out of date."""
    sha256 = hashlib.sha256()
    for array in arrays:
        sha256.update(f"{array.dtype} {array.shape}\n".encode())
        sha256.update(np.ascontiguousarray(array).tobytes())
    return sha256.hexdigest()[:16]
