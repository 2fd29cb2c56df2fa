"""Tables of the time of a training step, as `benchmarks/step_time.py --record` measures it."""

from __future__ import annotations

import functools

from emoe.reporting.cells import DASH, Column, Line, Number
from emoe.reporting.results import Results, known_methods, methods_of
from emoe.reporting.table import Table, TableSpec, build, note, short_commit, span

PAPER_STEPS, NEWS_STEPS = 200_000, 7_500  # of the paper's MNIST recipes, and of the news-small recipes
RIVAL = "vdm, eager"  # as the benchmark records it


def toy_steps(results: Results) -> list[Table]:
    """The toy methods on every machine, beside MDLM in the same run."""
    lines = []
    for data in sorted({row.data for row in results.select(metric="step_ms") if row.data.startswith("toy-")}):
        rows = results.select(data=data)
        run = results.runs[next(row.run for row in rows if row.metric == "step_ms")]
        lines.append(Line((f"{run.device}, torch {run.torch}",), rows))

    def cell(method: str, line: Line) -> str:
        ms, ratio = (Number(metric, {"method": method}, ".2f")(line) for metric in ("step_ms", "step_ratio_to_mdlm"))
        return DASH if DASH in (ms, ratio) else f"{ms} ms ({ratio}x)"

    measured = {row.method for line in lines for row in line.rows}
    columns = [(results.label(name), functools.partial(cell, name)) for name in known_methods() if name in measured]
    return build(TableSpec(["One training step"], lines, columns))


def step_variants(results: Results) -> list[Table]:
    """Every way to learn the latent, beside the paper's reading in the same run."""
    rows = results.select(metric="step_ms", data="toy-step-gpu")
    base = next((row for row in rows if row.method == "emoe"), None)
    if base is None:
        return []
    run = results.runs[base.run]
    ordered = sorted((row for row in rows if row.run == base.run), key=lambda row: row.value)
    lines = [Line((results.label(row.method),), [row]) for row in ordered]
    columns = [("ms", Number(form=".2f")), ("over E-MoE", Number(form=".2f", per=base.value, unit="x"))]
    text = f"Made by `{run.command}` at commit `{short_commit(run.commit)}` on {run.device} (torch {run.torch})."
    return build(TableSpec(["One training step of 512 rows"], lines, columns, text))


def mnist_steps(results: Results) -> list[Table]:
    """The methods on MNIST, the paper's budget in minutes, and the rival's speed."""
    part = results.only(metric="step_ms", data="mnist-step-gpu")
    rival = next((row.value for row in part.rows if row.method == RIVAL), None)

    def label(method: str) -> str:
        name, sep, more = method.partition(", ")
        return "VDM UNet, eager" if method == RIVAL else part.label(name) + sep + more

    def speed(line: Line) -> str:
        return f"{rival / line.rows[0].value:.1f}x" if rival else DASH

    lines = [Line((label(row.method),), [row], row.method) for row in part.rows]
    minutes = Number("step_ms", form=".1f", per=60_000 / PAPER_STEPS)
    columns: list[Column] = [
        ("ms per step", Number("step_ms", form=".2f", measured=True, plain=True)),
        (f"minutes for {PAPER_STEPS:,} steps", lambda line: DASH if line.method == RIVAL else minutes(line)),
        ("speed against the VDM UNet", speed),
    ]
    text = note("steps", part, n=span(row.n for row in part.rows[:1]))
    return build(TableSpec(["MNIST, 64 images a step"], lines, columns, text))


def text_steps(results: Results) -> list[Table]:
    """The news-small recipes, and the time of all of their steps."""
    part = results.only(metric="step_ms", data="news-small-step-gpu")
    lines = [Line((part.label(method),), part.select(method=method)) for method in methods_of(part.rows)]

    def milliseconds(line: Line) -> str:
        row = line.rows[0]
        return f"{row.value:.1f}" + ("" if row.stderr is None else f" ±{row.stderr:.2f}")

    minutes = Number("step_ms", form=".1f", per=60_000 / NEWS_STEPS)
    columns: list[Column] = [("ms per step", milliseconds), (f"minutes for {NEWS_STEPS:,} steps", minutes)]
    together = sum(row.value for row in part.rows) * NEWS_STEPS / 60_000
    text = f"Steps alone, all {len(lines)} together {together:.0f} minutes. "
    text += note("steps", part, n=span(row.n for row in part.rows[:1]))
    return build(TableSpec(["news-small, 256 rows of 128 tokens a step"], lines, columns, text))
