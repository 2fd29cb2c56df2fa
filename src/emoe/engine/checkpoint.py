"""Checkpoints that survive a kill at any instant: safetensors files and a manifest, committed by a rename.

A checkpoint is a folder `step-000001234`. It is written under a temporary name, every file is synced to the disk, the
manifest (sizes and SHA-256 of all files, sealed by a SHA-256 of its own) comes last, and a rename commits it. A reader
sees a whole one or none. Tensors are safetensors, the rest is JSON; no pickle.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from torch import Tensor

from emoe import files as storage
from emoe.files import DAMAGED, StorageError

SCHEMA = 1
WEIGHTS = ("model", "ema")  # groups that sampling needs
MANIFEST = "manifest.json"
Groups = Mapping[str, Mapping[str, Tensor]]  # group (the stem of its file name) -> tensor name -> tensor
_FOLDER = re.compile(r"step-[0-9]{9,}")
_FILE = re.compile(r"[A-Za-z0-9_]+(-[0-9]{5}-of-[0-9]{5})?\.safetensors")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """Tensors by group and name on the CPU, and the JSON values saved with them."""

    step: int
    tensors: dict[str, dict[str, Tensor]]
    meta: dict[str, Any]


class File(NamedTuple):
    """An entry of the manifest."""

    group: str
    size: int
    sha256: str


def save(
    root: Path, step: int, tensors: Groups, meta: Mapping[str, Any], keep: int, *, max_file_bytes: float = math.inf
) -> Path:
    """Write the checkpoint of a step, unless there is an intact one.

    `meta` are JSON values. Checkpoints older than the `keep` newest valid ones are removed. Groups are split into files
    of at most `max_file_bytes`, except for a larger tensor.

    Raises:
        StorageError: The disk is full or not writable; older checkpoints are unchanged.
    """
    storage.prepare(root)
    path, files = root / f"step-{step:09d}", dict[str, Any]()
    # All bytes are read: a run that was resumed from an older checkpoint must replace a damaged one.
    if path.exists() and _is_sound(path, load):
        return path
    size = sum(tensor.nbytes for group in tensors.values() for tensor in group.values())
    with storage.new_folder(path, size) as folder:
        for group, members in sorted(tensors.items()):
            for name, shard in split(group, members, max_file_bytes).items():
                data = to_bytes(shard)
                storage.write_synced(folder / name, data)
                files[name] = {"group": group, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        content = {"schema": SCHEMA, "step": step, "torch": torch.__version__, "meta": dict(meta), "files": files}
        storage.fault("before-manifest")
        storage.write_sealed(folder / MANIFEST, content)
        if path.exists():
            storage.discard(path)
    storage.fault("after-rename")
    _prune(root, step, keep)
    return path


def latest(root: Path) -> Path | None:
    """The newest checkpoint with a sound manifest and files of the right sizes, which are not read."""
    return next((folder for folder in reversed(_folders(root)) if _is_sound(folder)), None)


def load(path: Path, *, groups: Collection[str] | None = None) -> Checkpoint:
    """Read a `step-...` folder, or some of its groups of tensors, after checking sizes and SHA-256."""
    step, meta, files = _read_manifest(path, groups)
    tensors: dict[str, dict[str, Tensor]] = {}
    for name, file in files.items():
        tensors.setdefault(file.group, {}).update(read_tensors(path / name, file.sha256))
    return Checkpoint(step, tensors, meta)


def load_latest(root: Path, *, groups: Collection[str] | None = None) -> Checkpoint | None:
    """The newest checkpoint that loads; damaged ones are skipped with a warning. None if there are none.

    Raises:
        StorageError: There are checkpoints but not one can be read; starting anew would hide that.
    """
    problems = []
    for folder in reversed(_folders(root)):
        try:
            return load(folder, groups=groups)
        except StorageError as error:
            problems.append(str(error))
            _log.warning("skipped a damaged checkpoint: %s", error)
    if problems:
        raise StorageError(root, "no checkpoint can be read: " + " | ".join(problems), "restore one from a copy")
    return None


def _folders(root: Path) -> list[Path]:
    """All step folders, oldest first, valid or not."""
    folders = [entry for entry in root.iterdir() if _FOLDER.fullmatch(entry.name)] if root.is_dir() else []
    return sorted(folders, key=_step_of)


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def _read_manifest(folder: Path, groups: Collection[str] | None = None) -> tuple[int, dict[str, Any], dict[str, File]]:
    """Step, meta and the files of the groups, once the seal, the schema and their presence and sizes are checked."""
    path = folder / MANIFEST
    content = storage.read_sealed(path, SCHEMA)
    try:
        files = {name: File(**entry) for name, entry in content["files"].items()}
        step, meta = int(content["step"]), dict(content["meta"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StorageError(path, f"is not a manifest ({error!r})", DAMAGED) from error
    # Names come from a file that may be foreign: nothing outside the folder, nothing but safetensors.
    if odd := [name for name in files if not _FILE.fullmatch(name)]:
        raise StorageError(path, f"lists files that are not safetensors: {odd}", "pickles are never loaded")
    files = {name: file for name, file in files.items() if groups is None or file.group in groups}
    if missing := [name for name in files if not (folder / name).is_file()]:
        raise StorageError(folder, f"lacks {', '.join(missing)}", DAMAGED)
    if wrong := [name for name, file in files.items() if (folder / name).stat().st_size != file.size]:
        raise StorageError(folder, f"has files of the wrong size: {', '.join(wrong)}", DAMAGED)
    return step, meta, files


def _is_sound(folder: Path, read: Callable[[Path], object] = _read_manifest) -> bool:
    """Whether manifest and file sizes are right; with `load` as `read` every byte is read and hashed."""
    try:
        read(folder)
    except StorageError:
        return False
    return True


def _prune(root: Path, step: int, keep: int) -> None:
    """Remove checkpoints older than the `keep` newest valid ones up to `step`; later ones are damaged."""
    upto = [folder for folder in _folders(root) if _step_of(folder) <= step]
    valid = [folder for folder in upto if _is_sound(folder)]
    for folder in upto[: upto.index(valid[-keep])] if len(valid) >= keep else []:
        try:
            storage.discard(folder)
        except OSError as error:  # the new checkpoint is safe, so this must not end a run
            _log.warning("%s: could not be removed (%s)", folder, error.strerror)


# --- Tensors as bytes of safetensors files: equal tensors give equal bytes, foreign bytes are refused


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
    copies = {}
    for name, tensor in sorted(members.items()):
        # The format refuses tensors that share memory (tied weights, views of a buffer).
        copies[name] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    return safetensors.torch.save(copies)


def read_tensors(path: Path, sha256: str, remedy: str = DAMAGED) -> dict[str, Tensor]:
    """The tensors of a file with this SHA-256; a StorageError with the remedy if they cannot be read."""
    data = storage.read_verified(path, sha256, remedy)
    # The library would read a zip or a pickle as an absurd header length, so the form is checked first.
    if data[8:9] != b"{" or int.from_bytes(data[:8], "little") > len(data) - 8:
        raise StorageError(path, "is no safetensors file; pickles and other formats are never loaded", remedy)
    try:
        return safetensors.torch.load(data)
    except Exception as error:  # the parser's own errors, unknown dtypes, sizes that do not fit
        raise StorageError(path, f"is no sound safetensors file: {error}", remedy) from error
