"""Named likelihoods against the exact NLL: objective, bound@T and iw@T,K of the demo's models."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from emoe.domains.base import Domain
from emoe.domains.toy import Toy
from emoe.evaluation.measure import held_out_rows, measure_laws
from emoe.exact.laws import exact_laws, exact_nll
from emoe.experiment import Experiment, customise
from emoe.figures.curves import Curve, Panel
from emoe.recipes import get_recipe
from emoe.reporting.results import Results, Row, method_rank, select
from emoe.reporting.toy import likelihood_tables
from emoe.studies import options, pipeline, stages
from emoe.studies.demo import EXPERIMENTS
from emoe.studies.options import flag, hidden
from emoe.studies.pipeline import levels
from emoe.studies.stages import Stage, Trained
from emoe.types import Measurement

STEPS, DRAWS, ROWS = (1, 2, 4, 8, 16), 16, 8_000
BOUNDS = {"bound@T": "bound@{}", f"iw@T,{DRAWS}": f"iw@{{}},{DRAWS}"}  # labels and names


@dataclass(frozen=True, kw_only=True)
class Options(options.Options):
    """Options of the study of likelihoods."""

    study: str = hidden("likelihood")
    runs: Path | None = flag(Path("runs/demo"), "folder of the run folders; that of the demo", recorded=False)


class Study(pipeline.Study):
    """Train the demo's models and compare every named likelihood with the exact NLL of the T-step sampler."""

    options: Options

    def experiments(self) -> list[Experiment]:
        return [customise(get_recipe(name), self.options.settings) for name in EXPERIMENTS]

    def stages(self, run: Trained) -> list[Stage]:
        names = ["objective", *["nelbo"] * (not run.method.has_latent)]
        names += [name.format(steps) for steps in STEPS for name in BOUNDS.values()]
        truth = _truth(run.domain, self.runs[0].experiment)
        return [*(stages.likelihood(run, name, ROWS) for name in names), _exact(run), truth]

    def write(self, results: Results) -> None:
        self.print_tables(likelihood_tables(results))
        nll = results.only(task="toy", metric="nll")
        methods = sorted({row.method for row in nll.models.rows}, key=method_rank)
        self.panels("likelihood.png", [[_panel(nll, method) for method in methods]], width=3.6)


def _exact(trained: Trained) -> Stage:
    """Mean exact NLL of the rows for each T; where latents have to be drawn, with the standard error of four laws."""

    def run() -> list[Row]:
        rows = held_out_rows(trained.domain, ROWS, trained.experiment.seed)
        laws = exact_laws(trained.run.method, STEPS).values()
        items = [measure_laws("nll", lambda law: exact_nll(law, rows).mean().item(), each, ROWS) for each in laws]
        return [Row(**fields, **vars(item)) for fields, item in zip(wanted, items, strict=True)]

    wanted = [trained.fields(nfe=steps, convention="exact") for steps in STEPS]
    return Stage("exact NLL", run, wanted)


def _truth(toy: Domain, experiment: Experiment) -> Stage:
    """The NLL of the rows under the law of the data."""
    assert isinstance(toy, Toy)
    law, seed = toy.density.law(), experiment.seed

    def measure() -> list[Measurement]:
        return stages.numbers({"nll": exact_nll(law, held_out_rows(toy, ROWS, seed)).mean().item()}, ROWS)

    return stages.reference("the law", toy, measure, "nll", recipe=experiment.name, seed=seed, convention="exact")


def _panel(results: Results, method: str) -> Panel:
    """Bounds and exact NLL against T, with the objective and the data's own law as levels."""
    rows = results.select(method=method)
    named = {row.convention: row.value for row in rows}
    curves = {}
    for (label, form), style in zip(BOUNDS.items(), ("-", "--"), strict=True):
        points = [(steps, named[name]) for steps in STEPS if (name := form.format(steps)) in named]
        curves[label] = Curve(points, style=style)
    exact = sorted((row.nfe, row.value) for row in rows if row.convention == "exact" and row.nfe is not None)
    curves["exact NLL of the T-step sampler"] = Curve(exact, colour="black")
    objective = select(rows, convention="objective")
    level = levels({"objective": objective, "the data's own law": results.select(method="data")})
    return Panel(results.label(method), curves, xlabel="steps T", ylabel="nats per row", log_y=True, levels=level)
