"""Studies: train the runs behind a table, measure them, write results, tables and figures; each can be interrupted.

A study is a module with `Options`, a frozen dataclass, and `Study`, which has `run()`.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

STUDIES: dict[str, tuple[str, str]] = {
    "toy": ("emoe.studies.toy", "the paper's toy table and figures"),
    "held-out": ("emoe.studies.held_out", "exact laws on densities that no setting was chosen on"),
    "scaling": ("emoe.studies.scaling", "rows of tied symbols of growing length"),
    "likelihood": ("emoe.studies.likelihood", "every named likelihood against the exact NLL"),
    "digits": ("emoe.studies.images", "small digits: bits per dimension, samples over NFE"),
    "mnist": ("emoe.studies.images", "the same on binarised MNIST, beside the paper's table"),
    "text": ("emoe.studies.text", "text: likelihoods, generative perplexity, MAUVE"),
}
"""Name -> module and one line of help, for `emoe reproduce`; `demo` and `sweep` are commands of their own."""


def module(name: str) -> Any:
    """The module of a study, also of `demo` and `sweep`."""
    return importlib.import_module(STUDIES[name][0] if name in STUDIES else f"emoe.studies.{name}")


def run(name: str, options: Any) -> int:
    """Run or continue a study; return an exit code."""
    code: int = module(name).Study(dataclasses.replace(options, study=name)).run()
    return code
