"""Routes, their divergence and gradients, experts and the fused pass against plain references (Section 3.2-3.3)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from enumeration import ALPHA, Enumeration, chi_square
from torch import Tensor

from emoe.diffusion.categorical import categorical_kl, gaussian_kl, gumbel
from emoe.diffusion.masking import masked_nll, subs
from emoe.diffusion.schedule import CosineSchedule
from emoe.methods import emoe as emoe_method
from emoe.methods.base import MaskedDiffusion
from emoe.methods.emoe import EMoEConfig
from emoe.methods.vadd import VADDConfig
from emoe.rng import Rng
from emoe.routing.experts import RoutedExperts
from emoe.routing.kl import compare, load_balance, route_kl, routing_entropy
from emoe.routing.routes import draw, greedy, paired, replay, sharpened, straight_through
from emoe.types import BackboneOut, Gate, Route

KNOBS = {"relax_tau": torch.tensor(0.7, dtype=torch.float64), "kl_weight": torch.tensor(1.0, dtype=torch.float64)}
GRADIENTS = ("top-k", "selected", "all")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=generator(seed), dtype=torch.float64).to(dtype)


def gradients(module: torch.nn.Module, value: Tensor) -> dict[str, Tensor]:
    """Gradient of a scalar in every parameter, zeros where it does not reach."""
    names = [name for name, _ in module.named_parameters()]
    found = torch.autograd.grad(value, list(module.parameters()), allow_unused=True, retain_graph=True)
    zeros = [torch.zeros_like(p) for p in module.parameters()]
    return {n: z if g is None else g for n, g, z in zip(names, found, zeros, strict=True)}


def assert_gradients(got: dict[str, Tensor], want: dict[str, Tensor], atol: float, rtol: float = 0.0) -> None:
    assert got.keys() == want.keys()
    for name in want:
        scale = want[name].abs().max().item()
        assert torch.allclose(got[name], want[name], atol=atol + rtol * scale, rtol=0), name


@contextmanager
def recorded(method: MaskedDiffusion) -> Iterator[list[BackboneOut]]:
    """What the network returned, call by call."""
    seen: list[BackboneOut] = []
    handle = method.backbone.register_forward_hook(lambda module, inputs, out: seen.append(out))
    try:
        yield seen
    finally:
        handle.remove()


def batch_of(exact: Enumeration, rows: int = 12, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Clean rows, noisy rows and times that mix all mask patterns."""
    x0 = exact.clean[torch.arange(rows) % len(exact.clean)]
    pattern = exact.patterns[(torch.arange(rows) * 5 + 1) % len(exact.patterns)]
    return x0, torch.where(pattern, exact.mask_id, x0), torch.linspace(0.1, 1, rows, dtype=dtype)


# --- Oracle 5: the divergence of routes (Eq. 7-8) ----------------------------------------------------------------


@pytest.mark.parametrize(("experts", "length", "depth"), [(2, 2, 2), (3, 2, 2), (2, 3, 2), (3, 3, 1)])
def test_kl_along_the_route_averages_to_the_kl_of_whole_routes(tiny, experts: int, length: int, depth: int):
    """Eq. 7-8: E over z ~ q of the sum of the routers' KLs is KL(q(z | x0) || p(z | xt)) over all E^(D L) routes."""
    exact = Enumeration(tiny(EMoEConfig(experts=experts), length=length, depth=depth))
    t = 0.6
    with torch.no_grad():
        for x0, xt in zip(*(rows.tolist() for rows in batch_of(exact, 6)[:2]), strict=True):
            log_q, _, post = exact.read(torch.tensor([x0]), t)
            log_p, _, prior = exact.read(torch.tensor([xt]), t)
            assert log_q.exp().sum().item() == pytest.approx(1, abs=1e-13)
            assert log_p.exp().sum().item() == pytest.approx(1, abs=1e-13)
            whole = (log_q.exp() * (log_q - log_p)).sum()
            each = route_kl([block[0] for block in post], [block[0] for block in prior])  # (R, D)
            assert each.shape == (len(exact.routes), depth) and (each > -1e-15).all()
            assert (log_q[0].exp() @ each.sum(-1)).item() == pytest.approx(whole.item(), abs=1e-12)
            assert (each == 0).all() if x0 == xt else whole > 1e-4


def test_kl_of_the_training_pass_is_that_of_the_drawn_route(tiny):
    """`infer` reports the KL along the z it drew, and the NLL of that z."""
    for config in (EMoEConfig(experts=2), EMoEConfig(experts=3, gradient="all")):
        method = tiny(config)
        exact = Enumeration(method)
        x0, xt, t = batch_of(exact)
        with recorded(method) as seen, torch.no_grad():
            out = method.infer(x0, xt, t, KNOBS, Rng(1))
        for row in range(len(x0)):
            z = torch.stack([gate.expert[row, :, 0] for gate in seen[0].gates])
            r = int((exact.routes == z).all((1, 2)).nonzero())
            terms = exact.terms(t[row].item(), alpha=0.5)
            c = exact.clean.tolist().index(x0[row].tolist())
            x = exact.patterns.tolist().index((xt[row] == exact.mask_id).tolist())
            assert out.kl[row].item() == pytest.approx(terms.path_kl[c, x, r].item(), abs=1e-12)
            nll = masked_nll(out.log_x_theta[row : row + 1], x0[row : row + 1])
            assert nll.item() == pytest.approx(terms.nll[c, x, r].item(), abs=1e-12)


