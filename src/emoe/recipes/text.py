"""Text: the paper's LM1B experiment (App. B.3), news for one GPU, and a small size for tests.

The rows are a set of `emoe data prepare`: sets/lm1b, sets/news or sets/text, unless --domain.path is another one
(docs/guides/text.md).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

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

Options = dict[str, Any]
NFE = (1, 2, 4, 8, 16, 32, 64, 128)  # up to the tokens of a row
RAMP = Linear(start=0.0, end=1.0)
# t ~ U[0.001, 1], as in the code that the paper builds on. The logits of 16,384 positions and 30,522 symbols take 1 GB.
# There is room for 55 % of all positions; of the positions of 256 rows 0.500 +- 0.002 are masked.
LARGE: Options = {"t_low": 1e-3, "head_chunk": 16_384, "head_share": 0.55}


def _family(where: str, mdlm: Experiment, *, block: int, vadd: Options, emoe: Options, free_nats: Options) -> None:
    """Register MDLM and, with the same data and training, the other methods.

    With free nats all of E-MoE's blocks, or every second one, and most of their experts stay in use: the first nats of
    such a block cost nothing; a loss keeps the entropy of a block's usage above a floor; and the KL gets the weight of
    its time in the course of training, for samplers of several calls (docs/decisions/0026-every-second-block.md).
    """
    shared = {name: getattr(mdlm.method, name) for name in ("t_low", "head_chunk", "head_share")}
    free_nats = emoe | {"balance": 0.3, "kl_time_power": RAMP} | free_nats
    rows: list[tuple[str, str, MethodConfig]] = [
        ("MDLM", "mdlm", mdlm.method),
        ("VADD", "vadd", VADDConfig(**shared, **vadd)),
        ("E-MoE", "emoe", EMoEConfig(**shared, **emoe)),
        ("E-MoE with free nats, which keep its blocks in use,", "emoe-free-nats", EMoEConfig(**shared, **free_nats)),
        ("The autoregressive baseline", "ar", ARConfig(head_chunk=mdlm.method.head_chunk)),
        ("SEDD, with the time as an input,", "sedd", SEDDConfig(**shared)),
        (f"BD3-LM with blocks of {block} tokens", "bd3lm", BD3LMConfig(**shared, block=block)),
    ]
    network: Any = mdlm.backbone
    networks = {"ar": replace(network, causal=True), "sedd": replace(network, time_conditioning=True)}
    for label, key, method in rows:
        nfe = method.allowed_nfe(mdlm.eval.nfe, max(mdlm.eval.nfe))
        name, evaluation = mdlm.name.replace("mdlm", key), replace(mdlm.eval, nfe=nfe)
        experiment = replace(mdlm, name=name, backbone=networks.get(key, network), method=method, eval=evaluation)
        register(__name__, f"{label} on {where}.", experiment)


# The table of App. B.3: DiT-small, a million steps, constant learning rate.
_family(
    "LM1B (App. B.3)",
    Experiment(
        name="lm1b-mdlm",
        domain=TextConfig(path="sets/lm1b"),
        backbone=DiTConfig(),
        method=MDLMConfig(**LARGE),
        optim=OptimConfig(algorithm="adamw", lr=3e-4, warmup=2_500, schedule="constant"),
        train=TrainConfig(steps=1_000_000, batch=512, ema=0.9999, precision="bf16", log_every=500, save_every=10_000),
        eval=EvalConfig(nfe=NFE, samples=2_000, batch=250),
    ),
    block=16,
    vadd={"latent": 512, "kl_weight": replace(RAMP, steps=100_000)},
    emoe={"experts": 8, "relax_tau": Decay(rate=3e-5, floor=0.1)},
    # Of at most ln 8 = 2.08 nats; 0.02 free nats per token of 128 in every second block.
    free_nats={"usage_floor": 1.5, "free_nats": 2.8, "free_every": 2},
)
# Half the width, depth and batch, 7,500 steps (246M tokens); twice the learning rate, which decays; no dropout. The
# temperature takes the same course over fewer steps.
_family(
    "news, 36M parameters",
    Experiment(
        name="news-small-mdlm",
        domain=TextConfig(path="sets/news"),
        backbone=DiTConfig(width=384, depth=6, heads=6, hidden=1536, dropout=0.0),
        method=MDLMConfig(**LARGE),
        optim=OptimConfig(algorithm="adamw", lr=6e-4, warmup=500, floor=0.1),
        train=TrainConfig(steps=7_500, batch=256, ema=0.999, precision="bf16", save_every=2_500),
        eval=EvalConfig(nfe=NFE, samples=1_000, batch=250),
    ),
    block=16,
    vadd={"latent": 256, "kl_weight": replace(RAMP, share=0.1)},
    emoe={"experts": 8, "relax_tau": Decay(rate=4e-3, floor=0.1)},
    free_nats={"usage_floor": 1.5, "free_nats": 2.8, "free_every": 2},
)
# For small vocabularies and rows of 16 tokens.
_family(
    "a small text of your own, seconds on a CPU",
    Experiment(
        name="text-tiny-mdlm",
        domain=TextConfig(path="sets/text"),
        backbone=DiTConfig(
            width=32, depth=2, heads=2, hidden=64, cond_size=16, time_size=16, latent_hidden=32, dropout=0.0
        ),
        method=MDLMConfig(t_low=1 / 64),
        optim=OptimConfig(algorithm="adamw", lr=1e-2, warmup=20, floor=0.1),
        train=TrainConfig(steps=400, batch=32, ema=0.98, precision="fp32", log_every=50, save_every=200),
        eval=EvalConfig(nfe=(1, 2, 4, 8, 16), samples=200, batch=200),
    ),
    block=4,
    vadd={"latent": 8, "kl_weight": replace(RAMP, share=0.3)},
    emoe={"experts": 4, "relax_tau": Decay(rate=5e-3, floor=0.1)},
    # Of at most ln 4 = 1.39 nats; 0.01 free nats per token of 32 in each block.
    free_nats={"usage_floor": 1.2, "free_nats": 0.3},
)
