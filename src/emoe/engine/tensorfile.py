"""Named tensors as bytes of safetensors files: equal tensors give equal bytes, foreign bytes are refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
from torch import Tensor

from emoe.files import DAMAGED, StorageError, read_verified


def split(group: str, members: Mapping[str, Tensor], limit: float) -> dict[str, dict[str, Tensor]]:
    """File name -> tensors, sorted by name, in files of at most `limit` bytes; a larger tensor stays alone."""
    shards, filled = [dict[str, Tensor]()], 0
    for name, tensor in sorted(members.items()):
        size = tensor.nbytes + len(json.dumps(name)) + 160  # 160: the rest of its entry in the header
        if shards[-1] and filled + size > limit:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += size
    if len(shards) == 1:
        return {f"{group}.safetensors": shards[0]}
    return {f"{group}-{index:05d}-of-{len(shards):05d}.safetensors": shard for index, shard in enumerate(shards, 1)}


def to_bytes(members: Mapping[str, Tensor]) -> bytes:
    """Contents of the safetensors file of these tensors, whatever their device, layout and order."""
    ready, storages = dict[str, Tensor](), set()
    for name, tensor in sorted(members.items()):
        tensor = tensor.detach().cpu().contiguous()
        storage = tensor.untyped_storage().data_ptr()
        # The format refuses tensors that share memory (tied weights, views of a buffer); a copy is the same.
        ready[name] = tensor.clone() if storage in storages else tensor
        storages.add(storage)
    return safetensors.torch.save(ready)


def read(path: Path, sha256: str, remedy: str = DAMAGED) -> dict[str, Tensor]:
    """The tensors of a file with this SHA-256; a StorageError with the remedy if they cannot be read."""
    data = read_verified(path, sha256, remedy)
    # The library reads zips and pickles as absurd header lengths; the form is checked before it is asked.
    if data[8:9] != b"{" or int.from_bytes(data[:8], "little") > len(data) - 8:
        raise StorageError(path, "is no safetensors file; pickles and other formats are never loaded", remedy)
    try:
        return safetensors.torch.load(data)
    except Exception as error:  # the parser's own errors, unknown dtypes, sizes that do not fit
        raise StorageError(path, f"is no sound safetensors file: {error}", remedy) from error
