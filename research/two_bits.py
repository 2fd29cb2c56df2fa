"""Two equal bits: minimised, the objective of a model with a latent falls below the entropy of the data.

    python research/two_bits.py        half a minute; adds its rows to results/likelihood.json

Rows are 00 or 11, each half of the time. A tiny E-MoE that ignores the time is optimised on the exact objective: all
routes and masks are enumerated and the integral over t is done by hand, so nothing is drawn. Bounds do not fall below.
"""

from __future__ import annotations

import math
import time
from pathlib import Path

import torch
from jaxtyping import Float, Int
from routes import enumerate_routes
from torch import Tensor

from emoe.console import meter
from emoe.diffusion.times import grid_times
from emoe.exact.checks import tiny_methods
from emoe.exact.laws import chain_laws, exact_nll
from emoe.methods.emoe import EMoE
from emoe.reporting.provenance import describe_machine
from emoe.reporting.results import Row, RunInfo, record

ROWS = torch.tensor([[0, 0], [1, 1]])
POWERS = {"two-bits-weight-1": 0, "two-bits-weight-1/t": 1}  # recipe -> p of the KL's weight t^-p; VADD publishes 1
CONVENTIONS = ("objective", "objective, KL/t")  # name of what is minimised, by p
BOUND_STEPS = (1, 2, 4)
STARTS, UPDATES, RATE = 6, 600, 0.03  # most random models end in a worse optimum


def minimise(power: int, start: int) -> tuple[float, EMoE]:
    """Minimise the objective with t^-power on the KL from a random start; return it in nats, and the model."""
    method = tiny_methods("emoe", start)["emoe"]
    assert isinstance(method, EMoE)
    for parameter in method.backbone.trunk.time.parameters():  # type: ignore[union-attr]
        parameter.data.zero_().requires_grad_(False)
    optimiser = torch.optim.Adam([p for p in method.parameters() if p.requires_grad], lr=RATE)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, UPDATES)
    for _ in range(UPDATES):
        optimiser.zero_grad()
        objective(method, power).backward()
        optimiser.step()
        decay.step()
    with torch.no_grad():
        return objective(method, power).item(), method


def objective(method: EMoE, power: int) -> Float[Tensor, ""]:
    """Return E over t ~ U(0, 1] and masks of masked NLL / t + KL / t^power.

    k of 2 tokens are masked with probability t^k (1 - t)^(2 - k); against t^-p that is Beta(k - p + 1, 3 - k).
    """
    x0, xt, masked = patterns(method.space.mask_id)
    recon, kl = enumerate_routes(method, x0, xt, torch.ones(len(x0))).terms()
    a, b = (masked - torch.tensor([[1], [power]]) + 1), 3 - masked
    integral = (torch.lgamma(a) + torch.lgamma(b) - torch.lgamma(a + b)).exp()
    return (recon * integral[0] + kl * integral[1]).sum() / len(ROWS)


@torch.no_grad()
def bound(method: EMoE, steps: int) -> float:
    """Return bound@T (Eq. 6) without draws: the sum over i of E over masks of masked NLL / i + KL at t = i / T."""
    x0, xt, masked = patterns(method.space.mask_id)
    total = 0.0
    for i, t in enumerate(grid_times(steps)[1:], 1):
        recon, kl = enumerate_routes(method, x0, xt, torch.full((len(x0),), t)).terms()
        chance = t**masked * (1 - t) ** (2 - masked)
        total += (chance * (recon / i + kl)).sum().item() / len(ROWS)
    return total


def patterns(mask_id: int) -> tuple[Int[Tensor, "N 2"], Int[Tensor, "N 2"], Float[Tensor, " N"]]:
    """Return both rows with every pattern of masks that has one; without masks NLL and KL are 0."""
    flags = torch.tensor([[True, False], [False, True], [True, True]])
    x0, hide = ROWS.repeat_interleave(len(flags), 0), flags.repeat(len(ROWS), 1)
    return x0, torch.where(hide, mask_id, x0), hide.sum(-1).double()


def main(results: Path = Path("results/likelihood.json")) -> None:
    """Record the entropy of the data and, for each weight of the KL, the least objective and its bounds and NLL."""
    began, same = time.monotonic(), {"task": "likelihood", "data": "two-bits", "seed": None, "metric": "nll"}
    rows = [Row(**same, method="data", recipe=None, nfe=None, convention="exact", value=math.log(len(ROWS)))]
    with meter(len(POWERS) * STARTS, "two equal bits") as tick:
        for recipe, power in POWERS.items():
            models = []
            for start in range(STARTS):
                models.append(minimise(power, start))
                tick(1, recipe)
            least, method = min(models, key=lambda pair: pair[0])
            own = same | {"method": "emoe", "recipe": recipe}
            rows.append(Row(**own, nfe=None, convention=CONVENTIONS[power], value=least))
            for steps, law in chain_laws(method, BOUND_STEPS).items():
                rows.append(Row(**own, nfe=None, convention=f"bound@{steps}", value=bound(method, steps)))
                rows.append(Row(**own, nfe=steps, convention="exact", value=exact_nll(law, ROWS).mean().item()))
    wall_s = round(time.monotonic() - began, 1)
    record(results, RunInfo(command="python research/two_bits.py", wall_s=wall_s, **describe_machine("cpu")), rows)


if __name__ == "__main__":
    main()