def test_route_kl_gradient_is_its_finite_difference_on_both_sides():
    post, prior = randn(2, 3, 4, seed=1).requires_grad_(), randn(2, 3, 4, seed=2).requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b: route_kl([a, b], [b, a]), (post, prior), eps=1e-6, atol=1e-7)
    step = 1e-6
    route_kl([post], [prior]).sum().backward()
    for side in (post, prior):
        for place in [(0, 0, 0), (1, 2, 3)]:
            values = []
            with torch.no_grad():
                for sign in (1, -1):
                    side[place] += sign * step
                    values.append(route_kl([post], [prior]).sum().item())
                    side[place] -= sign * step
            assert (values[0] - values[1]) / (2 * step) == pytest.approx(side.grad[place].item(), abs=1e-7)


def test_categorical_kl_by_hand():
    q, p = torch.tensor([0.5, 0.25, 0.25]).double(), torch.tensor([0.25, 0.5, 0.25]).double()
    by_hand = 0.5 * math.log(2) - 0.25 * math.log(2)
    assert categorical_kl(q.log(), p.log()).item() == pytest.approx(by_hand, abs=1e-15)
    rows = randn(50, 6, seed=3), randn(50, 6, seed=4)
    kl = categorical_kl(*(torch.log_softmax(r, -1) for r in rows))
    reverse = categorical_kl(*(torch.log_softmax(r, -1) for r in rows[::-1]))
    assert (kl > 0).all() and not torch.allclose(kl, reverse)
    assert (categorical_kl(torch.log_softmax(rows[0], -1), torch.log_softmax(rows[0], -1)) == 0).all()


# --- Oracle 7: drawing routes ------------------------------------------------------------------------------------

RHOS = [
    [0.5, 0.5],
    [0.9, 0.1],
    [0.999, 0.001],
    [1 - 1e-4, 1e-4],
    [0.2, 0.3, 0.5],
    [0.98, 0.01, 0.01],
    [0.5, 0.3, 0.15, 0.05],
    [0.25, 0.25, 0.25, 0.25],
    [0.9985, 0.0005, 0.0005, 0.0005],
    [0.4, 0.2, 0.1, 0.1, 0.05, 0.05, 0.05, 0.05],
]


@pytest.mark.parametrize("rho", RHOS, ids=str)
def test_drawn_routes_follow_the_router_at_every_temperature(rho: list[float]):
    """Eq. 10-11: the executed expert is a draw from rho whatever relax_tau is, and the same one for the same noise."""
    n = 100_000
    logits = torch.tensor(rho).double().log().expand(1, n, -1) + 3.0  # routers are not normalised
    experts = [draw(generator(5), tau, top_k=min(2, len(rho)))(0, logits).expert[0, :, 0] for tau in (0.01, 1.0, 5.0)]
    assert torch.equal(experts[0], experts[1]) and torch.equal(experts[0], experts[2])
    assert chi_square(torch.bincount(experts[0], minlength=len(rho)), torch.tensor(rho)) > ALPHA


@pytest.mark.parametrize("policy", [lambda g: draw(g, 1.0), lambda g: sharpened(g, 1.0)], ids=["draw", "sharpened"])
def test_routes_are_independent_over_positions_blocks_and_rows(policy: Callable[[torch.Generator], Route]):
    n = 50_000
    rho = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3]]).double()
    route = policy(generator(6))
    z = torch.cat([route(d, rho.log().expand(n, 2, 3)).expert[..., 0] for d in range(2)], 1)  # (n, 2 * 2)
    laws = [rho[0], rho[1], rho[0], rho[1]]
    for i in range(4):
        for j in range(i):
            counts = torch.bincount(z[:, i] * 3 + z[:, j], minlength=9)
            assert chi_square(counts, laws[i][:, None] * laws[j]) > ALPHA, (i, j)
    rows = torch.bincount(z[::2, 0] * 3 + z[1::2, 0], minlength=9)
    assert chi_square(rows, laws[0][:, None] * laws[0]) > ALPHA


@pytest.mark.parametrize("tau", [0.25, 0.5, 2.0])
def test_sharpened_routes_follow_the_tempered_router(tau: float):
    rho = torch.tensor([0.5, 0.3, 0.15, 0.05]).double()
    logits = rho.log().expand(1, 100_000, 4) - 1.0
    gate = sharpened(generator(7), tau)(0, logits)
    counts = torch.bincount(gate.expert[0, :, 0], minlength=4)
    assert chi_square(counts, rho ** (1 / tau)) > ALPHA
    assert chi_square(counts, rho) < 1e-9
    assert gate.expert.shape == (1, 100_000, 1) and (gate.weight == 1).all()


def test_route_tau_zero_is_greedy_and_greedy_is_the_arg_max():
    logits = randn(4, 5, 6, seed=8)
    for route in (sharpened(generator(), 0.0), sharpened(generator(), 0), greedy()):
        gate = route(0, logits)
        assert torch.equal(gate.expert[..., 0], logits.argmax(-1)) and (gate.weight == 1).all()


@pytest.mark.parametrize("tau", [1.0, 0.5, 0.0])
def test_sampler_draws_its_routes_at_route_tau(tiny, tau: float):
    """`denoise` hands route_tau to the prior, and what it returns belongs to the routes it drew."""
    method = tiny(EMoEConfig(experts=3, route_tau=tau), depth=1, length=1)
    n = 30_000
    xt, t = torch.full((n, 1), method.space.mask_id), torch.full((n,), 0.5).double()
    with recorded(method) as seen:
        out = method.denoise(xt, t, Rng(9))
    z = seen[0].gates[0].expert[:, 0, 0]
    rho = torch.softmax(seen[0].route_logits[0][0, 0], -1)
    if tau:
        assert chi_square(torch.bincount(z, minlength=3), rho ** (1 / tau)) > ALPHA
    else:
        assert (z == rho.argmax()).all()
    again = method.backbone(xt, t, route=replay(seen[0].gates))
    assert torch.equal(out.log_x_theta, subs(again.logits, xt, method.space.mask_id))
    assert torch.equal(out.latent[0].expert[:, 0, 0], z)


