"""Training as a whole: refused steps, precision, averaged weights, files of limited size, and learning itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import jaxtyping
import numpy as np
import pytest
import torch
from line import Line, fit_line
from processes import logged
from small import TRANSFORMER, trained
from torch import Tensor

from emoe.engine import checkpoint
from emoe.engine.fit import MAX_SKIPPED_IN_ROW, NumericFailure
from emoe.engine.metricslog import read_metrics
from emoe.rng import Rng
from emoe.runs.run import Run
from emoe.runs.train import load_run
from emoe.types import Loss

KINDS = ("mdlm", "vadd", "emoe")
NETWORK = TRANSFORMER | {"backbone.width": 16, "backbone.hidden": 32, "backbone.time_size": 16}
NETWORK |= {"train.batch": 32, "train.steps": 20, "train.precision": "fp32", "optim.lr": 1e-2}
SMALL = NETWORK | {"domain.points": 300, "train.log_every": 1}


def step_of(folder: Path, step: int) -> dict[str, dict[str, Tensor]]:
    return checkpoint.load(folder / "checkpoints" / f"step-{step:09d}").tensors


@pytest.mark.parametrize(("where", "value"), [("loss", math.nan), ("gradient", -math.inf)])
def test_a_step_that_is_not_finite_changes_nothing_also_over_a_kill(where: str, value: float, tmp_path: Path) -> None:
    """What the optimiser does with such a step is in oracles/test_optim.py."""
    bad, parts = (2, 6, 7), tmp_path / "parts"
    module = Line(**{where: dict.fromkeys(bad, value)})
    fit_line(module, tmp_path / "whole", 10)
    for step in range(9):
        assert torch.equal(module.before[step], module.before[step + 1]) == (step in bad)
    records = read_metrics(tmp_path / "whole/metrics.jsonl")
    assert [record["skipped"] for record in records] == [0, 0, 1, 1, 1, 1, 2, 3, 3, 3]
    assert not math.isfinite(records[2]["grad_norm"])
    assert step_of(tmp_path / "whole", 10)["optim"]["weight/step"].item() == 7  # Adam counts good steps only
    fit_line(Line(**{where: dict.fromkeys(bad, value)}), parts, 10)
    (parts / "checkpoints/step-000000010").rename(tmp_path / "elsewhere")
    fit_line(Line(**{where: dict.fromkeys(bad, value)}), parts, 10, resume=True)
    for name in ("metrics.jsonl", "checkpoints/step-000000010/optim.safetensors"):
        assert (parts / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_too_many_in_a_row_end_the_run_and_as_many_apart_do_not(tmp_path: Path) -> None:
    first = 7
    module = Line(loss=dict.fromkeys(range(first, 100), math.nan))
    with pytest.raises(NumericFailure, match=f"the last {MAX_SKIPPED_IN_ROW} steps had a loss") as caught:
        fit_line(module, tmp_path / "a", 100)
    assert caught.value.exit_code == 4 and "Lower optim.lr" in str(caught.value)
    assert len(logged(tmp_path / "a")) == first + MAX_SKIPPED_IN_ROW
    assert torch.equal(module.weight, module.before[first])  # those of the last good step
    saved = checkpoint.load_latest(tmp_path / "a" / "checkpoints")
    assert saved is not None and torch.equal(saved.tensors["model"]["weight"], module.before[first])
    bad = [h for h in range(60) if h % MAX_SKIPPED_IN_ROW]
    fit_line(Line(loss=dict.fromkeys(bad, math.inf)), tmp_path / "b", 60)
    assert logged(tmp_path / "b")[-1]["skipped"] == len(bad)


class Refusing(Line):
    """Steps that are not valid, for a reason of its own, from step 3 on."""

    def forward(self, batch: Tensor, ramp: Mapping[str, Tensor], rng: Rng) -> Loss:
        loss = super().forward(batch, ramp, rng)
        return Loss(loss.total, loss.log, torch.tensor(rng.step < 3), "too many masks; raise the share")


def test_steps_that_a_module_refuses(tmp_path: Path) -> None:
    module = Refusing()
    with pytest.raises(NumericFailure, match="the last 20 steps were refused: too many masks; raise the share$"):
        fit_line(module, tmp_path, 100)
    assert torch.equal(module.weight, module.before[3]) and not torch.equal(module.before[3], module.before[2])


def test_checkpoints_in_files_of_limited_size(tmp_path: Path) -> None:
    module = Line()
    for name in "abc":
        module.register_buffer(name, torch.zeros(100_000))  # 400 kB
    fit_line(module, tmp_path, 6, max_file_mb=1)
    newest = tmp_path / "checkpoints" / "step-000000006"
    files = sorted(newest.glob("*.safetensors"))
    assert [file.name.partition("-")[0] for file in files] == ["model", "model", "optim.safetensors"]
    assert max(file.stat().st_size for file in files) <= 10**6
    assert checkpoint.load(newest).tensors["model"].keys() == {"a", "b", "c", "weight"}


def losses(folder: Path, kind: str, **more: object) -> list[float]:
    trained(f"toy-8modes-{kind}", folder, SMALL | {"train.steps": 5} | more)
    return [record["loss"] for record in logged(folder)]


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_and_the_weights_that_are_opened(kind: str, tmp_path: Path) -> None:
    full = losses(tmp_path / "full", kind)
    half = losses(tmp_path / "half", kind, **{"train.precision": "bf16", "train.ema": 0.8})
    assert full != half and half == pytest.approx(full, rel=0.05)
    saved = step_of(tmp_path / "half", 5)
    assert {value.dtype for value in saved["model"].values()} == {torch.float32}  # the weights stay exact
    runs = {name: load_run(tmp_path / "half", device="cpu", weights=name) for name in ("auto", "ema", "model")}  # type: ignore[arg-type]
    for name, group in {"auto": "ema", "ema": "ema", "model": "model"}.items():
        opened = runs[name].method
        assert all(torch.equal(value, saved[group][key]) for key, value in opened.named_parameters())
        assert not opened.training
    assert any(not torch.equal(value, saved["model"][key]) for key, value in saved["ema"].items())


@pytest.fixture(scope="module")
def two_modes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Each method trained for 200 steps on rows that are (0, 0) or (1, 1)."""
    folder = tmp_path_factory.mktemp("two")
    np.save(folder / "rows.npy", np.repeat([[0, 0], [1, 1]], 50, axis=0))
    settings = NETWORK | {"domain.path": str(folder / "rows.npy"), "train.batch": 64, "train.steps": 200}
    more: dict[str, dict[str, object]] = {"mdlm": {}, "vadd": {"method.kl_weight": 0.25}}
    more["emoe"] = {"method.experts": 4, "method.kl_weight": 0.25, "train.log_every": 1}
    disabled = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)  # the same calls are checked often enough above
    runs = {kind: trained(f"rows-{kind}", folder / kind, settings | more[kind]) for kind in KINDS}
    jaxtyping.config.update("jaxtyping_disable", disabled)
    return runs


