"""`emoe reproduce estimators`: its references are exact, its measures are what they are called, its files are whole."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from emoe import verify
from emoe.cli import main
from emoe.exact import chain_law, exact_nll
from emoe.methods.emoe import EMoE
from emoe.reporting.docs import BLOCKS
from emoe.reporting.latent import BASELINE, FAMILIES, STATES, estimator_order
from emoe.reporting.results import Results
from emoe.studies import estimators as study


@pytest.fixture(scope="module")
def models() -> dict[str, EMoE]:
    """The model after very few steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study, "MOMENTS", {"early": 1, "middle": 4})
        return dict(study.trained())


def test_measures_of_gradients_with_a_known_law() -> None:
    """g ~ N(mean, s^2 I) in 50 dimensions: bias, cosine, spread and size follow by hand."""
    groups, each, scale, dims = 400, 25, 3.0, 50
    exact, mean = torch.zeros(dims).double(), torch.zeros(dims).double()
    exact[0], mean[0], mean[1] = 2.0, 1.0, 1.0
    noise = torch.randn((groups, dims), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    drawn = mean + scale / math.sqrt(each) * noise
    found = study.quality(drawn, exact[None], each)
    left = scale * math.sqrt(dims / (groups * each))  # |mean of all draws - mean|
    assert found.error == pytest.approx(left / 2, rel=0.05)
    assert found.bias == pytest.approx(math.hypot(math.sqrt(2), left) / 2, rel=0.05)
    assert found.std == pytest.approx(scale * math.sqrt(dims) / 2, rel=0.05)
    assert found.size == pytest.approx(math.sqrt(2) / 2, rel=0.05)
    assert found.cosine == pytest.approx(1 / math.hypot(math.sqrt(2), left), rel=0.05)
    shaken = study.quality(drawn, torch.stack([exact + 0.1, exact - 0.1]), each)
    assert shaken.error == pytest.approx(math.hypot(left, 0.1 * math.sqrt(dims)) / 2, rel=0.05)


def test_the_likelihood_that_is_differentiated_is_that_of_the_sampler(models: dict[str, EMoE]) -> None:
    model = models["middle"]
    law = chain_law(model, 1)
    x0 = torch.arange(8)[:, None].expand(8, 2).contiguous()
    (nll, kl) = study.state_rows("middle", model)
    assert (nll.metric, kl.metric) == ("nll", "kl") and kl.value > 0
    assert nll.value == pytest.approx(exact_nll(law, x0).mean().item(), abs=1e-9)
    cell, step = study.cells(8)[0], 1e-5
    slope = study.likelihood_gradient(model, cell)
    assert (cell.xt == 8).all() and cell.t == 1 and slope[study.router_mask(model)].norm() > 1e-3
    values = []
    for sign in (1, -1):
        moved = study.with_options(model, {})
        place = 0
        with torch.no_grad():
            for parameter in moved.parameters():
                part = slope[place : place + parameter.numel()].view_as(parameter)
                parameter += sign * step * part
                place += parameter.numel()
        values.append(exact_nll(chain_law(moved, 1), cell.x0).item())
    assert (values[0] - values[1]) / (2 * step) == pytest.approx(slope.square().sum().item(), rel=1e-4)


def test_training_and_options(models: dict[str, EMoE]) -> None:
    early, middle = (models[state].state_dict() for state in STATES)
    assert any(not torch.equal(early[name], middle[name]) for name in early)
    again = study.with_options(models["middle"], {"gradient": "reinmax"})
    assert again.config.gradient == "reinmax" and again.config.estimator == "pathwise" and again.config.draws == 1
    assert all(torch.equal(value, middle[name]) for name, value in again.state_dict().items())
    assert verify.all_routes(again) == 256
    routers = study.router_mask(models["middle"])
    assert routers.sum() == 2 * (32 * 4 + 4) and len(routers) == sum(p.numel() for p in again.parameters())


def test_an_unbiased_estimator_shows_no_bias_and_a_cut_one_does(
    models: dict[str, EMoE], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = {name: study.ESTIMATORS[name] for name in ("selected tau 1", "leave-one-out K=4")}
    monkeypatch.setattr(study, "ESTIMATORS", chosen)
    monkeypatch.setattr(study, "GROUPS", 12)
    monkeypatch.setattr(study, "DRAWS", 100)
    told: list[str] = []
    rows = study.gradient_rows("middle", models["middle"], lambda size, text: told.append(text))
    assert told == [f"middle, {name}" for name in chosen]
    bias = {(row.recipe, row.convention): row for row in rows if row.metric == "bias"}
    cut, sure = (bias[name, "middle, routers"] for name in chosen)
    assert cut.value > 5 * cut.stderr and cut.value > 0.3
    assert sure.value < 1.5 * sure.stderr
    assert all(bias[name, "middle, others"].value < 0.5 for name in chosen)


def test_estimators_are_ordered_by_family_and_number() -> None:
    names = sorted(study.ESTIMATORS, key=estimator_order)
    assert names[0] == "top-2 tau 0.1" and names[-1] == "wake-sleep K=16" and BASELINE in names
    draws = [name for name in names if name.startswith("wake-sleep")]
    assert [name.partition("=")[2].partition(" ")[0] for name in draws] == ["2", "4", "8", "8", "8", "8", "16"]
    assert {name.partition(" ")[0] for name in names} == set(FAMILIES)


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    small = {"MOMENTS": {"early": 1, "middle": 2}, "GROUPS": 2, "DRAWS": 4, "CALLS": 2, "ROUNDS": 1, "STEP_BATCH": 4}
    for name, value in (small | {"STEP_RECIPE": "demo-emoe"}).items():
        monkeypatch.setattr(study, name, value)
    monkeypatch.setattr(verify, "TABLE", 2**10)
    monkeypatch.setattr(verify, "VIMCO_GROUPS", 2)
    assert main(["reproduce", "estimators", "--results", str(tmp_path), "--quiet"]) == 0
    results = Results.load(tmp_path / "estimators.json")
    assert {row.task for row in results.rows} == {"estimators"}
    for name in study.ESTIMATORS:
        for state in STATES:
            metrics = {row.metric for row in results.select(recipe=name, convention=f"{state}, routers")}
            assert metrics == {"bias", "cosine", "std", "snr", "likelihood_cosine"}
            assert len(results.select(recipe=name, convention=f"{state}, others")) == 4
        (ratio,) = results.select(recipe=name, metric="step_ratio")
        assert ratio.value > 0
    assert results.select(recipe=BASELINE, metric="step_ratio")[0].value == 1
    assert (tmp_path / "figures" / "estimators.png").stat().st_size > 10_000
    text = BLOCKS["estimator-table"](tmp_path)
    assert text.count("\n| wake-sleep K=16 |") == 2 and "**Early**" in text and "**Middle**" in text
    assert main(["reproduce", "estimators", "--train.steps", "3"]) == 2
    assert "train.steps: this study has no settings" in capsys.readouterr().err
