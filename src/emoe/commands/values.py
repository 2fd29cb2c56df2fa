"""Typed values from words of the command line."""

from __future__ import annotations

import math
from argparse import ArgumentTypeError
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

from emoe.config import alternatives, hint

NUMBERS: dict[Any, str] = {int: "whole number", float: "number"}


class Range(NamedTuple):
    """Smallest and largest number that is allowed."""

    low: float = -math.inf
    high: float = math.inf

    def __str__(self) -> str:
        ends = ((">=", self.low), ("<=", self.high))
        return " and ".join(f"{sign} {end}" for sign, end in ends if not math.isinf(end))


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


def read(annotation: Any, word: str) -> Any:
    """The value of a word: int, float, str, Path, Literal, or a tuple of them as `1,2,4`."""
    kind, extras = unwrap(annotation)
    several = get_origin(kind) is tuple
    element = get_args(kind)[0] if several else kind
    if get_origin(kind) is Literal:
        if word not in get_args(kind):
            raise ArgumentTypeError(f"{word!r} is not known{hint(word, list(get_args(kind)))}")
        return word
    if element not in NUMBERS:
        return tuple(element(part.strip()) for part in word.split(",") if part.strip()) if several else kind(word)
    allowed = next((extra for extra in extras if isinstance(extra, Range)), Range())
    try:
        values = tuple(map(element, word.split(",") if several else [word]))
    except ValueError:
        expected = f"{NUMBERS[element]}s" if several else f"one {NUMBERS[element]}"
        raise ArgumentTypeError(f"expected {f'{expected} {allowed}'.rstrip()}, got {word!r}") from None
    if not all(allowed.low <= value <= allowed.high and math.isfinite(value) for value in values):
        raise ArgumentTypeError(f"must be {str(allowed) or 'finite'}, got {word}")
    return values if several else values[0]
