"""The diffusion transformer for text: rotary positions, adaptive LayerNorm (adaLN), dense or routed MLPs.

Sizes and layers are those of the DiT that MDLM and its successors train on LM1B. Letters: K width, C size of the
conditioning vector, H heads, R = K / H / 2 rotated pairs in each head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as nnf

from emoe.backbones.base import Backbone, BackboneConfig
from emoe.backbones.layers import Dropout, RoutedMLP, held, kept, time_features
from emoe.config import ConfigError, option
from emoe.diffusion.chunks import product_dtype
from emoe.diffusion.masking import NEG_INF
from emoe.kernels import compiled
from emoe.routing.experts import Dispatch
from emoe.types import BackboneOut, Gate, Route, TokenSpace, Wants

SIGMA_EPS = 1e-3  # share of clean tokens at t = 1 in the schedule by which the time is measured


@dataclass(frozen=True, kw_only=True)
class DiTConfig(BackboneConfig, kind="dit"):
    """Sizes of the small network of the paper's language experiments."""

    supports: ClassVar[frozenset[str]] = frozenset(
        {"experts", "cond", "marks", "encoder", "causal", "attend", "time", "head_chunk"}
    )

    width: int = option(768, doc="model dimension", low=1)
    depth: int = option(12, doc="number of blocks D", low=1)
    heads: int = option(12, doc="attention heads; must divide the width into even parts", low=1)
    hidden: int = option(3072, doc="hidden size of each MLP or expert", low=1)
    cond_size: int = option(128, doc="size of the vector from which adaLN takes shift, scale and gate", low=1)
    time_size: int = option(256, doc="size of the sinusoidal time features; even", low=2)
    latent_hidden: int = option(512, doc="hidden size of the map from a latent vector to the conditioning", low=1)
    dropout: float = option(0.1, doc="dropout of what attention and MLP add, in training", low=0, high=0.9)
    rotary_base: float = option(10_000.0, doc="base of the rotary frequencies", above=1)
    time_conditioning: bool = option(False, doc="let adaLN see the time; false: it sees time 0 always, as in MDLM")
    causal: bool = option(False, doc="each position sees itself and earlier ones, and there is no adaLN (AR)")
    dispatch: Dispatch = option("auto", doc="how experts are run; auto chooses by device")
    router_std: float = option(0.0, doc="standard deviation of a router's first weights", low=0)
    router_bias: bool = option(False, doc="a bias in each router")
    router_norm: bool = option(False, doc="a LayerNorm of its own before each router")
    router_cap: float | None = option(
        None, doc="soft cap c * tanh(logits / c) of router logits; none = no cap", above=0
    )

    def conflicts(self) -> Iterator[str]:
        """Heads must cut the width into even parts, time features come in pairs, a causal network has no time."""
        if self.width % (2 * self.heads):
            yield f"heads: must divide width = {self.width} into even parts (rotary pairs), got {self.heads}"
        if self.time_size % 2:
            yield f"time_size: must be even, got {self.time_size}"
        if self.causal and self.time_conditioning:
            yield "time_conditioning: a causal network has no adaLN that could see the time; set it to false"

    def refusals(self, wants: Wants) -> Iterator[str]:
        """One line for each wanted feature that is not there; causal networks are for methods that want one."""
        yield from super().refusals(wants)
        if wants.causal and not self.causal:
            yield "backbone.causal: must be true, since the method predicts each token from those before it"
        elif self.causal and not wants.causal:
            yield "backbone.causal: must be false, since the method reads tokens on both sides of a mask"
        elif self.causal:
            for name in sorted(wants.names() & self.supports - {"causal", "head_chunk"}):
                yield f"backbone: a causal 'dit' has no {name!r}, which the method needs"
        if wants.time and not self.time_conditioning:
            yield "backbone.time_conditioning: must be true, since what the method predicts depends on the time"
        if wants.attend and self.time_conditioning:
            yield "backbone.time_conditioning: must be false, since parts of a row have times of their own"

    def build(self, space: TokenSpace, wants: Wants) -> DiT:
        """Make the denoiser, or with `causal` the autoregressive network."""
        self._check(wants)
        return DiT(self, space, wants)

    def build_encoder(self, space: TokenSpace, wants: Wants) -> Encoder:
        """Make a recognition encoder of the same size."""
        self._check(wants)
        return Encoder(self, space, wants.encoder)

    def _check(self, wants: Wants) -> None:
        if lines := list(self.refusals(wants)):
            raise ConfigError(lines)


