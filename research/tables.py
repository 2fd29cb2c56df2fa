"""Tables that only pages of this repository show: summaries, gaps to the paper, benchmarks, searches, one-off studies.

The latter are recorded by `python research/NAME.py`. `python -m emoe.reporting.docs` adds `BLOCKS` to its own.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from emoe.reporting.cells import DASH, MINUS, Column, Line, Number, Plain, data_name, data_of, measure, over, write
from emoe.reporting.docs import Block, block
from emoe.reporting.notes import comma, seeds_and_samples, short_commit, source_of, span
from emoe.reporting.recipes import comparable, parse
from emoe.reporting.render import markdown
from emoe.reporting.results import Results, SeedMean, method_rank, select
from emoe.reporting.table import Table, build, conventions_of, sampled, steps_of
from emoe.reporting.ties import health_tables, scaling_tables
from emoe.reporting.toy import METRICS

TOY = Plain("validity", form=".1f", below=[Plain("overlap", form=".1f")])
FRECHET = Plain("frechet", form=".1f")
ENTROPY = Plain("entropy", {"convention": None}, ".2f", "H ")
TEXT = Plain("gen_ppl", {"convention": "paper"}, ",.0f", below=[ENTROPY])
SUMMARY = {  # heading -> cell, data set or task, network calls
    "8-modes, 1 call": (TOY, {"data": "8-modes", "nfe": 1}),
    "Swiss-roll, 1 call": (TOY, {"data": "swiss-roll", "nfe": 1}),
    "MNIST, 1 call": (FRECHET, {"data": "mnist", "nfe": 1}),
    "64 calls": (FRECHET, {"data": "mnist", "nfe": 64}),
    "news, 1 call": (TEXT, {"task": "text", "nfe": 1}),
    "128 calls": (TEXT, {"task": "text", "nfe": 128}),
}
# First words of the names of estimators, in the order of tables and colours.
FAMILIES = ("top-2", "all", "selected", "reinmax", "gumbel-rao", "leave-one-out", "vimco", "wake-sleep")
BASELINE = "top-2 tau 1"
STATES = ("early", "middle")
OBJECTIVES = {"objective": ("KL × 1", 3), "objective, KL/t": ("KL × 1/t (VADD as published)", 2)}  # log(2) / 3
MNIST_STEPS = 200_000  # of the paper's recipes
RIVAL = "vdm, eager"  # as the benchmark records it
SEARCHES = (
    "toy-estimators", "toy-annealing", "toy-weighting", "toy-proper", "toy-draws", "toy-vadd", "toy-vadd-2",
    "toy-vadd-3", "ties-probe", "ties-64",
)  # fmt: skip


def summary(toy: Results, mnist: Results, text: Results) -> list[Table]:
    """Methods that were measured on the toy, and the other models of text, without errors."""
    rows = sampled(toy).select(task="toy", metric=METRICS)
    rows += mnist.select(task="mnist", metric="frechet") + text.select(task="text", metric=["gen_ppl", "entropy"])
    rows = [row for row in Results(rows).models.rows if " method." not in str(row.recipe)]
    lines = [
        Line((toy.label(name),), select(rows, method=name), name)
        for name in sorted({row.method for row in rows}, key=method_rank)
    ]
    return build(["Method"], lines, [(heading, partial(_with_second, *column)) for heading, column in SUMMARY.items()])


def _with_second(cell: Number, where: dict[str, object], line: Line) -> str:
    """The first number, and the second in parentheses."""
    first, *second = cell(line.where(**where)).split("\n")
    return first + "".join(f" ({text})" for text in second)


def estimator_order(name: str) -> tuple[int, list[float], str]:
    """Sorts estimators by family, then by their numbers, then by their further words."""
    family = name.partition(" ")[0]
    rank = FAMILIES.index(family) if family in FAMILIES else len(FAMILIES)
    return rank, [float(number) for number in re.findall(r"[\d.]+", name.removeprefix(family))], name


def estimator_tables(results: Results) -> list[Table]:
    """Bias, cosine, spread and cost of the gradients of every estimator, a table for each state of the model."""
    tables = []
    cost = next(iter(results.select(metric="step_ratio", recipe=BASELINE)), None)
    note = (
        "Gradients of the routers' parameters, unless said otherwise, relative to the size of the exact gradient of "
        "what each estimator claims to follow. ± is what the bias would read without one. Step cost: a step of the "
        f"8-modes model with a batch of 128 on the CPU, over that of {BASELINE.replace('tau', 'τ')}, medians of "
        f"{cost.n if cost else 0} interleaved rounds. Made by `emoe reproduce estimators`, {source_of(results)}."
    )
    for state in STATES:
        routers, others = ({"convention": f"{state}, {part}"} for part in ("routers", "others"))
        named = {str(row.recipe) for row in results.rows if str(row.convention).startswith(f"{state}, ")}
        names = sorted(named, key=estimator_order)
        lines = [Line((name.replace("tau", "τ"),), results.select(recipe=name)) for name in names]
        number = partial(Number, form=".2f", error="measured", plain=True)
        columns = [
            ("bias", number("bias", routers)),
            ("cosine", number("cosine", routers)),
            ("std per call", number("std", routers)),
            ("SNR per call", number("snr", routers)),
            ("cosine with ∇ −log p(x0 | xt)", number("likelihood_cosine", routers)),
            ("bias, other parameters", number("bias", others)),
            ("step cost", Number("step_ratio", form=".1f", unit="×")),
        ]
        nll, kl = (results.select(recipe=state, metric=metric)[0].value for metric in ("nll", "kl"))
        title = f"**{state.capitalize()}**: exact NLL of one step {nll:.2f} nats, KL(q ‖ p) {kl:.2f} nats."
        for table in build(["Estimator"], lines, columns, note * (state == STATES[-1])):
            tables.append(replace(table, title=title))
    return tables


def route_limit(limit: Results, toy: Results) -> list[Table]:
    """The best route code and trained models at one network call: exact laws, means over seeds."""
    results = Results().merge(limit).merge(toy).only(nfe=1, convention="exact")
    lines = [
        Line((data_name(data), "*best route code*" if method == "limit" else results.label(method)), rows)
        for data in ("8-modes", "swiss-roll")
        for method in ("limit", "emoe-plus", "vadd-plus", "vadd", "emoe", "mdlm")
        if (rows := results.select(data=data, method=method))
    ]
    columns = [(measure(metric).label, Number(metric, plain=True)) for metric in ("validity", "overlap", "kl")]
    note = "One network call, exact laws, mean ± standard error over seeds."
    return build(["Density", ""], lines, columns, note)


def information_tables(results: Results) -> list[Table]:
    """Nats of the blocks at the end of training, and ties kept at one network call."""

    def label(recipe: str) -> str:
        name, changes = parse(recipe)
        if name not in ("ties-emoe-plus", "ties-emoe-wake-sleep"):
            return "the paper's reading"
        everywhere = changes.keys() & {"method.carriers", "method.compare.in-turn"}
        return f"E-MoE+, {'all positions carry' if everywhere else 'positions code in turn'}"

    def nats(line: Line) -> list[float]:
        blocks: dict[str, float] = {}
        for row in line.rows:
            if row.metric.startswith("route_kl/"):
                block = row.metric.split("/")[1]
                blocks[block] = blocks.get(block, 0.0) + row.value
        return [blocks[block] for block in sorted(blocks)]

    recipes = sorted({str(row.recipe) for row in results.select(metric="ties")})
    lines = [Line((label(recipe),), results.select(recipe=recipe)) for recipe in recipes]
    columns: list[Column] = [
        ("nats per row", lambda line: f"{sum(nats(line)):.2f}"),
        ("by block", lambda line: " + ".join(f"{value:.2f}" for value in nats(line))),
        ("ties at NFE 1 (%)", Number("ties", {"nfe": 1}, error="measured", plain=True)),
        ("coverage (%)", Number("coverage", {"nfe": 1})),
    ]
    note = f"Made by `emoe reproduce information`, {source_of(results)}."
    return build(["How the latent is learned"], lines, columns, note)


def two_bits(results: Results) -> list[Table]:
    """Two equal bits: the least objective, and bounds and exact NLL of the same model, beside the entropy."""
    part = results.only(data="two-bits", metric="nll")
    lines = []
    for row in [row for row in part.rows if row.convention in OBJECTIVES]:
        label, k = OBJECTIVES[str(row.convention)]
        theory = f"log(2) / {k} = {math.log(2) / k:.3f}"
        lines.append(Line((label, f"**{row.value:.3f}**", theory), part.select(recipe=row.recipe)))
    bounds = [name for name in conventions_of(part.rows) if name.startswith("bound@")]
    columns = over("convention", "{}", bounds, Number())
    columns += over("nfe", "exact NLL, T = {}", steps_of(part.rows), Number(where={"convention": "exact"}))
    note = (
        f"The entropy of the data is {part.select(method='data')[0].value:.3f} nats. Nothing here is drawn; bounds and "
        "NLL are those of the model that the minimisation found. Made by `emoe reproduce likelihood --only two-bits`, "
        f"{source_of(part)}."
    )
    return build(["Objective", "minimised", "in theory"], lines, columns, note)


def mnist_steps(results: Results) -> list[Table]:
    """The training step of the methods on MNIST, the paper's budget in minutes, and the rival's speed."""
    part = results.only(metric="step_ms", data="mnist-step-gpu")

    def label(method: str) -> str:
        name, comma, more = method.partition(", ")
        return "VDM UNet, eager" if method == RIVAL else part.label(name) + comma + more

    lines = [Line((label(row.method),), [row], row.method) for row in part.rows]
    (rival,) = part.select(method=RIVAL)
    minutes = Number("step_ms", form=".1f", per=60_000 / MNIST_STEPS)
    columns: list[Column] = [
        ("ms per step", Number("step_ms", form=".2f", error="measured", plain=True)),
        (f"minutes for {MNIST_STEPS:,} steps", lambda line: DASH if line.method == RIVAL else minutes(line)),
        ("speed against the VDM UNet", lambda line: f"{rival.value / line.rows[0].value:.1f}x"),
    ]
    turns = span(row.n for row in part.rows[:1])
    note = f"Medians of turns within one process, {turns} each. Made at {source_of(part)}."
    return build(["MNIST, 64 images a step"], lines, columns, note)


def version_steps(results: Results) -> list[Table]:
    """Training steps of this version and of commit 6076d38, the last before the refactoring, in one command."""
    part = results.only(data="versions-gpu", metric="time_ms", method=["before, step", "after, step", "plain, step"])
    recipes = sorted({str(row.recipe) for row in part.rows})
    lines = [Line((recipe,), part.select(recipe=recipe)) for recipe in recipes]
    before, after, plain = (
        Number("time_ms", {"method": f"{tree}, step"}, ".2f", error="measured") for tree in ("before", "after", "plain")
    )

    def ratio(line: Line) -> str:
        old, new = before.mean(line), after.mean(line)
        return f"{new.mean / old.mean:.3f}" if old and new else DASH

    columns: list[Column] = [
        ("6076d38", before), ("now", after), ("now / 6076d38", ratio), ("without the norm kernel", plain),
    ]  # fmt: skip
    turns = span(row.n for row in part.rows)
    note = (
        f"Milliseconds of a training step, medians of {turns} turns of processes that work one after the other. LM1B "
        f"with half of its batch, 256 rows, so that all four processes fit on the device. Made at {source_of(part)}."
    )
    return build(["Recipe"], lines, columns, note)


def sampling_calls(results: Results) -> list[Table]:
    """A network call and the calls of a draw outside training, of E-MoE against MDLM."""
    part = results.only(data="versions-gpu", recipe="calls")
    kinds = {"network call": "network alone", "call of a plain draw": "sampler plain"}
    kinds["call of a reveal-first draw"] = "sampler reveal-first"

    def of(method: str, kind: str, line: Line) -> float:
        return float(select(line.rows, method=f"after, {method}, {kind}")[0].value)

    lines = [Line((label,), part.rows, kind) for kind, label in kinds.items()] * bool(part.rows)
    columns: list[Column] = [
        ("MDLM (ms)", lambda line: f"{of('mdlm', line.method, line):.1f}"),
        ("E-MoE (ms)", lambda line: f"{of('emoe', line.method, line):.1f}"),
        ("ratio", lambda line: f"{of('emoe', line.method, line) / of('mdlm', line.method, line):.3f}"),
    ]
    note = f"LM1B size, 250 rows of 128 tokens, 8 calls, bf16; medians of 5 turns. Made at {source_of(part)}."
    return build(["One call"], lines, columns, note)


def step_variants(results: Results) -> list[Table]:
    """The training step of every way to learn the latent, beside the paper's reading in the same run."""
    rows = results.select(metric="step_ms", data="toy-step-gpu")
    base = next(row for row in rows if row.method == "emoe")
    run = results.runs[base.run]
    ordered = sorted((row for row in rows if row.run == base.run), key=lambda row: row.value)
    lines = [Line((results.label(row.method),), [row]) for row in ordered]
    columns = [("ms", Number(form=".2f")), ("over E-MoE", Number(form=".2f", per=base.value, unit="x"))]
    note = f"Made by `{run.command}` at commit `{short_commit(run.commit)}` on {run.device} (torch {run.torch})."
    return build(["One training step of 512 rows"], lines, columns, note)


