"""GroupNorm, scale and shift (FiLM), and SiLU of feature maps as one kernel forward and one backward.

PyTorch's GroupNorm does not return channels_last and, under autocast, returns single precision, so that norm, FiLM and
SiLU are a dozen kernels with copies between layouts. The plain form is in `backbones.unet`; a test compares the two.

All maps are channels_last. Sums are in single precision and in a fixed order, so equal inputs give equal bits.
"""

# Triton's names are not types, and values in a kernel have no shapes to annotate.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
# ruff: noqa: ANN001, ANN202, N803

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 128  # about the number of multiprocessors of a large GPU
WIDTH = 36  # largest number of channels per program, where groups allow it
LARGEST = 16384  # most numbers of a map that a program holds at once
ROUND = 2048  # numbers that a program could process while it waits for memory in a round of a loop
UNROLL = 2  # rounds of a loop whose loads may overlap
WARPS = 8


@triton.jit
def _sigmoid(z):
    """1 / (1 + exp(-z)), in a third of the instructions of `tl.sigmoid`: the kernels are limited by arithmetic."""
    root = tl.rsqrt(1 + tl.exp2(-1.4426950408889634 * z))
    return root * root


@triton.jit
def _silu_slope(z):
    """The derivative of z sigmoid(z)."""
    gate = _sigmoid(z)
    y = z * gate
    return gate + y - y * gate


@triton.jit
def _to_channels(value, COUNT: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr):
    """Sums over the positions that lie side by side: from (LANES,), COUNT times WIDTH channels, to (BLOCK_C,)."""
    if COUNT == 1:
        total = value
    else:
        n, c = tl.arange(0, BLOCK_N)[:, None], tl.arange(0, BLOCK_C)[None, :]
        real = (n < COUNT) & (c < WIDTH)
        lane = tl.reshape(tl.where(real, n * WIDTH + c, 0), (BLOCK_N * BLOCK_C,))
        total = tl.sum(tl.where(real, tl.reshape(tl.gather(value, lane, 0), (BLOCK_N, BLOCK_C)), 0.0), 0)
    return total


@triton.jit
def _to_lanes(value, COUNT: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr):
    """Each lane gets the number of its channel: from (BLOCK_C,) to (LANES,)."""
    if COUNT == 1:
        each = value
    else:
        each = tl.gather(value, tl.arange(0, LANES) % WIDTH, 0)
    return each


