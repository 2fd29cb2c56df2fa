"""The study of images on small digits, which come with the package."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from emoe.studies import images
from emoe.studies.options import flag, folder


@dataclass(frozen=True, kw_only=True)
class Options(images.Options):
    """Options of `emoe reproduce digits`."""

    command = "reproduce digits"

    methods: tuple[str, ...] = flag(("mdlm", "vadd", "emoe", "emoe-vimco"), "methods, ends of recipes digits-*")
    runs: Path = folder("runs/digits")


def run(options: Options) -> int:
    """Train methods; measure bits per dimension and samples over NFE; write tables, figures and an animation."""
    return images.run_images(options, "digits")