def toy_source(results: Results) -> str:
    """One line: commands, commits and devices behind the tables, with seeds and sample counts."""
    rows = {metric: sampled(results).select(task="toy", metric=metric) for metric in METRICS}
    commands: dict[str, list[str]] = {}
    for name in sorted({row.run for group in rows.values() for row in group}):
        run = results.runs[name]
        where = f"at commit `{short_commit(run.commit)}` on {run.device} (torch {run.torch}, Python {run.python})"
        commands.setdefault(where, []).append(f"`{run.command}`")
    sources = "; ".join(f"{comma(dict.fromkeys(own))} {where}" for where, own in commands.items())
    samples = [
        f"{metric} from {seeds_and_samples(Results(group).models.rows)}" for metric, group in rows.items() if group
    ]
    return f"Made by {sources}: {'; '.join(samples)}."


def toy_gaps(results: Results) -> str:
    """How far VADD and E-MoE are from the paper at one network call, in points, with the sign."""
    part = sampled(results).only(task="toy", nfe=1, metric=METRICS)
    sentences = []
    for method, data in itertools.product(("vadd", "emoe"), data_of(part)):
        rows = part.select(method=method, data=data)
        line = Line((), rows, method, paper=comparable(rows), nfe=1)
        mean, paper = Number("validity").mean(line), line.reported("validity")
        if mean is not None and paper is not None:
            gap = f"{round(mean.mean, 1) - paper:+.1f}".replace("-", MINUS)
            ours = f"{part.label(method)} on {data_name(data)} at NFE 1: validity {write(mean, '.1f', plain=True)}"
            beside = Number("overlap", error="")(line)
            sentences.append(f"- {ours}, the paper reports {paper:.1f}: {gap} points (overlap {beside}).")
    return "\n".join(sentences) or "No VADD or E-MoE at NFE 1 to compare."


