"""`emoe sweep`: which trials there are, how they are compared, what is trained again, what a failure does."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from emoe import studies
from emoe.config import ConfigError
from emoe.reporting.results import Results
from emoe.studies import sweep

SMALL = {"train.steps": "4", "train.batch": "8", "domain.points": "60"}


def options(folder: Path, tiny: dict[str, str], **fields: Any) -> sweep.Options:
    settings = tiny | SMALL | fields.pop("settings", {})
    fields = {"recipe": "demo-mdlm", "name": "s", "device": "cpu", "jobs": 1, "quiet": True} | fields
    return sweep.Options(out=folder / "s", settings=settings, **fields)


def trials(**fields: Any) -> dict[str, Any]:
    return sweep.make_trials(sweep.Options(recipe="demo-emoe", **fields))


def test_trials() -> None:
    """A grid, trials picked by hand, tasks and seeds; equal ones once; a switched family drops earlier fields of it."""
    made = trials(
        vary=("optim.lr=0.001,0.01", "optim.betas=0.9,0.99|0.8,0.9"),
        also=('method.kl_weight={"kind": "linear", "start": 0, "end": 1} optim.lr=1e-2', "method.kind=mdlm"),
        on=("domain.density=8-modes,swiss-roll",),
        seeds=(3, 4),
        settings={"method.experts": "4", "optim.betas": "0.8,0.9"},
    )
    pairs = ("0.001 optim.betas=0.9,0.99", "0.01 optim.betas=0.9,0.99", "0.01 optim.betas=0.8,0.9")
    picked = 'method.kl-weight={"kind": "linear", "start": 0, "end": 1} optim.lr=1e-2'
    assert list(made) == ["base", *(f"optim.lr={pair}" for pair in pairs), picked, "method=mdlm"]
    grid = made["optim.lr=0.01 optim.betas=0.8,0.9"]
    tasks = itertools.product(("8-modes", "swiss-roll"), (3, 4))
    assert [(one.domain.density, one.seed) for one in grid] == list(tasks)
    assert {one.optim.lr for one in grid} == {0.01} and {one.method.experts for one in grid} == {4}
    assert next(iter(made["method=mdlm"])).method.kind == "mdlm"
    names = {one.name for trial in made.values() for one in trial}
    assert len(names) == 12 and "demo-emoe method.experts=4 optim.betas=0.8,0.9 optim.lr=0.01" in names


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vary": ("optim.lrr=1,2",)}, "trial optim.lrr=1: optim.lrr: no such field; did you mean 'optim.lr'"),
        ({"vary": ("optim.lr=1e-3,-1",)}, "trial optim.lr=-1: optim.lr: must be > 0"),
        ({"also": ("optim.lr",)}, "also: expected FIELD=VALUE"),
        ({"vary": ("optim.lr=",)}, "vary: expected FIELD=VALUE"),
        ({"vary": ("optim.lr=1", "optim.lr=2")}, "optim.lr: given twice"),
        ({"vary": ("train.keep=2,3",)}, "trial train.keep=3: changes nothing that is trained"),
        ({"vary": ("seed=1,2",)}, "vary: seed cannot be varied; use --seeds"),
        ({"also": ("domain=rows",), "on": ("domain.density=8-modes",)}, "domain is set by --on"),
        ({"on": ("domain.density=9-modes",)}, "density"),
        ({"settings": {"optim.lrr": "1"}}, "optim.lrr: no such field"),
        ({"metric": ("vallidity",)}, "8-modes has no 'vallidity'; did you mean 'validity'"),  # codespell:ignore
        ({"name": "../up"}, "name: expected letters"),
        ({"recipe": "demo-emo"}, "recipe: 'demo-emo' is not known"),
    ],
)
def test_refused_before_anything_is_written(fields, message: str, tmp_path: Path, tiny) -> None:
    with pytest.raises(ConfigError, match=message):
        studies.run("sweep", options(tmp_path, {}, **fields))
    assert not list(tmp_path.iterdir())


def test_a_sweep_from_end_to_end(tmp_path: Path, tiny, untouched, capsys) -> None:
    fields: dict[str, Any] = {"vary": ("optim.lr=1e-3,1e-2",), "on": ("domain.density=8-modes,swiss-roll",)}
    fields |= {"seeds": (1, 2), "metric": ("kl", "overlap", "coordination_gain"), "nfe": (1, 2)}
    given = options(tmp_path, tiny, **fields)
    assert studies.run("sweep", given) == 0
    said = capsys.readouterr().out
    results, page = Results.load(tmp_path / "s/results.json"), (tmp_path / "s/ranking.md").read_text()
    rows = results.select(metric="kl", nfe=1)
    kl, base = (np.array([row.value for row in rows if ("1e-2" in row.recipe) is changed]) for changed in (True, False))
    assert len(kl) == len(base) == 4 and kl.mean() < base.mean()
    gap = kl - base
    first, second = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")][1:]
    assert first[0] == "| optim.lr=1e-2" and second[0] == "| base" and first[-1] == second[-1] == "4/4 |"
    assert first[1] == f"{kl.mean():.4f}\N{NO-BREAK SPACE}±{kl.std(ddof=1) / 2:.4f}"
    error = gap.std(ddof=1) / 2
    assert first[2] == f"{gap.mean():+.4f}\N{NO-BREAK SPACE}±{error:.4f}".replace("-", "\N{MINUS SIGN}")
    assert second[2] == "—" and "overlap, NFE 2" in page and "emoe sweep demo-mdlm --name s --vary" in page
    assert "optim.lr=1e-2" in said and "minus base" in said
    untouched(tmp_path, lambda: studies.run("sweep", given))
    lost = next((tmp_path / "s/runs").glob("demo-mdlm-seed2-*"))
    shutil.rmtree(lost)
    assert studies.run("sweep", given) == 0 and list(lost.glob("checkpoints/step-*"))
    assert (tmp_path / "s/ranking.md").read_text().splitlines()[2:6][2].split(" | ")[1] == first[1]
    more = options(tmp_path, tiny, **fields | {"seeds": (1, 2, 3), "budget": 0})
    assert studies.run("sweep", more) == 0
    assert "4 runs not trained" in capsys.readouterr().err and "4/6" in (tmp_path / "s/ranking.md").read_text()


def test_failures_are_results_unless_all_fail(tmp_path: Path, tiny, capsys) -> None:
    also = ("optim.lr=1e30 train.steps=25", "domain=rows domain.path=none.npy", "optim.lr=1e-2")
    assert studies.run("sweep", options(tmp_path, tiny, also=also)) == 0
    said = capsys.readouterr()
    assert "optim.lr=1e30 train.steps=25, seed 1 failed: step 2" in said.err and "none.npy" in said.err
    page = (tmp_path / "s/ranking.md").read_text().splitlines()
    assert [line.split(" | ")[-1] for line in page if line.startswith("| ")][1:] == ["1/1 |", "1/1 |", "0/1 |", "0/1 |"]
    every = options(tmp_path / "all", tiny, settings={"optim.lr": "1e30", "train.steps": "25"})
    assert studies.run("sweep", every) == 1 and "nothing is measured yet" in capsys.readouterr().out
