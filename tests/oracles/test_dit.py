"""The diffusion transformer for text: published sizes, a plain reference, positions, routes, cache and dropout."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from emoe.backbones.base import active_parameters, total_parameters
from emoe.backbones.dit import DiT, DiTConfig, rotary_angles, rotate
from emoe.backbones.layers import Dropout, Router, dropout_from
from emoe.config import ConfigError
from emoe.diffusion.masking import masked_nll
from emoe.evaluation.pools import count_calls
from emoe.methods.base import MaskedDiffusion, MaskedDiffusionConfig
from emoe.methods.emoe import EMoEConfig
from emoe.methods.mdlm import MDLMConfig
from emoe.methods.vadd import VADDConfig
from emoe.rng import Rng, derive_seed
from emoe.routing.experts import RoutedExperts
from emoe.routing.kl import route_kl
from emoe.routing.routes import draw, greedy, paired, replay
from emoe.types import Convention, Gate, Route, TokenSpace, Wants

LM1B = TokenSpace(size=30_522, mask_id=103, length=128)
SPACE = TokenSpace(size=7, mask_id=2, length=6)
CONFIGS = [MDLMConfig(), VADDConfig(latent=3), EMoEConfig(experts=3)]
IDS = ["mdlm", "vadd", "emoe"]
OTHERS = [v for v in range(SPACE.size) if v != SPACE.mask_id]


def sizes(**other: object) -> DiTConfig:
    small = {"width": 16, "depth": 2, "heads": 2, "hidden": 16, "cond_size": 8, "time_size": 8, "latent_hidden": 8}
    return DiTConfig(**(small | {"dropout": 0.0, "dispatch": "loop"} | other))


@pytest.fixture
def build(scramble):
    """A factory of small methods in float64 with weights of their own."""

    def make(config: MaskedDiffusionConfig, *, dtype: torch.dtype = torch.float64, **other: object) -> MaskedDiffusion:
        return scramble(config.build(SPACE, sizes(**other)).to(dtype), 3)

    return make


@pytest.fixture
def network(scramble):
    """A factory of small networks in float64 with weights of their own."""

    def make(wants: Wants | None = None, seed: int = 1, **other: object) -> DiT:
        wants = wants or Wants(causal=bool(other.get("causal")))
        return scramble(sizes(**other).build(SPACE, wants).double(), seed)

    return make


def batch(rows: int = 3, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Clean and noisy rows, and times."""
    generator = torch.Generator().manual_seed(seed)
    x0 = torch.tensor(OTHERS)[torch.randint(len(OTHERS), (rows, SPACE.length), generator=generator)]
    xt = torch.where(torch.rand(x0.shape, generator=generator) < 0.5, SPACE.mask_id, x0)
    return x0, xt, torch.linspace(0.2, 0.9, rows, dtype=dtype)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def constant(expert: int = 0, last: int | None = None, blocks: int = 2) -> Route:
    """One expert everywhere, and in the last of the blocks perhaps another."""

    def policy(block: int, logits: Tensor) -> Gate:
        chosen = expert if last is None or block < blocks - 1 else last
        return Gate(torch.full((*logits.shape[:2], 1), chosen), torch.ones(*logits.shape[:2], 1, dtype=logits.dtype))

    return policy


def knobs_of(method: MaskedDiffusion, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    return {name: torch.tensor(ramp(3, 10), dtype=dtype) for name, ramp in method.ramps.items()}


def gradients(module: torch.nn.Module, value: Tensor) -> dict[str, Tensor | None]:
    found = torch.autograd.grad(value, list(module.parameters()), allow_unused=True)
    return dict(zip([name for name, _ in module.named_parameters()], found, strict=True))


# --- Sizes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "total", "active"),
    [
        (MDLMConfig(), 139_292_986, 139_292_986),
        (EMoEConfig(experts=8), 536_051_002, 139_366_714),
        (VADDConfig(latent=512), 256_492_986, 256_492_986),
    ],
    ids=["mdlm", "emoe", "vadd"],
)
def test_text_models_have_the_published_sizes(config, total: int, active: int):
    with torch.device("meta"):
        method = config.build(LM1B, DiTConfig())
    assert (total_parameters(method), active_parameters(method)) == (total, active)


def test_parts_have_the_published_sizes():
    with torch.device("meta"):
        wants = Wants(cond=512, encoder=1024)
        assert total_parameters(DiTConfig().build(LM1B, wants)) == 139_883_962
        assert total_parameters(DiTConfig().build_encoder(LM1B, wants)) == 116_609_024
        assert total_parameters(DiTConfig(causal=True).build(LM1B, Wants(causal=True))) == 131_912_250
        dense = DiTConfig().build(LM1B, Wants())
        assert total_parameters(DiTConfig().build(LM1B, Wants(marks=True))) == 139_292_986 + 768
        assert total_parameters(DiTConfig(router_bias=True).build(LM1B, Wants(experts=8))) == 536_051_002 + 96
    assert total_parameters(dense.trunk.blocks[0]) == 7_677_696
    assert total_parameters(dense.trunk.time) == 49_408


