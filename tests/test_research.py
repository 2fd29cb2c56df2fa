"""The one-off studies of `research/`, each once at a tiny size."""

from __future__ import annotations

import importlib
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from emoe.exact.laws import chain_law, exact_nll, kl_data_model
from emoe.reporting.results import Results

FOLDER = Path(__file__).parents[1] / "research"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch):
    """Imports a file of the folder."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield lambda name: importlib.import_module(name)
    for path in FOLDER.glob("*.py"):
        sys.modules.pop(path.stem, None)


def shrink(module: ModuleType, monkeypatch: pytest.MonkeyPatch, **sizes: object) -> None:
    for name, value in sizes.items():
        monkeypatch.setattr(module, name, value)


def test_every_file_opens_with_its_command() -> None:
    for path in FOLDER.glob("*.py"):
        assert "python research/" in path.read_text().split('"""')[1], path


def test_estimators(load, tmp_path: Path, monkeypatch) -> None:
    study = load("estimators")
    moments = {"early": 1, "middle": 3}
    shrink(study, monkeypatch, MOMENTS=moments, GROUPS=2, DRAWS=4, CALLS=2, VIMCO_GROUPS=2, TABLE=2**10)
    shrink(study, monkeypatch, ROUNDS=1, STEP_BATCH=4, STEP_RECIPE="demo-emoe")
    study.main(tmp_path / "estimators.json")
    results = Results.load(tmp_path / "estimators.json")
    for name in study.ESTIMATORS:
        for state in study.MOMENTS:
            metrics = {row.metric for row in results.select(recipe=name, convention=f"{state}, routers")}
            assert metrics == {"bias", "cosine", "std", "snr", "likelihood_cosine"}
    assert results.select(recipe=study.BASELINE, metric="step_ratio")[0].value == 1
    assert len(load("tables").estimator_tables(results)) == 2
    # The reference is exact: -log p(x0) of one step, summed over all routes.
    model = dict(study.trained())["middle"]
    x0 = torch.arange(8)[:, None].expand(8, 2).contiguous()
    nll, _ = study.state_rows("middle", model)
    assert nll.value == pytest.approx(exact_nll(chain_law(model, 1), x0).mean().item(), abs=1e-9)


def test_information(load, tmp_path: Path, capsys) -> None:
    study = load("information")
    small = {"train.steps": "4", "train.batch": "4", "backbone.width": "8", "backbone.hidden": "8"}
    small |= {"eval.samples": "20", "domain.points": "50", "train.log-every": "1"}
    options = study.Options(
        study="information", runs=tmp_path, results=tmp_path, device="cpu", quiet=True, settings=small
    )
    assert study.Study(options).run() == 0
    results = Results.load(tmp_path / "information.json")
    rows = [row for row in results.rows if row.metric.startswith("route_kl/")]
    counts = {recipe: sum(row.recipe == recipe for row in rows) for recipe in {row.recipe for row in rows}}
    assert sorted(counts.values()) == [8, 8, 12]  # 4 positions; wake-sleep sums the last of 3 blocks
    assert (
        tmp_path / "figures/information.png"
    ).stat().st_size > 5_000 and "E-MoE (wake-sleep)" in capsys.readouterr().out
    assert study.mean_end([(step, [step, 1.0]) for step in range(1, 21)]) == [15.5, 1.0]
    labels = [row[0] for row in load("tables").information_tables(results)[0].rows]
    assert len(set(labels)) == 3


def test_route_limit(load, tmp_path: Path, monkeypatch) -> None:
    study = load("route_limit")
    law = torch.rand(6, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    law /= law.sum()
    kl = [kl_data_model(law, study.fit_routes(law, 2, seed=1, updates=updates)) for updates in (0, 1, 2, 5, 20, 100)]
    assert all(later <= earlier + 1e-12 for earlier, later in zip(kl, kl[1:], strict=False)) and kl[-1] < 0.5 * kl[0]
    diagonal = torch.eye(4, dtype=torch.float64) / 4  # one expert: product of marginals; enough of them: exact
    torch.testing.assert_close(study.fit_routes(diagonal, 1, seed=0), torch.full((4, 4), 1 / 16).double())
    assert kl_data_model(diagonal, study.fit_routes(diagonal, 4, seed=0)) < 1e-6
    shrink(study, monkeypatch, SEEDS=(0,), EXPERTS=2, UPDATES=2)
    study.main(tmp_path / "route-limit.json")
    rows = Results.load(tmp_path / "route-limit.json").rows
    assert {(row.method, row.metric) for row in rows} == {("limit", name) for name in ("validity", "overlap", "kl")}


def test_two_bits(load, tmp_path: Path, monkeypatch) -> None:
    study = load("two_bits")
    shrink(study, monkeypatch, STARTS=1, UPDATES=3)
    study.main(tmp_path / "likelihood.json")
    results = Results.load(tmp_path / "likelihood.json")
    for recipe in study.POWERS:
        for steps in study.BOUND_STEPS:
            (bound,) = results.select(recipe=recipe, convention=f"bound@{steps}")
            (exact,) = results.select(recipe=recipe, convention="exact", nfe=steps)
            assert bound.value > exact.value > math.log(2)
    assert len(load("tables").two_bits(results)[0].rows) == 2