# --- Oracle 11: the straight-through surrogate (Eq. 10-11) -------------------------------------------------------


def top_set(log_rho: Tensor, noise: Tensor, k: int) -> Tensor:
    return (log_rho + noise).argsort(-1, descending=True)[..., :k]


@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("tau", [0.1, 0.7, 2.0])
@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_gate_gradient_is_the_formula_and_the_finite_difference(gradient: str, tau: float, top_k: int):
    """dw_j / d logit_e = w_j (1[j = e] - w_e) / tau over the kept experts, w = renormalised relaxed weights."""
    logits, noise = randn(2, 3, 4, seed=9).requires_grad_(), gumbel((2, 3, 4), generator(10))
    log_rho = torch.log_softmax(logits, -1)
    gate = straight_through(log_rho, noise, tau, top_k=top_k, gradient=gradient)
    kept = 4 if gradient == "all" else top_k
    columns = 1 if gradient == "selected" else kept
    order = top_set(log_rho.detach(), noise, kept)
    assert torch.equal(gate.expert, order[..., :columns])
    value = torch.zeros(2, 3, columns).double()
    value[..., 0] = 1
    assert torch.equal(gate.weight, value)

    def relaxed(at: Tensor) -> Tensor:
        return torch.softmax(((at + noise) / tau).gather(-1, order), -1)  # frozen noise and frozen choice

    w = relaxed(logits.detach())
    cotangent = randn(2, 3, columns, seed=11)
    (cotangent * gate.weight).sum().backward()
    full = torch.zeros(2, 3, kept).double()
    full[..., :columns] = cotangent
    on_kept = w * (full - (full * w).sum(-1, keepdim=True)) / tau
    by_hand = torch.zeros(2, 3, 4).double().scatter(-1, order, on_kept)
    assert torch.allclose(logits.grad, by_hand, atol=1e-13)
    step = 1e-6
    for place in [(0, 0, 0), (0, 2, 3), (1, 1, 1), (1, 2, 2)]:
        bump = torch.zeros(2, 3, 4).double()
        bump[place] = step
        change = (relaxed(logits.detach() + bump) - relaxed(logits.detach() - bump))[..., :columns]
        assert ((cotangent * change).sum() / (2 * step)).item() == pytest.approx(by_hand[place].item(), abs=1e-7)


@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_straight_through_output_is_bit_equal_to_hard_routing(scramble, gradient: str, dtype: torch.dtype):
    logits, x = randn(3, 5, 4, seed=12, dtype=dtype).requires_grad_(), randn(3, 5, 8, seed=13, dtype=dtype)
    paths = ["loop", "dense"] if dtype == torch.float64 else ["loop", "dense", "grouped"]
    for tau in (0.1, 0.37, 1.0):
        for seed in range(5):
            noise = gumbel((3, 5, 4), generator(seed))
            gate = straight_through(torch.log_softmax(logits, -1), noise, tau, gradient=gradient)
            assert gate.weight.dtype == dtype and gate.weight.requires_grad
            hard = Gate(gate.expert[..., :1], torch.ones(3, 5, 1, dtype=dtype))
            assert torch.equal(gate.weight[..., 0], hard.weight[..., 0]) and (gate.weight[..., 1:] == 0).all()
            for path in paths:
                experts = scramble(RoutedExperts(8, 16, 4, path).to(dtype), seed)
                with torch.no_grad():
                    expected = experts(x, hard)
                assert torch.equal(experts(x, gate), expected), (path, tau)