@pytest.mark.parametrize("wants", [Wants(), Wants(cond=512), Wants(experts=8)], ids=IDS)
def test_the_published_network_reads_no_value_and_has_fixed_shapes(wants: Wants):
    """Forward and backward without data, as a captured CUDA graph needs it: on `meta` a value that is read raises."""
    with torch.device("meta"):
        network = DiTConfig(dispatch="dense", dropout=0.0).build(LM1B, wants)
        x, t, cond = torch.zeros(4, 128, dtype=torch.long), torch.zeros(4), torch.zeros(4, 512)
        gate = Gate(torch.zeros(4, 128, 2, dtype=torch.long), torch.zeros(4, 128, 2))
        out = network(x, t, cond=cond if wants.cond else None, route=replay([gate] * 12) if wants.experts else None)
        out.logits.sum().backward()
    assert out.logits.shape == (4, 128, 30_522) and len(out.route_logits) == (12 if wants.experts else 0)
    assert network.head.weight.grad.shape == (30_522, 768)


@pytest.mark.parametrize(
    ("field", "value"),
    [("heads", 3), ("heads", 16), ("time_size", 7), ("dropout", 1.0), ("dropout", -0.1), ("rotary_base", 1.0)],
)
def test_sizes_that_do_not_fit_are_refused(field: str, value: float):
    with pytest.raises(ConfigError, match=f"{field}: must"):
        sizes(**{field: value})


def test_a_causal_network_says_what_it_lacks():
    with pytest.raises(ConfigError, match="time_conditioning: a causal network"):
        sizes(causal=True, time_conditioning=True)
    wants = {"experts": 2, "cond": 3, "marks": True, "encoder": 6, "attend": True}
    lines = list(sizes(causal=True).refusals(Wants(**wants, causal=True)))
    assert [line.split("'")[3] for line in lines] == ["attend", "cond", "encoder", "experts", "marks"]
    assert not list(sizes().refusals(Wants(**wants))) and not list(sizes(causal=True).refusals(Wants(causal=True)))
    for make in (sizes(causal=True).build, sizes(causal=True).build_encoder):
        with pytest.raises(ConfigError, match="has no 'experts', which the method needs"):
            make(SPACE, Wants(**wants, causal=True))


def test_causal_networks_and_methods_that_want_one_belong_together():
    (line,) = sizes().refusals(Wants(causal=True))
    assert line.startswith("backbone.causal: must be true")
    for wants in (Wants(), Wants(experts=2), Wants(attend=True)):
        (line,) = sizes(causal=True).refusals(wants)
        assert line.startswith("backbone.causal: must be false")
        with pytest.raises(ConfigError, match="backbone.causal: must be false"):
            sizes(causal=True).build(SPACE, wants)
    (line,) = sizes(time_conditioning=True).refusals(Wants(attend=True))
    assert line.startswith("backbone.time_conditioning: must be false")


# --- The network as its formulas ---------------------------------------------------------------------------------


def plain_norm(u: Tensor, weight: Tensor) -> Tensor:
    centred = u - u.mean(-1, keepdim=True)
    return weight * centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def plain_gelu(u: Tensor) -> Tensor:
    return 0.5 * u * (1 + torch.tanh(math.sqrt(2 / math.pi) * (u + 0.044715 * u**3)))


def plain_turn(u: Tensor, places: Tensor, base: float) -> Tensor:
    """Pairs (u_r, u_{r + R}) of (B, L, H, C) as complex numbers, times exp(i place base^(-2r / C))."""
    pairs = u.shape[-1] // 2
    frequency = torch.tensor([base ** (-2 * r / u.shape[-1]) for r in range(pairs)], dtype=torch.float64)
    turned = torch.complex(u[..., :pairs], u[..., pairs:]) * torch.exp(1j * places[:, None, None] * frequency)
    return torch.cat([turned.real, turned.imag], -1)


