"""Arithmetic settings of the process for a `with` block."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch

from emoe.config import ConfigError

Precision = Literal["fp32", "tf32", "bf16"]


class _Settings(NamedTuple):
    matmul: str
    deterministic: int  # torch's debug mode: 0 is no, 1 warns, 2 is yes
    benchmark: bool

    @classmethod
    def current(cls) -> _Settings:
        matmul, deterministic = torch.get_float32_matmul_precision(), torch.get_deterministic_debug_mode()
        return cls(matmul, deterministic, torch.backends.cudnn.benchmark)

    def apply(self) -> None:
        torch.set_float32_matmul_precision(self.matmul)
        if self.deterministic != _Settings.current().deterministic:  # the call imports torch's compiler: 2 s
            torch.use_deterministic_algorithms(self.deterministic > 0, warn_only=self.deterministic == 1)
        torch.backends.cudnn.benchmark = self.benchmark


_lock = threading.Lock()
_active: dict[object, tuple[int, _Settings]] = {}  # thread and settings of each block under way, oldest first
_original: list[_Settings] = []  # the settings before the first of them


@contextlib.contextmanager
def arithmetic(precision: Precision, *, deterministic: bool = False) -> Iterator[None]:
    """Set the arithmetic of matrix products and cuDNN in a `with` block.

    The settings are those of the process, so blocks in several threads must agree; when the last one ends, the settings
    before the first are restored. Unless `deterministic`, cuDNN benchmarks its convolutions.

    Raises:
        ConfigError: Another thread uses other settings.
    """
    wanted = _Settings("highest" if precision == "fp32" else "high", 2 * deterministic, not deterministic)
    block, thread = object(), threading.get_ident()
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it starts
    with _lock:
        if any(other != thread and settings != wanted for other, settings in _active.values()):
            raise ConfigError(["precision: another thread of this process works with other settings; use the same"])
        if not _active:
            _original[:] = [_Settings.current()]
        _active[block] = thread, wanted
        wanted.apply()
    try:
        yield
    finally:
        with _lock:
            del _active[block]
            (next(reversed(_active.values()))[1] if _active else _original[0]).apply()
