"""What each command of the command line does."""

from __future__ import annotations

import json
import re
import shlex
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from emoe.cli import Parser
from emoe.config import Config, ConfigError, allowed_range, hint, paths, to_dict, type_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from emoe.evaluation.likelihood import Tick
    from emoe.evaluation.results import Results, Row
    from emoe.runs import Run
    from emoe.types import Convention

FIELDS = ("name", "seed", "domain", "backbone", "method", "optim", "train", "eval")  # of an experiment, without a dot
LARGEST_SEED = 2**63 - 1
LINE_SECONDS = 3.0  # between two lines of progress


def split_settings(words: list[str], bare_fields: tuple[str, ...] = ()) -> tuple[list[str], dict[str, str]]:
    """Take `--a.b value`, `--a.b=value` and `a.b=value` out of the arguments; the rest stays for argparse.

    Fields of an experiment that have no dot (`--seed`, `--method`) are settings too where `bare_fields` says so.
    """
    rest, settings = [], {}
    queue = list(words)
    while queue:
        word = queue.pop(0)
        name, equals, value = word.partition("=")
        bare = name.removeprefix("--")
        flag = word.startswith("--") and ("." in bare or bare in bare_fields)
        if not flag and not (equals and re.fullmatch(r"\w[\w-]*(\.[\w-]+)+", name)):  # a path is no field
            rest.append(word)
            continue
        if not equals:
            if not queue or queue[0].startswith("--"):
                raise ConfigError([f"{bare}: a value is missing; write --{bare} VALUE"])
            value = queue.pop(0)
        settings[bare] = value
    return rest, settings


def print_fields(config: Config) -> None:
    """Every field of an experiment: flag, value, type, range, meaning."""
    for path, annotation, field, value in paths(config):
        allowed = allowed_range(field.metadata)
        print(f"  --{path.replace('_', '-')} {as_typed(value)}")
        print(f"        {field.metadata.get('doc', '')} [{type_name(annotation)}{', ' + allowed if allowed else ''}]")


def as_typed(value: object) -> str:
    """A value as it is written on the command line."""
    if isinstance(value, tuple):
        return ",".join(map(as_typed, value))
    return str(value).lower() if value is None or isinstance(value, bool) else shlex.quote(str(value))


def cmd_list(words: list[str]) -> int:
    """Show the recipes."""
    parser = Parser(prog="emoe list", description="Show all recipes, or every field of one.")
    parser.add_argument("recipe", nargs="?", help="a recipe whose fields are shown")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(words)
    from emoe.recipes import all_recipes, get_recipe

    if args.recipe:
        experiment = get_recipe(args.recipe)
        if args.json:
            print(json.dumps(to_dict(experiment), indent=1))
        else:
            print_fields(experiment)
        return 0
    docs = {name: (build.__doc__ or "").strip().splitlines()[0] for name, build in all_recipes().items()}
    if args.json:
        print(json.dumps(docs, indent=1))
    else:
        width = max(map(len, docs))
        for name, doc in docs.items():
            print(f"{name:<{width}}  {doc}")
    return 0


