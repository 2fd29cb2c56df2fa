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
import inspect
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from textwrap import dedent
from typing import Annotated, Any, Generic, Literal, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from emoe.commands.settings import FIELDS, field_names, split_settings
from emoe.commands.values import Range, read, unwrap
from emoe.overrides import as_text, field_hint

T = TypeVar("T")
SEVERAL, REPEATED = "several words", "given several times"
INJECTED = ("settings", "command")
COMMON = {
    "data_root": "folder with data files (MNIST); default: EMOE_DATA, then ./data",
    "device": "auto, cpu, cuda, cuda:N",
    "json": "print JSON",
    "quiet": "no progress",
}


class Parser(argparse.ArgumentParser):
    """argparse without abbreviations. Examples end the help; an error is a line with a suggestion and exits with 2."""

    def __init__(self, prog: str, description: str, examples: Sequence[str]):
        super().__init__(prog=prog, description=description, allow_abbrev=False)
        self.examples = examples

    def format_help(self) -> str:
        """The usual help, then the examples as they are typed."""
        return super().format_help() + "".join(f"{line}\n" for line in self.examples)

    def refuse(self, unknown: str, fields: Sequence[str]) -> NoReturn:
        """Exit because of an unknown argument; `fields` are settings that it may have meant."""
        name = unknown.partition("=")[0]
        flags = [flag[2:] for action in self._actions for flag in action.option_strings if flag.startswith("--")]
        self.error(f"unknown argument {name!r}{field_hint(name[2:], [*flags, *fields]) if name[:2] == '--' else ''}")

    def error(self, message: str) -> NoReturn:
        """Print the error and where help is."""
        print(f"{self.prog}: {message} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(2)


class Command(Generic[T]):
    """A function or dataclass with its parser; called with words, it calls the function.

    Args:
        name: As it is typed, such as `emoe train`.
        target: The function or dataclass.
        doc: Its docstring, if it is another one.
    """

    def __init__(self, name: str, target: Callable[..., T], doc: str | None = None):
        description, helps, examples = read_docstring(inspect.cleandoc(doc or target.__doc__ or ""))
        self.name, self.target, self.parser = name, target, Parser(name, description, examples)
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
        options = {"help": text.replace("%", "%%")} | _words(kind, extras, positional=positional, required=required)
        if kind is not bool:
            options["metavar"] = f"{{{','.join(get_args(kind))}}}" if get_origin(kind) is Literal else metavar or None
        if positional:
            self.parser.add_argument(name, **options)
            return
        self.parser.add_argument(f"--{_label(name)}", required=required, **options)
        self.valued |= set() if kind is bool else {f"--{_label(name)}"}
        for alias in (extra for extra in extras if str(extra).startswith("--")):
            self.parser.add_argument(alias, dest=name, **options | {"help": argparse.SUPPRESS})

    def __call__(self, words: list[str]) -> T:
        """Call the function with the arguments of a command line."""
        return self.target(**self.parse(words))

    def parse(self, words: list[str]) -> dict[str, Any]:
        """The arguments that are given, by parameter.

        Raises:
            ConfigError: A value that is not allowed.
            SystemExit: An unknown or missing argument, or --help.
        """
        rest, values = words, dict[str, Any](command=shlex.join([*self.name.split(), *words]))
        # With a recipe there are also settings without a dot, such as `--seed`, unless they are options.
        fields = [name for name in FIELDS if name not in self.annotations] if "recipe" in self.annotations else []
        if "settings" in self.injected:
            rest, values["settings"] = split_settings(words, fields, valued=self.valued)
        args, unknown = self.parser.parse_known_args(rest)
        if unknown:
            self.parser.refuse(unknown[0], field_names(args.recipe) if fields else ())
        values = {name: values[name] for name in self.injected}
        for name, annotation in self.annotations.items():
            given = getattr(args, name.rstrip("_"), None)
            if given is not None:
                values[name] = given if given is True else read(_label(name), annotation, given)
        return values


def _words(kind: Any, extras: Sequence[Any], *, positional: bool, required: bool) -> dict[str, Any]:
    """How argparse reads the words of a parameter."""
    if kind is bool:
        return {"action": "store_true", "default": None}
    if REPEATED in extras:
        return {"action": "append"}
    if SEVERAL in extras or (positional and get_origin(kind) is tuple):
        return {"action": "extend", "nargs": "+" if required or not positional else "*"}
    return {"nargs": "?"} if positional and not required else {}


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
