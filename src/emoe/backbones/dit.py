"""The diffusion transformer for text: rotary positions, adaptive LayerNorm (adaLN), dense or routed MLPs.

Sizes and layers are those of the DiT that MDLM and its successors train on LM1B. Letters: K width, C size of the
conditioning vector, H heads, R = K / H / 2 rotated pairs in each head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as nnf

from emoe.backbones.attention import Cache, RotaryAttention, View, rotary_angles
from emoe.backbones.base import Backbone, BackboneConfig, at_least_single
from emoe.backbones.layers import Dropout, Flow, RouterConfig, mlp_of, repeat_rows, silu_mlp, time_features, zeroed
from emoe.config import option
from emoe.diffusion.head import product_dtype
from emoe.kernels import compiled
from emoe.routing.experts import Dispatch
from emoe.types import Features, Latents, Needs, PerRow, Positions, Route, Tokens, TokenSpace


@dataclass(frozen=True, kw_only=True)
class DiTConfig(BackboneConfig, kind="dit"):
    """Sizes of the small network of the paper's language experiments."""

    supports: ClassVar[frozenset[str]] = frozenset({"experts", "cond", "marks", "encoder", "causal", "attend", "time"})

    width: int = option(768, doc="model dimension", low=1)
    depth: int = option(12, doc="number of blocks D", low=1)
    heads: int = option(12, doc="attention heads; must divide the width into even parts", low=1)
    hidden: int = option(3072, doc="hidden size of each MLP or expert", low=1)
    cond_size: int = option(128, doc="size of the vector from which adaLN takes shift, scale and gate", low=1)
    time_size: int = option(256, doc="size of the sinusoidal time features; even", low=2)
    latent_hidden: int = option(512, doc="hidden size of the map from a latent vector to the conditioning", low=1)
    dropout: float = option(0.1, doc="dropout of the outputs of attention and MLP, in training", low=0, high=0.9)
    rotary_base: float = option(10_000.0, doc="base of the rotary frequencies", above=1)
    time_conditioning: bool = option(False, doc="condition adaLN on the time; false: on time 0, as in MDLM")
    causal: bool = option(False, doc="each position attends to itself and earlier ones, without adaLN (AR)")
    dispatch: Dispatch = option("auto", doc="how experts are run; auto chooses by device")
    router: RouterConfig = option(RouterConfig(bias=False), doc="options of the routers")

    def conflicts(self) -> Iterator[str]:
        if self.width % (2 * self.heads):
            yield f"heads: must divide width = {self.width} into even parts (rotary pairs), got {self.heads}"
        if self.time_size % 2:
            yield f"time_size: must be even, got {self.time_size}"
        if self.causal and self.time_conditioning:
            yield "time_conditioning: a causal network has no adaLN that could see the time; set it to false"

    def unsupported(self, needs: Needs) -> Iterator[str]:
        yield from super().unsupported(needs)
        if needs.causal and not self.causal:
            yield "backbone.causal: must be true, since the method predicts each token from those before it"
        elif self.causal and not needs.causal:
            yield "backbone.causal: must be false, since the method reads tokens on both sides of a mask"
        elif self.causal:
            for name in sorted(needs.names() & self.supports - {"causal"}):
                yield f"backbone: a causal 'dit' has no {name!r}, which the method needs"
        if needs.time and not self.time_conditioning:
            yield "backbone.time_conditioning: must be true, since the prediction of the method depends on the time"
        if needs.attend and self.time_conditioning:
            yield "backbone.time_conditioning: must be false, since parts of a row have times of their own"

    def build(self, space: TokenSpace, needs: Needs) -> DiT:
        return DiT(self, space, needs)

    def build_encoder(self, space: TokenSpace, needs: Needs) -> Encoder:
        return Encoder(self, space, needs.encoder)


@compiled
def normed(
    x: Float[Tensor, "*B K"],
    weight: Float[Tensor, " K"],
    shift: Float[Tensor, "B 1 K"] | None = None,
    scale: Float[Tensor, "B 1 K"] | None = None,
    dtype: torch.dtype | None = None,
) -> Float[Tensor, "*B K"]:
    """Return (1 + scale) * norm(x) + shift in `dtype`, by default that of x; the norm in at least single precision."""
    precise = torch.promote_types(x.dtype, torch.float32)
    u = nnf.layer_norm(x.to(precise), weight.shape, weight.to(precise)).to(x.dtype)
    if shift is not None and scale is not None:
        u = (1 + scale) * u + shift
    return u if dtype is None else u.to(dtype)


