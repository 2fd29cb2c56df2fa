"""The paper's toy table: two densities, three methods, the settings of App. B.1."""

from __future__ import annotations

from emoe.backbones.transformer import TransformerConfig
from emoe.domains.toy import Density, ToyConfig
from emoe.engine.fit import TrainConfig
from emoe.engine.optim import OptimConfig
from emoe.experiment import Experiment
from emoe.methods.base import MethodConfig
from emoe.methods.emoe import EMoEConfig
from emoe.methods.mdlm import MDLMConfig
from emoe.methods.vadd import VADDConfig
from emoe.ramps import Constant
from emoe.recipes import register
from emoe.routing.compare import CompareConfig

T_LOW = 1 / 64  # t ~ U[1/64, 1] bounds the 1/t weight by 64
DENSITIES: dict[str, Density] = {"8modes": "8-modes", "swissroll": "swiss-roll"}

# Networks, data and steps of the paper. The last two come from a search on other densities
# (docs/learning-the-latent.md): each step minimises w(t) times a bound of 8 draws on -log p(x0 | xt), so the power of
# w(t) is on the KL too.
VIMCO = EMoEConfig(
    t_low=T_LOW,
    compare=CompareConfig(estimator="vimco", draws=8, in_turn=True, sum_last=True),
    kl_time_power=Constant(value=1.0),
)
METHODS: dict[str, tuple[str, MethodConfig, float]] = {
    "mdlm": ("MDLM on {} (Table 2, row 1).", MDLMConfig(t_low=T_LOW), 3e-4),
    "vadd": ("VADD on {} (Table 2, row 2).", VADDConfig(t_low=T_LOW), 3e-4),
    "emoe": ("E-MoE on {} (Table 2, row 3).", EMoEConfig(t_low=T_LOW), 3e-4),
    "emoe-vimco": ("E-MoE on {}, learned by VIMCO with 8 draws.", VIMCO, 1e-3),
    "vadd-plus": (
        "VADD on {}, with the importance-weighted bound of 8 draws.",
        VADDConfig(t_low=T_LOW, draws=8, elbo_weighted=True),
        1e-3,
    ),
}


def _toy(name: str, density: Density, method: MethodConfig, lr: float) -> Experiment:
    """600 epochs of 40 batches of 512; Adam, cosine to 0, clip 1; no warm-up, EMA or dropout."""
    return Experiment(
        name=name,
        domain=ToyConfig(density=density),
        backbone=TransformerConfig(),
        method=method,
        optim=OptimConfig(lr=lr, clip=1.0, schedule="cosine"),
        train=TrainConfig(steps=600 * 40, batch=512),
    )


for short, density in DENSITIES.items():
    for key, (doc, method, lr) in METHODS.items():
        old = f"toy-{short}-emoe-plus" if key == "emoe-vimco" else None
        register(__name__, doc.format(density), _toy(f"toy-{short}-{key}", density, method, lr), old=old)
