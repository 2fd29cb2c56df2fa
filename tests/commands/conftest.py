"""Commands in this process, in an empty folder, and tiny runs for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from emoe.cli import main

TINY = (
    "--train.steps 20 --train.batch 16 --train.log-every 5 --backbone.width 8 --backbone.hidden 16 --backbone.heads 2 "
    "--backbone.time-size 8 --eval.nfe 1,2 --eval.samples 200 --eval.batch 150 --quiet --device cpu"
).split()


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs a command in this process: (exit code, standard output, standard error)."""

    def run(*words: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([str(word) for word in words])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return run


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny runs by recipe; the folder of the data has a space and an umlaut."""
    rows = tmp_path_factory.mktemp("my däta") / "rows.npy"
    np.save(rows, np.random.default_rng(0).integers(5, size=(200, 3)))
    runs = {}
    for recipe in ("toy-8modes-mdlm", "toy-8modes-vadd", "toy-8modes-emoe", "rows-mdlm", "rows-emoe"):
        data = ["--domain.path", str(rows)] if recipe.startswith("rows") else ["--domain.points", "500"]
        runs[recipe] = tmp_path_factory.mktemp("runs") / recipe
        assert main(["train", recipe, "--run", str(runs[recipe]), *data, *TINY]) == 0
    return runs


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Commands run in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