@triton.jit
def _of_group(value, EACH: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_C: tl.constexpr):
    """At each channel the sum of `value` over the channels of its group; EACH channels make a group."""
    member = (tl.arange(0, BLOCK_C) // EACH)[:, None] == tl.arange(0, BLOCK_G)[None, :]
    total = tl.sum(tl.where(member, value[:, None], 0.0), 0)
    return tl.sum(tl.where(member, total[None, :], 0.0), 1)


@triton.jit
def _norm_forward(
    x,
    gamma,
    beta,
    film,
    film_stride,
    y,
    stats,
    eps,
    P: tl.constexpr,
    C: tl.constexpr,
    EACH: tl.constexpr,
    WIDTH: tl.constexpr,
    COUNT: tl.constexpr,
    LANES: tl.constexpr,
    R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_G: tl.constexpr,
    UNROLL: tl.constexpr,
    HAS_FILM: tl.constexpr,
):
    row, lane, c = tl.program_id(0), tl.arange(0, LANES), tl.arange(0, BLOCK_C)
    real = c < WIDTH
    channel = tl.program_id(1) * WIDTH + c
    start = row.to(tl.int64) * P * C + tl.program_id(1) * WIDTH
    offset, position = lane // WIDTH * C + lane % WIDTH, tl.where(lane < COUNT * WIDTH, lane // WIDTH, P)
    # Sums of distances from the first position: the difference of two large numbers would lose the variance.
    first = tl.load(x + start + lane % WIDTH)
    origin = first.to(tl.float32)
    once = tl.zeros((R, LANES), tl.float32)
    twice = tl.zeros((R, LANES), tl.float32)
    for chunk in tl.range(0, P, R * COUNT, loop_unroll_factor=UNROLL):
        p = (chunk + tl.arange(0, R) * COUNT)[:, None]
        inside = p + position[None, :] < P
        u = tl.load(x + start + p * C + offset[None, :], mask=inside, other=first[None, :]).to(tl.float32)
        u -= origin[None, :]  # 0 outside
        once += u
        twice += u * u
    centre = _to_channels(tl.sum(once, 0), COUNT, WIDTH, BLOCK_N, BLOCK_C) / P
    spread = _to_channels(tl.sum(twice, 0), COUNT, WIDTH, BLOCK_N, BLOCK_C) / P - centre * centre  # variances
    centre += tl.load(x + start + c, mask=real, other=0.0).to(tl.float32)
    mean = _of_group(centre, EACH, BLOCK_G, BLOCK_C) / EACH
    centre -= mean
    variance = _of_group(spread + centre * centre, EACH, BLOCK_G, BLOCK_C) / EACH
    rstd = 1 / tl.sqrt(variance + eps)
    scale, shift = tl.load(gamma + channel, mask=real, other=0.0), tl.load(beta + channel, mask=real, other=0.0)
    if HAS_FILM:
        more = 1 + tl.load(film + row * film_stride + channel, mask=real, other=0.0).to(tl.float32)
        shift = shift * more + tl.load(film + row * film_stride + C + channel, mask=real, other=0.0).to(tl.float32)
        scale *= more
    tl.store(stats + row * 2 * C + channel, mean, mask=real)
    tl.store(stats + row * 2 * C + C + channel, rstd, mask=real)
    scale *= rstd
    shift = _to_lanes(shift - mean * scale, COUNT, WIDTH, LANES)
    scale = _to_lanes(scale, COUNT, WIDTH, LANES)
    for chunk in tl.range(0, P, R * COUNT, loop_unroll_factor=UNROLL):
        p = (chunk + tl.arange(0, R) * COUNT)[:, None]
        inside, at = p + position[None, :] < P, start + p * C + offset[None, :]
        u = tl.load(x + at, mask=inside, other=first[None, :]).to(tl.float32)
        z = u * scale[None, :] + shift[None, :]
        tl.store(y + at, (z * _sigmoid(z)).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _norm_backward(
    x,
    gamma,
    beta,
    film,
    film_stride,
    stats,
    dy,
    dx,
    dfilm,
    partial,
    B: tl.constexpr,
    P: tl.constexpr,
    C: tl.constexpr,
    EACH: tl.constexpr,
    WIDTH: tl.constexpr,
    COUNT: tl.constexpr,
    LANES: tl.constexpr,
    R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_G: tl.constexpr,
    UNROLL: tl.constexpr,
    HAS_FILM: tl.constexpr,
):
    row, lane, c = tl.program_id(0), tl.arange(0, LANES), tl.arange(0, BLOCK_C)
    real = c < WIDTH
    channel = tl.program_id(1) * WIDTH + c
    start = row.to(tl.int64) * P * C + tl.program_id(1) * WIDTH
    offset, position = lane // WIDTH * C + lane % WIDTH, tl.where(lane < COUNT * WIDTH, lane // WIDTH, P)
    mean = tl.load(stats + row * 2 * C + channel, mask=real, other=0.0)
    rstd = tl.load(stats + row * 2 * C + C + channel, mask=real, other=0.0)
    g, b = tl.load(gamma + channel, mask=real, other=0.0), tl.load(beta + channel, mask=real, other=0.0)
    more = tl.full((BLOCK_C,), 1.0, tl.float32)
    scale, shift = g, b
    if HAS_FILM:
        more += tl.load(film + row * film_stride + channel, mask=real, other=0.0).to(tl.float32)
        shift = b * more + tl.load(film + row * film_stride + C + channel, mask=real, other=0.0).to(tl.float32)
        scale = g * more
    middle, slope = _to_lanes(mean, COUNT, WIDTH, LANES), _to_lanes(rstd * scale, COUNT, WIDTH, LANES)
    level = _to_lanes(shift, COUNT, WIDTH, LANES)
    ones = tl.zeros((R, LANES), tl.float32)
    both = tl.zeros((R, LANES), tl.float32)
    for chunk in tl.range(0, P, R * COUNT, loop_unroll_factor=UNROLL):
        p = (chunk + tl.arange(0, R) * COUNT)[:, None]
        inside, at = p + position[None, :] < P, start + p * C + offset[None, :]
        u = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) - middle[None, :]
        dz = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)  # 0 outside, and so are both sums
        dz *= _silu_slope(u * slope[None, :] + level[None, :])
        ones += dz
        both += dz * u
    dshift = _to_channels(tl.sum(ones, 0), COUNT, WIDTH, BLOCK_N, BLOCK_C)
    dscale = _to_channels(tl.sum(both, 0), COUNT, WIDTH, BLOCK_N, BLOCK_C) * rstd
    mean_dz = _of_group(scale * dshift, EACH, BLOCK_G, BLOCK_C) / (P * EACH)
    mean_dz_unit = _of_group(scale * dscale, EACH, BLOCK_G, BLOCK_C) / (P * EACH)
    level_du = _to_lanes(-rstd * mean_dz, COUNT, WIDTH, LANES)
    slope_du = _to_lanes(-rstd * rstd * mean_dz_unit, COUNT, WIDTH, LANES)
    for chunk in tl.range(0, P, R * COUNT, loop_unroll_factor=UNROLL):
        p = (chunk + tl.arange(0, R) * COUNT)[:, None]
        inside, at = p + position[None, :] < P, start + p * C + offset[None, :]
        u = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) - middle[None, :]
        dz = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        dz *= _silu_slope(u * slope[None, :] + level[None, :])
        du = dz * slope[None, :] + (u * slope_du[None, :] + level_du[None, :])
        tl.store(dx + at, du.to(dx.dtype.element_ty), mask=inside)
    tl.store(partial + row * C + channel, dscale * more, mask=real)
    tl.store(partial + (B + row) * C + channel, dshift * more, mask=real)
    if HAS_FILM:
        tl.store(dfilm + row * 2 * C + channel, (g * dscale + b * dshift).to(dfilm.dtype.element_ty), mask=real)
        tl.store(dfilm + row * 2 * C + C + channel, dshift.to(dfilm.dtype.element_ty), mask=real)


