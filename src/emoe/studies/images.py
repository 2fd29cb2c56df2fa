"""Binary images: bits per dimension under named likelihoods, samples over NFE, an animation of the routes."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import UInt8

from emoe.config import ConfigError
from emoe.domains.base import Domain, DomainConfig, permutation
from emoe.domains.images import Images, as_images
from emoe.experiment import Experiment
from emoe.figures.base import save
from emoe.figures.curves import Panel
from emoe.figures.gif import Recorder, write_gif
from emoe.figures.panels import IMAGE_DPI, panel_grid, show_mosaic
from emoe.reporting.cells import data_of, measure
from emoe.reporting.images import image_tables
from emoe.reporting.recipes import parse, reference_name
from emoe.reporting.results import Results, method_rank
from emoe.reporting.table import models, reference
from emoe.rng import Rng, derive_seed
from emoe.studies import options, pipeline, stages
from emoe.studies.options import flag, hidden, recipe_experiments, seeds_flag
from emoe.studies.pipeline import levels, mean_curve
from emoe.studies.pools import Archive
from emoe.studies.stages import Stage, Trained
from emoe.types import Measurement

METHODS = ("mdlm", "vadd", "emoe")
OURS = {"mnist": "emoe-floor", "digits": "emoe-vimco"}
LIKELIHOODS = ("objective", "nelbo", "bound@1", "bound@4", "bound@16", "bound@64", "iw@1,64", "iw@4,64")
TOKENS = 2**19  # tokens of a batch of likelihoods: 512 images of 32 x 32, or 8 with 64 draws each
EDGE = 4  # images along the edge of a panel of samples
ANIMATED, ANIMATION_STEPS = 4, 20
CURVES = ("frechet", "coverage", "confidence")
# Metrics that compare two sets of rows: the test split cannot be compared with itself.
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


class Study(pipeline.Study):
    """Train methods; measure bits per dimension and samples over NFE; write tables, figures and an animation."""

    options: Options
    gpu_jobs = 1

    def experiments(self) -> list[Experiment]:
        given = self.options
        methods = given.methods or (*METHODS, OURS[given.study])
        return recipe_experiments(given.study, methods, given.seeds, given.settings)

    def build_domain(self, config: DomainConfig, seed: int) -> Images:
        """Build the images; their folder is an option and no field, so a run does not depend on where they are."""
        root = {} if self.options.data_root is None else {"root": str(self.options.data_root)}
        domain = dataclasses.replace(config, **root).build(seed)
        if not isinstance(domain, Images):
            raise ConfigError(f"domain: {config.kind!r} has no images; leave the recipe's domain")
        return domain

    def stages(self, run: Trained) -> list[Stage]:
        """Sizes, likelihoods and samples; the cheapest first, so that a short budget gives most of them."""
        config, options = run.experiment.eval, self.options
        batch = max(1, min(config.batch, TOKENS // run.domain.space.length))
        names, steps = stages.likelihood_names(run.method, LIKELIHOODS), sorted(set(options.nfe or config.nfe))
        work = [stages.likelihood(run, name, options.rows, metrics=("nll", "bpd"), batch=batch) for name in names]
        samples = options.samples or config.samples
        work += [stages.pool(run, nfe, samples, keep=EDGE * EDGE) for nfe in steps]
        real = real_stage(run.domain, reference_name(parse(run.experiment.name).changes), samples)
        return [*stages.times(run), stages.sizes(run), *sorted(work, key=lambda stage: stage.rows), real]

    def write(self, results: Results) -> None:
        data, part = self.options.study, results.only(task=self.options.study)
        self.print_tables(image_tables(part))
        self.panels(f"{data}-curves.png", curves(part), width=3.3)
        if cells := self._samples(results):
            self.figure(f"{data}-samples.png", functools.partial(sample_grid, cells))
        animated = [run for run in self.runs if not run.steps_left and run.method.has_latent]
        for run in [run for run in animated if run.experiment.method.needs().experts][:1]:
            self.figure(f"{data}-film.gif", functools.partial(animation, run))

    def _samples(self, results: Results) -> dict[str, dict[str, np.ndarray]]:
        """Real images and samples at each NFE, of all methods with the changes and the seed of the first run."""
        first, rows = self.runs[0].experiment, {}
        paths = sorted((self.options.run_folder / "pools").glob(f"{self.options.study}-*.npz"))
        for archive in sorted(map(Archive.open, paths), key=lambda archive: method_rank(archive.manifest["method"])):
            recipe, seed = parse(archive.manifest["recipe"]), archive.manifest["seed"]
            if (recipe.changes, seed) == (parse(first.name).changes, first.seed):
                label = results.label(archive.manifest["method"])
                cells = {"real data": self.runs[0].domain.fresh(EDGE * EDGE, derive_seed(seed, label))}
                cells |= {f"NFE {key.nfe}": archive.tokens(key) for key in archive.keys()}
                rows[label] = {name: as_images(cell) for name, cell in cells.items()}
        return rows


def real_stage(images: Domain, name: str, count: int) -> Stage:
    """Metrics of real images, under the method `data`.

    Metrics of single images are those of the test images. Where two sets are compared, `count` training images take the
    place of samples: these are the numbers of a model that repeats its training data.
    """
    assert isinstance(images, Images)
    count = min(count, len(images.rows))

    def measure() -> list[Measurement]:
        order = permutation(len(images.rows), "real images")
        compared = {item.metric: item for item in images.measure(images.rows[order[:count]].long())}
        items = images.measure(images.test_rows.long())
        return [compared[item.metric] if item.metric in COMPARING else item for item in items]

    return stages.reference("real images", images, measure, "pixel_tv", n=count, recipe=name)


def sample_grid(rows: Mapping[str, Mapping[str, UInt8[np.ndarray, "_n S S"]]], path: Path) -> None:
    """A line of panels for each method (label -> column -> images), each with its first 4 x 4 images."""
    save(panel_grid(rows, functools.partial(show_mosaic, columns=EDGE), dpi=IMAGE_DPI), path)


def curves(results: Results) -> list[list[Panel]]:
    """Frechet distance, coverage and confidence over NFE: a line for each model, real data as a level."""
    part, panels = results.only(data=data_of(results)[:1]), []
    for metric in CURVES if part.rows else ():
        lines = {line.labels[0]: mean_curve(line.where(metric=metric).rows) for line in models(part)}
        real = levels({"real data": reference(part, "data").where(metric=metric).rows})
        panels.append(Panel(measure(metric).label, lines, log_y=metric == "frechet", levels=real))
    return [panels]


def animation(trained: Trained, path: Path) -> None:
    """Sample a few images with E-MoE and show every step with the experts that it ran."""
    run, space = trained.run, trained.domain.space
    recorder = Recorder(ANIMATED, math.isqrt(space.length))
    rng = Rng(derive_seed(trained.experiment.seed, "film"), device=run.device)
    masks = torch.full((ANIMATED, space.length), space.mask_id, device=run.device)
    run.method.sample(masks, ANIMATION_STEPS, rng, on_step=recorder)
    write_gif(recorder.frames, trained.experiment.method.needs().experts, path)
    trained.close()
