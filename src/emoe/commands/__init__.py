"""The table of commands, which are imported when they are called, and the exit codes of their errors.

Exit codes: 0 done, 2 bad configuration or arguments, 3 bad data, 4 numeric failure or collapse, 5 storage failure,
6 another process of the run is lost, 130/143 stopped by a signal after a checkpoint.
"""

from __future__ import annotations

import importlib
import sys

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


def run(command: str, words: list[str]) -> int:
    """Run a command; an error that the user can correct is a line per problem and an exit code."""
    module, function, _ = COMMANDS[command]
    try:
        return int(getattr(importlib.import_module(f"emoe.commands.{module}"), function)(words))
    except SystemExit as end:  # argparse, after --help or an error
        return int(end.code or 0)
    except (Exception, KeyboardInterrupt) as error:
        message, code = explain(error)
        if message is None:
            raise
    for line in message.splitlines():
        if line.startswith("domain.root: no such field") and "--data-root" in " ".join(words):
            line = "data-root: the data of this run come from no such folder; leave it out"
        print(f"emoe {command}: {line}", file=sys.stderr)
    return code


def explain(error: BaseException) -> tuple[str | None, int]:
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
