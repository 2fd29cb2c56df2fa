"""Signatures become parsers: types, ranges, help, settings and messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from emoe.commands.args import REPEATED, SEVERAL, Command
from emoe.commands.settings import FIELDS, split_settings, with_data_root
from emoe.commands.values import Range, Seed
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
        out: where to
        steps: some steps,
            in two lines
        seed: seed of 100%
        share: a share
        ink: the ink
        names: names
        given: several words
        run: run folders
        lm (FOLDER): a model
        continue_: go on
        settings: fields
        command: the command line

    Examples:
        emoe paint a    one file
        emoe paint --out x a b
    """
    return {name: value for name, value in locals().items() if value is not None}


PAINT = Command("emoe paint", paint)
DEFAULTS = {"seed": 0, "share": 0.5, "ink": "dark", "names": ("a", "b"), "given": (), "run": (), "continue_": False}


def painted(line: str) -> dict[str, Any]:
    words = line.split()
    return PAINT([*words, "--out", "x"])


def test_types_and_defaults() -> None:
    always = {"out": Path("x"), "settings": {}}
    assert painted("a b") == DEFAULTS | always | {"files": (Path("a"), Path("b")), "command": "emoe paint a b --out x"}
    line = (
        "a --steps 1,2 --seed 7 --share 1 --ink light --names c --given ?,1 -2,3 --run r --run s --judge m --continue"
    )
    given = painted(line.replace("-2,3", "2,?"))
    assert (given["steps"], given["seed"], given["share"], given["ink"]) == ((1, 2), 7, 1.0, "light")
    assert (given["names"], given["given"]) == (("c",), ("?,1", "2,?"))
    assert (given["run"], given["lm"], given["continue_"]) == ((Path("r"), Path("s")), "m", True)
    given = painted("a --given=-1,5 --given 2 --a.b 1 c.d=2 --run e.f=3")  # the value of an option is no setting
    assert given["given"] == ("-1,5", "2") and given["settings"] == {"a.b": "1", "c.d": "2"}
    assert given["run"] == (Path("e.f=3"),) and given["command"].startswith("emoe paint a --given=-1,5")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--steps 1,10", "steps: must be >= 1 and <= 9, got 1,10"),
        ("--steps 1,x", "steps: expected whole numbers >= 1 and <= 9, got '1,x'"),
        ("--seed 1,2", f"seed: expected one whole number >= 0 and <= {2**63 - 1}, got '1,2'"),
        ("--seed -1", f"seed: must be >= 0 and <= {2**63 - 1}, got -1"),
        ("--share x", "share: expected numbers, got 'x'"),
        ("--share 1,2", "share: expected one number, got '1,2'"),
        ("--share nan", "share: must be finite, got nan"),
        ("--ink drak", "ink: 'drak' is not known; did you mean 'dark'?"),
        ("--ink x", "ink: 'x' is not known; allowed: dark, light"),
        ("--a.b", "a.b: a value is missing; write --a.b VALUE"),
    ],
)
def test_values_that_are_refused(words: str, problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        PAINT(["f", "--out", "x", *words.split()])
    assert error.value.problems == [problem]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("", "the following arguments are required: FILE, --out"),
        ("a", "the following arguments are required: --out"),
        ("a --out x --seeed 1", "unknown argument '--seeed'; did you mean 'seed'?"),
        ("a --out x --cont", "unknown argument '--cont'; did you mean 'continue'?"),
        ("a --out", "argument --out: expected one argument"),
    ],
)
def test_arguments_that_are_refused(words: str, problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        PAINT(words.split())
    assert end.value.code == 2
    assert capsys.readouterr().err == f"emoe paint: {problem} (see emoe paint --help)\n"


def test_help(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as end:
        PAINT(["--help"])
    shown = capsys.readouterr().out
    assert end.value.code == 0 and "Paint files. With colours, 100% of them.\n" in shown
    lines = [line.split(maxsplit=1) for line in shown.splitlines()]
    for flag, text in {
        "--steps": "STEPS         some steps, in two lines",
        "--seed": "SEED           seed of 100% (default 0)",
        "--ink": "{dark,light}    the ink (default dark)",
        "--names": "NAMES         names (default a,b)",
        "--lm": "FOLDER           a model",
        "--continue": "go on",
        "FILE": "what to paint",
    }.items():
        assert [flag, text] in lines
    assert "--judge" not in shown and "--settings" not in shown and "--command" not in shown
    assert shown.endswith("\n\nexamples:\n  emoe paint a    one file\n  emoe paint --out x a b\n")


@dataclass(frozen=True, kw_only=True)
class Options:
    recipe: str = field(default="", metadata={"help": "a recipe", "positional": True})
    seeds: tuple[int, ...] = field(default=(0, 1), metadata={"help": "seeds", "low": 0, "high": 9})
    vary: tuple[str, ...] = field(default=(), metadata={"help": "values", "repeat": True, "metavar": "A=B,..."})
    budget: float | None = field(default=None, metadata={"help": "minutes", "low": 0, "high": None})
    runs: Path = field(default=Path(), metadata={"hidden": True})
    exact: bool = field(default=False, metadata={"help": "exactly"})
    settings: Mapping[str, str] = field(default_factory=dict)


def test_options_of_a_dataclass(capsys: pytest.CaptureFixture[str]) -> None:
    options = Command("emoe try", Options, "Try it.\n\nExamples:\n    emoe try a")
    assert options(["toy-8modes-emoe"]) == Options(recipe="toy-8modes-emoe")
    words = "toy-8modes-emoe --seeds 3 --vary a.b=1,2 --vary c.d=3 --budget 0.5 --exact --e.f 4 --seed 5 --method=vadd"
    assert options(words.split()) == Options(
        recipe="toy-8modes-emoe", seeds=(3,), vary=("a.b=1,2", "c.d=3"), budget=0.5, exact=True,
        settings={"e.f": "4", "seed": "5", "method": "vadd"},
    )  # fmt: skip
    for wrong, problem in {"--seeds x": "seeds: expected whole numbers >= 0 and <= 9, got 'x'",
                           "--budget -1": "budget: must be >= 0, got -1"}.items():  # fmt: skip
        with pytest.raises(ConfigError, match=problem):
            options(["a", *wrong.split()])
    with pytest.raises(SystemExit):
        options(["toy-8modes-emoe", "--steps", "3"])  # a field of the recipe
    assert "unknown argument '--steps'; did you mean 'train.steps'?" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        options(["--help"])
    shown = capsys.readouterr().out
    assert "Try it." in shown and "--vary A=B,..." in shown and "(default 0,1)" in shown
    assert shown.endswith("examples:\n  emoe try a\n")


def test_forms_of_settings() -> None:
    rest, settings = split_settings(
        "recipe --a.b 1 --a.c=2 d.e-f=3 --run x.y --seed -4 --g.h -5 runs/v1.2/x=3 --out=a.b".split(), ("seed",)
    )
    assert settings == {"a.b": "1", "a.c": "2", "d.e-f": "3", "seed": "-4", "g.h": "-5"}
    assert rest == "recipe --run x.y runs/v1.2/x=3 --out=a.b".split()
    assert set(FIELDS) == set(Experiment.__dataclass_fields__)


def test_the_data_root_is_a_setting() -> None:
    with with_data_root({"a.b": "1"}, "x") as settings:
        assert settings == {"a.b": "1", "domain.root": "x"}
    with pytest.raises(ConfigError, match="data-root: is the same as --domain.root; give one of them"):
        with with_data_root({"domain.root": "y"}, "x"):
            pass
    with pytest.raises(ConfigError, match="data-root: the data of this run come from no such folder; leave it out"):
        with with_data_root({}, "x"):
            raise ConfigError(["domain.root: no such field; did you mean 'domain.path'?"])
