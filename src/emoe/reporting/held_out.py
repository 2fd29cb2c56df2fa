"""Tables of the study of held-out densities (`emoe reproduce held-out`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial

from emoe.reporting.cells import Column, Line, Number, data_name, measure, write
from emoe.reporting.recipes import as_typed, parse
from emoe.reporting.results import Results, Row, SeedMean, mean_of, methods_of
from emoe.reporting.table import Table, build, comma, note, steps_of


def held_out_tables(results: Results) -> list[Table]:
    """Exact KL and overlap on densities that no setting was chosen on, a table for each setting that was run."""
    exact = results.only(convention="exact")
    settings: dict[str, set[str | None]] = {}
    for row in exact.rows:
        changes = {field: value for field, value in parse(row.recipe).changes.items() if field != "domain.density"}
        settings.setdefault(as_typed(changes), set()).add(row.recipe)
    tables = []
    for setting in sorted(settings):
        tables += _table(exact.only(recipe=settings[setting]), f"With `{setting}`:" * (len(settings) > 1))
    only = "".join(f"`{setting}`, " for setting in settings if setting and len(settings) == 1)
    text = note("held-out", exact, numbers=comma(exact.seeds), only=only)
    last = [dataclasses.replace(table, note="\n".join(filter(None, (table.note, text)))) for table in tables[-1:]]
    return tables[:-1] + last


def _table(part: Results, title: str) -> list[Table]:
    """One setting; the note counts the densities where an extension of a method is better: KL lower, overlap higher."""
    methods = methods_of(part.rows)
    steps = steps_of([Line((), part.rows)])
    lines = {
        (data, metric, nfe): Line(
            (data_name(data), f"{measure(metric).label}, NFE {nfe}"),
            part.select(data=data, metric=metric, nfe=nfe),
        )
        for data in sorted({row.data for row in part.rows})
        for metric in ("kl", "overlap")
        for nfe in [nfe for nfe in steps if nfe in (1, 2)] or steps
    }
    columns: list[Column] = [(part.label(method), Number(where={"method": method})) for method in methods]
    sentences = []
    for plain, other in [(plain, other) for plain in methods for other in methods if other.startswith(f"{plain}-")]:
        first, second = part.label(plain), part.label(other)
        columns.append((f"{second} − {first}", partial(_difference, plain, other)))
        counts: dict[str, list[bool]] = {}
        for (_, metric, nfe), line in lines.items():
            if mean := gap(line.rows, plain, other):
                name, sign = ("KL", -1) if metric == "kl" else (metric, 1)
                counts.setdefault(f"{name} at NFE {nfe}", []).append(sign * mean.mean > 0)
        words = comma(f"{name} in {sum(better)} of {len(better)}" for name, better in counts.items())
        sentences += [f"{second} is better than {first}: {words} densities."] * bool(counts)
    corner = ["Density", "of the exact law"]
    return build(corner, list(lines.values()), columns, "\n".join(sentences), title=title, align="ll")


def gap(rows: Sequence[Row], plain: str, other: str) -> SeedMean | None:
    """Mean over seeds of (second - first method) on the same seed, with its error; None without a common seed."""
    first, second = ({row.seed: row.value for row in rows if row.method == method} for method in (plain, other))
    return mean_of(second[seed] - first[seed] for seed in first if seed in second)


def _difference(plain: str, other: str, line: Line) -> str:
    digits = measure(line.rows[0].metric).digits if line.rows else 0
    return write(gap(line.rows, plain, other), f"+.{digits}f")
