"""Kernels for experts: what lies between their matrix products as one pass over memory.

Of large experts, whose rows are sorted for grouped products, that is gelu(u + b), see `biased_gelu`. Small ones are all
computed everywhere, and their hidden layer is gated.

With u = x W_in, (N, EF) of all experts side by side, and gates m (N, E) the layer is

    y = [m_1 gelu(u_1 + b_1), ..., m_E gelu(u_E + b_E), m] [W_out; b_out],

a matrix product on either side of one kernel. The gates stand beside the hidden layer, so that the biases of the second
layer, their gradient and what they add to that of the gates are part of products that are there anyway. Parameters get
the form and the precision of those products by one kernel, and their gradients go back by another.

Gates are given as in `types.Gate`, k experts with their weights for each row. Where an expert has no weight its hidden
layer is 0 and is not read; only the k experts of a row are read on the way back, as no other has a gradient to give.
Each program treats one expert, and puts its rows in order first: those with something to compute, then the others.

`routing.experts` holds the plain form, which everything but a GPU runs, and tests hold the two together. Sums are in
single precision and in a fixed order, so equal inputs give equal bits.
"""

# Triton's names are no types for a checker, and tensors in a kernel have no shapes to annotate.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
# ruff: noqa: ANN001, ANN202, N803

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

ALIGN = 16  # numbers of half precision that a GPU reads as one
BLOCK = 1024  # numbers of a parameter that a program copies
ADDED = 32  # columns whose sums one program finds
WIDEST = 2048  # numbers of a row's hidden layer that one program holds


class Plan(NamedTuple):
    """How a kernel cuts its work."""

    tile: int = 2048  # numbers that a program holds at a time, about
    programs: int = 512  # about as many as a large GPU holds at a time
    rows: int = 128  # that a program treats, at most: experts differ in what there is to do
    warps: int = 4
    registers: int | None = None  # of a thread, at most


FORWARD, BACKWARD = Plan(), Plan(registers=96)


@triton.jit
def _normal(z):
    """The tail Phi(-|z|) and the density phi(z) of a standard normal.

    phi(z) (b_1 t + ... + b_5 t^5) with t = 1 / (1 + 0.2316419 |z|) is off by 7.5e-8 at most (Abramowitz and Stegun,
    26.2.17), in half the instructions of erf and exp, for which the backward pass would have to wait.
    """
    root = tl.rsqrt(1 + 0.2316419 * tl.abs(z))
    t, density = root * root, tl.exp2(-0.7213475204444817 * (z * z) - 1.3257480647361595)
    tail = 1.781477937 + t * (-1.821255978 + t * 1.330274429)
    return (t * density) * (0.319381530 + t * (-0.356563782 + t * tail)), density


@triton.jit
def _logistic(z):
    """The s(z) with gelu(z) = z s(z) of the approximation by tanh, (1 + tanh v) / 2, v = sqrt(2 / pi) (z + a z^3)."""
    root = tl.rsqrt(1 + tl.exp2(z * (-2.302208198144325 - 0.1029432396 * z * z)))
    return root * root


@triton.jit
def _gelu(z, TANH: tl.constexpr):
    if TANH:
        y = z * _logistic(z)
    else:
        tail, _ = _normal(z)
        y = tl.maximum(z, 0.0) - tl.abs(z) * tail
    return y


@triton.jit
def _gelu_and_slope(z, TANH: tl.constexpr):
    if TANH:
        share = _logistic(z)
        y = z * share
        slope = share + (y - y * share) * (1.5957691216057308 + 0.2140644488 * z * z)
    else:
        tail, density = _normal(z)
        share = tl.where(z < 0, tail, 1 - tail)
        y = z * share
        slope = share + z * density
    return y, slope


@triton.jit
def _gate(expert, weight, row, inside, e, K: tl.constexpr):
    """The weight of expert e in each row, and whether it is one of the row's K experts."""
    mix = tl.zeros(row.shape, tl.float32)
    seen = tl.zeros(row.shape, tl.int1)
    for j in tl.static_range(K):
        mine = tl.load(expert + row * K + j, mask=inside, other=-1) == e
        mix += tl.load(weight + row * K + j, mask=mine, other=0.0).to(tl.float32)
        seen = seen | mine
    return mix, seen


