"""A search over settings: trials on the same tasks and seeds, trained many at once, ranked in a table and a plot."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
import sys
import textwrap
import time
from argparse import RawDescriptionHelpFormatter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from emoe.cli import Parser
from emoe.commands import parse_number, parse_numbers, split_settings
from emoe.config import ConfigError, hint, to_dict
from emoe.console import console_table
from emoe.domains.toy import Toy
from emoe.evaluation.evaluate import evaluate, evaluate_likelihood, make_row
from emoe.evaluation.exact_toy import exact_rows
from emoe.experiment import Experiment, customise
from emoe.files import replace_file
from emoe.recipes import get_recipe
from emoe.reporting.cells import measure
from emoe.reporting.provenance import describe_machine
from emoe.reporting.render import markdown_table
from emoe.reporting.results import Row
from emoe.reporting.table import Table
from emoe.runs import Run
from emoe.studies.base import Study, make_study, run_name, steps_done
from emoe.types import Convention, Measurement

Settings = dict[str, str]
Better = Literal["high", "low"] | None
Status = Literal["done", "failed", "partial", "not run"]

EXACT = ("validity", "overlap", "nll", "kl")  # of a toy model's law, without sampling noise
GAIN = "coordination_gain"  # needs no NFE: it is read off bound@1
MOST_SHOWN = 60  # trials in the plot
LARGEST_SEED = 2**63 - 1

DESCRIPTION = """\
Train a recipe under many settings, several runs at once, and rank them. The recipe itself is always a trial: the base
that all others are compared with. Killed, the same command continues; finished runs are not trained again.

