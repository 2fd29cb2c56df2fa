"""Bias, spread and cost of every estimator of the latent, against gradients summed over all routes.

A model of two tied symbols with 256 routes is trained for a while; at two moments its training gradient is drawn many
times at fixed (x0, xt, t) by every estimator and compared with the gradient of the objective the estimator claims
(`emoe.verify.claimed`), and with that of the exact one-step log-likelihood.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from emoe.backbones.transformer import TransformerConfig
from emoe.cli import Parser
from emoe.commands import split_settings
from emoe.config import ConfigError
from emoe.console import Tick, meter
from emoe.domains.ties import Ties, TiesConfig
from emoe.methods.emoe import EMoE, EMoEConfig
from emoe.recipes import get_recipe
from emoe.reporting.latent import BASELINE, FAMILIES, STATES
from emoe.reporting.results import Results, Row
from emoe.rng import Rng, derive_seed
from emoe.studies.base import make_study
from emoe.verify import claimed_gradients, enumerate_routes, flat_gradient, spread

SEED = 0
DATA = TiesConfig(family="pairs", length=2, points=4_096)
BACKBONE = TransformerConfig(width=32, depth=2, heads=2, hidden=64, time_size=16)
COMPARED: dict[str, Any] = {"estimator": "wake-sleep", "gradient": "none", "draws": 8}
TRAINED = EMoEConfig(experts=4, t_low=1 / 64, **COMPARED)
MOMENTS = {"early": 20, "middle": 150}  # steps of training before each state
BATCH, RATE = 128, 1e-3
GROUPS = 20  # independent means of gradients
DRAWS, CALLS = 480, 120  # routes drawn for each of them, and the fewest calls of an estimator of several draws
TICKS = [digit * 10.0**power for power in range(-5, 4) for digit in (1, 2, 5)]
ROUNDS, STEP_BATCH, STEP_RECIPE = 9, 128, "toy-8modes-emoe"


def _several(estimator: str, draws: int, **more: str) -> dict[str, Any]:
    return {"estimator": estimator, "gradient": "none", "draws": draws, **more}


ESTIMATORS: dict[str, tuple[dict[str, Any], float]] = {  # options of the method, and relax_tau
    **{
        f"{label} tau {tau:g}": ({"gradient": gradient}, tau)
        for label, gradient in (("top-2", "top-k"), ("all", "all"), ("selected", "selected"),
                                ("gumbel-rao", "gumbel-rao"))
        for tau in (1.0, 0.1)
    },
    "reinmax": ({"gradient": "reinmax"}, 1.0),
    **{f"{name} K={k}": (_several(name, k), 1.0) for name in ("leave-one-out", "vimco") for k in (4, 8)},
    **{f"wake-sleep K={k}": (_several("wake-sleep", k), 1.0) for k in (2, 4, 8, 16)},
    "wake-sleep K=8 summed": (_several("wake-sleep", 8, last_block="summed"), 1.0),
    "wake-sleep K=8 redraw block": (_several("wake-sleep", 8, redraw="block"), 1.0),
    "wake-sleep K=8 redraw positions": (_several("wake-sleep", 8, redraw="positions"), 1.0),
}  # fmt: skip


def main(words: list[str]) -> int:
    """`emoe reproduce estimators`."""
    rest, settings = split_settings(words)
    parser = Parser(
        prog="emoe reproduce estimators",
        description="Compare every estimator of the latent with gradients summed over all 256 routes of a small E-MoE "
        "(a few minutes on a CPU): relative bias, cosine, standard deviation and cost of a step. Writes "
        "estimators.json and a figure.",
    )
    parser.add_argument("--results", default="results", help="folder of estimators.json and figures (default results)")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    args = parser.parse_args(rest)
    if settings:
        raise ConfigError([f"{name}: this study has no settings" for name in settings])
    folder = Path(args.results)
    study = make_study(
        "reproduce estimators", words, folder=folder, results=folder / "estimators.json", device="cpu",
        quiet=args.quiet,
    )  # fmt: skip
    states = dict(trained())
    study.add([row for state, model in states.items() for row in state_rows(state, model)])
    with meter(len(states) * len(ESTIMATORS), "gradients", quiet=args.quiet) as tick:
        for state, model in states.items():
            study.add(gradient_rows(state, model, tick))
    with meter(ROUNDS, "cost of a step", quiet=args.quiet) as tick:
        results = study.add(cost_rows(tick))
    path = folder / "figures" / "estimators.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure(results, path)
    study.note(f"written: {folder / 'estimators.json'}, {path}")
    return 0


# --- The model ---------------------------------------------------------------------------------------------------


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
        method(rows, knobs_of(1.0), rng.at(step)).total.backward()
        optimiser.step()
        for state, moment in MOMENTS.items():
            if step + 1 == moment:
                yield state, copy.deepcopy(method).requires_grad_()


def with_options(model: EMoE, options: Mapping[str, Any]) -> EMoE:
    """The same weights with another estimator; options that are not named are the paper's reading."""
    config = EMoEConfig(experts=model.config.experts, t_low=model.config.t_low, **options)
    other = copy.deepcopy(model)
    other.config = config
    return other