def reference(
    network: DiT,
    x: Tensor,
    sigma: Tensor,
    *,
    cond: Tensor | None = None,
    experts: Tensor | None = None,
    attend: Tensor | None = None,
) -> Tensor:
    """Logits over all symbols, the mask's as the head gives it; `experts` (B, L) run in every block."""
    config, weights = network.trunk.config, {k.removeprefix("trunk."): v for k, v in network.state_dict().items()}

    def linear(name: str, u: Tensor) -> Tensor:
        return u @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", torch.zeros(1).double())

    def silu(u: Tensor) -> Tensor:
        return u / (1 + torch.exp(-u))

    rows, length = x.shape
    heads, size = config.heads, config.width // config.heads
    places = torch.arange(length).double()
    if not config.causal:
        half = config.time_size // 2
        angle = sigma[:, None] * torch.tensor([10_000 ** (-i / half) for i in range(half)], dtype=torch.float64)
        c = linear("time.2", silu(linear("time.0", torch.cat([angle.sin(), angle.cos()], -1))))
        if cond is not None:
            c = c + linear("latent.4", silu(linear("latent.2", silu(linear("latent.0", cond)))))
        c = silu(c)[:, None]
    h = weights["token.weight"][x]
    for d in range(config.depth):
        name = f"blocks.{d}."
        zero, one = torch.zeros(rows, 1, config.width).double(), torch.ones(rows, 1, config.width).double()
        parts = [zero, zero, one] * 2 if config.causal else linear(name + "adaln", c).split(config.width, -1)
        u = plain_norm(h, weights[name + "attention_norm.weight"]) * (1 + parts[1]) + parts[0]
        q, k, v = (part.view(rows, length, heads, size) for part in linear(name + "attention.qkv", u).chunk(3, -1))
        q, k = plain_turn(q, places, config.rotary_base), plain_turn(k, places, config.rotary_base)
        scores = torch.einsum("blhc,bmhc->bhlm", q, k) / math.sqrt(size)
        if attend is not None:
            scores = scores.masked_fill(~attend, -torch.inf)
        mixed = torch.einsum("bhlm,bmhc->blhc", torch.softmax(scores, -1), v).reshape(rows, length, -1)
        h = h + parts[2] * linear(name + "attention.out", mixed)
        u = plain_norm(h, weights[name + "mlp_norm.weight"]) * (1 + parts[4]) + parts[3]
        if experts is None:
            out = linear(name + "mlp.2", plain_gelu(linear(name + "mlp.0", u)))
        else:
            w_in, b_in, w_out, b_out = (weights[f"{name}mlp.experts.{p}"] for p in ("w_in", "b_in", "w_out", "b_out"))
            hidden = plain_gelu(torch.einsum("blk,blkf->blf", u, w_in[experts]) + b_in[experts])
            out = torch.einsum("blf,blfk->blk", hidden, w_out[experts]) + b_out[experts]
        h = h + parts[5] * out
    h = plain_norm(h, weights["norm.weight"])
    if not config.causal:
        shift, scale = linear("adaln", c).chunk(2, -1)
        h = h * (1 + scale) + shift
    return linear("head", h)


def test_the_network_is_its_formulas(network):
    """Without time; with sigma = -log alpha of the log-linear schedule; with a latent; in a smaller rotary base."""
    _, x, t = batch()
    sigma, cond = -torch.log(1 - 0.999 * t), randn(3, 3)
    zero = torch.zeros_like(t)
    plain, timed, bent = network(), network(time_conditioning=True), network(rotary_base=50.0)
    latent = network(Wants(cond=3), time_conditioning=True)
    for one, want in (
        (plain(x, t), reference(plain, x, zero)),
        (timed(x, t), reference(timed, x, sigma)),
        (bent(x, t), reference(bent, x, zero)),
        (latent(x, t, cond=cond), reference(latent, x, sigma, cond=cond)),
    ):
        assert torch.allclose(one.logits[..., OTHERS], want[..., OTHERS], atol=1e-12, rtol=1e-12)
        assert (one.logits[..., SPACE.mask_id] == -torch.inf).all() and not one.gates
    assert not torch.allclose(plain(x, t).logits[..., OTHERS], timed(x, t).logits[..., OTHERS], atol=1e-3)
    assert torch.equal(plain(x, t).logits, plain(x, t / 2).logits)  # time conditioning is off
    assert timed(x, torch.ones_like(t)).logits[..., OTHERS].isfinite().all()
    with pytest.raises(ValueError, match="needs cond"):
        latent(x, t)


@pytest.mark.parametrize("dispatch", ["loop", "dense"])
def test_the_routed_network_is_its_formulas(network, dispatch: str):
    routed = network(Wants(experts=3), dispatch=dispatch)
    _, x, t = batch()
    expert = torch.randint(3, x.shape, generator=torch.Generator().manual_seed(1))
    gate = Gate(expert[..., None], torch.ones(*x.shape, 1).double())
    out = routed(x, t, route=replay([gate, gate]))
    want = reference(routed, x, torch.zeros_like(t), experts=expert)
    assert torch.allclose(out.logits[..., OTHERS], want[..., OTHERS], atol=1e-12, rtol=1e-12)
    assert routed.routed_blocks == len(out.gates) == 2
    assert [tuple(block.shape) for block in out.route_logits] == [(3, 6, 3)] * 2
    with pytest.raises(ValueError, match="route policy"):
        routed(x, t)


def test_a_causal_network_is_its_formulas_and_sees_no_future(network):
    causal = network(causal=True)
    _, x, t = batch()
    logits = causal(x, t).logits
    up_to_oneself = torch.ones(6, 6, dtype=torch.bool).tril()
    want = reference(causal, x, t, attend=up_to_oneself)
    assert torch.allclose(logits[..., OTHERS], want[..., OTHERS], atol=1e-12, rtol=1e-12)
    given = causal(x, t, attend=up_to_oneself).logits
    assert torch.allclose(given[..., OTHERS], logits[..., OTHERS], atol=1e-12, rtol=1e-12)
    for place in range(6):
        other = x.clone()
        other[:, place] = (other[:, place] + 1) % SPACE.size
        moved = (causal(other, t).logits[..., OTHERS] - logits[..., OTHERS]).abs().amax((0, 2))
        assert (moved[:place] == 0).all() and (moved[place:] > 1e-9).all()


