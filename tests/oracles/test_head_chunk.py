"""Oracle 16: the head read in parts gives the loss and gradients of all logits at once; clean positions get none."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as nnf

from emoe.backbones.dit import DiTConfig
from emoe.backbones.transformer import TransformerConfig
from emoe.config import ConfigError
from emoe.diffusion import chunks
from emoe.diffusion.chunks import masked_total_and_target, total_and_target
from emoe.experiment import customise
from emoe.methods.ar import ARConfig
from emoe.methods.base import MaskedDiffusion, MaskedDiffusionConfig, MethodConfig, log_token_of
from emoe.methods.bd3lm import BD3LMConfig
from emoe.methods.emoe import EMoEConfig
from emoe.methods.mdlm import MDLMConfig
from emoe.methods.sedd import SEDDConfig
from emoe.methods.vadd import VADDConfig
from emoe.recipes import get_recipe
from emoe.rng import Rng
from emoe.types import Convention, TokenSpace

SPACE = TokenSpace(size=11, mask_id=3, length=5)
CONFIGS = {
    "mdlm": MDLMConfig,
    "vadd": lambda **more: VADDConfig(latent=3, **more),
    "vadd-3": lambda **more: VADDConfig(latent=3, draws=3, **more),
    "emoe": lambda **more: EMoEConfig(experts=3, **more),
    "emoe-vimco": lambda **more: EMoEConfig(experts=3, estimator="vimco", draws=2, credit="position", **more),
}


@pytest.fixture
def build(scramble):
    def make(config: MaskedDiffusionConfig, dtype: torch.dtype = torch.float64) -> MaskedDiffusion:
        sizes = {"width": 16, "depth": 2, "heads": 2, "hidden": 16, "cond_size": 8, "time_size": 8, "latent_hidden": 8}
        return scramble(config.build(SPACE, DiTConfig(**sizes, dropout=0.1, dispatch="loop")).to(dtype), 3)

    return make


def rows(count: int = 6) -> Tensor:
    symbols = torch.tensor([v for v in range(SPACE.size) if v != SPACE.mask_id])
    return symbols[torch.randint(10, (count, SPACE.length), generator=torch.Generator().manual_seed(0))]


def knobs_of(method: MaskedDiffusion) -> dict[str, Tensor]:
    return {name: torch.tensor(ramp(3, 10), dtype=torch.float64) for name, ramp in method.ramps.items()}


@pytest.mark.parametrize("chunk", [1, 7, 30, 1_000])
def test_sum_and_target_are_those_of_all_logits(chunk: int):
    """Values and gradients for any weights on the results, with a column of -inf."""
    draw = torch.Generator().manual_seed(1)
    h, weight, bias, a, b = (
        torch.randn(size, generator=draw, dtype=torch.float64) for size in ((6, 5, 4), (11, 4), (11,), (6, 5), (6, 5))
    )
    inputs = [h.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()]
    held = bias.masked_fill(torch.arange(11) == SPACE.mask_id, -torch.inf)
    logits = nnf.linear(h, weight, held)
    want = logits.logsumexp(-1), logits.gather(-1, rows()[..., None]).squeeze(-1)
    got = total_and_target(h, weight, held, rows(), chunk)
    for one, other in zip(got, want, strict=True):
        assert torch.allclose(one, other, rtol=1e-14, atol=1e-14)
    found = [torch.autograd.grad((a * x).sum() + (b * y).sum(), inputs, retain_graph=True) for x, y in (got, want)]
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("chunk", [4, 1_000])
@pytest.mark.parametrize("name", CONFIGS)
def test_loss_and_every_gradient_are_those_of_the_full_head(build, name: str, chunk: int):
    """Dropout included, which draws the same noise: the network before the head is run once in both."""
    found = []
    for more in ({}, {"head_chunk": chunk}):
        method = build(CONFIGS[name](t_low=0.05, **more)).train()
        loss = method(rows(), knobs_of(method), Rng(1).at(2))
        grads = torch.autograd.grad(loss.total, list(method.parameters()), allow_unused=True)
        found.append((loss, grads, [label for label, _ in method.named_parameters()]))
    (full, want, labels), (parts, got, _) = found
    for key in ("loss", "recon", "kl"):
        assert torch.allclose(full.log[key], parts.log[key], rtol=1e-12, atol=1e-13)
    for label, a, b in zip(labels, want, got, strict=True):
        assert (a is None) == (b is None), label
        assert a is None or torch.allclose(a, b, rtol=1e-10, atol=1e-12), label
    assert next(g for label, g in zip(labels, got, strict=True) if label.endswith("head.weight")).abs().max() > 0


@pytest.mark.parametrize(
    ("config", "causal"), [(ARConfig, True), (functools.partial(BD3LMConfig, block=5, t_low=0.05), False)]
)
def test_methods_from_left_to_right(scramble, config: Callable[..., MethodConfig], causal: bool):
    sizes = {"width": 16, "depth": 2, "heads": 2, "hidden": 16, "cond_size": 8, "time_size": 8, "dropout": 0.1}
    found = []
    for more in ({}, {"head_chunk": 7}):
        method = scramble(config(**more).build(SPACE, DiTConfig(**sizes, causal=causal)).double(), 3).train()
        loss = method(rows(), {}, Rng(1).at(2)).total
        found.append([loss, *torch.autograd.grad(loss, list(method.parameters()), allow_unused=True)])
        convention = Convention.parse("exact" if causal else "bound@3")
        found[-1].append(method.eval().nll_bound(rows(), convention, Rng(2)))
    for a, b in zip(*found, strict=True):
        assert (a is None) == (b is None) and (a is None or torch.allclose(a, b, rtol=1e-10, atol=1e-12))


@pytest.mark.parametrize("name", CONFIGS)
def test_likelihoods_are_those_of_the_full_head(build, name: str):
    full, parts = (build(CONFIGS[name](**more)).eval() for more in ({}, {"head_chunk": 4}))
    for text in ("objective", "bound@3", "iw@2,3"):
        a, b = (method.nll_bound(rows(), Convention.parse(text), Rng(2)) for method in (full, parts))
        assert torch.allclose(a, b, rtol=1e-12), text


@pytest.mark.parametrize("name", CONFIGS)
def test_clean_positions_have_exactly_no_gradient(build, monkeypatch: pytest.MonkeyPatch, name: str):
    method = build(CONFIGS[name](head_chunk=4)).eval()
    draws = getattr(method.config, "draws", 1)
    kept: list[Tensor] = []
    inner = method.backbone.features

    def features(*args, **more):
        h, *rest = inner(*args, **more)
        h.retain_grad()
        kept.append(h)
        return h, *rest

    monkeypatch.setattr(method.backbone, "features", features)
    x0 = rows()
    masked = torch.rand(x0.shape, generator=torch.Generator().manual_seed(3)) < 0.5
    xt, t = torch.where(masked, SPACE.mask_id, x0), torch.linspace(0.1, 0.9, len(x0), dtype=torch.float64)
    out = method.objective(x0, xt, t, knobs_of(method), Rng(3))
    out.loss.sum().backward()
    many = masked.repeat_interleave(draws, dim=0)
    assert (kept[0].grad[~many] == 0).all() and (kept[0].grad[many].abs().sum(-1) > 0).all()
    if draws == 1:
        log_token = log_token_of(method.infer(x0, xt, t, knobs_of(method), Rng(3)), x0)
        assert (log_token[~masked] == 0).all() and (log_token[masked] < 0).all()


@pytest.mark.parametrize("share", [0.5, 0.77])
def test_logits_of_masked_positions_alone(share: float, monkeypatch: pytest.MonkeyPatch):
    """Values and gradients at masked positions are those of all logits; where there is no room for them, NaN."""
    monkeypatch.setattr(chunks, "LEAST_ROWS", 1)
    draw = torch.Generator().manual_seed(1)
    sizes = (6, 5, 4), (11, 4), (11,), (6, 5), (6, 5)
    h, weight, bias, a, b = (torch.randn(size, generator=draw, dtype=torch.float64) for size in sizes)
    inputs = [h.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()]
    room = math.ceil(share * 30)
    for count in (0, 1, 7, room):
        masked = torch.zeros(30, dtype=torch.bool)
        masked[torch.randperm(30, generator=draw)[:count]] = True
        masked = masked.view(6, 5)
        got = masked_total_and_target(h, weight, bias, rows(), masked, share, 4)
        want = [torch.where(masked, one, 0.0) for one in total_and_target(h, weight, bias, rows(), 1_000)]
        for one, other in zip(got, want, strict=True):
            assert torch.allclose(one, other, rtol=1e-14, atol=1e-14)
        found = [torch.autograd.grad((a * x).sum() + (b * y).sum(), inputs) for x, y in (got, want)]
        for one, other in zip(*found, strict=True):
            assert torch.allclose(one, other, rtol=1e-12, atol=1e-13)
    masked = (torch.arange(30) < room + 1).view(6, 5)
    assert all(one.isnan().all() for one in masked_total_and_target(h, weight, bias, rows(), masked, share, 4))


SHARED = CONFIGS | {
    "sedd": SEDDConfig,
    "bd3lm": lambda **more: BD3LMConfig(block=5, **more),
}


@pytest.mark.parametrize("name", SHARED)
def test_training_makes_a_share_of_the_logits_and_the_same_step(
    scramble, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"width": 16, "depth": 2, "heads": 2, "hidden": 16, "cond_size": 8, "time_size": 8, "latent_hidden": 8}
    network = DiTConfig(**sizes, dropout=0.1, dispatch="loop", time_conditioning=name == "sedd")
    found, seen, inner = [], [], chunks._logits
    monkeypatch.setattr(chunks, "LEAST_ROWS", 16)
    monkeypatch.setattr(chunks, "_logits", lambda h, *rest: seen.append(len(h)) or inner(h, *rest))
    for more in ({}, {"head_share": 0.75}):
        seen.clear()
        method = scramble(SHARED[name](t_low=0.05, head_chunk=1_000, **more).build(SPACE, network).double(), 3).train()
        knobs = {key: torch.tensor(ramp(3, 10), dtype=torch.float64) for key, ramp in method.ramps.items()}
        loss = method(rows(16), knobs, Rng(1).at(2)).total
        found.append([loss, *torch.autograd.grad(loss, list(method.parameters()), allow_unused=True)])
        all_rows = 16 * getattr(method.config, "draws", 1)
        assert seen[0] == (math.ceil(0.75 * all_rows * SPACE.length) if more else all_rows * SPACE.length)
        seen.clear()
        method(rows(5), knobs, Rng(1).at(2))
        assert seen == [all_rows // 16 * 5 * SPACE.length]  # too few rows to count on their times
        seen.clear()
        method.eval().nll_bound(rows(), Convention.parse("nelbo" if name in ("sedd", "mdlm") else "bound@1"), Rng(2))
        assert sum(seen) == 6 * SPACE.length  # likelihoods may have more masks
    for one, other in zip(*found, strict=True):
        assert (one is None) == (other is None) and (one is None or torch.allclose(one, other, rtol=1e-10, atol=1e-12))
    narrow = scramble(SHARED[name](head_chunk=1_000, head_share=0.1).build(SPACE, network).double(), 3).train()
    assert "more than 0.1 of" in narrow.refusals() and "raise method.head_share" in narrow.refusals()
    assert SHARED[name](head_chunk=1_000).build(SPACE, network).refusals() is None
    knobs = {key: torch.tensor(ramp(3, 10), dtype=torch.float64) for key, ramp in narrow.ramps.items()}
    assert narrow(rows(16), knobs, Rng(1).at(2)).total.isnan()


def test_what_a_share_does_not_go_with() -> None:
    with pytest.raises(ConfigError, match="head_share: has no meaning without head_chunk"):
        MDLMConfig(head_share=0.5)
    with pytest.raises(ConfigError, match="head_share: has no meaning without masks"):
        ARConfig(head_chunk=8, head_share=0.5)


def test_no_more_than_a_chunk_of_logits_is_made_at_a_time(build, monkeypatch: pytest.MonkeyPatch):
    method, seen = build(MDLMConfig(head_chunk=8)), []
    inner = chunks._logits
    monkeypatch.setattr(chunks, "_logits", lambda h, *rest: seen.append(len(h)) or inner(h, *rest))
    monkeypatch.setattr(method.backbone, "read", None)
    method(rows(), {}, Rng(0)).total.backward()
    assert seen == [8, 8, 8, 6] * 2  # forward, then backward


def test_it_reads_no_value_and_has_fixed_shapes():
    """Forward and backward without data, as a captured CUDA graph needs it: on `meta` a value that is read raises."""
    with torch.device("meta"):
        h, weight = torch.zeros(512, 128, 768, requires_grad=True), torch.zeros(30_522, 768, requires_grad=True)
        bias, target = torch.zeros(30_522, requires_grad=True), torch.zeros(512, 128, dtype=torch.long)
        total, chosen = total_and_target(h, weight, bias, target, 8_192)
        (total - chosen).sum().backward()
        masked = torch.zeros(512, 128, dtype=torch.bool)
        total, chosen = masked_total_and_target(h, weight, bias, target, masked, 0.55, 8_192)
        (total - chosen).sum().backward()
    assert total.shape == (512, 128) and h.grad.shape == h.shape and weight.grad.shape == weight.shape


def test_half_precision_autocast_stays_near(build):
    losses = []
    for more in ({}, {"head_chunk": 8}):
        method = build(MDLMConfig(t_low=0.1, **more), torch.float32).eval()
        with torch.autocast("cpu", torch.bfloat16):
            loss = method(rows(), {}, Rng(1)).total
        loss.backward()
        losses.append((loss, method.backbone.head.weight.grad, method.backbone.trunk.token.weight.grad))
    for full, parts in zip(*losses, strict=True):
        assert parts.dtype == torch.float32
        assert (full - parts).abs().max() < 0.02 * full.abs().max()


def test_backbones_without_features_and_summed_blocks_refuse_it():
    with pytest.raises(ConfigError, match="backbone: 'transformer' has no 'head_chunk'"):
        customise(get_recipe("rows-mdlm"), {"method.head-chunk": "64"})
    assert not list(TransformerConfig().refusals(MDLMConfig().wants()))
    with pytest.raises(ConfigError, match="head_chunk: summing the last block needs all logits at once"):
        EMoEConfig(head_chunk=64, last_block="summed")
