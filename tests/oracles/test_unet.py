"""The UNet for binary images: published sizes, its parts as formulas, and routes at several resolutions."""

from __future__ import annotations

import itertools

import pytest
import torch
from enumeration import predict
from steps import constant, generator, loss_at, noised, ramp_of, randn, scramble
from torch import Tensor

from emoe.backbones.base import total_parameters
from emoe.backbones.layers import RouterConfig
from emoe.backbones.unet import UNetConfig, as_map, as_rows
from emoe.config import ConfigError
from emoe.methods.emoe import EMoEConfig
from emoe.methods.masked import MaskedDiffusionConfig
from emoe.methods.mdlm import MDLMConfig
from emoe.rng import Rng
from emoe.routing.compare import CompareConfig, both_passes
from emoe.routing.routes import draw, greedy, paired, replay
from emoe.types import Needs, TokenSpace

MNIST = TokenSpace(size=3, mask_id=2, length=32 * 32)


def sizes(**other: object) -> UNetConfig:
    small = {"channels": 8, "hidden": 8, "time_size": 8, "time_hidden": 16, "groups": 2, "dispatch": "loop"}
    return UNetConfig(**(small | other))


def image_space(side: int = 8, mask_id: int = 1) -> TokenSpace:
    return TokenSpace(size=3, mask_id=mask_id, length=side * side)


def build(config: MaskedDiffusionConfig, *, side: int = 8, dtype: torch.dtype = torch.float64, **other: object):
    return scramble(config.build(image_space(side), sizes(**other)).to(dtype), 3)


