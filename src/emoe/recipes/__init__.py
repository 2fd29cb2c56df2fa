"""Recipes: one Python function per row of the paper's tables (and a few of our own), each returning an experiment."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable

from emoe.config import ConfigError, hint
from emoe.experiment import Experiment

_RECIPES: dict[str, Callable[[], Experiment]] = {}


def recipe(build: Callable[[], Experiment]) -> Callable[[], Experiment]:
    """Register a function under its name with dashes: `toy_8modes_emoe` becomes `toy-8modes-emoe`."""
    _RECIPES[build.__name__.replace("_", "-")] = build
    return build


def all_recipes() -> dict[str, Callable[[], Experiment]]:
    """Name -> function of every recipe in this package and of those registered by the user."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return dict(sorted(_RECIPES.items()))


def get_recipe(name: str) -> Experiment:
    """Build the experiment of a recipe."""
    recipes = all_recipes()
    if name not in recipes:
        raise ConfigError([f"recipe: {name!r} is not known{hint(name, list(recipes))}"])
    return recipes[name]()
