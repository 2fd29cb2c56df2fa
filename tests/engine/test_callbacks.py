"""Callbacks: order of calls, early ends, posterior collapse at the same step with any interval of log records."""

from __future__ import annotations

import math
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from line import Line, fit_line
from processes import logged, outcome
from small import TOY, trained

from emoe.config import ConfigError
from emoe.engine import callbacks, checkpoint
from emoe.engine.callbacks import Callback, CollapseError, EarlyStopping, FitInfo, FitResult, StopSignal
from emoe.methods.emoe import EMoEConfig
from emoe.methods.masked import MaskedDiffusion
from emoe.methods.mdlm import MDLMConfig
from emoe.routing.compare import CompareConfig

Tiny = Callable[..., MaskedDiffusion]


class Recorder(Callback):
    """Keeps all calls, adds a key to every record, and fails in the method named `fails`."""

    def __init__(self, fails: str = ""):
        self.calls: list[tuple[str, Any]] = []
        self.fails = fails

    def _keep(self, name: str, value: Any) -> None:
        self.calls.append((name, value))
        if name == self.fails:
            raise KeyError(name)

    def on_start(self, info: FitInfo) -> None:
        self._keep("start", (info.start, info.total))

    def on_step(self, step: int) -> None:
        self._keep("step", step)

    def on_log(self, record: dict[str, Any]) -> None:
        record["twice"] = 2 * record["step"]
        self._keep("log", record["step"])

    def on_checkpoint(self, step: int, folder: Path) -> None:
        assert folder.name == f"step-{step:09d}" and folder.exists()
        self._keep("checkpoint", step)

    def on_end(self, result: FitResult | None) -> None:
        self._keep("end", result if result is None else result.step)


def test_calls_come_in_order_and_keys_reach_the_log(tmp_path: Path) -> None:
    recorder, again = Recorder(), Recorder()
    fit_line(Line(), tmp_path, 4, callbacks=[recorder], log_every=2, save_every=3)
    called = " ".join(f"{name}={value}" for name, value in recorder.calls)
    assert called == "start=(0, 4) step=1 step=2 log=2 step=3 checkpoint=3 step=4 log=4 checkpoint=4 end=4"
    assert [(record["step"], record["twice"]) for record in logged(tmp_path)] == [(2, 4), (4, 8)]
    fit_line(Line(), tmp_path, 6, callbacks=[again], resume=True)
    assert again.calls[:2] == [("start", (4, 6)), ("step", 5)]


@pytest.mark.parametrize("fails", ["start", "step", "log", "checkpoint"])
def test_the_end_is_called_once_after_an_error_too(fails: str, tmp_path: Path) -> None:
    first, second, third = Recorder(), Recorder(fails), Recorder()
    with pytest.raises(KeyError, match=fails):
        fit_line(Line(), tmp_path, 5, callbacks=[first, second, third])
    for recorder in (first, second):
        assert [call for call in recorder.calls if call[0] == "end"] == [("end", None)]
    assert third.calls == [] if fails == "start" else third.calls[-1] == ("end", None)
    fit_line(Line(), tmp_path, 5, resume=True)  # the folder is free, and the run goes on


def test_a_deadline_and_a_signal_end_a_run_cleanly(tmp_path: Path) -> None:
    stop = StopSignal()

    class Ask(Callback):
        def on_step(self, step: int) -> None:
            if step == 3:
                stop.ask()

    result = fit_line(Line(), tmp_path / "a", 9, callbacks=[callbacks.Deadline(time.monotonic())])
    assert (result.step, result.signal) == (0, None) and result.stop is not None and "time" in result.stop.reason
    result = fit_line(Line(), tmp_path / "b", 9, callbacks=[Ask(), stop, callbacks.Deadline(math.inf)])
    assert (result.step, result.signal) == (3, signal.SIGTERM)
    for folder in ("a", "b"):
        assert fit_line(Line(), tmp_path / folder, 9, resume=True).step == 9
    assert outcome(tmp_path / "a") == outcome(tmp_path / "b")


