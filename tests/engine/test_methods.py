"""Training of methods other than masked diffusion, which must memorise rows, and resumption of several networks."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from processes import outcome
from small import UNET, Settings, network, trained

from emoe.evaluation.measure import estimate_nll
from emoe.types import Likelihood

AR: Settings = {"method": "ar", "backbone.causal": True}
BD3LM: Settings = {"method": "bd3lm", "method.block": 2, "method.t_low": 0.1}
DIT: Settings = {"backbone": "dit", "train.batch": 64, "optim.lr": 5e-3}
DIT |= network(width=32, heads=2, depth=2, hidden=64, cond_size=16, time_size=16, dropout=0)


@pytest.fixture
def rows(tmp_path: Path) -> Settings:
    """A small DiT on 64 rows that count in steps of 1 to 4, modulo 5."""
    n = np.arange(64)[:, None]
    np.save(tmp_path / "rows.npy", (n + (n // 5 % 4 + 1) * np.arange(6)) % 5)
    return DIT | {"domain.path": str(tmp_path / "rows.npy")}


@pytest.mark.parametrize(("method", "likelihood", "nfe"), [(AR, "exact", 6), (BD3LM, "nelbo", 12)], ids=["ar", "bd3lm"])
def test_rows_are_memorised(method: Settings, likelihood: str, nfe: int, rows: Settings, tmp_path: Path) -> None:
    """20 different rows have 3 nats; free symbols would have 6 log 5 = 9.7."""
    run = trained("rows-mdlm", tmp_path / "run", rows | method | {"train.steps": 200})
    clean = run.domain.rows.long()
    known, counts = clean.unique(dim=0, return_counts=True)
    share = counts / counts.sum()
    entropy, free = -(share * share.log()).sum().item(), 6 * math.log(5)
    nll = estimate_nll(run.method, clean.repeat(20, 1), Likelihood.parse(likelihood)).value
    assert entropy - 0.1 < nll < entropy + 0.1 * (free - entropy)
    drawn = run.sample(200, nfe)
    assert (drawn[:, None] == known).all(-1).any(-1).double().mean() > 0.8


@pytest.mark.parametrize("method", [AR, BD3LM, UNET], ids=["ar", "bd3lm", "unet"])
def test_a_resumed_run_is_the_same_run(method: Settings, rows: Settings, tmp_path: Path) -> None:
    recipe, settings = ("rows-emoe", {}) if method is UNET else ("rows-mdlm", rows | {"backbone.dropout": 0.1})
    settings |= method | {"train.steps": 8, "train.save_every": 4}
    trained(recipe, tmp_path / "whole", settings)
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    shutil.rmtree(tmp_path / "parts" / "checkpoints" / "step-000000008")
    trained(recipe, tmp_path / "parts", settings, resume=True)
    assert outcome(tmp_path / "whole") == outcome(tmp_path / "parts")
