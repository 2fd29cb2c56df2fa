"""The diffusion transformer for text: published sizes, a plain reference, positions, cache and dropout."""

from __future__ import annotations

import math

import pytest
import torch
from enumeration import predict
from references import dit_logits
from steps import generator, gradients, noised, randn, scramble
from torch import Tensor

from emoe.backbones.base import total_parameters
from emoe.backbones.dit import DiT, DiTConfig
from emoe.backbones.layers import Dropout, Flow, RouterConfig, dropout_from
from emoe.config import ConfigError
from emoe.experiment import customise
from emoe.methods.vadd import VADDConfig
from emoe.recipes import get_recipe
from emoe.rng import Rng, derive_seed
from emoe.routing.routes import greedy, replay
from emoe.types import Gate, Needs, TokenSpace

LM1B = TokenSpace(size=30_522, mask_id=103, length=128)
SPACE = TokenSpace(size=7, mask_id=2, length=6)
OTHERS = [v for v in range(SPACE.size) if v != SPACE.mask_id]


def sizes(**other: object) -> DiTConfig:
    small = {"width": 16, "depth": 2, "heads": 2, "hidden": 16, "cond_size": 8, "time_size": 8, "latent_hidden": 8}
    return DiTConfig(**(small | {"dropout": 0.0, "dispatch": "loop"} | other))


def network(needs: Needs | None = None, **other: object) -> DiT:
    needs = needs or Needs(causal=bool(other.get("causal")))
    return scramble(sizes(**other).build(SPACE, needs).double(), 1)


