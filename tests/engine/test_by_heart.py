"""Methods that are not masked diffusion as a whole, through the engine: learning rows by heart, and resuming."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from processes import outcome

from emoe.evaluation.likelihood import estimate_nll
from emoe.runs.run import Run
from emoe.runs.train import train
from emoe.types import Likelihood

AR = {"method": "ar", "backbone.causal": True}
BD3LM = {"method": "bd3lm", "method.block": 2, "method.t_low": 0.1}


def trained(folder: Path, run: str, settings: dict[str, object], *, resume: bool = False) -> Run:
    """A small DiT on 64 rows that count in steps of 1 to 4, modulo 5."""
    n = np.arange(64)[:, None]
    np.save(folder / "rows.npy", (n + (n // 5 % 4 + 1) * np.arange(6)) % 5)
    small: dict[str, object] = {
        "domain.path": str(folder / "rows.npy"), "backbone": "dit", "backbone.width": 32, "backbone.heads": 2,
        "backbone.depth": 2, "backbone.hidden": 64, "backbone.cond_size": 16, "backbone.time_size": 16,
        "backbone.dropout": 0, "train.batch": 64, "train.precision": "fp32", "optim.lr": 5e-3,
    }  # fmt: skip
    return train("rows-mdlm", folder / run, settings=small | settings, device="cpu", callbacks=[], resume=resume)


@pytest.mark.parametrize(("method", "likelihood", "nfe"), [(AR, "exact", 6), (BD3LM, "nelbo", 12)], ids=["ar", "bd3lm"])
def test_rows_are_learned_by_heart(method: dict[str, object], likelihood: str, nfe: int, tmp_path: Path) -> None:
    """20 different rows have 3 nats; free symbols would have 6 log 5 = 9.7."""
    run = trained(tmp_path, "run", method | {"train.steps": 200})
    rows = run.domain.rows.long()
    known, counts = rows.unique(dim=0, return_counts=True)
    share = counts / counts.sum()
    entropy, free = -(share * share.log()).sum().item(), 6 * math.log(5)
    nll = estimate_nll(run.method, rows.repeat(20, 1), Likelihood.parse(likelihood)).value
    assert entropy - 0.1 < nll < entropy + 0.1 * (free - entropy)
    drawn = run.sample(200, nfe)
    assert (drawn[:, None] == known).all(-1).any(-1).double().mean() > 0.8


@pytest.mark.parametrize("method", [AR, BD3LM], ids=["ar", "bd3lm"])
def test_a_resumed_run_is_the_same_run(method: dict[str, object], tmp_path: Path) -> None:
    settings = method | {"backbone.dropout": 0.1, "train.steps": 8, "train.save_every": 4}
    trained(tmp_path, "whole", settings)
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    shutil.rmtree(tmp_path / "parts" / "checkpoints" / "step-000000008")
    trained(tmp_path, "parts", settings, resume=True)
    assert outcome(tmp_path / "whole") == outcome(tmp_path / "parts")
