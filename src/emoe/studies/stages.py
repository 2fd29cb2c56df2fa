"""A trained run of a study, and the stages that studies share."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from emoe.backbones.base import active_parameters, total_parameters
from emoe.config import to_dict
from emoe.domains.base import Domain
from emoe.engine import checkpoint
from emoe.evaluation.measure import HELD_OUT, Fields, exact_rows, factorised_nll, fields_of, measure_nll, passes
from emoe.experiment import Experiment
from emoe.methods.base import Method, SamplerConfig
from emoe.reporting.results import Results, Row
from emoe.runs.run import Run
from emoe.runs.sampling import draw
from emoe.runs.train import load_run
from emoe.studies.pools import RUN, SHOWN, Archive, PoolKey
from emoe.types import Likelihood, Measurement

if TYPE_CHECKING:
    from emoe.studies.pipeline import Study

TIMES = "times.jsonl"  # in a run folder: seconds of every part of its training
Measure = Callable[[], Iterable[Measurement]]


class Stage(NamedTuple):
    """A piece of work whose rows are recorded as soon as it is done."""

    name: str
    run: Callable[[], list[Row]]
    wanted: Sequence[Fields]  # of rows that are recorded when it is done
    n: int = 0  # samples or rows behind each of these, at least
    current: Callable[[], bool] = lambda: True  # whether its files are up to date
    rows: int = 1  # through the network, for the progress

    def done(self, results: Results) -> bool:
        """Whether its rows are recorded and its files are up to date."""
        found = (results.select(**fields) for fields in self.wanted)
        return self.current() and all(any((row.n or 0) >= self.n for row in rows) for rows in found)


def stage(name: str, fields: Fields, measure: Measure, metric: str = "", **options: Any) -> Stage:
    """A stage whose rows differ in the measurement alone; done when one of them, or that of `metric`, is recorded."""
    wanted = fields | ({"metric": metric} if metric else {})
    return Stage(name, lambda: [Row(**fields, **vars(item)) for item in measure()], [wanted], **options)


def reference(name: str, domain: Domain, measure: Measure, metric: str, n: int = 0, **own: Any) -> Stage:
    """A stage of a reference, such as real data; for `own` see `fields_of`."""
    return stage(f"{name} of {domain.name}", fields_of(domain, **own), measure, metric, n=n)


class Trained:
    """A run of a study; its data and weights are loaded when they are first needed."""

    def __init__(self, study: Study, experiment: Experiment, label: str = ""):
        self.study, self.experiment = study, experiment
        self.label = label or f"{experiment.name.partition(' ')[0]} seed {experiment.seed}"
        self.path = study.options.run_folder / run_name(experiment)

    @property
    def steps_left(self) -> int:
        """Training steps that are missing."""
        return max(0, self.experiment.train.steps - steps_done(self.path))

    @property
    def domain(self) -> Domain:
        """The data of the run."""
        return self.study.domain(self.experiment)

    @functools.cached_property
    def method(self) -> Method:
        """The method without weights: its label, its likelihoods."""
        with torch.device("meta"):
            return self.experiment.build_method(self.domain.space)

    @functools.cached_property
    def pools(self) -> Archive:
        """The samples of the run."""
        archive, fields = Archive.open(self.path.parent / "pools" / f"{self.path.name}.npz"), self.fields()
        archive.manifest |= {name: fields[name] for name in RUN}
        return archive

    @functools.cached_property
    def run(self) -> Run:
        """The run with its weights."""
        return self.open()

    def open(self, settings: Mapping[str, str] | None = None) -> Run:
        """Load the run, perhaps with other settings of its sampler."""
        return load_run(self.path, device=str(self.study.device), domain=self.domain, settings=settings)

    def close(self) -> None:
        """Free the weights."""
        vars(self).pop("run", None)

    def fields(self, domain: Domain | None = None, **own: Any) -> Fields:
        """Fields of rows of the run; see `fields_of`."""
        return fields_of(domain or self.domain, self.experiment, **own)


def numbers(values: Mapping[str, float], n: int | None = None) -> list[Measurement]:
    """Measurements without errors."""
    return [Measurement(metric, value, None, n) for metric, value in values.items()]


def steps_done(run: Path) -> int:
    """Training steps behind the newest checkpoint of a run folder; 0 without one."""
    newest = checkpoint.latest(run / "checkpoints")
    return 0 if newest is None else int(newest.name.removeprefix("step-"))


def run_name(experiment: Experiment) -> str:
    """Folder of an experiment: readable, and different for every difference in its fields.

    Fields at their default are left out: a run that was begun before an option existed keeps its folder.
    """
    digest = hashlib.sha256(json.dumps(to_dict(experiment, sparse=True), sort_keys=True).encode()).hexdigest()[:8]
    return f"{experiment.name.partition(' ')[0]}-seed{experiment.seed}-{digest}"


def times(trained: Trained) -> list[Stage]:
    """Seconds of training and milliseconds of a step, logging and saving included; no stage without recorded times."""
    file = trained.path / TIMES
    parts = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []
    steps, seconds = sum(part["to"] - part["from"] for part in parts), math.fsum(part["seconds"] for part in parts)
    if not steps:
        return []
    items = numbers({"train_s": seconds, "step_ms": 1000 * seconds / steps}, steps)
    return [stage("time", trained.fields(), lambda: items, "step_ms", n=steps)]


def sizes(trained: Trained) -> Stage:
    """Parameters, and those that sampling uses: of each set of experts one, and no encoder."""

    def measure() -> list[Measurement]:
        method = trained.run.method
        return numbers({"params": total_parameters(method), "params_active": active_parameters(method.backbone)})

    return stage("sizes", trained.fields(), measure, "params_active")


def pool(
    trained: Trained,
    nfe: int,
    samples: int,
    *,
    keep: int = 0,
    variant: str | None = None,
    sampler: SamplerConfig | None = None,
    settings: Mapping[str, str] | None = None,
    write: Callable[[Int[Tensor, "n L"]], list[str]] | None = None,
) -> Stage:
    """Draw a pool of samples and measure it.

    The first `keep` samples are saved, and `SHOWN` of them as text by `write`. `settings` are fields changed for this
    pool, which `variant` names; the sampler is the experiment's by default.
    """
    key = PoolKey(nfe, variant)
    config, seed, archive, keep = trained.experiment.eval, trained.experiment.seed, trained.pools, min(keep, samples)
    sampler, entries = sampler or config.sampler, archive.manifest.setdefault("pools", {})

    def measure() -> list[Measurement]:
        if archive.rows(key) >= samples:
            drawn, calls = archive.tokens(key)[:samples], entries[str(key)]["calls"]
        else:
            run = trained.open(settings) if settings else trained.run
            drawn, _, calls, _ = draw(run.method, samples, nfe, seed=seed, batch=config.batch, sampler=sampler)
            shown = {} if write is None else {"shown": write(drawn[:SHOWN])}
            entries[str(key)] = {"samples": samples, "calls": calls, "step": run.step, "sampler": sampler.kind, **shown}
            if keep:
                archive.arrays[str(key)] = drawn[:keep].numpy().astype("<u2")
            archive.save()
        items = trained.domain.measure(drawn, seed)
        return items if sampler.kind == "plain" else [*items, Measurement("network_calls", calls, None, samples)]

    def current() -> bool:
        return entries.get(str(key), {}).get("samples", 0) >= samples and archive.rows(key) >= keep

    name, fields = f"NFE {nfe}", trained.fields(nfe=nfe, convention=variant)
    name = name if variant is None else f"{name}, {variant}"
    return stage(name, fields, measure, rows=samples * nfe, current=current)


def likelihood_names(method: Method, wanted: Iterable[str]) -> list[str]:
    """Likelihoods of `wanted` whose kinds a method has."""
    kinds = {Likelihood.parse(name).kind for name in method.likelihoods()}
    return [name for name in wanted if Likelihood.parse(name).kind in kinds]


def likelihood(
    trained: Trained,
    name: str,
    count: int = HELD_OUT,
    *,
    metrics: Sequence[str] = ("nll",),
    batch: int | None = None,
    factorised: Callable[..., float] = factorised_nll,
    zero_shot: Domain | None = None,
) -> Stage:
    """Estimate a named likelihood of `count` held-out rows, or all; see `measure_nll`.

    With `zero_shot` the rows come from other data, metrics begin with `zero_shot_`, and there is no coordination gain.
    """
    likelihood, seed, source = Likelihood.parse(name), trained.experiment.seed, zero_shot or trained.domain
    count = min(count, source.fresh_rows or count)

    def measure() -> list[Measurement]:
        method, gain = trained.run.method, None if zero_shot else factorised
        items = measure_nll(method, source, likelihood, count, metrics=metrics, factorised=gain, seed=seed, batch=batch)
        prefix = "zero_shot_" if zero_shot else ""
        return [dataclasses.replace(item, metric=prefix + item.metric) for item in items]

    label, fields = name if zero_shot is None else f"{name} of {source.name}", trained.fields(source, convention=name)
    return stage(label, fields, measure, n=count, rows=passes(likelihood) * count)


def exact(trained: Trained, nfe: Sequence[int] | None = None) -> Stage:
    """Measures of the exact laws of a toy's samplers; by default at the NFE of the experiment."""
    nfe = nfe or trained.experiment.eval.nfe
    wanted = [trained.fields(nfe=calls, convention="exact", metric="kl") for calls in nfe]
    return Stage("exact laws", lambda: exact_rows(trained.run, nfe), wanted)
