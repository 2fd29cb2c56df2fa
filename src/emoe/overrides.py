"""Fields of a config as text: dotted paths, settings of a command line, hints for unknown names."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args, get_origin

from emoe.config import C, Config, ConfigError, Family, alternatives, convert, field_types, from_dict, prefixed, to_dict

BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def paths(config: Config, prefix: str = "") -> Iterator[tuple[str, Any, dataclasses.Field[Any], Any]]:
    """All leaves of a config and of the configs in it, as (dotted path, annotation, field, value)."""
    hints = field_types(type(config))
    for field in dataclasses.fields(config):
        value, path = getattr(config, field.name), prefix + field.name
        if isinstance(value, Family):
            yield path, hints[field.name], field, value.kind
        if isinstance(value, Config):
            yield from paths(value, path + ".")
        else:
            yield path, hints[field.name], field, value


def differences(old: Config, new: Config) -> dict[str, str]:
    """Fields in which two configs differ, except neutral ones: dotted path -> `old -> new`."""
    a, b = ({path: value for path, *_, value in paths(config)} for config in (old, new))
    neutral = {path for each in (old, new) for path, _, field, _ in paths(each) if field.metadata.get("neutral")}
    changed = [path for path in sorted({*a, *b} - neutral) if a.get(path) != b.get(path)]
    return {path: f"{a.get(path)!r} -> {b.get(path)!r}" for path in changed}


def as_text(value: object) -> str:
    """A value in the form of a command line."""
    if isinstance(value, list | tuple):
        return ",".join(map(as_text, value))
    if isinstance(value, Config | Mapping):
        return json.dumps(to_dict(value) if isinstance(value, Config) else value).replace('"', "'")
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def field_hint(name: str, fields: list[str]) -> str:
    """`hint` for a dotted field: one with the same last word, else a close one of its group, else any close one."""
    group, _, last = name.rpartition(".")
    same = [field for field in fields if field.rpartition(".")[2] == last]
    siblings = {field.rpartition(".")[2]: field for field in fields if group and field.rpartition(".")[0] == group}
    if same:
        close = difflib.get_close_matches(name, same, n=1, cutoff=0)
    elif siblings:
        close = [siblings[word] for word in difflib.get_close_matches(last, siblings, n=1)]
    else:
        close = difflib.get_close_matches(name, fields, n=1)
    allowed = siblings.values() or {field.partition(".")[0] for field in fields}
    return f"; did you mean {close[0]!r}?" if close else f"; allowed: {', '.join(sorted(allowed))}"


def override(config: C, settings: Mapping[str, object]) -> C:
    """A copy of `config` with dotted fields set, for instance `{"method.top-k": "1"}` or `{"method.top_k": 1}`.

    Text is parsed like that of a command line. A family is switched by its kind (`{"method": "vadd"}`), which resets
    its fields to the defaults of that kind.
    """
    tree, problems = to_dict(config), []
    # A kind is set before the fields that it resets, in any order of the command line.
    for name in sorted(settings, key=lambda name: name.removesuffix(".kind").count(".")):
        path = name.replace("-", "_")
        try:
            _put(tree, type(config), path.split("."), settings[name])
        except KeyError:
            with contextlib.suppress(ConfigError):  # fields of the new kinds, if they can be built
                config = from_dict(type(config), tree)
            fields = [known.replace("_", "-") for known, *_ in paths(config)]
            problems.append(f"{name}: no such field{field_hint(name.replace('_', '-'), fields)}")
        except ConfigError as error:
            problems.extend(f"{path}: {line}" for line in error.problems)
    if problems:
        raise ConfigError(problems)
    return from_dict(type(config), tree)


def parse(annotation: Any, text: str) -> Any:
    """Parse the text of a command-line value into a JSON value of the annotated type, which `convert` checks."""
    kinds = alternatives(annotation)
    if type(None) in kinds and text.lower() in ("none", "null"):
        return None
    for kind in kinds:
        family = kind if isinstance(kind, type) and issubclass(kind, Family) else None
        if kind is bool and text.lower() in BOOLEANS:
            return BOOLEANS[text.lower()]
        if get_origin(kind) is tuple:
            return [parse(get_args(kind)[0], part) for part in re.split(r"[,\s]+", text.strip(" ()[]")) if part]
        if kind is int or kind is float or (family and family.number_kind):
            with contextlib.suppress(ValueError):
                return int(text) if kind is int else float(text)
        if kind is Path:
            return Path(text)
        if isinstance(kind, type) and issubclass(kind, Config) and text.lstrip().startswith("{"):
            try:
                return json.loads(text)
            except (ValueError, RecursionError) as error:
                raise ConfigError([f"not valid JSON ({error})"]) from None
        if family:
            return {"kind": text}
    return text


def _put(tree: dict[str, Any], cls: type, path: list[str], value: object) -> None:
    """Set one dotted field inside the dictionary form of a config."""
    if issubclass(cls, Family):
        cls = cls.resolve(tree.get("kind", cls.kind))
        if path == ["kind"]:
            tree.clear()
            tree["kind"] = value
            return
    name, *rest = path
    annotation = field_types(cls)[name]
    if not rest:
        tree[name] = parse(annotation, value) if isinstance(value, str) else value
        return
    configs = [kind for kind in alternatives(annotation) if isinstance(kind, type) and issubclass(kind, Config)]
    if not configs:
        raise KeyError(name)
    if tree.get(name) is None:
        tree[name] = {}  # the defaults of an optional part
    elif not isinstance(tree[name], dict):
        with prefixed(name):
            tree[name] = to_dict(convert(annotation, tree[name], {}))
    _put(tree[name], configs[0], rest, value)
