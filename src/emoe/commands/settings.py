"""Settings: fields of a recipe on the command line."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

from emoe.config import Config, ConfigError, allowed_range, type_name
from emoe.overrides import as_text, paths

FIELDS = ("name", "seed", "domain", "backbone", "method", "optim", "train", "eval")  # of an experiment, without a dot


def split_settings(
    words: Sequence[str], fields: Collection[str] = (), *, valued: Collection[str] = ()
) -> tuple[list[str], dict[str, str]]:
    """Take the settings `--a.b value`, `--a.b=value` and `a.b=value` out of the words.

    Args:
        words: The command line.
        fields: Settings that have no dot, such as `seed`.
        valued: Options whose next word is their value, whatever it looks like.
    """
    rest, settings, queue = [], {}, list(words)
    while queue:
        word = queue.pop(0)
        name, equals, value = word.partition("=")
        field = name.removeprefix("--")
        is_flag = word.startswith("--") and ("." in field or field in fields)
        if not is_flag and not (equals and re.fullmatch(r"\w[\w-]*(\.[\w-]+)+", name)):  # a path is no field
            rest += [word, *queue[:1]] if word in valued else [word]
            del queue[: word in valued]
            continue
        if not equals:
            if not queue or queue[0].startswith("--"):
                raise ConfigError([f"{field}: a value is missing; write --{field} VALUE"])
            value = queue.pop(0)
        settings[field] = value
    return rest, settings


@contextmanager
def with_data_root(settings: Mapping[str, str], folder: str | None) -> Iterator[Mapping[str, str]]:
    """The settings with `--data-root` as the domain's root, and an error that names it where the domain has none."""
    if folder is None:
        yield settings
        return
    if "domain.root" in settings:
        raise ConfigError(["data-root: is the same as --domain.root; give one of them"])
    try:
        yield {**settings, "domain.root": folder}
    except ConfigError as error:
        lost = "data-root: the data of this run come from no such folder; leave it out"
        wrong = "domain.root: no such field"
        raise ConfigError([lost if line.startswith(wrong) else line for line in error.problems]) from None


def field_names(recipe: str) -> list[str]:
    """All fields of a recipe as they are typed."""
    from emoe.recipes import get_recipe

    return [path.replace("_", "-") for path, *_ in paths(get_recipe(recipe))]


def print_fields(config: Config) -> None:
    """Print every field of an experiment: flag, value, meaning, type and range."""
    for path, annotation, field, value in paths(config):
        allowed = allowed_range(field.metadata)
        print(f"  --{path.replace('_', '-')} {shlex.quote(as_text(value))}")
        print(f"        {field.metadata.get('doc', '')} [{type_name(annotation)}{', ' + allowed if allowed else ''}]")
