"""Training as a whole: steps that are not finite, stored losses, precision, moving averages, and learning itself."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jaxtyping
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from emoe.cli import main
from emoe.config import ConfigError, override
from emoe.domains.base import Domain
from emoe.engine import checkpoint, trainer
from emoe.engine.metricslog import read_metrics
from emoe.engine.optim import OptimConfig, ema_decay
from emoe.engine.stepper import Stepper
from emoe.engine.trainer import MAX_SKIPPED_IN_ROW, NumericFailure, TrainConfig, fit
from emoe.experiment import Experiment
from emoe.ramps import Linear
from emoe.recipes import get_recipe
from emoe.rng import Rng, derive_seed
from emoe.runs import Run, load_run, train
from emoe.types import Loss

GOLDEN = Path(__file__).parents[1] / "golden" / "losses.json"
KINDS = ("mdlm", "vadd", "emoe")
SMALL = {
    "domain.points": "300",
    "backbone.width": "16",
    "backbone.hidden": "32",
    "backbone.heads": "2",
    "backbone.time-size": "16",
    "train.batch": "32",
    "train.steps": "20",
    "train.precision": "fp32",
    "optim.lr": "1e-2",
}


class Line(nn.Module):
    """Least squares on noise, with faults at chosen steps: the loss, or the gradient alone, is spoiled."""

    def __init__(self, loss: Mapping[int, float] | None = None, gradient: Mapping[int, float] | None = None):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.loss, self.gradient = dict(loss or {}), dict(gradient or {})
        self.before: dict[int, Tensor] = {}

    def forward(self, batch: Tensor, knobs: Mapping[str, Tensor], rng: Rng) -> Loss:
        self.before[rng.step] = self.weight.detach().clone()
        target = torch.randn(3, generator=rng.stream("latent"))
        total = knobs["scale"] * (self.weight * self.loss.get(rng.step, 1.0) - target).square().sum()
        if rng.step in self.gradient:
            self.weight.register_hook(lambda grad: grad * self.gradient.get(rng.step, 1.0))
        return Loss(total, {"loss": total})


def run_line(module: nn.Module, folder: Path, steps: int, *, resume: bool = False, **options: Any) -> None:
    config = TrainConfig(steps=steps, batch=1, precision="fp32", **{"log_every": 1, "save_every": 5, **options})
    ramps = {"scale": Linear(start=1.0, end=2.0)}
    fit(
        module, lambda step: torch.zeros(1, 1), ramps, optim=OptimConfig(lr=0.1, schedule="constant"), train=config,
        rng=Rng(1), run_dir=folder, resume=resume, quiet=True,
    )  # fmt: skip


@pytest.mark.parametrize("where", ["loss", "gradient"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_step_that_is_not_finite_changes_nothing(where: str, value: float, tmp_path: Path) -> None:
    module = Line(**{where: {4: value, 5: value, 9: value}})
    run_line(module, tmp_path, 12, ema=0.5, save_every=1, keep=20)
    for bad in (4, 5, 9):
        assert torch.equal(module.before[bad], module.before[bad + 1])
    good = [h for h in range(11) if h not in (4, 5, 9)]
    assert all(not torch.equal(module.before[h], module.before[h + 1]) for h in good)
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [record["skipped"] for record in records] == [0, 0, 0, 0, 1, 2, 2, 2, 2, 3, 3, 3]
    assert not math.isfinite(records[4]["grad_norm"])
    saved = checkpoint.load_latest(tmp_path / "checkpoints")
    assert saved is not None and saved.tensors["optim"]["weight/step"].item() == 9  # Adam counts good steps only
    assert all(tensor.isfinite().all() for group in saved.tensors.values() for tensor in group.values())
    for bad in (4, 5, 9):
        before, after = (checkpoint.load(tmp_path / "checkpoints" / f"step-{h:09d}").tensors for h in (bad, bad + 1))
        for group in ("model", "ema", "optim"):
            same = [
                torch.equal(before[group][name], after[group][name]) for name in before[group] if "skip" not in name
            ]
            assert same and all(same), group


def test_too_many_in_a_row_end_the_run(tmp_path: Path) -> None:
    first = 7
    module = Line(loss=dict.fromkeys(range(first, 100), math.nan))
    with pytest.raises(NumericFailure, match=f"the last {MAX_SKIPPED_IN_ROW} steps") as caught:
        run_line(module, tmp_path, 100)
    assert caught.value.exit_code == 4 and str(caught.value).endswith("where it began.")
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == first + MAX_SKIPPED_IN_ROW
    assert torch.equal(module.weight, module.before[first])  # those of the last good step
    saved = checkpoint.load_latest(tmp_path / "checkpoints")
    assert saved is not None and torch.equal(saved.tensors["model"]["weight"], module.before[first])


def test_a_module_that_refuses_steps_itself_is_heard(tmp_path: Path) -> None:
    module = Line(loss=dict.fromkeys(range(100), math.nan))
    module.refusals = lambda: "Raise the share."
    with pytest.raises(NumericFailure, match=r"where it began\. Raise the share\.$"):
        run_line(module, tmp_path, 100)


def test_as_many_apart_do_not(tmp_path: Path) -> None:
    bad = [h for h in range(60) if h % MAX_SKIPPED_IN_ROW]
    run_line(Line(loss=dict.fromkeys(bad, math.inf)), tmp_path, 60)
    assert read_metrics(tmp_path / "metrics.jsonl")[-1]["skipped"] == len(bad)


def test_skipped_steps_are_remembered_over_a_kill(tmp_path: Path) -> None:
    faults = {2: math.nan, 6: math.nan, 7: math.nan}
    run_line(Line(loss=faults), tmp_path / "whole", 10)
    run_line(Line(loss=faults), tmp_path / "parts", 10)
    newest = tmp_path / "parts" / "checkpoints" / "step-000000010"
    newest.rename(tmp_path / "elsewhere")
    run_line(Line(loss=faults), tmp_path / "parts", 10, resume=True)
    for name in ("metrics.jsonl", "checkpoints/step-000000010/optim.safetensors"):
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


class Wide(Line):
    """A line with three more vectors of 400 kB."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.ParameterList(torch.zeros(100_000) for _ in range(3))

    def forward(self, batch: Tensor, knobs: Mapping[str, Tensor], rng: Rng) -> Loss:
        loss = super().forward(batch, knobs, rng)
        total = loss.total + sum((part - 1).square().mean() for part in self.more)
        return Loss(total, {"loss": total})


