"""Typed, frozen configuration: ranges live beside the fields, loading is strict, errors name field and remedy.

A config is a frozen dataclass derived from `Config` whose fields are made with `option(...)`. A *family* is a set
of configs of which one is chosen by its `kind` (a method, a backbone, a domain, a ramp). Everything a command line
or a saved JSON file can say about an experiment passes through `from_dict` or `override` below.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib
import json
import math
import pkgutil
import re
import reprlib
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin

C = TypeVar("C", bound="Config")
_short = reprlib.Repr()  # values inside messages: one line, however long the value is
_short.maxstring = _short.maxother = _short.maxlong = 80


class ConfigError(ValueError):
    """One or more faults of a configuration, a line each: `field: what is wrong; what is allowed`."""

    def __init__(self, problems: list[str]):
        super().__init__("\n".join(problems))
        self.problems = problems


def option(
    default: Any = MISSING,
    *,
    doc: str,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
) -> Any:
    """A config field with its explanation and its allowed range.

    Args:
        default: The default value; without one the field is required.
        doc: One line that `--help` prints.
        low: Smallest allowed value (inclusive).
        above: Lower limit that is itself not allowed.
        high: Largest allowed value (inclusive).
    """
    return dataclasses.field(default=default, metadata={"doc": doc, "low": low, "above": above, "high": high})


def allowed_range(metadata: Mapping[str, Any]) -> str:
    """The range of a field as people write it: `>= 1`, `> 0 and <= 1`, or an empty string."""
    parts = [
        f"{sign} {metadata[key]:g}"
        for key, sign in (("low", ">="), ("above", ">"), ("high", "<="))
        if metadata.get(key) is not None
    ]
    return " and ".join(parts)


def _out_of_range(value: float, metadata: Mapping[str, Any]) -> bool:
    low, above, high = (metadata.get(key) for key in ("low", "above", "high"))
    return (
        not -math.inf < value < math.inf  # also right for whole numbers that no float can hold
        or (low is not None and value < low)
        or (above is not None and value <= above)
        or (high is not None and value > high)
    )


@dataclass(frozen=True, kw_only=True)
class Config:
    """Base of all configs: checks every field against its range when it is built."""

    def __post_init__(self) -> None:
        problems = []
        for field in dataclasses.fields(self):
            for value in _numbers(getattr(self, field.name)):
                if _out_of_range(value, field.metadata):
                    allowed = allowed_range(field.metadata) or "a finite number"
                    problems.append(f"{field.name}: must be {allowed}, got {_short.repr(value)}")
                    break
        if not problems:
            problems.extend(self.conflicts())
        if problems:
            raise ConfigError(problems)

    def conflicts(self) -> Iterator[str]:
        """Yield one line per illegal combination of fields, beginning with the field's name and a colon."""
        return iter(())


def _numbers(value: Any) -> Iterator[float]:
    """The numbers a range applies to: a number, each number of a tuple, or the extremes of a ramp."""
    if isinstance(value, bool) or value is None:
        return
    if isinstance(value, int | float):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _numbers(item)
    elif isinstance(value, Family):
        yield from value.extremes()


@dataclass(frozen=True, kw_only=True)
class Family(Config):
    """A config that is one of several kinds, for instance one of the methods.

    Class arguments: `package="emoe.methods"` opens a family whose kinds are the modules of that package;
    `kind="mdlm"` joins the family of the base class. A kind that is not imported yet is looked up as the module
    of the same name, so a new method is one new file. A class that a user's script defines joins the same way.
    """

    kind: ClassVar[str] = ""
    members: ClassVar[dict[str, type[Family]]] = {}
    package: ClassVar[str] = ""

    def __init_subclass__(cls, *, kind: str = "", package: str | None = None, **rest: Any) -> None:
        super().__init_subclass__(**rest)
        if package is not None:
            cls.package, cls.members = package, {}
        if kind:
            cls.kind = kind
            cls.members[kind] = cls

    def extremes(self) -> tuple[float, ...]:
        """Smallest and largest number this object stands for (ramps), to be checked against a field's range."""
        return ()

    @classmethod
    def from_number(cls, value: float) -> Family | None:
        """What a bare number means where this family is expected; None if it means nothing."""
        return None

    @classmethod
    def known_kinds(cls) -> list[str]:
        """All kinds of the family, those in not yet imported modules of its package included."""
        found = set(cls.members)
        if cls.package:
            paths = importlib.import_module(cls.package).__path__
            modules = {module.name for module in pkgutil.iter_modules(paths)} - {"base", "layers", "metrics"}
            found |= (modules - set(cls.shared_modules().values())) | set(cls.shared_modules())
        return sorted(found)

    @classmethod
    def shared_modules(cls) -> dict[str, str]:
        """Kind -> module of the family's package, for kinds that do not have a module of their own name."""
        return dict(getattr(importlib.import_module(cls.package), "SHARED_MODULES", {})) if cls.package else {}

    @classmethod
    def resolve(cls, kind: object) -> type[Family]:
        """The class of a kind; imports the module of that name when it is needed."""
        if not isinstance(kind, str) or not kind:
            fault = f"expected text, got {_short.repr(kind)}" if kind else "missing"
            raise ConfigError([f"kind: {fault}; allowed: {', '.join(cls.known_kinds())}"])
        if kind not in cls.members and cls.package and kind in cls.known_kinds():
            importlib.import_module(f"{cls.package}.{cls.shared_modules().get(kind, kind)}")
        if kind not in cls.members:
            raise ConfigError([f"kind: {kind!r} is not known{hint(kind, cls.known_kinds())}"])
        return cls.members[kind]


