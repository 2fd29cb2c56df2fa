"""Rows of tied symbols of growing length, for several ways to learn a latent."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from emoe.config import ConfigError
from emoe.domains.ties import TieFamily, Ties
from emoe.evaluation.measure import row
from emoe.experiment import Experiment, customise
from emoe.figures.base import save
from emoe.figures.curves import Panel, draw
from emoe.recipes import get_recipe
from emoe.reporting import ties
from emoe.reporting.render import print_table
from emoe.reporting.results import Results, Row
from emoe.studies import options
from emoe.studies.course import routing_stage
from emoe.studies.figures import mean_curve
from emoe.studies.options import flag, hidden, seeds_flag
from emoe.studies.pipeline import Study, write_figure
from emoe.studies.pools import PoolKey
from emoe.studies.stages import Stage, Trained, likelihood_stage, pool_stage, recorded, time_stage
from emoe.types import Measurement

FAMILIES = get_args(TieFamily)
DEFAULT_VARIANTS = ("mdlm", "paper", "plus")
HELD_OUT_ROWS = 2_000  # of bound@1


@dataclass(frozen=True, kw_only=True)
class Options(options.Options):
    """Options of the study of row lengths."""

    reserved = {"domain.family": "families", "domain.length": "lengths", "backbone.depth": "depth"}

    study: str = hidden("scaling")
    variants: tuple[str, ...] = flag(DEFAULT_VARIANTS, "ways to learn", allowed=tuple(ties.VARIANTS))
    families: tuple[str, ...] = flag(FAMILIES, "families of ties", allowed=FAMILIES)
    lengths: tuple[int, ...] = flag((2, 4, 8, 16, 32, 64), "lengths L of a row", low=2, high=10_000)
    depth: int | None = flag(None, "blocks of the network; default: 2 to 6, growing with L", low=2, high=100)
    seeds: tuple[int, ...] = seeds_flag(0)


def run(options: Options) -> int:
    """Train variants on tied symbols; measure ties kept in one call, coverage of samples, and the latent."""
    write = functools.partial(_write, options)
    return Study(options, labelled_experiments(options), _stages, _ideal, write, measures_late=True).run()


def labelled_experiments(options: Options) -> dict[Experiment, str]:
    """First the default variants, the longest rows at the beginning.

    Lengths that a family cannot cut into groups are left out; fields of a variant win over `settings`.
    """
    settings = {name.replace("_", "-"): text for name, text in options.settings.items()}
    runs, refused = list[tuple[tuple[bool, int], Experiment, str]](), list[str]()
    tasks = itertools.product(options.lengths, options.seeds, options.families, options.variants)
    for length, seed, family, variant in tasks:
        depth = options.depth or ties.default_depth(length)
        task = {"domain.family": family, "domain.length": length, "backbone.depth": depth, "seed": seed}
        recipe, own = ties.VARIANTS[variant]
        try:
            one = customise(get_recipe(recipe), {**settings, **own, **{name: str(text) for name, text in task.items()}})
        except ConfigError as error:
            if any(not line.startswith("domain.length:") for line in error.problems):
                raise
            refused += error.problems
        else:
            order = variant not in DEFAULT_VARIANTS, -length
            runs.append((order, one, f"{variant}, {family}-L{length}, seed {seed}"))
    if not runs:
        raise ConfigError(list(dict.fromkeys(refused)))
    return {one: label for _, one, label in sorted(runs, key=lambda item: item[0])}


def _stages(trained: Trained) -> list[Stage]:
    config = trained.experiment.eval
    pools = [pool_stage(trained, PoolKey(nfe), config.samples) for nfe in config.nfe]
    bound = likelihood_stage(trained, "bound@1", HELD_OUT_ROWS, lambda nll, length: [nll])
    return [time_stage(trained), *pools, bound, routing_stage(trained)]


def _ideal(runs: Sequence[Trained]) -> list[Stage]:
    """What the best factorised chain keeps of the ties; at NFE 1 chance."""

    def stage(trained: Trained) -> Stage:
        domain, experiment = trained.domain, dataclasses.replace(trained.experiment, name="reference")
        assert isinstance(domain, Ties)

        def run() -> list[Row]:
            items = {nfe: Measurement("ties", domain.ideal(nfe), None, None) for nfe in experiment.eval.nfe}
            rows = [row(item, domain, experiment, nfe=nfe, method="ideal") for nfe, item in items.items()]
            return [dataclasses.replace(one, seed=None) for one in rows]

        def done(results: Results) -> bool:
            return all(recorded(results, method="ideal", data=domain.name, nfe=nfe) for nfe in experiment.eval.nfe)

        return Stage(f"ideal chain of {domain.name}", done, run)

    return [stage(trained) for trained in {trained.domain.name: trained for trained in runs}.values()]


def _write(options: Options, results: Results, runs: Sequence[Trained]) -> list[Path]:
    """Tables of these runs on the terminal; the figure of everything that is recorded."""
    part = results.only(recipe={"reference", *(trained.experiment.name for trained in runs)})
    for table in [*ties.scaling_tables(part), *ties.health_tables(part)]:
        print_table(table)
        print(table.note)
    kept = results.only(task="ties", metric="ties", nfe=1)
    families = sorted({ties.setting_of(row.data).family for row in kept.models.rows})

    def figure(path: Path) -> None:
        save(draw([[_panel(kept, family) for family in families]], width=2.9), path)

    path = options.results / "figures" / "scaling.png"
    return write_figure(path, [options.results / "scaling.json"], figure) if families else []


def _panel(results: Results, family: str) -> Panel:
    """Ties kept at NFE 1 against L: a line for each variant, and chance."""
    groups = {key: rows for key, rows in ties.by_variant(results).items() if key[0].family == family}
    rows = {
        label: [row for (_, name), group in groups.items() if name == label for row in group]
        for label in ties.ordered_variants(label for _, label in groups)
    }
    curves = {label: mean_curve(group, lambda row: ties.setting_of(row.data).length) for label, group in rows.items()}
    chance = [row for row in results.select(method="ideal") if ties.setting_of(row.data).family == family]
    curves["chance"] = mean_curve(chance, lambda row: ties.setting_of(row.data).length, colour="0.4", style=":")
    return Panel(family, curves, xlabel="length L", ylabel="ties kept at NFE 1 (%)")