# --- Positions and attention -------------------------------------------------------------------------------------


@dataclass
class Cache:
    """What a network keeps of the tokens it has read: rotated keys and values of each block; see `extend`."""

    room: int  # positions there is room for
    length: int = 0  # positions read so far
    blocks: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def add(
        self, block: int, k: Float[Tensor, "B H N _C"], v: Float[Tensor, "B H N _C"]
    ) -> tuple[Float[Tensor, "B H M _C"], Float[Tensor, "B H M _C"]]:
        """Keys and values of a block with N new positions behind the `length` old ones; views, M = length + N."""
        if block == len(self.blocks):
            batch, heads, _, size = k.shape
            self.blocks.append((k.new_empty(batch, heads, self.room, size), v.new_empty(batch, heads, self.room, size)))
        end = self.length + k.shape[2]
        for past, new in zip(self.blocks[block], (k, v), strict=True):
            past[:, :, self.length : end] = new
        keys, values = self.blocks[block]
        return keys[:, :, :end], values[:, :, :end]


@dataclass(frozen=True)
class View:
    """From where positions attend, and to what; the same for all blocks of a call."""

    cos: Float[Tensor, "L R"]
    sin: Float[Tensor, "L R"]
    attend: Bool[Tensor, "L M"] | None = None  # None: everything, or if causal everything up to oneself
    causal: bool = False
    cache: Cache | None = None


def rotary_angles(positions: Int[Tensor, " L"], pairs: int, base: float, dtype: torch.dtype) -> Float[Tensor, "L R"]:
    """position * base^(-r / R) for the pairs r = 0..R-1 of a head."""
    frequency = base ** (-torch.arange(pairs, device=positions.device, dtype=dtype) / pairs)
    return positions.to(dtype)[:, None] * frequency


def rotate(
    x: Float[Tensor, "B L H C"], cos: Float[Tensor, "L R"], sin: Float[Tensor, "L R"]
) -> Float[Tensor, "B L H C"]:
    """Turn each pair (x_r, x_{r+R}) of a head by its angle (the half-split convention), in the precision of the angles.

    Products of a turned query and a turned key depend on their positions through the difference alone.
    """
    a, b = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


@compiled
def rotated(
    qkv: Float[Tensor, "B L 3 H C"], cos: Float[Tensor, "L R"], sin: Float[Tensor, "L R"]
) -> tuple[Float[Tensor, "B L H C"], Float[Tensor, "B L H C"], Float[Tensor, "B L H C"]]:
    """Queries and keys turned by their positions, and values; compiled as one, so are their gradients."""
    q, k, v = qkv.unbind(2)
    return rotate(q, cos, sin), rotate(k, cos, sin), v


class RotaryAttention(nn.Module):
    """Multi-head self-attention without biases; queries and keys are rotated by their positions."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Float[Tensor, "B L K"], block: int, view: View) -> Float[Tensor, "B L K"]:
        """Attend and project."""
        batch, length, width = x.shape
        parts = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        # Heads stay behind positions in memory, as in what attention gives back: then none of it is copied.
        q, k, v = (part.transpose(1, 2) for part in rotated(parts, view.cos, view.sin))
        if view.cache is not None:
            k, v = view.cache.add(block, k, v)
        causal = view.causal and view.attend is None
        mixed = nnf.scaled_dot_product_attention(q, k, v, attn_mask=view.attend, is_causal=causal)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


# --- Blocks ------------------------------------------------------------------------------------------------------


class Norm(nn.Module):
    """LayerNorm with a weight and no bias, computed in at least single precision."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Float[Tensor, "*B K"]) -> Float[Tensor, "*B K"]:
        """Normalise the last axis."""
        return normed(x, self.weight)


@compiled
def normed(
    x: Float[Tensor, "*B K"],
    weight: Float[Tensor, " K"],
    shift: Float[Tensor, "B 1 K"] | None = None,
    scale: Float[Tensor, "B 1 K"] | None = None,
    dtype: torch.dtype | None = None,
) -> Float[Tensor, "*B K"]:
    """(1 + scale) * norm(x) + shift, in a precision: that of x unless told."""
    precise = torch.promote_types(x.dtype, torch.float32)
    u = nnf.layer_norm(x.to(precise), weight.shape, weight.to(precise)).to(x.dtype)
    if shift is not None and scale is not None:
        u = (1 + scale) * u + shift
    return u if dtype is None else u.to(dtype)


