"""Optimiser, learning-rate schedule, clipping and the moving average of the weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from emoe.config import Config, option


@dataclass(frozen=True, kw_only=True)
class OptimConfig(Config):
    """Adam or AdamW with warm-up and a schedule."""

    algorithm: Literal["adam", "adamw"] = option("adam", doc="adam, or adamw with decoupled weight decay")
    lr: float = option(3e-4, doc="peak learning rate", above=0)
    betas: tuple[float, ...] = option((0.9, 0.999), doc="decay of the two moments", low=0, high=1)
    eps: float = option(1e-8, doc="added to the root of the second moment", above=0)
    weight_decay: float = option(0.0, doc="weight decay", low=0)
    clip: float | None = option(1.0, doc="largest norm of the whole gradient; none = no clipping", above=0)
    warmup: int = option(0, doc="steps of linear warm-up", low=0)
    schedule: Literal["constant", "cosine"] = option("cosine", doc="course of the learning rate after warm-up")
    floor: float = option(0.0, doc="share of the peak that a cosine ends at", low=0, high=1)

    def conflicts(self) -> Iterator[str]:
        if len(self.betas) != 2 or max(self.betas) >= 1:
            yield f"betas: must be two numbers in [0, 1), got {self.betas}"

    def lr_at(self, step: int, total: int) -> float:
        """Learning rate of update h = 0..total-1: linear warm-up, then constant or cosine.

        Warm-up: lr * (h + 1) / warmup for h < warmup, so the first update is not lost.
        Cosine: lr * (floor + (1 - floor) * (1 + cos(pi * u)) / 2), u = (h - warmup) / (total - warmup).
        """
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        if self.schedule == "constant":
            return self.lr
        u = min(1.0, (step - self.warmup) / max(1, total - self.warmup))
        return self.lr * (self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * u)))


class Optimizer:
    """One update: clip, refuse non-finite gradients, Adam, moving average. No host synchronisation anywhere.

    A step whose loss or gradient norm is not finite changes nothing; `skipped` counts such steps, `skipped_in_row`
    those since the last good one. The learning rate is a tensor, which a captured CUDA graph reads at each replay.
    """

    def __init__(self, module: nn.Module, config: OptimConfig, *, ema: float, lr: Tensor, ema_decay: Tensor):
        self.config, self.ema_decay = config, ema_decay
        self.names = [name for name, p in module.named_parameters() if p.requires_grad]
        self.params: list[Tensor] = [p for p in module.parameters() if p.requires_grad]
        kind = torch.optim.AdamW if config.algorithm == "adamw" else torch.optim.Adam
        options: dict[str, Any] = {name: getattr(config, name) for name in ("betas", "eps", "weight_decay")}
        self.adam = kind(self.params, lr=lr, **options, fused=True, capturable=lr.is_cuda)
        self.ema: list[Tensor] = [p.detach().clone() for p in self.params] if ema else []
        self.grad_norm, self.skipped, self.skipped_in_row = torch.zeros(3, device=self.params[0].device).unbind()

    @torch.no_grad()
    def step(self, loss: Tensor, valid: Tensor | None = None) -> None:
        """Apply the gradients of `loss`, unless it is not valid."""
        grads = [p.grad for p in self.params if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads)
        good = torch.isfinite(norm) & torch.isfinite(loss)
        bad = (~(good if valid is None else good & valid)).to(torch.float32)
        if self.config.clip is not None:
            torch.nn.utils.clip_grads_with_norm_(self.params, self.config.clip, norm)
        # The fused kernels leave parameters and moments alone where found_inf is 1 (the protocol of GradScaler).
        self.adam.found_inf = bad  # type: ignore[attr-defined]
        self.adam.step()
        self.grad_norm.copy_(norm)
        self.skipped.add_(bad)
        self.skipped_in_row.add_(bad).mul_(bad)
        if self.ema:
            # ema <- ema + (1 - decay) * (p - ema), but for a step that was refused
            change = torch._foreach_sub(self.params, self.ema)
            torch._foreach_mul_(change, (1 - self.ema_decay) * (1 - bad))
            torch._foreach_add_(self.ema, change)

    def state(self) -> dict[str, dict[str, Tensor]]:
        """All tensors that a resumed run needs, by group and parameter name."""
        moments = {
            f"{name}/{key}": value
            for name, p in zip(self.names, self.params, strict=True)
            for key, value in self.adam.state[p].items()
        }
        counters = {"skipped": self.skipped, "skipped_in_row": self.skipped_in_row}
        groups = {"optim": moments | counters}
        if self.ema:
            groups["ema"] = dict(zip(self.names, self.ema, strict=True))
        return groups

    @torch.no_grad()
    def load(self, groups: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Restore the tensors of `state`."""
        saved = groups["optim"]
        for name, p in zip(self.names, self.params, strict=True):
            keys = [key for key in saved if key.rsplit("/", 1)[0] == name]
            self.adam.state[p] = {key.rsplit("/", 1)[1]: _laid_out_like(p, saved[key]) for key in keys}
        self.skipped.copy_(saved["skipped"])
        self.skipped_in_row.copy_(saved["skipped_in_row"])
        for name, average in zip(self.names, self.ema, strict=False):
            average.copy_(groups["ema"][name])


def _laid_out_like(p: Tensor, saved: Tensor) -> Tensor:
    """A copy on p's device; a tensor of p's shape gets p's memory format, as the fused kernels require."""
    where = torch.empty_like(p) if saved.shape == p.shape else torch.empty(saved.shape, device=p.device)
    return where.to(saved.dtype).copy_(saved)


def ema_decay(decay: float, step: int) -> float:
    """Decay of the moving average at update h: min(decay, (1 + h) / (10 + h)), which forgets early weights."""
    return min(decay, (1 + step) / (10 + step))
