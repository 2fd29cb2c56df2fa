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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxtyping import Int, Integer
from torch import Tensor

from emoe.config import ConfigError
from emoe.domains.base import DataError
from emoe.domains.text.data import Text, TextConfig, read_manifest
from emoe.evaluation.eval_lm import import_extra
from emoe.evaluation.likelihood import factorised_nll
from emoe.experiment import Experiment, customise
from emoe.figures.base import save
from emoe.figures.curves import Panel, draw
from emoe.methods.base import PLAIN
from emoe.reporting.cells import Line, measure
from emoe.reporting.render import print_table
from emoe.reporting.results import Results, Row
from emoe.reporting.table import models
from emoe.reporting.text import GREEDY, SETTINGS, data_of, text_page, text_tables
from emoe.rng import derive_seed
from emoe.studies import options
from emoe.studies.course import course_stage, passes_stage
from emoe.studies.eval_lm import EvalLMRun, eval_lm_experiment
from emoe.studies.figures import mean_curve
from emoe.studies.options import flag, folder, recipe_experiments
from emoe.studies.pipeline import Study, stale, write_page
from emoe.studies.pools import Archive, PoolKey
from emoe.studies.samples import samples_page
from emoe.studies.scores import Scoring, describe_text, in_tokens, mauve_stages, reference_row
from emoe.studies.stages import Stage, Trained, likelihood_names, likelihood_stage, pool_stage, size_stage, time_stage
from emoe.types import Likelihood, Measurement

SIZES = ("news-small", "text-tiny", "lm1b")
METHODS = ("ar", "mdlm", "sedd", "bd3lm", "vadd", "emoe", "emoe-free-nats")
LIKELIHOODS = ("exact", "nelbo", "objective", "bound@1", "bound@4", "bound@16", "bound@64", "iw@1,16")
VARIANT_NFE = 16  # most network calls that greedy routes are drawn with; the paper has 1 and 2


@dataclass(frozen=True, kw_only=True)
class Options(options.Options):
    """Options of the study of text."""

    command = "reproduce text"
    reserved = {
        "eval.nfe": "nfe", "eval.samples": "samples", "eval.sampler.kind": "sampler", "domain.path": "set",
    }  # fmt: skip

    size: str = flag(SIZES[0], "recipes", allowed=SIZES)
    methods: tuple[str, ...] = flag(METHODS, "methods, ends of recipes")
    only: str | None = flag(None, "one part alone", allowed=("train", "eval-lm", "score", "draw"), recorded=False)
    set: Path | None = flag(
        None, "folder of the prepared text; default: the recipe's, such as sets/news", recorded=False
    )
    eval_lm_set: Path | None = flag(
        None, "folder of prepared text that no model saw, for the evaluation LM; default: as --set, and -judge",
        recorded=False,
    )  # fmt: skip
    eval_lm_steps: int | None = flag(None, "training steps of the evaluation LM, at most", low=1, high=10_000_000)
    zero_shot: Path | None = flag(None, "folder of prepared text from elsewhere, for likelihoods", recorded=False)
    samples: int = flag(2_000, "samples for each NFE", low=4, high=1_000_000)
    nfe: tuple[int, ...] | None = flag(None, "numbers of network calls; default: the recipe's", low=1, high=10_000)
    sampler: str = flag("reveal-first", "how masked diffusion draws; one law", allowed=("reveal-first", "plain"))
    rows: int = flag(2_000, "test rows for likelihoods, or all", low=1, high=10_000_000)
    merge: tuple[Path, ...] = flag((), "results file of another machine to take in first", recorded=False, repeat=True)
    seeds: tuple[int, ...] = flag((0,), "seeds", low=0, high=options.LARGEST_SEED)
    runs: Path = folder("", "folder of runs, pools and features; default: runs/text, or runs/text-tiny")


def run(options: Options) -> int:
    """Train models of text; measure likelihoods, and samples by their entropy, generative perplexity and MAUVE."""
    name, only = "text-tiny" if options.size == "text-tiny" else "text", options.only
    if options.runs == Path():
        options = dataclasses.replace(options, runs=Path("runs") / name)
    experiments = recipe_experiments(options.size, options.methods, options.seeds, options.settings)
    lm_experiment = eval_lm_experiment(options.size, options.settings, options.eval_lm_steps)
    sets = Sets(options, experiments[0].domain, lm_experiment.domain)
    study = Study(
        options, name, experiments, functools.partial(_stages, options, sets), references=functools.partial(_real, options),
        write=functools.partial(_write, options), domain=lambda experiment: sets.open(experiment.domain), gpu_jobs=1,
    )  # fmt: skip
    lm_run = EvalLMRun(lm_experiment, options.runs, str(study.device))
    _merge(study)
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
            study.run_stages("scores", _scores(study, lm_run, sets, needed=only == "score"))
        if only in (None, "draw"):
            study.run_stages("MAUVE", _mauve(study))
    if only in (None, "draw"):
        study.finish()
    return study.close()