A trial is a set of changed fields. --vary options multiply into a grid, each --also adds one trial picked by hand. Each
trial is trained on all tasks (--on) with all seeds (--seeds); its score is the mean over them. Further fields, such as
--train.steps 2000, hold for all trials."""

EXAMPLES = """\
examples:
  emoe sweep toy-8modes-emoe --name lr --vary optim.lr=1e-4,3e-4,1e-3 --vary method.experts=4,8 --train.steps 4000
      a grid of 6 trials, ranked by the exact KL(data || model) with one network call

  emoe sweep toy-8modes-emoe --name picked --also "method.experts=16 optim.lr=1e-3" --also "optim.betas=0.9,0.99" \\
      --on domain.density=8-modes,swiss-roll --seeds 10,11 --rank kl@1,validity@1,overlap@1 --budget 8
      two trials picked by hand on 2 densities with 2 seeds; after 8 minutes no further run starts"""


@dataclass(frozen=True)
class Rank:
    """A number that trials are compared by: a metric, the NFE it is taken at, and which direction is better."""

    metric: str
    nfe: int | None
    better: Better

    def __str__(self) -> str:
        return self.metric if self.nfe is None else f"{self.metric}@{self.nfe}"

    @property
    def digits(self) -> int:
        """Decimals in tables; differences of likelihoods are small."""
        return 4 if self.metric in ("kl", "nll") else measure(self.metric).digits

    def of(self, rows: Sequence[Row]) -> float | None:
        """The value among the rows of one run; None if it was not measured."""
        return next((float(row.value) for row in rows if (row.metric, row.nfe) == (self.metric, self.nfe)), None)


@dataclass(frozen=True)
class Place:
    """Where every trial is run: the settings of a task, and a seed."""

    task: Settings
    seed: int | None  # None: the recipe's

    @property
    def settings(self) -> Settings:
        """As settings of an experiment."""
        return self.task | ({} if self.seed is None else {"seed": str(self.seed)})


@dataclass(frozen=True)
class Trial:
    """Changed fields, and the experiments they make, one for each place."""

    settings: Settings
    experiments: tuple[Experiment, ...]

    @property
    def label(self) -> str:
        """The changed fields; `base` if there are none."""
        return label_of(self.settings)


@dataclass(frozen=True)
class Outcome:
    """What became of a trial at one place."""

    task: Settings
    seed: int
    run: str  # name of the run folder
    status: Status
    error: str | None
    metrics: dict[str, float]
    step_ms: float | int | None


@dataclass(frozen=True)
class Mean:
    """Mean over places and its standard error (None for a single one)."""

    mean: float
    stderr: float | None
    n: int


@dataclass(frozen=True)
class Standing:
    """A trial with everything that is known of it."""

    trial: str
    settings: Settings
    rung: int  # of a sweep with halving, how far the trial came; 0 in all others
    steps: int  # training steps of each run
    status: Status
    metrics: dict[str, Mean | None]
    minus_base: Mean | None  # of the first metric, paired by place
    step_ms: float | None
    outcomes: tuple[Outcome, ...]
    rank: int | None = None

    @property
    def error(self) -> str | None:
        """The first line of what ended the first run that failed."""
        return next((outcome.error.splitlines()[0] for outcome in self.outcomes if outcome.error), None)


def main(words: list[str]) -> int:
    """`emoe sweep`."""
    began = time.monotonic()
    rest, settings = split_settings(_glue(words), ("domain", "backbone", "method"))
    args = _parser().parse_args(rest)
    if not re.fullmatch(r"\w[\w.-]*", args.name):
        raise ConfigError([f"name: expected letters, digits, dots and dashes, got {args.name!r}"])
    jobs, ranks, rungs = (
        parse_number("jobs", args.jobs, low=0, high=64),
        parse_ranks(args.rank),
        parse_rungs(args.halving),
    )
    deadline = None if args.budget is None else began + 60 * parse_minutes(args.budget)
    seeds = (None,) if args.seeds is None else parse_numbers("seeds", args.seeds, low=0, high=LARGEST_SEED)
    tasks = grid([parse_values("on", text) for text in args.on])
    places = [Place(task, seed) for task in tasks for seed in dict.fromkeys(seeds)]
    changes = parse_trials(args.asked, [*tasks[0], *rungs[0]])
    recipe, common = get_recipe(args.recipe), _normal(settings)
    trials = make_trials(recipe, common | rungs[0], changes, places)
    check_measures(trials[0], ranks)
    folder = Path(args.out or f"runs/sweep/{args.name}")
    standings: dict[str, Standing] = {}
    late = 0
    for number, rung in enumerate(rungs):
        if number:
            trials = make_trials(recipe, common | rung, better_half(rank_all(standings.values(), ranks[0])), places)
        study = make_study(
            "sweep", words, folder=folder / "runs", results=folder / "results.json", device=args.device,
            quiet=args.quiet, jobs=jobs,
        )  # fmt: skip
        study.deadline = deadline
        study.note(f"{len(trials)} trials, {len(trials) * len(places)} runs {label_of(rung) if rung else ''}".rstrip())
        found = run_trials(study, trials, places, ranks, rung=number)
        late += len(study.skipped)
        # A later rung that the budget cut short says less than the one before it.
        standings |= {s.trial: s for s in found if s.trial not in standings or s.status in ("done", "failed")}
    ranking = rank_all(standings.values(), ranks[0])
    title = f"{args.recipe} {label_of(common) if common else ''}".rstrip()
    report(
        folder, ranking, ranks, title=title, command=study.command, made=describe_machine(study.device),
        as_json=args.json,
    )  # fmt: skip
    if late:
        told = f"the budget of {args.budget} minutes is used up; the same command with more of it continues"
        print(f"emoe sweep: {late} runs not run: {told}", file=sys.stderr)
    if all(standing.status == "failed" for standing in ranking):
        print("emoe sweep: every trial failed", file=sys.stderr)
        return 1
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="emoe sweep", description=DESCRIPTION, epilog=EXAMPLES, formatter_class=RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("recipe", help="name of a recipe (emoe list)")
    add("--name", required=True, help="name of the sweep; its folder is runs/sweep/NAME")
    add(
        "--vary", metavar="FIELD=A,B,...", dest="asked", action="append", type=lambda text: ("vary", text), default=[],
        help="values of a field; several options make a grid. Values that hold commas are separated by |",
    )  # fmt: skip
    add(
        "--also", metavar="'FIELD=A ...'", dest="asked", action="append", type=lambda text: ("also", text),
        help="one more trial: its settings, separated by spaces",
    )  # fmt: skip
    add("--on", metavar="FIELD=A,B,...", action="append", default=[], help="tasks that every trial is trained on")
    add("--seeds", help="seeds of every trial and task, such as 10,11 (default: the recipe's)")
    add(
        "--rank", default="kl@1", metavar="METRIC@NFE,...",
        help="the first ranks, the others are shown. Toy: validity, overlap, nll, kl of the exact law. Elsewhere the "
        "domain's measures of samples. Anywhere: coordination_gain. METRIC@NFE:high or :low says what is better "
        "(default kl@1)",
    )  # fmt: skip
    add("--halving", metavar="A,B,...", help="all trials at train.steps A, then the better half at B, ...")
    add("--budget", metavar="MINUTES", help="no run starts after this time; what is done is ranked")
    add("--out", help="folder (default runs/sweep/NAME)")
    add("--jobs", default="0", help="runs trained at once; 0 = 6 on a GPU, one for each core on a CPU")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:N")
    add("--quiet", action="store_true", help="no progress")
    add("--json", action="store_true", help="print ranking.json")
    return parser


def report(
    folder: Path,
    ranking: Sequence[Standing],
    ranks: Sequence[Rank],
    *,
    title: str,
    command: str,
    made: Mapping[str, str],
    as_json: bool,
) -> None:
    """Write ranking.json, ranking.md and ranking.png, and print the one or the other.

    Args:
        folder: Where they go.
        ranking: Trials, best first.
        ranks: What was measured.
        title: The base's name.
        command: The command line.
        made: Commit, device and versions.
        as_json: Print JSON in place of the table.
    """
    tree = {
        "base": title,
        "rank": [str(rank) for rank in ranks],
        "command": command,
        "made": dict(made),
        "trials": [dataclasses.asdict(standing) for standing in ranking],
    }
    text = json.dumps(tree, indent=1, ensure_ascii=False) + "\n"
    replace_file(folder / "ranking.json", text)
    header, lines = table(ranking, ranks)
    replace_file(folder / "ranking.md", markdown(title, header, lines, ranks, command))
    drawn = draw(folder / "ranking.png", ranking, ranks[0], title)
    if as_json:
        print(text, end="")
        return
    console_table(header, lines, title=title)
    written = ["ranking.md", "ranking.json", *(["ranking.png"] if drawn else []), "results.json"]
    print("written: " + ", ".join(str(folder / name) for name in written))


def _glue(words: Sequence[str]) -> list[str]:
    """Join options and values that look like settings (`--vary a.b=1`), so that they are not taken for settings."""
    glued: list[str] = []
    queue = list(words)
    while queue:
        word = queue.pop(0)
        if word in ("--vary", "--also", "--on") and queue:
            word = f"{word}={queue.pop(0)}"
        glued.append(word)
    return glued


def _normal(settings: Mapping[str, str]) -> Settings:
    """Fields in one spelling: dashes, and a kind by its family's name."""
    return {name.replace("_", "-").removesuffix(".kind"): text for name, text in settings.items()}


