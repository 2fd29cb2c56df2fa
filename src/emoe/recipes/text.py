"""Text: the paper's LM1B experiment (App. B.3), news at a size for one GPU, and a size for tests.

The rows come from a set that `emoe data prepare` wrote: sets/lm1b, sets/news or sets/text, unless --domain.path names
another one (docs/guides/text.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from emoe.backbones.dit import DiTConfig
from emoe.domains.text.data import TextConfig
from emoe.engine.fit import TrainConfig
from emoe.engine.optim import OptimConfig
from emoe.experiment import EvalConfig, Experiment
from emoe.methods.ar import ARConfig
from emoe.methods.base import MethodConfig
from emoe.methods.bd3lm import BD3LMConfig
from emoe.methods.emoe import EMoEConfig
from emoe.methods.mdlm import MDLMConfig
from emoe.methods.sedd import SEDDConfig
from emoe.methods.vadd import VADDConfig
from emoe.ramps import Decay, Linear
from emoe.recipes import register

T_LOW = 1e-3  # t ~ U[0.001, 1], as in the code that the paper builds on
TINY_T_LOW = 1 / 64
LENGTH, TINY_LENGTH = 128, 16  # tokens of a row
CHUNK = 16_384  # positions whose logits are computed at once: 1 GB of them with 30,522 symbols
SHARE = 0.55  # of positions with room for logits; masked are 0.500 +- 0.002 of 256 rows of 128 tokens
NFE = (1, 2, 4, 8, 16, 32, 64, 128)
ADAMW = OptimConfig(algorithm="adamw", betas=(0.9, 0.999), weight_decay=0.0, clip=1.0)

Build = Callable[[str, MethodConfig, DiTConfig], Experiment]


def _large_vocabulary(method: MethodConfig) -> MethodConfig:
    """Logits of some positions at a time, and of masked ones only."""
    return replace(method, head_chunk=CHUNK, head_share=1.0 if isinstance(method, ARConfig) else SHARE)


def _lm1b(name: str, method: MethodConfig, backbone: DiTConfig) -> Experiment:
    """The table of App. B.3: DiT-small, batch 512, a million steps, constant learning rate."""
    return Experiment(
        name=name,
        domain=TextConfig(path="sets/lm1b"),
        backbone=backbone,
        method=_large_vocabulary(method),
        optim=replace(ADAMW, lr=3e-4, warmup=2_500, schedule="constant"),
        train=TrainConfig(steps=1_000_000, batch=512, ema=0.9999, precision="bf16", log_every=500, save_every=10_000),
        eval=EvalConfig(nfe=method.allowed_nfe(NFE, LENGTH), samples=2_000, batch=250),
    )


def _news(name: str, method: MethodConfig, backbone: DiTConfig) -> Experiment:
    """Half the width, depth and batch, 7,500 steps (246M tokens); twice the learning rate, which decays; no dropout."""
    return Experiment(
        name=name,
        domain=TextConfig(path="sets/news"),
        backbone=backbone,
        method=_large_vocabulary(method),
        optim=replace(ADAMW, lr=6e-4, warmup=500, floor=0.1),
        train=TrainConfig(steps=7_500, batch=256, ema=0.999, precision="bf16", save_every=2_500),
        eval=EvalConfig(nfe=method.allowed_nfe(NFE, LENGTH), samples=1_000, batch=250),
    )


def _tiny(name: str, method: MethodConfig, backbone: DiTConfig) -> Experiment:
    """Width 32, 2 blocks, batch 32, learning rate 1e-2, 400 steps; for small vocabularies and rows of 16 tokens."""
    return Experiment(
        name=name,
        domain=TextConfig(path="sets/text"),
        backbone=backbone,
        method=method,
        optim=OptimConfig(algorithm="adamw", lr=1e-2, clip=1.0, warmup=20, floor=0.1),
        train=TrainConfig(steps=400, batch=32, ema=0.98, precision="fp32", log_every=50, save_every=200),
        eval=EvalConfig(nfe=method.allowed_nfe((1, 2, 4, 8, 16), TINY_LENGTH), samples=200, batch=200),
    )


def _family(
    prefix: str,
    where: str,
    build: Build,
    backbone: DiTConfig,
    *,
    t_low: float,
    block: int,
    vadd: VADDConfig,
    emoe: EMoEConfig,
    free_nats: EMoEConfig,
) -> None:
    """Register all methods for one size and set."""
    timed, causal = replace(backbone, time_conditioning=True), replace(backbone, causal=True)
    rows: list[tuple[str, str, MethodConfig, DiTConfig]] = [
        ("MDLM", "mdlm", MDLMConfig(t_low=t_low), backbone),
        ("VADD", "vadd", vadd, backbone),
        ("E-MoE", "emoe", emoe, backbone),
        ("E-MoE with free nats, which keep its blocks in use,", "emoe-free-nats", free_nats, backbone),
        ("The autoregressive baseline", "ar", ARConfig(), causal),
        ("SEDD, with the time as an input,", "sedd", SEDDConfig(t_low=t_low), timed),
        (f"BD3-LM with blocks of {block} tokens", "bd3lm", BD3LMConfig(t_low=t_low, block=block), backbone),
    ]
    for doc, key, method, network in rows:
        old = f"{prefix}-emoe-plus" if key == "emoe-free-nats" else None
        register(__name__, f"{doc} on {where}.", build(f"{prefix}-{key}", method, network), old=old)


def _free_nats(emoe: EMoEConfig, floor: float, nats: float, every: int) -> EMoEConfig:
    """E-MoE whose blocks stay in use: all of them, or every second one, and most of their experts.

    The first nats of such a block are free, so that it finds a use for them; a loss acts where the entropy of a block's
    usage is below `floor` nats; and the weight of a time comes to the KL over training, which lowers what a sampler of
    several calls pays for its routes (docs/decisions/0026-every-second-block.md).
    """
    growing = Linear(start=0.0, end=1.0)
    return replace(emoe, balance=0.3, usage_floor=floor, free_nats=nats, free_every=every, kl_time_power=growing)


# Floors in nats, of at most ln 8 = 2.08 and ln 4 = 1.39. Free nats per row: 0.02 per token of 128 in every second
# block, 0.01 of 32 in each. On news the temperature takes the same course as on LM1B, over fewer steps.
LM1B_EMOE = EMoEConfig(t_low=T_LOW, experts=8, top_k=2, relax_tau=Decay(rate=3e-5, floor=0.1))
NEWS_EMOE = EMoEConfig(t_low=T_LOW, experts=8, relax_tau=Decay(rate=4e-3, floor=0.1))
TINY_EMOE = EMoEConfig(t_low=TINY_T_LOW, experts=4, relax_tau=Decay(rate=5e-3, floor=0.1))
TINY = DiTConfig(width=32, depth=2, heads=2, hidden=64, cond_size=16, time_size=16, latent_hidden=32, dropout=0.0)

_family(
    "lm1b",
    "LM1B (App. B.3)",
    _lm1b,
    DiTConfig(),
    t_low=T_LOW,
    block=16,
    vadd=VADDConfig(t_low=T_LOW, latent=512, kl_weight=Linear(start=0.0, end=1.0, steps=100_000)),
    emoe=LM1B_EMOE,
    free_nats=_free_nats(LM1B_EMOE, 1.5, 2.8, 2),
)
_family(
    "news-small",
    "news, 36M parameters",
    _news,
    DiTConfig(width=384, depth=6, heads=6, hidden=1536, dropout=0.0),
    t_low=T_LOW,
    block=16,
    vadd=VADDConfig(t_low=T_LOW, latent=256, kl_weight=Linear(start=0.0, end=1.0, share=0.1)),
    emoe=NEWS_EMOE,
    free_nats=_free_nats(NEWS_EMOE, 1.5, 2.8, 2),
)
_family(
    "text-tiny",
    "a small text of your own, seconds on a CPU",
    _tiny,
    TINY,
    t_low=TINY_T_LOW,
    block=4,
    vadd=VADDConfig(t_low=TINY_T_LOW, latent=8, kl_weight=Linear(start=0.0, end=1.0, share=0.3)),
    emoe=TINY_EMOE,
    free_nats=_free_nats(TINY_EMOE, 1.2, 0.3, 1),
)