def test_checkpoints_in_files_of_limited_size(tmp_path: Path) -> None:
    whole, again = Wide(), Wide()
    run_line(whole, tmp_path / "whole", 6)
    run_line(Wide(), tmp_path / "split", 6, max_file_mb=1)
    folders = {name: tmp_path / name / "checkpoints" / "step-000000005" for name in ("whole", "split")}
    found = {name: sorted(path.name for path in folder.glob("*.safetensors")) for name, folder in folders.items()}
    assert found["whole"] == ["model.safetensors", "optim.safetensors"]
    assert [name.partition("-")[0] for name in found["split"]] == ["model"] * 2 + ["optim"] * 3
    assert max((folders["split"] / name).stat().st_size for name in found["split"]) <= 10**6
    (tmp_path / "split" / "checkpoints" / "step-000000006").rename(tmp_path / "elsewhere")
    run_line(again, tmp_path / "split", 6, resume=True, max_file_mb=1)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), again.parameters(), strict=True))


def test_a_numeric_failure_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trainer, "MAX_SKIPPED_IN_ROW", 3)
    settings = SMALL | {"optim.lr": "1e30", "optim.clip": "none", "train.log-every": "1"}
    words = [word for name, value in settings.items() for word in (f"--{name}", value)]
    run = str(tmp_path / "run")
    assert main(["train", "toy-8modes-mdlm", "--run", run, "--device", "cpu", "--quiet", *words]) == 4
    err = capsys.readouterr().err
    assert err.startswith("emoe train: step ") and "Lower optim.lr" in err and err.count("\n") == 1


