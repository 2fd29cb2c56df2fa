"""Rows of results of a trained model: metrics of samples, named likelihoods, exact measures of toy models."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jaxtyping import Float
from torch import Tensor

from emoe.config import ConfigError
from emoe.console import Tick
from emoe.domains.base import Domain
from emoe.domains.toy import Toy, overlap_of_law, validity_of_law
from emoe.evaluation.likelihood import coordination_gain, estimate_nll, factorised_nll, held_out_rows, in_units
from emoe.exact.laws import exact_laws, kl_data_model
from emoe.experiment import Experiment
from emoe.methods.base import Method
from emoe.reporting.results import Row
from emoe.runs.sampling import Pool, draw
from emoe.types import Likelihood, Measurement


def row(
    item: Measurement,
    domain: Domain,
    experiment: Experiment,
    *,
    nfe: int | None,
    method: str | None = None,
    convention: str | None = None,
) -> Row:
    """A measurement as a row of results; `method` is the experiment's by default."""
    run: dict[str, Any] = {"task": domain.task, "data": domain.name, "recipe": experiment.name, "seed": experiment.seed}
    return Row(method=method or experiment.method_name, nfe=nfe, convention=convention, **run, **vars(item))


def described(method: Method, experiment: Experiment) -> dict[str, dict[str, str]]:
    """Label and colour of a method under its name in results, which travel with its rows."""
    label = method.label + experiment.method.variant()[1]
    return {experiment.method_name: {"label": label, "colour": method.colour}}


def measure_samples(
    method: Method,
    domain: Domain,
    experiment: Experiment,
    *,
    nfe: Iterable[int] | None = None,
    samples: int | None = None,
    seed: int | None = None,
    keep: Callable[[Pool], None] | None = None,
) -> list[Row]:
    """All metrics of the domain at each NFE, of `samples` rows.

    The sampler and the defaults are those of the experiment. `keep` is called with every pool.
    """
    config = experiment.eval
    seed = experiment.seed if seed is None else seed
    rows: list[Row] = []
    for calls in config.nfe if nfe is None else nfe:
        pool = draw(method, samples or config.samples, calls, seed=seed, batch=config.batch, sampler=config.sampler)
        if keep is not None:
            keep(pool)
        items = list(domain.measure(pool.samples, seed))
        if config.sampler.kind != "plain":
            items.append(Measurement("network_calls", pool.calls, None, len(pool.samples)))
        rows += [row(item, domain, experiment, nfe=pool.nfe) for item in items]
    return rows


def measure_likelihoods(
    method: Method,
    domain: Domain,
    experiment: Experiment,
    wanted: Sequence[Likelihood],
    *,
    rows: int | None = None,
    seed: int | None = None,
    tick: Tick | None = None,
) -> list[Row]:
    """Named likelihoods of held-out rows; with bound@1 of a method with a latent the coordination gain too."""
    seed, space = experiment.seed if seed is None else seed, method.space
    held_out, measured = held_out_rows(domain, rows, seed), list[Row]()
    for likelihood in wanted:
        nll = estimate_nll(method, held_out, likelihood, seed=seed, tick=tick)
        items = in_units(nll, space.length)
        if str(likelihood) == "bound@1" and method.has_latent:
            factorised = factorised_nll(domain.rows.cpu(), held_out.cpu(), space.size)
            items.append(coordination_gain(nll, factorised, space.length))
        measured += [row(item, domain, experiment, nfe=None, convention=str(likelihood)) for item in items]
    return measured


def exact_rows(
    method: Method, domain: Domain, experiment: Experiment, nfe: Iterable[int], *, tick: Tick | None = None
) -> list[Row]:
    """Validity, overlap, NLL and KL of the exact law of the T-step sampler of a toy run, convention `exact`.

    `validity` and `overlap` are in percent and compare with the exact law of the density (the largest overlap is 100).
    `nll` = -sum of data * log model and `kl` = KL(data || model), in nats per row. Where a latent has to be drawn, they
    are measures of the mean of several independent laws, with the standard error.
    """
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
    for steps, laws in exact_laws(method, nfe, tick=tick).items():
        for name, metric in metrics.items():
            each = [metric(law) for law in laws]
            error = statistics.stdev(each) / math.sqrt(len(each)) if len(each) > 1 else None
            item = Measurement(name, metric(laws.mean(0)), error, None)
            rows.append(row(item, domain, experiment, nfe=steps, convention="exact"))
    return rows
