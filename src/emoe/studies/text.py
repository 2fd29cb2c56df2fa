"""Text end to end: models of seven methods, a judge that saw other text, the paper's LM1B tables beside ours.

The stages pass small files on, so that each can run by itself and on another machine:

- `train`: a model, and all that needs its weights: sizes, named likelihoods, pools of samples (`pools/*.npz`).
- `judge`: an autoregressive model of text that no other model saw, early-stopped.
- `score`: perplexities of all pools under the judge, and features of samples (`features/*.npz`).
- `draw`: MAUVE, tables, figures and samples side by side.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from jaxtyping import Int
from torch import Tensor

from emoe.backbones.base import active_parameters, total_parameters
from emoe.cli import Parser
from emoe.commands import parse_number, parse_numbers, read_results, split_settings
from emoe.config import ConfigError
from emoe.console import count_calls, meter
from emoe.domains.base import DataError
from emoe.domains.text.data import HeldOut, Text, TextConfig, read_manifest
from emoe.domains.text.prepare import MANIFEST
from emoe.evaluation.evaluate import fresh_count, make_row
from emoe.evaluation.likelihood import coordination_gain, estimate_nll, factorised_nll, in_units, passes
from emoe.evaluation.pools import draw_pool
from emoe.experiment import Experiment, customise
from emoe.files import replace_file
from emoe.judges import MAUVE_SEEDS, SCALING, RunJudge, score
from emoe.methods.base import MaskedDiffusion
from emoe.methods.bd3lm import BD3LMConfig
from emoe.recipes import all_recipes, get_recipe
from emoe.reporting.render import print_table
from emoe.reporting.results import Results, Row
from emoe.reporting.text import SETTINGS, TASK, VARIANTS, Variant, eval_lm_notes, in_setting, text_page, text_tables
from emoe.rng import derive_seed
from emoe.runs import Run, load_run, pick_device
from emoe.studies.base import Study, make_study, run_name, steps_done
from emoe.studies.latent import parse_deadline, parse_jobs, parse_names, parse_seeds, refuse_fields
from emoe.studies.text_files import PCA, Archive, MauveCache, PoolKey, describe_pools, describe_text, digest
from emoe.studies.text_judge import CHECKS, EXACT, JudgeRun, full_precision
from emoe.studies.text_pages import curves, latent_curves, samples_page, with_earlier
from emoe.studies.text_training import network_passes, training_rows
from emoe.types import Convention, Measurement

DEFAULT_METHODS = "ar,mdlm,sedd,bd3lm,vadd,emoe,emoe-plus"
SIZES = ("news-small", "text-tiny", "lm1b")
PARTS = ("train", "judge", "score", "draw")
RESERVED = {"eval.nfe": "nfe", "eval.samples": "samples", "eval.sampler.kind": "sampler", "domain.path": "set"}
PLACES = ("--set", "--judge-set", "--zero-shot", "--merge")
SAMPLES, ROWS, WEIGHTED_ROWS = 2_000, 2_000, 500
HELD_OUT = 2_000  # held-out rows that MAUVE compares with
VARIANT_NFE = 16  # most network calls that other routes are drawn with; the paper has 1 and 2, of greedy ones
TIMES = "times.jsonl"  # in a run folder: how long each part of its training took
LIKELIHOODS = {
    "ar": ("exact",),
    "mdlm": ("nelbo", "bound@1", "bound@4", "bound@16", "bound@64"),
    "sedd": ("nelbo",),
    "bd3lm": ("nelbo", "bound@1"),
    "vadd": ("objective", "bound@1", "bound@4", "bound@16", "iw@1,16"),
    "emoe": ("objective", "bound@1", "bound@4", "bound@16", "iw@1,16"),
}

Kind = Literal["sizes", "training", "likelihood", "zero-shot", "pool"]
SamplerKind = Literal["reveal-first", "plain", "cached"]
SAMPLERS: tuple[SamplerKind, ...] = get_args(SamplerKind)


def main(words: list[str]) -> int:
    """`emoe reproduce text`."""
    rest, settings = split_settings(words)
    args = make_parser().parse_args(rest)
    deadline = parse_deadline(args.budget)
    refuse_fields(settings, RESERVED)
    for name, allowed in (("only", PARTS), ("size", SIZES), ("sampler", SAMPLERS)):
        given = getattr(args, name)
        if given not in (None, *allowed):
            raise ConfigError([f"{name}: {given!r} is not known; allowed: {', '.join(allowed)}"])
    plan = Plan(
        nfe=None if args.nfe is None else tuple(sorted(set(parse_numbers("nfe", args.nfe)))),
        samples=parse_number("samples", args.samples, low=4, high=1_000_000),
        rows=parse_number("rows", args.rows, high=10_000_000),
        weighted_rows=parse_number("iw-rows", args.iw_rows, high=10_000_000),
        sampler=args.sampler,
    )
    names = parse_names("methods", args.methods, recipes_of(args.size))
    experiments = [
        customise(get_recipe(f"{args.size}-{name}"), {**settings, "seed": str(seed)})
        for seed in parse_seeds(args.seeds)
        for name in names
    ]
    judge_steps = None if args.judge_steps is None else parse_number("judge-steps", args.judge_steps, high=10_000_000)
    judge = judge_experiment(args.size, settings, judge_steps)
    where = pick_device(args.device)
    jobs = parse_jobs(args.jobs) or (1 if where.type == "cuda" else torch.get_num_threads())
    folder, stem = Path(args.results), args.size if args.size == "text-tiny" else TASK
    study = make_study(
        "reproduce text", _without_places(words), folder=Path(args.runs or f"runs/{stem}"),
        results=folder / f"{stem}.json",
        device=args.device, quiet=args.quiet, jobs=jobs,
    )  # fmt: skip
    study.deadline, study.stops, study.sampled, study.tolerant = deadline, True, False, True
    _merge(study.results, [Path(path) for path in args.merge])
    domain = experiments[0].domain
    assert isinstance(domain, TextConfig) and isinstance(judge.domain, TextConfig)
    folders = {domain.path: args.set or domain.path, judge.domain.path: args.judge_set or judge.domain.path}
    sets = {path: Path(place) for path, place in folders.items()}
    return Chain(study, plan, domain, judge, folder, sets, args.zero_shot).run(experiments, args.only)


def make_parser() -> Parser:
    """The options."""
    parser = Parser(
        prog="emoe reproduce text",
        description="Train models of text; measure named likelihoods, samples at each NFE and, under a judge that was "
        "trained on other text, their perplexity and MAUVE; write text.json, text.md, figures and text-samples.md, "
        "or text-tiny.json and so on with --size text-tiny. "
        "Each stage can run alone (--only) and on another machine: scoring needs the folder pools/ and the judge's "
        "text, drawing needs text.json, pools/ and features/. Killed, or out of --budget, it continues with the same "
        "command. Fields of all recipes can be overridden, for instance --train.steps 200 for a try.",
        examples=[
            "emoe reproduce text --methods emoe --only train --set sets/news --budget 8",
            "emoe reproduce text --only judge --judge-set sets/news-judge",
            "emoe reproduce text --only score --judge-set sets/news-judge",
            "emoe reproduce text --only draw",
        ],
    )
    add = parser.add_argument
    add("--size", default=SIZES[0], help=f"recipes: {', '.join(SIZES)} (default {SIZES[0]})")
    add("--methods", default=DEFAULT_METHODS, help=f"methods, ends of recipes (default {DEFAULT_METHODS})")
    add("--only", help=f"one stage alone: {', '.join(PARTS)}")
    add("--set", help="folder of the prepared text, wherever it lies; default: the recipe's, such as sets/news")
    add(
        "--judge-set",
        help="folder of prepared text that no model saw, for the judge; default: that of --set and -judge",
    )
    add("--zero-shot", help="folder of prepared text from elsewhere, whose likelihood is measured too")
    add("--samples", default=str(SAMPLES), help=f"samples for each NFE (default {SAMPLES})")
    add("--nfe", help="numbers of network calls; default: the recipe's; a method leaves out what it cannot make")
    add(
        "--sampler",
        default=SAMPLERS[0],
        help=f"how masked diffusion draws: {', '.join(SAMPLERS)}; one law, other times (default {SAMPLERS[0]})",
    )
    add("--rows", default=str(ROWS), help=f"test rows for likelihoods (default {ROWS}, or all)")
    add("--iw-rows", default=str(WEIGHTED_ROWS), help=f"and for importance-weighted ones (default {WEIGHTED_ROWS})")
    add("--judge-steps", help="training steps of the judge, at most; default: the recipe's")
    add("--merge", nargs="+", default=[], metavar="FILE", help="results files of other machines to take in first")
    add("--seeds", default="0", help="seeds (default 0)")
    add("--budget", metavar="MINUTES", help="at this time training is stopped and saved, and nothing else starts")
    add("--runs", help="where run folders, pools and features go (default runs/text, or runs/text-tiny)")
    add("--results", default="results", help="folder of text.json, text.md and figures (default results)")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:N")
    add("--jobs", default="0", help="runs trained at once; 0 = one on a GPU, one for each core on a CPU")
    add("--quiet", action="store_true", help="no progress")
    return parser


def recipes_of(size: str) -> list[str]:
    """Ends of the recipes of a size: `mdlm`, `emoe-plus`, ..."""
    return [name.removeprefix(f"{size}-") for name in all_recipes() if name.startswith(f"{size}-")]


def judge_experiment(size: str, settings: Mapping[str, str], steps: int | None) -> Experiment:
    """The AR recipe of a size on text of its own, its validation rows held out; a checkpoint for every look at them."""
    own = {name: text for name, text in settings.items() if not name.startswith("method.")}
    if steps is not None:
        own["train.steps"] = str(steps)
    found = customise(get_recipe(f"{size}-ar"), own)
    domain = found.domain
    assert isinstance(domain, TextConfig)
    return dataclasses.replace(
        found,
        name=found.name.replace(f"{size}-ar", f"{size}-judge", 1),
        domain=dataclasses.replace(domain, path=f"{domain.path}-judge", held_out="valid"),
        train=dataclasses.replace(found.train, save_every=max(1, math.ceil(found.train.steps / CHECKS))),
    )


def _without_places(words: Sequence[str]) -> list[str]:
    """The command line without folders and files of data, which change no number."""
    kept, inside = [], ""
    for word in words:
        if word.startswith("--"):
            inside = word if word in PLACES else ""
        if not inside and word.partition("=")[0] not in PLACES:
            kept.append(word)
    return kept


def _merge(path: Path, others: Sequence[Path]) -> None:
    """Take the rows of other results files into one; younger ones stay."""
    if missing := [other for other in others if not other.is_file()]:
        raise ConfigError([f"merge: {missing[0]} does not exist; give results files of this study"])
    if others:
        results = _known(path)
        for other in others:
            results.merge(read_results(other))
        path.parent.mkdir(parents=True, exist_ok=True)
        results.save(path)


def _write(path: Path, text: str) -> bool:
    """Write a file unless it says so already; whether it was written."""
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return False
    replace_file(path, text)
    return True


def _known(path: Path) -> Results:
    return Results.load(path) if path.exists() else Results()


# --- What is measured of a model ---------------------------------------------------------------------------------


class Stage(NamedTuple):
    """A piece of work on a trained model: a likelihood by its name, a pool by its key, or one of the rest."""

    kind: Kind
    convention: str = ""
    pool: PoolKey | None = None

    @property
    def label(self) -> str:
        """For the log."""
        if self.pool is not None:
            return f"NFE {self.pool.nfe}" + ("" if self.pool.variant is None else f", {self.pool.variant}")
        return {"likelihood": self.convention, "zero-shot": f"zero-shot {self.convention}"}.get(self.kind, self.kind)


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    nfe: tuple[int, ...] | None  # None = those of the recipe
    samples: int  # for each NFE
    rows: int  # test rows for likelihoods
    weighted_rows: int  # and for importance-weighted ones
    sampler: SamplerKind = "reveal-first"  # all have one law; this one reads each position once, not at every step

    def steps(self, experiment: Experiment, length: int) -> tuple[int, ...]:
        """Numbers of network calls that samples are drawn with: of those wanted all that the method can make."""
        wanted = experiment.eval.nfe if self.nfe is None else self.nfe
        if experiment.method.kind == "ar":
            return (length,)
        if isinstance(experiment.method, BD3LMConfig):
            blocks = length // experiment.method.block
            return tuple(nfe for nfe in wanted if nfe % blocks == 0)
        return wanted

    def stages(self, experiment: Experiment, length: int, *, zero_shot: bool) -> list[Stage]:
        """Pieces of work in their order."""
        kind = str(experiment.method.kind)
        names = [name for name in LIKELIHOODS[kind] if Convention.parse(name).steps <= length]
        steps = self.steps(experiment, length)
        bounds = [name for name in names if name != "objective" and not name.startswith("iw")]
        return [
            Stage("sizes"),
            Stage("training"),
            *(Stage("likelihood", name) for name in names),
            *(Stage("zero-shot", name) for name in bounds if zero_shot),
            *(Stage("pool", pool=PoolKey(nfe)) for nfe in steps),
            *(
                Stage("pool", pool=PoolKey(nfe, variant.name))
                for variant in variants_of(experiment)
                for nfe in steps
                if variant.least <= nfe <= VARIANT_NFE
            ),
        ]

    def count(self, stage: Stage, text: Text) -> int:
        """Rows of a likelihood, or samples of a pool."""
        if stage.pool is not None:
            return self.samples
        return fresh_count(text, self.weighted_rows if stage.convention.startswith("iw") else self.rows)


@dataclass
class Chain:
    """The stages of the study, each of which does only what is not done yet."""

    study: Study
    plan: Plan
    config: TextConfig  # the models' text
    judge: Experiment
    folder: Path  # results
    sets: Mapping[str, Path]  # path in a config -> folder of the set on this machine
    zero_shot: str | None = None
    late: int = 0  # measurements that were not made
    texts: dict[TextConfig, Text] = field(default_factory=dict)

    def run(self, experiments: Sequence[Experiment], only: str | None) -> int:
        """All stages, or one of them alone; returns an exit code."""
        study = self.study
        if only in (None, "judge"):
            self.check_judge_set()
        if only in (None, "train"):
            self.check_set()
            self.train(experiments)
        if only in (None, "judge"):
            self.train_judge()
        if only in (None, "score"):
            self.score(needed=only == "score")
        if only in (None, "draw"):
            self.draw()
        for name, error in study.failed.items():
            print(f"emoe reproduce: {name} failed: {error}", file=sys.stderr)
        if study.skipped or self.late:
            told = f"{len(study.skipped)} runs not finished, {self.late} measurements not made"
            print(f"emoe reproduce: {told}: the budget is used up; the same command continues", file=sys.stderr)
        if only in (None, "draw"):
            show(study.results)
        return 1 if study.failed else 0

    # --- train

    def check_set(self) -> None:
        """Refuse a missing text with the option that names it."""
        try:
            read_manifest(self.sets[self.config.path])
        except DataError as error:
            raise DataError(
                f"set: {str(error).partition(';')[0]}; give --set FOLDER, which emoe data prepare wrote"
            ) from None

    def train(self, experiments: Sequence[Experiment]) -> None:
        """Train what is not trained and measure it at once; as many runs at a time as there are jobs."""
        left = [one for one in experiments if self._left(one)]
        self.study.note(f"{len(experiments)} models, {len(experiments) - len(left)} of them done before")
        for start in range(0, len(left), self.study.jobs):
            group = left[start : start + self.study.jobs]
            self._fit([one for one in group if not self._trained(one)])
            for experiment in group:
                if self._trained(experiment):
                    self._measure(experiment)
                else:
                    self.study.note(f"{_label(experiment)}: not trained yet, so not measured")
        for experiment in experiments:
            self._real(experiment)

    def _left(self, experiment: Experiment) -> list[Stage]:
        """Stages that are not done."""
        text, known = self._text(experiment.domain), _known(self.study.results)
        stages = self.plan.stages(experiment, text.space.length, zero_shot=self.zero_shot is not None)
        pools = Archive.open(self._pools(experiment))
        return [stage for stage in stages if not self._done(stage, experiment, text, known, pools)]

    def _done(self, stage: Stage, experiment: Experiment, text: Text, known: Results, pools: Archive) -> bool:
        same = functools.partial(known.select, recipe=experiment.name, seed=experiment.seed, task=TASK)
        if stage.kind == "sizes":
            return bool(same(metric="passes_train", data=text.name))
        if stage.kind == "training":
            return bool(same(metric="train_loss", data=text.name))
        if stage.pool is not None:
            found = same(metric="entropy", data=text.name, nfe=stage.pool.nfe, convention=stage.pool.variant)
            enough = pools.rows(stage.pool) >= self.plan.samples
        elif stage.kind == "zero-shot":
            found, enough = same(metric="zero_shot_ppl", data=self._elsewhere.name, convention=stage.convention), True
        else:
            found, enough = same(metric="ppl", data=text.name, convention=stage.convention), True
        wanted = self.plan.count(stage, self._elsewhere if stage.kind == "zero-shot" else text)
        return enough and any((row.n or 0) >= wanted for row in found)

    def _fit(self, experiments: Sequence[Experiment]) -> None:
        """Train runs, and note in their folders how long that took."""
        if not experiments:
            return
        before = {run_name(one): steps_done(self.study.folder / run_name(one)) for one in experiments}
        self.study.domains.update({one.domain: self._text(one.domain) for one in experiments})
        try:
            self.study.run(experiments)
        finally:
            for name, seconds in self.study.seconds.items():
                done = steps_done(self.study.folder / name)
                if done > before.get(name, done):
                    line = json.dumps({"from": before[name], "to": done, "seconds": round(seconds, 3)})
                    with (self.study.folder / name / TIMES).open("a", encoding="utf-8") as file:
                        file.write(f"{line}\n")
            self.study.seconds.clear()
            self.study.runs.clear()  # models are opened one at a time from here on

    def _measure(self, experiment: Experiment) -> None:
        """All stages of a trained run that are not done; each is recorded when it is."""
        left, runs = self._left(experiment), Opened(self.study, experiment, self._text(experiment.domain))
        for number, stage in enumerate(left, 1):
            if self._is_late():
                self.late += 1
                continue
            began = time.monotonic()
            label = f"{_label(experiment)}, {stage.label} [{number}/{len(left)}]"
            try:
                with full_precision():
                    rows = self._rows(stage, runs, experiment, label)
            except (RuntimeError, ValueError) as error:  # the other stages may still be measured
                if isinstance(error, ConfigError | DataError):
                    raise
                self.study.failed[label] = str(error) or type(error).__name__
                continue
            self.study.add(rows)
            told = [row for row in rows if row.metric in ("ppl", "zero_shot_ppl", "entropy", "params", "passes_train")]
            values = ", ".join(f"{row.metric} {row.value:.4g}" for row in told)
            self.study.note(f"{label}: {values}, {time.monotonic() - began:.1f} s")

    def _rows(self, stage: Stage, runs: Opened, experiment: Experiment, label: str) -> list[Row]:
        """The rows of a stage, with progress."""
        text, to_row = runs.text, functools.partial(make_row, experiment=experiment)
        if stage.kind == "sizes":
            found = [*sizes(runs.plain, text), *training_times(runs.path)]
            return [to_row(item, text, nfe=None) for item in found]
        if stage.kind == "training":
            return [to_row(item, text, nfe=None, convention=f"step {step}") for step, item in training_rows(runs.path)]
        if stage.pool is not None:
            found = self._pool(stage.pool, runs, experiment, label)
            return [to_row(item, text, nfe=stage.pool.nfe, convention=stage.pool.variant) for item in found]
        where = self._elsewhere if stage.kind == "zero-shot" else text
        convention, method = Convention.parse(stage.convention), runs.plain.method
        rows = where.fresh(self.plan.count(stage, where), derive_seed(experiment.seed, "held out"))
        with meter(passes(convention), label, quiet=self.study.quiet) as tick:
            nll = estimate_nll(method, rows, convention, seed=experiment.seed, tick=tick)
        found = in_tokens(nll, text.space.length)
        if stage.kind == "zero-shot":
            found = [dataclasses.replace(item, metric=f"zero_shot_{item.metric}") for item in found]
        elif stage.convention == "bound@1" and getattr(method, "has_latent", False):
            found.append(coordination_gain(nll, best_factorised(text, rows), text.space.length))
        return [to_row(item, where, nfe=None, convention=stage.convention) for item in found]

    def _pool(self, key: PoolKey, runs: Opened, experiment: Experiment, label: str) -> list[Measurement]:
        """Draw a pool, unless it was drawn before, keep it, and measure what needs no judge."""
        archive, text = Archive.open(self._pools(experiment)), runs.text
        if archive.rows(key) < self.plan.samples:
            run = runs.plain if key.variant is None else runs.changed(VARIANTS[key.variant])
            config, sampler = experiment.eval, None
            if isinstance(run.method, MaskedDiffusion):
                sampler = dataclasses.replace(config.sampler, kind=self.plan.sampler)
            calls = key.nfe * math.ceil(self.plan.samples / config.batch)
            with meter(calls, label, quiet=self.study.quiet) as tick, count_calls(run.method.backbone, tick):
                pool = draw_pool(
                    run.method, self.plan.samples, key.nfe, experiment.seed, batch=config.batch, sampler=sampler
                )
            how = {"calls": pool.calls, "step": run.step, "sampler": "own" if sampler is None else sampler.kind}
            told = archive.manifest.get("pools", {}) | {str(key): how}
            archive.manifest = describe_pools(experiment, text) | {"pools": told}
            archive.arrays[str(key)] = pool.samples.numpy().astype("<u2")
            archive.save()
        found = text.measure(archive.tokens(key)[: self.plan.samples], experiment.seed)
        how = archive.manifest["pools"][str(key)]
        if how.get("sampler", "plain") not in ("own", "plain"):
            found.append(Measurement("network_calls", how["calls"], None, archive.rows(key)))
        return found

    def _real(self, experiment: Experiment) -> None:
        """What held-out rows get where samples were measured."""
        text, known = self._text(experiment.domain), _known(self.study.results)
        count = fresh_count(text, self.plan.samples)
        found = known.select(task=TASK, data=text.name, method="data", metric="entropy")
        measured = known.select(task=TASK, data=text.name, recipe=experiment.name, metric="entropy")
        if not measured or any((row.n or 0) >= count for row in found):
            return
        rows = text.fresh(count, derive_seed("held-out text"))
        self.study.add([_reference_row(text.name, item) for item in text.measure(rows)])

    # --- judge

    def check_judge_set(self) -> None:
        """Refuse, before anything is trained, a text of the judge that is missing, or that is not another one."""
        assert isinstance(self.judge.domain, TextConfig)
        folder = self.sets[self.judge.domain.path]
        if self._judge_run().finished:
            return
        try:
            mine = read_manifest(folder)
        except DataError as error:
            raise DataError(
                f"judge-set: {str(error).partition(';')[0]}; give --judge-set FOLDER, text that no model saw, prepared "
                "with the same tokenizer, or one stage alone: --only train"
            ) from None
        if "valid" not in mine["splits"]:
            raise DataError(
                f"judge-set: {folder} has no validation rows, which say when to stop; prepare it with --split"
            )
        try:
            other = read_manifest(self.sets[self.config.path])
        except DataError:
            return  # the judge may be trained where the models' text is not
        same = [(one["tokenizer"]["sha256"], one["length"]) for one in (mine, other)]
        if same[0] != same[1]:
            raise DataError(f"judge-set: {folder} has another tokenizer or length than --set; prepare it with the same")
        seen = {item["sha256"] for item in other["inputs"]}
        both = [item["path"] for item in mine["inputs"] if "train" in item["starts"] and item["sha256"] in seen]
        if both:
            raise DataError(
                f"judge-set: {folder} trains on {both[0]}, which is in --set too; leave that file out of it"
            )

    def train_judge(self) -> None:
        """Train the judge, or go on with it."""
        run = self._judge_run()
        if run.finished:
            self.study.note(f"judge: trained before, best at step {run.best.step if run.best else 0}")
            return
        if self._is_late():
            self.study.skipped.append(run.run.name)
            return
        if not run.train(self._text(self.judge.domain), self.study.deadline):
            self.study.skipped.append(run.run.name)
            return
        assert run.best is not None
        told = f"held-out perplexity {math.exp(run.best.nll):.2f} of its own text"
        self.study.note(f"judge: best at step {run.best.step} of {steps_done(run.run)}, {told}")

    def _judge_run(self) -> JudgeRun:
        return JudgeRun(self.judge, self.study.folder, self.study.device, self.study.quiet)

    # --- score

    def score(self, *, needed: bool = True) -> None:
        """Perplexities and features of every pool in the folder of pools.

        Args:
            needed: A judge that is not trained, or no pools, are an error.
        """
        run, archives = self._judge_run(), self._archives()
        if not archives and needed:
            raise DataError(
                f"{self.study.folder / 'pools'}: holds no pools; draw them with --only train, or copy them there"
            )
        ready = steps_done(run.best_run) > 0 and (run.finished or not run.run.exists())
        if not ready and needed:
            raise ConfigError(
                [f"judge: {run.best_run.name} is not trained in {self.study.folder}; use --only judge first"]
            )
        if not ready:
            self.late += sum(len(archive.arrays) for archive in archives)
            return
        for text, group in self._by_text(archives):
            if text is None:
                told = group[0].manifest
                raise DataError(
                    f"{group[0].path}: its samples are compared with the {told['split']} rows of {told['data']}, which "
                    "no set here holds; give --set FOLDER, or a --judge-set that was prepared with them as --test"
                )
            with full_precision():
                self._score_group(run, text, group)

    def _score_group(self, run: JudgeRun, text: Text, archives: Sequence[Archive]) -> None:
        """Score pools that are compared with the same held-out rows."""
        assert isinstance(self.judge.domain, TextConfig)
        # The tokenizer of its own set, where that is here, is compared with that of the samples.
        own = (self.sets[self.judge.domain.path] / MANIFEST).exists()
        domain = self._text(self.judge.domain) if own else text
        judge = RunJudge(load_run(run.best_run, device=str(self.study.device), domain=domain))
        reference, pca = self._held_out(run, judge, text)
        for archive in archives:
            features = Archive.open(self.study.folder / "features" / archive.path.name)
            features.manifest = {name: value for name, value in archive.manifest.items() if name != "pools"} | {
                "judge": judge.describe(),
                "pca": reference.manifest["pca"],
                "scored": features.manifest.get("scored", {}),
            }
            for key in archive.keys():
                made_of = {"pool": digest(archive.arrays[str(key)]), "judge": judge.sha256}
                if features.manifest["scored"].get(str(key)) == made_of and self._scored(archive, key):
                    continue
                if self._is_late():
                    self.late += 1
                    continue
                began, tokens = time.monotonic(), archive.tokens(key)
                found = {setting: score(judge, text, tokens, setting).perplexity() for setting in SETTINGS}
                reduced = pca(judge.features(text, tokens))
                self.study.add(
                    [
                        _row(archive.manifest, item, nfe=key.nfe, convention=in_setting(setting, key.variant))
                        for setting, item in found.items()
                    ]
                )
                features.arrays[str(key)] = reduced
                features.manifest["scored"][str(key)] = made_of
                features.save()
                value = found[SETTINGS[0]].value
                self.study.note(f"{archive.path.stem}, {key}: gen_ppl {value:.4g}, {time.monotonic() - began:.1f} s")

    def _scored(self, archive: Archive, key: PoolKey) -> bool:
        known, told = _known(self.study.results), archive.manifest
        place = dict(task=TASK, data=told["data"], recipe=told["recipe"], seed=told["seed"], nfe=key.nfe)
        names = {in_setting(setting, key.variant) for setting in SETTINGS}
        return names <= {row.convention for row in known.select(metric="gen_ppl", **place)}

    def _held_out(self, run: JudgeRun, judge: RunJudge, text: Text) -> tuple[Archive, PCA]:
        """Features of held-out rows and their PCA, made once for a judge; and what the judge says of these rows."""
        folder = self.study.folder / "features"
        archive, kept = (Archive.open(folder / f"{name}-{text.name}.npz") for name in ("reference", "pca"))
        rows = text.fresh(fresh_count(text, HELD_OUT), derive_seed(0, "held out"))
        made_of = {"judge": judge.sha256, "split": describe_text(text)["split_sha256"]}
        same = kept.manifest.get("made_of") == made_of and bool(archive.arrays)
        if not same:
            features = judge.features(text, rows)
            pca = PCA.fit(features)
            archive.arrays = {"features": pca(features)}
            archive.manifest = describe_text(text) | {
                "judge": judge.describe(), "rows": len(rows), "settings": list(SETTINGS),
                "pca": pca.describe(f"{text.held_out} rows of {text.name}", len(rows)),
                "mauve": {"seeds": list(MAUVE_SEEDS), "scaling": SCALING, "clusters": "a tenth of the rows"},
            }  # fmt: skip
            kept.arrays = {"mean": pca.mean.numpy(), "directions": pca.directions.numpy()}
            kept.manifest = {"made_of": made_of, "share": pca.share}
            share = f"{100 * pca.share:.1f} % of the variance in {pca.directions.shape[1]} numbers a row"
            self.study.note(f"judge: {len(rows):,} held-out rows of {text.name} read, {share}")
        else:
            mean, directions = (torch.from_numpy(kept.arrays[name]) for name in ("mean", "directions"))
            pca = PCA(mean, directions, float(kept.manifest["share"]))
        known = _known(self.study.results)
        likelihood = known.select(task=TASK, data=text.name, method="judge", metric="ppl", recipe=self.judge.name)
        enough = any((row.n or 0) >= fresh_count(text, self.plan.rows) for row in likelihood)
        if not same or not enough or not known.select(task=TASK, data=text.name, method="data", metric="gen_ppl"):
            self.study.add(self._judge_rows(run, judge, text, rows, pca))
        if not same:  # after the rows: whoever finds these files must find the rows
            archive.save()
            kept.save()
        _write(self.folder / f"{self.stem}-judge.json", json.dumps(archive.manifest, indent=1, sort_keys=True) + "\n")
        return archive, pca

    def _judge_rows(self, run: JudgeRun, judge: RunJudge, text: Text, rows: Tensor, pca: PCA) -> list[Row]:
        """Perplexity of held-out rows, as a likelihood and as samples; the best step; the PCA."""
        method = judge.run.method
        held_out = text.fresh(fresh_count(text, self.plan.rows), derive_seed(0, "held out"))
        exact = in_tokens(estimate_nll(method, held_out, EXACT), text.space.length)
        best = [] if run.best is None else [Measurement("judge_valid_ppl", math.exp(run.best.nll), None, None)]
        others = [
            Measurement("judge_step", judge.run.step, None, None), *best,
            Measurement("pca_dimensions", pca.directions.shape[1], None, None),
            Measurement("pca_share", 100 * pca.share, None, len(rows)),
        ]  # fmt: skip
        told = {"data": text.name, "method": "judge", "recipe": self.judge.name, "seed": self.judge.seed}
        found = [_row(told, item, nfe=None, convention="exact") for item in exact]
        found += [_row(told, item, nfe=None) for item in others]
        real = {setting: score(judge, text, rows, setting).perplexity() for setting in SETTINGS}
        return found + [_reference_row(text.name, item, setting) for setting, item in real.items()]

    # --- draw

    def draw(self) -> None:
        """MAUVE where its package is, tables, figures and samples side by side; only what is new is written."""
        self._mauve()
        if not self.study.results.exists():
            self.study.note("nothing is measured yet")
            return
        results, written = Results.load(self.study.results).only(task=TASK), []
        tables, beside = self.folder / f"{self.stem}.md", self.folder / f"{self.stem}-samples.md"
        pages = {tables: text_page(results)}
        samples = samples_page(self._by_text(self._archives()), tables.name)
        if samples:
            pages[beside] = with_earlier(samples, beside.read_text(encoding="utf-8") if beside.exists() else "")
        elif self._archives():
            self.study.note(f"{beside.name}: not written, no set here has the words of these tokens; give --set FOLDER")
        written += [page for page, text in pages.items() if _write(page, text)]
        for name, make in (("gen-ppl", curves), ("latent", latent_curves)):
            path = self.folder / "figures" / f"{self.stem}-{name}.png"
            if path.exists() and path.stat().st_mtime_ns >= self.study.results.stat().st_mtime_ns:
                continue
            try:
                if make(results, path):
                    written.append(path)
            except ImportError:
                self.study.note(f"{path}: not drawn, matplotlib is missing; pip install emoe[plots]")
        self.study.note(f"written: {', '.join(map(str, written)) or 'nothing, all is up to date'}")

    def _mauve(self) -> None:
        """MAUVE of every pool whose features are here."""
        folder = self.study.folder / "features"
        cache, rows = MauveCache(folder / "mauve.json"), list[Row]()
        known = {row.identity: row for row in _known(self.study.results).select(metric=("mauve", "mauve_spread"))}
        for path in sorted(folder.glob("*.npz")):
            features = Archive.open(path)
            real = folder / f"reference-{features.manifest.get('data')}.npz"
            if path.name.startswith(("reference-", "pca-")) or not real.exists():
                continue
            reference = Archive.open(real).arrays["features"]
            for key in features.keys():
                samples = features.arrays[str(key)]
                if cache.find(samples, reference) is None and self._is_late():
                    self.late += 1
                    continue
                began, new = time.monotonic(), cache.find(samples, reference) is None
                try:
                    found = cache.measure(samples, reference)
                except ConfigError as error:
                    self.study.note(f"MAUVE is left out: {error}")
                    return
                if new:
                    spent = f"{time.monotonic() - began:.1f} s"
                    self.study.note(f"{path.stem}, {key}: MAUVE {100 * found.mean:.2f}, {spent}")
                n = min(len(samples), len(reference))
                items = [Measurement("mauve", 100 * found.mean, None, n)]
                items += [] if found.spread is None else [Measurement("mauve_spread", 100 * found.spread, None, n)]
                rows += [_row(features.manifest, item, nfe=key.nfe, convention=key.variant) for item in items]
        fresh = [row for row in rows if row.identity not in known or known[row.identity].value != row.value]
        if fresh:
            self.study.add(fresh)

    # --- what the stages share

    @property
    def stem(self) -> str:
        """How the names of results files begin."""
        return self.study.results.stem

    def _archives(self) -> list[Archive]:
        """Pools that are here; of those that would have the same rows, a recipe being changed since, the youngest."""
        paths = sorted((self.study.folder / "pools").glob("*.npz"))
        found: dict[tuple[str, ...], Archive] = {}
        for archive in map(Archive.open, sorted(paths, key=lambda path: path.stat().st_mtime_ns)):
            found[tuple(str(archive.manifest[name]) for name in ("data", "recipe", "seed"))] = archive
        return sorted(found.values(), key=lambda archive: archive.path)

    def _pools(self, experiment: Experiment) -> Path:
        return self.study.folder / "pools" / f"{run_name(experiment)}.npz"

    def _by_text(self, archives: Sequence[Archive]) -> list[tuple[Text | None, list[Archive]]]:
        """Pools by the held-out rows that they are compared with, and a set that holds these; None where none does."""
        groups: dict[str, list[Archive]] = {}
        for archive in archives:
            groups.setdefault(f"{archive.manifest['data']} {archive.manifest['split_sha256']}", []).append(archive)
        return [(self._holding(group[0].manifest), group) for group in groups.values()]

    def _holding(self, told: Mapping[str, Any]) -> Text | None:
        """A set with the tokens and held-out rows of a manifest: the models' own, or the judge's."""
        assert isinstance(self.judge.domain, TextConfig)
        splits: tuple[HeldOut, ...] = ("test", "valid")
        for config in (self.config, self.judge.domain):
            try:
                manifest = read_manifest(self.sets[config.path])
            except DataError:
                continue
            tokens = (manifest["tokenizer"]["sha256"], manifest["length"])
            for split in splits:
                rows = manifest["splits"].get(split, {}).get("sha256")
                if rows == told["split_sha256"] and tokens == (told["tokenizer"], told["length"]):
                    text = self._text(dataclasses.replace(config, held_out=split))
                    text.name = told["data"]
                    return text
        return None

    def _text(self, config: object) -> Text:
        assert isinstance(config, TextConfig)
        if config not in self.texts:
            self.texts[config] = Text(config, self.sets[config.path])
        return self.texts[config]

    @functools.cached_property
    def _elsewhere(self) -> Text:
        """The text of --zero-shot, which must have the tokens of the models'."""
        assert self.zero_shot is not None
        text, own = TextConfig(path=self.zero_shot).build(0), self._text(self.config)
        if text.space != own.space or text.manifest["tokenizer"]["sha256"] != own.manifest["tokenizer"]["sha256"]:
            raise DataError(
                f"zero-shot: {self.zero_shot} has another tokenizer or length than {own.name}; prepare it with the same"
            )
        return text

    def _trained(self, experiment: Experiment) -> bool:
        return steps_done(self.study.folder / run_name(experiment)) >= experiment.train.steps

    def _is_late(self) -> bool:
        return self.study.deadline is not None and time.monotonic() >= self.study.deadline