def _merge(study: Study) -> None:
    """Take in results files of other machines; of two rows of one identity the younger stays."""
    paths = study.options.merge
    if missing := [path for path in paths if not path.is_file()]:
        raise ConfigError([f"merge: {missing[0]} does not exist; give results files of this study"])
    if paths:
        results = study.known()
        for path in paths:
            results.merge(Results.load(path))
        results.save(study.results)


class Sets:
    """The prepared sets of a study by their configs, and where they are on this machine."""

    def __init__(self, options: Options, config: Any, lm_config: Any):
        self.options, self.config, self.lm_config = options, config, lm_config
        self._built: dict[TextConfig, Text] = {}

    def folder(self, config: TextConfig) -> Path:
        """The folder of a set."""
        given = {self.config.path: self.options.set, self.lm_config.path: self.options.eval_lm_set}
        return given.get(config.path) or Path(config.path)

    def open(self, config: Any) -> Text:
        """A set, which has the name of its path wherever it is."""
        if config not in self._built:
            text = dataclasses.replace(config, path=str(self.folder(config))).build(0)
            text.name = Path(config.path).name
            self._built[config] = text
        return self._built[config]

    @functools.cached_property
    def elsewhere(self) -> Text | None:
        """The text of --zero-shot, which must have the tokens of the models."""
        if self.options.zero_shot is None:
            return None
        path = self.options.zero_shot
        text, own = TextConfig(path=str(path)).build(0), self.open(self.config)
        if describe_text(text)["tokenizer"] != describe_text(own)["tokenizer"] or text.space != own.space:
            raise DataError(
                f"zero-shot: {path} has another tokenizer or length than {own.name}; prepare it with the same"
            )
        return text

    def holding(self, manifest: Mapping[str, Any]) -> Text:
        """A set with the tokens and held-out rows of a pool: that of the models, or of the evaluation LM."""
        for config in (self.config, self.lm_config):
            try:
                splits = read_manifest(self.folder(config))["splits"]
            except DataError:
                continue
            for split in ("test", "valid"):
                if splits.get(split, {}).get("sha256") == manifest["split_sha256"]:
                    text = self.open(dataclasses.replace(config, held_out=split))
                    text.name = manifest["data"]
                    same = describe_text(text)
                    if all(same[name] == manifest[name] for name in ("tokenizer", "length")):
                        return text
        raise DataError(
            f"score: samples of {manifest['recipe']} are compared with the {manifest['split']} rows of "
            f"{manifest['data']}, which no set here holds; give --set FOLDER, or an --eval-lm-set that was prepared "
            "with them as --test"
        )

    def check(self) -> None:
        """Refuse a missing set with the option for it."""
        try:
            read_manifest(self.folder(self.config))
        except DataError as error:
            problem = str(error).partition(";")[0]
            raise DataError(f"set: {problem}; give --set FOLDER, which emoe data prepare wrote") from None

    def check_eval_lm(self) -> None:
        """Refuse, before anything is trained, text of the evaluation LM that is missing or not other text."""
        folder = self.folder(self.lm_config)
        try:
            own = read_manifest(folder)
        except DataError as error:
            raise DataError(
                f"eval-lm-set: {str(error).partition(';')[0]}; give --eval-lm-set FOLDER, text that no model saw, "
                "prepared with the same tokenizer, or one part alone: --only train"
            ) from None
        if "valid" not in own["splits"]:
            raise DataError(
                f"eval-lm-set: {folder} has no validation rows, which decide when to stop; prepare it with --split"
            )
        try:
            other = read_manifest(self.folder(self.config))
        except DataError:
            return  # the evaluation LM may be trained on a machine without the models' text
        first, second = ((one["tokenizer"]["sha256"], one["length"]) for one in (own, other))
        if first != second:
            raise DataError(
                f"eval-lm-set: {folder} has another tokenizer or length than --set; prepare it with the same"
            )
        known = {item["sha256"] for item in other["inputs"]}
        both = [item["path"] for item in own["inputs"] if "train" in item["starts"] and item["sha256"] in known]
        if both:
            raise DataError(
                f"eval-lm-set: {folder} trains on {both[0]}, which is in --set too; leave that file out of it"
            )


