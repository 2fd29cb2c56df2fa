"""Two equal bits: minimised, the objective of a model with a latent falls below the entropy of the data; bounds do not.

Rows are 00 or 11, each half of the time. A tiny E-MoE that ignores the time is optimised on the exact objective: all
routes and masks are enumerated and the integral over t is done by hand, so nothing is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from emoe.backbones.transformer import Transformer
from emoe.console import Tick
from emoe.diffusion.times import grid_times
from emoe.exact import chain_laws, exact_nll
from emoe.methods.emoe import EMoE
from emoe.reporting.results import Row
from emoe.verify import exact_terms, tiny_method

ROWS = torch.tensor([[0, 0], [1, 1]])
POWERS = {"two-bits-weight-1": 0, "two-bits-weight-1/t": 1}  # recipe -> p of the KL's weight t^-p; VADD publishes 1
CONVENTIONS = ("objective", "objective, KL/t")  # name of what is minimised, by p
BOUND_STEPS = (1, 2, 4)
STARTS = range(6)  # seeds of random models; most of them end in a worse optimum
UPDATES, RATE = 600, 0.03
WORK = len(POWERS) * len(STARTS)  # what `two_bits_rows` tells its `tick`


def two_bits_rows(tick: Tick | None = None) -> list[Row]:
    """The data's entropy; and for each weight of the KL the least objective, and bounds and NLL of that same model."""

    def row(
        value: float, convention: str, method: str = "emoe", recipe: str | None = None, nfe: int | None = None
    ) -> Row:
        return Row(
            task="likelihood", data="two-bits", method=method, recipe=recipe, seed=None, nfe=nfe, metric="nll",
            convention=convention, value=value,
        )  # fmt: skip

    rows = [row(math.log(len(ROWS)), "exact", "data")]
    for recipe, power in POWERS.items():
        method, least = minimise(power, starts=STARTS, updates=UPDATES, tick=tick)
        rows.append(row(least, CONVENTIONS[power], recipe=recipe))
        for steps, law in chain_laws(method, BOUND_STEPS).items():
            rows.append(row(bound(method, steps), f"bound@{steps}", recipe=recipe))
            rows.append(row(exact_nll(law, ROWS).mean().item(), "exact", recipe=recipe, nfe=steps))
    return rows


def minimise(power: int, *, starts: Sequence[int], updates: int, tick: Tick | None = None) -> tuple[EMoE, float]:
    """The model of the least objective with t^-power on the KL, of some random starts, and that objective in nats.

    E over t ~ U(0, 1] and masks of masked NLL / t + KL / t^power: k of 2 tokens are masked with probability
    t^k (1 - t)^(2 - k), whose integral against t^-p is Beta(k - p + 1, 3 - k).
    """
    found: list[tuple[float, EMoE]] = []
    for start in starts:
        method = tiny_method("emoe", start)
        assert isinstance(method, EMoE) and isinstance(method.backbone, Transformer)
        for parameter in method.backbone.trunk.time.parameters():
            parameter.data.zero_().requires_grad_(False)
        weights = [p for p in method.parameters() if p.requires_grad]
        optimiser = torch.optim.Adam(weights, lr=RATE)
        decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, updates)
        for _ in range(updates):
            optimiser.zero_grad()
            objective(method, power).backward()
            optimiser.step()
            decay.step()
        with torch.no_grad():
            found.append((objective(method, power).item(), method))
        if tick is not None:
            tick(1, f"two bits, KL / t^{power}, start {start}")
    least, method = min(found, key=lambda pair: pair[0])
    return method, least


def objective(method: EMoE, power: int) -> Float[Tensor, ""]:
    """See `minimise`; for a network that ignores the time."""
    x0, xt, masked = _patterns(method.space.mask_id)
    recon, kl = exact_terms(method, x0, xt, torch.ones(len(x0)))
    terms = recon * _integral(masked, 1) + kl * _integral(masked, power)
    return terms.sum() / len(ROWS)


@torch.no_grad()
def bound(method: EMoE, steps: int) -> float:
    """bound@T (Eq. 6) without a draw: the sum over i of E over masks of masked NLL / i + KL at t = i / T."""
    x0, xt, masked = _patterns(method.space.mask_id)
    total = 0.0
    for i, t in enumerate(grid_times(steps)[1:], 1):
        recon, kl = exact_terms(method, x0, xt, torch.full((len(x0),), t))
        chance = t**masked * (1 - t) ** (2 - masked)
        total += (chance * (recon / i + kl)).sum().item() / len(ROWS)
    return total


def _patterns(mask_id: int) -> tuple[Int[Tensor, "N 2"], Int[Tensor, "N 2"], Float[Tensor, " N"]]:
    """Both rows with every pattern of masks that has one (without masks both passes are the same and cost nothing)."""
    flags = torch.tensor([[True, False], [False, True], [True, True]])
    x0, hide = ROWS.repeat_interleave(len(flags), 0), flags.repeat(len(ROWS), 1)
    return x0, torch.where(hide, mask_id, x0), hide.sum(-1).double()


def _integral(masked: Float[Tensor, " N"], power: int) -> Float[Tensor, " N"]:
    """Integral over t in [0, 1] of t^k (1 - t)^(2 - k) t^-power = Beta(k - power + 1, 3 - k)."""
    a, b = masked - power + 1, 3 - masked
    return (torch.lgamma(a) + torch.lgamma(b) - torch.lgamma(a + b)).exp()
