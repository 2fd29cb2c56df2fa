"""Settings of torch's arithmetic: restored whatever happens, and never mixed between threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from line import Line, fit_line

from emoe.config import ConfigError
from emoe.engine.arithmetic import Precision, arithmetic
from emoe.engine.callbacks import Callback
from emoe.methods.masked import MaskedDiffusion
from emoe.runs.sampling import draw

Settings = tuple[str, bool, bool, bool]


def current() -> Settings:
    torch_settings = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    return torch.get_float32_matmul_precision(), *torch_settings, torch.backends.cudnn.benchmark


def choose(matmul: str, deterministic: bool, warn_only: bool, benchmark: bool) -> None:
    torch.set_float32_matmul_precision(matmul)
    torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
    torch.backends.cudnn.benchmark = benchmark


class Look(Callback):
    """Keeps the settings of every step; fails at step 3."""

    def __init__(self) -> None:
        self.settings: list[Settings] = []

    def on_step(self, step: int) -> None:
        self.settings.append(current())
        if step == 3:
            raise KeyError


def test_settings_come_back_after_fit(tmp_path: Path) -> None:
    before, look, users = current(), Look(), ("medium", True, True, False)
    choose(*users)
    try:
        for steps in (2, 9):
            with suppress(KeyError):
                fit_line(Line(), tmp_path, steps, callbacks=[look], deterministic=True, resume=True)
            assert current() == users and set(look.settings) == {("highest", True, False, False)}
    finally:
        choose(*before)


def test_nested_blocks_restore_the_one_around_them() -> None:
    before = current()
    with arithmetic("fp32"):
        with arithmetic("tf32"):
            with arithmetic("fp32"):
                pass
            assert current()[0] == "high"
        assert current()[0] == "highest"
    assert current() == before


def test_threads_must_agree(tiny: Callable[..., MaskedDiffusion]) -> None:
    entered, leave, before = threading.Event(), threading.Event(), current()

    def work() -> None:
        with arithmetic("tf32"):
            entered.set()
            leave.wait(30)

    thread = threading.Thread(target=work)
    thread.start()
    assert entered.wait(30)
    with pytest.raises(ConfigError, match="another thread of this process works with other settings"):
        with arithmetic("fp32"):
            pass
    draw(tiny(), 3, 1)  # leaves the settings as they are: runs are measured while others train
    with arithmetic("bf16"):  # the same settings
        leave.set()
        thread.join()
        assert current()[0] == "high"
    assert current() == before


@pytest.mark.parametrize("precision", [None, "fp32", "tf32", "bf16"])
def test_samples_are_drawn_in_a_precision(tiny: Callable[..., MaskedDiffusion], precision: Precision | None) -> None:
    method, before, seen = tiny().float(), current(), []
    method.backbone.register_forward_hook(lambda *_: seen.append((current()[0], torch.is_autocast_enabled("cpu"))))
    pool = draw(method, 5, 2, precision=precision)
    matmul = {None: before[0], "fp32": "highest"}.get(precision, "high")
    assert pool.samples.shape == (5, method.space.length) and seen == [(matmul, precision == "bf16")] * 2
    assert current() == before and not torch.is_autocast_enabled("cpu")
