"""Categorical draws down to the far tail, where single precision makes rare tokens impossible."""

from __future__ import annotations

import math

import pytest
import torch
from enumeration import ALPHA, chi_square
from scipy import stats
from steps import generator

from emoe.diffusion.categorical import draw_categorical, gumbel, gumbel_from_uniform

GAP = 20.5  # log-probability of the heavy token minus that of a rare one


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_gumbel_noise_is_finite_for_every_uniform(dtype: torch.dtype):
    u = torch.tensor([0.0, 2.0**-149, 2.0**-24, 0.5, 1 - 2.0**-24, 1.0], dtype=dtype)
    g = gumbel_from_uniform(u)
    assert g.dtype == torch.float64 and g.isfinite().all() and (g.diff() > 0).all()
    assert g[3].item() == pytest.approx(-math.log(math.log(2)), abs=1e-15)
    assert g[4].item() == pytest.approx(24 * math.log(2), abs=1e-6)


def test_gumbel_noise_has_its_law():
    g = gumbel((200_000,), generator(1))
    assert stats.kstest(g.numpy(), "gumbel_r").pvalue > ALPHA


def test_gumbel_noise_has_53_bits():
    """Uniforms of single precision are multiples of 2^-24; hardly any of these may be."""
    u = torch.exp(-torch.exp(-gumbel((100_000,), generator(2))))
    scaled = u[(u > 0.25) & (u < 0.75)] * 2.0**24
    assert ((scaled - scaled.round()).abs() > 1e-4).double().mean() > 0.999


def test_draws_follow_unnormalised_log_probabilities():
    log_probs = torch.tensor([[2.0, 0.0, -1.0, -6.0], [0.0, 0.0, 0.0, 0.0]])
    drawn = draw_categorical(log_probs.expand(100_000, 2, 4), generator(3))
    laws = torch.softmax(log_probs.double(), -1)
    for row in range(2):
        assert chi_square(torch.bincount(drawn[:, row], minlength=4), laws[row]) > ALPHA
    both = torch.bincount(drawn[:, 0] * 4 + drawn[:, 1], minlength=16)
    assert chi_square(both, laws[0][:, None] * laws[1]) > ALPHA


def test_impossible_tokens_are_never_drawn():
    log_probs = torch.full((200_000, 5), -math.inf)
    log_probs[:, 1], log_probs[:, 3] = -800.0, -803.0
    counts = torch.bincount(draw_categorical(log_probs, generator(4)), minlength=5)
    assert (counts[[0, 2, 4]] == 0).all()
    assert chi_square(counts[[1, 3]], torch.tensor([1.0, math.exp(-3.0)])) > ALPHA


def tail_hits(monkeypatch: pytest.MonkeyPatch, bits: int) -> tuple[float, float]:
    """How often tokens at a gap of 20.5 beat the heavy one, and how often they should.

    Plain draws would need 10^10 numbers for a dozen hits. Rare tokens win only if their uniform is close to 1, so
    theirs is drawn from the last 2^-18 of the unit interval (at 2^-53 resolution) and the hits count 2^-18 each.
    `bits` cuts the uniforms as a generator of that precision would.
    """
    rows, rare, zoom = 4000, 256, 2.0**-18
    plain = torch.rand

    def zoomed(shape: tuple[int, ...], **options: object) -> torch.Tensor:
        u = plain(shape, **options)
        u[..., 1:] = 1 - zoom * (1 - u[..., 1:])
        return (u * 2.0**bits).floor() / 2.0**bits

    log_probs = torch.full((rows, 1 + rare), -GAP, dtype=torch.float64)
    log_probs[:, 0] = 0
    with monkeypatch.context() as patch:
        patch.setattr(torch, "rand", zoomed)
        hits = (draw_categorical(log_probs, generator(5)) > 0).sum().item()
    expected = rows * rare * math.exp(-GAP) / zoom
    return hits, expected


def test_rare_tokens_are_drawn_as_often_as_they_should(monkeypatch: pytest.MonkeyPatch):
    """2^18 tail tokens of weight e^-20.5 hold 3e-4 of the mass; with uniforms of 24 bits they would hold none."""
    hits, expected = tail_hits(monkeypatch, 53)
    assert expected > 100 and abs(hits - expected) < 4 * math.sqrt(expected)
    assert tail_hits(monkeypatch, 24)[0] == 0
