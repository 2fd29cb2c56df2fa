"""A step in several parts is the step in one: the same loss, log, gradients and weights, for the same draws.

Each part has random streams of its own. To compare with one batch, the test lets that batch draw what the parts draw,
part after part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from steps import generator
from torch import Tensor
from torch.overrides import TorchFunctionMode

from emoe.config import ConfigError
from emoe.diffusion.times import stratified_times
from emoe.engine.fit import TrainConfig
from emoe.engine.optim import OptimConfig
from emoe.engine.stepper import Stepper
from emoe.methods.emoe import EMoEConfig
from emoe.methods.masked import MaskedDiffusion, MaskedDiffusionConfig
from emoe.methods.mdlm import MDLMConfig
from emoe.methods.vadd import VADDConfig
from emoe.ramps import Constant
from emoe.rng import Rng
from emoe.routing.compare import CompareConfig
from emoe.types import Loss

STEPS, BATCH = 4, 12
OPTIM = OptimConfig(lr=1e-2, eps=1e-6, clip=0.5, schedule="constant")
CONFIGS: dict[str, MaskedDiffusionConfig] = {
    "mdlm": MDLMConfig(),
    "vadd": VADDConfig(),
    "emoe": EMoEConfig(experts=5, relax_tau=Constant(value=0.7)),
    "emoe-draws": EMoEConfig(experts=5, compare=CompareConfig(draws=3), kl_time_power=Constant(value=1.0)),
}
Tiny = Callable[..., MaskedDiffusion]


class DrawnInParts(TorchFunctionMode):
    """Draws of the whole batch from the streams of its parts, each for its own rows."""

    def __init__(self, parts: list[Rng]):
        super().__init__()
        self.parts, self.streams = parts, {}
        self.drawn = 0

    def open(self, whole: Rng) -> None:
        for purpose in ("mask", "latent", "route"):
            self.streams[id(whole.stream(purpose))] = [part.stream(purpose) for part in self.parts]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        own = self.streams.get(id(kwargs.get("generator")))
        if func not in (torch.rand, torch.randn) or own is None:
            assert own is None, f"{func} draws from a stream of the step"
            return func(*args, **kwargs)
        self.drawn += 1
        rows, *rest = args[0]
        shape = (rows // len(own), *rest)
        return torch.cat([func(shape, **{**kwargs, "generator": generator}) for generator in own])


def batches(method: MaskedDiffusion, step: int) -> Tensor:
    symbols = [symbol for symbol in range(method.space.size) if symbol != method.space.mask_id]
    rows = torch.randint(len(symbols), (BATCH, method.space.length), generator=generator(100 + step))
    return torch.tensor(symbols)[rows]


def stepper_of(method: MaskedDiffusion, accumulate: int, optim: OptimConfig = OPTIM) -> Stepper:
    train = TrainConfig(steps=STEPS, batch=accumulate, ema=0.5, accumulate=accumulate)
    return Stepper(method, lambda step: batches(method, step), method.ramps, optim=optim, train=train, rng=Rng(5))


def result(stepper: Stepper) -> dict[str, Tensor]:
    assert stepper.loss is not None
    named = dict(stepper.module.named_parameters())
    grads = {f"grad/{name}": p.grad for name, p in named.items() if p.grad is not None}
    weights = {f"weight/{name}": p for name, p in named.items()}
    average = {f"ema/{name}": value for name, value in stepper.optimizer.state()["ema"].items()}
    log = {f"log/{name}": value.double() for name, value in stepper.loss.log.items()}
    norm = {"grad_norm": stepper.optimizer.grad_norm}
    return {k: v.detach().clone() for k, v in (grads | weights | average | log | norm).items()}


def assert_equal(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        # usage and the norm are kept in single precision
        atol = 1e-6 if "usage" in name or name == "grad_norm" else 1e-12
        torch.testing.assert_close(actual[name], value, rtol=0, atol=atol, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("parts", [2, 3, 12])
@pytest.mark.parametrize("kind", CONFIGS)
def test_parts_equal_one_batch(kind: str, parts: int, tiny: Tiny) -> None:
    cut, whole = (stepper_of(tiny(CONFIGS[kind], size=4, length=3, width=16, hidden=16), count) for count in (parts, 1))
    draws = DrawnInParts([Rng(5).part(number, parts) for number in range(parts)])
    draws.open(whole.parts[0])
    for step in range(STEPS):
        cut(step)
        for part in draws.parts:
            part.at(step)
        with draws:
            whole(step)
        assert_equal(result(cut), result(whole))
    assert draws.drawn >= STEPS * {"mdlm": 1, "vadd": 2}.get(kind, 3)


def ramp_at_start(method: MaskedDiffusion) -> dict[str, Tensor]:
    return {name: torch.tensor(ramp(0, STEPS)) for name, ramp in method.ramps.items()}


@pytest.mark.parametrize(
    "config",
    [
        EMoEConfig(experts=4, balance=0.3),
        EMoEConfig(experts=4, balance=0.3, usage_floor=1.2),
        EMoEConfig(experts=4, free_nats=0.4),
    ],
    ids=["switch", "floor", "free-nats"],
)
def test_statistics_of_a_batch_are_those_of_its_parts(config: EMoEConfig, tiny: Tiny) -> None:
    parts, reference = 3, tiny(config)
    stepper = stepper_of(tiny(config), parts, replace(OPTIM, clip=None))
    ramp = ramp_at_start(reference)
    rows = batches(reference, 0).chunk(parts)
    losses = [reference(some, ramp, Rng(5).part(number, parts)) for number, some in enumerate(rows)]
    total = torch.stack([loss.total for loss in losses]).mean()
    total.backward()
    stepper(0)
    want = {f"grad/{name}": p.grad for name, p in reference.named_parameters()} | {"log/loss": total.detach()}
    if config.balance:
        aux = torch.stack([loss.log["aux"].detach() for loss in losses])
        assert aux.std() > 1e-3
        want["log/aux"] = aux.mean()
    got = result(stepper)
    assert_equal({name: got[name] for name in want}, want)


def test_times_of_the_parts_are_those_of_the_batch() -> None:
    whole = stratified_times(12, Rng(3).at(7))
    for ranks, parts in ((1, 4), (2, 2), (4, 1), (3, 2)):
        times = []
        for rank in range(ranks):
            for number in range(parts):
                part = Rng(3, rank=rank, world=ranks).part(number, parts).at(7)
                times.append(stratified_times(12 // (ranks * parts), part))
        assert torch.equal(torch.cat(times), whole)


@pytest.mark.parametrize("fault", ["loss", "valid"])
def test_a_part_that_is_not_finite_or_not_valid_refuses_the_step(tiny: Tiny, fault: str) -> None:
    method = tiny(CONFIGS["mdlm"])
    stepper = stepper_of(method, 3)
    before = [p.detach().clone() for p in method.parameters()]
    inner, calls = method.as_loss, []

    def spoiled(total: Tensor, *rest: Any, **more: Any) -> Loss:
        calls.append(total)
        bad = len(calls) == 2
        loss = inner(total * float("nan") if bad and fault == "loss" else total, *rest, **more)
        return replace(loss, valid=torch.tensor(not bad)) if fault == "valid" else loss

    method.as_loss = spoiled  # type: ignore[method-assign]
    stepper(0)
    assert len(calls) == 3 and stepper.optimizer.skipped == 1
    assert all(torch.equal(a, b) for a, b in zip(before, method.parameters(), strict=True))


def test_unequal_parts_are_refused(tiny: Tiny) -> None:
    with pytest.raises(ConfigError, match="accumulate: must divide batch = 10, got 3"):
        TrainConfig(batch=10, accumulate=3)
    with pytest.raises(ConfigError, match="train.accumulate: 12 rows cannot be cut into 5 equal parts"):
        stepper_of(tiny(CONFIGS["mdlm"]), 5)(0)
