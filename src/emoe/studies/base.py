"""What studies share: train a list of experiments, measure each, record the rows as they come."""

from __future__ import annotations

import hashlib
import json
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor

from emoe.config import to_dict
from emoe.evaluation.evaluate import evaluate, make_row
from emoe.evaluation.pools import Pool
from emoe.evaluation.results import Results, Row, RunInfo, describe_machine, record
from emoe.experiment import Experiment
from emoe.runs import Run, pick_device, train
from emoe.types import Measurement

Pools = dict[tuple[str, str, int, int], Int[Tensor, "n L"]]  # (data, method, seed, NFE) -> samples


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
    pools: Pools = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._began = time.monotonic()
        self._machine = describe_machine(self.device)

    def info(self) -> RunInfo:
        """Provenance of everything measured so far; its id stays the same while the study goes on."""
        return RunInfo(command=self.command, wall_s=round(time.monotonic() - self._began, 1), **self._machine)

    def add(self, rows: Sequence[Row]) -> Results:
        """Record rows at once, so that a study that is killed keeps what it has."""
        return record(self.results, self.info(), rows)

    def run(self, experiments: Sequence[Experiment]) -> Results:
        """Train and measure all experiments; finished ones are reused, unfinished ones resumed."""
        results = self.add([])
        for number, experiment in enumerate(experiments, 1):
            self.note(f"[{number}/{len(experiments)}] {experiment.name}, seed {experiment.seed}")
            results = self.one(experiment)
        return results

    def one(self, experiment: Experiment) -> Results:
        """Train and measure one experiment."""
        run = train(
            experiment, self.folder / run_name(experiment), resume=True, device=str(self.device), quiet=self.quiet
        )
        assert run.result is not None
        if run.result.signal is not None:
            raise Interrupted(run.result.signal)
        began = time.monotonic()

        def keep(pool: Pool) -> None:
            self.pools[run.domain.name, experiment.method.kind, experiment.seed, pool.nfe] = pool.samples

        rows = evaluate(run.method, run.domain, experiment, keep=keep)
        if run.result.seconds > 1:  # a finished run that was only reopened says nothing about training time
            spent = Measurement("train_s", round(run.result.seconds, 2), None, experiment.train.steps)
            rows.append(make_row(spent, run.domain, experiment, nfe=None))
        self.runs.append(run)
        first = [f"{row.metric} {row.value:.1f}" for row in rows if row.nfe == min(experiment.eval.nfe)]
        self.note(
            f"    trained in {run.result.seconds:.1f} s, measured in {time.monotonic() - began:.1f} s; "
            f"NFE {min(experiment.eval.nfe)}: {', '.join(first)}"
        )
        return self.add(rows)

    def note(self, text: str) -> None:
        """Say what is going on."""
        if not self.quiet:
            print(text, file=sys.stderr, flush=True)


def run_name(experiment: Experiment) -> str:
    """Folder of an experiment: readable, and different for every difference in what it says."""
    digest = hashlib.sha256(json.dumps(to_dict(experiment), sort_keys=True).encode()).hexdigest()[:8]
    return f"{experiment.name}-seed{experiment.seed}-{digest}"


def make_study(command: str, words: list[str], *, folder: Path, results: Path, device: str, quiet: bool) -> Study:
    """A study of a command line."""
    text = shlex.join(["emoe", *command.split(), *words])
    return Study(folder, results, text, pick_device(device), quiet)
