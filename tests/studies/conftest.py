"""Shared by tests of studies: tiny sizes, recorded rows of every study, prepared sets of text."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from emoe.reporting.results import Results

TINY = {"train.steps": "30", "train.batch": "16", "backbone.heads": "2"}
TINY |= dict.fromkeys(("backbone.width", "backbone.hidden", "backbone.time-size"), "8")
WORDS = "the a cat dog bird sees hears small old .".split()


@pytest.fixture(scope="session")
def tiny() -> dict[str, str]:
    """Settings of a small network and few steps."""
    return TINY


@pytest.fixture(scope="session")
def recorded() -> Callable[[str, Results], None]:
    """Checks that results hold the recorded rows of a study (`tests/golden/studies.json`)."""
    golden = json.loads((Path(__file__).parents[1] / "golden" / "studies.json").read_text())

    def check(study: str, results: Results) -> None:
        names = ("data", "method", "seed", "nfe", "metric", "convention")
        found = {tuple(getattr(row, name) for name in names): row.value for row in results.rows}
        for *identity, value in golden[study]:
            assert found[tuple(identity)] == pytest.approx(value, rel=1e-4, abs=1e-6), identity

    return check


@pytest.fixture(scope="session")
def untouched() -> Callable[[Path, Callable[[], int]], None]:
    """Checks that a call returns 0 and writes nothing below a folder."""

    def times(folder: Path) -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}

    def check(folder: Path, call: Callable[[], int]) -> None:
        before = times(folder)
        assert call() == 0 and times(folder) == before

    return check


def write_lines(path: Path, seed: int, count: int) -> Path:
    """A file of short sentences."""
    draw = random.Random(seed)
    lines = (
        f"The {draw.choice(['small', 'old'])} {draw.choice(['cat', 'dog'])} {draw.choice(['sees', 'hears'])} a bird."
        for _ in range(count)
    )
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="session")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared sets: `set`, `judge` (other training text, the same test rows), `else`, `known` and `strange`.

    `known` trains on text of `set`, `strange` has other words.
    """
    pytest.importorskip("tokenizers")
    from emoe.domains.text.prepare import PrepareConfig, prepare

    root = tmp_path_factory.mktemp("sets")
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    (root / "vocab.txt").write_text("\n".join([*special, *WORDS]) + "\n")
    (root / "other.txt").write_text("\n".join([*special, *reversed(WORDS)]) + "\n")
    names = {"train": 60, "valid": 30, "test": 40, "judge-train": 80, "judge-valid": 30, "else": 30}
    files = {name: write_lines(root / f"{name}.txt", seed, count) for seed, (name, count) in enumerate(names.items())}
    config = PrepareConfig(length=8, jobs=1)
    for name, parts in {
        "set": ("train", "valid", "test"),
        "judge": ("judge-train", "judge-valid", "test"),
        "else": ("valid", "valid", "else"),
        "known": ("train", "judge-valid", "test"),
        "strange": ("judge-train", "judge-valid", "test"),
    }.items():
        vocabulary = root / ("other.txt" if name == "strange" else "vocab.txt")
        train, valid, test = (files[part] for part in parts)
        splits = {"train": [train], "test": [test]} | ({} if name == "else" else {"valid": [valid]})
        prepare(root / name, vocabulary, [], config=config, **splits)
    return root