@compiled
def added(
    h: Float[Tensor, "B L K"], out: Float[Tensor, "*E B L K"], strength: Float[Tensor, "B 1 K"] | None
) -> Float[Tensor, "*E B L K"]:
    """h + strength * out."""
    return h + (out if strength is None else strength * out)


def adaln(layer: nn.Linear, c: Float[Tensor, "B C"], parts: int, like: Tensor) -> tuple[Float[Tensor, "B 1 K"], ...]:
    """The layer's output in `parts`, in the precision of the features: 1 + scale in bf16 would lose small scales."""
    return layer(c).to(like.dtype)[:, None].chunk(parts, dim=-1)


def zeroed(layer: nn.Linear) -> nn.Linear:
    """The layer with weights and bias at zero."""
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    return layer


class Block(nn.Module):
    """h + strength * dropout(f((1 + scale) * norm(h) + shift)) for f attention, then for f an MLP, dense or routed.

    Shift, scale and strength (the "gate" of adaLN, not a route's) are linear in the conditioning vector
    and start at zero, so that the block starts as the identity. A causal block has none of them.
    """

    def __init__(self, config: DiTConfig, experts: int):
        super().__init__()
        self.attention_norm = Norm(config.width)
        self.attention = RotaryAttention(config.width, config.heads)
        self.mlp_norm = Norm(config.width)
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
                bias=config.router_bias,
                activation="gelu-tanh",
            )
        else:
            self.mlp = nn.Sequential(
                nn.Linear(config.width, config.hidden), nn.GELU("tanh"), nn.Linear(config.hidden, config.width)
            )
        self.dropout = Dropout(config.dropout)
        self.adaln = None if config.causal else zeroed(nn.Linear(config.cond_size, 6 * config.width))

    def forward(
        self, h: Float[Tensor, "B L K"], c: Float[Tensor, "B C"] | None, number: int, route: Route | None, view: View
    ) -> tuple[Float[Tensor, "_B L K"], Float[Tensor, "B L E"] | None, Gate | None]:
        """Features of the rows that the gate keeps; router logits of all rows; the gate."""
        h, u, strength = self._attend(h, c, number, view)
        if not isinstance(self.mlp, RoutedMLP):
            return self._add(h, self.mlp(u), strength), None, None
        if route is None:
            raise ValueError("a routed backbone needs a route policy")
        logits, gate = self.mlp.route(u, number, route)
        out = self.mlp.experts(held(u, gate), gate)
        return self._add(kept(h, gate), out, None if strength is None else kept(strength, gate)), logits, gate

    def every(
        self, h: Float[Tensor, "B L K"], c: Float[Tensor, "B C"] | None, number: int, view: View
    ) -> tuple[Float[Tensor, "E B L K"], Float[Tensor, "B L E"]]:
        """Features under each expert, and the router logits."""
        assert isinstance(self.mlp, RoutedMLP)
        h, u, strength = self._attend(h, c, number, view)
        return self._add(h, self.mlp.experts.every(u), strength), self.mlp.router(u)

    def _attend(
        self, h: Float[Tensor, "B L K"], c: Float[Tensor, "B C"] | None, number: int, view: View
    ) -> tuple[Float[Tensor, "B L K"], Float[Tensor, "B L K"], Float[Tensor, "B 1 K"] | None]:
        """Features after attention, what router and MLP read of them, and the strength of what these will add."""
        first, second = self.attention_norm.weight, self.mlp_norm.weight
        dtype = product_dtype(h)  # all that reads u is a matrix product
        if self.adaln is None:
            h = self._add(h, self.attention(normed(h, first, None, None, dtype), number, view), None)
            return h, normed(h, second, None, None, dtype), None
        assert c is not None
        shift, scale, strength, mlp_shift, mlp_scale, mlp_strength = adaln(self.adaln, c, 6, h)
        u = normed(h, first, shift, scale, dtype)
        h = self._add(h, self.attention(u, number, view), strength)
        return h, normed(h, second, mlp_shift, mlp_scale, dtype), mlp_strength

    def _add(
        self, h: Float[Tensor, "B L K"], out: Float[Tensor, "*E B L K"], strength: Float[Tensor, "B 1 K"] | None
    ) -> Float[Tensor, "*E B L K"]:
        return added(h, self.dropout(out), strength)


