"""Rows of tied symbols: whether a latent keeps long rows in agreement within few steps.

Meant to be varied: --domain.family sums --domain.length 64 --backbone.depth 6.
"""

from __future__ import annotations

from emoe.backbones.transformer import TransformerConfig
from emoe.domains.ties import TiesConfig
from emoe.engine.optim import OptimConfig
from emoe.engine.trainer import TrainConfig
from emoe.experiment import EvalConfig, Experiment
from emoe.methods.base import MethodConfig
from emoe.methods.emoe import EMoEConfig
from emoe.methods.mdlm import MDLMConfig
from emoe.methods.vadd import VADDConfig
from emoe.recipes import recipe

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


@recipe
def ties_mdlm() -> Experiment:
    """MDLM on rows of tied symbols, pairs of length 16 unless changed."""
    return _ties("ties-mdlm", MDLMConfig(t_low=T_LOW))


@recipe
def ties_vadd() -> Experiment:
    """VADD on rows of tied symbols, pairs of length 16 unless changed."""
    return _ties("ties-vadd", VADDConfig(t_low=T_LOW))


@recipe
def ties_emoe() -> Experiment:
    """E-MoE on rows of tied symbols, pairs of length 16 unless changed."""
    return _ties("ties-emoe", EMoEConfig(t_low=T_LOW))


@recipe
def ties_emoe_plus() -> Experiment:
    """E-MoE on rows of tied symbols, with routes that positions code in turn (docs/learning-the-latent.md)."""
    method = EMoEConfig(
        t_low=T_LOW,
        estimator="wake-sleep",
        gradient="none",
        draws=4,
        credit="position",
        last_block="summed",
        carriers="spread",
        balance=0.3,
        balance_form="floor",
    )
    return _ties("ties-emoe-plus", method)
