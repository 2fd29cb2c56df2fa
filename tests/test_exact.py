"""Exact laws against plain enumeration of every route, quadrature on a fine grid, and samples."""

from __future__ import annotations

import math

import pytest
import torch
from enumeration import ALPHA, Enumeration, chi_square

from emoe.backbones.transformer import TransformerConfig
from emoe.diffusion.masking import subs
from emoe.diffusion.quadrature import gaussian_grid, gaussian_points
from emoe.diffusion.schedule import CosineSchedule, LogLinearSchedule
from emoe.domains.metrics import nearest_distance
from emoe.domains.toy import Toy, ToyConfig
from emoe.domains.toy.densities import validity_of_law
from emoe.evaluation.exact_toy import toy_measurements
from emoe.exact import Mixture, chain_law, chain_laws, exact_nll, kl_data_model, law_error, repeated_laws, step_law
from emoe.methods.base import MaskedDiffusion
from emoe.methods.emoe import EMoEConfig
from emoe.methods.mdlm import MDLM, MDLMConfig
from emoe.methods.vadd import VADDConfig
from emoe.rng import Rng
from emoe.routing.routes import greedy, replay
from emoe.types import Gate

MODELS = {
    "mdlm": (MDLMConfig(), {}),
    "mdlm-cosine": (MDLMConfig(schedule=CosineSchedule()), {"length": 3, "mask_id": 2}),
    "emoe": (EMoEConfig(experts=2), {"size": 4}),
    "emoe-3": (EMoEConfig(experts=3, schedule=LogLinearSchedule(eps=0.01)), {"mask_id": 0}),
    "emoe-long": (EMoEConfig(experts=2), {"length": 3}),
    "emoe-flat": (EMoEConfig(experts=3), {"depth": 1, "length": 3, "mask_id": 2}),
    "emoe-deep": (EMoEConfig(experts=2), {"depth": 3}),
    "emoe-marks": (EMoEConfig(experts=2, mask_aware=True), {}),
}


@pytest.fixture(params=MODELS)
def model(request, tiny) -> MaskedDiffusion:
    config, sizes = MODELS[request.param]
    return tiny(config, **sizes)


def table_of(law: Mixture, rows: torch.Tensor) -> torch.Tensor:
    """(B, C): what a mixture says of each clean row."""
    each = sum(law.log_token[:, :, place, rows[:, place]] for place in range(rows.shape[1]))
    return (law.log_weight[..., None].exp() * each.exp()).sum(1)


# --- The network under every expert of its last block ------------------------------------------------------------


@pytest.mark.parametrize("mask_id", [0, 1, 3])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_forward_last_is_forward_with_each_last_expert(tiny, depth: int, mask_id: int):
    backbone = tiny(EMoEConfig(experts=3, mask_aware=True), size=4, depth=depth, mask_id=mask_id, length=3).backbone
    draw = torch.Generator().manual_seed(3)
    x, t = torch.randint(4, (5, 3), generator=draw), torch.rand(5, generator=draw)
    marks, ones = x == mask_id, torch.ones(5, 3, 1, dtype=torch.float64)
    gates = [Gate(torch.randint(3, (5, 3, 1), generator=draw), ones) for _ in range(depth - 1)]
    logits, route_logits = backbone.forward_last(x, t, marks=marks, route=replay(gates))
    assert logits.shape == (3, 5, 3, 4) and len(route_logits) == depth
    for expert in range(3):
        last = Gate(torch.full((5, 3, 1), expert), ones)
        want = backbone(x, t, marks=marks, route=replay([*gates, last]))
        assert torch.allclose(logits[expert], want.logits, atol=1e-12, rtol=0)
        assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(route_logits, want.route_logits, strict=True))


def test_forward_last_refuses_a_dense_backbone(tiny):
    with pytest.raises(ValueError, match="dense"):
        tiny(MDLMConfig()).backbone.forward_last(torch.zeros(1, 2).long(), torch.ones(1), route=greedy())


# --- One step, and the chain --------------------------------------------------------------------------------------


def test_step_law_is_the_sum_over_all_routes(model: MaskedDiffusion):
    exact, t = Enumeration(model), 0.625
    law = step_law(model, exact.states, t)
    with torch.no_grad():
        want = exact.step(t, 1.0, 0.0)[:, exact.index(exact.clean)]
    assert torch.allclose(table_of(law, exact.clean), want, atol=1e-10, rtol=0)
    assert torch.allclose(law.log_weight.exp().sum(1), torch.ones(len(exact.states)).double(), atol=1e-10, rtol=0)
    assert torch.allclose(law.log_token.exp().sum(-1), torch.ones(law.log_token.shape[:-1]).double(), atol=1e-10)
    assert (law.log_token[..., exact.mask_id] == -math.inf).all()