class Trunk(nn.Module):
    """Embedding, blocks, and the last norm with its modulation; shared by denoiser and encoder.

    The conditioning vector is c = SiLU(MLP(features of sigma) + MLP(z)), the second only with a latent. The network is
    told a time t and no schedule, so sigma is that of the log-linear one, -log alpha = -log(1 - (1 - eps) t) with
    eps = 0.001, whatever the method's: a finite, increasing measure of time. Without `time_conditioning` sigma is 0.
    """

    def __init__(self, config: DiTConfig, space: TokenSpace, wants: Wants):
        super().__init__()
        self.config = config
        self.token = nn.Embedding(space.size, config.width)
        nn.init.kaiming_uniform_(self.token.weight, a=math.sqrt(5))
        self.mark = nn.Parameter(0.02 * torch.randn(config.width)) if wants.marks else None
        self.time = self.latent = self.adaln = None
        if not config.causal:
            size, hidden = config.cond_size, config.latent_hidden
            self.time = nn.Sequential(nn.Linear(config.time_size, size), nn.SiLU(), nn.Linear(size, size))
            if wants.cond:
                self.latent = nn.Sequential(
                    nn.Linear(wants.cond, hidden), nn.SiLU(),
                    nn.Linear(hidden, hidden), nn.SiLU(),
                    nn.Linear(hidden, size),
                )  # fmt: skip
            self.adaln = zeroed(nn.Linear(size, 2 * config.width))
        self.blocks = nn.ModuleList(Block(config, wants.experts) for _ in range(config.depth))
        self.norm = Norm(config.width)

    def forward(
        self,
        h: Float[Tensor, "B L K"],
        c: Float[Tensor, "B C"] | None,
        route: Route | None,
        view: View,
    ) -> tuple[Float[Tensor, "_B L K"], list[Float[Tensor, "_B L E"]], list[Gate]]:
        """Features of the rows that are kept, router logits of all rows, gates."""
        logits: list[Tensor] = []
        gates: list[Gate] = []
        for number, block in enumerate(self.blocks):
            h, logits_d, gate = block(h, c, number, route, view)
            if gate is not None:
                c = None if c is None else kept(c, gate)
                logits.append(logits_d)
                gates.append(gate)
        return self._finish(h, c), logits, gates

    def every(
        self, h: Float[Tensor, "B L K"], c: Float[Tensor, "B C"] | None, route: Route, view: View
    ) -> tuple[Float[Tensor, "E _B L K"], list[Float[Tensor, "_B L E"]]]:
        """Features under each expert of the last block, and the router logits of all blocks."""
        last = self.blocks[-1]
        assert isinstance(last, Block)
        if not isinstance(last.mlp, RoutedMLP):
            raise ValueError("a dense backbone has no experts to run")
        logits: list[Tensor] = []
        for number, block in enumerate(self.blocks[:-1]):
            h, logits_d, gate = block(h, c, number, route, view)
            c = None if c is None else kept(c, gate)
            logits.append(logits_d)
        h, logits_d = last.every(h, c, len(logits), view)
        return self._finish(h, c), [*logits, logits_d]

    def embed(self, x: Int[Tensor, "B L"], marks: Bool[Tensor, "B L"] | None) -> Float[Tensor, "B L K"]:
        """Embeddings of tokens, and of marks where there are any."""
        h = self.token(x)
        return h if self.mark is None or marks is None else h + marks[..., None].to(h.dtype) * self.mark

    def condition(self, t: Float[Tensor, " B"], cond: Float[Tensor, "B Z"] | None) -> Float[Tensor, "B C"] | None:
        """The vector that adaLN reads; None without adaLN."""
        if self.time is None:
            return None
        t = t.to(self.token.weight.dtype)
        sigma = -torch.log1p(-(1 - SIGMA_EPS) * t) if self.config.time_conditioning else torch.zeros_like(t)
        c = self.time(time_features(sigma / 1000, self.config.time_size))
        if self.latent is not None:
            if cond is None:
                raise ValueError("a backbone with a latent needs cond")
            c = c + self.latent(cond.to(t.dtype))
        return nnf.silu(c)

    def view(
        self,
        positions: Int[Tensor, " L"],
        attend: Bool[Tensor, "L M"] | None = None,
        cache: Cache | None = None,
    ) -> View:
        """The angles of positions, and who attends to whom."""
        dtype = torch.promote_types(self.token.weight.dtype, torch.float32)
        pairs = self.config.width // self.config.heads // 2
        angles = rotary_angles(positions, pairs, self.config.rotary_base, dtype)
        return View(angles.cos(), angles.sin(), attend, self.config.causal, cache)

    def _finish(self, h: Float[Tensor, "*E B L K"], c: Float[Tensor, "B C"] | None) -> Float[Tensor, "*E B L K"]:
        h = self.norm(h)
        if self.adaln is None:
            return h
        assert c is not None
        shift, scale = adaln(self.adaln, c, 2, h)
        return (1 + scale) * h + shift


