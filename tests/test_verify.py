"""`emoe verify` passes on sound methods and finds broken ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from emoe.exact.checks import tiny_methods, verify
from emoe.methods import emoe as emoe_method
from emoe.methods.emoe import EMoE, EMoEConfig
from emoe.methods.masked import Inferred
from emoe.methods.mdlm import MDLMConfig
from emoe.routing.compare import CompareConfig
from emoe.routing.latent import RouteLatent
from emoe.routing.routes import greedy

ROWS = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]])
KL = "KL of the latent, computed and as a mean of log ratios"


def failing(method: EMoE, steps: int = 2) -> set[str]:
    return {check.name for check in verify(method, ROWS, steps=(steps,)) if not check.passed}


@pytest.mark.parametrize("kind", ["mdlm", "vadd", "emoe"])
def test_all_checks_pass_on_sound_methods(kind: str) -> None:
    method = tiny_methods(kind, 1)[kind]
    checks = list(verify(method, ROWS, steps=(1, 3)))
    assert len(checks) == 8 + method.has_latent and [check for check in checks if not check.passed] == []


@pytest.mark.parametrize("compare", [None, CompareConfig(), CompareConfig(sum_last=True, in_turn=True)])
def test_single_precision_and_comparisons_pass(tiny, compare: CompareConfig | None) -> None:
    """At T = 1 the bound of MDLM is its NLL: differences are rounding, and have no spread to compare with."""
    config = EMoEConfig(experts=2, compare=compare) if compare else MDLMConfig()
    assert failing(tiny(config, mask_id=2, dtype=torch.float32), 1) == set()


def test_a_broken_sampler_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sampler always runs the first expert."""
    method = tiny_methods("emoe", 1)["emoe"]
    first = lambda generator, tau: lambda block, logits: greedy()(block, torch.zeros_like(logits))  # noqa: E731
    monkeypatch.setattr(emoe_method, "sharpened", first)
    assert failing(method) == {"samples follow the law, T = 2"}


def test_a_wrong_weight_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importance weights upside down."""
    method, inner = tiny_methods("emoe", 1)["emoe"], RouteLatent.log_ratio
    monkeypatch.setattr(RouteLatent, "log_ratio", lambda self: -inner(self))
    assert failing(method) == {KL, "exact NLL <= iw@2,16 <= bound@2 on average"}


def test_a_wrong_kl_and_a_bound_below_the_nll_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    method, inner = tiny_methods("emoe", 1)["emoe"], RouteLatent.kl
    monkeypatch.setattr(RouteLatent, "kl", lambda self: -inner(self))
    assert {KL, "bound@2 >= exact NLL at each of 4 rows"} <= failing(method)


def test_a_wrong_masked_nll_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    method, inner = tiny_methods("emoe", 1)["emoe"], EMoE.infer

    def generous(self: EMoE, *args: Any) -> Inferred:
        out = inner(self, *args)
        return replace(out, log_token=out.log_token / 2)

    monkeypatch.setattr(EMoE, "infer", generous)
    assert "bound@2 >= exact NLL at each of 4 rows" in failing(method)