# --- Stages ----------------------------------------------------------------------------------------------------------


def _stages(options: Options, sets: Sets, trained: Trained) -> list[Stage]:
    """What needs the weights of a model; bounds of text from elsewhere too."""
    text, experiment = sets.open(trained.experiment.domain), trained.experiment
    length, elsewhere = text.space.length, sets.elsewhere
    trained.pools.manifest |= {**describe_text(text), "batch": experiment.eval.batch}
    steps = experiment.method.allowed_nfe(options.nfe or experiment.eval.nfe, length)
    sampler = dataclasses.replace(experiment.eval.sampler, kind=options.sampler)
    try:
        trained.method.check_sampler(sampler)
    except ConfigError:  # it has a sampler of its own
        sampler = PLAIN
    pool = functools.partial(
        pool_stage, trained, samples=options.samples, keep=options.samples, sampler=sampler, write=text.decode
    )
    stages = [time_stage(trained), size_stage(trained), passes_stage(trained), course_stage(trained)]
    stages += [
        likelihood_stage(trained, name, options.rows, in_tokens, factorised=best_factorised)
        for name in _names(trained, length)
    ]
    if elsewhere is not None:
        bounds = [name for name in _names(trained, length) if not name.startswith(("objective", "iw"))]
        stages += [likelihood_stage(trained, name, options.rows, _zero_shot, elsewhere=elsewhere) for name in bounds]
    stages += [pool(key=PoolKey(nfe)) for nfe in steps]
    if _takes(experiment, GREEDY.settings):
        few = [nfe for nfe in steps if nfe <= VARIANT_NFE]
        stages += [pool(key=PoolKey(nfe, GREEDY.name), settings=GREEDY.settings) for nfe in few]
    return stages


def _names(trained: Trained, length: int) -> list[str]:
    """Likelihoods of at most as many steps as tokens; without a latent the objective is the nelbo."""
    names = likelihood_names(trained.method, LIKELIHOODS)
    names = [name for name in names if trained.method.has_latent or name != "objective"]
    return [name for name in names if Likelihood.parse(name).steps <= length]


def _zero_shot(nll: Measurement, length: int) -> list[Measurement]:
    return [dataclasses.replace(item, metric=f"zero_shot_{item.metric}") for item in in_tokens(nll, length)]


def _takes(experiment: Experiment, settings: Mapping[str, str]) -> bool:
    """Whether an experiment has these fields."""
    try:
        customise(experiment, settings)
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


def _real(options: Options, runs: Sequence[Trained]) -> list[Stage]:
    """What held-out rows get."""

    def stage(text: Text) -> Stage:
        count = min(options.samples, len(text.test_rows))

        def run() -> list[Row]:
            items = text.measure(text.fresh(count, derive_seed("held-out text")))
            return [reference_row(text.name, item) for item in items]

        def done(results: Results) -> bool:
            rows = results.select(task="text", data=text.name, method="data", metric="entropy")
            return any((row.n or 0) >= count for row in rows)

        return Stage(f"held-out rows of {text.name}", done, run)

    texts = {run.domain.name: run.domain for run in runs}
    return [stage(text) for text in texts.values() if isinstance(text, Text)]


def _train_eval_lm(study: Study, lm_run: EvalLMRun, sets: Sets) -> None:
    """Train the evaluation LM, or go on with it."""
    if not lm_run.finished and not study.is_late:
        lm_run.train(sets.open(sets.lm_config), study.stop, study.deadline, quiet=study.options.quiet)
    if lm_run.finished and lm_run.best is not None:
        study.note(f"evaluation LM: best at step {lm_run.best.step}, loss {lm_run.best.nll:.4f} nats per token")
    else:
        study.untrained += 1


