"""Numbers that depend on the training step h: temperatures, KL weights.

Ramps are frozen configs, which are saved with the experiment. The engine evaluates them on the host and passes the
values to the method as 0-dimensional tensors; a captured CUDA graph therefore reads a new value at each replay.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from emoe.config import Family, option


@dataclass(frozen=True, kw_only=True)
class Ramp(Family, package=""):
    """A number as a function of the step h and of the total number of steps; a bare number is a constant."""

    number_kind: ClassVar[str] = "constant"

    def __call__(self, step: int, total: int) -> float:
        """Value at step h in 0..total."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Constant(Ramp, kind="constant"):
    """The same value at every step."""

    extremes: ClassVar[tuple[str, ...]] = ("value",)
    value: float = option(doc="the value")

    def __call__(self, step: int, total: int) -> float:
        return self.value


@dataclass(frozen=True, kw_only=True)
class Slope(Ramp):
    """From `start` to `end` over a share of training or a number of steps, then constant."""

    extremes: ClassVar[tuple[str, ...]] = ("start", "end")
    start: float = option(doc="value at step 0")
    end: float = option(doc="value at the end of the ramp")
    share: float = option(1.0, doc="share of all steps the ramp takes", above=0, high=1)
    steps: int | None = option(None, doc="length of the ramp in steps, instead of a share", low=1)

    def progress(self, step: int, total: int) -> float:
        """u = min(1, h / length)."""
        return min(1.0, step / (self.steps if self.steps is not None else self.share * total))


@dataclass(frozen=True, kw_only=True)
class Linear(Slope, kind="linear"):
    """A straight line: start + (end - start) * u."""

    def __call__(self, step: int, total: int) -> float:
        return self.start + (self.end - self.start) * self.progress(step, total)


@dataclass(frozen=True, kw_only=True)
class Exponential(Slope, kind="exponential"):
    """A constant factor per step: start * (end / start)^u (tau_h of App. B.1)."""

    start: float = option(doc="value at step 0", above=0)
    end: float = option(doc="value at the end of the ramp", above=0)

    def __call__(self, step: int, total: int) -> float:
        return self.start * (self.end / self.start) ** self.progress(step, total)


@dataclass(frozen=True, kw_only=True)
class Decay(Ramp, kind="decay"):
    """max(floor, start * exp(-rate * h)): the temperature tau_h of App. B.2."""

    extremes: ClassVar[tuple[str, ...]] = ("floor", "start")  # a decay reaches its floor in the end
    start: float = option(1.0, doc="value at step 0", above=0)
    rate: float = option(doc="decay per step", low=0)
    floor: float = option(0.0, doc="smallest value", low=0)

    def __call__(self, step: int, total: int) -> float:
        return max(self.floor, self.start * math.exp(-self.rate * step))
