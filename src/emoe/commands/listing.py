"""`emoe list`: recipes and their fields."""

from __future__ import annotations

from json import dumps

from emoe.commands.args import Command
from emoe.commands.settings import print_fields
from emoe.config import to_dict


def list_recipes(recipe: str | None = None, *, json: bool = False) -> int:
    """Show all recipes, or every field of one.

    Args:
        recipe: a recipe whose fields are shown

    Examples:
        emoe list
        emoe list toy-8modes-emoe
    """
    from emoe.recipes import all_recipes, get_recipe

    if recipe is not None:
        experiment = get_recipe(recipe)
        if json:
            print(dumps(to_dict(experiment), indent=1))
        else:
            print_fields(experiment)
        return 0
    docs = {name: entry.doc for name, entry in all_recipes().items()}
    width = max(map(len, docs))
    print(dumps(docs, indent=1) if json else "\n".join(f"{name:<{width}}  {doc}" for name, doc in docs.items()))
    return 0


main = Command("emoe list", list_recipes)
