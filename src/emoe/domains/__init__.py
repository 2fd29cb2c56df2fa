"""Data, metrics and figures: one module per domain, named after its kind unless it is listed here."""

from typing import ClassVar

KINDS = {"mnist": "images", "digits": "images", "text": "text.data"}


class DataError(ValueError):
    """Data that cannot be used, with the position of the fault and the remedy."""

    exit_code: ClassVar[int] = 3
