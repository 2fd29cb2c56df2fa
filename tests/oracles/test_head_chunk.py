"""Logits in chunks and at scored positions only give the loss and gradients of all logits at once."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from steps import assert_gradients, generator, gradients, loss_at, ramp_of, randn, scramble
from torch import Tensor
from torch.nn import functional as nnf

from emoe.backbones.dit import DiTConfig
from emoe.backbones.transformer import TransformerConfig
from emoe.backbones.unet import UNetConfig
from emoe.config import ConfigError
from emoe.diffusion import head
from emoe.diffusion.head import has_room, total_and_target
from emoe.engine.fit import NumericFailure, TrainConfig, fit
from emoe.engine.optim import OptimConfig
from emoe.methods.ar import ARConfig
from emoe.methods.base import Method
from emoe.methods.bd3lm import BD3LMConfig
from emoe.methods.emoe import EMoEConfig
from emoe.methods.mdlm import MDLMConfig
from emoe.methods.sedd import SEDDConfig
from emoe.methods.vadd import VADDConfig
from emoe.rng import Rng
from emoe.routing.compare import CompareConfig
from emoe.types import Likelihood, Needs, TokenSpace

SPACE = TokenSpace(size=11, mask_id=3, length=16)
SMALL = {"width": 16, "depth": 2, "heads": 2, "hidden": 16, "time_size": 8, "dispatch": "loop"}
DIT = SMALL | {"cond_size": 8, "latent_hidden": 8, "dropout": 0.1}
UNET = {"channels": 8, "hidden": 8, "time_size": 8, "time_hidden": 16, "groups": 2, "dispatch": "loop"}
METHODS = {
    "mdlm": MDLMConfig(t_low=0.05),
    "vadd": VADDConfig(latent=3, t_low=0.05),
    "vadd-plus": VADDConfig(latent=3, draws=3, t_low=0.05),
    "emoe": EMoEConfig(experts=3, t_low=0.05),
    "emoe-vimco": EMoEConfig(experts=3, compare=CompareConfig(draws=2, credit="position"), t_low=0.05),
    "sedd": SEDDConfig(t_low=0.05),
    "bd3lm": BD3LMConfig(block=8, t_low=0.05),
    "ar": ARConfig(),
}
LIKELIHOODS = {"mdlm": "nelbo", "sedd": "nelbo", "ar": "exact", "bd3lm": "bound@3"}  # of the others iw@2,3
CASES = [(name, "dit") for name in METHODS] + [(name, "unet") for name in ("mdlm", "vadd", "emoe", "sedd")]
CASES += [(name, "transformer") for name in ("mdlm", "vadd", "emoe-vimco", "sedd")]


def build(name: str, backbone: str = "dit", dtype: torch.dtype = torch.float64, **more: object) -> Method:
    sizes = {
        "dit": DiTConfig(**DIT, causal=name == "ar", time_conditioning=name == "sedd"),
        "transformer": TransformerConfig(**SMALL),
        "unet": UNetConfig(**UNET),
    }[backbone]
    return scramble(replace(METHODS[name], **more).build(SPACE, sizes).to(dtype), 3).train()


def rows(count: int = 6) -> Tensor:
    symbols = torch.tensor([v for v in range(SPACE.size) if v != SPACE.mask_id])
    return symbols[torch.randint(10, (count, SPACE.length), generator=generator())]


@pytest.mark.parametrize("chunk", [1, 7, 30, 1_000])
@pytest.mark.parametrize("share", [1.0, 0.5, 0.77])
def test_sum_and_target_are_those_of_all_logits(share: float, chunk: int, monkeypatch: pytest.MonkeyPatch):
    """Values and gradients at scored positions, for any weights on the results, with a column of -inf."""
    monkeypatch.setattr(head, "MIN_ROWS", 1)
    h, weight, bias = (randn(*size, seed=1).requires_grad_() for size in ((6, 5, 4), (11, 4), (11,)))
    target, slopes = rows(6)[:, :5], (randn(6, 5, seed=2), randn(6, 5, seed=3))
    held = bias.masked_fill(torch.arange(11) == SPACE.mask_id, -torch.inf)
    logits, room = nnf.linear(h, weight, held), math.ceil(share * 30)
    for count in (0, 1, 7, room):
        scored = (torch.randperm(30, generator=generator(count)) < count).view(6, 5)
        values = logits.logsumexp(-1), logits.gather(-1, target[..., None]).squeeze(-1)
        want = [torch.where(scored, value, 0.0) for value in values]
        got = total_and_target(h, weight, held, target, scored, chunk, share)
        assert has_room(scored, share) is None if share == 1 else has_room(scored, share)
        sums = [sum((a * b).sum() for a, b in zip(slopes, both, strict=True)) for both in (got, want)]
        grads = [torch.autograd.grad(one, [h, weight, bias], retain_graph=True) for one in sums]
        for a, b in zip([*got, *grads[0]], [*want, *grads[1]], strict=True):
            assert torch.allclose(a, b, rtol=1e-12, atol=1e-13)
    if share < 1:
        scored = (torch.arange(30) < room + 1).view(6, 5)
        assert not has_room(scored, share)


@pytest.mark.parametrize("mask_id", [0, 3, 10])
@pytest.mark.parametrize("config", [DiTConfig(**DIT), TransformerConfig(**SMALL), UNetConfig(**UNET)])
def test_head_weights_are_those_of_read(config, mask_id: int):
    """The heads of transformer and UNet have no output for the mask; its entry is put in at -inf."""
    backbone = scramble(config.build(TokenSpace(size=11, mask_id=mask_id, length=16), Needs()).double(), 1)
    h = randn(4, 5, backbone.head.in_features)
    weight, bias = backbone.head_weights()
    logits = nnf.linear(h, weight, bias)
    assert weight.shape == (11, h.shape[-1]) and (logits[..., mask_id] == -torch.inf).all()
    assert backbone.has_mask_output == (backbone.head.out_features == 11)
    assert torch.allclose(logits, backbone.read(h), rtol=1e-13, atol=1e-13)


def test_no_value_is_read_and_shapes_are_fixed():
    """Forward and backward without data, as a captured CUDA graph needs it: on `meta` a value that is read raises."""
    with torch.device("meta"):
        h, weight = torch.zeros(512, 128, 768, requires_grad=True), torch.zeros(30_522, 768, requires_grad=True)
        bias, target = torch.zeros(30_522, requires_grad=True), torch.zeros(512, 128, dtype=torch.long)
        scored = torch.zeros(512, 128, dtype=torch.bool)
        for room in (1.0, 0.55):
            total, chosen = total_and_target(h, weight, bias, target, scored, 8_192, room)
            (total - chosen).sum().backward()
    assert total.shape == (512, 128) and h.grad.shape == h.shape and weight.grad.shape == weight.shape


@pytest.mark.parametrize("chunk", [4, 1_000])
@pytest.mark.parametrize(("name", "backbone"), CASES, ids="-".join)
def test_loss_gradients_and_likelihoods_are_those_of_the_full_head(name: str, backbone: str, chunk: int):
    """Dropout included, which draws the same noise: the network before the head is run once in both."""
    results = []
    for more in ({}, {"head_chunk": chunk}):
        method = build(name, backbone, **more)
        loss = method(rows(), ramp_of(method), Rng(1).at(2))
        likelihood = Likelihood.parse(LIKELIHOODS.get(name, "iw@2,3"))
        nll = method.eval().nll(rows(), likelihood, Rng(2))
        results.append((loss, gradients(method, loss.total), nll))
    (full, want, nll), (parts, got, other) = results
    for key in full.log:
        assert torch.allclose(full.log[key], parts.log[key], rtol=1e-12, atol=1e-13), key
    assert_gradients(got, want, 1e-12, 1e-10)
    assert torch.allclose(nll, other, rtol=1e-12) and got["backbone.head.weight"].abs().max() > 0


@pytest.mark.parametrize("name", ["mdlm", "vadd-plus", "emoe", "emoe-vimco"])
def test_clean_positions_have_exactly_no_gradient(monkeypatch: pytest.MonkeyPatch, name: str):
    method, features = build(name, head_chunk=4).eval(), []
    inner = method.scores
    monkeypatch.setattr(method, "scores", lambda h, *rest: features.append(h) or h.retain_grad() or inner(h, *rest))
    x0 = rows()
    masked = torch.rand(x0.shape, generator=generator(3)) < 0.5
    xt, t = torch.where(masked, SPACE.mask_id, x0), torch.linspace(0.1, 0.9, len(x0), dtype=torch.float64)
    loss_at(method, x0, xt, t, ramp_of(method), Rng(3)).total.backward()
    many = masked.repeat_interleave(len(features[0]) // len(x0), dim=0)
    slopes = features[0].grad
    assert (slopes[~many] == 0).all() and (slopes[many].abs().sum(-1) > 0).all()


def noted_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of rows of logits to come, forward and backward."""
    sizes: list[int] = []
    for name in ("_read", "_by_logits"):
        inner = getattr(head, name)
        monkeypatch.setattr(head, name, lambda x, *rest, inner=inner: sizes.append(len(x)) or inner(x, *rest))
    return sizes