def _scores(study: Study, lm_run: EvalLMRun, sets: Sets, *, needed: bool) -> list[Stage]:
    """Scores of every pool in the folder of pools; an error without them or without the LM if they are needed."""
    pools = _pools(study.options)
    if not pools and needed:
        folder = study.options.runs / "pools"
        raise DataError(f"{folder}: holds no pools; draw them with --only train, or copy them there")
    if not lm_run.is_ready:
        if needed:
            problem = f"{lm_run.best_path.name} is not trained in {study.options.runs}; use --only eval-lm first"
            raise ConfigError([f"eval-lm: {problem}"])
        study.unmeasured += sum(len(pool.arrays) for pool in pools)
        return []
    try:
        lm_text = sets.open(sets.lm_config)
    except DataError:  # it is not on this machine
        lm_text = None
    groups: dict[str, tuple[Text, list[Archive]]] = {}
    for pool in pools:
        text = sets.holding(pool.manifest)
        groups.setdefault(text.name, (text, []))[1].append(pool)
    folder, page = study.options.runs / "features", study.results.with_name(f"{study.results.stem}-judge.json")
    return [
        stage
        for text, own in groups.values()
        for stage in Scoring(lm_run, lm_text, text, study.options.rows, folder, page).stages(own)
    ]


def _pools(options: Options) -> list[Archive]:
    """Pools that are here; of those that would have the same rows, the recipe having changed since, the youngest."""
    paths = sorted((options.runs / "pools").glob("*.npz"), key=lambda path: path.stat().st_mtime_ns)
    names = ("data", "recipe", "seed")
    youngest = {tuple(archive.manifest[name] for name in names): archive for archive in map(Archive.open, paths)}
    return sorted(youngest.values(), key=lambda archive: archive.path)


def _mauve(study: Study) -> list[Stage]:
    """MAUVE, where its package is installed."""
    stages = mauve_stages(study.options.runs / "features")
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
    stem, results = "text-tiny" if options.size == "text-tiny" else "text", results.only(task="text")
    page, pools = options.results / f"{stem}.md", _pools(options)
    written = write_page(page, text_page(results))
    if pools:
        written += write_page(options.results / f"{stem}-samples.md", samples_page(pools, results, page.name))
    for name, make in (("gen-ppl", _curves), ("latent", _latent)):
        path = options.results / "figures" / f"{stem}-{name}.png"
        panels = make(results) if stale(path, [options.results / f"{stem}.json"]) else []
        if panels:
            save(draw(panels, width=4.0, height=3.0), path)
            written.append(path)
    for table in [*text_tables("gen-ppl", results)[:1], *text_tables("likelihood", results)]:
        print_table(table)
        print(table.note)
    return written


def _curves(results: Results) -> list[list[Panel]]:
    """Generative perplexity, entropy of the samples and MAUVE over NFE, a line of panels for each text."""
    lines = []
    for data in data_of(results):
        part = results.only(data=data)
        if part.select(metric="gen_ppl"):
            panels = {"gen_ppl": next(iter(SETTINGS)), "entropy": None, "mauve": None}
            lines.append([_panel(part, data, metric, setting) for metric, setting in panels.items()])
    return lines


def _panel(part: Results, data: str, metric: str, setting: str | None) -> Panel:
    curves = {}
    for line in models(part):
        for variant, label, style in ((None, "", "-"), (GREEDY.name, f", {GREEDY.label}", GREEDY.line)):
            rows = line.where(metric=metric, convention=" ".join(filter(None, [setting, variant])) or None).rows
            if rows:
                curves[line.labels[0] + label] = mean_curve(rows, lambda row: row.nfe, style=style)
    real = [row.value for row in part.select(method="data", metric=metric, convention=setting)]
    levels = {"held-out text": real[0]} if real else {}
    return Panel(f"{data}: {measure(metric).label}", curves, log_y=metric == "gen_ppl", levels=levels)


def _latent(results: Results) -> list[list[Panel]]:
    """Over training: usage entropy and route KL of every block, and both terms of the loss, for models with a latent."""
    lines = []
    for data in data_of(results):
        for line in models(results.only(data=data)):
            if any(row.value for row in line.where(metric="train_kl").rows):
                lines.append(
                    [
                        _course(line, f"{line.labels[0]}: entropy of usage (nats)", "usage_entropy/"),
                        _course(line, f"{line.labels[0]}: route KL (nats per position)", "route_kl/"),
                        _course(line, f"{line.labels[0]} on {data}: nats per token", "train_recon", "train_kl"),
                    ]
                )
    return lines


def _course(line: Line, title: str, *metrics: str) -> Panel:
    """Numbers of the log against the step, which is the convention of their rows."""
    rows = [row for row in line.rows if row.metric.startswith(metrics)]
    groups = {metric: [row for row in rows if row.metric == metric] for metric in sorted({row.metric for row in rows})}
    curves = {
        metric.rpartition("/")[2]: mean_curve(group, lambda row: float(str(row.convention).removeprefix("step ")))
        for metric, group in groups.items()
    }
    return Panel(title, curves, xlabel="training step", log_x=False)
