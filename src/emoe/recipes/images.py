"""Binary images: the paper's MNIST experiment (App. B.2), and digits of 8 x 8 pixels that train on two cores."""

from __future__ import annotations

from dataclasses import replace

from emoe.backbones.unet import UNetConfig
from emoe.domains.images import DigitsConfig, MNISTConfig
from emoe.engine.fit import TrainConfig
from emoe.engine.optim import OptimConfig
from emoe.experiment import EvalConfig, Experiment
from emoe.methods.emoe import EMoEConfig
from emoe.methods.mdlm import MDLMConfig
from emoe.methods.vadd import VADDConfig
from emoe.ramps import Constant, Decay, Linear
from emoe.recipes import register
from emoe.routing.compare import CompareConfig

# t ~ U[1/L, 1]: below 1/L less than one of the L pixels is masked on average, and the weight 1/t stays below L.
MNIST_T_LOW = 1 / 1024
DIGITS_T_LOW = 1 / 64
USAGE_FLOOR = 1.0  # nats, of at most ln 4 = 1.39
# App. B.2; the betas are those of the code that its UNet comes from.
ADAM = OptimConfig(algorithm="adamw", lr=2e-4, betas=(0.9, 0.99), weight_decay=0.01, warmup=5_000, floor=0.1)
HALF = Linear(start=0.0, end=1.0, share=0.5)
QUARTER = Linear(start=0.0, end=1.0, share=0.25)
ONE = Constant(value=1.0)
MNIST_EMOE = EMoEConfig(
    t_low=MNIST_T_LOW, experts=4, top_k=2, relax_tau=Decay(rate=2e-5, floor=0.5), kl_weight=HALF, balance=1e-2
)
# Four draws, as for small digits, would take five times as long (docs/log.md).
MNIST_FLOOR = replace(MNIST_EMOE, kl_time_power=ONE, balance=0.3, usage_floor=USAGE_FLOOR)
# The temperature falls a hundred times faster: training is a hundred times shorter. Without w(t) on the KL the latent
# is too cheap at small t, and samples of many steps are much worse (docs/log.md).
DIGITS_EMOE = replace(MNIST_EMOE, t_low=DIGITS_T_LOW, relax_tau=Decay(rate=2e-3, floor=0.5), kl_time_power=ONE)
# The best of few steps on small digits (docs/log.md). A position is one of the coarsest map, with all finer ones and
# pixels in it; the last block is drawn, because convolutions follow it.
DIGITS_VIMCO = replace(
    EMoEConfig(t_low=DIGITS_T_LOW, experts=4, kl_weight=HALF, kl_time_power=ONE, balance=0.3, usage_floor=USAGE_FLOOR),
    compare=CompareConfig(estimator="vimco", draws=4, credit="position"),
)

for key, doc, method in (
    ("mdlm", "MDLM on binarised MNIST (App. B.2).", MDLMConfig(t_low=MNIST_T_LOW)),
    ("vadd", "VADD on binarised MNIST (App. B.2).", VADDConfig(t_low=MNIST_T_LOW, latent=64, kl_weight=QUARTER)),
    ("emoe", "E-MoE on binarised MNIST (App. B.2).", MNIST_EMOE),
    ("emoe-floor", "E-MoE on binarised MNIST with w(t) on the KL too and a floor under expert usage.", MNIST_FLOOR),
):
    experiment = Experiment(
        name=f"mnist-{key}",
        domain=MNISTConfig(),
        backbone=UNetConfig(),
        method=method,
        optim=ADAM,
        train=TrainConfig(steps=200_000, batch=64, ema=0.9999, precision="bf16", save_every=10_000, max_file_mb=16),
        eval=EvalConfig(nfe=(1, 2, 4, 5, 10, 20, 64), samples=10_000, batch=500),
    )
    register(__name__, doc, experiment)
# A smaller network of the same kind; 1,497 images.
for key, doc, method in (
    ("mdlm", "MDLM on small digits; about a minute", MDLMConfig(t_low=DIGITS_T_LOW)),
    ("vadd", "VADD on small digits; below two minutes", VADDConfig(t_low=DIGITS_T_LOW, latent=16, kl_weight=QUARTER)),
    ("emoe", "E-MoE on small digits: the choices of App. B.2, and w(t) on the KL too; about two minutes", DIGITS_EMOE),
    ("emoe-vimco", "E-MoE on small digits, learned by VIMCO with 4 draws; three to five minutes", DIGITS_VIMCO),
):
    experiment = Experiment(
        name=f"digits-{key}",
        domain=DigitsConfig(),
        backbone=UNetConfig(channels=16, hidden=32, time_size=32, time_hidden=64),
        method=method,
        optim=replace(ADAM, lr=2e-3, warmup=50),
        train=TrainConfig(steps=2_600, batch=64, ema=0.995, precision="fp32", log_every=50, save_every=500),
        eval=EvalConfig(nfe=(1, 2, 4, 8, 16, 64), samples=1_000, batch=500),
    )
    register(__name__, f"{doc} on two cores.", experiment)
