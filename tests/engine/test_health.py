"""Runs that have stopped to learn: a warning once, or the end, at the same line however the run was interrupted."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from emoe.cli import main
from emoe.console import Progress
from emoe.engine import checkpoint
from emoe.engine.metricslog import read_metrics
from emoe.engine.optim import OptimConfig
from emoe.engine.trainer import GRACE, PATIENCE, DeadRun, TrainConfig, fit
from emoe.methods.base import MaskedDiffusion
from emoe.methods.emoe import EMoEConfig
from emoe.methods.mdlm import MDLMConfig
from emoe.rng import Rng
from emoe.types import Loss

STEPS = 100
FIRST = int(GRACE * STEPS) + PATIENCE  # the first step at which a run can be found dead


class Point(nn.Module):
    """One weight, and a number in the log that is 1 at chosen steps."""

    def __init__(self, ill: Sequence[int]):
        super().__init__()
        self.weight, self.ill = nn.Parameter(torch.ones(1)), set(ill)

    def forward(self, batch: Tensor, knobs: Mapping[str, Tensor], rng: Rng) -> Loss:
        total = self.weight.square().sum()
        return Loss(total, {"loss": total, "ill": torch.tensor(float(rng.step + 1 in self.ill))})


def judge(log: Mapping[str, Any]) -> str | None:
    return "it is ill; try rest" if log["ill"] else None


def run(folder: Path, ill: Sequence[int], *, stop: bool = False, resume: bool = False) -> str:
    shown = io.StringIO()
    config = TrainConfig(
        steps=STEPS, batch=1, precision="fp32", log_every=1, save_every=10, keep=20, stop_when_dead=stop
    )
    fit(
        Point(ill), lambda step: torch.zeros(1, 1), {}, optim=OptimConfig(), train=config, rng=Rng(0), run_dir=folder,
        resume=resume, health=judge, progress=Progress(STEPS, stream=shown),
    )  # fmt: skip
    return shown.getvalue()


def warned(folder: Path) -> list[int]:
    return [record["step"] for record in read_metrics(folder / "metrics.jsonl") if "warning" in record]


def test_a_warning_is_given_once(tmp_path: Path) -> None:
    text = run(tmp_path, range(1, 101))
    assert warned(tmp_path) == [FIRST]
    assert text.count("warning") == 1 and f"warning: step {FIRST}: it is ill; try rest\n" in text


@pytest.mark.parametrize(
    ("ill", "expected"),
    [
        (range(FIRST), []),
        ([*range(20, 20 + PATIENCE - 1), *range(60, 60 + PATIENCE - 1)], []),
        ([*range(20, 20 + PATIENCE - 1), *range(60, 60 + PATIENCE)], [60 + PATIENCE - 1]),
        ([*range(20, 20 + PATIENCE), *range(60, 60 + PATIENCE)], [20 + PATIENCE - 1]),
    ],
    ids=["early", "short", "long-enough", "twice"],
)
def test_when_it_is_given(ill: Sequence[int], expected: list[int], tmp_path: Path) -> None:
    run(tmp_path, ill)
    assert warned(tmp_path) == expected


def test_a_run_can_stop_and_go_on(tmp_path: Path) -> None:
    with pytest.raises(DeadRun, match=f"step {FIRST}: it is ill; try rest. It is saved; resume with") as caught:
        run(tmp_path / "run", range(1, 101), stop=True)
    assert caught.value.exit_code == 4
    saved = checkpoint.load_latest(tmp_path / "run" / "checkpoints")
    assert saved is not None and saved.step == FIRST and warned(tmp_path / "run") == [FIRST]
    with pytest.raises(DeadRun, match=f"step {FIRST + 1}:"):
        run(tmp_path / "run", range(1, 101), stop=True, resume=True)
    assert "warning" not in run(tmp_path / "run", range(1, 101), resume=True)
    run(tmp_path / "whole", range(1, 101))
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == (tmp_path / "whole/metrics.jsonl").read_bytes()


def test_an_interruption_does_not_move_it(tmp_path: Path) -> None:
    """The lines before the last checkpoint count: a run killed at any moment is found dead at the same step."""
    ill = range(35, 101)
    with pytest.raises(DeadRun):
        run(tmp_path / "whole", ill, stop=True)
    whole = (tmp_path / "whole/metrics.jsonl").read_bytes()
    assert len(whole.splitlines()) == 34 + PATIENCE
    run(tmp_path / "run", ill)
    for folder in sorted((tmp_path / "run/checkpoints").glob("step-*"))[4:]:  # as if killed after step 40
        folder.rename(tmp_path / folder.name)
    with pytest.raises(DeadRun):
        run(tmp_path / "run", ill, stop=True, resume=True)
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == whole


Tiny = Callable[..., MaskedDiffusion]


def line(usage: Sequence[Sequence[float]], kl: Sequence[float]) -> dict[str, Any]:
    log: dict[str, Any] = {"loss": 1.0}
    for d, (shares, nats) in enumerate(zip(usage, kl, strict=True), 1):
        log |= {f"usage/block{d}": list(shares), f"route_kl/block{d}": nats, f"route_kl_at/block{d}": [nats]}
    return log


EVEN, LONE = [0.25] * 4, [0.99, 0.01, 0.0, 0.0]


@pytest.mark.parametrize(
    ("usage", "kl", "expected"),
    [
        ([EVEN, EVEN], [0.1, 0.1], None),
        ([LONE, EVEN], [0.1, 0.1], None),
        ([LONE, LONE], [0.1, 0.1], "nearly all the work in each of the blocks 1, 2 (entropy of usage at most 0.056"),
        ([EVEN, EVEN], [0.0, 2e-4], None),
        ([EVEN, EVEN], [0.0, 9e-5], "nothing of the clean row in each of the blocks 1, 2 (KL at most 9e-05 nats"),
        ([EVEN], [0.0], "in block 1 (KL at most 0 nats per position)"),
        ([EVEN, EVEN], [math.nan, 0.0], None),
    ],
)
def test_dead_routers(usage: Any, kl: Any, expected: str | None, tiny: Tiny) -> None:
    said = tiny(EMoEConfig(experts=4)).health(line(usage, kl))
    assert said is None if expected is None else said is not None and expected in said
    if said is not None:
        assert all(name in said for name in ("method.balance", "method.kl_weight", "method.estimator"))


def test_who_has_no_routers_is_well(tiny: Tiny) -> None:
    assert tiny(MDLMConfig()).health({"loss": 1.0, "kl": 0.0}) is None
    assert tiny(EMoEConfig(experts=1, top_k=1)).health(line([[1.0]], [0.0])) is None


def test_a_block_that_is_summed_out_has_no_say(tiny: Tiny) -> None:
    """It has no posterior: its usage is the prior's, and it has no KL."""
    log = line([LONE], [0.5]) | {"usage/block2": EVEN, "prior_entropy/block2": 1.0}
    said = tiny(EMoEConfig(experts=4, last_block="summed")).health(log)
    assert said is not None and "in block 1 " in said


