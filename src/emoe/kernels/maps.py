"""Kernels for feature maps of a UNet: what stands between two convolutions as one pass over memory.

PyTorch's GroupNorm leaves channels_last and, under autocast, single precision, so that norm, film and SiLU are a dozen
kernels with copies between layouts; here they are one forward and one backward. Both functions say what they compute;
`backbones.unet` holds the plain form, which everything but a GPU runs, and tests hold the two together.

All maps are channels_last. Sums are in single precision and in a fixed order: no atomics, so equal inputs give equal
bits.
"""

# Triton's names are no types for a checker, and tensors in a kernel have no shapes to annotate.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
# ruff: noqa: ANN001, ANN202, N803

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 128  # about as many as a large GPU has multiprocessors
IN_FLIGHT = 8192  # numbers of a map that a program reads at once
WARPS = 8
ROWS = 128  # rows of a map that one program adds up


@triton.jit
def _of_group(value, c, EACH: tl.constexpr, GROUPS: tl.constexpr, BLOCK_C: tl.constexpr):
    """At each channel the sum of `value` over the channels of its group, for channels c of which EACH make a group."""
    total = tl.zeros((BLOCK_C,), tl.float32)
    for group in tl.static_range(GROUPS):
        mine = (c >= group * EACH) & (c < (group + 1) * EACH)
        total += tl.where(mine, tl.sum(tl.where(mine, value, 0.0)), 0.0)
    return total


