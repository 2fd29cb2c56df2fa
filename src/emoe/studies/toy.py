"""The paper's toy table and figures: 2 densities x 3 seeds x 3 methods at 600 epochs (Table 2, App. C.1)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from emoe.domains.toy import Toy
from emoe.domains.toy.densities import ideal_factorised, validity_of_law
from emoe.evaluation.measure import row
from emoe.figures.base import save
from emoe.figures.panels import histogram_grid
from emoe.reporting.grid import sampled
from emoe.reporting.render import print_metrics
from emoe.reporting.results import Results, Row
from emoe.reporting.toy import METRICS, toy_page
from emoe.rng import derive_seed
from emoe.studies import options
from emoe.studies.options import flag, hidden, recipe_experiments, seeds_flag
from emoe.studies.pipeline import Study, write_figure, write_page
from emoe.studies.pools import PoolKey
from emoe.studies.stages import Stage, Trained, exact_stage, pool_stage, recorded, time_stage
from emoe.types import Measurement

DENSITIES = {"8-modes": "toy-8modes", "swiss-roll": "toy-swissroll"}
SHOWN_NFE = (1, 2, 8, 32)
TRUTH = 20_000  # rows of ground truth in figures
Grid = dict[str, dict[str, Tensor]]


@dataclass(frozen=True, kw_only=True)
class Options(options.Options):
    """Options of the toy study."""

    study: str = hidden("toy")
    seeds: tuple[int, ...] = seeds_flag(0, 1, 2)
    methods: tuple[str, ...] = flag(("mdlm", "vadd", "emoe"), "methods, ends of recipes toy-8modes-*")
    densities: tuple[str, ...] = flag(tuple(DENSITIES), "densities", allowed=tuple(DENSITIES))
    exact: bool = flag(False, "also record measures of the exact laws (convention exact)")


def run(options: Options) -> int:
    """Train methods on toy densities, measure validity and overlap over NFE, write tables and figures."""
    experiments = [
        experiment
        for seed in options.seeds
        for density in options.densities
        for experiment in recipe_experiments(DENSITIES[density], options.methods, [seed], options.settings)
    ]

    def stages(trained: Trained) -> list[Stage]:
        return [*sample_stages(trained), *([exact_stage(trained)] if options.exact else [])]

    return Study(options, experiments, stages, reference_stages, functools.partial(_write, options)).run()


def sample_stages(trained: Trained) -> list[Stage]:
    """Times and samples of a toy model, all of which are kept for figures."""
    config = trained.experiment.eval
    pools = [pool_stage(trained, PoolKey(nfe), config.samples, keep=config.samples) for nfe in config.nfe]
    return [time_stage(trained), *pools]


def reference_stages(runs: Sequence[Trained]) -> list[Stage]:
    """Real data and the ideal chain, for each density and seed of some runs."""
    return [_references(run) for run in {(run.domain.name, run.experiment.seed): run for run in runs}.values()]


def _references(trained: Trained) -> Stage:
    """Fresh real data, and the best factorised T-step chain, for the density and seed of a run.

    The chain's validity is exact. Its overlap is measured on samples of its law, so that it has the same finite-sample
    loss as the other overlaps.
    """
    toy, experiment = trained.domain, dataclasses.replace(trained.experiment, name="reference")
    assert isinstance(toy, Toy)
    count, seed, steps = experiment.eval.samples, experiment.seed, experiment.eval.nfe

    def run() -> list[Row]:
        items = toy.measure(toy.fresh(count, seed), seed)
        rows = [row(item, toy, experiment, nfe=None, method="data") for item in items]
        for nfe in steps:
            law = ideal_factorised(toy.cell_probabilities(), nfe)
            generator = torch.Generator().manual_seed(derive_seed(seed, "ideal", nfe))
            cell = torch.multinomial(law.flatten(), count, replacement=True, generator=generator)
            drawn = torch.stack([cell // law.shape[1], cell % law.shape[1]], dim=-1)
            exact = Measurement("validity", validity_of_law(law, toy.support, toy.radius), None, None)
            items = [exact, *(item for item in toy.measure(drawn, seed) if item.metric != "validity")]
            rows += [row(item, toy, experiment, nfe=nfe, method="ideal") for item in items]
        return rows

    def done(results: Results) -> bool:
        same = {"method": "ideal", "metric": "overlap", "data": toy.name, "seed": seed}
        return all(recorded(results, n=count, nfe=nfe, **same) for nfe in steps)

    return Stage(f"references of {toy.name}, seed {seed}", done, run)


def _write(options: Options, results: Results, runs: Sequence[Trained]) -> list[Path]:
    """The page of tables, figures of the first seed, and tables on the terminal."""
    first = [trained for trained in runs if trained.experiment.seed == options.seeds[0]]
    written = write_page(options.results / "toy.md", toy_page(results))
    for path, grid in _grids(first, results, options.results / "figures").items():
        written += write_figure(
            path, [run.pools.path for run in first], functools.partial(_draw, grid, runs[0].domain.space.size - 1)
        )
    print_metrics(sampled(results), "toy", METRICS)
    gaps = [
        (abs(model.value - ideal.value), model)
        for model in results.select(task="toy", method="mdlm", metric="validity", convention=None)
        for ideal in results.select(method="ideal", metric="validity", data=model.data, seed=model.seed, nfe=model.nfe)
    ]
    if gaps:  # checks training, sampler and metric
        gap, model = max(gaps, key=lambda pair: pair[0])
        where = f"{model.data}, seed {model.seed}, NFE {model.nfe}"
        print(f"MDLM against the ideal factorised chain: largest gap {gap:.2f} points ({where})")
    return written


def _draw(grid: Grid, size: int, path: Path) -> None:
    pairs = {line: {name: rows.numpy() for name, rows in cells.items()} for line, cells in grid.items()}
    save(histogram_grid(pairs, size), path)


def _grids(runs: Sequence[Trained], results: Results, folder: Path) -> dict[Path, Grid]:
    """Samples over NFE for each density, and a summary at NFE 1."""
    grids, summary = dict[Path, Grid](), Grid()
    for trained in runs:
        data, label = trained.domain.name, results.label(trained.experiment.method_name)
        keys = [key for key in map(PoolKey, SHOWN_NFE) if trained.pools.rows(key)]
        pools = {f"NFE {key.nfe}": trained.pools.tokens(key) for key in keys}
        if "NFE 1" in pools:
            truth = {"ground truth": trained.domain.fresh(TRUTH, trained.experiment.seed)}
            grids.setdefault(folder / f"toy-{data}.png", {})[label] = truth | pools
            summary.setdefault(data, truth)[label] = pools["NFE 1"]
    return grids | ({folder / "toy-summary.png": summary} if summary else {})
