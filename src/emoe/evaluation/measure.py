"""Numbers of a trained model: named likelihoods of held-out rows, exact measures of toy models, rows of results."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int, Integer
from torch import Tensor

from emoe.config import ConfigError
from emoe.console import Tick
from emoe.domains.base import Domain
from emoe.domains.toy import Toy, overlap_of_law, validity_of_law
from emoe.exact.laws import exact_laws, kl_data_model
from emoe.experiment import Experiment
from emoe.methods.base import Method
from emoe.reporting.results import Row
from emoe.rng import Rng, derive_seed
from emoe.types import Likelihood, Measurement

if TYPE_CHECKING:
    from emoe.runs.run import Run

HELD_OUT = 2_000  # rows
UNITS = ("nll", "bpd", "ppl")
ROWS, LOGITS = 4096, 2**28  # rows of a call, and the most numbers that its logits may be
Fields = dict[str, Any]  # of rows, all but those of the measurement


def held_out_rows(domain: Domain, count: int | None, seed: int) -> Int[Tensor, "n L"]:
    """`count` rows that were not trained on; default: 2,000, or all where there are fewer."""
    count = min(HELD_OUT, domain.fresh_rows or HELD_OUT) if count is None else count
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


def fields_of(domain: Domain, experiment: Experiment | None = None, **own: Any) -> Fields:
    """Fields of rows of an experiment, or without one of real data; no NFE and convention unless `own` has them."""
    run: Fields = {"method": "data", "recipe": "reference", "seed": None}
    if experiment is not None:
        run = {"method": experiment.method_name, "recipe": experiment.name, "seed": experiment.seed}
    return {"task": domain.task, "data": domain.name, "nfe": None, "convention": None, **run, **own}


def rows_of(fields: Fields, items: Mapping[Any, Iterable[Measurement]]) -> list[Row]:
    """Rows of measurements by convention."""
    return [Row(**fields | {"convention": name}, **vars(item)) for name, group in items.items() for item in group]


def described(run: Run) -> dict[str, dict[str, str]]:
    """Label and colour of the method of a run under its name in results, which are stored with its rows."""
    label = run.method.label + run.experiment.method.variant()[1]
    return {run.experiment.method_name: {"label": label, "colour": run.method.colour}}


def measure_likelihoods(
    run: Run,
    wanted: Sequence[Likelihood],
    *,
    rows: int | None = None,
    seed: int | None = None,
    tick: Tick | None = None,
) -> list[Row]:
    """Named likelihoods of held-out rows; with bound@1 of a method with a latent the coordination gain too."""
    seed = run.experiment.seed if seed is None else seed
    items = {str(name): measure_nll(run.method, run.domain, name, rows, seed=seed, tick=tick) for name in wanted}
    return rows_of(fields_of(run.domain, run.experiment), items)


def exact_rows(run: Run, nfe: Iterable[int], *, tick: Tick | None = None) -> list[Row]:
    """Validity, overlap, NLL and KL of the exact law of the T-step sampler of a toy run, convention `exact`.

    `validity` and `overlap` are in percent and compare with the exact law of the density (the largest overlap is 100).
    `nll` = -sum of data * log model and `kl` = KL(data || model), in nats per row.
    """
    domain, experiment = run.domain, run.experiment
    if not isinstance(domain, Toy):
        raise ConfigError([f"exact: {experiment.name} is no toy; the law of other domains is too large to enumerate"])
    data, support, radius = domain.density.law(), domain.support, domain.radius
    entropy = -data.xlogy(data).sum().item()
    metrics: dict[str, Callable[[Float[Tensor, "50 50"]], float]] = {
        "validity": lambda law: validity_of_law(law, support, radius),
        "overlap": lambda law: overlap_of_law(law, data),
        "nll": lambda law: entropy + kl_data_model(data, law),
        "kl": lambda law: kl_data_model(data, law),
    }
    rows = []
    for steps, laws in exact_laws(run.method, nfe, tick=tick).items():
        items = [measure_laws(name, metric, laws) for name, metric in metrics.items()]
        rows += rows_of(fields_of(domain, experiment, nfe=steps), {"exact": items})
    return rows


def measure_laws(
    name: str, metric: Callable[[Tensor], float], laws: Float[Tensor, "R *V"], n: int | None = None
) -> Measurement:
    """A measure of the mean of independent laws, with its standard error; one law, which is exact, has no error."""
    each = [metric(law) for law in laws]
    error = statistics.stdev(each) / math.sqrt(len(each)) if len(each) > 1 else None
    return Measurement(name, metric(laws.mean(0)), error, n)
