"""Small settings that train on two CPU cores in about a minute: the demo, and rows of a user's own."""

from __future__ import annotations

from emoe.backbones.transformer import TransformerConfig
from emoe.domains.base import DomainConfig
from emoe.domains.rows import RowsConfig
from emoe.domains.toy import ToyConfig
from emoe.engine.optim import OptimConfig
from emoe.engine.trainer import TrainConfig
from emoe.experiment import EvalConfig, Experiment
from emoe.methods.base import MethodConfig
from emoe.methods.emoe import EMoEConfig
from emoe.methods.mdlm import MDLMConfig
from emoe.methods.vadd import VADDConfig
from emoe.recipes import recipe

T_LOW = 1 / 64


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


def _demo(name: str, method: MethodConfig) -> Experiment:
    # With seed 0 several of the 8 centres share a row, and even independent coordinates are often valid.
    return _small(name, ToyConfig(density="8-modes"), method, (1, 2, 4, 8), seed=1)


def _rows(name: str, method: MethodConfig) -> Experiment:
    return _small(name, RowsConfig(path=""), method, (1, 2, 4, 8, 16, 32))


@recipe
def demo_mdlm() -> Experiment:
    """MDLM of the demo: 8-modes, a small network."""
    return _demo("demo-mdlm", MDLMConfig(t_low=T_LOW))


@recipe
def demo_vadd() -> Experiment:
    """VADD of the demo: 8-modes, a small network."""
    return _demo("demo-vadd", VADDConfig(t_low=T_LOW))


@recipe
def demo_emoe() -> Experiment:
    """E-MoE of the demo: 8-modes, a small network."""
    return _demo("demo-emoe", EMoEConfig(t_low=T_LOW))


@recipe
def rows_mdlm() -> Experiment:
    """MDLM on your own rows of integers: --domain.path data.npy (.npy, .npz or .csv)."""
    return _rows("rows-mdlm", MDLMConfig(t_low=T_LOW))


@recipe
def rows_vadd() -> Experiment:
    """VADD on your own rows of integers: --domain.path data.npy (.npy, .npz or .csv)."""
    return _rows("rows-vadd", VADDConfig(t_low=T_LOW))


@recipe
def rows_emoe() -> Experiment:
    """E-MoE on your own rows of integers: --domain.path data.npy (.npy, .npz or .csv)."""
    return _rows("rows-emoe", EMoEConfig(t_low=T_LOW))
