"""Bias and GELU (with tanh) of rows sorted by expert, gelu(u_n + b_expert(n)), as one kernel forward, one backward.

`routing.experts` holds the plain form, and a test compares the two.
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

WIDEST = 2048  # most numbers of a row that one program holds


@triton.jit
def _logistic(z):
    """The s(z) with gelu(z) = z s(z) of the approximation by tanh, (1 + tanh v) / 2, v = sqrt(2 / pi) (z + a z^3)."""
    root = tl.rsqrt(1 + tl.exp2(z * (-2.302208198144325 - 0.1029432396 * z * z)))
    return root * root


@triton.jit
def _biased_gelu(u, bias, expert, y, F: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    shift = tl.load(bias + tl.load(expert + row) * F + f, mask=f < F, other=0.0).to(tl.float32)
    z = tl.load(u + row * F + f, mask=f < F, other=0.0).to(tl.float32) + shift
    tl.store(y + row * F + f, (z * _logistic(z)).to(y.dtype.element_ty), mask=f < F)


@triton.jit
def _biased_gelu_backward(u, bias, expert, dy, du, F: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    shift = tl.load(bias + tl.load(expert + row) * F + f, mask=f < F, other=0.0).to(tl.float32)
    z = tl.load(u + row * F + f, mask=f < F, other=0.0).to(tl.float32) + shift
    share = _logistic(z)
    slope = share * (1 + z * (1 - share) * (1.5957691216057308 + 0.2140644488 * z * z))
    dz = slope * tl.load(dy + row * F + f, mask=f < F, other=0.0).to(tl.float32)
    tl.store(du + row * F + f, dz.to(du.dtype.element_ty), mask=f < F)


class _BiasedGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, u: Tensor, bias: Tensor, expert: Tensor):
        u, bias, expert = u.contiguous(), bias.contiguous(), expert.contiguous()
        ctx.save_for_backward(u, bias, expert)
        y, (rows, hidden) = torch.empty_like(u), u.shape
        grid = rows, triton.cdiv(hidden, WIDEST)
        _biased_gelu[grid](u, bias, expert, y, F=hidden, BLOCK=_block(hidden))
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor):
        u, bias, expert = ctx.saved_tensors
        du, (rows, hidden) = torch.empty_like(u), u.shape
        grid = rows, triton.cdiv(hidden, WIDEST)
        _biased_gelu_backward[grid](u, bias, expert, dy.contiguous(), du, F=hidden, BLOCK=_block(hidden))
        dbias = None
        if ctx.needs_input_grad[1]:
            mine = expert == torch.arange(len(bias), device=expert.device)[:, None]
            dbias = (mine.to(du.dtype) @ du).to(bias.dtype)
        return du, dbias, None


def _block(hidden: int) -> int:
    return min(triton.next_power_of_2(hidden), WIDEST)


def biased_gelu(u: Tensor, bias: Tensor, expert: Tensor) -> Tensor:
    """gelu(u_n + b_expert(n)) for rows u (N, F), bias (E, F), expert (N,); the result in the precision of u."""
    return _BiasedGelu.apply(u, bias, expert)
