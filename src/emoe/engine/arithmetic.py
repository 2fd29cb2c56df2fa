"""Arithmetic settings of the process, set for a block of work and restored afterwards."""

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
    deterministic: bool
    benchmark: bool

    def apply(self) -> None:
        torch.set_float32_matmul_precision(self.matmul)
        if torch.are_deterministic_algorithms_enabled() != self.deterministic:  # the call imports torch's compiler: 2 s
            torch.use_deterministic_algorithms(self.deterministic)
        torch.backends.cudnn.benchmark = self.benchmark


_lock = threading.Lock()
_active: list[tuple[int, _Settings]] = []  # thread and settings of the blocks under way
_original: list[_Settings] = []  # what was set before the first of them


@contextlib.contextmanager
def arithmetic(precision: Precision, *, deterministic: bool = False) -> Iterator[None]:
    """Settings for matrix products and cuDNN, for the length of a `with` block.

    They hold for the whole process, so blocks in several threads must agree; when the last one ends, the settings from
    before the first are restored. Unless `deterministic`, cuDNN tries its convolutions and takes the fastest.

    Raises:
        ConfigError: Another thread works with other settings.
    """
    wanted = _Settings("highest" if precision == "fp32" else "high", deterministic, not deterministic)
    entry = threading.get_ident(), wanted
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it starts
    with _lock:
        if any(thread != entry[0] and settings != wanted for thread, settings in _active):
            raise ConfigError(["precision: another thread of this process works with other settings; use the same"])
        if not _active:
            backends = torch.backends.cudnn.benchmark, torch.are_deterministic_algorithms_enabled()
            _original[:] = [_Settings(torch.get_float32_matmul_precision(), backends[1], backends[0])]
        _active.append(entry)
        wanted.apply()
    try:
        yield
    finally:
        with _lock:
            _active.remove(entry)
            (_active[-1][1] if _active else _original[0]).apply()