@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("dispatch", ["loop", "dense"])
def test_router_gradient_through_the_experts_is_the_formula(scramble, gradient: str, dispatch: str):
    """out = sum_j w_j f_j(x): the router learns from all kept experts, x and the experts only from the drawn one."""
    experts = scramble(RoutedExperts(6, 8, 4, dispatch).double(), 1)
    x, logits = randn(2, 3, 6, seed=14).requires_grad_(), randn(2, 3, 4, seed=15).requires_grad_()
    noise, cotangent, tau = gumbel((2, 3, 4), generator(16)), randn(2, 3, 6, seed=17), 0.6
    gate = straight_through(torch.log_softmax(logits, -1), noise, tau, gradient=gradient)
    (experts(x, gate) * cotangent).sum().backward()

    def run(e: int) -> Tensor:
        return torch.nn.functional.gelu(x @ experts.w_in[e] + experts.b_in[e]) @ experts.w_out[e] + experts.b_out[e]

    order = top_set(torch.log_softmax(logits.detach(), -1), noise, 4 if gradient == "all" else 2)
    w = torch.softmax(((logits.detach() + noise) / tau).gather(-1, order), -1)
    value = torch.stack([(run(e) * cotangent).sum(-1) for e in range(4)], -1)  # <v, f_e(x)>
    score = value.detach().gather(-1, order)
    if gradient == "selected":
        score = score * torch.tensor([1.0, 0.0]).double()
    on_kept = w * (score - (score * w).sum(-1, keepdim=True)) / tau
    assert torch.allclose(logits.grad, torch.zeros_like(logits).scatter(-1, order, on_kept), atol=1e-12)
    wanted = torch.autograd.grad(
        value.gather(-1, order[..., :1]).sum(), [x, experts.w_in, experts.b_in, experts.w_out, experts.b_out]
    )
    got = [x.grad, experts.w_in.grad, experts.b_in.grad, experts.w_out.grad, experts.b_out.grad]
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_whole_training_gradient_is_the_finite_difference_of_the_surrogate(
    tiny, gradient: str, monkeypatch: pytest.MonkeyPatch
):
    """The network with noise, choices and undrawn experts' outputs frozen, differentiated by differences.

    Loss = NLL + KL of `infer`, in every parameter tensor: nothing is detached that should not be, and reverse.
    """
    method = tiny(EMoEConfig(experts=3, gradient=gradient, top_k=2))
    x0, xt, t = batch_of(Enumeration(method), 8)

    def loss() -> Tensor:
        out = method.infer(x0, xt, t, KNOBS, Rng(2))
        return (masked_nll(out.log_x_theta, x0) / t + out.kl).sum()

    want = gradients(method, loss())

    frozen: list[tuple[Tensor, Tensor]] = []  # of each block: the kept experts, their relaxed weights
    outputs: list[Tensor] = []  # of each block: what the kept experts gave
    recording = True
    columns = 1 if gradient == "selected" else 3 if gradient == "all" else 2

    def surrogate_draw(source: torch.Generator, tau: Tensor, **_: object) -> Route:
        def policy(block: int, logits: Tensor) -> Gate:
            perturbed = torch.log_softmax(logits, -1) + gumbel(tuple(logits.shape), source)
            if recording:
                order = perturbed.topk(3 if gradient == "all" else 2, -1).indices
                frozen.append((order, torch.softmax((perturbed / tau).gather(-1, order), -1)[..., :columns]))
            order, start = frozen[block]
            weight = torch.softmax((perturbed / tau).gather(-1, order), -1)[..., :columns]
            hard = torch.zeros_like(weight)
            hard[..., 0] = 1
            return Gate(order[..., :columns], weight - start + hard)

        return policy

    calls = [0]

    def surrogate_experts(self: RoutedExperts, x: Tensor, gate: Gate) -> Tensor:
        kept = []
        for e in range(3):
            hidden = torch.nn.functional.gelu(x @ self.w_in[e] + self.b_in[e])
            kept.append(hidden @ self.w_out[e] + self.b_out[e])
        values = torch.stack(kept, -2).gather(-2, gate.expert[..., None].expand(*gate.expert.shape, x.shape[-1]))
        block = calls[0] % 2
        calls[0] += 1
        if recording:
            outputs.append(values)
        values = torch.cat([values[..., :1, :], outputs[block][..., 1:, :]], -2)
        return (gate.weight[..., None] * values).sum(-2)

    monkeypatch.setattr(emoe_method, "draw", surrogate_draw)
    monkeypatch.setattr(RoutedExperts, "forward", surrogate_experts)
    with torch.no_grad():
        loss()
        recording = False
        step = 1e-5
        for number, (name, parameter) in enumerate(method.named_parameters()):
            way = randn(*parameter.shape, seed=100 + number)
            way /= way.norm()
            values = []
            for sign in (1, -1):
                parameter.add_(way, alpha=sign * step)
                values.append(loss().item())
                parameter.add_(way, alpha=-sign * step)
            slope = (values[0] - values[1]) / (2 * step)
            assert slope == pytest.approx((want[name] * way).sum().item(), abs=2e-6, rel=1e-6), name
    routers = [name for name in want if ".router." in name]
    assert routers and all(want[name].abs().max() > 1e-3 for name in routers)


# --- Oracle 14 and 17: one fused pass ----------------------------------------------------------------------------


def sequential(method: MaskedDiffusion, x0: Tensor, xt: Tensor, t: Tensor, rng: Rng) -> tuple[Tensor, Tensor, tuple]:
    """Algo. 1 as it is printed: a clean pass that draws z, then a noisy pass that is forced onto it."""
    config = method.config
    policy = draw(rng.stream("route"), KNOBS["relax_tau"].to(t.dtype), top_k=config.top_k, gradient=config.gradient)
    marks = (xt == method.space.mask_id) if config.mask_aware else None
    clean = method.backbone(x0, t, marks=marks, route=policy)
    noisy = method.backbone(xt, t, route=replay(clean.gates))
    kl = torch.zeros_like(t)
    for post, prior in zip(clean.route_logits, noisy.route_logits, strict=True):
        q, p = torch.log_softmax(post, -1), torch.log_softmax(prior, -1)
        kl = kl + (q.exp() * (q - p)).sum((1, 2))
    return masked_nll(subs(noisy.logits, xt, method.space.mask_id), x0), kl, clean.gates


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(
    ("dtype", "dispatch"),
    [(torch.float64, "loop"), (torch.float64, "dense"), (torch.float32, "loop"), (torch.float32, "grouped")],
    ids=["fp64-loop", "fp64-dense", "fp32-loop", "fp32-grouped"],
)
def test_fused_pass_equals_two_passes(tiny, dtype: torch.dtype, dispatch: str, depth: int):
    config = EMoEConfig(experts=3, mask_aware=depth == 2, gradient=GRADIENTS[depth % 3])
    method = tiny(config, depth=depth, dtype=dtype, dispatch=dispatch)
    x0, xt, t = batch_of(Enumeration(method), 24, dtype)
    nll, kl, gates = sequential(method, x0, xt, t, Rng(3))
    knobs = {name: value.to(dtype) for name, value in KNOBS.items()}
    with recorded(method) as seen:
        out = method.infer(x0, xt, t, knobs, Rng(3))
    assert len(seen) == 1 and len(seen[0].logits) == len(x0)
    for fused, plain in zip(seen[0].gates, gates, strict=True):
        assert torch.equal(fused.expert[-len(x0) :], plain.expert)
        assert torch.equal(fused.expert[: len(x0)], plain.expert)
    exact, close = (1e-12, 0.0) if dtype == torch.float64 else (0.0, 1e-5)
    for got, want in ((masked_nll(out.log_x_theta, x0), nll), (out.kl, kl)):
        assert torch.allclose(got, want, atol=exact + close, rtol=close)
        assert_gradients(gradients(method, got.sum()), gradients(method, want.sum()), exact, close)


