"""The command line as a whole: help, what is refused with which words, exit codes, terminals."""

from __future__ import annotations

import importlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

import emoe
from emoe.cli import COMMANDS, main
from emoe.commands import train
from emoe.config import allowed_range
from emoe.engine.fit import NumericFailure
from emoe.overrides import as_text, paths
from emoe.recipes import all_recipes, get_recipe

Command = Callable[..., tuple[int, str, str]]
SOURCE = str(Path(emoe.__file__).parents[1])


def shell(*words: str, **options: object) -> subprocess.CompletedProcess[str]:
    """A real process."""
    environment = os.environ | {"PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1"}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "timeout": 120} | options
    return subprocess.run([sys.executable, *words], env=environment, **options)  # type: ignore[call-overload, no-any-return]


def test_help_imports_nothing_heavy(command: Command) -> None:
    code, out, err = command("--help")
    assert code == 0 and not err and all(name in out for name in COMMANDS)
    assert command()[:2] == command("help")[:2] == (code, out)
    assert command("--version")[:2] == (0, f"emoe {emoe.__version__}\n")
    script = (
        "import sys; from emoe.cli import main\n"
        "for words in '--help', '--version', 'trainn', 'list --help', 'train --help', 'sample x --nfe 0',"
        " 'data --help', 'release --help', 'eval x --nfe 0', 'reproduce --help': main(words.split())\n"
        "sys.exit(bool({'torch', 'numpy', 'matplotlib', 'rich'} & set(sys.modules)))"
    )
    done = shell("-c", script)
    assert done.returncode == 0 and "Traceback" not in done.stderr
    assert "did you mean 'train'?" in done.stderr and "nfe: must be >= 1" in done.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str, command: Command) -> None:
    module, function, _ = COMMANDS[name]
    assert callable(getattr(importlib.import_module(f"emoe.commands.{module}"), function))
    code, out, err = command(name, "--help")
    assert code == 0 and f"usage: emoe {name}" in out and not err
    assert name == "demo" or re.search(rf"^examples:\n  emoe {name}\b", out, re.MULTILINE)


def test_list(command: Command) -> None:
    assert [line.split()[0] for line in command("list")[1].splitlines()] == sorted(all_recipes())
    assert json.loads(command("list", "--json")[1]) == {name: recipe.doc for name, recipe in all_recipes().items()}
    assert json.loads(command("list", "rows-vadd", "--json")[1])["method"]["kind"] == "vadd"


def test_train_help_lists_every_field_with_its_range(command: Command) -> None:
    recipe = "toy-8modes-emoe"
    code, out, err = command("train", recipe, "--help")
    lines = out.splitlines()
    assert code == 0 and not err and not Path("runs").exists() and "usage: emoe train" in lines[0]
    for path, _, field, value in paths(get_recipe(recipe)):
        meaning = lines[lines.index(f"  --{path.replace('_', '-')} {shlex.quote(as_text(value))}") + 1]
        assert field.metadata["doc"] in meaning and allowed_range(field.metadata) in meaning
    assert command("list", recipe)[1] in out
    _, out, _ = command("train", recipe, "--method", "vadd", "--method.latent", 3, "-h")  # fields of the chosen kind
    assert "  --method.latent 3" in out and "--method.experts" not in out


