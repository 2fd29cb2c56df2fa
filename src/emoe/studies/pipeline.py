"""The pipeline of a study: plan, train what is missing, measure in stages, write tables and figures.

Every stage records its rows at once, so a study that is killed continues with the same command.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

from emoe.console import Tick, meter
from emoe.domains.base import Domain
from emoe.engine.callbacks import Callback, Deadline, StopSignal
from emoe.evaluation.measure import described
from emoe.experiment import Experiment
from emoe.figures.base import save
from emoe.figures.curves import Curve, Panel, draw
from emoe.files import replace_file
from emoe.reporting.provenance import describe_machine
from emoe.reporting.render import print_table
from emoe.reporting.results import Results, Row, RunInfo, mean_over_seeds, record
from emoe.reporting.table import Table
from emoe.runs.train import pick_device, train
from emoe.studies.options import Options
from emoe.studies.stages import TIMES, Stage, Trained, steps_done

Task = Callable[[Tick], None]


class Interrupted(RuntimeError):
    """A signal stopped a study after a good save; the same command continues it."""

    def __init__(self, signal: int):
        super().__init__("stopped and saved; the same command continues where it stopped")
        self.exit_code = 128 + signal


class Study:
    """What is trained, how each run is measured, and what is written of the results.

    Subclasses override `experiments`, `stages`, `write` and, where needed, `references` and `build_domain`.
    """

    gpu_jobs = 6  # runs at once on a GPU, unless the options say otherwise
    measures_past_deadline = False  # whether trained runs are measured after the budget is used up

    def __init__(self, options: Options):
        self.options, self.device = options, pick_device(options.device)
        self.jobs = options.jobs or (self.gpu_jobs if self.device.type == "cuda" else torch.get_num_threads())
        self.results = options.results / f"{options.stem}.json"
        self.failed: dict[str, str] = {}  # label -> the error that ended it
        self.untrained = self.unmeasured = 0  # runs and stages that are left when the budget is used up
        self.stop, self.began, self._machine = StopSignal(), time.monotonic(), describe_machine(self.device)
        self.deadline = None if options.budget is None else self.began + 60 * options.budget
        self.written: list[Path] = []  # pages and figures that have changed
        self._domains: dict[object, Domain] = {}
        self._lock, self._local = threading.RLock(), threading.local()
        experiments = self.experiments()
        labels = experiments if isinstance(experiments, Mapping) else dict.fromkeys(experiments, "")
        self.runs = [Trained(self, experiment, label) for experiment, label in labels.items()]

    def experiments(self) -> Mapping[Experiment, str] | Sequence[Experiment]:
        """What is trained, with labels for the log if these are not the recipe and the seed."""
        raise NotImplementedError

    def stages(self, run: Trained) -> list[Stage]:
        """What is measured of a trained run."""
        raise NotImplementedError

    def references(self, runs: Sequence[Trained]) -> list[Stage]:
        """What is measured beside the trained runs, such as real data."""
        return []

    def write(self, results: Results) -> None:
        """Write pages and figures of all results, and print the main tables."""
        raise NotImplementedError

    def build_domain(self, experiment: Experiment) -> Domain:
        """Build the data of an experiment."""
        return experiment.domain.build(experiment.seed)

    def run(self) -> int:
        """Everything that is missing, or one part (`options.only`): train, score, draw; returns an exit code."""
        only = self.options.only
        with self.interruptible():
            if only in (None, "train"):
                self.train()
            if only in (None, "score"):
                self.measure()
        if only != "train":
            self.finish()
        return self.close()

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let signals end the study at the next safe point."""
        with self.stop:
            yield
        if self.stop.requested is not None:
            raise Interrupted(self.stop.requested)

    def train(self) -> None:
        """Train what is not trained; runs that were begun are continued.

        A small network leaves most of a GPU idle, and on a CPU several threads inside one wait for each other more than
        they compute. So several runs go on at once, each in a thread with one CPU core and a CUDA stream of its own.
        Runs share nothing, so their number changes nothing but the time.
        """
        left = {run: steps for run in self.runs if (steps := run.steps_left)}
        steps = sum(left.values())
        self.note(f"{len(self.runs)} runs, {len(self.runs) - len(left)} of them trained; {steps:,} steps to train")
        self._parallel("training", steps, [(run.label, functools.partial(self._train, run)) for run in left])

    def measure(self) -> None:
        """Run the stages of all trained runs that are not recorded, then the references."""
        results, left = self.known(), dict[Trained, list[Stage]]()
        for run in self.runs:
            if run.steps_left:
                self.note(f"{run.label}: not trained yet, so not measured")
            elif stages := [stage for stage in self.stages(run) if not stage.done(results)]:
                left[run] = stages
        self.note(f"{sum(map(len, left.values()))} measurements to make")
        tasks = [(run.label, functools.partial(self._measure, run, stages)) for run, stages in left.items()]
        self._parallel("measurements", sum(stage.rows for stages in left.values() for stage in stages), tasks)
        self.run_stages("references", self.references([run for run in self.runs if not run.steps_left]))

    def run_stages(self, label: str, stages: Sequence[Stage]) -> None:
        """Run stages of no run in particular, one after the other, unless they are recorded."""
        results = self.known()
        if left := [stage for stage in stages if not stage.done(results)]:
            with self._meter(label, sum(stage.rows for stage in left)) as tick:
                for stage in left:
                    self._run_stage(stage, stage.name, tick)

    def finish(self) -> None:
        """Write and print everything that is recorded."""
        results = self.known()
        if results.rows:
            self.write(results)
            self.note(f"written: {', '.join(map(str, self.written)) or 'nothing, all is up to date'}")
        else:
            print("nothing is measured yet")

    def page(self, name: str, text: str) -> None:
        """Write a page of Markdown unless it has this content."""
        path = self.options.results / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            replace_file(path, text)
            self.written.append(path)

    def figure(self, name: str, draw: Callable[[Path], None], *, always: bool = False) -> None:
        """Draw a figure that is missing or older than the results."""
        path = self.options.results / "figures" / name
        if always or not path.exists() or path.stat().st_mtime_ns < self.results.stat().st_mtime_ns:
            draw(path)
            self.written.append(path)

    def panels(self, name: str, panels: Sequence[Sequence[Panel]], *, always: bool = False, **style: Any) -> None:
        """A figure of lines of panels; none without panels."""
        if any(panels):
            self.figure(name, lambda path: save(draw(panels, **style), path), always=always)

    def print_tables(self, tables: Iterable[Table]) -> None:
        """Print tables with their notes."""
        for table in tables:
            print_table(table)
            if table.note:
                print(table.note)

    def close(self) -> int:
        """Report what failed and what is left; returns the exit code."""
        command = self.options.command
        for label, error in self.failed.items():
            print(f"{command}: {label} failed: {error}", file=sys.stderr)
        if self.untrained or self.unmeasured:
            left = f"{self.untrained} runs not trained, {self.unmeasured} measurements not made"
            print(f"{command}: {left}: the budget is used up; the same command continues", file=sys.stderr)
        return 1 if self.failed else 0

    def known(self) -> Results:
        """Rows that are recorded."""
        return Results.load(self.results) if self.results.exists() else Results()

    def domain(self, experiment: Experiment) -> Domain:
        """The data of an experiment, built once."""
        with self._lock:
            key = experiment.domain, experiment.seed
            if key not in self._domains:
                self._domains[key] = self.build_domain(experiment)
            return self._domains[key]

    def note(self, text: str) -> None:
        """Print a line of the log."""
        if not self.options.quiet:
            print(text, file=sys.stderr, flush=True)

    @property
    def past_deadline(self) -> bool:
        """Whether the budget is used up."""
        return self.deadline is not None and time.monotonic() >= self.deadline

    @contextlib.contextmanager
    def _meter(self, label: str, total: int) -> Iterator[Tick]:
        """A progress bar with a lock, for several threads."""
        with meter(total, label, quiet=self.options.quiet) as tick:

            def locked(size: int, text: str) -> None:
                with self._lock:
                    tick(size, text)

            yield locked

    def _parallel(self, label: str, total: int, tasks: Sequence[tuple[str, Task]]) -> None:
        """Run labelled tasks in `jobs` threads."""
        if not tasks:
            return
        with self._meter(label, total) as tick, ThreadPoolExecutor(self.jobs, initializer=self._start_thread) as pool:
            futures = [pool.submit(self._attempt, name, task, tick) for name, task in tasks]
            try:
                for future in as_completed(futures):
                    future.result()
            except BaseException:
                self.stop.ask()
                raise

    def _start_thread(self) -> None:
        """One core and one CUDA stream for a thread, kept over its tasks: streams come from a pool of few."""
        torch.set_num_threads(1)
        self._local.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def _attempt(self, label: str, task: Task, tick: Tick) -> None:
        stream = self._local.stream
        if self.stop.requested is None:
            with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream), self._catching(label):
                task(tick)

    @contextlib.contextmanager
    def _catching(self, label: str) -> Iterator[None]:
        """Record the error of a task; the other tasks continue."""
        try:
            yield
        except Exception as error:
            self.failed[label] = str(error) or type(error).__name__

    def _train(self, run: Trained, tick: Tick) -> None:
        """Train a run to the end or the deadline, and note in its folder how long it took."""
        if not self.past_deadline:
            start = steps_done(run.path)
            callbacks: list[Callback] = [RunProgress(run.label, start, tick, self.note)]
            callbacks += [] if self.deadline is None else [Deadline(self.deadline)]
            result = train(
                run.experiment, run.path, resume=True, device=str(self.device), callbacks=callbacks, stop=self.stop,
                domain=run.domain,
            ).result  # fmt: skip
            if result is not None and result.step > start:
                part = {"from": start, "to": result.step, "seconds": round(result.seconds, 3)}
                with (run.path / TIMES).open("a", encoding="utf-8") as file:
                    file.write(json.dumps(part) + "\n")
        with self._lock:
            self.untrained += run.steps_left > 0

    def _measure(self, run: Trained, stages: Sequence[Stage], tick: Tick) -> None:
        for number, stage in enumerate(stages, 1):
            self._run_stage(stage, f"{run.label}, {stage.name} [{number}/{len(stages)}]", tick, run)
        run.close()

    def _run_stage(self, stage: Stage, label: str, tick: Tick, run: Trained | None = None) -> None:
        """Run a stage, if there is time left, and record its rows; count rows that enter the network meanwhile."""
        if self.stop.requested is not None:
            return
        if self.past_deadline and not self.measures_past_deadline:
            with self._lock:
                self.unmeasured += 1
            return
        began, counted = time.monotonic(), 0

        def count(_: object, inputs: tuple[Any, ...], __: object) -> None:
            nonlocal counted
            size = min(len(inputs[0]), stage.rows - counted)
            counted += size
            tick(size, label)

        with self._catching(label), contextlib.ExitStack() as stack:
            methods = None if run is None else described(run.run.method, run.experiment)
            if run is not None:
                stack.callback(run.run.method.backbone.register_forward_hook(count).remove)
            rows = stage.run()
            wall_s = round(time.monotonic() - self.began, 1)
            info = RunInfo(command=self.options.command_line(), wall_s=wall_s, **self._machine)
            with self._lock:
                record(self.results, info, rows, methods)
            values = ", ".join(f"{row.metric} {row.value:.4g}" for row in rows[:4])
            self.note(f"{label}: {values}, {time.monotonic() - began:.1f} s")
        tick(stage.rows - counted, label)


