"""Layers that backbones share."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as nnf

from emoe.config import Config, ConfigError, option
from emoe.kernels import compiled
from emoe.routing.experts import Activation, Dispatch, RoutedExperts
from emoe.types import Gate, PerRow, Route, RouterLogits


@compiled
def time_features(t: PerRow, size: int) -> Float[Tensor, "B F"]:
    """Sines and cosines of 1000 t at `size / 2` frequencies from 1 down to 1e-4."""
    half = size // 2
    frequency = torch.exp(-math.log(10_000) * torch.arange(half, device=t.device, dtype=t.dtype) / half)
    angle = 1000 * t[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], dim=-1)


SHORT = 4  # up to this length attention by broadcasting beats the library's kernels, which are made for long rows


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
        """Attend and project."""
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = short_attention(q, k, v) if length <= SHORT else nnf.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Dropout(nn.Module):
    """x * keep / (1 - p) with keep ~ Bernoulli(1 - p) from a given generator; the identity in evaluation and at p = 0.

    What a training step draws is a function of (seed, step), so noise comes from a stream that `dropout_from` lends
    for the time of a call, never from torch's global generator.
    """

    def __init__(self, p: float):
        super().__init__()
        self.p = p
        self.generator: torch.Generator | None = None

    def forward(self, x: Float[Tensor, "*N"]) -> Float[Tensor, "*N"]:
        """Drop and scale."""
        if not self.training or self.p == 0:
            return x
        if self.generator is None:
            raise ConfigError(f"dropout: {self.p:g} needs a random stream, which the method does not lend; set it to 0")
        keep = torch.empty(x.shape, dtype=torch.bool, device=x.device).bernoulli_(1 - self.p, generator=self.generator)
        return x * keep * (1 / (1 - self.p))


@contextlib.contextmanager
def dropout_from(module: nn.Module, generator: torch.Generator) -> Iterator[None]:
    """Every `Dropout` in the module draws from the generator, in the order of the calls, while this is open."""
    parts = [part for part in module.modules() if isinstance(part, Dropout)]
    before = [part.generator for part in parts]
    for part in parts:
        part.generator = generator
    try:
        yield
    finally:
        for part, old in zip(parts, before, strict=True):
            part.generator = old


@dataclass(frozen=True, kw_only=True)
class RouterConfig(Config):
    """Options of the routers of a backbone."""

    std: float = option(0.0, doc="standard deviation of a router's first weights", low=0)
    norm: bool = option(False, doc="a LayerNorm before each router")
    logit_norm: bool = option(False, doc="an affine LayerNorm on each router's logits")
    cap: float | None = option(None, doc="soft cap c * tanh(logits / c) of router logits; none = no cap", above=0)
    bias: bool = option(True, doc="a bias in each router")


class Router(nn.Linear):
    """A linear router over experts.

    It starts at zero by default: all experts are equally likely, and posterior and prior agree, until there is a
    reason for them not to (docs/decisions/0015-initialisation.md).
    """

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
        """Logits in at least single precision; cap * tanh(logits / cap) where there is a cap, after any LayerNorm."""
        norm = self.logit_norm
        logits = super().forward(x if self.norm is None else self.norm(x))
        logits = logits if logits.dtype == torch.float64 else logits.float()
        if norm is None:
            return logits if self.cap is None else _shaped(logits, None, None, 0.0, self.cap)
        return _shaped(logits, norm.weight, norm.bias, norm.eps, self.cap)


@compiled
def _shaped(
    x: Float[Tensor, "*N E"],
    weight: Float[Tensor, " E"] | None,
    bias: Float[Tensor, " E"] | None,
    eps: float,
    cap: float | None,
) -> Float[Tensor, "*N E"]:
    """LayerNorm over few numbers, for which the library's kernels are not made, and a soft cap."""
    if weight is not None and bias is not None:
        centred = x - x.mean(-1, keepdim=True)
        x = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * weight + bias
    return x if cap is None else cap * torch.tanh(x / cap)


def drop_rows(rows: Float[Tensor, "B *N"], gate: Gate) -> Float[Tensor, "_B *N"]:
    """The batch rows that a gate keeps. The backward of a slice fills a tensor, so nothing is sliced needlessly."""
    return rows[gate.keep_from :] if gate.keep_from else rows


def repeat_rows(rows: Float[Tensor, "B *N"], gate: Gate) -> Float[Tensor, "_B *N"]:
    """The batch rows that a gate keeps, each as often as the gate holds draws for it."""
    rows = drop_rows(rows, gate)
    return rows.repeat_interleave(gate.draws, dim=0) if gate.draws > 1 else rows


class RoutedMLP(nn.Module):
    """The feed-forward part of a block: a router and the experts it chooses from."""

    def __init__(
        self,
        width: int,
        hidden: int,
        experts: int,
        dispatch: Dispatch,
        router: RouterConfig,
        activation: Activation = "gelu",
    ):
        super().__init__()
        self.router = Router(width, experts, router)
        self.experts = RoutedExperts(width, hidden, experts, dispatch, activation)

    def route(self, x: Float[Tensor, "B P K"], block: int, policy: Route | None) -> tuple[RouterLogits, Gate]:
        """Router logits, and the policy's choice."""
        if policy is None:
            raise ValueError("a routed backbone needs a route policy")
        logits = self.router(x)
        return logits, policy(block, logits)
