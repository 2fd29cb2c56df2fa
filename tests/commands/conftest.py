"""Commands in this process, in an empty folder, and tiny runs for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from emoe.cli import main

METHODS = ("mdlm", "vadd", "emoe")
TINY = (
    "--train.steps 20 --train.batch 16 --train.log-every 5 --backbone.width 8 --backbone.hidden 16 --backbone.heads 2 "
    "--backbone.time-size 8 --eval.nfe 1,2 --eval.samples 200 --eval.batch 150 --quiet --device cpu"
).split()

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs a command in this process: (exit code, standard output, standard error)."""

    def run(*words: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([str(word) for word in words])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return run


@pytest.fixture(scope="session")
def rows_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200 rows of 3 symbols 0..4, in a folder whose name has a space and an umlaut."""
    path = tmp_path_factory.mktemp("my däta") / "rows.npy"
    np.save(path, np.random.default_rng(0).integers(5, size=(200, 3)))
    return path


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, rows_file: Path) -> dict[str, Path]:
    """A tiny run of every method on two domains."""
    runs = {}
    for method in METHODS:
        data = {f"toy-8modes-{method}": "--domain.points 500".split(), f"rows-{method}": ["--domain.path", rows_file]}
        for recipe, words in data.items():
            runs[recipe] = tmp_path_factory.mktemp("runs") / recipe
            assert main(["train", recipe, "--run", str(runs[recipe]), *map(str, words), *TINY]) == 0
    return runs


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Commands run in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
