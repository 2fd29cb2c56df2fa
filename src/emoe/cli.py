"""The command line: one table of commands, each imported only when it is called.

Exit codes: 0 done, 2 bad configuration or arguments, 3 bad data, 4 numeric failure or dead run, 5 storage failure,
6 another process of the run is lost, 130/143 stopped by a signal after a good save.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable

COMMANDS = {
    "list": "show the recipes, or the fields of one",
    "train": "train a recipe, every field overridable",
    "sample": "draw samples from a trained run, or complete given rows, images and text",
    "eval": "measure a trained run over numbers of steps (NFE)",
    "verify": "check a run, or random tiny models, against exact laws",
    "sweep": "search over settings: many small runs at once, ranked in a table",
    "reproduce": "run a table of the paper from end to end",
    "data": "download and check MNIST, or turn text into rows of tokens",
    "release": "export the weights of finished runs as a model to be opened by name",
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
  emoe sample RUN --given digit.png --keep top-half --nfe 16 --picture filled.png    the rest of an image
  emoe sample RUN --given "the minister {{3}} on friday." --nfe 16                     a hole of three tokens in a text

`emoe COMMAND --help` explains a command."""


class Parser(argparse.ArgumentParser):
    """argparse without abbreviations, whose errors are one line with a suggestion and exit with 2.

    `examples` are commands that end the help, line by line.
    """

    def __init__(self, *, examples: Sequence[str] = (), **options: Any):
        super().__init__(allow_abbrev=False, **options)
        self.examples = examples

    def format_help(self) -> str:
        """The usual help, then the examples as they are typed."""
        shown = "".join(f"\n  {line}" for line in self.examples)
        return super().format_help() + (f"\nexamples:{shown}\n" if shown else "")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse all arguments; one that is not known is refused."""
        found, unknown = self.parse_known_args(args, namespace)
        self.refuse(unknown)
        return found

    def refuse(self, unknown: Sequence[str], fields: Sequence[str] = ()) -> None:
        """Exit if there are unknown arguments; `fields` are names of settings one of them may have meant."""
        from emoe.config import field_hint

        for word in unknown[:1]:
            name = word.partition("=")[0]
            flags = [flag for action in self._actions for flag in action.option_strings if flag.startswith("--")]
            known = field_hint(name.lstrip("-"), [*(flag[2:] for flag in flags), *fields])
            self.error(f"unknown argument {name!r}{known if name.startswith('--') else ''}")

    def error(self, message: str) -> NoReturn:
        """Print the error and where help is."""
        print(f"{self.prog}: {message} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(2)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a plus-minus sign must not end a run on an old terminal
    try:
        try:
            code = _main(words)
        except SystemExit as end:  # argparse, after --help or an error
            code = int(end.code or 0)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader of a pipe went away (`emoe list | head`): not an error, but the interpreter's own flush would be.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _main(words: list[str]) -> int:
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
    """Run a command; what a user can mend is a line per problem and an exit code, everything else a traceback."""
    try:
        from emoe import commands

        run: Callable[[list[str]], int] = getattr(commands, f"cmd_{command}")
        return run(words)
    except BrokenPipeError:
        raise
    except (Exception, KeyboardInterrupt) as error:
        told = _explain(error)
        if told is None:
            raise
        message, code = told
    for line in message.splitlines():
        print(f"emoe {command}: {line}", file=sys.stderr)
    return code


def _explain(error: BaseException) -> tuple[str, int] | None:
    """Message and exit code of an error that a user can mend; None for all others."""
    from emoe.config import ConfigError

    if isinstance(error, ConfigError):
        return str(error), 2
    if hasattr(error, "exit_code"):
        return str(error), int(error.exit_code)
    if isinstance(error, KeyboardInterrupt):
        return "stopped", 130
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror or error}; give a path that exists and is writable, or free space", 5
    # torch has no type of its own for memory that a CPU lacks.
    if type(error).__name__ in ("MemoryError", "OutOfMemoryError") or "can't allocate memory" in str(error):
        return "out of memory; lower train.batch or eval.batch, or the sizes of the network", 4
    return None