def test_clean_pass_cut_at_the_last_router_is_free(tiny):
    """Dropping the clean half after its last router changes no value and no gradient."""
    method = tiny(EMoEConfig(experts=3))
    x0, xt, t = batch_of(Enumeration(method))
    both, times = torch.cat([x0, xt]), torch.cat([t, t])

    def uncut(inner: Route) -> Route:
        def policy(block: int, logits: Tensor) -> Gate:
            gate = inner(block, logits[: len(x0)])
            return Gate(gate.expert.repeat(2, 1, 1), gate.weight.repeat(2, 1, 1))

        return policy

    results = []
    for wrap in (lambda inner: paired(inner, 2), uncut):
        out = method.backbone(both, times, route=wrap(draw(generator(4), 0.7)))
        post, prior = zip(*(logits.chunk(2) for logits in out.route_logits), strict=True)
        nll = masked_nll(subs(out.logits[-len(x0) :], xt, method.space.mask_id), x0)
        value = nll.sum() + route_kl(post, prior).sum()
        results.append((len(out.logits), out.gates[-1].keep_from, value, gradients(method, value)))
    cut, whole = results
    assert (cut[0], whole[0]) == (len(x0), 2 * len(x0)) and (cut[1], whole[1]) == (len(x0), 0)
    assert cut[2].item() == pytest.approx(whole[2].item(), abs=1e-12)
    assert_gradients(cut[3], whole[3], 1e-12)


# --- Oracle 15: experts ------------------------------------------------------------------------------------------


def one_hot_mixture(experts: RoutedExperts, x: Tensor, gate: Gate) -> Tensor:
    """sum_e mix_e f_e(x) over all experts; those that are not drawn give only the gradient of their weight."""
    out = torch.zeros_like(x)
    drawn = gate.expert[..., :1]
    for e in range(experts.experts):
        hidden = torch.nn.functional.gelu(x @ experts.w_in[e] + experts.b_in[e])
        f = hidden @ experts.w_out[e] + experts.b_out[e]
        f = torch.where(drawn == e, f, f.detach())
        out = out + ((gate.expert == e) * gate.weight).sum(-1, keepdim=True) * f
    return out


# Three of five experts without rows, one with a single row; all rows on one expert; all experts in use.
LOADS = {
    "empty and single": [3, 3, 1, 3, 3, 3, 3, 3, 3, 3, 3, 3],
    "collapsed": [2] * 12,
    "even": [0, 1, 2, 3, 4, 4, 3, 2, 1, 0, 2, 2],
}


@pytest.mark.parametrize("load", LOADS, ids=list(LOADS))
@pytest.mark.parametrize(
    ("dispatch", "dtype"),
    [("loop", torch.float64), ("dense", torch.float64), ("grouped", torch.float32), ("auto", torch.float32)],
    ids=["loop", "dense", "grouped", "auto"],
)
@pytest.mark.parametrize("k", [1, 2])
def test_every_dispatch_is_the_one_hot_mixture(scramble, load: str, dispatch: str, dtype: torch.dtype, k: int):
    experts = scramble(RoutedExperts(8, 16, 5, dispatch).to(dtype), 2)
    first = torch.tensor(LOADS[load]).view(3, 4)
    expert = torch.stack([first, (first + 1) % 5], -1)[..., :k]
    logits = randn(3, 4, k, seed=18, dtype=dtype).requires_grad_()
    soft = torch.softmax(logits, -1)
    weight = soft - soft.detach() + torch.eye(k, dtype=dtype)[0]
    x, cotangent = randn(3, 4, 8, seed=19, dtype=dtype).requires_grad_(), randn(3, 4, 8, seed=20, dtype=dtype)
    inputs = [x, logits, *experts.parameters()]
    got, want = experts(x, Gate(expert, weight)), one_hot_mixture(experts, x, Gate(expert, weight))
    tolerance = 1e-12 if dtype == torch.float64 else 2e-6
    assert torch.allclose(got, want, atol=tolerance)
    got_grads = torch.autograd.grad((got * cotangent).sum(), inputs, retain_graph=True)
    want_grads = torch.autograd.grad((want * cotangent).sum(), inputs, retain_graph=True)
    for a, b in zip(got_grads, want_grads, strict=True):
        assert torch.allclose(a, b, atol=10 * tolerance)
    idle = [e for e in range(5) if e not in first]
    for grad in got_grads[2:]:
        assert (grad[idle] == 0).all()  # exactly, and there: an idle expert still takes part
    summed = torch.autograd.grad(experts(x, Gate(expert, weight)).sum(), inputs)  # an expanded, zero-stride gradient
    assert all(grad.isfinite().all() for grad in summed)


