"""Triton kernels for the UNet on a GPU: what stands between two convolutions as one pass over memory.

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

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 512  # a few for each multiprocessor of a large GPU
IN_FLIGHT = 4096  # numbers of a map that a program reads at once
ROWS = 256  # rows of a map that one program adds up


@triton.jit
def _of_group(value, c, EACH: tl.constexpr, GROUPS: tl.constexpr, BLOCK_C: tl.constexpr):
    """At each channel the sum of `value` over the channels of its group, for channels c of which EACH make a group."""
    total = tl.zeros((BLOCK_C,), tl.float32)
    for group in tl.static_range(GROUPS):
        mine = (c >= group * EACH) & (c < (group + 1) * EACH)
        total += tl.where(mine, tl.sum(tl.where(mine, value, 0.0)), 0.0)
    return total


@triton.jit
def _affine(gamma, beta, film, film_stride, row, channel, real, C: tl.constexpr, HAS_FILM: tl.constexpr):
    """1 + s, and scale and shift of normalised numbers: (1 + s) gamma and (1 + s) beta + m."""
    scale, shift = tl.load(gamma + channel, mask=real, other=0.0), tl.load(beta + channel, mask=real, other=0.0)
    more = scale * 0 + 1
    if HAS_FILM:
        more += tl.load(film + row * film_stride + channel, mask=real, other=0.0).to(tl.float32)
        shift = shift * more + tl.load(film + row * film_stride + C + channel, mask=real, other=0.0).to(tl.float32)
        scale *= more
    return more, scale, shift


@triton.jit
def _sum_parts(sums, row, kind, channel, real, C: tl.constexpr, KINDS: tl.constexpr, SPLITS: tl.constexpr):
    """What the programs of a row have summed, put together: sums is (B, SPLITS, KINDS, C)."""
    total = tl.load(sums + (row * SPLITS * KINDS + kind) * C + channel, mask=real, other=0.0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(sums + ((row * SPLITS + split) * KINDS + kind) * C + channel, mask=real, other=0.0)
    return total


@triton.jit
def _moments(
    x, sums, P: tl.constexpr, C: tl.constexpr, SPAN: tl.constexpr, SPLITS: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Sums over positions of x - x_0 and its square, where x_0 is the first position: large means do no harm."""
    row, c = tl.program_id(0), tl.arange(0, BLOCK_C)
    real = c < SPAN
    channel = tl.program_id(1) * SPAN + c
    start = row.to(tl.int64) * P * C
    first = tl.load(x + start + channel, mask=real, other=0.0).to(tl.float32)
    once = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    twice = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    for chunk in tl.static_range(0, P // SPLITS, BLOCK_P):
        p = tl.program_id(2) * (P // SPLITS) + chunk + tl.arange(0, BLOCK_P)
        u = tl.load(x + start + p[:, None] * C + channel[None, :], mask=real[None, :], other=0.0).to(tl.float32)
        u -= first[None, :]
        once += u
        twice += u * u
    place = sums + (row * SPLITS + tl.program_id(2)) * 2 * C + channel
    tl.store(place, tl.sum(once, 0), mask=real)
    tl.store(place + C, tl.sum(twice, 0), mask=real)


@triton.jit
def _norm_forward(
    x, sums, bias, gamma, beta, film, film_stride, y, stats, eps, P: tl.constexpr, C: tl.constexpr, SPAN: tl.constexpr,
    EACH: tl.constexpr, SPLITS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_FILM: tl.constexpr,
):  # fmt: skip
    row, c = tl.program_id(0), tl.arange(0, BLOCK_C)
    real = c < SPAN
    channel = tl.program_id(1) * SPAN + c
    start = row.to(tl.int64) * P * C
    first = tl.load(x + start + channel, mask=real, other=0.0).to(tl.float32)
    added = first * 0
    if HAS_BIAS:
        added = tl.load(bias + channel, mask=real, other=0.0)
    centre = _sum_parts(sums, row, 0, channel, real, C, 2, SPLITS) / P
    spread = _sum_parts(sums, row, 1, channel, real, C, 2, SPLITS) / P - centre * centre  # variance of each channel
    centre += first + added
    mean = _of_group(centre, c, EACH, SPAN // EACH, BLOCK_C) / EACH
    variance = _of_group(spread + (centre - mean) * (centre - mean), c, EACH, SPAN // EACH, BLOCK_C) / EACH
    rstd = 1 / tl.sqrt(variance + eps)
    mean -= added  # from here on the mean of x without its bias
    if tl.program_id(2) == 0:
        tl.store(stats + row * 2 * C + channel, mean, mask=real)
        tl.store(stats + row * 2 * C + C + channel, rstd, mask=real)
    _, scale, shift = _affine(gamma, beta, film, film_stride, row, channel, real, C, HAS_FILM)
    scale *= rstd
    shift -= mean * scale
    for chunk in tl.static_range(0, P // SPLITS, BLOCK_P):
        p = tl.program_id(2) * (P // SPLITS) + chunk + tl.arange(0, BLOCK_P)
        offsets = start + p[:, None] * C + channel[None, :]
        z = tl.load(x + offsets, mask=real[None, :], other=0.0).to(tl.float32) * scale[None, :] + shift[None, :]
        tl.store(y + offsets, (z * tl.sigmoid(z)).to(y.dtype.element_ty), mask=real[None, :])


@triton.jit
def _unit_and_dz(x, dy, offsets, real, mean, rstd, scale, shift):
    """Normalised numbers, and the gradient at the argument of SiLU."""
    unit = (tl.load(x + offsets, mask=real[None, :], other=0.0).to(tl.float32) - mean[None, :]) * rstd[None, :]
    z = unit * scale[None, :] + shift[None, :]
    gate = tl.sigmoid(z)
    dz = tl.load(dy + offsets, mask=real[None, :], other=0.0).to(tl.float32) * gate * (1 + z * (1 - gate))
    return unit, dz


@triton.jit
def _gradient_sums(
    x, stats, gamma, beta, film, film_stride, dy, sums, P: tl.constexpr, C: tl.constexpr, SPAN: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, HAS_FILM: tl.constexpr,
):  # fmt: skip
    """Sums over positions of dz, dz * unit and unit."""
    row, c = tl.program_id(0), tl.arange(0, BLOCK_C)
    real = c < SPAN
    channel = tl.program_id(1) * SPAN + c
    start = row.to(tl.int64) * P * C
    mean = tl.load(stats + row * 2 * C + channel, mask=real, other=0.0)
    rstd = tl.load(stats + row * 2 * C + C + channel, mask=real, other=0.0)
    _, scale, shift = _affine(gamma, beta, film, film_stride, row, channel, real, C, HAS_FILM)
    ones = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    both = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    units = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    for chunk in tl.static_range(0, P // SPLITS, BLOCK_P):
        p = tl.program_id(2) * (P // SPLITS) + chunk + tl.arange(0, BLOCK_P)
        offsets = start + p[:, None] * C + channel[None, :]
        unit, dz = _unit_and_dz(x, dy, offsets, real, mean, rstd, scale, shift)
        ones += dz
        both += dz * unit
        units += unit
    place = sums + (row * SPLITS + tl.program_id(2)) * 3 * C + channel
    tl.store(place, tl.sum(ones, 0), mask=real)
    tl.store(place + C, tl.sum(both, 0), mask=real)
    tl.store(place + 2 * C, tl.sum(units, 0), mask=real)


@triton.jit
def _norm_backward(
    x, sums, stats, gamma, beta, film, film_stride, dy, dx, dfilm, partial, B, P: tl.constexpr, C: tl.constexpr,
    SPAN: tl.constexpr, EACH: tl.constexpr, SPLITS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_FILM: tl.constexpr,
):  # fmt: skip
    row, c = tl.program_id(0), tl.arange(0, BLOCK_C)
    real = c < SPAN
    channel = tl.program_id(1) * SPAN + c
    start = row.to(tl.int64) * P * C
    mean = tl.load(stats + row * 2 * C + channel, mask=real, other=0.0)
    rstd = tl.load(stats + row * 2 * C + C + channel, mask=real, other=0.0)
    more, scale, shift = _affine(gamma, beta, film, film_stride, row, channel, real, C, HAS_FILM)
    dshift = _sum_parts(sums, row, 0, channel, real, C, 3, SPLITS)
    dscale = _sum_parts(sums, row, 1, channel, real, C, 3, SPLITS)
    mean_dz = _of_group(scale * dshift, c, EACH, SPAN // EACH, BLOCK_C) / (P * EACH)
    mean_dz_unit = _of_group(scale * dscale, c, EACH, SPAN // EACH, BLOCK_C) / (P * EACH)
    if tl.program_id(2) == 0:
        tl.store(partial + row * C + channel, dscale * more, mask=real)
        tl.store(partial + (B + row) * C + channel, dshift * more, mask=real)
        if HAS_BIAS:  # the sum of du over positions
            units = _sum_parts(sums, row, 2, channel, real, C, 3, SPLITS)
            dbias = rstd * (scale * dshift - P * mean_dz - mean_dz_unit * units)
            tl.store(partial + (2 * B + row) * C + channel, dbias, mask=real)
        if HAS_FILM:
            g, b = tl.load(gamma + channel, mask=real, other=0.0), tl.load(beta + channel, mask=real, other=0.0)
            tl.store(dfilm + row * 2 * C + channel, (g * dscale + b * dshift).to(dfilm.dtype.element_ty), mask=real)
            tl.store(dfilm + row * 2 * C + C + channel, dshift.to(dfilm.dtype.element_ty), mask=real)
    for chunk in tl.static_range(0, P // SPLITS, BLOCK_P):
        p = tl.program_id(2) * (P // SPLITS) + chunk + tl.arange(0, BLOCK_P)
        offsets = start + p[:, None] * C + channel[None, :]
        unit, dz = _unit_and_dz(x, dy, offsets, real, mean, rstd, scale, shift)
        du = rstd[None, :] * (dz * scale[None, :] - mean_dz[None, :] - unit * mean_dz_unit[None, :])
        tl.store(dx + offsets, du.to(dx.dtype.element_ty), mask=real[None, :])


class _NormSiLU(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, gamma: Tensor, beta: Tensor, film: Tensor | None, groups: int
    ) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        batch, channels, height, width = x.shape
        ctx.plan = plan = _Plan.of(batch, height * width, channels, groups)
        y, stats = torch.empty_like(x), torch.empty(batch, 2, channels, device=x.device)
        sums = torch.empty(batch, plan.splits, 2, channels, device=x.device)
        if film is not None and film.stride(1) != 1:
            film = film.contiguous()
        _moments[plan.grid](x, sums, **plan.shape)
        _norm_forward[plan.grid](
            x, sums, gamma if bias is None else bias, gamma, beta, gamma if film is None else film,
            0 if film is None else film.stride(0), y, stats, 1e-5, **plan.shape, EACH=plan.each,
            HAS_BIAS=bias is not None, HAS_FILM=film is not None,
        )  # fmt: skip
        ctx.save_for_backward(x, gamma, beta, film, stats)
        ctx.has_bias = bias is not None
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor):
        x, gamma, beta, film, stats = ctx.saved_tensors
        dy = dy.to(x.dtype).contiguous(memory_format=torch.channels_last)
        batch, channels = x.shape[:2]
        plan, dx = ctx.plan, torch.empty_like(x)
        dfilm = None if film is None else torch.empty(film.shape, dtype=film.dtype, device=film.device)
        partial = torch.empty(2 + ctx.has_bias, batch, channels, device=x.device)
        sums = torch.empty(batch, plan.splits, 3, channels, device=x.device)
        stride, film = (0, gamma) if film is None else (film.stride(0), film)
        _gradient_sums[plan.grid](
            x, stats, gamma, beta, film, stride, dy, sums, **plan.shape, HAS_FILM=dfilm is not None
        )
        _norm_backward[plan.grid](
            x, sums, stats, gamma, beta, film, stride, dy, dx, gamma if dfilm is None else dfilm, partial, batch,
            **plan.shape, EACH=plan.each, HAS_BIAS=ctx.has_bias, HAS_FILM=dfilm is not None,
        )  # fmt: skip
        total = partial.sum(1)
        return dx, total[2] if ctx.has_bias else None, total[0], total[1], dfilm, None


@dataclass(frozen=True)
class _Plan:
    """How a map is cut among programs, and the compile-time numbers that follow.

    A program takes whole groups of a row's channels, so that neighbouring threads read neighbouring numbers, and a
    part of its positions. Sums come first, from all parts; a second kernel puts them together and uses them.
    """

    grid: tuple[int, int, int]
    splits: int
    each: int
    shape: dict[str, int]

    @staticmethod
    @functools.cache
    def of(batch: int, positions: int, channels: int, groups: int) -> _Plan:
        halves = 2 if channels > 128 and groups % 2 == 0 else 1
        span = channels // halves
        block_c = triton.next_power_of_2(span)
        splits = 1
        while positions % (2 * splits) == 0 and positions // splits > 64 and batch * halves * splits < PROGRAMS:
            splits *= 2
        block_p = 1
        while (positions // splits) % (2 * block_p) == 0 and 2 * block_p * block_c <= IN_FLIGHT:
            block_p *= 2
        shape = {"P": positions, "C": channels, "SPAN": span, "SPLITS": splits, "BLOCK_P": block_p, "BLOCK_C": block_c}
        warps = min(8, max(1, block_p * block_c // 512))
        return _Plan((batch, halves, splits), splits, channels // groups, {**shape, "num_warps": warps})


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
            dy, partial, rows, C=channels, BLOCK_C=triton.next_power_of_2(channels), ROWS=ROWS, BLOCK=32
        )
        return dy, partial.sum(0), dy if ctx.has_skip else None


def add_bias(x: Tensor, bias: Tensor, skip: Tensor | None = None) -> Tensor:
    """x + bias (+ skip), (B, C, H, W) in the precision of x; the bias is (C,) in single precision."""
    return _AddBias.apply(x, bias, skip)
