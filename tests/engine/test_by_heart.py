"""Methods that are not masked diffusion as a whole, through the engine: learning rows by heart, and resuming."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from emoe.evaluation.likelihood import estimate_nll
from emoe.evaluation.pools import draw_pool
from emoe.experiment import Experiment, customise
from emoe.recipes import get_recipe
from emoe.runs import train
from emoe.types import Convention

AR = {"method": "ar", "backbone.causal": "true"}
BD3LM = {"method": "bd3lm", "method.block": "2", "method.t-low": "0.1"}
METHODS = pytest.mark.parametrize("settings", [AR, BD3LM], ids=lambda settings: settings["method"])


def experiment(folder: Path, settings: dict[str, str]) -> Experiment:
    """64 rows in a file that count in steps of 1 to 4, modulo 5, and a small DiT."""
    n = np.arange(64)[:, None]
    np.save(folder / "rows.npy", (n + (n // 5 % 4 + 1) * np.arange(6)) % 5)
    small = {
        "domain.path": str(folder / "rows.npy"), "backbone": "dit", "backbone.width": "32", "backbone.heads": "2",
        "backbone.depth": "2", "backbone.hidden": "64", "backbone.cond-size": "16", "backbone.time-size": "16",
        "backbone.dropout": "0", "train.batch": "64", "train.precision": "fp32", "optim.lr": "5e-3",
    }  # fmt: skip
    return customise(get_recipe("rows-mdlm"), small | settings)


@pytest.mark.parametrize(
    ("settings", "convention", "nfe"), [(AR, "exact", 6), (BD3LM, "nelbo", 12)], ids=["ar", "bd3lm"]
)
def test_rows_are_learned_by_heart(settings: dict[str, str], convention: str, nfe: int, tmp_path: Path):
    """20 different rows have 3 nats; free symbols would have 6 log 5 = 9.7."""
    run = train(experiment(tmp_path, settings | {"train.steps": "200"}), tmp_path / "run", device="cpu", quiet=True)
    rows = run.domain.rows.long()
    known, counts = rows.unique(dim=0, return_counts=True)
    share = counts / counts.sum()
    entropy, free = -(share * share.log()).sum().item(), 6 * math.log(5)
    nll = estimate_nll(run.method, rows.repeat(20, 1), Convention.parse(convention)).value
    assert entropy - 0.1 < nll < entropy + 0.1 * (free - entropy)
    drawn = draw_pool(run.method, 200, nfe, seed=0).samples
    assert (drawn[:, None] == known).all(-1).any(-1).double().mean() > 0.8


@METHODS
def test_a_resumed_run_is_the_same_run(settings: dict[str, str], tmp_path: Path):
    whole = experiment(tmp_path, settings | {"backbone.dropout": "0.1", "train.steps": "8", "train.save-every": "4"})
    weights = train(whole, tmp_path / "whole", device="cpu", quiet=True).method.state_dict()
    train(whole, tmp_path / "parts", device="cpu", quiet=True)
    newest = max((tmp_path / "parts" / "checkpoints").glob("step-*"))
    for path in sorted(newest.rglob("*"), reverse=True):
        path.unlink()
    newest.rmdir()
    again = train(whole, tmp_path / "parts", resume=True, device="cpu", quiet=True).method.state_dict()
    assert weights.keys() == again.keys() and all(torch.equal(weights[name], again[name]) for name in weights)
