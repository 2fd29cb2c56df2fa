"""The toy transformer of App. B.1: pre-norm blocks over rows of tokens, dense or with routed experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from emoe.backbones.base import Backbone, BackboneConfig
from emoe.backbones.layers import Attention, RoutedMLP, held, kept, time_features, token_logits
from emoe.config import option
from emoe.routing.experts import Dispatch
from emoe.types import BackboneOut, Gate, Route, TokenSpace, Wants

# With the default of 1 a token's own embedding drowns what attention adds, so that its router sees little of the
# others; at 0.02 some runs did not find their latent at all (docs/decisions/0015-initialisation.md).
EMBEDDING_STD = 0.2


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
    router_std: float = option(0.0, doc="standard deviation of a router's first weights", low=0)
    router_norm: bool = option(False, doc="a LayerNorm of its own before each router")
    router_cap: float | None = option(
        None, doc="soft cap c * tanh(logits / c) of router logits; none = no cap", above=0
    )

    def conflicts(self) -> Iterator[str]:
        """Heads must divide the width, time features come in pairs."""
        if self.width % self.heads:
            yield f"heads: must divide width = {self.width}, got {self.heads}"
        if self.time_size % 2:
            yield f"time_size: must be even, got {self.time_size}"

    def build(self, space: TokenSpace, wants: Wants) -> Transformer:
        """Make the denoiser."""
        return Transformer(self, space, wants)

    def build_encoder(self, space: TokenSpace, wants: Wants) -> Encoder:
        """Make a recognition encoder of the same size."""
        return Encoder(self, space, wants.encoder)


class Block(nn.Module):
    """x + attention(norm x), then x + MLP(norm x); the MLP is dense or routed."""

    def __init__(self, config: TransformerConfig, experts: int):
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config.width, config.heads)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp: nn.Module
        if experts:
            self.mlp = RoutedMLP(
                config.width,
                config.hidden,
                experts,
                config.dispatch,
                std=config.router_std,
                norm=config.router_norm,
                cap=config.router_cap,
            )
        else:
            self.mlp = nn.Sequential(
                nn.Linear(config.width, config.hidden), nn.GELU(), nn.Linear(config.hidden, config.width)
            )

    def forward(
        self, h: Float[Tensor, "B L K"], number: int, route: Route | None
    ) -> tuple[Float[Tensor, "_B L K"], Float[Tensor, "B L E"] | None, Gate | None]:
        """Features of the rows that the gate keeps; router logits of all rows; the gate."""
        h, u = self._attend(h)
        if not isinstance(self.mlp, RoutedMLP):
            return h + self.mlp(u), None, None
        if route is None:
            raise ValueError("a routed backbone needs a route policy")
        logits, gate = self.mlp.route(u, number, route)
        return kept(h, gate) + self.mlp.experts(held(u, gate), gate), logits, gate

    def every(self, h: Float[Tensor, "B L K"]) -> tuple[Float[Tensor, "E B L K"], Float[Tensor, "B L E"]]:
        """Features under each expert, and the router logits."""
        if not isinstance(self.mlp, RoutedMLP):
            raise ValueError("a dense backbone has no experts to run")
        h, u = self._attend(h)
        return h + self.mlp.experts.every(u), self.mlp.router(u)

    def _attend(self, h: Float[Tensor, "B L K"]) -> tuple[Float[Tensor, "B L K"], Float[Tensor, "B L K"]]:
        h = h + self.attention(self.attention_norm(h))
        return h, self.mlp_norm(h)


class Trunk(nn.Module):
    """Embeddings and blocks, shared by denoiser and encoder."""

    def __init__(self, config: TransformerConfig, space: TokenSpace, wants: Wants):
        super().__init__()
        self.time_size = config.time_size
        self.token = nn.Embedding(space.size, config.width)
        self.position = nn.Embedding(space.length, config.width)
        for table in (self.token, self.position):
            nn.init.normal_(table.weight, std=EMBEDDING_STD)
        self.time = nn.Sequential(
            nn.Linear(config.time_size, config.width), nn.SiLU(), nn.Linear(config.width, config.width)
        )
        self.cond = nn.Linear(wants.cond, config.width) if wants.cond else None
        self.mark = nn.Parameter(0.02 * torch.randn(config.width)) if wants.marks else None
        self.blocks = nn.ModuleList(Block(config, wants.experts) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.width)

    def forward(
        self,
        x: Int[Tensor, "B L"],
        t: Float[Tensor, " B"],
        cond: Float[Tensor, "B Z"] | None,
        marks: Bool[Tensor, "B L"] | None,
        route: Route | None,
    ) -> tuple[Float[Tensor, "_B L K"], list[Float[Tensor, "_B L E"]], list[Gate]]:
        """Features of the rows that are kept, router logits of all rows, gates."""
        h = self._embed(x, t, cond, marks)
        logits: list[Tensor] = []
        gates: list[Gate] = []
        for block in self.blocks:
            h, logits_d, gate = block(h, len(gates), route)
            if gate is not None:
                logits.append(logits_d)
                gates.append(gate)
        return self.norm(h), logits, gates

    def every(
        self, x: Int[Tensor, "B L"], t: Float[Tensor, " B"], marks: Bool[Tensor, "B L"] | None, route: Route
    ) -> tuple[Float[Tensor, "E _B L K"], list[Float[Tensor, "_B L E"]]]:
        """Features under each expert of the last block, and the router logits of all blocks."""
        h = self._embed(x, t, None, marks)
        logits: list[Tensor] = []
        for block in self.blocks[:-1]:
            h, logits_d, _ = block(h, len(logits), route)
            logits.append(logits_d)
        last = self.blocks[-1]
        assert isinstance(last, Block)
        h, logits_d = last.every(h)
        return self.norm(h), [*logits, logits_d]

    def _embed(
        self,
        x: Int[Tensor, "B L"],
        t: Float[Tensor, " B"],
        cond: Float[Tensor, "B Z"] | None,
        marks: Bool[Tensor, "B L"] | None,
    ) -> Float[Tensor, "B L K"]:
        dtype = self.token.weight.dtype
        h = self.token(x) + self.position.weight + self.time(time_features(t.to(dtype), self.time_size))[:, None]
        if self.cond is not None:
            h = h + self.cond(cond)[:, None]
        if self.mark is not None and marks is not None:
            h = h + marks[..., None].to(dtype) * self.mark
        return h


class Transformer(Backbone):
    """Denoiser: a row of tokens to logits over all symbols but the mask, which gets -inf."""

    def __init__(self, config: TransformerConfig, space: TokenSpace, wants: Wants):
        super().__init__()
        self.routed_blocks = config.depth if wants.experts else 0
        self.mask_id = space.mask_id
        self.trunk = Trunk(config, space, wants)
        self.head = nn.Linear(config.width, space.size - 1)

    def forward(
        self,
        x: Int[Tensor, "B L"],
        t: Float[Tensor, " B"],
        *,
        cond: Float[Tensor, "B Z"] | None = None,
        marks: Bool[Tensor, "B L"] | None = None,
        route: Route | None = None,
    ) -> BackboneOut:
        """See `Backbone.forward`."""
        h, route_logits, gates = self.trunk(x, t, cond, marks, route)
        return BackboneOut(self._read(h), tuple(route_logits), tuple(gates))

    def forward_last(
        self, x: Int[Tensor, "B L"], t: Float[Tensor, " B"], *, marks: Bool[Tensor, "B L"] | None = None, route: Route
    ) -> tuple[Float[Tensor, "E _B L V"], tuple[Float[Tensor, "_B L E"], ...]]:
        """See `Backbone.forward_last`: no attention follows the last block."""
        h, route_logits = self.trunk.every(x, t, marks, route)
        return self._read(h), tuple(route_logits)

    def _read(self, h: Float[Tensor, "*B L K"]) -> Float[Tensor, "*B L V"]:
        return token_logits(self.head(h), self.mask_id)


class Encoder(nn.Module):
    """Recognition network: clean row, time and mask pattern to a vector, by mean pooling over positions."""

    def __init__(self, config: TransformerConfig, space: TokenSpace, outputs: int):
        super().__init__()
        self.trunk = Trunk(config, space, Wants(marks=True))
        self.head = nn.Linear(config.width, outputs)

    def forward(
        self, x0: Int[Tensor, "B L"], t: Float[Tensor, " B"], marks: Bool[Tensor, "B L"]
    ) -> Float[Tensor, "B O"]:
        """(x0, t, mask pattern) -> parameters of the posterior."""
        h, _, _ = self.trunk(x0, t, None, marks, None)
        return self.head(h.mean(1))
