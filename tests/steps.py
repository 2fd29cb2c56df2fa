"""Helpers of the oracles: a training step at given rows, masks and times, its gradients, and the network's results."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from enumeration import Enumeration
from torch import Tensor, nn

from emoe.backbones.dit import DiTConfig
from emoe.methods.base import Method
from emoe.methods.masked import MaskedDiffusion
from emoe.rng import Rng
from emoe.types import Features, Gate, Loss, Noised, Route

# Sizes of the weights of tiny models: routes far from uniform, experts that differ, positions that depend on others.
SCALES = {".router.": 2.5, ".w_out": 6.0, ".b_out": 10.0, ".attention.out.": 4.0, "head.weight": 3.0}


def scramble(module: torch.nn.Module, seed: int) -> torch.nn.Module:
    """Give a module weights that do not depend on how the package initialises; equal names get equal weights.

    Matrices and biases are uniform within 1 / sqrt(fan in), embeddings normal, all times their scale above.
    """
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
            normal = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            uniform = 2 * torch.rand(parameter.shape, generator=generator, dtype=torch.float64) - 1
            if "norm" in name:
                value = 0.1 * normal + (1 if name.endswith("weight") else 0)
            elif ".token." in name or ".position." in name or name.endswith(".mark"):
                value = normal
            else:
                stacked = re.search(r"\bw_(in|out)$", name)  # experts hold (in, out), linear layers (out, in)
                fan_in = parameter.shape[-2] if stacked else parameter.shape[-1]
                value = uniform / math.sqrt(fan_in)
            parameter.copy_(value * next((scale for part, scale in SCALES.items() if part in name), 1.0))
    return module


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normal numbers that are the same in every precision, but for rounding."""
    return torch.randn(shape, generator=generator(seed), dtype=torch.float64).to(dtype)


def small_dit(**other: object) -> DiTConfig:
    sizes = {"width": 8, "depth": 2, "heads": 2, "hidden": 8, "cond_size": 4, "time_size": 4, "dropout": 0.0}
    return DiTConfig(**(sizes | other))


def counts_of(rows: Tensor) -> Tensor:
    """Frequencies of the 16 rows of four symbols 0 or 2, in lexicographic order."""
    return torch.bincount(((rows == 2).long() * torch.tensor([8, 4, 2, 1])).sum(-1), minlength=16)


def constant(expert: int = 0, at: tuple[int, int, int, int] | None = None) -> Route:
    """One expert everywhere, but for `at` = (block, row, position, expert)."""

    def policy(block: int, logits: Tensor) -> Gate:
        chosen = torch.full((*logits.shape[:2], 1), expert)
        if at is not None and at[0] == block:
            chosen[at[1], at[2]] = at[3]
        return Gate(chosen, torch.ones(chosen.shape, dtype=logits.dtype))

    return policy


def masks(method: Method, n: int) -> Tensor:
    """The rows from which a sampler starts."""
    return torch.full((n, method.space.length), method.space.mask_id)


def batch_of(method: MaskedDiffusion, rows: int = 12, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """Clean rows, noisy rows and times that mix all mask patterns."""
    exact = Enumeration(method)
    x0 = exact.clean[torch.arange(rows) % len(exact.clean)]
    pattern = exact.patterns[(torch.arange(rows) * 5 + 1) % len(exact.patterns)]
    return x0, torch.where(pattern, exact.mask_id, x0), torch.linspace(0.1, 1, rows, dtype=dtype)


def ramp_of(method: Method, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Ramps at step 3 of 10."""
    return {name: torch.tensor(ramp(3, 10), dtype=dtype) for name, ramp in method.ramps.items()}


def noised(method: MaskedDiffusion, x0: Tensor, xt: Tensor, t: Tensor) -> Noised:
    """Lines 3-4 of Algo. 1 with these rows and times, weighted as in training."""
    return Noised(x0, xt, t, xt == method.space.mask_id, method.config.schedule.elbo_weight(t))


def loss_at(method: MaskedDiffusion, x0: Tensor, xt: Tensor, t: Tensor, ramp: Mapping[str, Tensor], rng: Rng) -> Loss:
    """The training loss of these rows, masks and times."""
    method.noise = lambda *_: noised(method, x0, xt, t)
    try:
        return method(x0, ramp, rng)
    finally:
        del method.noise


def gradients(module: nn.Module, value: Tensor) -> dict[str, Tensor | None]:
    """Gradient of a number in every parameter, None where it is not reached."""
    names, parameters = zip(*module.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(value, parameters, allow_unused=True, retain_graph=True), strict=True))


def flat(gradient: Mapping[str, Tensor | None], module: nn.Module) -> Tensor:
    """Gradients as one vector, zero where there are none."""
    parts = [(gradient[name], p) for name, p in module.named_parameters()]
    return torch.cat([(torch.zeros_like(p) if slope is None else slope).flatten() for slope, p in parts])


def assert_gradients(
    actual: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None], atol: float, rtol: float = 0.0
) -> None:
    """Equal within `atol` and, in proportion to the largest entry of each parameter's gradient, `rtol`."""
    assert actual.keys() == expected.keys()
    for name, want in expected.items():
        got = actual[name]
        want, got = (torch.zeros(()) if one is None else one for one in (want, got))
        assert (got - want).abs().max() <= atol + rtol * want.abs().max(), name


@contextmanager
def recorded(method: MaskedDiffusion) -> Iterator[list[Features]]:
    """The results of the network's calls, in order."""
    calls: list[Features] = []
    handle = method.backbone.register_forward_hook(lambda module, inputs, out: calls.append(out))
    try:
        yield calls
    finally:
        handle.remove()
