"""Rows of results of a trained model: their identity, named likelihoods, exact measures of toy models."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxtyping import Float
from torch import Tensor

from emoe.config import ConfigError
from emoe.console import Tick
from emoe.domains.base import Domain
from emoe.domains.toy import Toy, overlap_of_law, validity_of_law
from emoe.evaluation.likelihood import measure_nll
from emoe.exact.laws import exact_laws, kl_data_model
from emoe.experiment import Experiment
from emoe.reporting.results import Row
from emoe.types import Likelihood, Measurement

if TYPE_CHECKING:
    from emoe.runs.run import Run

Fields = dict[str, Any]  # of rows, all but those of the measurement


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
    data, support, radius = domain.cell_probabilities().double(), domain.support, domain.radius
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
