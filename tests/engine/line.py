"""The smallest thing the engine can train, with faults at chosen steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from emoe.engine.callbacks import Callback, FitResult
from emoe.engine.fit import TrainConfig, fit
from emoe.engine.optim import OptimConfig
from emoe.ramps import Linear
from emoe.rng import Rng
from emoe.types import Loss


class Line(nn.Module):
    """Least squares on noise; the loss or the gradient alone is spoiled, and the log says `ill`, at chosen steps."""

    def __init__(
        self,
        loss: Mapping[int, float] | None = None,
        gradient: Mapping[int, float] | None = None,
        ill: Iterable[int] = (),
    ):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.loss, self.gradient, self.ill = dict(loss or {}), dict(gradient or {}), set(ill)
        self.before: dict[int, Tensor] = {}

    def forward(self, batch: Tensor, ramp: Mapping[str, Tensor], rng: Rng) -> Loss:
        self.before[rng.step] = self.weight.detach().clone()
        target = torch.randn(3, generator=rng.stream("latent"))
        total = ramp["scale"] * (self.weight * self.loss.get(rng.step, 1.0) - target).square().sum()
        if rng.step in self.gradient:
            self.weight.register_hook(lambda grad: grad * self.gradient.get(rng.step, 1.0))
        return Loss(total, {"ill": torch.tensor(float(rng.step + 1 in self.ill))})


def fit_line(
    module: nn.Module,
    folder: Path,
    steps: int,
    *,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
    **options: Any,
) -> FitResult:
    """Train it, with a record at each step and a checkpoint at every fifth unless `options` say otherwise."""
    config = TrainConfig(steps=steps, batch=1, precision="fp32", **{"log_every": 1, "save_every": 5, **options})
    ramps, optim = {"scale": Linear(start=1.0, end=2.0)}, OptimConfig(lr=0.1, schedule="constant")
    where = {"run_dir": folder, "resume": resume, "callbacks": callbacks}
    return fit(module, lambda step: torch.zeros(1, 1), ramps, optim=optim, train=config, rng=Rng(1), **where)
