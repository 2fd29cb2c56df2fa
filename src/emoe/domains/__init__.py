"""Data, metrics and figures: one module per domain, named after its kind unless it is listed here."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from emoe.config import ConfigError

KINDS = {"mnist": "images", "digits": "images", "text": "text.data"}


class DataError(ValueError):
    """Data that cannot be used, with the position of the fault and the remedy."""

    exit_code: ClassVar[int] = 3


def check_file(path: Path, remedy: str) -> None:
    """Raise a `DataError` that ends with the remedy unless there is such a file."""
    if not path.is_file():
        raise DataError(f"{path}: {'is a folder' if path.is_dir() else 'does not exist'}; {remedy}")


@contextmanager
def readable(path: Path, remedy: str, problem: str = "cannot be read, damaged or cut off") -> Iterator[None]:
    """Turn all errors about the content of a file into a `DataError` that ends with the remedy."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:  # parsers raise many kinds for damaged files
        raise DataError(f"{path}: {problem} ({type(error).__name__}: {error}); {remedy}") from error


@contextmanager
def naming(source: str, *, typed: bool = False) -> Iterator[None]:
    """Put the name of a file before a `DataError`; turn that of typed text into a `ConfigError`."""
    try:
        yield
    except DataError as error:
        shown = source if len(source) <= 40 else f"{source[:37]}..."
        raise ConfigError([f"given: {shown!r}: {error}"]) if typed else DataError(f"{source}: {error}") from None
