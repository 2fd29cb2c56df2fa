"""A captured CUDA graph trains like the eager step (needs a GPU: pytest -m gpu)."""

import pytest
import torch

from emoe.config import override
from emoe.engine.stepper import Stepper
from emoe.recipes import get_recipe
from emoe.rng import Rng

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def _losses(recipe: str, *, graph: bool, steps: int, parts: int = 1) -> tuple[list[float], list[torch.Tensor]]:
    experiment = override(get_recipe(recipe), {"train.precision": "fp32", "train.ema": "0.99"})
    domain = experiment.domain.build(0)
    device = torch.device("cuda")
    method = experiment.build_method(domain.space).to(device)
    step = Stepper(
        method,
        domain.batches(64, 0, device=device),
        method.ramps,
        experiment.optim,
        total=steps,
        rng=Rng(1, device=device),
        ema=experiment.train.ema,
        precision="fp32",
        graph=graph,
        accumulate=parts,
    )
    losses = []
    for h in range(steps):
        step(h)
        losses.append(step.loss.total.item())
    assert (step.graph is not None) == graph
    return losses, [*method.parameters(), *step.optimizer.ema]


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("recipe", ["toy-8modes-mdlm", "toy-8modes-vadd", "toy-8modes-emoe"])
def test_graph_equals_eager(recipe: str, parts: int) -> None:
    eager, eager_weights = _losses(recipe, graph=False, steps=60, parts=parts)
    graph, graph_weights = _losses(recipe, graph=True, steps=60, parts=parts)
    assert len(set(graph)) == len(graph), "a replay must see new data and new noise"
    torch.testing.assert_close(torch.tensor(graph), torch.tensor(eager), rtol=2e-4, atol=2e-5)
    for a, b in zip(graph_weights, eager_weights, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=2e-4)
