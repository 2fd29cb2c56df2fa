"""What the studies of the latent share: their options, runs that need no second look, and a budget of time."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from emoe.cli import Parser
from emoe.commands import LARGEST_SEED, parse_number, parse_numbers
from emoe.config import ConfigError
from emoe.experiment import Experiment
from emoe.reporting.results import Results
from emoe.studies.base import Study, run_name, steps_done
from emoe.studies.sweep import parse_minutes


def add_options(parser: Parser, name: str, *, seeds: str) -> None:
    """Options that both studies have."""
    add = parser.add_argument
    add("--seeds", default=seeds, help=f"seeds (default {seeds})")
    add("--budget", metavar="MINUTES", help="no run starts after this time; the same command continues")
    add("--runs", default=f"runs/{name}", help=f"where run folders go (default runs/{name})")
    add("--results", default="results", help=f"folder of {name}.json (default results)")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:N")
    add("--jobs", default="0", help="runs trained at once; 0 = 6 on a GPU, one for each core on a CPU")
    add("--quiet", action="store_true", help="no progress")


def parse_names(option: str, text: str, allowed: Iterable[str]) -> list[str]:
    """Names separated by commas, each once; one that is not allowed is refused with those that are."""
    allowed = list(allowed)
    names = list(dict.fromkeys(word.strip() for word in text.split(",")))
    wrong = [name for name in names if name not in allowed]
    if wrong:
        raise ConfigError([f"{option}: {wrong[0]!r} is not known; allowed: {', '.join(allowed)}"])
    return names


def parse_seeds(text: str) -> tuple[int, ...]:
    """Seeds, each once."""
    return tuple(dict.fromkeys(parse_numbers("seeds", text, low=0, high=LARGEST_SEED)))


def parse_jobs(text: str) -> int:
    """Number of runs at once."""
    return parse_number("jobs", text, low=0, high=64)


def parse_deadline(text: str | None) -> float | None:
    """The moment of `time.monotonic()` at which a budget that begins now is used up; None without one."""
    return None if text is None else time.monotonic() + 60 * parse_minutes(text)


def refuse_fields(settings: Iterable[str], options: Mapping[str, str]) -> None:
    """Refuse settings of fields that the study sets itself; `options` says what to use in their place."""
    wrong = [name for name in settings if name.replace("_", "-") in options]
    if wrong:
        raise ConfigError([f"{name}: the study sets it; use --{options[name.replace('_', '-')]}" for name in wrong])


def complete(study: Study, experiments: Sequence[Experiment], label: Callable[[Experiment], str], metric: str) -> int:
    """Train and measure what is not measured yet and say what is missing in the end; returns an exit code.

    A run needs no second look if its folder holds all steps and the results have its `metric` at every NFE: the
    recipe's name and the run's folder differ with every field that could change a number.
    """
    known = Results.load(study.results) if study.results.exists() else Results()
    seen = {(row.recipe, row.seed, row.nfe) for row in known.select(metric=metric)}

    def measured(one: Experiment) -> bool:
        recorded = all((one.name, one.seed, nfe) in seen for nfe in one.eval.nfe)
        return recorded and steps_done(study.folder / run_name(one)) >= one.train.steps

    left = [one for one in experiments if not measured(one)]
    study.note(f"{len(experiments)} runs, {len(experiments) - len(left)} of them trained and measured before")
    study.tolerant = True
    study.labels |= {run_name(one): f"{label(one)}, seed {one.seed}" for one in left}
    study.run(left)
    for name, error in study.failed.items():
        print(f"emoe reproduce: {study.labels[name]} failed: {error}", file=sys.stderr)
    if study.skipped:
        late = f"{len(study.skipped)} of {len(experiments)} runs not run"
        print(f"emoe reproduce: {late}: the budget is used up; the same command continues", file=sys.stderr)
    return 1 if study.failed else 0
