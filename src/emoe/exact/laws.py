"""Exact laws of small models: the law of the T-step chain from the components of its reverse steps.

R components of a mixture, C = V - 1 symbols other than the mask, M a set of masked positions. Tables over clean rows
have the shape (C,) * L; their index skips the mask. Networks run in their own precision, all sums in float64.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from emoe.config import ConfigError
from emoe.console import Tick
from emoe.diffusion.schedule import Schedule
from emoe.diffusion.times import GridStep, grid, grid_times
from emoe.methods.base import Method
from emoe.rng import derive_seed

REPEATS = 4  # independent laws of a method whose latents are drawn
MOST_NUMBERS = 20_000_000  # of the tables of all mask patterns together, 8 bytes each

Pattern = tuple[bool, ...]
Table = Float[Tensor, "..."]


def conditionals(method: Method, t: float, seed: int) -> dict[Pattern, Table]:
    """For each pattern M of masks (except the empty one) the table (C,) * L of p(x0^M = x^M | x^l for l not in M; t).

    Only rows that still hold a mask are run, each once. Latents that have to be drawn are drawn by `seed`.
    """
    space, device = method.space, next(method.parameters()).device
    mask = torch.tensor([space.mask_id])
    symbols = torch.tensor([v for v in range(space.size) if v != space.mask_id])
    tables: dict[Pattern, Tensor] = {}
    for pattern in list(itertools.product((False, True), repeat=space.length))[1:]:
        positions = [position for position, masked in enumerate(pattern) if masked]
        rows = torch.cartesian_prod(*(mask if masked else symbols for masked in pattern)).view(-1, space.length)
        law = method.components(rows.to(device), t, seed=seed)
        token = law.log_token[..., symbols.to(device)].exp()
        terms = [term for position in positions for term in (token[:, :, position], [0, 1, 2 + position])]
        joint = torch.einsum(law.log_weight.exp(), [0, 1], *terms, [0, *(2 + position for position in positions)])
        # The axes of the clean tokens come first, then those of the masks: put them in order of position.
        order = [position for position, masked in enumerate(pattern) if not masked] + positions
        joint = joint.cpu().reshape([len(symbols)] * space.length)
        tables[pattern] = joint.movedim(list(range(space.length)), order).contiguous()
    return tables


def check_chain(method: Method) -> Schedule:
    """Return the schedule of the method's reverse chain; raise a `ConfigError` if its law cannot be computed."""
    if method.chain_schedule is None:
        raise ConfigError(f"exact: {method.label} has no chain of factorised steps, so its law is not known here")
    space = method.space
    numbers = (2 * (space.size - 1)) ** space.length
    if numbers > MOST_NUMBERS:
        raise ConfigError(
            f"exact: {space.size - 1} symbols in {space.length} positions make tables of {numbers:,} numbers, more "
            f"than {MOST_NUMBERS:,}; ask for bound@T or iw@T,K, which need no enumeration"
        )
    return method.chain_schedule


@torch.no_grad()
def chain_laws(method: Method, nfe: Iterable[int], *, seed: int = 0, tick: Tick | None = None) -> dict[int, Table]:
    """Return the law of the sampler's rows for each number of steps T, a table (C,) * L (Algo. 2, t_i = i/T).

    Let m_M be the law of the rows whose masks are M. A step with reveal probability a moves, for every S in M,

        m_{M - S} += a^|S| (1 - a)^|M - S| sum over x^(M - S) of m_M p(x^M | x^(not M); t).

    The network is run once for each time, which nested grids (1, 2, 4, ...) share.
    """
    schedule = check_chain(method)

    @functools.cache
    def read(t: float) -> dict[Pattern, Tensor]:
        tables = conditionals(method, t, seed)
        if tick is not None:
            tick(1, f"exact law, t = {t:g}")
        return tables

    return {steps: _propagate(method, grid(schedule, steps), read) for steps in nfe}


def chain_law(method: Method, steps: int) -> Table:
    """`chain_laws` for one T."""
    return chain_laws(method, [steps])[steps]


def exact_laws(method: Method, nfe: Iterable[int], *, seed: int = 0, tick: Tick | None = None) -> dict[int, Table]:
    """Return laws of the T-step sampler for each T, stacked: one, or `REPEATS` if the latent has to be drawn."""
    nfe = sorted(nfe)
    if not method.draws_components:
        return {steps: law[None] for steps, law in chain_laws(method, nfe, tick=tick).items()}
    seeds = [derive_seed(seed, "repeat", repeat) for repeat in range(REPEATS)]
    repeats = [chain_laws(method, nfe, tick=tick, seed=each) for each in seeds]
    return {steps: torch.stack([laws[steps] for laws in repeats]) for steps in nfe}


def law_work(method: Method, nfe: Iterable[int]) -> int:
    """Return the number of times at which `exact_laws` runs the network; its `tick` counts the same."""
    times = {time for steps in nfe for time in grid_times(steps)[1:]}
    return len(times) * (REPEATS if method.draws_components else 1)


def exact_nll(law: Table, rows: Int[Tensor, "n L"], *, mask_id: int | None = None) -> Float[Tensor, " n"]:
    """Return -log p(row) of clean rows, in nats; `mask_id` is by default the last symbol."""
    mask_id = law.shape[0] if mask_id is None else mask_id
    if (rows == mask_id).any():
        raise ValueError(f"rows: {mask_id} is the mask; a law covers clean rows only")
    return -law[tuple((rows - (rows > mask_id).long()).cpu().unbind(1))].log()


def kl_data_model(data: Table, law: Table) -> float:
    """Return KL(data || law) = sum of data log(data / law) in nats; infinite if the model misses some of the data."""
    return (torch.special.xlogy(data, data) - torch.special.xlogy(data, law)).sum().item()


def _propagate(method: Method, steps: Iterable[GridStep], read: Callable[[float], dict[Pattern, Table]]) -> Table:
    """Compute the sum of `chain_laws`; m_M has size 1 along the axes in M, so that products broadcast."""
    length = method.space.length
    none_masked, all_masked = (False,) * length, (True,) * length
    mass: dict[Pattern, Any] = {none_masked: 0.0, all_masked: torch.ones([1] * length, dtype=torch.float64)}
    for step in steps:
        after = {none_masked: mass[none_masked]}
        for pattern, table in read(step.time).items():
            if pattern not in mass:
                continue
            joint = mass[pattern] * table
            for left in itertools.product(*((False, True) if masked else (False,) for masked in pattern)):
                axes = [axis for axis, stays in enumerate(left) if stays]
                summed = joint.sum(axes, keepdim=True) if axes else joint
                weight = step.reveal ** (sum(pattern) - sum(left)) * (1 - step.reveal) ** sum(left)
                after[left] = after.get(left, 0.0) + weight * summed
        mass = after
    return mass[none_masked]
