"""Bias, spread and cost of the estimators of the latent, against gradients summed over all routes.

    python research/estimators.py        minutes on a CPU; writes results/estimators.json and a figure

A model of two tied symbols with 256 routes is trained for a while; at two moments its training gradient is drawn many
times at fixed (x0, xt, t) by every estimator and compared with the gradient of the objective that the estimator claims
to follow, and with that of the exact one-step log-likelihood.
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
from jaxtyping import Bool, Float, Int
from routes import enumerate_routes, flat_gradient
from tables import BASELINE, FAMILIES, STATES
from torch import Tensor

from emoe.backbones.transformer import TransformerConfig
from emoe.console import Tick, meter
from emoe.domains.ties import Ties, TiesConfig
from emoe.figures.base import CYCLE, canvas, save
from emoe.methods.emoe import EMoE, EMoEConfig
from emoe.recipes import get_recipe
from emoe.reporting.provenance import describe_machine
from emoe.reporting.results import Results, Row, RunInfo, record
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


def compared(estimator: str, draws: int, **more: bool) -> CompareConfig:
    """Draws that are compared, row by row."""
    return CompareConfig(estimator=estimator, draws=draws, **more)  # type: ignore[arg-type]


ESTIMATORS: dict[str, tuple[CompareConfig | None, float]] = {  # how draws are compared, and relax_tau
    **{f"top-2 tau {tau:g}": (None, tau) for tau in (1.0, 0.1)},
    **{f"{name} K={k}": (compared(name, k), 1.0) for name in ("leave-one-out", "vimco") for k in (4, 8)},
    **{f"wake-sleep K={k}": (compared("wake-sleep", k), 1.0) for k in (2, 4, 8, 16)},
    "wake-sleep K=8 summed": (compared("wake-sleep", 8, sum_last=True), 1.0),
}


def trained() -> Iterator[tuple[str, EMoE]]:
    """The model at each of the `MOMENTS` of one training run, in float64."""
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


def with_estimator(model: EMoE, compare: CompareConfig | None) -> EMoE:
    """The same weights with another estimator."""
    other = copy.deepcopy(model)
    other.config = EMoEConfig(experts=model.config.experts, t_low=model.config.t_low, compare=compare)
    return other


def ramp_of(relax_tau: float) -> dict[str, Tensor]:
    """Temperature of the relaxation, and a KL weight of 1."""
    return {"relax_tau": torch.tensor(relax_tau), "kl_weight": torch.tensor(1.0), "kl_time_power": torch.tensor(0.0)}


# --- Gradients -------------------------------------------------------------------------------------------------------


class Cell(NamedTuple):
    """Where gradients are compared: a row, the row with masks, and a time."""

    x0: Int[Tensor, "1 L"]
    xt: Int[Tensor, "1 L"]
    t: Float[Tensor, " 1"]


def cells(mask_id: int) -> list[Cell]:
    """Two rows at t = 1; one of them at t = 1/2, still all masked; the other with one token known."""
    values = [([0, 0], [mask_id] * 2, 1.0), ([5, 5], [mask_id] * 2, 1.0), ([0, 0], [mask_id] * 2, 0.5)]
    values.append(([5, 5], [5, mask_id], 0.5))
    return [Cell(torch.tensor([x0]), torch.tensor([xt]), torch.tensor([t]).double()) for x0, xt, t in values]


def row_losses(method: EMoE, cell: Cell, relax_tau: float, count: int, rng: Rng) -> Float[Tensor, " B"]:
    """Training losses of a cell, drawn `count` times."""
    x0, xt, t = (value.repeat_interleave(count, 0) for value in cell)
    weight, ramp = method.config.schedule.elbo_weight(t), ramp_of(relax_tau)
    return method.objective(Noised(x0, xt, t, xt == method.space.mask_id, weight), ramp, rng)[0]


def claimed_gradients(method: EMoE, cell: Cell, parameters: list[Tensor], seed: int) -> Float[Tensor, "G N"]:
    """Gradients of `claimed`: an exact one, or for VIMCO some whose mean is exact."""
    compare = method.config.compare
    groups = VIMCO_GROUPS if compare is not None and compare.estimator == "vimco" else 1
    generators = [torch.Generator().manual_seed(derive_seed(seed, "claimed", group)) for group in range(groups)]
    return torch.stack([flat_gradient(claimed(method, cell, generator), parameters) for generator in generators])


def claimed(method: EMoE, cell: Cell, generator: torch.Generator) -> Float[Tensor, ""]:
    """A number whose gradient the method's estimator claims to follow at a cell, with a KL weight beta of 1.

    Top-2 and leave-one-out: w(t) E_q[masked NLL] + KL(q || p). Wake-sleep: -log sum_z p(z) exp(f) for network and
    prior, KL(p(z | x0, xt) || q) for the posterior. VIMCO: its bound of K draws, of which K - 1 are drawn.
    """
    routes, compare = enumerate_routes(method, *cell), method.config.compare
    weight = method.config.schedule.elbo_weight(cell.t).double()
    beta = torch.ones_like(weight)
    if compare is None or compare.estimator == "leave-one-out":
        recon, kl = routes.terms()
        return (weight * recon + kl).sum()
    if compare.estimator == "wake-sleep":
        return (routes.evidence(weight, beta) - routes.score(weight, beta)).sum()
    # -E over z_1..z_K ~ q of B = log 1/K sum_k exp(f_k + r_k - s_k) is symmetric in the draws, so its gradient is
    # K E[sum over z_K of grad q(z_K) B] + E[grad B].
    log_q, log_p, log_x = (table[0] for table in routes.tables())
    value, tuples = weight * log_x + log_p - log_q, max(1, TABLE // len(log_q))
    others = torch.multinomial(log_q.detach().exp(), tuples * (compare.draws - 1), True, generator=generator)
    drawn = value[others.view(tuples, compare.draws - 1)].logsumexp(1)
    bound, q = torch.logaddexp(drawn[:, None], value) - math.log(compare.draws), log_q.exp()
    return -(compare.draws * q * bound.detach() + q.detach() * bound).sum(1).mean()


def likelihood_gradient(model: EMoE, cell: Cell) -> Float[Tensor, " N"]:
    """Exact gradient of -log p(x0 | xt) of one step, in all parameters; the posterior has no part in it."""
    one = torch.ones(1, dtype=torch.float64)
    return flat_gradient(enumerate_routes(model, *cell).evidence(one, one).sum(), list(model.parameters()))


class Quality(NamedTuple):
    """A drawn gradient against the exact one, relative to the size of the exact one."""

    bias: float  # |mean - exact|
    error: float  # what `bias` would be without a bias
    cosine: float  # of the mean and the exact one
    std: float  # sqrt(E |g - E g|^2) of a single call
    size: float  # |E g|


def quality(drawn: Float[Tensor, "G N"], references: Float[Tensor, "R N"], each: int) -> Quality:
    """Compare means over groups of `each` calls with references, whose mean is the exact gradient."""
    mean, exact = drawn.mean(0), references.mean(0)
    size, noise = exact.norm().item(), spread(drawn)
    return Quality(
        bias=(mean - exact).norm().item() / size,
        error=math.hypot(noise, spread(references)) / size,
        cosine=cosine(mean, exact),
        std=noise * math.sqrt(len(drawn) * each) / size,
        size=math.sqrt(max(0.0, mean.square().sum().item() - noise**2)) / size,
    )


def spread(means: Float[Tensor, "G N"]) -> float:
    """sqrt(E |mean of the rows - its expectation|^2); 0 for a single row."""
    return math.sqrt(means.var(0).sum().item() / len(means)) if len(means) > 1 else 0.0


def cosine(a: Float[Tensor, " N"], b: Float[Tensor, " N"]) -> float:
    """Cosine of two vectors."""
    return torch.dot(a, b).item() / (a.norm().item() * b.norm().item())


def router_mask(model: EMoE) -> Bool[Tensor, " N"]:
    """Which entries of a gradient of all parameters belong to routers."""
    return torch.cat([torch.full((p.numel(),), "router" in n.split(".")) for n, p in model.named_parameters()])


def gradient_rows(state: str, model: EMoE, tick: Tick) -> list[Row]:
    """All measures of all estimators, over the cells: root mean square of sizes, mean of cosines."""
    cases, routers, rows = cells(model.space.mask_id), router_mask(model), list[Row]()
    wanted = [likelihood_gradient(model, cell)[routers] for cell in cases if cell.t == 1]
    for name, (compare, tau) in ESTIMATORS.items():
        method = with_estimator(model, compare)
        parameters, each = list(method.parameters()), max(CALLS, DRAWS // (compare.draws if compare else 1))
        qualities: dict[str, list[Quality]] = {"routers": [], "others": []}
        cosines = []
        for number, cell in enumerate(cases):
            rng = Rng(derive_seed(SEED, name, number))
            losses = (row_losses(method, cell, tau, each, rng.at(group)).mean() for group in range(GROUPS))
            drawn = torch.stack([flat_gradient(loss, parameters) for loss in losses])
            exact = claimed_gradients(method, cell, parameters, seed=number)
            for part, own in (("routers", routers), ("others", ~routers)):
                qualities[part].append(quality(drawn[:, own], exact[:, own], each))
            if cell.t == 1:
                cosines.append(cosine(drawn.mean(0)[routers], wanted[len(cosines)]))
        calls = GROUPS * each * len(cases)
        for part, several in qualities.items():
            std = rms(one.std for one in several)
            bias, error = rms(one.bias for one in several), rms(one.error for one in several)
            values = {"bias": bias, "cosine": fmean(one.cosine for one in several), "std": std}
            values["snr"] = rms(one.size for one in several) / std
            rows += [
                row(name, metric, value, f"{state}, {part}", n=calls, stderr=error if metric == "bias" else None)
                for metric, value in values.items()
            ]
        rows.append(row(name, "likelihood_cosine", fmean(cosines), f"{state}, routers", n=calls))
        tick(1, f"{state}, {name}")
    return rows


def rms(values: Iterator[float]) -> float:
    """Root mean square."""
    return math.sqrt(fmean(value**2 for value in values))


@torch.no_grad()
def state_rows(state: str, model: EMoE) -> list[Row]:
    """Exact NLL of one step and KL(q || p) at t = 1, means over all rows of the data."""
    x0 = torch.arange(model.space.mask_id)[:, None].expand(-1, model.space.length).contiguous()
    one = torch.ones(len(x0), dtype=torch.float64)
    routes = enumerate_routes(model, x0, torch.full_like(x0, model.space.mask_id), one)
    values = {"nll": routes.evidence(one, one).mean().item(), "kl": routes.terms()[1].mean().item()}
    return [row(state, metric, value, "exact", nfe=1) for metric, value in values.items()]


def cost_rows(tick: Tick) -> list[Row]:
    """Median time of a training step of the toy's model for each estimator, and its ratio to the paper's reading.

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
    """A row of results."""
    where: dict = {"task": "estimators", "data": "pairs-L2", "method": "emoe", "seed": SEED, "nfe": None} | more
    return Row(recipe=recipe, metric=metric, convention=convention, value=value, **where)