def search_table(ranking: dict[str, Any]) -> Table:
    """All trials of a search of version 0.1 (`results/search/*.json`), best first, with errors over tasks and seeds."""
    names, info = ranking["rank"], ranking["made"]
    forms = [f".{measure(name.partition('@')[0]).digits}f" for name in names]
    rows, tasks = list[list[str]](), dict[str, None]()
    for trial in ranking["trials"]:
        label = short_label(trial["settings"]) + f" ({trial['status']})" * (trial["status"] != "done")
        means = [mean and SeedMean(mean["mean"], mean["stderr"]) for mean in map(trial["metrics"].get, names)]
        rows.append([label, *(write(mean, form, plain=True) for mean, form in zip(means, forms, strict=True))])
        for outcome in trial["outcomes"]:
            task, seed = comma(outcome["task"].values()), f"seed {outcome['seed']}"
            tasks[f"{task} ({seed})" if task else seed] = None
    commits = comma(f"`{short_commit(commit)}`" for commit in info.get("commits", [info["commit"]]))
    note = (
        f"Base: `{ranking['base']}`; mean ± standard error over {comma(tasks)}. Made by `emoe sweep` at commit "
        f"{commits} on {info['device']} (torch {info['torch']}, Python {info['python']})."
    )
    return Table(["Trial", *names], rows, note=note)


