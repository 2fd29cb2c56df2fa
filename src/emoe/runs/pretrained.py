"""Released weights: a trained run as two small files, which load and sample without the training data.

A release is a folder `NAME` with `model.safetensors`, the moving average of the weights (or else the weights) in 16
bits, and `config.json`: the experiment, the token space, the hash of the file, and its origin. Names are searched in
the folders of `EMOE_WEIGHTS`, then in `weights/` of this package.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

import emoe
from emoe import files as storage
from emoe.config import ConfigError, prefixed, to_dict
from emoe.domains.base import Domain
from emoe.engine.checkpoint import read_tensors, to_bytes
from emoe.experiment import Experiment, customise
from emoe.files import StorageError
from emoe.methods.base import Method
from emoe.reporting.provenance import source_commit
from emoe.runs.run import Run
from emoe.runs.train import NO_RUN, Weights, load_run, pick_device, with_weights
from emoe.types import TokenSpace

Precision = Literal["fp16", "bf16"]

SCHEMA = 2
CONFIG, MODEL = "config.json", "model.safetensors"
PACKAGED = Path(__file__).parents[1] / "weights"
AGAIN = "get the release again from where it came from"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Release:
    """A release that was written."""

    name: str
    path: Path
    parameters: int
    size: int  # bytes of both files
    rounding: float  # max |w - rounded w| over all weights
    tensor: str  # the parameter with this error


def folders() -> list[Path]:
    """Folders in which names are searched: those of `EMOE_WEIGHTS` (separated as in `PATH`), then the package's."""
    named = os.environ.get("EMOE_WEIGHTS", "").split(os.pathsep)
    return [*(Path(folder).expanduser() for folder in named if folder), PACKAGED]


def released() -> dict[str, Path]:
    """Name -> folder of every released model on this machine; of equal names the first one counts."""
    models: dict[str, Path] = {}
    for root in folders():
        for folder in sorted(root.iterdir()) if root.is_dir() else []:
            if _NAME.fullmatch(folder.name) and (folder / CONFIG).is_file():
                models.setdefault(folder.name, folder)
    return models


def find(name: str | Path) -> Path | None:
    """The folder of a release by its path, or else by its name (see `released`); None if there is none."""
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
    """Open a released model by its name (see `released`) or folder; the other arguments are those of `load_run`."""
    where, path = pick_device(device), find(name)
    if path is None:
        raise ConfigError(_unknown(Path(name)))
    content = storage.read_sealed(path / CONFIG, SCHEMA, AGAIN)
    try:
        tree, own, step = dict(content["experiment"]), content["weights"], int(content["step"])
        licence, title, digest = content["licence"], content["name"], content["file"]["sha256"]
        space = TokenSpace(**content["space"])
    except (KeyError, TypeError, ValueError) as error:
        raise StorageError(path / CONFIG, f"is no config of a release ({error!r})", AGAIN) from error
    if weights not in ("auto", own):
        raise ConfigError([f"weights: {path} holds no {weights!r}; allowed: auto, {own}"])
    with prefixed(f"{path / CONFIG}: "):
        saved = Experiment.from_tree(tree, content["schema"])
    experiment = customise(saved, settings or {})
    run = Run(path, experiment, experiment.build_method(space), step, name=title, licence=licence)
    problem = f"weights: {path / MODEL} does not fit the model of its config and these settings"
    return with_weights(run, read_tensors(path / MODEL, digest, AGAIN), problem, where, domain)