class Opened:
    """A trained run, opened when it is needed: with its own sampler, and with other routes."""

    def __init__(self, study: Study, experiment: Experiment, text: Text):
        self.path, self.device, self.text = study.folder / run_name(experiment), str(study.device), text
        self.settings = measuring(experiment, study.device)
        self.others: dict[str, Run] = {}

    @functools.cached_property
    def plain(self) -> Run:
        """As it was trained, the moving average of its weights."""
        return load_run(self.path, device=self.device, domain=self.text, settings=self.settings)

    def changed(self, variant: Variant) -> Run:
        """The same weights with other routes."""
        if variant.name not in self.others:
            settings = self.settings | variant.settings
            self.others[variant.name] = load_run(self.path, device=self.device, domain=self.text, settings=settings)
        return self.others[variant.name]


def variants_of(experiment: Experiment) -> list[Variant]:
    """Other ways to draw routes that a recipe can take: none without routes, no averages where draws are compared."""

    def fits(variant: Variant) -> bool:
        try:
            customise(experiment, variant.settings)
        except ConfigError:
            return False
        return True

    return [variant for variant in VARIANTS.values() if fits(variant)]


def measuring(experiment: Experiment, device: torch.device) -> dict[str, str]:
    """Fields that change how fast a run is measured, and no number.

    In single precision a GPU has no grouped products, and "auto" would run every expert on every position: 8 times
    the work for the one that is used.
    """
    routed = experiment.method.wants().experts and getattr(experiment.backbone, "dispatch", None) == "auto"
    return {"backbone.dispatch": "loop"} if routed and device.type == "cuda" else {}


