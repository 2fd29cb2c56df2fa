"""Kernels for feature maps of a UNet, and its layers made of them: what stands between two convolutions in one pass.

PyTorch's GroupNorm leaves channels_last and, under autocast, single precision, so that norm, film and SiLU are a dozen
kernels with copies between layouts; here they are one forward and one backward. Each function says what it computes;
`backbones.unet` holds the plain form, which everything but a GPU runs, and tests hold the two together.

All maps are channels_last. Sums are in single precision and in a fixed order, so equal inputs give equal bits. For the
gradient of a bias each program writes what it has found, and the last to finish adds it all up: it knows by a counter.
Gradients of parameters run beside the rest where an `Aside` is given.
"""

# Triton's names are no types for a checker, and tensors in a kernel have no shapes to annotate.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
# ruff: noqa: ANN001, ANN202, N803

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as nnf

from emoe.kernels import convs, norms
from emoe.kernels.aside import Aside

Result = TypeVar("Result")
PROGRAMS = 128  # about as many as a large GPU has multiprocessors
WIDTH = 36  # channels that one program treats, about: a map with more is cut where its groups allow
LARGEST = 16384  # numbers of a map that a program holds at once, at most
ROUND = 2048  # numbers that a program could treat while it waits for memory, once in each round of a loop
UNROLL = 2  # rounds of a loop whose loads may be under way together
WARPS = 8
ROWS = 128  # rows of a map that one program adds up, at least
ADDERS = 256  # programs that add up the rows of a map, about


@triton.jit
def _sigmoid(z):
    """1 / (1 + exp(-z)), in a third of the instructions of `tl.sigmoid`: arithmetic is what the norms wait for."""
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
        found = value
    else:
        found = tl.gather(value, tl.arange(0, LANES) % WIDTH, 0)
    return found


