"""A grid of settings on tasks and seeds: every trial is compared with the base on the same task and seed."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from emoe.config import ConfigError, hint
from emoe.domains.toy import Toy
from emoe.evaluation.measure import UNITS
from emoe.experiment import Experiment, customise
from emoe.recipes import get_recipe
from emoe.reporting.cells import measure, write
from emoe.reporting.recipes import as_typed
from emoe.reporting.results import Results, mean_of
from emoe.reporting.table import Table, markdown
from emoe.studies import options, pipeline, stages
from emoe.studies.options import LARGEST_SEED, flag, hidden
from emoe.studies.stages import Stage, Trained

EXACT = ("validity", "overlap", "nll", "kl")  # of a toy model's law, without sampling noise
GAIN = "coordination_gain"  # from bound@1: it has no NFE
NOTE = (
    "Mean ± standard error over tasks and seeds. `minus base` is the mean difference to the base on the same task and "
    "seed: compare trials by this number."
)
Settings = dict[str, str]
Trials = dict[str, dict[Experiment, str]]  # label -> an experiment for each task and seed, with its label


@dataclass(frozen=True, kw_only=True)
class Options(options.Options):
    """Options of a sweep; `settings` hold for all trials."""

    study: str = hidden("sweep")
    recipe: str = flag("", "name of a recipe; unchanged it is the base", positional=True)
    name: str = flag("", "name of the sweep; its folder is runs/sweep/NAME")
    vary: tuple[str, ...] = flag((), "FIELD=A,B,...: values of a field; several options make a grid", repeat=True)
    also: tuple[str, ...] = flag((), "'FIELD=A FIELD=B ...': one more trial", repeat=True)
    on: tuple[str, ...] = flag((), "FIELD=A,B,...: tasks that every trial is trained on", repeat=True)
    seeds: tuple[int, ...] | None = flag(None, "seeds; default: the recipe's", low=0, high=LARGEST_SEED)
    metric: tuple[str, ...] = flag(("kl",), "what is measured; the first metric at the first NFE ranks the trials")
    nfe: tuple[int, ...] = flag((1,), "numbers of network calls", low=1, high=9_999)
    out: Path | None = flag(None, "folder; default: runs/sweep/NAME", recorded=False)
    runs: Path | None = hidden(None)
    results: Path = hidden(Path())
    stem = "results"


class Study(pipeline.Study):
    """Train a recipe under many settings, several runs at once, and compare each with the recipe itself, the base.

    A trial is a set of changed fields. --vary options multiply into a grid, each --also adds one trial picked by hand.
    Each trial is trained on all tasks (--on) with all seeds (--seeds). Further fields, such as --train.steps 2000, hold
    for all trials. Killed, the same command continues; finished runs are not trained again.

    Examples:
        emoe sweep toy-8modes-emoe --name lr --vary optim.lr=1e-4,3e-4,1e-3 --vary method.experts=4,8
        emoe sweep toy-8modes-emoe --name picked --also "method.experts=16 optim.lr=1e-3" --seeds 10,11 --budget 8
    """

    options: Options
    measures_past_deadline = True

    def __init__(self, options: Options):
        if not re.fullmatch(r"\w[\w.-]*", options.name):
            raise ConfigError([f"name: expected letters, digits, dots and dashes, got {options.name!r}"])
        self.trials = make_trials(options)
        check_metrics(options.metric, self.trials["base"])
        out = options.out or Path("runs/sweep") / options.name
        super().__init__(dataclasses.replace(options, runs=out / "runs", results=out))

    def experiments(self) -> dict[Experiment, str]:
        return {experiment: label for trial in self.trials.values() for experiment, label in trial.items()}

    def stages(self, run: Trained) -> list[Stage]:
        metrics, nfe, work = self.options.metric, self.options.nfe, stages.times(run)
        if isinstance(run.domain, Toy):
            work += [stages.exact(run, nfe)] * (metrics != (GAIN,))
        else:
            work += [stages.pool(run, calls, run.experiment.eval.samples) for calls in nfe]
        gain = stages.likelihood(run, "bound@1", metrics=UNITS)
        return work + [gain] * (GAIN in metrics)

    def write(self, results: Results) -> None:
        given = itertools.product(self.options.metric, self.options.nfe)
        columns = dict.fromkeys((metric, None if metric == GAIN else nfe) for metric, nfe in given)
        table = ranking(results, self.trials, [*columns, ("step_ms", None)])
        table.title = self.options.recipe
        self.print_tables([table])
        self.page("ranking.md", f"{markdown([table])}\n```bash\n{self.options.command_line()}\n```\n")

    def close(self) -> int:
        """A failed trial is a result; the exit code is 1 only if all of them fail."""
        super().close()
        return int(len(self.failed) == len(self.runs))


def make_trials(options: Options) -> Trials:
    """The base, the grid and single trials; equal ones once. The error names every setting that is refused."""
    tasks = grid([parse_values("on", text) for text in options.on])
    seeds: list[Settings] = [{}] if options.seeds is None else [{"seed": str(seed)} for seed in options.seeds]
    changes = [{}, *grid([parse_values("vary", text) for text in options.vary]), *map(parse_trial, options.also)]
    recipe, common = get_recipe(options.recipe), normal(options.settings)
    trials, problems, known = Trials(), list[str](), set[tuple[Experiment, ...]]()
    for change in changes:
        label, trial = as_typed(change) or "base", dict[Experiment, str]()
        for name, other in itertools.product(change, tasks[0]):
            if f"{name}.".startswith(f"{other}.") or f"{other}.".startswith(f"{name}."):
                problems.append(f"trial {label}: {name} is set by --on; a trial cannot change it too")
        try:
            for task, seed in itertools.product(tasks, seeds):
                one = customise(recipe, layered(common, change, task, seed))
                trial[one] = ", ".join(filter(None, [label, as_typed(task), f"seed {one.seed}"]))
        except ConfigError as error:
            if not change:
                raise
            problems += [f"trial {label}: {line}" for line in error.problems]
            continue
        unnamed = tuple(dataclasses.replace(one, name="") for one in trial)
        if unnamed not in known:
            if {one.name for one in trial} & {one.name for other in trials.values() for one in other}:
                problems.append(f"trial {label}: changes nothing that is trained; leave it out")
            trials[label] = trial
        known.add(unnamed)
    if problems:
        raise ConfigError(problems[:20])
    return trials


def normal(settings: Mapping[str, str]) -> Settings:
    """Fields in one spelling: dashes, and a kind by its family's name."""
    return {name.replace("_", "-").removesuffix(".kind"): text for name, text in settings.items()}


