"""Rows of tied symbols: whether a latent keeps long rows in agreement within few steps.

To be varied: --domain.family sums --domain.length 64 --backbone.depth 6.
"""

from __future__ import annotations

from emoe.backbones.transformer import TransformerConfig
from emoe.domains.ties import TiesConfig
from emoe.engine.fit import TrainConfig
from emoe.engine.optim import OptimConfig
from emoe.experiment import EvalConfig, Experiment
from emoe.methods.base import MethodConfig
from emoe.methods.emoe import EMoEConfig
from emoe.recipes import register, three_methods
from emoe.routing.compare import CompareConfig

T_LOW = 1 / 64


def _ties(name: str, method: MethodConfig) -> Experiment:
    """Eight pairs of equal symbols; width 64, 4 blocks, MLP 128, batch 128, learning rate 1e-3, 4,000 steps."""
    return Experiment(
        name=name,
        domain=TiesConfig(family="pairs", length=16),
        backbone=TransformerConfig(width=64, heads=4, hidden=128, depth=4),
        method=method,
        optim=OptimConfig(lr=1e-3, warmup=100, schedule="cosine"),
        train=TrainConfig(steps=4_000, batch=128, save_every=1_000),
        eval=EvalConfig(nfe=(1, 2, 4), samples=4_000),
    )


WAKE_SLEEP = EMoEConfig(
    t_low=T_LOW,
    compare=CompareConfig(estimator="wake-sleep", draws=4, credit="position", in_turn=True, sum_last=True),
    balance=0.3,
    usage_floor=1.5,
)

for key, (label, method) in three_methods(T_LOW).items():
    doc = f"{label} on rows of tied symbols, pairs of length 16 unless changed."
    register(__name__, doc, _ties(f"ties-{key}", method))
doc = "E-MoE on rows of tied symbols, learned by wake-sleep with routes in turn (docs/learning-the-latent.md)."
register(__name__, doc, _ties("ties-emoe-wake-sleep", WAKE_SLEEP))