# Words | fragments of what is said.
REFUSED = """
trainn toy-8modes-emoe | no command 'trainn' | did you mean 'train'?
train toy-8modes-emo | recipe: 'toy-8modes-emo' | did you mean 'toy-8modes-emoe'?
train | arguments are required: recipe | emoe train --help
train toy-8modes-emoe --method.topk 2 | method.topk: no such field | did you mean 'method.top-k'?
train toy-8modes-emoe --steps 2 | '--steps' | did you mean 'train.steps'?
train toy-8modes-emoe --reusme | '--reusme' | did you mean 'resume'?
eval x --nfes 2 | '--nfes' | did you mean 'nfe'?
train toy-8modes-emoe runs/a | unknown argument 'runs/a'
train toy-8modes-emoe --method emo | method.kind: 'emo' is not known | did you mean 'emoe'?
train toy-8modes-emoe --train.steps 0 --optim.lr -1e-3 | train.steps: must be >= 1, got 0 | optim.lr: must be > 0
train toy-8modes-emoe --seed -1 | seed: must be >= 0, got -1
train toy-8modes-mdlm --method.top-k 2 | method.top-k: no such field | method.t-low
train toy-8modes-emoe --train.steps | train.steps: a value is missing | --train.steps VALUE
train toy-8modes-emoe --device gpu | device: 'gpu' is not known | allowed: auto, cpu, cuda, cuda:N
train toy-8modes-emoe --data-root x | data-root: the data of this run come from no such folder
sample x --nfe 1,2 | nfe: expected whole number >= 1 and <= 10000, got '1,2'
sample x | run: x is no run folder | emoe train RECIPE
sample x --keep 0 | keep: applies to given rows only; add --given FILE
sample x --given 1 --continue 1 | continue: is another way of giving rows; give either --given or --continue
sample x --given | --given: expected at least one argument
eval x --likelihood bond@4 | likelihood: 'bond@4' is no likelihood; allowed: objective, nelbo, bound@T, iw@T,K
verify --method mdml | method: 'mdml' has no exact law | did you mean 'mdlm'?
reproduce toyy | study: 'toyy' is not known | did you mean 'toy'?
reproduce toy --densities 9-modes | densities: '9-modes' | 8-modes, swiss-roll
reproduce toy --seeds one | seeds: expected whole number >= 0
reproduce toy --train.stps 5 | train.stps: | did you mean 'train.steps'?
reproduce toy --data-root x | data-root: 'toy' needs no data files
data minst | data: 'minst' is not known | did you mean 'mnist'?
data | arguments are required: mnist|prepare
report none.json --picture a.png --run b | results: none.json does not exist | picture: a.png | run: b
"""


@pytest.mark.parametrize("case", REFUSED.strip().splitlines(), ids=lambda case: case.partition(" | ")[0])
def test_refused(case: str, command: Command, empty_folder: Path) -> None:
    words, *fragments = case.split(" | ")
    code, out, err = command(*words.split())
    assert code == 2 and not out
    assert all(fragment in err for fragment in fragments), err
    assert "Traceback" not in err and all(line.startswith("emoe") for line in err.splitlines())
    assert list(empty_folder.iterdir()) == []  # nothing is begun before everything is checked


ERRORS = {
    "stopped\n": (KeyboardInterrupt(), 130),
    "step 5: not finite\n": (NumericFailure("step 5: not finite"), 4),
    "out of memory; lower train.batch": (MemoryError(), 4),
    "out of memory; ": (RuntimeError("DefaultCPUAllocator: can't allocate memory: 8 bytes"), 4),
    "/x: Permission denied; ": (PermissionError(13, "Permission denied", "/x"), 5),
    "No space left on device; ": (OSError(28, "No space left on device"), 5),
}


def test_errors_become_exit_codes(monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    for text, (error, expected) in ERRORS.items():
        monkeypatch.setattr(train, "list_recipes", Mock(side_effect=error))
        code, _, err = command("list")
        assert code == expected and err.startswith(f"emoe list: {text}")
    monkeypatch.setattr(train, "list_recipes", Mock(side_effect=ZeroDivisionError))  # a bug is shown whole
    with pytest.raises(ZeroDivisionError):
        main(["list"])


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["list"]])
def test_a_closed_pipe_is_no_error(words: list[str]) -> None:
    """As in `emoe list | head -1`, with the reader gone from the start."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as pipe:
        done = shell("-m", "emoe", *words, stdout=pipe)
    assert (done.returncode, done.stderr) == (0, "")
    assert shell("-m", "emoe", "trainn").returncode == 2


def test_a_terminal_without_unicode(trained: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    assert main(["eval", str(trained["toy-8modes-mdlm"]), "--nfe", "1", "--samples", "50"]) == 0
    assert raw.getvalue().isascii() and b"MDLM" in raw.getvalue()
