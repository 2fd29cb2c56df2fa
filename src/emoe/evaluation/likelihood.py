"""Named likelihoods of held-out rows, with standard errors, and the coordination gain."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import torch
from jaxtyping import Int, Integer
from torch import Tensor

from emoe.console import Tick
from emoe.domains.base import Domain
from emoe.methods.base import Method
from emoe.rng import Rng, derive_seed
from emoe.types import Likelihood, Measurement

HELD_OUT = 2_000  # rows
ROWS, LOGITS = 4096, 2**28  # rows of a call, and the most numbers that its logits may be


def held_out_rows(domain: Domain, count: int | None, seed: int) -> Int[Tensor, "n L"]:
    """`count` rows that were not trained on; default: 2,000, or all where there are fewer."""
    if count is None:
        count = HELD_OUT if domain.fresh_rows is None else min(HELD_OUT, domain.fresh_rows)
    return domain.fresh(count, derive_seed(seed, "held out"))


def passes(likelihood: Likelihood) -> int:
    """How often `estimate_nll` runs all rows by default, a measure of how long it takes."""
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

    All rows are drawn for `repeats` times (8 by default, 4 with importance weights) with fresh times, masks and
    latents; the standard error is that of the mean of the repeats: the error of the estimate for these rows, not that
    of having chosen these rows. `exact` is no estimate: one repeat, no error. `tick` is called after every repeat.
    `batch` are the rows of a call, draws counted: by default 4,096, fewer where B L V logits are more than 2^28.
    """
    space = method.space
    batch = batch or max(1, min(ROWS, LOGITS // (space.length * space.size)))
    device = next(method.parameters()).device
    rows = rows.to(device)
    repeats = repeats or _default_repeats(likelihood)
    size = max(1, batch // max(1, likelihood.draws))
    means = []
    for repeat in range(repeats):
        rng = Rng(derive_seed(seed, "nll", likelihood, repeat), device=device)
        parts = [method.nll(part, likelihood, rng.at(k)) for k, part in enumerate(rows.split(size))]
        means.append(torch.cat(parts).mean().item())
        if tick is not None:
            tick(max(1, likelihood.draws), str(likelihood))
    error = statistics.stdev(means) / math.sqrt(repeats) if repeats > 1 else None
    return Measurement("nll", statistics.fmean(means), error, len(rows))


def in_units(nll: Measurement, length: int) -> list[Measurement]:
    """An NLL in nats per row, and the same in bits per dimension and as perplexity per token.

    bpd = nll / (L ln 2) (Eq. 40), ppl = exp(nll / L); errors by the first derivative.
    """
    bits = 1 / (length * math.log(2))
    ppl = math.exp(nll.value / length)
    errors = [None if nll.stderr is None else nll.stderr * scale for scale in (bits, ppl / length)]
    return [nll, Measurement("bpd", nll.value * bits, errors[0], nll.n), Measurement("ppl", ppl, errors[1], nll.n)]


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

    Positive only if the latent ties positions together: a factorised step cannot get below its own optimum. A large
    route KL says nothing of the kind, since every position may code for itself alone.
    """
    error = None if bound_at_1.stderr is None else bound_at_1.stderr / length
    return Measurement("coordination_gain", (factorised - bound_at_1.value) / length, error, bound_at_1.n)


def likelihoods(
    method: Method,
    train: Integer[Tensor, "N L"],
    rows: Int[Tensor, "n L"],
    wanted: Sequence[Likelihood],
    seed: int = 0,
    *,
    tick: Tick | None = None,
) -> list[tuple[Likelihood, Measurement]]:
    """Measurements of named likelihoods; with bound@1 of a method with a latent the coordination gain too."""
    items = list[tuple[Likelihood, Measurement]]()
    for likelihood in wanted:
        nll = estimate_nll(method, rows, likelihood, seed=seed, tick=tick)
        items += [(likelihood, item) for item in in_units(nll, method.space.length)]
        if (likelihood.kind, likelihood.steps) == ("bound", 1) and method.has_latent:
            factorised = factorised_nll(train.cpu(), rows.cpu(), method.space.size)
            items.append((likelihood, coordination_gain(nll, factorised, method.space.length)))
    return items
