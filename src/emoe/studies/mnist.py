"""The study of images on binarised MNIST, beside the paper's table."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from emoe.studies import images
from emoe.studies.options import flag, folder


@dataclass(frozen=True, kw_only=True)
class Options(images.Options):
    """Options of `emoe reproduce mnist`."""

    command = "reproduce mnist"

    methods: tuple[str, ...] = flag(("mdlm", "vadd", "emoe", "emoe-floor"), "methods, ends of recipes mnist-*")
    runs: Path = folder("runs/mnist")


def run(options: Options) -> int:
    """Train methods; measure bits per dimension and samples over NFE; write tables, figures and an animation."""
    return images.run_images(options, "mnist")
