"""One training step as a function of the step number: eager, or captured once as a CUDA graph and replayed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from emoe import kernels
from emoe.config import Config, ConfigError, option
from emoe.engine.arithmetic import Precision
from emoe.engine.distributed import ALONE, World
from emoe.engine.optim import OptimConfig, Optimizer, ema_decay
from emoe.ramps import Ramp
from emoe.rng import Rng
from emoe.types import Loss

WARMUP_STEPS = 3  # eager steps before capture: they create gradients, moments and generators
TABLE_STEPS = 1024  # steps whose numbers go to the device at once: a copy per step would stall the GPU

# Locked while a thread compiles (in its first steps) or captures: compilers time kernels and wait for the whole device,
# which ends another thread's capture.
_ALONE = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Config):
    """Length, batch, arithmetic, log records and checkpoints of training."""

    steps: int = option(24_000, doc="number of updates", low=1)
    batch: int = option(512, doc="rows per update, over all ranks", low=1)
    accumulate: int = option(1, doc="equal parts of a process's rows per update, to save memory", low=1, neutral=True)
    ema: float = option(0.0, doc="decay of the moving average of the weights; 0 = none", low=0, high=0.999999)
    precision: Precision = option("tf32", doc="arithmetic of matrix products; CPUs have only fp32 and bf16")
    cuda_graph: bool = option(True, doc="capture the step as a CUDA graph where there is a GPU", neutral=True)
    deterministic: bool = option(False, doc="only kernels that repeat their bits: slower, but exact on a GPU too")
    log_every: int = option(100, doc="steps between two log records", low=1, neutral=True)
    save_every: int = option(2_000, doc="steps between two checkpoints", low=1, neutral=True)
    keep: int = option(2, doc="checkpoints kept", low=2, neutral=True)
    max_file_mb: int | None = option(
        None, doc="largest checkpoint file in 10^6 bytes, unless one tensor is larger; none = any", low=1, neutral=True
    )
    stop_on_collapse: bool = option(False, doc="end a run on posterior collapse instead of warning", neutral=True)

    def conflicts(self) -> Iterator[str]:
        if self.batch % self.accumulate:
            yield f"accumulate: must divide batch = {self.batch}, got {self.accumulate}"


class Stepper:
    """Forward, backward and update of step h; everything that changes with h enters through device tensors.

    With `cuda_graph` the first steps run eagerly on a side stream (they are real steps), then one step is captured and
    all later ones replay it: the same kernels with new data, times, noise, ramps and learning rate.

    With `accumulate` = k the rows of a step are cut into k equal parts, one after the other in memory; their
    gradients, losses and logs are averaged, and then averaged over the ranks of `world`. Each part has random streams
    of its own (`Rng.part`). Terms that are not means over rows are averaged over the parts.
    """

    def __init__(
        self,
        module: nn.Module,
        batches: Callable[[int], Tensor],
        ramps: Mapping[str, Ramp],
        *,
        optim: OptimConfig,
        train: TrainConfig,
        rng: Rng,
        world: World = ALONE,
    ):
        self.module, self.batches, self.ramps = module, batches, dict(ramps)
        self.optim, self.train, self.world, self.device = optim, train, world, rng.device
        self.parts = [rng.part(number, train.accumulate) for number in range(train.accumulate)]
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # for convolutions
        self.values = torch.zeros(len(self.ramps) + 2, device=self.device)  # ramps, learning rate, EMA decay
        self.ramp = {name: self.values[i] for i, name in enumerate(self.ramps)}
        self.optimizer = Optimizer(module, optim, ema=train.ema, lr=self.values[-2], ema_decay=self.values[-1])
        self.loss: Loss | None = None
        self.graph: torch.cuda.CUDAGraph | None = None
        # With several ranks the steps are eager: a graph would have to hold the exchange between them.
        self.use_graph = train.cuda_graph and on_gpu and world.size == 1
        self.notes: tuple[str, ...] = (f"kernels: {kernels.describe(self.device)}",) if on_gpu else ()
        if train.cuda_graph and on_gpu and not self.use_graph:
            self.notes += ("CUDA graphs are off with several ranks",)
        self._eager_steps = 0
        self._stream: torch.cuda.Stream | None = None
        self._table, self._table_start = self.values[None], -1

    def numbers_at(self, step: int) -> dict[str, float]:
        """Ramps, learning rate and EMA decay of step h, by name."""
        total = self.train.steps
        numbers = {name: ramp(step, total) for name, ramp in self.ramps.items()}
        return numbers | {"lr": self.optim.lr_at(step, total), "ema_decay": ema_decay(self.train.ema, step)}

    def __call__(self, step: int) -> None:
        """Do step h = 0, 1, ...; `loss` and `optimizer.grad_norm` then hold its results."""
        self._seed(step)
        self.values.copy_(self._numbers_on_device(step))
        batch = self.batches(step)
        if not self.use_graph:
            self.loss = self._train(batch)
        elif self._eager_steps < WARMUP_STEPS:
            with _ALONE, self._on_side_stream():
                self.loss = self._train(batch)
            self._eager_steps += 1
        else:
            if self.graph is None:
                self._batch = batch.clone()
                self.graph = self._capture(self._batch)
                self._seed(step)  # capture does not run the kernels, but it moves the generators
            self._batch.copy_(batch)
            self.graph.replay()

    def _seed(self, step: int) -> None:
        for part in self.parts:
            part.at(step)

    def _numbers_on_device(self, step: int) -> Tensor:
        start = step - step % TABLE_STEPS
        if start != self._table_start:
            rows = [list(self.numbers_at(h).values()) for h in range(start, start + TABLE_STEPS)]
            self._table, self._table_start = torch.tensor(rows, device=self.device), start
        return self._table[step - start]

    def _train(self, batch: Tensor) -> Loss:
        self.module.zero_grad()
        count = len(self.parts)
        if len(batch) % count:
            raise ConfigError([f"train.accumulate: {len(batch)} rows cannot be cut into {count} equal parts"])
        loss = _mean([self._backward(rows, part) for rows, part in zip(batch.chunk(count), self.parts, strict=True)])
        if self.world.size > 1:
            loss = self._exchange(loss)
        self.optimizer.step(loss.total, loss.valid)
        return loss

    def _backward(self, rows: Tensor, rng: Rng) -> Loss:
        """Add the gradients of a part; return its loss and log, detached."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.train.precision == "bf16"):
            loss = self.module(rows, self.ramp, rng)
        count = len(self.parts)
        (loss.total if count == 1 else loss.total / count).backward()
        log = {name: value.detach() for name, value in loss.log.items()}
        return Loss(loss.total.detach(), log, loss.valid, loss.refusal)

    def _exchange(self, loss: Loss) -> Loss:
        """Average gradients, loss and log over the ranks, so that all ranks update alike, refusals included."""
        params = self.optimizer.params
        # A parameter that no rank used must stay without a gradient, or weight decay and moments would act on it.
        used = self.world.agree(*(p.grad is not None for p in params))
        for p, anywhere in zip(params, used, strict=True):
            if anywhere and p.grad is None:
                p.grad = torch.zeros_like(p)
        log = {name: value.clone() for name, value in loss.log.items()}
        loss = Loss(loss.total.clone(), log, loss.valid, loss.refusal)
        self.world.average([p.grad for p in params if p.grad is not None])
        self.world.average([loss.total, *loss.log.values()])
        if loss.valid is None:
            return loss
        share = loss.valid.to(loss.total.dtype)
        self.world.average([share])
        return Loss(loss.total, log, share == 1, loss.refusal)

    def _capture(self, batch: Tensor) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        for part in self.parts:
            for generator in part.generators():
                graph.register_generator_state(generator)
        self.module.zero_grad()
        # Other threads may train on streams of their own: one capture at a time, and it must not forbid their calls.
        with _ALONE, torch.cuda.graph(graph, stream=self._side_stream(), capture_error_mode="thread_local"):
            self.loss = self._train(batch)
        return graph

    def _side_stream(self) -> torch.cuda.Stream:
        """The stream to capture on: the current one, unless that is the default stream, which cannot be captured.

        Streams come from a small pool in turn; taking a new one where the caller has its own would in the end hand
        out the stream of another thread.
        """
        current = torch.cuda.current_stream()
        if current != torch.cuda.default_stream():
            return current
        self._stream = self._stream or torch.cuda.Stream()
        return self._stream

    @contextlib.contextmanager
    def _on_side_stream(self) -> Iterator[None]:
        current, side = torch.cuda.current_stream(), self._side_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            yield
        current.wait_stream(side)


def _mean(losses: Sequence[Loss]) -> Loss:
    """The mean of each number over equal parts of a batch; valid if all parts are."""
    first = losses[0]
    if len(losses) == 1:
        return first
    log = {name: torch.stack([loss.log[name] for loss in losses]).mean(0) for name in first.log}
    flags = [loss.valid for loss in losses if loss.valid is not None]
    valid = torch.stack(flags).all() if flags else None
    return Loss(torch.stack([loss.total for loss in losses]).mean(), log, valid, first.refusal)
