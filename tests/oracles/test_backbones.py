"""What every backbone gives every method: gradients, dispatch, both passes in one call, precision, inputs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from enumeration import predict
from steps import assert_gradients, constant, generator, gradients, ramp_of, randn, scramble
from torch import Tensor

from emoe.backbones.base import Backbone, BackboneConfig
from emoe.backbones.dit import DiTConfig
from emoe.backbones.layers import Router, RouterConfig, dropout_from
from emoe.backbones.transformer import TransformerConfig
from emoe.backbones.unet import UNetConfig
from emoe.methods.base import Method, MethodConfig
from emoe.methods.emoe import EMoEConfig
from emoe.methods.mdlm import MDLMConfig
from emoe.methods.vadd import VADDConfig
from emoe.rng import Rng
from emoe.routing.compare import CompareConfig
from emoe.routing.latent import RouteLatent
from emoe.routing.routes import draw, each_expert, greedy, paired, replay
from emoe.types import Needs, TokenSpace

MASK = 1
SMALL = {"width": 16, "depth": 2, "heads": 2, "hidden": 16, "time_size": 8}
BACKBONES: dict[str, BackboneConfig] = {
    "transformer": TransformerConfig(**SMALL),
    "dit": DiTConfig(**SMALL, cond_size=8, latent_hidden=8, dropout=0.0, time_conditioning=True),
    "unet": UNetConfig(channels=8, hidden=8, time_size=8, time_hidden=16, groups=2),
}
METHODS: dict[str, MethodConfig] = {
    "mdlm": MDLMConfig(),
    "vadd": VADDConfig(latent=3),
    "vadd-plus": VADDConfig(latent=3, draws=2),
    "emoe": EMoEConfig(experts=3),
    "wake-sleep": EMoEConfig(experts=3, compare=CompareConfig(estimator="wake-sleep", draws=2)),
    "in-turn": EMoEConfig(experts=3, compare=CompareConfig(draws=2, in_turn=True, credit="position")),
}
every_backbone = pytest.mark.parametrize("kind", BACKBONES)
every_method = pytest.mark.parametrize("name", METHODS)


def space_of(mask_id: int = MASK) -> TokenSpace:
    return TokenSpace(size=4, mask_id=mask_id, length=16)


def network(kind: str, needs: Needs, *, mask_id: int = MASK, dispatch: str = "loop") -> Backbone:
    return scramble(replace(BACKBONES[kind], dispatch=dispatch).build(space_of(mask_id), needs).double(), 1)


def build(name: str, kind: str, *, dtype: torch.dtype = torch.float64, dispatch: str = "loop") -> Method:
    return scramble(METHODS[name].build(space_of(), replace(BACKBONES[kind], dispatch=dispatch)).to(dtype), 3)


def batch(rows: int = 3, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Clean and noisy rows, and times."""
    x0 = torch.tensor([0, 2, 3])[torch.randint(3, (rows, 16), generator=generator())]
    xt = torch.where(torch.rand(x0.shape, generator=generator(1)) < 0.5, MASK, x0)
    return x0, xt, torch.linspace(0.2, 0.9, rows, dtype=dtype)


@every_backbone
@pytest.mark.parametrize("mask_id", [0, 1, 3])
def test_the_mask_is_impossible_and_any_positions_can_be_read(kind: str, mask_id: int):
    net = network(kind, Needs(), mask_id=mask_id)
    x, t = torch.arange(32).view(2, 16) % 4, torch.tensor([0.3, 0.8]).double()
    logits, h = predict(net, x, t).logits, net(x, t).h
    others = [v for v in range(4) if v != mask_id]
    assert logits.shape == (2, 16, 4) and (logits[..., mask_id] == -torch.inf).all()
    assert logits[..., others].isfinite().all()
    chosen = x == others[0]
    assert torch.allclose(net.read(h[chosen])[:, others], logits[chosen][:, others], atol=1e-12)
    slopes = gradients(net, torch.log_softmax(logits, -1)[..., others[0]].sum())
    assert all(slope is None or slope.isfinite().all() for slope in slopes.values())


