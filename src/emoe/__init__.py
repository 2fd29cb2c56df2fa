"""E-MoE: masked diffusion whose reverse step is a mixture over expert routes.

`train(recipe, folder)` trains, `load_run(folder)` opens a trained run and `from_pretrained(name)` released weights, all
three as a `Run`; `Rng(seed)` holds the random streams of a sampler. These names are imported on first use; all else is
imported from its own module.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from emoe.rng import Rng as Rng
    from emoe.runs.pretrained import from_pretrained as from_pretrained
    from emoe.runs.run import Run as Run
    from emoe.runs.train import load_run as load_run
    from emoe.runs.train import train as train
else:  # type checkers see only the names above

    def __getattr__(name: str) -> object:
        if name in _HOMES:
            return getattr(importlib.import_module(_HOMES[name]), name)
        raise AttributeError(f"module 'emoe' has no attribute {name!r}")


__version__ = "0.2.0"
_HOMES = {
    "Rng": "emoe.rng",
    "Run": "emoe.runs.run",
    "from_pretrained": "emoe.runs.pretrained",
    "load_run": "emoe.runs.train",
    "train": "emoe.runs.train",
}
__all__ = ["Rng", "Run", "__version__", "from_pretrained", "load_run", "train"]