def cmd_train(words: list[str]) -> int:
    """Train a recipe."""
    wants_fields = len(words) > 1 and not words[0].startswith("-") and ("--help" in words or "-h" in words)
    rest, settings = split_settings(words, FIELDS)
    parser = Parser(
        prog="emoe train",
        description="Train a recipe. Any field may follow as --field value; "
        "`emoe train RECIPE --help` lists them with their ranges.",
        add_help=not wants_fields,
    )
    parser.add_argument("recipe", help="name of a recipe (emoe list)")
    parser.add_argument("--run", help="run folder; default runs/RECIPE-seedN")
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint, if there is one")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    parser.add_argument("--tensorboard", action="store_true", help="also write TensorBoard events into the run folder")
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON")
    args, unknown = parser.parse_known_args([word for word in rest if not (wants_fields and word in ("-h", "--help"))])
    from emoe.experiment import customise
    from emoe.recipes import get_recipe

    recipe = get_recipe(args.recipe)
    parser.refuse(unknown, [path.replace("_", "-") for path, *_ in paths(recipe)])
    experiment = customise(recipe, settings)
    if wants_fields:
        parser.print_help()
        print(f"\nfields of {args.recipe} and their values:")
        print_fields(experiment)
        return 0
    from emoe.runs import train

    folder = args.run or f"runs/{experiment.name.replace(' ', '_')}-seed{experiment.seed}"
    run = train(
        experiment, folder, resume=args.resume, device=args.device, quiet=args.quiet, tensorboard=args.tensorboard
    )
    assert run.result is not None
    outcome = {"run": str(run.path), "step": run.step, "steps": experiment.train.steps, "seconds": run.result.seconds}
    if args.json:
        print(json.dumps(outcome))
    else:
        print(f"{run.path}: step {run.step} of {experiment.train.steps} after {run.result.seconds:.1f} s")
        if run.result.signal is None:
            print(f"next: emoe eval {shlex.quote(str(run.path))}")
        else:
            print("stopped by a signal and saved; the same command with --resume continues")
    return 0 if run.result.signal is None else 128 + run.result.signal


def parse_numbers(name: str, text: str, *, low: int = 1, high: int = 10_000) -> tuple[int, ...]:
    """`1,2,4` as whole numbers in a range."""
    try:
        values = tuple(int(part) for part in str(text).split(","))
    except ValueError:
        raise ConfigError([f"{name}: expected whole numbers >= {low} and <= {high}, got {text!r}"]) from None
    if min(values) < low or max(values) > high:
        raise ConfigError([f"{name}: must be >= {low} and <= {high}, got {text}"])
    return values


def parse_number(name: str, text: str, *, low: int = 1, high: int = 10_000) -> int:
    """One whole number in a range."""
    values = parse_numbers(name, text, low=low, high=high)
    if len(values) > 1:
        raise ConfigError([f"{name}: expected one whole number >= {low} and <= {high}, got {text!r}"])
    return values[0]


def cmd_sample(words: list[str]) -> int:
    """Draw samples."""
    rest, settings = split_settings(words)
    parser = Parser(
        prog="emoe sample",
        description="Draw rows from a trained run. --method.route-tau 0 makes E-MoE's routes greedy (the ablation).",
    )
    parser.add_argument("run", help="run folder")
    parser.add_argument("--n", default="10", help="number of rows (default 10)")
    parser.add_argument("--nfe", default="1", help="network calls (default 1)")
    parser.add_argument("--seed", default="0", help="seed of the draw (default 0)")
    parser.add_argument("--out", help="write an .npy file instead of printing")
    parser.add_argument("--picture", help="also draw the samples into this .png beside the real data")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(rest)
    count = parse_number("n", args.n, high=10_000_000)
    steps = parse_number("nfe", args.nfe)
    seed = parse_number("seed", args.seed, low=0, high=LARGEST_SEED)
    from emoe.evaluation.pools import draw_pool
    from emoe.runs import load_run

    run = load_run(args.run, device=args.device, settings=settings)
    pool = draw_pool(run.method, count, steps, seed, batch=run.experiment.eval.batch)
    if args.picture:
        fresh = run.domain.fresh(max(count, 1000), seed)
        run.domain.picture({"real data": fresh, f"NFE {pool.nfe}": pool.samples}, Path(args.picture))
    if args.out:
        import numpy as np

        out = args.out if args.out.endswith(".npy") else f"{args.out}.npy"
        np.save(out, pool.samples.numpy())
        print(f"{out}: {count} rows, NFE {pool.nfe}", file=sys.stderr)
        if args.json:
            print(json.dumps({"nfe": pool.nfe, "out": out}))
    elif args.json:
        print(json.dumps({"nfe": pool.nfe, "samples": pool.samples.tolist()}))
    else:
        for row in pool.samples.tolist():
            print(" ".join(map(str, row)))
    return 0


