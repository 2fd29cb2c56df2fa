"""Samplers that do less work have the law of the plain one; the nucleus; calls are counted row by row."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from enumeration import ALPHA, Enumeration, chi_square, product_of_marginals
from torch import Tensor

from emoe.backbones.dit import DiTConfig
from emoe.config import ConfigError
from emoe.diffusion.samplers import top_p
from emoe.evaluation.evaluate import evaluate
from emoe.evaluation.pools import count_calls, draw_pool
from emoe.experiment import customise
from emoe.methods.base import MaskedDiffusion, MaskedDiffusionConfig, SamplerConfig
from emoe.methods.emoe import EMoEConfig
from emoe.methods.mdlm import MDLMConfig
from emoe.methods.sedd import SEDDConfig
from emoe.methods.vadd import VADDConfig
from emoe.recipes import get_recipe
from emoe.rng import Rng
from emoe.types import StepEvent, TokenSpace

SPACE = TokenSpace(size=3, mask_id=1, length=3)
STEPS = 3
KINDS = ["plain", "cached", "reveal-first"]
CONFIGS = [MDLMConfig(), VADDConfig(latent=2), EMoEConfig(experts=2)]
IDS = ["mdlm", "vadd", "emoe"]


@pytest.fixture
def build(scramble):
    """A factory of small methods on a DiT, in float64, with weights of their own."""

    def make(config: MaskedDiffusionConfig, *, space: TokenSpace = SPACE, seed: int = 23, **other: object):
        small = {"width": 8, "depth": 2, "heads": 2, "hidden": 8, "cond_size": 8, "time_size": 4, "latent_hidden": 8}
        sizes = DiTConfig(**(small | {"dropout": 0.0, "dispatch": "loop"} | other))
        method = scramble(config.build(space, sizes).double(), seed).eval()
        with torch.no_grad():  # blocks that add much, and no symbol that always wins
            method.backbone.head.bias.zero_()
            method.backbone.trunk.adaln.bias[:8] = 0
            for block in method.backbone.trunk.blocks:
                block.adaln.bias.view(6, 8)[[2, 5]] = 1
        return method

    return make


def sampler(kind: str, nucleus: float = 1.0) -> SamplerConfig:
    return SamplerConfig(kind=kind, nucleus=nucleus)


def counts_of(exact: Enumeration, rows: Tensor) -> Tensor:
    return torch.bincount(exact.index(rows), minlength=len(exact.states))


def watched(method: MaskedDiffusion, kind: str, n: int, steps: int, given: Tensor | None = None):
    """Rows, events, and the rows of all network calls."""
    events: list[StepEvent] = []
    with count_calls(method.backbone) as count:
        rows = method.sample(n, steps, Rng(3), given=given, on_step=events.append, sampler=sampler(kind))
    return rows, events, count


# --- Oracle 9: one law -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("config", [MDLMConfig(), EMoEConfig(experts=2)], ids=["mdlm", "emoe"])
def test_samples_follow_the_enumerated_chain(build, config: MaskedDiffusionConfig, kind: str):
    """V = 3, L = 3, T = 3, by chi-square, which rejects the chain with another number of steps and independence."""
    method = build(config)
    exact = Enumeration(method)
    law = exact.law(STEPS)
    counts = counts_of(exact, method.sample(30_000, STEPS, Rng(1), sampler=sampler(kind)))
    assert chi_square(counts, law) > ALPHA
    assert chi_square(counts, exact.law(1)) < 1e-9
    assert chi_square(counts, product_of_marginals(law, 3, 3)) < 1e-9


def test_cached_chain_with_a_kept_latent_has_the_law_of_fresh_ones(build):
    """The chain of (row, latent) in which z stays as long as the row does, summed over all rows and routes."""
    exact = Enumeration(build(EMoEConfig(experts=2)))
    states, start = len(exact.states), exact.index(torch.tensor([SPACE.mask_id] * 3))
    with torch.no_grad():
        parts = [exact.component(i / STEPS, 1 - (i - 1) / STEPS, 1 - i / STEPS) for i in (3, 2, 1)]
    prior = parts[0][0].exp()  # p(z | x), at no time in particular
    assert all(torch.equal(log_route.exp(), prior) for log_route, _ in parts)
    stays = torch.eye(states, dtype=torch.bool)

    def law(keeps: Tensor) -> Tensor:
        """Law of the rows if z is kept wherever `keeps` (x, x_s) says so and drawn anew elsewhere."""
        pairs = torch.zeros(states, prior.shape[1], dtype=torch.float64)
        pairs[start] = prior[start]
        for _, move in parts:
            flow = pairs[:, :, None] * move  # x, z, x_s
            fresh = (flow * ~keeps[:, None]).sum((0, 1))
            pairs = (flow * keeps[:, None]).sum(0).T + fresh[:, None] * prior
        return pairs.sum(1)

    assert torch.allclose(law(stays), exact.law(STEPS), atol=1e-14)
    assert torch.allclose(law(torch.zeros_like(stays)), exact.law(STEPS), atol=1e-14)
    assert (law(torch.ones_like(stays)) - exact.law(STEPS)).abs().sum() > 0.1  # kept although tokens were drawn


@pytest.mark.parametrize("steps", [1, 5, 12])
def test_without_a_latent_cached_samples_are_the_plain_ones(build, steps: int):
    method = build(MDLMConfig())
    for nucleus in (1.0, 0.7):
        plain, cached = (method.sample(300, steps, Rng(2), sampler=sampler(k, nucleus)) for k in ("plain", "cached"))
        assert torch.equal(plain, cached)


def test_a_cached_row_keeps_the_prediction_it_has(build, monkeypatch: pytest.MonkeyPatch):
    """E-MoE: a row is handed to the network exactly where it differs from what the network saw of it last."""
    method = build(EMoEConfig(experts=2))
    seen: list[Tensor] = []
    inner = method.denoise
    monkeypatch.setattr(method, "denoise", lambda x, t, rng: seen.append(x) or inner(x, t, rng))
    rows, events, _ = watched(method, "cached", 40, 9)
    before = torch.full_like(rows, SPACE.mask_id)
    run = torch.ones(40, dtype=torch.bool)
    calls = iter(seen)
    for event in events:
        if run.any():
            assert torch.equal(next(calls), before[run])
        run = (event.x != before).any(-1) & (event.x == SPACE.mask_id).any(-1)
        before = event.x
    assert next(calls, None) is None


@pytest.mark.parametrize("kind", ["cached", "reveal-first"])
@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_equal_streams_reveal_the_same_positions_and_given_tokens_stay(build, config: MaskedDiffusionConfig, kind: str):
    method = build(config)
    given = torch.tensor([[1, 1, 1], [1, 0, 1], [2, 1, 0], [0, 2, 2]]).repeat(25, 1)
    plain, other = (watched(method, one, 100, 6, given) for one in ("plain", kind))
    for a, b in zip(plain[1], other[1], strict=True):
        assert (a.step, a.time) == (b.step, b.time) and torch.equal(a.revealed, b.revealed)
    rows = other[0]
    assert torch.equal(rows[given != 1], given[given != 1]) and (rows != 1).all()
    assert torch.equal(rows, watched(method, kind, 100, 6, given)[0])
    assert torch.equal(given[3::4], torch.tensor([[0, 2, 2]]).repeat(25, 1))  # the caller's rows are left alone


def test_revealing_first_is_exact_where_the_network_reads_the_time(build):
    method = build(MDLMConfig(), time_conditioning=True)
    exact = Enumeration(method)
    counts = counts_of(exact, method.sample(30_000, 2, Rng(4), sampler=sampler("reveal-first")))
    assert chi_square(counts, exact.law(2)) > ALPHA
    still = Enumeration(build(MDLMConfig()))
    assert chi_square(counts, still.law(2)) < 1e-9


# --- What is refused ---------------------------------------------------------------------------------------------


def test_cached_needs_a_network_without_time(build, tiny):
    for method in (build(MDLMConfig(), time_conditioning=True), tiny(EMoEConfig(experts=2), timeless=True)):
        with pytest.raises(ConfigError, match="cached reuses a prediction at a later time.*time_conditioning=false"):
            method.sample(2, 2, Rng(0), sampler=sampler("cached"))


def test_revealing_first_needs_features(tiny):
    with pytest.raises(ConfigError, match="reveal-first reads single positions, which Transformer cannot"):
        tiny(MDLMConfig()).sample(2, 2, Rng(0), sampler=sampler("reveal-first"))


def test_revealing_first_needs_to_know_the_prior(build):
    method = build(MDLMConfig())
    method.prior = lambda xt, rng: MaskedDiffusion.prior(method, xt, rng)  # a method of one's own that lacks it
    with pytest.raises(ConfigError, match=r"MDLM has no prior\(\), which reveal-first needs; use plain"):
        method.sample(2, 2, Rng(0), sampler=sampler("reveal-first"))


def test_options_out_of_range_and_methods_with_a_sampler_of_their_own(tiny):
    for nucleus in (0.0, -0.5, 1.5):
        with pytest.raises(ConfigError, match="nucleus: must be > 0 and <= 1"):
            SamplerConfig(nucleus=nucleus)
    with pytest.raises(ConfigError, match="eval.sampler.kind: got 'greedy'"):
        customise(get_recipe("rows-mdlm"), {"eval.sampler.kind": "greedy"})
    with pytest.raises(ConfigError, match="sampler: SEDD has a sampler of its own"):
        draw_pool(tiny(SEDDConfig()), 4, 2, seed=0, sampler=sampler("plain", 0.9))


# --- Work --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_calls_are_those_that_a_row_needs(build, config: MaskedDiffusionConfig):
    method, n, steps = build(config), 50, 9
    given = torch.full((n, 3), SPACE.mask_id)
    given[:5] = 0  # nothing to do for these
    changes = torch.stack([event.revealed.any(-1) for event in watched(method, "plain", n, steps, given)[1]])
    rows, events, count = watched(method, "reveal-first", n, steps, given)
    assert count.rows == changes.sum() and count.calls == changes.any(-1).sum()
    rows, events, count = watched(method, "cached", n, steps, given)
    open_after = torch.stack([(event.x == SPACE.mask_id).any(-1) for event in events])
    assert count.rows == (n - 5) + (changes & open_after).sum()
    assert count.rows < 0.5 * n * steps
    assert watched(method, "plain", n, steps, given)[2].rows == n * steps


@pytest.mark.parametrize("steps", [1, 4])
def test_the_head_reads_every_position_once(build, monkeypatch: pytest.MonkeyPatch, steps: int):
    method, read = build(EMoEConfig(experts=2)), []
    inner = method.backbone.read
    monkeypatch.setattr(method.backbone, "read", lambda h: read.append(len(h)) or inner(h))
    method.sample(30, steps, Rng(0), sampler=sampler("reveal-first"))
    assert sum(read) == 90 and len(read) <= steps


def test_many_positions_are_read_in_parts(build, monkeypatch: pytest.MonkeyPatch):
    method, read = build(MDLMConfig()), []
    monkeypatch.setattr("emoe.diffusion.samplers.READ_AT_ONCE", 16)
    inner = method.backbone.read
    monkeypatch.setattr(method.backbone, "read", lambda h: read.append(len(h)) or inner(h))
    method.sample(10, 1, Rng(0), sampler=sampler("reveal-first"))
    assert read == [16, 14]


def test_pools_say_how_many_calls_a_row_took(build):
    method = build(MDLMConfig())
    assert draw_pool(method, 20, 8, seed=1, batch=7).calls == 8
    lazy, cached = (draw_pool(method, 2_000, 8, seed=1, batch=700, sampler=sampler(k)) for k in KINDS[:0:-1])
    assert lazy.nfe == cached.nfe == 8 and lazy.calls == cached.calls  # a call per change
    # A step of 8 reveals none of 3 tokens with probability (7/8)^3.
    assert lazy.calls == pytest.approx(8 * (1 - (7 / 8) ** 3), abs=0.05)
    assert torch.equal(cached.samples, draw_pool(method, 2_000, 8, seed=1, batch=700).samples)


def test_evaluation_uses_the_sampler_and_a_changed_recipe_says_so(tmp_path: Path):
    np.save(tmp_path / "rows.npy", np.arange(60).reshape(20, 3) % 6)
    small = {
        "width": "8",
        "hidden": "8",
        "heads": "2",
        "depth": "1",
        "time-size": "8",
        "cond-size": "4",
        "dropout": "0",
    }
    settings = {"backbone": "dit", "domain.path": str(tmp_path / "rows.npy")}
    settings |= {f"backbone.{name}": value for name, value in small.items()}
    settings |= {"eval.samples": "50", "eval.nfe": "6"}
    plain = customise(get_recipe("rows-mdlm"), settings)
    changed = customise(plain, {"eval.sampler.kind": "cached", "eval.sampler.nucleus": "0.5"})
    assert changed.eval.sampler == sampler("cached", 0.5)
    assert changed.name == f"{plain.name} eval.sampler.kind=cached eval.sampler.nucleus=0.5"
    assert customise(plain, {"eval.samples": "60", "eval.nfe": "2", "eval.batch": "9"}).name == plain.name
    domain = plain.domain.build(0)
    method = plain.build_method(domain.space).eval()
    names = {row.metric: row.value for row in evaluate(method, domain, changed)}
    assert 1 <= names["network_calls"] < 4
    assert "network_calls" not in {row.metric for row in evaluate(method, domain, plain)}


# --- Nucleus -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [0.05, 0.3, 0.6, 0.95])
def test_nucleus_is_the_smallest_set_of_most_likely_symbols(p: float):
    logits = torch.randn(40, 6, generator=torch.Generator().manual_seed(0)) * 2
    logits[:, 2] = -torch.inf
    kept = top_p(logits, p)
    assert kept.dtype == torch.float64
    for row, found in zip(torch.softmax(logits.double(), -1).tolist(), kept.tolist(), strict=True):
        total, inside = 0.0, set()
        for symbol in sorted(range(6), key=lambda symbol: -row[symbol]):
            if total >= p:
                break
            inside.add(symbol)
            total += row[symbol]
        assert {symbol for symbol in range(6) if found[symbol] > -torch.inf} == inside
        assert all(found[symbol] == pytest.approx(np.log(row[symbol]), abs=1e-12) for symbol in inside)


def test_nucleus_of_equals_takes_the_first_and_one_changes_nothing():
    equal = torch.zeros(1, 4)
    assert (top_p(equal, 0.5) > -torch.inf).tolist() == [[True, True, False, False]]
    assert (top_p(equal, 1e-9) > -torch.inf).tolist() == [[True, False, False, False]]
    assert top_p(equal, 1.0) is equal


@pytest.mark.parametrize("kind", KINDS)
def test_samples_from_the_nucleus_follow_its_law(build, kind: str):
    """MDLM in one step: the product over positions of its marginals, cut at p and brought back to sum one."""
    method = build(MDLMConfig(), space=TokenSpace(size=5, mask_id=1, length=2))
    mask, p = torch.full((1, 2), 1), 0.8
    with torch.no_grad():
        probs = torch.softmax(method.backbone(mask, torch.ones(1).double()).logits[0], -1)
    kept = torch.softmax(top_p(probs.log(), p), -1)
    assert 2 < (kept > 0).sum() < 8
    rows = method.sample(40_000, 1, Rng(5), sampler=sampler(kind, p))
    counts = torch.bincount(rows[:, 0] * 5 + rows[:, 1], minlength=25)
    assert chi_square(counts, kept[0][:, None] * kept[1]) > ALPHA
    best = method.sample(100, 1, Rng(6), sampler=sampler(kind, 1e-6))
    assert torch.equal(best, probs.argmax(-1).expand(100, -1))


@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_the_default_is_plain_without_a_nucleus(build, config: MaskedDiffusionConfig):
    method = build(config)
    assert torch.equal(method.sample(50, 3, Rng(7)), method.sample(50, 3, Rng(7), sampler=SamplerConfig()))
