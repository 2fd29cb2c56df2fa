"""The demo: MDLM, VADD and E-MoE on 8-modes from the same data, and digits by released models, in minutes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from emoe.cli import Parser
from emoe.commands import split_settings
from emoe.console import count_calls, meter
from emoe.domains.images import as_images
from emoe.evaluation.curves import Curves, read_curve
from emoe.evaluation.grid import METHODS, toy_grid
from emoe.evaluation.pools import draw_pool
from emoe.evaluation.report import Picture, write_report
from emoe.evaluation.results import Results
from emoe.evaluation.tables import print_grid
from emoe.evaluation.toy_report import toy_sections
from emoe.experiment import Experiment, customise
from emoe.pretrained import from_pretrained, released
from emoe.recipes import get_recipe
from emoe.studies.base import make_study
from emoe.studies.images import samples_figure
from emoe.studies.toy import reference_rows

EXPERIMENTS = ("demo-emoe", "demo-vadd", "demo-mdlm")  # the longest first, so that cores stay busy
RELEASED = ("mnist-mdlm", "mnist-vadd", "mnist-emoe")  # those that are there are shown
RELEASED_NFE = (1, 4, 16)
RELEASED_IMAGES = 16


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
    kinds = {run.experiment.method.kind for run in study.runs}
    panels = {"ground truth": toy.fresh(20_000, seed)}
    panels |= {label: study.pools[toy.name, kind, seed, 1] for kind, label in METHODS.items() if kind in kinds}
    toy.picture(panels, folder / "figure.png", title="8-modes: one network call per sample (NFE 1)")
    digits = draw_digits(folder / "digits.png", device=args.device, quiet=args.quiet)
    write_toy_report(
        folder / "report.html",
        "E-MoE demo: 8-modes",
        results,
        [folder / "figure.png", *([folder / "digits.png"] if digits else [])],
        [run.path for run in study.runs],
    )
    for metric in ("validity", "overlap"):
        print_grid(toy_grid(results, metric))
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
                rows[METHODS[str(run.experiment.method.kind)]] = {
                    f"NFE {nfe}": as_images(draw_pool(run.method, RELEASED_IMAGES, nfe, seed=0).samples)
                    for nfe in RELEASED_NFE
                }
    if rows:
        samples_figure(rows, path)
    return names


def write_toy_report(path: Path, title: str, results: Results, pictures: Sequence[Path], runs: Sequence[Path]) -> None:
    """The toy report with pictures and, where run folders are given, their training curves."""
    shown = [Picture(picture, _caption(picture)) for picture in pictures]
    curves = []
    for key, name in (("loss", "Training loss (nats per token)"), ("kl", "KL of the latent (nats per token)")):
        series = {}
        for run in runs:
            points = read_curve(run / "metrics.jsonl", key)
            if any(y for _, y in points):
                series[_run_label(run)] = points
        if series:
            curves.append(Curves(series, name, name))
    write_report(path, title, toy_sections(results, pictures=shown, curves=curves))


def _caption(picture: Path) -> str:
    if picture.stem == "figure":
        return "Samples at one network call: factorised MDLM mixes coordinates of different modes."
    if picture.stem == "digits":
        return "Binarised MNIST by released models: MDLM draws every pixel of a call alone."
    return picture.stem.replace("-", " ")


def _run_label(run: Path) -> str:
    experiment = Experiment.load(run / "experiment.json")
    return METHODS.get(experiment.method.kind, experiment.method.kind)