def knobs_of(relax_tau: float) -> dict[str, Tensor]:
    """Temperature of the relaxation, and a KL weight of 1."""
    return {"relax_tau": torch.tensor(relax_tau), "kl_weight": torch.tensor(1.0)}


@torch.no_grad()
def state_rows(state: str, model: EMoE) -> list[Row]:
    """What the model knows: exact NLL of one step and KL(q || p) at t = 1, means over all rows of the data."""
    x0 = torch.arange(model.space.mask_id)[:, None].expand(-1, model.space.length).contiguous()
    one = torch.ones(len(x0), dtype=torch.float64)
    routes = enumerate_routes(model, x0, torch.full_like(x0, model.space.mask_id), one)
    values = {"nll": routes.evidence(one, one).mean().item(), "kl": routes.terms()[1].mean().item()}
    return [_row(state, metric, value, None, convention="exact", nfe=1) for metric, value in values.items()]


# --- Gradients ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """Where gradients are compared: one row, what is left of it, and a time."""

    x0: Int[Tensor, "1 L"]
    xt: Int[Tensor, "1 L"]
    t: Float[Tensor, " 1"]


def cells(mask_id: int) -> list[Cell]:
    """Two rows at t = 1; one of them at t = 1/2, still all masked; the other with one token known."""

    def cell(x0: list[int], xt: list[int], t: float) -> Cell:
        return Cell(torch.tensor([x0]), torch.tensor([xt]), torch.tensor([t], dtype=torch.float64))

    first, second, masks = [0, 0], [5, 5], [mask_id, mask_id]
    return [
        cell(first, masks, 1.0),
        cell(second, masks, 1.0),
        cell(first, masks, 0.5),
        cell(second, [5, mask_id], 0.5),
    ]


@dataclass(frozen=True)
class Quality:
    """A drawn gradient against the exact one, for one set of parameters."""

    bias: float  # |mean - exact| / |exact|
    error: float  # sqrt(E |mean - its expectation|^2) / |exact|: what `bias` reads without a bias
    cosine: float  # of the mean and the exact one
    std: float  # sqrt(E |g - E g|^2) / |exact| of a single call
    size: float  # |E g| / |exact|


def quality(drawn: Float[Tensor, "G N"], references: Float[Tensor, "R N"], each: int) -> Quality:
    """Compare means over groups of `each` calls with references, whose mean is the exact gradient."""
    mean, exact = drawn.mean(0), references.mean(0)
    size, noise = exact.norm().item(), spread(drawn)
    return Quality(
        bias=(mean - exact).norm().item() / size,
        error=math.hypot(noise, spread(references)) / size,
        cosine=_cosine(mean, exact),
        std=noise * math.sqrt(len(drawn) * each) / size,
        size=math.sqrt(max(0.0, mean.square().sum().item() - noise**2)) / size,
    )