def parse_values(option: str, text: str) -> tuple[str, list[str]]:
    """`FIELD=A,B` or, for values that hold commas, `FIELD=A|B`."""
    field, equals, values = text.partition("=")
    parts = [value.strip() for value in values.split("|" if "|" in values else ",") if value.strip()]
    if not equals or not field.strip() or not parts:
        raise ConfigError([f"{option}: expected FIELD=VALUE,VALUE,... got {text!r}"])
    (name,) = normal({field.strip(): ""})
    if name in ("seed", "name"):
        raise ConfigError([f"{option}: {name} cannot be varied; " + ("use --seeds" if name == "seed" else "leave it")])
    return name, list(dict.fromkeys(parts))


def parse_trial(text: str) -> Settings:
    """`FIELD=A FIELD=B`: a setting begins where FIELD= follows a space, so values may hold spaces and commas."""
    pairs = (parse_values("also", f"{part}|") for part in re.split(r"\s+(?=[\w.-]+=)", text.strip()))
    return {name: values[0] for name, values in pairs}


def grid(options: Sequence[tuple[str, list[str]]]) -> list[Settings]:
    """All combinations, the last field changing fastest; one empty set of settings without options."""
    names = [name for name, _ in options]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError([f"{name}: given twice; write all its values in one option" for name in twice])
    return [dict(zip(names, values, strict=True)) for values in itertools.product(*(values for _, values in options))]


def layered(*layers: Mapping[str, str]) -> Settings:
    """Later settings over earlier ones; a family that is switched (`method=vadd`) drops earlier fields of it."""
    merged: Settings = {}
    for layer in layers:
        kept = {name: text for name, text in merged.items() if not any(name.startswith(f"{new}.") for new in layer)}
        merged = kept | dict(layer)
    return merged


def check_metrics(metrics: Iterable[str], experiments: Iterable[Experiment]) -> None:
    """Refuse a metric that the data do not have, before anything is trained."""
    for experiment in {one.domain: one for one in experiments}.values():
        domain = experiment.domain.build(experiment.seed)
        names = [*EXACT] if isinstance(domain, Toy) else [item.metric for item in domain.measure(domain.fresh(20, 0))]
        for metric in metrics:
            if metric not in (GAIN, *names):
                raise ConfigError([f"metric: {domain.name} has no {metric!r}{hint(metric, [*names, GAIN])}"])


def ranking(results: Results, trials: Trials, columns: Sequence[tuple[str, int | None]]) -> Table:
    """Means over tasks and seeds of metrics at numbers of network calls, for all trials.

    The first column ranks them if higher or lower is better; trials that lack a run are last.
    """
    metric, form = columns[0][0], [f".{4 if name in ('kl', 'nll') else measure(name).digits}f" for name, _ in columns]
    better = "low" if metric == "nll" else measure(metric).better
    sign = {"high": -1.0, "low": 1.0, None: 0.0}[better]
    values = {label: [_values(results, trial, *column) for column in columns] for label, trial in trials.items()}
    base, ranked = values["base"][0], list[tuple[bool, float, list[str]]]()
    for label, trial in trials.items():
        first = values[label][0]
        gap = mean_of(first[run] - base[run] for run in first if run in base) if label != "base" else None
        cells = [write(mean_of(column.values()), text) for column, text in zip(values[label], form, strict=True)]
        row = [label, cells[0], write(gap, f"+{form[0]}"), *cells[1:], f"{len(first)}/{len(trial)}"]
        ranked.append((len(first) < len(trial), sign * math.fsum(first.values()) / max(1, len(first)), row))
    rows = [row for *_, row in sorted(ranked, key=lambda entry: entry[:2])]
    first_name, *names = [name if nfe is None else f"{name}, NFE {nfe}" for name, nfe in columns[:-1]]
    return Table(["Trial", first_name, "minus base", *names, "ms per step", "runs"], rows, note=NOTE)


def _values(results: Results, trial: Iterable[Experiment], metric: str, nfe: int | None) -> dict[int, float]:
    """The numbers of the runs of a trial that have one, by their position."""
    groups = [results.select(recipe=one.name, seed=one.seed, metric=metric, nfe=nfe) for one in trial]
    return {position: float(rows[0].value) for position, rows in enumerate(groups) if rows}
