"""Tables of the study of named likelihoods (`emoe reproduce likelihood`)."""

from __future__ import annotations

import functools
import math

from emoe.reporting.cells import Line, Number, over, write
from emoe.reporting.results import Results, Row, mean_over_seeds
from emoe.reporting.table import Table, TableSpec, build, comma, conventions_of, note, steps_of

KINDS = {"objective": "objective", "bound@T": "bound@", "iw@T,16": "iw@", "exact": "exact"}
OBJECTIVES = {"objective": ("KL × 1", 3), "objective, KL/t": ("KL × 1/t (VADD as published)", 2)}  # log(2) / 3


def likelihood_tables(results: Results) -> list[Table]:
    """Objective, bounds and exact NLL of the demo's models against the number of steps, in nats per row."""
    part = results.only(task="toy")
    nll = part.select(metric="nll")
    lines = [
        Line((part.label(method), label), [row for row in nll if _is_kind(row, kind) and row.method == method])
        for method in ("mdlm", "vadd", "emoe")
        for label, kind in KINDS.items()
    ]
    steps = steps_of(lines)

    def cell(wanted: int, line: Line) -> str:
        rows = [row for row in line.rows if (_steps(row) or steps[0]) == wanted]  # the objective has no T
        mean = mean_over_seeds(rows, measured=True)
        return write(mean._replace(stderr=mean.stderr or None), ".3f", plain=True) if mean else ""

    truth = next((row for row in nll if row.method == "data"), None)
    if truth is None:
        return []
    gains = (f"{part.label(row.method)} {row.value:+.3f}" for row in part.select(metric="coordination_gain"))
    text = note("likelihood", part, truth=f"{truth.value:.3f}", rows=f"{truth.n:,}", gains=comma(gains))
    columns = [(f"T = {wanted}", functools.partial(cell, wanted)) for wanted in steps]
    return build(TableSpec(["Method", "nats per row"], lines, columns, text, align="ll"))


def _is_kind(row: Row, kind: str) -> bool:
    return str(row.convention).startswith(kind)


def _steps(row: Row) -> int:
    """T of `bound@T`, `iw@T,K` or the exact NLL of a T-step sampler; 0 without one."""
    return row.nfe or int(str(row.convention).partition("@")[2].partition(",")[0] or 0)


def two_bits(results: Results) -> list[Table]:
    """Two equal bits: the least objective, and bounds and exact NLL of the same model, beside the entropy."""
    part = results.only(data="two-bits", metric="nll")
    least = [row for row in part.rows if row.convention in OBJECTIVES]
    entropy = next((row.value for row in part.select(method="data")), None)
    if entropy is None:
        return []
    labels = [OBJECTIVES[str(row.convention)] for row in least]
    lines = [
        Line((label, f"**{row.value:.3f}**", f"log(2) / {k} = {math.log(2) / k:.3f}"), part.select(recipe=row.recipe))
        for (label, k), row in zip(labels, least, strict=True)
    ]
    bounds = [name for name in conventions_of(lines, "nll") if name.startswith("bound@")]
    columns = over("convention", "{}", bounds, Number())
    columns += over("nfe", "exact NLL, T = {}", steps_of(lines), Number(where={"convention": "exact"}))
    text = note("two-bits", part, entropy=f"{entropy:.3f}")
    return build(TableSpec(["Objective", "minimised", "in theory"], lines, columns, text, align="lrr"))
