"""A method in a user's script: one file and one recipe are enough for everything that the package's methods can do."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from processes import logged, outcome
from small import TRANSFORMER, Settings, trained

import emoe
import emoe.recipes
from emoe.config import ConfigError
from emoe.evaluation.measure import described, measure_likelihoods
from emoe.exact.checks import tiny_methods, verify
from emoe.exact.laws import chain_law
from emoe.methods.base import MethodConfig
from emoe.runs.run import Run
from emoe.types import Likelihood

SCRIPT = '''
"""Masked diffusion with two heads: the posterior guesses the side from the clean row, the prior tosses a coin."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import logsigmoid

from emoe.config import option
from emoe.diffusion.masking import subs
from emoe.methods.masked import Inferred, MaskedDiffusion, MaskedDiffusionConfig
from emoe.ramps import Linear, Ramp
from emoe.recipes import get_recipe, recipe
from emoe.types import Mixture, Needs


@dataclass(frozen=True, kw_only=True)
class CoinConfig(MaskedDiffusionConfig, kind="coin"):
    """Options of the coin."""

    kl_weight: Ramp = option(Linear(start=0.0, end=1.0), doc="weight of the KL", low=0)

    def needs(self):
        return Needs(cond=1)

    def variant(self):
        return "-fair", " (fair)"


@dataclass(frozen=True)
class Side:
    """Heads with probability sigmoid(logit); the prior is 1/2."""

    logit: torch.Tensor
    heads: torch.Tensor

    @property
    def z(self):
        return 2.0 * self.heads[:, None].to(self.logit.dtype) - 1.0

    def kl(self):
        p = self.logit.sigmoid()
        return p * logsigmoid(self.logit) + (1 - p) * logsigmoid(-self.logit) + math.log(2)

    def log_ratio(self):
        return -math.log(2) - logsigmoid(torch.where(self.heads, self.logit, -self.logit))


class Coin(MaskedDiffusion, config=CoinConfig):
    label, colour, has_latent = "Coin", "#123456", True

    def __init__(self, config, space, backbone):
        super().__init__(config, space, backbone, ramps={"kl_weight": config.kl_weight})
        self.guess = nn.Embedding(space.size, 1)

    def infer(self, noised, ramp, rng):
        logit = self.guess(noised.x0).mean((1, 2))
        draws = torch.rand(logit.shape, generator=rng.stream("latent"), device=logit.device)
        side = Side(logit, draws < logit.sigmoid())
        log_token, _ = self.predict(noised, noised.xt, noised.t, cond=side.z)
        return Inferred(log_token, side, log={"heads": side.heads.float().mean()})

    def prior(self, step, rng):
        draws = torch.rand(len(step.x), generator=rng.stream("latent"), device=step.x.device)
        heads = draws < (1.0 if step.greedy else 0.5)
        return {"cond": Side(self.guess.weight.new_zeros(len(step.x)), heads).z}

    @torch.no_grad()
    def components(self, xt, t, *, seed=0):
        log_token = []
        for z in (-1.0, 1.0):
            out = self.backbone(xt, torch.full((len(xt),), t), cond=self.guess.weight.new_full((len(xt), 1), z))
            log_token.append(subs(self.backbone.read(out.h).double(), xt, self.space.mask_id))
        return Mixture(torch.full((len(xt), 2), -math.log(2)).double(), torch.stack(log_token, 1))


@recipe
def rows_coin():
    """Two heads and a coin on rows of your own."""
    return dataclasses.replace(get_recipe("rows-mdlm"), name="rows-coin", method=CoinConfig(t_low=0.1))
'''


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The imported script, beside a file of rows whose positions agree."""
    folder = tmp_path_factory.mktemp("outside")
    (folder / "my_coin.py").write_text(SCRIPT.lstrip())
    np.save(folder / "rows.npy", np.repeat([[0, 0, 1], [1, 1, 0]], 40, axis=0))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        importlib.import_module("my_coin")
        yield folder
    MethodConfig.members.pop("coin", None)
    emoe.recipes._RECIPES.pop("rows-coin", None)
    sys.modules.pop("my_coin", None)


@pytest.fixture(scope="module")
def settings(script: Path) -> Settings:
    own = TRANSFORMER | {"domain.path": str(script / "rows.npy"), "eval.nfe": [1, 2], "eval.samples": 40}
    return own | {"train.steps": 60, "train.save_every": 30, "train.log_every": 1, "optim.lr": 1e-2}


@pytest.fixture(scope="module")
def run(script: Path, settings: Settings) -> Run:
    return trained("rows-coin", script / "run", settings)


def test_it_trains_and_resumes(run: Run, settings: Settings, tmp_path: Path) -> None:
    records = logged(run.path)
    assert run.step == 60 and {"heads", "kl", "recon", "kl_weight"} <= set(records[0])
    assert np.mean([record["loss"] for record in records[-10:]]) < records[0]["loss"]
    shutil.copytree(run.path, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000000060")
    again = trained("rows-coin", tmp_path / "run", settings, resume=True)
    assert outcome(tmp_path / "run") == outcome(run.path)
    assert torch.equal(again.sample(9, seed=1), emoe.load_run(run.path, device="cpu").sample(9, seed=1))


def test_it_samples_and_completes(run: Run) -> None:
    assert run.sample(9, 2).shape == (9, 3)
    completion = run.complete("0,?,1", 5)
    assert (completion.pool[:, [0, 2]] == torch.tensor([0, 1])).all()
    xt = torch.full((1, 3), run.method.space.mask_id)
    greedy = [run.log_probs(xt, routes="greedy", seed=seed) for seed in range(4)]
    drawn = [run.log_probs(xt, seed=seed) for seed in range(8)]
    assert all(torch.equal(greedy[0], other) for other in greedy)
    assert any(torch.equal(greedy[0], other) for other in drawn) != all(torch.equal(greedy[0], one) for one in drawn)


def test_its_likelihoods_and_exact_law(run: Run) -> None:
    wanted = [Likelihood.parse(name) for name in run.method.likelihoods()]
    rows = measure_likelihoods(run, wanted, rows=50)
    nll = {row.convention: row.value for row in rows if row.metric == "nll"}
    assert nll.keys() == set(run.method.likelihoods()) and nll["iw@1,16"] <= nll["bound@1"] + 0.1
    assert {row.method for row in rows} == {"coin-fair"} and "coordination_gain" in {row.metric for row in rows}
    law = chain_law(run.method, 1)
    assert law.shape == (2, 2, 2) and law.sum().item() == pytest.approx(1)
    checks = list(verify(run.method, torch.tensor([[0, 0, 1], [1, 0, 1]]), steps=(1, 2)))
    assert len(checks) > 6 and all(check.passed for check in checks), checks
    assert set(tiny_methods("coin")) == {"coin"}


def test_its_results_have_its_name_label_and_colour(run: Run) -> None:
    rows = run.evaluate()
    recipe = run.experiment.name
    assert recipe.startswith("rows-coin ") and {row.nfe for row in rows} == {1, 2}
    assert {(row.task, row.data, row.method, row.recipe) for row in rows} == {("rows", "rows", "coin-fair", recipe)}
    assert described(run) == {"coin-fair": {"label": "Coin (fair)", "colour": "#123456"}}


def test_a_run_of_a_method_that_is_not_imported(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(MethodConfig.members, "coin")
    with pytest.raises(
        ConfigError, match="experiment.json: method.kind: 'coin' is not known; allowed: ar, bd3lm, emoe"
    ):
        emoe.load_run(run.path, device="cpu")
