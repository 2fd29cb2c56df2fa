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
from dataclasses import dataclass
from pathlib import Path

from jaxtyping import Int, Integer
from torch import Tensor

from emoe.config import ConfigError
from emoe.console import meter
from emoe.domains.base import DataError, DomainConfig
from emoe.domains.text.data import Text
from emoe.evaluation.eval_lm import import_extra
from emoe.evaluation.measure import factorised_nll
from emoe.experiment import Experiment
from emoe.figures.curves import Panel
from emoe.methods.base import PLAIN
from emoe.reporting.cells import Line, data_of, measure
from emoe.reporting.results import Results, Row
from emoe.reporting.table import models
from emoe.reporting.text import GREEDY, SETTINGS, VARIANTS, text_tables
from emoe.rng import derive_seed
from emoe.studies import options, pipeline, stages, training
from emoe.studies.eval_lm import EvalLMRun, KeepBest, Sets, describe_text, eval_lm_experiment
from emoe.studies.options import flag, hidden, recipe_experiments, seeds_flag
from emoe.studies.pipeline import levels, mean_curve
from emoe.studies.pools import Archive, samples_page
from emoe.studies.scores import mauve_stages, score_stages
from emoe.studies.stages import Stage, Trained
from emoe.types import Likelihood

SIZES = ("news-small", "text-tiny", "lm1b")
METHODS = ("ar", "mdlm", "sedd", "bd3lm", "vadd", "emoe", "emoe-free-nats")
LIKELIHOODS = ("exact", "nelbo", "objective", "bound@1", "bound@4", "bound@16", "bound@64", "iw@1,16")
GREEDY_SETTINGS = {"method.route-tau": "0"}
GREEDY_NFE = 16  # most network calls that greedy routes are drawn with; the paper has 1 and 2


@dataclass(frozen=True, kw_only=True)
class Options(options.Options):
    """Options of the study of text."""

    reserved = {"eval.nfe": "nfe", "eval.samples": "samples", "eval.sampler.kind": "sampler", "domain.path": "set"}

    study: str = hidden("text")
    size: str = flag(SIZES[0], "recipes", allowed=SIZES)
    methods: tuple[str, ...] = flag(METHODS, "methods, ends of recipes")
    only: str | None = flag(None, "one part alone", allowed=("train", "eval-lm", "score", "draw"), recorded=False)
    set: Path | None = flag(None, "folder of prepared text; default: the recipe's, such as sets/news", recorded=False)
    eval_lm_set: Path | None = flag(None, "text that no model saw; default: the recipe's, with -judge", recorded=False)
    eval_lm_steps: int | None = flag(None, "training steps of the evaluation LM, at most", low=1, high=10_000_000)
    zero_shot: Path | None = flag(None, "folder of prepared text from elsewhere, for likelihoods", recorded=False)
    samples: int = flag(2_000, "samples for each NFE", low=4, high=1_000_000)
    nfe: tuple[int, ...] | None = flag(None, "numbers of network calls; default: the recipe's", low=1, high=10_000)
    sampler: str = flag("reveal-first", "how masked diffusion draws; one law", allowed=("reveal-first", "plain"))
    rows: int = flag(2_000, "test rows for likelihoods, or all", low=1, high=10_000_000)
    merge: tuple[Path, ...] = flag((), "results file of another machine to merge first", recorded=False, repeat=True)
    seeds: tuple[int, ...] = seeds_flag(0)

    @property
    def stem(self) -> str:
        return "text-tiny" if self.size == "text-tiny" else "text"


