"""Binary images: the paper's MNIST table beside valid bounds, samples over NFE, a film of the routes; also digits."""

from __future__ import annotations

import dataclasses
import functools
import io
import math
import os
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from jaxtyping import UInt8

from emoe.backbones.base import active_parameters, total_parameters
from emoe.cli import Parser
from emoe.commands import parse_number, parse_numbers, split_settings
from emoe.config import ConfigError
from emoe.console import console_table, count_calls, meter
from emoe.domains.base import DomainConfig
from emoe.domains.images import Images, as_images, pack_rows, unpack_rows
from emoe.evaluation.evaluate import make_row, method_name
from emoe.evaluation.grid import METHODS, measure
from emoe.evaluation.image_blocks import (
    REACHED,
    SHOWN,
    TASKS,
    bpd_lines,
    data_of,
    image_tables,
    mean_of,
    models,
    nfe_grid,
    real_data,
    reference_name,
)
from emoe.evaluation.latent_blocks import words_of
from emoe.evaluation.likelihood import coordination_gain, estimate_nll, factorised_nll, in_units, passes
from emoe.evaluation.pools import draw_pool
from emoe.evaluation.results import Results, Row
from emoe.evaluation.tables import print_grid
from emoe.experiment import Experiment, customise
from emoe.figures.gif import Recorder, write_gif
from emoe.figures.panels import mosaic
from emoe.files import replace_file
from emoe.methods.emoe import EMoE
from emoe.pretrained import experiment_of, from_pretrained, released
from emoe.recipes import all_recipes, get_recipe
from emoe.rng import Rng, derive_seed
from emoe.runs import Run, load_run, pick_device
from emoe.studies.base import Study, make_study, run_name, steps_done
from emoe.studies.latent import parse_deadline, parse_jobs, parse_names, parse_seeds, refuse_fields
from emoe.types import Convention, Measurement

DEFAULT_METHODS = "mdlm,vadd,emoe,emoe-plus"
BOUNDS = ("bound@1", "bound@4", "bound@16", "bound@64")
WEIGHTED = ("iw@1,64", "iw@4,64")
ROWS, WEIGHTED_ROWS = 10_000, 1_000  # test images
TOKENS = 2**19  # tokens of a batch of likelihoods: 512 images of 32 x 32, or 8 with 64 draws each
PARTS = ("train", "score", "draw")
RESERVED = {"eval.nfe": "nfe", "eval.samples": "samples", "domain.root": "data-root"}
# Measures that compare two sets of rows: the test split cannot be compared with itself.
COMPARING = ("frechet", "precision", "recall", "density", "coverage", "class_tv", "pixel_tv")
EDGE = 4  # images along the edge of a panel of samples
FILM_IMAGES, FILM_STEPS = 4, 20
FILMED = ("emoe", "emoe-plus")  # the first one that is trained
CURVES = ("frechet", "coverage", "confidence")
KEPT = "shown.npz"  # in a run folder: the first samples at each NFE

Stage = int | Convention | None  # a pool at an NFE, a likelihood, or (None) the sizes of the network
Made = Callable[[Path], None]


def main(words: list[str], data: str = "mnist") -> int:
    """`emoe reproduce mnist` and `emoe reproduce digits`."""
    if data not in TASKS:
        raise ValueError(f"no images are called {data!r}")
    rest, settings = split_settings(words)
    args = make_parser(data).parse_args(rest)
    deadline = parse_deadline(args.budget)
    refuse_fields(settings, RESERVED)
    if args.only not in (None, *PARTS):
        raise ConfigError([f"only: {args.only!r} is not known; allowed: {', '.join(PARTS)}"])
    plan = Plan(
        nfe=None if args.nfe is None else tuple(sorted(set(parse_numbers("nfe", args.nfe)))),
        samples=None if args.samples is None else parse_number("samples", args.samples, low=2, high=10_000_000),
        rows=parse_number("rows", args.rows, high=10_000_000),
        weighted_rows=parse_number("iw-rows", args.iw_rows, high=10_000_000),
        unfinished=args.unfinished,
        released=args.released,
    )
    names = parse_names("methods", args.methods, recipes_of(data))
    seeds = parse_seeds(args.seeds)
    experiments = [_experiment(data, name, seed, settings) for seed in seeds for name in names]
    folder = Path(args.results)
    where = pick_device(args.device)
    jobs = parse_jobs(args.jobs) or (1 if where.type == "cuda" else torch.get_num_threads())
    study = make_study(
        f"reproduce {data}", _without_places(words), folder=Path(args.runs), results=folder / f"{data}.json",
        device=args.device, quiet=args.quiet, jobs=jobs,
    )  # fmt: skip
    study.deadline, study.stops, study.sampled, study.tolerant = deadline, True, False, True
    with data_root(getattr(args, "data_root", None)):
        return Chain(study, plan).run(data, experiments, _all_methods(data, seeds[0], settings), folder, args.only)


