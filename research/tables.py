"""Tables that only pages of this repository show: summaries, gaps to the paper, benchmarks, searches, one-off studies.

The latter are recorded by `python research/NAME.py`. `python -m emoe.reporting.docs` adds `BLOCKS` to its own.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from functools import partial
from pathlib import Path

from emoe.reporting.cells import DASH, MINUS, Column, Line, Number, Plain, data_name, data_of, measure, over, write
from emoe.reporting.docs import Block, block
from emoe.reporting.notes import comma, seeds_and_samples, source_of, span
from emoe.reporting.results import Results, SeedMean, method_rank, select
from emoe.reporting.table import Table, build, conventions_of, markdown, models, sampled, steps_of, with_note
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
FAMILIES = ("top-2", "all", "selected", "reinmax", "gumbel-rao", "leave-one-out", "vimco", "wake-sleep")
BASELINE = "top-2 tau 1"
STATES = ("early", "middle")
OBJECTIVES = {"objective": ("KL × 1", 3), "objective, KL/t": ("KL × 1/t (VADD as published)", 2)}  # log(2) / 3
MNIST_STEPS = 200_000  # of the paper's recipes
RIVAL = "vdm, eager"  # as the benchmark records it
SEARCHES = [path.stem for path in (Path(__file__).parents[1] / "results" / "search").glob("*.json")]


def summary(toy: Results, mnist: Results, text: Results) -> list[Table]:
    """Return the main numbers of all methods, without errors."""
    rows = sampled(toy).select(task="toy", metric=METRICS)
    rows += mnist.select(task="mnist", metric="frechet") + text.select(task="text", metric=["gen_ppl", "entropy"])
    rows = [row for row in Results(rows).models.rows if " method." not in str(row.recipe)]
    lines = [
        Line((toy.label(name),), select(rows, method=name), name)
        for name in sorted({row.method for row in rows}, key=method_rank)
    ]
    return build(["Method"], lines, [(heading, partial(_with_second, *column)) for heading, column in SUMMARY.items()])


def _with_second(cell: Number, where: dict[str, object], line: Line) -> str:
    """Return the first number, and the second in parentheses."""
    first, *second = cell(line.where(**where)).split("\n")
    return first + "".join(f" ({text})" for text in second)


def estimator_order(name: str) -> tuple[int, list[float], str]:
    """Return the sort key of an estimator: its family, then its numbers."""
    family, _, setting = name.partition(" ")
    return FAMILIES.index(family), [float(number) for number in re.findall(r"[\d.]+", setting)], name


def estimator_tables(results: Results) -> list[Table]:
    """Return bias, cosine, spread and cost of the gradients of every estimator, a table for each state of the model."""
    (cost,) = results.select(metric="step_ratio", recipe=BASELINE)
    text = (
        "Gradients of the routers' parameters, unless said otherwise, relative to the size of the exact gradient of "
        "the objective of each estimator. ± is the expected size of the bias of an unbiased estimator. Step cost: a "
        f"step of the 8-modes model with a batch of 128 on the CPU, over that of {BASELINE.replace('tau', 'τ')}, "
        f"medians of {cost.n} interleaved rounds. Made by `emoe reproduce estimators`, {source_of(results)}."
    )
    number, tables = partial(Number, form=".2f", error="measured"), []
    for state in STATES:
        routers, others = ({"convention": f"{state}, {part}"} for part in ("routers", "others"))
        names = sorted({row.recipe for row in results.select(**routers)}, key=estimator_order)
        lines = [Line((name.replace("tau", "τ"),), results.select(recipe=name)) for name in names]
        columns = [
            ("bias", number("bias", routers)),
            ("cosine", number("cosine", routers)),
            ("std per call", number("std", routers)),
            ("SNR per call", number("snr", routers)),
            ("cosine with ∇ −log p(x0 | xt)", number("likelihood_cosine", routers)),
            ("bias, other parameters", number("bias", others)),
            ("step cost", Number("step_ratio", form=".1f", unit="×")),
        ]
        (table,) = build(["Estimator"], lines, columns)
        nll, kl = (results.select(recipe=state, metric=metric)[0].value for metric in ("nll", "kl"))
        table.title = f"**{state.capitalize()}**: exact NLL of one step {nll:.2f} nats, KL(q ‖ p) {kl:.2f} nats."
        tables.append(table)
    return with_note(tables, text)


def route_limit(limit: Results, toy: Results) -> list[Table]:
    """Compare the best route code and trained models at one network call: exact laws, means over seeds."""
    results = Results().merge(limit).merge(toy).only(nfe=1, convention="exact")
    lines = [
        Line((data_name(data), "*best route code*" if method == "limit" else results.label(method)), rows)
        for data in ("8-modes", "swiss-roll")
        for method in ("limit", "emoe-plus", "vadd-plus", "vadd", "emoe", "mdlm")
        if (rows := results.select(data=data, method=method))
    ]
    columns = [(measure(metric).label, Number(metric)) for metric in ("validity", "overlap", "kl")]
    note = "One network call, exact laws, mean ± standard error over seeds."
    return build(["Density", ""], lines, columns, note)


def information_tables(results: Results) -> list[Table]:
    """Return nats of the blocks at the end of training, and ties kept at one network call."""

    def nats(line: Line) -> list[float]:
        rows = [row for row in line.rows if row.metric.startswith("route_kl/")]
        blocks = sorted({row.metric.split("/")[1] for row in rows})
        return [math.fsum(row.value for row in rows if row.metric.split("/")[1] == block) for block in blocks]

    lines = sorted(models(results, metric="ties"), key=lambda line: str(line.rows[0].recipe))
    columns: list[Column] = [
        ("nats per row", lambda line: f"{sum(nats(line)):.2f}"),
        ("by block", lambda line: " + ".join(f"{value:.2f}" for value in nats(line))),
        ("ties at NFE 1 (%)", Number("ties", {"nfe": 1}, error="measured")),
        ("coverage (%)", Number("coverage", {"nfe": 1})),
    ]
    text = f"Made by `emoe reproduce information`, {source_of(results)}."
    return build(["How the latent is learned"], lines, columns, text)


def two_bits(results: Results) -> list[Table]:
    """Return the least objective for two equal bits, and bounds and exact NLL of the same model."""
    part, lines = results.only(data="two-bits", metric="nll"), []
    for convention, (label, k) in OBJECTIVES.items():
        (row,) = part.select(convention=convention)
        labels = label, f"**{row.value:.3f}**", f"log(2) / {k} = {math.log(2) / k:.3f}"
        lines.append(Line(labels, part.select(recipe=row.recipe)))
    bounds = [name for name in conventions_of(part.rows) if name.startswith("bound@")]
    columns = over("convention", "{}", bounds, Number())
    columns += over("nfe", "exact NLL, T = {}", steps_of(part.rows), Number(where={"convention": "exact"}))
    text = (
        f"The entropy of the data is {part.select(method='data')[0].value:.3f} nats. Nothing here is drawn; bounds and "
        "NLL are those of the model that the minimisation found. Made by `emoe reproduce likelihood --only two-bits`, "
        f"{source_of(part)}."
    )
    return build(["Objective", "minimised", "in theory"], lines, columns, text)


def label(results: Results, method: str) -> str:
    """Return the label of a method of a benchmark: `E-MoE, 2 draws` for `emoe, 2 draws`."""
    name, comma, more = method.partition(", ")
    return "VDM UNet, eager" if method == RIVAL else results.label(name) + comma + more


def mnist_steps(results: Results) -> list[Table]:
    """Compare training steps of the methods on MNIST, with the paper's budget in minutes, and the VDM UNet."""
    part = results.only(metric="step_ms", data="mnist-step-gpu")
    lines = [Line((label(part, row.method),), [row], row.method) for row in part.rows]
    (rival,) = part.select(method=RIVAL)
    minutes = Number("step_ms", form=".1f", per=60_000 / MNIST_STEPS)
    columns: list[Column] = [
        ("ms per step", Number("step_ms", form=".2f", error="measured")),
        (f"minutes for {MNIST_STEPS:,} steps", lambda line: DASH if line.method == RIVAL else minutes(line)),
        ("speed against the VDM UNet", lambda line: f"{rival.value / line.rows[0].value:.1f}x"),
    ]
    text = f"Medians of {part.rows[0].n} interleaved rounds in one process. Made at {source_of(part)}."
    return build(["MNIST, 64 images a step"], lines, columns, text)


