"""Rows of tied symbols of growing length, for several ways to learn a latent."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from emoe.config import ConfigError
from emoe.domains.base import Domain
from emoe.domains.ties import TieFamily, Ties
from emoe.experiment import Experiment, customise
from emoe.figures.curves import Panel
from emoe.recipes import get_recipe
from emoe.reporting import ties
from emoe.reporting.cells import Line
from emoe.reporting.results import Results
from emoe.studies import options, pipeline, stages, training
from emoe.studies.options import flag, hidden, seeds_flag
from emoe.studies.pipeline import mean_curve
from emoe.studies.stages import Stage, Trained

FAMILIES = get_args(TieFamily)
VARIANTS: dict[str, tuple[str, dict[str, str]]] = {  # name -> recipe and changed fields
    "mdlm": ("ties-mdlm", {}),
    "vadd": ("ties-vadd", {}),
    "paper": ("ties-emoe", {}),
    "plus": ("ties-emoe-wake-sleep", {}),
    "wake-sleep-row": ("ties-emoe-wake-sleep", {"method.compare.credit": "row"}),
    "all-carry": ("ties-emoe-wake-sleep", {"method.compare.in-turn": "false"}),
}
DEFAULT_VARIANTS = ("mdlm", "paper", "plus")


@dataclass(frozen=True, kw_only=True)
class Options(options.Options):
    """Options of the study of row lengths."""

    reserved = {"domain.family": "families", "domain.length": "lengths", "backbone.depth": "depth"}

    study: str = hidden("scaling")
    variants: tuple[str, ...] = flag(DEFAULT_VARIANTS, "ways to learn", allowed=tuple(VARIANTS))
    families: tuple[str, ...] = flag(FAMILIES, "families of ties", allowed=FAMILIES)
    lengths: tuple[int, ...] = flag((2, 4, 8, 16, 32, 64), "lengths L of a row", low=2, high=10_000)
    depth: int | None = flag(None, "blocks of the network; default: 2 to 6, growing with L", low=2, high=100)
    seeds: tuple[int, ...] = seeds_flag(0)


class Study(pipeline.Study):
    """Train variants on tied symbols; measure ties kept in one call, coverage of samples, and the latent."""

    options: Options
    measures_past_deadline = True

    def experiments(self) -> dict[Experiment, str]:
        """Default variants come first, each with the longest rows first.

        Lengths that a family cannot cut into groups are left out; fields of a variant win over `settings`.
        """
        given, runs, refused = self.options, dict[Experiment, str](), list[str]()
        settings = {name.replace("_", "-"): text for name, text in given.settings.items()}
        tasks = itertools.product(given.lengths, given.seeds, given.families, given.variants)
        for length, seed, family, variant in sorted(
            tasks, key=lambda task: (task[3] not in DEFAULT_VARIANTS, -task[0])
        ):
            depth, (recipe, own) = given.depth or ties.default_depth(length), VARIANTS[variant]
            task = {"domain.family": family, "domain.length": length, "backbone.depth": depth, "seed": seed}
            try:
                experiment = customise(get_recipe(recipe), {**settings, **own, **task})
            except ConfigError as error:
                if any(not line.startswith("domain.length:") for line in error.problems):
                    raise
                refused += error.problems
            else:
                runs[experiment] = f"{variant}, {family}-L{length}, seed {seed}"
        if not runs:
            raise ConfigError(list(dict.fromkeys(refused)))
        return runs

    def stages(self, run: Trained) -> list[Stage]:
        config, bound = run.experiment.eval, stages.likelihood(run, "bound@1")
        pools = [stages.pool(run, nfe, config.samples) for nfe in config.nfe]
        ideal = [_ideal(run.domain, nfe) for nfe in config.nfe]
        return [*stages.times(run), *pools, bound, *training.routing(run), *ideal]

    def write(self, results: Results) -> None:
        """The tables are of these runs, the figure of all results."""
        part = results.only(recipe={"reference", *(run.experiment.name for run in self.runs)})
        self.print_tables([*ties.scaling_tables(part), *ties.health_tables(part)])
        kept = results.only(task="ties", metric="ties", nfe=1)
        panels = [_panel(family, lines) for family, lines in ties.by_family(kept).items()]
        self.panels("scaling.png", [panels], width=2.9)


def _ideal(domain: Domain, nfe: int) -> Stage:
    """Ties that the best factorised chain keeps; at NFE 1 chance."""
    assert isinstance(domain, Ties)
    name, share = f"ideal chain, NFE {nfe},", functools.partial(domain.ideal, nfe)
    return stages.reference(name, domain, lambda: stages.numbers({"ties": share()}), "ties", method="ideal", nfe=nfe)


def _panel(family: str, lines: Sequence[Line]) -> Panel:
    """Ties kept at NFE 1 against L: a curve for each model, and chance."""
    curves = {}
    for line in lines:
        colour, style = ("0.4", ":") if line.reference else ("", "-")
        curves[line.labels[0]] = mean_curve(
            line.rows, lambda row: ties.setting_of(row.data).length, colour=colour, style=style
        )
    return Panel(family, curves, xlabel="length L", ylabel="ties kept at NFE 1 (%)")