def batch(rows: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """Clean and noisy rows, and times."""
    source = generator()
    x0 = torch.tensor(OTHERS)[torch.randint(len(OTHERS), (rows, SPACE.length), generator=source)]
    xt = torch.where(torch.rand(x0.shape, generator=source) < 0.5, SPACE.mask_id, x0)
    return x0, xt, torch.linspace(0.2, 0.9, rows, dtype=torch.float64)


def test_parts_have_the_published_sizes():
    with torch.device("meta"):
        needs = Needs(cond=512, encoder=1024)
        assert total_parameters(DiTConfig().build(LM1B, needs)) == 139_883_962
        assert total_parameters(DiTConfig().build_encoder(LM1B, needs)) == 116_609_024
        assert total_parameters(DiTConfig(causal=True).build(LM1B, Needs(causal=True))) == 131_912_250
        dense = DiTConfig().build(LM1B, Needs())
        assert total_parameters(DiTConfig().build(LM1B, Needs(marks=True))) == 139_292_986 + 768
        assert total_parameters(DiTConfig(router=RouterConfig()).build(LM1B, Needs(experts=8))) == 536_051_002 + 96
    assert total_parameters(dense.trunk.blocks[0]) == 7_677_696
    assert total_parameters(dense.trunk.time) == 49_408


@pytest.mark.parametrize("needs", [Needs(), Needs(cond=512), Needs(experts=8)], ids=["mdlm", "vadd", "emoe"])
def test_the_published_network_reads_no_value_and_has_fixed_shapes(needs: Needs):
    """Forward and backward without data, as a captured CUDA graph needs it: on `meta` a value that is read raises."""
    with torch.device("meta"):
        network = DiTConfig(dispatch="dense", dropout=0.0).build(LM1B, needs)
        x, t, cond = torch.zeros(4, 128, dtype=torch.long), torch.zeros(4), torch.zeros(4, 512)
        gate = Gate(torch.zeros(4, 128, 2, dtype=torch.long), torch.zeros(4, 128, 2))
        out = network(x, t, cond=cond if needs.cond else None, route=replay([gate] * 12) if needs.experts else None)
        logits = network.read(out.h)
        logits.sum().backward()
    assert logits.shape == (4, 128, 30_522) and len(out.route_logits) == (12 if needs.experts else 0)
    assert network.head.weight.grad.shape == (30_522, 768)


@pytest.mark.parametrize(
    ("field", "value"),
    [("heads", 3), ("heads", 16), ("time_size", 7), ("dropout", 1.0), ("dropout", -0.1), ("rotary_base", 1.0)],
)
def test_sizes_that_do_not_fit_are_refused(field: str, value: float):
    with pytest.raises(ConfigError, match=f"{field}: must"):
        sizes(**{field: value})


def test_unsupported_needs_of_a_network_are_named():
    with pytest.raises(ConfigError, match="time_conditioning: a causal network"):
        sizes(causal=True, time_conditioning=True)
    needs = {"experts": 2, "cond": 3, "marks": True, "encoder": 6, "attend": True}
    lines = list(sizes(causal=True).unsupported(Needs(**needs, causal=True)))
    assert [line.split("'")[3] for line in lines] == ["attend", "cond", "encoder", "experts", "marks"]
    assert not list(sizes().unsupported(Needs(**needs)))
    assert not list(sizes(causal=True).unsupported(Needs(causal=True)))
    for options, wanted, message in (
        ({}, Needs(causal=True), "backbone.causal: must be true"),
        ({"causal": True}, Needs(experts=2), "backbone.causal: must be false"),
        ({}, Needs(time=True), "backbone.time_conditioning: must be true"),
        ({"time_conditioning": True}, Needs(attend=True), "backbone.time_conditioning: must be false"),
    ):
        (line,) = sizes(**options).unsupported(wanted)
        assert line.startswith(message)
    with pytest.raises(ConfigError, match="backbone.causal: must be true.*method: 'ar'"):
        customise(get_recipe("rows-mdlm"), {"method": "ar", "backbone": "dit"})


def test_the_network_is_its_formulas():
    """Without time; with sigma = -log alpha of the log-linear schedule; with a latent; in a smaller rotary base."""
    _, x, t = batch()
    sigma, cond = -torch.log(1 - 0.999 * t), randn(3, 3)
    zero = torch.zeros_like(t)
    plain, timed, bent = network(), network(time_conditioning=True), network(rotary_base=50.0)
    latent = network(Needs(cond=3), time_conditioning=True)
    for one, want in (
        (predict(plain, x, t), dit_logits(plain, x, zero)),
        (predict(timed, x, t), dit_logits(timed, x, sigma)),
        (predict(bent, x, t), dit_logits(bent, x, zero)),
        (predict(latent, x, t, cond=cond), dit_logits(latent, x, sigma, cond=cond)),
    ):
        assert torch.allclose(one.logits[..., OTHERS], want[..., OTHERS], atol=1e-12, rtol=1e-12)
        assert (one.logits[..., SPACE.mask_id] == -torch.inf).all() and not one.gates
    assert torch.equal(plain(x, t).h, plain(x, t / 2).h)  # time conditioning is off
    assert (timed(x, t).h - timed(x, t / 2).h).abs().max() > 1e-3 and timed(x, torch.ones_like(t)).h.isfinite().all()
    with pytest.raises(ValueError, match="needs cond"):
        latent(x, t)


@pytest.mark.parametrize("dispatch", ["loop", "dense"])
def test_the_routed_network_is_its_formulas(dispatch: str):
    routed = network(Needs(experts=3), dispatch=dispatch)
    _, x, t = batch()
    expert = torch.randint(3, x.shape, generator=generator(1))
    gate = Gate(expert[..., None], torch.ones(*x.shape, 1).double())
    out = predict(routed, x, t, route=replay([gate, gate]))
    want = dit_logits(routed, x, torch.zeros_like(t), experts=expert)
    assert torch.allclose(out.logits[..., OTHERS], want[..., OTHERS], atol=1e-12, rtol=1e-12)
    assert routed.routed_blocks == len(out.gates) == 2
    assert [tuple(block.shape) for block in out.route_logits] == [(3, 6, 3)] * 2


def test_a_causal_network_is_its_formulas_and_does_not_depend_on_the_future():
    causal = network(causal=True)
    _, x, t = batch()
    logits = predict(causal, x, t).logits
    up_to_oneself = torch.ones(6, 6, dtype=torch.bool).tril()
    want = dit_logits(causal, x, t, attend=up_to_oneself)
    assert torch.allclose(logits[..., OTHERS], want[..., OTHERS], atol=1e-12, rtol=1e-12)
    given = predict(causal, x, t, attend=up_to_oneself).logits
    assert torch.allclose(given[..., OTHERS], logits[..., OTHERS], atol=1e-12, rtol=1e-12)
    for position in range(6):
        other = x.clone()
        other[:, position] = (other[:, position] + 1) % SPACE.size
        moved = (predict(causal, other, t).logits[..., OTHERS] - logits[..., OTHERS]).abs().amax((0, 2))
        assert (moved[:position] == 0).all() and (moved[position:] > 1e-9).all()


def test_first_weights_are_those_of_the_dit_logits():
    torch.manual_seed(0)
    network = sizes(width=64, cond_size=32).build(SPACE, Needs(experts=2))
    for name, parameter in network.named_parameters():
        if "adaln" in name or name.startswith("head.") or ".router." in name:
            assert (parameter == 0).all(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name
        else:
            assert parameter.abs().max() > 0, name
    bound = 1 / math.sqrt(64)  # kaiming_uniform with a = sqrt 5
    assert 0.95 * bound < network.trunk.token.weight.abs().max() <= bound
    h, c = torch.randn(2, 6, 64), torch.randn(2, 32)
    view = network.trunk._view(torch.arange(6), None, None)
    flow = Flow(greedy())
    assert torch.equal(network.trunk.blocks[0](h, c, flow, view), h) and (flow.logits[0] == 0).all()


def test_the_encoder_marks_the_pattern_by_the_embedding_of_the_mask():
    """A clean row never uses it. Without time conditioning the time does not count."""
    encoder, (x0, xt, t) = scramble(VADDConfig(latent=2).build(SPACE, sizes()).double(), 3).encoder, batch(1)
    marks, table = xt == SPACE.mask_id, encoder.trunk.token.weight
    start = encoder(x0, t, marks)
    used = torch.autograd.grad(start.sum(), table)[0].abs().sum(-1) > 0
    assert marks.any() and used.nonzero().flatten().tolist() == sorted({*x0[0].tolist(), SPACE.mask_id})
    assert torch.equal(encoder(x0, t + 0.05, marks), start)


@pytest.mark.parametrize("chunks", [[1] * 6, [6], [2, 1, 3], [1, 5]], ids=str)
def test_a_cache_gives_the_logits_of_the_whole_prefix(chunks: list[int]):
    net = network(causal=True).eval()
    x, _, t = batch()
    whole, cache, done = predict(net, x, t).logits, net.new_cache(), 0
    for size in chunks:
        got = net.extend(x[:, done : done + size], cache)
        want = whole[:, done : done + size, OTHERS]
        assert torch.allclose(got[..., OTHERS], want, atol=1e-12, rtol=1e-12)
        assert (got[..., SPACE.mask_id] == -torch.inf).all() and not got.requires_grad
        done += size
    assert cache.length == 6
    cache = net.new_cache()
    last = net.extend(x, cache, keep=4)
    assert cache.length == 4 and torch.allclose(last[..., OTHERS], whole[:, 4:, OTHERS], atol=1e-12)


def test_networks_that_are_not_causal_need_attend_and_no_time():
    x, everything = batch()[0], torch.ones(6, 6, dtype=torch.bool)
    for net, attend in ((network(), None), (network(time_conditioning=True), everything)):
        with pytest.raises(ValueError, match="needs `attend` and must not read the time"):
            net.extend(x, net.new_cache(), attend=attend)


def test_dropout_keeps_a_share_and_scales_it():
    layer, x = Dropout(0.25), torch.ones(200, 500)
    with dropout_from(layer, generator()):
        out = layer(x)
    assert out.unique().tolist() == pytest.approx([0, 4 / 3])
    assert (out > 0).float().mean().item() == pytest.approx(0.75, abs=0.01)
    for idle in (Dropout(0.25).eval(), Dropout(0.0)):
        assert idle(x) is x


def test_dropout_is_a_function_of_its_stream():
    """Equal streams give equal losses and gradients, whatever was drawn before: a resumed run continues exactly."""
    method = scramble(VADDConfig(latent=3).build(SPACE, sizes(dropout=0.3)).double(), 3)
    step = noised(method, *batch(4))
    assert sum(isinstance(part, Dropout) for part in method.modules()) == 4  # of denoiser and encoder

    def run(number: int) -> tuple[float, Tensor]:
        with dropout_from(method, generator(derive_seed(1, number, "dropout"))):
            loss = method.infer(step, {}, Rng(0)).log_token.sum()
        return loss.item(), gradients(method, loss)["encoder.head.weight"]

    torch.manual_seed(0)
    state = torch.random.get_rng_state()
    first = run(5)
    other = run(6)
    again = run(5)
    assert first[0] == again[0] and torch.equal(first[1], again[1]) and first[0] != other[0]
    assert torch.equal(state, torch.random.get_rng_state())  # the global generator is not touched
    assert all(part.generator is None for part in method.modules() if isinstance(part, Dropout))
    with pytest.raises(ConfigError, match="dropout: 0.3 needs a random stream"):
        method.infer(step, {}, Rng(0))
