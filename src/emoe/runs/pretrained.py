"""Released weights: a trained run as two small files that load and sample without the data it was trained on.

A release is a folder `NAME` with `model.safetensors` (the moving average of the weights, or the weights themselves
where there is none, in 16 bits) and `config.json`: the experiment, the token space, what the file must hash to, and
where it comes from. Names are looked up in the folders of `EMOE_WEIGHTS`, then in `weights/` of this package. Tensors
are safetensors, the rest is JSON; no pickle.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

import emoe
from emoe import files as storage
from emoe.config import ConfigError, to_dict
from emoe.domains.base import Domain
from emoe.engine import checkpoint, tensorfile
from emoe.engine.checkpoint import NewerSchemaError
from emoe.experiment import Experiment, customise
from emoe.files import StorageError
from emoe.methods.base import Method
from emoe.reporting.provenance import source_commit
from emoe.runs.run import Run
from emoe.runs.train import Weights, load_run, pick_device
from emoe.types import TokenSpace

Precision = Literal["fp16", "bf16"]

SCHEMA = 2
CONFIG, MODEL = "config.json", "model.safetensors"
LICENCE = "Apache-2.0"
PACKAGED = Path(__file__).parents[1] / "weights"
AGAIN = "get the release again from where it came from"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_DTYPES: dict[str, torch.dtype] = {"fp16": torch.float16, "bf16": torch.bfloat16}
_NAMED = 5  # tensors that an error names; a wrong size of the network concerns them all


@dataclass(frozen=True)
class Release:
    """What `release` wrote."""

    name: str
    path: Path
    parameters: int
    size: int  # bytes of both files
    rounding: float  # max |w - rounded w| over all weights
    tensor: str  # where that is


def folders() -> list[Path]:
    """Where names are looked up: the folders of `EMOE_WEIGHTS` (separated like those of `PATH`), then the package's."""
    named = os.environ.get("EMOE_WEIGHTS", "").split(os.pathsep)
    return [*(Path(folder).expanduser() for folder in named if folder), PACKAGED]


def released() -> dict[str, Path]:
    """Name -> folder of every released model that is here; of equal names the first one counts."""
    models: dict[str, Path] = {}
    for root in folders():
        for folder in sorted(root.iterdir()) if root.is_dir() else []:
            if _NAME.fullmatch(folder.name) and (folder / CONFIG).is_file():
                models.setdefault(folder.name, folder)
    return models


def find(name: str | Path) -> Path | None:
    """The folder of a release: a path that exists, else a name (see `released`); None if it is neither."""
    path = Path(name)
    if path.exists():
        return path if (path / CONFIG).is_file() else None
    return released().get(str(name))


def from_pretrained(
    name: str | Path,
    *,
    device: str = "auto",
    settings: Mapping[str, object] | None = None,
    weights: Weights = "auto",
    domain: Domain | None = None,
) -> Run:
    """Open a released model. No training data are needed until `.domain` is asked for.

    Args:
        name: A name (`emoe.runs.pretrained.released()` lists them), or the folder of a release.
        device: auto, cpu, cuda or cuda:N.
        settings: Overrides that do not change the weights, such as `{"method.route-tau": "0"}`, or that say where
            the data are, such as `{"domain.path": "rows.npy"}`.
        weights: A release holds either `ema` or `model`; asking for the other is refused.
        domain: The domain, if the caller has built it already.

    Raises:
        ConfigError: There is no such release, or its tensors are not those of the model it describes.
        StorageError: Its files are damaged, not safetensors, or of a later release of this package.
    """
    where, path = pick_device(device), find(name)
    if path is None:
        raise ConfigError([_unknown(name)])
    content = _read_config(path)
    with _parsing(path / CONFIG):
        held, step, licence = str(content["weights"]), int(content["step"]), str(content["licence"])
        space = TokenSpace(**content["space"])
        size, digest = int(content["file"]["size"]), str(content["file"]["sha256"])
        title = str(content["name"])
    if weights not in ("auto", held):
        raise ConfigError([f"weights: {path} holds no {weights!r}; allowed: auto, {held}"])
    experiment = customise(_experiment(content, path), settings or {})
    tensors = _read_tensors(path / MODEL, size, digest)
    method = experiment.build_method(space)
    _fill(method, tensors, path / MODEL)
    return Run(path, experiment, method.to(where).eval(), step, name=title, licence=licence, domain=domain)


def experiment_of(path: Path) -> Experiment:
    """The experiment of a release; the weights are not read."""
    return _experiment(_read_config(path), path)