def make_parser(data: str) -> Parser:
    """The options."""
    about = {
        "mnist": "on binarised MNIST (about an hour on a data-centre GPU)",
        "digits": "on the small digits that come with the package",
    }[data]
    parser = Parser(
        prog=f"emoe reproduce {data}",
        description=f"Train MDLM, VADD, E-MoE and E-MoE+ {about}; measure samples at each NFE and named likelihoods in "
        f"bits per dimension; write {data}.json, {data}.md, figures and a film of the routes. Killed, or out of "
        "--budget, it continues with the same command; a run folder that was copied from another machine is continued "
        "too, and methods may be run one by one. Fields of all recipes can be overridden, for instance --train.steps "
        "200 for a try.",
    )
    parser.add_argument(
        "--methods", default=DEFAULT_METHODS, help=f"methods, ends of recipes (default {DEFAULT_METHODS})"
    )
    parser.add_argument("--nfe", help="numbers of network calls; default: the recipe's")
    parser.add_argument("--samples", help="samples for each NFE; default: the recipe's")
    parser.add_argument("--rows", default=str(ROWS), help=f"test images for likelihoods (default {ROWS}, or all)")
    parser.add_argument(
        "--iw-rows", default=str(WEIGHTED_ROWS),
        help=f"test images for importance-weighted ones (default {WEIGHTED_ROWS}, or all)",
    )  # fmt: skip
    parser.add_argument("--only", help=f"one part of the chain alone: {', '.join(PARTS)}")
    parser.add_argument(
        "--unfinished", action="store_true", help="measure and show runs as far as they are; tables tell the step"
    )
    parser.add_argument(
        "--released", action="store_true",
        help="measure and show released weights where there is no run of a recipe: nothing is trained",
    )  # fmt: skip
    if data == "mnist":
        parser.add_argument("--data-root", help="folder with MNIST's files; default: EMOE_DATA, then ./data")
    add = parser.add_argument
    add("--seeds", default="0", help="seeds (default 0)")
    add(
        "--budget", metavar="MINUTES",
        help="after this time a run under way is stopped and saved and nothing else starts; the same command continues",
    )  # fmt: skip
    add("--runs", default=f"runs/{data}", help=f"where run folders go (default runs/{data})")
    add("--results", default="results", help=f"folder of {data}.json, {data}.md and figures (default results)")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:N")
    add("--jobs", default="0", help="runs trained at once; 0 = one on a GPU, one for each core on a CPU")
    add("--quiet", action="store_true", help="no progress")
    return parser


def recipes_of(data: str) -> list[str]:
    """Ends of the recipes of a data set: `mdlm`, `emoe-plus`, ..."""
    return [name.removeprefix(f"{data}-") for name in all_recipes() if name.startswith(f"{data}-")]


def _experiment(data: str, method: str, seed: int, settings: Mapping[str, str]) -> Experiment:
    return customise(get_recipe(f"{data}-{method}"), {**settings, "seed": str(seed)})


def _all_methods(data: str, seed: int, settings: Mapping[str, str]) -> list[Experiment]:
    """One experiment for each method that takes these settings: figures show what earlier commands trained, too."""
    found = []
    for name in recipes_of(data):
        try:
            found.append(_experiment(data, name, seed, settings))
        except ConfigError:
            continue
    order = list(METHODS)
    return sorted(found, key=lambda one: order.index(method_name(one)) if method_name(one) in order else len(order))


