"""The paper's toy table: two densities, three methods, the settings of App. B.1."""

from __future__ import annotations

from emoe.backbones.transformer import TransformerConfig
from emoe.domains.toy import Density, ToyConfig
from emoe.engine.fit import TrainConfig
from emoe.engine.optim import OptimConfig
from emoe.experiment import Experiment
from emoe.methods.base import MethodConfig
from emoe.methods.emoe import EMoEConfig
from emoe.methods.vadd import VADDConfig
from emoe.ramps import Constant
from emoe.recipes import register, three_methods
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
VADD_PLUS = VADDConfig(t_low=T_LOW, draws=8, elbo_weighted=True)


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
    for row, (key, (label, method)) in enumerate(three_methods(T_LOW).items(), 1):
        doc = f"{label} on {density} (Table 2, row {row})."
        register(__name__, doc, _toy(f"toy-{short}-{key}", density, method, lr=3e-4))
    doc = f"E-MoE on {density}, learned by VIMCO with 8 draws."
    register(__name__, doc, _toy(f"toy-{short}-emoe-vimco", density, VIMCO, lr=1e-3))
    doc = f"VADD on {density}, with the importance-weighted bound of 8 draws."
    register(__name__, doc, _toy(f"toy-{short}-vadd-plus", density, VADD_PLUS, lr=1e-3))