@triton.jit
def _norm_forward(
    x, bias, gamma, beta, film, film_stride, y, stats, eps, P: tl.constexpr, C: tl.constexpr, EACH: tl.constexpr,
    GROUPS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_FILM: tl.constexpr,
):  # fmt: skip
    row, c = tl.program_id(0), tl.arange(0, BLOCK_C)
    real = c < GROUPS * EACH
    channel = tl.program_id(1) * GROUPS * EACH + c
    start = row.to(tl.int64) * P * C
    # Sums of distances from the first position: the difference of two large numbers would lose the variance.
    first = tl.load(x + start + channel, mask=real, other=0.0).to(tl.float32)
    once = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    twice = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    for chunk in range(0, P, BLOCK_P):
        p = chunk + tl.arange(0, BLOCK_P)
        inside = (p < P)[:, None] & real[None, :]
        u = tl.load(x + start + p[:, None] * C + channel[None, :], mask=inside, other=0.0).to(tl.float32)
        u = tl.where(inside, u - first[None, :], 0.0)
        once += u
        twice += u * u
    centre = tl.sum(once, 0) / P
    spread = tl.sum(twice, 0) / P - centre * centre  # variance of each channel
    centre += first
    if HAS_BIAS:
        centre += tl.load(bias + channel, mask=real, other=0.0)
    mean = _of_group(centre, c, EACH, GROUPS, BLOCK_C) / EACH
    variance = _of_group(spread + (centre - mean) * (centre - mean), c, EACH, GROUPS, BLOCK_C) / EACH
    rstd = 1 / tl.sqrt(variance + eps)
    scale, shift = tl.load(gamma + channel, mask=real, other=0.0), tl.load(beta + channel, mask=real, other=0.0)
    if HAS_FILM:
        more = 1 + tl.load(film + row * film_stride + channel, mask=real, other=0.0).to(tl.float32)
        shift = shift * more + tl.load(film + row * film_stride + C + channel, mask=real, other=0.0).to(tl.float32)
        scale *= more
    if HAS_BIAS:
        mean -= tl.load(bias + channel, mask=real, other=0.0)  # from here on the mean of x without its bias
    tl.store(stats + row * 2 * C + channel, mean, mask=real)
    tl.store(stats + row * 2 * C + C + channel, rstd, mask=real)
    scale *= rstd
    shift -= mean * scale
    for chunk in range(0, P, BLOCK_P):
        p = chunk + tl.arange(0, BLOCK_P)
        inside = (p < P)[:, None] & real[None, :]
        offsets = start + p[:, None] * C + channel[None, :]
        z = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32) * scale[None, :] + shift[None, :]
        tl.store(y + offsets, (z * tl.sigmoid(z)).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _norm_backward(
    x, gamma, beta, film, film_stride, stats, dy, dx, dfilm, partial, B, P: tl.constexpr, C: tl.constexpr,
    EACH: tl.constexpr, GROUPS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_FILM: tl.constexpr,
):  # fmt: skip
    row, c = tl.program_id(0), tl.arange(0, BLOCK_C)
    real = c < GROUPS * EACH
    channel = tl.program_id(1) * GROUPS * EACH + c
    start = row.to(tl.int64) * P * C
    mean = tl.load(stats + row * 2 * C + channel, mask=real, other=0.0)
    rstd = tl.load(stats + row * 2 * C + C + channel, mask=real, other=0.0)
    g, b = tl.load(gamma + channel, mask=real, other=0.0), tl.load(beta + channel, mask=real, other=0.0)
    more = tl.full((BLOCK_C,), 1.0, tl.float32)
    scale, shift = g, b
    if HAS_FILM:
        more += tl.load(film + row * film_stride + channel, mask=real, other=0.0).to(tl.float32)
        shift = b * more + tl.load(film + row * film_stride + C + channel, mask=real, other=0.0).to(tl.float32)
        scale = g * more
    units = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    ones = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    both = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    for chunk in range(0, P, BLOCK_P):
        p = chunk + tl.arange(0, BLOCK_P)
        inside = (p < P)[:, None] & real[None, :]
        offsets = start + p[:, None] * C + channel[None, :]
        u = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
        unit = tl.where(inside, (u - mean[None, :]) * rstd[None, :], 0.0)
        z = unit * scale[None, :] + shift[None, :]
        gate = tl.sigmoid(z)
        dz = tl.load(dy + offsets, mask=inside, other=0.0).to(tl.float32) * gate * (1 + z * (1 - gate))
        ones += dz
        both += dz * unit
        if HAS_BIAS:
            units += unit
    dscale, dshift = tl.sum(both, 0), tl.sum(ones, 0)
    mean_dz = _of_group(scale * dshift, c, EACH, GROUPS, BLOCK_C) / (P * EACH)
    mean_dz_unit = _of_group(scale * dscale, c, EACH, GROUPS, BLOCK_C) / (P * EACH)
    for chunk in range(0, P, BLOCK_P):
        p = chunk + tl.arange(0, BLOCK_P)
        inside = (p < P)[:, None] & real[None, :]
        offsets = start + p[:, None] * C + channel[None, :]
        u = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
        unit = (u - mean[None, :]) * rstd[None, :]
        z = unit * scale[None, :] + shift[None, :]
        gate = tl.sigmoid(z)
        dz = tl.load(dy + offsets, mask=inside, other=0.0).to(tl.float32) * gate * (1 + z * (1 - gate))
        du = rstd[None, :] * (dz * scale[None, :] - mean_dz[None, :] - unit * mean_dz_unit[None, :])
        tl.store(dx + offsets, du.to(dx.dtype.element_ty), mask=inside)
    tl.store(partial + row * C + channel, dscale * more, mask=real)
    tl.store(partial + (B + row) * C + channel, dshift * more, mask=real)
    if HAS_BIAS:  # the sum of du over positions
        dbias = rstd * (scale * dshift - P * mean_dz - mean_dz_unit * tl.sum(units, 0))
        tl.store(partial + (2 * B + row) * C + channel, dbias, mask=real)
    if HAS_FILM:
        tl.store(dfilm + row * 2 * C + channel, (g * dscale + b * dshift).to(dfilm.dtype.element_ty), mask=real)
        tl.store(dfilm + row * 2 * C + C + channel, dshift.to(dfilm.dtype.element_ty), mask=real)


class _NormSiLU(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, gamma: Tensor, beta: Tensor, film: Tensor | None, groups: int
    ) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        batch, channels, height, width = x.shape
        y = torch.empty_like(x)
        stats = torch.empty(batch, 2, channels, device=x.device)
        if film is not None and film.stride(1) != 1:
            film = film.contiguous()
        ctx.grid, ctx.options = _options(batch, height * width, channels, groups, bias, film)
        _norm_forward[ctx.grid](
            x, gamma if bias is None else bias, gamma, beta, gamma if film is None else film,
            0 if film is None else film.stride(0), y, stats, 1e-5, **ctx.options,
        )  # fmt: skip
        ctx.save_for_backward(x, gamma, beta, film, stats)
        ctx.has_bias = bias is not None
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor):
        x, gamma, beta, film, stats = ctx.saved_tensors
        dy = dy.to(x.dtype).contiguous(memory_format=torch.channels_last)
        batch, channels = x.shape[:2]
        dx = torch.empty_like(x)
        dfilm = None if film is None else torch.empty(film.shape, dtype=film.dtype, device=film.device)
        partial = torch.empty(2 + ctx.has_bias, batch, channels, device=x.device)
        _norm_backward[ctx.grid](
            x, gamma, beta, gamma if film is None else film, 0 if film is None else film.stride(0), stats, dy, dx,
            gamma if dfilm is None else dfilm, partial, batch, **ctx.options,
        )  # fmt: skip
        sums = partial.sum(1)
        return dx, sums[2] if ctx.has_bias else None, sums[0], sums[1], dfilm, None


