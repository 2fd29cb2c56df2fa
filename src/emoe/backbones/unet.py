"""The convolutional UNet of the binary-image experiments: three resolutions, dense or with routed expert branches.

A row of L tokens is an image of side S = sqrt(L), pixels in row-major order. Letters: C channels, H = W the side of a
feature map, P = H * W its positions. Maps are (B, C, H, W) in the memory format channels_last, so that their positions
as rows (B, P, C) are a view.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as nnf

from emoe.backbones.base import Backbone, BackboneConfig, at_least_single
from emoe.backbones.layers import Flow, RoutedMLP, RouterConfig, repeat_rows, silu_mlp, time_features, zeroed
from emoe.config import ConfigError, option
from emoe.kernels import compiled, load
from emoe.routing.experts import Dispatch
from emoe.types import Features, Gate, Latents, Needs, PerRow, Positions, Route, Tokens, TokenSpace

# The eight blocks in network order: S, S/2, S/4 on the way down; S/4 in the middle; S/4, S/2, S on the way up, which
# read a skip connection beside their input; S.
JOINED = (False, False, False, False, True, True, True, False)
ROUTED = (False, True, True, True, True, True, False, False)  # all at S/2 and S/4
NORM = load("norm")


@dataclass(frozen=True, kw_only=True)
class UNetConfig(BackboneConfig, kind="unet"):
    """Sizes of the paper's network for binarised MNIST."""

    supports: ClassVar[frozenset[str]] = frozenset({"experts", "cond", "marks", "encoder", "time"})

    channels: int = option(72, doc="channels at every resolution", low=1)
    hidden: int = option(144, doc="hidden channels of each expert", low=1)
    time_size: int = option(128, doc="size of the sinusoidal time features; even", low=2)
    time_hidden: int = option(512, doc="size of the time vector that every block reads", low=1)
    groups: int = option(8, doc="groups of each GroupNorm; must divide the channels", low=1)
    dispatch: Dispatch = option("auto", doc="how experts are run; auto chooses by device")
    router: RouterConfig = option(RouterConfig(logit_norm=True, cap=5.0), doc="options of the routers")

    def conflicts(self) -> Iterator[str]:
        if self.channels % self.groups:
            yield f"groups: must divide channels = {self.channels}, got {self.groups}"
        if self.time_size % 2:
            yield f"time_size: must be even, got {self.time_size}"

    def build(self, space: TokenSpace, needs: Needs) -> UNet:
        return UNet(self, space, needs)

    def build_encoder(self, space: TokenSpace, needs: Needs) -> Encoder:
        return Encoder(self, space, needs.encoder)


def check_image(length: int) -> None:
    """Raise a `ConfigError` unless rows are square images that can be halved twice."""
    side = math.isqrt(length)
    if side * side != length or side % 4:
        raise ConfigError(
            f"backbone: unet needs square images with a side that 4 divides (length 16, 64, ...); rows have {length}"
        )


def as_rows(h: Float[Tensor, "B C H W"]) -> Float[Tensor, "B P C"]:
    """Return the positions of a map as rows, in row-major order."""
    return h.permute(0, 2, 3, 1).flatten(1, 2)


def as_map(rows: Float[Tensor, "B P C"]) -> Float[Tensor, "B C H H"]:
    """Invert `as_rows` for square maps; channels_last."""
    side = math.isqrt(rows.shape[1])
    return rows.unflatten(1, (side, side)).permute(0, 3, 1, 2)


def conv3(inputs: int, channels: int, stride: int = 1) -> nn.Conv2d:
    """Make a 3x3 convolution that keeps the side, or divides it by the stride."""
    return nn.Conv2d(inputs, channels, 3, stride=stride, padding=1)


def kernel_for(h: Tensor) -> ModuleType | None:
    """Return the module with the fused norm if it can process a map: on a GPU, in at most 32 bits."""
    return NORM if h.is_cuda and h.dtype != torch.float64 else None


def norm_silu(
    norm: nn.GroupNorm, h: Float[Tensor, "B C H W"], film: Float[Tensor, "B _2C"] | None = None
) -> Float[Tensor, "B C H W"]:
    """Return SiLU((1 + scale) norm(h) + shift), where film = [scale, shift], in the precision of h, channels_last."""
    fused = kernel_for(h)
    if fused is not None:
        return fused.norm_silu(h, norm.weight, norm.bias, norm.num_groups, film)
    v = norm(h)
    if film is not None:
        scale, shift = film[..., None, None].chunk(2, dim=1)
        v = (1 + scale) * v + shift
    # GroupNorm on a GPU leaves channels_last and half precision: back to them
    return nnf.silu(v).to(h.dtype, memory_format=torch.channels_last)


