"""Rows of an evaluation: the method they name, exact laws of toy runs, and progress that stays off standard output."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from emoe.evaluation.evaluate import make_row, method_name
from emoe.evaluation.exact_toy import is_drawn, law_work, laws

from emoe import console as progress
from emoe.cli import main
from emoe.exact import chain_laws, repeated_laws
from emoe.methods.emoe import EMoEConfig
from emoe.methods.vadd import VADDConfig
from emoe.recipes import get_recipe
from emoe.reporting.grid import metric_lines
from emoe.reporting.results import Results, RunInfo, known_methods
from emoe.runs import train
from emoe.types import Measurement

RUN = RunInfo(command="c", commit="d", device="e", torch="2", python="3", date="2025-01-01T00:00:00Z", wall_s=1)


@pytest.mark.parametrize(
    ("base", "name", "wanted"),
    [
        ("toy-8modes-emoe", "toy-8modes-emoe", "emoe"),
        ("toy-8modes-emoe", "toy-8modes-emoe-plus", "emoe-plus"),
        ("toy-8modes-emoe", "toy-8modes-emoe-plus method.route-tau=0", "emoe-plus"),
        ("toy-8modes-emoe", "toy-8modes-emoe name=x-emoe-plus", "emoe"),
        ("toy-8modes-vadd", "toy-swissroll-vadd-plus", "vadd-plus"),
        ("toy-8modes-vadd", "toy-8modes-emoe-plus", "vadd"),
        ("toy-8modes-mdlm", "mine", "mdlm"),
    ],
)
def test_the_method_of_a_row(base: str, name: str, wanted: str) -> None:
    experiment = dataclasses.replace(get_recipe(base), name=name)
    assert method_name(experiment) == wanted and wanted in known_methods()
    domain, item = experiment.domain.build(0), Measurement("validity", 90.0, 0.5, 3000)
    assert make_row(item, domain, experiment, nfe=1).method == wanted
    assert make_row(item, domain, experiment, nfe=1, method="data").method == "data"


def test_improved_methods_have_a_line_of_their_own_and_no_figure_of_the_paper() -> None:
    rows = []
    for method, value in (("vadd", 91.0), ("vadd-plus", 92.0), ("emoe", 93.0), ("emoe-plus", 94.0)):
        kind = method.removesuffix("-plus")
        for seed in (0, 1):
            recipe = dataclasses.replace(get_recipe(f"toy-8modes-{kind}"), name=f"toy-8modes-{method}", seed=seed)
            changed = dataclasses.replace(recipe, name=f"toy-8modes-{method} train.steps=5")
            domain = recipe.domain.build(0)
            rows.append(make_row(Measurement("validity", value, 0.5, 3000), domain, recipe, nfe=1))
            rows.append(make_row(Measurement("validity", 1.0, 0.5, 3000), domain, changed, nfe=1))
    lines = {line.labels[0]: line for line in metric_lines(Results().add(RUN, rows))}
    values = {name: {row.value for row in lines[name].rows} for name in ("VADD", "VADD+", "E-MoE", "E-MoE+")}
    assert values == {"VADD": {91.0}, "VADD+": {92.0}, "E-MoE": {93.0}, "E-MoE+": {94.0}}
    paper = {name: lines[name].where(nfe=1).reported("validity") for name in values}
    assert paper == {"VADD": 91.8, "VADD+": None, "E-MoE": 94.4, "E-MoE+": None}


def test_laws_tell_how_far_they_are_and_are_what_they_were(tiny) -> None:
    for config in (EMoEConfig(experts=2), VADDConfig(latent=3)):
        method, told = tiny(config), []
        found = laws(method, [4, 1, 6], samples=50, seed=2, tick=lambda *what, told=told: told.append(what))
        if is_drawn(method):
            wanted = repeated_laws(method, [1, 4, 6], repeats=4, samples=50, seed=2)
        else:
            wanted = {steps: law[None] for steps, law in chain_laws(method, [1, 4, 6]).items()}
        assert list(found) == [1, 4, 6] and all(torch.equal(found[steps], wanted[steps]) for steps in found)
        once = [(1, "exact law, T = 1"), (3, "exact law, T = 4"), (4, "exact law, T = 6")]  # new times of each grid
        assert told == once * (4 if is_drawn(method) else 1)
        assert sum(size for size, _ in told) == law_work(method, [4, 1, 6])


SMALL = {"backbone.width": "8", "backbone.hidden": "8", "backbone.heads": "2", "backbone.time-size": "4"}
SMALL |= {"train.steps": "2", "train.batch": "4", "domain.points": "50", "method.experts": "2"}


@pytest.fixture(scope="module")
def toy_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "toy"
    train("toy-8modes-emoe", str(folder), settings=SMALL, device="cpu", quiet=True)
    return folder


def test_progress_goes_to_standard_error(
    toy_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["eval", str(toy_run), "--device", "cpu", "--json", "--exact", "--nfe", "1,2", "--samples", "20"]
    words += ["--rows", "10", "--likelihood", "bound@1 iw@1,4"]
    assert main(words) == 0
    out, err = capsys.readouterr()
    rows = json.loads(out)
    exact = {(row["metric"], row["nfe"]) for row in rows if row["convention"] == "exact"}
    assert exact == {(name, nfe) for name in ("validity", "overlap", "nll", "kl") for nfe in (1, 2)}
    assert "step" not in err  # over before a line is due
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert [row["value"] for row in json.loads(out)] == [row["value"] for row in rows]
    lines = [line for line in err.splitlines() if " of " in line]
    assert f"exact law of {toy_run}: step 1/2 (50.0%)" in lines[0] and "step 2/2 (100.0%)" in lines[1]
    assert [f"samples of {toy_run}: step {call}/3" in line for call, line in enumerate(lines[2:5], 1)] == [True] * 3
    assert f"likelihoods of {toy_run}: step 1/24 (4.2%)" in lines[5] and "| bound@1" in lines[5]
    assert "step 24/24 (100.0%)" in lines[-1] and "ETA 0:00:00 | iw@1,4" in lines[-1] and len(lines) == 2 + 3 + 8 + 4


def test_the_exact_law_of_other_domains_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "rows.csv"
    data.write_text("0,1,2\n1,2,0\n" * 5, encoding="utf-8")
    settings = {key: value for key, value in SMALL.items() if key != "domain.points"} | {"domain.path": str(data)}
    train("rows-emoe", str(tmp_path / "run"), settings=settings, device="cpu", quiet=True)
    assert main(["eval", str(tmp_path / "run"), "--exact", "--nfe", "1", "--samples", "4", "--device", "cpu"]) == 2
    assert "exact: rows-emoe" in capsys.readouterr().err