def _options(
    batch: int, positions: int, channels: int, groups: int, bias: Tensor | None, film: Tensor | None
) -> tuple[tuple[int, int], dict[str, Any]]:
    """Programs, and compile-time numbers of both kernels.

    A program takes all positions of a row and all channels, or half of them where there are few rows, whole groups in
    any case: neighbouring threads then read neighbouring numbers.
    """
    parts = 2 if batch < PROGRAMS and groups % 2 == 0 else 1
    each = channels // groups
    block_c = triton.next_power_of_2(channels // parts)
    block_p = min(triton.next_power_of_2(positions), max(1, IN_FLIGHT // block_c))
    return (batch, parts), {
        "P": positions, "C": channels, "EACH": each, "GROUPS": groups // parts, "BLOCK_P": block_p, "BLOCK_C": block_c,
        "HAS_BIAS": bias is not None, "HAS_FILM": film is not None,
        "num_warps": min(WARPS, max(1, block_p * block_c // 512)),
    }  # fmt: skip


def norm_silu(
    x: Tensor, gamma: Tensor, beta: Tensor, groups: int, *, bias: Tensor | None = None, film: Tensor | None = None
) -> Tensor:
    """SiLU((1 + s) (gamma norm(x + bias) + beta) + h), (B, C, H, W) in and out, in the precision of x.

    norm is over the H * W * C / G numbers of each group of channels, with 1e-5 added to the variance.

    Args:
        x: A map.
        gamma: (C,), single precision.
        beta: (C,), single precision.
        groups: G, which divides C.
        bias: (C,), of the convolution that made x; single precision.
        film: (B, 2C), s and h; None: both 0.
    """
    return _NormSiLU.apply(x, bias, gamma, beta, film, groups)


@triton.jit
def _add_forward(x, skip, bias, y, count, C: tl.constexpr, BLOCK: tl.constexpr, HAS_SKIP: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    value = tl.load(x + at, mask=inside).to(tl.float32) + tl.load(bias + at % C, mask=inside)
    if HAS_SKIP:
        value += tl.load(skip + at, mask=inside).to(tl.float32)
    tl.store(y + at, value.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _sum_rows(x, partial, rows, C: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK_C)
    total = tl.zeros((BLOCK, BLOCK_C), tl.float32)
    for start in range(0, ROWS, BLOCK):
        row = tl.program_id(0).to(tl.int64) * ROWS + start + tl.arange(0, BLOCK)
        inside = (row < rows)[:, None] & (c < C)[None, :]
        total += tl.load(x + row[:, None] * C + c[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(partial + tl.program_id(0) * C + c, tl.sum(total, 0), mask=c < C)


class _AddBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, skip: Tensor | None):
        x = x.contiguous(memory_format=torch.channels_last)
        skip = None if skip is None else skip.to(x.dtype).contiguous(memory_format=torch.channels_last)
        y = torch.empty_like(x)
        _add_forward[(triton.cdiv(x.numel(), 2048),)](
            x, x if skip is None else skip, bias, y, x.numel(), C=x.shape[1], BLOCK=2048, HAS_SKIP=skip is not None
        )
        ctx.has_skip = skip is not None
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor):
        dy = dy.contiguous(memory_format=torch.channels_last)
        channels, rows = dy.shape[1], dy.numel() // dy.shape[1]
        programs = triton.cdiv(rows, ROWS)
        partial = torch.empty(programs, channels, device=dy.device)
        _sum_rows[(programs,)](
            dy, partial, rows, C=channels, BLOCK_C=triton.next_power_of_2(channels), ROWS=ROWS, BLOCK=64, num_warps=8
        )
        return dy, partial.sum(0), dy if ctx.has_skip else None


def add_bias(x: Tensor, bias: Tensor, skip: Tensor | None = None) -> Tensor:
    """x + bias (+ skip), (B, C, H, W) in the precision of x; the bias is (C,) in single precision."""
    return _AddBias.apply(x, bias, skip)
