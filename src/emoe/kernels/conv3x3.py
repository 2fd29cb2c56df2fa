"""3x3 convolutions of 72 channels, the paper's number, by the CUDA kernels `conv3x3.cu` and `conv3x3_weights.cu`.

They know Hopper GPUs and these channels alone; `emoe.kernels.convs` is for everything else and chooses between the two.
Sums are in single precision and in a fixed order, so equal inputs give equal bits.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from emoe.kernels import cuda

CHANNELS = 72
BLOCKS = 132  # multiprocessors of a large GPU
BLOCK = 227 * 1024  # bytes of shared memory of one of them
POSITION = 2 * CHANNELS  # bytes of a position in shared memory
GROUP = 1280  # bytes of eight rows of 72 numbers, as products read them: see warpgroups.cuh
WEIGHTS = 9 * CHANNELS // 8 * GROUP
BARRIER = 8
GROUPS = 2  # warpgroups of a block; conv3x3_weights.cu is written for two
FORWARD, BACKWARD = 256, 128  # positions of a band
STAGES = 4  # bands of a ring
# Positions of all maps from which these kernels are faster than those of Triton, as measured on an H200.
LEAST_FORWARD, LEAST_BACKWARD = 32768, 16384


def _lines(height: int, width: int, positions: int) -> int:
    """Lines of a band with so many positions, if the height is a multiple of them; otherwise 0."""
    if width > positions or positions % width or (width % 16 and 16 % width):
        return 0
    return positions // width if height % (positions // width) == 0 else 0


def _forward_memory(lines: int, width: int) -> int:
    """Bytes for the weights, two bands with their border, and a barrier for each."""
    return WEIGHTS + 2 * ((lines + 2) * (width + 2) * POSITION + BARRIER)


def _weights_memory(lines: int, width: int) -> int:
    """Bytes for a ring of bands, each with lines of x and their border, lines of dy, and a barrier."""
    return STAGES * (math.ceil(lines * (width + 2) * POSITION / 256) * 256 + lines * width // 8 * GROUP + BARRIER)


def _known(x: Tensor, outputs: int, least: int) -> bool:
    """Whether a map (B, I, H, W) and a number of channels of the result are of the kind, and large enough."""
    fits = x.shape[1] == CHANNELS and outputs % CHANNELS == 0 and x.numel() >= least * CHANNELS
    return fits and x.is_cuda and x.element_size() == 2 and cuda.available(x.get_device())


def fits(x: Tensor, outputs: int) -> bool:
    """Whether `forward` is for a map (B, I, H, W) and a number of channels of the result."""
    lines = _lines(x.shape[2], x.shape[3], FORWARD)
    return lines > 0 and _forward_memory(lines, x.shape[3]) <= BLOCK and _known(x, outputs, LEAST_FORWARD)


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, skip: Tensor | None, y: Tensor, *, turned: bool) -> None:
    """Write the convolution of x (B, 72, H, W) + bias + skip into y; see `convs.forward`. All are channels_last."""
    batch, outputs, height, width = y.shape
    rows = _lines(height, width, FORWARD)
    bands, programs = batch * height // rows, outputs // CHANNELS
    macros = {
        "H": height, "W": width, "ROWS": rows, "OUTPUTS": outputs, "GROUPS": GROUPS, "TILES": FORWARD // (64 * GROUPS),
        "TURNED": turned, "HAS_BIAS": bias is not None, "HAS_SKIP": skip is not None,
        "BFLOAT": x.dtype == torch.bfloat16,
    }  # fmt: skip
    kernel = cuda.kernel("conv3x3.cu", x.get_device(), _forward_memory(rows, width), tuple(macros.items()))
    grid = min(bands, max(1, BLOCKS // programs)), programs, 1
    kernel(grid, 128 * GROUPS, x, weight, weight if bias is None else bias, x if skip is None else skip, y, bands)


def fits_weights(x: Tensor, dy: Tensor) -> bool:
    """Whether `partial_weight_gradients` is for a map and the gradient of a result."""
    lines = _lines(x.shape[2], x.shape[3], BACKWARD)
    return lines > 0 and _weights_memory(lines, x.shape[3]) <= BLOCK and _known(x, dy.shape[1], LEAST_BACKWARD)


def partial_weight_gradients(x: Tensor, dy: Tensor) -> Tensor:
    """Terms of the gradient of the weights, from x (B, 72, H, W) and dy (B, O, H, W), all channels_last.

    (parts, 9 * 72 + 1, O): the last row is of the gradient of a bias.
    """
    batch, outputs, height, width = dy.shape
    rows = _lines(height, width, BACKWARD)
    bands, blocks = batch * height // rows, 3 * (outputs // CHANNELS)
    share = math.ceil(bands / max(1, BLOCKS // blocks))
    parts = math.ceil(bands / share)
    macros = {
        "H": height, "W": width, "ROWS": rows, "OUTPUTS": outputs, "STAGES": STAGES,
        "BFLOAT": x.dtype == torch.bfloat16,
    }  # fmt: skip
    kernel = cuda.kernel("conv3x3_weights.cu", x.get_device(), _weights_memory(rows, width), tuple(macros.items()))
    partial = torch.empty(parts, 9 * CHANNELS + 1, outputs, device=x.device)
    kernel((parts, blocks, 1), 128 * GROUPS, x, dy, partial, bands, share)
    return partial