def _without_places(words: Sequence[str]) -> list[str]:
    """The command line without the folder of the data, which changes no number."""
    kept = [w for before, w in zip(["", *words], words, strict=False) if before != "--data-root"]
    return [word for word in kept if word.partition("=")[0] != "--data-root"]


@contextmanager
def data_root(folder: str | None) -> Iterator[None]:
    """Let `folder` hold the data for a while.

    It is no field of the experiment: a run folder must be the same one where the data lie elsewhere.
    """
    before = os.environ.get("EMOE_DATA")
    if folder is not None:
        os.environ["EMOE_DATA"] = folder
    try:
        yield
    finally:
        if folder is not None:
            os.environ.pop("EMOE_DATA")
            os.environ |= {} if before is None else {"EMOE_DATA": before}


@dataclass(frozen=True)
class Plan:
    """What is measured of every run."""

    nfe: tuple[int, ...] | None  # None = those of the recipe
    samples: int | None  # for each NFE; None = as many as the recipe says
    rows: int  # test images for likelihoods
    weighted_rows: int  # and for importance-weighted ones
    unfinished: bool = False  # runs that are still in training, too
    released: bool = False  # released weights where there is no run

    def steps(self, experiment: Experiment) -> tuple[int, ...]:
        """Numbers of network calls that samples are drawn with."""
        return experiment.eval.nfe if self.nfe is None else self.nfe

    def stages(self, experiment: Experiment) -> list[Stage]:
        """Pieces of work."""
        latent = bool(experiment.method.wants().names())
        names = ["objective", *([] if latent else ["nelbo"]), *BOUNDS]
        return [
            None,
            *map(Convention.parse, names),
            *self.steps(experiment),
            *(Convention.parse(name) for name in WEIGHTED if latent),
        ]

    def count(self, stage: Stage, experiment: Experiment, domain: Images) -> int | None:
        """How many samples or test images a stage takes."""
        if stage is None:
            return None
        if isinstance(stage, int):
            return self.samples or experiment.eval.samples
        return min(self.weighted_rows if stage.draws else self.rows, len(domain.test_rows))

    def done(self, results: Results, stage: Stage, experiment: Experiment, domain: Images) -> bool:
        """Whether the results hold the stage, with as many samples or rows as are wanted, or more."""
        metric = "params_active" if stage is None else "ink" if isinstance(stage, int) else "bpd"
        place = {
            "nfe": stage if isinstance(stage, int) else None,
            "convention": str(stage) if isinstance(stage, Convention) else None,
        }
        same = results.select(recipe=experiment.name, seed=experiment.seed, data=domain.name, metric=metric, **place)
        return any((row.n or 0) >= (self.count(stage, experiment, domain) or 0) for row in same)

    def calls(self, stage: Stage, experiment: Experiment, domain: Images) -> int:
        """Network calls of a stage."""
        count = self.count(stage, experiment, domain)
        if stage is None or count is None:
            return 0
        if isinstance(stage, int):
            return stage * math.ceil(count / experiment.eval.batch)
        draws = max(1, stage.draws)
        return passes(stage) // draws * math.ceil(count / max(1, _batch(experiment, domain) // draws))

    def measure(self, stage: Stage, run: Run, experiment: Experiment, domain: Images) -> list[Row]:
        """The rows of a stage."""
        count = self.count(stage, experiment, domain)
        if stage is None or count is None:
            sizes = {"params": total_parameters(run.method), "params_active": active_parameters(run.method)}
            items = [Measurement(name, size, None, None) for name, size in sizes.items()]
            return [make_row(item, domain, experiment, nfe=None) for item in items]
        if isinstance(stage, int):
            pool = draw_pool(run.method, count, stage, experiment.seed, batch=experiment.eval.batch)
            found = domain.measure(pool.samples, experiment.seed)
            return [make_row(item, domain, experiment, nfe=pool.nfe) for item in found]
        rows = domain.fresh(count, derive_seed(experiment.seed, "held out"))
        batch = _batch(experiment, domain)
        nll = estimate_nll(run.method, rows, stage, seed=experiment.seed, batch=batch)
        found = [item for item in in_units(nll, domain.space.length) if item.metric != "ppl"]
        if str(stage) == "bound@1" and getattr(run.method, "has_latent", False):
            best = factorised_nll(domain.rows, rows, domain.space.size)
            found.append(coordination_gain(nll, best, domain.space.length))
        return [make_row(item, domain, experiment, nfe=None, convention=str(stage)) for item in found]