def version_steps(results: Results) -> list[Table]:
    """Compare training steps of this version and of commit 6076d38, the last before the refactoring."""
    trees = ("before", "after", "plain")
    part = results.only(data="versions-gpu", metric="time_ms", method=[f"{tree}, step" for tree in trees])
    lines = [Line((recipe,), part.select(recipe=recipe)) for recipe in sorted({row.recipe for row in part.rows})]
    before, after, plain = (Number("time_ms", {"method": f"{tree}, step"}, ".2f", error="measured") for tree in trees)

    def ratio(line: Line) -> str:
        old, new = before.mean(line), after.mean(line)
        return f"{new.mean / old.mean:.3f}" if old and new else DASH

    headings = ("6076d38", "now", "now / 6076d38", "without the norm kernel")
    text = (
        f"Milliseconds of a training step, medians of {span(row.n for row in part.rows)} turns of processes that work "
        "one after the other. LM1B with half of its batch, 256 rows, so that all four processes fit on the device. "
        f"Made at {source_of(part)}."
    )
    return build(["Recipe"], lines, list(zip(headings, (before, after, ratio, plain), strict=True)), text)


def sampling_calls(results: Results) -> list[Table]:
    """Compare network calls of E-MoE and MDLM outside training, alone and in a draw."""
    part = results.only(data="versions-gpu", recipe="calls")
    lines = [
        Line((kind,), [part.select(method=f"after, {method}, {kind}")[0] for method in ("mdlm", "emoe")])
        for kind in ("network call", "call of a plain draw", "call of a reveal-first draw")
    ]
    columns: list[Column] = [
        ("MDLM (ms)", lambda line: f"{line.rows[0].value:.1f}"),
        ("E-MoE (ms)", lambda line: f"{line.rows[1].value:.1f}"),
        ("ratio", lambda line: f"{line.rows[1].value / line.rows[0].value:.3f}"),
    ]
    text = f"LM1B size, 250 rows of 128 tokens, 8 calls, bf16; medians of 5 turns. Made at {source_of(part)}."
    return build(["One call"], lines, columns, text)


