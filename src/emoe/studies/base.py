"""What studies share: train a list of experiments, measure each, record the rows as they come."""

from __future__ import annotations

import hashlib
import json
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor

from emoe.config import to_dict
from emoe.console import Progress
from emoe.domains.base import Domain, DomainConfig
from emoe.engine import checkpoint
from emoe.engine.signals import StopSignal
from emoe.evaluation.evaluate import evaluate, make_row, method_name
from emoe.evaluation.pools import Pool
from emoe.experiment import Experiment
from emoe.reporting.provenance import describe_machine
from emoe.reporting.results import Results, Row, RunInfo, record
from emoe.runs import Run, pick_device, train
from emoe.types import Measurement

Pools = dict[tuple[str, str, int, int], Int[Tensor, "n L"]]  # (data, method, seed, NFE) -> samples


LINE_SECONDS = 3.0  # between two lines of the common progress


class Interrupted(RuntimeError):
    """A signal stopped a study after a good save; the same command continues it."""

    def __init__(self, signal: int):
        super().__init__("stopped and saved; the same command continues where it stopped")
        self.exit_code = 128 + signal


@dataclass
class Study:
    """A list of runs and where their results go."""

    folder: Path  # run folders
    results: Path  # results file
    command: str
    device: torch.device
    quiet: bool = False
    jobs: int = 1  # runs trained at once, each in a thread and on a CUDA stream of its own
    more: Callable[[Run], list[Row]] | None = None  # further rows of a trained run
    sampled: bool = True  # draw and measure samples as each experiment says; else `more` alone measures
    tolerant: bool = False  # a run that fails is noted in `failed` and the others go on
    deadline: float | None = None  # of time.monotonic(): later no run starts; finished ones are still measured
    stops: bool = False  # at the deadline a run that is under way is stopped and saved
    labels: dict[str, str] = field(default_factory=dict)  # name of a run's folder -> what the log calls it
    domains: dict[DomainConfig, Domain] = field(default_factory=dict)  # already built, whatever the seed
    pools: Pools = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)  # name of a run's folder -> what ended it
    skipped: list[str] = field(default_factory=list)  # folders of runs that were not started, or not finished
    seconds: dict[str, float] = field(default_factory=dict)  # folder of a run -> how long it was trained just now

    def __post_init__(self) -> None:
        self._began = time.monotonic()
        self._machine = describe_machine(self.device)
        self._of_thread = threading.local()

    def info(self) -> RunInfo:
        """Provenance of everything measured so far; its id stays the same while the study goes on."""
        return RunInfo(command=self.command, wall_s=round(time.monotonic() - self._began, 1), **self._machine)

    def add(self, rows: Sequence[Row]) -> Results:
        """Record rows at once, so that a study that is killed keeps what it has."""
        return record(self.results, self.info(), rows)

    def run(self, experiments: Sequence[Experiment]) -> Results:
        """Train and measure all experiments; finished ones are reused, unfinished ones resumed.

        A small network leaves most of a GPU idle, and on a CPU several threads per network wait for each other more
        than they compute. So several runs go on at once, each in a thread with one CPU core and a CUDA stream of its
        own. Runs share nothing, so their number changes nothing but the time.
        """
        self.add([])
        total = sum(experiment.train.steps for experiment in experiments)
        with (
            StopSignal() as stop,
            Progress(total, label="all runs", quiet=self.quiet) as whole,
            ThreadPoolExecutor(self.jobs, initializer=torch.set_num_threads, initargs=(1,)) as threads,
        ):
            shares = Shares(whole)
            futures = [threads.submit(self._attempt, experiment, stop, shares) for experiment in experiments]
            try:
                for number, future in enumerate(as_completed(futures), 1):
                    whole.note(f"[{number}/{len(futures)}] {future.result()}")
            except BaseException:
                stop.ask()
                for future in futures:
                    future.cancel()
                raise
        order = [run_name(experiment) for experiment in experiments]
        self.runs.sort(key=lambda run: order.index(run.path.name))
        return Results.load(self.results)

    def _attempt(self, experiment: Experiment, stop: StopSignal, shares: Shares) -> str:
        """One experiment, if there is time left for it; a tolerant study outlives its failure."""
        name = run_name(experiment)
        late = self.deadline is not None and time.monotonic() >= self.deadline
        if late and steps_done(self.folder / name) < experiment.train.steps:
            self.skipped.append(name)
            return f"{self._label(experiment)}: not run, the time is up"
        try:
            return self._one(experiment, stop, shares)
        except Interrupted:
            raise
        except Exception as error:
            if not self.tolerant:
                raise
            self.failed[name] = str(error) or type(error).__name__
            return f"{self._label(experiment)}: FAILED: {self.failed[name]}"

    def _one(self, experiment: Experiment, stop: StopSignal, shares: Shares) -> str:
        """Train and measure one experiment; returns a line about it."""
        label, name = self._label(experiment), run_name(experiment)
        begun = steps_done(self.folder / name)
        with self._own_stream():
            run = train(
                experiment,
                self.folder / name,
                resume=True,
                device=str(self.device),
                stop=Until(stop, self.deadline) if self.stops else stop,
                progress=shares.of(label),
                domain=self.domains.get(experiment.domain),
            )
            assert run.result is not None
            self.seconds[name] = run.result.seconds
            if run.result.signal is not None:
                if not self.stops or stop.requested is not None:
                    raise Interrupted(run.result.signal)
                if run.step < experiment.train.steps:  # the deadline may come with the last step
                    self.skipped.append(name)
                    return f"{label}: stopped and saved at step {run.step:,}, the time is up"

            def keep(pool: Pool) -> None:
                self.pools[run.domain.name, method_name(experiment), experiment.seed, pool.nfe] = pool.samples

            rows = evaluate(run.method, run.domain, experiment, keep=keep) if self.sampled else []
            rows += self.more(run) if self.more is not None else []
        if begun == 0 and run.result.seconds > 1:  # of a run that was continued this is but a part
            spent = Measurement("train_s", round(run.result.seconds, 2), None, experiment.train.steps)
            rows.append(make_row(spent, run.domain, experiment, nfe=None))
        self.runs.append(run)
        self.add(rows)
        first = min((row.nfe for row in rows if row.nfe is not None), default=None)
        values = ", ".join(
            f"{row.metric} {row.value:.4g}"
            for row in rows
            if row.nfe == first and (row.convention is None or not self.sampled)
        )
        return f"{label}: {run.result.seconds:.1f} s; {'' if first is None else f'NFE {first}: '}{values}"

    def _label(self, experiment: Experiment) -> str:
        """An experiment in a line of the log."""
        recipe = experiment.name.partition(" ")[0]
        return self.labels.get(run_name(experiment), f"{recipe} seed {experiment.seed}")

    def _own_stream(self) -> AbstractContextManager[object]:
        """One CUDA stream for each worker thread, kept over its runs: streams come from a pool of few."""
        if self.device.type != "cuda":
            return nullcontext()
        if getattr(self._of_thread, "stream", None) is None:
            self._of_thread.stream = torch.cuda.Stream(self.device)
        return torch.cuda.stream(self._of_thread.stream)

    def note(self, text: str) -> None:
        """Say what is going on."""
        if not self.quiet:
            print(text, file=sys.stderr, flush=True)


