"""Convolutions of 3x3 taps, or one, for few channels, as products of matrices on tensor cores.

cuDNN pads 72 channels to a tile of 128. Here the channels of one result are a power of 2 and the rest beside it
(64 + 16), and taps and channels of the input lie side by side in one sum of 9 * I numbers, whatever I is. Maps and
weights are channels_last, so that neighbouring channels of a tap are neighbours in memory: I and O are multiples of 8,
O not where there is one tap. Sums are in single precision and in a fixed order, so equal inputs give equal bits.
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

from emoe.kernels import conv3x3

PROGRAMS = 132  # multiprocessors of a large GPU
# Options of the two kernels, the fastest of those that were tried on an H200.
LARGE: dict[str, Any] = {"BLOCK_P": 256, "BLOCK_K": 64, "num_warps": 8, "num_stages": 4}
WIDE: dict[str, Any] = {"BLOCK_P": 128, "BLOCK_K": 64, "num_warps": 4, "num_stages": 3}
MEDIUM: dict[str, Any] = {"BLOCK_P": 128, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3}
SMALL: dict[str, Any] = {"BLOCK_P": 64, "BLOCK_K": 64, "num_warps": 4, "num_stages": 4}
WEIGHT: dict[str, Any] = {"BLOCK_M": 256, "BLOCK_P": 64, "num_warps": 8, "num_stages": 3}
WEIGHT_WIDE: dict[str, Any] = {"BLOCK_M": 128, "BLOCK_P": 64, "num_warps": 4, "num_stages": 4}


@triton.jit
def _taps_inside(p, end, H: tl.constexpr, W: tl.constexpr, STRIDE: tl.constexpr, TAPS: tl.constexpr):
    """A bit for each of the taps at positions p of all results: whether it lies inside; 0 from `end` on.

    H and W are the map's, and multiples of the stride.
    """
    if TAPS == 1:
        bits = tl.where(p < end, 1, 0)
    else:
        w, h = p % (W // STRIDE) * STRIDE, p // (W // STRIDE) % (H // STRIDE) * STRIDE
        vertical = tl.where(h > 0, 0b000000111, 0) | tl.where(h < H - 1, 0b111111000, 0b000111000)
        horizontal = tl.where(w > 0, 0b001001001, 0) | tl.where(w < W - 1, 0b110110110, 0b010010010)
        bits = tl.where(p < end, vertical & horizontal, 0)
    return bits


@triton.jit
def _under(x, begin, p, W: tl.constexpr, IN: tl.constexpr, STRIDE: tl.constexpr):
    """Where the positions of the maps lie that are under positions begin + p of the results."""
    if STRIDE == 1:
        found = x + begin.to(tl.int64) * IN + p * IN
    else:
        q = begin + p
        found = x + (q // (W // STRIDE)).to(tl.int64) * (STRIDE * W * IN) + q % (W // STRIDE) * (STRIDE * IN)
    return found


@triton.jit
def _tap_and_offset(k, W: tl.constexpr, IN: tl.constexpr, TAPS: tl.constexpr):
    """Of number k of TAPS * I: its tap, TAPS where there is none; where it lies, seen from channel 0 of the middle."""
    tap = k // IN
    if TAPS == 1:
        offset = k
    else:
        offset = k + (tap // 3 * (W - 3) - W - 1) * IN
    return tap, offset


@triton.jit
def _store(
    y, bias, skip, row, inside, o, value, OUT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SKIP: tl.constexpr
):  # fmt: skip
    """Write channels o of a result, with what is to be added to it."""
    at, real = row[:, None] * OUT + o[None, :], inside[:, None] & (o < OUT)[None, :]
    if HAS_BIAS:
        value += tl.load(bias + o, mask=o < OUT, other=0.0)[None, :]
    if HAS_SKIP:
        value += tl.load(skip + at, mask=real, other=0.0).to(tl.float32)
    tl.store(y + at, value.to(y.dtype.element_ty), mask=real)


@triton.jit
def _forward(
    x, weight, bias, skip, y, count, H: tl.constexpr, W: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr,
    TAPS: tl.constexpr, STRIDE: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
    MORE: tl.constexpr, TURNED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SKIP: tl.constexpr,
):  # fmt: skip
    begin = tl.program_id(0) * BLOCK_P
    first = tl.program_id(1) * (BLOCK_N + MORE)
    p, o, more = tl.arange(0, BLOCK_P), first + tl.arange(0, BLOCK_N), first + BLOCK_N + tl.arange(0, max(MORE, 1))
    bits = _taps_inside(begin + p, count, H, W, STRIDE, TAPS)
    at = _under(x, begin, p[:, None], W, IN, STRIDE)
    total = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
    rest = tl.zeros((BLOCK_P, max(MORE, 1)), tl.float32)
    for start in range(0, TAPS * IN, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        tap, offset = _tap_and_offset(k, W, IN, TAPS)
        value = tl.load(at + offset[None, :], mask=(bits[:, None] >> tap[None, :]) & 1 != 0, other=0.0)
        real = (k < TAPS * IN)[:, None]
        if TURNED:  # weights (IN, OUT, 3, 3), and taps from the last to the first
            there = weight + (k % IN * (TAPS * OUT) + (TAPS - 1 - tap) * OUT)[:, None]
        else:
            there = weight + k[:, None]
        column: tl.constexpr = 1 if TURNED else TAPS * IN
        w = tl.load(there + o[None, :] * column, mask=real & (o < OUT)[None, :], other=0.0)
        total = tl.dot(value, w, total, input_precision="ieee")
        if MORE > 0:
            w = tl.load(there + more[None, :] * column, mask=real & (more < OUT)[None, :], other=0.0)
            rest = tl.dot(value, w, rest, input_precision="ieee")
    row, inside = begin.to(tl.int64) + p, begin + p < count
    _store(y, bias, skip, row, inside, o, total, OUT, HAS_BIAS, HAS_SKIP)
    if MORE > 0:
        _store(y, bias, skip, row, inside, more, rest, OUT, HAS_BIAS, HAS_SKIP)


@triton.jit
def _by_input(
    dy, weight, dx, count, H: tl.constexpr, W: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, MORE: tl.constexpr,
):  # fmt: skip
    """The gradient of the input where the stride is 2: H, W are the result's, IN the input's channels, OUT dy's.

    Of the four pixels (2a + r, 2b + c) under one of dy, each program has one: r and c. An even line has the middle line
    of taps at a; an odd one the first at a + 1 and the last at a. With columns alike these are 1, 2, 2 or 4 taps.
    """
    begin, first = tl.program_id(0) * BLOCK_P, tl.program_id(1) * (BLOCK_N + MORE)
    r, c = tl.program_id(2) // 2, tl.program_id(2) % 2
    p, n, more = tl.arange(0, BLOCK_P), first + tl.arange(0, BLOCK_N), first + BLOCK_N + tl.arange(0, max(MORE, 1))
    q = begin + p
    a, b = q // W % H, q % W
    at = dy + begin.to(tl.int64) * OUT + p[:, None] * OUT
    total = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
    rest = tl.zeros((BLOCK_P, max(MORE, 1)), tl.float32)
    terms = (1 + r) * (1 + c) * OUT
    for start in range(0, terms, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        tap = k // OUT
        line, column = tap // (1 + c), tap % (1 + c)
        down, right = r * (1 - line), c * (1 - column)  # where dy is read, seen from (a, b)
        there = weight + (k % OUT * (9 * IN) + ((1 - r + 2 * line) * 3 + 1 - c + 2 * column) * IN)[:, None]
        inside = (a[:, None] + down[None, :] < H) & (b[:, None] + right[None, :] < W) & (q < count)[:, None]
        real = k < terms
        offset = k + (down * W + right - tap) * OUT
        value = tl.load(at + offset[None, :], mask=inside & real[None, :], other=0.0)
        w = tl.load(there + n[None, :], mask=real[:, None] & (n < IN)[None, :], other=0.0)
        total = tl.dot(value, w, total, input_precision="ieee")
        if MORE > 0:
            w = tl.load(there + more[None, :], mask=real[:, None] & (more < IN)[None, :], other=0.0)
            rest = tl.dot(value, w, rest, input_precision="ieee")
    row = (q // W).to(tl.int64) * (4 * W) + r * (2 * W) + 2 * b + c
    _store(dx, dx, dx, row, q < count, n, total, IN, False, False)
    if MORE > 0:
        _store(dx, dx, dx, row, q < count, more, rest, IN, False, False)


@triton.jit
def _by_weight(
    x, dy, partial, count, EACH: tl.constexpr, H: tl.constexpr, W: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr,
    TAPS: tl.constexpr, STRIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    begin = tl.program_id(1) * EACH
    end = tl.minimum(begin + EACH, count)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    o = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    tap, offset = _tap_and_offset(m, W, IN, TAPS)
    slope = dy + begin.to(tl.int64) * OUT
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, EACH, BLOCK_P):
        p = start + tl.arange(0, BLOCK_P)
        inside = (_taps_inside(begin + p, end, H, W, STRIDE, TAPS)[:, None] >> tap[None, :]) & 1 != 0
        at = _under(x, begin, p[:, None], W, IN, STRIDE)
        value = tl.load(at + offset[None, :], mask=inside, other=0.0)
        real = (p < end - begin)[:, None] & (o < OUT)[None, :]
        g = tl.load(slope + p[:, None] * OUT + o[None, :], mask=real, other=0.0)
        total = tl.dot(tl.trans(value), g, total, input_precision="ieee")
    there = partial + (tl.program_id(1) * (TAPS * IN) + m)[:, None] * OUT + o[None, :]
    tl.store(there, total, mask=(m < TAPS * IN)[:, None] & (o < OUT)[None, :])


@triton.jit
def _add_parts(
    partial, dw, dbias, PARTS: tl.constexpr, M: tl.constexpr, ROWS: tl.constexpr, OUT: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at, part = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_S)
    inside = (part < PARTS)[:, None] & (at < ROWS * OUT)[None, :]
    total = tl.sum(tl.load(partial + part[:, None] * (ROWS * OUT) + at[None, :], mask=inside, other=0.0), 0)
    row, o = at // OUT, at % OUT
    tl.store(dw + o * M + row, total.to(dw.dtype.element_ty), mask=row < M)
    if ROWS > M:
        tl.store(dbias + o, total, mask=row == M)


def fits(x: Tensor, weight: Tensor, stride: int = 1) -> bool:
    """Whether x (B, I, H, W) and weights (O, I, K, K) are for these kernels, with (K - 1) / 2 zeros on each side.

    They want half precision, K = 3 or 1, I and with K = 3 also O multiples of 8, H and W multiples of the stride.
    """
    outputs, inputs, *taps = weight.shape
    half = x.dtype == weight.dtype and x.element_size() == 2 and taps in ([3, 3], [1, 1])
    aligned = inputs % 8 == 0 and (outputs % 8 == 0 or taps == [1, 1])
    return half and aligned and not any(side % stride for side in x.shape[2:])


def _columns(outputs: int) -> tuple[int, dict[str, int]]:
    """How many programs share the channels of a result, and the two powers of 2 of each; the second may be 0."""
    programs = triton.cdiv(outputs, 160)
    share = max(16, triton.cdiv(outputs, programs))
    block = triton.next_power_of_2(share)
    if block == share:
        return programs, {"BLOCK_N": block, "MORE": 0}
    return programs, {"BLOCK_N": block // 2, "MORE": triton.next_power_of_2(max(16, share - block // 2))}


def _options(positions: int, inputs: int, outputs: int) -> dict[str, Any]:
    """Compile-time numbers of `_forward`: blocks as large as leave no multiprocessor idle."""
    if positions < 64 * PROGRAMS:
        return SMALL
    if max(inputs, outputs) > 128:
        return WIDE
    return LARGE if positions >= 256 * PROGRAMS else MEDIUM


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    skip: Tensor | None = None,
    *,
    stride: int = 1,
    turned: bool = False,
) -> Tensor:
    """A convolution of 3x3 taps, or one, that keeps the side or divides it by the stride.

    (B, I, H, W) and (O, I, K, K) of one precision to (B, O, H / stride, W / stride).

    Args:
        x: A map.
        weight: Its weights.
        bias: (O,) in single precision, added to the result.
        skip: Of the result's shape, in the precision of x, added to the result.
        stride: Distance between the positions of the result.
        turned: The transpose, which is the gradient of the input; the weights are (I, O, K, K), the stride is 1.
    """
    x = x.contiguous(memory_format=torch.channels_last)
    weight = weight.contiguous(memory_format=torch.channels_last)
    (batch, inputs, height, width), outputs = x.shape, weight.shape[1 if turned else 0]
    shape = batch, outputs, height // stride, width // stride
    y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    skip = None if skip is None else skip.contiguous(memory_format=torch.channels_last)
    taps = weight.shape[2] * weight.shape[3]
    if taps == 9 and stride == 1 and conv3x3.fits(x, outputs):
        conv3x3.forward(x, weight, bias, skip, y, turned=turned)
        return y
    programs, blocks = _columns(outputs)
    positions = y.numel() // outputs
    options = _options(positions, inputs, outputs)
    _forward[(triton.cdiv(positions, options["BLOCK_P"]), programs)](
        x, weight, weight if bias is None else bias, x if skip is None else skip, y, positions,
        H=height, W=width, IN=inputs, OUT=outputs, TAPS=taps, STRIDE=stride, TURNED=turned,
        HAS_BIAS=bias is not None, HAS_SKIP=skip is not None, **blocks, **options,
    )  # fmt: skip
    return y


def input_gradient(dy: Tensor, weight: Tensor) -> Tensor:
    """That of a 3x3 convolution with stride 2: (B, O, H, W) and (O, I, 3, 3) to (B, I, 2H, 2W)."""
    dy = dy.contiguous(memory_format=torch.channels_last)
    weight = weight.contiguous(memory_format=torch.channels_last)
    (batch, outputs, height, width), inputs = dy.shape, weight.shape[1]
    shape = batch, inputs, 2 * height, 2 * width
    dx = torch.empty(shape, dtype=dy.dtype, device=dy.device, memory_format=torch.channels_last)
    programs, blocks = _columns(inputs)
    positions = dy.numel() // outputs
    options = _options(4 * positions, inputs, outputs)
    _by_input[(triton.cdiv(positions, options["BLOCK_P"]), programs, 4)](
        dy, weight, dx, positions, H=height, W=width, IN=inputs, OUT=outputs, **blocks, **options
    )
    return dx


def _parts(positions: int, block: int, tiles: int) -> tuple[int, int]:
    """In how many parts the positions are cut for the weights' gradient, and how many each has, a multiple of block."""
    blocks = triton.cdiv(positions, block)
    each = triton.cdiv(blocks, max(1, PROGRAMS // tiles))
    return triton.cdiv(blocks, each), each * block


def weight_gradient(
    x: Tensor, dy: Tensor, dtype: torch.dtype, stride: int = 1, side: int = 3
) -> tuple[Tensor, Tensor | None]:
    """The gradient of the weights, (O, I, side, side) in `dtype`, from x (B, I, H, W) and that of the result.

    dw[o, tap, i] = sum_p dy[p, o] x[stride p + tap, i]. Programs take parts of the positions, and another kernel adds
    up. Where it costs nothing there is the gradient of the bias too, sum_p dy[p, o] in single precision.
    """
    x, dy = x.contiguous(memory_format=torch.channels_last), dy.contiguous(memory_format=torch.channels_last)
    inputs, outputs, taps = x.shape[1], dy.shape[1], side * side
    if taps == 9 and stride == 1 and conv3x3.fits_weights(x, dy):
        partial = conv3x3.partial_weight_gradients(x, dy)
    else:
        partial = _partial(x, dy, stride, taps)
    parts, rows = partial.shape[:2]
    dw = torch.empty(outputs, inputs, side, side, dtype=dtype, device=x.device, memory_format=torch.channels_last)
    dbias = torch.empty(outputs, device=x.device) if rows > taps * inputs else None
    several = triton.next_power_of_2(parts)
    block = max(32, 8192 // several)
    _add_parts[(triton.cdiv(rows * outputs, block),)](
        partial, dw, partial if dbias is None else dbias, PARTS=parts, M=taps * inputs, ROWS=rows, OUT=outputs,
        BLOCK_S=several, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return dw, dbias


def _partial(x: Tensor, dy: Tensor, stride: int, taps: int) -> Tensor:
    """Terms of that gradient: (parts, taps * I, O)."""
    (_, inputs, height, width), outputs = x.shape, dy.shape[1]
    columns, positions = min(128, max(16, triton.next_power_of_2(outputs))), dy.numel() // outputs
    narrow = taps * inputs <= WEIGHT_WIDE["BLOCK_M"]
    options = WEIGHT_WIDE if narrow or inputs > 128 or positions < 64 * PROGRAMS else WEIGHT
    tiles, programs = triton.cdiv(taps * inputs, options["BLOCK_M"]), triton.cdiv(outputs, columns)
    parts, each = _parts(positions, options["BLOCK_P"], tiles * programs)
    partial = torch.empty(parts, taps * inputs, outputs, device=x.device)
    _by_weight[(tiles, parts, programs)](
        x, dy, partial, positions, EACH=each, H=height, W=width, IN=inputs, OUT=outputs, TAPS=taps,
        STRIDE=stride, BLOCK_N=columns, **options,
    )  # fmt: skip
    return partial