@compiled
def added(h: Float[Tensor, "B L K"], out: Float[Tensor, "B L K"], strength: Float[Tensor, "B 1 K"] | None) -> Tensor:
    """Return h + strength * out."""
    return h + (out if strength is None else strength * out)


def adaln(
    layer: nn.Linear | None, c: Float[Tensor, "B C"] | None, parts: int, like: Tensor
) -> tuple[Float[Tensor, "B 1 K"] | None, ...]:
    """Split the layer's output, if any, in the precision of the features: in bf16, 1 + scale would lose much."""
    return (None,) * parts if layer is None else layer(c).to(like.dtype)[:, None].chunk(parts, dim=-1)


class Block(nn.Module):
    """h + strength * dropout(f((1 + scale) * norm(h) + shift)) for f attention, then for f an MLP, dense or routed.

    Shift, scale and strength (the "gate" of adaLN, not a route's) are linear in the conditioning vector and start at
    zero, so that the block starts as the identity. A causal block has none of them.
    """

    def __init__(self, config: DiTConfig, number: int, experts: int):
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width, bias=False)
        self.attention = RotaryAttention(config.width, config.heads, number)
        self.mlp_norm = nn.LayerNorm(config.width, bias=False)
        self.mlp = mlp_of(config, experts, "gelu-tanh")
        self.dropout = Dropout(config.dropout)
        self.adaln = None if config.causal else zeroed(nn.Linear(config.cond_size, 6 * config.width))

    def forward(
        self, h: Float[Tensor, "B L K"], c: Float[Tensor, "B C"] | None, flow: Flow, view: View
    ) -> Float[Tensor, "_B L K"]:
        dtype = product_dtype(h)  # all that reads u is a matrix product
        shift, scale, strength, mlp_shift, mlp_scale, mlp_strength = adaln(self.adaln, c, 6, h)
        u = normed(h, self.attention_norm.weight, shift, scale, dtype)
        h = added(h, self.dropout(self.attention(u, view)), strength)
        out, gate = self.mlp(normed(h, self.mlp_norm.weight, mlp_shift, mlp_scale, dtype), flow)
        mlp_strength = None if mlp_strength is None else repeat_rows(mlp_strength, gate)
        return added(repeat_rows(h, gate), self.dropout(out), mlp_strength)


class Trunk(nn.Module):
    """Embedding, blocks, and the last norm with its modulation; shared by denoiser and encoder.

    The conditioning vector is c = SiLU(MLP(features of sigma) + MLP(z)), the second only with a latent. Whatever the
    method's schedule, sigma is that of the log-linear one, -log(1 - (1 - eps) t) with eps = 0.001: a finite, increasing
    measure of time. Without `time_conditioning` it is 0.
    """

    def __init__(self, config: DiTConfig, space: TokenSpace, needs: Needs):
        super().__init__()
        self.config = config
        self.token = nn.Embedding(space.size, config.width)
        nn.init.kaiming_uniform_(self.token.weight, a=math.sqrt(5))
        self.mark = nn.Parameter(0.02 * torch.randn(config.width)) if needs.marks else None
        self.time = self.latent = self.adaln = None
        if not config.causal:
            size, hidden = config.cond_size, config.latent_hidden
            self.time = silu_mlp(config.time_size, size, size)
            self.latent = silu_mlp(needs.cond, hidden, hidden, size) if needs.cond else None
            self.adaln = zeroed(nn.Linear(size, 2 * config.width))
        self.blocks = nn.ModuleList(Block(config, number, needs.experts) for number in range(config.depth))
        self.norm = nn.LayerNorm(config.width, bias=False)

    def forward(
        self,
        h: Float[Tensor, "B L K"],
        t: PerRow,
        *,
        cond: Latents = None,
        route: Route | None = None,
        attend: Bool[Tensor, "L M"] | None = None,
        positions: Int[Tensor, " L"] | None = None,
        cache: Cache | None = None,
    ) -> Features:
        """Return features from embeddings, whose number L may differ from the length of the token space.

        `attend` says which position (row) attends to which (column): by default to all, or to earlier ones if causal.
        `positions`, by which queries and keys are rotated, are 0..L-1 by default. For `cache` see `DiT.extend`.
        """
        positions = torch.arange(h.shape[1], device=h.device) if positions is None else positions
        flow, c, view = Flow(route), self._condition(t, cond), self._view(positions, attend, cache)
        for block in self.blocks:
            h = block(h, c, flow, view)
            c = repeat_rows(c, flow.gates[-1]) if flow.gates and c is not None else c
        h = normed(h, self.norm.weight)
        shift, scale = adaln(self.adaln, c, 2, h)
        return flow.features(h if shift is None or scale is None else (1 + scale) * h + shift)

    def embed(self, x: Tokens, marks: Positions | None) -> Float[Tensor, "B L K"]:
        h = self.token(x)
        return h if self.mark is None or marks is None else h + marks[..., None].to(h.dtype) * self.mark

    def _condition(self, t: PerRow, cond: Latents) -> Float[Tensor, "B C"] | None:
        if self.time is None:
            return None
        t = t.to(self.token.weight.dtype)
        sigma = -torch.log1p(-(1 - 1e-3) * t) if self.config.time_conditioning else torch.zeros_like(t)
        c = self.time(time_features(sigma / 1000, self.config.time_size))
        if self.latent is not None:
            if cond is None:
                raise ValueError("a backbone with a latent needs cond")
            c = c + self.latent(cond.to(t.dtype))
        return nnf.silu(c)

    def _view(self, positions: Int[Tensor, " L"], attend: Bool[Tensor, "L M"] | None, cache: Cache | None) -> View:
        dtype = torch.promote_types(self.token.weight.dtype, torch.float32)
        pairs = self.config.width // self.config.heads // 2
        angles = rotary_angles(positions, pairs, self.config.rotary_base, dtype)
        return View(angles.cos(), angles.sin(), attend, self.config.causal and attend is None, cache)


