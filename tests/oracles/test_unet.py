"""The UNet for binary images: published sizes, what each part reaches, routes, and the fused pass."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from torch import Tensor

from emoe.backbones.base import active_parameters, total_parameters
from emoe.backbones.layers import Router
from emoe.backbones.unet import UNet, UNetConfig, as_map, as_rows
from emoe.config import ConfigError
from emoe.methods.base import MaskedDiffusion, MaskedDiffusionConfig
from emoe.methods.emoe import EMoEConfig
from emoe.methods.mdlm import MDLMConfig
from emoe.methods.vadd import VADDConfig
from emoe.recipes import get_recipe
from emoe.rng import Rng
from emoe.routing.kl import route_kl
from emoe.routing.routes import draw, greedy, paired, replay
from emoe.types import Convention, Gate, Route, TokenSpace, Wants

MNIST = TokenSpace(size=3, mask_id=2, length=32 * 32)
CONFIGS = [MDLMConfig(), VADDConfig(latent=3), EMoEConfig(experts=3)]
IDS = ["mdlm", "vadd", "emoe"]


def sizes(**other: object) -> UNetConfig:
    small = {"channels": 8, "hidden": 8, "time_size": 8, "time_hidden": 16, "groups": 2, "dispatch": "loop"}
    return UNetConfig(**(small | other))


def image_space(side: int = 8, mask_id: int = 1) -> TokenSpace:
    return TokenSpace(size=3, mask_id=mask_id, length=side * side)


@pytest.fixture
def build(scramble):
    """A factory of small methods in float64 with weights of their own."""

    def make(config: MaskedDiffusionConfig, *, side: int = 8, dtype: torch.dtype = torch.float64, **other: object):
        return scramble(config.build(image_space(side), sizes(**other)).to(dtype), 3)

    return make


def batch(rows: int = 3, side: int = 8, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """Clean and noisy images (the symbols are 0 and 2, the mask is 1), and times."""
    generator = torch.Generator().manual_seed(seed)
    x0 = 2 * torch.randint(2, (rows, side * side), generator=generator)
    xt = torch.where(torch.rand(x0.shape, generator=generator) < 0.5, 1, x0)
    return x0, xt, torch.linspace(0.2, 0.9, rows, dtype=dtype)


def constant(expert: int = 0, at: tuple[int, int, int, int] | None = None) -> Route:
    """Expert 0 everywhere, but for `at` = (block, row, position, expert)."""

    def policy(block: int, logits: Tensor) -> Gate:
        chosen = torch.full((*logits.shape[:2], 1), expert)
        if at is not None and at[0] == block:
            chosen[at[1], at[2]] = at[3]
        return Gate(chosen, torch.ones(chosen.shape, dtype=logits.dtype))

    return policy


def knobs_of(method: MaskedDiffusion, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    return {name: torch.tensor(ramp(3, 10), dtype=dtype) for name, ramp in method.ramps.items()}


def loss_gradients(method: MaskedDiffusion, value: Tensor) -> dict[str, Tensor | None]:
    found = torch.autograd.grad(value, list(method.parameters()), allow_unused=True)
    return dict(zip([name for name, _ in method.named_parameters()], found, strict=True))


# --- Sizes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "total", "active"),
    [
        (MDLMConfig(), 2_074_346, 2_074_346),
        (EMoEConfig(experts=4), 2_494_886, 2_180_606),
        (VADDConfig(latent=64), 2_500_066, 2_500_066),
    ],
    ids=["mdlm", "emoe", "vadd"],
)
def test_image_models_have_the_published_sizes(config, total: int, active: int):
    method = config.build(MNIST, UNetConfig())
    assert (total_parameters(method), active_parameters(method)) == (total, active)


def test_a_mark_costs_one_vector():
    plain, marked = (UNetConfig().build(MNIST, Wants(marks=marks)) for marks in (False, True))
    assert total_parameters(marked) - total_parameters(plain) == 72


@pytest.mark.parametrize("length", [1, 4, 36, 63, 65, 32])
def test_rows_that_are_no_image_are_refused(length: int):
    space = TokenSpace(size=3, mask_id=2, length=length)
    for make in (sizes().build, sizes().build_encoder):
        with pytest.raises(ConfigError, match=f"backbone: .*{length}"):
            make(space, Wants(encoder=4))


@pytest.mark.parametrize(("field", "value"), [("groups", 3), ("time_size", 7), ("channels", 0), ("router_cap", 0.0)])
def test_sizes_that_do_not_fit_are_refused(field: str, value: float):
    with pytest.raises(ConfigError, match=f"{field}: must"):
        sizes(**{field: value})


def test_summing_the_last_block_is_refused():
    with pytest.raises(ConfigError, match="last_block: unet cannot sum its last block"):
        EMoEConfig(experts=2, last_block="summed").build(image_space(), sizes())


def test_squares_of_pixels_are_not_masked_as_one():
    with pytest.raises(ConfigError, match="kl_positions: unet routes squares of pixels.*; use all"):
        EMoEConfig(experts=2, kl_positions="masked").build(image_space(), sizes())


# --- The network -------------------------------------------------------------------------------------------------


def test_positions_of_a_map_are_its_pixels_in_row_major_order():
    image = torch.arange(2 * 3 * 4 * 4).view(2, 3, 4, 4).double()
    rows = as_rows(image).contiguous()
    assert rows.shape == (2, 16, 3) and torch.equal(rows[1, 4 * 2 + 3], image[1, :, 2, 3])
    assert torch.equal(as_map(rows), image)
    assert as_map(rows).is_contiguous(memory_format=torch.channels_last)
    assert as_rows(as_map(rows)).data_ptr() == rows.data_ptr()  # a view


@pytest.mark.parametrize("mask_id", [0, 1, 2])
@pytest.mark.parametrize("side", [4, 8, 12])
def test_shapes_and_the_impossible_mask(scramble, side: int, mask_id: int):
    network = scramble(sizes().build(image_space(side, mask_id), Wants(experts=3)).double(), 1)
    x, t = torch.arange(2 * side * side).view(2, -1) % 3, torch.tensor([0.3, 0.8]).double()
    out = network(x, t, route=greedy())
    others = [v for v in range(3) if v != mask_id]
    assert out.logits.shape == (2, side * side, 3) and (out.logits[..., mask_id] == -torch.inf).all()
    assert out.logits[..., others].isfinite().all()
    half, quarter = (side // 2) ** 2, (side // 4) ** 2
    assert [tuple(block.shape) for block in out.route_logits] == [
        (2, positions, 3) for positions in (half, quarter, quarter, quarter, half)
    ]
    assert len(out.gates) == network.routed_blocks == 5
    with pytest.raises(ValueError, match="route policy"):
        network(x, t)


def test_a_residual_block_starts_as_its_skip_and_routers_start_undecided():
    torch.manual_seed(0)
    network = sizes().build(image_space(), Wants(experts=3))
    first, joined = network.blocks[0].residual, network.blocks[4].residual
    h, wide, cond = torch.randn(2, 8, 4, 4), torch.randn(2, 16, 4, 4), torch.randn(2, 16)
    assert torch.equal(first(h, cond), h)
    assert torch.equal(joined(wide, cond), joined.skip(wide))
    x0, _, t = batch(dtype=torch.float32)
    assert all((block == 0).all() for block in network(x0, t, route=greedy()).route_logits)


def test_a_residual_block_is_its_formula(build):
    block = build(MDLMConfig()).backbone.blocks[4].residual
    generator = torch.Generator().manual_seed(2)
    h, cond = (torch.randn(shape, generator=generator).double() for shape in ((2, 16, 4, 4), (2, 16)))

    def norm(u: Tensor, layer: torch.nn.GroupNorm) -> Tensor:
        parts = u.view(2, 2, -1)  # two groups
        parts = (parts - parts.mean(-1, keepdim=True)) / (parts.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
        return parts.view_as(u) * layer.weight[:, None, None] + layer.bias[:, None, None]

    def silu(u: Tensor) -> Tensor:
        return u * torch.sigmoid(u)

    film = (cond @ block.film.weight.T)[..., None, None]
    u = norm(block.conv_in(silu(norm(h, block.norm_in))), block.norm_out)
    want = block.skip(h) + block.conv_out(silu((1 + film[:, :8]) * u + film[:, 8:]))
    assert torch.allclose(block(h, block.film(cond)), want, atol=1e-12)


def test_router_logits_are_normalised_then_capped(scramble):
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0)).double()
    plain, router = (
        scramble(Router(8, 4, **options).double(), 2) for options in ({}, {"logit_norm": True, "cap": 1.5})
    )
    assert {name for name, _ in plain.named_parameters()} == {"weight", "bias"}
    assert sum(p.numel() for p in router.parameters()) == 8 * 4 + 4 + 8
    logits = plain(x)
    spread = (logits - logits.mean(-1, keepdim=True)) / (logits.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
    affine = spread * router.logit_norm.weight + router.logit_norm.bias
    assert torch.allclose(router(x), 1.5 * torch.tanh(affine / 1.5), atol=1e-14)
    assert (affine.abs() > 1.5).any() and (router(x).abs() < 1.5).all()


def test_tokens_places_time_latent_and_marks_reach_every_pixel_of_their_row_alone(scramble):
    network = scramble(sizes().build(image_space(), Wants(experts=2, cond=3, marks=True)).double(), 1)
    x, _, t = batch(2)
    cond = torch.randn(2, 3, generator=torch.Generator().manual_seed(1)).double()
    marks = torch.zeros_like(x, dtype=torch.bool)
    marks[0, 5] = True

    def run(x=x, t=t, cond=cond, marks=marks) -> Tensor:
        return network(x, t, cond=cond, marks=marks, route=constant()).logits[..., [0, 2]]

    start = run()
    other_x, other_t, other_cond = x.clone(), t.clone(), cond.clone()
    other_x[0, 63] = 1
    other_t[0] += 0.01
    other_cond[0, 2] += 1
    mirrored = x.view(2, 8, 8).flip(2).flatten(1), marks.view(2, 8, 8).flip(2).flatten(1)
    changed = {
        "token": run(x=other_x),
        "time": run(t=other_t),
        "latent": run(cond=other_cond),
        "marks": run(marks=torch.zeros_like(marks)),
        "place": run(x=mirrored[0], marks=mirrored[1]).view(2, 8, 8, 2).flip(2).flatten(1, 2),
    }
    for name, logits in changed.items():
        assert (logits[0] - start[0]).abs().min() > 1e-12, name
        if name != "place":
            assert torch.equal(logits[1], start[1]), name
    assert torch.equal(run(marks=None), changed["marks"])
    with pytest.raises(ValueError, match="needs cond"):
        network(x, t, route=constant())


def test_encoder_sees_image_time_and_mask_pattern(build):
    encoder = build(VADDConfig(latent=2)).encoder
    x0, xt, t = batch(1)
    marks = xt == 1
    start = encoder(x0, t, marks)
    other = x0.clone()
    other[0, 63] = 2 - other[0, 63]
    flipped = marks.clone()
    flipped[0, 0] = ~flipped[0, 0]
    assert start.shape == (1, 4)
    for changed in (encoder(other, t, marks), encoder(x0, t + 0.1, marks), encoder(x0, t, flipped)):
        assert (changed - start).abs().min() > 1e-12


@pytest.mark.parametrize("config", [*CONFIGS, EMoEConfig(experts=3, mask_aware=True)], ids=[*IDS, "emoe-mask-aware"])
def test_the_loss_reaches_every_parameter(build, config):
    method = build(config)
    loss = method(batch(4)[0], knobs_of(method), Rng(0)).total
    assert loss.isfinite()
    for name, gradient in loss_gradients(method, loss).items():
        assert gradient is not None and gradient.isfinite().all() and gradient.abs().max() > 0, name


@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_methods_sample_and_have_their_likelihoods(build, config):
    method = build(config)
    rows = method.sample(3, 2, Rng(0))
    assert rows.shape == (3, 64) and (rows != 1).all()
    assert torch.equal(rows, method.sample(3, 2, Rng(0)))
    for convention in ("objective", "bound@2", "iw@2,2"):
        value = method.nll_bound(rows, Convention.parse(convention), Rng(0))
        assert value.shape == (3,) and value.isfinite().all()


@pytest.mark.parametrize("draws", [1, 2])
def test_maps_stay_in_channels_last(build, draws: int):
    network = build(EMoEConfig(experts=3), dtype=torch.float32).backbone
    maps: list[Tensor] = []
    convolutions = [module for module in network.modules() if isinstance(module, torch.nn.Conv2d)]
    for module in [*network.blocks, *convolutions]:
        module.register_forward_hook(lambda module, inputs, out: maps.extend([inputs[0], out]))
    x0, xt, t = batch(dtype=torch.float32)
    route = paired(draw(torch.Generator().manual_seed(0), 0.7, draws=draws), 5)
    network(torch.cat([x0, xt]), torch.cat([t, t]), route=route)
    assert len(maps) == 2 * (8 + 8 * 2 + 3 + 2 + 2 + 1)
    assert all(one.is_contiguous(memory_format=torch.channels_last) for one in maps)


@pytest.mark.parametrize(
    ("config", "dispatch"),
    [*((config, "auto") for config in CONFIGS), *((CONFIGS[-1], path) for path in ("loop", "dense", "grouped"))],
    ids=[*IDS, "emoe-loop", "emoe-dense", "emoe-grouped"],
)
def test_half_precision_autocast_runs_and_stays_near(build, config, dispatch: str):
    method = build(config, dtype=torch.float32, dispatch=dispatch)
    x0, xt, t = batch(dtype=torch.float32)
    extra = {"cond": torch.ones(3, 3)} if isinstance(config, VADDConfig) else {}
    route = constant(1) if isinstance(config, EMoEConfig) else None
    full = method.backbone(xt, t, route=route, **extra)
    with torch.autocast("cpu", torch.bfloat16):
        half = method.backbone(xt, t, route=route, **extra)
        loss = method(x0, knobs_of(method, torch.float32), Rng(0)).total
    assert half.logits.dtype == torch.float32 and all(block.dtype == torch.float32 for block in half.route_logits)
    a, b = (out.logits[..., [0, 2]].flatten() for out in (full, half))
    assert not torch.equal(a, b) and torch.corrcoef(torch.stack([a, b]))[0, 1] > 0.99
    assert all(gradient.isfinite().all() for gradient in loss_gradients(method, loss).values())


# --- Routes ------------------------------------------------------------------------------------------------------


def test_a_route_acts_in_its_own_block_and_row_and_on_what_follows(build):
    """Another expert at one place changes the routers of later blocks and the logits of its row; nothing before it."""
    network = build(EMoEConfig(experts=3)).backbone
    x, _, t = batch(2)
    start = network(x, t, route=constant())
    for block in range(5):
        other = network(x, t, route=constant(at=(block, 0, 1, 2)))
        moved = [not torch.equal(a, b) for a, b in zip(start.route_logits, other.route_logits, strict=True)]
        assert moved == [d > block for d in range(5)]
        assert not torch.allclose(start.logits[0, :, 0], other.logits[0, :, 0])
        assert torch.equal(start.logits[1], other.logits[1])
        replayed = network(x, t, route=replay(other.gates))
        assert torch.equal(replayed.logits, other.logits)


def test_a_branch_adds_its_expert_at_each_position(build):
    """r + W2 gelu(W1 r + b1) + b2 of the position's expert, r the output of the residual block."""
    network = build(EMoEConfig(experts=3)).backbone
    block = network.blocks[2]
    seen: dict[str, Tensor] = {}
    block.residual.register_forward_hook(lambda module, inputs, out: seen.update(before=out))
    block.register_forward_hook(lambda module, inputs, out: seen.update(after=out))
    x, _, t = batch(2)
    out = network(x, t, route=greedy())
    experts, r = block.branch.experts, seen["before"]
    for row, i, j in itertools.product(range(2), range(2), range(2)):
        e = out.gates[1].expert[row, 2 * i + j, 0]
        at = r[row, :, i, j]
        hidden = torch.nn.functional.gelu(at @ experts.w_in[e] + experts.b_in[e])
        assert torch.allclose(seen["after"][row, :, i, j], at + hidden @ experts.w_out[e] + experts.b_out[e])
        assert torch.allclose(out.route_logits[1][row, 2 * i + j], block.branch.router(at[None, None])[0, 0])


