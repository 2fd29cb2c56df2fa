"""The command line: `emoe COMMAND`; the module of a command is imported when it is called.

Exit codes: 0 done, 2 bad configuration or arguments, 3 bad data, 4 numeric failure or collapse, 5 storage failure,
6 another process of the run is lost, 130/143 stopped by a signal after a checkpoint.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Sequence

COMMANDS = {  # name: (module, function of words, help)
    "list": ("train", "list_recipes", "show the recipes, or the fields of one"),
    "train": ("train", "main", "train a recipe, every field overridable"),
    "sample": ("sample", "sample", "draw samples from a trained run, or complete given rows, images and text"),
    "eval": ("evaluate", "evaluate", "measure a trained run over numbers of steps (NFE)"),
    "verify": ("evaluate", "verify", "check a run, or random tiny models, against exact laws"),
    "sweep": ("reproduce", "sweep", "search over settings: many small runs at once, ranked in a table"),
    "reproduce": ("reproduce", "main", "run a table of the paper from end to end"),
    "data": ("data", "main", "download and check MNIST, or turn text into rows of tokens"),
    "release": ("train", "release", "export the weights of finished runs as a model to be opened by name"),
    "report": ("evaluate", "report", "write an HTML report from results or runs"),
    "demo": ("reproduce", "demo", "train three methods in minutes and show the difference"),
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a plus-minus sign must not end a run on an old terminal
    try:
        code = _main(words)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader of a pipe went away (`emoe list | head`): not an error, but the interpreter's own flush would be.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _main(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        width = max(map(len, COMMANDS))
        print(TOP_HELP.format(commands="\n".join(f"  {name:<{width}}  {row[-1]}" for name, row in COMMANDS.items())))
        return 0
    if words[0] in ("-V", "--version"):
        from emoe import __version__

        print(f"emoe {__version__}")
        return 0
    if words[0] not in COMMANDS:
        from emoe.config import hint

        print(f"emoe: no command {words[0]!r}{hint(words[0], list(COMMANDS))}", file=sys.stderr)
        return 2
    return _run(words[0], words[1:])


def _run(command: str, words: list[str]) -> int:
    """Run a command; an error that the user can correct is a line per problem and an exit code."""
    module, function, _ = COMMANDS[command]
    try:
        return int(getattr(importlib.import_module(f"emoe.commands.{module}"), function)(words))
    except SystemExit as end:  # argparse, after --help or an error
        return int(end.code or 0)
    except (Exception, KeyboardInterrupt) as error:
        message, code = _explain(error)
        if message is None:
            raise
    for line in message.splitlines():
        if line.startswith("domain.root: no such field") and "--data-root" in " ".join(words):
            line = "data-root: the data of this run come from no such folder; leave it out"
        print(f"emoe {command}: {line}", file=sys.stderr)
    return code


def _explain(error: BaseException) -> tuple[str | None, int]:
    """Message and exit code of an error; no message for a bug, or if the reader of a pipe is gone."""
    if isinstance(error, KeyboardInterrupt):
        return "stopped", 130
    if code := getattr(error, "exit_code", 0):
        return str(error), int(code)
    if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
        path = f"{error.filename}: " if error.filename else ""
        return f"{path}{error.strerror or error}; give a path that exists and is writable, or free space", 5
    # torch has no type of its own for memory that a CPU lacks.
    if type(error).__name__ in ("MemoryError", "OutOfMemoryError") or "can't allocate memory" in str(error):
        return "out of memory; lower train.batch or eval.batch, or the sizes of the network", 4
    return None, 1
