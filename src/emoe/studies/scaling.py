"""How far a latent carries: rows of tied symbols of growing length, for several ways to learn it."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from emoe.cli import Parser
from emoe.commands import parse_number, parse_numbers, split_settings
from emoe.config import ConfigError
from emoe.domains.ties import TieFamily, Ties, TiesConfig
from emoe.evaluation.evaluate import evaluate_likelihood, make_row
from emoe.experiment import Experiment, customise
from emoe.recipes import get_recipe
from emoe.reporting.cells import Line, Number
from emoe.reporting.render import print_table
from emoe.reporting.results import Results, Row
from emoe.reporting.ties import (
    VARIANTS,
    TieSetting,
    by_variant,
    default_depth,
    health_tables,
    ordered_variants,
    scaling_tables,
    setting_of,
    variant_of,
)
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
from emoe.types import Convention, Measurement

DEFAULT_VARIANTS = ("mdlm", "paper", "plus")
LENGTHS = "2,4,8,16,32,64"
HELD_OUT_ROWS = 2_000  # of bound@1
LAST_LINES = 10  # of the training log, whose mean is taken
DEAD = 0.1  # share of an even share below which an expert counts as dead
RESERVED = {"domain.family": "families", "domain.length": "lengths", "backbone.depth": "depth"}


def main(words: list[str]) -> int:
    """`emoe reproduce scaling`."""
    rest, settings = split_settings(words)
    families = get_args(TieFamily)
    parser = Parser(
        prog="emoe reproduce scaling",
        description="Train variants on rows of tied symbols of growing length and measure how many ties one network "
        "call keeps, whether samples stay varied, and what the latent does. The longest rows of the default variants "
        "come first. Fields of all recipes can be overridden, for instance --train.steps 500 for a try. Killed, or out "
        "of --budget, it continues with the same command; what is trained and measured stays.",
    )
    parser.add_argument(
        "--variants", default=",".join(DEFAULT_VARIANTS),
        help=f"of {', '.join(VARIANTS)} (default {','.join(DEFAULT_VARIANTS)})",
    )  # fmt: skip
    parser.add_argument("--families", default=",".join(families), help=f"of {', '.join(families)} (default: all)")
    parser.add_argument("--lengths", default=LENGTHS, help=f"lengths L of a row (default {LENGTHS})")
    parser.add_argument("--depth", help="blocks of the network for all lengths (default: 2 to 6, growing with L)")
    add_options(parser, "scaling", seeds="0")
    args = parser.parse_args(rest)
    deadline = parse_deadline(args.budget)
    refuse_fields(settings, RESERVED)
    experiments = make_experiments(
        parse_names("variants", args.variants, VARIANTS),
        parse_names("families", args.families, families),
        parse_numbers("lengths", args.lengths, low=2),
        parse_seeds(args.seeds),
        settings,
        depth=None if args.depth is None else parse_number("depth", args.depth, low=2, high=100),
    )
    folder = Path(args.results)
    study = make_study(
        "reproduce scaling", words, folder=Path(args.runs), results=folder / "scaling.json", device=args.device,
        quiet=args.quiet, jobs=parse_jobs(args.jobs),
    )  # fmt: skip
    study.more, study.deadline = latent_rows, deadline
    code = complete(study, experiments, _label, "ties")
    recorded = study.add(reference_rows(experiments, Results.load(study.results)))
    results = recorded.only(recipe={"reference", *(one.name for one in experiments)})
    tables = scaling_tables(results)
    if not tables:
        print("nothing is measured yet")
        return code
    for table in tables + health_tables(results):
        print_table(table)
        print(table.note)
    written = [study.results]
    picture = folder / "figures" / "scaling.png"
    if figure(recorded.only(task="ties"), picture):  # all that is recorded, as in docs: a part of it may be run alone
        written.append(picture)
    study.note(f"written: {', '.join(map(str, written))}")
    return code


def make_experiments(
    variants: Sequence[str],
    families: Sequence[str],
    lengths: Sequence[int],
    seeds: Sequence[int],
    settings: Mapping[str, str],
    depth: int | None = None,
) -> list[Experiment]:
    """All runs: first those of the default variants, the longest rows at the beginning.

    Lengths that a family cannot cut into groups are left out; what a variant is made of wins over `settings`.
    """
    found: dict[str, tuple[tuple[bool, int], Experiment]] = {}
    refused: list[str] = []
    for length in dict.fromkeys(lengths):
        for seed in seeds:
            for family in families:
                for variant in variants:
                    recipe, own = VARIANTS[variant]
                    place = {
                        "domain.family": family, "domain.length": str(length), "seed": str(seed),
                        "backbone.depth": str(depth or default_depth(length)),
                    }  # fmt: skip
                    try:
                        one = customise(get_recipe(recipe), {**_normal(settings), **own, **place})
                    except ConfigError as error:
                        if any(not line.startswith("domain.length:") for line in error.problems):
                            raise
                        refused += error.problems
                        continue
                    found.setdefault(f"{one.name} seed {seed}", ((variant not in DEFAULT_VARIANTS, -length), one))
    if not found:
        raise ConfigError(list(dict.fromkeys(refused)))
    return [one for _, one in sorted(found.values(), key=lambda pair: pair[0])]


def _normal(settings: Mapping[str, str]) -> dict[str, str]:
    """Fields in one spelling, so that a variant's own settings replace them."""
    return {name.replace("_", "-"): text for name, text in settings.items()}


