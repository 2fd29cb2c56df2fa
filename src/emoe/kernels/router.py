"""Kernels for a router over few experts: a linear layer with a handful of outputs, LayerNorm over them and a soft cap.

PyTorch takes a matrix product with as many columns as there are experts, casts around it, and as much again three times
backward; here a row is read once forward and once backward. `backbones.layers.Router` holds the plain form, and tests
hold the two together.

All arithmetic is in single precision and in a fixed order, so equal inputs give equal bits.
"""

# Triton's names are no types for a checker, and tensors in a kernel have no shapes to annotate.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator,assignment"
# ruff: noqa: ANN001, ANN202, N803

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDEST, MOST, WEIGHTS = 256, 16, 1024  # inputs, experts and weights, at most: loops over them are written out
PROGRAMS = 128  # about as many as a large GPU has multiprocessors
FORWARD = {"BLOCK": 64, "num_warps": 2}  # a row to each thread
TILE = 16384  # numbers that a program holds at once backward, at most
WARPS = 4  # of a program backward


@triton.jit
def _tanh(a):
    """The hyperbolic tangent; by its series near 0, where the difference of exponentials would lose digits."""
    square = a * a
    near = a * (1 + square * (-0.33333333333 + square * (0.13333333333 - square * 0.05396825397)))
    power = tl.exp(-2 * tl.abs(a))
    far = (1 - power) / (1 + power)
    return tl.where(square < 0.04, near, tl.where(a < 0, -far, far))


@triton.jit
def _unit(z, real, eps, E: tl.constexpr):
    """(z - mean) / deviation over the experts that are real, (BLOCK, BLOCK_E), 0 elsewhere; and 1 / deviation."""
    centred = tl.where(real, z - tl.sum(z, 1)[:, None] / E, 0.0)
    rstd = 1 / tl.sqrt(tl.sum(centred * centred, 1) / E + eps)[:, None]
    return centred * rstd, rstd


