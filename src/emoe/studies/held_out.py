"""E-MoE with what was chosen on other densities, on densities that nothing was chosen on: exact laws, paired seeds."""

from __future__ import annotations

from pathlib import Path

from emoe.cli import Parser
from emoe.commands import split_settings
from emoe.domains.toy.densities import HELD_OUT
from emoe.evaluation.exact_toy import exact_rows
from emoe.experiment import Experiment, customise
from emoe.recipes import all_recipes, get_recipe
from emoe.reporting.latent import held_out_tables
from emoe.reporting.render import print_table
from emoe.reporting.results import Results, Row
from emoe.runs import Run
from emoe.studies.base import make_study
from emoe.studies.latent import (
    add_options,
    complete,
    parse_deadline,
    parse_jobs,
    parse_names,
    parse_seeds,
    refuse_fields,
)

RECIPE = "toy-8modes-"  # the density is replaced
DEFAULTS = {"train.steps": "8000", "eval.nfe": "1,2,4"}  # settings may replace these


def main(words: list[str]) -> int:
    """`emoe reproduce held-out`."""
    rest, settings = split_settings(words)
    parser = Parser(
        prog="emoe reproduce held-out",
        description="Train methods on the five held-out toy densities and compare the exact laws of their samplers: "
        "KL(data || model) and overlap, free of sampling noise, with differences between runs of the same seed. "
        f"Fields of all recipes can be overridden; --train.steps is {DEFAULTS['train.steps']} and --eval.nfe "
        f"{DEFAULTS['eval.nfe']} unless given. Killed, or out of --budget, it continues with the same command; what "
        "is trained and measured stays.",
    )
    allowed = [name.removeprefix(RECIPE) for name in all_recipes() if name.startswith(RECIPE)]
    parser.add_argument("--methods", default="emoe,emoe-plus", help=f"of {', '.join(allowed)} (default emoe,emoe-plus)")
    parser.add_argument("--densities", default=",".join(HELD_OUT), help=f"of {', '.join(HELD_OUT)} (default: all)")
    add_options(parser, "held-out", seeds="0,1,2")
    args = parser.parse_args(rest)
    deadline = parse_deadline(args.budget)
    refuse_fields(settings, {"domain.density": "densities"})
    experiments = make_experiments(
        parse_names("methods", args.methods, allowed),
        parse_names("densities", args.densities, HELD_OUT),
        parse_seeds(args.seeds),
        DEFAULTS | settings,
    )
    folder = Path(args.results)
    study = make_study(
        "reproduce held-out", words, folder=Path(args.runs), results=folder / "held-out.json", device=args.device,
        quiet=args.quiet, jobs=parse_jobs(args.jobs),
    )  # fmt: skip
    study.sampled, study.more, study.deadline = False, exact, deadline
    code = complete(study, experiments, _label, "kl")
    show(Results.load(study.results).only(recipe={one.name for one in experiments}))
    study.note(f"written: {study.results}")
    return code


def make_experiments(
    methods: list[str], densities: list[str], seeds: tuple[int, ...], settings: dict[str, str]
) -> list[Experiment]:
    """All runs, seed by seed: if time runs out, pairs are complete for the first seeds."""
    return [
        customise(get_recipe(RECIPE + method), {**settings, "domain.density": density, "seed": str(seed)})
        for seed in seeds
        for density in densities
        for method in methods
    ]


def exact(run: Run) -> list[Row]:
    """Measures of the exact law of a run."""
    return exact_rows(run.method, run.domain, run.experiment, run.experiment.eval.nfe)


def _label(experiment: Experiment) -> str:
    """A run in the log: `E-MoE+, pinwheel`."""
    method = experiment.name.partition(" ")[0].removeprefix(RECIPE)
    return f"{Results().label(method)}, {getattr(experiment.domain, 'density', '')}"


def show(results: Results) -> None:
    """Print the table, and in how many densities a plus recipe is better."""
    tables = held_out_tables(results)
    if not tables:
        print("nothing is measured yet")
    for table in tables:
        print_table(table)
        print(table.note)
