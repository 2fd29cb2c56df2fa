"""Bias, spread and cost of the estimators of the latent, against gradients summed over all routes.

    python research/estimators.py        minutes on a CPU; writes results/estimators.json

A model of two tied symbols with 256 routes is trained for a while. At two moments its training gradient is drawn many
times at fixed (x0, xt, t) by every estimator and compared with the exact gradient of the estimator's objective, and
with that of the exact one-step log-likelihood.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from routes import enumerate_routes, flat_gradient
from tables import BASELINE
from torch import Tensor
from torch.nn import functional as nnf

from emoe.backbones.transformer import TransformerConfig
from emoe.console import Tick, meter
from emoe.domains.ties import Ties, TiesConfig
from emoe.methods.emoe import EMoE, EMoEConfig
from emoe.recipes import get_recipe
from emoe.reporting.provenance import describe_machine
from emoe.reporting.results import Row, RunInfo, record
from emoe.rng import Rng, derive_seed
from emoe.routing.compare import CompareConfig
from emoe.types import Noised

SEED = 0
DATA = TiesConfig(family="pairs", length=2, points=4_096)
BACKBONE = TransformerConfig(width=32, depth=2, heads=2, hidden=64, time_size=16)
TRAINED = EMoEConfig(experts=4, t_low=1 / 64, compare=CompareConfig(estimator="wake-sleep", draws=8))
MOMENTS = {"early": 20, "middle": 150}  # steps of training before each state
BATCH, RATE = 128, 1e-3
GROUPS = 20  # independent means of gradients
DRAWS, CALLS = 480, 120  # routes drawn for each of them, and the fewest calls of an estimator of several draws
VIMCO_GROUPS, TABLE = 8, 2**20  # independent references of VIMCO's bound; entries of their tables
ROUNDS, STEP_BATCH, STEP_RECIPE = 9, 128, "toy-8modes-emoe"
COMPARED = {"leave-one-out": (4, 8), "vimco": (4, 8), "wake-sleep": (2, 4, 8, 16)}  # estimator -> numbers of draws
ESTIMATORS: dict[str, tuple[CompareConfig | None, float]] = {  # how draws are compared, and relax_tau
    **{f"top-2 tau {tau:g}": (None, tau) for tau in (1.0, 0.1)},
    **{f"{name} K={k}": (CompareConfig(estimator=name, draws=k), 1.0) for name, ks in COMPARED.items() for k in ks},
    "wake-sleep K=8 summed": (CompareConfig(estimator="wake-sleep", draws=8, sum_last=True), 1.0),
}


def trained() -> Iterator[tuple[str, EMoE]]:
    """Yield the model at each of the `MOMENTS` of one training run, in float64."""
    domain = DATA.build(SEED)
    assert isinstance(domain, Ties)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(SEED, "estimators"))
        method = TRAINED.build(domain.space, BACKBONE).double()
    optimiser = torch.optim.Adam(method.parameters(), lr=RATE)
    rng, order = Rng(SEED), torch.Generator().manual_seed(derive_seed(SEED, "order"))
    for step in range(max(MOMENTS.values())):
        rows = domain.rows[torch.randint(len(domain.rows), (BATCH,), generator=order)]
        optimiser.zero_grad()
        method(rows, ramp_of(1.0), rng.at(step)).total.backward()
        optimiser.step()
        for state, moment in MOMENTS.items():
            if step + 1 == moment:
                yield state, copy.deepcopy(method).requires_grad_()


def ramp_of(relax_tau: float) -> dict[str, Tensor]:
    """Return values of ramps: the temperature of the relaxation, and a KL weight of 1."""
    return {"relax_tau": torch.tensor(relax_tau), "kl_weight": torch.tensor(1.0), "kl_time_power": torch.tensor(0.0)}


class Cell(NamedTuple):
    """A case for which gradients are compared: a row, the row with masks, and a time."""

    x0: Int[Tensor, "1 L"]
    xt: Int[Tensor, "1 L"]
    t: Float[Tensor, " 1"]


def cells(mask_id: int) -> list[Cell]:
    """Return two rows at t = 1, one of them at t = 1/2, still all masked, and the other with one token known."""
    values = [([0, 0], [mask_id] * 2, 1.0), ([5, 5], [mask_id] * 2, 1.0), ([0, 0], [mask_id] * 2, 0.5)]
    values.append(([5, 5], [5, mask_id], 0.5))
    return [Cell(torch.tensor([x0]), torch.tensor([xt]), torch.tensor([t]).double()) for x0, xt, t in values]


def row_losses(method: EMoE, cell: Cell, relax_tau: float, count: int, rng: Rng) -> Float[Tensor, " B"]:
    """Draw the training loss of a cell `count` times."""
    x0, xt, t = (value.repeat_interleave(count, 0) for value in cell)
    weight, ramp = method.config.schedule.elbo_weight(t), ramp_of(relax_tau)
    return method.objective(Noised(x0, xt, t, xt == method.space.mask_id, weight), ramp, rng)[0]


def exact_gradients(method: EMoE, cell: Cell, parameters: list[Tensor], seed: int) -> Float[Tensor, "G N"]:
    """Return gradients of `objective_of`: an exact one, or for VIMCO several whose mean is exact."""
    compare = method.config.compare
    groups = VIMCO_GROUPS if compare is not None and compare.estimator == "vimco" else 1
    generators = [torch.Generator().manual_seed(derive_seed(seed, "claimed", group)) for group in range(groups)]
    return torch.stack([flat_gradient(objective_of(method, cell, generator), parameters) for generator in generators])


def objective_of(method: EMoE, cell: Cell, generator: torch.Generator) -> Float[Tensor, ""]:
    """Return the objective of the method's estimator at a cell, with a KL weight of 1.

    Top-2 and leave-one-out: w(t) E_q[masked NLL] + KL(q || p). Wake-sleep: -log sum_z p(z) exp(f) for network and
    prior, KL(p(z | x0, xt) || q) for the posterior. VIMCO: its bound of K draws, of which K - 1 are drawn.
    """
    routes, compare = enumerate_routes(method, *cell), method.config.compare
    weight = method.config.schedule.elbo_weight(cell.t).double()
    if compare is None or compare.estimator == "leave-one-out":
        recon, kl = routes.terms()
        return (weight * recon + kl).sum()
    if compare.estimator == "wake-sleep":
        return (routes.evidence(weight) - routes.score(weight)).sum()
    # -E over z_1..z_K ~ q of B = log 1/K sum_k exp(f_k + r_k - s_k) is symmetric in the draws, so its gradient is
    # K E[sum over z_K of grad q(z_K) B] + E[grad B].
    log_q = routes.log_q[0]
    value, tuples = routes.joint(weight)[0] - log_q, max(1, TABLE // len(log_q))
    others = torch.multinomial(log_q.detach().exp(), tuples * (compare.draws - 1), True, generator=generator)
    drawn = value[others.view(tuples, compare.draws - 1)].logsumexp(1)
    bound, q = torch.logaddexp(drawn[:, None], value) - math.log(compare.draws), log_q.exp()
    return -(compare.draws * q * bound.detach() + q.detach() * bound).sum(1).mean()


def likelihood_gradient(model: EMoE, cell: Cell) -> Float[Tensor, " N"]:
    """Return the exact gradient of -log p(x0 | xt) of one step in all parameters; it does not involve the posterior."""
    one = torch.ones(1, dtype=torch.float64)
    return flat_gradient(enumerate_routes(model, *cell).evidence(one).sum(), list(model.parameters()))


def quality(drawn: Float[Tensor, "G N"], references: Float[Tensor, "R N"], each: int) -> dict[str, float]:
    """Compare means over groups of `each` calls with the mean of references, the exact gradient; all over its size."""
    mean, exact = drawn.mean(0), references.mean(0)
    size, noise = exact.norm().item(), spread(drawn)
    return {
        "bias": (mean - exact).norm().item() / size,
        "error": math.hypot(noise, spread(references)) / size,  # expected bias of an unbiased estimator
        "cosine": nnf.cosine_similarity(mean, exact, dim=0).item(),
        "std": noise * math.sqrt(len(drawn) * each) / size,  # sqrt(E |g - E g|^2) of a single call
        "size": math.sqrt(max(0.0, mean.square().sum().item() - noise**2)) / size,  # |E g|
    }


def spread(means: Float[Tensor, "G N"]) -> float:
    """Estimate sqrt(E |mean of the rows - its expectation|^2); 0 for a single row."""
    return math.sqrt(means.var(0).sum().item() / len(means)) if len(means) > 1 else 0.0


def gradient_rows(state: str, model: EMoE, tick: Tick) -> list[Row]:
    """Measure all estimators over the cells: root mean square of sizes, mean of cosines."""
    cases, rows = cells(model.space.mask_id), list[Row]()
    # Entries of a gradient of all parameters that belong to routers.
    routers = torch.cat([torch.full((p.numel(),), "router" in n.split(".")) for n, p in model.named_parameters()])
    wanted = [likelihood_gradient(model, cell)[routers] for cell in cases if cell.t == 1]  # the first cells
    for name, (compare, tau) in ESTIMATORS.items():
        method = copy.deepcopy(model)
        method.config = replace(model.config, compare=compare)
        parameters, each = list(method.parameters()), max(CALLS, DRAWS // (compare.draws if compare else 1))
        calls, gradients = GROUPS * each * len(cases), []
        for number, cell in enumerate(cases):
            rng = Rng(derive_seed(SEED, name, number))
            losses = (row_losses(method, cell, tau, each, rng.at(group)).mean() for group in range(GROUPS))
            drawn = torch.stack([flat_gradient(loss, parameters) for loss in losses])
            gradients.append((drawn, exact_gradients(method, cell, parameters, seed=number)))
        for part, own in (("routers", routers), ("others", ~routers)):
            several = [quality(drawn[:, own], exact[:, own], each) for drawn, exact in gradients]
            bias, error, std, size = (rms(one[key] for one in several) for key in ("bias", "error", "std", "size"))
            values = {"cosine": fmean(one["cosine"] for one in several), "std": std, "snr": size / std}
            rows.append(row(name, "bias", bias, f"{state}, {part}", n=calls, stderr=error))
            rows += [row(name, metric, value, f"{state}, {part}", n=calls) for metric, value in values.items()]
        means = [drawn.mean(0)[routers] for drawn, _ in gradients]
        cosine = fmean(nnf.cosine_similarity(*pair, dim=0).item() for pair in zip(means, wanted, strict=False))
        rows.append(row(name, "likelihood_cosine", cosine, f"{state}, routers", n=calls))
        tick(1, f"{state}, {name}")
    return rows


def rms(values: Iterator[float]) -> float:
    """Return the root mean square."""
    return math.sqrt(fmean(value**2 for value in values))


@torch.no_grad()
def state_rows(state: str, model: EMoE) -> list[Row]:
    """Return exact NLL of one step and KL(q || p) at t = 1, means over all rows of the data."""
    x0 = torch.arange(model.space.mask_id)[:, None].expand(-1, model.space.length).contiguous()
    one = torch.ones(len(x0), dtype=torch.float64)
    routes = enumerate_routes(model, x0, torch.full_like(x0, model.space.mask_id), one)
    values = {"nll": routes.evidence(one).mean().item(), "kl": routes.terms()[1].mean().item()}
    return [row(state, metric, value, "exact", nfe=1) for metric, value in values.items()]


def cost_rows(tick: Tick) -> list[Row]:
    """Return the median time of a training step of the toy model for each estimator, and its ratio to the baseline.

    Every round takes one step of each, so that a machine that slows down slows them all.
    """
    recipe = get_recipe(STEP_RECIPE)
    domain, steps = recipe.domain.build(SEED), {}
    for name, (compare, tau) in ESTIMATORS.items():
        method = replace(recipe.method, compare=compare).build(domain.space, recipe.backbone)  # type: ignore[call-arg]
        steps[name] = (method, torch.optim.Adam(method.parameters(), lr=1e-4), tau)
    spent: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(ROUNDS + 1):
        for name, (method, optimiser, tau) in steps.items():
            began = time.perf_counter()
            optimiser.zero_grad()
            method(domain.rows[:STEP_BATCH], ramp_of(tau), Rng(turn)).total.backward()
            optimiser.step()
            if turn:  # the first round warms up
                spent[name].append(time.perf_counter() - began)
        tick(1, f"round {turn}")
    medians = {name: median(times) for name, times in spent.items()}
    times = [row(name, "step_ms", 1000 * value, n=ROUNDS, data="8-modes") for name, value in medians.items()]
    base = medians[BASELINE]
    return times + [row(name, "step_ratio", v / base, n=ROUNDS, data="8-modes") for name, v in medians.items()]


def row(recipe: str, metric: str, value: float, convention: str | None = None, **more: object) -> Row:
    """Return a row of results."""
    where: dict = {"task": "estimators", "data": "pairs-L2", "method": "emoe", "seed": SEED, "nfe": None} | more
    return Row(recipe=recipe, metric=metric, convention=convention, value=value, **where)


def main(results: Path = Path("results/estimators.json")) -> None:
    """Record all states, gradients and costs."""
    began, states, rows = time.monotonic(), dict(trained()), list[Row]()
    with meter(len(states) * len(ESTIMATORS) + ROUNDS + 1, "estimators") as tick:
        for state, model in states.items():
            rows += state_rows(state, model) + gradient_rows(state, model, tick)
        rows += cost_rows(tick)
    wall_s = round(time.monotonic() - began, 1)
    info = RunInfo(command="python research/estimators.py", wall_s=wall_s, **describe_machine("cpu"))
    record(results, info, rows)


if __name__ == "__main__":
    main()
