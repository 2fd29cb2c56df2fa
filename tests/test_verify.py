"""`emoe verify` passes on what is right and fails on what is broken."""

from __future__ import annotations

import itertools
import json
import math

import pytest
import torch
from enumeration import Enumeration
from torch import Tensor

from emoe.cli import main
from emoe.exact import chain_law
from emoe.methods.emoe import EMoE, EMoEConfig
from emoe.types import Weighed
from emoe.verify import (
    TINY,
    claimed_gradients,
    enumerate_routes,
    exact_terms,
    flat_gradient,
    gradient_checks,
    gradient_gap,
    spread,
    tiny_method,
    verify,
)

ROWS = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]])


@pytest.mark.parametrize("kind", TINY)
def test_all_checks_pass_on_sound_methods(kind: str) -> None:
    checks = list(verify(tiny_method(kind, 1), ROWS, steps=(1, 3)))
    assert len(checks) == 9 + 2 * (kind == "emoe") and [check for check in checks if not check.passed] == []


def failing(method: EMoE) -> set[str]:
    return {check.name for check in verify(method, ROWS, steps=(2,)) if not check.passed}


def test_a_broken_sampler_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    method = tiny_method("emoe", 1)
    monkeypatch.setattr("emoe.methods.emoe.sharpened", lambda generator, tau: lambda d, logits: _first_expert(logits))
    assert failing(method) == {"samples follow the law, T = 2"}


def _first_expert(logits: torch.Tensor):
    from emoe.routing.routes import greedy

    return greedy()(0, torch.zeros_like(logits))


def test_a_wrong_weight_and_a_wrong_kl_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    method, weigh = tiny_method("emoe", 1), EMoE.weigh

    def flipped(self: EMoE, *args: object) -> Weighed:
        out = weigh(self, *args)
        return Weighed(out.log_x_theta, -out.log_ratio)

    monkeypatch.setattr(EMoE, "weigh", flipped)
    assert "KL of the latent, computed and as a mean of log ratios" in failing(method)