def test_approximate_activation_is_an_option_of_experts():
    """The default stays exact: the two differ, by no more than the approximation does."""
    torch.manual_seed(0)
    exact, near = (RoutedExperts(8, 16, 3, "loop", activation).double() for activation in ("gelu", "gelu-tanh"))
    near.load_state_dict(exact.state_dict())
    x, gate = 3 * randn(2, 5, 8), Gate(torch.randint(3, (2, 5, 1)), torch.ones(2, 5, 1).double())
    assert 1e-6 < (exact(x, gate) - near(x, gate)).abs().max() < 1e-2
    plain = RoutedExperts(8, 16, 3, "loop").double()
    plain.load_state_dict(exact.state_dict())
    assert torch.equal(plain(x, gate), exact(x, gate))


def test_routers_can_do_without_bias():
    assert {name for name, _ in Router(8, 4, bias=False).named_parameters()} == {"weight"}
    assert {name for name, _ in Router(8, 4).named_parameters()} == {"weight", "bias"}


def test_one_expert_is_the_dense_network(network):
    dense, routed = network(), network(Wants(experts=1))
    weights = dense.state_dict()
    for name, value in routed.state_dict().items():
        if ".mlp.experts." in name:
            stem, part = name.split("experts.")
            target = {"w_in": "0.weight", "b_in": "0.bias", "w_out": "2.weight", "b_out": "2.bias"}[part]
            weights[stem + target] = value[0].T if part.startswith("w") else value[0]
        elif ".router." not in name:
            weights[name] = value
    dense.load_state_dict(weights)
    _, x, t = batch()
    a, b = dense(x, t).logits[..., OTHERS], routed(x, t, route=greedy()).logits[..., OTHERS]
    assert torch.allclose(a, b, atol=1e-13, rtol=1e-13)


# --- The start ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_it_starts_uniform_over_all_symbols_but_the_mask(config):
    """Logits 0, and -inf for the mask: a masked token costs ln(V - 1), a row w(t) times that for each."""
    torch.manual_seed(0)
    method = config.build(SPACE, sizes())
    x0, xt, t = batch(dtype=torch.float32)
    extra = {"cond": torch.randn(3, 3)} if isinstance(config, VADDConfig) else {}
    logits = method.backbone(xt, t, route=greedy() if isinstance(config, EMoEConfig) else None, **extra).logits
    assert (logits[..., OTHERS] == 0).all() and (logits[..., SPACE.mask_id] == -torch.inf).all()
    out = method.infer(x0, xt, t, knobs_of(method, torch.float32), Rng(0))
    masked = (xt == SPACE.mask_id).sum(-1)
    assert torch.allclose(masked_nll(out.log_x_theta, x0), masked * math.log(SPACE.size - 1))


def test_first_weights_are_those_of_the_reference():
    torch.manual_seed(0)
    network = sizes(width=64, cond_size=32).build(SPACE, Wants(experts=2))
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
    view = network.trunk.view(torch.arange(6))
    out, logits, _ = network.trunk.blocks[0](h, c, 0, greedy(), view)
    assert torch.equal(out, h) and (logits == 0).all()


@pytest.mark.parametrize("config", [*CONFIGS, EMoEConfig(experts=3, mask_aware=True)], ids=[*IDS, "emoe-mask-aware"])
def test_the_loss_reaches_every_parameter(build, config):
    method = build(config)
    loss = method(batch(8)[0], knobs_of(method), Rng(0)).total
    assert loss.isfinite()
    for name, gradient in gradients(method, loss).items():
        assert gradient is not None and gradient.isfinite().all() and gradient.abs().max() > 0, name


@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_the_zeros_of_the_start_open_within_three_steps(config):
    """First the head, then embedding, last norm and adaLN, then all that stands behind a strength of 0."""
    torch.manual_seed(0)
    method = config.build(SPACE, sizes()).double()
    optimiser, x0, reached = torch.optim.Adam(method.parameters(), lr=1e-2), batch(32)[0], []
    for step in range(3):
        optimiser.zero_grad()
        method(x0, knobs_of(method), Rng(0).at(step)).total.backward()
        assert all(parameter.grad is not None for parameter in method.parameters())  # zero, but not missing
        moved = {name for name, parameter in method.named_parameters() if parameter.grad.abs().max() > 1e-12}
        reached.append({name.removeprefix("backbone.") for name in moved if name.startswith("backbone.")})
        optimiser.step()
    assert reached[0] == {"head.weight", "head.bias"}
    second = {"trunk.token.weight", "trunk.norm.weight", "trunk.adaln.weight", "trunk.adaln.bias"}
    assert reached[1] >= second | {f"trunk.blocks.{d}.adaln.{part}" for d in range(2) for part in ("weight", "bias")}
    assert not any(".attention" in name or ".time." in name for name in reached[1])
    assert reached[2] == {name for name, _ in method.backbone.named_parameters()}
    assert moved == {name for name, _ in method.named_parameters()}