def label_of(settings: Mapping[str, str]) -> str:
    """Settings as they are typed; `base` for none."""
    return " ".join(f"{name}={text}" for name, text in settings.items()) or "base"


def brief(settings: Mapping[str, str], width: int = 64) -> str:
    """Settings in few letters, for a plot: last parts of names, ramps as `4.0 to 1.0`, in lines of some width."""
    words = []
    for name, text in settings.items():
        ends = re.findall(r'"(?:start|end|value)": ([-+.\deE]+)', text)
        words.append(f"{name.rpartition('.')[2]}={' to '.join(ends) or text}")
    return textwrap.fill(", ".join(words) or "base", width)


def parse_minutes(text: str) -> float:
    """A number of minutes >= 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ConfigError([f"budget: expected minutes >= 0, got {text!r}"])
    return value


def parse_rungs(text: str | None) -> list[Settings]:
    """`4000,8000` as settings of the number of steps, which must rise; no settings, once, without halving."""
    if text is None:
        return [{}]
    steps = parse_numbers("halving", text, high=100_000_000)
    if list(steps) != sorted(set(steps)):
        raise ConfigError([f"halving: numbers of steps must rise, got {text}"])
    return [{"train.steps": str(number)} for number in steps]


def parse_ranks(text: str) -> list[Rank]:
    """`kl@1,overlap@4`: metrics and numbers of network calls; the first must know which direction is better."""
    ranks = []
    for word in text.split(","):
        found = re.fullmatch(r"([A-Za-z]\w*)(?:@([1-9]\d{0,3}))?(?::(high|low))?", word.strip())
        if found is None:
            raise ConfigError([f"rank: expected METRIC@NFE such as kl@1, got {word!r}"])
        metric, nfe, said = found.groups()
        if nfe is None and metric != GAIN:
            raise ConfigError([f"rank: {metric} needs a number of network calls; write {metric}@1"])
        better: Better = "low" if metric in ("kl", "nll") else measure(metric).better
        if said:
            better = "high" if said == "high" else "low"
        ranks.append(Rank(metric, None if metric == GAIN else int(nfe), better))
    if ranks[0].better is None:
        raise ConfigError([f"rank: is a high or a low {ranks[0]} better? write {ranks[0]}:high or {ranks[0]}:low"])
    return list(dict.fromkeys(ranks))


def parse_values(option: str, text: str) -> tuple[str, list[str]]:
    """`FIELD=A,B` or, for values that hold commas, `FIELD=A|B`."""
    field, equals, values = text.partition("=")
    found = [value.strip() for value in values.split("|" if "|" in values else ",") if value.strip()]
    if not equals or not field.strip() or not found:
        raise ConfigError([f"{option}: expected FIELD=VALUE,VALUE,... got {text!r}"])
    (name,) = _normal({field.strip(): ""})
    if name in ("seed", "name"):
        raise ConfigError([f"{option}: {name} cannot be varied; " + ("use --seeds" if name == "seed" else "leave it")])
    return name, list(dict.fromkeys(found))


def grid(options: Sequence[tuple[str, list[str]]]) -> list[Settings]:
    """All combinations, the last field moving fastest; one empty set of settings without options."""
    names = [name for name, _ in options]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError([f"{name}: given twice; write all its values in one option" for name in twice])
    return [dict(zip(names, values, strict=True)) for values in itertools.product(*(values for _, values in options))]


def parse_trials(asked: Sequence[tuple[str, str]], fixed: Sequence[str] = ()) -> list[Settings]:
    """Settings of all trials: the base, then the grid and the trials picked by hand in the order given.

    Args:
        asked: ("vary" or "also", text) as on the command line. The grid stands where its first option does.
        fixed: Fields that tasks or halving set, which no trial may change.
    """
    varied = grid([parse_values(option, text) for option, text in asked if option == "vary"])
    trials: list[Settings] = [{}]
    placed = False
    for option, text in asked:
        if option == "vary":
            trials += [] if placed else varied
            placed = True
            continue
        one: Settings = {}
        # A setting begins where FIELD= follows a space, so values may hold spaces, commas and quotes.
        for part in re.split(r"\s+(?=[\w.-]+=)", text.strip()):
            name, values = parse_values(option, f"{part}|")
            one[name] = values[0]
        trials.append(one)
    problems = {
        f"{name}: is set by --on or --halving; a trial cannot change it too": None
        for trial in trials
        for name in trial
        if any(f"{name}.".startswith(f"{one}.") or f"{one}.".startswith(f"{name}.") for one in fixed)
    }
    if problems:
        raise ConfigError(list(problems))
    return trials


def layered(*layers: Mapping[str, str]) -> Settings:
    """Later settings over earlier ones; a family that is switched (`method=vadd`) drops earlier fields of it."""
    merged: Settings = {}
    for layer in layers:
        kept = {name: text for name, text in merged.items() if not any(name.startswith(f"{new}.") for new in layer)}
        merged = kept | dict(layer)
    return merged


def make_trials(
    recipe: Experiment, common: Mapping[str, str], changes: Sequence[Settings], places: Sequence[Place]
) -> list[Trial]:
    """The experiments of all trials, equal ones only once; every setting that is refused is named with its trial."""
    trials: list[Trial] = []
    problems: list[str] = []
    known: dict[str, str] = {}  # everything but the name -> label
    named: dict[str, str] = {}  # name -> label
    for change in changes:
        label = label_of(change)
        try:
            made = tuple(customise(recipe, layered(common, change, place.settings)) for place in places)
        except ConfigError as error:
            if not change:
                raise
            problems += [f"trial {label}: {line}" for line in error.problems]
            continue
        content = json.dumps([to_dict(dataclasses.replace(one, name="")) for one in made], sort_keys=True)
        if content in known:
            continue
        if made[0].name in named:
            problems.append(f"trial {label}: changes nothing that is trained, as {named[made[0].name]}; leave it out")
        known[content] = named[made[0].name] = label
        trials.append(Trial(change, made))
    if problems:
        raise ConfigError(problems[:20])
    return trials


def check_measures(base: Trial, ranks: Sequence[Rank]) -> None:
    """Refuse a metric that the data do not have, before anything is trained."""
    for domain in {json.dumps(to_dict(one.domain)): one for one in reversed(base.experiments)}.values():
        built = domain.domain.build(domain.seed)
        names = EXACT if isinstance(built, Toy) else [item.metric for item in built.measure(built.fresh(20, 0))]
        for rank in ranks:
            if rank.metric not in (GAIN, *names):
                raise ConfigError([f"rank: {built.name} has no {rank.metric!r}{hint(rank.metric, [*names, GAIN])}"])


def measure_run(run: Run, ranks: Sequence[Rank]) -> list[Row]:
    """What ranks need of a run, and no more: the exact law of a toy, samples elsewhere, bound@1 for the gain."""
    rows: list[Row] = []
    steps = sorted({rank.nfe for rank in ranks if rank.nfe is not None})
    if steps and isinstance(run.domain, Toy):
        rows += exact_rows(run.method, run.domain, run.experiment, steps)
    elif steps:
        rows += evaluate(run.method, run.domain, run.experiment, nfe=steps)
    if any(rank.metric == GAIN for rank in ranks):
        rows += evaluate_likelihood(run.method, run.domain, run.experiment, [Convention.parse("bound@1")])
    return rows


def run_trials(
    study: Study, trials: Sequence[Trial], places: Sequence[Place], ranks: Sequence[Rank], *, rung: int = 0
) -> list[Standing]:
    """Train and measure all trials, all places of one before the next, and sum up what came of each."""
    experiments = [one for trial in trials for one in trial.experiments]
    before = {run_name(one): steps_done(study.folder / run_name(one)) for one in experiments}
    measured: dict[str, tuple[str, dict[str, float]]] = {}  # run -> its data and its numbers

    def more(run: Run) -> list[Row]:
        name = run.path.name
        rows = measure_run(run, ranks)
        measured[name] = run.domain.name, {str(rank): value for rank in ranks if (value := rank.of(rows)) is not None}
        assert run.result is not None
        if run.result.step > before[name]:  # a finished run that was only reopened says nothing about time
            pace = 1e3 * run.result.seconds / (run.result.step - before[name])
            rows.append(make_row(Measurement("step_ms", pace, None, None), run.domain, run.experiment, nfe=None))
        return rows

    study.sampled, study.tolerant, study.more = False, True, more
    for trial in trials:
        for place, one in zip(places, trial.experiments, strict=True):
            where = [label_of(place.task)] if place.task else []
            study.labels[run_name(one)] = ", ".join([trial.label, *where, f"seed {one.seed}"])
    results = study.run(experiments)

    def outcome(place: Place, one: Experiment) -> Outcome:
        name = run_name(one)
        if name in study.failed or name in study.skipped:
            error = study.failed.get(name)
            return Outcome(place.task, one.seed, name, "not run" if error is None else "failed", error, {}, None)
        data, numbers = measured[name]
        # Runs that were only reopened were timed when they were trained.
        timed = results.select(recipe=one.name, seed=one.seed, data=data, metric="step_ms")
        return Outcome(place.task, one.seed, name, "done", None, numbers, timed[0].value if timed else None)

    found = [tuple(map(outcome, places, trial.experiments)) for trial in trials]
    base = next((outcomes for trial, outcomes in zip(trials, found, strict=True) if not trial.settings), ())
    return [sum_up(trial, outcomes, base, ranks, rung) for trial, outcomes in zip(trials, found, strict=True)]


def sum_up(
    trial: Trial, outcomes: tuple[Outcome, ...], base: Sequence[Outcome], ranks: Sequence[Rank], rung: int = 0
) -> Standing:
    """Means over the places of a trial, and the paired difference to the base in the first metric."""
    kinds = {outcome.status for outcome in outcomes}
    status: Status = "failed" if "failed" in kinds else "partial" if len(kinds) > 1 else outcomes[0].status
    first = str(ranks[0])
    gaps = [
        mine.metrics[first] - theirs.metrics[first]
        for mine, theirs in zip(outcomes, base, strict=False)
        if trial.settings and first in mine.metrics and first in theirs.metrics
    ]
    paces = mean_of([outcome.step_ms for outcome in outcomes if outcome.step_ms is not None])
    return Standing(
        trial=trial.label,
        settings=trial.settings,
        rung=rung,
        steps=trial.experiments[0].train.steps,
        status=status,
        metrics={
            name: mean_of([outcome.metrics[name] for outcome in outcomes if name in outcome.metrics])
            for name in map(str, ranks)
        },
        minus_base=mean_of(gaps),
        step_ms=None if paces is None else paces.mean,
        outcomes=outcomes,
    )


def mean_of(values: Sequence[float]) -> Mean | None:
    """Mean and standard error; None without values."""
    if not values:
        return None
    count, mean = len(values), math.fsum(values) / len(values)
    spread = math.fsum((value - mean) ** 2 for value in values)
    return Mean(mean, math.sqrt(spread / (count - 1) / count) if count > 1 else None, count)


def rank_all(standings: Iterable[Standing], rank: Rank) -> list[Standing]:
    """Trials that were finished, those of the last rung first and the best at the top; then the rest as they came."""

    def key(standing: Standing) -> tuple[int, float]:
        mean = standing.metrics[str(rank)]
        assert mean is not None
        return -standing.rung, -mean.mean if rank.better == "high" else mean.mean

    everyone = list(standings)
    finished = [one for one in everyone if one.status == "done" and one.metrics[str(rank)] is not None]
    rest = [one for one in everyone if one not in finished]
    ranked = sorted(finished, key=key)
    return [dataclasses.replace(one, rank=number) for number, one in enumerate(ranked, 1)] + rest


def better_half(ranking: Sequence[Standing]) -> list[Settings]:
    """Settings of the better half of the finished trials, best first; the base goes on in any case."""
    finished = [standing for standing in ranking if standing.rank is not None]
    kept = [standing.settings for standing in finished[: (len(finished) + 1) // 2]]
    return [{}, *(settings for settings in kept if settings)]


def table(ranking: Sequence[Standing], ranks: Sequence[Rank]) -> tuple[list[str], list[list[str]]]:
    """Header and cells: mean and standard error over tasks and seeds, cost, how many runs stand behind it."""
    halved = len({standing.steps for standing in ranking}) > 1
    arrow = {"high": " ↑", "low": " ↓", None: ""}
    names = [f"{rank}{arrow[rank.better]}" for rank in ranks]
    header = ["trial", names[0], "minus base", *names[1:], "ms/step", "s/run", "runs", *(["steps"] * halved), "status"]
    lines = []
    for standing in ranking:
        cells = [_cell(standing.metrics[str(rank)], rank.digits) for rank in ranks]
        ms, done = standing.step_ms, sum(outcome.status == "done" for outcome in standing.outcomes)
        seconds = None if ms is None else ms * standing.steps / 1e3
        status = standing.status + (f": {standing.error[:80]}" if standing.error else "")
        lines.append(
            [
                f"{standing.rank}. {standing.trial}" if standing.rank else f"-  {standing.trial}",
                cells[0],
                _cell(standing.minus_base, ranks[0].digits, sign="+"),
                *cells[1:],
                "" if ms is None else f"{ms:.2f}",
                "" if seconds is None else f"{seconds:.1f}",
                f"{done}/{len(standing.outcomes)}",
                *([str(standing.steps)] * halved),
                status,
            ]
        )
    return header, lines


def _cell(mean: Mean | None, digits: int, *, sign: str = "") -> str:
    if mean is None:
        return "—"
    return f"{mean.mean:{sign}.{digits}f}" + ("" if mean.stderr is None else f" ±{mean.stderr:.{digits}f}")


def markdown(
    title: str, header: Sequence[str], lines: Sequence[Sequence[str]], ranks: Sequence[Rank], command: str
) -> str:
    """The ranking as a page."""
    body = markdown_table(Table(header, lines, align="l" + "r" * (len(header) - 2) + "l"))
    note = (
        f"Ranked by {ranks[0]} ({ranks[0].better} is better). Mean ± standard error over tasks and seeds; `minus base` "
        "is the mean difference to the base on the same task and seed, the number to judge a change by."
    )
    return f"# {title}\n\n{body}\n\n{note}\n\n```bash\n{command}\n```\n"


def draw(path: Path, ranking: Sequence[Standing], rank: Rank, title: str) -> bool:
    """A dot with its standard error for each trial, best at the top, and a line at the base; False without any."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    shown = [standing for standing in ranking if standing.metrics[str(rank)] is not None][:MOST_SHOWN]
    if not shown:
        path.unlink(missing_ok=True)  # a picture of an earlier ranking would pass for this one's
        return False
    figure = Figure(figsize=(8.0, 1.2 + 0.28 * len(shown)), layout="constrained")
    FigureCanvasAgg(figure)
    panel = figure.subplots()
    means = []
    for height, standing in enumerate(shown):
        mean = standing.metrics[str(rank)]
        assert mean is not None
        means.append(mean.mean)
        colour = "tab:red" if not standing.settings else "tab:blue"
        face = colour if standing.rank else "white"  # hollow: not all runs are there
        panel.errorbar(
            mean.mean, height, xerr=mean.stderr, fmt="o", color=colour, markerfacecolor=face, markersize=5, capsize=2
        )
        if not standing.settings:
            panel.axvline(mean.mean, color="tab:red", linestyle=":", linewidth=1)
    panel.set_yticks(range(len(shown)), [brief(standing.settings) for standing in shown], fontsize=7)
    panel.set_ylim(len(shown) - 0.5, -0.5)
    if min(means) > 0 and max(means) > 30 * min(means):
        panel.set_xscale("log")
    panel.set_xlabel(f"{rank} ({rank.better} is better), mean ± standard error over tasks and seeds")
    figure.suptitle(textwrap.fill(title, 120), fontsize=8)
    panel.grid(axis="x", color="0.9")
    panel.set_axisbelow(True)
    figure.savefig(path, dpi=120)
    return True
