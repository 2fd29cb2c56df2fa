"""The paper's toy table: two densities, three methods, the settings of App. B.1."""

from __future__ import annotations

from typing import Literal

from emoe.backbones.transformer import TransformerConfig
from emoe.domains.toy import ToyConfig
from emoe.engine.optim import OptimConfig
from emoe.engine.trainer import TrainConfig
from emoe.experiment import Experiment
from emoe.methods.base import MethodConfig
from emoe.methods.emoe import EMoEConfig
from emoe.methods.mdlm import MDLMConfig
from emoe.methods.vadd import VADDConfig
from emoe.recipes import recipe

T_LOW = 1 / 64  # t ~ U[1/64, 1] bounds the 1/t weight by 64


def _toy(name: str, density: Literal["8-modes", "swiss-roll"], method: MethodConfig) -> Experiment:
    """600 epochs of 40 batches of 512; Adam, cosine to 0, clip 1; no warm-up, EMA or dropout."""
    return Experiment(
        name=name,
        domain=ToyConfig(density=density),
        backbone=TransformerConfig(),
        method=method,
        optim=OptimConfig(lr=3e-4, clip=1.0, schedule="cosine"),
        train=TrainConfig(steps=600 * 40, batch=512),
    )


@recipe
def toy_8modes_mdlm() -> Experiment:
    """MDLM on 8-modes (Table 2, row 1)."""
    return _toy("toy-8modes-mdlm", "8-modes", MDLMConfig(t_low=T_LOW))


@recipe
def toy_8modes_vadd() -> Experiment:
    """VADD on 8-modes (Table 2, row 2)."""
    return _toy("toy-8modes-vadd", "8-modes", VADDConfig(t_low=T_LOW))


@recipe
def toy_8modes_emoe() -> Experiment:
    """E-MoE on 8-modes (Table 2, row 3)."""
    return _toy("toy-8modes-emoe", "8-modes", EMoEConfig(t_low=T_LOW))


@recipe
def toy_swissroll_mdlm() -> Experiment:
    """MDLM on Swiss-roll (Table 2, row 1)."""
    return _toy("toy-swissroll-mdlm", "swiss-roll", MDLMConfig(t_low=T_LOW))


@recipe
def toy_swissroll_vadd() -> Experiment:
    """VADD on Swiss-roll (Table 2, row 2)."""
    return _toy("toy-swissroll-vadd", "swiss-roll", VADDConfig(t_low=T_LOW))


@recipe
def toy_swissroll_emoe() -> Experiment:
    """E-MoE on Swiss-roll (Table 2, row 3)."""
    return _toy("toy-swissroll-emoe", "swiss-roll", EMoEConfig(t_low=T_LOW))
