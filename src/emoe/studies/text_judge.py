"""The judge of the text study: an autoregressive run on text that no model saw, kept where its held-out loss is lowest.

The run folder is one like any other and resumes like any other. Beside it lies a folder that ends in `-best`, a run
too: the checkpoint with the lowest loss on the validation rows of the judge's own text.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from emoe.console import Progress
from emoe.domains.base import DataError
from emoe.domains.text.data import Text
from emoe.engine import checkpoint
from emoe.engine.signals import StopSignal
from emoe.evaluation.likelihood import estimate_nll
from emoe.experiment import Experiment
from emoe.files import replace_file
from emoe.runs import load_run, train
from emoe.studies.base import Interrupted, Until, run_name, steps_done
from emoe.types import Convention

CHECKS = 8  # looks at the validation rows in the course of training: each saves and opens a checkpoint
PATIENCE = 3  # looks without a lower loss, after which training ends
LOOKS = "held-out.jsonl"
EXACT = Convention.parse("exact")


class Look(NamedTuple):
    """The loss of the validation rows after a step, in nats per token."""

    step: int
    nll: float


@contextmanager
def full_precision() -> Iterator[None]:
    """Products in single precision, as the paper evaluates, whatever a training run in this process has set."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@dataclass
class JudgeRun:
    """Trains the judge, looks at its validation rows, keeps the best step."""

    experiment: Experiment
    folder: Path  # of all runs
    device: torch.device
    quiet: bool = False
    looks: list[Look] = field(default_factory=list)

    def __post_init__(self) -> None:
        file = self.run / LOOKS
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        self.looks = [Look(**json.loads(line)) for line in lines]

    @property
    def run(self) -> Path:
        """The run folder."""
        return self.folder / run_name(self.experiment)

    @property
    def best_run(self) -> Path:
        """The run folder of the best step."""
        return self.folder / f"{run_name(self.experiment)}-best"

    @property
    def best(self) -> Look | None:
        """The look with the lowest loss."""
        return min(self.looks, key=lambda look: look.nll, default=None)

    @property
    def exhausted(self) -> bool:
        """Whether the last looks brought nothing."""
        return self.best is not None and len(self.looks) - 1 - self.looks.index(self.best) >= PATIENCE

    @property
    def finished(self) -> bool:
        """Whether nothing is left to train."""
        if self.best is None or steps_done(self.best_run) != self.best.step:
            return False
        return self.exhausted or self.looks[-1].step >= self.experiment.train.steps

    def train(self, text: Text, deadline: float | None = None) -> bool:
        """Train until the end, or until the loss no longer falls; False if the deadline came first.

        Args:
            text: The judge's text, its validation rows held out.
            deadline: Of `time.monotonic()`; training is then stopped and saved.

        Raises:
            DataError: The best step was removed, or lost its files.
        """
        done = steps_done(self.run)
        self.looks = [look for look in self.looks if look.step <= done]  # a run that lost steps looks again
        self.look(text)
        if self.best is not None and steps_done(self.best_run) != self.best.step:
            raise DataError(f"{self.best_run}: is not whole; remove it and {self.run} to train the judge again")
        with StopSignal() as stop:
            late = Until(stop, deadline)
            while not self.finished and late.requested is None:
                watch = Watch(self, text, stop)
                train(
                    self.experiment, self.run, resume=True, device=str(self.device), stop=Until(watch.stop, deadline),
                    progress=watch, domain=text,
                )  # fmt: skip
                self.look(text)
            if stop.requested is not None:
                raise Interrupted(stop.requested)
        return self.finished

    def look(self, text: Text) -> None:
        """Measure the newest checkpoint, unless that was done, and keep it if it is the best."""
        newest = checkpoint.latest(self.run / "checkpoints")
        if newest is None:
            return
        step = int(newest.name.removeprefix("step-"))
        if step % self.experiment.train.save_every and step < self.experiment.train.steps:
            return  # where a signal or a deadline stopped the run: a look there would change which step is the best
        if step not in [look.step for look in self.looks]:
            run = load_run(self.run, device=str(self.device), domain=text)
            with full_precision():
                nll = estimate_nll(run.method, text.test_rows.long(), EXACT)
            self.looks.append(Look(step, nll.value / text.space.length))
            lines = "".join(json.dumps(look._asdict()) + "\n" for look in self.looks)
            replace_file(self.run / LOOKS, lines.encode())
        if self.best is not None and self.best.step == step:
            self._keep(newest)

    def _keep(self, newest: Path) -> None:
        """Make a checkpoint the only one of the folder of the best step; files are linked, not copied."""
        target = self.best_run / "checkpoints" / newest.name
        if not target.exists():
            draft = target.with_name(f".tmp-{newest.name}")
            shutil.rmtree(draft, ignore_errors=True)
            shutil.copytree(newest, draft, copy_function=_link)
            replace_file(self.best_run / "experiment.json", (self.run / "experiment.json").read_bytes())
            draft.rename(target)
        for other in target.parent.glob("step-*"):
            if other != target:
                shutil.rmtree(other)


class Watch(Progress):
    """Progress of the judge that looks at the validation rows after every checkpoint."""

    def __init__(self, judge: JudgeRun, text: Text, stop: StopSignal):
        total = judge.experiment.train.steps
        super().__init__(total, steps_done(judge.run), judge.experiment.name.partition(" ")[0], quiet=judge.quiet)
        self.judge, self.text = judge, text
        self.stop = _Either(stop)
        self.seen = -1

    def update(self, step: int) -> None:
        """Show a step; the checkpoint before it, if there is a new one, is looked at."""
        super().update(step)
        self._look(step)

    def log(self, step: int, text: str = "") -> None:
        """The same with a line."""
        super().log(step, text)
        self._look(step)

    def _look(self, step: int) -> None:
        # A checkpoint is written after its step was shown: the next step finds it.
        number = (step - 1) // self.judge.experiment.train.save_every
        if number == self.seen:
            return
        self.seen = number
        before = len(self.judge.looks)
        self.judge.look(self.text)
        if len(self.judge.looks) > before:
            look, best = self.judge.looks[-1], self.judge.best
            assert best is not None
            self.note(f"held-out loss {look.nll:.4f} nats per token at step {look.step}; best at step {best.step}")
        if self.judge.exhausted:
            self.stop.ask()


class _Either(StopSignal):
    """A stop that is asked for here, or by another one."""

    def __init__(self, other: StopSignal):
        super().__init__()
        self.other = other

    @property
    def requested(self) -> int | None:
        return self.other.requested or super().requested


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another disk, or one without links
        shutil.copy2(source, target)
