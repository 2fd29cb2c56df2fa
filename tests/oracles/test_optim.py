"""The optimiser against Adam, clipping and moving average written out by hand, and steps that must not count."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from emoe.engine.optim import OptimConfig, Optimizer, ema_decay
from emoe.engine.stepper import Stepper, TrainConfig
from emoe.ramps import Linear
from emoe.rng import Rng
from emoe.types import Loss


class Bowl(nn.Module):
    """Parameters of three shapes and a loss whose gradient never dies (where it does, Adam amplifies rounding)."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.a = nn.Parameter(torch.randn(4, 3, generator=draw, dtype=torch.float64).to(dtype))
        self.b = nn.Parameter(torch.randn(5, generator=draw, dtype=torch.float64).to(dtype))
        self.c = nn.Parameter(torch.randn((), generator=draw, dtype=torch.float64).to(dtype))

    def loss(self, step: int) -> Tensor:
        draw = torch.Generator().manual_seed(1000 + step)
        target = [torch.randn(p.shape, generator=draw, dtype=torch.float64).to(p.dtype) for p in self.parameters()]
        parts = [(p - goal).square().sum() for p, goal in zip(self.parameters(), target, strict=True)]
        return (1 + step % 7) * sum(parts) + (self.c - self.b.mean()).square()


def copies(module: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in module.parameters()]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("algorithm", ["adam", "adamw"])
@pytest.mark.parametrize(("clip", "decay"), [(1.0, 0.1), (None, 0.0), (1e6, 0.02)])
def test_a_hundred_updates_equal_adam_by_hand(algorithm: str, clip: float | None, decay: float, dtype: torch.dtype):
    """Clip by the norm of everything, Adam or AdamW with bias correction, then the moving average."""
    config = OptimConfig(algorithm=algorithm, lr=0.05, betas=(0.8, 0.95), eps=1e-6, weight_decay=decay, clip=clip)
    module = Bowl(dtype)
    lr, average_decay = torch.tensor(0.0), torch.tensor(0.0)
    optimizer = Optimizer(module, config, ema=0.9, lr=lr, ema_decay=average_decay)
    params = [p.double() for p in copies(module)]
    first, second = [torch.zeros_like(p) for p in params], [torch.zeros_like(p) for p in params]
    average = list(params)
    reference = Bowl(torch.float64)
    for step in range(100):
        lr.fill_(config.lr_at(step, 100))
        average_decay.fill_(ema_decay(0.9, step))
        module.zero_grad()
        loss = module.loss(step)
        loss.backward()
        optimizer.step(loss.detach())

        for p, value in zip(reference.parameters(), params, strict=True):
            p.data.copy_(value.to(dtype))
        grads = list(torch.autograd.grad(reference.loss(step), list(reference.parameters())))
        norm = math.sqrt(sum(g.square().sum().item() for g in grads))
        assert optimizer.grad_norm.item() == pytest.approx(norm, rel=1e-5)
        if clip is not None:
            grads = [g * min(1.0, clip / (norm + 1e-6)) for g in grads]
        rate, d = lr.item(), average_decay.item()
        for i, g in enumerate(grads):
            if algorithm == "adamw":
                params[i] = params[i] * (1 - rate * decay)
            else:
                g = g + decay * params[i]
            first[i] = 0.8 * first[i] + 0.2 * g
            second[i] = 0.95 * second[i] + 0.05 * g * g
            m, v = first[i] / (1 - 0.8 ** (step + 1)), second[i] / (1 - 0.95 ** (step + 1))
            params[i] = params[i] - rate * m / (v.sqrt() + 1e-6)
        average = [d * a + (1 - d) * p for a, p in zip(average, params, strict=True)]
    tolerance = 1e-9 if dtype == torch.float64 else 1e-5
    for got, want in zip(module.parameters(), params, strict=True):
        assert torch.allclose(got.double(), want, atol=tolerance)
    for got, want in zip(optimizer.ema, average, strict=True):
        assert torch.allclose(got.double(), want, atol=tolerance)
    assert optimizer.skipped == 0 and optimizer.skipped_in_row == 0


