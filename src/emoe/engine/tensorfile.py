"""Named tensors as bytes of safetensors files: equal tensors give equal bytes, foreign bytes are refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
from torch import Tensor

from emoe.files import DAMAGED, StorageError, read_verified


def split(members: Mapping[str, Tensor], limit: int | None) -> list[list[str]]:
    """Sorted names, cut into lists whose files have at most `limit` bytes; a larger tensor stays alone."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name in sorted(members):
        size = members[name].nbytes + len(json.dumps(name)) + 160  # 160: the rest of its entry in the header
        if shards[-1] and limit is not None and filled + size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def to_bytes(members: Mapping[str, Tensor]) -> bytes:
    """Contents of the safetensors file of these tensors, whatever their device, layout and order."""
    ready: dict[str, Tensor] = {}
    storages = set()
    for name in sorted(members):
        tensor = members[name].detach().cpu().contiguous()
        storage = tensor.untyped_storage().data_ptr()
        # The format refuses tensors that share memory (tied weights, views of a buffer); a copy is the same.
        ready[name] = tensor.clone() if storage in storages else tensor
        storages.add(storage)
    return safetensors.torch.save(ready)


def from_bytes(data: bytes) -> dict[str, Tensor]:
    """The tensors of a safetensors file; a ValueError if it is something else, such as a pickle, or malformed."""
    # The library reads zips and pickles as absurd header lengths; the form is checked before it is asked.
    if data[8:9] != b"{" or int.from_bytes(data[:8], "little") > len(data) - 8:
        raise ValueError("not a safetensors file; pickles and other formats are never loaded")
    try:
        return safetensors.torch.load(data)
    except Exception as error:  # the parser's own errors, unknown dtypes, sizes that do not fit
        raise ValueError(f"not a sound safetensors file: {error}") from error


def read(path: Path, sha256: str, remedy: str = DAMAGED) -> dict[str, Tensor]:
    """The tensors of a file with this SHA-256; a StorageError with the remedy if they cannot be read."""
    data = read_verified(path, sha256, remedy)
    try:
        return from_bytes(data)
    except ValueError as error:
        raise StorageError(path, str(error), remedy) from error
