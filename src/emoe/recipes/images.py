"""Binary images: the paper's MNIST experiment (App. B.2), and digits of 8 x 8 pixels that train on two cores."""

from __future__ import annotations

import dataclasses

from emoe.backbones.unet import UNetConfig
from emoe.domains.images import DigitsConfig, MNISTConfig
from emoe.engine.optim import OptimConfig
from emoe.engine.trainer import TrainConfig
from emoe.experiment import EvalConfig, Experiment
from emoe.methods.base import MethodConfig
from emoe.methods.emoe import EMoEConfig
from emoe.methods.mdlm import MDLMConfig
from emoe.methods.vadd import VADDConfig
from emoe.ramps import Constant, Decay, Linear
from emoe.recipes import recipe

# t ~ U[1/L, 1]: below 1/L less than one of the L pixels is masked on average, and the weight 1/t stays below L.
MNIST_T_LOW = 1 / 1024
USAGE_FLOOR = 1.0  # nats, of at most ln 4 = 1.39
DIGITS_T_LOW = 1 / 64


def _mnist(name: str, method: MethodConfig) -> Experiment:
    """The table of App. B.2; betas are those of the code its UNet comes from. Checkpoints in files of 16 MB at most."""
    return Experiment(
        name=name,
        domain=MNISTConfig(),
        backbone=UNetConfig(),
        method=method,
        optim=OptimConfig(
            algorithm="adamw",
            lr=2e-4,
            betas=(0.9, 0.99),
            weight_decay=0.01,
            clip=1.0,
            warmup=5_000,
            schedule="cosine",
            floor=0.1,
        ),
        train=TrainConfig(steps=200_000, batch=64, ema=0.9999, precision="bf16", save_every=10_000, max_file_mb=16),
        eval=EvalConfig(nfe=(1, 2, 4, 5, 10, 20, 64), samples=10_000, batch=500),
    )


def _digits(name: str, method: MethodConfig) -> Experiment:
    """The same kind of network with 16 channels; 1,497 images, batch 64."""
    return Experiment(
        name=name,
        domain=DigitsConfig(),
        backbone=UNetConfig(channels=16, hidden=32, time_size=32, time_hidden=64),
        method=method,
        optim=OptimConfig(
            algorithm="adamw", lr=2e-3, betas=(0.9, 0.99), weight_decay=0.01, clip=1.0, warmup=50, floor=0.1
        ),
        train=TrainConfig(steps=2_600, batch=64, ema=0.995, precision="fp32", log_every=50, save_every=500),
        eval=EvalConfig(nfe=(1, 2, 4, 8, 16, 64), samples=1_000, batch=500),
    )


@recipe
def mnist_mdlm() -> Experiment:
    """MDLM on binarised MNIST (App. B.2)."""
    return _mnist("mnist-mdlm", MDLMConfig(t_low=MNIST_T_LOW))


@recipe
def mnist_vadd() -> Experiment:
    """VADD on binarised MNIST (App. B.2)."""
    method = VADDConfig(t_low=MNIST_T_LOW, latent=64, kl_weight=Linear(start=0.0, end=1.0, share=0.25))
    return _mnist("mnist-vadd", method)


MNIST_EMOE = EMoEConfig(
    t_low=MNIST_T_LOW,
    experts=4,
    top_k=2,
    relax_tau=Decay(rate=2e-5, floor=0.5),
    kl_weight=Linear(start=0.0, end=1.0, share=0.5),
    balance=1e-2,
    balance_form="switch",
)


@recipe
def mnist_emoe() -> Experiment:
    """E-MoE on binarised MNIST (App. B.2)."""
    return _mnist("mnist-emoe", MNIST_EMOE)


@recipe
def mnist_emoe_plus() -> Experiment:
    """E-MoE on binarised MNIST with w(t) on the KL too and a floor under the experts' usage: no step costs more."""
    # Four draws, as for small digits, would take five times as long (docs/log.md).
    method = dataclasses.replace(
        MNIST_EMOE, elbo_power=Constant(value=1.0), balance=0.3, balance_form="floor", usage_floor=USAGE_FLOOR
    )
    return _mnist("mnist-emoe-plus", method)


# The best of few steps on small digits (docs/log.md): a proper score, a latent that costs nothing at first, four draws.
PLUS = EMoEConfig(
    experts=4,
    estimator="vimco",
    gradient="none",
    draws=4,
    credit="position",  # a position of the coarsest map, with all finer ones and pixels in it
    last_block="drawn",  # convolutions follow the last routed block
    kl_weight=Linear(start=0.0, end=1.0, share=0.5),
    elbo_power=Constant(value=1.0),
    balance=0.3,
    balance_form="floor",
    usage_floor=USAGE_FLOOR,
)


@recipe
def digits_mdlm() -> Experiment:
    """MDLM on small digits; about a minute on two cores."""
    return _digits("digits-mdlm", MDLMConfig(t_low=DIGITS_T_LOW))


@recipe
def digits_vadd() -> Experiment:
    """VADD on small digits; below two minutes on two cores."""
    method = VADDConfig(t_low=DIGITS_T_LOW, latent=16, kl_weight=Linear(start=0.0, end=1.0, share=0.25))
    return _digits("digits-vadd", method)


@recipe
def digits_emoe() -> Experiment:
    """E-MoE on small digits: the choices of App. B.2, and w(t) on the KL too; about two minutes on two cores."""
    # Without that weight the latent is too cheap at small t, and samples of many steps fall far behind (docs/log.md).
    method = EMoEConfig(
        t_low=DIGITS_T_LOW,
        experts=4,
        top_k=2,
        relax_tau=Decay(rate=2e-3, floor=0.5),  # a hundred times faster: training is a hundred times shorter
        kl_weight=Linear(start=0.0, end=1.0, share=0.5),
        elbo_power=Constant(value=1.0),
        balance=1e-2,
        balance_form="switch",
    )
    return _digits("digits-emoe", method)


@recipe
def digits_emoe_aware() -> Experiment:
    """E-MoE on small digits, told how many steps the sampler takes; about two minutes on two cores."""
    method = digits_emoe().method
    assert isinstance(method, EMoEConfig)
    aware = dataclasses.replace(method, step_aware=True, elbo_power=Linear(start=0.0, end=1.0))
    return _digits("digits-emoe-aware", aware)


@recipe
def digits_emoe_plus() -> Experiment:
    """E-MoE on small digits, learned by comparing draws; three to five minutes on two cores."""
    return _digits("digits-emoe-plus", dataclasses.replace(PLUS, t_low=DIGITS_T_LOW))
