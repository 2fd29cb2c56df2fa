"""Exact laws of small models: one reverse step as a finite mixture, and the law of the T-step chain.

Letters as in `emoe.types`, and: R components of a mixture, C = V - 1 symbols other than the mask, M a set of masked
positions. Tables over clean rows have the shape (C,) * L; their index skips the mask. Networks run in
their own precision, all sums over routes, rows and steps in float64.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from emoe.config import ConfigError
from emoe.diffusion.masking import NEG_INF, reveal_probability, subs
from emoe.diffusion.quadrature import gaussian_grid, gaussian_points
from emoe.diffusion.times import grid_times
from emoe.methods.base import MaskedDiffusion
from emoe.methods.emoe import EMoE
from emoe.methods.mdlm import MDLM
from emoe.methods.vadd import VADD
from emoe.rng import Rng, derive_seed
from emoe.types import Gate

BUDGET = 200_000  # most components times rows of one call of `step_law`
SAMPLES = 4_096  # latents drawn for the fully masked row where a Gaussian latent is too large for quadrature
NODES = {1: 2_000, 2: 60}  # points of the trapezoid rule in each dimension of a latent of that size
CHUNK = {"cpu": 256, "cuda": 16_384}  # rows that a network is given at a time: caches are small, launches are dear

Pattern = tuple[bool, ...]
Table = Float[Tensor, "..."]


@dataclass(frozen=True)
class Mixture:
    """p(x0 | xt) = sum_r w_r prod_l p_r(x0^l), in logarithms and float64, SUBS applied."""

    log_weight: Float[Tensor, "B R"]
    log_token: Float[Tensor, "B R L V"]


@functools.singledispatch
def step_law(method: MaskedDiffusion, xt: Int[Tensor, "B L"], t: float, **how: Any) -> Mixture:
    """The law of one step of the sampler, p(x0 | xt) = sum_z p(z | xt) prod_l p(x0^l | xt, z), as a finite mixture.

    MDLM has one component. E-MoE has one for each choice of routes z in all blocks but the last: given these, the
    last block's routes are independent over positions and are summed there,
    p_r(x^l) = sum_e p(z_D^l = e | z_<D, xt) softmax(head_e)^l, so that R = E^(L (D - 1)). `route_tau` counts. VADD has
    the points of a trapezoid rule if Z <= 2, else `samples` equally weighted latents. A method of your own takes
    part by `@step_law.register`; a subclass that does not is read as its parent.

    Args:
        method: The method; what it is decides how the sum is made.
        xt: Noisy rows.
        t: Their time.
        how: `steps` of the sampler, of which a `step_aware` network is told; `budget`, the largest R * B that is not
            refused; for VADD also `samples`, latents to draw for each row (None: quadrature, or `SAMPLES` / B of them),
            and their `seed`. All rows of a call share them.
    """
    raise TypeError(f"no exact step is known for {type(method).__name__}; register one with @step_law.register")


@step_law.register
@torch.no_grad()
def _mdlm(method: MDLM, xt: Tensor, t: float, **_: Any) -> Mixture:
    parts = [
        subs(method.backbone(x, _told(method, x, t, None)).logits.double(), x, method.space.mask_id)
        for x in xt.split(_chunk(xt))
    ]
    return Mixture(torch.zeros(len(xt), 1, dtype=torch.float64, device=xt.device), torch.cat(parts)[:, None])


@step_law.register
@torch.no_grad()
def _emoe(method: EMoE, xt: Tensor, t: float, *, steps: int | None = None, budget: int = BUDGET, **_: Any) -> Mixture:
    length, blocks, experts = xt.shape[1], method.backbone.routed_blocks - 1, method.config.experts
    count = experts ** (length * blocks)
    _check(count, len(xt), budget, f"E-MoE has {experts}^({length} * {blocks}) routes in all blocks but the last")
    digits = experts ** torch.arange(length * blocks, device=xt.device)
    routes = (torch.arange(count, device=xt.device)[:, None] // digits % experts).view(count, blocks, length)

    def part(row: Int[Tensor, " N"], route: Int[Tensor, " N"]) -> tuple[Tensor, Tensor]:
        x, z = xt[row], routes[route, ..., None]

        def forced(block: int, logits: Tensor) -> Gate:
            return Gate(z[:, block], torch.ones_like(z[:, block], dtype=logits.dtype))

        logits, route_logits = method.backbone.forward_last(x, _told(method, x, t, steps), route=forced)
        *log_rho, last = (_sharpen(one.double(), method.config.route_tau) for one in route_logits)
        chosen = [rho.gather(-1, z[:, d]).sum((1, 2)) for d, rho in enumerate(log_rho)]
        token = torch.einsum("nle,enlv->nlv", last.exp(), torch.softmax(logits.double(), -1))
        return sum(chosen, token.new_zeros(len(x))), subs(token.log(), x, method.space.mask_id)

    every = torch.cartesian_prod(torch.arange(len(xt), device=xt.device), torch.arange(count, device=xt.device))
    parts = zip(*(part(*pairs.unbind(1)) for pairs in every.split(_chunk(xt))), strict=True)
    log_weight, log_token = (torch.cat(values).unflatten(0, (len(xt), count)) for values in parts)
    coded = method.coded(xt)
    if not coded.all():  # rows whose routes are averaged: a mixture of one part
        whole = Rng(0, device=xt.device)  # nothing is drawn for them
        told = _told(method, xt, t, steps)
        token = subs(method.backbone(xt, told, **method.prior(xt, whole)).logits.double(), xt, method.space.mask_id)
        alone = torch.arange(count, device=xt.device) == 0
        log_weight = torch.where(coded[:, None], log_weight, torch.where(alone, 0.0, -math.inf))
        log_token = torch.where(coded[:, None, None, None], log_token, token[:, None])
    return Mixture(log_weight, log_token)


@step_law.register
@torch.no_grad()
def _vadd(
    method: VADD, xt: Tensor, t: float, *, steps: int | None = None, samples: int | None = None, seed: int = 0,
    budget: int = BUDGET,
) -> Mixture:  # fmt: skip
    size = method.config.latent
    if samples is None and size in NODES:
        z, log_weight = gaussian_grid(size, NODES[size])
    else:
        z = gaussian_points(samples or max(1, SAMPLES // len(xt)), size, derive_seed(seed, "exact", t))
        log_weight = z.new_full((len(z),), -math.log(len(z)))
    _check(len(z), len(xt), budget, f"VADD has {len(z)} values of its latent")
    z = z.to(next(method.parameters()))

    def part(row: Int[Tensor, " N"], latent: Int[Tensor, " N"]) -> Float[Tensor, "N L V"]:
        logits = method.backbone(xt[row], _told(method, xt[row], t, steps), cond=z[latent]).logits
        return subs(logits.double(), xt[row], method.space.mask_id)

    every = torch.cartesian_prod(torch.arange(len(xt), device=xt.device), torch.arange(len(z), device=xt.device))
    log_token = torch.cat([part(*pairs.unbind(1)) for pairs in every.split(_chunk(xt))])
    log_token = log_token.unflatten(0, (len(xt), len(z)))
    return Mixture(log_weight.to(xt.device).expand(len(xt), -1), log_token)


def conditionals(method: MaskedDiffusion, t: float, *, samples: int | None = None, **how: Any) -> dict[Pattern, Table]:
    """For each pattern M of masks (but the empty one) the table (C,) * L of p(x0^M = x^M | x^l for l not in M; t).

    Only rows that still hold a mask are run, each once. `samples` is for the fully masked row; the rows of another
    pattern share as many. `how` goes to `step_law`.
    """
    space, device = method.space, next(method.parameters()).device
    mask = torch.tensor([space.mask_id])
    symbols = torch.tensor([v for v in range(space.size) if v != space.mask_id])
    tables: dict[Pattern, Tensor] = {}
    for pattern in itertools.product((False, True), repeat=space.length):
        places = [place for place, masked in enumerate(pattern) if masked]
        if not places:
            continue
        rows = torch.cartesian_prod(*(mask if masked else symbols for masked in pattern)).view(-1, space.length)
        each = None if samples is None else max(1, samples // len(rows))
        law = step_law(method, rows.to(device), t, samples=each, **how)
        token = law.log_token[..., symbols.to(device)].exp()
        terms = [term for place in places for term in (token[:, :, place], [0, 1, 2 + place])]
        joint = torch.einsum(law.log_weight.exp(), [0, 1], *terms, [0, *(2 + place for place in places)])
        # The axes of the clean tokens come first, then those of the masks: put each in its place.
        order = sorted(range(space.length), key=lambda place: (pattern[place], place))
        joint = joint.cpu().reshape([len(symbols)] * space.length)
        tables[pattern] = joint.permute([order.index(place) for place in range(space.length)]).contiguous()
    return tables


@torch.no_grad()
def chain_laws(method: MaskedDiffusion, nfe: Iterable[int], **how: Any) -> dict[int, Table]:
    """Law of the sampler's rows for each number of steps T, a table (C,) * L: Algo. 2 from all masks, t_i = i/T.

    Let m_M be the law of the rows whose masks are M. A step with reveal probability a moves, for every S in M,

        m_{M - S} += a^|S| (1 - a)^|M - S| sum over x^(M - S) of m_M p(x^M | x^(not M); t).

    Times that grids share (1, 2, 4, ... are nested) are run once. `how`: see `conditionals`.
    """
    read = functools.cache(functools.partial(conditionals, method, **how))
    aware = method.config.step_aware  # then a step depends on how many there are
    return {steps: _propagate(method, steps, functools.partial(read, steps=steps) if aware else read) for steps in nfe}


def chain_law(method: MaskedDiffusion, steps: int, **how: Any) -> Table:
    """`chain_laws` for one T."""
    return chain_laws(method, [steps], **how)[steps]


def repeated_laws(
    method: MaskedDiffusion, nfe: Iterable[int], *, repeats: int = 2, samples: int = SAMPLES, seed: int = 0
) -> dict[int, Float[Tensor, "repeats ..."]]:
    """Independent estimates of `chain_laws` from drawn latents; take their mean, and `law_error` as its error."""
    nfe = list(nfe)
    again = [chain_laws(method, nfe, samples=samples, seed=derive_seed(seed, "repeat", r)) for r in range(repeats)]
    return {steps: torch.stack([laws[steps] for laws in again]) for steps in nfe}


def law_error(laws: Float[Tensor, "repeats ..."]) -> tuple[float, float]:
    """Error of the mean of independent estimates of a law: in total variation, and of the worst cell.

    Standard errors of each cell from the spread of the estimates; the first is half their sum.
    """
    error = laws.std(0, correction=1) / math.sqrt(len(laws))
    return error.sum().item() / 2, error.max().item()


def exact_nll(law: Table, rows: Int[Tensor, "n L"], *, mask_id: int | None = None) -> Float[Tensor, " n"]:
    """-log p(row) of clean rows, in nats; `mask_id` is the last symbol unless it is given."""
    mask_id = law.shape[0] if mask_id is None else mask_id
    if (rows == mask_id).any():
        raise ValueError(f"rows: {mask_id} is the mask; a law speaks of clean rows only")
    return -law[tuple((rows - (rows > mask_id).long()).cpu().unbind(1))].log()


def kl_data_model(data: Table, law: Table) -> float:
    """KL(data || law) = sum of data log(data / law) in nats; infinite where the model misses what the data has."""
    return (torch.special.xlogy(data, data) - torch.special.xlogy(data, law)).sum().item()


def _propagate(method: MaskedDiffusion, steps: int, read: Callable[[float], dict[Pattern, Tensor]]) -> Table:
    """The sum of `chain_laws`; m_M has size 1 along the axes in M, so that products broadcast."""
    length, count = method.space.length, method.space.size - 1
    patterns = sorted(itertools.product((False, True), repeat=length), key=sum, reverse=True)
    shapes = {pattern: [1 if masked else count for masked in pattern] for pattern in patterns}
    mass = {pattern: torch.zeros(shape, dtype=torch.float64) for pattern, shape in shapes.items()}
    mass[patterns[0]].fill_(1)
    times = grid_times(steps)
    alpha = [float(method.config.schedule.alpha(torch.tensor(t, dtype=torch.float64))) for t in times]
    alpha[0] = 1.0  # as the sampler has it
    for i in range(steps, 0, -1):
        reveal = float(reveal_probability(alpha[i - 1], alpha[i]))
        after = {pattern: torch.zeros_like(one) for pattern, one in mass.items()}
        after[patterns[-1]] += mass[patterns[-1]]
        for pattern, table in read(times[i]).items():
            joint = mass[pattern] * table
            for left in patterns:
                if any(one and not masked for one, masked in zip(left, pattern, strict=True)):
                    continue
                stay, gone = sum(left), sum(pattern) - sum(left)
                axes = [axis for axis, one in enumerate(left) if one]
                kept = joint.sum(axes, keepdim=True) if axes else joint
                after[left] += reveal**gone * (1 - reveal) ** stay * kept
        mass = after
    return mass[patterns[-1]]


def _check(components: int, rows: int, budget: int, what: str) -> None:
    if components * rows > budget:
        raise ConfigError(
            [
                f"budget: {what}, times {rows} rows; that is more than {budget}, and too many to enumerate; ask for "
                "bound@T or iw@T,K, which need no enumeration"
            ]
        )


def _chunk(x: Tensor) -> int:
    return CHUNK.get(x.device.type, CHUNK["cpu"])


def _told(method: MaskedDiffusion, x: Int[Tensor, "B L"], t: float, steps: int | None) -> Float[Tensor, " B"]:
    """What the network is told of the time of each row, in single precision as the sampler gives it."""
    times = torch.full((len(x),), t, dtype=torch.float32, device=x.device)
    return method.told(times, None if steps is None else torch.full_like(times, steps))


def _sharpen(logits: Float[Tensor, "B L E"], route_tau: float) -> Float[Tensor, "B L E"]:
    """log p(z) of the routes that the sampler draws: softmax(log rho / tau), or the largest alone at tau = 0."""
    if route_tau == 0:
        best = logits.argmax(-1, keepdim=True)
        return torch.full_like(logits, NEG_INF).scatter(-1, best, 0.0)
    return torch.log_softmax(torch.log_softmax(logits, -1) / route_tau, -1)