# --- What reaches the output -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask_id", [0, 3, 6])
def test_the_mask_is_impossible_wherever_it_is_and_reading_takes_any_positions(scramble, mask_id: int):
    space = TokenSpace(size=7, mask_id=mask_id, length=6)
    network = scramble(sizes().build(space, Wants()).double(), 2)
    x, t = torch.arange(12).view(2, 6) % 7, torch.tensor([0.3, 0.8]).double()
    logits = network(x, t).logits
    others = [v for v in range(7) if v != mask_id]
    assert (logits[..., mask_id] == -torch.inf).all() and logits[..., others].isfinite().all()
    h, _, _ = network.features(x, t)
    chosen = torch.tensor([[True, False, False, True, True, False], [False] * 5 + [True]])
    assert h.shape == (2, 6, 16) and torch.allclose(network.read(h[chosen])[:, others], logits[chosen][:, others])
    found = gradients(network, torch.log_softmax(logits, -1)[..., others[0]].sum())
    assert all(gradient.isfinite().all() for gradient in found.values())
    assert (found["head.weight"][mask_id] == 0).all() and found["head.bias"][mask_id] == 0


def test_tokens_order_time_latent_and_marks_reach_every_position_of_their_row_alone(network):
    net = network(Wants(experts=2, cond=3, marks=True), time_conditioning=True)
    x, t, cond = batch(2)[0], torch.tensor([0.3, 0.6]).double(), randn(2, 3)
    marks = torch.zeros_like(x, dtype=torch.bool)
    marks[0, 1] = True

    def run(x: Tensor = x, t: Tensor = t, cond: Tensor = cond, marks: Tensor | None = marks) -> Tensor:
        return net(x, t, cond=cond, marks=marks, route=constant()).logits[..., OTHERS]

    start = run()
    other_x, other_t, other_cond = x.clone(), t.clone(), cond.clone()
    other_x[0, 5] = SPACE.mask_id
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
        assert (logits[0] - start[0]).abs().amax(-1).min() > 1e-9, name
        if name != "order":
            assert torch.equal(logits[1], start[1]), name
    assert torch.equal(run(marks=None), changed["marks"])


@pytest.mark.parametrize("timed", [False, True])
def test_encoder_sees_row_mask_pattern_and_perhaps_time(build, timed: bool):
    encoder = build(VADDConfig(latent=2), time_conditioning=timed).encoder
    x0, xt, t = batch(1)
    marks = xt == SPACE.mask_id
    start = encoder(x0, t, marks)
    other, flipped = x0.clone(), marks.clone()
    other[0, 5] = 6 - other[0, 5]
    flipped[0, 0] = ~flipped[0, 0]
    assert start.shape == (1, 4)
    for changed in (encoder(other, t, marks), encoder(x0, t, flipped)):
        assert (changed - start).abs().min() > 1e-9
    assert torch.equal(encoder(x0, t + 0.05, marks), start) != timed
    table = encoder.trunk.token.weight  # the pattern is marked by the mask's embedding, which no clean row uses
    used = torch.autograd.grad(start.sum(), table)[0].abs().sum(-1) > 0
    assert marks.any() and used.nonzero().flatten().tolist() == sorted({*x0[0].tolist(), SPACE.mask_id})


# --- Positions, who attends to whom, and the cache ---------------------------------------------------------------


def test_rotation_is_half_split_and_products_depend_on_differences():
    x = randn(1, 3, 1, 8)
    places = torch.tensor([0, 1, 5])
    angles = rotary_angles(places, 4, 10_000.0, torch.float64)
    assert torch.allclose(angles[2], 5 * torch.tensor([1, 0.1, 0.01, 0.001]).double(), atol=1e-15)
    turned = rotate(x, angles.cos(), angles.sin())
    want = plain_turn(x, places.double(), 10_000.0)
    assert torch.allclose(turned, want, atol=1e-14) and torch.equal(turned[0, 0, 0], x[0, 0, 0])
    q, k = randn(1, 1, 1, 8, seed=1), randn(1, 1, 1, 8, seed=2)

    def product(i: int, j: int) -> float:
        at = [rotary_angles(torch.tensor([p]), 4, 10_000.0, torch.float64) for p in (i, j)]
        return (rotate(q, at[0].cos(), at[0].sin()) * rotate(k, at[1].cos(), at[1].sin())).sum().item()

    assert product(3, 7) == pytest.approx(product(103, 107), abs=1e-12)
    assert abs(product(3, 7) - product(7, 3)) > 1e-3 and abs(product(3, 7) - product(3, 8)) > 1e-3


def test_only_differences_of_positions_count(network):
    net = network()
    _, x, t = batch()
    start = net(x, t).logits[..., OTHERS]
    places = torch.arange(6)
    moved = net(x, t, positions=places + 1000).logits[..., OTHERS]
    assert torch.allclose(moved, start, atol=1e-10)
    order = torch.tensor([3, 0, 5, 1, 4, 2])  # tokens carry their positions with them
    assert torch.allclose(net(x[:, order], t, positions=places[order]).logits[..., OTHERS], start[:, order], atol=1e-12)
    for other in (2 * places, places.flip(0)):
        assert (net(x, t, positions=other).logits[..., OTHERS] - start).abs().max() > 1e-3


