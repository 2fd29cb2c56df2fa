"""How the named likelihoods differ: objective, bound@T, iw@T,K and exact NLL against T, for the demo's three models."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from emoe.cli import Parser
from emoe.commands import split_settings
from emoe.domains.toy import Toy
from emoe.evaluation.evaluate import make_row
from emoe.evaluation.grid import METHODS
from emoe.evaluation.likelihood import coordination_gain, estimate_nll, factorised_nll
from emoe.evaluation.results import Results, Row
from emoe.exact import NODES, chain_laws, exact_nll, repeated_laws
from emoe.experiment import customise
from emoe.methods.base import MaskedDiffusion
from emoe.methods.vadd import VADD
from emoe.recipes import get_recipe
from emoe.rng import derive_seed
from emoe.runs import Run
from emoe.studies.base import make_study
from emoe.types import Convention, Measurement

EXPERIMENTS = ("demo-emoe", "demo-vadd", "demo-mdlm")
STEPS = (1, 2, 4, 8, 16)
DRAWS = 16
ROWS = 8_000


def main(words: list[str]) -> int:
    """`emoe reproduce likelihood`."""
    rest, settings = split_settings(words)
    parser = Parser(
        prog="emoe reproduce likelihood",
        description="Train the demo's three models (minutes on 2 CPU cores) and compare every named likelihood with "
        "the exact NLL of the T-step sampler on the same held-out rows. Writes likelihood.json and a figure.",
    )
    parser.add_argument(
        "--runs", default="runs/demo", help="where run folders go (default runs/demo: reuses the demo's)"
    )
    parser.add_argument("--results", default="results", help="folder of likelihood.json and figures (default results)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    args = parser.parse_args(rest)
    folder = Path(args.results)
    study = make_study(
        "reproduce likelihood", words, folder=Path(args.runs), results=folder / "likelihood.json", device=args.device,
        quiet=args.quiet,
    )  # fmt: skip
    study.run([customise(get_recipe(name), settings) for name in EXPERIMENTS])
    for run in study.runs:
        study.note(f"likelihoods of {run.experiment.name}")
        study.add(likelihood_rows(run))
    results = Results.load(folder / "likelihood.json").only(metric=("nll", "coordination_gain"))
    results.save(folder / "likelihood.json")
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    figure(results, folder / "figures" / "likelihood.png")
    study.note(f"written: {folder / 'likelihood.json'}, {folder / 'figures' / 'likelihood.png'}")
    return 0


def likelihood_rows(run: Run) -> list[Row]:
    """All named likelihoods of a toy run and the exact NLL, on the same held-out rows; and the data's entropy."""
    toy, method = run.domain, run.method
    assert isinstance(toy, Toy) and isinstance(method, MaskedDiffusion)
    held_out = toy.fresh(ROWS, derive_seed(run.experiment.seed, "held out"))

    def row(item: Measurement, convention: str, nfe: int | None = None, kind: str | None = None) -> Row:
        return make_row(item, toy, run.experiment, nfe=nfe, convention=convention, method=kind)

    cells = toy.cell_probabilities()
    truth = Measurement("nll", exact_nll(cells, held_out).mean().item(), None, ROWS)
    rows = [row(truth, "exact", kind="data")]
    names = ["objective", *([] if method.has_latent else ["nelbo"])]
    names += [name for steps in STEPS for name in (f"bound@{steps}", f"iw@{steps},{DRAWS}")]
    for name in names:
        nll = estimate_nll(method, held_out, Convention.parse(name), seed=run.experiment.seed)
        rows.append(row(nll, name))
        if name == "bound@1" and method.has_latent:
            best = factorised_nll(toy.rows, held_out, toy.space.size)
            rows.append(row(coordination_gain(nll, best, toy.space.length), name))
    return rows + [row(item, "exact", steps) for steps, item in exact_rows(method, held_out).items()]


def exact_rows(method: MaskedDiffusion, rows: Int[Tensor, "n L"]) -> dict[int, Measurement]:
    """Mean exact NLL of rows for each T; where latents have to be drawn, with the standard error of four laws."""
    if isinstance(method, VADD) and method.config.latent not in NODES:
        laws = repeated_laws(method, STEPS, repeats=4)
    else:
        laws = {steps: law[None] for steps, law in chain_laws(method, STEPS).items()}
    found = {}
    for steps, several in laws.items():
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

    kinds = [kind for kind in METHODS if results.select(method=kind, metric="nll")]
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
        panel.set(title=METHODS[kind], xlabel="steps T", xticks=STEPS, xticklabels=[str(t) for t in STEPS])
    panels[0].set(ylabel="nats per row", yticks=(2, 4, 8, 16, 32), yticklabels=("2", "4", "8", "16", "32"))
    picture.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8, frameon=False
    )
    picture.savefig(path, dpi=120)