def sizes(run: Run, text: Text) -> list[Measurement]:
    """Parameters, of which an encoder has none that are active in a draw, and network passes that are counted."""
    found: dict[str, float] = {
        "params": total_parameters(run.method), "params_active": active_parameters(run.method.backbone),
    }  # fmt: skip
    found |= network_passes(run, text)
    return [Measurement(name, value, None, None) for name, value in found.items()]


def training_times(run: Path) -> list[Measurement]:
    """Seconds of training and milliseconds of a step, logging and saving included; nothing where no time was noted."""
    file = run / TIMES
    parts = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []
    steps = sum(part["to"] - part["from"] for part in parts)
    if not steps:
        return []
    seconds = math.fsum(part["seconds"] for part in parts)
    return [Measurement("train_s", seconds, None, steps), Measurement("step_ms", 1000 * seconds / steps, None, steps)]


def best_factorised(text: Text, rows: Int[Tensor, "n L"]) -> float:
    """NLL in nats per row of the best factorised one-step model of text.

    Its marginals by position, or those of all positions together, whichever are better: rows are cut out of a stream,
    so that positions are alike, and with a large vocabulary counts by position are few.
    """
    together = factorised_nll(text.rows.reshape(-1, 1), rows.reshape(-1, 1), text.space.size) * text.space.length
    return min(factorised_nll(text.rows, rows, text.space.size), together)


