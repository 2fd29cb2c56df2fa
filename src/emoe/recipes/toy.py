"""Small data: the paper's toy table (App. B.1), the demo, rows of tied symbols, and rows of a user's own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from emoe.backbones.transformer import TransformerConfig
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
# VIMCO and VADD+ come from a search on other densities (docs/learning-the-latent.md): each step minimises w(t) times a
# bound of 8 draws on -log p(x0 | xt), so the KL has the weight w(t) too.
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
# The paper's 600 epochs of 40 batches of 512; Adam, cosine to 0, clip 1; no warm-up, EMA or dropout.
TOY = Experiment(
    name="toy",
    domain=ToyConfig(density="8-modes"),
    backbone=TransformerConfig(),
    method=MDLMConfig(t_low=T_LOW),
    optim=OptimConfig(lr=3e-4),
    train=TrainConfig(steps=600 * 40, batch=512),
)
# About a minute on two cores. With seed 0 several of the 8 centres share a row, and even independent coordinates are
# often valid.
DEMO = replace(
    TOY,
    seed=1,
    backbone=TransformerConfig(width=64, hidden=256),
    optim=OptimConfig(lr=1e-3),
    train=TrainConfig(steps=4_000, batch=256, save_every=1_000),
    eval=EvalConfig(nfe=(1, 2, 4, 8)),
)
ROWS = replace(DEMO, seed=0, domain=RowsConfig(path=""), eval=EvalConfig(nfe=(1, 2, 4, 8, 16, 32)))
# Eight pairs of equal symbols. To be varied: --domain.family sums --domain.length 64 --backbone.depth 6.
TIES = replace(
    TOY,
    domain=TiesConfig(family="pairs", length=16),
    backbone=TransformerConfig(width=64, heads=4, hidden=128, depth=4),
    optim=OptimConfig(lr=1e-3, warmup=100),
    train=TrainConfig(steps=4_000, batch=128, save_every=1_000),
    eval=EvalConfig(nfe=(1, 2, 4), samples=4_000),
)


def _add(name: str, doc: str, base: Experiment, method: MethodConfig, **changes: Any) -> None:
    register(__name__, doc, replace(base, name=name, method=method, **changes))


for row, (key, (label, method)) in enumerate(METHODS.items(), 1):
    _add(f"demo-{key}", f"{label} of the demo: 8-modes, a small network.", DEMO, method)
    rows = f"{label} on your own rows of integers: --domain.path data.npy (.npy, .npz or .csv)."
    _add(f"rows-{key}", rows, ROWS, method)
    _add(f"ties-{key}", f"{label} on rows of tied symbols, pairs of length 16 unless changed.", TIES, method)
    for short, density in DENSITIES.items():
        doc = f"{label} on {density} (Table 2, row {row})."
        _add(f"toy-{short}-{key}", doc, TOY, method, domain=ToyConfig(density=density))
for short, density in DENSITIES.items():
    changes = {"domain": ToyConfig(density=density), "optim": OptimConfig(lr=1e-3)}
    doc = f"E-MoE on {density}, learned by VIMCO with 8 draws."
    _add(f"toy-{short}-emoe-vimco", doc, TOY, VIMCO, **changes)
    doc = f"VADD on {density}, with the importance-weighted bound of 8 draws."
    _add(f"toy-{short}-vadd-plus", doc, TOY, VADD_PLUS, **changes)
doc = "E-MoE on rows of tied symbols, learned by wake-sleep with routes in turn (docs/learning-the-latent.md)."
_add("ties-emoe-wake-sleep", doc, TIES, WAKE_SLEEP)
