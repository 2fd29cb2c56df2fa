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
from emoe.reporting.results import Results, Row, RunInfo

FOLDER = Path(__file__).parents[1] / "research"
RUN = RunInfo(
    command="emoe toy", commit="0123456789abcdef-dirty", device="a GPU", torch="2", python="3",
    date="2025-01-01T00:00:00Z", wall_s=3.0,
)  # fmt: skip


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
    shrink(
        study, monkeypatch, MOMENTS={"early": 1, "middle": 3}, GROUPS=2, DRAWS=4, CALLS=2, VIMCO_GROUPS=2, TABLE=2**10
    )
    shrink(study, monkeypatch, ROUNDS=1, STEP_BATCH=4, STEP_RECIPE="demo-emoe")
    study.main(tmp_path)
    results = Results.load(tmp_path / "estimators.json")
    for name in study.ESTIMATORS:
        for state in study.STATES:
            metrics = {row.metric for row in results.select(recipe=name, convention=f"{state}, routers")}
            assert metrics == {"bias", "cosine", "std", "snr", "likelihood_cosine"}
    assert results.select(recipe=study.BASELINE, metric="step_ratio")[0].value == 1
    assert (tmp_path / "figures/estimators.png").stat().st_size > 10_000 and len(
        load("tables").estimator_tables(results)
    ) == 2
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
    assert (tmp_path / "figures/information.png").stat().st_size > 5_000 and "in turn" in capsys.readouterr().out
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


def test_a_search_shows_ramps_and_failures(load) -> None:
    settings = {"optim.lr": "1e-3", "method.kl-weight": '{"kind": "linear", "start": 4.0, "end": 1.0, "share": 0.6}'}
    outcome = {"task": {"domain.density": "moons"}, "seed": 10}
    metrics = {"kl@1": {"mean": -0.1234, "stderr": 0.01}, "overlap@1": None}
    trials = [
        {"settings": settings, "status": "done", "outcomes": [outcome], "metrics": metrics},
        {"settings": {}, "status": "failed", "outcomes": [outcome], "metrics": {"kl@1": None, "overlap@1": None}},
    ]
    made = {"commit": "0123456789abcdef", "device": "a GPU", "torch": "2", "python": "3"}
    ranking = {"base": "toy-8modes-vadd", "rank": ["kl@1", "overlap@1"], "made": made, "trials": trials}
    table = load("tables").search_table(ranking)
    assert table.rows[0] == ["lr 1e-3, kl-weight 4 → 1 over 60%", "-0.123 ±0.010", "—"]
    assert table.rows[1] == ["**base** (failed)", "—", "—"]
    assert "over moons (seed 10)" in table.note and "`0123456789ab`" in table.note


def test_the_table_of_step_times(load) -> None:
    same = dict(task="benchmark", data="mnist-step-gpu", seed=0, nfe=None, metric="step_ms", recipe="r")
    times = {"mdlm": 3.0, "emoe": 6.0, "mdlm, eager": 15.0, "vdm, eager": 21.0}
    rows = [Row(**same, method=method, value=value, stderr=0.01, n=20) for method, value in times.items()]
    (table,) = load("tables").mnist_steps(Results().add(RUN, rows))
    assert ["MDLM", "3.00 ±0.01", "10.0", "7.0x"] in table.rows
    assert ["MDLM, eager", "15.00 ±0.01", "50.0", "1.4x"] in table.rows
    assert ["VDM UNet, eager", "21.00 ±0.01", "—", "1.0x"] in table.rows


def test_gaps_to_the_paper(load) -> None:
    same = dict(task="toy", data="8-modes", nfe=1, n=2500)
    rows = [
        Row(**same, method=method, recipe=f"toy-8modes-{method}", seed=seed, metric=metric, value=value + shift + seed)
        for method, value in (("vadd", 92.8), ("emoe", 87.0))
        for metric, shift in (("validity", 0), ("overlap", -10))
        for seed in (0, 1)
    ]
    results, tables = Results().add(RUN, rows), load("tables")
    assert tables.toy_gaps(results).splitlines() == [
        "- VADD on 8-modes at NFE 1: validity 93.3 ±0.5, the paper reports 91.8: +1.5 points (overlap 83.3).",
        "- E-MoE on 8-modes at NFE 1: validity 87.5 ±0.5, the paper reports 94.4: −6.9 points (overlap 77.5).",
    ]
    source = tables.toy_source(results)
    assert source.startswith("Made by `emoe toy` at commit `0123456789ab-dirty` on a GPU (torch 2, Python 3): validity")
