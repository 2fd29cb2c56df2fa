"""Named likelihoods of held-out rows, with standard errors, and the coordination gain."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Int, Integer
from torch import Tensor

from emoe.console import Tick
from emoe.domains.base import Domain
from emoe.methods.base import Method
from emoe.rng import Rng, derive_seed
from emoe.types import Likelihood, Measurement

HELD_OUT = 2_000  # rows
UNITS = ("nll", "bpd", "ppl")
ROWS, LOGITS = 4096, 2**28  # rows of a call, and the most numbers that its logits may be


def held_out_rows(domain: Domain, count: int | None, seed: int) -> Int[Tensor, "n L"]:
    """`count` rows that were not trained on; default: 2,000, or all where there are fewer."""
    if count is None:
        count = HELD_OUT if domain.fresh_rows is None else min(HELD_OUT, domain.fresh_rows)
    return domain.fresh(count, derive_seed(seed, "held out"))


def passes(likelihood: Likelihood) -> int:
    """Passes of `estimate_nll` over all rows by default, in units of one draw."""
    return _default_repeats(likelihood) * max(1, likelihood.draws)


def _default_repeats(likelihood: Likelihood) -> int:
    return 1 if likelihood.kind == "exact" else 4 if likelihood.draws else 8


@torch.no_grad()
def estimate_nll(
    method: Method,
    rows: Int[Tensor, "n L"],
    likelihood: Likelihood,
    *,
    repeats: int | None = None,
    seed: int = 0,
    batch: int | None = None,
    tick: Tick | None = None,
) -> Measurement:
    """Mean over rows of a named likelihood, in nats per row, with its standard error.

    Each of `repeats` repeats (by default 8, or 4 with importance weights) draws new times, masks and latents for all
    rows. The standard error is that of the mean of the repeats: it does not include the choice of the rows. `exact` has
    one repeat and no error. `tick` is called after every repeat. `batch` is the number of rows of a call times draws,
    by default 4,096, but fewer where B L V logits are more than 2^28.
    """
    space, device, draws = method.space, next(method.parameters()).device, max(1, likelihood.draws)
    batch = batch or max(1, min(ROWS, LOGITS // (space.length * space.size)))
    repeats, means = repeats or _default_repeats(likelihood), []
    for repeat in range(repeats):
        rng = Rng(derive_seed(seed, "nll", likelihood, repeat), device=device)
        parts = rows.to(device).split(max(1, batch // draws))
        nll = torch.cat([method.nll(part, likelihood, rng.at(k)) for k, part in enumerate(parts)])
        means.append(nll.mean().item())
        if tick is not None:
            tick(draws, str(likelihood))
    error = statistics.stdev(means) / math.sqrt(repeats) if repeats > 1 else None
    return Measurement("nll", statistics.fmean(means), error, len(rows))


def in_units(nll: Measurement, length: int, metrics: Sequence[str] = UNITS) -> list[Measurement]:
    """An NLL in nats per row, per token, in bits per dimension and as perplexity per token.

    nll_token = nll / L, bpd = nll / (L ln 2) (Eq. 40), ppl = exp(nll / L); errors by the first derivative.
    """
    bits, ppl = 1 / (length * math.log(2)), math.exp(nll.value / length)
    values = {"nll": nll.value, "nll_token": nll.value / length, "bpd": nll.value * bits, "ppl": ppl}
    slopes = {"nll": 1.0, "nll_token": 1 / length, "bpd": bits, "ppl": ppl / length}
    errors = {name: None if nll.stderr is None else nll.stderr * slope for name, slope in slopes.items()}
    return [Measurement(metric, values[metric], errors[metric], nll.n) for metric in metrics]


def factorised_nll(train: Integer[Tensor, "N L"], rows: Int[Tensor, "n L"], symbols: int) -> float:
    """NLL in nats per row of the best factorised one-step model: the product of the data's marginals.

    The marginals are those of the training rows, with half a count added to every symbol.
    """
    total = 0.0
    for position in range(train.shape[1]):
        column = train[:, position].long()  # rows may be small integers in a file: one column at a time
        counts = torch.bincount(column, minlength=symbols).double() + 0.5
        total -= (counts / counts.sum()).log()[rows[:, position]].mean().item()
    return total


def coordination_gain(bound_at_1: Measurement, factorised: float, length: int) -> Measurement:
    """(NLL of the best factorised one-step model - bound@1) / L, in nats per token.

    Positive only if the latent makes positions dependent: a factorised step cannot get below its own optimum. A large
    route KL does not show that, since every position may code for itself alone.
    """
    error = None if bound_at_1.stderr is None else bound_at_1.stderr / length
    return Measurement("coordination_gain", (factorised - bound_at_1.value) / length, error, bound_at_1.n)


def measure_nll(
    method: Method,
    domain: Domain,
    likelihood: Likelihood,
    count: int | None = None,
    *,
    metrics: Sequence[str] = UNITS,
    factorised: Callable[..., float] | None = factorised_nll,
    seed: int = 0,
    batch: int | None = None,
    tick: Tick | None = None,
) -> list[Measurement]:
    """A named likelihood of held-out rows (see `estimate_nll`); with bound@1 of a latent the coordination gain too.

    `factorised` gives the NLL of the best factorised step; without it there is no gain.
    """
    rows, space = held_out_rows(domain, count, seed), method.space
    nll = estimate_nll(method, rows, likelihood, seed=seed, batch=batch, tick=tick)
    items = in_units(nll, space.length, metrics)
    if factorised and method.has_latent and str(likelihood) == "bound@1":
        items.append(coordination_gain(nll, factorised(domain.rows, rows, space.size), space.length))
    return items