def drawn_gradients(method: EMoE, cell: Cell, relax_tau: float, each: int, seed: int) -> Float[Tensor, "G N"]:
    """Means over `each` calls of the training gradient of all parameters, `GROUPS` times."""
    rows = [value.repeat_interleave(each, 0) for value in (cell.x0, cell.xt, cell.t)]
    rng, knobs, parameters = Rng(seed), knobs_of(relax_tau), list(method.parameters())
    return torch.stack(
        [
            flat_gradient(method.objective(rows[0], rows[1], rows[2], knobs, rng.at(group)).loss.mean(), parameters)
            for group in range(GROUPS)
        ]
    )


def likelihood_gradient(model: EMoE, cell: Cell) -> Float[Tensor, " N"]:
    """Exact gradient of -log p(x0 | xt) of one step, in all parameters; the posterior has no part in it."""
    one = torch.ones(1, dtype=torch.float64)
    value = enumerate_routes(model, cell.x0, cell.xt, cell.t).evidence(one, one).sum()
    return flat_gradient(value, list(model.parameters()))


def gradient_rows(state: str, model: EMoE, tick: Tick | None = None) -> list[Row]:
    """All measures of all estimators, over the cells: root mean square of sizes, mean of cosines."""
    places = cells(model.space.mask_id)
    routers = router_mask(model)
    wanted = [likelihood_gradient(model, cell)[routers] for cell in places if cell.t == 1]
    rows = []
    for name, (options, tau) in ESTIMATORS.items():
        method = with_options(model, options)
        each = max(CALLS, DRAWS // method.config.draws)
        found: dict[str, list[Quality]] = {"routers": [], "others": []}
        cosines: list[float] = []
        for number, cell in enumerate(places):
            drawn = drawn_gradients(method, cell, tau, each, derive_seed(SEED, name, number))
            exact = claimed_gradients(method, cell.x0, cell.xt, cell.t, list(method.parameters()), seed=number)
            for part, mine in (("routers", routers), ("others", ~routers)):
                found[part].append(quality(drawn[:, mine], exact[:, mine], each))
            if cell.t == 1:
                cosines.append(_cosine(drawn.mean(0)[routers], wanted[len(cosines)]))
        calls = GROUPS * each * len(places)
        for part, several in found.items():
            where, std = f"{state}, {part}", _rms([q.std for q in several])
            rows += [
                _row(name, "bias", _rms([q.bias for q in several]), _rms([q.error for q in several]), where, n=calls),
                _row(name, "cosine", _mean([q.cosine for q in several]), None, where, n=calls),
                _row(name, "std", std, None, where, n=calls),
                _row(name, "snr", _rms([q.size for q in several]) / std, None, where, n=calls),
            ]
        rows.append(_row(name, "likelihood_cosine", _mean(cosines), None, f"{state}, routers", n=calls))
        if tick is not None:
            tick(1, f"{state}, {name}")
    return rows


def router_mask(model: EMoE) -> Bool[Tensor, " N"]:
    """Which entries of a gradient of all parameters belong to routers."""
    return torch.cat([torch.full((p.numel(),), "router" in n.split(".")) for n, p in model.named_parameters()])


def _cosine(a: Float[Tensor, " N"], b: Float[Tensor, " N"]) -> float:
    return torch.dot(a, b).item() / (a.norm().item() * b.norm().item())


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def _rms(values: list[float]) -> float:
    return math.sqrt(math.fsum(value**2 for value in values) / len(values))


def _row(
    recipe: str,
    metric: str,
    value: float,
    stderr: float | None,
    convention: str | None = None,
    *,
    nfe: int | None = None,
    n: int | None = None,
    data: str = "pairs-L2",
) -> Row:
    return Row(
        task="estimators", data=data, method="emoe", recipe=recipe, seed=SEED, nfe=nfe, metric=metric,
        convention=convention, value=value, stderr=stderr, n=n,
    )  # fmt: skip


# --- Cost --------------------------------------------------------------------------------------------------------


def cost_rows(tick: Tick | None = None) -> list[Row]:
    """Median time of a training step of the toy's model for each estimator, and its ratio to the paper's reading.

    Every round takes one step of each, so that a machine that slows down slows them all.
    """
    recipe = get_recipe(STEP_RECIPE)
    domain = recipe.domain.build(SEED)
    assert isinstance(recipe.method, EMoEConfig)
    rows = domain.rows[:STEP_BATCH]
    steps = {}
    for name, (options, tau) in ESTIMATORS.items():
        method = replace(recipe.method, **options).build(domain.space, recipe.backbone)
        steps[name] = (method, torch.optim.Adam(method.parameters(), lr=1e-4), tau)
    spent: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(ROUNDS + 1):
        for name, (method, optimiser, tau) in steps.items():
            began = time.perf_counter()
            optimiser.zero_grad()
            method(rows, knobs_of(tau), Rng(turn)).total.backward()
            optimiser.step()
            if turn:  # the first round warms up
                spent[name].append(time.perf_counter() - began)
        if tick is not None and turn:
            tick(1, f"round {turn}")
    medians = {name: median(times) for name, times in spent.items()}
    return [
        row
        for name, value in medians.items()
        for row in (
            _row(name, "step_ms", 1000 * value, None, n=ROUNDS, data="8-modes"),
            _row(name, "step_ratio", value / medians[BASELINE], None, n=ROUNDS, data="8-modes"),
        )
    ]


# --- Figure ------------------------------------------------------------------------------------------------------


def figure(results: Results, path: Path) -> None:
    """Relative bias against the standard deviation of a call, one point per estimator and one panel per state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    picture = Figure(figsize=(11.0, 5.4), layout="constrained")
    FigureCanvasAgg(picture)
    panels = picture.subplots(1, len(STATES), sharex=True, sharey=True, squeeze=False)[0]
    offsets = ((6, 2, "left"), (-6, 2, "right"), (6, -9, "left"), (-6, -9, "right"))
    for panel, state in zip(panels, STATES, strict=True):
        biases = results.select(metric="bias", convention=f"{state}, routers")
        spreads = {row.recipe: row.value for row in results.select(metric="std", convention=f"{state}, routers")}
        taken: list[tuple[float, float]] = []
        for row in sorted(biases, key=lambda row: -row.value):
            family, _, rest = str(row.recipe).partition(" ")
            colour = f"C{FAMILIES.index(family)}"
            x, y = spreads[row.recipe], row.value
            seen = y > 2 * (row.stderr or 0)
            panel.plot(x, y, "o", color=colour, markersize=6, markerfacecolor=colour if seen else "white")
            near = sum(abs(a - math.log(x)) < 0.5 and abs(b - math.log(y)) < 0.12 for a, b in taken)
            taken.append((math.log(x), math.log(y)))
            right, up, side = offsets[near % len(offsets)]
            label = rest.replace("tau", "τ").replace("redraw ", "")
            panel.annotate(
                label, (x, y), xytext=(right, up), textcoords="offset points", fontsize=7,
                color=colour, ha=side,
            )  # fmt: skip
        panel.set_xscale("log")
        panel.set_yscale("log")
        panel.minorticks_off()
        panel.set(title=state, xlabel="standard deviation of a call / |exact gradient|")
        panel.grid(alpha=0.2, which="both")
    low, high = panels[0].get_xlim()
    panels[0].set_xlim(low / 1.1, high * 2)  # room for labels
    for axis in (panels[0].xaxis, panels[0].yaxis):
        shown = [mark for mark in TICKS if axis.get_view_interval()[0] < mark < axis.get_view_interval()[1]]
        axis.set_ticks(shown, labels=[f"{mark:g}" for mark in shown])
    panels[0].set_ylabel("|mean − exact| / |exact gradient|, routers")
    panels[0].text(0.02, 0.02, "filled: bias beyond twice its error\nopen: none seen", transform=panels[0].transAxes,
                   fontsize=8)  # fmt: skip
    marks = [Line2D([], [], marker="o", linestyle="", color=f"C{number}") for number in range(len(FAMILIES))]
    picture.legend(marks, FAMILIES, loc="outside lower center", ncols=len(FAMILIES), fontsize=8, frameon=False)
    picture.savefig(path, dpi=120)
