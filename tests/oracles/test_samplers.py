"""Both samplers of masked diffusion have the exact law of the chain; the nucleus; events and calls, row by row."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from enumeration import ALPHA, Enumeration, chi_square, predict, product_of_marginals
from small import TRANSFORMER
from steps import masks, randn, scramble
from torch import Tensor

from emoe.backbones.dit import DiTConfig
from emoe.config import ConfigError
from emoe.diffusion.categorical import top_p
from emoe.exact.laws import chain_law
from emoe.experiment import customise
from emoe.methods.base import SamplerConfig
from emoe.methods.emoe import EMoEConfig
from emoe.methods.masked import MaskedDiffusion, MaskedDiffusionConfig
from emoe.methods.mdlm import MDLMConfig
from emoe.methods.sedd import SEDDConfig
from emoe.methods.vadd import VADDConfig
from emoe.recipes import get_recipe
from emoe.rng import Rng
from emoe.runs.run import Run
from emoe.runs.sampling import draw, record_calls
from emoe.types import StepEvent, TokenSpace

SPACE = TokenSpace(size=3, mask_id=1, length=3)
STEPS = 3
KINDS = ["plain", "reveal-first"]
CONFIGS = [MDLMConfig(), VADDConfig(latent=1), EMoEConfig(experts=2)]
IDS = ["mdlm", "vadd", "emoe"]


def build(config: MaskedDiffusionConfig, *, space: TokenSpace = SPACE, **other: object):
    """A small method on a DiT, in float64."""
    small = {"width": 8, "depth": 2, "heads": 2, "hidden": 8, "cond_size": 8, "time_size": 4, "latent_hidden": 8}
    sizes = DiTConfig(**(small | {"dropout": 0.0, "dispatch": "loop"} | other))
    method = scramble(config.build(space, sizes).double(), 23).eval()
    with torch.no_grad():  # blocks that add much, and no symbol that is drawn nearly always
        method.backbone.head.bias.zero_()
        method.backbone.trunk.adaln.bias[:8] = 0
        for block in method.backbone.trunk.blocks:
            block.adaln.bias.view(6, 8)[[2, 5]] = 1
    return method


def sampler(kind: str, nucleus: float = 1.0) -> SamplerConfig:
    return SamplerConfig(kind=kind, nucleus=nucleus)


def watched(method: MaskedDiffusion, kind: str, x: Tensor, steps: int):
    """Rows, events, and the number of rows of every network call."""
    events: list[StepEvent] = []
    with record_calls(method.backbone) as shapes:
        rows = method.sample(x, steps, Rng(3), sampler=sampler(kind), on_step=events.append)
    return rows, events, [shape[0] for shape in shapes]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_samples_follow_the_enumerated_chain(config: MaskedDiffusionConfig, kind: str):
    """V = 3, L = 3, T = 3, by chi-square, which rejects the chain with another number of steps and independence."""
    method = build(config)
    exact = Enumeration(method)

    def law(steps: int) -> Tensor:
        if not isinstance(config, VADDConfig):
            return exact.law(steps)
        states = torch.zeros(len(exact.states)).double()
        return states.index_put((exact.index(exact.clean),), chain_law(method, steps).flatten())

    counts = exact.counts(method.sample(masks(method, 30_000), STEPS, Rng(1), sampler=sampler(kind)))
    assert chi_square(counts, law(STEPS)) > ALPHA
    assert chi_square(counts, law(1)) < 1e-9
    assert chi_square(counts, product_of_marginals(law(STEPS), 3, 3)) < 1e-9


def test_revealing_first_is_exact_where_the_network_reads_the_time():
    method = build(MDLMConfig(), time_conditioning=True)
    exact = Enumeration(method)
    counts = exact.counts(method.sample(masks(method, 30_000), 2, Rng(4), sampler=sampler("reveal-first")))
    assert chi_square(counts, exact.law(2)) > ALPHA
    assert chi_square(counts, Enumeration(build(MDLMConfig())).law(2)) < 1e-9


@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_equal_streams_reveal_the_same_positions_and_given_tokens_stay(config: MaskedDiffusionConfig):
    method = build(config)
    given = torch.tensor([[1, 1, 1], [1, 0, 1], [2, 1, 0], [0, 2, 2]]).repeat(25, 1)
    plain, other = (watched(method, kind, given, 6) for kind in KINDS)
    for a, b in zip(plain[1], other[1], strict=True):
        assert (a.step, a.time) == (b.step, b.time) and torch.equal(a.revealed, b.revealed)
    rows = other[0]
    assert torch.equal(rows[given != 1], given[given != 1]) and (rows != 1).all()
    assert torch.equal(rows, watched(method, "reveal-first", given, 6)[0])
    assert torch.equal(given[3::4], torch.tensor([[0, 2, 2]]).repeat(25, 1))  # the argument is not changed


@pytest.mark.parametrize("kind", KINDS)
def test_events_have_the_latent_of_every_row(kind: str):
    """Gates of both blocks, with expert -1 in rows that were not run; for VADD a vector, with zeros there."""
    for config in CONFIGS:
        method, n = build(config), 40
        for event in watched(method, kind, masks(method, n), 5)[1]:
            run = event.revealed.any(-1) if kind == "reveal-first" else torch.ones(n, dtype=torch.bool)
            assert run.any() and run.all() == (kind == "plain")
            if isinstance(config, MDLMConfig):
                assert event.latent is None
            elif isinstance(config, VADDConfig):
                assert event.latent.shape == (n, 1) and torch.equal(event.latent.any(-1), run)
            else:
                assert len(event.latent) == 2
                for gate in event.latent:
                    assert gate.expert.shape == gate.weight.shape == (n, 3, 1)
                    assert torch.equal((gate.expert >= 0).all((1, 2)), run) and (gate.expert[~run] == -1).all()
                    assert (gate.weight[run] == 1).all() and (gate.weight[~run] == 0).all()


@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_only_rows_with_revealed_positions_are_run(config: MaskedDiffusionConfig):
    method, n, steps = build(config), 50, 9
    given = masks(method, n)
    given[:5] = 0  # complete rows
    _, events, calls = watched(method, "plain", given, steps)
    changes = torch.stack([event.revealed.any(-1) for event in events])
    assert sum(calls) == n * steps
    _, _, calls = watched(method, "reveal-first", given, steps)
    assert sum(calls) == changes.sum() < 0.5 * n * steps and len(calls) == changes.any(-1).sum()


@pytest.mark.parametrize(
    ("config", "steps"), [(EMoEConfig(experts=2), 1), (EMoEConfig(experts=2), 4), (MDLMConfig(), 1)]
)
def test_the_head_reads_every_position_once_and_many_in_parts(monkeypatch: pytest.MonkeyPatch, config, steps):
    method, read = build(config), []
    monkeypatch.setattr("emoe.methods.masked.AT_ONCE", 50)
    inner = method.backbone.read
    monkeypatch.setattr(method.backbone, "read", lambda h: read.append(len(h)) or inner(h))
    method.sample(masks(method, 30), steps, Rng(0), sampler=sampler("reveal-first"))
    assert sum(read) == 90 and max(read) <= 50 and (read == [50, 40] or steps > 1)


def test_draw_counts_the_calls_of_a_row():
    method = build(MDLMConfig())
    assert draw(method, 20, 8, seed=1, batch=7).calls == 8
    pool = draw(method, 2_000, 8, seed=1, batch=700, sampler=sampler("reveal-first"))
    # A step of 8 reveals none of 3 tokens with probability (7/8)^3.
    assert pool.nfe == 8 and pool.calls == pytest.approx(8 * (1 - (7 / 8) ** 3), abs=0.05)


def test_evaluation_uses_the_sampler_of_the_experiment(tmp_path: Path):
    np.save(tmp_path / "rows.npy", np.arange(60).reshape(20, 3) % 6)
    settings = TRANSFORMER | {"domain.path": str(tmp_path / "rows.npy"), "eval.samples": 50, "eval.nfe": [6]}
    plain = customise(get_recipe("rows-mdlm"), settings)
    changed = customise(plain, {"eval.sampler.kind": "reveal-first", "eval.sampler.nucleus": "0.5"})
    assert changed.name == f"{plain.name} eval.sampler.kind=reveal-first eval.sampler.nucleus=0.5"
    method = plain.build_method(plain.domain.build(0).space).eval()
    values = {row.metric: row.value for row in Run(tmp_path, changed, method, 0).evaluate()}
    assert 1 <= values["network_calls"] < 4
    assert "network_calls" not in {row.metric for row in Run(tmp_path, plain, method, 0).evaluate()}


def test_unknown_options_and_methods_with_a_sampler_of_their_own_are_refused(tiny):
    with pytest.raises(ConfigError, match="nucleus: must be > 0 and <= 1"):
        SamplerConfig(nucleus=0.0)
    with pytest.raises(ConfigError, match="sampler: SEDD has a sampler of its own"):
        draw(tiny(SEDDConfig()), 4, 2, sampler=sampler("plain", 0.9))


@pytest.mark.parametrize("p", [0.05, 0.3, 0.6, 0.95])
def test_nucleus_is_the_smallest_set_of_most_likely_symbols(p: float):
    logits = 2 * randn(40, 6, dtype=torch.float32)
    logits[:, 2] = -torch.inf
    nucleus = top_p(logits, p)
    assert nucleus.dtype == torch.float64
    for row, kept in zip(torch.softmax(logits.double(), -1).tolist(), nucleus.tolist(), strict=True):
        total, inside = 0.0, set()
        for symbol in sorted(range(6), key=lambda symbol: -row[symbol]):
            if total >= p:
                break
            inside.add(symbol)
            total += row[symbol]
        assert {symbol for symbol in range(6) if kept[symbol] > -torch.inf} == inside
        assert all(kept[symbol] == pytest.approx(np.log(row[symbol]), abs=1e-12) for symbol in inside)


def test_nucleus_of_equals_takes_the_first_and_one_changes_nothing():
    equal = torch.zeros(1, 4)
    assert (top_p(equal, 0.5) > -torch.inf).tolist() == [[True, True, False, False]]
    assert (top_p(equal, 1e-9) > -torch.inf).tolist() == [[True, False, False, False]]
    assert top_p(equal, 1.0) is equal


@pytest.mark.parametrize("kind", KINDS)
def test_samples_from_the_nucleus_follow_its_law(kind: str):
    """MDLM in one step: the product over positions of its marginals, cut at p and normalised again."""
    method = build(MDLMConfig(), space=TokenSpace(size=5, mask_id=1, length=2))
    with torch.no_grad():
        probs = torch.softmax(predict(method.backbone, masks(method, 1), torch.ones(1).double()).logits[0], -1)
    nucleus = torch.softmax(top_p(probs.log(), 0.8), -1)
    assert 2 < (nucleus > 0).sum() < 8
    rows = method.sample(masks(method, 40_000), 1, Rng(5), sampler=sampler(kind, 0.8))
    counts = torch.bincount(rows[:, 0] * 5 + rows[:, 1], minlength=25)
    assert chi_square(counts, nucleus[0][:, None] * nucleus[1]) > ALPHA
    best = method.sample(masks(method, 100), 1, Rng(6), sampler=sampler(kind, 1e-6))
    assert torch.equal(best, probs.argmax(-1).expand(100, -1))