def test_rows_that_are_kept_apart_by_a_mask_are_rows_of_their_own(network):
    """[a; b] with a block-diagonal mask: each half as alone, wherever it lies and however it is counted."""
    net = network()
    a, b, t = batch()
    same = torch.arange(12) // 6
    apart = same[:, None] == same
    want = torch.cat([net(a, t).logits, net(b, t).logits], 1)[..., OTHERS]
    for places in (torch.arange(12), torch.arange(12) % 6):
        got = net(torch.cat([a, b], 1), t, attend=apart, positions=places).logits[..., OTHERS]
        assert torch.allclose(got, want, atol=1e-12)
    joined = net(torch.cat([a, b], 1), t, positions=torch.arange(12) % 6).logits[..., OTHERS]
    assert (joined - want).abs().max() > 1e-3


def test_block_diffusion_in_one_call_is_a_call_for_each_block(network):
    """[xt; x0] with the mask of BD3-LM: noisy block n sees itself and clean blocks before it, at the same places."""
    net = network()
    x0, xt, t = batch()
    block = torch.arange(6) // 2
    own, before = block[:, None] == block, block[:, None] > block
    attend = torch.cat([torch.cat([own, before], 1), torch.cat([torch.zeros_like(own), own | before], 1)])
    both = net(torch.cat([xt, x0], 1), t, attend=attend, positions=torch.arange(6).repeat(2)).logits[:, :6]
    for n in range(3):
        rows = torch.cat([x0[:, : 2 * n], xt[:, 2 * n : 2 * n + 2]], 1)
        part = block[: 2 * n + 2]
        alone = net(rows, t, attend=part[:, None] >= part).logits[:, 2 * n :]
        assert torch.allclose(both[:, 2 * n : 2 * n + 2, OTHERS], alone[..., OTHERS], atol=1e-12)


@pytest.mark.parametrize("chunks", [[1] * 6, [6], [2, 1, 3], [1, 5]], ids=str)
def test_a_cache_says_what_the_whole_prefix_says(network, chunks: list[int]):
    net = network(causal=True).eval()
    x, _, t = batch()
    whole, cache, done = net(x, t).logits, net.new_cache(), 0
    for size in chunks:
        got = net.extend(x[:, done : done + size], cache)
        prefix = net(x[:, : done + size], t).logits[:, done:]
        for want in (whole[:, done : done + size], prefix):
            assert torch.allclose(got[..., OTHERS], want[..., OTHERS], atol=1e-12, rtol=1e-12)
        assert (got[..., SPACE.mask_id] == -torch.inf).all() and not got.requires_grad
        done += size
    assert cache.length == 6
    with pytest.raises(ValueError, match="room for 6 positions, not for 7"):
        net.extend(x[:, :1], cache)


@pytest.mark.parametrize("chunks", [[1, 1], [2], [1]], ids=str)
def test_blocks_in_a_cache_say_what_whole_rows_say(network, chunks: list[int]):
    """No position sees a later block of two; behind each chunk comes a noisy block, twice, that is not kept."""
    net, (x0, xt, t) = network(), batch()
    block, cache = torch.arange(6) // 2, net.new_cache()

    def compare(new: Tensor, keep: int) -> None:
        old = cache.length
        part = block[: old + new.shape[1]]
        attend = part[:, None] >= part
        got = net.extend(new, cache, attend=attend[old:], keep=keep)
        want = net(torch.cat([x0[:, :old], new], 1), t, attend=attend).logits[:, old:]
        assert torch.allclose(got[..., OTHERS], want[..., OTHERS], atol=1e-12, rtol=1e-12)
        assert cache.length == old + keep

    for size in chunks:
        old, end = cache.length, cache.length + 2 * size
        noisy = xt[:, end : end + 2]
        compare(torch.cat([x0[:, old:end], noisy], 1), 2 * size)
        compare(noisy.flip(1), 0)


def test_the_last_logits_alone_and_the_first(network):
    net, (x, _, t) = network(causal=True), batch()
    whole = net(x, t).logits
    last = net.extend(x, net.new_cache(), last=2)
    assert last.shape[1] == 2 and torch.allclose(last[..., OTHERS], whole[:, 4:, OTHERS], atol=1e-12)
    first = net(x, t, first=4).logits
    assert first.shape[1] == 4 and torch.allclose(first[..., OTHERS], whole[:, :4, OTHERS], atol=1e-12)


def test_other_networks_are_extended_by_callers_who_answer_for_it(network):
    net, x, attend = network(), batch()[0], torch.ones(6, 6, dtype=torch.bool)
    with pytest.raises(ValueError, match="new tokens would change"):
        net.extend(x, net.new_cache())
    net = network(time_conditioning=True)
    with pytest.raises(ValueError, match="at other times"):
        net.extend(x, net.new_cache(), attend=attend)


def test_every_way_to_ask_the_network_is_one_call(network):
    net, (x, _, t) = network(causal=True), batch()
    cache = net.new_cache()
    ways = (lambda: net(x, t), lambda: net.features(x, t), lambda: net.extend(x[:, :2], cache))
    for number, ask in enumerate(ways):
        with count_calls(net) as count:
            for _ in range(number + 1):
                ask()
        assert count.calls == number + 1
    with count_calls(net) as count:
        net.read(net.features(x, t)[0])
    assert count.calls == 1