def test_it_reads_what_a_step_logs(tiny: Tiny) -> None:
    method = tiny(EMoEConfig(experts=4))
    knobs = {name: torch.tensor(ramp(0, 1)) for name, ramp in method.ramps.items()}
    rows = torch.tensor([[0, 2], [2, 2], [0, 0], [2, 0]])
    assert method.health(values(method(rows, knobs, Rng(0)))) is None
    with torch.no_grad():
        for name, p in method.named_parameters():
            if ".router." in name:
                p.zero_()
    said = method.health(values(method(rows, knobs, Rng(0))))
    assert said is not None and "KL at most 0 nats" in said


def values(loss: Loss) -> dict[str, Any]:
    return {name: value.tolist() for name, value in loss.log.items()}


def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A weight of the KL that leaves routes no use, which is what happens to the plain objective on some data."""
    words = ["--domain.points", "300", "--backbone.width", "8", "--backbone.hidden", "16", "--backbone.heads", "2"]
    words += ["--backbone.time-size", "8", "--train.batch", "8", "--train.steps", "40", "--train.log-every", "1"]
    command = ["train", "toy-8modes-emoe", *words, "--method.kl-weight", "1000", "--device", "cpu"]
    assert main([*command, "--run", str(tmp_path / "a")]) == 0
    assert capsys.readouterr().err.count("warning: step 14: the routers are dead: routes tell nothing") == 1
    stopping = [*command, "--run", str(tmp_path / "b"), "--train.stop-when-dead", "true", "--quiet"]
    assert main(stopping) == 4
    told = capsys.readouterr().err
    assert told.startswith("emoe train: step 14: the routers are dead") and told.count("\n") == 1
    assert [json.loads(one)["step"] for one in (tmp_path / "b/metrics.jsonl").read_text().splitlines()][-1] == 14
    assert main([*stopping[:-2], "false", "--resume"]) == 0
    assert (tmp_path / "a/metrics.jsonl").read_bytes() == (tmp_path / "b/metrics.jsonl").read_bytes()
