"""The pipeline of a study: plan, train what is missing, measure in stages, write tables and figures.

Every stage records its rows at once, so a study that is killed continues with the same command.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from emoe.console import Tick, meter
from emoe.domains.base import Domain, DomainConfig
from emoe.engine.callbacks import Callback, Deadline, StopSignal
from emoe.evaluation.measure import Fields, described
from emoe.experiment import Experiment
from emoe.figures.base import save
from emoe.figures.curves import Curve, Panel, draw
from emoe.files import replace_file
from emoe.reporting.docs import PAGES
from emoe.reporting.provenance import describe_machine
from emoe.reporting.results import Results, Row, RunInfo, mean_over_seeds, record
from emoe.reporting.table import Table, markdown, print_table
from emoe.runs.train import pick_device, train
from emoe.studies.options import Options
from emoe.studies.stages import TIMES, Stage, Trained, steps_done

Task = Callable[[Tick], None]


class Study:
    """Runs to train, their measurements, and pages and figures of the results.

    Subclasses override `experiments`, `stages`, `write` and, where needed, `build_domain`.
    """

    gpu_jobs = 6  # runs at once on a GPU, unless the options say otherwise
    measures_past_deadline = False  # whether trained runs are measured after the budget is used up
    writing_parts: Sequence[str | None] = (None, "score", "draw")  # after which pages and figures are written

    def __init__(self, options: Options):
        self.options, self.device = options, pick_device(options.device)
        self.jobs = options.jobs or (self.gpu_jobs if self.device.type == "cuda" else torch.get_num_threads())
        self.results = options.results / f"{options.stem}.json"
        self.failed: dict[str, str] = {}  # label -> the error that ended it
        self.untrained = self.unmeasured = 0  # runs and stages that are left when the budget is used up
        self.stop, self.began, self._machine = StopSignal(), time.monotonic(), describe_machine(self.device)
        self.deadline = math.inf if options.budget is None else self.began + 60 * options.budget
        self.written: list[Path] = []  # pages and figures that have changed
        self._lock, self._domain = threading.RLock(), functools.cache(self.build_domain)
        experiments = self.experiments()
        labels = experiments if isinstance(experiments, Mapping) else dict.fromkeys(experiments, "")
        self.runs = [Trained(self, experiment, label) for experiment, label in labels.items()]

    def experiments(self) -> Mapping[Experiment, str] | Sequence[Experiment]:
        """Experiments to train, with labels for the log if these are not the recipe and the seed."""
        raise NotImplementedError

    def stages(self, run: Trained) -> list[Stage]:
        """Stages of a trained run and of references such as real data, which run once if several runs have them."""
        raise NotImplementedError

    def write(self, results: Results) -> None:
        """Write figures and further pages of all results, and print the main tables."""
        raise NotImplementedError

    def build_domain(self, config: DomainConfig, seed: int) -> Domain:
        """Build the data of runs."""
        return config.build(seed)

    def run(self) -> int:
        """Do the missing work, or one part of it (`options.only`), and write pages; return an exit code."""
        with self.stop:
            self.work()
        if self.stop.requested is not None:
            print(f"{self.options.command}: stopped and saved; the same command continues", file=sys.stderr)
            return 128 + self.stop.requested
        if self.options.only in self.writing_parts:
            self.finish()
        return self.close()

    def work(self) -> None:
        """Train and measure."""
        if self.wants("train"):
            self.train()
        if self.wants("score"):
            self.measure()

    def wants(self, part: str) -> bool:
        """Whether a part is to run."""
        return self.options.only in (None, part)

    def train(self) -> None:
        """Train all unfinished runs, from their newest checkpoints.

        A small network leaves most of a GPU idle, and on a CPU the threads of one network wait for each other more than
        they compute. So several runs train at once, each in a thread with one CPU core and a CUDA stream of its own.
        They share nothing, so their number does not change the results.
        """
        left = {run: steps for run in self.runs if (steps := run.steps_left)}
        steps = sum(left.values())
        self.note(f"{len(self.runs)} runs, {len(self.runs) - len(left)} of them trained; {steps:,} steps to train")
        self._parallel("training", steps, {run: functools.partial(self._train, run) for run in left})

    def measure(self) -> None:
        """Run the stages of all trained runs that are not recorded."""
        results, tasks, todo, seen = self.known(), dict[Trained, Task](), list[Stage](), list[Sequence[Fields]]()
        for run in self.runs:
            if run.steps_left:
                self.note(f"{run.label}: not trained yet, so not measured")
                continue
            new = [stage for stage in self.stages(run) if stage.wanted not in seen]
            seen += [stage.wanted for stage in new]
            if own := [stage for stage in new if not stage.done(results)]:
                todo, tasks[run] = todo + own, functools.partial(self._measure, own, run=run)
        self.note(f"{len(todo)} measurements to make")
        self._parallel("measurements", sum(stage.rows for stage in todo), tasks)

    def run_stages(self, label: str, stages: Sequence[Stage]) -> None:
        """Run stages that belong to no single run, one after the other, unless they are recorded."""
        results = self.known()
        left = [stage for stage in stages if not stage.done(results)]
        with meter(sum(stage.rows for stage in left), label, quiet=self.options.quiet) as tick:
            self._measure(left, tick)

    def finish(self) -> None:
        """Write and print all results."""
        results, stem = self.known(), self.options.stem
        if results.rows:
            if stem in PAGES:
                self.page(f"{stem}.md", markdown(PAGES[stem](results)))
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

    def figure(self, name: str, draw: Callable[[Path], None]) -> None:
        """Draw a figure that is missing or older than the results, or with `--only draw`."""
        path = self.options.results / "figures" / name
        fresh = path.exists() and path.stat().st_mtime_ns >= self.results.stat().st_mtime_ns
        if self.options.only == "draw" or not fresh:
            draw(path)
            self.written.append(path)

    def panels(self, name: str, panels: Sequence[Sequence[Panel]], **style: Any) -> None:
        """A figure of lines of panels; none without panels."""
        if any(panels):
            self.figure(name, lambda path: save(draw(panels, **style), path))

    def print_tables(self, tables: Iterable[Table]) -> None:
        """Print tables with their notes."""
        for table in tables:
            print_table(table)
            if table.note:
                print(table.note)

    def close(self) -> int:
        """Print failures and missing work; return the exit code."""
        command = self.options.command
        for label, error in self.failed.items():
            print(f"{command}: {label} failed: {error}", file=sys.stderr)
        if self.untrained or self.unmeasured:
            left = f"{self.untrained} runs not trained, {self.unmeasured} measurements not made"
            print(f"{command}: {left}: the budget is used up; the same command continues", file=sys.stderr)
        return 1 if self.failed else 0

    def known(self) -> Results:
        """The recorded results."""
        return Results.load(self.results) if self.results.exists() else Results()

    def domain(self, experiment: Experiment) -> Domain:
        """The data of an experiment, built once."""
        with self._lock:
            return self._domain(experiment.domain, experiment.seed)

    def note(self, text: str) -> None:
        """Print a line of the log."""
        if not self.options.quiet:
            print(text, file=sys.stderr, flush=True)

    @property
    def past_deadline(self) -> bool:
        """Whether the budget is used up."""
        return time.monotonic() >= self.deadline

    def _parallel(self, label: str, total: int, tasks: Mapping[Trained, Task]) -> None:
        """Run the tasks of runs in `jobs` threads."""
        threads = ThreadPoolExecutor(self.jobs, initializer=self._start_thread)
        with meter(total, label, quiet=self.options.quiet) as tick, threads as pool:
            locked = functools.partial(self._tick, tick)
            futures = [pool.submit(self._attempt, run.label, task, locked) for run, task in tasks.items()]
            try:
                for future in as_completed(futures):
                    future.result()
            except BaseException:
                self.stop.ask()
                raise

    def _tick(self, tick: Tick, size: int, text: str) -> None:
        with self._lock:
            tick(size, text)

    def _start_thread(self) -> None:
        """Give a thread one core and, for all its tasks, one CUDA stream: streams come from a small pool."""
        torch.set_num_threads(1)
        if self.device.type == "cuda":
            torch.cuda.set_stream(torch.cuda.Stream(self.device))

    def _attempt(self, label: str, task: Task, tick: Tick) -> None:
        """Run a task unless a stop is requested, and record its error; the other tasks continue."""
        try:
            if self.stop.requested is None:
                task(tick)
        except Exception as error:
            self.failed[label] = str(error) or type(error).__name__

    def _train(self, run: Trained, tick: Tick, *others: Callback) -> None:
        """Train a run to the end or the deadline, and record in its folder how long it took."""
        if not self.past_deadline:
            start = steps_done(run.path)
            callbacks = [RunProgress(run.label, start, tick, self.note), *others, Deadline(self.deadline)]
            resume = functools.partial(train, run.experiment, run.path, resume=True, device=str(self.device))
            result = resume(callbacks=callbacks, stop=self.stop, domain=run.domain).result
            if result is not None and result.step > start:
                part = {"from": start, "to": result.step, "seconds": round(result.seconds, 3)}
                with (run.path / TIMES).open("a", encoding="utf-8") as file:
                    file.write(json.dumps(part) + "\n")
        with self._lock:
            self.untrained += run.steps_left > 0

    def _measure(self, stages: Sequence[Stage], tick: Tick, run: Trained | None = None) -> None:
        """Run stages while there is time left."""
        for number, stage in enumerate(stages, 1):
            if self.past_deadline and not self.measures_past_deadline:
                with self._lock:
                    self.unmeasured += 1
                continue
            name = stage.name if run is None else f"{run.label}, {stage.name}"
            label = f"{name} [{number}/{len(stages)}]"
            self._attempt(label, functools.partial(self._run_stage, stage, label, run), tick)
        if run is not None:
            run.close()

    def _run_stage(self, stage: Stage, label: str, run: Trained | None, tick: Tick) -> None:
        """Run a stage and record its rows; the rows that enter the network are its progress."""
        left, began, methods = stage.rows, time.monotonic(), None

        def count(_: object, inputs: tuple[Any, ...], __: object) -> None:
            nonlocal left
            size = min(len(inputs[0]), left)
            left -= size
            tick(size, label)

        with contextlib.ExitStack() as stack:
            stack.callback(lambda: tick(left, label))
            if run is not None:
                methods = described(run.run)
                stack.enter_context(run.run.method.backbone.register_forward_hook(count))
            rows = stage.run()
        wall_s = round(time.monotonic() - self.began, 1)
        info = RunInfo(command=self.options.command_line(), wall_s=wall_s, **self._machine)
        with self._lock:
            record(self.results, info, rows, methods)
        values = ", ".join(f"{row.metric} {row.value:.4g}" for row in rows[:4])
        self.note(f"{label}: {values}, {time.monotonic() - began:.1f} s")


class RunProgress(Callback):
    """Adds the steps of a run to the progress of all runs."""

    def __init__(self, label: str, start: int, tick: Tick, note: Callable[[str], None]):
        self.label, self.step, self.tick, self.note, self.text = label, start, tick, note, label

    def on_step(self, step: int) -> None:
        self.tick(step - self.step, self.text)
        self.step = step

    def on_log(self, record: dict[str, Any]) -> None:
        self.text = f"{self.label}: loss {record['loss']:.4f}"
        if "warning" in record:
            self.note(f"{self.label}: step {record['step']}: {record['warning']}")


def levels(groups: Mapping[str, Sequence[Row]]) -> dict[str, float]:
    """The first number of each group of rows, for the levels of a panel."""
    return {label: float(rows[0].value) for label, rows in groups.items() if rows}


def mean_curve(
    rows: Iterable[Row], x: Callable[[Row], float | None] = attrgetter("nfe"), *, colour: str = "", style: str = "-"
) -> Curve:
    """Means over seeds of rows of one metric against x, with their standard errors; rows without x are left out."""
    groups: dict[float, list[Row]] = {}
    for row in rows:
        if (value := x(row)) is not None:
            groups.setdefault(value, []).append(row)
    means = {value: mean for value in sorted(groups) if (mean := mean_over_seeds(groups[value], measured=True))}
    points = [(value, mean.mean) for value, mean in means.items()]
    return Curve(points, [mean.stderr for mean in means.values()], colour=colour or None, style=style)
