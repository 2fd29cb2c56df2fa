"""Text: the paper's LM1B experiment (App. B.3), news at a size for one GPU, and a size for tests.

The rows come from a set that `emoe data prepare` wrote: sets/lm1b, sets/news or sets/text, unless --domain.path names
another one (docs/guides/text.md).
"""

from __future__ import annotations

import dataclasses

from emoe.backbones.dit import DiTConfig
from emoe.domains.text.data import TextConfig
from emoe.engine.optim import OptimConfig
from emoe.engine.trainer import TrainConfig
from emoe.experiment import EvalConfig, Experiment
from emoe.methods.ar import ARConfig
from emoe.methods.base import MethodConfig
from emoe.methods.bd3lm import BD3LMConfig
from emoe.methods.emoe import EMoEConfig
from emoe.methods.mdlm import MDLMConfig
from emoe.methods.sedd import SEDDConfig
from emoe.methods.vadd import VADDConfig
from emoe.ramps import Decay, Linear
from emoe.recipes import recipe

T_LOW = 1e-3  # t ~ U[0.001, 1], as the code that the paper builds on has it
TINY_T_LOW = 1 / 64
LENGTH, TINY_LENGTH = 128, 16  # tokens of a row, which NFE of methods that go from left to right depend on
BLOCK, TINY_BLOCK = 16, 4  # tokens of a block of BD3-LM
FLOOR, TINY_FLOOR = 1.5, 1.2  # nats, of at most ln 8 = 2.08 and ln 4 = 1.39
FREE, TINY_FREE = 2.8, 0.3  # nats per row: 0.02 per token of 128 in every second block, 0.01 of 32 in each
FREE_EVERY = 2  # half of the blocks: what is free is taken, and few deep codes share more than many shallow ones
AWARE_FREE, TINY_AWARE_FREE = 4.0, 1.0  # where only few steps have them
CHUNK = 16_384  # positions whose logits are made at once: 1 GB of them with 30,522 symbols
SHARE = 0.55  # of positions whose logits are made; masked are 0.500 +- 0.002 of 256 rows of 128 tokens


def _kept_open(method: MethodConfig, floor: float, free: float, every: int = 1) -> EMoEConfig:
    """E-MoE of a recipe whose blocks stay in use: all of them, or every second one, and most of their experts.

    The first nats of such a block are free, so that it gets to find a use for them; a loss pushes where the entropy of
    a block's usage is below `floor`; and the weight of a time comes to the KL over training, which lowers what a
    sampler of several calls pays for its routes. Comparing draws, which wins on tied symbols and points, lost to the
    floor in a first probe of text (docs/log.md).
    """
    assert isinstance(method, EMoEConfig)
    return dataclasses.replace(
        method,
        balance=0.3,
        balance_form="floor",
        usage_floor=floor,
        free_nats=free,
        free_every=every,
        elbo_power=Linear(start=0.0, end=1.0),
    )


def _aware(method: MethodConfig, free: float) -> EMoEConfig:
    """E-MoE+ of a recipe that is told how many steps the sampler takes; nats are free in one and two steps alone."""
    assert isinstance(method, EMoEConfig)
    return dataclasses.replace(method, step_aware=True, free_nats=free, free_every=1)  # in all blocks


def _large_vocabulary(method: MethodConfig) -> MethodConfig:
    """Logits of some positions at a time, and of masked ones alone; rows of one step are masked throughout."""
    all_read = isinstance(method, ARConfig) or getattr(method, "step_aware", False)
    return dataclasses.replace(method, head_chunk=CHUNK, head_share=1.0 if all_read else SHARE)


