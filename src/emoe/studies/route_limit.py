"""How well the best route code could do: the mixture that E-MoE's routes can express, fitted to a density directly.

With two positions and two blocks one network call of E-MoE is p(i, j) = sum_ab w_a v_b P_ab(i) Q_ab(j): the routes a, b
of the two positions in block 1 are drawn apart (w, v), block 2 reads both of them, and what it draws stays within a
position. A network that could represent anything would reach the optimum over w, v, P and Q; the rest is learning.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from emoe.cli import Parser
from emoe.commands import parse_number, parse_numbers
from emoe.console import console_table
from emoe.domains.toy import Toy
from emoe.domains.toy.densities import overlap_of_law, validity_of_law
from emoe.evaluation.evaluate import make_row
from emoe.exact import kl_data_model
from emoe.experiment import customise
from emoe.recipes import get_recipe
from emoe.reporting.results import Row
from emoe.studies.base import make_study
from emoe.studies.toy import DENSITIES
from emoe.types import Measurement

UPDATES = 400
SMALLEST = 1e-12  # mass of a cell that no component owns


def fit_routes(law: Float[Tensor, "J K"], experts: int, *, seed: int, updates: int = UPDATES) -> Float[Tensor, "J K"]:
    """The law sum_ab w_a v_b P_ab Q_ab that expectation maximisation finds from a random start.

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


def main(words: list[str]) -> int:
    """`emoe reproduce route-limit`."""
    parser = Parser(
        prog="emoe reproduce route-limit",
        description="Fit the mixture that E-MoE's routes can express to the toy densities by expectation maximisation "
        "(seconds on a CPU): what a perfect learner would reach in one step. Writes route-limit.json.",
    )
    parser.add_argument("--seeds", default="0,1,2", help="seeds (default 0,1,2)")
    parser.add_argument("--experts", default="8", help="experts per block (default 8)")
    parser.add_argument("--results", default="results", help="folder of route-limit.json (default results)")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    args = parser.parse_args(words)
    path = Path(args.results) / "route-limit.json"
    study = make_study("reproduce route-limit", words, folder=path.parent, results=path, device="cpu", quiet=args.quiet)
    experts = parse_number("experts", args.experts, high=16)
    lines, rows = [], []
    for recipe in DENSITIES.values():
        for seed in parse_numbers("seeds", args.seeds, low=0):
            found = limit_rows(recipe, seed, experts)
            rows += found
            values = {row.metric: row.value for row in found}
            lines.append([found[0].data, str(seed), *(f"{values[name]:.4g}" for name in ("validity", "overlap", "kl"))])
            study.note(f"{found[0].data}, seed {seed}: done")
    study.add(rows)
    console_table(["density", "seed", "validity", "overlap", "KL"], lines, title="The best route code, one step")
    return 0


def limit_rows(recipe: str, seed: int, experts: int) -> list[Row]:
    """Exact validity, overlap and KL of the fitted law."""
    experiment = customise(get_recipe(f"{recipe}-emoe"), {"seed": str(seed)})
    toy = experiment.domain.build(seed)
    assert isinstance(toy, Toy)
    data = toy.cell_probabilities().double()
    law = fit_routes(data, experts, seed=seed)
    anonymous = dataclasses.replace(experiment, name=f"route-limit-{experts}")
    measured = {
        "validity": validity_of_law(law, toy.support, toy.radius),
        "overlap": overlap_of_law(law, data),
        "kl": kl_data_model(data, law),
    }
    return [
        make_row(Measurement(name, value, None, None), toy, anonymous, nfe=1, method="limit", convention="exact")
        for name, value in measured.items()
    ]
