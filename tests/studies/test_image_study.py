"""`emoe reproduce digits` and `mnist`: recorded rows, parts alone, what is continued, figures and the animation."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from emoe import studies
from emoe.backbones.base import total_parameters
from emoe.reporting.results import Results
from emoe.runs.train import load_run
from emoe.studies import images
from emoe.studies.pools import Archive, PoolKey

LATENT = ["objective", "bound@1", "bound@4", "bound@16", "bound@64", "iw@1,64", "iw@4,64"]
PLAIN = ["objective", "nelbo", "bound@1", "bound@4", "bound@16", "bound@64"]
SIZES = {"nfe": (1, 2), "samples": 40, "rows": 20, "device": "cpu", "jobs": 1, "quiet": True}
SMALL = {"backbone.time-size": "4", "backbone.groups": "2", "train.steps": "4", "train.batch": "8"}
SMALL |= dict.fromkeys(("backbone.channels", "backbone.hidden", "backbone.time-hidden"), "8")
TOY = {"domain": "toy", "domain.density": "8-modes", "backbone": "transformer", "train.steps": "1"}


def study(folder: Path, *methods: str, settings: dict[str, str] = SMALL, **fields: Any) -> int:
    places = {"runs": folder / "runs", "results": folder / "results", "methods": methods or None}
    return studies.run("digits", images.Options(**SIZES | places | fields, settings=settings))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of three methods, the first of them run by itself."""
    folder = tmp_path_factory.mktemp("study")
    assert study(folder, "mdlm") == 0
    shutil.copy(folder / "results/digits.json", folder / "first.json")
    assert study(folder, "emoe", "vadd", "mdlm", jobs=2) == 0
    return folder


def test_the_study_gives_the_recorded_rows(finished: Path, recorded, untouched) -> None:
    results = Results.load(finished / "results/digits.json")
    recorded("digits", results)
    for method in ("mdlm", "vadd", "emoe"):
        own = results.only(method=method)
        names = {row.convention for row in own.select(metric="bpd")}
        assert names == set(PLAIN if method == "mdlm" else LATENT)
        assert {row.n for row in own.select(metric="bpd")} == {20}  # all likelihoods of one table on the same rows
        found = {row.metric for row in own.select(nfe=1)}
        assert {"frechet", "precision", "recall", "density", "coverage", "confidence", "class_tv"} <= found
        (path,) = (finished / "runs").glob(f"digits-{method}-seed0-*")
        run = load_run(path, device="cpu")
        (total,), (active,) = (own.select(metric=name) for name in ("params", "params_active"))
        assert total.value == total_parameters(run.method)
        encoder = total.value - total_parameters(run.method.backbone)
        if method == "vadd":  # the encoder takes no part in sampling
            assert encoder > 0 and active.value == total.value - encoder
        pool = Archive.open(finished / f"runs/pools/{path.name}.npz")
        assert pool.rows(PoolKey(2)) == 16  # those that the figure shows
    assert set(Results.load(finished / "first.json").rows) <= set(results.rows)  # nothing is lost or measured again
    text = (finished / "results/digits.md").read_text()
    assert all(f" {name} |" in text for name in {*PLAIN, *LATENT}) and "real data" in text
    untouched(finished, lambda: study(finished, "mdlm", "vadd", "emoe"))


def test_figures_and_the_animation(finished: Path) -> None:
    figures = finished / "results/figures"
    names = {f"digits-{name}" for name in ("curves.png", "film.gif", "samples.png")}
    assert {path.name for path in figures.iterdir()} == names
    with Image.open(figures / "digits-film.gif") as film:
        assert film.n_frames == images.ANIMATION_STEPS + 1


def test_parts_alone_and_without_time(tmp_path: Path, capsys) -> None:
    assert study(tmp_path, "mdlm", only="score", quiet=False) == 0
    assert "not trained yet, so not measured" in capsys.readouterr().err
    assert study(tmp_path, "mdlm", only="train") == 0 and not (tmp_path / "results").exists()
    assert study(tmp_path, "mdlm", only="score", budget=0) == 0
    assert "0 runs not trained, 11 measurements not made" in capsys.readouterr().err
    assert study(tmp_path, "mdlm", only="score") == 0
    assert not (tmp_path / "results/figures/digits-film.gif").exists()  # nothing is routed
    assert study(tmp_path, "mdlm", only="score", samples=50) == 0  # more samples are drawn anew
    rows = Results.load(tmp_path / "results/digits.json")
    assert {row.n for row in rows.select(metric="ink", method="mdlm")} == {50}


def test_the_folder_of_the_data_is_no_part_of_a_run(tmp_path: Path, capsys) -> None:
    assert study(tmp_path, "mdlm", settings=TOY) == 1 and "'toy' has no images" in capsys.readouterr().err
    fields = {"methods": ("mdlm",), "runs": tmp_path, "results": tmp_path} | SIZES
    for root in (tmp_path / "here", tmp_path / "there"):
        given = images.Options(**fields, data_root=root, settings={"train.steps": "1"})
        assert studies.run("mnist", given) == 1  # no data there
        assert str(root) in capsys.readouterr().err and "root" not in given.command_line()
