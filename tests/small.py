"""Sizes at which recipes train in a moment, and training on a CPU without output."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from emoe.experiment import Experiment
from emoe.runs.run import Run
from emoe.runs.train import train

Settings = dict[str, object]
TRANSFORMER: Settings = {
    "backbone.width": 8, "backbone.hidden": 16, "backbone.heads": 2, "backbone.time_size": 8, "train.batch": 8,
}  # fmt: skip
TOY = TRANSFORMER | {"domain.points": 300, "train.log_every": 1}
UNET: Settings = {
    "domain": "digits", "backbone": "unet", "backbone.channels": 8, "backbone.hidden": 8, "backbone.time_size": 8,
    "backbone.time_hidden": 8, "backbone.groups": 2, "train.batch": 8,
}  # fmt: skip


def trained(recipe: str | Experiment, folder: Path, settings: Mapping[str, object], **options: Any) -> Run:
    """`train` without a progress bar."""
    return train(recipe, folder, settings=settings, device="cpu", callbacks=[], **options)