def short_label(settings: dict[str, str]) -> str:
    """Changed fields without their family's name; ramps as `4 → 1 over 60%`."""
    words = []
    for name, text in settings.items():
        if text.startswith("{"):
            ramp = json.loads(text)
            text = f"{ramp['start']:g} → {ramp['end']:g} over {ramp.get('share', 1):.0%}"
        words.append(f"{name.rpartition('.')[2]} {text}")
    return comma(words) or "**base**"


def search(name: str, folder: Path) -> str:
    """The block of a search."""
    return markdown([search_table(json.loads((folder / "search" / f"{name}.json").read_text(encoding="utf-8")))])


BLOCKS: dict[str, Block] = {
    "summary": block(summary, "toy", "mnist", "text"),
    "estimator-table": block(estimator_tables, "estimators", command="python research/estimators.py"),
    "information": block(information_tables, "information", command="python research/information.py"),
    "route-limit": block(route_limit, "route-limit", "toy", command="python research/route_limit.py"),
    "two-bits": block(two_bits, "likelihood", command="python research/two_bits.py"),
    "toy-source": block(toy_source, "toy"),
    "toy-gaps": block(toy_gaps, "toy"),
    "mnist-steps": block(mnist_steps, "benchmark", command="python benchmarks/step_time.py --record"),
    "version-steps": block(version_steps, "benchmark", command="python benchmarks/versions.py --record"),
    "sampling-calls": block(sampling_calls, "benchmark", command="python benchmarks/versions.py --calls --record"),
    "step-variants": block(step_variants, "benchmark", command="python benchmarks/step_time.py --record"),
    "scaling-64-table": block(scaling_tables, "scaling-64", command="emoe reproduce scaling"),
    "scaling-64-health": block(health_tables, "scaling-64", command="emoe reproduce scaling"),
    **{f"search-{name}": partial(search, name) for name in SEARCHES},
}
