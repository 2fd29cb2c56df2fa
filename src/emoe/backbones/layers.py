"""Layers that backbones share."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as nnf

from emoe.backbones.base import at_least_single
from emoe.config import Config, ConfigError, option
from emoe.kernels import compiled
from emoe.routing.experts import Activation, Dispatch, RoutedExperts
from emoe.types import Features, Gate, PerRow, Route, RouterLogits


def zeroed(layer: nn.Module) -> Any:
    """Set the weights and bias of a layer to zero."""
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    return layer


def silu_mlp(*sizes: int) -> nn.Sequential:
    """Make linear layers between vectors of these sizes, with SiLU between them."""
    layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.SiLU())]
    return nn.Sequential(*layers[:-1])


@compiled
def time_features(t: PerRow, size: int) -> Float[Tensor, "B F"]:
    """Return sines and cosines of 1000 t at `size / 2` frequencies from 1 down to 1e-4."""
    half = size // 2
    frequency = torch.exp(-math.log(10_000) * torch.arange(half, device=t.device, dtype=t.dtype) / half)
    angle = 1000 * t[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], dim=-1)


SHORT = 4  # largest length at which attention by broadcasting is faster than the library's kernels


def short_attention(
    q: Float[Tensor, "B H L C"], k: Float[Tensor, "B H L C"], v: Float[Tensor, "B H L C"]
) -> Float[Tensor, "B H L C"]:
    """softmax(q k' / sqrt(C)) v without matrix products; equal to `scaled_dot_product_attention`."""
    scores = (q[..., :, None, :] * k[..., None, :, :]).sum(-1) / math.sqrt(q.shape[-1])
    return (torch.softmax(scores, -1)[..., None] * v[..., None, :, :]).sum(-2)


class Attention(nn.Module):
    """Multi-head self-attention over all positions."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Float[Tensor, "B L K"]) -> Float[Tensor, "B L K"]:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = short_attention(q, k, v) if length <= SHORT else nnf.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Dropout(nn.Module):
    """x * keep / (1 - p) with keep ~ Bernoulli(1 - p); the identity in evaluation and at p = 0.

    All draws of a training step are a function of (seed, step), so noise comes from the stream of `dropout_from`, never
    from torch's global generator.
    """

    def __init__(self, p: float):
        super().__init__()
        self.p = p
        self.generator: torch.Generator | None = None

    def forward(self, x: Float[Tensor, "*N"]) -> Float[Tensor, "*N"]:
        if not self.training or self.p == 0:
            return x
        if self.generator is None:
            raise ConfigError(f"dropout: {self.p:g} needs a random stream, which the method does not give; set it to 0")
        keep = torch.empty(x.shape, dtype=torch.bool, device=x.device).bernoulli_(1 - self.p, generator=self.generator)
        return x * keep * (1 / (1 - self.p))


@contextlib.contextmanager
def dropout_from(module: nn.Module, generator: torch.Generator) -> Iterator[None]:
    """Let every `Dropout` in the module draw from the generator, in the order of the calls, inside this context."""
    parts = [part for part in module.modules() if isinstance(part, Dropout)]
    for part in parts:
        part.generator = generator
    try:
        yield
    finally:
        for part in parts:
            part.generator = None


@dataclass(frozen=True, kw_only=True)
class RouterConfig(Config):
    """Options of the routers of a backbone."""

    std: float = option(0.0, doc="standard deviation of a router's first weights", low=0)
    norm: bool = option(False, doc="a LayerNorm before each router")
    logit_norm: bool = option(False, doc="an affine LayerNorm on each router's logits")
    cap: float | None = option(None, doc="soft cap c * tanh(logits / c) of router logits; none = no cap", above=0)
    bias: bool = option(True, doc="a bias in each router")


class Router(nn.Linear):
    """A linear router over experts; it starts at zero by default (docs/decisions/0015-initialisation.md)."""

    def __init__(self, width: int, experts: int, config: RouterConfig):
        super().__init__(width, experts, bias=config.bias)
        if config.std:
            nn.init.normal_(self.weight, std=config.std)
        else:
            nn.init.zeros_(self.weight)
        if config.bias:
            nn.init.zeros_(self.bias)
        self.norm = nn.LayerNorm(width) if config.norm else None
        self.logit_norm = nn.LayerNorm(experts) if config.logit_norm else None
        self.cap = config.cap

    def forward(self, x: Float[Tensor, "B P K"]) -> RouterLogits:
        """Return logits in at least single precision, after LayerNorm and cap * tanh(logits / cap) if there are any."""
        logits = at_least_single(super().forward(x if self.norm is None else self.norm(x)))
        norm = self.logit_norm
        if norm is None:
            return logits if self.cap is None else _shaped(logits, None, None, 0.0, self.cap)
        return _shaped(logits, norm.weight, norm.bias, norm.eps, self.cap)


@compiled
def _shaped(
    x: Float[Tensor, "*N E"], weight: Tensor | None, bias: Tensor | None, eps: float, cap: float | None
) -> Float[Tensor, "*N E"]:
    """Apply LayerNorm over few numbers, for which the library's kernels are slow, and a soft cap."""
    if weight is not None and bias is not None:
        centred = x - x.mean(-1, keepdim=True)
        x = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * weight + bias
    return x if cap is None else cap * torch.tanh(x / cap)


def repeat_rows(rows: Float[Tensor, "B *N"], gate: Gate | None) -> Float[Tensor, "_B *N"]:
    """Return the batch rows that a gate keeps, each once for every draw of the gate; all of them without a gate."""
    if gate is None:
        return rows
    rows = rows[gate.keep_from :] if gate.keep_from else rows  # the backward of a slice fills a tensor
    return rows.repeat_interleave(gate.draws, dim=0) if gate.draws > 1 else rows


@dataclass
class Flow:
    """The policy of a network call, and router logits and gates of the blocks so far."""

    policy: Route | None
    logits: list[RouterLogits] = field(default_factory=list)
    gates: list[Gate] = field(default_factory=list)

    def features(self, h: Float[Tensor, "B L K"]) -> Features:
        return Features(h, tuple(self.logits), tuple(self.gates))


class RoutedMLP(nn.Module):
    """The feed-forward part of a block: a router and the experts it chooses from."""

    def __init__(
        self, width: int, hidden: int, experts: int, dispatch: Dispatch, router: RouterConfig, act: Activation = "gelu"
    ):
        super().__init__()
        self.router = Router(width, experts, router)
        self.experts = RoutedExperts(width, hidden, experts, dispatch, act)

    def forward(self, x: Float[Tensor, "B P K"], flow: Flow) -> tuple[Float[Tensor, "_B P K"], Gate]:
        """Return the experts' output for the rows that the policy's gate keeps, and the gate; record it in the flow."""
        if flow.policy is None:
            raise ValueError("a routed backbone needs a route policy")
        flow.logits.append(self.router(x))
        gate = flow.policy(len(flow.gates), flow.logits[-1])
        flow.gates.append(gate)
        return self.experts(x[gate.keep_from :] if gate.keep_from else x, gate), gate


class DenseMLP(nn.Sequential):
    """The feed-forward part of a block without experts, called like a routed one."""

    def __init__(self, width: int, hidden: int, act: Activation = "gelu"):
        gelu = nn.GELU("tanh" if act == "gelu-tanh" else "none")
        super().__init__(nn.Linear(width, hidden), gelu, nn.Linear(hidden, width))

    def forward(self, input: Float[Tensor, "B P K"], flow: Flow | None = None) -> tuple[Float[Tensor, "B P K"], None]:
        return super().forward(input), None


def mlp_of(config: Any, experts: int, act: Activation = "gelu") -> nn.Module:
    """Make the feed-forward part of a block in the sizes of a config, with routed experts if there are any."""
    if experts:
        return RoutedMLP(config.width, config.hidden, experts, config.dispatch, config.router, act)
    return DenseMLP(config.width, config.hidden, act)
