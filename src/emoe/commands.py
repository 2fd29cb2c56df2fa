"""What each command of the command line does."""

from __future__ import annotations

import json
import math
import re
import shlex
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from emoe.cli import Parser
from emoe.config import Config, ConfigError, allowed_range, hint, paths, to_dict, type_name
from emoe.console import LINE_SECONDS, count_calls, meter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from emoe.console import Tick
    from emoe.evaluation.pools import Pool
    from emoe.judges import Comparison
    from emoe.reporting.results import Results, Row
    from emoe.runs import Run
    from emoe.types import Convention

FIELDS = ("name", "seed", "domain", "backbone", "method", "optim", "train", "eval")  # of an experiment, without a dot
INKS = ("auto", "dark", "light")
LARGEST_SEED = 2**63 - 1
FROM_FILES = ("mnist",)  # studies that read data files, and have --data-root
PICTURED = 1_000  # rows of real data beside samples in a picture


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
    parser = Parser(
        prog="emoe list",
        description="Show all recipes, or every field of one.",
        examples=["emoe list", "emoe list toy-8modes-emoe"],
    )
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
        examples=[
            "emoe train toy-8modes-emoe --run runs/a --train.steps 2000",
            "emoe train rows-emoe --domain.path data.npy --run runs/b",
        ],
    )
    parser.add_argument("recipe", help="name of a recipe (emoe list)")
    parser.add_argument("--run", help="run folder; default runs/RECIPE-seedN")
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint, if there is one")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    parser.add_argument("--tensorboard", action="store_true", help="also write TensorBoard events into the run folder")
    add_data_root(parser)
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON")
    args, unknown = parser.parse_known_args([word for word in rest if not (wants_fields and word in ("-h", "--help"))])
    from emoe.experiment import customise
    from emoe.recipes import get_recipe

    recipe = get_recipe(args.recipe)
    parser.refuse(unknown, [path.replace("_", "-") for path, *_ in paths(recipe)])
    with told_data_root(args.data_root, settings):
        experiment = customise(recipe, settings)
    if wants_fields:
        parser.print_help()
        print(f"\nfields of {args.recipe} and their values:")
        print_fields(experiment)
        return 0
    from emoe.engine.distributed import launched
    from emoe.runs import train

    folder = args.run or f"runs/{experiment.name.replace(' ', '_')}-seed{experiment.seed}"
    run = train(
        experiment, folder, resume=args.resume, device=args.device, quiet=args.quiet, tensorboard=args.tensorboard
    )
    assert run.result is not None
    outcome = {"run": str(run.path), "step": run.step, "steps": experiment.train.steps, "seconds": run.result.seconds}
    if launched()[0] != 0:
        pass  # of several processes the first one speaks
    elif args.json:
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


def add_data_root(parser: Parser) -> None:
    """The option that names the folder of data files."""
    parser.add_argument("--data-root", help="folder with data files (MNIST); default: EMOE_DATA, then ./data")


@contextmanager
def told_data_root(folder: str | None, settings: dict[str, str]) -> Iterator[None]:
    """Add `--data-root` to the settings as the domain's root, and explain it where the domain has none."""
    if folder is None:
        yield
        return
    if "domain.root" in settings:
        raise ConfigError(["data-root: is the same as --domain.root; give one of them"])
    settings["domain.root"] = folder
    try:
        yield
    except ConfigError as error:
        lost = "data-root: the data of this run come from no such folder; leave it out"
        raise ConfigError(
            [lost if line.startswith("domain.root: no such field") else line for line in error.problems]
        ) from None


