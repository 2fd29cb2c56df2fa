"""The update of all weights in one pass: equal to torch.optim, and to the plain form in every state it can be in."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor, nn

from emoe.engine import tensorfile
from emoe.engine.optim import ROW, OptimConfig, Optimizer


class Odd(nn.Module):
    """Parameters that fill less than a row, exactly one, and more, one of them in channels_last."""

    def __init__(self, dtype: torch.dtype = torch.float64):
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        shapes = {"a": (8, 4, 3, 3), "b": (5,), "c": (), "gate": (16, 8), "late": (3, 50), "idle": (7,), "e": (200, 2)}
        for name, shape in shapes.items():
            value = torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype)
            if len(shape) == 4:
                value = value.to(memory_format=torch.channels_last)
            self.register_parameter(name, nn.Parameter(value))

    def set_grads(self, step: int) -> None:
        """Gradients of step h; `late` has none before step 6, `b` none at step 11, `idle` never."""
        draw = torch.Generator().manual_seed(100 + step)
        for name, p in self.named_parameters():
            grad = torch.randn(p.shape, generator=draw, dtype=torch.float64).to(p.dtype)
            missing = name == "idle" or (name == "late" and step < 6) or (name == "b" and step == 11)
            p.grad = None if missing else torch.empty_like(p).copy_(grad)  # as autograd gives them: strides of p


def build(config: OptimConfig, *, ema: float = 0.9, flat: bool, dtype: torch.dtype = torch.float64):
    module = Odd(dtype)
    lr, decay = torch.tensor(0.05, dtype=torch.float64), torch.tensor(0.75, dtype=torch.float64)
    return module, Optimizer(module, config, ema=ema, lr=lr, ema_decay=decay, flat=flat)


def everything(module: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    groups = {"model": dict(module.named_parameters()), **optimizer.state(), "": {"norm": optimizer.grad_norm}}
    return {f"{group}/{name}": x.detach().clone() for group, some in groups.items() for name, x in some.items()}


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].shape == value.shape and found[name].dtype == value.dtype, name
        rtol = 1e-6 if name == "/norm" else 1e-12  # the norm is kept in float32
        torch.testing.assert_close(found[name], value, rtol=rtol, atol=1e-12, equal_nan=True, msg=name)


@pytest.mark.parametrize("algorithm", ["adam", "adamw"])
@pytest.mark.parametrize(("clip", "weight_decay"), [(1.0, 0.1), (None, 0.0), (None, 0.1)])
def test_one_pass_equals_torch_optim(algorithm: str, clip: float | None, weight_decay: float) -> None:
    config = OptimConfig(algorithm=algorithm, betas=(0.8, 0.95), eps=1e-6, weight_decay=weight_decay, clip=clip)
    module, optimizer = build(config, flat=True)
    reference = Odd()
    kind = torch.optim.AdamW if algorithm == "adamw" else torch.optim.Adam
    adam = kind(reference.parameters(), lr=0.05, betas=(0.8, 0.95), eps=1e-6, weight_decay=weight_decay, foreach=False)
    average = [p.detach().clone() for p in reference.parameters()]
    for step in range(25):
        for one in (module, reference):
            one.set_grads(step)
        optimizer.step(torch.tensor(1.0))
        torch.nn.utils.clip_grad_norm_(reference.parameters(), math.inf if clip is None else clip)
        adam.step()
        average = [a + 0.25 * (p.detach() - a) for a, p in zip(average, reference.parameters(), strict=True)]
    for found, wanted in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    for found, wanted in zip(optimizer.ema, average, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("ema", [0.9, 0.0])
@pytest.mark.parametrize("scaled", ["gate", None])
@pytest.mark.parametrize(("algorithm", "clip"), [("adam", 1.0), ("adamw", 1.0), ("adamw", None)])
@pytest.mark.parametrize("weight_decay", [0.1, 0.0])
def test_both_forms_agree_on_all_they_keep(
    algorithm: str, clip: float | None, weight_decay: float, scaled: str | None, ema: float
) -> None:
    """Also where steps are refused, the first one among them, and where gradients come late or stay away."""
    config = OptimConfig(algorithm=algorithm, clip=clip, weight_decay=weight_decay, scaled=scaled, scale=3.0)
    pairs = [build(config, ema=ema, flat=flat) for flat in (True, False)]
    for step in range(14):
        before = [everything(*pair) for pair in pairs]
        for module, optimizer in pairs:
            module.set_grads(step)
            if step in (3, 9):
                module.e.grad[17, 1] = math.nan if step == 3 else -math.inf
            optimizer.step(torch.tensor(math.inf if step == 0 else 1.0))
            optimizer.lr.mul_(0.9)
        after = [everything(*pair) for pair in pairs]
        assert_same(after[0], after[1])
        if step in (0, 3, 9):
            for name in before[0].keys() - {"optim/skipped", "optim/skipped_in_row", "/norm"}:
                assert torch.equal(after[0][name], before[0][name]), name
    assert pairs[0][1].skipped == 3
    assert after[0]["optim/late/step"] == 7 and after[0]["optim/b/step"] == 10
    assert torch.equal(after[0]["model/idle"], Odd().idle) and "optim/idle/step" not in after[0]


def test_a_run_may_change_its_form_at_a_checkpoint() -> None:
    config = OptimConfig(algorithm="adamw", weight_decay=0.1)
    module, optimizer = build(config, flat=False)
    other, other_optimizer = build(config, flat=True)
    for step, flat in zip(range(12), itertools.cycle([True] * 4 + [False] * 4)):
        if step in (4, 8):
            groups = {name: tensorfile.to_bytes(some) for name, some in other_optimizer.state().items()}
            weights = other.state_dict()
            other, other_optimizer = build(config, flat=flat)
            other.load_state_dict(weights)
            other_optimizer.load({name: tensorfile.from_bytes(data) for name, data in groups.items()})
        for net, one in ((module, optimizer), (other, other_optimizer)):
            net.set_grads(step)
            one.step(torch.tensor(1.0))
        assert (other_optimizer.rows is not None) == flat
        assert_same(everything(other, other_optimizer), everything(module, optimizer))


def test_parameters_keep_their_layout_and_start_at_aligned_addresses() -> None:
    module, optimizer = build(OptimConfig(), flat=True, dtype=torch.float32)
    base = module.a.untyped_storage().data_ptr()
    for p, plain, average in zip(module.parameters(), Odd(torch.float32).parameters(), optimizer.ema, strict=True):
        assert torch.equal(p, plain) and p.stride() == plain.stride() == average.stride()
        assert p.untyped_storage().data_ptr() == base and (p.data_ptr() - base) % (4 * ROW) == 0
        assert p.is_leaf and p.requires_grad


def test_gradients_of_another_layout_or_type_are_understood() -> None:
    pairs = [build(OptimConfig(), flat=True) for _ in range(2)]
    for step in range(8):
        for (module, optimizer), strange in zip(pairs, (True, False), strict=True):
            module.set_grads(step)
            if strange:
                module.a.grad = module.a.grad.contiguous()
                module.gate.grad = module.gate.grad.t().contiguous().t()
            optimizer.step(torch.tensor(1.0))
    assert_same(everything(*pairs[0]), everything(*pairs[1]))
    rows, values = pairs[0][1].rows, [p.detach().float() for p in pairs[0][0].parameters()]
    matrix = rows.fill(torch.zeros(len(rows.owner), 128, dtype=torch.float64), values)
    assert all(torch.equal(a, b) for a, b in zip(rows.views(matrix), map(Tensor.double, values), strict=True))


def test_training_goes_on_through_the_views() -> None:
    """Autograd, channels_last convolutions and a changed learning rate, on both forms."""
    curves = []
    for flat in (True, False):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(2, 6, 3), nn.SiLU(), nn.Flatten(), nn.Linear(6 * 16, 1)).double()
        net = net.to(memory_format=torch.channels_last)
        images, goal = torch.randn(8, 2, 6, 6, dtype=torch.float64), torch.randn(8, 1, dtype=torch.float64)
        lr, decay = torch.tensor(0.01), torch.tensor(0.9)
        optimizer = Optimizer(net, OptimConfig(), ema=0.9, lr=lr, ema_decay=decay, flat=flat)
        curve = []
        for _ in range(30):
            optimizer.zero_grad()
            loss = (net(images) - goal).square().mean()
            loss.backward()
            optimizer.step(loss.detach())
            lr.mul_(0.98)
            curve.append(loss.item())
        curves.append(curve)
    assert curves[0] == pytest.approx(curves[1], rel=1e-9) and curves[0][-1] < 0.1 * curves[0][0]


def test_a_cpu_and_mixed_types_have_the_plain_form() -> None:
    module = Odd(torch.float32)
    numbers = {"ema": 0.0, "lr": torch.tensor(0.1), "ema_decay": torch.tensor(0.0)}
    assert Optimizer(module, OptimConfig(), **numbers).rows is None
    module.b.data = module.b.data.double()
    assert Optimizer(module, OptimConfig(), **numbers, flat=True).rows is None