def step_variants(results: Results) -> list[Table]:
    """Compare training steps of all estimators with the paper's in the same run."""
    part = results.only(metric="step_ms", data="toy-step-gpu")
    (base,) = part.select(method="emoe")
    rows = sorted(part.select(run=base.run), key=lambda row: row.value)
    lines = [Line((label(part, row.method),), [row]) for row in rows]
    columns = [("ms", Number(form=".2f")), ("over E-MoE", Number(form=".2f", per=base.value, unit="x"))]
    text = f"Made by `{part.runs[base.run].command}`, {source_of(part.of(rows))}."
    return build(["One training step of 512 rows"], lines, columns, text)


def toy_source(results: Results) -> str:
    """Return commands, commits and devices of the tables, with seeds and sample counts."""
    part = sampled(results).only(task="toy", metric=METRICS)
    sources = dict.fromkeys(f"`{run.command}`, {source_of(part.only(run=name))}" for name, run in part.runs.items())
    rows = {metric: part.models.select(metric=metric) for metric in METRICS}
    samples = "; ".join(f"{metric} from {seeds_and_samples(group)}" for metric, group in rows.items() if group)
    return f"Made by {'; '.join(sources)}: {samples}."


def toy_gaps(results: Results) -> str:
    """Return the differences of VADD and E-MoE from the paper at one network call, in points."""
    part = sampled(results).only(task="toy", nfe=1, metric=METRICS)
    sentences = []
    for method, data in itertools.product(("vadd", "emoe"), data_of(part)):
        for line in models(part.only(method=method, data=data)):
            line = line.where(nfe=1)
            mean, paper = Number("validity").mean(line), line.reported("validity")
            gap = f"{round(mean.mean, 1) - paper:+.1f}".replace("-", MINUS)
            ours = f"{part.label(method)} on {data_name(data)} at NFE 1: validity {write(mean, '.1f')}"
            overlap = Plain("overlap")(line)
            sentences.append(f"- {ours}, the paper reports {paper:.1f}: {gap} points (overlap {overlap}).")
    return "\n".join(sentences)


def search(name: str, folder: Path) -> str:
    """Return all trials of a search of version 0.1 (`results/search/*.json`), best first."""
    ranking = json.loads((folder / "search" / f"{name}.json").read_text(encoding="utf-8"))
    forms, made = {name: f".{measure(name.partition('@')[0]).digits}f" for name in ranking["rank"]}, ranking["made"]
    rows, tasks = list[list[str]](), dict[str, None]()
    for trial in ranking["trials"]:
        status = "" if trial["status"] == "done" else f" ({trial['status']})"
        means = {name: SeedMean(mean["mean"], mean["stderr"]) for name, mean in trial["metrics"].items()}
        cells = [write(means.get(name), form) for name, form in forms.items()]
        rows.append([short_label(trial["settings"]) + status, *cells])
        tasks |= {f"{comma(outcome['task'].values())} (seed {outcome['seed']})": None for outcome in trial["outcomes"]}
    commits = comma(f"`{commit[:12]}`" for commit in made.get("commits", [made["commit"]]))
    text = (
        f"Base: `{ranking['base']}`; mean ± standard error over {comma(tasks)}. Made by `emoe sweep` at "
        f"commit {commits} on {made['device']} (torch {made['torch']}, Python {made['python']})."
    )
    return markdown([Table(["Trial", *forms], rows, note=text)])


def short_label(settings: dict[str, str]) -> str:
    """Return changed fields without their family's name; ramps as `4 → 1 over 60%`."""
    words = []
    for name, text in settings.items():
        if text.startswith("{"):
            ramp = json.loads(text)
            text = f"{ramp['start']:g} → {ramp['end']:g} over {ramp.get('share', 1):.0%}"
        words.append(f"{name.rpartition('.')[2]} {text}")
    return comma(words) or "**base**"


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
