"""Methods on toy densities that no setting was chosen on: exact laws of their samplers, paired by seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from emoe.domains.toy.densities import HELD_OUT
from emoe.reporting.latent import held_out_tables
from emoe.reporting.render import print_table
from emoe.reporting.results import Results
from emoe.studies import options
from emoe.studies.options import flag, hidden, recipe_experiments, seeds_flag
from emoe.studies.pipeline import Study
from emoe.studies.stages import Stage, Trained, exact_stage, time_stage

DEFAULTS = {"train.steps": "8000", "eval.nfe": "1,2,4"}  # settings replace these


@dataclass(frozen=True, kw_only=True)
class Options(options.Options):
    """Options of the study of held-out densities; --train.steps is 8000 and --eval.nfe 1,2,4 unless they are given."""

    reserved = {"domain.density": "densities"}

    study: str = hidden("held-out")
    methods: tuple[str, ...] = flag(("emoe", "emoe-vimco"), "methods, ends of recipes toy-8modes-*")
    densities: tuple[str, ...] = flag(HELD_OUT, "densities", allowed=HELD_OUT)
    seeds: tuple[int, ...] = seeds_flag(0, 1, 2)


def run(options: Options) -> int:
    """Train methods on five densities and compare the exact laws of their samplers between runs of the same seed."""
    labels = {}
    for seed in options.seeds:  # seed by seed: if time runs out, pairs are complete for the first seeds
        for density in options.densities:
            settings = {**DEFAULTS, **options.settings, "domain.density": density}
            for one in recipe_experiments("toy-8modes", options.methods, [seed], settings):
                labels[one] = f"{one.name.partition(' ')[0]}, {density}, seed {seed}"

    def write(results: Results, runs: Sequence[Trained]) -> list[Path]:
        for table in held_out_tables(results.only(recipe={trained.experiment.name for trained in runs})):
            print_table(table)
            print(table.note)
        return []

    def stages(trained: Trained) -> list[Stage]:
        return [time_stage(trained), exact_stage(trained)]

    return Study(options, labels, stages, lambda runs: [], write, measures_late=True).run()
