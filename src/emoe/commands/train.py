"""`emoe list`: recipes and their fields; `emoe train`; `emoe release`: weights to be opened by name."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from emoe.commands import args
from emoe.config import Config, allowed_range, to_dict, type_name
from emoe.overrides import as_text, paths

if TYPE_CHECKING:
    from emoe.experiment import Experiment

HELP = {"-h", "--help"}


@args.command("emoe list")
def list_recipes(recipe: str | None = None, *, json: bool = False) -> int:
    """Show all recipes, or every field of one.

    Args:
        recipe: a recipe whose fields are shown

    Examples:
        emoe list
        emoe list toy-8modes-emoe
    """
    from emoe.recipes import all_recipes, get_recipe

    docs = {name: entry.doc for name, entry in all_recipes().items()}
    width = max(map(len, docs))
    if json:
        print(dumps(docs if recipe is None else to_dict(get_recipe(recipe)), indent=1))
    elif recipe is None:
        print("\n".join(f"{name:<{width}}  {doc}" for name, doc in docs.items()))
    else:
        print_fields(get_recipe(recipe))
    return 0


def print_fields(config: Config) -> None:
    """Print every field of an experiment: flag, value, meaning, type and range."""
    for path, annotation, field, value in paths(config):
        allowed = allowed_range(field.metadata)
        print(f"  --{path.replace('_', '-')} {shlex.quote(as_text(value))}")
        print(f"        {field.metadata.get('doc', '')} [{type_name(annotation)}{', ' + allowed if allowed else ''}]")


@args.command("emoe train")
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
    seconds, signal, steps = trained.result.seconds, trained.result.signal, experiment.train.steps
    following = f"next: emoe eval {shlex.quote(str(trained.path))}"
    if signal is not None:
        following = "stopped by a signal and saved; the same command with --resume continues"
    outcome = {"run": str(trained.path), "step": trained.step, "steps": steps, "seconds": seconds}
    text = f"{trained.path}: step {trained.step} of {steps} after {seconds:.1f} s\n{following}"
    if launched()[0] == 0:
        print(dumps(outcome) if json else text)
    return 0 if signal is None else 128 + signal


def configure(recipe: str, settings: Mapping[str, str], data_root: str | None) -> Experiment:
    """The experiment of a recipe with its settings."""
    from emoe.experiment import customise
    from emoe.recipes import get_recipe

    return customise(get_recipe(recipe), args.with_data_root(settings, data_root))


def main(words: list[str]) -> int:
    """Train; with --help after a recipe, list its fields."""
    if len(words) < 2 or words[0].startswith("-") or HELP.isdisjoint(words):
        return int(train(words))
    given = train.parse([word for word in words if word not in HELP])
    train.parser.print_help()
    print(f"\nfields of {given['recipe']} and their values:")
    print_fields(configure(given["recipe"], given["settings"], given.get("data_root")))
    return 0


@args.command("emoe release")
def release(
    run: Path,
    *,
    out: Path,
    name: str | None = None,
    precision: Literal["fp16", "bf16"] = "fp16",
    unfinished: bool = False,
    licence: str = "Apache-2.0",
    json: bool = False,
) -> int:
    """Export the weights of a finished run (the moving average where there is one) in 16 bits.

    They go to OUT/NAME/model.safetensors and OUT/NAME/config.json. Nothing is evaluated.

    Args:
        run: run folder
        out: folder of releases
        name: name of the release; default: the name of its recipe
        precision: fp16 rounds finer; bf16 takes weights of any size
        unfinished: also release a run that has not done all steps
        licence: licence of the weights

    Examples:
        emoe release runs/a --out models --name mine
        EMOE_WEIGHTS=models emoe sample mine --nfe 4
    """
    from emoe.runs import pretrained

    done = pretrained.release(run, out, name=name, precision=precision, unfinished=unfinished, licence=licence)
    if json:
        print(dumps(vars(done) | {"path": str(done.path)}, indent=1))
    else:
        size = f"{done.parameters:,} parameters, {done.size / 1e6:.2f} MB in {precision}"
        print(f"{done.path}: {size}; largest rounding error {done.rounding:.1e} ({done.tensor})")
    return 0
