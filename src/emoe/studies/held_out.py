"""Methods on toy densities that no setting was chosen on: exact laws of their samplers, paired by seed."""

from __future__ import annotations

from dataclasses import dataclass

from emoe.domains.toy import HELD_OUT
from emoe.experiment import Experiment
from emoe.reporting.results import Results
from emoe.reporting.toy import held_out_tables
from emoe.studies import options, pipeline, stages
from emoe.studies.options import flag, hidden, recipe_experiments, seeds_flag
from emoe.studies.stages import Stage, Trained

DEFAULTS = {"train.steps": "8000", "eval.nfe": "1,2,4"}  # settings replace these


@dataclass(frozen=True, kw_only=True)
class Options(options.Options):
    """Options of the study of held-out densities; --train.steps is 8000 and --eval.nfe 1,2,4 unless they are given."""

    reserved = {"domain.density": "densities"}

    study: str = hidden("held-out")
    methods: tuple[str, ...] = flag(("emoe", "emoe-vimco"), "methods, ends of recipes toy-8modes-*")
    densities: tuple[str, ...] = flag(HELD_OUT, "densities", allowed=HELD_OUT)
    seeds: tuple[int, ...] = seeds_flag(0, 1, 2)


class Study(pipeline.Study):
    """Train methods on five densities and compare the exact laws of their samplers between runs of the same seed."""

    options: Options
    measures_past_deadline = True

    def experiments(self) -> dict[Experiment, str]:
        """Seed by seed: if time runs out, pairs are complete for the first seeds."""
        labels = {}
        for seed in self.options.seeds:
            for density in self.options.densities:
                settings = {**DEFAULTS, **self.options.settings, "domain.density": density}
                for experiment in recipe_experiments("toy-8modes", self.options.methods, [seed], settings):
                    labels[experiment] = f"{experiment.name.partition(' ')[0]}, {density}, seed {seed}"
        return labels

    def stages(self, run: Trained) -> list[Stage]:
        return [*stages.times(run), stages.exact(run)]

    def write(self, results: Results) -> None:
        self.print_tables(held_out_tables(results.only(recipe={run.experiment.name for run in self.runs})))