def cmd_eval(words: list[str]) -> int:
    """Measure a run."""
    rest, settings = split_settings(words)
    parser = Parser(
        prog="emoe eval",
        description="Draw samples at each NFE and measure them, and estimate named likelihoods. One or more runs.",
    )
    parser.add_argument("runs", nargs="+", help="run folders")
    parser.add_argument("--nfe", help="numbers of network calls, such as 1,2,4; default: the recipe's")
    parser.add_argument("--samples", help="rows for each NFE; default: the recipe's")
    parser.add_argument("--seed", help="seed of the draws; default: the run's")
    parser.add_argument(
        "--likelihood",
        help="named likelihoods, such as 'objective bound@4 iw@4,64 nelbo'; none = leave them out (default: a few)",
    )
    parser.add_argument(
        "--exact", action="store_true", help="toy: also the exact law at each NFE, without sampling noise"
    )
    parser.add_argument("--rows", default="2000", help="held-out rows for likelihoods (default 2000)")
    parser.add_argument("--results", help="also merge the rows into this results file")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    args = parser.parse_args(rest)
    nfe = None if args.nfe is None else parse_numbers("nfe", args.nfe)
    samples = None if args.samples is None else parse_number("samples", args.samples, low=2, high=10_000_000)
    seed = None if args.seed is None else parse_number("seed", args.seed, low=0, high=LARGEST_SEED)
    held_out = parse_number("rows", args.rows, high=10_000_000)
    asked = parse_conventions(args.likelihood) if args.likelihood not in (None, "none") else None
    from emoe.evaluation.evaluate import evaluate, evaluate_likelihood
    from emoe.evaluation.grid import metric_grid
    from emoe.evaluation.likelihood import default_conventions, passes
    from emoe.evaluation.results import Results, RunInfo, describe_machine, record
    from emoe.evaluation.tables import print_grid
    from emoe.runs import load_run

    results = Results()
    conventions: dict[Convention, None] = {}
    for folder in args.runs:
        began = time.monotonic()
        run = load_run(folder, device=args.device, settings=settings)
        files = [run.path / "eval.json", *([Path(args.results)] if args.results else [])]
        for file in files:
            read_results(file)  # a file that cannot be merged into is better found before the work than after
        # Exact laws first: one that is too large is refused before anything is drawn.
        rows = exact_part(run, nfe or run.experiment.eval.nfe) if args.exact else []
        rows += evaluate(run.method, run.domain, run.experiment, nfe=nfe, samples=samples, seed=seed)
        if args.likelihood != "none":
            names = default_conventions(run.method) if asked is None else asked
            conventions |= dict.fromkeys(names)
            with meter(sum(map(passes, names)), f"likelihoods of {folder}") as tick:
                rows += evaluate_likelihood(
                    run.method, run.domain, run.experiment, names, rows=held_out, seed=seed, tick=tick
                )
        info = RunInfo(
            command=command_line("eval", words),
            wall_s=round(time.monotonic() - began, 1),
            **describe_machine(next(run.method.parameters()).device),
        )
        results.add(info, rows)
        for file in files:
            record(file, info, rows)
    if args.json:
        print(json.dumps([vars(row) for row in results.rows], indent=1))
    else:
        for part in (results.only(convention=None), results.only(convention="exact")):
            for task, metric in dict.fromkeys((row.task, row.metric) for row in part.rows):
                print_grid(metric_grid(part, task, metric))
        print_likelihoods(results.rows, list(conventions))
    return 0


def exact_part(run: Run, nfe: Sequence[int]) -> list[Row]:
    """Rows of the exact law of a toy run, with progress."""
    from emoe.evaluation.exact_toy import exact_rows, law_work

    with meter(law_work(run.method, nfe), f"exact law of {run.path}") as tick:
        return exact_rows(run.method, run.domain, run.experiment, nfe, tick=tick)