def sample_parser() -> Parser:
    """The options of `emoe sample`."""
    parser = Parser(
        prog="emoe sample",
        description="Draw rows from a trained run, or complete rows of which a part is --given: tokens that are kept "
        "stay, all others are drawn. Of a run on text, samples are text, and so is what is given: [MASK] is a hole of "
        "one token, {5} of five, ___ of all the room that is left in the row; what follows the text is drawn too. "
        "--method.route-tau 0 makes E-MoE's routes greedy (the ablation).",
        examples=[
            "emoe sample runs/toy --n 1000 --nfe 2 --out samples.npy --picture samples.png",
            "emoe sample runs/toy --given 12,? --n 5                       the second token for a first one of 12",
            "emoe sample runs/rows --given rows.csv --keep 0-3 --nfe 4     positions 0 to 3 stay",
            "emoe sample runs/digits --given a.png b.png --keep top-half --nfe 16 --n 8 --picture filled.png",
            "emoe sample runs/news --given 'the minister {3} on friday.' --nfe 16    three tokens, and what follows",
            "emoe sample runs/news --continue 'the minister said' --nfe 32 --n 3",
        ],
    )
    parser.add_argument("run", help="run folder")
    parser.add_argument("--n", default="10", help="number of rows, or of completions of each given row (default 10)")
    parser.add_argument("--nfe", help="network calls; default: the fewest of the recipe's eval.nfe, most often 1")
    parser.add_argument("--seed", default="0", help="seed of the draw (default 0)")
    parser.add_argument("--out", help="write an .npy file instead of printing")
    parser.add_argument(
        "--picture", help="also draw the samples into this .png beside the real data, or the rows they complete"
    )
    parser.add_argument(
        "--given",
        nargs="+",
        action="extend",
        help="what to complete: .png images of the model's size; or .npy or .csv files, or rows such as 12,? in which "
        "?, an empty cell or -1 is wanted (--given=-1,5 where one begins with a minus); or text with holes, or .txt "
        "files with one such text in a line",
    )
    parser.add_argument(
        "--continue", dest="continued", nargs="+", action="extend", help="the same for beginnings, without holes"
    )
    parser.add_argument(
        "--keep",
        help="what stays of the given rows: positions such as 0-9,20, or none; of images also top-half, bottom-half, "
        "left-half, right-half, centre, border, or a .png mask (white stays). Default: all tokens that are given",
    )
    parser.add_argument("--ink", default="auto", help="ink of .png images: dark, light, or auto (default)")
    add_data_root(parser)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def cmd_sample(words: list[str]) -> int:
    """Draw samples, or complete given rows."""
    rest, settings = split_settings(words)
    args = sample_parser().parse_args(rest)
    count = parse_number("n", args.n, high=10_000_000)
    steps = None if args.nfe is None else parse_number("nfe", args.nfe)
    seed = parse_number("seed", args.seed, low=0, high=LARGEST_SEED)
    if args.ink not in INKS:
        raise ConfigError([f"ink: {args.ink!r} is not known{hint(args.ink, list(INKS))}"])
    if args.given is not None and args.continued is not None:
        raise ConfigError(["continue: is another way of giving rows; give either --given or --continue"])
    source = args.given or args.continued
    if source is None and (args.keep is not None or args.ink != "auto"):
        name = "ink" if args.keep is None else "keep"
        raise ConfigError([f"{name}: says what is done with given rows; add --given FILE"])
    from emoe.runs import load_run

    with told_data_root(args.data_root, settings):
        run = load_run(args.run, device=args.device, settings=settings)
    steps = min(run.experiment.eval.nfe) if steps is None else steps
    told: dict[str, object] = {"nfe": steps}
    if source is None:
        from emoe.evaluation.evaluate import fresh_count
        from emoe.evaluation.pools import draw_pool

        with sampling(run, count, (steps,), f"samples of {args.run}", quiet=args.quiet):
            config = run.experiment.eval
            samples = draw_pool(run.method, count, steps, seed, batch=config.batch, sampler=config.sampler).samples
        if args.picture:
            fresh = run.domain.fresh(fresh_count(run.domain, max(count, PICTURED)), seed)
            run.domain.picture({"real data": fresh, f"NFE {steps}": samples}, Path(args.picture))
    else:
        from emoe.completion import check_beginnings, fill_in, prepare

        space, domain = run.method.space, run.experiment.domain
        rows, given = prepare(space, domain, source, keep=args.keep, ink=args.ink)
        if args.continued is not None:
            check_beginnings(given, space)
        with sampling(run, count * len(rows), (steps,), f"completions by {args.run}", quiet=args.quiet):
            found = fill_in(run, rows, given, count, steps, seed)
        samples = found.pool
        told["given"] = found.given.where(found.kept, -1).tolist()
        if args.picture:
            found.picture(args.picture)
    show_samples(samples, run, told, args.out, as_json=args.json)
    return 0


