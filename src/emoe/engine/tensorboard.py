"""TensorBoard as a log of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from emoe.config import ConfigError


class TensorBoardLog:
    """Sends the numbers of a step to TensorBoard; `step` hides what a killed run wrote after it."""

    def __init__(self, folder: Path, step: int | None = None):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ConfigError(["tensorboard: the package is missing; pip install emoe[track]"]) from None
        purge = None if step is None else step + 1
        self._writer: Any = SummaryWriter(str(folder), purge_step=purge)

    def __enter__(self) -> TensorBoardLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, record: Mapping[str, Any]) -> None:
        """Send every value of a record that is a single number."""
        for name, value in record.items():
            number = value.tolist() if isinstance(value, Tensor) else value
            if name != "step" and isinstance(number, int | float):
                self._writer.add_scalar(name, number, record["step"])

    def close(self) -> None:
        """Write out what is buffered."""
        self._writer.close()
