"""`emoe release`: weights of finished runs, to be opened by name."""

from __future__ import annotations

from json import dumps
from pathlib import Path
from typing import Literal

from emoe.commands.args import Command
from emoe.config import ConfigError


def release(
    runs: tuple[Path, ...],
    *,
    out: Path,
    name: str | None = None,
    precision: Literal["fp16", "bf16"] = "fp16",
    unfinished: bool = False,
    licence: str = "Apache-2.0",
    json: bool = False,
) -> int:
    """Export the weights of finished runs (the moving average where there is one) in 16 bits.

    Each goes to OUT/NAME/model.safetensors and OUT/NAME/config.json. Nothing is evaluated.

    Args:
        runs (RUN): run folders
        out: folder that the releases go into
        name: name of the release, for a single run; default: the name of its recipe
        precision: fp16 rounds finer; bf16 takes weights of any size
        unfinished: also release runs that have not done all steps
        licence: licence of the weights
        json: print JSON

    Examples:
        emoe release runs/a --out models --name mine
        EMOE_WEIGHTS=models emoe sample mine --nfe 4
    """
    from emoe.runs import pretrained

    if name is not None and len(runs) > 1:
        raise ConfigError([f"name: {len(runs)} runs cannot share a name; release them one at a time"])
    # All are checked before the first is written.
    names = [pretrained.check_release(run, out, name, unfinished) for run in runs]
    if twice := sorted({one for one in names if names.count(one) > 1}):
        raise ConfigError([f"name: several runs would be called {twice[0]!r}; release them one at a time with --name"])
    releases = [
        pretrained.release(run, out, name=one, precision=precision, unfinished=unfinished, licence=licence)
        for run, one in zip(runs, names, strict=True)
    ]
    if json:
        print(dumps([vars(one) | {"path": str(one.path)} for one in releases], indent=1))
        return 0
    for one in releases:
        print(
            f"{one.path}: {one.parameters:,} parameters, {one.size / 1e6:.2f} MB in {precision}; "
            f"largest rounding error {one.rounding:.1e} ({one.tensor})"
        )
    return 0


main = Command("emoe release", release)