class Study(pipeline.Study):
    """Train models of text; measure likelihoods, and samples by their entropy, generative perplexity and MAUVE."""

    options: Options
    gpu_jobs = 1
    writing_parts = (None, "draw")

    def __init__(self, options: Options):
        super().__init__(options)
        lm = eval_lm_experiment(options.size, options.settings, options.eval_lm_steps)
        text = self.runs[0].experiment.domain
        self.sets = Sets(text, lm.domain, options.set, options.eval_lm_set, options.zero_shot)
        self.lm_run = EvalLMRun(self, lm)

    def experiments(self) -> list[Experiment]:
        given = self.options
        return recipe_experiments(given.size, given.methods, given.seeds, given.settings)

    def build_domain(self, config: DomainConfig, seed: int) -> Text:
        return self.sets.open(config)

    def work(self) -> None:
        """All parts, or one."""
        self.merge()
        if self.wants("eval-lm") and self.lm_run.steps_left:
            self.sets.check_eval_lm()
        if self.wants("train"):
            self.sets.check()
            self.train()
            self.measure()
        if self.wants("eval-lm"):
            self.train_eval_lm()
        if self.wants("score"):
            self.run_stages("scores", self.score_stages())
        if self.wants("draw"):
            self.run_stages("MAUVE", self.mauve_stages())

    def merge(self) -> None:
        """Merge results files of other machines; of two rows with the same identity the newer one stays."""
        results, paths = self.known(), self.options.merge
        if missing := [path for path in paths if not path.is_file()]:
            raise ConfigError([f"merge: {missing[0]} does not exist; give results files of this study"])
        for path in paths:
            results.merge(Results.load(path)).save(self.results)

    def stages(self, run: Trained) -> list[Stage]:
        text, options, config = self.sets.open(run.experiment.domain), self.options, run.experiment.eval
        run.pools.manifest |= {**describe_text(text), "batch": config.batch}
        names = stages.likelihood_names(run.method, LIKELIHOODS)
        names = [name for name in names if Likelihood.parse(name).steps <= text.space.length]
        if not run.method.has_latent:
            names = [name for name in names if name != "objective"]  # it is the nelbo
        likelihood = functools.partial(stages.likelihood, run, count=options.rows, metrics=("nll_token", "ppl"))
        work = [*stages.times(run), stages.sizes(run), training.passes(run), training.curves(run)]
        work += [likelihood(name=name, factorised=best_factorised) for name in names]
        if self.sets.zero_shot_text is not None:
            bounds = [name for name in names if not name.startswith(("objective", "iw"))]
            work += [likelihood(name=name, zero_shot=self.sets.zero_shot_text) for name in bounds]
        steps = run.experiment.method.allowed_nfe(options.nfe or config.nfe, text.space.length)
        sampler = dataclasses.replace(config.sampler, kind=options.sampler)  # type: ignore[arg-type]
        try:
            run.method.check_sampler(sampler)
        except ConfigError:  # the method has a sampler of its own
            sampler = PLAIN
        pool = functools.partial(stages.pool, run, samples=options.samples, keep=options.samples, write=text.decode)
        work += [pool(nfe=nfe, sampler=sampler) for nfe in steps]
        if hasattr(run.experiment.method, "route_tau"):
            greedy = functools.partial(pool, sampler=sampler, variant=GREEDY, settings=GREEDY_SETTINGS)
            work += [greedy(nfe=nfe) for nfe in steps if nfe <= GREEDY_NFE]
        count, seed = min(options.samples, len(text.test_rows)), derive_seed("held-out text")
        real = stages.reference(
            "held-out rows", text, lambda: text.measure(text.fresh(count, seed)), "entropy", n=count
        )
        return [*work, real]

    def train_eval_lm(self) -> None:
        """Train the evaluation LM, or continue."""
        run = self.lm_run
        if run.steps_left:
            with meter(run.steps_left, run.label, quiet=self.options.quiet) as tick:
                self._train(run, tick, KeepBest(run))
        if not run.steps_left and (best := run.best()):
            self.note(f"evaluation LM: best at step {best[0]}, {best[1]:.4f} nats per token of its validation rows")

    def score_stages(self) -> list[Stage]:
        """Scores of every pool; without pools or the evaluation LM an error if they alone are asked for."""
        pools, folder, run = self.pools(), self.options.run_folder, self.lm_run
        if not pools and self.options.only == "score":
            raise DataError(f"{folder / 'pools'}: holds no pools; draw them with --only train, or copy them there")
        if not run.is_ready:
            if self.options.only == "score":
                name = run.best_path.name
                raise ConfigError(f"eval-lm: {name} is not trained in {folder}; use --only eval-lm first")
            self.unmeasured += sum(len(pool.arrays) for pool in pools)
            return []
        groups: dict[Text, list[Archive]] = {}
        for pool in pools:
            groups.setdefault(self.sets.matching(pool.manifest), []).append(pool)
        page, rows = self.options.results / f"{self.options.stem}-judge.json", self.options.rows
        return [stage for text, own in groups.items() for stage in score_stages(run, text, own, rows, page)]

    def pools(self) -> list[Archive]:
        """The newest pool of each run; a run has several if its recipe has changed."""
        paths = sorted((self.options.run_folder / "pools").glob("*.npz"), key=lambda path: path.stat().st_mtime_ns)
        names = ("data", "recipe", "seed")
        newest = {tuple(archive.manifest[name] for name in names): archive for archive in map(Archive.open, paths)}
        return sorted(newest.values(), key=lambda archive: archive.path)

    def mauve_stages(self) -> list[Stage]:
        """MAUVE, where its package is installed."""
        try:
            import_extra("mauve")
        except ConfigError as error:
            self.note(f"MAUVE is left out: {error}")
            return []
        return mauve_stages(self.options.run_folder / "features")

    def write(self, results: Results) -> None:
        stem, results, pools = self.options.stem, results.only(task="text"), self.pools()
        if pools:
            self.page(f"{stem}-samples.md", samples_page(pools, results, f"{stem}.md"))
        self.panels(f"{stem}-gen-ppl.png", _gen_ppl(results), height=3.0)
        self.panels(f"{stem}-latent.png", _latent(results), height=3.0)
        self.print_tables([*text_tables("gen-ppl", results)[:1], *text_tables("likelihood", results)])


