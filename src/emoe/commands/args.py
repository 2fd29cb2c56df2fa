"""Parsers from typed signatures.

A command is a function, or a frozen dataclass of options, whose signature and docstring define the parser:

- Parameters before `*` are positional, all others are options. A parameter without a default is required.
- `bool` is a flag; other types and ranges are those of `emoe.commands.values`. A positional tuple takes several words,
  an option `1,2,4`; annotated with `SEVERAL` or `REPEATED` it takes several words or is given several times. An
  annotation `"--old"` is another name of an option, which help does not show.
- `settings` receives fields of a recipe (`--train.steps 50`), `command` the command line as it was typed.
- `Args` in the docstring are the help, `name (METAVAR): text`, beside those in `COMMON`; `Examples` end it.

In a dataclass the metadata of a field stand for this: `help`, `metavar`, `low`, `high`, `positional`, `repeat`, and
`hidden` for one that is no option. An empty text as its default means that it is required.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import inspect
import itertools
import re
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from textwrap import dedent
from typing import Annotated, Any, Literal, NoReturn, get_args, get_origin, get_type_hints

from emoe.commands.values import Range, read, unwrap
from emoe.config import ConfigError
from emoe.overrides import as_text, field_hint, paths

SEVERAL, REPEATED = "several words", "given several times"
INJECTED = ("settings", "command")
FIELDS = ("name", "seed", "domain", "backbone", "method", "optim", "train", "eval")  # of an experiment, without a dot
COMMON = {
    "data_root": "folder with data files (MNIST); default: EMOE_DATA, then ./data",
    "device": "auto, cpu, cuda, cuda:N",
    "json": "print JSON",
    "quiet": "no progress",
}


class Parser(argparse.ArgumentParser):
    """argparse whose help ends with examples as they are typed, and whose errors are one line."""

    examples: Sequence[str] = ()

    def format_help(self) -> str:
        return super().format_help() + "".join(f"{line}\n" for line in self.examples)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")

    def refuse(self, unknown: str, fields: Sequence[str]) -> NoReturn:
        """Exit because of an unknown argument; `fields` are settings that it may have meant."""
        name = unknown.partition("=")[0]
        flags = [flag[2:] for flag in self._option_string_actions if flag.startswith("--")]
        self.error(f"unknown argument {name!r}{field_hint(name[2:], [*flags, *fields]) if name[:2] == '--' else ''}")


class Command:
    """A function or dataclass with its parser; called with words, it calls the function.

    `name` is as it is typed, such as `emoe train`; `doc` is the docstring, if it is not that of `target`.
    """

    def __init__(self, name: str, target: Callable[..., Any], doc: str | None = None):
        description, helps, examples = read_docstring(inspect.cleandoc(doc or target.__doc__ or ""))
        self.name, self.target, self.parser = name, target, Parser(name, description=description, allow_abbrev=False)
        self.parser.examples = examples
        parameters = inspect.signature(target).parameters
        self.injected = [key for key in INJECTED if key in parameters]
        self.annotations = {k: v for k, v in get_type_hints(target, include_extras=True).items() if k in parameters}
        options = dataclasses.fields(target) if dataclasses.is_dataclass(target) else ()
        fields: dict[str, Mapping[str, Any]] = {option.name: option.metadata for option in options}
        self.valued: set[str] = set()  # options whose next word is their value, whatever it looks like
        for key, parameter in parameters.items():
            if key not in self.injected and not fields.get(key, {}).get("hidden"):
                self._add(parameter, *helps.get(key, ("", "")), fields.get(key))

    def _add(self, parameter: inspect.Parameter, metavar: str, text: str, field: Mapping[str, Any] | None) -> None:
        """Add a parameter to the parser; an argument that is not given is None."""
        name, required = parameter.name, parameter.default is parameter.empty
        positional = parameter.kind is not parameter.KEYWORD_ONLY
        if field is not None:
            metavar, text, positional = field.get("metavar", ""), field.get("help", ""), bool(field.get("positional"))
            required = required or parameter.default == ""
            ends = {end: field[end] for end in ("low", "high") if field.get(end) is not None}
            limits = (Range(**ends), *[REPEATED] * bool(field.get("repeat")))
            self.annotations[name] = Annotated[self.annotations[name], *limits]
        kind, extras = unwrap(self.annotations[name])
        shown = "" if required else as_text(parameter.default)
        if "default" not in text and shown not in ("none", "false", ""):
            text += f" (default {shlex.quote(shown)})"
        options: dict[str, Any] = {"help": text.replace("%", "%%")}
        if kind is bool:
            options |= {"action": "store_true", "default": None}
        else:
            options["metavar"] = f"{{{','.join(get_args(kind))}}}" if get_origin(kind) is Literal else metavar or None
        if REPEATED in extras:
            options["action"] = "append"
        elif SEVERAL in extras or (positional and get_origin(kind) is tuple):
            options |= {"action": "extend", "nargs": "+" if required or not positional else "*"}
        elif positional and not required:
            options["nargs"] = "?"
        if positional:
            self.parser.add_argument(name, **options)
            return
        action = self.parser.add_argument(f"--{_label(name)}", required=required, **options)
        self.valued |= set() if kind is bool else {*action.option_strings}
        for alias in (extra for extra in extras if str(extra).startswith("--")):
            self.parser.add_argument(alias, dest=name, **options | {"help": argparse.SUPPRESS})

    def __call__(self, words: list[str]) -> Any:
        return self.target(**self.parse(words))

    def parse(self, words: list[str]) -> dict[str, Any]:
        """The arguments that are given, by parameter; an unknown or missing one, or --help, exits."""
        # With a recipe there are also settings without a dot, such as `--seed`, unless they are options.
        fields = [name for name in FIELDS if name not in self.annotations] if "recipe" in self.annotations else []
        values: dict[str, Any] = {}
        if "command" in self.injected:
            values["command"] = shlex.join([*self.name.split(), *words])
        if "settings" in self.injected:
            words, values["settings"] = split_settings(words, fields, valued=self.valued)
        args, unknown = self.parser.parse_known_args(words)
        if unknown:
            from emoe.recipes import get_recipe

            known = [path.replace("_", "-") for path, *_ in paths(get_recipe(args.recipe))] if fields else ()
            self.parser.refuse(unknown[0], known)
        for name, annotation in self.annotations.items():
            given = getattr(args, name.rstrip("_"), None)
            if given is not None:
                values[name] = given if given is True else read(_label(name), annotation, given)
        return values


def command(name: str) -> Callable[[Callable[..., Any]], Command]:
    """Make a command of a function: `@command("emoe train")`."""
    return functools.partial(Command, name)


def _label(name: str) -> str:
    """A parameter's name on the command line."""
    return name.rstrip("_").replace("_", "-")