@contextmanager
def meter(total: int, label: str, *, quiet: bool = False) -> Iterator[Tick]:
    """Show on standard error how much of `total` is done and how long the rest takes; short work says nothing."""
    from emoe.engine.runlog import Progress

    done, shown = 0, time.monotonic()
    with Progress(total, label=label, quiet=quiet) as progress:

        def tick(size: int, text: str) -> None:
            nonlocal done, shown
            done += size
            progress.update(done)
            if time.monotonic() - shown >= LINE_SECONDS:
                shown = time.monotonic()
                progress.log(done, text)

        yield tick


def print_likelihoods(rows: Sequence[Row], conventions: list[Convention]) -> None:
    """One line for each run and named likelihood: nats per row with its standard error, the other units, what it is."""
    from emoe.evaluation.tables import console_table

    lines = []
    for recipe, seed in dict.fromkeys((row.recipe, row.seed) for row in rows if row.convention is not None):
        for convention in conventions:
            mine = [row for row in rows if (row.recipe, row.seed, row.convention) == (recipe, seed, str(convention))]
            found = {row.metric: row for row in mine}
            if "nll" in found:
                gain = found.get("coordination_gain")
                lines.append(
                    [
                        f"{recipe} seed {seed}",
                        str(convention),
                        f"{found['nll'].value:.3f} ±{found['nll'].stderr or 0:.3f}",
                        f"{found['bpd'].value:.3f}",
                        f"{found['ppl'].value:.2f}",
                        convention.bounds + (f"; coordination gain {gain.value:+.3f} nats per token" if gain else ""),
                    ]
                )
    if lines:
        header = ["Likelihood", "convention", "nats per row", "bits/dim", "perplexity", "what it is"]
        console_table(header, lines)


def parse_conventions(text: str) -> list[Convention]:
    """Names of likelihoods, separated by spaces (`iw@4,64` holds a comma)."""
    from emoe.types import Convention

    try:
        return [Convention.parse(word) for word in text.split()]
    except ValueError as error:
        raise ConfigError([f"likelihood: {error}"]) from None


def read_results(path: Path) -> Results:
    """A results file, empty if there is none yet; a broken one is refused like any other bad argument."""
    from emoe.evaluation.results import Results, ResultsError

    try:
        return Results.load(path) if path.exists() else Results()
    except ResultsError as error:
        raise ConfigError(str(error).splitlines()) from None


def command_line(command: str, words: list[str]) -> str:
    """The command as a user would type it, for the record."""
    return shlex.join(["emoe", command, *words])


