"""The best mixture that the routes of E-MoE can express, fitted to a density directly.

    python research/route_limit.py        seconds; writes results/route-limit.json

With two positions and two blocks one network call of E-MoE is p(i, j) = sum_ab w_a v_b P_ab(i) Q_ab(j): the routes a, b
of the two positions in block 1 are drawn independently (w, v), block 2 reads both of them, and its routes act
within a position. A network that could represent anything would reach the optimum over w, v, P and Q.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from emoe.console import console_table
from emoe.domains.toy import Toy, overlap_of_law, validity_of_law
from emoe.exact.laws import kl_data_model
from emoe.recipes import get_recipe
from emoe.reporting.provenance import describe_machine
from emoe.reporting.results import Row, RunInfo, record

EXPERTS, SEEDS, UPDATES = 8, (0, 1, 2), 400
SMALLEST = 1e-12  # mass of a cell that no component owns


def fit_routes(law: Float[Tensor, "J K"], experts: int, *, seed: int, updates: int = UPDATES) -> Float[Tensor, "J K"]:
    """Fit the law sum_ab w_a v_b P_ab Q_ab by expectation maximisation from a random start.

    Components begin as the marginals with a little noise. No update can lower the likelihood.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (experts, experts)
    first, second = (
        _normalised(margin * (1 + 0.1 * torch.rand(*shape, len(margin), generator=generator, dtype=torch.float64)))
        for margin in (law.sum(1), law.sum(0))
    )
    weight_a = weight_b = torch.full((experts,), 1 / experts, dtype=torch.float64)
    for _ in range(updates):
        joint = torch.einsum("a,b,abi,abj->abij", weight_a, weight_b, first, second)
        owned = joint / joint.sum((0, 1)).clamp_min(1e-300) * law
        weight_a, weight_b = owned.sum((1, 2, 3)), owned.sum((0, 2, 3))
        first, second = _normalised(owned.sum(3) + SMALLEST), _normalised(owned.sum(2) + SMALLEST)
    return torch.einsum("a,b,abi,abj->ij", weight_a, weight_b, first, second)


def _normalised(mass: Float[Tensor, "A B K"]) -> Float[Tensor, "A B K"]:
    return mass / mass.sum(-1, keepdim=True)


def limit_rows(recipe: str, seed: int, experts: int) -> list[Row]:
    """Return exact validity, overlap and KL of the fitted law."""
    toy = get_recipe(recipe).domain.build(seed)
    assert isinstance(toy, Toy)
    data = toy.density.law()
    law = fit_routes(data, experts, seed=seed)
    same = {"task": toy.task, "data": toy.name, "method": "limit", "recipe": f"route-limit-{experts}", "seed": seed}
    values = {
        "validity": validity_of_law(law, toy.support, toy.radius),
        "overlap": overlap_of_law(law, data),
        "kl": kl_data_model(data, law),
    }
    return [Row(**same, nfe=1, metric=name, convention="exact", value=value) for name, value in values.items()]


def main(results: Path = Path("results/route-limit.json")) -> None:
    """Fit both densities of the paper with all seeds."""
    began, recipes = time.monotonic(), ("toy-8modes-emoe", "toy-swissroll-emoe")
    groups = [limit_rows(recipe, seed, EXPERTS) for recipe in recipes for seed in SEEDS]
    wall_s = round(time.monotonic() - began, 1)
    info = RunInfo(command="python research/route_limit.py", wall_s=wall_s, **describe_machine("cpu"))
    record(results, info, [one for group in groups for one in group])
    lines = [[group[0].data, str(group[0].seed), *(f"{one.value:.4g}" for one in group)] for group in groups]
    console_table(["density", "seed", "validity", "overlap", "KL"], lines, title="The best route code, one step")


if __name__ == "__main__":
    main()
