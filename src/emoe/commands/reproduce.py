"""`emoe reproduce`, `emoe demo` and `emoe sweep`: studies, whose options are dataclasses."""

from __future__ import annotations

import dataclasses

from emoe.commands.args import Command
from emoe.config import ConfigError, hint


def main(words: list[str]) -> int:
    """Run a study, or list them."""
    from emoe.studies import STUDIES

    if not words or words[0] in ("-h", "--help"):
        width = max(map(len, STUDIES))
        lines = [f"  {name:<{width}}  {text}" for name, (_, text) in STUDIES.items()]
        last = ["examples:", "  emoe reproduce toy --seeds 0 --train.steps 500", "  emoe reproduce toy --help"]
        print("\n".join(["usage: emoe reproduce STUDY [...]", "", "studies:", *lines, "", *last]))
        return 0
    if words[0] not in STUDIES:
        raise ConfigError([f"study: {words[0]!r} is not known{hint(words[0], list(STUDIES))}"])
    return study(words[0], f"emoe reproduce {words[0]}", words[1:])


def demo(words: list[str]) -> int:
    """Run the demo."""
    return study("demo", "emoe demo", words)


def sweep(words: list[str]) -> int:
    """Search over settings."""
    return study("sweep", "emoe sweep", words)


def study(name: str, command: str, words: list[str]) -> int:
    """Run a study with the options of a command line."""
    from emoe import studies

    module = studies.module(name)
    fields = {field.name for field in dataclasses.fields(module.Options)}
    if "data_root" not in fields and any(word.partition("=")[0] == "--data-root" for word in words):
        raise ConfigError([f"data-root: {name!r} needs no data files; leave it out"])
    return int(module.run(Command(command, module.Options, module.run.__doc__)(words)))