def read_docstring(text: str) -> tuple[str, dict[str, tuple[str, str]], list[str]]:
    """Description, metavar and help by parameter, and examples of a docstring in Google style."""
    description, *parts = re.split(r"^(Args|Examples|Raises|Returns|Attributes):\n", text, flags=re.MULTILINE)
    sections = dict(zip(parts[::2], map(dedent, parts[1::2]), strict=True))
    entries = re.findall(r"^(\w+)(?: \((.*?)\))?: (.*(?:\n +.*)*)", sections.get("Args", ""), flags=re.MULTILINE)
    helps = {name: ("", text) for name, text in COMMON.items()}
    helps |= {name: (metavar, " ".join(text.split())) for name, metavar, text in entries}
    examples = [f"  {line}".rstrip() for line in sections.get("Examples", "").rstrip().splitlines()]
    return " ".join(description.split()), helps, ["", "examples:", *examples] if examples else []


def split_settings(
    words: Sequence[str], fields: Collection[str] = (), *, valued: Collection[str] = ()
) -> tuple[list[str], dict[str, str]]:
    """Take the settings `--a.b value`, `--a.b=value` and `a.b=value` out of the words.

    `fields` are settings that have no dot, such as `seed`, `valued` options whose next word is always their value.
    """
    rest, settings, queue = list[str](), dict[str, str](), iter(words)
    for word in queue:
        name, equals, value = word.partition("=")
        field = name.removeprefix("--")
        is_flag = word.startswith("--") and ("." in field or field in fields)
        if word in valued:
            rest += [word, *itertools.islice(queue, 1)]
        elif is_flag or (equals and re.fullmatch(r"\w[\w-]*(\.[\w-]+)+", name)):  # a path is no field
            settings[field] = value if equals else next(queue, "--")
            if not equals and settings[field].startswith("--"):
                raise ConfigError([f"{field}: a value is missing; write --{field} VALUE"])
        else:
            rest.append(word)
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
