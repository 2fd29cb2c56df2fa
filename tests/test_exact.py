"""Exact laws against plain enumeration of every route and quadrature on a fine grid."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from enumeration import Enumeration, predict
from steps import scramble
from torch import Tensor

from emoe.backbones.transformer import TransformerConfig
from emoe.config import ConfigError
from emoe.diffusion import categorical
from emoe.diffusion.masking import subs
from emoe.diffusion.schedule import CosineSchedule, LogLinearSchedule
from emoe.domains.toy import ToyConfig, validity_of_law
from emoe.evaluation.measure import exact_rows
from emoe.exact.laws import chain_law, chain_laws, exact_laws, exact_nll, kl_data_model, law_work
from emoe.methods.base import Method
from emoe.methods.emoe import EMoEConfig
from emoe.methods.masked import MaskedDiffusion
from emoe.methods.mdlm import MDLMConfig
from emoe.methods.sedd import SEDDConfig
from emoe.methods.vadd import VADDConfig, gaussian_grid, gaussian_points
from emoe.recipes import get_recipe
from emoe.routing.routes import greedy
from emoe.runs.run import Run
from emoe.types import Mixture, TokenSpace

MODELS = {
    "mdlm": (MDLMConfig(), {}),
    "mdlm-cosine": (MDLMConfig(schedule=CosineSchedule()), {"length": 3, "mask_id": 2}),
    "emoe": (EMoEConfig(experts=2), {"size": 4}),
    "emoe-3": (EMoEConfig(experts=3, schedule=LogLinearSchedule(eps=0.01)), {"mask_id": 0}),
    "emoe-long": (EMoEConfig(experts=2), {"length": 3}),
    "emoe-flat": (EMoEConfig(experts=3), {"depth": 1, "length": 3, "mask_id": 2}),
    "emoe-deep": (EMoEConfig(experts=2), {"depth": 3}),
}


@pytest.fixture(params=MODELS)
def model(request, tiny) -> MaskedDiffusion:
    config, sizes = MODELS[request.param]
    return tiny(config, **sizes)


def table_of(law: Mixture, rows: Tensor) -> Tensor:
    """(B, C): the probability of each clean row under a mixture."""
    each = sum(law.log_token[:, :, position, rows[:, position]] for position in range(rows.shape[1]))
    return (law.log_weight[..., None].exp() * each.exp()).sum(1)


def assert_normalised(law: Mixture, mask_id: int) -> None:
    assert law.log_weight.dtype == law.log_token.dtype == torch.float64
    assert torch.allclose(law.log_weight.exp().sum(1), torch.ones(len(law.log_weight)).double(), atol=1e-10, rtol=0)
    assert torch.allclose(law.log_token.exp().sum(-1), torch.ones(law.log_token.shape[:-1]).double(), atol=1e-10)
    assert (law.log_token[..., mask_id] == -math.inf).all()


def test_components_are_the_sum_over_all_routes(model: MaskedDiffusion):
    exact, t = Enumeration(model), 0.625
    clean = torch.cat([exact.clean, exact.states])  # rows with and without masks
    law = model.components(clean, t)
    with torch.no_grad():
        want = exact.step(t, 1.0, 0.0)[exact.index(clean)][:, exact.index(exact.clean)]
    assert torch.allclose(table_of(law, exact.clean), want, atol=1e-10, rtol=0)
    assert_normalised(law, exact.mask_id)


def test_a_method_without_an_exact_law_says_so(tiny):
    method, rows = tiny(SEDDConfig()), torch.tensor([[1, 1], [1, 0]])
    for ask in (lambda: method.components(rows, 0.5), lambda: chain_law(method, 1)):
        with pytest.raises(ConfigError, match="exact: SEDD has no"):
            ask()


def test_chain_law_is_the_enumerated_one(model: MaskedDiffusion):
    exact, laws = Enumeration(model), chain_laws(model, [1, 2, 3, 4])
    for steps, law in laws.items():
        want = exact.law(steps)[exact.index(exact.clean)]
        assert law.dtype == torch.float64 and law.shape == (model.space.size - 1,) * model.space.length
        assert torch.allclose(law.flatten(), want, atol=1e-10, rtol=0) and abs(law.sum().item() - 1) < 1e-10
        nll = exact_nll(law, exact.clean, mask_id=model.space.mask_id)
        assert torch.allclose(nll, exact.nll(steps), atol=1e-10)
    assert torch.equal(chain_law(model, 3), laws[3])


def test_nested_grids_read_each_time_once(tiny):
    method, ticks = tiny(MDLMConfig()), []
    times, inner = [], method.components
    method.components = lambda xt, t, **how: times.append(t) or inner(xt, t, **how)
    chain_laws(method, [1, 2, 4], tick=lambda *what: ticks.append(what))
    assert len(times) == 4 * 3 and len(set(times)) == 4 == law_work(method, [1, 2, 4])  # of 3 patterns of masks each
    assert ticks == [(1, f"exact law, t = {t}") for t in ("1", "0.5", "0.75", "0.25")]


def test_sharpened_routes_count(tiny):
    """route_tau = 1/2 doubles the routers' logits; route_tau = 0 runs the best expert everywhere."""
    sharp, doubled = tiny(EMoEConfig(experts=3, route_tau=0.5)), tiny(EMoEConfig(experts=3))
    with torch.no_grad():
        for block in doubled.backbone.trunk.blocks:
            for parameter in block.mlp.router.parameters():
                parameter.mul_(2)
    assert torch.allclose(chain_law(sharp, 2), chain_law(doubled, 2), atol=1e-12)
    collapsed = tiny(EMoEConfig(experts=3, route_tau=0.0))
    states = Enumeration(collapsed).states
    law = collapsed.components(states, 0.5)
    with torch.no_grad():
        logits = predict(collapsed.backbone, states, torch.full((len(states),), 0.5), route=greedy()).logits
    assert torch.equal(law.log_weight.exp().sort(1).values[:, -1], torch.ones(len(states)).double())
    best = law.log_token[torch.arange(len(states)), law.log_weight.argmax(1)]
    assert torch.allclose(best.exp(), subs(logits, states, 1).exp(), atol=1e-12)