def _batch(experiment: Experiment, domain: Images) -> int:
    """Rows of a network call for likelihoods, draws counted: bounded, whatever fits into training."""
    return max(1, min(experiment.eval.batch, TOKENS // domain.space.length))


@dataclass
class Chain:
    """The parts of the study, each of which does only what is not done yet."""

    study: Study
    plan: Plan
    late: int = 0  # stages that were not started
    domains: dict[DomainConfig, Images] = field(default_factory=dict)

    def run(
        self, data: str, experiments: Sequence[Experiment], shown: Sequence[Experiment], folder: Path, only: str | None
    ) -> int:
        """Train, score, draw, or one of them alone; returns an exit code.

        Args:
            data: mnist or digits.
            experiments: What to train and score.
            shown: What figures show, where it is trained: one experiment for each method.
            folder: Where results go.
            only: A part of the chain; None for all.
        """
        study = self.study
        if only in (None, "train"):
            self.train(experiments)
        if only in (None, "score"):
            self.score(experiments)
            self.real(experiments)
        if only in (None, "draw"):
            self.draw(data, shown, folder, anew=only == "draw")
        for name, error in study.failed.items():
            print(f"emoe reproduce: {name} failed: {error}", file=sys.stderr)
        left = len(study.skipped) + self.late
        if left:
            late = f"{len(study.skipped)} runs not trained, {self.late} measurements not made"
            print(f"emoe reproduce: {late}: the budget is used up; the same command continues", file=sys.stderr)
        if only != "train":
            show(study.results, data)
        return 1 if study.failed else 0

    def train(self, experiments: Sequence[Experiment]) -> None:
        """Train what is not trained; a run that was begun is continued."""
        left = [one for one in experiments if not (self._trained(one) or self._release(one))]
        self.study.note(f"{len(experiments)} runs, {len(experiments) - len(left)} of them trained before")
        if left:
            self.study.run(left)
            self.study.runs.clear()  # models are opened one at a time from here on

    def score(self, experiments: Sequence[Experiment]) -> None:
        """Measure what is not measured; every stage is recorded as soon as it is done."""
        for experiment in experiments:
            if not self._ready(experiment):
                self.study.note(f"{_label(experiment)}: not trained yet, so not measured")
                continue
            domain, known = self._domain(experiment), _known(self.study.results)
            stages, named = self.plan.stages(experiment), self._named(experiment)
            left = [stage for stage in stages if not self.plan.done(known, stage, named, domain)]
            left.sort(key=lambda stage: self.plan.calls(stage, named, domain))  # a budget is to buy as many as it can
            if not left:
                self.study.note(f"{_label(experiment)}: measured before")
                continue
            run = None
            for stage in left:
                if self._is_late():
                    self.late += 1
                    continue
                run = run or self._open(experiment)
                self._score(stage, run, named, domain, f"{stages.index(stage) + 1}/{len(stages)}")

    def _score(self, stage: Stage, run: Run, experiment: Experiment, domain: Images, place: str) -> None:
        """One stage, with progress."""
        began = time.monotonic()
        name = "sizes" if stage is None else f"NFE {stage}" if isinstance(stage, int) else str(stage)
        label = f"{_label(experiment)}, {name} [{place}]"
        with (
            meter(self.plan.calls(stage, experiment, domain), label, quiet=self.study.quiet) as tick,
            count_calls(run.method.backbone, tick),
        ):
            rows = self.plan.measure(stage, run, experiment, domain)
        self.study.add(rows)
        told = [row for row in rows if row.metric in ("bpd", "coordination_gain", "params", *CURVES)]
        values = ", ".join(f"{row.metric} {row.value:.4g}" for row in told)
        self.study.note(f"{label}: {values}, {time.monotonic() - began:.1f} s")

    def real(self, experiments: Sequence[Experiment]) -> None:
        """What real images get where samples were measured."""
        for experiment in experiments:
            known = _known(self.study.results)
            if not known.select(recipe=self._named(experiment).name, seed=experiment.seed, metric="ink"):
                continue
            domain = self._domain(experiment)
            count = min(self.plan.samples or experiment.eval.samples, len(domain.rows))
            same = dict(recipe=reference_name(experiment.name), data=domain.name, metric="pixel_tv")
            if any((row.n or 0) >= count for row in known.select(method="data", **same)):
                continue
            if self._is_late():
                self.late += 1
                continue
            self.study.note(f"{domain.name}: real images")
            self.study.add(real_rows(domain, experiment, count))

    def draw(self, data: str, shown: Sequence[Experiment], folder: Path, *, anew: bool = False) -> None:
        """Tables and figures of all that is recorded; figures only where what they show is younger, or all `anew`."""
        if not self.study.results.exists():
            self.study.note("nothing is measured yet")
            return
        written, results = [], Results.load(self.study.results)
        text, page = image_tables(results, data), folder / f"{data}.md"
        if not page.exists() or page.read_text(encoding="utf-8") != text:
            replace_file(page, text)
            written.append(page)
        trained = [one for one in shown if self._ready(one)]
        figures: dict[str, tuple[list[Path], Made]] = {
            "curves.png": ([self.study.results], functools.partial(curves, results, data))
        }
        if trained:  # a run that was copied here may be old, but not the folder that it was copied into
            sources = [self.study.results, self.study.folder, *map(self._checkpoints, trained)]
            figures["samples.png"] = (sources, functools.partial(self._samples, trained))
        routed = [one for kind in FILMED for one in trained if method_name(one) == kind][:1]
        for one in routed:
            figures["film.gif"] = ([self._checkpoints(one)], functools.partial(self._film, one))
        for name, (sources, make) in figures.items():
            path = folder / "figures" / f"{data}-{name}"
            if anew or _stale(path, sources):
                if self._is_late():
                    self.late += 1
                    continue
                try:
                    make(path)
                except ImportError:
                    self.study.note(f"{path}: not drawn, matplotlib is missing; pip install emoe[plots]")
                    continue
                written.append(path)
        self.study.note(f"written: {', '.join(map(str, written)) or 'nothing, all is up to date'}")

    def _samples(self, experiments: Sequence[Experiment], path: Path) -> None:
        """The picture of the first samples."""
        samples_figure({_title(self._named(one)): self._kept(one) for one in experiments}, path)

    def _kept(self, experiment: Experiment) -> dict[str, UInt8[np.ndarray, "n S S"]]:
        """Column -> the first images of a run at each NFE, and real ones; drawn once and kept in the run folder."""
        folder = self._place(experiment)
        wanted = {"real data": None} | {f"NFE {nfe}": nfe for nfe in self.plan.steps(experiment)}
        path, found = folder / KEPT, {}
        if not _stale(path, [self._checkpoints(experiment)]):
            try:
                with np.load(path, allow_pickle=False) as archive:
                    found = {name: archive[name] for name in archive.files}
            except (OSError, ValueError, zipfile.BadZipFile):
                found = {}
        if not wanted.keys() <= found.keys():
            run, domain, count = self._open(experiment), self._domain(experiment), EDGE * EDGE
            left = {name: nfe for name, nfe in wanted.items() if name not in found}
            label = f"{_label(experiment)}, samples to show"
            with (
                meter(sum(nfe or 0 for nfe in left.values()), label, quiet=self.study.quiet) as tick,
                count_calls(run.method.backbone, tick),
            ):
                for name, nfe in left.items():
                    rows = (
                        domain.fresh(
                            min(count, len(domain.test_rows)), derive_seed(experiment.seed, _title(experiment))
                        )
                        if nfe is None
                        else draw_pool(run.method, count, nfe, experiment.seed).samples
                    )
                    found[name] = pack_rows(rows)
            file = io.BytesIO()
            np.savez_compressed(file, **found)
            folder.mkdir(parents=True, exist_ok=True)
            replace_file(path, file.getvalue())
        return {name: as_images(unpack_rows(found[name])) for name in wanted}

    def _film(self, experiment: Experiment, path: Path) -> None:
        """The film of a run."""
        film(self._open(experiment), self._domain(experiment), path)

    def _reached(self, experiment: Experiment) -> int:
        """Steps of the run, if it has begun."""
        return steps_done(self.study.folder / run_name(experiment))

    def _trained(self, experiment: Experiment) -> bool:
        return self._reached(experiment) >= experiment.train.steps

    def _release(self, experiment: Experiment) -> Path | None:
        """Released weights that are to stand in for a run which has not begun: of its recipe, unchanged, and seed."""
        if not self.plan.released or self._reached(experiment):
            return None
        path = released().get(experiment.name)
        if path is None:
            return None
        held = experiment_of(path)
        return path if (held.name, held.seed) == (experiment.name, experiment.seed) else None

    def _ready(self, experiment: Experiment) -> bool:
        """Whether a run can be measured: it is trained, begun and wanted as it is, or stood in for."""
        begun = self.plan.unfinished and self._reached(experiment) > 0
        return self._trained(experiment) or begun or self._release(experiment) is not None

    def _named(self, experiment: Experiment) -> Experiment:
        """The experiment as its rows call it: with the step that it has reached, as long as that is not its last."""
        if self._trained(experiment) or self._release(experiment):
            return experiment
        return dataclasses.replace(experiment, name=f"{experiment.name} {REACHED}={self._reached(experiment)}")

    def _checkpoints(self, experiment: Experiment) -> Path:
        return self._release(experiment) or self.study.folder / run_name(experiment) / "checkpoints"

    def _place(self, experiment: Experiment) -> Path:
        """Where what belongs to a run is kept; a release may lie in an installed package."""
        name = f"{experiment.name}-released" if self._release(experiment) else run_name(experiment)
        return self.study.folder / name

    def _domain(self, experiment: Experiment) -> Images:
        if experiment.domain not in self.domains:
            domain = experiment.domain.build(experiment.seed)
            if not isinstance(domain, Images):
                raise ConfigError([f"domain: {experiment.domain.kind!r} has no images; leave the recipe's domain"])
            self.domains[experiment.domain] = domain
        return self.domains[experiment.domain]

    def _open(self, experiment: Experiment) -> Run:
        device, domain = str(self.study.device), self._domain(experiment)
        release = self._release(experiment)
        if release is not None:
            return from_pretrained(release, device, domain=domain)
        return load_run(self.study.folder / run_name(experiment), device=device, domain=domain)

    def _is_late(self) -> bool:
        return self.study.deadline is not None and time.monotonic() >= self.study.deadline


def _known(path: Path) -> Results:
    return Results.load(path) if path.exists() else Results()


def _label(experiment: Experiment) -> str:
    """A run in the log; what was changed in its recipe is on the command line."""
    return f"{experiment.name.partition(' ')[0]} seed {experiment.seed}"


def _title(experiment: Experiment) -> str:
    """A run in a figure; with its step where it is not at its end."""
    name = METHODS.get(method_name(experiment), method_name(experiment))
    reached = words_of(experiment.name)[1].get(REACHED)
    return name if reached is None else f"{name}\nstep {int(reached):,}"


def _stale(path: Path, sources: Sequence[Path]) -> bool:
    """Whether a file is missing or older than what it is made from."""
    if not path.exists():
        return True
    made = path.stat().st_mtime_ns
    return any(source.exists() and source.stat().st_mtime_ns > made for source in sources)


def real_rows(domain: Images, experiment: Experiment, count: int) -> list[Row]:
    """Measures of real images, under the method `data`.

    Where rows are judged one by one they are the test images. Where two sets are compared, `count` training images
    stand in the place of samples: what a model would get that has learned its training data perfectly and nothing else.
    """
    order = torch.randperm(len(domain.rows), generator=torch.Generator().manual_seed(derive_seed("real images")))
    beside = {item.metric: item for item in domain.measure(domain.rows[order[:count]].long())}
    alone = domain.measure(domain.test_rows.long())
    named = dataclasses.replace(experiment, name=reference_name(experiment.name))
    rows = [
        make_row(beside[item.metric] if item.metric in COMPARING else item, domain, named, nfe=None, method="data")
        for item in alone
    ]
    return [dataclasses.replace(row, seed=None) for row in rows]


def show(path: Path, data: str) -> None:
    """Print the tables."""
    results = _known(path).only(task=data)
    for name in data_of(results):
        header, lines = bpd_lines(results, name)
        plain = [[text.replace("*", "") for text in line] for line in lines]
        console_table(header, plain, title="Bits per dimension")
        for metric in SHOWN:
            grid = nfe_grid(results, name, metric)
            if grid.lines:
                print_grid(grid)


def samples_figure(rows: Mapping[str, Mapping[str, UInt8[np.ndarray, "_n S S"]]], path: Path) -> None:
    """A line of panels for each method (name -> column -> images), each with its first 4 x 4 images."""
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = list(dict.fromkeys(name for cells in rows.values() for name in cells))
    nothing = next(iter(next(iter(rows.values())).values()))[:0]
    picture = Figure(figsize=(1.35 * len(columns) + 0.3, 1.35 * len(rows) + 0.3), layout="constrained")
    FigureCanvasAgg(picture)
    shades = colormaps["gray_r"].with_extremes(bad="0.85")
    panels = picture.subplots(len(rows), len(columns), squeeze=False)
    for line, (method, cells) in zip(panels, rows.items(), strict=True):
        for panel, name in zip(line, columns, strict=True):
            tiles = mosaic(cells.get(name, nothing), EDGE)
            # Values below the mask are arbitrary, and matplotlib computes with them.
            tiles = np.ma.masked_array(tiles.filled(0.0), tiles.mask)
            panel.imshow(tiles, cmap=shades, vmin=0.0, vmax=1.0, interpolation="nearest")
            panel.set(xticks=[], yticks=[])
            panel.spines[:].set_visible(False)
        line[0].set_ylabel(method, fontsize=9)
    for panel, name in zip(panels[0], columns, strict=True):
        panel.set_title(name, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(path, dpi=200)


def curves(results: Results, data: str, path: Path) -> None:
    """Frechet distance, coverage and confidence over NFE: a line for each model, real data as a level."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    results = results.only(task=data)
    names = data_of(results)
    groups = models(results, names[0]) if names else {}
    steps = sorted({row.nfe for rows in groups.values() for row in rows if row.nfe is not None})
    picture = Figure(figsize=(3.3 * len(CURVES), 3.2), layout="constrained")
    FigureCanvasAgg(picture)
    panels = picture.subplots(1, len(CURVES), squeeze=False)[0]
    for panel, metric in zip(panels, CURVES, strict=True):
        for number, (model, rows) in enumerate(groups.items()):
            means = [(nfe, mean) for nfe in steps if (mean := mean_of(rows, metric, nfe=nfe)) is not None]
            panel.errorbar(
                [nfe for nfe, _ in means], [mean.mean for _, mean in means],
                yerr=[mean.stderr or 0.0 for _, mean in means], marker="o", markersize=4, linewidth=1.2, capsize=2,
                label=model.label, color=f"C{number}",
            )  # fmt: skip
        real = mean_of(real_data(results, names[0]), metric) if names else None
        if real is not None:
            panel.axhline(real.mean, color="0.4", linestyle=":", label="real data")
        panel.set_xscale("log", base=2)
        panel.set_yscale("log" if metric == "frechet" else "linear")
        panel.set(title=measure(metric).label, xlabel="NFE", xticks=steps, xticklabels=[str(nfe) for nfe in steps])
        panel.grid(color="0.92")
    handles = {name: line for panel in panels for line, name in zip(*panel.get_legend_handles_labels(), strict=True)}
    picture.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=5, fontsize=8, frameon=False
    )  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(path, dpi=120)


def film(run: Run, domain: Images, path: Path, *, images: int = FILM_IMAGES, steps: int = FILM_STEPS) -> None:
    """Sample a few images with E-MoE and show every step with the experts that it ran."""
    assert isinstance(run.method, EMoE)
    recorder = Recorder(images, domain.side)
    rng = Rng(derive_seed(run.experiment.seed, "film"), device=next(run.method.parameters()).device)
    run.method.sample(images, steps, rng, on_step=recorder)
    write_gif(recorder.frames, run.method.config.experts, path)