def best_factorised(train: Integer[Tensor, "N L"], rows: Int[Tensor, "n L"], size: int) -> float:
    """NLL in nats per row of the best factorised one-step model of text.

    Its marginals by position, or those of all positions together, whichever are better: rows are cut out of a stream,
    so that positions are alike, and with a large vocabulary counts by position are few.
    """
    together = factorised_nll(train.reshape(-1, 1), rows.reshape(-1, 1), size) * rows.shape[1]
    return min(factorised_nll(train, rows, size), together)


def _gen_ppl(results: Results) -> list[list[Panel]]:
    """Generative perplexity, entropy of the samples and MAUVE over NFE, a line of panels for each text."""
    panels = {"gen_ppl": SETTINGS[0], "entropy": None, "mauve": None}
    parts = {data: part for data in data_of(results) if (part := results.only(data=data)).select(metric="gen_ppl")}
    return [[_panel(part, data, *panel) for panel in panels.items()] for data, part in parts.items()]


def _panel(part: Results, data: str, metric: str, setting: str | None) -> Panel:
    curves = {}
    for line in models(part):
        for variant, label, style in ((None, "", "-"), (GREEDY, f", {VARIANTS[GREEDY]}", ":")):
            name = " ".join(filter(None, [setting, variant])) or None
            if rows := line.where(metric=metric, convention=name).rows:
                curves[line.labels[0] + label] = mean_curve(rows, style=style)
    real = levels({"held-out text": part.select(method="data", metric=metric, convention=setting)})
    return Panel(f"{data}: {measure(metric).label}", curves, log_y=metric == "gen_ppl", levels=real)


def _latent(results: Results) -> list[list[Panel]]:
    """Over training, for models with a latent: usage entropy and route KL by block, and the terms of the loss."""
    return [
        [
            _training_curves(line, f"{line.labels[0]}: entropy of usage (nats)", "usage_entropy/"),
            _training_curves(line, f"{line.labels[0]}: route KL (nats per position)", "route_kl/"),
            _training_curves(line, f"{line.labels[0]} on {data}: nats per token", "train_recon", "train_kl"),
        ]
        for data in data_of(results)
        for line in models(results.only(data=data))
        if any(row.value for row in line.where(metric="train_kl").rows)
    ]


def _training_curves(line: Line, title: str, *metrics: str) -> Panel:
    """Numbers of the log against the step, which is the convention of their rows."""
    groups: dict[str, list[Row]] = {}
    for row in sorted(line.rows, key=lambda row: row.metric):
        if row.metric.startswith(metrics):
            groups.setdefault(row.metric.rpartition("/")[2], []).append(row)
    curves = {label: mean_curve(rows, lambda row: float(str(row.convention)[5:])) for label, rows in groups.items()}
    return Panel(title, curves, xlabel="training step", log_x=False)