# --- Networks ----------------------------------------------------------------------------------------------------


class DiT(Backbone):
    """Denoiser: a row of tokens to logits over V symbols, of which the mask gets -inf.

    The head has an output for the mask too, as the published sizes demand; it is never used. Head and adaLN start at
    zero: the first logits are 0, and every symbol but the mask has probability 1 / (V - 1).

    With `causal` position l reads the tokens 0..l alone, there is no adaLN, and t has no meaning; see `extend`.
    """

    def __init__(self, config: DiTConfig, space: TokenSpace, wants: Wants):
        super().__init__()
        self.routed_blocks = config.depth if wants.experts else 0
        self.mask_id, self.length = space.mask_id, space.length
        self.reads_time = config.time_conditioning
        self.trunk = Trunk(config, space, wants)
        self.head = zeroed(nn.Linear(config.width, space.size))

    @property
    def counted(self) -> nn.Module:
        """The trunk, through which `forward`, `features` and `extend` pass once each."""
        return self.trunk

    def forward(
        self,
        x: Int[Tensor, "B L"],
        t: Float[Tensor, " B"],
        *,
        cond: Float[Tensor, "B Z"] | None = None,
        marks: Bool[Tensor, "B L"] | None = None,
        route: Route | None = None,
        attend: Bool[Tensor, "L L"] | None = None,
        positions: Int[Tensor, " L"] | None = None,
        first: int | None = None,
    ) -> BackboneOut:
        """See `Backbone.forward`, and `features` for the rest; `first`: logits of so many first positions alone."""
        h, route_logits, gates = self.features(
            x, t, cond=cond, marks=marks, route=route, attend=attend, positions=positions
        )
        return BackboneOut(self.read(h if first is None else h[:, :first]), route_logits, gates)

    def features(
        self,
        x: Int[Tensor, "B L"],
        t: Float[Tensor, " B"],
        *,
        cond: Float[Tensor, "B Z"] | None = None,
        marks: Bool[Tensor, "B L"] | None = None,
        route: Route | None = None,
        attend: Bool[Tensor, "L L"] | None = None,
        positions: Int[Tensor, " L"] | None = None,
    ) -> tuple[Float[Tensor, "_B L K"], tuple[Float[Tensor, "_B L E"], ...], tuple[Gate, ...]]:
        """What `read` turns into logits, position by position; router logits and gates as in `BackboneOut`.

        Args:
            x: Tokens, the mask among them; L may differ from the length of the token space.
            t: Time of each row.
            cond: A latent vector for each row, where the method wants one.
            marks: Positions that get a learned mark, where the method wants it.
            route: Route policy, called once per block in order.
            attend: Which position (row) sees which (column); None: all of them, or the earlier ones if causal.
            positions: Places of the tokens, by which queries and keys are rotated; None: 0..L-1.
        """
        places = torch.arange(x.shape[1], device=x.device) if positions is None else positions
        h, c = self.trunk.embed(x, marks), self.trunk.condition(t, cond)
        h, logits, gates = self.trunk(h, c, route, self.trunk.view(places, attend))
        return h, tuple(logits), tuple(gates)

    def read(self, h: Float[Tensor, "*B K"]) -> Float[Tensor, "*B V"]:
        """Logits of features at any positions, in at least single precision, the mask's column at -inf.

        The -inf is in the bias: nothing of the size of the logits is copied for it, forward or backward.
        """
        logits = nnf.linear(h, *self.head_weights())
        return logits if logits.dtype == torch.float64 else logits.float()

    def head_weights(self) -> tuple[Float[Tensor, "V K"], Float[Tensor, " V"]]:
        """See `Backbone.head_weights`."""
        is_mask = torch.arange(self.head.out_features, device=self.head.bias.device) == self.mask_id
        return self.head.weight, self.head.bias.masked_fill(is_mask, NEG_INF)

    def forward_last(
        self, x: Int[Tensor, "B L"], t: Float[Tensor, " B"], *, marks: Bool[Tensor, "B L"] | None = None, route: Route
    ) -> tuple[Float[Tensor, "E _B L V"], tuple[Float[Tensor, "_B L E"], ...]]:
        """See `Backbone.forward_last`: no attention follows the last block.

        It makes E * B * L * V logits: for small vocabularies only. With E = 8, L = 128 and V = 30,522 they take 125 MB
        a row in single precision.
        """
        places = torch.arange(x.shape[1], device=x.device)
        h, c = self.trunk.embed(x, marks), self.trunk.condition(t, None)
        h, route_logits = self.trunk.every(h, c, route, self.trunk.view(places))
        return self.read(h), tuple(route_logits)

    def new_cache(self) -> Cache:
        """An empty cache for `extend`, with room for the length of the token space."""
        return Cache(self.length)

    @torch.no_grad()
    def extend(
        self,
        x_new: Int[Tensor, "B N"],
        cache: Cache,
        *,
        attend: Bool[Tensor, "N M"] | None = None,
        keep: int | None = None,
        last: int | None = None,
    ) -> Float[Tensor, "B _N V"]:
        """See `Backbone.extend`; positions go on where the cache ends. For sampling: it has no gradient.

        Equal to the last N positions of one call on all tokens so far, as long as no position sees a later one that is
        not in the cache with it: then keys and values of old positions stay as they are. A causal network is so by
        itself; any other needs `attend`, by which its caller answers for it, and must not see the time.
        """
        config, old, new = self.trunk.config, cache.length, x_new.shape[1]
        if not config.causal and (attend is None or config.time_conditioning):
            why = "new tokens would change what old ones see" if attend is None else "old ones were read at other times"
            raise ValueError(f"a network that is not causal is extended with `attend` and without a time: {why}")
        if old + new > cache.room:
            raise ValueError(f"the cache has room for {cache.room} positions, not for {old + new}")
        places = torch.arange(old, old + new, device=x_new.device)
        if attend is None and old:  # without a past the causal path is the quicker one
            attend = places[:, None] >= torch.arange(old + new, device=x_new.device)
        c = self.trunk.condition(torch.zeros(len(x_new), device=x_new.device), None)
        h, _, _ = self.trunk(self.trunk.embed(x_new, None), c, None, self.trunk.view(places, attend, cache))
        cache.length += new if keep is None else keep
        return self.read(h if last is None else h[:, new - last :])