def _experiment(content: Mapping[str, Any], path: Path) -> Experiment:
    with _parsing(path / CONFIG):
        tree, schema = dict(content["experiment"]), int(content["schema"])
    try:
        return Experiment.from_tree(tree, schema)
    except ConfigError as error:
        raise ConfigError([f"{path / CONFIG}: {line}" for line in error.problems]) from None


def release(
    run_dir: str | Path,
    out: str | Path,
    *,
    name: str | None = None,
    precision: Precision = "fp16",
    unfinished: bool = False,
    licence: str = LICENCE,
) -> Release:
    """Write the weights of a finished run as `out/NAME`, whole or not at all.

    Parameters are rounded to 16 bits, buffers stay as they are. Paths of the data are cut to the file's name: the
    folders of this machine mean nothing on another.

    Args:
        run_dir: The run folder.
        out: Folder of releases; made when missing.
        name: Name of the release; default: the recipe's, if no field of it was changed.
        precision: fp16 rounds to 11 significant bits and refuses weights from 65,520 on; bf16 has 8 bits and no limit.
        unfinished: Also release a run that has not done all its steps.
        licence: Licence of the weights (SPDX).

    Raises:
        ConfigError: The run is not finished, the name is taken or none, or weights cannot be rounded.
        StorageError: Disk full or not writable. Nothing is left behind.
    """
    source, root = Path(run_dir), Path(out)
    name = check_release(source, root, name, unfinished)
    experiment = Experiment.load(source / "experiment.json")
    held: Weights = "ema" if experiment.train.ema else "model"
    run = load_run(source, device="cpu", weights=held)
    _check_finished(source, run.step, experiment, unfinished)  # the newest checkpoint may have been damaged
    method = run.method
    tensors, rounding, worst = _rounded(method, precision)
    data = tensorfile.to_bytes(tensors)
    parameters = sum(parameter.numel() for parameter in method.parameters())
    config = {
        "schema": SCHEMA,
        "name": name,
        "experiment": to_dict(_portable(experiment)),
        "step": run.step,
        "weights": held,
        "precision": precision,
        "rounding": rounding,
        "parameters": parameters,
        "space": dataclasses.asdict(method.space),
        "file": {"name": MODEL, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()},
        "licence": licence,
        "commit": source_commit(),
        "emoe": emoe.__version__,
        "torch": torch.__version__,
    }
    path = _write(root, name, data, config)
    size = sum(file.stat().st_size for file in path.iterdir())
    return Release(name, path, parameters, size, rounding, worst)


def _unknown(name: str | Path) -> str:
    """The message for something that is no release."""
    path = Path(name)
    if (path / "experiment.json").is_file():
        return f"weights: {path} is a run folder, not a release; open it with emoe.load_run, or export it: emoe release"
    if path.is_file():
        return f"weights: {path} is a file; give the folder with {CONFIG} and {MODEL}; pickles are never loaded"
    if path.is_dir():
        return f"weights: {path} is no release (no {CONFIG}); give a folder that emoe release wrote"
    there = ", ".join(sorted(released())) or "none"
    searched = ", ".join(map(str, folders()))
    return f"weights: no released model is called {str(name)!r}; there are: {there} (in {searched}; set EMOE_WEIGHTS)"


def check_release(source: Path, root: Path, name: str | None, unfinished: bool) -> str:
    """The name of the release of a run, after all checks that need no weights."""
    if not (source / "experiment.json").is_file():
        raise ConfigError([f"run: {source} is no run folder (no experiment.json); make one with: emoe train RECIPE"])
    experiment = Experiment.load(source / "experiment.json")
    newest = checkpoint.latest(source / "checkpoints", groups=checkpoint.WEIGHTS)
    if newest is None:
        raise ConfigError([f"run: {source} has no checkpoint yet; train it with: emoe train ... --resume"])
    _check_finished(source, checkpoint.load(newest, groups=()).step, experiment, unfinished)
    if name is None and not _NAME.fullmatch(experiment.name):
        # A changed recipe says so in its name; its weights must not pass for the recipe's own.
        raise ConfigError([f"name: {source} holds {experiment.name!r}, which cannot name a folder; give one: --name"])
    name = experiment.name if name is None else name
    if not _NAME.fullmatch(name):
        raise ConfigError([f"name: {name!r} is not allowed; letters, digits, '.', '_' and '-' only, no '.' in front"])
    if (root / name).exists():
        raise ConfigError([f"name: {root / name} exists already; remove it or give another --name"])
    return name


def _check_finished(source: Path, step: int, experiment: Experiment, unfinished: bool) -> None:
    steps = experiment.train.steps
    if step < steps and not unfinished:
        remedy = "finish it with: emoe train ... --resume, or add --unfinished"
        raise ConfigError([f"run: {source} is at step {step} of {steps}; {remedy}"])