def figure(results: Results, path: Path) -> None:
    """Relative bias against the standard deviation of a call, one point per estimator and one panel per state."""
    picture = canvas(11.0, 5.4)
    for axis, state in zip(picture.subplots(1, len(STATES), sharex=True, sharey=True), STATES, strict=True):
        spreads = {one.recipe: one.value for one in results.select(metric="std", convention=f"{state}, routers")}
        for one in results.select(metric="bias", convention=f"{state}, routers"):
            family, _, setting = str(one.recipe).partition(" ")
            colour, x = CYCLE[FAMILIES.index(family)], spreads[one.recipe]
            sure = one.value > 2 * (one.stderr or 0)  # filled: a bias beyond twice its error
            axis.plot(x, one.value, "o", color=colour, markerfacecolor=colour if sure else "white", label=family)
            axis.annotate(setting, (x, one.value), xytext=(5, 2), textcoords="offset points", fontsize=7, color=colour)
        axis.set(xscale="log", yscale="log", title=state, xlabel="standard deviation of a call / |exact gradient|")
    picture.axes[0].set_ylabel("|mean - exact| / |exact gradient|, routers; filled: beyond twice its error")
    handles = dict(zip(*reversed(picture.axes[0].get_legend_handles_labels()), strict=True))
    picture.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=len(handles), fontsize=8)
    save(picture, path)


def main(folder: Path = Path("results")) -> None:
    """All states, gradients and costs."""
    began, states, rows = time.monotonic(), dict(trained()), list[Row]()
    with meter(len(states) * len(ESTIMATORS) + ROUNDS + 1, "estimators") as tick:
        for state, model in states.items():
            rows += state_rows(state, model) + gradient_rows(state, model, tick)
        rows += cost_rows(tick)
    wall_s = round(time.monotonic() - began, 1)
    info = RunInfo(command="python research/estimators.py", wall_s=wall_s, **describe_machine("cpu"))
    figure(record(folder / "estimators.json", info, rows), folder / "figures" / "estimators.png")


if __name__ == "__main__":
    main()