def release(
    run_dir: str | Path,
    out: str | Path,
    *,
    name: str | None = None,
    precision: Precision = "fp16",
    unfinished: bool = False,
    licence: str = "Apache-2.0",
) -> Release:
    """Write the weights of a finished run as `out/NAME`, whole or not at all.

    Parameters are rounded to 16 bits, buffers are not. Of the path of the data only the name of the file is written.

    Args:
        run_dir: The run folder.
        out: Folder of releases; made when missing.
        name: Name of the release; default: that of the recipe, if no field was changed.
        precision: fp16 rounds to 11 significant bits and refuses weights from 65,520 on; bf16 has 8 bits and no limit.
        unfinished: Also release a run that has not done all its steps.
        licence: Licence of the weights (SPDX).
    """
    source, root = Path(run_dir), Path(out)
    if not (source / "experiment.json").is_file():
        raise ConfigError(f"run: {source} {NO_RUN}")
    run = load_run(source, device="cpu")
    experiment, steps = run.experiment, run.experiment.train.steps
    if run.step < steps and not unfinished:
        remedy = "finish it with: emoe train ... --resume, or add --unfinished"
        raise ConfigError(f"run: {source} is at step {run.step} of {steps}; {remedy}")
    name = experiment.name if name is None else name
    if not _NAME.fullmatch(name):  # such as that of a changed recipe
        letters = "letters, digits, '.', '_' and '-' only, no '.' in front"
        raise ConfigError(f"name: it is {name!r}, which cannot name a folder; give one: --name ({letters})")
    if (root / name).exists():
        raise ConfigError(f"name: {root / name} exists already; remove it or give another --name")
    tensors, errors = _rounded(run.method, precision)
    data, worst = to_bytes(tensors), max(errors, key=errors.__getitem__)
    parameters = sum(parameter.numel() for parameter in run.method.parameters())
    config = {
        "schema": SCHEMA,
        "name": name,
        "experiment": to_dict(_portable(experiment)),
        "step": run.step,
        "weights": "ema" if experiment.train.ema else "model",
        "precision": precision,
        "rounding": errors[worst],
        "parameters": parameters,
        "space": dataclasses.asdict(run.method.space),
        "file": {"name": MODEL, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()},
        "licence": licence,
        "commit": source_commit(),
        "emoe": emoe.__version__,
        "torch": torch.__version__,
    }
    storage.prepare(root)
    with storage.new_folder(root / name, len(data)) as folder:
        storage.write_synced(folder / MODEL, data)
        storage.write_sealed(folder / CONFIG, config)
    size = sum(file.stat().st_size for file in (root / name).iterdir())
    return Release(name, root / name, parameters, size, errors[worst], worst)


def _unknown(path: Path) -> list[str]:
    if (path / "experiment.json").is_file():
        return [f"run: {path} is a run folder, not a release; open it with emoe.load_run, or export it: emoe release"]
    if path.is_file():
        return [f"run: {path} is a file; give the folder with {CONFIG} and {MODEL}; pickles are never loaded"]
    there, searched = ", ".join(sorted(released())) or "none", ", ".join(map(str, folders()))
    nor = f"nor is it a released model (no {CONFIG}); there are: {there} (in {searched}; set EMOE_WEIGHTS)"
    return [f"run: {path} {NO_RUN}", f"run: {nor}"]


def _rounded(method: Method, precision: Precision) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The state with its parameters in 16 bits, and max |w - rounded w| by parameter."""
    tensors, errors = dict(method.state_dict()), dict[str, float]()
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16
    for name, _ in method.named_parameters(remove_duplicate=False):
        weight, rounded = tensors[name], tensors[name].to(dtype)
        if not weight.isfinite().all():
            raise ConfigError(f"run: {name} is not finite; look at metrics.jsonl for where that began")
        if not rounded.isfinite().all():
            remedy = "; use --precision bf16" if precision == "fp16" else ""
            raise ConfigError(f"precision: {name} has weights too large for {precision}{remedy}")
        errors[name] = (weight.double() - rounded.double()).abs().max().item()
        tensors[name] = rounded
    return tensors, errors


def _portable(experiment: Experiment) -> Experiment:
    """The experiment without folders of this machine."""
    domain = experiment.domain
    changes: dict[str, str | None] = {"root": None} if getattr(domain, "root", None) else {}
    if path := getattr(domain, "path", None):
        changes["path"] = Path(path).name
    return dataclasses.replace(experiment, domain=dataclasses.replace(domain, **changes))