def test_a_bound_without_its_factor_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A KL counted with the wrong sign makes the bound fall below the truth."""
    method, infer = tiny_method("emoe", 1), EMoE.infer

    def generous(self: EMoE, *args: object):
        out = infer(self, *args)
        return type(out)(out.log_x_theta, -out.kl)

    monkeypatch.setattr(EMoE, "infer", generous)
    assert any(name.startswith("bound@2 >= exact") for name in failing(method))


# --- The gradient of the routers ----------------------------------------------------------------------------------

HALF = torch.full((1,), 0.5, dtype=torch.float64)


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        (EMoEConfig(experts=2), {}),
        (EMoEConfig(experts=3), {"depth": 1, "length": 3, "mask_id": 2}),
        (EMoEConfig(experts=2), {"depth": 3}),
        (EMoEConfig(experts=2, mask_aware=True), {"size": 4}),
    ],
)
def test_exact_terms_are_the_enumerated_ones_and_so_are_their_gradients(tiny, config, sizes) -> None:
    method = tiny(config, **sizes)
    exact = Enumeration(method)
    terms, shape = exact.terms(0.5), (len(exact.clean), len(exact.patterns))
    x0 = exact.clean.repeat_interleave(len(exact.patterns), 0)
    xt = torch.where(exact.patterns.repeat(len(exact.clean), 1), exact.mask_id, x0)
    recon, kl = exact_terms(method, x0, xt, HALF.expand(len(x0)))
    q = terms.log_q.exp()
    wanted = (q * terms.nll).sum(-1), (q * terms.path_kl).sum(-1)
    parameters = list(method.parameters())
    for ours, theirs in zip((recon.view(shape), kl.view(shape)), wanted, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-12, rtol=0) and theirs.max() > 0.01
        weight = torch.linspace(1, 2, ours.numel(), dtype=torch.float64).view(shape)  # no cancelling between rows
        found = [
            torch.autograd.grad((weight * one).sum(), parameters, retain_graph=True, allow_unused=True)
            for one in (ours, theirs)
        ]
        for a, b in zip(*found, strict=True):
            assert (a is None and b is None) or torch.allclose(
                torch.zeros(()) if a is None else a, torch.zeros(()).double() if b is None else b, atol=1e-10, rtol=0
            )


def test_terms_of_masked_positions_only(tiny) -> None:
    every, masked = (tiny(EMoEConfig(experts=2, kl_positions=where)) for where in ("all", "masked"))
    x0, some, none = torch.tensor([[0, 2]]), torch.tensor([[1, 2]]), torch.tensor([[1, 1]])
    assert exact_terms(masked, x0, none, HALF)[1].item() == exact_terms(every, x0, none, HALF)[1].item()
    assert 0 < exact_terms(masked, x0, some, HALF)[1] < exact_terms(every, x0, some, HALF)[1]


def test_what_no_route_follows_has_no_bias_and_the_routers_have_one() -> None:
    """The head's mean gradient is the exact one; at a low temperature the routers' bias shrinks, at a high it grows."""
    method = tiny_method("emoe", 3)
    x0, xt = torch.tensor([[0, 1]]), torch.tensor([[2, 2]])
    head, routers = list(method.backbone.head.parameters()), []
    for name, parameter in method.named_parameters():
        routers += [parameter] * (".router." in name)
    sure = gradient_gap(method, x0, xt, HALF, head, relax_tau=1.0)
    assert sure.cosine > 0.999 and sure.bias < 3 * sure.error < 0.03
    cool, warm, hot = (gradient_gap(method, x0, xt, HALF, routers, relax_tau=tau) for tau in (0.3, 1.0, 3.0))
    assert 20 * warm.error < warm.bias and cool.bias < warm.bias < hot.bias and cool.cosine > warm.cosine > hot.cosine
    assert all(parameter.grad is None for parameter in method.parameters())


def test_a_gradient_that_is_cut_shows(tiny) -> None:
    """Only the executed weight gets a gradient: far from the exact gradient, which the default estimates."""
    found = {}
    for gradient in ("top-k", "selected"):
        method = tiny(EMoEConfig(experts=2, gradient=gradient), mask_id=2)
        with torch.no_grad():  # as a caller may have it
            checks = list(gradient_checks(method, ROWS, 0))
        assert [check.name for check in checks] == [f"straight-through gradient, relax_tau {t}" for t in ("1", "0.1")]
        seen = checks[0].seen
        assert checks[0].passed and seen.startswith("recorded; cosine ") and "worst of 4 rows" in seen
        found[gradient] = float(seen.split("relative bias ")[1].split()[0])
    assert found["top-k"] + 0.1 < found["selected"]


def test_too_many_routes_are_said(tiny) -> None:
    method = tiny(EMoEConfig(experts=5), length=3, depth=3)
    for check in gradient_checks(method, torch.tensor([[0, 0, 2]]), 0):
        assert check.passed and check.seen == "skipped: 15,625 routes are too many to enumerate"


# --- Other estimators, a summed last block, positions that carry in turn ------------------------------------------

FORMS = [(last, carriers) for last in ("drawn", "summed") for carriers in ("all", "spread")]


def plain_tables(method: EMoE, x0: Tensor, xt: Tensor, t: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """log q, its part of positions that carry, log p and log p(x0 | xt, z) of every drawn route, (B, R) each."""
    exact, config = Enumeration(method), method.config
    (_, _, post), (_, token, prior) = exact.read(x0, t), exact.read(xt, t)
    z = exact.routes[None, ..., None].expand(len(x0), -1, -1, -1, 1)  # (B, R, D, L, 1)
    coding, last = max(1, exact.blocks - 1), exact.blocks - 1
    log_q, log_own, log_p, log_last = (torch.zeros(z.shape[:2]).double() for _ in range(4))
    for d in range(exact.blocks):
        q, p = (side[d].gather(-1, z[:, :, d]).squeeze(-1) for side in (post, prior))
        if d == last and config.last_block == "summed":
            log_last = p.sum(-1)
            continue
        own = torch.tensor([config.carriers == "all" or place % coding == d for place in range(exact.length)])
        log_q, log_p = log_q + torch.where(own, q, p).sum(-1), log_p + p.sum(-1)
        log_own = log_own + (q * own).sum(-1)
    chosen = x0[:, None, :, None].expand(-1, z.shape[1], -1, 1)
    log_x = (token.gather(-1, chosen).squeeze(-1) * (xt == exact.mask_id)[:, None]).sum(-1)
    if config.last_block == "drawn":
        return log_q, log_own, log_p, log_x
    inner = config.experts**exact.length  # routes of the last block vary fastest
    log_x = (log_last + log_x).unflatten(1, (-1, inner)).logsumexp(-1)
    return (*(one.unflatten(1, (-1, inner))[..., 0] for one in (log_q, log_own, log_p)), log_x)


@pytest.mark.parametrize(
    ("last_block", "carriers", "sizes"),
    [(*form, sizes) for form in FORMS for sizes in ({}, {"depth": 3, "length": 3})]
    + [("drawn", carriers, {"depth": 1}) for carriers in ("all", "spread")],  # summed, it has nothing to draw
)
def test_every_objective_is_the_enumerated_one_and_so_is_its_gradient(tiny, last_block, carriers, sizes) -> None:
    method = tiny(EMoEConfig(experts=2, last_block=last_block, carriers=carriers), **sizes)
    x0 = torch.tensor([[0, 2, 2], [2, 2, 0]])[:, : method.space.length]
    xt = torch.where(torch.tensor([[True] * 3, [True, False, True]])[:, : method.space.length], 1, x0)
    routes = enumerate_routes(method, x0, xt, torch.full((2,), 0.5, dtype=torch.float64))
    log_q, log_own, log_p, log_x = plain_tables(method, x0, xt, 0.5)
    weight, beta = torch.tensor([2.0, 1.5]).double(), torch.tensor([0.6, 1.0]).double()
    joint = log_p + (weight / beta)[:, None] * log_x
    recon, kl = routes.terms()
    pairs = [
        (recon, -(log_q.exp() * log_x).sum(-1)),
        (kl, (log_q.exp() * (log_q - log_p)).sum(-1)),
        (routes.evidence(weight, beta), -beta * joint.logsumexp(-1)),
        (routes.score(weight, beta), (joint.softmax(-1).detach() * log_own).sum(-1)),
    ]
    parameters = list(method.parameters())
    for ours, theirs in pairs:
        assert torch.allclose(ours, theirs, atol=1e-11, rtol=0) and theirs.abs().min() > 0.01
        slopes = [
            torch.cat(
                [
                    torch.zeros_like(p).flatten() if slope is None else slope.flatten()
                    for slope, p in zip(
                        torch.autograd.grad((one * weight).sum(), parameters, retain_graph=True, allow_unused=True),
                        parameters,
                        strict=True,
                    )
                ]
            )
            for one in (ours, theirs)
        ]
        assert torch.allclose(*slopes, atol=1e-9, rtol=0) and slopes[1].norm() > 0.01
    for ours, theirs in zip(routes.tables(), (log_q, log_p, log_x), strict=True):
        assert torch.allclose(ours.sort(-1).values, theirs.sort(-1).values, atol=1e-12, rtol=0)
    q, p, x = routes.tables()
    assert torch.allclose((q.exp() * p * x).sum(-1), (log_q.exp() * log_p * log_x).sum(-1), atol=1e-11, rtol=0)


@pytest.mark.parametrize(("last_block", "carriers"), [("drawn", "all"), ("summed", "spread")])
def test_the_reference_of_vimco_is_the_bound_over_all_tuples(tiny, last_block: str, carriers: str) -> None:
    options = {"estimator": "vimco", "draws": 2, "gradient": "none"}
    method = tiny(EMoEConfig(experts=2, last_block=last_block, carriers=carriers, **options))
    x0, xt, parameters = torch.tensor([[0, 2]]), torch.tensor([[1, 1]]), list(method.parameters())
    log_q, _, log_p, log_x = (one[0] for one in plain_tables(method, x0, xt, 0.5))
    z = torch.tensor(list(itertools.product(range(len(log_q)), repeat=2)))
    bound = (2 * log_x + log_p - log_q)[z].logsumexp(1) - math.log(2)
    want = flat_gradient(-(log_q[z].sum(1).exp() * bound).sum(), parameters)
    found = claimed_gradients(method, x0, xt, HALF, parameters)
    assert len(found) > 1 and (found.mean(0) - want).norm() < 3 * spread(found) < 0.01 * want.norm()


@pytest.mark.parametrize(("last_block", "carriers"), [("drawn", "spread"), ("summed", "all")])
@pytest.mark.parametrize("estimator", ["leave-one-out", "vimco", "wake-sleep"])
def test_the_gradient_of_draws_is_compared_with_what_it_claims(tiny, estimator, last_block, carriers) -> None:
    """Leave-one-out and VIMCO have no bias; that of wake-sleep falls with more draws."""
    found = {}
    few, many = 2, 300 if estimator == "wake-sleep" else 8
    for draws in (few, many):
        options = {"estimator": estimator, "draws": draws, "gradient": "none"}
        method = tiny(EMoEConfig(experts=2, last_block=last_block, carriers=carriers, **options), mask_id=2)
        routers = [p for name, p in method.named_parameters() if ".router." in name]
        x0, xt = torch.tensor([[0, 1]]), torch.tensor([[2, 2]])
        found[draws] = gradient_gap(method, x0, xt, HALF, routers, relax_tau=1.0, each=2_400)
    if estimator == "wake-sleep":
        assert found[few].bias > max(5 * found[few].error, 3 * found[many].bias) and found[many].cosine > 0.95
    else:
        assert all(gap.bias < 2 * gap.error < 0.4 for gap in found.values())


def test_a_model_with_other_options_is_verified_and_named(tiny) -> None:
    options = {"estimator": "wake-sleep", "draws": 3, "gradient": "none", "last_block": "summed", "carriers": "spread"}
    checks = list(verify(tiny(EMoEConfig(experts=2, **options), mask_id=2), ROWS, steps=(1,)))
    assert [check for check in checks if not check.passed] == []
    assert checks[-1].name == "wake-sleep, 3 draws: gradient" and checks[-1].seen.startswith("recorded; cosine ")
    assert checks[-2].name.startswith("KL of the latent")
    mixed = tiny(EMoEConfig(experts=2, estimator="leave-one-out", draws=2), mask_id=2)
    names = [check.name for check in gradient_checks(mixed, ROWS[:1], 0)]
    assert names == [f"leave-one-out, 2 draws: gradient, relax_tau {tau}" for tau in ("1", "0.1")]


def test_rows_whose_routes_are_averaged(tiny) -> None:
    """With one token of two masked there is no latent: the sampler follows the law, and bounds are bounds of it."""
    plain, method = (tiny(EMoEConfig(experts=2, mean_below=share), mask_id=2) for share in (0.0, 0.5))
    checks = list(verify(method, ROWS, steps=(1, 2)))
    assert [check for check in checks if not check.passed] == []
    assert checks[-1].seen == "skipped: mean_below leaves some rows no routes to enumerate"
    one, two = (chain_law(each, 2) for each in (plain, method))
    assert (one - two).abs().max() > 1e-3 and torch.equal(chain_law(plain, 1), chain_law(method, 1))


def test_what_cannot_be_compared_says_why(tiny) -> None:
    free = tiny(EMoEConfig(experts=2, free_nats=0.1), mask_id=2)
    assert {check.seen for check in gradient_checks(free, ROWS, 0)} == {
        "skipped: free_nats counts the KL by what the whole batch spends"
    }
    vimco = tiny(EMoEConfig(experts=5, estimator="vimco", draws=2, gradient="none"), length=3)
    (check,) = gradient_checks(vimco, torch.tensor([[0, 0, 2]]), 0)
    assert check.passed and check.seen == "skipped: the bound of 2 draws needs a table of 15,625 routes"


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--method", "mdlm", "--json"]) == 0
    assert all(line["passed"] and line["model"] == "tiny mdlm" for line in json.loads(capsys.readouterr().out))
    assert main(["verify", "--method", "mdml"]) == 2
    assert "did you mean 'mdlm'?" in capsys.readouterr().err
