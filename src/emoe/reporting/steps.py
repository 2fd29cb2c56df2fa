"""Tables of the time of a training step, as `benchmarks/step_time.py --record` measures it."""

from __future__ import annotations

from emoe.reporting.cells import DASH, Column, Line, Number, data_name
from emoe.reporting.results import Results
from emoe.reporting.table import Table, build, note, span

STEPS = {"mnist-step-gpu": 200_000, "news-small-step-gpu": 7_500}  # of the paper's MNIST recipes, and of news-small
RIVAL = "vdm, eager"  # as the benchmark records it


def step_tables(results: Results) -> list[Table]:
    """A table for each benchmark."""
    return [table for data in sorted({row.data for row in results.rows}) for table in step_table(results, data)]


def step_table(results: Results, data: str) -> list[Table]:
    """Milliseconds of a step; of all steps and against the rival where these are known."""
    part = results.only(metric="step_ms", data=data)

    def label(method: str) -> str:
        name, comma, more = method.partition(", ")
        return "VDM UNet, eager" if method == RIVAL else part.label(name) + comma + more

    lines = [Line((label(row.method),), [row], row.method) for row in part.rows]
    columns: list[Column] = [("ms per step", Number("step_ms", form=".2f", measured=True, plain=True))]
    if data in STEPS:
        minutes = Number("step_ms", form=".1f", per=60_000 / STEPS[data])
        heading = f"minutes for {STEPS[data]:,} steps"
        columns.append((heading, lambda line: DASH if line.method == RIVAL else minutes(line)))
    if rival := part.select(method=RIVAL):
        columns.append(("speed against the VDM UNet", lambda line: f"{rival[0].value / line.rows[0].value:.1f}x"))
    return build([data_name(data)], lines, columns, note("steps", part, n=span(row.n for row in part.rows[:1])))
