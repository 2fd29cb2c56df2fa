"""`emoe eval`: samples and likelihoods of runs; `emoe verify`: checks against exact laws; `emoe report`: a page."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping, Sequence
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from emoe.commands import args
from emoe.commands.args import Range, Rows, Seed
from emoe.commands.sample import sampling
from emoe.config import ConfigError
from emoe.console import console_table, meter

if TYPE_CHECKING:
    from emoe.evaluation.eval_lm import EvalLM
    from emoe.reporting.results import Results, Row
    from emoe.runs.run import Run
    from emoe.runs.sampling import Pool


@args.command("emoe eval")
def evaluate(
    runs: tuple[str, ...],
    *,
    nfe: Annotated[tuple[int, ...] | None, Range(1, 10_000)] = None,
    samples: Annotated[int | None, Range(2, 10_000_000)] = None,
    seed: Seed | None = None,
    likelihood: str | None = None,
    exact: bool = False,
    eval_lm: Annotated[str | None, "--judge"] = None,
    rows: Rows | None = None,
    results: Path | None = None,
    data_root: str | None = None,
    device: str = "auto",
    json: bool = False,
    settings: Mapping[str, str],
    command: str,
) -> int:
    """Draw samples at each NFE and measure them, and estimate named likelihoods. One or more runs.

    Args:
        runs: run folders
        nfe: numbers of network calls, such as 1,2,4; default: the recipe's
        samples: rows for each NFE; default: the recipe's
        seed: seed of the draws; default: the run's
        likelihood: named likelihoods, such as 'objective bound@4 iw@4,64 nelbo'; none = leave them out (default: a few)
        exact: toy: also the exact law at each NFE, without sampling noise
        eval_lm (FOLDER): text: also the perplexity of the samples under a language model, a run of 'ar' or a Hugging
            Face model
        rows: held-out rows for likelihoods (default 2000, or all where there are fewer)
        results: also merge the rows into this results file
        json: print the rows as JSON

    Examples:
        emoe eval runs/a runs/b --nfe 1,2,4
        emoe eval runs/a --likelihood 'bound@4 iw@4,64' --rows 500
        emoe eval runs/news --eval-lm models/gpt2-large --nfe 1,8    generative perplexity, entropy beside it
    """
    from emoe.evaluation.measure import described, exact_rows, measure_likelihoods, passes
    from emoe.exact.laws import law_work
    from emoe.reporting.provenance import describe_machine
    from emoe.reporting.results import Results, Row, RunInfo, record
    from emoe.runs.train import load_run
    from emoe.types import Likelihood

    try:
        asked = [Likelihood.parse(word) for word in (likelihood or "").split() if word != "none"]
    except ValueError as error:
        raise ConfigError([f"likelihood: {error}"]) from None
    everything, likelihoods = Results(), []
    for folder in runs:
        began = time.monotonic()
        run = load_run(folder, device=device, settings=args.with_data_root(settings, data_root))
        files = [path for path in (run.eval_file, results) if path is not None]
        for path in filter(Path.exists, files):
            Results.load(path)  # a file that cannot be merged into is refused before the work
        names = [Likelihood.parse(name) for name in run.method.likelihoods()] if likelihood is None else asked
        # The evaluation LM and the exact law come first: they can be refused.
        lm = None if eval_lm is None else text_lm(run, eval_lm, device)
        steps, measured = nfe or run.experiment.eval.nfe, list[Row]()
        if exact:
            with meter(law_work(run.method, steps), f"exact law of {run.path}") as tick:
                measured += exact_rows(run, steps, tick=tick)
        measured += sample_rows(run, steps, samples, seed, lm)
        if names:
            with meter(sum(map(passes, names)), f"likelihoods of {run.path}") as tick:
                measured += measure_likelihoods(run, names, rows=rows, seed=seed, tick=tick)
        info = RunInfo(command=command, wall_s=round(time.monotonic() - began, 1), **describe_machine(run.device))
        methods = described(run)
        everything.add(info, measured, methods)
        for path in files:
            record(path, info, measured, methods)
        likelihoods += [row for row in measured if row.metric == "nll" and row.nfe is None]
    if json:
        print(dumps([vars(row) for row in everything.rows], indent=1))
    else:
        show(everything, likelihoods)
    return 0


def text_lm(run: Run, folder: str, device: str) -> EvalLM:
    """An evaluation LM that reads the tokens of a run on text."""
    from emoe.domains.text.data import Text
    from emoe.evaluation.eval_lm import open_eval_lm

    if not isinstance(run.domain, Text):
        raise ConfigError([f"eval-lm: {run.path} was not trained on text; leave it out"])
    lm = open_eval_lm(folder, device=device)
    lm.encode(run.domain, run.domain.test_rows[:1].long())
    return lm


def sample_rows(run: Run, nfe: Sequence[int], samples: int | None, seed: int | None, lm: EvalLM | None) -> list[Row]:
    """Measures of samples at each NFE; with an evaluation LM also their perplexity and that of held-out rows."""
    from emoe.evaluation.gen_ppl import score
    from emoe.evaluation.measure import fields_of, held_out_rows, rows_of

    domain: Any = run.domain
    pools: list[Pool] = []
    with sampling(run, samples or run.experiment.eval.samples, nfe, f"samples of {run.path}"):
        rows = run.evaluate(nfe=nfe, samples=samples, seed=seed, keep=pools.append)
    if lm is None:
        return rows
    held_out = score(lm, domain, held_out_rows(domain, None, 0)).perplexity("judge_ppl")
    shown = f"{held_out.value:.2f} of {held_out.n:,} held-out rows of {domain.name}"
    print(f"evaluation LM {lm.name}: perplexity {shown}", file=sys.stderr)
    scored = [(pool.nfe, score(lm, domain, pool.samples).perplexity()) for pool in pools]
    for calls, item in [*scored, (None, held_out)]:
        rows += rows_of(fields_of(domain, run.experiment, nfe=calls), {"paper": [item]})
    return rows


def show(results: Results, likelihoods: Sequence[Row]) -> None:
    """Print a table for each metric over NFE, and one of the likelihoods, given by their rows of `nll`."""
    from emoe.reporting.table import print_metrics
    from emoe.types import Likelihood

    for part in (results.only(convention=None), results.only(convention="exact"), results.only(metric="gen_ppl")):
        for task, metric in dict.fromkeys((row.task, row.metric) for row in part.rows if row.nfe is not None):
            print_metrics(part, task, [metric])
    lines = []
    for nll in likelihoods:
        name, same = str(nll.convention), {"recipe": nll.recipe, "seed": nll.seed, "convention": nll.convention}
        values = {row.metric: row.value for row in results.select(**same)}
        error = "" if nll.stderr is None else f" ±{nll.stderr:.3f}"
        meaning = Likelihood.parse(name).bounds
        if "coordination_gain" in values:
            meaning += f"; coordination gain {values['coordination_gain']:+.3f} nats per token"
        units = [f"{values['bpd'] * math.log(2):.4f}", f"{values['bpd']:.3f}", f"{values['ppl']:.2f}"]
        lines.append([f"{nll.recipe} seed {nll.seed}", name, f"{nll.value:.3f}{error}", *units, meaning])
    if lines:
        header = ["Likelihood", "convention", "nats per row", "nats per token", "bits/dim", "perplexity", "what it is"]
        console_table(header, lines)


@args.command("emoe verify")
def verify(
    run: str | None = None, *, method: str | None = None, seed: Seed = 0, device: str = "cpu", json: bool = False
) -> int:
    """Check a trained run, or random tiny models of each method, against laws computed by enumeration.

    Probabilities, samplers, bounds and KL. Exits 1 if a check fails.

    Args:
        run: run folder of a model small enough to enumerate (the toy); else tiny ones
        method: only this kind of tiny model, such as mdlm, vadd or emoe
        seed: seed of models and draws

    Examples:
        emoe verify
        emoe verify runs/toy
        emoe verify --method emoe --seed 3
    """
    import torch

    from emoe.exact import checks
    from emoe.runs.train import load_run

    if run is not None:
        opened = load_run(run, device=device)
        cases = {run: (opened.method, opened.domain.fresh(20, seed))}
    else:
        rows = torch.cartesian_prod(*[torch.arange(2)] * 2)
        cases = {f"tiny {kind}": (tiny, rows) for kind, tiny in checks.tiny_methods(method, seed).items()}
    lines: list[dict[str, Any]] = []
    for name, (model, rows) in cases.items():
        for check in checks.verify(model, rows, seed=seed):
            lines.append({"model": name, "check": check.name, "passed": check.passed, "seen": check.seen})
            if not json:
                print(f"{name}: {check.name}: {'ok' if check.passed else 'FAILED'} ({check.seen})", flush=True)
    passed = sum(line["passed"] for line in lines)
    print(dumps(lines, indent=1) if json else f"{passed} of {len(lines)} checks passed")
    return int(passed < len(lines))


@args.command("emoe report")
def report(
    results: Path = Path("results/toy.json"),
    *,
    out: Path | None = None,
    picture: Annotated[tuple[Path, ...], args.REPEATED] = (),
    run: Annotated[tuple[Path, ...], args.REPEATED] = (),
    title: str = "E-MoE results",
) -> int:
    """Write a self-contained HTML report from a results file or a run folder that was evaluated.

    Args:
        results: results file or run folder
        out: where the report goes; default: beside the results, ending in .html
        picture: an image to show; may be given several times
        run: a run folder whose curves are shown; may repeat
        title: heading

    Examples:
        emoe report results/toy.json --run runs/a --picture results/figures/toy-summary.png
    """
    if (results / "experiment.json").exists():
        run, results = (results, *run), results / "eval.json"
    origin = f"emoe eval {results.parent}" if results.name == "eval.json" else "emoe reproduce toy"
    problems = [f"results: {results} does not exist; make it with: {origin}"] * (not results.exists())
    problems += [f"picture: {path} does not exist" for path in picture if not path.is_file()]
    problems += [f"run: {path} is no run folder" for path in run if not (path / "experiment.json").exists()]
    if problems:
        raise ConfigError(problems)
    from emoe.reporting.html import write_page
    from emoe.reporting.results import Results

    out = out or results.with_suffix(".html")
    captions = {path: path.stem.replace("-", " ") for path in picture}
    write_page(out, title, Results.load(results), pictures=captions, runs=run)
    print(out)
    return 0