def test_chain_law_is_the_enumerated_one(model: MaskedDiffusion):
    exact = Enumeration(model)
    laws = chain_laws(model, [1, 2, 3, 4])
    for steps, law in laws.items():
        want = exact.law(steps)[exact.index(exact.clean)]
        assert law.dtype == torch.float64 and law.shape == (model.space.size - 1,) * model.space.length
        assert torch.allclose(law.flatten(), want, atol=1e-10, rtol=0)
        assert abs(law.sum().item() - 1) < 1e-10
        nll = exact_nll(law, exact.clean, mask_id=model.space.mask_id)
        assert torch.allclose(nll, exact.nll(steps), atol=1e-10)
    assert torch.equal(chain_law(model, 3), laws[3])


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
    law = step_law(collapsed, states, 0.5)
    with torch.no_grad():
        logits = collapsed.backbone(states, torch.full((len(states),), 0.5), route=greedy()).logits
    best = law.log_weight.argmax(1)
    assert torch.equal(law.log_weight.exp().sort(1).values[:, -1], torch.ones(len(states)).double())
    found = law.log_token[torch.arange(len(states)), best]
    assert torch.allclose(found.exp(), subs(logits, states, 1).exp(), atol=1e-12)


def test_measures_of_a_law():
    data = torch.tensor([[0.5, 0.0], [0.25, 0.25]], dtype=torch.float64)
    law = torch.tensor([[0.25, 0.25], [0.25, 0.25]], dtype=torch.float64)
    assert kl_data_model(data, law) == pytest.approx(0.5 * math.log(2), abs=1e-15) and kl_data_model(data, data) == 0
    assert kl_data_model(law, data) == math.inf
    assert exact_nll(data, torch.tensor([[0, 0], [1, 0]])).tolist() == pytest.approx([math.log(2), math.log(4)])
    assert exact_nll(data, torch.tensor([[0, 2]]), mask_id=1).item() == math.inf
    with pytest.raises(ValueError, match="2 is the mask"):
        exact_nll(data, torch.tensor([[0, 2]]))


def test_too_many_routes_are_refused(tiny):
    method = tiny(EMoEConfig(experts=4), depth=3)
    with pytest.raises(ValueError, match=r"budget: E-MoE has 4\^\(2 \* 2\) routes .* 2 rows; .* more than 511"):
        step_law(method, torch.tensor([[1, 1], [1, 0]]), 0.5, budget=511)
    assert step_law(method, torch.tensor([[1, 1], [1, 0]]), 0.5, budget=512).log_weight.shape == (2, 256)
    with pytest.raises(ValueError, match="too many to enumerate"):
        chain_law(tiny(EMoEConfig(experts=8), length=8, size=3, depth=2), 1)
    with pytest.raises(ValueError, match="VADD has 300 values"):
        step_law(tiny(VADDConfig(latent=4)), torch.tensor([[1, 1]]), 0.5, samples=300, budget=299)


class Other(MDLM):
    pass


def test_a_method_can_register_its_own_step(tiny):
    method = tiny(MDLMConfig())
    other = Other(method.config, method.space, TransformerConfig(width=8, hidden=8, heads=2, time_size=4))
    rows = torch.tensor([[1, 1]])
    assert step_law(other, rows, 1.0).log_weight.shape == (1, 1)  # as its parent does

    @step_law.register
    def _(method: Other, xt: torch.Tensor, t: float, **how: object) -> Mixture:
        return Mixture(torch.zeros(1, 1), torch.full((1, 1, 2, 3), 0.5).log())

    assert step_law(other, rows, 1.0).log_token[0, 0, 0, 0] == pytest.approx(math.log(0.5))
    with pytest.raises(TypeError, match="no exact step is known for MDLM"):
        step_law.dispatch(object)(method, rows, 1.0)


# --- A Gaussian latent --------------------------------------------------------------------------------------------


def integrated(method: MaskedDiffusion, rows: torch.Tensor, clean: torch.Tensor, t: float, nodes: int) -> torch.Tensor:
    """(B, C): p(clean | row) by the trapezoid rule on [-10, 10], row by row."""
    z = torch.linspace(-10, 10, nodes, dtype=torch.float64)
    weight = torch.exp(-z.square() / 2) * (20 / (nodes - 1)) / math.sqrt(2 * math.pi)
    found = []
    with torch.no_grad():
        for row in rows:
            x = row.expand(nodes, -1)
            log_token = subs(method.backbone(x, torch.full((nodes,), t), cond=z[:, None]).logits, x, 1)
            found.append(weight @ (log_token[:, 0, clean[:, 0]] + log_token[:, 1, clean[:, 1]]).exp())
    return torch.stack(found)


@pytest.mark.parametrize("seed", [21, 1, 2])
def test_quadrature_of_a_small_latent(tiny, seed: int):
    method = tiny(VADDConfig(latent=1), seed=seed)
    clean = torch.cartesian_prod(torch.tensor([0, 2]), torch.tensor([0, 2]))
    rows = torch.tensor([[1, 1], [1, 0], [2, 1]])
    law = step_law(method, rows, 0.5)
    want = integrated(method, rows, clean, 0.5, 4_000)
    assert torch.allclose(table_of(law, clean), want, atol=1e-8, rtol=0)
    product = want[0].view(2, 2).sum(1, keepdim=True) * want[0].view(2, 2).sum(0, keepdim=True)
    assert (product.flatten() - want[0]).abs().max() > 1e-4  # the latent ties the positions
    assert abs(chain_law(method, 3).sum().item() - 1) < 1e-10


