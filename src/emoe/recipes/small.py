"""Small settings that train on two CPU cores in about a minute: the demo, and rows of a user's own."""

from __future__ import annotations

from emoe.backbones.transformer import TransformerConfig
from emoe.domains.base import DomainConfig
from emoe.domains.rows import RowsConfig
from emoe.domains.toy import ToyConfig
from emoe.engine.fit import TrainConfig
from emoe.engine.optim import OptimConfig
from emoe.experiment import EvalConfig, Experiment
from emoe.methods.base import MethodConfig
from emoe.recipes import register, three_methods


def _small(name: str, domain: DomainConfig, method: MethodConfig, nfe: tuple[int, ...], seed: int = 0) -> Experiment:
    """Width 64, MLP 256, batch 256, learning rate 1e-3, 4,000 steps."""
    return Experiment(
        name=name,
        seed=seed,
        domain=domain,
        backbone=TransformerConfig(width=64, hidden=256),
        method=method,
        optim=OptimConfig(lr=1e-3),
        train=TrainConfig(steps=4_000, batch=256, save_every=1_000),
        eval=EvalConfig(nfe=nfe),
    )


for key, (label, method) in three_methods(t_low=1 / 64).items():
    # With seed 0 several of the 8 centres share a row, and even independent coordinates are often valid.
    demo = _small(f"demo-{key}", ToyConfig(density="8-modes"), method, (1, 2, 4, 8), seed=1)
    register(__name__, f"{label} of the demo: 8-modes, a small network.", demo)
    rows = _small(f"rows-{key}", RowsConfig(path=""), method, (1, 2, 4, 8, 16, 32))
    register(__name__, f"{label} on your own rows of integers: --domain.path data.npy (.npy, .npz or .csv).", rows)
