"""Route KL of every block and position in the course of training.

python research/information.py        minutes on two cores; writes results/information.json and a figure
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

import numpy as np
from tables import information_tables

from emoe.engine.metricslog import read_metrics
from emoe.experiment import Experiment, customise
from emoe.figures.base import canvas, save
from emoe.recipes import get_recipe
from emoe.reporting.results import Results
from emoe.studies import pipeline, stages
from emoe.studies.options import Options
from emoe.studies.stages import Stage, Trained
from emoe.types import Measurement

# Small enough for two CPU cores in a few minutes; ties of four positions and three blocks show the effect of turns.
SETTINGS = {"backbone.width": "32", "backbone.hidden": "64", "backbone.depth": "3", "domain.length": "4"}
SETTINGS |= {"train.batch": "64", "train.steps": "2000"}
VARIANTS: dict[str, tuple[str, dict[str, str]]] = {
    "paper's reading": ("ties-emoe", {}),
    "all positions in all blocks": ("ties-emoe-wake-sleep", {"method.compare.in-turn": "false"}),
    "positions in turn": ("ties-emoe-wake-sleep", {}),
}
COLOURS = ("Blues", "Oranges", "Greens")  # of the blocks
LAST = 10  # logged records that a number at the end of training is a mean of
Curve = list[tuple[int, list[float]]]  # (step, nats at each position)


def curves(run: Path) -> dict[int, Curve]:
    """Return block -> route KL at each position for every logged step."""
    blocks: dict[int, Curve] = {}
    for record in read_metrics(run / "metrics.jsonl"):
        for key, value in record.items():
            name, _, block = key.partition("/block")
            if name == "route_kl_at":
                blocks.setdefault(int(block), []).append((record["step"], value))
    return blocks


def mean_end(curve: Curve) -> list[float]:
    """Return the mean of the last logged records at each position."""
    return [fmean(column) for column in zip(*(nats for _, nats in curve[-LAST:]), strict=True)]


def draw(panels: Mapping[str, dict[int, Curve]], path: Path) -> None:
    """Draw stacked areas of nats over training, a colour for each block and a shade for each position."""
    from matplotlib import colormaps

    figure = canvas(3.4 * len(panels), 3.0)
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, (label, blocks) in zip(axes, panels.items(), strict=True):
        layers, colours, names = [], [], []
        for block, curve in sorted(blocks.items()):
            series = np.array([nats for _, nats in curve]).T
            layers += [*series]
            colours += [*colormaps[COLOURS[block - 1]](np.linspace(0.35, 0.85, len(series)))]
            names += [f"block {block}", *["_"] * (len(series) - 1)]
        axis.stackplot([step for step, _ in next(iter(blocks.values()))], *layers, colors=colours, labels=names)
        axis.set_title(label, fontsize=9)
        axis.set_xlabel("training step", fontsize=8)
        axis.legend(fontsize=7, loc="upper left")
    axes[0].set_ylabel("route KL (nats per row)", fontsize=8)
    save(figure, path)


class Study(pipeline.Study):
    """Train the variants, record their nats, draw the figure and print a table."""

    def experiments(self) -> dict[Experiment, str]:
        settings = {**SETTINGS, **self.options.settings}
        return {customise(get_recipe(name), {**settings, **own}): label for label, (name, own) in VARIANTS.items()}

    def stages(self, run: Trained) -> list[Stage]:
        nats = [
            Measurement(f"route_kl/block{block}/position{number}", nats, None, min(LAST, len(curve)))
            for block, curve in curves(run.path).items()
            for number, nats in enumerate(mean_end(curve), 1)
        ]
        config = run.experiment.eval
        pools = [stages.pool(run, nfe, config.samples) for nfe in config.nfe]
        return [*pools, stages.stage("nats", run.fields(), lambda: nats, "route_kl/block1/position1")]

    def write(self, results: Results) -> None:
        self.figure("information.png", lambda path: draw({run.label: curves(run.path) for run in self.runs}, path))
        self.print_tables(information_tables(results))


if __name__ == "__main__":
    raise SystemExit(Study(Options(study="information")).run())