def hint(word: str, candidates: list[str]) -> str:
    """`; did you mean 'x'?` when something is close, otherwise the list of what is allowed."""
    close = difflib.get_close_matches(word, candidates, n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else f"; allowed: {', '.join(sorted(candidates))}"


def field_hint(name: str, fields: list[str]) -> str:
    """`hint` for a dotted field: the same last word elsewhere, something close in its group, something close."""
    group, _, last = name.rpartition(".")
    same = [field for field in fields if field.rpartition(".")[2] == last]
    siblings = {field.rpartition(".")[2]: field for field in fields if group and field.rpartition(".")[0] == group}
    if same:
        close = difflib.get_close_matches(name, same, n=1, cutoff=0)
    elif siblings:
        close = [siblings[word] for word in difflib.get_close_matches(last, siblings, n=1)]
    else:
        close = difflib.get_close_matches(name, fields, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; allowed: {', '.join(sorted(siblings.values() or {field.partition('.')[0] for field in fields}))}"


def field_types(cls: type) -> dict[str, Any]:
    """Field name -> resolved annotation, class variables left out."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def to_dict(config: Config, *, sparse: bool = False) -> dict[str, Any]:
    """Plain JSON-able dictionary of a config; families carry their `kind`.

    `sparse` leaves out fields that have their default value, so that it stays the same when new fields are added.
    """

    def plain(value: Any) -> Any:
        if isinstance(value, Config):
            return to_dict(value, sparse=sparse)
        return list(value) if isinstance(value, tuple) else value

    head = {"kind": config.kind} if isinstance(config, Family) else {}
    default = {field.name: field.default for field in dataclasses.fields(config)} if sparse else {}
    values = {name: getattr(config, name) for name in field_types(type(config))}
    return head | {name: plain(value) for name, value in values.items() if not sparse or value != default[name]}


def from_dict(cls: type[C], data: Any, path: str = "") -> C:
    """Build a config from a dictionary, strictly.

    Unknown or missing fields, wrong types, values out of range and illegal combinations raise `ConfigError` with
    one line for each problem found.
    """
    where = f"{path}: " if path else ""
    prefix = f"{path}." if path else ""
    if not isinstance(data, Mapping):
        raise ConfigError([f"{where}expected the fields of {cls.__name__}, got {_short.repr(data)}"])
    data = dict(data)
    if issubclass(cls, Family):
        try:
            cls = cls.resolve(data.pop("kind", cls.kind))  # type: ignore[assignment]
        except ConfigError as error:
            raise ConfigError([prefix + line for line in error.problems]) from None
    hints = field_types(cls)
    problems = [
        f"{prefix}{name}: unknown field of {cls.__name__}{hint(str(name), list(hints))}"
        for name in data
        if name not in hints
    ]
    values: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        if field.name in data:
            try:
                allowed = allowed_range(field.metadata)
                values[field.name] = _convert(hints[field.name], data[field.name], f"{prefix}{field.name}", allowed)
            except ConfigError as error:
                problems.extend(error.problems)
        elif field.default is MISSING and field.default_factory is MISSING:
            problems.append(f"{prefix}{field.name}: missing; {field.metadata.get('doc', 'give a value')}")
    if not problems:
        try:
            return cls(**values)
        except ConfigError as error:
            problems = [prefix + line for line in error.problems]
    raise ConfigError(problems)


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) in (Union, types.UnionType):
        return get_args(annotation)
    return (annotation,)


def type_name(annotation: Any) -> str:
    """A type as `--help` and errors print it."""
    names = []
    for kind in _alternatives(annotation):
        if kind is type(None):
            names.append("none")
        elif get_origin(kind) is Literal:
            names.append("|".join(str(choice) for choice in get_args(kind)))
        elif get_origin(kind) is tuple:
            names.append(f"{type_name(get_args(kind)[0])},...")
        elif isinstance(kind, type) and issubclass(kind, Family):
            names.append(" or ".join(kind.known_kinds()))
        else:
            names.append({int: "whole number", float: "number", str: "text", bool: "true|false"}.get(kind, str(kind)))
    return " or ".join(names)


def _convert(annotation: Any, value: Any, path: str, allowed: str = "") -> Any:
    """Check `value` (already a JSON value) against an annotation and return it in the annotated type.

    The range `allowed` is not checked here; it is what an error about the type says besides.
    """
    for kind in _alternatives(annotation):
        if kind is type(None):
            if value is None:
                return None
        elif get_origin(kind) is Literal:
            if value in get_args(kind):
                return value
            if len(_alternatives(annotation)) == 1:
                known = hint(str(value), [str(choice) for choice in get_args(kind)])
                raise ConfigError([f"{path}: got {_short.repr(value)}{known}"])
        elif get_origin(kind) is tuple:
            if isinstance(value, list | tuple):
                return tuple(_convert(get_args(kind)[0], item, path, allowed) for item in value)
        elif isinstance(kind, type) and issubclass(kind, Config):
            if isinstance(value, kind):
                return value
            if isinstance(value, int | float) and not isinstance(value, bool) and issubclass(kind, Family):
                try:
                    built = kind.from_number(float(value))
                except OverflowError:
                    built = None
                except ConfigError as error:
                    raise ConfigError([f"{path}.{line}" for line in error.problems]) from None
                if built is not None:
                    return built
            return from_dict(kind, value, path)
        elif kind is float:
            if isinstance(value, int | float) and not isinstance(value, bool):
                with contextlib.suppress(OverflowError):
                    return float(value)
        elif isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
            return value
    expected = f"{type_name(annotation)} {allowed}".rstrip()
    raise ConfigError([f"{path}: expected {expected}, got {_short.repr(value)}"])


def _parse(annotation: Any, text: str) -> Any:
    """Turn the text of a command-line value into a JSON value of the annotated type (checked by `_convert`)."""
    for kind in _alternatives(annotation):
        if kind is type(None) and text.lower() in ("none", "null"):
            return None
        if kind is bool and text.lower() in ("true", "yes", "on", "false", "no", "off"):
            return text.lower() in ("true", "yes", "on")
        if get_origin(kind) is tuple:
            return [_parse(get_args(kind)[0], part) for part in re.split(r"[,\s]+", text.strip(" ()[]")) if part]
        if kind is int:
            with contextlib.suppress(ValueError):
                return int(text)
        if kind is float or (isinstance(kind, type) and issubclass(kind, Family) and kind.from_number(0.0) is not None):
            with contextlib.suppress(ValueError):
                return float(text)
        if isinstance(kind, type) and issubclass(kind, Config):
            if text.lstrip().startswith("{"):
                try:
                    return json.loads(text)
                except (ValueError, RecursionError) as error:
                    raise ConfigError([f"not valid JSON ({error})"]) from None
            return {"kind": text}
    return text


def paths(config: Config, prefix: str = "") -> Iterator[tuple[str, Any, dataclasses.Field[Any], Any]]:
    """All leaves of a config as (dotted path, annotation, field, value), nested configs opened."""
    hints = field_types(type(config))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        path = prefix + field.name
        if isinstance(value, Family):
            yield path, hints[field.name], field, value.kind
        if isinstance(value, Config):
            yield from paths(value, path + ".")
        else:
            yield path, hints[field.name], field, value


def override(config: C, settings: Mapping[str, str]) -> C:
    """A copy of `config` with dotted fields set from command-line text, for instance `{"method.top-k": "1"}`.

    A family is switched by its name (`{"method": "vadd"}`), which resets its fields to that kind's defaults.
    """
    tree = to_dict(config)
    problems = []
    # A kind comes before the fields it resets, whatever the order on the command line.
    for name in sorted(settings, key=lambda name: name.removesuffix(".kind").count(".")):
        text, path = settings[name], name.replace("-", "_")
        try:
            _put(tree, type(config), path.split("."), text)
        except KeyError:
            with contextlib.suppress(ConfigError):  # of the kinds chosen so far, where they can be built
                config = from_dict(type(config), tree)
            fields = [known.replace("_", "-") for known, *_ in paths(config)]
            problems.append(f"{name}: no such field{field_hint(name.replace('_', '-'), fields)}")
        except ConfigError as error:
            problems.extend(f"{path}: {line}" for line in error.problems)
    if problems:
        raise ConfigError(problems)
    return from_dict(type(config), tree)


def _put(tree: dict[str, Any], cls: type, path: list[str], text: str) -> None:
    """Set one dotted field inside the dictionary form of a config."""
    if issubclass(cls, Family):
        cls = cls.resolve(tree.get("kind", cls.kind))
        if path == ["kind"]:
            tree.clear()
            tree["kind"] = text
            return
    annotation = field_types(cls)[path[0]]
    if len(path) == 1:
        tree[path[0]] = _parse(annotation, text)
        return
    inner = next(
        (kind for kind in _alternatives(annotation) if isinstance(kind, type) and issubclass(kind, Config)), None
    )
    if inner is None:
        raise KeyError(path[0])
    if not isinstance(tree.get(path[0]), dict):
        value = _convert(annotation, tree.get(path[0]), path[0])
        tree[path[0]] = to_dict(value)
    _put(tree[path[0]], inner, path[1:], text)