def test_measures_of_a_law():
    data = torch.tensor([[0.5, 0.0], [0.25, 0.25]], dtype=torch.float64)
    law = torch.tensor([[0.25, 0.25], [0.25, 0.25]], dtype=torch.float64)
    assert kl_data_model(data, law) == pytest.approx(0.5 * math.log(2), abs=1e-15) and kl_data_model(data, data) == 0
    assert kl_data_model(law, data) == math.inf
    assert exact_nll(data, torch.tensor([[0, 0], [1, 0]])).tolist() == pytest.approx([math.log(2), math.log(4)])
    assert exact_nll(data, torch.tensor([[0, 2]]), mask_id=1).item() == math.inf
    with pytest.raises(ValueError, match="2 is the mask"):
        exact_nll(data, torch.tensor([[0, 2]]))


def test_too_large_laws_are_refused_before_anything_is_run(tiny, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(categorical, "BUDGET", 511)
    rows = torch.tensor([[1, 1], [1, 0]])
    method = tiny(EMoEConfig(experts=4), depth=3)
    with pytest.raises(ConfigError, match=r"budget: 4\^\(2 \* 2\) routes .* 2 rows; .* more than 511"):
        method.components(rows, 0.5)
    with pytest.raises(ConfigError, match="VADD has 2048 values"):
        tiny(VADDConfig(latent=4)).components(rows, 0.5)
    monkeypatch.setattr(categorical, "BUDGET", 512)
    assert method.components(rows, 0.5).log_weight.shape == (2, 256)
    with pytest.raises(ConfigError, match="too many to enumerate"):
        chain_law(tiny(EMoEConfig(experts=8), length=8), 1)
    large = MDLMConfig().build(TokenSpace(51, 50, 12), TransformerConfig(width=8, hidden=8, heads=2, time_size=4))
    large.backbone.register_forward_pre_hook(lambda *_: pytest.fail("the network was run"))
    with pytest.raises(ConfigError, match="exact: 50 symbols in 12 positions make tables of .* numbers, more than"):
        chain_law(large, 1)


def integrated(method: MaskedDiffusion, rows: Tensor, clean: Tensor, t: float, nodes: int) -> Tensor:
    """(B, C): p(clean | row) by the trapezoid rule on [-10, 10], row by row."""
    z = torch.linspace(-10, 10, nodes, dtype=torch.float64)
    weight = torch.exp(-z.square() / 2) * (20 / (nodes - 1)) / math.sqrt(2 * math.pi)
    tables = []
    with torch.no_grad():
        for row in rows:
            x = row.expand(nodes, -1)
            logits = predict(method.backbone, x, torch.full((nodes,), t), cond=z[:, None]).logits
            log_token = subs(logits, x, 1)
            tables.append(weight @ (log_token[:, 0, clean[:, 0]] + log_token[:, 1, clean[:, 1]]).exp())
    return torch.stack(tables)


@pytest.mark.parametrize("seed", [21, 1, 2])
def test_quadrature_of_a_small_latent(tiny, seed: int):
    method = tiny(VADDConfig(latent=1), seed=seed)
    clean = torch.cartesian_prod(torch.tensor([0, 2]), torch.tensor([0, 2]))
    rows = torch.tensor([[1, 1], [1, 0], [2, 1]])
    want = integrated(method, rows, clean, 0.5, 4_000)
    assert torch.allclose(table_of(method.components(rows, 0.5), clean), want, atol=1e-8, rtol=0)
    product = want[0].view(2, 2).sum(1, keepdim=True) * want[0].view(2, 2).sum(0, keepdim=True)
    assert (product.flatten() - want[0]).abs().max() > 1e-4  # the latent ties the positions
    assert abs(chain_law(method, 3).sum().item() - 1) < 1e-10


@pytest.mark.parametrize("latent", [1, 2])
def test_drawn_latents_agree_with_quadrature_within_their_spread(tiny, latent: int):
    method = tiny(VADDConfig(latent=latent))
    exact = exact_laws(method, [1, 3])
    method.draws_components = True
    for steps, laws in exact_laws(method, [1, 3], seed=1).items():
        assert torch.allclose(laws.flatten(1).sum(1), torch.ones(4).double(), atol=1e-10)
        error, distance = laws.std(0) / 2, (laws.mean(0) - exact[steps][0]).abs()
        assert 0 < error.max() < 1e-2 and distance.sum() < 4 * error.sum() and distance.max() < 4 * error.max()


def test_points_of_a_gaussian():
    drawn = gaussian_points(4_096, 3, 5), torch.full((4_096,), 1 / 4_096).log()
    for points, log_weight in (gaussian_grid(2, 20), drawn):
        weight = log_weight.exp().double()
        assert (weight @ points).abs().max() < 1e-3
        second = points.T @ (weight[:, None] * points)
        assert torch.allclose(second, torch.eye(points.shape[1]).double(), atol=1e-2)
    assert not torch.equal(gaussian_points(8, 3, 5), gaussian_points(8, 3, 6))


def test_exact_rows_of_a_toy_run():
    toy, experiment = ToyConfig(density="8-modes", points=5_000).build(0), get_recipe("toy-8modes-emoe")
    sizes, data = TransformerConfig(width=16, heads=2, hidden=16, time_size=8), toy.density.law()
    method = scramble(EMoEConfig(experts=4).build(toy.space, sizes), 1)

    def run_of(method: Method) -> Run:
        run = Run(Path(), experiment, method, 0)
        run.domain = toy
        return run

    rows = exact_rows(run_of(method), [1, 2])
    assert {(row.convention, row.stderr, row.n) for row in rows} == {("exact", None, None)} and len(rows) == 8
    values = {(row.nfe, row.metric): row.value for row in rows}
    for steps in (1, 2):
        law = chain_law(method, steps)
        assert values[steps, "nll"] == pytest.approx(-(data * law.log()).sum().item(), abs=1e-10)
        assert values[steps, "kl"] == pytest.approx((data * (data / law).log()).nansum().item(), abs=1e-10)
        assert values[steps, "validity"] == validity_of_law(law, toy.support, toy.radius)
        assert 0 < values[steps, "overlap"] < 100
    vadd = VADDConfig(latent=3).build(toy.space, sizes)
    assert all(row.stderr > 0 for row in exact_rows(run_of(vadd), [1]))
