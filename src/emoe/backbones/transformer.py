"""The toy transformer of App. B.1: pre-norm blocks over rows of tokens, dense or with routed experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from emoe.backbones.base import Backbone, BackboneConfig
from emoe.backbones.layers import Attention, Flow, RouterConfig, mlp_of, repeat_rows, silu_mlp, time_features
from emoe.config import option
from emoe.routing.experts import Dispatch
from emoe.types import Features, Latents, Needs, PerRow, Positions, Route, Tokens, TokenSpace

EMBEDDING_STD = 0.2  # with 1, other tokens hardly affect a router (docs/decisions/0015-initialisation.md)


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(BackboneConfig, kind="transformer"):
    """Sizes as in Table "Toy hyperparameters"."""

    supports: ClassVar[frozenset[str]] = frozenset({"experts", "cond", "marks", "encoder", "time"})

    width: int = option(128, doc="model dimension", low=1)
    depth: int = option(2, doc="number of blocks D", low=1)
    heads: int = option(4, doc="attention heads; must divide the width", low=1)
    hidden: int = option(512, doc="hidden size of each MLP or expert", low=1)
    time_size: int = option(64, doc="size of the sinusoidal time features; even", low=2)
    dispatch: Dispatch = option("auto", doc="how experts are run; auto chooses by device")
    router: RouterConfig = option(RouterConfig(), doc="options of the routers")

    def conflicts(self) -> Iterator[str]:
        if self.width % self.heads:
            yield f"heads: must divide width = {self.width}, got {self.heads}"
        if self.time_size % 2:
            yield f"time_size: must be even, got {self.time_size}"

    def build(self, space: TokenSpace, needs: Needs) -> Transformer:
        return Transformer(self, space, needs)

    def build_encoder(self, space: TokenSpace, needs: Needs) -> Encoder:
        return Encoder(self, space, needs.encoder)


class Block(nn.Module):
    """x + attention(norm x), then x + MLP(norm x); the MLP is dense or routed."""

    def __init__(self, config: TransformerConfig, experts: int):
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config.width, config.heads)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = mlp_of(config, experts)

    def forward(self, h: Float[Tensor, "B L K"], flow: Flow) -> Float[Tensor, "_B L K"]:
        h = h + self.attention(self.attention_norm(h))
        out, gate = self.mlp(self.mlp_norm(h), flow)
        return repeat_rows(h, gate) + out


class Trunk(nn.Module):
    """Embeddings and blocks, shared by denoiser and encoder."""

    def __init__(self, config: TransformerConfig, space: TokenSpace, needs: Needs):
        super().__init__()
        self.time_size = config.time_size
        self.token = nn.Embedding(space.size, config.width)
        self.position = nn.Embedding(space.length, config.width)
        for table in (self.token, self.position):
            nn.init.normal_(table.weight, std=EMBEDDING_STD)
        self.time = silu_mlp(config.time_size, config.width, config.width)
        self.cond = nn.Linear(needs.cond, config.width) if needs.cond else None
        self.mark = nn.Parameter(0.02 * torch.randn(config.width)) if needs.marks else None
        self.blocks = nn.ModuleList(Block(config, needs.experts) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.width)

    def forward(
        self, x: Tokens, t: PerRow, *, cond: Latents = None, marks: Positions | None = None, route: Route | None = None
    ) -> Features:
        dtype, flow = self.token.weight.dtype, Flow(route)
        h = self.token(x) + self.position.weight + self.time(time_features(t.to(dtype), self.time_size))[:, None]
        if self.cond is not None:
            h = h + self.cond(cond)[:, None]
        if self.mark is not None and marks is not None:
            h = h + marks[..., None].to(dtype) * self.mark
        for block in self.blocks:
            h = block(h, flow)
        return flow.features(self.norm(h))


class Transformer(Backbone):
    """Denoiser: a row of tokens to logits over all symbols but the mask, which gets -inf."""

    has_mask_output = False

    def __init__(self, config: TransformerConfig, space: TokenSpace, needs: Needs):
        super().__init__()
        self.routed_blocks = config.depth if needs.experts else 0
        self.mask_id = space.mask_id
        self.trunk = Trunk(config, space, needs)
        self.head = nn.Linear(config.width, space.size - 1)

    def forward(self, x: Tokens, t: PerRow, **inputs: Any) -> Features:
        return self.trunk(x, t, **inputs)


class Encoder(nn.Module):
    """Recognition network: clean row, time and mask pattern to a vector, by mean pooling over positions."""

    def __init__(self, config: TransformerConfig, space: TokenSpace, outputs: int):
        super().__init__()
        self.trunk = Trunk(config, space, Needs(marks=True))
        self.head = nn.Linear(config.width, outputs)

    def forward(self, x0: Tokens, t: PerRow, marks: Positions) -> Float[Tensor, "B O"]:
        return self.head(self.trunk(x0, t, marks=marks).h.mean(1))
