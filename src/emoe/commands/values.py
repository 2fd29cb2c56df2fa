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
    """The value of an argument: of type int, float, str, Path, Literal, or a tuple of them.

    A tuple is a word with commas (`1,2,4`), or a list of its elements. `name` is for errors.
    """
    kind, extras = unwrap(annotation)
    several = get_origin(kind) is tuple
    element = get_args(kind)[0] if several else kind
    if isinstance(words, list):
        return tuple(read(name, element, word) for word in words)
    if element in NUMBERS:
        allowed = next((extra for extra in extras if isinstance(extra, Range)), Range())
        try:
            values = tuple(map(element, words.split(","))) if several else (element(words),)
        except ValueError:
            expected = f"{NUMBERS[element]}s" if several else f"one {NUMBERS[element]}"
            raise ConfigError(f"{name}: expected {f'{expected} {allowed}'.rstrip()}, got {words!r}") from None
        if not all(allowed.low <= value <= allowed.high and math.isfinite(value) for value in values):
            raise ConfigError(f"{name}: must be {str(allowed) or 'finite'}, got {words}")
        return values if several else values[0]
    if several:
        return tuple(element(part.strip()) for part in words.split(",") if part.strip())
    if get_origin(kind) is Literal and words not in get_args(kind):
        raise ConfigError(f"{name}: {words!r} is not known{hint(words, list(get_args(kind)))}")
    return words if get_origin(kind) is Literal else kind(words)
