"""The table of the study of named likelihoods (`emoe reproduce likelihood`)."""

from __future__ import annotations

from functools import partial

from emoe.reporting.cells import Line, write
from emoe.reporting.results import Results, Row, mean_over_seeds
from emoe.reporting.table import Table, build, comma, note, steps_of

KINDS = {"objective": "objective", "bound@T": "bound@", "iw@T,16": "iw@", "exact": "exact"}


def likelihood_tables(results: Results) -> list[Table]:
    """Objective, bounds and exact NLL of the demo's models against the number of steps, in nats per row."""
    part = results.only(task="toy")
    nll = part.only(metric="nll")
    lines = [
        Line((part.label(method), label), [row for row in rows if str(row.convention).startswith(kind)])
        for method in ("mdlm", "vadd", "emoe")
        for rows in [nll.select(method=method)]
        for label, kind in KINDS.items()
    ]
    steps, truth = steps_of(lines), nll.select(method="data")
    if not truth:
        return []
    columns = [(f"T = {wanted}", partial(_cell, wanted, wanted == steps[0])) for wanted in steps]
    gains = (f"{part.label(row.method)} {row.value:+.3f}" for row in part.select(metric="coordination_gain"))
    text = note("likelihood", part, truth=f"{truth[0].value:.3f}", rows=f"{truth[0].n:,}", gains=comma(gains))
    return build(["Method", "nats per row"], lines, columns, text, align="ll")


def _cell(wanted: int, first: bool, line: Line) -> str:
    """The likelihood of T steps; one without T, as the objective, in the first column."""
    mean = mean_over_seeds([row for row in line.rows if _steps(row) in (wanted, first and None)], measured=True)
    return write(mean._replace(stderr=mean.stderr or None), ".3f", plain=True) if mean else ""


def _steps(row: Row) -> int | None:
    """T of `bound@T`, `iw@T,K` or the exact NLL of a T-step sampler; None without one."""
    numbers = str(row.convention).partition("@")[2]
    return int(numbers.partition(",")[0]) if numbers else row.nfe
