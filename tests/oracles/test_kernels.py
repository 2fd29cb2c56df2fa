"""The Triton kernel against the plain form, on a GPU, or on a CPU by Triton's interpreter where it is installed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from interpreter import DEVICE, unchecked
from torch import Tensor
from torch.nn import functional as nnf

from emoe.backbones import unet
from emoe.recipes import get_recipe
from emoe.rng import Rng

norm: Any = unchecked("emoe.kernels.norm")


def plain(x: Tensor, gamma: Tensor, beta: Tensor, groups: int, film: Tensor | None) -> Tensor:
    v = nnf.group_norm(x, groups, gamma, beta)
    if film is not None:
        scale, shift = film[..., None, None].chunk(2, 1)
        v = (1 + scale) * v + shift
    return nnf.silu(v)


def normal(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE).requires_grad_()


def assert_equal(fused: Tensor, wanted: Tensor, leaves: list[Tensor], weight: Tensor, tolerance: float = 2e-5) -> None:
    """Values and gradients agree, in proportion to the largest entry."""
    slopes = (torch.autograd.grad((value * weight).sum(), leaves) for value in (fused, wanted))
    pairs = [(fused, wanted), *zip(*slopes, strict=True)]
    for a, b in pairs:
        assert (a - b).abs().max() <= tolerance * b.abs().max()


@pytest.mark.parametrize("with_film", [False, True])
@pytest.mark.parametrize(("batch", "channels", "groups", "side"), [(3, 72, 8, 4), (2, 144, 8, 8), (3, 24, 3, 2)])
def test_norm_film_and_silu(batch: int, channels: int, groups: int, side: int, with_film: bool) -> None:
    x = normal(batch, channels, side, side, seed=0)
    gamma, beta = normal(channels, seed=1), normal(channels, seed=2)
    film = normal(batch, 2 * channels, seed=4) if with_film else None
    leaves = [leaf for leaf in (x, gamma, beta, film) if leaf is not None]
    fused = norm.norm_silu(x, gamma, beta, groups, film)
    assert fused.is_contiguous(memory_format=torch.channels_last)
    slope = normal(*x.shape, seed=5).detach()
    assert_equal(fused, plain(x, gamma, beta, groups, film), leaves, slope)
    values = (norm.norm_silu(x, gamma, beta, groups, film) * slope for _ in range(2))
    first, second = (torch.autograd.grad(value.sum(), leaves) for value in values)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_norms_in_several_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"LARGEST": 1024, "ROUND": 0}.items():
        monkeypatch.setattr(norm, name, value)
    parts, options = norm._options(2, 36, 72, 8)
    assert (parts, options["COUNT"] > 1) == (2, True)
    assert options["COUNT"] * options["R"] < 36
    x, film = normal(2, 72, 6, 6, seed=0), normal(2, 144, seed=1)
    gamma, beta = normal(72, seed=2), normal(72, seed=3)
    fused = norm.norm_silu(x, gamma, beta, 8, film)
    assert_equal(fused, plain(x, gamma, beta, 8, film), [x, gamma, beta, film], normal(*x.shape, seed=5).detach())


def test_norms_in_half_precision() -> None:
    x, weight = normal(3, 72, 6, 6, seed=0).detach().bfloat16(), normal(3, 72, 6, 6, seed=1).detach().bfloat16()
    gamma, beta, film = normal(72, seed=2), normal(72, seed=3), normal(3, 144, seed=5).detach().bfloat16()
    halves = [x.requires_grad_(), gamma, beta, film.requires_grad_()]
    singles = [leaf.detach().float().requires_grad_() for leaf in halves]
    fused, wanted = norm.norm_silu(x, gamma, beta, 8, film), plain(*singles[:3], 8, singles[3])
    results = [fused, *torch.autograd.grad((fused * weight).sum(), halves)]
    for a, b in zip(results, [wanted, *torch.autograd.grad((wanted * weight).sum(), singles)], strict=True):
        assert (a - b).abs().max() <= 2**-7 * b.abs().max()  # one bit: the interpreter cuts, where a GPU rounds


def test_a_large_mean_does_not_drown_the_variance() -> None:
    x = (normal(2, 16, 8, 8, seed=0).detach() + 1000).requires_grad_()
    gamma, beta = torch.ones(16, device=DEVICE), torch.zeros(16, device=DEVICE)
    wanted = plain(x.double(), gamma.double(), beta.double(), 8, None)
    assert (norm.norm_silu(x, gamma, beta, 8) - wanted).abs().max() < 2e-3


@pytest.mark.parametrize("method", ["mdlm", "vadd", "emoe"])
def test_losses_and_gradients_of_a_network(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # convolutions would round more than the tolerance
    experiment = get_recipe(f"digits-{method}")
    domain = experiment.domain.build(0)
    torch.manual_seed(0)
    model = experiment.build_method(domain.space).to(DEVICE)
    for parameter in model.parameters():
        parameter.data.add_(0.05 * torch.randn_like(parameter))  # some start at zero, and would hide others
    batch = domain.batches(4, 0, device=DEVICE)(0)
    ramp = {name: torch.tensor(float(one(10, 100)), device=DEVICE) for name, one in model.ramps.items()}

    def gradients(module: Any) -> tuple[float, list[Tensor]]:
        monkeypatch.setattr(unet, "kernel_for", lambda h: module)
        model.zero_grad()
        loss = model(batch, ramp, Rng(0, device=DEVICE)).total
        loss.backward()
        return loss.item(), [p.grad.clone() for p in model.parameters() if p.grad is not None]

    (plain_loss, wanted), (loss, slopes) = gradients(None), gradients(norm)
    assert loss == pytest.approx(plain_loss, rel=1e-5)
    for a, b in zip(slopes, wanted, strict=True):
        assert (a - b).abs().max() <= 1e-4 * b.abs().max() + 1e-7