@pytest.mark.parametrize("dispatch", ["loop", "dense", "grouped"])
def test_an_expert_without_positions_has_a_zero_gradient(build, dispatch: str):
    method = build(EMoEConfig(experts=3), dtype=torch.float32, dispatch=dispatch)
    x, _, t = batch(dtype=torch.float32)
    logits = method.backbone(x, t, route=constant(1)).logits[..., [0, 2]]
    for name, gradient in loss_gradients(method, logits.square().sum()).items():
        if ".experts." in name:
            assert gradient is not None and (gradient[[0, 2]] == 0).all() and gradient[1].abs().max() > 0, name


def test_every_dispatch_gives_the_same_loss_and_gradients(build):
    results = []
    for dispatch in ("loop", "dense", "grouped", "auto"):
        method = build(EMoEConfig(experts=3), dtype=torch.float32, dispatch=dispatch)
        loss = method(batch(4)[0], knobs_of(method, torch.float32), Rng(1)).total
        results.append((loss.item(), loss_gradients(method, loss)))
    for loss, gradients in results[1:]:
        assert loss == pytest.approx(results[0][0], rel=1e-5)
        for name, want in results[0][1].items():
            assert torch.allclose(gradients[name], want, atol=1e-4 * want.abs().max().item()), name


@pytest.mark.parametrize("draws", [1, 3])
def test_one_paired_call_equals_a_clean_and_a_noisy_pass(build, draws: int):
    """Algo. 1 in one call, with K draws that start at the first routed block: values and gradients of two passes."""
    method = build(EMoEConfig(experts=3))
    network = method.backbone
    x0, xt, t = batch(3)

    def posterior() -> Route:
        return draw(torch.Generator().manual_seed(4), 0.7, draws=draws)

    both = network(torch.cat([x0, xt]), torch.cat([t, t]), route=paired(posterior(), 5))
    assert [len(block) for block in both.route_logits] == [6, *[6 * draws] * 4]
    assert both.gates[0].draws == draws and both.gates[-1].keep_from == 3 * draws

    many = [value.repeat_interleave(draws, 0) for value in (x0, xt, t)]
    single = draw(torch.Generator().manual_seed(4), 0.7)  # the same noise, for rows that are repeated beforehand
    clean = network(many[0], many[2], route=single)
    noisy = network(many[1], many[2], route=replay(clean.gates))
    assert both.logits.shape == noisy.logits.shape == (3 * draws, 64, 3)
    values = []
    for logits, post, prior in (
        (both.logits, *zip(*(block.chunk(2) for block in both.route_logits), strict=True)),
        (noisy.logits, clean.route_logits, noisy.route_logits),
    ):
        first = [block.repeat_interleave(3 * draws // len(block), 0) for block in (post[0], prior[0])]
        kl = route_kl([first[0], *post[1:]], [first[1], *prior[1:]])
        values.append((logits[..., [0, 2]], kl))
    for fused, apart in zip(*values, strict=True):
        assert torch.allclose(fused, apart, atol=1e-10, rtol=1e-10)
    assert not torch.allclose(*values[0][0][:2])  # draws and rows differ
    grads = [loss_gradients(method, torch.log_softmax(logits, -1)[..., 0].sum() + kl.sum()) for logits, kl in values]
    for name, want in grads[1].items():
        assert torch.allclose(grads[0][name], want, atol=1e-9 * max(1.0, want.abs().max().item())), name


def test_a_method_trains_on_several_draws(build):
    for config in (
        EMoEConfig(experts=3, draws=2),
        EMoEConfig(experts=3, draws=2, estimator="wake-sleep", gradient="none"),
        EMoEConfig(experts=3, draws=2, redraw="block"),
        VADDConfig(latent=3, draws=2),
    ):
        method = build(config)
        loss = method(batch(4)[0], knobs_of(method), Rng(0)).total
        assert loss.isfinite()
        assert all(gradient is not None for gradient in loss_gradients(method, loss).values())


def test_kl_along_the_route_averages_to_the_kl_of_whole_routes(build):
    """Eq. 7-8 with blocks of different resolutions: all 2^(4 + 1 + 1 + 1 + 4) routes of a 4x4 image."""
    network = build(EMoEConfig(experts=2), side=4).backbone
    assert isinstance(network, UNet)
    positions = [4, 1, 1, 1, 4]
    routes = torch.tensor(list(itertools.product(range(2), repeat=sum(positions))))
    gates = [Gate(z[..., None], torch.ones(*z.shape, 1).double()) for z in routes.split(positions, dim=1)]
    x0, xt, _ = batch(1, side=4)
    sides = []
    with torch.no_grad():
        for x in (x0, xt):
            out = network(x.expand(len(routes), -1), torch.full((len(routes),), 0.6).double(), route=replay(gates))
            log_rho = [torch.log_softmax(block, -1) for block in out.route_logits]
            each = [rho.gather(-1, gate.expert).sum((1, 2)) for rho, gate in zip(log_rho, gates, strict=True)]
            sides.append((torch.stack(each).sum(0), out.route_logits))
    (log_q, post), (log_p, prior) = sides
    assert log_q.exp().sum().item() == pytest.approx(1, abs=1e-12)
    assert log_p.exp().sum().item() == pytest.approx(1, abs=1e-12)
    whole = (log_q.exp() * (log_q - log_p)).sum().item()
    along = (log_q.exp() @ route_kl(post, prior).sum(-1)).item()
    assert whole > 1e-3 and along == pytest.approx(whole, rel=1e-10)


def test_positions_of_finer_maps_lie_in_squares_of_coarser_ones():
    backbone = UNetConfig(channels=8, hidden=8, groups=2, time_size=4, time_hidden=8).build(
        TokenSpace(size=3, mask_id=2, length=64), Wants(experts=2)
    )
    image = torch.arange(64.0).view(8, 8)
    want = torch.stack([image[i : i + 4, j : j + 4].sum() for i in (0, 4) for j in (0, 4)])
    assert torch.equal(backbone.grouped(image.view(1, 64), 4), want[None])
    assert torch.equal(backbone.grouped(image.view(1, 64), 64), image.view(1, 64))
    with pytest.raises(ValueError, match="squares"):
        backbone.grouped(image.view(1, 64), 9)


@pytest.mark.parametrize("credit", ["row", "position"])
def test_comparisons_of_draws_judge_rows_or_squares(credit: str):
    """The weights of draws, by hand: one comparison for each row, or for each square of the coarsest map."""
    config = EMoEConfig(experts=2, estimator="wake-sleep", gradient="none", draws=3, credit=credit)
    space = TokenSpace(size=3, mask_id=2, length=64)
    method = config.build(space, UNetConfig(channels=8, hidden=8, groups=2, time_size=4, time_hidden=8, router_std=1.0))
    x0 = torch.randint(2, (2, 64), generator=torch.Generator().manual_seed(0))
    t, knobs = torch.tensor([1.0, 0.5]), {name: torch.ones(()) for name in method.ramps}
    xt = torch.where(torch.rand(2, 64, generator=torch.Generator().manual_seed(1)) < t[:, None], 2, x0)
    out = method.objective(x0, xt, t, knobs, Rng(3))
    passes = method._both_passes(x0, xt, t, 1.0, Rng(3), draws=3)
    log_token = passes.log_x_theta.gather(-1, x0.repeat_interleave(3, 0)[..., None]).squeeze(-1)
    f = (1 / t)[:, None, None] * log_token.view(2, 3, 64)
    ratio = torch.zeros(2, 3, 4)
    for post, prior, route in zip(passes.post, passes.prior, passes.routes, strict=True):
        each = torch.log_softmax(prior, -1) - torch.log_softmax(post, -1)
        chosen = each.gather(-1, route[..., None]).view(2, 3, *(2 * [int(route.shape[1] ** 0.5)]))
        half = chosen.shape[-1] // 2
        parts = [chosen[..., i : i + half, j : j + half].sum((-2, -1)) for i in (0, half) for j in (0, half)]
        ratio += torch.stack(parts, -1)
    f = f.view(2, 3, 8, 8)
    f = torch.stack([f[..., i : i + 4, j : j + 4].sum((-2, -1)) for i in (0, 4) for j in (0, 4)], -1)
    value = f + ratio
    value = value.sum(-1, keepdim=True) if credit == "row" else value
    weights = torch.softmax(value, 1)
    assert ratio.abs().max() > 0.1  # routes count
    assert torch.allclose(out.log["effective_draws"], (1 / weights.square().sum(1)).mean(), atol=1e-4)


def test_routes_of_images_with_few_masks_are_averaged():
    experiment = get_recipe("digits-emoe")
    space = TokenSpace(size=3, mask_id=2, length=64)
    method = dataclasses.replace(experiment.method, mean_below=0.5).build(
        space, dataclasses.replace(experiment.backbone, router_std=1.0)
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in method.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    clean = torch.randint(2, (4, 64), generator=generator)
    places = torch.arange(64).expand(4, -1)
    xt = torch.where(places < torch.tensor([[16], [32], [33], [64]]), 2, clean)
    with torch.no_grad():
        first, second = (method.denoise(xt, torch.full((4,), 0.5), Rng(seed)).log_x_theta for seed in (0, 1))
    same = [torch.equal(a, b) for a, b in zip(first, second, strict=True)]
    assert same == [True, True, False, False]