@triton.jit
def _sort(order, mixes, row, inside, mix, wanted):
    """Write all rows and their weights, those wanted first; gives the place of each, and how many are wanted."""
    before = tl.cumsum(wanted.to(tl.int32), 0)
    count = tl.sum(wanted.to(tl.int32), 0)
    place = tl.where(wanted, before - 1, count + row - before)
    tl.store(order + place, row, mask=inside)
    tl.store(mixes + place, mix, mask=inside)
    tl.debug_barrier()  # other threads read it
    return place, count


@triton.jit
def _store_zeros(y, row, real, STRIDE: tl.constexpr, BEGIN: tl.constexpr, SIZE: tl.constexpr, F: tl.constexpr):
    f = BEGIN + tl.arange(0, SIZE)
    zeros = tl.zeros((row.shape[0], SIZE), y.dtype.element_ty)
    tl.store(y + row[:, None] * STRIDE + f[None, :], zeros, mask=real[:, None] & (f < F)[None, :])


@triton.jit
def _forward_part(
    u, shift, y, row, real, read, mix, E: tl.constexpr, F: tl.constexpr, WIDE: tl.constexpr, BEGIN: tl.constexpr,
    SIZE: tl.constexpr, TANH: tl.constexpr,
):  # fmt: skip
    f = BEGIN + tl.arange(0, SIZE)
    mine = (f < F)[None, :]
    z = tl.load(u + row[:, None] * (E * F) + f[None, :], mask=read[:, None] & mine, other=0.0).to(tl.float32)
    value = _gelu(z + shift[None, :], TANH) * mix[:, None]
    tl.store(y + row[:, None] * WIDE + f[None, :], value.to(y.dtype.element_ty), mask=real[:, None] & mine)


@triton.jit
def _forward(
    u, bias, expert, weight, order, mixes, y, rows, E: tl.constexpr, F: tl.constexpr, K: tl.constexpr,
    WIDE: tl.constexpr, EACH: tl.constexpr, R: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr,
    TAIL: tl.constexpr, TANH: tl.constexpr,
):  # fmt: skip
    e, begin, every = tl.program_id(1), tl.program_id(0).to(tl.int64) * EACH, tl.arange(0, EACH)
    inside = begin + every < rows
    expert += begin * K
    weight += begin * K
    y += begin * WIDE
    mix, _ = _gate(expert, weight, every, inside, e, K)
    order += (tl.program_id(0) * E + e) * EACH
    mixes += (tl.program_id(0) * E + e) * EACH
    _, count = _sort(order, mixes, every, inside, mix, mix != 0)
    first, rest = tl.arange(0, FIRST), FIRST + tl.arange(0, max(REST, 1))
    shift = tl.load(bias + e * F + first)
    shift_rest = tl.load(bias + e * F + rest, mask=rest < F, other=0.0)
    here, there = u + begin * (E * F) + e * F, y + e * F
    for start in range(0, EACH, R):
        place = start + tl.arange(0, R)
        real = begin + place < rows
        row = tl.load(order + place, mask=real, other=0)
        if start < count:
            read, gate = place < count, tl.load(mixes + place, mask=real, other=0.0)
            _forward_part(here, shift, there, row, real, read, gate, E, F, WIDE, 0, FIRST, TANH)
            if REST > 0:
                _forward_part(here, shift_rest, there, row, real, read, gate, E, F, WIDE, FIRST, REST, TANH)
        else:
            _store_zeros(there, row, real, WIDE, 0, FIRST, F)
            if REST > 0:
                _store_zeros(there, row, real, WIDE, FIRST, REST, F)
    if e == E - 1:  # the gates, and zeros up to the width
        c = tl.arange(0, TAIL)
        gates = tl.zeros((EACH, TAIL), tl.float32)
        for j in tl.static_range(K):
            mine = tl.load(expert + every * K + j, mask=inside, other=-1)[:, None] == c[None, :]
            value = tl.load(weight + every * K + j, mask=inside, other=0.0).to(tl.float32)
            gates += tl.where(mine, value[:, None], 0.0)
        real = inside[:, None] & (c < WIDE - E * F)[None, :]
        tl.store(y + every[:, None] * WIDE + E * F + c[None, :], gates.to(y.dtype.element_ty), mask=real)