# --- Routes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dispatch", ["loop", "dense", "grouped"])
def test_an_expert_without_positions_has_a_zero_gradient(build, dispatch: str):
    method = build(EMoEConfig(experts=3), dtype=torch.float32, dispatch=dispatch)
    _, xt, t = batch(dtype=torch.float32)
    logits = method.backbone(xt, t, route=constant(1)).logits[..., OTHERS]
    for name, gradient in gradients(method, logits.square().sum()).items():
        if ".experts." in name:
            assert gradient is not None and (gradient[[0, 2]] == 0).all() and gradient[1].abs().max() > 0, name


def test_every_dispatch_gives_the_same_loss_and_gradients(build):
    results = []
    for dispatch in ("loop", "dense", "grouped", "auto"):
        method = build(EMoEConfig(experts=3), dtype=torch.float32, dispatch=dispatch)
        loss = method(batch(4)[0], knobs_of(method, torch.float32), Rng(1)).total
        results.append((loss.item(), gradients(method, loss)))
    for loss, found in results[1:]:
        assert loss == pytest.approx(results[0][0], rel=1e-5)
        for name, want in results[0][1].items():
            assert torch.allclose(found[name], want, atol=1e-4 * want.abs().max().item()), name


@pytest.mark.parametrize("draws", [1, 3])
def test_one_paired_call_equals_a_clean_and_a_noisy_pass(build, draws: int):
    """Algo. 1 in one call, with K draws that start at the first block: values and gradients of two passes."""
    method = build(EMoEConfig(experts=3), time_conditioning=True)  # rows differ in what adaLN reads
    network = method.backbone
    x0, xt, t = batch(3)
    posterior = draw(torch.Generator().manual_seed(4), 0.7, draws=draws)
    both = network(torch.cat([x0, xt]), torch.cat([t, t]), route=paired(posterior, 2))
    assert [len(block) for block in both.route_logits] == [6, 6 * draws]
    assert both.gates[0].draws == draws and both.gates[-1].keep_from == 3 * draws

    many = [value.repeat_interleave(draws, 0) for value in (x0, xt, t)]
    single = draw(torch.Generator().manual_seed(4), 0.7)  # the same noise, for rows that are repeated beforehand
    clean = network(many[0], many[2], route=single)
    noisy = network(many[1], many[2], route=replay(clean.gates))
    assert both.logits.shape == noisy.logits.shape == (3 * draws, 6, 7)
    values = []
    for logits, post, prior in (
        (both.logits, *zip(*(block.chunk(2) for block in both.route_logits), strict=True)),
        (noisy.logits, clean.route_logits, noisy.route_logits),
    ):
        first = [block.repeat_interleave(3 * draws // len(block), 0) for block in (post[0], prior[0])]
        kl = route_kl([first[0], *post[1:]], [first[1], *prior[1:]])
        values.append((logits[..., OTHERS], kl))
    for fused, apart in zip(*values, strict=True):
        assert torch.allclose(fused, apart, atol=1e-10, rtol=1e-10)
    assert not torch.allclose(*values[0][0][:2])  # draws and rows differ
    grads = [gradients(method, torch.log_softmax(logits, -1)[..., 0].sum() + kl.sum()) for logits, kl in values]
    for name, want in grads[1].items():
        assert torch.allclose(grads[0][name], want, atol=1e-9 * max(1.0, want.abs().max().item())), name


def test_all_experts_of_the_last_block_at_once(network):
    net = network(Wants(experts=3, marks=True), time_conditioning=True)
    x0, xt, t = batch()
    marks = xt == SPACE.mask_id
    each, route_logits = net.forward_last(xt, t, marks=marks, route=constant(1))
    assert each.shape == (3, 3, 6, 7)
    for e in range(3):
        out = net(xt, t, marks=marks, route=constant(1, last=e))
        assert torch.allclose(each[e][..., OTHERS], out.logits[..., OTHERS], atol=1e-12)
        assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(route_logits, out.route_logits, strict=True))
    with pytest.raises(ValueError, match="dense backbone has no experts"):
        network().forward_last(x0, t, route=constant())


@pytest.mark.parametrize(
    "config",
    [
        EMoEConfig(experts=3, last_block="summed"),
        EMoEConfig(experts=3, draws=2, last_block="summed"),
        EMoEConfig(experts=3, draws=2, estimator="wake-sleep", gradient="none"),
        EMoEConfig(experts=3, kl_positions="masked"),
        VADDConfig(latent=3, draws=2),
    ],
    ids=["summed", "summed-draws", "wake-sleep", "masked", "vadd-draws"],
)
def test_methods_train_with_their_options(build, config):
    method = build(config, time_conditioning=True)
    loss = method(batch(4)[0], knobs_of(method), Rng(0)).total
    assert loss.isfinite()
    assert all(gradient is not None for gradient in gradients(method, loss).values())


@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_methods_sample_and_have_their_likelihoods(build, config):
    method = build(config)
    rows = method.sample(3, 2, Rng(0))
    assert rows.shape == (3, 6) and (rows != SPACE.mask_id).all()
    assert torch.equal(rows, method.sample(3, 2, Rng(0)))
    for convention in ("objective", "bound@2", "iw@2,2"):
        value = method.nll_bound(rows, Convention.parse(convention), Rng(0))
        assert value.shape == (3,) and value.isfinite().all()


# --- Precision, dropout, training --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "dispatch"),
    [*((config, "auto") for config in CONFIGS), *((CONFIGS[-1], path) for path in ("loop", "dense", "grouped"))],
    ids=[*IDS, "emoe-loop", "emoe-dense", "emoe-grouped"],
)
def test_half_precision_autocast_runs_and_stays_near(build, config, dispatch: str):
    method = build(config, dtype=torch.float32, dispatch=dispatch, dropout=0.1)
    x0, xt, t = batch(dtype=torch.float32)
    extra = {"cond": torch.ones(3, 3)} if isinstance(config, VADDConfig) else {}
    route = constant(1) if isinstance(config, EMoEConfig) else None
    full = method.eval().backbone(xt, t, route=route, **extra)
    with torch.autocast("cpu", torch.bfloat16):
        half = method.backbone(xt, t, route=route, **extra)
        with dropout_from(method.train(), torch.Generator().manual_seed(0)):
            loss = method(x0, knobs_of(method, torch.float32), Rng(0)).total
    assert half.logits.dtype == torch.float32 and all(block.dtype == torch.float32 for block in half.route_logits)
    a, b = (out.logits[..., OTHERS].flatten() for out in (full, half))
    assert not torch.equal(a, b) and torch.corrcoef(torch.stack([a, b]))[0, 1] > 0.99
    assert all(gradient.isfinite().all() for gradient in gradients(method, loss).values())


