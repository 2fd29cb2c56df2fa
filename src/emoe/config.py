"""Typed, frozen configuration: ranges beside the fields, strict loading, errors with field and remedy.

A config is a frozen dataclass derived from `Config` whose fields are made with `option(...)`. A *family* is a set
of configs of which one is chosen by its `kind` (a method, a backbone, a domain, a ramp). All settings of a command line
or a saved JSON file pass through `from_dict`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import importlib
import math
import operator
import pkgutil
import reprlib
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin

C = TypeVar("C", bound="Config")
_hints = functools.cache(typing.get_type_hints)
_short = reprlib.Repr()  # values inside messages: one line, however long the value is
_short.maxstring = _short.maxother = _short.maxlong = 80


class ConfigError(ValueError):
    """One or more faults of a configuration, a line each: `field: problem; allowed values`."""

    exit_code: ClassVar[int] = 2

    def __init__(self, problems: str | list[str]):
        self.problems = [problems] if isinstance(problems, str) else problems
        super().__init__("\n".join(self.problems))


@contextlib.contextmanager
def prefixed(prefix: str) -> Iterator[None]:
    """Put a prefix before each problem of a `ConfigError`."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError([prefix + line for line in error.problems]) from None


def option(
    default: Any = MISSING,
    *,
    doc: str,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    neutral: bool = False,
) -> Any:
    """A config field with a line for `--help` and a range: low <= value <= high and above < value.

    A `neutral` field, such as the interval of log lines, changes no result of a run.
    """
    limits = {"low": low, "above": above, "high": high}
    return dataclasses.field(default=default, metadata={"doc": doc, "neutral": neutral, **limits})


def _limits(metadata: Mapping[str, Any]) -> list[tuple[str, Any, float]]:
    limits = (("low", ">=", operator.ge), ("above", ">", operator.gt), ("high", "<=", operator.le))
    return [(sign, holds, metadata[name]) for name, sign, holds in limits if metadata.get(name) is not None]


def _in_range(number: float, metadata: Mapping[str, Any]) -> float:
    # The comparison with infinity is correct also for whole numbers that no float can represent.
    if not (-math.inf < number < math.inf and all(holds(number, limit) for _, holds, limit in _limits(metadata))):
        raise ConfigError(f": must be {allowed_range(metadata) or 'a finite number'}, got {_short.repr(number)}")
    return number


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def allowed_range(metadata: Mapping[str, Any]) -> str:
    """The range of a field as text: `>= 1`, `> 0 and <= 1`, or an empty string."""
    return " and ".join(f"{sign} {limit}" for sign, _, limit in _limits(metadata))


@dataclass(frozen=True, kw_only=True)
class Config:
    """Base of all configs: checks every field against its type and range when it is built."""

    def __post_init__(self) -> None:
        values, problems = _converted(type(self), vars(self))
        vars(self).update(values)  # the class is frozen
        if problems := problems or list(self.conflicts()):
            raise ConfigError(problems)

    def conflicts(self) -> Iterator[str]:
        """Yield one line per illegal combination of fields, beginning with the field's name and a colon."""
        return iter(())


@dataclass(frozen=True, kw_only=True)
class Family(Config):
    """A config that is one of several kinds, for instance one of the methods.

    Class arguments: `package="emoe.methods"` opens a family whose kinds are the modules of that package, except the
    `shared` ones; `kind="mdlm"` joins the family of the base class. The module of a kind is imported on first use, so a
    new method is one new file. A class in a user's script joins in the same way.
    """

    kind: ClassVar[str] = ""
    members: ClassVar[dict[str, type[Family]]] = {}
    package: ClassVar[str] = ""
    shared: ClassVar[tuple[str, ...]] = ()
    number_kind: ClassVar[str] = ""  # the kind, with a field `value`, that a bare number means; none: a number is wrong
    extremes: ClassVar[tuple[str, ...]] = ()  # fields that are checked against the range of a field with this config

    def __init_subclass__(cls, *, kind: str = "", package: str | None = None, shared: tuple[str, ...] = ()) -> None:
        super().__init_subclass__()
        if package is not None:
            cls.package, cls.members, cls.shared = package, {}, shared
        if kind:
            inside = cls.__module__.startswith(cls.package)
            # The package's own module of this kind may not be imported yet when a script defines the same kind.
            other = cls.members.get(kind, cls) if inside or kind not in cls.known_kinds() else cls.resolve(kind)
            names = [f"{each.__module__}.{each.__qualname__}" for each in (other, cls)]
            if names[0] != names[1]:
                raise ConfigError([f"kind: {kind!r} is both {names[0]} and {names[1]}; choose another name for one"])
            cls.kind = kind
            cls.members[kind] = cls

    @classmethod
    def known_kinds(cls) -> list[str]:
        """All kinds of the family, also those in modules of its package that are not imported yet."""
        return sorted({*cls.members, *cls._modules()})

    @classmethod
    def _modules(cls) -> dict[str, str]:
        """Kind -> module of the family's package; `KINDS` of the package lists modules with other names."""
        if not cls.package:
            return {}
        package = importlib.import_module(cls.package)
        others: dict[str, str] = getattr(package, "KINDS", {})
        names = {module.name for module in pkgutil.iter_modules(package.__path__)}
        return {name: name for name in names.difference(cls.shared, others.values())} | others

    @classmethod
    def resolve(cls, kind: object) -> type[Family]:
        """The class of a kind, imported if necessary."""
        if not isinstance(kind, str) or not kind:
            fault = f"expected text, got {_short.repr(kind)}" if kind else "missing"
            raise ConfigError([f"kind: {fault}; allowed: {', '.join(cls.known_kinds())}"])
        if kind not in cls.members and (module := cls._modules().get(kind)):
            importlib.import_module(f"{cls.package}.{module}")
        if kind not in cls.members:
            raise ConfigError([f"kind: {kind!r} is not known{hint(kind, cls.known_kinds())}"])
        return cls.members[kind]