@every_backbone
def test_inputs_reach_every_position_of_their_row_alone(kind: str):
    net = network(kind, Needs(experts=2, cond=3, marks=True))
    x, t, cond = batch(2)[1], torch.tensor([0.3, 0.6]).double(), randn(2, 3)
    marks = torch.zeros_like(x, dtype=torch.bool)
    marks[0, 5] = True

    def run(x: Tensor = x, t: Tensor = t, cond: Tensor = cond, marks: Tensor | None = marks) -> Tensor:
        return predict(net, x, t, cond=cond, marks=marks, route=constant()).logits[..., [0, 2, 3]]

    start = run()
    other_x, other_t, other_cond = x.clone(), t.clone(), cond.clone()
    other_x[0, 15] = (other_x[0, 15] + 1) % 4
    other_t[0] += 0.01
    other_cond[0, 2] += 1
    changed = {
        "token": run(x=other_x),
        "time": run(t=other_t),
        "latent": run(cond=other_cond),
        "marks": run(marks=torch.zeros_like(marks)),
        "order": run(x=x.flip(1), marks=marks.flip(1)).flip(1),
    }
    for name, logits in changed.items():
        assert (logits[0] - start[0]).abs().amax(-1).min() > 1e-12, name
        assert name == "order" or torch.equal(logits[1], start[1]), name
    assert torch.equal(run(marks=None), changed["marks"])
    with pytest.raises(ValueError, match="route policy"):
        net(x, t, cond=cond)


@every_backbone
def test_encoders_see_row_time_and_mask_pattern(kind: str):
    encoder = build("vadd", kind).encoder
    x0, xt, t = batch(1)
    marks, other = xt == MASK, x0.clone()
    flipped = marks.clone()
    other[0, 15] = (other[0, 15] + 2) % 4
    flipped[0, 0] = ~flipped[0, 0]
    start = encoder(x0, t, marks)
    assert start.shape == (1, 6)
    for changed in (encoder(other, t, marks), encoder(x0, t + 0.05, marks), encoder(x0, t, flipped)):
        assert (changed - start).abs().min() > 1e-12


