"""The toy network: sizes, attention, inputs that must reach the output; and the contract of sampling."""

from __future__ import annotations

import jaxtyping
import pytest
import torch
from enumeration import ALPHA, Enumeration, chi_square
from steps import masks, ramp_of, randn, scramble

from emoe.backbones.base import active_parameters, total_parameters
from emoe.backbones.layers import SHORT, Attention, time_features
from emoe.backbones.transformer import TransformerConfig
from emoe.diffusion.masking import mask_tokens
from emoe.methods.emoe import EMoEConfig
from emoe.methods.mdlm import MDLM, MDLMConfig
from emoe.methods.vadd import VADDConfig
from emoe.rng import Rng
from emoe.runs.sampling import draw, record_calls
from emoe.types import StepEvent, TokenSpace

TOY = TokenSpace(size=51, mask_id=50, length=2)


@pytest.mark.parametrize(
    ("config", "total", "active"),
    [(MDLMConfig(), 434_866, 434_866), (EMoEConfig(), 2_280_898, 436_930), (VADDConfig(), 866_626, 866_626)],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_toy_models_have_the_published_sizes(config, total: int, active: int):
    method = config.build(TOY, TransformerConfig())
    assert (total_parameters(method), active_parameters(method)) == (total, active)


def test_wrong_shapes_are_refused_while_testing():
    """The checks that tests/conftest.py installs are on: two rows cannot have three alphas."""
    pytest.importorskip("beartype")
    with pytest.raises(jaxtyping.TypeCheckError):
        mask_tokens(torch.zeros(2, 4, dtype=torch.long), torch.ones(3), 1, torch.Generator())


@pytest.mark.parametrize("length", [SHORT, SHORT + 1])
def test_attention_is_softmax_of_scaled_products_at_every_length(length: int):
    layer, x = scramble(Attention(8, 2).double(), 0), randn(2, length, 8)
    q, k, v = (part.view(2, length, 2, 4) for part in layer.qkv(x).split(8, -1))
    weights = torch.softmax(torch.einsum("blhc,bmhc->bhlm", q, k) / 2, -1)
    mixed = torch.einsum("bhlm,bmhc->blhc", weights, v).reshape(2, length, 8)
    assert torch.allclose(layer(x), layer.out(mixed), atol=1e-14)


def test_time_features_are_sines_and_cosines_of_a_thousand_t():
    features = time_features(torch.tensor([0.0, 0.3], dtype=torch.float64), 6)
    assert features[0].tolist() == [0, 0, 0, 1, 1, 1]
    angles = 300 * torch.tensor([1.0, 10_000 ** (-1 / 3), 10_000 ** (-2 / 3)], dtype=torch.float64)
    assert torch.allclose(features[1], torch.cat([angles.sin(), angles.cos()]), atol=1e-12)


CONFIGS = [MDLMConfig(), EMoEConfig(experts=2), VADDConfig(latent=2)]
every_method = pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.kind)


@every_method
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_step_is_one_network_call(tiny, config, steps: int):
    method = tiny(config)
    with record_calls(method.backbone) as calls:
        method.sample(masks(method, 3), steps, Rng(0))
    assert len(calls) == steps
    method.sample(masks(method, 3), steps, Rng(0))
    assert len(calls) == steps  # the hook is removed
    with record_calls(method.backbone) as calls:
        method(torch.tensor([[0, 2]]), ramp_of(method), Rng(0))
    assert len(calls) == 1  # and so is a training step
    pool = draw(method, 7, steps, seed=1, batch=3)
    assert pool.nfe == steps and pool.samples.shape == (7, 2) and (pool.samples != method.space.mask_id).all()