@pytest.mark.parametrize("dispatch", ["loop", "dense", "grouped"])
def test_order_of_rows_does_not_matter(scramble, dispatch: str):
    dtype = torch.float32 if dispatch == "grouped" else torch.float64
    experts = scramble(RoutedExperts(8, 16, 4, dispatch).to(dtype), 3)
    x, expert = randn(6, 2, 8, seed=21, dtype=dtype), torch.randint(0, 4, (6, 2, 1), generator=generator(22))
    gate = Gate(expert, torch.ones(6, 2, 1, dtype=dtype))
    order = torch.randperm(6, generator=generator(23))
    moved = Gate(expert[order], gate.weight[order])
    tolerance = 1e-6 if dispatch == "grouped" else 1e-14
    assert torch.allclose(experts(x[order], moved), experts(x, gate)[order], atol=tolerance)


def test_renaming_experts_changes_no_law_and_no_bound(tiny):
    config = EMoEConfig(experts=3)
    method, renamed = tiny(config), tiny(config)
    order = torch.tensor([2, 0, 1])
    weights = method.state_dict()
    for name in weights:
        if ".router." in name or ".mlp.experts." in name:
            weights[name] = weights[name][order]
    renamed.load_state_dict(weights)
    before, after = Enumeration(method), Enumeration(renamed)
    assert not torch.allclose(before.read(before.states, 0.5)[0], after.read(after.states, 0.5)[0])
    assert torch.allclose(before.law(2), after.law(2), atol=1e-14)
    assert torch.allclose(before.bound(2), after.bound(2), atol=1e-13)


def test_a_method_with_all_rows_on_one_expert_trains_and_leaves_the_others_alone(tiny):
    method = tiny(EMoEConfig(experts=3, gradient="selected"))
    with torch.no_grad():
        for block in method.backbone.trunk.blocks:
            block.mlp.router.bias.copy_(torch.tensor([-1e4, 1e4, -1e4]))
    method(Enumeration(method).clean, KNOBS, Rng(5)).total.backward()
    for block in method.backbone.trunk.blocks:
        for parameter in block.mlp.experts.parameters():
            assert (parameter.grad[[0, 2]] == 0).all() and parameter.grad[1].abs().max() > 0
            assert parameter.grad.isfinite().all()


# --- Load balance and what is logged -----------------------------------------------------------------------------


def test_load_balance_is_one_when_even_and_the_number_of_experts_when_collapsed():
    def balance(logits: Tensor, route: Tensor) -> float:
        found = compare([logits], [logits], [route])
        return load_balance(found.chance, found.used).item()

    even = torch.arange(12).view(3, 4) % 4
    assert balance(torch.zeros(3, 4, 4).double(), even) == pytest.approx(1, abs=1e-7)
    sharp = 200 * torch.nn.functional.one_hot(even, 4).double()
    assert balance(sharp, even) == pytest.approx(1, abs=1e-7)
    one = torch.full((3, 4), 2)
    all_in = torch.tensor([0.0, 0, 200, 0]).double().expand(3, 4, 4)
    assert balance(all_in, one) == pytest.approx(4, abs=1e-7)
    logits = randn(3, 4, 4, seed=24)
    share = torch.tensor([0.25, 0.25, 0.25, 0.25]).double()
    by_hand = 4 * (share * torch.softmax(logits, -1).mean((0, 1))).sum()
    assert balance(logits, even) == pytest.approx(by_hand.item(), abs=1e-7)


@pytest.mark.parametrize("sizes", [(4,), (4, 4, 4), (8, 2, 6)])
def test_all_blocks_at_once_are_as_one_by_one(sizes: tuple[int, ...]):
    post, prior = ([randn(3, size, 4, seed=s + d) for d, size in enumerate(sizes)] for s in (30, 40))
    routes = [torch.randint(4, (3, size), generator=torch.Generator().manual_seed(d)) for d, size in enumerate(sizes)]
    found = compare(post, prior, routes)
    assert torch.allclose(found.kl, route_kl(post, prior), atol=1e-14)
    for d, at in enumerate(found.kl_at.split(sizes, dim=1)):
        assert torch.allclose(at.sum(1), found.kl[:, d], atol=1e-14)
        assert torch.allclose(found.chance[d], torch.softmax(post[d], -1).mean((0, 1)), atol=1e-14)
        counts = torch.bincount(routes[d].flatten(), minlength=4)
        assert torch.allclose(found.used[d], counts / counts.sum().double(), atol=1e-14)
        assert torch.allclose(found.post_entropy[d], routing_entropy(post[d]), atol=1e-14)
        assert torch.allclose(found.prior_entropy[d], routing_entropy(prior[d]), atol=1e-14)


def test_load_balance_pushes_the_router_away_from_the_busy_expert():
    logits = torch.zeros(1, 4, 3).double().requires_grad_()
    busy = torch.tensor([[0, 0, 0, 1]])
    found = compare([logits], [logits], [busy])
    load_balance(found.chance, found.used).sum().backward()
    slope = logits.grad.sum((0, 1))
    assert slope[0] > 0 and slope[2] < slope[1] < slope[0]


def test_routing_entropy_of_certain_and_indifferent_routers():
    assert routing_entropy(torch.zeros(2, 3, 5)).item() == pytest.approx(math.log(5), abs=1e-6)
    assert routing_entropy(torch.tensor([0.0, 500, 0]).expand(2, 3, 3)).item() == pytest.approx(0, abs=1e-6)