# The kernels are PyTorch operators, so that `torch.compile` can compile the functions that call them.
@torch.library.custom_op(
    "emoe::norm_silu",
    mutates_args=(),
    schema="(Tensor x, Tensor gamma, Tensor beta, Tensor? film, int groups) -> (Tensor, Tensor)",
)
def _norm_silu(x: Tensor, gamma: Tensor, beta: Tensor, film: Tensor | None, groups: int) -> tuple[Tensor, Tensor]:
    """The result, and (B, 2, C): mean and 1 / standard deviation of each channel's group."""
    x, film = _aligned(x, film)
    batch, channels, height, width = x.shape
    y, stats = torch.empty_like(x), torch.empty(batch, 2, channels, device=x.device)
    parts, options = _options(batch, height * width, channels, groups)
    film_rows = (gamma, 0) if film is None else (film, film.stride(0))
    _norm_forward[(batch, parts)](x, gamma, beta, *film_rows, y, stats, 1e-5, HAS_FILM=film is not None, **options)
    return y, stats


@torch.library.custom_op(
    "emoe::norm_silu_backward",
    mutates_args=(),
    schema="(Tensor x, Tensor gamma, Tensor beta, Tensor? film, Tensor stats, Tensor dy, int groups)"
    " -> (Tensor, Tensor, Tensor)",
)
def _norm_silu_backward(
    x: Tensor, gamma: Tensor, beta: Tensor, film: Tensor | None, stats: Tensor, dy: Tensor, groups: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, of gamma and beta as (2, C), and of film; empty without a film."""
    (x, film), (dy, _) = _aligned(x, film), _aligned(dy.to(x.dtype), None)
    batch, channels, height, width = x.shape
    dx, dfilm = torch.empty_like(x), gamma.new_empty(0) if film is None else film.new_empty(film.shape)
    partial = torch.empty(2, batch, channels, device=x.device)
    parts, options = _options(batch, height * width, channels, groups)
    film_rows = (gamma, 0) if film is None else (film, film.stride(0))
    _norm_backward[(batch, parts)](
        x, gamma, beta, *film_rows, stats, dy, dx, dfilm, partial, B=batch, HAS_FILM=film is not None, **options
    )
    return dx, partial.sum(1), dfilm


@_norm_silu.register_fake
def _(x, gamma, beta, film, groups):
    y = torch.empty_like(x, memory_format=torch.channels_last)
    return y, x.new_empty(len(x), 2, x.shape[1], dtype=torch.float32)


@_norm_silu_backward.register_fake
def _(x, gamma, beta, film, stats, dy, groups):
    dx = torch.empty_like(x, memory_format=torch.channels_last)
    dfilm = gamma.new_empty(0) if film is None else film.new_empty(film.shape)
    return dx, gamma.new_empty(2, len(gamma), dtype=torch.float32), dfilm


def _save(ctx, inputs, output):
    *tensors, ctx.groups = inputs
    ctx.save_for_backward(*tensors, output[1])


def _gradients(ctx, dy, _):
    x, gamma, beta, film, stats = ctx.saved_tensors
    dx, dscale, dfilm = _norm_silu_backward(x, gamma, beta, film, stats, dy, ctx.groups)
    dgamma, dbeta = dscale.unbind()
    return dx, dgamma, dbeta, None if film is None else dfilm, None


_norm_silu.register_autograd(_gradients, setup_context=_save)


def _aligned(x: Tensor, film: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return both in the layout that the kernels read."""
    if film is not None and film.stride(1) != 1:
        film = film.contiguous()
    return x.contiguous(memory_format=torch.channels_last), film


@functools.cache
def _tile(positions: int, width: int, largest: int, wait: int) -> tuple[int, int]:
    """Return the numbers that a program reads at a time, (R, LANES), for the least work on maps (positions, width)."""
    narrow = triton.next_power_of_2(width)
    tiles = []
    for lanes in (narrow << i for i in range(11)):
        for r in (1 << i for i in range(20)):
            rounds = triton.cdiv(triton.cdiv(positions, lanes // width), r)
            # With one round a program still holds the numbers for its second pass.
            work = rounds * (r * lanes + wait) * (1 if rounds == 1 else 2)
            if r * lanes <= max(largest, narrow) and lanes <= max(1024, narrow):
                tiles.append((work, lanes, r))
    _, lanes, r = min(tiles)
    return r, lanes


def _options(batch: int, positions: int, channels: int, groups: int) -> tuple[int, dict[str, Any]]:
    """Return the number of parts of the channels, and compile-time numbers of both kernels.

    A program takes all positions of a row and whole groups of its channels, so that neighbouring threads read
    neighbouring numbers. It reads (R, LANES) numbers at a time, both powers of 2, with the channels of COUNT positions
    side by side: 36 or 72 channels alone would leave nearly half of the lanes idle.
    """
    parts = 1
    while groups // parts % 2 == 0 and (channels // parts > WIDTH or parts == 1 and batch < PROGRAMS):
        parts *= 2
    width = channels // parts
    r, lanes = _tile(positions, width, LARGEST, ROUND)
    tile = dict(WIDTH=width, COUNT=lanes // width, LANES=lanes, R=r, UNROLL=UNROLL)
    blocks = dict(BLOCK_N=lanes // width, BLOCK_C=width, BLOCK_G=groups // parts)
    options = dict(P=positions, C=channels, EACH=channels // groups, num_warps=min(WARPS, max(1, r * lanes // 512)))
    return parts, options | tile | {name: triton.next_power_of_2(size) for name, size in blocks.items()}


def norm_silu(x: Tensor, gamma: Tensor, beta: Tensor, groups: int, film: Tensor | None = None) -> Tensor:
    """Return SiLU((1 + s) (gamma norm(x) + beta) + h), (B, C, H, W), in the precision of x.

    norm is over the H * W * C / G numbers of each group of channels, with 1e-5 added to the variance.

    Args:
        x: A map.
        gamma: (C,), single precision.
        beta: (C,), single precision.
        groups: G, which divides C.
        film: (B, 2C), s and h; None: both 0.
    """
    y: Tensor = _norm_silu(x, gamma, beta, film, groups)[0]
    return y
