"""How the named likelihoods differ: objective, bound@T, iw@T,K and exact NLL against T; and two equal bits."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from emoe.cli import Parser
from emoe.commands import split_settings
from emoe.config import ConfigError
from emoe.console import Tick, meter
from emoe.domains.toy import Toy
from emoe.evaluation.evaluate import make_row
from emoe.evaluation.exact_toy import law_work, laws
from emoe.evaluation.likelihood import coordination_gain, estimate_nll, factorised_nll, passes
from emoe.exact import exact_nll
from emoe.experiment import customise
from emoe.methods.base import MaskedDiffusion
from emoe.recipes import get_recipe
from emoe.reporting.results import Results, Row, methods_of
from emoe.rng import derive_seed
from emoe.runs import Run
from emoe.studies.base import make_study
from emoe.studies.two_bits import WORK, two_bits_rows
from emoe.types import Convention, Measurement

EXPERIMENTS = ("demo-emoe", "demo-vadd", "demo-mdlm")
STEPS = (1, 2, 4, 8, 16)
DRAWS = 16
ROWS = 8_000
PARTS = ("models", "two-bits")


def main(words: list[str]) -> int:
    """`emoe reproduce likelihood`."""
    rest, settings = split_settings(words)
    parser = Parser(
        prog="emoe reproduce likelihood",
        description="Train the demo's three models (minutes on 2 CPU cores) and compare every named likelihood with "
        "the exact NLL of the T-step sampler on the same held-out rows; and minimise the objective for two equal bits, "
        "where it falls below their entropy. Writes likelihood.json and a figure.",
    )
    parser.add_argument("--only", help="one part alone: models, or two-bits (half a minute)")
    parser.add_argument(
        "--runs", default="runs/demo", help="where run folders go (default runs/demo: reuses the demo's)"
    )
    parser.add_argument("--results", default="results", help="folder of likelihood.json and figures (default results)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    args = parser.parse_args(rest)
    if args.only not in (None, *PARTS):
        raise ConfigError([f"only: {args.only!r} is not known; allowed: {', '.join(PARTS)}"])
    folder = Path(args.results)
    study = make_study(
        "reproduce likelihood", words, folder=Path(args.runs), results=folder / "likelihood.json", device=args.device,
        quiet=args.quiet,
    )  # fmt: skip
    written = [folder / "likelihood.json"]
    if args.only != "models":
        with meter(WORK, "two equal bits", quiet=args.quiet) as tick:
            study.add(two_bits_rows(tick))
    if args.only != "two-bits":
        study.run([customise(get_recipe(name), settings) for name in EXPERIMENTS])
        for run in study.runs:
            total = sum(passes(Convention.parse(name)) for name in _names(run)) + law_work(run.method, STEPS)
            with meter(total, f"likelihoods of {run.experiment.name}", quiet=args.quiet) as tick:
                study.add(likelihood_rows(run, tick))
        results = Results.load(folder / "likelihood.json").only(metric=("nll", "coordination_gain"))
        results.save(folder / "likelihood.json")
        written.append(folder / "figures" / "likelihood.png")
        written[-1].parent.mkdir(parents=True, exist_ok=True)
        figure(results.only(task="toy"), written[-1])
    study.note(f"written: {', '.join(map(str, written))}")
    return 0


def _names(run: Run) -> list[str]:
    """The named likelihoods of a run."""
    names = ["objective", *([] if getattr(run.method, "has_latent", False) else ["nelbo"])]
    return names + [name for steps in STEPS for name in (f"bound@{steps}", f"iw@{steps},{DRAWS}")]


def likelihood_rows(run: Run, tick: Tick | None = None) -> list[Row]:
    """All named likelihoods of a toy run and the exact NLL, on the same held-out rows; and the data's entropy."""
    toy, method = run.domain, run.method
    assert isinstance(toy, Toy) and isinstance(method, MaskedDiffusion)
    held_out = toy.fresh(ROWS, derive_seed(run.experiment.seed, "held out"))

    def row(item: Measurement, convention: str, nfe: int | None = None, kind: str | None = None) -> Row:
        return make_row(item, toy, run.experiment, nfe=nfe, convention=convention, method=kind)

    cells = toy.cell_probabilities()
    truth = Measurement("nll", exact_nll(cells, held_out).mean().item(), None, ROWS)
    rows = [row(truth, "exact", kind="data")]
    for name in _names(run):
        nll = estimate_nll(method, held_out, Convention.parse(name), seed=run.experiment.seed, tick=tick)
        rows.append(row(nll, name))
        if name == "bound@1" and method.has_latent:
            best = factorised_nll(toy.rows, held_out, toy.space.size)
            rows.append(row(coordination_gain(nll, best, toy.space.length), name))
    return rows + [row(item, "exact", steps) for steps, item in exact_nlls(method, held_out, tick).items()]


def exact_nlls(method: MaskedDiffusion, rows: Int[Tensor, "n L"], tick: Tick | None = None) -> dict[int, Measurement]:
    """Mean exact NLL of rows for each T; where latents have to be drawn, with the standard error of four laws."""
    found = {}
    for steps, several in laws(method, STEPS, tick=tick).items():
        each = torch.stack([exact_nll(law, rows).mean() for law in several])
        error = each.std().item() / math.sqrt(len(each)) if len(each) > 1 else None
        found[steps] = Measurement("nll", exact_nll(several.mean(0), rows).mean().item(), error, len(rows))
    return found


def figure(results: Results, path: Path) -> None:
    """One panel per method: bounds and exact NLL against T, objective and data entropy as levels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    def value(**filters: Any) -> float:
        return float(results.select(metric="nll", **filters)[0].value)

    kinds = methods_of(results.only(metric="nll").models.rows)
    picture = Figure(figsize=(3.3 * len(kinds), 3.0), layout="constrained")
    FigureCanvasAgg(picture)
    panels = picture.subplots(1, len(kinds), sharey=True, squeeze=False)[0]
    for panel, kind in zip(panels, kinds, strict=True):
        lines = {
            "bound@T": [value(method=kind, convention=f"bound@{t}") for t in STEPS],
            f"iw@T,{DRAWS}": [value(method=kind, convention=f"iw@{t},{DRAWS}") for t in STEPS],
            "exact NLL of the T-step sampler": [value(method=kind, convention="exact", nfe=t) for t in STEPS],
        }
        for (name, values), style in zip(lines.items(), ("o-", "s--", "k^-"), strict=True):
            panel.plot(STEPS, values, style, label=name, markersize=4, linewidth=1.2)
        panel.axhline(value(method=kind, convention="objective"), color="tab:red", linestyle=":", label="objective")
        panel.axhline(value(method="data"), color="0.5", linewidth=1, label="the data's own law")
        panel.set_xscale("log", base=2)
        panel.set_yscale("log", base=2)
        panel.set(title=results.label(kind), xlabel="steps T", xticks=STEPS, xticklabels=[str(t) for t in STEPS])
    panels[0].set(ylabel="nats per row", yticks=(2, 4, 8, 16, 32), yticklabels=("2", "4", "8", "16", "32"))
    picture.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8, frameon=False
    )
    picture.savefig(path, dpi=120)