def test_clipping_holds_a_spike(tmp_path: Path) -> None:
    module = Line(gradient={3: 1e6})
    run_line(module, tmp_path, 8)
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert records[3]["grad_norm"] > 1e5 and records[-1]["skipped"] == 0
    assert (module.before[4] - module.before[3]).abs().max() < 0.5


def built(kind: str, **more: str) -> tuple[Experiment, Domain, Any, Stepper]:
    experiment = override(get_recipe(f"toy-8modes-{kind}"), SMALL | more)
    domain = experiment.domain.build(experiment.seed)
    method = experiment.build_method(domain.space)
    stepper = Stepper(
        method, domain.batches(experiment.train.batch, experiment.seed), method.ramps, experiment.optim,
        total=experiment.train.steps, rng=Rng(derive_seed(experiment.seed, "train")), ema=experiment.train.ema,
        precision=experiment.train.precision, graph=False,
    )  # fmt: skip
    return experiment, domain, method, stepper


def losses(kind: str, **more: str) -> list[float]:
    experiment, _, _, stepper = built(kind, **more)
    found = []
    for step in range(experiment.train.steps):
        stepper(step)
        assert stepper.loss is not None
        found.append(stepper.loss.total.item())
    return found


@pytest.mark.golden
@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_the_stored_ones(kind: str) -> None:
    """A change of these numbers changes every result; `EMOE_REGENERATE_GOLDEN=1` stores new ones."""
    found = losses(kind)
    if os.environ.get("EMOE_REGENERATE_GOLDEN") == "1":
        stored = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
        text = json.dumps(stored | {kind: [float(f"{loss:.7g}") for loss in found]}, indent=1, sort_keys=True)
        GOLDEN.write_text(text + "\n")
    assert found == pytest.approx(json.loads(GOLDEN.read_text())[kind], rel=1e-4)


def test_the_same_seed_gives_the_same_losses_and_another_seed_others() -> None:
    first = losses("emoe")
    torch.manual_seed(1)
    torch.rand(5)
    assert losses("emoe") == first != losses("emoe", seed="1")


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16(kind: str) -> None:
    short = {"train.steps": "5"}
    full, half = losses(kind, **short), losses(kind, **short, **{"train.precision": "bf16"})
    assert full != half and half == pytest.approx(full, rel=0.05)
    _, _, method, stepper = built(kind, **{"train.precision": "bf16"})
    stepper(0)
    assert {parameter.dtype for parameter in method.parameters()} == {torch.float32}  # the weights stay exact
    assert stepper.optimizer.grad_norm.isfinite()


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_every_precision_trains_and_samples(precision: str, tmp_path: Path) -> None:
    settings = SMALL | {"train.precision": precision, "train.steps": "3"}
    run = train("toy-8modes-emoe", tmp_path / "run", settings=settings, device="cpu", quiet=True)
    assert run.step == 3 and run.sample(10, 2).shape == (10, 2)


def test_an_opened_run_has_the_averaged_weights(tmp_path: Path) -> None:
    settings = SMALL | {"train.ema": "0.8"}
    run = train("toy-8modes-emoe", tmp_path / "run", settings=settings, device="cpu", quiet=True)
    saved = checkpoint.load_latest(tmp_path / "run" / "checkpoints")
    assert saved is not None
    for weights, group in {"auto": "ema", "ema": "ema", "model": "model"}.items():
        opened = load_run(tmp_path / "run", device="cpu", weights=weights)  # type: ignore[arg-type]
        assert all(torch.equal(value, saved.tensors[group][name]) for name, value in opened.method.named_parameters())
        assert not opened.method.training
    assert not torch.equal(run.sample(200, 1), load_run(tmp_path / "run", device="cpu", weights="model").sample(200, 1))
    assert torch.equal(run.sample(200, 1), load_run(tmp_path / "run", device="cpu", weights="ema").sample(200, 1))


