"""Files that carry text from one stage of the study to the next: pools of samples, features, MAUVE.

They are small, so that a stage can run on a machine that gets nothing else: tokens of 16 bits, and features of 16 bits
after a PCA that is fitted on held-out text.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from emoe.domains.base import DataError
from emoe.domains.text.data import Text
from emoe.evaluation.evaluate import method_name
from emoe.experiment import Experiment
from emoe.files import replace_file
from emoe.judges import MAUVE_SEEDS, Mauve, mauve

MANIFEST = "manifest"
DIMENSIONS = 100  # of stored features
FEATURE_BYTES = 500_000  # of the stored features of a pool
Array = NDArray[Any]


class PoolKey(NamedTuple):
    """A pool of a run: network calls, and what was changed in the sampler."""

    nfe: int
    variant: str | None = None

    def __str__(self) -> str:
        return f"nfe{self.nfe}" + ("" if self.variant is None else f" {self.variant}")

    @classmethod
    def parse(cls, text: str) -> PoolKey:
        """What `str` wrote."""
        name, _, variant = text.partition(" ")
        return cls(int(name.removeprefix("nfe")), variant or None)


@dataclass
class Archive:
    """Arrays by name and a manifest, in one compressed .npz file."""

    path: Path
    manifest: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, Array] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path) -> Archive:
        """Read a file, or begin one where there is none.

        Raises:
            DataError: The file is damaged.
        """
        if not path.exists():
            return cls(path)
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as found:
                arrays = {name: found[name] for name in found.files}
            return cls(path, json.loads(arrays.pop(MANIFEST).tobytes()), arrays)
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise DataError(f"{path}: cannot be read, damaged ({error}); remove it, or copy it again") from None

    def save(self) -> None:
        """Write the file, whole or not at all."""
        file = io.BytesIO()
        told = np.frombuffer(json.dumps(self.manifest, sort_keys=True).encode(), np.uint8)
        np.savez_compressed(file, **self.arrays, **{MANIFEST: told})  # type: ignore[arg-type]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self.path, file.getvalue())

    def keys(self) -> list[PoolKey]:
        """The pools in it, those of fewest calls first."""
        return sorted(map(PoolKey.parse, self.arrays), key=lambda key: (key.variant or "", key.nfe))

    def rows(self, key: PoolKey) -> int:
        """Rows of a pool; 0 if it is not here."""
        return len(self.arrays.get(str(key), ()))

    def tokens(self, key: PoolKey) -> Int[Tensor, "n L"]:
        """Samples of a pool."""
        return torch.from_numpy(self.arrays[str(key)].astype(np.int64))


def describe_pools(experiment: Experiment, text: Text) -> dict[str, Any]:
    """What later stages must know of samples: who made them, and which held-out text they are compared with."""
    return {
        "recipe": experiment.name,
        "method": method_name(experiment),
        "seed": experiment.seed,
        "batch": experiment.eval.batch,
        **describe_text(text),
    }


def describe_text(text: Text) -> dict[str, Any]:
    """The held-out rows of a set and its tokens, by checksum."""
    return {
        "data": text.name,
        "split": text.held_out,
        "split_sha256": text.manifest["splits"][text.held_out]["sha256"],
        "tokenizer": text.manifest["tokenizer"]["sha256"],
        "length": text.space.length,
        "size": text.space.size,
        "mask": text.space.mask_id,
        "packing": text.manifest.get("packing"),
    }


def digest(*arrays: Array) -> str:
    """A checksum of arrays, by which results of equal inputs are known again."""
    found = hashlib.sha256()
    for array in arrays:
        found.update(f"{array.dtype} {array.shape}\n".encode())
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()[:16]


# --- Features ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PCA:
    """Principal components of features: y = (x - mean) W."""

    mean: Float[Tensor, " F"]
    directions: Float[Tensor, "F D"]
    share: float  # of the variance that they keep

    @classmethod
    def fit(cls, features: Float[Tensor, "n F"], dimensions: int = DIMENSIONS) -> PCA:
        """The first components of features, at most one fewer than rows; the largest entry of each is positive."""
        x = features.double()
        mean = x.mean(0)
        _, values, rows = torch.linalg.svd(x - mean, full_matrices=False)
        count = max(1, min(dimensions, len(x) - 1, x.shape[1]))
        kept = rows[:count]
        signs = kept.gather(1, kept.abs().argmax(1, keepdim=True)).sign()
        total = values.square().sum().item()
        share = values[:count].square().sum().item() / total if total else 1.0
        # As they are stored: features must not depend on whether the components come from a file.
        return cls(mean.float(), (kept * signs).T.float().contiguous(), share)

    def __call__(self, features: Float[Tensor, "n F"]) -> NDArray[np.float16]:
        """Features as they are stored, at most `FEATURE_BYTES` of them."""
        most = FEATURE_BYTES // (2 * self.directions.shape[1])
        reduced = (features[:most].double() - self.mean.double()) @ self.directions.double()
        found: NDArray[np.float16] = reduced.numpy().astype("<f2")
        return found

    def describe(self, fitted_on: str, rows: int) -> dict[str, Any]:
        """For a manifest."""
        return {
            "dimensions": self.directions.shape[1],
            "of": self.directions.shape[0],
            "variance_kept": round(self.share, 4),
            "fitted_on": fitted_on,
            "rows": rows,
            "stored_as": "float16",
        }


# --- MAUVE -------------------------------------------------------------------------------------------------------


@contextmanager
def _no_advice() -> Iterator[None]:
    """Let nothing through to standard error, where k-means writes a line of advice for every seed."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


class MauveCache:
    """MAUVE of pairs of feature sets, kept by their checksum: k-means takes seconds, and nothing changes."""

    def __init__(self, path: Path):
        self.path = path
        try:
            self.known: dict[str, Any] = dict(json.loads(path.read_bytes())) if path.exists() else {}
        except (OSError, ValueError, TypeError):
            self.known = {}

    def find(self, samples: Array, real: Array, seeds: Sequence[int] = MAUVE_SEEDS) -> Mauve | None:
        """What is known of the pair."""
        found: Mapping[str, Any] | None = self.known.get(self._name(samples, real, seeds))
        return None if found is None else Mauve(tuple(found["values"]), int(found["clusters"]))

    def measure(self, samples: Array, real: Array, seeds: Sequence[int] = MAUVE_SEEDS) -> Mauve:
        """What is known of the pair, or is computed now; as many rows of both as the fewer has."""
        known = self.find(samples, real, seeds)
        if known is not None:
            return known
        n = min(len(samples), len(real))
        ours, theirs = (torch.from_numpy(part[:n].astype(np.float64)) for part in (samples, real))
        with _no_advice():
            found = mauve(ours, theirs, seeds)
        self.known[self._name(samples, real, seeds)] = {"values": list(found.values), "clusters": found.clusters}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self.path, (json.dumps(self.known, indent=1, sort_keys=True) + "\n").encode())
        return found

    @staticmethod
    def _name(samples: Array, real: Array, seeds: Sequence[int]) -> str:
        n = min(len(samples), len(real))
        return f"{digest(samples[:n], real[:n])}/{','.join(map(str, seeds))}"
