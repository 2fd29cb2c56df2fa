"""Where the latent's nats go: the route KL of every block and position in the course of training."""

from __future__ import annotations

import json
import math
from pathlib import Path

from emoe.cli import Parser
from emoe.commands import split_settings
from emoe.console import console_table
from emoe.evaluation.evaluate import make_row
from emoe.experiment import Experiment, customise
from emoe.recipes import get_recipe
from emoe.reporting.results import Row
from emoe.runs import Run
from emoe.studies.base import make_study
from emoe.types import Measurement

# Small enough for two CPU cores in a few minutes; ties of four positions and three blocks show what spreading does.
SIZES = {"backbone.width": "32", "backbone.hidden": "64", "train.batch": "64", "train.steps": "2000"}
TIES = {"domain.length": "4", "backbone.depth": "3"}
VARIANTS: dict[str, tuple[str, dict[str, str]]] = {
    "paper's reading": ("ties-emoe", {}),
    "all positions carry": ("ties-emoe-plus", {"method.carriers": "all"}),
    "positions code in turn": ("ties-emoe-plus", {}),
}
LAST = 10  # logged lines that a figure at the end of training is a mean of
Curve = list[tuple[int, list[float]]]  # (step, nats at each position)


def main(words: list[str]) -> int:
    """`emoe reproduce information`."""
    rest, settings = split_settings(words)
    parser = Parser(
        prog="emoe reproduce information",
        description="Train E-MoE on two pairs of equal symbols in three ways (minutes on 2 cores) and draw how many "
        "nats each block and position carries in the course of training. Writes information.json and a figure.",
    )
    parser.add_argument("--runs", default="runs/information", help="where run folders go (default runs/information)")
    parser.add_argument("--results", default="results", help="folder of information.json and figures (default results)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    args = parser.parse_args(rest)
    folder = Path(args.results)
    study = make_study(
        "reproduce information", words, folder=Path(args.runs), results=folder / "information.json",
        device=args.device, quiet=args.quiet,
    )  # fmt: skip
    study.more = information_rows
    study.run(
        [customise(get_recipe(recipe), {**SIZES, **TIES, **own, **settings}) for recipe, own in VARIANTS.values()]
    )
    runs = dict(zip(VARIANTS, study.runs, strict=True))
    draw({label: curves(run.path) for label, run in runs.items()}, folder / "figures" / "information.png")
    lines = []
    for label, run in runs.items():
        ends = {block: mean_end(curve) for block, curve in curves(run.path).items()}
        share = [f"{sum(nats):.2f}" for nats in ends.values()]
        ties = [row for row in study.add([]).select(metric="ties", nfe=1, recipe=run.experiment.name)]
        lines.append([label, f"{sum(map(sum, ends.values())):.2f}", " + ".join(share), f"{ties[0].value:.1f}"])
    console_table(["how the latent is learned", "nats per row", "by block", "ties at NFE 1 (%)"], lines)
    study.note(f"written: {folder / 'information.json'}, {folder / 'figures' / 'information.png'}")
    return 0


def curves(run: Path) -> dict[int, Curve]:
    """Block -> route KL at each position for every logged step."""
    found: dict[int, Curve] = {}
    for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        for key, value in entry.items():
            name, _, block = key.partition("/block")
            if name == "route_kl_at":
                found.setdefault(int(block), []).append((entry["step"], value))
    return found


def mean_end(curve: Curve) -> list[float]:
    """Mean of the last logged lines at each position."""
    tail = [nats for _, nats in curve[-LAST:]]
    return [math.fsum(column) / len(tail) for column in zip(*tail, strict=True)]


def information_rows(run: Run) -> list[Row]:
    """Nats that every block and position carries at the end of training."""
    experiment: Experiment = run.experiment
    rows = []
    for block, curve in curves(run.path).items():
        for place, nats in enumerate(mean_end(curve)):
            item = Measurement(f"route_kl/block{block}/position{place + 1}", nats, None, min(LAST, len(curve)))
            rows.append(make_row(item, run.domain, experiment, nfe=None))
    return rows


def draw(panels: dict[str, dict[int, Curve]], path: Path) -> None:
    """Stacked areas of nats over training, a colour for each block and a shade for each position."""
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.4 * len(panels), 3.0), layout="constrained")
    FigureCanvasAgg(figure)
    maps = ("Blues", "Oranges", "Greens", "Purples", "Reds", "Greys")
    for panel, (label, blocks) in zip(figure.subplots(1, len(panels), sharey=True, squeeze=False)[0], panels.items(),
                                      strict=True):  # fmt: skip
        layers, colours, names = [], [], []
        for block, curve in sorted(blocks.items()):
            series = list(zip(*(nats for _, nats in curve), strict=True))
            for place, values in enumerate(series):
                layers.append(values)
                colours.append(colormaps[maps[(block - 1) % len(maps)]](0.35 + 0.5 * place / max(1, len(series) - 1)))
                names.append(f"block {block}" if place == len(series) // 2 else "_")
        steps = [step for step, _ in next(iter(blocks.values()))]
        panel.stackplot(steps, *layers, colors=colours, labels=names)
        panel.set_title(label, fontsize=9)
        panel.set_xlabel("training step", fontsize=8)
        panel.tick_params(labelsize=7)
        panel.legend(fontsize=7, loc="upper left")
    figure.axes[0].set_ylabel("route KL (nats per row)", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