@pytest.mark.parametrize("latent", [1, 2])
def test_drawn_latents_agree_with_quadrature_within_the_stated_error(tiny, latent: int):
    method = tiny(VADDConfig(latent=latent))
    laws = repeated_laws(method, [1, 3], repeats=4, samples=2_000, seed=1)
    for steps, drawn in laws.items():
        assert torch.allclose(drawn.flatten(1).sum(1), torch.ones(4).double(), atol=1e-10)
        distance = (drawn.mean(0) - chain_law(method, steps)).abs()
        total, worst = law_error(drawn)
        assert 0 < worst < 1e-2 and distance.sum() / 2 < 4 * total and distance.max() < 4 * worst


def test_points_of_a_gaussian():
    for points, log_weight in (
        gaussian_grid(2, 20),
        (gaussian_points(4_096, 3, 5), torch.full((4_096,), 1 / 4_096).log()),
    ):
        weight = log_weight.exp().double()
        assert (weight @ points).abs().max() < 1e-3
        second = points.T @ (weight[:, None] * points)
        assert torch.allclose(second, torch.eye(points.shape[1]).double(), atol=1e-2)
    assert not torch.equal(gaussian_points(8, 3, 5), gaussian_points(8, 3, 6))


# --- The toy ------------------------------------------------------------------------------------------------------

POOL = 20_000


@pytest.fixture(scope="module")
def toy() -> Toy:
    return ToyConfig(density="8-modes", points=5_000).build(0)


@pytest.fixture(scope="module")
def trained(toy: Toy) -> MaskedDiffusion:
    """A small E-MoE after a few steps of training: far from the data, but no longer noise."""
    torch.manual_seed(0)
    sizes = TransformerConfig(width=32, heads=2, hidden=32, time_size=16)
    method = EMoEConfig(experts=4, t_low=1 / 64).build(toy.space, sizes)
    adam, rng = torch.optim.Adam(method.parameters(), lr=3e-3), Rng(1)
    knobs = {"relax_tau": torch.tensor(0.7), "kl_weight": torch.tensor(1.0)}
    for step in range(100):
        rows = toy.rows[torch.randint(len(toy.rows), (256,), generator=torch.Generator().manual_seed(step))]
        adam.zero_grad()
        method(rows, knobs, rng.at(step)).total.backward()
        adam.step()
    return method


def histogram(rows: torch.Tensor) -> torch.Tensor:
    return torch.bincount(rows[:, 0] * 50 + rows[:, 1], minlength=2_500)


def test_samples_of_a_toy_model_follow_its_exact_law(toy: Toy, trained: MaskedDiffusion):
    laws = chain_laws(trained, [1, 2, 4])
    data = histogram(toy.fresh(POOL, 3))
    draw = torch.Generator().manual_seed(4)
    for steps, law in laws.items():
        pool = trained.sample(POOL, steps, Rng(5))
        share = validity_of_law(law, toy.support, toy.radius) / 100
        seen = (nearest_distance(pool, toy.support) <= toy.radius).double().mean().item()
        assert abs(seen - share) < 4 * math.sqrt(share * (1 - share) / POOL)
        again = [
            torch.multinomial(law.flatten(), POOL, True, generator=draw).bincount(minlength=2_500) for _ in range(20)
        ]
        overlaps = torch.stack([torch.minimum(one, data).sum() for one in again]).double() / POOL
        mine = torch.minimum(histogram(pool), data).sum().item() / POOL
        assert abs(mine - overlaps.mean().item()) < 4 * overlaps.std().item() * math.sqrt(1 + 1 / 20)
        assert chi_square(histogram(pool), law) > ALPHA
    assert (laws[1] - laws[4]).abs().sum() > 0.05  # sharp enough to see a wrong number of steps


def test_toy_measurements(toy: Toy, trained: MaskedDiffusion):
    data = toy.cell_probabilities()
    found = toy_measurements(trained, toy, [1, 2])
    for steps, items in found.items():
        law = chain_law(trained, steps)
        values = {item.metric: item.value for item in items}
        assert list(values) == ["validity", "overlap", "nll", "kl"]
        assert all(item.stderr is None and item.n is None for item in items)
        assert values["nll"] == pytest.approx(-(data * law.log()).sum().item(), abs=1e-10)
        assert values["kl"] == pytest.approx((data * (data / law).log()).nansum().item(), abs=1e-10)
        assert values["validity"] == validity_of_law(law, toy.support, toy.radius) and 0 < values["overlap"] < 100
    vadd = VADDConfig(latent=3).build(toy.space, TransformerConfig(width=16, heads=2, hidden=16, time_size=8))
    drawn = toy_measurements(vadd, toy, [1], samples=100, repeats=2)[1]
    assert [item.metric for item in drawn] == ["validity", "overlap", "nll", "kl"]
    assert all(item.stderr > 0 for item in drawn)
