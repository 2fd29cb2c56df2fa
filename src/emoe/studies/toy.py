"""The paper's toy table and figures: 2 densities x 3 seeds x 3 methods at 600 epochs (Table 2, App. C.1)."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from emoe.domains.base import Domain
from emoe.domains.toy import Toy, ideal_factorised, validity_of_law
from emoe.experiment import Experiment
from emoe.figures.base import save
from emoe.figures.panels import histogram_grid
from emoe.reporting.results import Results
from emoe.reporting.table import print_metrics, sampled
from emoe.reporting.toy import METRICS
from emoe.rng import derive_seed
from emoe.studies import options, pipeline, stages
from emoe.studies.options import flag, hidden, recipe_experiments, seeds_flag
from emoe.studies.stages import Stage, Trained
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


class ToyStudy(pipeline.Study):
    """Base of studies of toy models: samples over NFE, beside real data and the ideal chain."""

    def stages(self, run: Trained) -> list[Stage]:
        config = run.experiment.eval
        pools = [stages.pool(run, nfe, config.samples, keep=config.samples) for nfe in config.nfe]
        return [*stages.times(run), *pools, *_references(run.domain, run.experiment)]


class Study(ToyStudy):
    """Train methods on toy densities, measure validity and overlap over NFE, write tables and figures."""

    options: Options

    def experiments(self) -> list[Experiment]:
        given = self.options
        return [
            experiment
            for seed in given.seeds
            for density in given.densities
            for experiment in recipe_experiments(DENSITIES[density], given.methods, [seed], given.settings)
        ]

    def stages(self, run: Trained) -> list[Stage]:
        return super().stages(run) + ([stages.exact(run)] if self.options.exact else [])

    def write(self, results: Results) -> None:
        first = [run for run in self.runs if run.experiment.seed == self.options.seeds[0]]
        for name, grid in _grids(first, results).items():
            self.figure(name, functools.partial(_draw, grid, first[0].domain.space.size - 1))
        print_metrics(sampled(results), "toy", METRICS)
        gaps = [
            (abs(model.value - ideal.value), f"{model.data}, seed {model.seed}, NFE {model.nfe}")
            for model in results.select(task="toy", method="mdlm", metric="validity", convention=None)
            for ideal in results.select(method="ideal", metric="validity", data=model.data, seed=model.seed)
            if model.nfe == ideal.nfe
        ]
        if gaps:  # checks training, sampler and metric
            gap, where = max(gaps)
            print(f"MDLM against the ideal factorised chain: largest gap {gap:.2f} points ({where})")


def _references(toy: Domain, experiment: Experiment) -> list[Stage]:
    """Fresh real data, and the best factorised T-step chain for each T.

    The chain's validity is exact. Its overlap is measured on samples of its law, so that it has the same finite-sample
    loss as the other overlaps.
    """
    assert isinstance(toy, Toy)
    count, seed = experiment.eval.samples, experiment.seed
    reference = functools.partial(stages.reference, domain=toy, metric="overlap", n=count, seed=seed)

    def ideal(nfe: int) -> list[Measurement]:
        law = ideal_factorised(toy.density.law(), nfe)
        generator = torch.Generator().manual_seed(derive_seed(seed, "ideal", nfe))
        cell = torch.multinomial(law.flatten(), count, replacement=True, generator=generator)
        drawn = torch.stack([cell // law.shape[1], cell % law.shape[1]], dim=-1)
        exact = Measurement("validity", validity_of_law(law, toy.support, toy.radius), None, None)
        return [exact, *(item for item in toy.measure(drawn, seed) if item.metric != "validity")]

    chains = [
        reference(f"ideal chain, NFE {nfe},", measure=functools.partial(ideal, nfe), method="ideal", nfe=nfe)
        for nfe in experiment.eval.nfe
    ]
    return [reference("real data", measure=lambda: toy.measure(toy.fresh(count, seed), seed)), *chains]


def _draw(grid: Grid, size: int, path: Path) -> None:
    save(histogram_grid(grid, size), path)


def _grids(runs: Sequence[Trained], results: Results) -> Mapping[str, Grid]:
    """Samples over NFE for each density, and a summary at NFE 1, by file name."""
    grids, summary = dict[str, Grid](), Grid()
    for trained in runs:
        data, label = trained.domain.name, results.label(trained.experiment.method_name)
        keys = [key for key in trained.pools.keys() if key.nfe in SHOWN_NFE]
        pools = {f"NFE {key.nfe}": trained.pools.tokens(key) for key in keys}
        if "NFE 1" in pools:
            truth = {"ground truth": trained.domain.fresh(TRUTH, trained.experiment.seed)}
            grids.setdefault(f"toy-{data}.png", {})[label] = truth | pools
            summary.setdefault(data, truth)[label] = pools["NFE 1"]
    return grids | ({"toy-summary.png": summary} if summary else {})
