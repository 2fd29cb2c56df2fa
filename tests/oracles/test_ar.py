"""AR: its law over all rows, the sampler, continuation, calls, refusals, and learning."""

from __future__ import annotations

import pytest
import torch
from enumeration import ALPHA, all_rows, chi_square
from torch import Tensor

from emoe.backbones.dit import DiTConfig
from emoe.backbones.transformer import TransformerConfig
from emoe.config import ConfigError
from emoe.evaluation.likelihood import default_conventions, estimate_nll, passes
from emoe.evaluation.pools import draw_pool
from emoe.experiment import customise
from emoe.methods.ar import AR, ARConfig
from emoe.recipes import get_recipe
from emoe.rng import Rng
from emoe.types import Convention, StepEvent, TokenSpace

SPACE = TokenSpace(size=3, mask_id=1, length=4)
CLEAN = all_rows([0, 2], SPACE.length)
EXACT = Convention.parse("exact")


def sizes(**other: object) -> DiTConfig:
    small = {"width": 8, "depth": 2, "heads": 2, "hidden": 8, "cond_size": 4, "time_size": 4, "dropout": 0.0}
    return DiTConfig(**(small | {"causal": True} | other))


@pytest.fixture
def method(scramble) -> AR:
    return scramble(ARConfig().build(SPACE, sizes()).double(), 5)


def number(rows: Tensor) -> Tensor:
    """Place of clean rows in CLEAN."""
    return ((rows == 2).long() * torch.tensor([8, 4, 2, 1])).sum(-1)


def law_of(method: AR) -> Tensor:
    """p(x) of every clean row, from the network asked for each prefix apart."""
    law = torch.ones(len(CLEAN), dtype=torch.float64)
    for n, row in enumerate(CLEAN.tolist()):
        for place, symbol in enumerate(row):
            prefix = torch.tensor([[SPACE.mask_id, *row[:place]]])
            logits = method.backbone(prefix, torch.zeros(1)).logits[0, -1]
            law[n] *= torch.softmax(logits, -1)[symbol].item()
    return law


def test_the_law_sums_to_one_and_the_likelihood_is_its_logarithm(method):
    law = law_of(method)
    assert law.sum().item() == pytest.approx(1, abs=1e-12) and law.max() > 3 * law.min()
    nll = method.nll_bound(CLEAN, EXACT, Rng(0))
    assert nll.dtype == torch.float64 and torch.allclose(nll, -law.log(), atol=1e-12)
    loss = method(CLEAN, {}, Rng(0))
    assert loss.total.item() == pytest.approx(nll.mean().item() / SPACE.length, abs=1e-12)
    assert set(loss.log) == {"loss"} and not method.ramps


def test_the_first_token_is_learned_too_and_every_parameter_that_can_be(method):
    method(CLEAN, {}, Rng(0)).total.backward()
    table = method.backbone.trunk.token.weight.grad.abs().sum(-1)
    assert (table > 0).all()  # the mask is the token before the first
    assert all(parameter.grad.abs().sum() > 0 for parameter in method.parameters())


def test_the_sampler_has_the_law(method):
    rows = method.sample(20_000, SPACE.length, Rng(1))
    assert (rows != SPACE.mask_id).all()
    assert chi_square(torch.bincount(number(rows), minlength=16), law_of(method)) > ALPHA


def test_given_tokens_are_continued_from_the_conditional(method):
    """Rows with prefixes of their own in one batch; the rest follows p(rest | prefix)."""
    m, n = SPACE.mask_id, 8_000
    prefixes = torch.tensor([[m, m, m, m], [2, m, m, m], [0, 2, m, m], [2, 0, 2, m], [0, 0, 2, 2]])
    given = prefixes.repeat_interleave(n, 0)
    before = given.clone()
    rows = method.sample(len(given), SPACE.length, Rng(2), given=given)
    assert torch.equal(given, before) and torch.equal(rows[given != m], given[given != m])
    law = law_of(method)
    for prefix, part in zip(prefixes, rows.split(n), strict=True):
        fits = ((CLEAN == prefix) | (prefix == m)).all(-1)
        want, seen = torch.where(fits, law, 0.0), torch.bincount(number(part), minlength=16)
        if fits.sum() > 1:
            assert chi_square(seen, want / want.sum()) > ALPHA
        else:
            assert seen[fits].item() == n