# On a GPU these functions are compiled as a whole: the operations around a convolution take as long as it does.
@compiled
def halved(conv: nn.Module, h: Float[Tensor, "B C H W"]) -> Float[Tensor, "B C _H _W"]:
    """Apply a convolution of stride 2."""
    return conv(h)


@compiled
def doubled(conv: nn.Module, h: Float[Tensor, "B C H W"], skip: Float[Tensor, "B I _H _W"]) -> Tensor:
    """Copy each pixel to 2x2, apply a convolution, and append the skip connection."""
    with torch.autocast(h.device.type, enabled=False):  # it would use single precision
        h = nnf.interpolate(h, scale_factor=2, mode="nearest")
    return torch.cat([conv(h), skip], dim=1)


class Residual(nn.Module):
    """skip(h) + conv(SiLU(film(norm conv(SiLU(norm h))))), with film(u) = (1 + scale) u + shift from the time vector.

    The second convolution starts at zero, so that the block starts as its skip: the identity, or a 1x1 convolution
    where the number of channels changes. The network computes the films of all blocks as one product of their weights.
    """

    def __init__(self, inputs: int, channels: int, groups: int, cond: int):
        super().__init__()
        self.norm_in = nn.GroupNorm(groups, inputs)
        self.conv_in = conv3(inputs, channels)
        self.norm_out = nn.GroupNorm(groups, channels)
        self.film = nn.Linear(cond, 2 * channels, bias=False) if cond else None
        self.conv_out = zeroed(conv3(channels, channels))
        self.skip = nn.Conv2d(inputs, channels, 1) if inputs != channels else None

    @compiled
    def forward(self, h: Float[Tensor, "B I H W"], film: Float[Tensor, "B _2C"] | None) -> Float[Tensor, "B C H W"]:
        u = self.conv_in(norm_silu(self.norm_in, h))
        u = self.conv_out(norm_silu(self.norm_out, u, film))
        return (h if self.skip is None else self.skip(h)) + u


@dataclass
class MapFlow(Flow):
    """The flow of the UNet, with scales, shifts and maps of the blocks to come. All have the rows of the features."""

    films: list[Float[Tensor, "B _2C"]] = field(default_factory=list)  # scale and shift of the blocks to come
    skips: list[Tensor] = field(default_factory=list)  # inputs of the way up

    def follow(self, gate: Gate) -> None:
        """Drop and repeat rows as the gate does."""
        self.films = [repeat_rows(film, gate) for film in self.films]
        self.skips = [as_map(repeat_rows(as_rows(skip), gate)) for skip in self.skips]


class Block(nn.Module):
    """A residual block r, dense, or with an additive branch of experts: r(h) + expert_z(r(h)).

    Router and experts read the features of the residual block at each position, without a norm of their own (its
    parameters would not fit the published sizes). An expert is an MLP of 1x1 convolutions.
    """

    def __init__(self, config: UNetConfig, *, joined: bool, cond: int, experts: int):
        super().__init__()
        channels = config.channels
        self.residual = Residual(2 * channels if joined else channels, channels, config.groups, cond)
        self.branch = RoutedMLP(channels, config.hidden, experts, config.dispatch, config.router) if experts else None

    def forward(self, h: Float[Tensor, "B I H W"], flow: MapFlow) -> Float[Tensor, "_B C H W"]:
        h = self.residual(h, flow.films.pop(0))
        if self.branch is None:
            return h
        rows = as_rows(h)
        added, gate = self.branch(rows, flow)
        flow.follow(gate)
        return as_map(repeat_rows(rows, gate) + added.to(rows.dtype))