def hint(word: str, candidates: list[str]) -> str:
    """`; did you mean 'x'?` if a candidate is close, otherwise the list of all."""
    close = difflib.get_close_matches(word, candidates, n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else f"; allowed: {', '.join(sorted(candidates))}"


def field_types(cls: type) -> dict[str, Any]:
    """Field name -> resolved annotation, without class variables."""
    hints = _hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def to_dict(config: Config, *, sparse: bool = False) -> dict[str, Any]:
    """A config as a dictionary of JSON values, with the `kind` of a family.

    `sparse` leaves out fields with their default value, so that new fields do not change it.
    """
    tree: dict[str, Any] = {"kind": config.kind} if isinstance(config, Family) else {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if not sparse or value != field.default:
            plain = to_dict(value, sparse=sparse) if isinstance(value, Config) else value
            tree[field.name] = list(plain) if isinstance(plain, tuple) else plain
    return tree


def from_dict(cls: type[C], data: Mapping[Any, Any]) -> C:
    """Build a config from a dictionary, strictly.

    Unknown or missing fields, wrong types, values out of range and illegal combinations raise `ConfigError` with
    one line for each problem.
    """
    data = dict(data)
    if issubclass(cls, Family):
        cls = cls.resolve(data.pop("kind", cls.kind))  # type: ignore[assignment]
    known = list(field_types(cls))
    unknown = [str(name) for name in data if name not in known]
    problems = [f"{name}: unknown field of {cls.__name__}{hint(name, known)}" for name in unknown]
    for field in dataclasses.fields(cls):
        if field.name not in data and field.default is MISSING and field.default_factory is MISSING:
            problems.append(f"{field.name}: missing; {field.metadata.get('doc', 'give a value')}")
    values, wrong = _converted(cls, data)
    if problems or wrong:
        raise ConfigError(problems + wrong)
    return cls(**values)


def _converted(cls: type[Config], data: Mapping[Any, Any]) -> tuple[dict[str, Any], list[str]]:
    """The fields in `data` in their annotated types, and one line for each value that is not allowed."""
    values, problems, annotations = dict[str, Any](), list[str](), field_types(cls)
    for field in dataclasses.fields(cls):
        if field.name in data:
            try:
                values[field.name] = convert(annotations[field.name], data[field.name], field.metadata)
            except ConfigError as error:
                problems += [field.name + line for line in error.problems]
    return values, problems


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, or the annotation itself."""
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def type_name(annotation: Any) -> str:
    """A type as `--help` and errors print it."""
    names = []
    for kind in alternatives(annotation):
        if kind is type(None):
            names.append("none")
        elif get_origin(kind) is Literal:
            names.append("|".join(str(choice) for choice in get_args(kind)))
        elif get_origin(kind) is tuple:
            names.append(f"{type_name(get_args(kind)[0])},...")
        elif isinstance(kind, type) and issubclass(kind, Family):
            names.append(" or ".join(kind.known_kinds()))
        elif isinstance(kind, type) and issubclass(kind, Config):
            names.append(f"fields ({', '.join(field_types(kind))})")
        else:
            names.append({int: "whole number", float: "number", str: "text", bool: "true|false"}.get(kind, str(kind)))
    return " or ".join(names)


def convert(annotation: Any, value: Any, metadata: Mapping[str, Any]) -> Any:
    """Return `value`, which may be a JSON value, in the annotated type, after a check of its type and range.

    The range in the metadata of a field applies to a number, each number of a tuple, or the extremes of a ramp.
    Problems begin with a colon, or with the dot before a field of the value.
    """
    kinds = alternatives(annotation)
    if value is None and type(None) in kinds:
        return None
    for kind in kinds:
        base = get_origin(kind) or kind
        if base is Literal:
            if value in get_args(kind):
                return value
            if len(kinds) == 1:
                known = hint(str(value), [str(choice) for choice in get_args(kind)])
                raise ConfigError([f": got {_short.repr(value)}{known}"])
        elif base is tuple:
            if isinstance(value, list | tuple):
                return tuple(convert(get_args(kind)[0], item, metadata) for item in value)
        elif issubclass(base, Config):
            if issubclass(kind, Family) and kind.number_kind and _is_number(value):
                value = {"kind": kind.number_kind, "value": value}
            if isinstance(value, Mapping):
                with prefixed("."):
                    value = from_dict(kind, value)
            if not isinstance(value, kind):
                raise ConfigError([f": expected the fields of {kind.__name__}, got {_short.repr(value)}"])
            for name in getattr(value, "extremes", ()):
                _in_range(getattr(value, name), metadata)
            return value
        elif base is float:
            if _is_number(value):
                with contextlib.suppress(OverflowError):
                    return _in_range(float(value), metadata)
        elif isinstance(value, base) and (base is bool or not isinstance(value, bool)):
            return _in_range(value, metadata) if base is int else value
    expected = f"{type_name(annotation)} {allowed_range(metadata)}".rstrip()
    raise ConfigError([f": expected {expected}, got {_short.repr(value)}"])
