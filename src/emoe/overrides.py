"""Fields of a config as text: paths, settings of a command line, hints for names that are not known."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar, get_args, get_origin

from emoe.config import Config, ConfigError, Family, alternatives, convert, field_types, from_dict, to_dict

C = TypeVar("C", bound=Config)


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


def neutral_fields(config: Config) -> set[str]:
    """Dotted paths of the fields that change nothing of what a run computes."""
    return {path for path, _, field, _ in paths(config) if field.metadata.get("neutral")}


def differences(old: Config, new: Config) -> dict[str, str]:
    """Fields in which two configs differ: dotted path -> `old -> new`."""

    def flat(tree: Any, path: str = "") -> dict[str, Any]:
        if not isinstance(tree, dict):
            return {path: tree}
        return {k: v for name, sub in tree.items() for k, v in flat(sub, f"{path}.{name}" if path else name).items()}

    a, b = flat(to_dict(old)), flat(to_dict(new))
    return {key: f"{a.get(key)!r} -> {b.get(key)!r}" for key in sorted(a.keys() | b.keys()) if a.get(key) != b.get(key)}


def as_text(value: object) -> str:
    """A value as it is written on a command line."""
    if isinstance(value, str):
        return value
    if isinstance(value, Config):
        return as_text(to_dict(value))
    if isinstance(value, list | tuple):
        return ",".join(map(as_text, value))
    return json.dumps(value).replace('"', "'") if isinstance(value, Mapping) else str(value).lower()


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


def override(config: C, settings: Mapping[str, object]) -> C:
    """A copy of `config` with dotted fields set, for instance `{"method.top-k": "1"}` or `{"method.top_k": 1}`.

    Text is read as on a command line; other values are taken as they are. A family is switched by its name
    (`{"method": "vadd"}`), which resets its fields to that kind's defaults.
    """
    tree = to_dict(config)
    problems = []
    # A kind comes before the fields it resets, whatever the order on the command line.
    for name in sorted(settings, key=lambda name: name.removesuffix(".kind").count(".")):
        path = name.replace("-", "_")
        try:
            _put(tree, type(config), path.split("."), settings[name])
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


def _parse(annotation: Any, text: str) -> Any:
    """Turn the text of a command-line value into a JSON value of the annotated type (checked by `convert`)."""
    if type(None) in alternatives(annotation) and text.lower() in ("none", "null"):
        return None
    for kind in alternatives(annotation):
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
            return {"kind": text} if issubclass(kind, Family) else text
    return text


def _put(tree: dict[str, Any], cls: type, path: list[str], value: object) -> None:
    """Set one dotted field inside the dictionary form of a config."""
    if issubclass(cls, Family):
        cls = cls.resolve(tree.get("kind", cls.kind))
        if path == ["kind"]:
            tree.clear()
            tree["kind"] = value
            return
    annotation = field_types(cls)[path[0]]
    if len(path) == 1:
        tree[path[0]] = _parse(annotation, value) if isinstance(value, str) else value
        return
    inner = next(
        (kind for kind in alternatives(annotation) if isinstance(kind, type) and issubclass(kind, Config)), None
    )
    if inner is None:
        raise KeyError(path[0])
    if tree.get(path[0]) is None:
        tree[path[0]] = {}  # an optional part begins with its defaults
    elif not isinstance(tree[path[0]], dict):
        tree[path[0]] = to_dict(convert(annotation, tree[path[0]], path[0]))
    _put(tree[path[0]], inner, path[1:], value)