class UNet(Backbone):
    """Denoiser: an image of tokens to logits over all symbols but the mask, which gets -inf.

    Embedding, 3x3 convolution; eight blocks, with convolutions of stride 2 on the way down, and copies of each pixel to
    2x2 followed by a convolution on the way up; GroupNorm, SiLU, 1x1 convolution. A latent vector is appended to the
    time vector that all blocks read. Convolutions follow the last routed block, so a route there moves the logits of
    many pixels, and a sum over its routes is not a product of sums over each position's.
    """

    routes_tokens = False  # positions at S/2 and S/4 are squares of pixels
    local_last_block = False
    has_mask_output = False
    blocks: Any  # a ModuleList of `Block`

    def __init__(self, config: UNetConfig, space: TokenSpace, needs: Needs):
        super().__init__()
        channels = config.channels
        check_image(space.length)
        self.routed_blocks = sum(ROUTED) if needs.experts else 0
        self.mask_id, self.time_size = space.mask_id, config.time_size
        self.token = nn.Embedding(space.size, channels)
        self.mark = nn.Parameter(0.02 * torch.randn(channels)) if needs.marks else None
        self.time = silu_mlp(config.time_size, config.time_hidden, config.time_hidden).append(nn.SiLU())
        self.stem = conv3(channels, channels)
        self.down = nn.ModuleList(conv3(channels, channels, stride=2) for _ in range(2))
        self.up = nn.ModuleList(conv3(channels, channels) for _ in range(2))
        self.blocks = nn.ModuleList(
            Block(config, joined=joined, cond=config.time_hidden + needs.cond, experts=needs.experts if routed else 0)
            for joined, routed in zip(JOINED, ROUTED, strict=True)
        )
        self.norm = nn.GroupNorm(config.groups, channels)
        self.head = nn.Linear(channels, space.size - 1)

    def forward(
        self, x: Tokens, t: PerRow, *, cond: Latents = None, marks: Positions | None = None, route: Route | None = None
    ) -> Features:
        flow = MapFlow(route, films=list(self._films(t, cond).chunk(len(JOINED), dim=-1)))
        blocks = iter(self.blocks)
        h = next(blocks)(self.embed(x, marks), flow)
        flow.skips.append(h)
        for down in self.down:
            h = next(blocks)(halved(down, h), flow)
            flow.skips.append(h)
        h = next(blocks)(h, flow)
        h = next(blocks)(torch.cat([h, flow.skips.pop()], dim=1), flow)
        for up in self.up:
            h = next(blocks)(doubled(up, h, flow.skips.pop()), flow)
        h = next(blocks)(h, flow)
        return flow.features(as_rows(norm_silu(self.norm, h)))

    @compiled
    def embed(self, x: Tokens, marks: Positions | None) -> Float[Tensor, "B C S S"]:
        """Embed tokens and marks, and apply the first convolution."""
        weight = self.token.weight
        # the gradient of an embedding of few symbols is many atomic additions to few addresses, that of a product none
        use_product = x.is_cuda and torch.is_grad_enabled()
        rows = nnf.one_hot(x, len(weight)).to(weight.dtype) @ weight if use_product else self.token(x)
        if self.mark is not None and marks is not None:
            rows = rows + marks[..., None].to(rows.dtype) * self.mark
        return self.stem(as_map(rows))

    def grouped(self, values: Float[Tensor, "*N P"], groups: int) -> Float[Tensor, "*N G"]:
        """Sum over the positions of a finer map that lie in each square of a coarser one."""
        coarse = math.isqrt(groups)
        each = math.isqrt(values.shape[-1]) // coarse
        squares = values.unflatten(-1, (coarse, each, coarse, each))
        return squares.sum((-3, -1)).flatten(-2)

    def _films(self, t: PerRow, cond: Latents) -> Float[Tensor, "B _F"]:
        """Compute scale and shift of every block from the time vector, followed by the latent if there is one."""
        vector = self.time(time_features(t.to(self.token.weight.dtype), self.time_size))
        if cond is not None:
            vector = torch.cat([vector, cond.to(vector.dtype)], dim=-1)
        return nnf.linear(vector, torch.cat([block.residual.film.weight for block in self.blocks]))


class Encoder(nn.Module):
    """Recognition network, about a sixth of the denoiser's size: clean image, time and mask pattern to a vector.

    Embeddings of tokens, marks and time are added; then a 3x3 convolution, and twice a convolution of stride 2 and a
    residual block; GroupNorm, SiLU, the mean over positions, a linear layer.
    """

    def __init__(self, config: UNetConfig, space: TokenSpace, outputs: int):
        super().__init__()
        channels = config.channels
        check_image(space.length)
        self.time_size = config.time_size
        self.token = nn.Embedding(space.size, channels)
        self.mark = nn.Parameter(torch.randn(channels))
        self.time = silu_mlp(config.time_size, channels, channels)
        self.stem = conv3(channels, channels)
        self.down = nn.ModuleList(conv3(channels, channels, stride=2) for _ in range(2))
        self.blocks = nn.ModuleList(Residual(channels, channels, config.groups, cond=0) for _ in range(2))
        self.norm = nn.GroupNorm(config.groups, channels)
        self.head = nn.Linear(channels, outputs)

    def forward(self, x0: Tokens, t: PerRow, marks: Positions) -> Float[Tensor, "B O"]:
        dtype = self.token.weight.dtype
        rows = self.token(x0) + marks[..., None].to(dtype) * self.mark
        rows = rows + self.time(time_features(t.to(dtype), self.time_size))[:, None]
        h = self.stem(as_map(rows))
        for down, block in zip(self.down, self.blocks, strict=True):
            h = block(halved(down, h), None)
        return at_least_single(self.head(norm_silu(self.norm, h).mean((2, 3))))