class DiT(Backbone):
    """Denoiser: a row of tokens to logits over V symbols, of which the mask gets -inf; the published sizes count it.

    Head and adaLN start at zero: the first logits are 0, and every symbol but the mask has probability 1 / (V - 1).
    With `causal` position l reads the tokens 0..l alone, there is no adaLN, and t has no meaning; see `extend`.
    """

    def __init__(self, config: DiTConfig, space: TokenSpace, needs: Needs):
        super().__init__()
        self.routed_blocks = config.depth if needs.experts else 0
        self.mask_id, self.length = space.mask_id, space.length
        self.trunk = Trunk(config, space, needs)
        self.head = zeroed(nn.Linear(config.width, space.size))

    def forward(self, x: Tokens, t: PerRow, *, marks: Positions | None = None, **inputs: Any) -> Features:
        return self.trunk(self.trunk.embed(x, marks), t, **inputs)

    def new_cache(self) -> Cache:
        """Return an empty cache for `extend`, with room for the length of the token space."""
        return Cache(self.length)

    @torch.no_grad()
    def extend(
        self, x: Int[Tensor, "B N"], cache: Cache, *, attend: Bool[Tensor, "N M"] | None = None, keep: int | None = None
    ) -> Float[Tensor, "B _N V"]:
        """Add N tokens to those in a cache and return their logits; with `keep` add that many and return the others'.

        Equal to the last positions of one call on all tokens so far, as long as no position attends to a later one that
        is not cached with it: then keys and values of old positions do not change. This holds for a causal network; any
        other needs `attend` (which new position attends to which of the M = old + N) and must not read the time.
        """
        config, old, new = self.trunk.config, cache.length, x.shape[1]
        if not config.causal and (attend is None or config.time_conditioning):
            raise ValueError("extend: a network that is not causal needs `attend` and must not read the time")
        positions = torch.arange(old, old + new, device=x.device)
        if attend is None and old:  # without a past the causal path is faster
            attend = positions[:, None] >= torch.arange(old + new, device=x.device)
        t = torch.zeros(len(x), device=x.device)
        h = self(x, t, attend=attend, positions=positions, cache=cache).h
        cache.length += new if keep is None else keep
        return self.read(h if keep is None else h[:, keep:])


class Encoder(nn.Module):
    """Recognition network: clean row, time and mask pattern to a vector, by mean pooling over positions.

    The same network with another head, which starts like any linear layer, not at zero. Positions that are masked in xt
    are marked by the embedding of the mask, which a clean row never uses: the mask pattern takes no parameters.
    """

    def __init__(self, config: DiTConfig, space: TokenSpace, outputs: int):
        super().__init__()
        self.mask_id = space.mask_id
        self.trunk = Trunk(config, space, Needs())
        self.head = nn.Linear(config.width, outputs)

    def forward(self, x0: Tokens, t: PerRow, marks: Positions) -> Float[Tensor, "B O"]:
        h = self.trunk.embed(x0, None)
        h = h + marks[..., None].to(h.dtype) * self.trunk.token.weight[self.mask_id]
        return at_least_single(self.head(self.trunk(h, t).h.mean(1)))