class Until(StopSignal):
    """A stop that another one asks for, or that comes at a moment of `time.monotonic()`."""

    def __init__(self, stop: StopSignal, deadline: float | None):
        super().__init__()
        self.stop, self.deadline = stop, deadline

    @property
    def requested(self) -> int | None:
        """See `StopSignal`; at the deadline as if a SIGTERM had come."""
        late = self.deadline is not None and time.monotonic() >= self.deadline
        return self.stop.requested or (int(signal.SIGTERM) if late else None)


class Shares:
    """A common progress display of runs that go on at once."""

    def __init__(self, whole: Progress):
        self.whole, self.lock = whole, threading.Lock()
        self.steps: dict[Share, int] = {}  # by run, not by label: two runs may be called alike
        self.shown = 0.0

    def of(self, label: str) -> Share:
        """The part of one run."""
        return Share(self, label)


class Share(Progress):
    """What one run reports to the common display; lines in a log come every few seconds, not for every run's step."""

    def __init__(self, shares: Shares, label: str):
        super().__init__(shares.whole.total, label=label, quiet=True)
        self.shares = shares

    def update(self, step: int) -> None:
        """Count the steps of this run."""
        with self.shares.lock:
            self.shares.steps[self] = step
            self.shares.whole.update(sum(self.shares.steps.values()))

    def log(self, step: int, text: str = "") -> None:
        """Show the steps of all runs, and what this one says."""
        self.update(step)
        with self.shares.lock:
            if time.monotonic() - self.shares.shown >= LINE_SECONDS:
                self.shares.shown = time.monotonic()
                done = sum(self.shares.steps.values())
                self.shares.whole.log(done, f"{self.label}: step {step}, {text}")


def steps_done(run: Path) -> int:
    """Training steps behind the newest checkpoint of a run folder; 0 without one."""
    newest = checkpoint.latest(run / "checkpoints")
    return 0 if newest is None else int(newest.name.removeprefix("step-"))


def run_name(experiment: Experiment) -> str:
    """Folder of an experiment: readable, and different for every difference in what it says.

    Fields at their default are left out: a run that was begun before an option existed is still found.
    """
    digest = hashlib.sha256(json.dumps(to_dict(experiment, sparse=True), sort_keys=True).encode()).hexdigest()[:8]
    return f"{experiment.name.partition(' ')[0]}-seed{experiment.seed}-{digest}"


def make_study(
    command: str, words: list[str], *, folder: Path, results: Path, device: str, quiet: bool, jobs: int = 0
) -> Study:
    """A study of a command line; `jobs` 0 means 6 runs at once on a GPU, and one per thread of torch on a CPU."""
    where = pick_device(device)
    count = jobs or (6 if where.type == "cuda" else torch.get_num_threads())
    return Study(folder, results, _what_matters(command, words), where, quiet, count)


def _what_matters(command: str, words: list[str]) -> str:
    """The command line for the record, without where things go: that changes no number and is nobody's business."""
    places = ("--runs", "--results", "--out")
    kept = [
        word
        for before, word in zip(["", *words], words, strict=False)
        if before not in places and word.partition("=")[0] not in places
    ]
    return shlex.join(["emoe", *command.split(), *kept])