@triton.jit
def _forward(
    x, weight, bias, gamma, beta, z_kept, y, rows, eps, cap, K: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_E: tl.constexpr, EACH: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr, HAS_CAP: tl.constexpr,
    KEEP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside, c, e = row < rows, tl.arange(0, EACH), tl.arange(0, BLOCK_E)
    sums = ()
    for _ in tl.static_range(E):
        sums = sums + (tl.zeros((BLOCK,), tl.float32),)
    # As many numbers of a row at a time as a thread loads at once: rows end in a thread, and so do the sums over them.
    for begin in tl.static_range(0, K, EACH):
        there = begin + c < K
        u = tl.load(x + row[:, None] * K + begin + c[None, :], mask=inside[:, None] & there[None, :], other=0.0)
        u = u.to(tl.float32)
        more = ()
        for i in tl.static_range(E):
            w = tl.load(weight + i * K + begin + c, mask=there, other=0.0)
            more = more + (sums[i] + tl.sum(u * w[None, :], 1),)
        sums = more
    z = tl.zeros((BLOCK, BLOCK_E), tl.float32)
    for i in tl.static_range(E):
        z = tl.where((e == i)[None, :], sums[i][:, None], z)
    real = (e < E)[None, :]
    at, mask = row[:, None] * E + e[None, :], inside[:, None] & real
    if HAS_BIAS:
        z += tl.load(bias + e, mask=e < E, other=0.0)[None, :]
    if KEEP:
        tl.store(z_kept + at, z, mask=mask)
    if HAS_NORM:
        z, _ = _unit(z, real, eps, E)
        z = z * tl.load(gamma + e, mask=e < E, other=0.0)[None, :] + tl.load(beta + e, mask=e < E, other=0.0)[None, :]
    if HAS_CAP:
        z = cap * _tanh(z / cap)
    tl.store(y + at, z, mask=mask)


@triton.jit
def _backward(
    x, weight, gamma, beta, z_kept, dy, dx, partial, rows, eps, cap, K: tl.constexpr, E: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, R: tl.constexpr,
    EACH: tl.constexpr, HAS_NORM: tl.constexpr, HAS_CAP: tl.constexpr,
):  # fmt: skip
    c, e, k = tl.arange(0, EACH), tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    real = (e < E)[None, :]
    scale = tl.load(gamma + e, mask=e < E, other=0.0)[None, :]
    shift = tl.load(beta + e, mask=e < E, other=0.0)[None, :]
    dbias = tl.zeros((BLOCK, BLOCK_E), tl.float32)
    dgamma = tl.zeros((BLOCK, BLOCK_E), tl.float32)
    dbeta = tl.zeros((BLOCK, BLOCK_E), tl.float32)
    dw = ()
    for _ in tl.static_range(E):
        dw = dw + (tl.zeros((R, BLOCK_K), tl.float32),)
    first = tl.program_id(0).to(tl.int64) * ROWS
    for begin in range(0, ROWS, BLOCK):
        # The rows as (R, BLOCK / R): all threads hold R of them at a time, and sums over the rest need no other thread.
        folded = first + begin + (tl.arange(0, R) * (BLOCK // R))[:, None] + tl.arange(0, BLOCK // R)[None, :]
        there = (folded < rows)[:, :, None] & (k < K)[None, None, :]
        u = tl.load(x + folded[:, :, None] * K + k[None, None, :], mask=there, other=0.0).to(tl.float32)
        row = first + begin + tl.arange(0, BLOCK)
        inside = row < rows
        at, mask = row[:, None] * E + e[None, :], inside[:, None] & real
        dz = tl.load(dy + at, mask=mask, other=0.0)  # 0 outside, and so are all sums
        if HAS_NORM or HAS_CAP:
            z = tl.load(z_kept + at, mask=mask, other=0.0)
            v = z
            if HAS_NORM:
                z, rstd = _unit(z, real, eps, E)
                v = z * scale + shift
            if HAS_CAP:
                level = _tanh(v / cap)
                dz *= 1 - level * level
            if HAS_NORM:
                dgamma += dz * z
                dbeta += dz
                dz *= scale
                dz = rstd * (dz - tl.sum(dz, 1)[:, None] / E - z * (tl.sum(dz * z, 1)[:, None] / E))
        dbias += dz
        parts, more = (), ()
        for i in tl.static_range(E):
            part = tl.sum(tl.where((e == i)[None, :], dz, 0.0), 1)
            parts = parts + (part,)
            more = more + (dw[i] + tl.sum(tl.reshape(part, (R, BLOCK // R))[:, :, None] * u, 1),)
        dw = more
        for start in tl.static_range(0, K, EACH):
            near = start + c < K
            du = tl.zeros((BLOCK, EACH), tl.float32)
            for i in tl.static_range(E):
                du += parts[i][:, None] * tl.load(weight + i * K + start + c, mask=near, other=0.0)[None, :]
            spot = dx + row[:, None] * K + start + c[None, :]
            tl.store(spot, du.to(dx.dtype.element_ty), mask=inside[:, None] & near[None, :])
    found = partial + tl.program_id(0) * (E * (K + 3 if HAS_NORM else K + 1))
    for i in tl.static_range(E):
        tl.store(found + i * K + k, tl.sum(dw[i], 0), mask=k < K)
    tl.store(found + E * K + e, tl.sum(dbias, 0), mask=e < E)
    if HAS_NORM:
        tl.store(found + E * (K + 1) + e, tl.sum(dgamma, 0), mask=e < E)
        tl.store(found + E * (K + 2) + e, tl.sum(dbeta, 0), mask=e < E)


@functools.cache
def _blocks(rows: int, width: int, size: int) -> tuple[int, dict[str, int]]:
    """Programs backward, and compile-time numbers of theirs, for rows of `width` numbers of `size` bytes."""
    wide = triton.next_power_of_2(width)
    at_once = max(1, WARPS * 32 * 16 // size // wide)  # rows that all threads load with one instruction
    block = max(at_once, TILE // wide)
    while block > at_once and triton.cdiv(rows, block) < PROGRAMS:
        block //= 2
    blocks = triton.cdiv(rows, block)
    each = triton.cdiv(blocks, 2 * PROGRAMS)
    made = {"ROWS": each * block, "BLOCK": block, "BLOCK_K": wide, "R": at_once, "num_warps": WARPS}
    return triton.cdiv(blocks, each), made


def _sum_of_programs(partial: Tensor) -> Tensor:
    """What N programs have found, (N, C), to (C,)."""
    return partial.sum(0)


class _Logits(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gamma: Tensor | None,
        beta: Tensor | None,
        eps: float,
        cap: float | None,
        keep: bool,
    ):
        x, weight = x.contiguous(), weight.contiguous()
        (experts, width), rows = weight.shape, x.numel() // x.shape[-1]
        y = torch.empty(*x.shape[:-1], experts, device=x.device)
        keep = keep and not (gamma is None and cap is None)  # without either, dz = dy
        z = torch.empty_like(y) if keep else None
        ctx.numbers, ctx.has_bias = (eps, 1.0 if cap is None else float(cap)), bias is not None
        ctx.options = {
            "K": width, "E": experts, "BLOCK_E": triton.next_power_of_2(experts), "EACH": 16 // x.element_size(),
            "HAS_NORM": gamma is not None, "HAS_CAP": cap is not None,
        }  # fmt: skip
        _forward[(triton.cdiv(rows, FORWARD["BLOCK"]),)](
            x, weight, weight if bias is None else bias, weight if gamma is None else gamma,
            weight if beta is None else beta, y if z is None else z, y, rows, *ctx.numbers, HAS_BIAS=ctx.has_bias,
            KEEP=keep, **ctx.options, **FORWARD,
        )  # fmt: skip
        ctx.save_for_backward(x, weight, gamma, beta, z)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor):
        x, weight, gamma, beta, z = ctx.saved_tensors
        (experts, width), rows = weight.shape, x.numel() // x.shape[-1]
        dy, dx = dy.contiguous(), torch.empty_like(x)
        programs, blocks = _blocks(rows, width, x.element_size())
        sizes = [experts * width] + [experts] * (1 if gamma is None else 3)
        partial = torch.empty(programs, sum(sizes), device=x.device)
        _backward[(programs,)](
            x, weight, weight if gamma is None else gamma, weight if beta is None else beta, dy if z is None else z,
            dy, dx, partial, rows, *ctx.numbers, **ctx.options, **blocks,
        )  # fmt: skip
        dw, dbias, *of_norm = _sum_of_programs(partial).split(sizes)
        dgamma, dbeta = of_norm or (None, None)
        return dx, dw.view_as(weight), dbias if ctx.has_bias else None, dgamma, dbeta, None, None, None


def fits(x: Tensor, weight: Tensor) -> bool:
    """Whether x (*N, K) and weights (E, K) are for these kernels."""
    known = x.dtype in (torch.float32, torch.bfloat16, torch.float16) and weight.dtype == torch.float32
    few = weight.shape[1] <= WIDEST and weight.shape[0] <= MOST and weight.numel() <= WEIGHTS
    return known and few and x.numel() > 0


def logits(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    gamma: Tensor | None = None,
    beta: Tensor | None = None,
    eps: float = 1e-5,
    cap: float | None = None,
) -> Tensor:
    """cap * tanh(norm(x W' + bias) / cap), (*N, K) to (*N, E) in single precision; parameters are in that too.

    What the norm reads is kept for the gradient, E numbers for each row.

    Args:
        x: Features, in half or single precision.
        weight: W, (E, K).
        bias: (E,).
        gamma: Scale of the LayerNorm over the E logits, (E,); None: no norm.
        beta: Its shift, (E,).
        eps: What it adds to the variance.
        cap: None: no cap.
    """
    return _Logits.apply(x, weight, bias, gamma, beta, eps, cap, torch.is_grad_enabled())