def test_the_moving_average_is_the_recursion() -> None:
    _, _, method, stepper = built("mdlm", **{"train.ema": "0.5"})
    average = {name: value.detach().clone() for name, value in method.named_parameters()}
    for step in range(6):
        stepper(step)
        decay = ema_decay(0.5, step)
        average = {name: decay * average[name] + (1 - decay) * value for name, value in method.named_parameters()}
    for name, value in stepper.optimizer.state()["ema"].items():
        torch.testing.assert_close(value, average[name], rtol=1e-5, atol=1e-6)


def test_no_average_was_kept(tmp_path: Path) -> None:
    train("toy-8modes-mdlm", tmp_path / "run", settings=SMALL | {"train.steps": "1"}, device="cpu", quiet=True)
    assert load_run(tmp_path / "run", device="cpu").step == 1
    with pytest.raises(ConfigError, match="without a moving average; allowed: auto, model"):
        load_run(tmp_path / "run", device="cpu", weights="ema")


@pytest.fixture(scope="module")
def two_modes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Each method trained for 200 steps on rows that are (0, 0) or (1, 1)."""
    folder = tmp_path_factory.mktemp("two")
    np.save(folder / "rows.npy", np.repeat([[0, 0], [1, 1]], 50, axis=0))
    settings = {name: value for name, value in SMALL.items() if not name.startswith("domain")}
    settings |= {"domain.path": str(folder / "rows.npy"), "train.batch": "64", "train.steps": "200"}
    settings |= {"train.log-every": "1"}
    more = {"mdlm": {}, "vadd": {"method.kl-weight": "0.25"}}
    more["emoe"] = {"method.experts": "4", "method.kl-weight": "0.25"}
    disabled = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)  # the same calls are checked often enough above
    runs = {}
    for kind in KINDS:
        runs[kind] = train(f"rows-{kind}", folder / kind, settings=settings | more[kind], device="cpu", quiet=True)
    jaxtyping.config.update("jaxtyping_disable", disabled)
    return runs


def correlation(run: Run, nfe: int = 1) -> float:
    """Correlation of the two positions over 2,000 samples; both modes must be there for it to be large."""
    return float(np.corrcoef(run.sample(2_000, nfe, seed=1).double().T.numpy())[0, 1])


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_falls(kind: str, two_modes: dict[str, Run]) -> None:
    recon = [record["recon"] for record in read_metrics(two_modes[kind].path / "metrics.jsonl")]
    assert np.mean(recon[-50:]) < 0.75 * np.mean(recon[:20])


def test_one_step_of_a_factorised_model_cannot_tie_positions_together(two_modes: dict[str, Run]) -> None:
    assert abs(correlation(two_modes["mdlm"])) < 0.1
    assert correlation(two_modes["mdlm"], nfe=16) > 0.8  # many steps can: the network has learnt the data


@pytest.mark.parametrize("kind", ["vadd", "emoe"])
def test_one_step_of_a_mixture_can(kind: str, two_modes: dict[str, Run]) -> None:
    assert correlation(two_modes[kind]) > 0.4
    samples = two_modes[kind].sample(2_000, 1, seed=1)
    assert 0.25 < samples.double().mean() < 0.75
    other = two_modes["mdlm"].sample(2_000, 1, seed=1)
    agree, baseline = ((rows[:, 0] == rows[:, 1]).double().mean().item() for rows in (samples, other))
    assert agree > baseline + 0.2


def test_the_routes_are_what_ties_them(two_modes: dict[str, Run]) -> None:
    greedy = load_run(two_modes["emoe"].path, device="cpu", settings={"method.route-tau": "0"})
    joint = np.histogram2d(*greedy.sample(4_000, 1, seed=1).T.numpy(), bins=2)[0] / 4_000
    product = joint.sum(1, keepdims=True) * joint.sum(0, keepdims=True)
    assert np.abs(joint - product).max() < 0.03  # one route for all samples: nothing but a factorised step is left