def correlation(run: Run, nfe: int = 1) -> float:
    """Correlation of the two positions over 2,000 samples; both modes must be there for it to be large."""
    return float(np.corrcoef(run.sample(2_000, nfe, seed=1).double().T.numpy())[0, 1])


def test_a_mixture_ties_positions_together_in_one_step(two_modes: dict[str, Run]) -> None:
    recon = [record["recon"] for record in logged(two_modes["emoe"].path)]
    assert np.mean(recon[-50:]) < 0.75 * np.mean(recon[:20])
    assert abs(correlation(two_modes["mdlm"])) < 0.1  # a factorised step cannot
    assert correlation(two_modes["mdlm"], nfe=16) > 0.8  # many steps can: the network has learnt the data
    for kind in ("vadd", "emoe"):
        assert correlation(two_modes[kind]) > 0.4
        assert 0.25 < two_modes[kind].sample(2_000, 1, seed=1).double().mean() < 0.75


def test_the_routes_are_what_ties_them(two_modes: dict[str, Run]) -> None:
    greedy = load_run(two_modes["emoe"].path, device="cpu", settings={"method.route-tau": "0"})
    joint = np.histogram2d(*greedy.sample(4_000, 1, seed=1).T.numpy(), bins=2)[0] / 4_000
    product = joint.sum(1, keepdims=True) * joint.sum(0, keepdims=True)
    assert np.abs(joint - product).max() < 0.03  # one route for all samples: nothing but a factorised step is left
