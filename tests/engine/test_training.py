"""Training as a whole: steps that are not finite, refused steps, precision, moving averages, and learning itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
from emoe.engine.optim import ema_decay
from emoe.engine.stepper import Stepper
from emoe.overrides import override
from emoe.recipes import get_recipe
from emoe.rng import Rng, derive_seed
from emoe.runs.run import Run
from emoe.runs.train import load_run
from emoe.types import Loss

KINDS = ("mdlm", "vadd", "emoe")
NETWORK = TRANSFORMER | {"backbone.width": 16, "backbone.hidden": 32, "backbone.time_size": 16}
NETWORK |= {"train.batch": 32, "train.steps": 20, "train.precision": "fp32", "optim.lr": 1e-2}
SMALL = NETWORK | {"domain.points": 300}


def step_of(folder: Path, step: int) -> dict[str, dict[str, Tensor]]:
    return checkpoint.load(folder / "checkpoints" / f"step-{step:09d}").tensors


@pytest.mark.parametrize("where", ["loss", "gradient"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_step_that_is_not_finite_changes_nothing(where: str, value: float, tmp_path: Path) -> None:
    bad = (4, 5, 9)
    module = Line(**{where: dict.fromkeys(bad, value)})
    fit_line(module, tmp_path, 12, ema=0.5, save_every=1, keep=20)
    for step in range(11):
        assert torch.equal(module.before[step], module.before[step + 1]) == (step in bad)
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [record["skipped"] for record in records] == [0, 0, 0, 0, 1, 2, 2, 2, 2, 3, 3, 3]
    assert not math.isfinite(records[4]["grad_norm"])
    last = step_of(tmp_path, 12)
    assert last["optim"]["weight/step"].item() == 9  # Adam counts good steps only
    assert all(tensor.isfinite().all() for group in last.values() for tensor in group.values())
    for step in bad:
        before, after = step_of(tmp_path, step), step_of(tmp_path, step + 1)
        for group in ("model", "ema", "optim"):
            names = [name for name in before[group] if "skip" not in name]
            assert names and all(torch.equal(before[group][name], after[group][name]) for name in names), group


def test_too_many_in_a_row_end_the_run_and_as_many_apart_do_not(tmp_path: Path) -> None:
    first = 7
    module = Line(loss=dict.fromkeys(range(first, 100), math.nan))
    with pytest.raises(NumericFailure, match=f"the last {MAX_SKIPPED_IN_ROW} steps") as caught:
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


def test_skipped_steps_are_remembered_over_a_kill(tmp_path: Path) -> None:
    faults = {2: math.nan, 6: math.nan, 7: math.nan}
    for name in ("whole", "parts"):
        fit_line(Line(loss=faults), tmp_path / name, 10)
    (tmp_path / "parts" / "checkpoints" / "step-000000010").rename(tmp_path / "elsewhere")
    fit_line(Line(loss=faults), tmp_path / "parts", 10, resume=True)
    for name in ("metrics.jsonl", "checkpoints/step-000000010/optim.safetensors"):
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


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


def test_clipping_holds_a_spike(tmp_path: Path) -> None:
    module = Line(gradient={3: 1e6})
    fit_line(module, tmp_path, 8)
    assert logged(tmp_path)[3]["grad_norm"] > 1e5 and logged(tmp_path)[-1]["skipped"] == 0
    assert (module.before[4] - module.before[3]).abs().max() < 0.5


def built(kind: str, **more: object) -> tuple[Any, Stepper]:
    experiment = override(get_recipe(f"toy-8modes-{kind}"), SMALL | more)
    domain, config = experiment.domain.build(experiment.seed), experiment.train
    method = experiment.build_method(domain.space)
    stepper = Stepper(
        method, domain.batches(config.batch, experiment.seed), method.ramps, optim=experiment.optim, train=config,
        rng=Rng(derive_seed(experiment.seed, "train")),
    )  # fmt: skip
    return method, stepper


def losses(kind: str, steps: int = 5, **more: object) -> list[float]:
    _, stepper = built(kind, **more)
    values: list[Any] = []
    for step in range(steps):
        stepper(step)
        values.append(stepper.loss)
    return [loss.total.item() for loss in values]


def test_the_same_seed_gives_the_same_losses_and_another_seed_others() -> None:
    first = losses("emoe")
    torch.manual_seed(1)
    torch.rand(5)
    assert losses("emoe") == first != losses("emoe", seed=1)


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16(kind: str) -> None:
    full, half = losses(kind), losses(kind, **{"train.precision": "bf16"})
    assert full != half and half == pytest.approx(full, rel=0.05)
    method, stepper = built(kind, **{"train.precision": "bf16"})
    stepper(0)
    assert {parameter.dtype for parameter in method.parameters()} == {torch.float32}  # the weights stay exact
    assert stepper.optimizer.grad_norm.isfinite()


def test_the_moving_average_is_the_recursion() -> None:
    method, stepper = built("mdlm", **{"train.ema": 0.5})
    average = {name: value.detach().clone() for name, value in method.named_parameters()}
    for step in range(6):
        stepper(step)
        decay = ema_decay(0.5, step)
        average = {name: decay * average[name] + (1 - decay) * value for name, value in method.named_parameters()}
    for name, value in stepper.optimizer.state()["ema"].items():
        torch.testing.assert_close(value, average[name], rtol=1e-5, atol=1e-6)


def test_an_opened_run_has_the_averaged_weights(tmp_path: Path) -> None:
    trained("toy-8modes-emoe", tmp_path, SMALL | {"train.ema": 0.8})
    saved = step_of(tmp_path, 20)
    runs = {name: load_run(tmp_path, device="cpu", weights=name) for name in ("auto", "ema", "model")}  # type: ignore[arg-type]
    for name, group in {"auto": "ema", "ema": "ema", "model": "model"}.items():
        opened = runs[name].method
        assert all(torch.equal(value, saved[group][key]) for key, value in opened.named_parameters())
        assert not opened.training
    rows = {name: run.sample(200, 1) for name, run in runs.items()}
    assert torch.equal(rows["auto"], rows["ema"]) and not torch.equal(rows["ema"], rows["model"])


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
