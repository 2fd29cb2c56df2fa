"""A deterministic run on a GPU that is continued from a checkpoint ends with the same bits (pytest -m gpu)."""

import shutil
from pathlib import Path

import pytest
import torch

from emoe.runs import train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("method", ["mdlm", "vadd", "emoe", "emoe-plus"])
def test_a_resumed_run_has_the_same_bits(method: str, tmp_path: Path) -> None:
    settings = {
        "train.deterministic": "true", "train.precision": "bf16", "train.steps": "30", "train.save-every": "15",
        "train.log-every": "1",
    }  # fmt: skip
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    train(f"digits-{method}", whole, settings=settings, device="cuda", quiet=True)
    shutil.copytree(whole, resumed)
    shutil.rmtree(resumed / "checkpoints" / "step-000000030")
    train(f"digits-{method}", resumed, settings=settings, device="cuda", quiet=True, resume=True)
    files = sorted(path.relative_to(whole) for path in (whole / "checkpoints" / "step-000000030").iterdir())
    assert files and all((whole / one).read_bytes() == (resumed / one).read_bytes() for one in files)
    assert (whole / "metrics.jsonl").read_bytes() == (resumed / "metrics.jsonl").read_bytes()
