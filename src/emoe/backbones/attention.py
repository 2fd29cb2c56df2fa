"""Attention with rotary positions, under any mask, and a cache of keys and values.

Letters: K width, C size of a head, H heads, R = C / 2 rotated pairs in each head.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as nnf

from emoe.kernels import compiled


@dataclass
class Cache:
    """Rotated keys and values of each block for the tokens so far; see `extend`."""

    room: int  # largest number of positions
    length: int = 0  # positions so far
    blocks: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def add(
        self, block: int, k: Float[Tensor, "B H N _C"], v: Float[Tensor, "B H N _C"]
    ) -> tuple[Float[Tensor, "B H M _C"], Float[Tensor, "B H M _C"]]:
        """Append N positions to the keys and values of a block; return views of all M = length + N."""
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
    """Rotations, mask and cache of the attention in all blocks of a call."""

    cos: Float[Tensor, "L R"]
    sin: Float[Tensor, "L R"]
    attend: Bool[Tensor, "L M"] | None = None  # None: everything, or if causal everything up to oneself
    causal: bool = False  # without `attend` only
    cache: Cache | None = None


def rotary_angles(positions: Int[Tensor, " L"], pairs: int, base: float, dtype: torch.dtype) -> Float[Tensor, "L R"]:
    """Return position * base^(-r / R) for the pairs r = 0..R-1 of a head."""
    frequency = base ** (-torch.arange(pairs, device=positions.device, dtype=dtype) / pairs)
    return positions.to(dtype)[:, None] * frequency


def rotate(
    x: Float[Tensor, "B L H C"], cos: Float[Tensor, "L R"], sin: Float[Tensor, "L R"]
) -> Float[Tensor, "B L H C"]:
    """Turn each pair (x_r, x_{r+R}) of a head by its angle (half-split convention), in the precision of the angles."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


@compiled
def rotated(
    qkv: Float[Tensor, "B L 3 H C"], cos: Float[Tensor, "L R"], sin: Float[Tensor, "L R"]
) -> tuple[Float[Tensor, "B L H C"], Float[Tensor, "B L H C"], Float[Tensor, "B L H C"]]:
    """Return queries and keys, turned by their positions, and values; compiled together with their gradients."""
    q, k, v = qkv.unbind(2)
    return rotate(q, cos, sin), rotate(k, cos, sin), v


class RotaryAttention(nn.Module):
    """Multi-head self-attention of block `number`, without biases; queries and keys are rotated by their positions."""

    def __init__(self, width: int, heads: int, number: int):
        super().__init__()
        self.heads, self.number = heads, number
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Float[Tensor, "B L K"], view: View) -> Float[Tensor, "B L K"]:
        batch, length, width = x.shape
        parts = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        # Heads stay behind positions in memory, as in the result of attention: then nothing is copied.
        q, k, v = (part.transpose(1, 2) for part in rotated(parts, view.cos, view.sin))
        if view.cache is not None:
            k, v = view.cache.add(self.number, k, v)
        mixed = nnf.scaled_dot_product_attention(q, k, v, attn_mask=view.attend, is_causal=view.causal)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))
