"""Parsers from typed signatures.

A command is a function, or a frozen dataclass of options, whose signature and docstring define the parser:

- Parameters before `*` are positional, all others are options. A parameter without a default is required.
- `bool` is a flag, `Literal` a choice, numbers may have a `Range`. A positional tuple takes several words, an option
  `1,2,4`; annotated with `SEVERAL` or `REPEATED` it takes several words or is given several times. An annotation
  `"--old"` is another name of an option, which help does not show.
- A parameter that is a dataclass stands for its fields, each an option.
- `settings` receives fields of a recipe (`--train.steps 50`), `command` the command line as it was typed.
- `Args` in the docstring are the help, `name (METAVAR): text`, beside those in `COMMON`; `Examples` end it.

In a dataclass the metadata of a field stand for this: `doc`, `metavar`, `low`, `high`, `positional`, `repeat`,
and `hidden` for one that is no option. An empty text as its default means that it is required.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import inspect
import itertools
import re
import shlex
from argparse import ArgumentTypeError
from collections.abc import Callable, Collection, Mapping, Sequence
from shutil import get_terminal_size
from textwrap import dedent, fill
from typing import Annotated, Any, Literal, NamedTuple, NoReturn, get_args, get_origin, get_type_hints

from emoe.config import ConfigError, alternatives, convert
from emoe.overrides import as_text, field_hint, parse, paths

SEVERAL, REPEATED = "several words", "given several times"
INJECTED = ("settings", "command")
FIELDS = ("name", "seed", "domain", "backbone", "method", "optim", "train", "eval")  # of an experiment, without a dot
COMMON = {
    "data_root": "folder with data files (MNIST); default: EMOE_DATA, then ./data",
    "device": "auto, cpu, cuda, cuda:N",
    "json": "print JSON",
    "quiet": "no progress",
}


class Range(NamedTuple):
    """Smallest and largest number that is allowed."""

    low: float | None = None
    high: float | None = None


Steps = Annotated[int, Range(1, 10_000)]
Rows = Annotated[int, Range(1, 10_000_000)]
Seed = Annotated[int, Range(0, 2**63 - 1)]


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


class Command:
    """A function or dataclass with its parser; called with words, it calls the function.

    `name` is as it is typed, such as `emoe train`; `doc` is the docstring, if it is not that of `target`.
    """

    def __init__(self, name: str, target: Callable[..., Any], doc: str | None = None):
        self.name, self.target = name, target
        description, self._help, examples = read_docstring(inspect.cleandoc(doc or target.__doc__ or ""))
        self.parser = Parser(
            name,
            description=fill(description, get_terminal_size().columns - 2),
            epilog=examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            argument_default=argparse.SUPPRESS,
            allow_abbrev=False,
        )
        self.names: set[str] = set()  # of arguments
        self._groups: dict[str, Any] = {}  # parameters that are dataclasses
        self._add_all(target)

    def _add_all(self, target: Any) -> None:
        """Add the parameters of a function or dataclass to the parser."""
        hints, fields = get_type_hints(target, include_extras=True), getattr(target, "__dataclass_fields__", {})
        for name, parameter in inspect.signature(target).parameters.items():
            metavar, text = self._help.get(name, ("", ""))
            about = {"doc": text, "metavar": metavar, "positional": parameter.kind is not parameter.KEYWORD_ONLY}
            about = fields[name].metadata if name in fields else about
            if dataclasses.is_dataclass(hints[name]):
                self._groups[name] = hints[name]
                self._add_all(hints[name])
            elif name not in INJECTED and not about.get("hidden"):
                self._add(name, hints[name], parameter.default, about)

    def _add(self, name: str, annotation: Any, default: Any, about: Mapping[str, Any]) -> None:
        """Add an argument."""
        self.names.add(name)
        kind, extras = unwrap(annotation)
        positional, required = about.get("positional", False), default in (inspect.Parameter.empty, "")
        text, shown = about.get("doc", ""), "" if required else as_text(default)
        if "default" not in text and shown not in ("none", "false", ""):
            text += f" (default {shlex.quote(shown)})"
        options: dict[str, Any] = {"help": text.replace("%", "%%")}
        if kind is bool:
            options["action"] = "store_true"
        elif get_origin(kind) is Literal:
            options["metavar"] = f"{{{','.join(get_args(kind))}}}"
        else:
            options["metavar"] = about.get("metavar") or None
        if REPEATED in extras or about.get("repeat"):
            options["action"] = "append"
        elif SEVERAL in extras or (positional and get_origin(kind) is tuple):
            options |= {"action": "extend", "nargs": "+" if required or not positional else "*"}
        elif positional and not required:
            options["nargs"] = "?"
        if kind is not bool:
            limits = next((extra._asdict() for extra in extras if isinstance(extra, Range)), about)
            options["type"] = functools.partial(read, get_args(kind)[0] if options.get("action") else kind, limits)
        if positional:
            self.parser.add_argument(name, **options)
            return
        self.parser.add_argument(f"--{name.rstrip('_').replace('_', '-')}", dest=name, required=required, **options)
        for alias in (extra for extra in extras if str(extra).startswith("--")):
            self.parser.add_argument(alias, dest=name, **options | {"help": argparse.SUPPRESS})

    def __call__(self, words: list[str]) -> Any:
        return self.target(**self.parse(words))

    def parse(self, words: list[str]) -> dict[str, Any]:
        """The arguments that are given, by parameter; a wrong or missing one, or --help, exits."""
        # With a recipe there are also settings without a dot, such as `--seed`, unless they are options.
        fields = [name for name in FIELDS if name not in self.names] if "recipe" in self.names else []
        flags, values = self.parser._option_string_actions, dict[str, Any]()
        parameters = inspect.signature(self.target).parameters
        if "command" in parameters:
            values["command"] = shlex.join([*self.name.split(), *words])
        if "settings" in parameters:
            valued = [flag for flag, action in flags.items() if action.nargs != 0]
            words, values["settings"] = split_settings(words, fields, valued=valued)
        args, unknown = self.parser.parse_known_args(words)
        if unknown:
            self._refuse(unknown[0].partition("=")[0], args.recipe if fields else None)
        values |= {name: tuple(value) if isinstance(value, list) else value for name, value in vars(args).items()}
        for name, group in self._groups.items():
            values[name] = group(**{key: values.pop(key) for key in group.__dataclass_fields__ if key in values})
        return values

    def _refuse(self, name: str, recipe: str | None) -> NoReturn:
        """Exit because of an unknown argument, which may have meant an option or a field of the recipe."""
        if not name.startswith("--"):
            self.parser.error(f"unknown argument {name!r}")
        known = [flag[2:] for flag in self.parser._option_string_actions if flag.startswith("--")]
        if recipe is not None:
            from emoe.recipes import get_recipe

            known += [path.replace("_", "-") for path, *_ in paths(get_recipe(recipe))]
        self.parser.error(f"unknown argument {name!r}{field_hint(name[2:], known)}")


def command(name: str) -> Callable[[Callable[..., Any]], Command]:
    """Make a command of a function: `@command("emoe train")`."""
    return functools.partial(Command, name)


def read_docstring(text: str) -> tuple[str, dict[str, tuple[str, str]], str]:
    """Description, (metavar, help) by parameter, and examples of a docstring in Google style."""
    description, *parts = re.split(r"^(Args|Examples):\n", text, flags=re.MULTILINE)
    sections = dict(zip(parts[::2], map(dedent, parts[1::2]), strict=True))
    entries = re.findall(r"^(\w+)(?: \((.*?)\))?: (.*(?:\n +.*)*)", sections.get("Args", ""), flags=re.MULTILINE)
    helps = {name: ("", text) for name, text in COMMON.items()}
    helps |= {name: (metavar, " ".join(text.split())) for name, metavar, text in entries}
    examples = "".join(f"\n  {line}" for line in sections.get("Examples", "").rstrip().splitlines())
    return " ".join(description.split()), helps, f"examples:{examples}" if examples else ""


def unwrap(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    """A type without None and annotations, and the annotations."""
    if get_origin(annotation) is Annotated:
        kind, extras = unwrap(get_args(annotation)[0])
        return kind, (*extras, *get_args(annotation)[1:])
    if type(None) in alternatives(annotation):
        return unwrap(next(kind for kind in alternatives(annotation) if kind is not type(None)))
    return annotation, ()


def read(kind: Any, limits: Mapping[str, Any], word: str) -> Any:
    """The value of a word, read like a field of a config."""
    try:
        return convert(kind, parse(kind, word), limits)
    except ConfigError as error:
        raise ArgumentTypeError(str(error).removeprefix(": ")) from None


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


def with_data_root(settings: Mapping[str, str], folder: str | None) -> Mapping[str, str]:
    """The settings with `--data-root` as the domain's root."""
    if folder is not None and "domain.root" in settings:
        raise ConfigError(["data-root: is the same as --domain.root; give one of them"])
    return settings if folder is None else {**settings, "domain.root": folder}
