"""Optimiser, learning-rate schedule, clipping and the moving average of the weights."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from emoe.compiled import compiled, kernels_wanted
from emoe.config import Config, ConfigError, option
from emoe.ramps import learning_rate

ROW = 128  # numbers: a parameter that starts a row is aligned like a tensor of its own


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
    scaled: str | None = option(None, doc="parameters with this in their name have a learning rate of their own")
    scale: float = option(1.0, doc="that learning rate as a multiple of the common one", above=0)

    def conflicts(self):  # type: ignore[no-untyped-def]
        """Two decay rates."""
        if len(self.betas) != 2 or max(self.betas) >= 1:
            yield f"betas: must be two numbers in [0, 1), got {self.betas}"

    def lr_at(self, step: int, total: int) -> float:
        """Learning rate of update h = 0..total-1."""
        return learning_rate(
            step, total, peak=self.lr, warmup=self.warmup, cosine=self.schedule == "cosine", floor=self.floor
        )


class Optimizer:
    """One update: clip, refuse non-finite gradients, Adam, moving average. No host synchronisation anywhere.

    A step whose loss or gradient norm is not finite changes nothing; `skipped` counts such steps, `skipped_in_row`
    those since the last good one. The learning rate is a tensor, so a captured CUDA graph sees its changes.

    With `flat` (None: on a GPU, unless plain PyTorch is asked for) parameters, moments and averages become parts of
    one matrix each and `update` is one pass over them; else `torch.optim` does it. Saved states are the same.
    """

    def __init__(
        self,
        module: nn.Module,
        config: OptimConfig,
        *,
        ema: float,
        lr: Tensor,
        ema_decay: Tensor,
        flat: bool | None = None,
    ):
        self.config, self.ema_decay = config, ema_decay
        self.names = [name for name, p in module.named_parameters() if p.requires_grad]
        self.params: list[Tensor] = [p for p in module.parameters() if p.requires_grad]
        kind = torch.optim.AdamW if config.algorithm == "adamw" else torch.optim.Adam
        chosen = [config.scaled is not None and config.scaled in name for name in self.names]
        if config.scaled is not None and not any(chosen):
            raise ConfigError([f"scaled: no parameter has {config.scaled!r} in its name, such as {self.names[0]!r}"])
        self.lr, self.scale = lr, config.scale
        self.scaled_lr = lr.clone()
        groups: list[dict[str, Any]] = [
            {"params": [p for p, mine in zip(self.params, chosen, strict=True) if not mine]}
        ]
        if any(chosen):
            mine = [p for p, one in zip(self.params, chosen, strict=True) if one]
            groups = [group for group in groups if group["params"]] + [{"params": mine, "lr": self.scaled_lr}]
        self.adam = kind(
            groups,
            lr=lr,
            betas=(config.betas[0], config.betas[1]),
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
            capturable=lr.is_cuda,
        )
        self.ema: list[Tensor] = [p.detach().clone() for p in self.params] if ema else []
        device = self.params[0].device
        self.grad_norm = torch.zeros((), device=device)
        self.skipped = torch.zeros((), device=device)
        self.skipped_in_row = torch.zeros((), device=device)
        one_type = len({p.dtype for p in self.params}) == 1
        self.rows = Rows(self.params) if one_type and (self._pays() if flat is None else flat) else None
        if self.rows is not None:
            self._lay_out(self.rows, torch.tensor([config.scale if mine else 1.0 for mine in chosen], device=device))

    def _pays(self) -> bool:
        return self.params[0].is_cuda and kernels_wanted()

    @torch.no_grad()
    def _lay_out(self, rows: Rows, scales: Float[Tensor, " count"]) -> None:
        """Move parameters and averages into matrices, and make moments there."""
        self._weights = rows.fill(self.params[0].new_zeros(len(rows.owner), ROW), self.params)
        for p, view in zip(self.params, rows.views(self._weights), strict=True):
            p.data = view
        self._averages = self._weights.clone() if self.ema else None
        self.ema = [] if self._averages is None else rows.views(self._averages)
        self._first, self._second, self._grads = (torch.zeros_like(self._weights) for _ in range(3))
        self._steps, self._scales = torch.zeros_like(scales), scales
        parts = zip(self._steps, rows.views(self._first), rows.views(self._second), strict=True)
        self._moments = [dict(zip(("step", "exp_avg", "exp_avg_sq"), part, strict=True)) for part in parts]
        self._used: list[bool] = []
        self._mask = torch.zeros_like(scales, dtype=torch.bool)

    def zero_grad(self) -> None:
        """Drop the gradients."""
        self.adam.zero_grad(set_to_none=True)

    @torch.no_grad()
    def step(self, loss: Tensor) -> None:
        """Apply the gradients of `loss`."""
        if self.rows is not None:
            self._step_flat(self.rows, loss)
            return
        grads = [p.grad for p in self.params if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads)
        bad = (~(torch.isfinite(norm) & torch.isfinite(loss))).to(torch.float32)
        if self.config.clip is not None:
            torch.nn.utils.clip_grads_with_norm_(self.params, self.config.clip, norm)
        torch.mul(self.lr, self.scale, out=self.scaled_lr)
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

    def _step_flat(self, rows: Rows, loss: Tensor) -> None:
        used = [p.grad is not None for p in self.params]
        if used != self._used:
            self._used, self._mask = used, torch.tensor(used, device=self._mask.device)
            # As with torch.optim, a parameter that never had a gradient has no moments to save.
            self.adam.state.update(
                {p: own for p, own, one in zip(self.params, self._moments, used, strict=True) if one}
            )
        grads = rows.fill(self._grads, [p.grad for p in self.params])
        # Not compiled: among the forms of a sum the compiler chooses by the clock, and bits would differ between runs.
        norm = torch.linalg.vector_norm(grads)
        self.grad_norm = norm.float()
        # `compiled` takes a call without gradients for evaluation; here no tensor has one to follow.
        with torch.enable_grad():
            counters = self._steps, self._scales, self.lr, loss.detach(), self.skipped, self.skipped_in_row
            numbers = prepare(norm, self._mask, *counters, self.config)
            moved = self._weights, grads, self._first, self._second, self._averages
            update(*moved, self.ema_decay, norm, rows.owner, *numbers, self.config)

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
        """Restore what `state` returned."""
        saved = groups["optim"]
        for number, (name, p) in enumerate(zip(self.names, self.params, strict=True)):
            keys = [key for key in saved if key.rsplit("/", 1)[0] == name]
            self.adam.state[p] = {key.rsplit("/", 1)[1]: _laid_out_like(p, saved[key]) for key in keys}
            if self.rows is not None and keys:
                for key, home in self._moments[number].items():
                    home.copy_(self.adam.state[p][key])
                self.adam.state[p] = self._moments[number]
        self.skipped.copy_(saved["skipped"])
        self.skipped_in_row.copy_(saved["skipped_in_row"])
        for name, average in zip(self.names, self.ema, strict=False):
            average.copy_(groups["ema"][name])


class Rows:
    """Tensors like some parameters as a matrix (rows, ROW): each fills rows of its own, the last one up with zeros."""

    def __init__(self, like: Sequence[Tensor]):
        self.shapes = [p.shape for p in like]
        self.strides = [torch.empty_like(p).stride() for p in like]  # channels_last stays, gaps do not
        rows = [-(-p.numel() // ROW) for p in like]
        self.starts = list(itertools.accumulate(rows, initial=0))
        self.owner = torch.arange(len(rows)).repeat_interleave(torch.tensor(rows)).to(like[0].device)

    def fill(self, matrix: Float[Tensor, "rows 128"], values: Sequence[Tensor | None]) -> Float[Tensor, "rows 128"]:
        """Copy the values into a matrix, by one kernel where they lie in memory as the parameters do; None is 0."""
        given = [(view, value) for view, value in zip(self.views(matrix), values, strict=True) if value is not None]
        if len(given) < len(values):
            matrix.zero_()
        if given:
            torch._foreach_copy_([view for view, _ in given], [value for _, value in given])
        return matrix

    def views(self, matrix: Float[Tensor, "rows 128"]) -> list[Tensor]:
        """The parts of a matrix in the shapes of the parameters."""
        places = zip(self.shapes, self.strides, self.starts[:-1], strict=True)
        return [matrix.as_strided(shape, strides, start * ROW) for shape, strides, start in places]


@compiled
def prepare(
    norm: Float[Tensor, ""],
    used: Bool[Tensor, " count"],
    steps: Float[Tensor, " count"],
    scales: Float[Tensor, " count"],
    lr: Float[Tensor, ""],
    loss: Float[Tensor, ""],
    skipped: Float[Tensor, ""],
    skipped_in_row: Float[Tensor, ""],
    config: OptimConfig,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Counters of a step, in place, and the numbers that `update` needs of each parameter.

    Not a part of `update`, since the compiler would take the powers, in double precision, anew for every number.

    Returns:
        Of each of the parameters: whether it moves, lr / (1 - beta1^n) with its own learning rate and n the updates
        with this one, sqrt(1 - beta2^n), 1 - lr * weight_decay; then whether norm and loss are finite.
    """
    good = torch.isfinite(norm) & torch.isfinite(loss)
    bad = 1 - good.to(torch.float32)
    skipped.add_(bad)
    skipped_in_row.add_(bad).mul_(bad)
    moves = used & good
    steps.add_(moves)
    (beta1, beta2), n, rate = config.betas, steps.double(), scales.double() * lr
    numbers = rate / (1 - beta1**n), (1 - beta2**n).sqrt(), 1 - rate * config.weight_decay
    pace, root, kept = (number.to(norm.dtype) for number in numbers)
    return moves, pace, root, kept, good


