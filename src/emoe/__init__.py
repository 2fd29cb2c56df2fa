"""E-MoE: masked diffusion whose reverse step is a mixture over expert routes.

The public surface is small: `train(recipe, folder)` trains, `load_run(folder)` opens a trained run,
`from_pretrained(name)` opens released weights, `Rng(seed)` holds the random streams a sampler draws from. Everything
else is reached through its own module (`emoe.recipes`, `emoe.methods`, `emoe.domains`, `emoe.engine`). Heavy imports
happen on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from emoe.pretrained import PretrainedRun
    from emoe.rng import Rng as Rng
    from emoe.runs import Run

__version__ = "0.1.0"
__all__ = ["Rng", "__version__", "from_pretrained", "load_run", "train"]


def __getattr__(name: str) -> object:
    if name == "Rng":
        from emoe.rng import Rng

        return Rng
    raise AttributeError(f"module 'emoe' has no attribute {name!r}")


def from_pretrained(name: str, device: str = "cpu", **options: object) -> PretrainedRun:
    """Open released weights by name or folder; they need no training data (see `emoe.pretrained`)."""
    from emoe.pretrained import from_pretrained as load

    return load(name, device, **options)  # type: ignore[arg-type]


def load_run(path: str, **options: object) -> Run:
    """Open a run folder: its experiment, its domain and its method with the trained weights (see `emoe.runs`)."""
    from emoe.runs import load_run as load

    return load(path, **options)  # type: ignore[arg-type]


def train(recipe: str, run_dir: str, **options: object) -> Run:
    """Train a recipe by name into `run_dir` and return the finished run (see `emoe.runs.train`)."""
    from emoe.runs import train as fit

    return fit(recipe, run_dir, **options)  # type: ignore[arg-type]