@triton.jit
def _backward_part(
    u, shift, dy, du, row, real, read, mix, total, E: tl.constexpr, F: tl.constexpr, WIDE: tl.constexpr,
    BEGIN: tl.constexpr, SIZE: tl.constexpr, R: tl.constexpr, KEEP: tl.constexpr, TANH: tl.constexpr,
):  # fmt: skip
    """Writes du; gives the sums of dy gelu(z) over this part of each row, and `total` + du, rows KEEP apart added."""
    f = BEGIN + tl.arange(0, SIZE)
    mine = (f < F)[None, :]
    z = tl.load(u + row[:, None] * (E * F) + f[None, :], mask=read[:, None] & mine, other=0.0).to(tl.float32)
    slope = tl.load(dy + row[:, None] * WIDE + f[None, :], mask=read[:, None] & mine, other=0.0).to(tl.float32)
    y, by_z = _gelu_and_slope(z + shift[None, :], TANH)
    dz = by_z * (slope * mix[:, None])
    tl.store(du + row[:, None] * (E * F) + f[None, :], dz.to(du.dtype.element_ty), mask=real[:, None] & mine)
    return tl.sum(slope * y, 1), total + tl.sum(tl.reshape(dz, (R // KEEP, KEEP, SIZE)), 0)


@triton.jit
def _backward(
    u, bias, expert, weight, order, mixes, dy, du, dweight, partial, rows, E: tl.constexpr, F: tl.constexpr,
    K: tl.constexpr, WIDE: tl.constexpr, EACH: tl.constexpr, R: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr,
    KEEP: tl.constexpr, TANH: tl.constexpr,
):  # fmt: skip
    e, begin, every = tl.program_id(1), tl.program_id(0).to(tl.int64) * EACH, tl.arange(0, EACH)
    inside = begin + every < rows
    expert += begin * K
    mix, seen = _gate(expert, weight + begin * K, every, inside, e, K)
    order += (tl.program_id(0) * E + e) * EACH
    mixes += (tl.program_id(0) * E + e) * EACH
    where, count = _sort(order, mixes, every, inside, mix, seen)
    first, rest = tl.arange(0, FIRST), FIRST + tl.arange(0, max(REST, 1))
    shift = tl.load(bias + e * F + first)
    shift_rest = tl.load(bias + e * F + rest, mask=rest < F, other=0.0)
    total = tl.zeros((KEEP, FIRST), tl.float32)
    total_rest = tl.zeros((R, max(REST, 1)), tl.float32)
    here, there, slopes = u + begin * (E * F) + e * F, du + begin * (E * F) + e * F, dy + begin * WIDE + e * F
    for start in range(0, EACH, R):
        place = start + tl.arange(0, R)
        real = begin + place < rows
        row = tl.load(order + place, mask=real, other=0)
        if start < count:
            read, gate = place < count, tl.load(mixes + place, mask=real, other=0.0)
            dmix, total = _backward_part(
                here, shift, slopes, there, row, real, read, gate, total, E, F, WIDE, 0, FIRST, R, KEEP, TANH
            )
            if REST > 0:
                more, total_rest = _backward_part(
                    here, shift_rest, slopes, there, row, real, read, gate, total_rest, E, F, WIDE, FIRST, REST, R, R,
                    TANH,
                )  # fmt: skip
                dmix += more
            tl.debug_barrier()  # all threads have read the weights
            tl.store(mixes + place, dmix, mask=read)
        else:
            _store_zeros(there, row, real, E * F, 0, FIRST, F)
            if REST > 0:
                _store_zeros(there, row, real, E * F, FIRST, REST, F)
    sums = partial + tl.program_id(0) * (E * F) + e * F
    tl.store(sums + first, tl.sum(total, 0))
    if REST > 0:
        tl.store(sums + rest, tl.sum(total_rest, 0), mask=rest < F)
    tl.debug_barrier()
    dmix = tl.load(mixes + where, mask=seen, other=0.0)
    dmix += tl.load(dy + (begin + every) * WIDE + E * F + e, mask=seen, other=0.0).to(tl.float32)
    for j in tl.static_range(K):  # each entry has one expert, so that one program writes it
        mine = tl.load(expert + every * K + j, mask=inside, other=-1) == e
        tl.store(dweight + (begin + every) * K + j, dmix.to(dweight.dtype.element_ty), mask=mine)


@triton.jit
def _pack(
    w_in, w_out, b_out, first, second, E: tl.constexpr, F: tl.constexpr, C: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """(E, C, F) to (C, EF); (E, F, C) and (E, C) to (WIDE, C), zeros below."""
    at, size = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), C * E * F
    c, e, f = at // (E * F), at % (E * F) // F, at % F
    value = tl.load(w_in + (e * C + c) * F + f, mask=at < size, other=0.0)
    tl.store(first + at, value.to(first.dtype.element_ty), mask=at < size)
    value = tl.load(w_out + at, mask=at < size, other=0.0)
    value += tl.load(b_out + at - size, mask=(at >= size) & (at < size + E * C), other=0.0)
    tl.store(second + at, value.to(second.dtype.element_ty), mask=at < WIDE * C)


@triton.jit
def _unpack(
    first, second, partial, dw_in, dw_out, db_in, db_out, E: tl.constexpr, F: tl.constexpr, C: tl.constexpr,
    PROGRAMS: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    """The way back of `_pack`, and the sums of `partial` over (PROGRAMS, EF)."""
    size, adders = C * E * F, tl.cdiv(E * F, ADDED)
    if tl.program_id(0) < adders:
        column = tl.program_id(0) * ADDED + tl.arange(0, ADDED)
        total = tl.zeros((R, ADDED), tl.float32)
        for begin in range(0, PROGRAMS, R):
            row = begin + tl.arange(0, R)
            inside = (row < PROGRAMS)[:, None] & (column < E * F)[None, :]
            total += tl.load(partial + row[:, None] * (E * F) + column[None, :], mask=inside, other=0.0)
        tl.store(db_in + column, tl.sum(total, 0).to(db_in.dtype.element_ty), mask=column < E * F)
    else:
        at = (tl.program_id(0) - adders) * BLOCK + tl.arange(0, BLOCK)
        e, c, f = at // (C * F), at // F % C, at % F
        value = tl.load(first + c * (E * F) + e * F + f, mask=at < size, other=0.0)
        tl.store(dw_in + at, value.to(dw_in.dtype.element_ty), mask=at < size)
        value = tl.load(second + at, mask=at < size + E * C, other=0.0)
        tl.store(dw_out + at, value.to(dw_out.dtype.element_ty), mask=at < size)
        tl.store(db_out + at - size, value.to(db_out.dtype.element_ty), mask=(at >= size) & (at < size + E * C))


@triton.jit
def _biased_gelu(u, bias, expert, y, F: tl.constexpr, BLOCK: tl.constexpr, TANH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    shift = tl.load(bias + tl.load(expert + row) * F + f, mask=f < F, other=0.0).to(tl.float32)
    z = tl.load(u + row * F + f, mask=f < F, other=0.0).to(tl.float32) + shift
    tl.store(y + row * F + f, _gelu(z, TANH).to(y.dtype.element_ty), mask=f < F)


@triton.jit
def _biased_gelu_backward(u, bias, expert, dy, du, F: tl.constexpr, BLOCK: tl.constexpr, TANH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    shift = tl.load(bias + tl.load(expert + row) * F + f, mask=f < F, other=0.0).to(tl.float32)
    z = tl.load(u + row * F + f, mask=f < F, other=0.0).to(tl.float32) + shift
    _, slope = _gelu_and_slope(z, TANH)
    dz = slope * tl.load(dy + row * F + f, mask=f < F, other=0.0).to(tl.float32)
    tl.store(du + row * F + f, dz.to(du.dtype.element_ty), mask=f < F)


class _BiasedGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, u: Tensor, bias: Tensor, expert: Tensor, tanh: bool):
        u, bias, expert = u.contiguous(), bias.contiguous(), expert.contiguous()
        ctx.save_for_backward(u, bias, expert)
        ctx.tanh = tanh
        y, (rows, hidden) = torch.empty_like(u), u.shape
        grid = rows, triton.cdiv(hidden, WIDEST)
        _biased_gelu[grid](u, bias, expert, y, F=hidden, BLOCK=_block(hidden), TANH=tanh)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor):
        u, bias, expert = ctx.saved_tensors
        du, (rows, hidden) = torch.empty_like(u), u.shape
        grid = rows, triton.cdiv(hidden, WIDEST)
        _biased_gelu_backward[grid](u, bias, expert, dy.contiguous(), du, F=hidden, BLOCK=_block(hidden), TANH=ctx.tanh)
        dbias = None
        if ctx.needs_input_grad[1]:
            mine = expert == torch.arange(len(bias), device=expert.device)[:, None]
            dbias = (mine.to(du.dtype) @ du).to(bias.dtype)
        return du, dbias, None, None


def _block(hidden: int) -> int:
    return min(triton.next_power_of_2(hidden), WIDEST)


def biased_gelu(u: Tensor, bias: Tensor, expert: Tensor, *, tanh: bool) -> Tensor:
    """gelu(u_n + b_expert(n)) for rows u (N, F), bias (E, F), expert (N,); the result in the precision of u."""
    return _BiasedGelu.apply(u, bias, expert, tanh)


def _sizes(rows: int, experts: int, hidden: int, plan: Plan) -> dict[str, Any]:
    """EACH rows for a program, R at a time, and their hidden layer in two: a power of two, and what is left."""
    first = 1 << hidden.bit_length() - 1
    rest = triton.next_power_of_2(hidden - first) if hidden > first else 0
    r = max(1, min(plan.tile // first, plan.rows))
    each = max(r, min(triton.next_power_of_2(triton.cdiv(rows * experts, plan.programs)), plan.rows))
    sizes = {"E": experts, "F": hidden, "EACH": each, "R": r, "FIRST": first, "REST": rest}
    return sizes | {"num_warps": plan.warps, "maxnreg": plan.registers}


def _lists(programs: int, each: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Where each program writes in which order it treats its rows, and their weights."""
    return torch.empty(programs, each, dtype=torch.int32, device=device), torch.empty(programs, each, device=device)


def _width(experts: int, hidden: int) -> int:
    """Columns of hidden layer and gates, such that all rows begin where a GPU reads best."""
    return triton.cdiv(experts * hidden + experts, ALIGN) * ALIGN


def gated(u: Tensor, bias: Tensor, expert: Tensor, weight: Tensor, *, tanh: bool) -> Tensor:
    """[m_e gelu(u_e + b_e) for all e, m, 0]: (N, EF), (E, F), (N, k), (N, k) to (N, W), in the precision of u."""
    experts, hidden = bias.shape
    sizes, wide = _sizes(len(u), experts, hidden, FORWARD), _width(experts, hidden)
    programs = triton.cdiv(len(u), sizes["EACH"])
    y = torch.empty(len(u), wide, dtype=u.dtype, device=u.device)
    _forward[(programs, experts)](
        u, bias, expert, weight, *_lists(programs * experts, sizes["EACH"], u.device), y, len(u), K=expert.shape[1],
        WIDE=wide, TAIL=triton.next_power_of_2(wide - experts * hidden), TANH=tanh, **sizes,
    )  # fmt: skip
    return y


def gated_backward(
    u: Tensor, bias: Tensor, expert: Tensor, weight: Tensor, dy: Tensor, *, tanh: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `gated` by u, by the weights (N, k), and by the bias in parts to add up: (programs, EF)."""
    experts, hidden = bias.shape
    sizes = _sizes(len(u), experts, hidden, BACKWARD)
    programs = triton.cdiv(len(u), sizes["EACH"])
    at_once = 512 * BACKWARD.warps // u.itemsize // sizes["FIRST"]  # rows that all threads hold side by side
    du, dweight = torch.empty_like(u), torch.empty_like(weight)
    partial = torch.empty(programs, experts * hidden, device=u.device)
    _backward[(programs, experts)](
        u, bias, expert, weight, *_lists(programs * experts, sizes["EACH"], u.device), dy, du, dweight, partial, len(u),
        K=expert.shape[1], WIDE=dy.shape[1], KEEP=max(1, min(sizes["R"], at_once)), TANH=tanh, **sizes,
    )  # fmt: skip
    return du, dweight, partial


class _AllExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        expert: Tensor,
        weight: Tensor,
        w_in: Tensor,
        b_in: Tensor,
        w_out: Tensor,
        b_out: Tensor,
        dtype: torch.dtype,
        tanh: bool,
    ):
        experts, width, hidden = w_in.shape
        wide = _width(experts, hidden)
        first = torch.empty(width, experts * hidden, dtype=dtype, device=rows.device)
        second = torch.empty(wide, width, dtype=dtype, device=rows.device)
        _pack[(triton.cdiv(wide * width, BLOCK),)](
            w_in.contiguous(), w_out.contiguous(), b_out.contiguous(), first, second, E=experts, F=hidden, C=width,
            WIDE=wide, BLOCK=BLOCK,
        )  # fmt: skip
        ctx.dtype, ctx.tanh = rows.dtype, tanh
        ctx.kinds = [(parameter.shape, parameter.dtype) for parameter in (w_in, b_in, w_out, b_out)]
        rows, b_in, expert, weight = rows.to(dtype), b_in.contiguous(), expert.contiguous(), weight.contiguous()
        u = rows @ first
        y = gated(u, b_in, expert, weight, tanh=tanh)
        ctx.save_for_backward(rows, expert, weight, first, second, b_in, u, y)
        return y @ second

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dresult: Tensor):
        rows, expert, weight, first, second, b_in, u, y = ctx.saved_tensors
        dresult = dresult.to(u.dtype)
        du, dweight, partial = gated_backward(u, b_in, expert, weight, dresult @ second.T, tanh=ctx.tanh)
        drows = (du @ first.T).to(ctx.dtype) if ctx.needs_input_grad[0] else None
        if not any(ctx.needs_input_grad[3:7]):
            return drows, None, dweight, None, None, None, None, None, None
        (experts, hidden), width = b_in.shape, rows.shape[1]
        dw_in, db_in, dw_out, db_out = (torch.empty(shape, dtype=d, device=u.device) for shape, d in ctx.kinds)
        programs = triton.cdiv(experts * hidden, ADDED) + triton.cdiv(experts * (hidden + 1) * width, BLOCK)
        _unpack[(programs,)](
            rows.T @ du, y.T @ dresult, partial, dw_in, dw_out, db_in, db_out, E=experts, F=hidden, C=width,
            PROGRAMS=len(partial), BLOCK=BLOCK, R=32, ADDED=ADDED,
        )  # fmt: skip
        return drows, None, dweight, dw_in, db_in, dw_out, db_out, None, None


def all_experts(
    rows: Tensor,
    expert: Tensor,
    weight: Tensor,
    w_in: Tensor,
    b_in: Tensor,
    w_out: Tensor,
    b_out: Tensor,
    approximate: str,
    dtype: torch.dtype,
) -> Tensor:
    """sum_j weight_j f_expert_j(x) for rows (N, C), in the precision `dtype` of the products.

    Args:
        rows: x, (N, C).
        expert: (N, k) in 0..E-1.
        weight: (N, k).
        w_in: (E, C, F).
        b_in: (E, F).
        w_out: (E, F, C).
        b_out: (E, C).
        approximate: "none" or "tanh", as for PyTorch's gelu.
        dtype: Of the products and the result.
    """
    with torch.autocast(rows.device.type, enabled=False):
        return _AllExperts.apply(rows, expert, weight, w_in, b_in, w_out, b_out, dtype, approximate == "tanh")
