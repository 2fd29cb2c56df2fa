"""The paper's toy table and figures: 2 densities x 3 seeds x 3 methods at 600 epochs (Table 2, App. C.1)."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from emoe.cli import Parser
from emoe.commands import parse_numbers, split_settings
from emoe.config import ConfigError
from emoe.domains.base import Domain
from emoe.domains.toy import Toy
from emoe.domains.toy.densities import CELLS, ideal_factorised, validity_of_law
from emoe.evaluation.evaluate import make_row
from emoe.evaluation.exact_toy import exact_rows
from emoe.evaluation.grid import METHODS, toy_grid
from emoe.evaluation.results import Results, Row
from emoe.evaluation.tables import print_grid, toy_tables
from emoe.experiment import customise
from emoe.figures.base import save
from emoe.figures.panels import histogram_grid
from emoe.recipes import get_recipe
from emoe.rng import derive_seed
from emoe.studies.base import Pools, Study, make_study
from emoe.types import Measurement

DENSITIES = {"8-modes": "toy-8modes", "swiss-roll": "toy-swissroll"}
SWEEP = (1, 2, 8, 32)


def main(words: list[str]) -> int:
    """`emoe reproduce toy`."""
    rest, settings = split_settings(words)
    parser = Parser(
        prog="emoe reproduce toy",
        description="Train MDLM, VADD and E-MoE on both toy densities with 3 seeds at the paper's budget (18 runs of "
        "24,000 steps: minutes on a data-centre GPU, about half a day on 2 CPU cores), measure validity and overlap "
        "per NFE, and write results, tables and figures. Killed, it continues with the same command. Fields of all "
        "recipes can be overridden, for instance --train.steps 500 for a try.",
    )
    parser.add_argument("--seeds", default="0,1,2", help="seeds (default 0,1,2)")
    parser.add_argument("--methods", default="mdlm,vadd,emoe", help="methods, ends of recipes (default mdlm,vadd,emoe)")
    parser.add_argument("--densities", default=",".join(DENSITIES), help="densities (default: both)")
    parser.add_argument("--runs", default="runs/toy", help="where run folders go (default runs/toy)")
    parser.add_argument("--results", default="results", help="folder of toy.json, toy.md and figures (default results)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N")
    parser.add_argument("--exact", action="store_true", help="also record the exact law's measures (convention exact)")
    parser.add_argument("--jobs", default="0", help="runs trained at once; 0 = 6 on a GPU, one for each core on a CPU")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    args = parser.parse_args(rest)
    (jobs,) = parse_numbers("jobs", args.jobs, low=0, high=64)
    seeds = parse_numbers("seeds", args.seeds, low=0)
    experiments = [
        customise(get_recipe(f"{_prefix(density)}-{method}"), {**settings, "seed": str(seed)})
        for seed in seeds
        for density in args.densities.split(",")
        for method in args.methods.split(",")
    ]
    folder = Path(args.results)
    study = make_study(
        "reproduce toy", words, folder=Path(args.runs), results=folder / "toy.json", device=args.device,
        quiet=args.quiet, jobs=jobs,
    )  # fmt: skip
    if args.exact:
        study.more = lambda run: exact_rows(run.method, run.domain, run.experiment, run.experiment.eval.nfe)
    study.run(experiments)
    results = study.add(reference_rows(study))
    (folder / "toy.md").write_text(toy_tables(results), encoding="utf-8")
    shown = {run.domain.name: run.domain for run in study.runs if run.experiment.seed == seeds[0]}
    figures(study.pools, shown, seeds[0], folder / "figures")
    for metric in ("validity", "overlap"):
        print_grid(toy_grid(results, metric))
    print_gaps(results)
    study.note(f"written: {folder / 'toy.json'}, {folder / 'toy.md'}, {folder / 'figures'}")
    return 0


def _prefix(density: str) -> str:
    if density not in DENSITIES:
        raise ConfigError([f"densities: {density!r} is not known; allowed: {', '.join(DENSITIES)}"])
    return DENSITIES[density]


def reference_rows(study: Study) -> list[Row]:
    """For each density and seed: fresh real data, and the best factorised T-step chain there can be.

    The chain's validity is exact; its overlap is measured on 20,000 draws from its law, so that it is comparable
    with the other overlaps, which all carry the same finite-sample loss.
    """
    rows = []
    for run in {(run.domain.name, run.experiment.seed): run for run in study.runs}.values():
        toy, seed = run.domain, run.experiment.seed
        assert isinstance(toy, Toy)
        anonymous = dataclasses.replace(run.experiment, name="reference")
        count = run.experiment.eval.samples
        rows += [
            make_row(item, toy, anonymous, nfe=None, method="data")
            for item in toy.measure(toy.fresh(count, seed), seed)
        ]
        cells = toy.cell_probabilities()
        for nfe in run.experiment.eval.nfe:
            law = ideal_factorised(cells, nfe)
            exact = Measurement("validity", validity_of_law(law, toy.support, toy.radius), None, None)
            generator = torch.Generator().manual_seed(derive_seed(seed, "ideal", nfe))
            cell = torch.multinomial(law.flatten(), count, replacement=True, generator=generator)
            drawn = torch.stack([cell // law.shape[1], cell % law.shape[1]], dim=-1)
            sampled = [item for item in toy.measure(drawn, seed) if item.metric != "validity"]
            rows += [make_row(item, toy, anonymous, nfe=nfe, method="ideal") for item in (exact, *sampled)]
    return rows


def figures(pools: Pools, domains: dict[str, Domain], seed: int, folder: Path) -> None:
    """The summary at NFE 1 and the sweeps over NFE 1, 2, 8, 32 of App. C.1, for one seed."""
    folder.mkdir(parents=True, exist_ok=True)
    methods = [name for name in METHODS if any(key[1] == name for key in pools)]
    summary = {}
    for data, toy in domains.items():
        truth = toy.fresh(20_000, seed).numpy()
        sweep = {
            METHODS[m]: {"ground truth": truth}
            | {f"NFE {n}": pools[data, m, seed, n].numpy() for n in SWEEP if (data, m, seed, n) in pools}
            for m in methods
        }
        save(histogram_grid(sweep, CELLS), folder / f"toy-{data}.png")
        first = {METHODS[m]: pools[data, m, seed, 1].numpy() for m in methods if (data, m, seed, 1) in pools}
        summary[data] = {"ground truth": truth, **first}
    save(histogram_grid(summary, CELLS), folder / "toy-summary.png")


def print_gaps(results: Results) -> None:
    """How far MDLM is from the ideal factorised chain, for each seed and NFE: the check that the chain is right."""
    gaps = []
    for row in results.select(task="toy", method="mdlm", metric="validity", convention=None):
        ideal = results.select(task="toy", data=row.data, method="ideal", metric="validity", seed=row.seed, nfe=row.nfe)
        if ideal:
            gaps.append((abs(row.value - ideal[0].value), row.data, row.seed, row.nfe))
    if gaps:
        gap, data, seed, nfe = max(gaps)
        print(f"MDLM against the ideal factorised chain: largest gap {gap:.2f} points ({data}, seed {seed}, NFE {nfe})")