@pytest.mark.parametrize("name", [name for name in METHODS if name != "ar"])
def test_training_computes_a_share_of_the_logits_and_the_same_step(name: str, monkeypatch: pytest.MonkeyPatch):
    results, sizes = [], noted_sizes(monkeypatch)
    monkeypatch.setattr(head, "MIN_ROWS", 16)
    for more in ({}, {"head_share": 0.75}):
        sizes.clear()
        method = build(name, head_chunk=1_000, **more)
        loss = method(rows(16), ramp_of(method), Rng(1).at(2))
        assert (loss.valid is None) == (not more) and (not more or loss.valid)
        results.append((loss.total, gradients(method, loss.total)))
        draws = {"vadd-plus": 3, "emoe-vimco": 2}.get(name, 1)
        assert sizes[0] == math.ceil((0.75 if more else 1) * draws * 16 * SPACE.length)
        sizes.clear()
        method(rows(5), ramp_of(method), Rng(1).at(2))
        assert sizes == [draws * 5 * SPACE.length]  # too few rows to rely on their times
        sizes.clear()
        method.eval().nll(rows(), Likelihood.parse("nelbo" if name in ("sedd", "mdlm") else "bound@1"), Rng(2))
        assert sum(sizes) == 6 * SPACE.length  # likelihoods may have more masks
    assert torch.allclose(results[0][0], results[1][0], rtol=1e-12)
    assert_gradients(results[1][1], results[0][1], 1e-12, 1e-10)


