"""Evaluate a run: draw a pool for each NFE, measure it, and give rows of the results contract."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from emoe.console import Tick
from emoe.domains.base import Domain
from emoe.evaluation.likelihood import likelihoods
from emoe.evaluation.pools import Pool, draw_pool
from emoe.experiment import Experiment
from emoe.methods.base import Method
from emoe.reporting.results import Row
from emoe.rng import derive_seed
from emoe.types import Convention, Measurement

HELD_OUT = 2_000  # rows for likelihoods
ENDINGS = ("plus", "aware")  # of recipes whose rows are those of a method of their own


def evaluate(
    method: Method,
    domain: Domain,
    experiment: Experiment,
    *,
    nfe: Iterable[int] | None = None,
    samples: int | None = None,
    seed: int | None = None,
    keep: Callable[[Pool], None] | None = None,
) -> list[Row]:
    """All metrics of the domain at each NFE.

    Args:
        method: The trained method.
        domain: What measures the samples.
        experiment: Where defaults for the other arguments come from.
        nfe: Numbers of function evaluations.
        samples: Rows drawn for each.
        seed: Seed of the draws and of the fresh data they are compared with; default: the experiment's.
        keep: Called with every pool, for figures.
    """
    config = experiment.eval
    seed = experiment.seed if seed is None else seed
    rows: list[Row] = []
    for steps in config.nfe if nfe is None else nfe:
        pool = draw_pool(method, samples or config.samples, steps, seed, batch=config.batch, sampler=config.sampler)
        if keep is not None:
            keep(pool)
        measured = list(domain.measure(pool.samples, seed))
        if config.sampler.kind != "plain":
            measured.append(Measurement("network_calls", pool.calls, None, len(pool.samples)))
        rows += [make_row(item, domain, experiment, nfe=pool.nfe) for item in measured]
    return rows


def evaluate_likelihood(
    method: Method,
    domain: Domain,
    experiment: Experiment,
    conventions: Sequence[Convention],
    *,
    rows: int | None = None,
    seed: int | None = None,
    tick: Tick | None = None,
) -> list[Row]:
    """Named likelihoods of rows that were not trained on, each under its convention; nll is in nats per row.

    `rows` are 2,000 by default, or all that the domain has where it has fewer.
    """
    seed = experiment.seed if seed is None else seed
    rows = fresh_count(domain, HELD_OUT) if rows is None else rows
    held_out = domain.fresh(rows, derive_seed(seed, "held out"))
    found = likelihoods(method, domain.rows, held_out, conventions, seed, tick=tick)
    return [make_row(item, domain, experiment, nfe=None, convention=str(name)) for name, item in found]


def fresh_count(domain: Domain, wanted: int) -> int:
    """`wanted`, or all fresh rows of a domain that has fewer."""
    return wanted if domain.fresh_rows is None else min(wanted, domain.fresh_rows)


def method_name(experiment: Experiment) -> str:
    """The method of an experiment in results: its kind, `emoe-plus` for recipes such as `toy-8modes-emoe-plus`."""
    kind, recipe = str(experiment.method.kind), experiment.name.partition(" ")[0]
    return next((name for ending in ENDINGS if recipe.endswith(name := f"{kind}-{ending}")), kind)


def make_row(
    item: Measurement,
    domain: Domain,
    experiment: Experiment,
    *,
    nfe: int | None,
    method: str | None = None,
    convention: str | None = None,
) -> Row:
    """A measurement as a row of the results contract; `method` is the experiment's unless it is given."""
    return Row(
        task=domain.task,
        data=domain.name,
        method=method or method_name(experiment),
        recipe=experiment.name,
        seed=experiment.seed,
        nfe=nfe,
        metric=item.metric,
        convention=convention,
        value=item.value,
        stderr=item.stderr,
        n=item.n,
    )
