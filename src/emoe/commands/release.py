"""`emoe release`: weights of a finished run, to be opened by name."""

from __future__ import annotations

from json import dumps
from pathlib import Path
from typing import Literal

from emoe.commands import args


@args.command("emoe release")
def release(
    run: Path,
    *,
    out: Path,
    name: str | None = None,
    precision: Literal["fp16", "bf16"] = "fp16",
    unfinished: bool = False,
    licence: str = "Apache-2.0",
    json: bool = False,
) -> int:
    """Export the weights of a finished run (the moving average where there is one) in 16 bits.

    They go to OUT/NAME/model.safetensors and OUT/NAME/config.json. Nothing is evaluated.

    Args:
        run: run folder
        out: folder of releases
        name: name of the release; default: the name of its recipe
        precision: fp16 rounds finer; bf16 takes weights of any size
        unfinished: also release a run that has not done all steps
        licence: licence of the weights

    Examples:
        emoe release runs/a --out models --name mine
        EMOE_WEIGHTS=models emoe sample mine --nfe 4
    """
    from emoe.runs import pretrained

    done = pretrained.release(run, out, name=name, precision=precision, unfinished=unfinished, licence=licence)
    if json:
        print(dumps(vars(done) | {"path": str(done.path)}, indent=1))
    else:
        size = f"{done.parameters:,} parameters, {done.size / 1e6:.2f} MB in {precision}"
        print(f"{done.path}: {size}; largest rounding error {done.rounding:.1e} ({done.tensor})")
    return 0
