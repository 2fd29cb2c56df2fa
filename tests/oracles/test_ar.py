"""AR: its law over all rows, the sampler, continuation, network calls and refusals."""

from __future__ import annotations

import pytest
import torch
from enumeration import ALPHA, all_rows, chi_square, predict
from steps import counts_of, masks, scramble, small_dit
from torch import Tensor

from emoe.config import ConfigError
from emoe.evaluation.measure import estimate_nll, passes
from emoe.methods.ar import AR, ARConfig
from emoe.rng import Rng
from emoe.runs.sampling import draw
from emoe.types import Likelihood, StepEvent, TokenSpace

SPACE = TokenSpace(size=3, mask_id=1, length=4)
CLEAN = all_rows([0, 2], SPACE.length)
EXACT = Likelihood.parse("exact")


@pytest.fixture
def method() -> AR:
    return scramble(ARConfig().build(SPACE, small_dit(causal=True)).double(), 5)


def law_of(method: AR) -> Tensor:
    """p(x) of every clean row, by a network call for each prefix."""
    law = torch.ones(len(CLEAN), dtype=torch.float64)
    for n, row in enumerate(CLEAN.tolist()):
        for position, symbol in enumerate(row):
            prefix = torch.tensor([[SPACE.mask_id, *row[:position]]])
            logits = predict(method.backbone, prefix, torch.zeros(1)).logits[0, -1]
            law[n] *= torch.softmax(logits, -1)[symbol].item()
    return law


def test_the_law_sums_to_one_and_the_likelihood_is_its_logarithm(method):
    law = law_of(method)
    assert law.sum().item() == pytest.approx(1, abs=1e-12) and law.max() > 3 * law.min()
    nll = method.nll(CLEAN, EXACT, Rng(0))
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
    rows = method.sample(masks(method, 20_000), SPACE.length, Rng(1))
    assert (rows != SPACE.mask_id).all()
    assert chi_square(counts_of(rows), law_of(method)) > ALPHA


def test_given_tokens_are_continued_from_the_conditional(method):
    """Rows with prefixes of their own in one batch; the rest follows p(rest | prefix)."""
    m, n = SPACE.mask_id, 8_000
    prefixes = torch.tensor([[m, m, m, m], [2, m, m, m], [0, 2, m, m], [2, 0, 2, m], [0, 0, 2, 2]])
    given = prefixes.repeat_interleave(n, 0)
    before = given.clone()
    rows = method.sample(given, SPACE.length, Rng(2))
    assert torch.equal(given, before) and torch.equal(rows[given != m], given[given != m])
    law = law_of(method)
    for prefix, part in zip(prefixes, rows.split(n), strict=True):
        fits = ((CLEAN == prefix) | (prefix == m)).all(-1)
        want, counts = torch.where(fits, law, 0.0), counts_of(part)
        if fits.sum() > 1:
            assert chi_square(counts, want / want.sum()) > ALPHA
        else:
            assert counts[fits].item() == n


def test_tokens_right_of_a_mask_cannot_be_given(method):
    m = SPACE.mask_id
    for row in ([m, 2, m, m], [0, m, m, 2], [m, m, m, 0], [0, m, 2, 0]):
        with pytest.raises(ConfigError, match="given tokens must come first, since"):
            method.sample(torch.tensor([[0, 2, m, m], row]), SPACE.length, Rng(0))


def test_one_call_for_each_token(method):
    pool = draw(method, 7, SPACE.length, seed=1, batch=3)  # `draw` compares the calls with the steps
    assert pool.nfe == SPACE.length and torch.equal(pool.samples, draw(method, 7, 4, seed=1, batch=3).samples)
    given = torch.tensor([[0, 2, 1, 1]]).expand(5, -1)
    assert draw(method, 5, 4, given=given).nfe == 4
    assert method.config.allowed_nfe((1, 4, 8), SPACE.length) == (4,)
    for steps in (1, 3, 5, 8):
        with pytest.raises(ConfigError, match=f"nfe: 'ar' needs one call per token: 4, got {steps}"):
            method.sample(masks(method, 1), steps, Rng(0))


def test_events_of_a_step(method):
    events: list[StepEvent] = []
    rows = method.sample(torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]]), 4, Rng(3), on_step=events.append)
    assert [(event.step, event.time) for event in events] == [(4, 1.0), (3, 0.75), (2, 0.5), (1, 0.25)]
    assert [event.revealed.sum().item() for event in events] == [1, 2, 2, 2]
    for end, event in enumerate(events, start=1):
        assert torch.equal(event.x[:, :end], rows[:, :end]) and (event.x[1, end:] == 1).all()


def test_the_only_likelihood_is_exact(method):
    assert method.likelihoods() == ("exact",) and EXACT.bounds == "the NLL itself"
    nll = estimate_nll(method, CLEAN, EXACT, batch=5)
    assert nll.value == pytest.approx(-law_of(method).log().mean().item(), abs=1e-12)
    assert nll.stderr is None and passes(EXACT) == 1
    for name in ("objective", "nelbo", "bound@4", "iw@1,2"):
        with pytest.raises(ConfigError, match=f"'ar' has no {name}"):
            method.nll(CLEAN, Likelihood.parse(name), Rng(0))
