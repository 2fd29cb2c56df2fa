"""The command line: `emoe COMMAND`; see `emoe.commands` for the commands and their exit codes."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence

from emoe.commands import COMMANDS, run

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
    return run(words[0], words[1:])