def test_a_sampler_with_hidden_calls_is_refused(tiny, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(MDLM, "prior", lambda self, step, rng: {} if self.backbone(step.x, step.t) else {})
    with pytest.raises(RuntimeError, match="2 steps made 4 network calls"):
        draw(tiny(MDLMConfig()), 4, 2)


@pytest.mark.parametrize("rows", [[[0, 4]], [[0, -2]], [[0, 1, 2]]], ids=["too large", "negative", "too long"])
def test_given_rows_that_do_not_fit_are_refused(tiny, rows: list[list[int]]):
    with pytest.raises(ValueError, match="given"):
        draw(tiny(MDLMConfig(), size=4), 1, 2, given=torch.tensor(rows))


@every_method
def test_step_events_describe_every_step(tiny, config):
    method = tiny(config, length=3)
    events: list[StepEvent] = []
    rows = method.sample(masks(method, 50), 4, Rng(2), on_step=events.append)
    assert [event.step for event in events] == [4, 3, 2, 1]
    assert [event.time for event in events] == [1.0, 0.75, 0.5, 0.25]
    before = torch.full((50, 3), method.space.mask_id)
    for event in events:
        assert torch.equal(event.revealed, (before == method.space.mask_id) & (event.x != method.space.mask_id))
        assert torch.equal(event.x[~event.revealed], before[~event.revealed])
        assert (event.latent is None) == isinstance(config, MDLMConfig)
        before = event.x
    assert torch.equal(before, rows)
    share = sum(event.revealed.sum() for event in events[:2]) / 150
    assert 0.35 < share < 0.65  # a quarter of all positions at each step
    assert torch.equal(rows, method.sample(masks(method, 50), 4, Rng(2)))  # `on_step` changes nothing


@every_method
def test_equal_seeds_give_equal_samples_and_other_seeds_others(tiny, config):
    method = tiny(config, length=3)
    first = method.sample(masks(method, 200), 3, Rng(3))
    assert torch.equal(first, method.sample(masks(method, 200), 3, Rng(3)))
    assert not torch.equal(first, method.sample(masks(method, 200), 3, Rng(4)))
    used = Rng(3)
    method.sample(masks(method, 10), 2, used)
    assert torch.equal(first, method.sample(masks(method, 200), 3, used))  # earlier draws of an Rng do not matter
    torch.manual_seed(0)
    state = torch.random.get_rng_state()
    method.sample(masks(method, 10), 2, Rng(3))
    assert torch.equal(state, torch.random.get_rng_state())  # the global generator is not touched


@pytest.mark.parametrize("config", CONFIGS[:2], ids=lambda config: config.kind)
@pytest.mark.parametrize("steps", [1, 3])
def test_infilled_rows_follow_the_chain_from_the_given_state(tiny, config, steps: int):
    method = tiny(config, length=3)
    exact = Enumeration(method)
    start = [1, 2, 1]  # the middle token is given
    n = 100_000
    rows = method.sample(torch.tensor([start]).repeat(n, 1), steps, Rng(5))
    law = exact.law(steps, start)
    assert chi_square(exact.counts(rows), law) > ALPHA
    free = exact.law(steps)  # the chain from all masks, conditioned on the same token, is another law
    conditional = torch.where(exact.states[:, 1] == 2, free, 0.0)
    assert (law - conditional / conditional.sum()).abs().max() > 1e-3


def test_rng_streams_are_functions_of_seed_rank_step_and_purpose():
    def numbers(rng: Rng, purpose: str = "mask", **options: bool) -> list[float]:
        return torch.rand(3, generator=rng.stream(purpose, **options)).tolist()

    base = numbers(Rng(1).at(5))
    assert base == numbers(Rng(1).at(5)) and base == numbers(Rng(1).at(9).at(5))
    rngs = [Rng(2), Rng(1, rank=1, world=2), Rng(1).fork("a"), Rng(1).fork("b")]
    others = [*(numbers(rng.at(5)) for rng in rngs), numbers(Rng(1).at(5), "time"), numbers(Rng(1).at(6))]
    assert len({tuple(row) for row in [base, *others]}) == 7
    assert numbers(Rng(3, rank=1, world=2).part(2, 3).at(9)) == numbers(Rng(3, rank=5, world=6).at(9))
    shared = [numbers(Rng(1, rank=r, world=2).at(5), "time", shared=True) for r in (0, 1)]
    assert shared[0] == shared[1]
    rng = Rng(1).at(5)
    first, second = numbers(rng), numbers(rng)
    assert first == base and second != base  # a stream goes on within a step
    assert numbers(rng.at(6)) == others[-1] and len(rng.generators()) == 1
