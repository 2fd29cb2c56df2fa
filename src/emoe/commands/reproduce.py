"""`emoe reproduce`, `emoe demo` and `emoe sweep`: studies, whose options are dataclasses."""

from __future__ import annotations

import functools

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
    return study(words[0], words[1:])


def study(name: str, words: list[str]) -> int:
    """Run a study with the options of a command line."""
    from emoe import studies

    module = studies.module(name)
    options = Command(module.Options(study=name).command, module.Options, module.Study.__doc__)
    if "data_root" not in options.names and any(word.partition("=")[0] == "--data-root" for word in words):
        raise ConfigError([f"data-root: {name!r} needs no data files; leave it out"])
    return studies.run(name, options(words))


demo, sweep = functools.partial(study, "demo"), functools.partial(study, "sweep")