def test_balance_adds_the_mean_over_blocks_of_the_posterior_routers(tiny):
    method = tiny(EMoEConfig(experts=3, balance=0.25))
    x0, xt, t = batch_of(Enumeration(method))
    with recorded(method) as seen:
        out = method.infer(x0, xt, t, KNOBS, Rng(6))
    parts = []
    for logits, gate in zip(seen[0].route_logits, seen[0].gates, strict=True):
        share = torch.nn.functional.one_hot(gate.expert[: len(x0), :, 0], 3).double().mean((0, 1))
        parts.append(3 * (share * torch.softmax(logits[: len(x0)], -1).mean((0, 1))).sum())
    assert out.aux.item() == pytest.approx(0.25 * sum(parts).item() / 2, abs=1e-7)
    assert tiny(EMoEConfig(experts=3)).infer(x0, xt, t, KNOBS, Rng(6)).aux is None


def test_logged_numbers_describe_the_routers(tiny):
    method = tiny(EMoEConfig(experts=3))
    x0, xt, t = batch_of(Enumeration(method))
    with recorded(method) as seen:
        out = method.infer(x0, xt, t, KNOBS, Rng(7))
    total = sum(out.log[f"route_kl/block{d}"] for d in (1, 2)) * method.space.length
    assert total.item() == pytest.approx(out.kl.mean().item(), abs=1e-12)
    for d in (1, 2):
        post, prior = seen[0].route_logits[d - 1].chunk(2)
        assert torch.allclose(out.log[f"post_entropy/block{d}"], routing_entropy(post), atol=1e-14)
        assert torch.allclose(out.log[f"prior_entropy/block{d}"], routing_entropy(prior), atol=1e-14)
        counts = torch.bincount(seen[0].gates[d - 1].expert[: len(x0), :, 0].flatten(), minlength=3)
        assert torch.allclose(out.log[f"usage/block{d}"], counts / counts.sum().double())


# --- Options -----------------------------------------------------------------------------------------------------


def test_mask_aware_shows_the_pattern_to_the_posterior_and_to_nothing_else(tiny):
    plain = tiny(EMoEConfig(experts=3))
    aware = tiny(EMoEConfig(experts=3, mask_aware=True))
    extra = set(aware.state_dict()) - set(plain.state_dict())
    assert extra == {"backbone.trunk.mark"}
    aware.load_state_dict(plain.state_dict() | {"backbone.trunk.mark": torch.zeros(8).double()})
    x0, xt, t = batch_of(Enumeration(plain))

    def run(method: MaskedDiffusion) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        with recorded(method) as seen:
            out = method.infer(x0, xt, t, KNOBS, Rng(8))
        denoised = method.denoise(xt, t, Rng(8)).log_x_theta
        first = seen[0].route_logits[0]
        return out.log_x_theta, out.kl, first, denoised

    assert all(torch.equal(a, b) for a, b in zip(run(plain), run(aware), strict=True))
    before = run(aware)
    with torch.no_grad():
        aware.backbone.trunk.mark.copy_(randn(8, seed=25))
    after = run(aware)
    masked = (xt == 1).any(-1)
    post, prior = after[2].chunk(2)
    old_post, old_prior = before[2].chunk(2)
    assert torch.equal(prior, old_prior) and torch.equal(after[3], before[3])
    assert torch.equal(post[~masked], old_post[~masked])
    assert all(not torch.allclose(post[i], old_post[i]) for i in masked.nonzero().flatten())


def test_kl_positions_masked_counts_masked_positions_and_changes_nothing_else(tiny):
    every, masked = tiny(EMoEConfig(experts=3)), tiny(EMoEConfig(experts=3, kl_positions="masked"))
    x0, xt, t = batch_of(Enumeration(every))
    with recorded(masked) as seen:
        some = masked.infer(x0, xt, t, KNOBS, Rng(9))
    full = every.infer(x0, xt, t, KNOBS, Rng(9))
    assert torch.equal(some.log_x_theta, full.log_x_theta) and torch.equal(some.kl, full.kl) and full.train_kl is None
    is_mask = xt == 1
    assert (some.train_kl[~is_mask.any(-1)] == 0).all()
    assert torch.equal(some.train_kl[is_mask.all(-1)], full.kl[is_mask.all(-1)])
    by_hand = torch.zeros(len(x0)).double()
    for logits in seen[0].route_logits:
        post, prior = (torch.log_softmax(half, -1) for half in logits.chunk(2))
        by_hand += ((post.exp() * (post - prior)).sum(-1) * is_mask).sum(-1)
    assert torch.allclose(some.train_kl, by_hand, atol=1e-14)
    mixed = is_mask.any(-1) & ~is_mask.all(-1)
    assert mixed.any() and (some.train_kl[mixed] < full.kl[mixed]).all()


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_gradient_options_and_temperature_change_router_gradients_only(tiny, gradient: str):
    """Same weights, same noise: values agree bitwise, gradients of the routers do not."""
    reference, other = tiny(EMoEConfig(experts=3)), tiny(EMoEConfig(experts=3, gradient=gradient))
    x0, xt, t = batch_of(Enumeration(reference))
    a = reference.infer(x0, xt, t, KNOBS, Rng(10))
    b = other.infer(x0, xt, t, KNOBS | {"relax_tau": torch.tensor(0.3).double()}, Rng(10))
    assert torch.equal(a.log_x_theta, b.log_x_theta) and torch.equal(a.kl, b.kl)
    first = gradients(reference, masked_nll(a.log_x_theta, x0).sum())
    second = gradients(other, masked_nll(b.log_x_theta, x0).sum())
    assert torch.allclose(first["backbone.head.weight"], second["backbone.head.weight"], atol=1e-12)
    last = "backbone.trunk.blocks.1.mlp.experts.w_out"
    assert torch.allclose(first[last], second[last], atol=1e-12)
    router = "backbone.trunk.blocks.1.mlp.router.weight"
    assert not torch.allclose(first[router], second[router], atol=1e-6)


