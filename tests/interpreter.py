"""Triton kernels in tests: on a GPU as they are, on a CPU by Triton's interpreter where Triton is installed."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from types import ModuleType

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("no Triton here (pip install triton)", allow_module_level=True)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported


@functools.cache
def unchecked(name: str) -> ModuleType:
    """A module as it is written: Triton reads the source of kernels, which wrappers that check types would hide."""
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.origin is not None
    plain_spec = importlib.util.spec_from_file_location(name, spec.origin)
    assert plain_spec is not None and plain_spec.loader is not None
    module = importlib.util.module_from_spec(plain_spec)
    sys.modules[name] = module
    plain_spec.loader.exec_module(module)
    return module
