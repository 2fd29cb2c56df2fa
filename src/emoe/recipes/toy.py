"""Small data: the paper's toy table (App. B.1), the demo, rows of tied symbols, and rows of a user's own."""

from __future__ import annotations

from emoe.backbones.transformer import TransformerConfig
from emoe.domains.base import DomainConfig
from emoe.domains.rows import RowsConfig
from emoe.domains.ties import TiesConfig
from emoe.domains.toy import Density, ToyConfig
from emoe.engine.fit import TrainConfig
from emoe.engine.optim import OptimConfig
from emoe.experiment import EvalConfig, Experiment
from emoe.methods.base import MethodConfig
from emoe.methods.emoe import EMoEConfig
from emoe.methods.mdlm import MDLMConfig
from emoe.methods.vadd import VADDConfig
from emoe.ramps import Constant
from emoe.recipes import register
from emoe.routing.compare import CompareConfig

T_LOW = 1 / 64  # t ~ U[1/64, 1] bounds the 1/t weight by 64
METHODS: dict[str, tuple[str, MethodConfig]] = {
    "mdlm": ("MDLM", MDLMConfig(t_low=T_LOW)),
    "vadd": ("VADD", VADDConfig(t_low=T_LOW)),
    "emoe": ("E-MoE", EMoEConfig(t_low=T_LOW)),
}
DENSITIES: dict[str, Density] = {"8modes": "8-modes", "swissroll": "swiss-roll"}
# These two come from a search on other densities (docs/learning-the-latent.md): each step minimises w(t) times a bound
# of 8 draws on -log p(x0 | xt), so the power of w(t) is on the KL too.
VIMCO = EMoEConfig(
    t_low=T_LOW,
    compare=CompareConfig(estimator="vimco", draws=8, in_turn=True, sum_last=True),
    kl_time_power=Constant(value=1.0),
)
VADD_PLUS = VADDConfig(t_low=T_LOW, draws=8, elbo_weighted=True)
WAKE_SLEEP = EMoEConfig(
    t_low=T_LOW,
    compare=CompareConfig(estimator="wake-sleep", draws=4, credit="position", in_turn=True, sum_last=True),
    balance=0.3,
    usage_floor=1.5,
)


def _toy(name: str, density: Density, method: MethodConfig, lr: float = 3e-4) -> Experiment:
    """The paper's 600 epochs of 40 batches of 512; Adam, cosine to 0, clip 1; no warm-up, EMA or dropout."""
    return Experiment(
        name=name,
        domain=ToyConfig(density=density),
        backbone=TransformerConfig(),
        method=method,
        optim=OptimConfig(lr=lr),
        train=TrainConfig(steps=600 * 40, batch=512),
    )


def _small(name: str, domain: DomainConfig, method: MethodConfig, nfe: tuple[int, ...], seed: int = 0) -> Experiment:
    """About a minute on two cores: width 64, MLP 256, batch 256, learning rate 1e-3, 4,000 steps."""
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


def _ties(name: str, method: MethodConfig) -> Experiment:
    """Eight pairs of equal symbols; width 64, 4 blocks, MLP 128, batch 128, learning rate 1e-3, 4,000 steps.

    To be varied: --domain.family sums --domain.length 64 --backbone.depth 6.
    """
    return Experiment(
        name=name,
        domain=TiesConfig(family="pairs", length=16),
        backbone=TransformerConfig(width=64, heads=4, hidden=128, depth=4),
        method=method,
        optim=OptimConfig(lr=1e-3, warmup=100),
        train=TrainConfig(steps=4_000, batch=128, save_every=1_000),
        eval=EvalConfig(nfe=(1, 2, 4), samples=4_000),
    )


for row, (key, (label, method)) in enumerate(METHODS.items(), 1):
    for short, density in DENSITIES.items():
        doc = f"{label} on {density} (Table 2, row {row})."
        register(__name__, doc, _toy(f"toy-{short}-{key}", density, method))
    # With seed 0 several of the 8 centres share a row, and even independent coordinates are often valid.
    demo = _small(f"demo-{key}", ToyConfig(density="8-modes"), method, (1, 2, 4, 8), seed=1)
    register(__name__, f"{label} of the demo: 8-modes, a small network.", demo)
    rows = _small(f"rows-{key}", RowsConfig(path=""), method, (1, 2, 4, 8, 16, 32))
    register(__name__, f"{label} on your own rows of integers: --domain.path data.npy (.npy, .npz or .csv).", rows)
    doc = f"{label} on rows of tied symbols, pairs of length 16 unless changed."
    register(__name__, doc, _ties(f"ties-{key}", method))
for short, density in DENSITIES.items():
    doc = f"E-MoE on {density}, learned by VIMCO with 8 draws."
    register(__name__, doc, _toy(f"toy-{short}-emoe-vimco", density, VIMCO, lr=1e-3))
    doc = f"VADD on {density}, with the importance-weighted bound of 8 draws."
    register(__name__, doc, _toy(f"toy-{short}-vadd-plus", density, VADD_PLUS, lr=1e-3))
doc = "E-MoE on rows of tied symbols, learned by wake-sleep with routes in turn (docs/learning-the-latent.md)."
register(__name__, doc, _ties("ties-emoe-wake-sleep", WAKE_SLEEP))