def batch(rows: int = 3, side: int = 8, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """Clean and noisy images (the symbols are 0 and 2, the mask is 1), and times."""
    source = generator(seed)
    x0 = 2 * torch.randint(2, (rows, side * side), generator=source)
    xt = torch.where(torch.rand(x0.shape, generator=source) < 0.5, 1, x0)
    return x0, xt, torch.linspace(0.2, 0.9, rows, dtype=dtype)


def test_a_mark_costs_one_vector():
    plain, marked = (UNetConfig().build(MNIST, Needs(marks=marks)) for marks in (False, True))
    assert total_parameters(marked) - total_parameters(plain) == 72


@pytest.mark.parametrize("length", [1, 4, 36, 63, 65, 32])
def test_rows_that_are_no_image_are_refused(length: int):
    space = TokenSpace(size=3, mask_id=2, length=length)
    for make in (sizes().build, sizes().build_encoder):
        with pytest.raises(ConfigError, match=f"backbone: .*{length}"):
            make(space, Needs(encoder=4))


@pytest.mark.parametrize(("field", "value"), [("groups", 3), ("time_size", 7), ("channels", 0)])
def test_sizes_that_do_not_fit_are_refused(field: str, value: float):
    with pytest.raises(ConfigError, match=f"{field}: must"):
        sizes(**{field: value})


def test_summing_the_last_block_is_refused():
    with pytest.raises(ConfigError, match="compare.sum_last: routes in the last block of a unet move other positions"):
        EMoEConfig(experts=2, compare=CompareConfig(sum_last=True)).build(image_space(), sizes())
    with pytest.raises(ConfigError, match="exact: routes in the last block of this backbone move other positions"):
        EMoEConfig(experts=2).build(image_space(), sizes()).components(torch.ones(1, 64).long(), 0.5)


def test_positions_of_a_map_are_its_pixels_in_row_major_order():
    image = torch.arange(2 * 3 * 4 * 4).view(2, 3, 4, 4).double()
    rows = as_rows(image).contiguous()
    assert rows.shape == (2, 16, 3) and torch.equal(rows[1, 4 * 2 + 3], image[1, :, 2, 3])
    assert torch.equal(as_map(rows), image)
    assert as_map(rows).is_contiguous(memory_format=torch.channels_last)
    assert as_rows(as_map(rows)).data_ptr() == rows.data_ptr()  # a view


@pytest.mark.parametrize("side", [4, 8, 12])
def test_blocks_route_at_half_and_quarter_resolution(side: int):
    network = scramble(sizes().build(image_space(side), Needs(experts=3)).double(), 1)
    out = predict(network, torch.arange(2 * side * side).view(2, -1) % 3, torch.ones(2), route=greedy())
    half, quarter = (side // 2) ** 2, (side // 4) ** 2
    assert [block.shape[1] for block in out.route_logits] == [half, quarter, quarter, quarter, half]
    assert out.logits.shape == (2, side * side, 3) and len(out.gates) == network.routed_blocks == 5


def test_a_residual_block_starts_as_its_skip():
    network = sizes().build(image_space(), Needs(experts=3))
    first, joined = network.blocks[0].residual, network.blocks[4].residual
    h, wide, film = (randn(2, *size, dtype=torch.float32) for size in ((8, 4, 4), (16, 4, 4), (16,)))
    assert torch.equal(first(h, film), h)
    assert torch.equal(joined(wide, film), joined.skip(wide))


def test_a_residual_block_is_its_formula():
    block = build(MDLMConfig()).backbone.blocks[4].residual
    h, cond = randn(2, 16, 4, 4, seed=2), randn(2, 16, seed=3)

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


@pytest.mark.parametrize("draws", [1, 2])
def test_maps_stay_in_channels_last(draws: int):
    network = build(EMoEConfig(experts=3), dtype=torch.float32).backbone
    maps: list[Tensor] = []
    convolutions = [module for module in network.modules() if isinstance(module, torch.nn.Conv2d)]
    for module in [*network.blocks, *convolutions]:
        module.register_forward_hook(lambda module, inputs, out: maps.extend([inputs[0], out]))
    x0, xt, t = batch(dtype=torch.float32)
    route = paired(draw(generator(), 0.7, draws=draws), 5)
    network(torch.cat([x0, xt]), torch.cat([t, t]), route=route)
    assert len(maps) == 2 * (8 + 8 * 2 + 3 + 2 + 2 + 1)
    assert all(one.is_contiguous(memory_format=torch.channels_last) for one in maps)


def test_a_route_acts_in_its_own_row_and_on_later_blocks():
    """Another expert at one position changes the routers of later blocks and the logits of its row, nothing before."""
    network = build(EMoEConfig(experts=3)).backbone
    x, _, t = batch(2)
    start = network(x, t, route=constant())
    for block in range(5):
        other = network(x, t, route=constant(at=(block, 0, 1, 2)))
        moved = [not torch.equal(a, b) for a, b in zip(start.route_logits, other.route_logits, strict=True)]
        assert moved == [d > block for d in range(5)]
        assert not torch.allclose(start.h[0], other.h[0]) and torch.equal(start.h[1], other.h[1])
        assert torch.equal(network(x, t, route=replay(other.gates)).h, other.h)


def test_a_branch_adds_its_expert_at_each_position():
    """r + W2 gelu(W1 r + b1) + b2 of the position's expert, r the output of the residual block."""
    network = build(EMoEConfig(experts=3)).backbone
    block = network.blocks[2]
    maps: dict[str, Tensor] = {}
    block.residual.register_forward_hook(lambda module, inputs, out: maps.update(before=out))
    block.register_forward_hook(lambda module, inputs, out: maps.update(after=out))
    x, _, t = batch(2)
    out = network(x, t, route=greedy())
    experts, r = block.branch.experts, maps["before"]
    for row, i, j in itertools.product(range(2), range(2), range(2)):
        e = out.gates[1].expert[row, 2 * i + j, 0]
        at = r[row, :, i, j]
        hidden = torch.nn.functional.gelu(at @ experts.w_in[e] + experts.b_in[e])
        assert torch.allclose(maps["after"][row, :, i, j], at + hidden @ experts.w_out[e] + experts.b_out[e])
        assert torch.allclose(out.route_logits[1][row, 2 * i + j], block.branch.router(at[None, None])[0, 0])


def test_positions_of_finer_maps_are_summed_over_squares_of_coarser_ones():
    backbone, image = build(MDLMConfig()).backbone, torch.arange(64.0).view(8, 8)
    want = torch.stack([image[i : i + 4, j : j + 4].sum() for i in (0, 4) for j in (0, 4)])
    assert torch.equal(backbone.grouped(image.view(1, 64), 4), want[None])
    assert torch.equal(backbone.grouped(image.view(1, 64), 64), image.view(1, 64))


@pytest.mark.parametrize("credit", ["row", "position"])
def test_draws_are_compared_by_rows_or_squares(credit: str):
    """The weights of draws, by hand: one comparison for each row, or for each square of the coarsest map."""
    compare = CompareConfig(estimator="wake-sleep", draws=3, credit=credit)
    method = build(EMoEConfig(experts=2, compare=compare), router=RouterConfig(std=1.0))
    (x0, xt, _), t = batch(2), torch.tensor([1.0, 0.5]).double()
    log = loss_at(method, x0, xt, t, ramp_of(method), Rng(3)).log
    log_token, latent = both_passes(method, noised(method, x0, xt, t), Rng(3), draws=3)

    def squares(values: Tensor) -> Tensor:
        """Sums over the quarters of square maps, (2, 3, 4)."""
        values = values.view(2, 3, *(2 * [int(values.shape[-1] ** 0.5)]))
        half = values.shape[-1] // 2
        parts = [values[..., i : i + half, j : j + half].sum((-2, -1)) for i in (0, half) for j in (0, half)]
        return torch.stack(parts, -1)

    value = squares(log_token) / t[:, None, None]
    for post, prior, route in zip(latent.post, latent.prior, latent.routes, strict=True):
        each = torch.log_softmax(prior, -1) - torch.log_softmax(post, -1)
        value = value + squares(each.gather(-1, route[..., None]).squeeze(-1))
    value = value.sum(-1, keepdim=True) if credit == "row" else value
    weights = torch.softmax(value, 1)
    assert latent.log_ratio().abs().max() > 0.1  # routes count
    assert torch.allclose(log["effective_draws"], (1 / weights.square().sum(1)).mean(), atol=1e-9)
