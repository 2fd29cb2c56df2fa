"""Signatures become parsers: types, ranges, help, settings and messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from emoe.commands.args import FIELDS, REPEATED, SEVERAL, Command, Range, Seed, split_settings, with_data_root
from emoe.config import ConfigError
from emoe.experiment import Experiment


def paint(
    files: tuple[Path, ...],
    *,
    out: Path,
    steps: Annotated[tuple[int, ...] | None, Range(1, 9)] = None,
    seed: Seed = 0,
    share: float = 0.5,
    ink: Literal["dark", "light"] = "dark",
    names: tuple[str, ...] = ("a", "b"),
    given: Annotated[tuple[str, ...], SEVERAL] = (),
    run: Annotated[tuple[Path, ...], REPEATED] = (),
    lm: Annotated[str | None, "--judge"] = None,
    continue_: bool = False,
    settings: Mapping[str, str],
    command: str,
) -> dict[str, Any]:
    """Paint files.

    With colours, 100% of them.

    Args:
        files (FILE): what to paint
        steps: some steps,
            in two lines
        seed: seed of 100%
        lm (FOLDER): a model

    Examples:
        emoe paint a    one file
        emoe paint --out x a b
    """
    return locals()


PAINT = Command("emoe paint", paint)


def test_types_and_defaults() -> None:
    defaults = {"steps": None, "seed": 0, "share": 0.5, "ink": "dark", "names": ("a", "b"), "given": (), "run": ()}
    same = {"files": (Path("a"), Path("b")), "out": Path("x"), "lm": None, "continue_": False, "settings": {}}
    assert PAINT("a b --out x".split()) == defaults | same | {"command": "emoe paint a b --out x"}
    line = "a --out x --steps 1,2 --seed 7 --share 1 --ink light --names c --run r --run s --judge m --continue"
    given = PAINT([*line.split(), "--given", "?,1", "2,?"])
    assert (given["steps"], given["seed"], given["share"], given["ink"]) == ((1, 2), 7, 1.0, "light")
    assert (given["names"], given["given"], given["run"]) == (("c",), ("?,1", "2,?"), (Path("r"), Path("s")))
    assert (given["lm"], given["continue_"]) == ("m", True)
    line = "a --out x --given=-1,5 --given 2 --a.b 1 c.d=2 --run e.f=3"  # the value of an option is no setting
    given = PAINT(line.split())
    assert (given["given"], given["run"]) == (("-1,5", "2"), (Path("e.f=3"),))
    assert given["settings"] == {"a.b": "1", "c.d": "2"} and given["command"] == f"emoe paint {line}"


REFUSED = {
    "--steps 1,10": "steps: must be >= 1 and <= 9, got 10",
    "--steps 1,x": "steps: expected whole number >= 1 and <= 9, got 'x'",
    "--seed 1,2": f"seed: expected whole number >= 0 and <= {2**63 - 1}, got '1,2'",
    "--share x": "share: expected number, got 'x'",
    "--share nan": "share: must be a finite number, got nan",
    "--ink drak": "ink: got 'drak'; did you mean 'dark'?",
}


@pytest.mark.parametrize("words", REFUSED)
def test_values_that_are_refused(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        PAINT(["f", "--out", "x", *words.split()])
    assert capsys.readouterr().err == f"emoe paint: argument --{REFUSED[words]} (see emoe paint --help)\n"


HELP = """
Paint files. With colours, 100% of them.
FILE what to paint
--steps STEPS some steps, in two lines
--seed SEED seed of 100% (default 0)
--ink {dark,light} (default dark)
--names NAMES (default a,b)
--lm FOLDER a model
--continue
"""


def test_help(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit, match="0"):
        PAINT(["--help"])
    shown = capsys.readouterr().out
    assert set(HELP.strip().splitlines()) <= {" ".join(line.split()) for line in shown.splitlines()}
    assert not any(f"--{name}" in shown for name in ("judge", "settings", "command"))
    assert shown.endswith("\n\nexamples:\n  emoe paint a    one file\n  emoe paint --out x a b\n")


@dataclass(frozen=True, kw_only=True)
class Options:
    recipe: str = field(default="", metadata={"doc": "a recipe", "positional": True})
    seeds: tuple[int, ...] = field(default=(0, 1), metadata={"doc": "seeds", "low": 0, "high": 9})
    vary: tuple[str, ...] = field(default=(), metadata={"doc": "values", "repeat": True, "metavar": "A=B,..."})
    budget: float | None = field(default=None, metadata={"doc": "minutes", "low": 0, "high": None})
    runs: Path = field(default=Path(), metadata={"hidden": True})
    settings: Mapping[str, str] = field(default_factory=dict)


def test_options_of_a_dataclass(capsys: pytest.CaptureFixture[str]) -> None:
    options = Command("emoe try", Options, "Try it.\n\nExamples:\n    emoe try a")
    assert options(["toy-8modes-emoe"]) == Options(recipe="toy-8modes-emoe")
    words = "toy-8modes-emoe --seeds 3 --vary a.b=1,2 --vary c.d=3 --budget 0.5 --e.f 4 --seed 5 --method=vadd"
    settings = {"e.f": "4", "seed": "5", "method": "vadd"}
    expected = Options(recipe="toy-8modes-emoe", seeds=(3,), vary=("a.b=1,2", "c.d=3"), budget=0.5, settings=settings)
    assert options(words.split()) == expected
    for words in ("", "a --seeds x", "a --budget -1", "toy-8modes-emoe --steps 3", "--help"):
        with pytest.raises(SystemExit):
            options(words.split())
    out, err = capsys.readouterr()
    for message in ("required: recipe", "whole number >= 0 and <= 9, got 'x'", "--budget: must be >= 0, got -1.0"):
        assert message in err
    assert "unknown argument '--steps'; did you mean 'train.steps'?" in err
    assert "Try it." in out and "--vary A=B,..." in out and "(default 0,1)" in out and "--runs" not in out


def test_settings() -> None:
    words = "recipe --a.b 1 --a.c=2 d.e-f=3 --run x.y --seed -4 --g.h -5 runs/v1.2/x=3 --out=a.b".split()
    rest, settings = split_settings(words, ("seed",))
    assert settings == {"a.b": "1", "a.c": "2", "d.e-f": "3", "seed": "-4", "g.h": "-5"}
    assert rest == "recipe --run x.y runs/v1.2/x=3 --out=a.b".split()
    assert set(FIELDS) == set(Experiment.__dataclass_fields__)
    assert with_data_root({"a.b": "1"}, "x") == {"a.b": "1", "domain.root": "x"}
    with pytest.raises(ConfigError, match="a.b: a value is missing; write --a.b VALUE"):
        split_settings(["--a.b"])
    with pytest.raises(ConfigError, match="data-root: is the same as --domain.root; give one of them"):
        with_data_root({"domain.root": "y"}, "x")
