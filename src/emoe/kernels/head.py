"""Kernels for logits over a large vocabulary: each logit is read once forward, and read and written once backward.

PyTorch takes a dozen passes over them: to single precision, maximum, exponential, sum, and back. `diffusion.head`
holds the plain form, and a test compares the two.
"""

# Triton's names are no types for a checker, and tensors in a kernel have no shapes to annotate.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
# ruff: noqa: ANN001, ANN202, N803

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # logits that a program holds at a time


@triton.jit
def _total_and_target(logits, target, total, chosen, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * SIZE
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)  # of each lane
    summed = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, SIZE, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        value = tl.load(start + at, mask=at < SIZE, other=float("-inf")).to(tl.float32)
        above = tl.maximum(largest, value)
        base = tl.where(above == float("-inf"), 0.0, above)  # a lane that has seen nothing finite stays at 0
        summed = summed * tl.exp(largest - base) + tl.exp(value - base)
        largest = above
    top = tl.max(largest, 0)
    tl.store(total + row, top + tl.log(tl.sum(summed * tl.exp(largest - top), 0)))
    tl.store(chosen + row, tl.load(start + tl.load(target + row)).to(tl.float32))


@triton.jit
def _by_logits(logits, target, total, by_total, by_chosen, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * SIZE
    top, slope, more = tl.load(total + row), tl.load(by_total + row), tl.load(by_chosen + row)
    mine = tl.load(target + row)
    for begin in range(0, SIZE, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        value = tl.load(start + at, mask=at < SIZE, other=float("-inf")).to(tl.float32)
        grad = slope * tl.exp(value - top) + tl.where(at == mine, more, 0.0)
        tl.store(start + at, grad.to(logits.dtype.element_ty), mask=at < SIZE)


def total_and_target(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """log sum_y exp(a_y) and a_target of logits (N, V), as two (N,) in single precision."""
    total, chosen = (torch.empty(len(logits), device=logits.device) for _ in range(2))
    _total_and_target[(len(logits),)](logits, target, total, chosen, SIZE=logits.shape[1], BLOCK=BLOCK, num_warps=8)
    return total, chosen


def gradient_in_place(logits: Tensor, target: Tensor, total: Tensor, by_total: Tensor, by_chosen: Tensor) -> Tensor:
    """by_total * softmax(a) + by_chosen * one-hot(target), written over the logits (N, V)."""
    _by_logits[(len(logits),)](
        logits, target, total, by_total, by_chosen, SIZE=logits.shape[1], BLOCK=BLOCK, num_warps=8
    )
    return logits