def _rounded(method: Method, precision: Precision) -> tuple[dict[str, Tensor], float, str]:
    """The state with its parameters in 16 bits, the largest |w - rounded w| and the name of its tensor."""
    tensors: dict[str, Tensor] = {}
    largest, worst = 0.0, ""
    parameters = dict(method.named_parameters(remove_duplicate=False))
    for name, tensor in method.state_dict().items():
        tensors[name] = tensor
        if name not in parameters or not tensor.is_floating_point():
            continue
        if not tensor.isfinite().all():
            raise ConfigError([f"run: {name} is not finite; look at metrics.jsonl for where that began"])
        tensors[name] = tensor.to(_DTYPES[precision])
        if not tensors[name].isfinite().all():
            remedy = "; use --precision bf16" if precision == "fp16" else ""
            raise ConfigError([f"precision: {name} has weights too large for {precision}{remedy}"])
        error = (tensor.double() - tensors[name].double()).abs().max().item() if tensor.numel() else 0.0
        if error > largest or not worst:
            largest, worst = error, name
    return tensors, largest, worst


def _portable(experiment: Experiment) -> Experiment:
    """The experiment without folders of this machine in it."""
    domain = experiment.domain
    changes: dict[str, str | None] = {}
    if getattr(domain, "root", None):
        changes["root"] = None
    if path := getattr(domain, "path", None):
        changes["path"] = Path(path).name
    return dataclasses.replace(experiment, domain=dataclasses.replace(domain, **changes))


def _write(root: Path, name: str, data: bytes, config: Mapping[str, Any]) -> Path:
    """Both files under a temporary name, forced to the disk; the rename makes them real."""
    storage.prepare(root)
    final, temporary = root / name, root / f".tmp-{name}-{os.getpid()}"
    try:
        temporary.mkdir()
        storage.write_synced(temporary / MODEL, data)
        storage.write_sealed(temporary / CONFIG, config)
        storage.sync_folder(temporary)
        temporary.rename(final)
        storage.sync_folder(root)
    except OSError as error:
        problem = f"cannot write the release {name!r}, {len(data)} bytes needed ({error})"
        raise StorageError(root, problem, "free space or make the folder writable") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return final


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    try:
        content = storage.read_sealed(path)
    except StorageError as error:
        # The remedy for a checkpoint (take an older one) is no help here.
        raise StorageError(path, "is not what emoe release wrote: its SHA-256 does not match", AGAIN) from error
    with _parsing(path):
        if int(content["schema"]) > SCHEMA:
            problem = f"has schema {content['schema']}, this version reads up to {SCHEMA}"
            raise NewerSchemaError(path, problem, "update emoe")
    return content


@contextmanager
def _parsing(path: Path) -> Iterator[None]:
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StorageError(path, f"is no config of a release ({error!r})", AGAIN) from error


def _read_tensors(path: Path, size: int, sha256: str) -> dict[str, Tensor]:
    """The tensors of a file whose size and SHA-256 are right."""
    if not path.is_file():
        raise StorageError(path, "is missing", AGAIN)
    if path.stat().st_size != size:
        raise StorageError(path, f"has {path.stat().st_size} bytes instead of {size}", AGAIN)
    try:
        return tensorfile.from_bytes(storage.read_verified(path, sha256))
    except StorageError as error:
        raise StorageError(path, "is damaged: its SHA-256 does not match", AGAIN) from error
    except ValueError as error:
        raise StorageError(path, str(error), AGAIN) from error


def _fill(method: Method, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Load tensors into a method, in its own precision, if names, shapes and kinds of numbers are the method's."""
    wanted = method.state_dict()
    faults = [f"{name} is missing" for name in wanted if name not in tensors]
    faults += [f"{name} is not part of the model" for name in tensors if name not in wanted]
    for name in wanted.keys() & tensors.keys():
        have, want = tensors[name], wanted[name]
        if have.shape != want.shape:
            faults.append(f"{name} has shape {tuple(have.shape)}, the model wants {tuple(want.shape)}")
        elif have.is_floating_point() != want.is_floating_point():
            faults.append(f"{name} holds {have.dtype}, the model wants {want.dtype}")
    if faults:
        more = [f"  and {len(faults) - _NAMED} more"] if len(faults) > _NAMED else []
        lines = [f"  {fault}" for fault in sorted(faults)[:_NAMED]]
        raise ConfigError([f"weights: {path} does not fit the model of its config and these settings", *lines, *more])
    method.load_state_dict({name: tensor.to(wanted[name].dtype) for name, tensor in tensors.items()})