class RunProgress(Callback):
    """Adds the steps of one run to the common progress."""

    def __init__(self, label: str, start: int, tick: Tick, note: Callable[[str], None]):
        self.label, self.step, self.tick, self.note, self.text = label, start, tick, note, label

    def on_step(self, step: int) -> None:
        """Move the bar."""
        self.tick(step - self.step, self.text)
        self.step = step

    def on_log(self, record: dict[str, Any]) -> None:
        """Show the loss with the next step, and a warning at once."""
        self.text = f"{self.label}: loss {record['loss']:.4f}"
        if "warning" in record:
            self.note(f"{self.label}: step {record['step']}: {record['warning']}")


def mean_curve(rows: Iterable[Row], x: Callable[[Row], float | None], *, colour: str = "", style: str = "-") -> Curve:
    """Means over seeds of rows of one metric against x, with their standard errors; rows without x are left out."""
    groups: dict[float, list[Row]] = {}
    for row in rows:
        if (value := x(row)) is not None:
            groups.setdefault(value, []).append(row)
    means = {value: mean for value in sorted(groups) if (mean := mean_over_seeds(groups[value], measured=True))}
    points = [(value, mean.mean) for value, mean in means.items()]
    return Curve(points, [mean.stderr for mean in means.values()], colour=colour or None, style=style)
