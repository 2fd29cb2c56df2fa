"""A grid of settings on tasks and seeds: every trial is compared with the base on the same task and seed."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from emoe.config import ConfigError, hint
from emoe.domains.toy import Toy
from emoe.evaluation.likelihood import HELD_OUT
from emoe.experiment import Experiment, customise
from emoe.recipes import get_recipe
from emoe.reporting.cells import measure, write
from emoe.reporting.render import markdown
from emoe.reporting.results import Results, mean_of
from emoe.reporting.table import Table
from emoe.studies import options, pipeline, stages
from emoe.studies.options import LARGEST_SEED, flag, hidden
from emoe.studies.pools import PoolKey
from emoe.studies.stages import Stage, Trained

EXACT = ("validity", "overlap", "nll", "kl")  # of a toy model's law, without sampling noise
GAIN = "coordination_gain"  # from bound@1: it has no NFE
NOTE = (
    "Mean ± standard error over tasks and seeds. `minus base` is the mean difference to the base on the same task and "
    "seed: compare trials by this number."
)
Settings = dict[str, str]
Trials = dict[str, list[Experiment]]  # label -> an experiment for each task and seed


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
    """Train a recipe under many settings and compare each with the recipe itself."""

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
        """Every trial on every task with every seed."""
        tasks = [as_text(task) for task in tasks_of(self.options) for _ in self.options.seeds or "-"]
        return {
            experiment: ", ".join(filter(None, [name, task, f"seed {experiment.seed}"]))
            for name, trial in self.trials.items()
            for task, experiment in zip(tasks, trial, strict=True)
        }

    def stages(self, run: Trained) -> list[Stage]:
        """The exact law of a toy, samples of other data, bound@1 for the coordination gain."""
        metrics, nfe, work = self.options.metric, self.options.nfe, stages.times(run)
        if isinstance(run.domain, Toy):
            work += [stages.exact(run, nfe)] * (metrics != (GAIN,))
        else:
            work += [stages.pool(run, PoolKey(calls), run.experiment.eval.samples) for calls in nfe]
        gain = stages.likelihood(run, "bound@1", HELD_OUT, ("nll", "bpd", "ppl"))
        return work + [gain] * (GAIN in metrics)

    def write(self, results: Results) -> None:
        """The table of trials, best first."""
        given = itertools.product(self.options.metric, self.options.nfe)
        first, *others = dict.fromkeys(Column(metric, None if metric == GAIN else calls) for metric, calls in given)
        base, rows = first.values(results, self.trials["base"]), []
        for label, trial in sorted(self.trials.items(), key=lambda item: first.rank(results, item[1])):
            own = first.values(results, trial)
            gap = mean_of(own[key] - base[key] for key in own if key in base) if label != "base" else None
            cells = [column.cell(results, trial) for column in [*others, Column("step_ms", None)]]
            gain = write(gap, f"+.{first.digits}f")
            rows.append([label, first.cell(results, trial), gain, *cells, f"{len(own)}/{len(trial)}"])
        header = ["Trial", str(first), "minus base", *map(str, others), "ms per step", "runs"]
        table = Table(header, rows, title=self.options.recipe, note=NOTE)
        self.print_tables([table])
        command = f"```bash\n{self.options.command_line()}\n```\n"
        self.page("ranking.md", f"{markdown([table])}\n{command}")

    def close(self) -> int:
        """A failed trial is a result; the exit code is 1 only if all of them fail."""
        super().close()
        return int(len(self.failed) == len(self.runs))


def make_trials(options: Options) -> Trials:
    """The base, the grid and single trials; equal ones once. The error names every setting that is refused."""
    tasks = tasks_of(options)
    seeds: list[Settings] = [{}] if options.seeds is None else [{"seed": str(seed)} for seed in options.seeds]
    changes = [{}, *grid([parse_values("vary", text) for text in options.vary]), *map(parse_trial, options.also)]
    recipe, common = get_recipe(options.recipe), normal(options.settings)
    trials, problems = Trials(), list[str]()
    for change in changes:
        label = as_text(change) or "base"
        for name, other in itertools.product(change, tasks[0]):
            if f"{name}.".startswith(f"{other}.") or f"{other}.".startswith(f"{name}."):
                problems.append(f"trial {label}: {name} is set by --on; a trial cannot change it too")
        try:
            pairs = itertools.product(tasks, seeds)
            trial = [customise(recipe, layered(common, change, task, seed)) for task, seed in pairs]
        except ConfigError as error:
            if not change:
                raise
            problems += [f"trial {label}: {line}" for line in error.problems]
            continue
        if any(_equal(trial, other) for other in trials.values()):
            continue
        if trial[0].name in {other[0].name for other in trials.values()}:
            problems.append(f"trial {label}: changes nothing that is trained; leave it out")
        trials[label] = trial
    if problems:
        raise ConfigError(problems[:20])
    return trials


def _equal(trial: Sequence[Experiment], other: Sequence[Experiment]) -> bool:
    return all(one == dataclasses.replace(two, name=one.name) for one, two in zip(trial, other, strict=True))


def tasks_of(options: Options) -> list[Settings]:
    """The tasks of every trial."""
    return grid([parse_values("on", text) for text in options.on])


def as_text(settings: Mapping[str, str]) -> str:
    """Settings as they are typed."""
    return " ".join(f"{name}={text}" for name, text in settings.items())


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


def check_metrics(metrics: Iterable[str], experiments: Sequence[Experiment]) -> None:
    """Refuse a metric that the data do not have, before anything is trained."""
    for experiment in {one.domain: one for one in experiments}.values():
        domain = experiment.domain.build(experiment.seed)
        names = [*EXACT] if isinstance(domain, Toy) else [item.metric for item in domain.measure(domain.fresh(20, 0))]
        for metric in metrics:
            if metric not in (GAIN, *names):
                raise ConfigError([f"metric: {domain.name} has no {metric!r}{hint(metric, [*names, GAIN])}"])


class Column(NamedTuple):
    """A metric at a number of network calls."""

    metric: str
    nfe: int | None

    def __str__(self) -> str:
        return self.metric if self.nfe is None else f"{self.metric}, NFE {self.nfe}"

    @property
    def digits(self) -> int:
        """Decimals; differences of likelihoods are small."""
        return 4 if self.metric in ("kl", "nll") else measure(self.metric).digits

    def values(self, results: Results, trial: Sequence[Experiment]) -> dict[int, float]:
        """The numbers of the runs of a trial that have one, by their position."""
        same = {"metric": self.metric, "nfe": self.nfe}
        groups = [results.select(recipe=one.name, seed=one.seed, **same) for one in trial]
        return {position: float(rows[0].value) for position, rows in enumerate(groups) if rows}

    def cell(self, results: Results, trial: Sequence[Experiment]) -> str:
        """Mean and standard error over tasks and seeds."""
        return write(mean_of(self.values(results, trial).values()), f".{self.digits}f")

    def rank(self, results: Results, trial: Sequence[Experiment]) -> tuple[bool, float]:
        """Sort key: trials that lack a run last, the others by their mean if higher or lower is better."""
        values = self.values(results, trial)
        better = "low" if self.metric == "nll" else measure(self.metric).better
        sign = {"high": -1.0, "low": 1.0}.get(better or "", 0.0)
        return len(values) < len(trial), sign * math.fsum(values.values()) / max(1, len(values))