def test_routers_have_their_options():
    x = 5 * randn(2, 5, 8)
    plain = Router(8, 4, RouterConfig(bias=False))
    assert {name for name, _ in plain.named_parameters()} == {"weight"} and (plain.weight == 0).all()
    wide = Router(400, 50, RouterConfig(std=0.3))
    assert wide.weight.std().item() == pytest.approx(0.3, rel=0.03) and (wide.bias == 0).all()
    router = scramble(Router(8, 4, RouterConfig(norm=True, logit_norm=True, cap=1.0)).double(), 2)

    def normed(u: Tensor, layer: torch.nn.LayerNorm) -> Tensor:
        centred = (u - u.mean(-1, keepdim=True)) / (u.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
        return centred * layer.weight + layer.bias

    logits = normed(normed(x, router.norm) @ router.weight.T + router.bias, router.logit_norm)
    assert torch.allclose(router(x), torch.tanh(logits), atol=1e-14) and (logits.abs() > 1).any()


@every_backbone
@every_method
def test_the_loss_reaches_every_parameter(name: str, kind: str):
    method = build(name, kind)
    loss = method(batch(8)[0], ramp_of(method), Rng(0)).total
    for label, slope in gradients(method, loss).items():
        assert slope is not None and slope.isfinite().all() and slope.abs().max() > 0, label


@every_backbone
@pytest.mark.parametrize("name", ["emoe", "wake-sleep"])
def test_every_dispatch_gives_the_same_loss_and_gradients(name: str, kind: str):
    results = []
    for dispatch in ("loop", "dense", "grouped", "auto"):
        method = build(name, kind, dtype=torch.float32, dispatch=dispatch)
        loss = method(batch(4)[0], ramp_of(method, torch.float32), Rng(1)).total
        results.append((loss.item(), gradients(method, loss)))
    for loss, slopes in results[1:]:
        assert loss == pytest.approx(results[0][0], rel=1e-5)
        assert_gradients(slopes, results[0][1], 1e-7, 2e-4)


@every_backbone
@pytest.mark.parametrize("draws", [1, 3])
def test_one_paired_call_equals_a_clean_and_a_noisy_pass(kind: str, draws: int):
    """Algo. 1 in one call, with K draws that start at the first block: values and gradients of two passes."""
    net = network(kind, Needs(experts=3))
    x0, xt, t = batch(3)
    posterior = draw(generator(4), 0.7, draws=draws)
    both = predict(net, torch.cat([x0, xt]), torch.cat([t, t]), route=paired(posterior, net.routed_blocks))
    assert [len(block) for block in both.route_logits] == [6, *[6 * draws] * (net.routed_blocks - 1)]
    assert both.gates[0].draws == draws and both.gates[-1].keep_from == 3 * draws

    many = [value.repeat_interleave(draws, 0) for value in (x0, xt, t)]
    clean = net(many[0], many[2], route=draw(generator(4), 0.7))  # the same noise, for rows that are repeated first
    noisy = predict(net, many[1], many[2], route=replay(clean.gates))
    routes = tuple(gate.expert[..., 0] for gate in clean.gates)
    values = []
    for logits, post, prior in (
        (both.logits, *zip(*(block.chunk(2) for block in both.route_logits), strict=True)),
        (noisy.logits, clean.route_logits, noisy.route_logits),
    ):
        first = [block.repeat_interleave(3 * draws // len(block), 0) for block in (post[0], prior[0])]
        kl = RouteLatent((first[0], *post[1:]), (first[1], *prior[1:]), routes).kl()
        values.append((logits[..., [0, 2, 3]], kl))
    for fused, apart in zip(*values, strict=True):
        assert fused.shape == apart.shape and torch.allclose(fused, apart, atol=1e-10, rtol=1e-10)
    assert not torch.allclose(*values[0][0][:2])  # draws and rows differ
    slopes = [gradients(net, torch.log_softmax(logits, -1)[..., 0].sum() + kl.sum()) for logits, kl in values]
    assert_gradients(*slopes, 1e-9, 1e-9)


@pytest.mark.parametrize("kind", ["transformer", "dit"])
@pytest.mark.parametrize("mask_id", [0, 1, 3])
@pytest.mark.parametrize("dispatch", ["loop", "dense"])
def test_each_expert_is_every_expert_by_itself(kind: str, dispatch: str, mask_id: int):
    """Bit for bit in the transformer, where experts are run apart ("dense" computes them all as one product)."""
    net = network(kind, Needs(experts=3, marks=True), mask_id=mask_id, dispatch=dispatch)
    _, xt, t = batch()
    with torch.no_grad():
        out = net(xt, t, marks=xt == MASK, route=each_expert(constant(1), 1))
        logits = net.read(out.h).unflatten(0, (3, 3))
        for expert in range(3):
            gates = [constant(e)(d, torch.zeros(3, 16, 3).double()) for d, e in enumerate((1, expert))]
            alone = predict(net, xt, t, marks=xt == MASK, route=replay(gates))
            assert torch.allclose(logits[:, expert], alone.logits, rtol=1e-12, atol=1e-12)
            assert kind == "dit" or dispatch == "dense" or torch.equal(logits[:, expert], alone.logits)
            assert all(torch.equal(a, b) for a, b in zip(out.route_logits, alone.route_logits, strict=True))


@every_backbone
@pytest.mark.parametrize(
    ("name", "dispatch"),
    [("mdlm", "auto"), ("vadd", "auto"), *(("emoe", path) for path in ("auto", "loop", "dense", "grouped"))],
)
def test_half_precision_autocast_runs_and_stays_near(kind: str, name: str, dispatch: str):
    method = build(name, kind, dtype=torch.float32, dispatch=dispatch)
    x0, xt, t = batch(dtype=torch.float32)
    inputs = {"emoe": {"route": constant(1)}, "vadd": {"cond": torch.ones(3, 3)}}.get(name, {})
    full = predict(method.backbone, xt, t, **inputs)
    with torch.autocast("cpu", torch.bfloat16):
        half = predict(method.backbone, xt, t, **inputs)
        with dropout_from(method, generator()):
            loss = method(x0, ramp_of(method, torch.float32), Rng(0)).total
    assert half.logits.dtype == torch.float32 and all(block.dtype == torch.float32 for block in half.route_logits)
    a, b = (out.logits[..., [0, 2, 3]].flatten() for out in (full, half))
    assert not torch.equal(a, b) and torch.corrcoef(torch.stack([a, b]))[0, 1] > 0.99
    assert all(slope is None or slope.isfinite().all() for slope in gradients(method, loss).values())


@every_backbone
def test_an_untrained_network_knows_nothing(kind: str):
    """Routers start undecided, and so do the posterior and the prior: the KL is 0."""
    torch.manual_seed(0)
    net = BACKBONES[kind].build(space_of(), Needs(experts=3))
    assert all((block == 0).all() for block in net(*batch(dtype=torch.float32)[1:], route=greedy()).route_logits)