def _label(experiment: Experiment) -> str:
    """A run in the log: `plus, pairs-L64`."""
    domain = experiment.domain
    assert isinstance(domain, TiesConfig)
    return f"{variant_of(experiment.name)[0]}, {domain.family}-L{domain.length}"


def latent_rows(run: Run) -> list[Row]:
    """bound@1 of held-out rows, the coordination gain if there is a latent, and the routing at the end of training."""
    rows = evaluate_likelihood(
        run.method, run.domain, run.experiment, [Convention.parse("bound@1")], rows=HELD_OUT_ROWS
    )
    kept = [row for row in rows if row.metric in ("nll", "coordination_gain")]
    found = routing_health(last_lines(run.path / "metrics.jsonl"))
    return kept + [make_row(item, run.domain, run.experiment, nfe=None) for item in found]


def last_lines(path: Path, count: int = LAST_LINES) -> list[dict[str, Any]]:
    """The last lines of a metrics.jsonl file."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines()[-count:]]


def routing_health(lines: Sequence[Mapping[str, Any]]) -> list[Measurement]:
    """What the routing does, from lines of the training log; nothing where nothing is routed.

    route_kl/blockD: mean route KL in nats per position.
    usage_entropy/blockD: entropy in nats of the mean usage of the block's experts, at most log E: of the aggregate
        posterior. least_usage_entropy is the least of them.
    dead_experts: experts whose mean usage is below 1 / (10 E), over all blocks; n is the number of all experts.
    effective_draws: how many of the K draws count, where draws are compared.
    """
    found: list[Measurement] = []
    entropies: list[float] = []
    dead = total = 0
    names = [name for name in (lines[-1] if lines else {}) if name.startswith("usage/")]
    for name in names:
        block = name.removeprefix("usage/")
        usage = [sum(column) / len(lines) for column in zip(*(line[name] for line in lines), strict=True)]
        entropies.append(-sum(share * math.log(share) for share in usage if share > 0))
        dead += sum(share < DEAD / len(usage) for share in usage)
        total += len(usage)
        found += _mean(lines, f"route_kl/{block}")
        found.append(Measurement(f"usage_entropy/{block}", entropies[-1], None, len(lines)))
    if names:
        found.append(Measurement("least_usage_entropy", min(entropies), None, len(lines)))
        found.append(Measurement("dead_experts", dead, None, total))
    return found + _mean(lines, "effective_draws")


def _mean(lines: Sequence[Mapping[str, Any]], name: str) -> list[Measurement]:
    """Mean of a number over the lines that have it; a log holds nan and inf as texts."""
    values = [float(line[name]) for line in lines if isinstance(line.get(name), int | float)]
    return [Measurement(name, math.fsum(values) / len(values), None, len(values))] if values else []


def reference_rows(experiments: Sequence[Experiment], results: Results) -> list[Row]:
    """What the best factorised chain keeps of the ties, where models were measured but not yet it; at NFE 1 chance."""
    measured = {row.data for row in results.select(task="ties", metric="ties")}
    known = {(row.data, row.nfe) for row in results.select(task="ties", method="ideal")}
    rows: dict[tuple[str, int], Row] = {}
    for one in experiments:
        assert isinstance(one.domain, TiesConfig)
        domain = dataclasses.replace(one.domain, points=2).build(one.seed)
        assert isinstance(domain, Ties)
        named = dataclasses.replace(one, name="reference")
        for nfe in one.eval.nfe if domain.name in measured else ():
            item = Measurement("ties", domain.ideal(nfe), None, None)
            row = make_row(item, domain, named, nfe=nfe, method="ideal")
            if (domain.name, nfe) not in known:
                rows[domain.name, nfe] = dataclasses.replace(row, seed=None)
    return list(rows.values())


def figure(results: Results, path: Path) -> bool:
    """Ties kept at NFE 1 against L, a panel for each family, a line for each variant; False without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    groups, ideal = by_variant(results), results.select(method="ideal", metric="ties", nfe=1)
    chance = {setting_of(row.data): row.value for row in ideal}
    families = sorted({place.family for place, _ in groups})
    lengths = sorted({place.length for place, _ in groups})
    labels = ordered_variants(label for _, label in groups)
    picture = Figure(figsize=(2.7 * len(families), 3.2), layout="constrained")
    FigureCanvasAgg(picture)
    panels = picture.subplots(1, len(families), sharey=True, squeeze=False)[0]
    for panel, family in zip(panels, families, strict=True):
        for number, label in enumerate(labels):
            rows = {length: groups.get((TieSetting(family, length), label), []) for length in lengths}
            means = {length: Number("ties", {"nfe": 1}).mean(Line((), own)) for length, own in rows.items()}
            points = [(length, mean) for length, mean in means.items() if mean is not None]
            panel.errorbar(
                [length for length, _ in points], [mean.mean for _, mean in points],
                yerr=[mean.stderr or 0.0 for _, mean in points], marker="o", markersize=4, linewidth=1.2, capsize=2,
                label=label, color=f"C{number}",
            )  # fmt: skip
        levels = [
            (length, chance[TieSetting(family, length)]) for length in lengths if TieSetting(family, length) in chance
        ]
        panel.plot(*zip(*levels, strict=True), color="0.4", linestyle=":", label="chance")
        panel.set_xscale("log", base=2)
        panel.set(title=family, xlabel="length L", xticks=lengths, xticklabels=[str(length) for length in lengths])
        panel.set_ylim(-3, 103)
        panel.grid(color="0.92")
    panels[0].set_ylabel("ties kept at NFE 1 (%)")
    handles, names = panels[0].get_legend_handles_labels()
    picture.legend(handles, names, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(path, dpi=120)
    return True
