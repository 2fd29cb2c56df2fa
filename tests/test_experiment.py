"""What an experiment is called once its fields are changed."""

from emoe.experiment import customise
from emoe.recipes import get_recipe


def test_a_changed_recipe_says_what_was_changed() -> None:
    recipe = get_recipe("toy-8modes-emoe")
    changed = customise(
        recipe, {"train.steps": "50", "method.top_k": "1", "seed": "3", "eval.nfe": "1", "optim.lr": "3e-4"}
    )
    assert (
        changed.name == "toy-8modes-emoe method.top-k=1 train.steps=50"
    )  # a value that is the recipe's own is no change
    assert (changed.seed, changed.train.steps, changed.eval.nfe) == (3, 50, (1,))


def test_neutral_fields_and_a_name_of_ones_own_leave_the_name_alone() -> None:
    recipe = get_recipe("toy-8modes-emoe")
    assert customise(recipe, {"seed": "3", "train.keep": "5", "train.log_every": "7"}).name == recipe.name
    assert customise(recipe, {"train.steps": "50", "name": "mine"}).name == "mine"


def test_another_method_with_fields_of_its_own() -> None:
    changed = customise(get_recipe("toy-8modes-emoe"), {"method.latent": "3", "method": "vadd"})
    assert changed.name == "toy-8modes-emoe method=vadd method.latent=3" and changed.method.latent == 3
