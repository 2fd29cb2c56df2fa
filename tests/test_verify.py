"""`emoe verify` passes on what is right and fails on what is broken."""

from __future__ import annotations

import json

import pytest
import torch

from emoe.cli import main
from emoe.methods.emoe import EMoE
from emoe.types import Weighed
from emoe.verify import TINY, tiny_method, verify

ROWS = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]])


@pytest.mark.parametrize("kind", TINY)
def test_all_checks_pass_on_sound_methods(kind: str) -> None:
    checks = list(verify(tiny_method(kind, 1), ROWS, steps=(1, 3)))
    assert len(checks) == 9 and [check for check in checks if not check.passed] == []


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


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--method", "mdlm", "--json"]) == 0
    assert all(line["passed"] and line["model"] == "tiny mdlm" for line in json.loads(capsys.readouterr().out))
    assert main(["verify", "--method", "mdml"]) == 2
    assert "did you mean 'mdlm'?" in capsys.readouterr().err
