"""The studies of the latent: held-out densities, row lengths, named likelihoods; and what training logs say."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from emoe import studies
from emoe.config import ConfigError
from emoe.domains.toy import HELD_OUT
from emoe.reporting import ties
from emoe.reporting.results import Results
from emoe.studies import held_out, likelihood, scaling
from emoe.studies.training import routing_at_end


def places(folder: Path, **fields: Any) -> dict[str, Any]:
    return {"runs": folder / "runs", "results": folder / "results", "device": "cpu", "jobs": 1, "quiet": True} | fields


def test_held_out_densities(tmp_path: Path, tiny, recorded, untouched, capsys) -> None:
    settings = tiny | {"domain.points": "200", "method.experts": "2", "eval.nfe": "1,2"}
    given = held_out.Options(**places(tmp_path), densities=("letter",), seeds=(0,), settings=settings)
    assert studies.run("held-out", given) == 0
    results = Results.load(tmp_path / "results/held-out.json")
    recorded("held-out", results)
    assert not results.select(convention=None, metric=("overlap", "validity"))  # nothing is drawn
    said = capsys.readouterr().out
    assert "where E-MoE (VIMCO) − E-MoE is an improvement: KL(data || model) (nats), NFE 1: 1 of 1;" in said
    untouched(tmp_path, lambda: studies.run("held-out", given))
    assert held_out.Options().densities == HELD_OUT and held_out.DEFAULTS["train.steps"] == "8000"


def test_scaling(tmp_path: Path, tiny, recorded, untouched, capsys) -> None:
    settings = tiny | {"domain.points": "50", "eval.samples": "50", "eval.nfe": "1,2"}
    given = scaling.Options(**places(tmp_path, jobs=2), lengths=(4, 2), families=("pairs",), settings=settings)
    assert studies.run("scaling", given) == 0
    results = Results.load(tmp_path / "results/scaling.json")
    recorded("scaling", results)
    groups = {line.labels[0]: line.rows for line in ties.by_family(results)["pairs"]}
    lengths = {label: {ties.setting_of(row.data).length for row in rows} for label, rows in groups.items()}
    assert lengths == dict.fromkeys(("MDLM", "E-MoE", "E-MoE (wake-sleep)", "chance"), {2, 4})
    # Depth 3, of whose blocks the last is summed out: it has no posterior, but experts in use.
    found = {row.metric: row for row in groups["E-MoE (wake-sleep)"] if row.nfe is None and row.data == "pairs-L4"}
    assert {"route_kl/block1", "route_kl/block2", "usage_entropy/block3", "effective_draws"} <= set(found)
    assert "route_kl/block3" not in found and found["dead_experts"].n == 24
    said = capsys.readouterr().out
    assert "E-MoE (wake-sleep)" in said and "coordination gain" in said
    assert (tmp_path / "results/figures/scaling.png").stat().st_size > 1_000
    untouched(tmp_path, lambda: studies.run("scaling", given))


def test_runs_of_scaling() -> None:
    variants, families = ("all-carry", "mdlm", "plus"), ("pairs", "sums")
    given = scaling.Options(variants=variants, families=families, lengths=(2, 8, 64), seeds=(0, 1))
    runs = scaling.Study(given).experiments()
    assert len(runs) == len({(one.name, one.seed) for one in runs}) == 36
    order = [(label.startswith("all-carry"), -one.domain.length) for one, label in runs.items()]
    assert order == sorted(order) and next(iter(runs.values())) == "mdlm, pairs-L64, seed 0"
    assert {one.backbone.depth for one in runs if one.domain.length == 64} == {6}
    for one, label in runs.items():
        recipe, changes = scaling.VARIANTS[label.partition(",")[0]]
        assert one.name.startswith(recipe) and all(f"{field}={value}" in one.name for field, value in changes.items())
    fixed = scaling.Options(variants=("wake-sleep-row",), families=("pairs",), lengths=(16,), depth=3)
    (one,) = scaling.Study(fixed).experiments()
    assert (one.backbone.depth, one.method.compare.credit) == (3, "row")
    # Lengths that a family cannot have are left out; alone they are refused.
    some = scaling.Options(variants=("mdlm",), families=("pairs", "permutations", "sums"), lengths=(6, 5))
    labels = ["pairs-L6, seed 0", "permutations-L6, seed 0", "permutations-L5, seed 0"]
    assert [label[6:] for label in scaling.Study(some).experiments().values()] == labels
    with pytest.raises(ConfigError, match="pairs cannot cut 3 positions"):
        studies.run("scaling", scaling.Options(families=("pairs",), lengths=(3,)))


def test_named_likelihoods(tmp_path: Path, tiny, monkeypatch, untouched, capsys) -> None:
    monkeypatch.setattr(likelihood, "STEPS", (1, 2))
    monkeypatch.setattr(likelihood, "ROWS", 200)
    monkeypatch.setattr(likelihood, "EXPERIMENTS", ("demo-emoe", "demo-mdlm"))
    given = likelihood.Options(**places(tmp_path), settings=tiny | {"domain.points": "200", "method.head-chunk": "0"})
    assert studies.run("likelihood", given) == 0
    results = Results.load(tmp_path / "results/likelihood.json").only(metric="nll")
    names = ["bound@1", "bound@2", "exact", "exact", "iw@1,16", "iw@2,16", "objective"]
    assert sorted(row.convention for row in results.select(method="emoe")) == names
    assert sorted(row.convention for row in results.select(method="mdlm")) == sorted([*names, "nelbo"])
    (exact, bound) = (results.select(method="mdlm", convention=name)[0] for name in ("exact", "bound@1"))
    assert exact.value == pytest.approx(bound.value, rel=1e-3)  # one step of a factorised model
    (truth,) = results.select(method="data")
    assert (truth.n, truth.convention) == (200, "exact") and truth.value < exact.value
    assert (tmp_path / "results/figures/likelihood.png").stat().st_size > 5_000
    assert "exact" in capsys.readouterr().out
    untouched(tmp_path, lambda: studies.run("likelihood", given))


def test_the_routing_at_the_end_of_training() -> None:
    even = [0.25] * 4
    first, second = (
        {"step": step, "route_kl/block1": kl, "usage/block1": usage, "usage/block2": even}
        for step, kl, usage in ((1, 0.2, [1.0, 0.0, 0.0, 0.0]), (2, 0.4, [0.8, 0.2, 0.0, 0.0]))
    )
    records = [first, second | {"effective_draws": math.nan}]
    found = {item.metric: item for item in routing_at_end(records)}
    assert found["route_kl/block1"].value == pytest.approx(0.3)
    entropy = -(0.9 * math.log(0.9) + 0.1 * math.log(0.1))
    assert found["usage_entropy/block1"].value == found["least_usage_entropy"].value == pytest.approx(entropy)
    assert found["usage_entropy/block2"].value == pytest.approx(math.log(4))
    assert (found["dead_experts"].value, found["dead_experts"].n) == (2, 8) and "effective_draws" not in found
    assert routing_at_end([{"step": 1, "loss": 3.0}]) == [] == routing_at_end([])
