"""The fused kernels against the plain form; on a GPU, or on a CPU by Triton's interpreter where Triton is installed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from interpreter import DEVICE, unchecked
from torch import Tensor
from torch.nn import functional as nnf

from emoe.backbones import layers, unet
from emoe.diffusion import chunks
from emoe.kernels.aside import Aside
from emoe.recipes import get_recipe
from emoe.rng import Rng

convs: Any = unchecked("emoe.kernels.convs")
maps: Any = unchecked("emoe.kernels.maps")
head: Any = unchecked("emoe.kernels.head")
router: Any = unchecked("emoe.kernels.router")


def plain(x: Tensor, gamma: Tensor, beta: Tensor, groups: int, bias: Tensor | None, film: Tensor | None) -> Tensor:
    v = nnf.group_norm(x if bias is None else x + bias[:, None, None], groups, gamma, beta)
    if film is not None:
        scale, shift = film[..., None, None].chunk(2, 1)
        v = (1 + scale) * v + shift
    return nnf.silu(v)


def normal(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE).requires_grad_()


def assert_equal(mine: Tensor, wanted: Tensor, leaves: list[Tensor], weight: Tensor, tolerance: float = 2e-5) -> None:
    """Values and gradients agree, in proportion to the largest entry."""
    pairs = [(mine, wanted)]
    pairs += zip(
        torch.autograd.grad((mine * weight).sum(), leaves), torch.autograd.grad((wanted * weight).sum(), leaves),
        strict=True,
    )  # fmt: skip
    for a, b in pairs:
        assert (a - b).abs().max() <= tolerance * b.abs().max()


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("with_film", [False, True])
@pytest.mark.parametrize(("batch", "channels", "groups", "side"), [(3, 72, 8, 4), (2, 144, 8, 8), (3, 24, 3, 2)])
def test_norm_film_and_silu(
    batch: int, channels: int, groups: int, side: int, with_film: bool, with_bias: bool
) -> None:
    x = normal(batch, channels, side, side, seed=0)
    gamma, beta = normal(channels, seed=1), normal(channels, seed=2)
    bias = normal(channels, seed=3) if with_bias else None
    film = normal(batch, 2 * channels, seed=4) if with_film else None
    leaves = [leaf for leaf in (x, gamma, beta, bias, film) if leaf is not None]
    mine, same = maps.norm_silu(x, gamma, beta, groups, bias=bias, film=film)
    assert torch.equal(same, x)
    assert mine.is_contiguous(memory_format=torch.channels_last)
    assert_equal(mine, plain(x, gamma, beta, groups, bias, film), leaves, normal(*x.shape, seed=5).detach())


def test_what_reads_the_input_of_a_norm_beside_it() -> None:
    x, other = normal(3, 24, 6, 6, seed=0), normal(3, 24, 6, 6, seed=1)
    gamma, beta = normal(24, seed=2), normal(24, seed=3)
    mine, same = maps.norm_silu(x, gamma, beta, 3)
    wanted = plain(x, gamma, beta, 3, None, None)
    slope = normal(*x.shape, seed=4).detach()
    assert_equal(mine + same * other, wanted + x * other, [x, gamma, beta, other], slope)
    _, same = maps.norm_silu(x, gamma, beta, 3)  # the norm itself unread
    assert torch.equal(torch.autograd.grad((same * slope).sum(), x)[0], slope)


def test_norms_in_several_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"LARGEST": 1024, "ROUND": 0}.items():
        monkeypatch.setattr(maps, name, value)
    parts, options = maps._options(2, 36, 72, 8)
    assert (parts, options["COUNT"] > 1) == (2, True)
    assert options["COUNT"] * options["R"] < 36
    x, film = normal(2, 72, 6, 6, seed=0), normal(2, 144, seed=1)
    gamma, beta, bias = (normal(72, seed=seed) for seed in (2, 3, 4))
    mine, _ = maps.norm_silu(x, gamma, beta, 8, bias=bias, film=film)
    leaves = [x, gamma, beta, bias, film]
    assert_equal(mine, plain(x, gamma, beta, 8, bias, film), leaves, normal(*x.shape, seed=5).detach())


def test_norms_in_half_precision() -> None:
    x, weight = normal(3, 72, 6, 6, seed=0).detach().bfloat16(), normal(3, 72, 6, 6, seed=1).detach().bfloat16()
    gamma, beta, bias = (normal(72, seed=seed) for seed in (2, 3, 4))
    film = normal(3, 144, seed=5).detach().bfloat16()
    halves = [x.requires_grad_(), gamma, beta, bias, film.requires_grad_()]
    singles = [leaf.detach().float().requires_grad_() for leaf in halves]
    mine, _ = maps.norm_silu(x, gamma, beta, 8, bias=bias, film=film)
    wanted = plain(singles[0], singles[1], singles[2], 8, singles[3], singles[4])
    found = [mine, *torch.autograd.grad((mine * weight).sum(), halves)]
    for a, b in zip(found, [wanted, *torch.autograd.grad((wanted * weight).sum(), singles)], strict=True):
        assert (a - b).abs().max() <= 2**-7 * b.abs().max()  # one bit: the interpreter cuts, where a GPU rounds


def test_sums_over_rows_are_the_same_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maps, "ROWS", 64)
    # More rows than are added up at a time, and more programs
    x, z = normal(35, 8, 2, 2, seed=0), normal(1, 8, 72, 72, seed=1)
    gamma, beta, bias = (normal(8, seed=seed) for seed in (2, 3, 4))
    for mine, wanted, leaves in (
        (maps.norm_silu(x, gamma, beta, 4)[0], plain(x, gamma, beta, 4, None, None), [gamma, beta]),
        (maps.join_bias(z, bias, z)[:, :8], z + bias[:, None, None], [bias]),
    ):
        weight = normal(*mine.shape, seed=5).detach()
        first = torch.autograd.grad((mine * weight).sum(), leaves, retain_graph=True)
        second = torch.autograd.grad((mine * weight).sum(), leaves)
        for a, b, right in zip(first, second, torch.autograd.grad((wanted * weight).sum(), leaves), strict=True):
            assert torch.equal(a, b)
            assert (a - right).abs().max() <= 2e-5 * right.abs().max()


def test_a_large_mean_does_not_drown_the_variance() -> None:
    x = (normal(2, 16, 8, 8, seed=0).detach() + 1000).requires_grad_()
    gamma, beta = torch.ones(16, device=DEVICE), torch.zeros(16, device=DEVICE)
    wanted = plain(x.double(), gamma.double(), beta.double(), 8, None, None)
    assert (maps.norm_silu(x, gamma, beta, 8)[0] - wanted).abs().max() < 2e-3


def test_bias_and_a_map_beside_it() -> None:
    # 1,200 rows: several programs, the last not full
    x, bias, skip = normal(3, 24, 20, 20, seed=0), normal(24, seed=1), normal(3, 24, 20, 20, seed=2)
    mine, wanted = maps.join_bias(x, bias, skip), torch.cat([x + bias[:, None, None], skip], dim=1)
    assert mine.is_contiguous(memory_format=torch.channels_last)
    assert_equal(mine, wanted, [x, bias, skip], normal(*wanted.shape, seed=3).detach())


@pytest.mark.parametrize(("channels", "side"), [(24, 4), (300, 8)])  # a line of pixels by one program, or by two
def test_pixels_are_copied_to_squares(channels: int, side: int) -> None:
    x = normal(2, channels, side, side, seed=0)
    mine, wanted = maps.doubled(x), nnf.interpolate(x, scale_factor=2, mode="nearest")
    assert mine.is_contiguous(memory_format=torch.channels_last) and torch.equal(mine, wanted)
    assert_equal(mine, wanted, [x], normal(*wanted.shape, seed=1).detach())


def test_embeddings() -> None:
    table, slope = normal(3, 24, seed=0), normal(5, 40, 24, seed=1).detach()  # 200 rows: two programs
    x = torch.randint(3, (5, 40), generator=torch.Generator().manual_seed(2)).to(DEVICE)
    assert_equal(maps.embed(x, table, torch.float32), nnf.embedding(x, table), [table], slope)
    assert maps.embed(x, table, torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("with_skip", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("size", "stride", "padding"), [(1, 1, 0), (3, 2, 1), (3, 1, 1)])
@pytest.mark.parametrize("own", [False, True])
def test_convolutions(
    own: bool, size: int, stride: int, padding: int, with_bias: bool, with_skip: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    if own:
        monkeypatch.setattr(convs, "fits", lambda x, weight, stride=1: True)
    x, weight = normal(2, 40, 6, 6, seed=0), normal(24, 40, size, size, seed=1)
    bias, skip = normal(24, seed=2), normal(2, 24, 6 // stride, 6 // stride, seed=3)
    wanted = nnf.conv2d(x, weight, bias if with_bias else None, stride, padding)
    wanted = wanted + skip if with_skip else wanted
    leaves = [x, weight] + [bias] * with_bias + [skip] * with_skip
    given = {"bias": bias if with_bias else None, "skip": skip if with_skip else None}
    mine = maps.convolution(x, weight, **given, stride=stride, padding=padding, aside=Aside())
    slope = normal(*wanted.shape, seed=4).detach()
    assert_equal(mine, wanted, leaves, slope)
    # Weights that are rounded for the product: their own precision has the gradient.
    other = normal(24, 40, size, size, seed=5)
    mine = maps.convolution(x, other, **given, rounded=weight.detach(), stride=stride, padding=padding, aside=Aside())
    again = nnf.conv2d(x, weight, None, stride, padding)
    found, want = torch.autograd.grad(mine, other, slope)[0], torch.autograd.grad(again, weight, slope)[0]
    assert found.dtype == other.dtype and (found - want).abs().max() <= 1e-4 * want.abs().max()


@pytest.mark.parametrize("method", ["mdlm", "vadd", "emoe"])
def test_losses_and_gradients_of_a_network(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # convolutions would round more than the bar allows
    # In single precision too
    monkeypatch.setattr(convs, "fits", lambda x, weight, stride=1: True)
    experiment = get_recipe(f"digits-{method}")
    domain = experiment.domain.build(0)
    torch.manual_seed(0)
    model = experiment.build_method(domain.space).to(DEVICE)
    for parameter in model.parameters():
        parameter.data.add_(0.05 * torch.randn_like(parameter))  # some start at zero, and would hide others
    batch = domain.batches(4, 0, device=DEVICE)(0)
    knobs = {name: torch.tensor(float(ramp(10, 100)), device=DEVICE) for name, ramp in model.ramps.items()}

    def gradients(kernels: Any) -> tuple[float, list[Tensor]]:
        monkeypatch.setattr(unet, "_fused", lambda h: kernels)
        monkeypatch.setattr(layers, "_fused", lambda x: kernels and router)
        model.zero_grad()
        loss = model(batch, knobs, Rng(0, device=DEVICE)).total
        loss.backward()
        return loss.item(), [p.grad.clone() for p in model.parameters() if p.grad is not None]

    (want, wanted), (mine, found) = gradients(None), gradients(maps)
    assert mine == pytest.approx(want, rel=1e-5)
    for a, b in zip(found, wanted, strict=True):
        assert (a - b).abs().max() <= 1e-4 * b.abs().max() + 1e-7


@pytest.mark.parametrize("chunk", [4, 7])
def test_losses_over_a_large_vocabulary(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "BLOCK", 32)  # several rounds, the last not full
    h, weight, bias = normal(2, 5, 6, seed=0), normal(75, 6, seed=1), normal(75, seed=2)
    no_mask = torch.zeros(75, device=DEVICE)
    no_mask[[0, 33]] = float("-inf")  # a symbol that is never drawn
    target = torch.tensor([[1, 2, 74, 64, 31], [32, 5, 6, 7, 8]], device=DEVICE)
    both = [normal(2, 5, seed=seed).detach() for seed in (3, 4)]

    def found(fused: Any) -> list[Tensor]:
        monkeypatch.setattr(chunks, "_fused", lambda h: fused)
        values = chunks.total_and_target(h, weight, bias + no_mask, target, chunk)
        loss = sum(((value * slope).sum() for value, slope in zip(values, both, strict=True)), h.new_zeros(()))
        return [*values, *torch.autograd.grad(loss, (h, weight, bias))]

    for a, b in zip(found(head), found(None), strict=True):
        assert (a - b).abs().max() <= 2e-5 * b.abs().max()