def test_a_cache_in_half_precision():
    torch.manual_seed(0)
    net = sizes(causal=True).build(SPACE, Wants(causal=True)).eval()
    torch.nn.init.normal_(net.head.weight)
    x, _, t = batch(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        cache = net.new_cache()
        parts = torch.cat([net.extend(x[:, i : i + 1], cache) for i in range(6)], 1)
    assert cache.blocks[0][0].dtype == torch.bfloat16
    assert torch.allclose(parts[..., OTHERS], net(x, t).logits[..., OTHERS], atol=0.1)


def test_dropout_keeps_a_share_and_scales_it():
    layer, x = Dropout(0.25), torch.ones(200, 500)
    with dropout_from(layer, torch.Generator().manual_seed(0)):
        out = layer(x)
    assert out.unique().tolist() == pytest.approx([0, 4 / 3])
    assert (out > 0).float().mean().item() == pytest.approx(0.75, abs=0.01)
    for idle in (Dropout(0.25).eval(), Dropout(0.0)):
        assert idle(x) is x


def test_dropout_is_a_function_of_its_stream(build):
    """Equal streams give equal losses and gradients, whatever was drawn before: a resumed run goes on as it was."""
    method = build(VADDConfig(latent=3), dropout=0.3)
    (x0, xt, t), knobs = batch(4), knobs_of(method)
    assert sum(isinstance(part, Dropout) for part in method.modules()) == 4  # of denoiser and encoder

    def run(step: int) -> tuple[float, Tensor]:
        stream = torch.Generator().manual_seed(derive_seed(1, step, "dropout"))
        with dropout_from(method, stream):
            loss = masked_nll(method.infer(x0, xt, t, knobs, Rng(0)).log_x_theta, x0).sum()
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
        method.infer(x0, xt, t, knobs, Rng(0))


def test_dropout_acts_on_what_layers_add_and_not_in_evaluation(network):
    net, still = network(dropout=0.5), network()
    _, x, t = batch()
    assert torch.equal(net.eval()(x, t).logits, still(x, t).logits)
    net.train()
    parts: list[tuple[Tensor, Tensor]] = []
    for block in net.trunk.blocks:
        block.dropout.register_forward_hook(lambda module, inputs, out: parts.append((inputs[0], out)))
    with dropout_from(net, torch.Generator().manual_seed(0)):
        net(x, t)
    assert len(parts) == 4
    kept = [(out != 0) for _, out in parts]
    for (before, after), keep in zip(parts, kept, strict=True):
        assert torch.allclose(after, torch.where(keep, 2 * before, 0.0)) and 0.3 < keep.double().mean() < 0.7
    assert all(not torch.equal(kept[0], other) for other in kept[1:])


@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_a_small_network_learns_on_a_cpu(config):
    """Rows that count upwards from a random symbol: a masked token follows from any clean one."""
    torch.manual_seed(0)
    method = config.build(SPACE, sizes(width=32, heads=4, hidden=64, dropout=0.1, dispatch="auto"))
    optimiser = torch.optim.Adam(method.parameters(), lr=5e-3)
    start = torch.randint(6, (64, 1), generator=torch.Generator().manual_seed(0))
    x0 = torch.tensor(OTHERS)[(start + torch.arange(6)) % 6]
    knobs, rng, losses = knobs_of(method, torch.float32), Rng(0), []
    for step in range(60):
        with dropout_from(method, torch.Generator().manual_seed(step)):
            out = method(x0, knobs, rng.at(step))
        optimiser.zero_grad()
        out.total.backward()
        optimiser.step()
        losses.append(out.log["recon"].item())
    assert losses[0] == pytest.approx(math.log(6), rel=0.3)
    assert sum(losses[-10:]) / 10 < 0.6 * math.log(6)