def test_tokens_right_of_a_mask_cannot_be_given(method):
    m = SPACE.mask_id
    for row in ([m, 2, m, m], [0, m, m, 2], [m, m, m, 0], [0, m, 2, 0]):
        with pytest.raises(ConfigError, match="given tokens must come first, since"):
            method.sample(2, SPACE.length, Rng(0), given=torch.tensor([[0, 2, m, m], row]))
    with pytest.raises(ValueError, match="expected shape"):
        method.sample(2, SPACE.length, Rng(0), given=torch.zeros(1, 4, dtype=torch.long))
    with pytest.raises(ValueError, match="tokens must be in"):
        method.sample(1, SPACE.length, Rng(0), given=torch.full((1, 4), 3))


def test_one_call_for_each_token(method):
    pool = draw_pool(method, 7, SPACE.length, seed=1, batch=3)  # it compares the calls with the steps
    assert pool.nfe == SPACE.length and torch.equal(pool.samples, draw_pool(method, 7, 4, seed=1, batch=3).samples)
    given = torch.tensor([[0, 2, 1, 1]]).expand(5, -1)
    assert draw_pool(method, 5, 4, seed=0, given=given).nfe == 4
    for steps in (1, 3, 5, 8):
        with pytest.raises(ConfigError, match=f"nfe: 'ar' needs one call per token: steps = 4, got {steps}"):
            method.sample(1, steps, Rng(0))


def test_events_of_a_step(method):
    seen: list[StepEvent] = []
    given = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    rows = method.sample(2, 4, Rng(3), given=given, on_step=seen.append)
    assert [(event.step, event.time) for event in seen] == [(4, 1.0), (3, 0.75), (2, 0.5), (1, 0.25)]
    assert [event.revealed.sum().item() for event in seen] == [1, 2, 2, 2]
    for place, event in enumerate(seen):
        assert torch.equal(event.x[:, : place + 1], rows[:, : place + 1]) and (event.x[1, place + 1 :] == 1).all()


def test_the_likelihood_is_exact_and_says_so(method):
    assert [str(name) for name in default_conventions(method)] == ["exact"] and EXACT.bounds == "the NLL itself"
    found = estimate_nll(method, CLEAN, EXACT, batch=5)
    assert found.value == pytest.approx(-law_of(method).log().mean().item(), abs=1e-12)
    assert found.stderr is None and passes(EXACT) == 1
    for name in ("objective", "nelbo", "bound@4", "iw@1,2"):
        with pytest.raises(ConfigError, match=f"'ar' has no {name}"):
            method.nll_bound(CLEAN, Convention.parse(name), Rng(0))


def test_a_network_that_sees_the_future_is_refused():
    with pytest.raises(ConfigError, match="backbone.causal: must be true"):
        ARConfig().build(SPACE, sizes(causal=False))
    with pytest.raises(ConfigError, match="'transformer' has no 'causal'"):
        ARConfig().build(SPACE, TransformerConfig())
    recipe = get_recipe("rows-mdlm")
    for settings, line in (
        ({"method": "ar", "backbone": "dit"}, "backbone.causal: must be true.*method: 'ar'"),
        ({"backbone": "dit", "backbone.causal": "true"}, "backbone.causal: must be false.*method: 'mdlm'"),
    ):
        with pytest.raises(ConfigError, match=line):
            customise(recipe, settings)


def test_the_loss_reads_no_value():
    """Forward and backward without data, as a captured CUDA graph needs it: on `meta` a value that is read raises."""
    with torch.device("meta"):
        method = ARConfig().build(SPACE, sizes())
        method.token_nll(torch.zeros(5, 4, dtype=torch.long)).mean().backward()
    assert method.backbone.head.weight.grad.shape == (3, 8)