@pytest.mark.parametrize("name", [name for name in METHODS if name != "ar"])
def test_a_step_with_too_many_masks_is_refused_and_ends_training(name: str, tmp_path: Path):
    """The loss is finite, `valid` is false, no weight changes, and the failure names the option to raise."""
    method = build(name, dtype=torch.float32, head_chunk=1_000, head_share=0.1)
    loss = method(rows(64), ramp_of(method, torch.float32), Rng(1))
    assert loss.total.isfinite() and not loss.valid
    before = [p.detach().clone() for p in method.parameters()]
    train = TrainConfig(steps=40, batch=64, log_every=5, save_every=100, ema=0.9)
    with pytest.raises(NumericFailure, match=r"20 steps were refused: more than 0.1 of .* raise method.head_share"):
        fit(method, lambda step: rows(64), method.ramps, optim=OptimConfig(), train=train, rng=Rng(0), run_dir=tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(before, method.parameters(), strict=True))


def test_no_more_than_a_chunk_of_logits_is_computed_at_a_time(monkeypatch: pytest.MonkeyPatch):
    method, sizes = build("mdlm", head_chunk=40), noted_sizes(monkeypatch)
    monkeypatch.setattr(method.backbone, "read", None)
    method(rows(), {}, Rng(0)).total.backward()
    assert sizes == [40, 40, 16] * 2  # forward, then backward


def test_half_precision_autocast_stays_near():
    results = []
    for more in ({}, {"head_chunk": 40}):
        method = build("mdlm", dtype=torch.float32, **more).eval()
        with torch.autocast("cpu", torch.bfloat16):
            loss = method(rows(), {}, Rng(1)).total
        loss.backward()
        results.append((loss, method.backbone.head.weight.grad, method.backbone.trunk.token.weight.grad))
    for full, parts in zip(*results, strict=True):
        assert parts.dtype == torch.float32 and (full - parts).abs().max() < 0.02 * full.abs().max()


def test_options_without_effect_are_refused() -> None:
    with pytest.raises(ConfigError, match="head_share: has no effect without head_chunk"):
        MDLMConfig(head_share=0.5)
    with pytest.raises(ConfigError, match="head_share: has no effect without masks"):
        ARConfig(head_chunk=8, head_share=0.5)
