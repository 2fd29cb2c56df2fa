"""Text as rows of tokens: how it is prepared, and the domain of prepared sets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from emoe.config import Config, option

Packing = Literal["chunks", "wrap"]
Detokenise = Literal["auto", "lm1b", "wikitext", "none"]  # auto: by the name of the file
Errors = Literal["strict", "replace"]


@dataclass(frozen=True, kw_only=True)
class PrepareConfig(Config):
    """How text becomes rows."""

    split: tuple[float, ...] | None = option(
        None, doc="shares of training documents for valid and test: 0.005,0.005", low=0, high=0.5
    )
    length: int = option(128, doc="tokens of a row", low=3, high=65_536)
    packing: Packing = option("chunks", doc="chunks: plain rows; wrap: rows with [CLS] at both ends")
    detokenise: Detokenise = option("auto", doc="spacing to undo; auto: by the names of the files")
    encoding_errors: Errors = option("strict", doc="bytes that are not UTF-8: an error, or replaced")
    seed: int = option(0, doc="seed of the split", low=0)
    jobs: int | None = option(None, doc="slices encoded at once; default: one for each core, up to 16", low=1, high=256)
    slice_bytes: int = field(default=4 << 20, metadata={"hidden": True, "low": 16, "high": 1 << 28})

    def conflicts(self) -> Iterator[str]:
        if self.split is not None and (len(self.split) != 2 or not any(self.split)):
            yield "split: give two shares, of valid and of test, one of them above 0: 0.005,0.005"