def in_tokens(nll: Measurement, length: int) -> list[Measurement]:
    """An NLL in nats per row as nats per token and as perplexity."""
    error = None if nll.stderr is None else nll.stderr / length
    ppl = next(item for item in in_units(nll, length) if item.metric == "ppl")
    return [Measurement("nll_token", nll.value / length, error, nll.n), ppl]


def _row(told: Mapping[str, Any], item: Measurement, *, nfe: int | None, convention: str | None = None) -> Row:
    """A row of what a manifest tells of."""
    return Row(
        task=TASK, data=told["data"], method=told["method"], recipe=told["recipe"], seed=told["seed"], nfe=nfe,
        metric=item.metric, convention=convention, value=item.value, stderr=item.stderr, n=item.n,
    )  # fmt: skip


def _reference_row(data: str, item: Measurement, convention: str | None = None) -> Row:
    told = {"data": data, "method": "data", "recipe": "reference", "seed": None}
    return _row(told, item, nfe=None, convention=convention)


def _label(experiment: Experiment) -> str:
    return f"{experiment.name.partition(' ')[0]} seed {experiment.seed}"


def show(path: Path) -> None:
    """Print the main tables."""
    results = _known(path)
    for table in text_tables("gen-ppl", results):
        if f"Setting `{SETTINGS[0]}`" in table.note:
            print_table(dataclasses.replace(table, title="Generative perplexity, and entropy (H) of the samples"))
    for table in text_tables("likelihood", results):
        print_table(dataclasses.replace(table, title="Perplexity of test rows, and nats per token"))
    for sentence in eval_lm_notes(results):
        print(sentence)