def cmd_verify(words: list[str]) -> int:
    """Check methods against exact laws."""
    parser = Parser(
        prog="emoe verify",
        description="Check a trained run, or random tiny models of each method, against laws computed by enumeration: "
        "probabilities, samplers, bounds and KL. Exits 1 if a check fails.",
    )
    parser.add_argument(
        "run", nargs="?", help="run folder of a model small enough to enumerate (the toy); else tiny ones"
    )
    parser.add_argument("--method", help="only this kind of tiny model: mdlm, vadd or emoe")
    parser.add_argument("--seed", default="0", help="seed of models and draws")
    parser.add_argument("--device", default="cpu", help="auto, cpu, cuda, cuda:N (default cpu)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(words)
    seed = parse_number("seed", args.seed, low=0, high=LARGEST_SEED)
    from emoe.evaluation.tables import console_table
    from emoe.methods.base import MaskedDiffusion
    from emoe.runs import load_run
    from emoe.verify import TINY, tiny_method, verify

    cases = {}
    if args.run:
        run = load_run(args.run, device=args.device)
        if not isinstance(run.method, MaskedDiffusion):
            raise ConfigError([f"run: {args.run} holds no masked diffusion model; only those have an exact law here"])
        cases[args.run] = (run.method, run.domain.fresh(20, seed))
    else:
        kinds = [args.method] if args.method else list(TINY)
        if args.method and args.method not in TINY:
            raise ConfigError([f"method: {args.method!r} has no tiny model{hint(args.method, list(TINY))}"])
        every = [[a, b] for a in (0, 1) for b in (0, 1)]
        import torch

        cases = {f"tiny {kind}": (tiny_method(kind, seed), torch.tensor(every)) for kind in kinds}
    lines, failed = [], 0
    for name, (method, rows) in cases.items():
        for check in verify(method, rows, seed=seed):
            failed += not check.passed
            lines.append({"model": name, "check": check.name, "passed": check.passed, "seen": check.seen})
            if not args.json:
                print(f"{name}: {check.name}: {'ok' if check.passed else 'FAILED'}", file=sys.stderr, flush=True)
    if args.json:
        print(json.dumps(lines, indent=1))
    else:
        table = [[line["model"], line["check"], "ok" if line["passed"] else "FAILED", line["seen"]] for line in lines]
        console_table(["model", "check", "", "seen"], table)
        print(f"{len(lines) - failed} of {len(lines)} checks passed")
    return 1 if failed else 0


def cmd_reproduce(words: list[str]) -> int:
    """Run a table of the paper."""
    studies = {
        "toy": "Table 2 and the figures of App. C.1",
        "likelihood": "named likelihoods against the exact NLL (docs/likelihood.md)",
        "information": "where the latent's nats go, by block and position, in the course of training",
        "route-limit": "what the best route code could do on the toy densities",
        "held-out": "E-MoE and E-MoE+ on densities that no setting was chosen on, exact laws",
        "scaling": "rows of tied symbols of growing length, for several ways to learn the latent",
        "estimators": "bias, spread and cost of estimators of the latent (docs/learning-the-latent.md)",
    }
    if not words or words[0] in ("-h", "--help"):
        lines = [f"  {name:<12}{text}" for name, text in studies.items()]
        print("\n".join(["usage: emoe reproduce STUDY [...]", "", "studies:", *lines]))
        return 0
    if words[0] not in studies:
        raise ConfigError([f"study: {words[0]!r} is not known{hint(words[0], list(studies))}"])
    import importlib

    return int(importlib.import_module(f"emoe.studies.{words[0].replace('-', '_')}").main(words[1:]))


def cmd_demo(words: list[str]) -> int:
    """Run the demo."""
    from emoe.studies import demo

    return demo.main(words)


def cmd_sweep(words: list[str]) -> int:
    """Search over settings."""
    from emoe.studies import sweep

    return sweep.main(words)


def cmd_report(words: list[str]) -> int:
    """Write a report."""
    parser = Parser(prog="emoe report", description="Write a self-contained HTML report from a results file.")
    parser.add_argument(
        "results", nargs="?", default="results/toy.json", help="results file (default results/toy.json)"
    )
    parser.add_argument("--out", help="where the report goes; default: beside the results, ending in .html")
    parser.add_argument("--picture", action="append", default=[], help="an image to show; may be given several times")
    parser.add_argument("--run", action="append", default=[], help="a run folder whose curves are shown; may repeat")
    parser.add_argument("--title", default="E-MoE results", help="heading")
    args = parser.parse_args(words)
    source = Path(args.results)
    pictures, runs = [Path(picture) for picture in args.picture], [Path(run) for run in args.run]
    problems = [f"results: {source} does not exist; make it with: emoe reproduce toy"] * (not source.exists())
    problems += [f"picture: {picture} does not exist" for picture in pictures if not picture.is_file()]
    problems += [f"run: {run} is no run folder" for run in runs if not (run / "experiment.json").exists()]
    if problems:
        raise ConfigError(problems)
    results = read_results(source)
    from emoe.studies.demo import write_toy_report

    out = Path(args.out) if args.out else source.with_suffix(".html")
    write_toy_report(out, args.title, results, pictures, runs)
    print(out)
    return 0
