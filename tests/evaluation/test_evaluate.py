"""Rows of an evaluation name their method, and progress stays off standard output."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from small import TOY, trained

from emoe import console
from emoe.cli import main
from emoe.evaluation.measure import fields_of
from emoe.overrides import override
from emoe.recipes import get_recipe


@pytest.mark.parametrize(
    ("recipe", "changes", "method"),
    [
        ("toy-8modes-mdlm", {}, "mdlm"),
        ("toy-8modes-emoe", {"name": "x-emoe-vimco"}, "emoe"),  # of the options, not of the name
        ("toy-8modes-emoe-vimco", {"method.route_tau": 0.0}, "emoe-vimco"),
        ("toy-8modes-emoe-vimco", {"method": "vadd"}, "vadd"),
    ],
)
def test_the_method_of_a_row(recipe: str, changes: dict[str, object], method: str) -> None:
    experiment = override(get_recipe(recipe), changes)
    domain = experiment.domain.build(0)
    run = {"recipe": experiment.name, "method": method, "seed": 0}
    made = {"task": "toy", "data": "8-modes", "nfe": 1, "convention": None}
    assert fields_of(domain, experiment, nfe=1) == made | run
    assert fields_of(domain, nfe=1) == made | {"recipe": "reference", "method": "data", "seed": None}


def test_progress_goes_to_standard_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained("toy-8modes-emoe", tmp_path / "toy", TOY | {"train.steps": 2, "method.experts": 2}).path
    words = ["eval", str(run), "--device", "cpu", "--json", "--exact", "--nfe", "1,2", "--samples", "20"]
    words += ["--rows", "10", "--likelihood", "bound@1 iw@1,4"]
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert "step" not in err  # over before a line is due
    monkeypatch.setattr(console, "LINE_SECONDS", 0.0)
    assert main(words) == 0
    again, err = capsys.readouterr()
    assert [entry["value"] for entry in json.loads(again)] == [entry["value"] for entry in json.loads(out)]
    for name, metrics in {
        "bound@1": {"nll", "bpd", "ppl", "coordination_gain"},
        "iw@1,4": {"nll", "bpd", "ppl"},
    }.items():
        assert {entry["metric"] for entry in json.loads(out) if entry["convention"] == name} == metrics
    lines = [line for line in err.splitlines() if " of " in line]
    assert f"exact law of {run}: step 1/2 (50.0%)" in lines[0] and "step 2/2 (100.0%)" in lines[1]
    assert [f"samples of {run}: step {call}/3" in line for call, line in enumerate(lines[2:5], 1)] == [True] * 3
    assert f"likelihoods of {run}: step 1/24 (4.2%)" in lines[5] and "| bound@1" in lines[5]
    assert "step 24/24 (100.0%)" in lines[-1] and "ETA 0:00:00 | iw@1,4" in lines[-1] and len(lines) == 2 + 3 + 8 + 4
