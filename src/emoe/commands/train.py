"""`emoe train`."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from json import dumps
from typing import TYPE_CHECKING

from emoe.commands.args import Command
from emoe.commands.settings import print_fields, with_data_root

if TYPE_CHECKING:
    from emoe.experiment import Experiment

HELP = {"-h", "--help"}


def train(
    recipe: str,
    *,
    run: str | None = None,
    resume: bool = False,
    device: str = "auto",
    quiet: bool = False,
    tensorboard: bool = False,
    wandb: bool = False,
    data_root: str | None = None,
    json: bool = False,
    settings: Mapping[str, str],
) -> int:
    """Train a recipe.

    Any field may follow as --field value; `emoe train RECIPE --help` lists them with their ranges.

    Args:
        recipe: name of a recipe (emoe list)
        run: run folder; default runs/RECIPE-seedN
        resume: continue from the newest checkpoint, if there is one
        tensorboard: also write TensorBoard events into the run folder
        wandb: also log to Weights & Biases
        json: print the outcome as JSON

    Examples:
        emoe train toy-8modes-emoe --run runs/a --train.steps 2000
        emoe train rows-emoe --domain.path data.npy --run runs/b
    """
    from emoe.engine.callbacks import Callback, ProgressBar, TensorBoard, WandB
    from emoe.engine.distributed import launched
    from emoe.runs.train import train as train_run

    experiment = configure(recipe, settings, data_root)
    callbacks: list[Callback] = []
    if not quiet:
        callbacks.append(ProgressBar(f"{experiment.name.partition(' ')[0]} seed {experiment.seed}"))
    callbacks += [TensorBoard()] * tensorboard + [WandB()] * wandb
    folder = run or f"runs/{experiment.name.replace(' ', '_')}-seed{experiment.seed}"
    trained = train_run(experiment, folder, resume=resume, device=device, callbacks=callbacks)
    assert trained.result is not None
    seconds, signal = trained.result.seconds, trained.result.signal
    steps = experiment.train.steps
    if launched()[0] != 0:
        pass  # rank 0 prints
    elif json:
        print(dumps({"run": str(trained.path), "step": trained.step, "steps": steps, "seconds": seconds}))
    else:
        print(f"{trained.path}: step {trained.step} of {steps} after {seconds:.1f} s")
        if signal is None:
            print(f"next: emoe eval {shlex.quote(str(trained.path))}")
        else:
            print("stopped by a signal and saved; the same command with --resume continues")
    return 0 if signal is None else 128 + signal


def configure(recipe: str, settings: Mapping[str, str], data_root: str | None) -> Experiment:
    """The experiment of a recipe with its settings."""
    from emoe.experiment import customise
    from emoe.recipes import get_recipe

    with with_data_root(settings, data_root) as fields:
        return customise(get_recipe(recipe), fields)


def main(words: list[str]) -> int:
    """Train; with --help after a recipe, list its fields."""
    command = Command("emoe train", train)
    if len(words) < 2 or words[0].startswith("-") or HELP.isdisjoint(words):
        return command(words)
    given = command.parse([word for word in words if word not in HELP])
    experiment = configure(given["recipe"], given["settings"], given.get("data_root"))
    command.parser.print_help()
    print(f"\nfields of {given['recipe']} and their values:")
    print_fields(experiment)
    return 0
