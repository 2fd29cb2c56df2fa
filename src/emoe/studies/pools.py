"""Pools of samples and features of them: arrays of a run in one compressed .npz file, a page of the first samples.

Tokens have 16 bits, so that the files are small: a machine needs nothing else to score them.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape as escape_html
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from emoe.domains.base import DataError
from emoe.files import replace_file
from emoe.reporting.recipes import as_typed, common_changes, parse, without
from emoe.reporting.results import Results, method_rank
from emoe.reporting.text import VARIANTS

MANIFEST = "manifest"
RUN = ("data", "method", "recipe", "seed")  # in the manifest of an archive: the run that it belongs to
SHOWN = 2  # samples of a pool that are saved as text
Array = NDArray[Any]
_SIGNS = re.compile(r"([\\`*_{}\[\]()#+\-.!|~$])")


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


def escape(text: str) -> str:
    """Escape text for Markdown."""
    return _SIGNS.sub(r"\\\1", escape_html(text, quote=False))


def samples_page(pools: Sequence[Archive], results: Results, tables: str) -> str:
    """For every text and NFE the first samples of each pool; `tables` is the page that has their numbers."""
    changes = common_changes(pool.manifest["recipe"] for pool in pools)
    everywhere = f" All with `{as_typed(changes)}`." if changes else ""
    parts = [
        f"# Samples\n\nThe first {SHOWN} of each pool, not chosen, by the moving average of the weights; special "
        f"tokens by their names. A low generative perplexity can hide repetition: read them beside `{tables}`."
        f"{everywhere}\n"
    ]
    order = sorted(pools, key=lambda pool: (method_rank(pool.manifest["method"]), pool.manifest["recipe"], pool.path))
    for data in sorted({pool.manifest["data"] for pool in pools}):
        own = [pool for pool in order if pool.manifest["data"] == data]
        for nfe in sorted({key.nfe for pool in own for key in pool.keys()}):
            lines = [f"## {escape(data)}, NFE {nfe}\n"]
            for pool in own:
                for key in [PoolKey(nfe), *(PoolKey(nfe, name) for name in VARIANTS)]:
                    if shown := pool.manifest["pools"].get(str(key), {}).get("shown", ()):
                        title = _title(pool, key, results, changes)
                        lines += [f"**{title}**\n", *(f"- {escape(text)}" for text in shown), ""]
            parts.append("\n".join(lines))
    return "\n".join(parts)


def _title(pool: Archive, key: PoolKey, results: Results, common: Mapping[str, str]) -> str:
    recipe, seed = parse(pool.manifest["recipe"]), pool.manifest["seed"]
    own = as_typed(without(recipe.changes, common))
    variant = VARIANTS[key.variant] if key.variant else ""
    words = [results.label(pool.manifest["method"]), f"({own})" * bool(own), f"seed {seed}" * bool(seed), variant]
    return escape(", ".join(filter(None, words)))
