"""`emoe reproduce`, `emoe demo` and `emoe sweep`: studies, whose options are dataclasses."""

from __future__ import annotations

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
    """Train three methods on the 8-modes density with a small network and show why the mixture helps.

    Then draw digits with the released models of MNIST. Writes report.html, figure.png, digits.png and results.json.
    Runs that are finished are reused; delete the folder to train again.

    Examples:
        emoe demo
        emoe demo --out runs/demo --train.steps 500
    """
    return study("demo", "emoe demo", words, demo.__doc__)


def sweep(words: list[str]) -> int:
    """Train a recipe under many settings, several runs at once, and compare each with the recipe itself, the base.

    A trial is a set of changed fields. --vary options multiply into a grid, each --also adds one trial picked by hand.
    Each trial is trained on all tasks (--on) with all seeds (--seeds). Further fields, such as --train.steps 2000, hold
    for all trials. Killed, the same command continues; finished runs are not trained again.

    Examples:
        emoe sweep toy-8modes-emoe --name lr --vary optim.lr=1e-4,3e-4,1e-3 --vary method.experts=4,8
        emoe sweep toy-8modes-emoe --name picked --also "method.experts=16 optim.lr=1e-3" --seeds 10,11 --budget 8
    """
    return study("sweep", "emoe sweep", words, sweep.__doc__)


def study(name: str, command: str, words: list[str], doc: str | None = None) -> int:
    """Run a study with the options of a command line."""
    from emoe import studies

    module = studies.module(name)
    options = Command(command, module.Options, doc or module.Study.__doc__)
    if "data_root" not in options.names and any(word.partition("=")[0] == "--data-root" for word in words):
        raise ConfigError([f"data-root: {name!r} needs no data files; leave it out"])
    return studies.run(name, options(words))
