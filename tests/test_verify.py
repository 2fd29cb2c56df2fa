"""`emoe verify` passes on what is right and fails on what is broken."""

from __future__ import annotations

import json

import pytest
import torch
from enumeration import Enumeration

from emoe.cli import main
from emoe.methods.emoe import EMoE, EMoEConfig
from emoe.types import Weighed
from emoe.verify import TINY, exact_terms, gradient_checks, gradient_gap, tiny_method, verify

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


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--method", "mdlm", "--json"]) == 0
    assert all(line["passed"] and line["model"] == "tiny mdlm" for line in json.loads(capsys.readouterr().out))
    assert main(["verify", "--method", "mdml"]) == 2
    assert "did you mean 'mdlm'?" in capsys.readouterr().err
