"""On a GPU (pytest -m gpu): a captured graph trains like the eager step, and a resumed run has the same bits."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from processes import outcome
from small import Settings, stepper_of

from emoe.overrides import override
from emoe.recipes import get_recipe
from emoe.rng import Rng
from emoe.runs.train import train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def losses(recipe: str, *, graph: bool, steps: int, parts: int) -> tuple[list[float], list[torch.Tensor]]:
    settings = {"train.steps": steps, "train.accumulate": parts, "train.batch": 64, "train.cuda_graph": graph}
    experiment = override(get_recipe(recipe), {"train.precision": "fp32", "train.ema": 0.99, **settings})
    domain, device = experiment.domain.build(0), torch.device("cuda")
    method = experiment.build_method(domain.space).to(device)
    stepper = stepper_of(experiment, domain, method, Rng(1, device=device))
    values = []
    for step in range(steps):
        stepper(step)
        assert stepper.loss is not None
        values.append(stepper.loss.total.item())
    assert (stepper.graph is not None) == graph and stepper.notes[0].startswith("kernels: ")
    return values, [*method.parameters(), *stepper.optimizer.ema]


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("recipe", ["toy-8modes-mdlm", "toy-8modes-vadd", "toy-8modes-emoe"])
def test_graph_equals_eager(recipe: str, parts: int) -> None:
    eager, eager_weights = losses(recipe, graph=False, steps=60, parts=parts)
    graph, graph_weights = losses(recipe, graph=True, steps=60, parts=parts)
    assert len(set(graph)) == len(graph), "a replay must see new data and new noise"
    torch.testing.assert_close(torch.tensor(graph), torch.tensor(eager), rtol=2e-4, atol=2e-5)
    for a, b in zip(graph_weights, eager_weights, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=2e-4)


@pytest.mark.parametrize("method", ["mdlm", "vadd", "emoe", "emoe-vimco"])
def test_a_resumed_run_has_the_same_bits(method: str, tmp_path: Path) -> None:
    settings: Settings = {"train.deterministic": True, "train.precision": "bf16", "train.steps": 30}
    settings |= {"train.save_every": 15, "train.log_every": 1}
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    train(f"digits-{method}", whole, settings=settings, device="cuda", callbacks=[])
    shutil.copytree(whole, resumed)
    shutil.rmtree(resumed / "checkpoints" / "step-000000030")
    train(f"digits-{method}", resumed, settings=settings, device="cuda", callbacks=[], resume=True)
    assert outcome(whole) == outcome(resumed)
