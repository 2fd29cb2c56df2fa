"""Typed values from words of the command line."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

from emoe.config import ConfigError, alternatives, hint

NUMBERS: dict[Any, str] = {int: "whole number", float: "number"}


class Range(NamedTuple):
    """Smallest and largest number that is allowed."""

    low: float = -math.inf
    high: float = math.inf

    def __str__(self) -> str:
        return " and ".join([f">= {self.low}"] * (self.low > -math.inf) + [f"<= {self.high}"] * (self.high < math.inf))


Steps = Annotated[int, Range(1, 10_000)]
Rows = Annotated[int, Range(1, 10_000_000)]
Seed = Annotated[int, Range(0, 2**63 - 1)]


def unwrap(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    """A type without None and annotations, and the annotations."""
    if get_origin(annotation) is Annotated:
        kind, extras = unwrap(get_args(annotation)[0])
        return kind, (*extras, *get_args(annotation)[1:])
    if type(None) in alternatives(annotation):
        return unwrap(next(kind for kind in alternatives(annotation) if kind is not type(None)))
    return annotation, ()


def read(name: str, annotation: Any, words: str | list[str]) -> Any:
    """The value of an argument.

    Args:
        name: The argument, for errors.
        annotation: Its type: int, float, str, Path, Literal, or a tuple of them.
        words: A word, with commas for a tuple (`1,2,4`); or the elements of a tuple.

    Raises:
        ConfigError: A value that is not allowed.
    """
    kind, extras = unwrap(annotation)
    inner = get_args(kind)[0] if get_origin(kind) is tuple else kind
    if isinstance(words, list):
        return tuple(read(name, inner, word) for word in words)
    if inner in NUMBERS:
        allowed = next((extra for extra in extras if isinstance(extra, Range)), Range())
        values = _numbers(name, inner, words, allowed, one=inner is kind)
        return values[0] if inner is kind else values
    if inner is not kind:
        return tuple(inner(part.strip()) for part in words.split(",") if part.strip())
    if get_origin(kind) is not Literal:
        return kind(words)
    if words not in get_args(kind):
        raise ConfigError([f"{name}: {words!r} is not known{hint(words, list(get_args(kind)))}"])
    return words


def _numbers(name: str, kind: Any, words: str, allowed: Range, *, one: bool) -> tuple[float, ...]:
    expected = f"{NUMBERS[kind]}s {allowed}".rstrip()
    try:
        values = tuple(map(kind, words.split(",")))
    except ValueError:
        raise ConfigError([f"{name}: expected {expected}, got {words!r}"]) from None
    if one and len(values) > 1:
        raise ConfigError([f"{name}: expected one {expected.replace('s', '', 1)}, got {words!r}"])
    if not all(allowed.low <= value <= allowed.high and math.isfinite(value) for value in values):
        raise ConfigError([f"{name}: must be {str(allowed) or 'finite'}, got {words}"])
    return values
