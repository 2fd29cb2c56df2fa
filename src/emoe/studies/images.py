"""Binary images: bits per dimension under named likelihoods, samples over NFE, an animation of the routes."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import UInt8

from emoe.config import ConfigError
from emoe.domains.base import Domain
from emoe.domains.images import Images, as_images
from emoe.evaluation.likelihood import in_units
from emoe.evaluation.measure import row
from emoe.experiment import Experiment
from emoe.figures.base import save
from emoe.figures.curves import Panel, draw
from emoe.figures.gif import Recorder, write_gif
from emoe.figures.panels import IMAGE_DPI, mosaic, panel_grid, show_mosaic
from emoe.reporting.cells import measure
from emoe.reporting.images import bpd_tables, data_of, image_page, nfe_tables, real_data
from emoe.reporting.recipes import parse, reference_name
from emoe.reporting.render import print_table
from emoe.reporting.results import Results, Row, method_rank
from emoe.reporting.table import models
from emoe.rng import Rng, derive_seed
from emoe.studies import options, stages
from emoe.studies.figures import mean_curve
from emoe.studies.options import flag, hidden, recipe_experiments, seeds_flag
from emoe.studies.pipeline import Study, write_figure, write_page
from emoe.studies.pools import Archive, PoolKey
from emoe.studies.stages import Stage, Trained
from emoe.types import Measurement

METHODS = ("mdlm", "vadd", "emoe")
OURS = {"mnist": "emoe-floor", "digits": "emoe-vimco"}
LIKELIHOODS = ("objective", "nelbo", "bound@1", "bound@4", "bound@16", "bound@64", "iw@1,64", "iw@4,64")
TOKENS = 2**19  # tokens of a batch of likelihoods: 512 images of 32 x 32, or 8 with 64 draws each
EDGE = 4  # images along the edge of a panel of samples
ANIMATED, ANIMATION_STEPS = 4, 20
CURVES = ("frechet", "coverage", "confidence")
# Measures that compare two sets of rows: the test split cannot be compared with itself.
COMPARING = ("frechet", "precision", "recall", "density", "coverage", "class_tv", "pixel_tv")


@dataclass(frozen=True, kw_only=True)
class Options(options.Options):
    """Options of the studies of images; `study` is mnist or digits."""

    reserved = {"eval.nfe": "nfe", "eval.samples": "samples", "domain.root": "data-root"}

    study: str = hidden("mnist")
    methods: tuple[str, ...] | None = flag(None, "methods, ends of recipes; default: mdlm, vadd, emoe and one of ours")
    nfe: tuple[int, ...] | None = flag(None, "numbers of network calls; default: the recipe's", low=1, high=10_000)
    samples: int | None = flag(None, "samples for each NFE; default: the recipe's", low=2, high=10_000_000)
    rows: int = flag(10_000, "test images for likelihoods, or all", low=1, high=10_000_000)
    seeds: tuple[int, ...] = seeds_flag(0)
    only: str | None = flag(None, "one part alone", allowed=("train", "score", "draw"), recorded=False)
    data_root: Path | None = flag(None, "folder of MNIST's files; default: EMOE_DATA, then ./data", recorded=False)


def run(options: Options) -> int:
    """Train methods; measure bits per dimension and samples over NFE; write tables, figures and an animation."""

    def build(experiment: Experiment) -> Images:
        # --data-root is no field of the experiment: a run folder must be the same wherever the data are.
        own = {} if options.data_root is None else {"root": str(options.data_root)}
        domain = dataclasses.replace(experiment.domain, **own).build(experiment.seed)
        if not isinstance(domain, Images):
            raise ConfigError([f"domain: {experiment.domain.kind!r} has no images; leave the recipe's domain"])
        return domain

    methods = options.methods or (*METHODS, OURS[options.study])
    experiments = recipe_experiments(options.study, methods, options.seeds, options.settings)
    study = Study(
        options, experiments, functools.partial(_stages, options), functools.partial(_real, options),
        functools.partial(_write, options), domain=build, gpu_jobs=1,
    )  # fmt: skip
    return study.run(options.only)


def _stages(options: Options, trained: Trained) -> list[Stage]:
    """Sizes, likelihoods and samples; those of few network calls first, so that a budget buys many."""
    config, length = trained.experiment.eval, trained.domain.space.length
    batch, samples = max(1, min(config.batch, TOKENS // length)), options.samples or config.samples
    names = stages.likelihood_names(trained.method, LIKELIHOODS)
    work = [stages.likelihood_stage(trained, name, options.rows, _bits, batch=batch) for name in names]
    steps = sorted(set(options.nfe or config.nfe))
    work += [stages.pool_stage(trained, PoolKey(nfe), samples, keep=EDGE * EDGE) for nfe in steps]
    return [stages.time_stage(trained), stages.size_stage(trained), *sorted(work, key=lambda stage: stage.rows)]


def _bits(nll: Measurement, length: int) -> list[Measurement]:
    return in_units(nll, length)[:2]


def _real(options: Options, runs: Sequence[Trained]) -> list[Stage]:
    """Real images; models on other data have their own."""
    first = {reference_name(parse(trained.experiment.name).changes): trained for trained in reversed(runs)}
    counts = {name: options.samples or trained.experiment.eval.samples for name, trained in first.items()}
    return [real_stage(run, name, min(counts[name], len(run.domain.rows))) for name, run in first.items()]


def real_stage(trained: Trained, name: str, count: int) -> Stage:
    """Measures of real images, under the method `data`.

    Measures of single images are those of the test images. Where two sets are compared, `count` training images take
    the place of samples: what a model would get that has learned its training data perfectly and nothing else.
    """
    domain, experiment = trained.domain, dataclasses.replace(trained.experiment, name=name)
    assert isinstance(domain, Images)

    def run() -> list[Row]:
        order = torch.randperm(len(domain.rows), generator=torch.Generator().manual_seed(derive_seed("real images")))
        compared = {item.metric: item for item in domain.measure(domain.rows[order[:count]].long())}
        items = domain.measure(domain.test_rows.long())
        items = [compared[item.metric] if item.metric in COMPARING else item for item in items]
        rows = [row(item, domain, experiment, nfe=None, method="data") for item in items]
        return [dataclasses.replace(one, seed=None) for one in rows]

    same = {"method": "data", "recipe": name, "data": domain.name, "metric": "pixel_tv"}
    return Stage(f"real images of {domain.name}", lambda results: stages.recorded(results, n=count, **same), run)


def _write(options: Options, results: Results, runs: Sequence[Trained]) -> list[Path]:
    """The page of tables and the figures; tables on the terminal."""
    data, folder, part = options.study, options.results, results.only(task=options.study)
    figures: dict[str, tuple[Sequence[Path], Callable[[Path], None]]] = {}  # sources and what draws them
    if part.models.rows:
        figures["curves.png"] = [folder / f"{data}.json"], functools.partial(curves, part)
    if pools := _shown(options, runs[0].experiment):
        samples = functools.partial(_draw_samples, pools, results, runs[0].domain)
        figures["samples.png"] = [archive.path for archive in pools], samples
    for run in [run for run in runs if not run.steps_left and run.method.has_latent]:
        if run.experiment.method.needs().experts and "film.gif" not in figures:
            figures["film.gif"] = [run.path / "checkpoints"], functools.partial(animation, run)
    written = write_page(folder / f"{data}.md", image_page(results, data))
    for name, (sources, make) in figures.items():
        written += write_figure(folder / "figures" / f"{data}-{name}", sources, make, anew=options.only == "draw")
    for table in [*bpd_tables(part), *nfe_tables(part)]:
        print_table(table)
    return written


def _shown(options: Options, like: Experiment) -> list[Archive]:
    """Samples of all methods with the changes and the seed of an experiment, also those of earlier commands."""
    wanted, paths = (parse(like.name).changes, like.seed), (options.run_folder / "pools").glob(f"{options.study}-*.npz")
    archives = [Archive.open(path) for path in sorted(paths)]
    same = [one for one in archives if (parse(one.manifest["recipe"]).changes, one.manifest["seed"]) == wanted]
    return sorted(same, key=lambda archive: method_rank(archive.manifest["method"]))


def _draw_samples(pools: Sequence[Archive], results: Results, domain: Domain, path: Path) -> None:
    """The first samples of each method at each NFE, and real images."""
    rows = {}
    for archive in pools:
        label = results.label(archive.manifest["method"])
        cells = {"real data": domain.fresh(EDGE * EDGE, derive_seed(archive.manifest["seed"], label))}
        cells |= {f"NFE {key.nfe}": archive.tokens(key) for key in archive.keys()}
        rows[label] = {name: as_images(cell) for name, cell in cells.items()}
    sample_grid(rows, path)


def sample_grid(rows: Mapping[str, Mapping[str, UInt8[np.ndarray, "_n S S"]]], path: Path) -> None:
    """A line of panels for each method (label -> column -> images), each with its first 4 x 4 images."""
    columns = list(dict.fromkeys(name for cells in rows.values() for name in cells))
    nothing = next(iter(next(iter(rows.values())).values()))[:0]
    figure, axes = panel_grid(len(rows), len(columns))
    for line, (label, cells) in zip(axes, rows.items(), strict=True):
        line[0].set_ylabel(label, fontsize=9)
        for axis, name in zip(line, columns, strict=True):
            show_mosaic(axis, mosaic(cells.get(name, nothing), EDGE))
    for axis, name in zip(axes[0], columns, strict=True):
        axis.set_title(name, fontsize=9)
    save(figure, path, dpi=IMAGE_DPI)


def curves(results: Results, path: Path) -> None:
    """Frechet distance, coverage and confidence over NFE: a line for each model, real data as a level."""
    part = results.only(data=data_of(results)[0])
    panels = []
    for metric in CURVES:
        rows = {line.labels[0]: line.where(metric=metric).rows for line in models(part)}
        lines = {label: mean_curve(group, lambda row: row.nfe) for label, group in rows.items()}
        real = [row.value for row in real_data(part).where(metric=metric).rows]
        levels = {"real data": real[0]} if real else {}
        panels.append(Panel(measure(metric).label, lines, log_y=metric == "frechet", levels=levels))
    save(draw([panels], width=3.3), path)


def animation(trained: Trained, path: Path) -> None:
    """Sample a few images with E-MoE and show every step with the experts that it ran."""
    run, space = trained.run, trained.domain.space
    recorder = Recorder(ANIMATED, math.isqrt(space.length))
    rng = Rng(derive_seed(trained.experiment.seed, "film"), device=run.device)
    masks = torch.full((ANIMATED, space.length), space.mask_id, device=run.device)
    run.method.sample(masks, ANIMATION_STEPS, rng, on_step=recorder)
    write_gif(recorder.frames, trained.experiment.method.needs().experts, path)
    trained.close()