@triton.jit
def _of_group(value, EACH: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_C: tl.constexpr):
    """At each channel the sum of `value` over the channels of its group; EACH channels make a group."""
    mine = (tl.arange(0, BLOCK_C) // EACH)[:, None] == tl.arange(0, BLOCK_G)[None, :]
    total = tl.sum(tl.where(mine, value[:, None], 0.0), 0)
    return tl.sum(tl.where(mine, total[None, :], 0.0), 1)


@triton.jit
def _add_up(
    partial, sums, channel, real, ROWS: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr
):
    """Store the sums over (ROWS, C) numbers that other programs have written, in a fixed order."""
    total = tl.zeros((BLOCK, BLOCK_C), tl.float32)
    for begin in range(0, ROWS, BLOCK):
        row = begin + tl.arange(0, BLOCK)
        inside = (row < ROWS)[:, None] & real[None, :]
        at = partial + row[:, None] * C + channel[None, :]
        total += tl.load(at, mask=inside, other=0.0, cache_modifier=".cg")  # the cache of this processor may be old
    tl.store(sums + channel, tl.sum(total, 0), mask=real)


@triton.jit
def _is_last(done, programs):
    """Whether all other programs have been here, by a counter that began at 0; what they wrote can be read then."""
    tl.debug_barrier()  # all threads have written
    return tl.atomic_add(done, 1, sem="acq_rel", scope="gpu") == programs - 1


@triton.jit
def _norm_forward(
    x, bias, gamma, beta, film, film_stride, y, stats, eps, P: tl.constexpr, C: tl.constexpr,
    EACH: tl.constexpr, WIDTH: tl.constexpr, COUNT: tl.constexpr, LANES: tl.constexpr, R: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_G: tl.constexpr, UNROLL: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_FILM: tl.constexpr,
):  # fmt: skip
    row, lane, c = tl.program_id(0), tl.arange(0, LANES), tl.arange(0, BLOCK_C)
    real = c < WIDTH
    channel = tl.program_id(1) * WIDTH + c
    start = row.to(tl.int64) * P * C + tl.program_id(1) * WIDTH
    offset, place = lane // WIDTH * C + lane % WIDTH, tl.where(lane < COUNT * WIDTH, lane // WIDTH, P)
    # Sums of distances from the first position: the difference of two large numbers would lose the variance.
    first = tl.load(x + start + lane % WIDTH)
    origin = first.to(tl.float32)
    once = tl.zeros((R, LANES), tl.float32)
    twice = tl.zeros((R, LANES), tl.float32)
    for chunk in tl.range(0, P, R * COUNT, loop_unroll_factor=UNROLL):
        p = (chunk + tl.arange(0, R) * COUNT)[:, None]
        inside = p + place[None, :] < P
        u = tl.load(x + start + p * C + offset[None, :], mask=inside, other=first[None, :]).to(tl.float32)
        u -= origin[None, :]  # 0 outside
        once += u
        twice += u * u
    centre = _to_channels(tl.sum(once, 0), COUNT, WIDTH, BLOCK_N, BLOCK_C) / P
    spread = _to_channels(tl.sum(twice, 0), COUNT, WIDTH, BLOCK_N, BLOCK_C) / P - centre * centre  # variances
    centre += tl.load(x + start + c, mask=real, other=0.0).to(tl.float32)
    if HAS_BIAS:
        centre += tl.load(bias + channel, mask=real, other=0.0)
    mean = _of_group(centre, EACH, BLOCK_G, BLOCK_C) / EACH
    centre -= mean
    variance = _of_group(spread + centre * centre, EACH, BLOCK_G, BLOCK_C) / EACH
    rstd = 1 / tl.sqrt(variance + eps)
    scale, shift = tl.load(gamma + channel, mask=real, other=0.0), tl.load(beta + channel, mask=real, other=0.0)
    if HAS_FILM:
        more = 1 + tl.load(film + row * film_stride + channel, mask=real, other=0.0).to(tl.float32)
        shift = shift * more + tl.load(film + row * film_stride + C + channel, mask=real, other=0.0).to(tl.float32)
        scale *= more
    if HAS_BIAS:
        mean -= tl.load(bias + channel, mask=real, other=0.0)  # from here on the mean of x without its bias
    tl.store(stats + row * 3 * C + channel, mean, mask=real)
    tl.store(stats + row * 3 * C + C + channel, rstd, mask=real)
    tl.store(stats + row * 3 * C + 2 * C + channel, centre, mask=real)
    scale *= rstd
    shift = _to_lanes(shift - mean * scale, COUNT, WIDTH, LANES)
    scale = _to_lanes(scale, COUNT, WIDTH, LANES)
    for chunk in tl.range(0, P, R * COUNT, loop_unroll_factor=UNROLL):
        p = (chunk + tl.arange(0, R) * COUNT)[:, None]
        inside, at = p + place[None, :] < P, start + p * C + offset[None, :]
        u = tl.load(x + at, mask=inside, other=first[None, :]).to(tl.float32)
        z = u * scale[None, :] + shift[None, :]
        tl.store(y + at, (z * _sigmoid(z)).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _norm_backward(
    x, gamma, beta, film, film_stride, stats, dy, dskip, dx, dfilm, partial, B: tl.constexpr, P: tl.constexpr,
    C: tl.constexpr, EACH: tl.constexpr, WIDTH: tl.constexpr, COUNT: tl.constexpr, LANES: tl.constexpr, R: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_G: tl.constexpr, UNROLL: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_FILM: tl.constexpr, HAS_SKIP: tl.constexpr,
):  # fmt: skip
    row, lane, c = tl.program_id(0), tl.arange(0, LANES), tl.arange(0, BLOCK_C)
    real = c < WIDTH
    channel = tl.program_id(1) * WIDTH + c
    start = row.to(tl.int64) * P * C + tl.program_id(1) * WIDTH
    offset, place = lane // WIDTH * C + lane % WIDTH, tl.where(lane < COUNT * WIDTH, lane // WIDTH, P)
    mean = tl.load(stats + row * 3 * C + channel, mask=real, other=0.0)
    rstd = tl.load(stats + row * 3 * C + C + channel, mask=real, other=0.0)
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
        inside, at = p + place[None, :] < P, start + p * C + offset[None, :]
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
        inside, at = p + place[None, :] < P, start + p * C + offset[None, :]
        u = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) - middle[None, :]
        dz = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        dz *= _silu_slope(u * slope[None, :] + level[None, :])
        du = dz * slope[None, :] + (u * slope_du[None, :] + level_du[None, :])
        if HAS_SKIP:
            du += tl.load(dskip + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx + at, du.to(dx.dtype.element_ty), mask=inside)
    tl.store(partial + row * C + channel, dscale * more, mask=real)
    tl.store(partial + (B + row) * C + channel, dshift * more, mask=real)
    if HAS_BIAS:  # the sum of du over positions
        centre = tl.load(stats + row * 3 * C + 2 * C + channel, mask=real, other=0.0)
        dbias = rstd * (scale * dshift - P * mean_dz - mean_dz_unit * P * rstd * centre)
        tl.store(partial + (2 * B + row) * C + channel, dbias, mask=real)
    if HAS_FILM:
        tl.store(dfilm + row * 2 * C + channel, (g * dscale + b * dshift).to(dfilm.dtype.element_ty), mask=real)
        tl.store(dfilm + row * 2 * C + C + channel, dshift.to(dfilm.dtype.element_ty), mask=real)


def _map_like(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A map of this shape to write to."""
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)


class _NormSiLU(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        gamma: Tensor,
        beta: Tensor,
        film: Tensor | None,
        groups: int,
        aside: Aside,
    ):
        ctx.set_materialize_grads(False)
        x = x.contiguous(memory_format=torch.channels_last)
        batch, channels, height, width = x.shape
        y = torch.empty_like(x)
        stats = torch.empty(batch, 3, channels, device=x.device)
        if film is not None and film.stride(1) != 1:
            film = film.contiguous()
        ctx.has_bias, ctx.groups, ctx.aside = bias is not None, groups, aside
        ctx.save_for_backward(x, gamma, beta, film, stats)
        if norms.fits(x, film, groups):
            norms.forward(x, bias, gamma, beta, film, groups, y, stats)
            return y, x
        parts, options = _options(batch, height * width, channels, groups)
        _norm_forward[(batch, parts)](
            x, gamma if bias is None else bias, gamma, beta, gamma if film is None else film,
            0 if film is None else film.stride(0), y, stats, 1e-5, HAS_BIAS=bias is not None,
            HAS_FILM=film is not None, **options,
        )  # fmt: skip
        return y, x

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dskip: Tensor | None):
        x, gamma, beta, film, stats = ctx.saved_tensors
        if dy is None:
            return dskip, None, None, None, None, None, None
        dy = dy.to(x.dtype).contiguous(memory_format=torch.channels_last)
        if dskip is not None:
            dskip = dskip.to(x.dtype).contiguous(memory_format=torch.channels_last)
        batch, channels, height, width = x.shape
        dx = torch.empty_like(x)
        dfilm = None if film is None else torch.empty(film.shape, dtype=film.dtype, device=film.device)
        partial = torch.empty(2 + ctx.has_bias, batch, channels, device=x.device)
        if norms.fits(x, film, ctx.groups):
            norms.backward(x, gamma, beta, film, ctx.groups, stats, dy, dskip, dx, dfilm, partial)
        else:
            parts, options = _options(batch, height * width, channels, ctx.groups)
            _norm_backward[(batch, parts)](
                x, gamma, beta, gamma if film is None else film, 0 if film is None else film.stride(0), stats, dy,
                dy if dskip is None else dskip, dx, gamma if dfilm is None else dfilm, partial, B=batch,
                HAS_BIAS=ctx.has_bias, HAS_FILM=film is not None, HAS_SKIP=dskip is not None, **options,
            )  # fmt: skip
        dgamma, dbeta, *dbias = ctx.aside(_sum_of_rows, partial)
        return dx, dbias[0] if dbias else None, dgamma, dbeta, dfilm, None, None


def _sum_of_rows(partial: Tensor) -> tuple[Tensor, ...]:
    """(N, B, C) -> N times (C,)."""
    return partial.sum(1).unbind()


@functools.cache
def _tile(positions: int, width: int, largest: int, wait: int) -> tuple[int, int]:
    """How many numbers a program reads at a time, (R, LANES), for the least work on maps (positions, width)."""
    narrow = triton.next_power_of_2(width)
    tiles = []
    for lanes in (narrow << i for i in range(11)):
        for r in (1 << i for i in range(20)):
            rounds = triton.cdiv(triton.cdiv(positions, lanes // width), r)
            # With one round a program holds what it has read, and does nothing twice.
            work = rounds * (r * lanes + wait) * (1 if rounds == 1 else 2)
            if r * lanes <= max(largest, narrow) and lanes <= max(1024, narrow):
                tiles.append((work, lanes, r))
    _, lanes, r = min(tiles)
    return r, lanes


def _options(batch: int, positions: int, channels: int, groups: int) -> tuple[int, dict[str, Any]]:
    """In how many parts the channels are cut, and compile-time numbers of both kernels.

    A program takes all positions of a row and whole groups of its channels, so that neighbouring threads read
    neighbouring numbers. It reads (R, LANES) numbers at a time, both powers of 2, with the channels of COUNT positions
    side by side: 36 or 72 channels alone would leave nearly half of the lanes idle.
    """
    parts = 1
    while groups // parts % 2 == 0 and (channels // parts > WIDTH or parts == 1 and batch < PROGRAMS):
        parts *= 2
    width = channels // parts
    r, lanes = _tile(positions, width, LARGEST, ROUND)
    return parts, {
        "P": positions, "C": channels, "EACH": channels // groups, "WIDTH": width, "COUNT": lanes // width,
        "LANES": lanes, "R": r, "BLOCK_N": triton.next_power_of_2(lanes // width),
        "BLOCK_C": triton.next_power_of_2(width), "BLOCK_G": triton.next_power_of_2(groups // parts),
        "UNROLL": UNROLL, "num_warps": min(WARPS, max(1, r * lanes // 512)),
    }  # fmt: skip


def norm_silu(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor,
    groups: int,
    *,
    bias: Tensor | None = None,
    film: Tensor | None = None,
    aside: Aside | None = None,
) -> tuple[Tensor, Tensor]:
    """SiLU((1 + s) (gamma norm(x + bias) + beta) + h), (B, C, H, W) in and out, in the precision of x; and x itself.

    norm is over the H * W * C / G numbers of each group of channels, with 1e-5 added to the variance. Who reads x for
    something else as well takes the second result: the two gradients are then added on the way.

    Args:
        x: A map.
        gamma: (C,), single precision.
        beta: (C,), single precision.
        groups: G, which divides C.
        bias: (C,), of the convolution that made x; single precision.
        film: (B, 2C), s and h; None: both 0.
        aside: Where the gradients of gamma, beta and bias are added up.
    """
    return _NormSiLU.apply(x, bias, gamma, beta, film, groups, aside or _at_once)


def _at_once(function: Callable[..., Result], *args: Any) -> Result:
    return function(*args)


@triton.jit
def _add_forward(x, skip, bias, y, count, C: tl.constexpr, BLOCK: tl.constexpr, HAS_SKIP: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    value = tl.load(x + at, mask=inside).to(tl.float32) + tl.load(bias + at % C, mask=inside)
    if HAS_SKIP:
        value += tl.load(skip + at, mask=inside).to(tl.float32)
    tl.store(y + at, value.to(y.dtype.element_ty), mask=inside)


def _added(x: Tensor, bias: Tensor | None, skip: Tensor | None) -> Tensor:
    """x + bias (+ skip), maps in the precision of x, the bias in single precision."""
    if bias is None:
        return x if skip is None else x + skip
    y = torch.empty_like(x)
    _add_forward[(triton.cdiv(x.numel(), 2048),)](
        x, x if skip is None else skip, bias, y, x.numel(), C=x.shape[1], BLOCK=2048, HAS_SKIP=skip is not None
    )
    return y


@triton.jit
def _join_forward(x, skip, bias, y, count, C: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row, c = at // (2 * C), (at % (2 * C)).to(tl.int32)
    mine, other = (at < count) & (c < C), (at < count) & (c >= C)
    value = tl.load(x + row * C + c, mask=mine, other=0.0).to(tl.float32) + tl.load(bias + c, mask=mine, other=0.0)
    value += tl.load(skip + row * C + (c - C), mask=other, other=0.0).to(tl.float32)
    tl.store(y + at, value.to(y.dtype.element_ty), mask=at < count)


@triton.jit
def _sum_rows(
    x, dx, dskip, partial, sums, done, rows, PROGRAMS: tl.constexpr, C: tl.constexpr, BLOCK_C: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    c = tl.arange(0, BLOCK_C)
    total = tl.zeros((BLOCK, BLOCK_C), tl.float32)
    for start in range(0, ROWS, BLOCK):
        row = tl.program_id(0).to(tl.int64) * ROWS + start + tl.arange(0, BLOCK)
        inside = (row < rows)[:, None] & (c < C)[None, :]
        if SPLIT:  # rows of 2C numbers, whose halves go apart
            at, half = row[:, None] * (2 * C) + c[None, :], row[:, None] * C + c[None, :]
            value = tl.load(x + at, mask=inside, other=0.0)
            tl.store(dx + half, value, mask=inside)
            tl.store(dskip + half, tl.load(x + at + C, mask=inside, other=0.0), mask=inside)
        else:
            value = tl.load(x + row[:, None] * C + c[None, :], mask=inside, other=0.0)
        total += value.to(tl.float32)
    tl.store(partial + tl.program_id(0) * C + c, tl.sum(total, 0), mask=c < C)
    if _is_last(done, PROGRAMS):
        _add_up(partial, sums, c, c < C, PROGRAMS, C, BLOCK, BLOCK_C)


def _summed(dy: Tensor, halves: tuple[Tensor, ...] | None = None) -> Tensor:
    """Sums of a map over rows and positions, (C,) in single precision; of the first half, where halves are written."""
    first, second = (dy, dy) if halves is None else halves
    channels, rows = first.shape[1], first.numel() // first.shape[1]
    each = max(ROWS, triton.next_power_of_2(triton.cdiv(rows, ADDERS)))
    programs = triton.cdiv(rows, each)
    partial, sums = torch.empty(programs, channels, device=dy.device), torch.empty(channels, device=dy.device)
    done = torch.zeros(1, dtype=torch.int32, device=dy.device)
    _sum_rows[(programs,)](
        dy, first, second, partial, sums, done, rows, PROGRAMS=programs, C=channels,
        BLOCK_C=triton.next_power_of_2(channels), ROWS=each, BLOCK=64, SPLIT=halves is not None, num_warps=8,
    )  # fmt: skip
    return sums


class _JoinBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, skip: Tensor):
        x = x.contiguous(memory_format=torch.channels_last)
        skip = skip.to(x.dtype).contiguous(memory_format=torch.channels_last)
        batch, channels, height, width = x.shape
        y = _map_like(x, (batch, 2 * channels, height, width))
        _join_forward[(triton.cdiv(y.numel(), 2048),)](x, skip, bias, y, y.numel(), C=channels, BLOCK=2048)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor):
        dy = dy.contiguous(memory_format=torch.channels_last)
        batch, channels, height, width = dy.shape
        halves = tuple(_map_like(dy, (batch, channels // 2, height, width)) for _ in range(2))
        return halves[0], _summed(dy, halves), halves[1]


def join_bias(x: Tensor, bias: Tensor, skip: Tensor) -> Tensor:
    """[x + bias, skip] along the channels, twice (B, C, H, W) to (B, 2C, H, W), in the precision of x."""
    return _JoinBias.apply(x, bias, skip)


@triton.jit
def _embed_forward(x, table, y, count, C: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    value = tl.load(table + tl.load(x + at // C, mask=inside, other=0) * C + at % C, mask=inside)
    tl.store(y + at, value.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _embed_backward(
    x, dy, partial, rows, V: tl.constexpr, C: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    c, v = tl.arange(0, BLOCK_C), tl.program_id(1)
    total = tl.zeros((BLOCK, BLOCK_C), tl.float32)
    for start in range(0, ROWS, BLOCK):
        row = tl.program_id(0).to(tl.int64) * ROWS + start + tl.arange(0, BLOCK)
        mine = tl.load(x + row, mask=row < rows, other=V) == v
        inside = mine[:, None] & (c < C)[None, :]
        total += tl.load(dy + row[:, None] * C + c[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(partial + (tl.program_id(0) * V + v) * C + c, tl.sum(total, 0), mask=c < C)


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, table: Tensor, dtype: torch.dtype):
        x, table = x.contiguous(), table.contiguous()
        y = torch.empty(*x.shape, table.shape[1], dtype=dtype, device=x.device)
        _embed_forward[(triton.cdiv(y.numel(), 2048),)](x, table, y, y.numel(), C=table.shape[1], BLOCK=2048)
        ctx.save_for_backward(x)
        ctx.size = table.shape
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor):
        (x,) = ctx.saved_tensors
        return None, _sum_by_symbol(x, dy, *ctx.size), None


def _sum_by_symbol(x: Tensor, dy: Tensor, symbols: int, channels: int) -> Tensor:
    """(V, C): the sum of dy (*N, C) over where x (*N) is each symbol."""
    programs, dy = triton.cdiv(x.numel(), ROWS), dy.contiguous()
    partial = torch.empty(programs, symbols, channels, device=x.device)
    _embed_backward[(programs, symbols)](
        x, dy, partial, x.numel(), V=symbols, C=channels, BLOCK_C=triton.next_power_of_2(channels), ROWS=ROWS, BLOCK=64
    )
    return partial.sum(0)


def embed(x: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor:
    """table[x], integers (*N) and a table (V, C) to (*N, C) in `dtype`; for few symbols, all of which are read back."""
    return _Embed.apply(x, table, dtype)


@triton.jit
def _double(small, large, C: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr, BACK: tl.constexpr):
    line = tl.program_id(0).to(tl.int64)  # of all rows of pixels in all maps
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < W * C
    here, there = small + line * (W * C) + at, large + line * (4 * W * C) + at // C * (2 * C) + at % C
    if BACK:
        value = tl.load(there, mask=inside).to(tl.float32) + tl.load(there + C, mask=inside).to(tl.float32)
        value += tl.load(there + 2 * W * C, mask=inside).to(tl.float32)
        value += tl.load(there + 2 * W * C + C, mask=inside).to(tl.float32)
        tl.store(here, value.to(small.dtype.element_ty), mask=inside)
    else:
        value = tl.load(here, mask=inside)
        tl.store(there, value, mask=inside)
        tl.store(there + C, value, mask=inside)
        tl.store(there + 2 * W * C, value, mask=inside)
        tl.store(there + 2 * W * C + C, value, mask=inside)


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor):
        x = x.contiguous(memory_format=torch.channels_last)
        y = _map_like(x, (*x.shape[:2], 2 * x.shape[2], 2 * x.shape[3]))
        _pair(x, y, back=False)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor):
        dy = dy.contiguous(memory_format=torch.channels_last)
        dx = _map_like(dy, (*dy.shape[:2], dy.shape[2] // 2, dy.shape[3] // 2))
        _pair(dx, dy, back=True)
        return dx


def _pair(small: Tensor, large: Tensor, *, back: bool) -> None:
    batch, channels, height, width = small.shape
    block = min(2048, triton.next_power_of_2(width * channels))
    _double[(batch * height, triton.cdiv(width * channels, block))](
        small, large, C=channels, W=width, BLOCK=block, BACK=back, num_warps=max(1, block // 256)
    )


def doubled(x: Tensor) -> Tensor:
    """Each pixel copied to 2x2: (B, C, H, W) to (B, C, 2H, 2W)."""
    return _Doubled.apply(x)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        master: Tensor,
        bias: Tensor | None,
        skip: Tensor | None,
        weight: Tensor,
        stride: int,
        padding: int,
        aside: Aside,
    ):
        x = x.contiguous(memory_format=torch.channels_last)
        if skip is not None:
            skip = skip.to(x.dtype).contiguous(memory_format=torch.channels_last)
        ctx.save_for_backward(x, weight)
        ctx.own = 2 * padding + 1 == weight.shape[2] and convs.fits(x, weight, stride)
        ctx.steps, ctx.aside, ctx.dtype = (stride, padding), aside, master.dtype
        if ctx.own:
            return convs.forward(x, weight, bias, skip, stride=stride)
        return _added(nnf.conv2d(x, weight, stride=stride, padding=padding), bias, skip)

    @staticmethod
    def backward(ctx: Any, dy: Tensor):
        x, weight = ctx.saved_tensors
        dy = dy.to(x.dtype).contiguous(memory_format=torch.channels_last)
        dx = dw = dbias = None
        stride = ctx.steps[0]
        if ctx.needs_input_grad[0]:
            if ctx.own and stride == 1:
                dx = convs.forward(dy, weight, turned=True)
            elif ctx.own and stride == 2 and weight.shape[2] == 3:
                dx = convs.input_gradient(dy, weight)
            else:
                dx = _gradient(0, x.dtype, x, dy, weight, *ctx.steps)
        if ctx.needs_input_grad[1]:
            if ctx.own:
                dw, dbias = ctx.aside(convs.weight_gradient, x, dy, ctx.dtype, stride, weight.shape[2])
            else:
                dw = ctx.aside(_gradient, 1, ctx.dtype, x, dy, weight, *ctx.steps)
        if ctx.needs_input_grad[2] and dbias is None:
            dbias = ctx.aside(_summed, dy)
        dbias = dbias if ctx.needs_input_grad[2] else None
        return dx, dw, dbias, dy if ctx.needs_input_grad[3] else None, None, None, None, None


def _gradient(of: int, dtype: torch.dtype, x: Tensor, dy: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
    """The gradient of a convolution's input (0) or weights (1), by cuDNN, in `dtype`."""
    mask, steps = [of == 0, of == 1, False], ([stride] * 2, [padding] * 2, [1, 1])
    return torch.ops.aten.convolution_backward(dy, x, weight, None, *steps, False, [0, 0], 1, mask)[of].to(dtype)


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    skip: Tensor | None = None,
    *,
    rounded: Tensor | None = None,
    stride: int = 1,
    padding: int = 1,
    aside: Aside | None = None,
) -> Tensor:
    """A convolution, (B, I, H, W) and (O, I, K, K) of one precision to (B, O, H', W'), + bias + skip.

    Half precision and one tap or 3x3 are for `convs`, all else for cuDNN.

    Args:
        x: A map.
        weight: Its weights.
        bias: (O,) in single precision.
        skip: (B, O, H', W').
        rounded: The weights in the precision of x, where `weight` has another: it then only gets the gradient, in its
            own precision and without a rounding in between.
        stride: Distance between the positions of the result.
        padding: Zeros on each side.
        aside: Where the gradients of weights and bias are computed.
    """
    with torch.autocast(x.device.type, enabled=False):
        used = weight.detach() if rounded is None else rounded
        return _Convolution.apply(x, weight, bias, skip, used, stride, padding, aside or _at_once)