# --- VADD --------------------------------------------------------------------------------------------------------


def test_gaussian_kl_is_the_closed_form_and_the_monte_carlo_mean():
    mean, log_std = randn(3, 2, seed=26), 0.5 * randn(3, 2, seed=27)
    q = torch.distributions.Normal(mean, log_std.exp())
    p = torch.distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean))
    assert torch.allclose(gaussian_kl(mean, log_std), torch.distributions.kl_divergence(q, p).sum(-1), atol=1e-14)
    z = mean + log_std.exp() * randn(100_000, 3, 2, seed=28)
    ratio = (q.log_prob(z) - p.log_prob(z)).sum(-1)
    error = ratio.std(0) / math.sqrt(len(z))
    assert ((ratio.mean(0) - gaussian_kl(mean, log_std)).abs() < 4 * error).all()
    assert (gaussian_kl(torch.zeros(1, 4), torch.zeros(1, 4)) == 0).all()


def test_vadd_draws_its_latent_from_the_encoder(tiny):
    """z = mean + std * noise of the clean row and the mask pattern; log x_theta is that of the network under z."""
    method = tiny(VADDConfig(latent=3))
    x0, xt, t = torch.tensor([[0, 2], [2, 2]]), torch.tensor([[0, 1], [1, 1]]), torch.tensor([0.3, 0.8]).double()
    out = method.infer(x0, xt, t, {}, Rng(11))
    mean, log_std = method.encoder(x0, t, xt == 1).chunk(2, -1)
    noise = torch.randn(2, 3, generator=Rng(11).stream("latent"), dtype=torch.float64)
    z = mean + log_std.exp() * noise
    assert torch.equal(out.log_x_theta, subs(method.backbone(xt, t, cond=z).logits, xt, 1))
    assert torch.equal(out.kl, gaussian_kl(mean, log_std))
    prior = method.denoise(xt, t, Rng(11))
    assert torch.equal(prior.latent, noise)
    assert torch.equal(prior.log_x_theta, subs(method.backbone(xt, t, cond=noise).logits, xt, 1))
    other = method.encoder(x0, t, torch.zeros_like(xt, dtype=torch.bool))
    assert not torch.allclose(other, torch.cat([mean, log_std], -1))  # the encoder sees the mask pattern


@pytest.mark.parametrize("schedule", [None, CosineSchedule()], ids=["linear", "cosine"])
def test_vadd_weighs_its_kl_by_lambda_or_by_lambda_times_the_elbo_weight(tiny, schedule):
    extra = {} if schedule is None else {"schedule": schedule}
    t = torch.tensor([0.25, 0.5]).double()
    knobs = {"kl_weight": torch.tensor(0.4, dtype=torch.float64)}
    plain = tiny(VADDConfig(**extra))
    weighted = tiny(VADDConfig(elbo_weighted=True, **extra))
    assert (plain.kl_weight(t, knobs) == 0.4).all()
    factor = torch.tensor([4.0, 2.0]).double() if schedule is None else schedule.elbo_weight(t)
    assert torch.allclose(weighted.kl_weight(t, knobs), 0.4 * factor)
    x0 = Enumeration(plain).clean
    a, b = plain(x0, knobs, Rng(12)), weighted(x0, knobs, Rng(12))
    assert torch.equal(a.log["recon"], b.log["recon"]) and torch.equal(a.log["kl"], b.log["kl"])
    assert a.total.item() == pytest.approx((a.log["recon"] + 0.4 * a.log["kl"]).item(), rel=1e-14)
    assert b.total > a.total


@pytest.mark.parametrize("config", [EMoEConfig(experts=2), VADDConfig(latent=2)], ids=["emoe", "vadd"])
def test_loss_reads_the_numbers_that_the_method_names_as_ramps(tiny, config):
    method = tiny(config)
    knobs = {name: torch.tensor(ramp(0, 10)) for name, ramp in method.ramps.items()}
    assert method(Enumeration(method).clean, knobs, Rng(13)).total.isfinite()
    heavier = knobs | {"kl_weight": knobs["kl_weight"] + 1}
    a, b = (method(Enumeration(method).clean, k, Rng(13)) for k in (knobs, heavier))
    assert (b.total - a.total).item() == pytest.approx(a.log["kl"].item(), rel=1e-6)


def test_experts_agree_under_autocast():
    values, grads = [], []
    for dispatch in ("loop", "dense", "grouped"):
        torch.manual_seed(3)
        experts = RoutedExperts(16, 32, 4, dispatch)
        x = torch.randn(3, 5, 16)
        gate = Gate(torch.randint(4, (3, 5, 1)), torch.ones(3, 5, 1))
        with torch.autocast("cpu", torch.bfloat16):
            out = experts(x, gate)
        out.float().square().sum().backward()
        values.append(out.detach().float())
        grads.append(experts.w_in.grad)
    exact = RoutedExperts(16, 32, 4, "loop")
    exact.load_state_dict(experts.state_dict())
    want = exact(x, gate).detach()
    assert all(torch.allclose(value, want, atol=0.02) for value in values)
    assert all((grad - grads[0]).norm() < 0.02 * grads[0].norm() for grad in grads)
