"""Norm, film and SiLU of large maps, by the CUDA kernels `norm_silu.cu` and `norm_silu_backward.cu`.

A program of Triton has no room for a map of 32 x 32 positions and reads it twice; a block of these reads it once. They
have the precision, the sums and the files of statistics of `emoe.kernels.maps`, which chooses between the two.
"""

from __future__ import annotations

import torch
from torch import Tensor

from emoe.kernels import cuda

WIDTH = 36  # channels of a block: as many as leave no multiprocessor idle with 64 images of 72
POSITIONS = 1024  # of a map
PLACES, ROUNDS = 64, 8  # see norms.cuh
THREADS = WIDTH // 4 * PLACES
SUMS = 4 * (PLACES + ROUNDS + 1) * 2 * WIDTH  # bytes
COEFFICIENTS = 4 * 4 * WIDTH
MAP = 2 * POSITIONS * WIDTH  # bytes of a block's part of a map


def _fit(shape: torch.Size, groups: int) -> bool:
    """Whether maps (B, C, H, W) are of the size that these kernels are for, and can be cut between groups."""
    _, channels, height, width = shape
    return height * width == POSITIONS and channels % WIDTH == 0 and WIDTH % (channels // groups) == 0


def fits(x: Tensor, film: Tensor | None, groups: int) -> bool:
    """Whether `forward` and `backward` are for a map and its film."""
    alike = x.element_size() == 2 and (film is None or film.dtype == x.dtype)
    return alike and _fit(x.shape, groups) and x.is_cuda and cuda.available(x.get_device())


def _macros(x: Tensor, groups: int, *, bias: bool, film: bool) -> dict[str, int]:
    return {
        "P": POSITIONS, "DEPTH": x.shape[1], "WIDTH": WIDTH, "EACH": x.shape[1] // groups, "HAS_BIAS": bias,
        "HAS_FILM": film, "BFLOAT": x.dtype == torch.bfloat16,
    }  # fmt: skip


def forward(
    x: Tensor,
    bias: Tensor | None,
    gamma: Tensor,
    beta: Tensor,
    film: Tensor | None,
    groups: int,
    y: Tensor,
    stats: Tensor,
) -> None:
    """Write `maps.norm_silu` of x (B, C, H, W) into y.

    `stats` (B, 3, C) gets the mean of x, the inverse deviation and how far a channel's mean is from its group's.
    """
    macros = _macros(x, groups, bias=bias is not None, film=film is not None)
    kernel = cuda.kernel("norm_silu.cu", x.get_device(), SUMS + COEFFICIENTS, tuple(macros.items()))
    grid = len(x), x.shape[1] // WIDTH, 1
    kernel(
        grid, THREADS, x, gamma if bias is None else bias, gamma, beta, x if film is None else film, y, stats,
        0 if film is None else film.stride(0),
    )  # fmt: skip


def backward(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor,
    film: Tensor | None,
    groups: int,
    stats: Tensor,
    dy: Tensor,
    dskip: Tensor | None,
    dx: Tensor,
    dfilm: Tensor | None,
    partial: Tensor,
) -> None:
    """Write the gradients of x and film (B, 2C), and terms of those of gamma, beta and bias: (2 or 3, B, C)."""
    macros = _macros(x, groups, bias=len(partial) == 3, film=film is not None) | {"HAS_SKIP": dskip is not None}
    shared = MAP * (1 + (dskip is not None)) + SUMS + COEFFICIENTS
    kernel = cuda.kernel("norm_silu_backward.cu", x.get_device(), shared, tuple(macros.items()))
    grid = len(x), x.shape[1] // WIDTH, 1
    kernel(
        grid, THREADS, x, gamma, beta, x if film is None else film, stats, dy, dy if dskip is None else dskip, dx,
        dx if dfilm is None else dfilm, partial, 0 if film is None else film.stride(0), len(x),
    )  # fmt: skip