def _nfe(method: MethodConfig, length: int, most: tuple[int, ...]) -> tuple[int, ...]:
    """Numbers of network calls that a method can make: one per token, or some in every block."""
    if isinstance(method, ARConfig):
        return (length,)
    if isinstance(method, BD3LMConfig):
        return tuple(nfe for nfe in most if nfe % (length // method.block) == 0)
    return most


def _lm1b(name: str, method: MethodConfig, backbone: DiTConfig | None = None) -> Experiment:
    """The table of App. B.3: DiT-small, batch 512, a million steps, constant learning rate."""
    return Experiment(
        name=name,
        domain=TextConfig(path="sets/lm1b"),
        backbone=backbone or DiTConfig(),
        method=_large_vocabulary(method),
        optim=OptimConfig(
            algorithm="adamw",
            lr=3e-4,
            betas=(0.9, 0.999),
            weight_decay=0.0,
            clip=1.0,
            warmup=2_500,
            schedule="constant",
        ),
        train=TrainConfig(steps=1_000_000, batch=512, ema=0.9999, precision="bf16", log_every=500, save_every=10_000),
        eval=EvalConfig(nfe=_nfe(method, LENGTH, (1, 2, 4, 8, 16, 32, 64, 128)), samples=2_000, batch=250),
    )


SMALL = DiTConfig(width=384, depth=6, heads=6, hidden=1536, dropout=0.0)


def _news(name: str, method: MethodConfig, backbone: DiTConfig = SMALL) -> Experiment:
    """Half the width, depth and batch, 7,500 steps (246M tokens); twice the learning rate, which decays; no dropout."""
    return Experiment(
        name=name,
        domain=TextConfig(path="sets/news"),
        backbone=backbone,
        method=_large_vocabulary(method),
        optim=OptimConfig(
            algorithm="adamw", lr=6e-4, betas=(0.9, 0.999), weight_decay=0.0, clip=1.0, warmup=500, floor=0.1
        ),
        train=TrainConfig(steps=7_500, batch=256, ema=0.999, precision="bf16", save_every=2_500),
        eval=EvalConfig(nfe=_nfe(method, LENGTH, (1, 2, 4, 8, 16, 32, 64, 128)), samples=1_000, batch=250),
    )


TINY = DiTConfig(width=32, depth=2, heads=2, hidden=64, cond_size=16, time_size=16, latent_hidden=32, dropout=0.0)


def _tiny(name: str, method: MethodConfig, backbone: DiTConfig = TINY) -> Experiment:
    """Width 32, 2 blocks, batch 32, learning rate 1e-2, 400 steps; for small vocabularies and rows of 16 tokens."""
    return Experiment(
        name=name,
        domain=TextConfig(path="sets/text"),
        backbone=backbone,
        method=method,
        optim=OptimConfig(algorithm="adamw", lr=1e-2, clip=1.0, warmup=20, floor=0.1),
        train=TrainConfig(steps=400, batch=32, ema=0.98, precision="fp32", log_every=50, save_every=200),
        eval=EvalConfig(nfe=_nfe(method, TINY_LENGTH, (1, 2, 4, 8, 16)), samples=200, batch=200),
    )


# --- LM1B ----------------------------------------------------------------------------------------------------------


@recipe
def lm1b_mdlm() -> Experiment:
    """MDLM on LM1B (App. B.3)."""
    return _lm1b("lm1b-mdlm", MDLMConfig(t_low=T_LOW))


@recipe
def lm1b_vadd() -> Experiment:
    """VADD on LM1B (App. B.3)."""
    return _lm1b("lm1b-vadd", VADDConfig(t_low=T_LOW, latent=512, kl_weight=Linear(start=0.0, end=1.0, steps=100_000)))


@recipe
def lm1b_emoe() -> Experiment:
    """E-MoE on LM1B (App. B.3)."""
    return _lm1b("lm1b-emoe", EMoEConfig(t_low=T_LOW, experts=8, top_k=2, relax_tau=Decay(rate=3e-5, floor=0.1)))


@recipe
def lm1b_emoe_plus() -> Experiment:
    """E-MoE on LM1B, with half of the blocks kept in use."""
    return _lm1b("lm1b-emoe-plus", _kept_open(lm1b_emoe().method, FLOOR, FREE, FREE_EVERY))


@recipe
def lm1b_emoe_aware() -> Experiment:
    """E-MoE+ on LM1B, told how many steps the sampler takes."""
    return _lm1b("lm1b-emoe-aware", _aware(lm1b_emoe_plus().method, AWARE_FREE), DiTConfig(time_conditioning=True))


@recipe
def lm1b_ar() -> Experiment:
    """The autoregressive baseline on LM1B."""
    return _lm1b("lm1b-ar", ARConfig(), DiTConfig(causal=True))


@recipe
def lm1b_sedd() -> Experiment:
    """SEDD on LM1B, with the time as an input."""
    return _lm1b("lm1b-sedd", SEDDConfig(t_low=T_LOW), DiTConfig(time_conditioning=True))


@recipe
def lm1b_bd3lm() -> Experiment:
    """BD3-LM on LM1B, blocks of 16 tokens."""
    return _lm1b("lm1b-bd3lm", BD3LMConfig(t_low=T_LOW, block=BLOCK))


# --- News ----------------------------------------------------------------------------------------------------------


@recipe
def news_small_mdlm() -> Experiment:
    """MDLM on news, 36M parameters."""
    return _news("news-small-mdlm", MDLMConfig(t_low=T_LOW))


@recipe
def news_small_vadd() -> Experiment:
    """VADD on news."""
    method = VADDConfig(t_low=T_LOW, latent=256, kl_weight=Linear(start=0.0, end=1.0, share=0.1))
    return _news("news-small-vadd", method)


@recipe
def news_small_emoe() -> Experiment:
    """E-MoE on news, with the choices of App. B.3."""
    # The temperature takes the same course as on LM1B, over fewer steps.
    return _news("news-small-emoe", EMoEConfig(t_low=T_LOW, experts=8, relax_tau=Decay(rate=4e-3, floor=0.1)))


@recipe
def news_small_emoe_plus() -> Experiment:
    """E-MoE on news, with half of the blocks kept in use."""
    return _news("news-small-emoe-plus", _kept_open(news_small_emoe().method, FLOOR, FREE, FREE_EVERY))


@recipe
def news_small_emoe_aware() -> Experiment:
    """E-MoE+ on news, told how many steps the sampler takes."""
    network = dataclasses.replace(SMALL, time_conditioning=True)
    return _news("news-small-emoe-aware", _aware(news_small_emoe_plus().method, AWARE_FREE), network)


@recipe
def news_small_ar() -> Experiment:
    """The autoregressive baseline on news."""
    return _news("news-small-ar", ARConfig(), dataclasses.replace(SMALL, causal=True))


@recipe
def news_small_sedd() -> Experiment:
    """SEDD on news, with the time as an input."""
    return _news("news-small-sedd", SEDDConfig(t_low=T_LOW), dataclasses.replace(SMALL, time_conditioning=True))


@recipe
def news_small_bd3lm() -> Experiment:
    """BD3-LM on news, blocks of 16 tokens."""
    return _news("news-small-bd3lm", BD3LMConfig(t_low=T_LOW, block=BLOCK))


# --- A size for tests ----------------------------------------------------------------------------------------------


@recipe
def text_tiny_mdlm() -> Experiment:
    """MDLM on a small text of your own, seconds on a CPU."""
    return _tiny("text-tiny-mdlm", MDLMConfig(t_low=TINY_T_LOW))


@recipe
def text_tiny_vadd() -> Experiment:
    """VADD on a small text of your own, seconds on a CPU."""
    method = VADDConfig(t_low=TINY_T_LOW, latent=8, kl_weight=Linear(start=0.0, end=1.0, share=0.3))
    return _tiny("text-tiny-vadd", method)


@recipe
def text_tiny_emoe() -> Experiment:
    """E-MoE on a small text of your own, seconds on a CPU."""
    return _tiny("text-tiny-emoe", EMoEConfig(t_low=TINY_T_LOW, experts=4, relax_tau=Decay(rate=5e-3, floor=0.1)))


@recipe
def text_tiny_emoe_plus() -> Experiment:
    """E-MoE on a small text of your own, with all blocks kept in use; seconds on a CPU."""
    return _tiny("text-tiny-emoe-plus", _kept_open(text_tiny_emoe().method, TINY_FLOOR, TINY_FREE))


@recipe
def text_tiny_emoe_aware() -> Experiment:
    """E-MoE+ on a small text of your own, told how many steps the sampler takes; seconds on a CPU."""
    network = dataclasses.replace(TINY, time_conditioning=True)
    return _tiny("text-tiny-emoe-aware", _aware(text_tiny_emoe_plus().method, TINY_AWARE_FREE), network)


@recipe
def text_tiny_ar() -> Experiment:
    """The autoregressive baseline on a small text of your own, seconds on a CPU."""
    return _tiny("text-tiny-ar", ARConfig(), dataclasses.replace(TINY, causal=True))


@recipe
def text_tiny_sedd() -> Experiment:
    """SEDD on a small text of your own, seconds on a CPU."""
    return _tiny("text-tiny-sedd", SEDDConfig(t_low=TINY_T_LOW), dataclasses.replace(TINY, time_conditioning=True))


@recipe
def text_tiny_bd3lm() -> Experiment:
    """BD3-LM on a small text of your own, blocks of 4 tokens; seconds on a CPU."""
    return _tiny("text-tiny-bd3lm", BD3LMConfig(t_low=TINY_T_LOW, block=TINY_BLOCK))