class Score(Callback):
    """A number that falls to step 4 and is not in every record."""

    def on_log(self, record: dict[str, Any]) -> None:
        if record["step"] % 2 == 0:
            record["score"] = abs(record["step"] - 4.0) if record["step"] < 8 else math.nan


def test_early_stopping_counts_records_that_hold_the_number_also_over_a_resumption(tmp_path: Path) -> None:
    fit_line(Line(), tmp_path / "parts", 7, callbacks=[Score()])
    for folder, resume in (("whole", False), ("parts", True)):
        result = fit_line(Line(), tmp_path / folder, 50, callbacks=[Score(), EarlyStopping("score", 3)], resume=resume)
        assert result.step == 10 and result.stop is not None
        assert result.stop.reason == "score has not improved since step 4"


def test_the_progress_bar_shows_notes_losses_and_warnings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    notes, bar = ("CUDA graphs are off with several ranks",), callbacks.ProgressBar("name")
    bar.on_start(FitInfo(4, 0, tmp_path, torch.device("cpu"), notes))
    bar.on_log({"step": 2, "loss": 0.25, "warning": "careful"})
    bar.on_end(None)
    note, warning, line = capsys.readouterr().err.splitlines()
    assert note == f"name: {notes[0]}" and warning == "name: warning: step 2: careful"
    assert line.startswith("name: step 2/4 (50.0%)") and line.endswith("| loss 0.2500")


@pytest.mark.parametrize(
    ("callback", "module", "message"),
    [
        (callbacks.TensorBoard(), "torch.utils.tensorboard", r"tensorboard: .*pip install emoe\[track\]"),
        (callbacks.WandB(), "wandb", r"wandb: the package is missing; pip install wandb"),
    ],
)
def test_a_missing_package_is_named(
    callback: Callback, module: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=message):
        fit_line(Line(), tmp_path, 2, callbacks=[callback])


@pytest.mark.filterwarnings("ignore")  # of tensorboard's own making
def test_numbers_reach_tensorboard(tmp_path: Path) -> None:
    record = {"step": 4, "loss": 0.5, "skipped": 2, "usage": [0.5], "warning": "text", "flag": True}
    assert callbacks.scalars(record) == {"loss": 0.5, "skipped": 2}
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    fit_line(Line(), tmp_path, 2, callbacks=[callbacks.TensorBoard()])
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    expected = [(record["step"], pytest.approx(record["loss"])) for record in logged(tmp_path)]
    assert [(event.step, event.value) for event in events.Scalars("loss")] == expected


def fit_ill(folder: Path, ill: Iterable[int], *, steps: int = 100, stop: bool = False, **options: Any) -> FitResult:
    watch = callbacks.CollapseWarning(lambda record: "it is ill; try rest" if record["ill"] else None, stop=stop)
    return fit_line(Line(ill=ill), folder, steps, callbacks=[watch], save_every=10, keep=20, **options)


def warned(folder: Path) -> list[int]:
    return [record["step"] for record in logged(folder) if "warning" in record]


@pytest.mark.parametrize(
    ("ill", "expected"),
    [
        (range(15), []),  # early
        ([*range(20, 24), *range(60, 64)], []),  # short
        ([*range(20, 24), *range(60, 90)], [64]),
        ([*range(20, 30), *range(60, 90)], [24]),  # twice
    ],
)
def test_a_warning_is_given_once_when_it_has_lasted(ill: Sequence[int], expected: list[int], tmp_path: Path) -> None:
    fit_ill(tmp_path, ill)
    assert warned(tmp_path) == expected


@pytest.mark.parametrize("log_every", [1, 10, 50])
def test_the_interval_of_the_log_hardly_moves_it(log_every: int, tmp_path: Path) -> None:
    fit_ill(tmp_path, range(1, 251), steps=250, log_every=log_every)
    (step,) = warned(tmp_path)
    assert 35 < step <= 35 + 2 * log_every


