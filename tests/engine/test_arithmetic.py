"""Settings of torch's arithmetic: restored whatever happens, and never mixed between threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from line import Line, fit_line

from emoe.config import ConfigError
from emoe.engine.arithmetic import arithmetic
from emoe.engine.callbacks import Callback
from emoe.methods.masked import MaskedDiffusion
from emoe.runs.sampling import draw


def current() -> tuple[object, ...]:
    return (
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.benchmark,
    )


def apply(matmul: str, deterministic: bool, warn_only: bool, benchmark: bool) -> None:
    torch.set_float32_matmul_precision(matmul)
    torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
    torch.backends.cudnn.benchmark = benchmark


@pytest.fixture(params=[("medium", True, True, False), ("high", False, False, True)])
def users(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Settings that a user has chosen for the process."""
    before: Any = current()
    apply(*request.param)
    yield request.param
    apply(*before)


class Fail(Callback):
    def on_step(self, step: int) -> None:
        raise KeyError


def test_settings_come_back_after_fit_and_draw(
    users: Any, tiny: Callable[..., MaskedDiffusion], tmp_path: Path
) -> None:
    seen: list[object] = []

    class Look(Callback):
        def on_step(self, step: int) -> None:
            seen.append(current())

    def interrupt(*_: object) -> None:
        seen.append(current())
        raise KeyError

    fit_line(Line(), tmp_path, 2, callbacks=[Look()], deterministic=True)
    assert current() == users and seen == [("highest", True, False, False)] * 2
    with suppress(KeyError):
        fit_line(Line(), tmp_path, 9, callbacks=[Fail()], resume=True)
    assert current() == users
    for precision, name in (("tf32", "high"), ("fp32", "highest"), (None, users[0])):
        draw(tiny(), 3, 1, precision=precision)
        with suppress(KeyError):
            draw(tiny(), 3, 1, precision=precision, on_step=interrupt)
        assert current() == users and seen[-1][0] == name  # type: ignore[index]


def test_nested_blocks_restore_the_one_around_them() -> None:
    before = current()
    with arithmetic("fp32"):
        with arithmetic("tf32"):
            with arithmetic("fp32"):
                pass
            assert current()[0] == "high"
        assert current()[0] == "highest"
    assert current() == before


def test_threads_must_agree() -> None:
    entered, leave = threading.Event(), threading.Event()
    before = current()

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
    with arithmetic("bf16"):  # the same settings
        leave.set()
        thread.join()
        assert current()[0] == "high"
    assert current() == before
