"""log p(x0 | xt, z): greedy latents, and latents drawn from the prior, whose mean is the exact mixture."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from enumeration import predict
from torch import Tensor

from emoe.config import ConfigError
from emoe.diffusion.masking import subs
from emoe.methods.emoe import EMoEConfig
from emoe.methods.masked import MaskedDiffusion
from emoe.methods.mdlm import MDLMConfig
from emoe.methods.sedd import SEDDConfig
from emoe.methods.vadd import VADDConfig
from emoe.recipes import get_recipe
from emoe.rng import Rng
from emoe.routing.routes import greedy
from emoe.runs.run import Run

CONFIGS = [MDLMConfig(), VADDConfig(latent=1), EMoEConfig(experts=3)]
ROWS = torch.tensor([[1, 1, 1], [1, 0, 1], [2, 1, 0]])  # the mask is 1
every_method = pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.kind)


def run_of(method: MaskedDiffusion) -> Run:
    return Run(Path("run"), get_recipe("toy-8modes-mdlm"), method, 0)


@every_method
def test_drawn_latents_have_the_mean_of_the_exact_mixture(tiny, config):
    """At the time that is the share of masks; each position by itself, since the latent ties them."""
    method, n = tiny(config, length=3), 4_000
    for row in ROWS:
        law = method.components(row[None], (row == 1).double().mean().item())
        want = torch.einsum("r,rlv->lv", law.log_weight[0].exp(), law.log_token[0].exp())
        probs = run_of(method).log_probs(row.expand(n, -1), seed=1).exp()
        assert torch.allclose(probs.sum(-1), torch.ones(n, 3).double()) and (probs[..., 1] == 0).all()
        error = probs.std(0) / math.sqrt(n)
        assert ((probs.mean(0) - want).abs() <= 4.5 * error + 1e-6).all()
        assert (error.max() > 1e-3) == method.has_latent


@every_method
def test_greedy_latents_are_the_most_likely_ones(tiny, config):
    method = tiny(config, length=3)
    t = (ROWS == 1).double().mean(1)
    inputs = {"vadd": {"cond": torch.zeros(3, 1).double()}, "emoe": {"route": greedy()}}.get(config.kind, {})
    want = subs(predict(method.backbone, ROWS, t, **inputs).logits, ROWS, 1)
    run = run_of(method)
    for seed in (0, 1):
        assert torch.allclose(run.log_probs(ROWS, routes="greedy", seed=seed).exp(), want.exp(), atol=1e-6)
    drawn = [run.log_probs(ROWS, seed=seed) for seed in (0, 0, 1)]
    assert torch.equal(drawn[0], drawn[1]) and torch.equal(drawn[0], drawn[2]) == (not method.has_latent)
    clean = ROWS != 1
    assert (drawn[0].gather(-1, ROWS[..., None]).squeeze(-1)[clean] == 0).all()


def test_rows_without_masks_and_other_methods(tiny):
    row = torch.tensor([[0, 2, 2]])
    log_probs: Tensor = tiny(EMoEConfig(experts=2), length=3).log_probs(row, Rng(0))
    assert torch.equal(log_probs.exp(), torch.nn.functional.one_hot(row, 3).double())
    with pytest.raises(ConfigError, match="log_probs: SEDD does not predict masked tokens independently"):
        tiny(SEDDConfig()).log_probs(row, Rng(0))