def test_an_interruption_does_not_move_it_and_a_stopped_run_can_go_on(tmp_path: Path) -> None:
    ill, parts = range(35, 101), tmp_path / "parts"
    with pytest.raises(CollapseError, match="step 39: it is ill; try rest. It is saved; resume with") as caught:
        fit_ill(tmp_path / "whole", ill, stop=True)
    assert caught.value.exit_code == 4 and warned(tmp_path / "whole") == [39]
    saved = checkpoint.load_latest(tmp_path / "whole/checkpoints")
    assert saved is not None and saved.step == 39
    fit_ill(parts, ill)
    for folder in sorted((parts / "checkpoints").glob("step-*"))[3:]:  # as if killed after step 30
        folder.rename(tmp_path / folder.name)
    for _ in range(2):  # a stopped run that resumes unchanged stops again
        with pytest.raises(CollapseError, match="step 39"):
            fit_ill(parts, ill, stop=True, resume=True)
        assert outcome(parts) == outcome(tmp_path / "whole")
    fit_ill(parts, ill, resume=True)
    fit_ill(tmp_path / "unbroken", ill)
    assert outcome(parts) == outcome(tmp_path / "unbroken")


def test_a_run_of_routes_without_use(tmp_path: Path) -> None:
    """A weight of the KL that leaves routes no use, which is what happens to the plain objective on some data."""
    settings = TOY | {"train.steps": 40, "method.kl_weight": 1000, "train.stop_on_collapse": True}
    with pytest.raises(CollapseError, match="posterior collapse: routes carry no information"):
        trained("toy-8modes-emoe", tmp_path, settings)
    (step,) = warned(tmp_path)
    assert logged(tmp_path)[-1]["step"] == step < 12
    run = trained("toy-8modes-emoe", tmp_path, settings | {"train.stop_on_collapse": False}, resume=True)
    assert run.step == 40 and warned(tmp_path) == [step]


EVEN, LONE = [0.25] * 4, [0.99, 0.01, 0.0, 0.0]


def record_of(usage: Sequence[Sequence[float]], kl: Sequence[float]) -> dict[str, Any]:
    shares = {f"usage/block{d}": list(block) for d, block in enumerate(usage, 1)}
    return shares | {f"route_kl/block{d}": nats for d, nats in enumerate(kl, 1)}


@pytest.mark.parametrize(
    ("usage", "kl", "expected"),
    [
        ([EVEN, EVEN], [0.1, 0.1], None),
        ([LONE, EVEN], [0.1, 0.1], None),
        ([LONE, LONE], [0.1, 0.1], "nearly all the work in each of the blocks 1, 2 (entropy of usage at most 0.056"),
        ([EVEN, EVEN], [0.0, 2e-4], None),
        ([EVEN, EVEN], [0.0, 9e-5], "about the clean row in each of the blocks 1, 2 (KL at most 9e-05 nats"),
        ([EVEN, EVEN], [math.nan, 0.0], None),
    ],
)
def test_collapse_in_a_record(usage: Any, kl: Any, expected: str | None, tiny: Tiny) -> None:
    text = tiny(EMoEConfig(experts=4)).collapse(record_of(usage, kl))
    assert text is None if expected is None else text is not None and expected in text
    if text is not None:
        assert all(name in text for name in ("method.balance", "method.kl_weight", "method.compare"))


def test_collapse_of_other_methods(tiny: Tiny) -> None:
    assert tiny(MDLMConfig()).collapse({"loss": 1.0, "kl": 0.0}) is None
    assert tiny(EMoEConfig(experts=1, top_k=1)).collapse(record_of([[1.0]], [0.0])) is None
    # A block that is summed out has no posterior: its usage is the prior's, and it has no KL.
    summed = EMoEConfig(experts=4, compare=CompareConfig(estimator="vimco", draws=2, sum_last=True))
    assert "in block 1 " in str(tiny(summed).collapse(record_of([LONE], [0.5]) | {"usage/block2": EVEN}))
