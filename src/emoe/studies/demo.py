"""The demo: MDLM, VADD and E-MoE on 8-modes from the same data, and digits by released models, in minutes."""

from __future__ import annotations

from pathlib import Path

from emoe.cli import Parser
from emoe.commands import split_settings
from emoe.console import count_calls, meter
from emoe.domains.images import as_images
from emoe.evaluation.pools import draw_pool
from emoe.experiment import customise
from emoe.pretrained import from_pretrained, released
from emoe.recipes import get_recipe
from emoe.reporting.grid import sampled
from emoe.reporting.html import write_page
from emoe.reporting.render import print_metrics
from emoe.reporting.results import Results, method_rank
from emoe.reporting.toy import METRICS
from emoe.studies.base import make_study
from emoe.studies.images import samples_figure
from emoe.studies.toy import reference_rows

EXPERIMENTS = ("demo-emoe", "demo-vadd", "demo-mdlm")  # the longest first, so that cores stay busy
RELEASED = ("mnist-mdlm", "mnist-vadd", "mnist-emoe")  # those that are there are shown
RELEASED_NFE = (1, 4, 16)
RELEASED_IMAGES = 16
CAPTIONS = {
    "figure": "Samples at one network call: factorised MDLM mixes coordinates of different modes.",
    "digits": "Binarised MNIST by released models: MDLM draws every pixel of a call alone.",
}


def main(words: list[str]) -> int:
    """`emoe demo`."""
    rest, settings = split_settings(words)
    parser = Parser(
        prog="emoe demo",
        description="Train three methods on the 8-modes density with a small network and show why the mixture helps; "
        "then draw digits with the released models of MNIST. Writes report.html, figure.png, digits.png and "
        "results.json. Runs that are finished are reused; delete the folder to train again.",
    )
    parser.add_argument("--out", default="runs/demo", help="folder (default runs/demo)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    args = parser.parse_args(rest)
    folder = Path(args.out)
    study = make_study(
        "demo", words, folder=folder, results=folder / "results.json", device=args.device, quiet=args.quiet
    )
    study.run([customise(get_recipe(name), settings) for name in EXPERIMENTS])
    results = study.add(reference_rows(study))
    seed = study.runs[0].experiment.seed
    toy = study.runs[0].domain
    kinds = sorted({str(run.experiment.method.kind) for run in study.runs}, key=method_rank)
    panels = {"ground truth": toy.fresh(20_000, seed)}
    panels |= {results.label(kind): study.pools[toy.name, kind, seed, 1] for kind in kinds}
    toy.picture(panels, folder / "figure.png", title="8-modes: one network call per sample (NFE 1)")
    digits = draw_digits(folder / "digits.png", device=args.device, quiet=args.quiet)
    pictures = {folder / "figure.png": CAPTIONS["figure"]}
    pictures |= {folder / "digits.png": CAPTIONS["digits"]} if digits else {}
    runs = [run.path for run in study.runs]
    write_page(folder / "report.html", "E-MoE demo: 8-modes", results, pictures=pictures, runs=runs)
    print_metrics(sampled(results), "toy", METRICS)
    print(f"report:  {folder / 'report.html'}\nfigure:  {folder / 'figure.png'}")
    if digits:
        print(f"digits:  {folder / 'digits.png'} ({', '.join(digits)}: released weights)")
    print(f"numbers: {folder / 'results.json'}")
    return 0


def draw_digits(path: Path, *, device: str = "auto", quiet: bool = False) -> list[str]:
    """A picture of the first samples of the released models of MNIST; returns their names, none without any."""
    names = [name for name in RELEASED if name in released()]
    rows = {}
    with meter(len(names) * sum(RELEASED_NFE), "digits by released models", quiet=quiet) as tick:
        for name in names:
            run = from_pretrained(name, device)
            with count_calls(run.method.backbone, tick):
                rows[Results().label(str(run.experiment.method.kind))] = {
                    f"NFE {nfe}": as_images(draw_pool(run.method, RELEASED_IMAGES, nfe, seed=0).samples)
                    for nfe in RELEASED_NFE
                }
    if rows:
        samples_figure(rows, path)
    return names
