"""The command line: one table of commands, each imported only when it is called.

Exit codes: 0 done, 2 bad configuration or arguments, 3 bad data, 4 numeric failure, 5 storage failure,
130/143 stopped by a signal after a good save.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable

COMMANDS = {
    "list": "show the recipes, or the fields of one",
    "train": "train a recipe, every field overridable",
    "sample": "draw samples from a trained run",
    "eval": "measure a trained run over numbers of steps (NFE)",
    "reproduce": "run a table of the paper from end to end",
    "report": "write an HTML report from results or runs",
    "demo": "train three methods in minutes and show the difference",
}

TOP_HELP = """usage: emoe COMMAND [...]

E-MoE: masked diffusion whose reverse step is a mixture over expert routes.

commands:
{commands}

first steps:
  emoe demo                                 train MDLM, VADD and E-MoE on 8-modes and compare them
  emoe list                                 all recipes
  emoe train toy-8modes-emoe --help         every field of a recipe, with its range
  emoe train toy-8modes-emoe --run runs/a --train.steps 2000
  emoe eval runs/a --nfe 1,2,4
  emoe train rows-emoe --domain.path data.npy    your own rows of integers

`emoe COMMAND --help` explains a command."""


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one line and exit with 2."""

    def error(self, message: str) -> NoReturn:
        """Print the error and where help is."""
        print(f"{self.prog}: {message}\n(see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(2)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        width = max(map(len, COMMANDS))
        print(TOP_HELP.format(commands="\n".join(f"  {name:<{width}}  {text}" for name, text in COMMANDS.items())))
        return 0
    if words[0] in ("-V", "--version"):
        from emoe import __version__

        print(f"emoe {__version__}")
        return 0
    if words[0] not in COMMANDS:
        from emoe.config import hint

        print(f"emoe: no command {words[0]!r}{hint(words[0], list(COMMANDS))}", file=sys.stderr)
        return 2
    return _guarded(words[0], words[1:])


def _guarded(command: str, words: list[str]) -> int:
    """Run a command; what a user can mend is one message and an exit code, everything else a traceback."""
    from emoe.config import ConfigError

    try:
        from emoe import commands

        run: Callable[[list[str]], int] = getattr(commands, f"cmd_{command}")
        return run(words)
    except ConfigError as error:
        for line in error.problems:
            print(f"emoe {command}: {line}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader of a pipe went away (`emoe list | head`): not an error, but the interpreter's own flush would be.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        code = getattr(error, "exit_code", None)
        if code is None:
            raise
        print(f"emoe {command}: {error}", file=sys.stderr)
        return int(code)
