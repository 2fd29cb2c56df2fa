"""Text end to end: models of seven methods, an evaluation LM that saw other text, the paper's LM1B tables beside ours.

The parts exchange small files, so that each can run by itself and on another machine:

- `train`: the models, and what needs their weights: sizes, named likelihoods, pools of samples (`pools/*.npz`).
- `eval-lm`: an autoregressive model of text that no other model saw, early-stopped.
- `score`: perplexities of all pools under the evaluation LM, and features of samples (`features/*.npz`).
- `draw`: MAUVE, tables, figures and samples side by side.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxtyping import Int, Integer
from torch import Tensor

from emoe.config import ConfigError
from emoe.domains.base import DataError
from emoe.domains.text.data import Text
from emoe.evaluation.eval_lm import import_extra
from emoe.evaluation.likelihood import factorised_nll
from emoe.experiment import customise
from emoe.figures.base import save
from emoe.figures.curves import Panel, draw
from emoe.methods.base import PLAIN
from emoe.reporting.cells import Line, measure
from emoe.reporting.render import print_table
from emoe.reporting.results import Results, Row
from emoe.reporting.table import models
from emoe.reporting.text import GREEDY, SETTINGS, data_of, text_page, text_tables
from emoe.rng import derive_seed
from emoe.studies import options, stages
from emoe.studies.course import course_stage, passes_stage
from emoe.studies.eval_lm import EvalLMRun, eval_lm_experiment
from emoe.studies.figures import mean_curve
from emoe.studies.options import flag, hidden, recipe_experiments, seeds_flag
from emoe.studies.pipeline import Study, write_figure, write_page
from emoe.studies.pools import Archive, PoolKey
from emoe.studies.samples import samples_page
from emoe.studies.scores import Scoring, describe_text, in_tokens, mauve_stages, reference_row
from emoe.studies.sets import Sets
from emoe.studies.stages import Stage, Trained
from emoe.types import Likelihood, Measurement

SIZES = ("news-small", "text-tiny", "lm1b")
METHODS = ("ar", "mdlm", "sedd", "bd3lm", "vadd", "emoe", "emoe-free-nats")
LIKELIHOODS = ("exact", "nelbo", "objective", "bound@1", "bound@4", "bound@16", "bound@64", "iw@1,16")
GREEDY_NFE = 16  # most network calls that greedy routes are drawn with; the paper has 1 and 2


@dataclass(frozen=True, kw_only=True)
class Options(options.Options):
    """Options of the study of text."""

    reserved = {
        "eval.nfe": "nfe", "eval.samples": "samples", "eval.sampler.kind": "sampler", "domain.path": "set",
    }  # fmt: skip

    study: str = hidden("text")
    size: str = flag(SIZES[0], "recipes", allowed=SIZES)
    methods: tuple[str, ...] = flag(METHODS, "methods, ends of recipes")
    only: str | None = flag(None, "one part alone", allowed=("train", "eval-lm", "score", "draw"), recorded=False)
    set: Path | None = flag(None, "folder of prepared text; default: the recipe's, such as sets/news", recorded=False)
    eval_lm_set: Path | None = flag(
        None, "folder of prepared text that no model saw; default: that of the recipe, with -judge", recorded=False
    )
    eval_lm_steps: int | None = flag(None, "training steps of the evaluation LM, at most", low=1, high=10_000_000)
    zero_shot: Path | None = flag(None, "folder of prepared text from elsewhere, for likelihoods", recorded=False)
    samples: int = flag(2_000, "samples for each NFE", low=4, high=1_000_000)
    nfe: tuple[int, ...] | None = flag(None, "numbers of network calls; default: the recipe's", low=1, high=10_000)
    sampler: str = flag("reveal-first", "how masked diffusion draws; one law", allowed=("reveal-first", "plain"))
    rows: int = flag(2_000, "test rows for likelihoods, or all", low=1, high=10_000_000)
    merge: tuple[Path, ...] = flag((), "results file of another machine to take in first", recorded=False, repeat=True)
    seeds: tuple[int, ...] = seeds_flag(0)

    @property
    def stem(self) -> str:
        """How the names of its files begin."""
        return "text-tiny" if self.size == "text-tiny" else "text"

    @property
    def run_folder(self) -> Path:
        """Folder of runs, pools and features."""
        return self.runs or Path("runs") / self.stem


def run(options: Options) -> int:
    """Train models of text; measure likelihoods, and samples by their entropy, generative perplexity and MAUVE."""
    only = options.only
    experiments = recipe_experiments(options.size, options.methods, options.seeds, options.settings)
    lm = eval_lm_experiment(options.size, options.settings, options.eval_lm_steps)
    sets = Sets(experiments[0].domain, lm.domain, options.set, options.eval_lm_set, options.zero_shot)
    study = Study(
        options, experiments, functools.partial(_stages, options, sets), functools.partial(_real, options.samples),
        functools.partial(_write, options), name=options.stem, domain=lambda one: sets.open(one.domain), gpu_jobs=1,
    )  # fmt: skip
    lm_run = EvalLMRun(lm, options.run_folder, str(study.device))
    merge(options.merge, study.results)
    with study.interruptible():
        if only in (None, "eval-lm") and not lm_run.finished:
            sets.check_eval_lm()
        if only in (None, "train"):
            sets.check()
            study.train()
            study.measure()
        if only in (None, "eval-lm"):
            _train_eval_lm(study, lm_run, sets)
        if only in (None, "score"):
            study.run_stages("scores", _scores(options, study, lm_run, sets))
        if only in (None, "draw"):
            study.run_stages("MAUVE", _mauve(options, study))
    if only in (None, "draw"):
        study.finish()
    return study.close()


def merge(paths: Sequence[Path], into: Path) -> None:
    """Take in results files of other machines; of two rows of one identity the younger stays."""
    if missing := [path for path in paths if not path.is_file()]:
        raise ConfigError([f"merge: {missing[0]} does not exist; give results files of this study"])
    results = Results.load(into) if into.exists() else Results()
    for path in paths:
        results.merge(Results.load(path)).save(into)


# --- Stages ----------------------------------------------------------------------------------------------------------


def _stages(options: Options, sets: Sets, trained: Trained) -> list[Stage]:
    """What needs the weights of a model."""
    text, experiment = sets.open(trained.experiment.domain), trained.experiment
    trained.pools.manifest |= {**describe_text(text), "batch": experiment.eval.batch}
    names = stages.likelihood_names(trained.method, LIKELIHOODS)
    names = [name for name in names if Likelihood.parse(name).steps <= text.space.length]
    if not trained.method.has_latent:
        names = [name for name in names if name != "objective"]  # it is the nelbo
    likelihood = functools.partial(stages.likelihood_stage, trained, count=options.rows)
    work = [stages.time_stage(trained), stages.size_stage(trained), passes_stage(trained), course_stage(trained)]
    work += [likelihood(name=name, units=in_tokens, factorised=best_factorised) for name in names]
    if sets.elsewhere is not None:
        bounds = [name for name in names if not name.startswith(("objective", "iw"))]
        work += [likelihood(name=name, units=zero_shot, elsewhere=sets.elsewhere) for name in bounds]
    steps = experiment.method.allowed_nfe(options.nfe or experiment.eval.nfe, text.space.length)
    keys: dict[PoolKey, Mapping[str, str]] = {PoolKey(nfe): {} for nfe in steps}
    if _takes(trained, GREEDY.settings):
        keys |= {PoolKey(nfe, GREEDY.name): GREEDY.settings for nfe in steps if nfe <= GREEDY_NFE}
    sampler = dataclasses.replace(experiment.eval.sampler, kind=options.sampler)  # type: ignore[arg-type]
    try:
        trained.method.check_sampler(sampler)
    except ConfigError:  # the method has a sampler of its own
        sampler = PLAIN
    pool = functools.partial(
        stages.pool_stage, trained, samples=options.samples, keep=options.samples, write=text.decode
    )
    return work + [pool(key=key, sampler=sampler, settings=settings) for key, settings in keys.items()]


def zero_shot(nll: Measurement, length: int) -> list[Measurement]:
    """Measurements of text from elsewhere."""
    return [dataclasses.replace(item, metric=f"zero_shot_{item.metric}") for item in in_tokens(nll, length)]


def _takes(trained: Trained, settings: Mapping[str, str]) -> bool:
    """Whether an experiment has these fields."""
    try:
        customise(trained.experiment, settings)
    except ConfigError:
        return False
    return True


def best_factorised(train: Integer[Tensor, "N L"], rows: Int[Tensor, "n L"], size: int) -> float:
    """NLL in nats per row of the best factorised one-step model of text.

    Its marginals by position, or those of all positions together, whichever are better: rows are cut out of a stream,
    so that positions are alike, and with a large vocabulary counts by position are few.
    """
    together = factorised_nll(train.reshape(-1, 1), rows.reshape(-1, 1), size) * rows.shape[1]
    return min(factorised_nll(train, rows, size), together)


def _real(samples: int, runs: Sequence[Trained]) -> list[Stage]:
    """Measures of held-out rows."""

    def stage(text: Any) -> Stage:
        count = min(samples, len(text.test_rows))
        same = {"task": "text", "data": text.name, "method": "data", "metric": "entropy"}

        def run() -> list[Row]:
            items = text.measure(text.fresh(count, derive_seed("held-out text")))
            return [reference_row(text.name, item) for item in items]

        return Stage(f"held-out rows of {text.name}", lambda results: stages.recorded(results, n=count, **same), run)

    return [stage(text) for text in {run.domain.name: run.domain for run in runs}.values()]


def _train_eval_lm(study: Study, lm_run: EvalLMRun, sets: Sets) -> None:
    """Train the evaluation LM, or go on with it."""
    if not lm_run.finished and not study.is_late:
        lm_run.train(sets.open(sets.lm_config), study.stop, study.deadline, quiet=study.options.quiet)
    if lm_run.finished and (best := lm_run.best()):
        study.note(f"evaluation LM: best at step {best[0]}, {best[1]:.4f} nats per token of its validation rows")
    else:
        study.untrained += 1


def _scores(options: Options, study: Study, lm_run: EvalLMRun, sets: Sets) -> list[Stage]:
    """Scores of every pool; without pools or the evaluation LM an error if they alone are asked for."""
    pools, runs, needed = _pools(options), options.run_folder, options.only == "score"
    if not pools and needed:
        raise DataError(f"{runs / 'pools'}: holds no pools; draw them with --only train, or copy them there")
    if not lm_run.is_ready:
        if needed:
            raise ConfigError([f"eval-lm: {lm_run.best_path.name} is not trained in {runs}; use --only eval-lm first"])
        study.unmeasured += sum(len(pool.arrays) for pool in pools)
        return []
    groups: dict[str, tuple[Text, list[Archive]]] = {}
    for pool in pools:
        text = sets.holding(pool.manifest)
        groups.setdefault(text.name, (text, []))[1].append(pool)
    page = options.results / f"{options.stem}-judge.json"
    scoring = functools.partial(Scoring, lm_run, sets.lm_text, rows=options.rows, folder=runs / "features", page=page)
    return [stage for text, own in groups.values() for stage in scoring(text=text).stages(own)]


def _pools(options: Options) -> list[Archive]:
    """Pools that are here; of those that would have the same rows, the recipe having changed since, the youngest."""
    paths = sorted((options.run_folder / "pools").glob("*.npz"), key=lambda path: path.stat().st_mtime_ns)
    names = ("data", "recipe", "seed")
    youngest = {tuple(archive.manifest[name] for name in names): archive for archive in map(Archive.open, paths)}
    return sorted(youngest.values(), key=lambda archive: archive.path)


def _mauve(options: Options, study: Study) -> list[Stage]:
    """MAUVE, where its package is installed."""
    stages = mauve_stages(options.run_folder / "features")
    try:
        import_extra("mauve")
    except ConfigError as error:
        if stages:
            study.note(f"MAUVE is left out: {error}")
        return []
    return stages


# --- Pages and figures -----------------------------------------------------------------------------------------------


def _write(options: Options, results: Results, runs: Sequence[Trained]) -> list[Path]:
    """Tables, figures and samples side by side; the main tables on the terminal."""
    folder, stem, results = options.results, options.stem, results.only(task="text")
    page, pools = folder / f"{stem}.md", _pools(options)
    written = write_page(page, text_page(results))
    written += write_page(folder / f"{stem}-samples.md", samples_page(pools, results, page.name)) if pools else []
    makers: dict[str, Callable[[Results], list[list[Panel]]]] = {"gen-ppl": _curves, "latent": _latent}
    for name, make in makers.items():
        if panels := make(results):
            path, sources = folder / "figures" / f"{stem}-{name}.png", [folder / f"{stem}.json"]
            written += write_figure(path, sources, functools.partial(_draw, panels))
    for table in [*text_tables("gen-ppl", results)[:1], *text_tables("likelihood", results)]:
        print_table(table)
        print(table.note)
    return written


def _draw(panels: list[list[Panel]], path: Path) -> None:
    save(draw(panels, height=3.0), path)


def _curves(results: Results) -> list[list[Panel]]:
    """Generative perplexity, entropy of the samples and MAUVE over NFE, a line of panels for each text."""
    panels = {"gen_ppl": SETTINGS[0], "entropy": None, "mauve": None}
    parts = {data: part for data in data_of(results) if (part := results.only(data=data)).select(metric="gen_ppl")}
    return [[_panel(part, data, *panel) for panel in panels.items()] for data, part in parts.items()]


def _panel(part: Results, data: str, metric: str, setting: str | None) -> Panel:
    curves = {}
    for line in models(part):
        for variant, label, style in ((None, "", "-"), (GREEDY.name, f", {GREEDY.label}", GREEDY.line)):
            name = " ".join(filter(None, [setting, variant])) or None
            if rows := line.where(metric=metric, convention=name).rows:
                curves[line.labels[0] + label] = mean_curve(rows, lambda row: row.nfe, style=style)
    real = [row.value for row in part.select(method="data", metric=metric, convention=setting)]
    levels = {"held-out text": real[0]} if real else {}
    return Panel(f"{data}: {measure(metric).label}", curves, log_y=metric == "gen_ppl", levels=levels)


def _latent(results: Results) -> list[list[Panel]]:
    """Over training, for models with a latent: usage entropy and route KL by block, and the terms of the loss."""
    lines = [(data, line) for data in data_of(results) for line in models(results.only(data=data))]
    return [
        [
            _course(line, f"{line.labels[0]}: entropy of usage (nats)", "usage_entropy/"),
            _course(line, f"{line.labels[0]}: route KL (nats per position)", "route_kl/"),
            _course(line, f"{line.labels[0]} on {data}: nats per token", "train_recon", "train_kl"),
        ]
        for data, line in lines
        if any(row.value for row in line.where(metric="train_kl").rows)
    ]


def _course(line: Line, title: str, *metrics: str) -> Panel:
    """Numbers of the log against the step, which is the convention of their rows."""
    groups: dict[str, list[Row]] = {}
    for row in sorted(line.rows, key=lambda row: row.metric):
        if row.metric.startswith(metrics):
            groups.setdefault(row.metric.rpartition("/")[2], []).append(row)
    curves = {label: mean_curve(rows, lambda row: float(str(row.convention)[5:])) for label, rows in groups.items()}
    return Panel(title, curves, xlabel="training step", log_x=False)
