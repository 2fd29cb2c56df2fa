"""Recipes: named experiments, one for each row of the paper's tables and some others."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import NamedTuple

from emoe.config import ConfigError, hint
from emoe.experiment import Experiment


class Recipe(NamedTuple):
    """A named experiment with a line of description."""

    doc: str
    build: Callable[[], Experiment]
    origin: str  # module, and function


_RECIPES: dict[str, Recipe] = {}
EARLIER = {  # names of version 0.1 -> current names
    "toy-8modes-emoe-plus": "toy-8modes-emoe-vimco",
    "toy-swissroll-emoe-plus": "toy-swissroll-emoe-vimco",
    "ties-emoe-plus": "ties-emoe-wake-sleep",
    "digits-emoe-plus": "digits-emoe-vimco",
    "mnist-emoe-plus": "mnist-emoe-floor",
    "lm1b-emoe-plus": "lm1b-emoe-free-nats",
    "news-small-emoe-plus": "news-small-emoe-free-nats",
    "text-tiny-emoe-plus": "text-tiny-emoe-free-nats",
}


def recipe(build: Callable[[], Experiment]) -> Callable[[], Experiment]:
    """Register a function under its name with dashes: `my_data_emoe` becomes `my-data-emoe`."""
    doc = (build.__doc__ or "").strip().partition("\n")[0]
    _add(build.__name__.replace("_", "-"), Recipe(doc, build, f"{build.__module__}.{build.__qualname__}"))
    return build


def register(origin: str, doc: str, experiment: Experiment) -> None:
    """Register an experiment under its own name."""
    _add(experiment.name, Recipe(doc, lambda: experiment, origin))


def _add(name: str, new: Recipe) -> None:
    other = _RECIPES.get(name, new)
    if other.origin != new.origin:
        raise ConfigError(f"recipe: {name!r} is in both {other.origin} and {new.origin}; choose another name for one")
    _RECIPES[name] = new


def all_recipes() -> dict[str, Recipe]:
    """All recipes of this package and of the user, by name."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return dict(sorted(_RECIPES.items()))


def get_recipe(name: str) -> Experiment:
    """Build the experiment of a recipe; earlier names work too."""
    recipes = all_recipes()
    current = name if name in recipes else EARLIER.get(name, name)
    if current not in recipes:
        raise ConfigError(f"recipe: {name!r} is not known{hint(name, list(recipes))}")
    return recipes[current].build()