def test_average_decays_less_at_first_and_is_kept_only_if_asked_for():
    assert [ema_decay(0.999, h) for h in (0, 90)] == [0.1, 0.91] and ema_decay(0.5, 1000) == 0.5
    numbers = {"lr": torch.tensor(0.1), "ema_decay": torch.tensor(0.0)}
    optimizer = Optimizer(Bowl(torch.float32), OptimConfig(), ema=0.0, **numbers)
    assert optimizer.ema == [] and "ema" not in optimizer.state()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("clip", [1.0, None])
@pytest.mark.parametrize("where", ["gradient", "loss", "valid"])
def test_a_step_that_is_not_finite_or_not_valid_changes_nothing(bad: float, clip: float | None, where: str):
    config = OptimConfig(clip=clip, weight_decay=0.1, algorithm="adamw")

    def start() -> tuple[Bowl, Optimizer]:
        module = Bowl(torch.float32)
        return module, Optimizer(module, config, ema=0.9, lr=torch.tensor(0.1), ema_decay=torch.tensor(0.9))

    def update(module: Bowl, optimizer: Optimizer, step: int, poison: bool = False) -> None:
        module.zero_grad()
        loss = module.loss(step)
        loss.backward()
        if poison and where == "gradient":
            module.b.grad[2] = bad
        loss = loss.detach() + (bad if poison and where == "loss" else 0)
        optimizer.step(loss, torch.tensor(not poison) if where == "valid" else None)

    module, optimizer = start()
    for step in range(5):
        update(module, optimizer, step)
    before = {group: {k: v.clone() for k, v in values.items()} for group, values in optimizer.state().items()}
    weights = copies(module)
    for step in range(3):
        update(module, optimizer, step, poison=True)
        assert (optimizer.skipped, optimizer.skipped_in_row) == (step + 1, step + 1)
        assert optimizer.grad_norm.isfinite() == (where != "gradient")
    assert all(torch.equal(a, b) for a, b in zip(weights, module.parameters(), strict=True))
    after = optimizer.state()
    for group, values in before.items():
        for name, value in values.items():
            assert name.startswith("skipped") or torch.equal(after[group][name], value), f"{group} {name}"
    update(module, optimizer, 5)
    assert (optimizer.skipped, optimizer.skipped_in_row) == (3, 0)
    twin, plain = start()  # the same good steps without the bad ones between them end at the same weights
    for step in range(6):
        update(twin, plain, step)
    assert all(torch.equal(a, b) for a, b in zip(twin.parameters(), module.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(plain.ema, optimizer.ema, strict=True))


class Recorder(nn.Module):
    """A module that records the values of its ramp."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))
        self.weights: list[float] = []

    def forward(self, batch: Tensor, ramp: dict[str, Tensor], rng: Rng) -> Loss:
        self.weights.append(ramp["weight"].item())
        return Loss((self.w - batch).square().sum())


@pytest.mark.parametrize("start", [0, 1022])
def test_stepper_passes_the_numbers_of_the_step(start: int):
    """Ramp, learning rate and EMA decay of step h, also across the edge of a table and after a resume."""
    module, total = Recorder(), 2000
    optim = OptimConfig(lr=0.5, warmup=4, schedule="cosine", clip=None)
    train, ramps = TrainConfig(steps=total, ema=0.99), {"weight": Linear(start=0.0, end=1.0)}
    stepper = Stepper(module, lambda step: torch.ones(2), ramps, optim=optim, train=train, rng=Rng(0))
    for step in range(start, start + 5):
        stepper(step)
        numbers = stepper.numbers_at(step)
        assert numbers == {"weight": step / total, "lr": optim.lr_at(step, total), "ema_decay": ema_decay(0.99, step)}
        assert stepper.optimizer.adam.param_groups[0]["lr"].item() == pytest.approx(numbers["lr"], rel=1e-6)
        assert stepper.optimizer.ema_decay.item() == pytest.approx(numbers["ema_decay"], rel=1e-6)
    assert module.weights == pytest.approx([step / total for step in range(start, start + 5)], rel=1e-6)
