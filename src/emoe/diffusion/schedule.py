"""Masking schedules: the probability alpha_t that a token is still clean at time t, and the weight of the ELBO."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from emoe.config import Family, option


@dataclass(frozen=True, kw_only=True)
class Schedule(Family, package=""):
    """alpha_t decreases from 1 at t = 0 to (almost) 0 at t = 1."""

    def alpha(self, t: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Return the probability that a token is not masked at time t."""
        raise NotImplementedError

    def elbo_weight(self, t: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Return the weight -alpha'_t / (1 - alpha_t) of the masked negative log-likelihood (Eq. 22)."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class LinearSchedule(Schedule, kind="linear"):
    """alpha_t = 1 - t, so the weight is 1 / t (Prop. 3.1, step 5)."""

    def alpha(self, t: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        return 1 - t

    def elbo_weight(self, t: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """1 / t (Eq. 22)."""
        return 1 / t


@dataclass(frozen=True, kw_only=True)
class LogLinearSchedule(LinearSchedule, kind="loglinear"):
    """alpha_t = 1 - (1 - eps) t: a token is clean at t = 1 with probability eps; the weight is 1 / t."""

    eps: float = option(1e-3, doc="probability that a token is clean at t = 1", low=0, high=0.5)

    def alpha(self, t: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        return 1 - (1 - self.eps) * t


@dataclass(frozen=True, kw_only=True)
class CosineSchedule(Schedule, kind="cosine"):
    """alpha_t = 1 - cos(pi/2 (1 - t)): masks slowly at first."""

    def alpha(self, t: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        return 1 - torch.cos(math.pi / 2 * (1 - t))

    def elbo_weight(self, t: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """pi/2 tan(pi/2 (1 - t)) (Eq. 22)."""
        return math.pi / 2 * torch.tan(math.pi / 2 * (1 - t))
