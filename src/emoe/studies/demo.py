"""The demo: MDLM, VADD and E-MoE on 8-modes from the same data, and digits of released models, in minutes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from emoe.console import meter, tick_calls
from emoe.domains.images import as_images
from emoe.experiment import Experiment, customise
from emoe.recipes import get_recipe
from emoe.reporting import html
from emoe.reporting.results import Results, method_rank
from emoe.reporting.table import print_metrics
from emoe.reporting.toy import METRICS
from emoe.runs.pretrained import from_pretrained, released
from emoe.runs.sampling import draw
from emoe.studies import options
from emoe.studies.images import sample_grid
from emoe.studies.options import flag, hidden
from emoe.studies.pools import PoolKey
from emoe.studies.toy import TRUTH, ToyStudy

EXPERIMENTS = ("demo-emoe", "demo-vadd", "demo-mdlm")  # the longest first, so that cores stay busy
RELEASED = ("mnist-mdlm", "mnist-vadd", "mnist-emoe")
RELEASED_NFE = (1, 4, 16)
RELEASED_IMAGES = 16
SAMPLES = "Samples at one network call: factorised MDLM mixes coordinates of different modes."
DIGITS = "Binarised MNIST by released models: MDLM draws every pixel of a call alone."


@dataclass(frozen=True, kw_only=True)
class Options(options.Options):
    """Options of the demo."""

    study: str = hidden("demo")
    out: Path = flag(Path("runs/demo"), "folder of runs, report and figures; delete it to train again", recorded=False)
    runs: Path | None = hidden(None)
    results: Path = hidden(Path())
    stem = "results"


class Study(ToyStudy):
    """Train three methods on the 8-modes density with a small network and show why the mixture helps.

    Then draw digits with the released models of MNIST. Writes report.html, figure.png, digits.png and results.json.
    Runs that are finished are reused; delete the folder to train again.

    Examples:
        emoe demo
        emoe demo --out runs/demo --train.steps 500
    """

    options: Options

    def __init__(self, options: Options):
        super().__init__(dataclasses.replace(options, runs=options.out, results=options.out))

    def experiments(self) -> list[Experiment]:
        return [customise(get_recipe(name), self.options.settings) for name in EXPERIMENTS]

    def write(self, results: Results) -> None:
        folder, trained = self.options.out, [run for run in self.runs if not run.steps_left]
        order, first = sorted(trained, key=lambda run: method_rank(run.experiment.method_name)), self.runs[0]
        panels = {"ground truth": first.domain.fresh(TRUTH, first.experiment.seed)}
        panels |= {results.label(run.experiment.method_name): run.pools.tokens(PoolKey(1)) for run in order}
        first.domain.picture(panels, folder / "figure.png", title="8-modes: one network call per sample (NFE 1)")
        names = draw_digits(folder / "digits.png", device=self.options.device, quiet=self.options.quiet)
        pictures = {folder / "figure.png": SAMPLES} | ({folder / "digits.png": DIGITS} if names else {})
        paths = [run.path for run in trained]
        html.write_page(folder / "report.html", "E-MoE demo: 8-modes", results, pictures=pictures, runs=paths)
        self.written += [folder / "report.html", *pictures]
        print_metrics(results, "toy", METRICS)
        print(f"report:  {folder / 'report.html'}\nfigure:  {folder / 'figure.png'}")
        if names:
            print(f"digits:  {folder / 'digits.png'} ({', '.join(names)}: released weights)")
        print(f"numbers: {self.results}")


def draw_digits(path: Path, *, device: str = "auto", quiet: bool = False) -> list[str]:
    """A figure of the first samples of the released models of MNIST; returns their names, none without any."""
    names = [name for name in RELEASED if name in released()]
    rows = {}
    with meter(len(names) * sum(RELEASED_NFE), "digits by released models", quiet=quiet) as tick:
        for name in names:
            run = from_pretrained(name, device=device)
            with tick_calls(run.method.backbone, tick):
                pools = {nfe: draw(run.method, RELEASED_IMAGES, nfe).samples for nfe in RELEASED_NFE}
            rows[run.method.label] = {f"NFE {nfe}": as_images(samples) for nfe, samples in pools.items()}
    if rows:
        sample_grid(rows, path)
    return names