@compiled
def update(
    params: Float[Tensor, "rows 128"],
    grads: Float[Tensor, "rows 128"],
    exp_avg: Float[Tensor, "rows 128"],
    exp_avg_sq: Float[Tensor, "rows 128"],
    ema: Float[Tensor, "rows 128"] | None,
    ema_decay: Float[Tensor, ""],
    norm: Float[Tensor, ""],
    owner: Int[Tensor, " rows"],
    moves: Bool[Tensor, " count"],
    pace: Float[Tensor, " count"],
    root: Float[Tensor, " count"],
    kept: Float[Tensor, " count"],
    good: Bool[Tensor, ""],
    config: OptimConfig,
) -> None:
    """Adam or AdamW, then the moving average, in place; row r has the numbers of parameter owner[r].

    With g the clipped gradient (plus weight_decay * p for Adam):
    m <- m + (1 - beta1) (g - m),  v <- v + (1 - beta2) (g^2 - v),  p <- kept * p for AdamW,
    p <- p - pace * m / (sqrt(v) / root + eps),  ema <- ema + (1 - decay) (p - ema).
    """
    moves, pace, root, kept = (x.index_select(0, owner).unsqueeze(1) for x in (moves, pace, root, kept))
    (beta1, beta2), g, p = config.betas, grads, params
    if config.clip is not None:
        g = g * (config.clip / (norm + 1e-6)).clamp(max=1)
    if config.weight_decay and config.algorithm == "adamw":
        p = kept * p
    elif config.weight_decay:
        g = g + config.weight_decay * p
    m = exp_avg + (1 - beta1) * (g - exp_avg)
    v = exp_avg_sq + (1 - beta2) * (g * g - exp_avg_sq)
    p = torch.where(moves, p - pace * m / (v.sqrt() / root + config.eps), params)
    if ema is not None:
        ema.copy_(torch.where(good, ema + (1 - ema_decay) * (p - ema), ema))
    params.copy_(p)
    exp_avg.copy_(torch.where(moves, m, exp_avg))
    exp_avg_sq.copy_(torch.where(moves, v, exp_avg_sq))


def _laid_out_like(p: Tensor, saved: Tensor) -> Tensor:
    """A copy on p's device; in p's order in memory too where it has p's shape, as the fused kernels demand."""
    where = torch.empty_like(p) if saved.shape == p.shape else torch.empty(saved.shape, device=p.device)
    return where.to(saved.dtype).copy_(saved)


def ema_decay(decay: float, step: int) -> float:
    """Decay of the moving average at update h: min(decay, (1 + h) / (10 + h)), so early weights do not linger."""
    return min(decay, (1 + step) / (10 + step))