class Encoder(nn.Module):
    """Recognition network: clean row, time and mask pattern to a vector, by mean pooling over positions.

    The same network with another head. Positions that are masked in xt are marked by the embedding of the mask, which
    a clean row never uses, so that the mask pattern takes no parameters. The head starts like any linear layer, not at
    zero: what it says of the row is then no pure noise when the denoiser begins to listen.
    """

    def __init__(self, config: DiTConfig, space: TokenSpace, outputs: int):
        super().__init__()
        self.mask_id = space.mask_id
        self.trunk = Trunk(config, space, Wants())
        self.head = nn.Linear(config.width, outputs)

    def forward(
        self, x0: Int[Tensor, "B L"], t: Float[Tensor, " B"], marks: Bool[Tensor, "B L"]
    ) -> Float[Tensor, "B O"]:
        """(x0, t, mask pattern) -> parameters of the posterior, in at least single precision."""
        h = self.trunk.embed(x0, None)
        h = h + marks[..., None].to(h.dtype) * self.trunk.token.weight[self.mask_id]
        places = torch.arange(x0.shape[1], device=x0.device)
        h, _, _ = self.trunk(h, self.trunk.condition(t, None), None, self.trunk.view(places))
        pooled = self.head(h.mean(1))
        return pooled if pooled.dtype == torch.float64 else pooled.float()
