"""The paper's toy table: two densities, three methods, the settings of App. B.1."""

from __future__ import annotations

from emoe.backbones.transformer import TransformerConfig
from emoe.domains.toy import Density, ToyConfig
from emoe.engine.optim import OptimConfig
from emoe.engine.trainer import TrainConfig
from emoe.experiment import Experiment
from emoe.methods.base import MethodConfig
from emoe.methods.emoe import EMoEConfig
from emoe.methods.mdlm import MDLMConfig
from emoe.methods.vadd import VADDConfig
from emoe.ramps import Constant
from emoe.recipes import recipe

T_LOW = 1 / 64  # t ~ U[1/64, 1] bounds the 1/t weight by 64


# What docs/learning-the-latent.md found on other densities: networks, data and steps of the paper, learned otherwise.
# For both, each step minimises w(t) times a bound of 8 draws on -log p(x0 | xt): the power of w(t) is on the KL too.
EMOE_PLUS = EMoEConfig(
    t_low=T_LOW,
    estimator="vimco",
    gradient="none",
    draws=8,
    last_block="summed",
    carriers="spread",
    elbo_power=Constant(value=1.0),
)
VADD_PLUS = VADDConfig(t_low=T_LOW, draws=8, elbo_weighted=True)
PLUS_LR = 1e-3


def _toy(name: str, density: Density, method: MethodConfig, *, lr: float = 3e-4) -> Experiment:
    """600 epochs of 40 batches of 512; Adam, cosine to 0, clip 1; no warm-up, EMA or dropout."""
    return Experiment(
        name=name,
        domain=ToyConfig(density=density),
        backbone=TransformerConfig(),
        method=method,
        optim=OptimConfig(lr=lr, clip=1.0, schedule="cosine"),
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


@recipe
def toy_8modes_emoe_plus() -> Experiment:
    """E-MoE on 8-modes with the estimator that docs/learning-the-latent.md arrives at."""
    return _toy("toy-8modes-emoe-plus", "8-modes", EMOE_PLUS, lr=PLUS_LR)


@recipe
def toy_8modes_vadd_plus() -> Experiment:
    """VADD on 8-modes with the best setting that a search of its own found."""
    return _toy("toy-8modes-vadd-plus", "8-modes", VADD_PLUS, lr=PLUS_LR)


@recipe
def toy_swissroll_emoe_plus() -> Experiment:
    """E-MoE on Swiss-roll with the estimator that docs/learning-the-latent.md arrives at."""
    return _toy("toy-swissroll-emoe-plus", "swiss-roll", EMOE_PLUS, lr=PLUS_LR)


@recipe
def toy_swissroll_vadd_plus() -> Experiment:
    """VADD on Swiss-roll with the best setting that a search of its own found."""
    return _toy("toy-swissroll-vadd-plus", "swiss-roll", VADD_PLUS, lr=PLUS_LR)