def show_samples(samples: Tensor, run: Run, told: dict[str, object], out: str | None, *, as_json: bool) -> None:
    """Write samples into a file, or print them: as text where the domain has words for them."""
    domain = run.experiment.domain
    if out:
        import numpy as np

        out = out if out.endswith(".npy") else f"{out}.npy"
        np.save(out, samples.numpy())
        print(f"{out}: {len(samples)} rows, NFE {told['nfe']}", file=sys.stderr)
        if as_json:
            print(json.dumps({**told, "out": out}))
    elif as_json:
        written = {"text": domain.write(samples)} if domain.has_words else {}
        print(json.dumps({**told, "samples": samples.tolist(), **written}))
    else:
        for line in domain.write(samples):
            print(line)


@contextmanager
def sampling(run: Run, rows: int, nfe: Sequence[int], label: str, *, quiet: bool = False) -> Iterator[None]:
    """Show how many of the network calls are made that draw `rows` rows for each NFE; a bar after a few seconds."""
    calls = sum(nfe) * -(-rows // run.experiment.eval.batch)
    with (
        meter(calls, label, quiet=quiet, patience=LINE_SECONDS) as tick,
        count_calls(run.method.backbone, tick),
    ):
        yield


def eval_parser() -> Parser:
    """The options of `emoe eval`."""
    parser = Parser(
        prog="emoe eval",
        description="Draw samples at each NFE and measure them, and estimate named likelihoods. One or more runs.",
        examples=[
            "emoe eval runs/a runs/b --nfe 1,2,4",
            "emoe eval runs/a --likelihood 'bound@4 iw@4,64' --rows 500",
            "emoe eval runs/news --judge models/gpt2-large --nfe 1,8    generative perplexity, entropy beside it",
        ],
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
    parser.add_argument(
        "--judge",
        metavar="FOLDER",
        help="text: also the perplexity of the samples under a judge, a run of 'ar' or a Hugging Face model",
    )
    parser.add_argument("--rows", help="held-out rows for likelihoods (default 2000, or all where there are fewer)")
    parser.add_argument("--results", help="also merge the rows into this results file")
    add_data_root(parser)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    return parser


def cmd_eval(words: list[str]) -> int:
    """Measure a run."""
    rest, settings = split_settings(words)
    args = eval_parser().parse_args(rest)
    nfe = None if args.nfe is None else parse_numbers("nfe", args.nfe)
    samples = None if args.samples is None else parse_number("samples", args.samples, low=2, high=10_000_000)
    seed = None if args.seed is None else parse_number("seed", args.seed, low=0, high=LARGEST_SEED)
    held_out = None if args.rows is None else parse_number("rows", args.rows, high=10_000_000)
    asked = parse_conventions(args.likelihood) if args.likelihood not in (None, "none") else None
    from emoe.evaluation.evaluate import evaluate
    from emoe.evaluation.likelihood import default_conventions
    from emoe.reporting.provenance import describe_machine
    from emoe.reporting.render import print_metrics
    from emoe.reporting.results import Results, RunInfo, record
    from emoe.runs import load_run

    results = Results()
    conventions: dict[Convention, None] = {}
    for folder in args.runs:
        began = time.monotonic()
        mine = dict(settings)
        with told_data_root(args.data_root, mine):
            run = load_run(folder, device=args.device, settings=mine)
        files = [*([run.eval_file] if run.eval_file else []), *([Path(args.results)] if args.results else [])]
        for file in files:
            read_results(file)  # a file that cannot be merged into is better found before the work than after
        # Exact laws first: one that is too large is refused before anything is drawn.
        config = run.experiment.eval
        rows = exact_part(run, nfe or config.nfe) if args.exact else []
        judged = judge_part(run, args.judge, args.device) if args.judge else None
        with sampling(run, samples or config.samples, nfe or config.nfe, f"samples of {folder}"):
            rows += evaluate(run.method, run.domain, run.experiment, nfe=nfe, samples=samples, seed=seed, keep=judged)
        rows += judged.rows if judged is not None else []
        if args.likelihood != "none":
            names = default_conventions(run.method) if asked is None else asked
            conventions |= dict.fromkeys(names)
            rows += likelihood_part(run, names, held_out, seed)
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
        # Likelihoods, which belong to no NFE, have a table of their own.
        for part in (results.only(convention=None), results.only(convention="exact"), results.only(metric="gen_ppl")):
            for task, metric in dict.fromkeys((row.task, row.metric) for row in part.rows if row.nfe is not None):
                print_metrics(part, task, [metric])
        print_likelihoods(results.rows, list(conventions))
    return 0


class Judging:
    """Scores every pool that it is called with; `rows` are the perplexities, and the judge's own of held-out rows."""

    def __init__(self, run: Run, comparison: Comparison):
        self.run, self.comparison = run, comparison
        self.rows: list[Row] = []

    def __call__(self, pool: Pool) -> None:
        """Score a pool."""
        from emoe.evaluation.evaluate import make_row

        for item in self.comparison.measure(pool.samples, nfe=pool.nfe, seeds=()).measurements:
            known = any(row.metric == item.metric == "judge_ppl" for row in self.rows)
            if not known:
                nfe = pool.nfe if item.metric == "gen_ppl" else None
                name = self.comparison.setting.name
                self.rows.append(
                    make_row(item, self.run.domain, self.run.experiment, nfe=nfe, convention=name)
                )  # fmt: skip
                if nfe is None:
                    told = f"perplexity {item.value:.2f} of {item.n:,} held-out rows of {self.run.domain.name}"
                    print(f"judge {self.comparison.judge.name}: {told}", file=sys.stderr)


def judge_part(run: Run, folder: str, device: str) -> Judging:
    """A judge of the samples of a run on text, opened before anything is drawn."""
    from emoe.domains.text.data import Text
    from emoe.judges import Comparison, open_judge

    if not isinstance(run.domain, Text):
        raise ConfigError([f"judge: {run.path} was not trained on text; leave it out"])
    judge = open_judge(folder, device=device, text=run.domain)
    judge.encode(run.domain, run.domain.test_rows[:1].long())  # one that reads other tokens is refused here
    return Judging(run, Comparison(judge, run.domain))


def likelihood_part(run: Run, names: Sequence[Convention], rows: int | None, seed: int | None) -> list[Row]:
    """Rows of named likelihoods, with progress."""
    from emoe.evaluation.evaluate import evaluate_likelihood
    from emoe.evaluation.likelihood import passes

    with meter(sum(map(passes, names)), f"likelihoods of {run.path}") as tick:
        return evaluate_likelihood(run.method, run.domain, run.experiment, names, rows=rows, seed=seed, tick=tick)


def exact_part(run: Run, nfe: Sequence[int]) -> list[Row]:
    """Rows of the exact law of a toy run, with progress."""
    from emoe.evaluation.exact_toy import exact_rows, law_work

    with meter(law_work(run.method, nfe), f"exact law of {run.path}") as tick:
        return exact_rows(run.method, run.domain, run.experiment, nfe, tick=tick)


def print_likelihoods(rows: Sequence[Row], conventions: list[Convention]) -> None:
    """One line for each run and named likelihood: nats per row with its standard error, other units, what it is."""
    from emoe.console import console_table

    lines = []
    for recipe, seed in dict.fromkeys((row.recipe, row.seed) for row in rows if row.convention is not None):
        for convention in conventions:
            mine = [row for row in rows if (row.recipe, row.seed, row.convention) == (recipe, seed, str(convention))]
            found = {row.metric: row for row in mine}
            if nll := found.get("nll"):
                gain = found.get("coordination_gain")
                lines.append(
                    [
                        f"{recipe} seed {seed}",
                        str(convention),
                        f"{nll.value:.3f}" + ("" if nll.stderr is None else f" ±{nll.stderr:.3f}"),
                        f"{found['bpd'].value * math.log(2):.4f}",
                        f"{found['bpd'].value:.3f}",
                        f"{found['ppl'].value:.2f}",
                        convention.bounds + (f"; coordination gain {gain.value:+.3f} nats per token" if gain else ""),
                    ]
                )
    if lines:
        header = ["Likelihood", "convention", "nats per row", "nats per token", "bits/dim", "perplexity", "what it is"]
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
    from emoe.reporting.results import Results, ResultsError

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
        examples=["emoe verify", "emoe verify runs/toy", "emoe verify --method emoe --seed 3"],
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
    from emoe.console import console_table
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
        "mnist": "the MNIST table: bits per dimension under named conventions, samples over NFE, a film",
        "digits": "the same on small digits that come with the package, in minutes on a CPU",
        "text": "the LM1B tables on text of your own: likelihoods, Gen-PPL with entropy, MAUVE, the collapse ablation",
    }
    if not words or words[0] in ("-h", "--help"):
        lines = [f"  {name:<12}{text}" for name, text in studies.items()]
        last = ["examples:", "  emoe reproduce toy --seeds 0 --train.steps 500", "  emoe reproduce toy --help"]
        print("\n".join(["usage: emoe reproduce STUDY [...]", "", "studies:", *lines, "", *last]))
        return 0
    if words[0] not in studies:
        raise ConfigError([f"study: {words[0]!r} is not known{hint(words[0], list(studies))}"])
    if words[0] not in FROM_FILES and any(word.partition("=")[0] == "--data-root" for word in words):
        raise ConfigError([f"data-root: {words[0]!r} needs no data files; leave it out"])
    if words[0] in ("mnist", "digits"):
        from emoe.studies import images

        return images.main(words[1:], words[0])
    import importlib

    return int(importlib.import_module(f"emoe.studies.{words[0].replace('-', '_')}").main(words[1:]))


def cmd_release(words: list[str]) -> int:
    """Export weights."""
    from emoe.pretrained import release_command

    return release_command(words)


def cmd_demo(words: list[str]) -> int:
    """Run the demo."""
    from emoe.studies import demo

    return demo.main(words)


def cmd_sweep(words: list[str]) -> int:
    """Search over settings."""
    from emoe.studies import sweep

    return sweep.main(words)


def cmd_data(words: list[str]) -> int:
    """Fetch, check or pack data files, or prepare text."""
    if words[:1] == ["prepare"]:
        return prepare_text(words[1:])
    parser = Parser(
        prog="emoe data",
        description="mnist: download the four files of MNIST into DATA-ROOT/mnist, or check those that are there. "
        "pack: write MNIST in black and white as one file of 2 MB, mnist-packed.npz, whose folder can be a data root "
        "on another machine. prepare: turn text into rows of tokens, see emoe data prepare --help.",
        examples=[
            "emoe data mnist",
            "emoe data mnist --data-root ~/data",
            "emoe data pack --out packed",
            "emoe data prepare news/ --tokenizer bert/vocab.txt --out sets/news",
        ],
    )
    parser.add_argument("what", metavar="mnist|pack|prepare", help="what to do")
    parser.add_argument("--out", help="pack: the folder to write into")
    add_data_root(parser)
    parser.add_argument("--quiet", action="store_true", help="no progress")
    args = parser.parse_args(words)
    if args.what not in ("mnist", "pack"):
        raise ConfigError([f"data: {args.what!r} is not known{hint(args.what, ['mnist', 'pack', 'prepare'])}"])
    if (args.what == "pack") != (args.out is not None):
        told = "give the folder to write into: --out DIR" if args.what == "pack" else "is for pack; use --data-root"
        raise ConfigError([f"out: {told}"])
    from emoe.domains.images import files
    from emoe.domains.images.data import write_packed

    root = files.data_root(args.data_root)
    if args.what == "pack":
        path = write_packed(root, Path(args.out))
        print(f"{path}: {path.stat().st_size / 1e6:.1f} MB; use it with --data-root {shlex.quote(str(path.parent))}")
        return 0
    folder = root or files.LOCAL
    if files.is_complete(folder):
        print(f"{folder}: all {len(files.ORIGINAL)} files of MNIST are there and checked; nothing to download")
        return 0
    fetched: dict[str, int] = {}
    with download_meter(args.quiet) as show:

        def note(name: str, size: int, total: int) -> None:
            fetched[name] = size
            show(name, size, total)

        files.download_mnist(folder, on_progress=note)
    amount = sum(fetched.values()) / 1e6
    print(f"{folder / 'mnist'}: {len(fetched)} files downloaded ({amount:.1f} MB), all {len(files.ORIGINAL)} checked")
    if args.data_root:
        print(f"next: emoe train ... --data-root {shlex.quote(args.data_root)}, or export EMOE_DATA to name it once")
    return 0


def prepare_parser() -> Parser:
    """The arguments of `emoe data prepare`."""
    parser = Parser(
        prog="emoe data prepare",
        description="Turn text into packed rows of tokens. Inputs are text files, also packed (.gz, .xz, .bz2) or in "
        "archives (.tar, .tar.gz), or folders of them; one line is a sentence or paragraph, empty lines separate "
        "documents. Names such as train, valid and test, and those of the One Billion Word benchmark, tell the split. "
        "A run that was stopped goes on when it is started again.",
        examples=[
            "emoe data prepare news/ --tokenizer bert/vocab.txt --out sets/news",
            "emoe data prepare book.txt --split 0.01,0.01 --tokenizer bert --out sets/book",
            "emoe data prepare 1-billion-word-language-modeling-benchmark-r13output.tar.gz --tokenizer bert "
            "--packing wrap --out sets/lm1b",
            "emoe data prepare --train a.txt.gz b.txt.xz --test c.txt --tokenizer bert --out sets/mine",
        ],
    )
    parser.add_argument("inputs", nargs="*", help="files and folders whose names tell the split")
    for split, use in (("train", "train on"), ("valid", "validate with"), ("test", "test with")):
        parser.add_argument(f"--{split}", nargs="+", default=[], metavar="FILE", help=f"files and folders to {use}")
    parser.add_argument("--out", required=True, help="the folder to write")
    parser.add_argument("--tokenizer", required=True, help="BERT's vocab.txt or tokenizer.json, or its folder")
    parser.add_argument("--split", metavar="V,T", help="shares of training documents for valid and test: 0.005,0.005")
    parser.add_argument("--length", default="128", help="tokens of a row (default 128)")
    parser.add_argument(
        "--packing", default="chunks", help="chunks (default): plain rows; wrap: rows with [CLS] at both ends"
    )
    parser.add_argument(
        "--detokenise", default="auto", help="spacing to undo: auto (default, by file names), lm1b, wikitext, none"
    )
    parser.add_argument(
        "--encoding-errors", default="strict", help="bytes that are not UTF-8: strict (default), replace"
    )
    parser.add_argument("--seed", default="0", help="seed of --split")
    parser.add_argument("--jobs", help="processes; default: one for each core")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    return parser


def prepare_text(words: list[str]) -> int:
    """Turn text into packed rows of tokens."""
    args = prepare_parser().parse_args(words)
    from emoe.config import override
    from emoe.domains.text.prepare import PrepareConfig, prepare

    names = ("split", "length", "packing", "detokenise", "encoding_errors", "seed", "jobs")
    config = override(PrepareConfig(), {name: getattr(args, name) for name in names if getattr(args, name) is not None})
    began, past, read = time.monotonic(), 0, 0
    with ExitStack() as stack:
        tick: Tick | None = None

        def show(size: int, total: int, text: int) -> None:
            nonlocal tick, past, read
            if tick is None:
                tick = stack.enter_context(meter(total // 1000, f"{args.out} (kB of files)", quiet=args.quiet))
            read += text
            speed = f"{read / 1e6 / max(time.monotonic() - began, 1e-9):.2f} MB/s of text"
            tick((past + size) // 1000 - past // 1000, speed)
            past += size

        splits = {name: [Path(path) for path in getattr(args, name)] for name in ("train", "valid", "test")}
        done = prepare(
            Path(args.out),
            Path(args.tokenizer),
            [Path(path) for path in args.inputs],
            config=config,
            on_progress=show,
            note=lambda text: print(f"emoe data: {text}", file=sys.stderr),
            **splits,
        )
    for name, split in done.manifest["splits"].items():
        print(
            f"{name}: {split['rows']:,} rows of {done.manifest['length']} tokens, {split['documents']:,} documents, "
            f"{100 * split['unknown_share']:.3f}% of the tokens unknown"
        )
    work = f"{done.made} parts made, {done.kept} kept" if done.made + done.kept else "is there already, nothing to do"
    print(f"{done.path}: {work}; train on it with --domain text --domain.path {shlex.quote(str(done.path))}")
    return 0


@contextmanager
def download_meter(quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """Show on standard error what is downloaded: a bar for each file on a terminal, else a line every few seconds."""
    from emoe.console import Progress

    shown: dict[str, Progress] = {}
    told = time.monotonic()

    def show(name: str, size: int, total: int) -> None:
        if name not in shown:
            for before in shown.values():
                before.close()
            shown[name] = Progress(total // 1000, label=f"{name} (kB)", quiet=quiet).__enter__()
        shown[name].update(size // 1000)
        nonlocal told
        if size >= total or time.monotonic() - told >= LINE_SECONDS:
            told = time.monotonic()
            shown[name].log(size // 1000)

    try:
        yield show
    finally:
        for progress in shown.values():
            progress.close()


def cmd_report(words: list[str]) -> int:
    """Write a report."""
    parser = Parser(
        prog="emoe report",
        description="Write a self-contained HTML report from a results file or a run folder that was evaluated.",
        examples=["emoe report results/toy.json --run runs/a --picture results/figures/toy-summary.png"],
    )
    parser.add_argument(
        "results", nargs="?", default="results/toy.json", help="results file or run folder (default results/toy.json)"
    )
    parser.add_argument("--out", help="where the report goes; default: beside the results, ending in .html")
    parser.add_argument("--picture", action="append", default=[], help="an image to show; may be given several times")
    parser.add_argument("--run", action="append", default=[], help="a run folder whose curves are shown; may repeat")
    parser.add_argument("--title", default="E-MoE results", help="heading")
    args = parser.parse_args(words)
    source = Path(args.results)
    pictures, runs = [Path(picture) for picture in args.picture], [Path(run) for run in args.run]
    if (source / "experiment.json").exists():
        runs, source = [source, *runs], source / "eval.json"
    made = f"emoe eval {source.parent}" if source.name == "eval.json" else "emoe reproduce toy"
    problems = [f"results: {source} does not exist; make it with: {made}"] * (not source.exists())
    problems += [f"picture: {picture} does not exist" for picture in pictures if not picture.is_file()]
    problems += [f"run: {run} is no run folder" for run in runs if not (run / "experiment.json").exists()]
    if problems:
        raise ConfigError(problems)
    results = read_results(source)
    from emoe.reporting.html import write_page

    out = Path(args.out) if args.out else source.with_suffix(".html")
    captions = {picture: picture.stem.replace("-", " ") for picture in pictures}
    write_page(out, args.title, results, pictures=captions, runs=runs)
    print(out)
    return 0
