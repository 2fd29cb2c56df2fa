"""Tables of the toy from samples, of exact laws and of likelihoods: `emoe reproduce toy`, `held-out`, `likelihood`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import partial

from emoe.reporting.cells import DASH, Column, Line, Number, data_name, data_of, measure, over, write
from emoe.reporting.grid import grid_note, main_rows, metric_tables, sampled
from emoe.reporting.recipes import as_typed, parse
from emoe.reporting.render import markdown
from emoe.reporting.results import Results, Row, SeedMean, mean_of, mean_over_seeds, methods_of
from emoe.reporting.table import Table, build, comma, note, steps_of, with_note

METRICS = ("validity", "overlap")  # samples that repeat one good mode raise validity; only overlap shows it
KINDS = {"objective": "objective", "bound@T": "bound@", "iw@T,16": "iw@", "exact": "exact"}


def toy_tables(results: Results, metric: str) -> list[Table]:
    """The paper's toy table of a metric with our numbers, from samples as in the paper; the last has the note."""
    results = sampled(results)
    tables = metric_tables(results, "toy", metric)
    return with_note(tables, grid_note(main_rows(results, task="toy", metric=metric), metric, tables))


def toy_page(results: Results) -> str:
    """`results/toy.md`: validity and overlap, which belong together, each with its densities side by side."""
    tables = {f"**{measure(metric).label}**": toy_tables(results, metric) for metric in METRICS}
    return "\n".join(f"{title}\n\n{markdown([side_by_side(own)])}" for title, own in tables.items() if own)


def side_by_side(tables: Sequence[Table]) -> Table:
    """One table of the columns of all."""
    header = ["Method"]
    rows = {row[0]: [row[0]] for table in tables for row in table.rows}
    for table in tables:
        name, first, *others = table.header
        header += [f"{name}, {first}", *(heading.removeprefix("NFE ") for heading in others)]
        cells = {row[0]: row[1:] for row in table.rows}
        for label, row in rows.items():
            row += cells.get(label, [DASH] * (len(table.header) - 1))
    return Table(header, list(rows.values()), note=tables[-1].note)


def exact_tables(results: Results) -> list[Table]:
    """Measures of the exact laws of the models, a table for each density, and how far samples lie from them."""
    models = results.only(task="toy", convention="exact").models
    exact = models.of(main_rows(models))
    tables = []
    for data in data_of(exact):
        part = exact.only(data=data)
        lines = [
            Line((part.label(method), measure(metric).label), part.select(method=method, metric=metric))
            for method in methods_of(part.rows)
            for metric in ("validity", "overlap", "nll", "kl")
        ]
        columns = over("nfe", "NFE {}", steps_of(lines), Number())
        tables += build([data_name(data), "of the exact law"], lines, columns)
    distance = _largest_distance(results, exact.rows)
    return with_note(tables, f"Mean ± standard error over seeds ({comma(exact.seeds)}). {distance}")


def _largest_distance(results: Results, exact: Sequence[Row]) -> str:
    """The largest |sampled - exact validity| in standard errors, over every run and NFE that has both.

    The error is that of n independent samples of the exact law, sqrt(p (1 - p) / n), which stays above zero where all
    samples happen to be valid; that of an exact law whose latent was drawn is added in squares.
    """
    sampled = {row.identity: row for row in results.select(task="toy", metric="validity", convention=None)}
    distances = []
    for law in (row for row in exact if row.metric == "validity"):
        row = sampled.get((*law.identity[:-1], None))  # the convention is the last
        if row is not None and row.n:
            error = math.hypot(math.sqrt(max(law.value * (100 - law.value) / row.n, 0.0)), law.stderr or 0.0)
            if error > 0:
                distances.append((abs(row.value - law.value) / error, row, law))
    if not distances:
        return "No sampled validity stands beside these."
    most, row, law = max(distances, key=lambda distance: distance[0])
    return (
        f"Largest distance between sampled and exact validity in {len(distances)} comparisons: {most:.1f} standard "
        f"errors ({results.label(row.method)} on {data_name(row.data)}, seed {row.seed}, NFE {row.nfe}: "
        f"{row.value:.2f} % of {row.n:,} samples, {law.value:.2f} % of the law)."
    )


def held_out_tables(results: Results) -> list[Table]:
    """Exact KL and overlap on densities that no setting was chosen on, a table for each setting that was run."""
    exact = results.only(convention="exact")
    settings: dict[str, set[str | None]] = {}
    for row in exact.rows:
        changes = {field: value for field, value in parse(row.recipe).changes.items() if field != "domain.density"}
        settings.setdefault(as_typed(changes), set()).add(row.recipe)
    tables = []
    for setting, recipes in sorted(settings.items()):
        tables += _held_out_table(exact.only(recipe=recipes), f"With `{setting}`:" * (len(settings) > 1))
    only = "".join(f"`{setting}`, " for setting in settings if setting and len(settings) == 1)
    for table in tables[-1:]:
        tables[-1] = dataclasses.replace(table, note=f"{table.note}\n{note('held-out', exact, only=only)}".strip())
    return tables


def _held_out_table(part: Results, title: str) -> list[Table]:
    """One setting; the note counts the densities where an extension of a method is better: KL lower, overlap higher."""
    methods, steps = methods_of(part.rows), steps_of([Line((), part.rows)])
    lines = {
        (data, metric, nfe): Line((data_name(data), f"{measure(metric).label}, NFE {nfe}"), rows)
        for data in sorted({row.data for row in part.rows})
        for metric in ("kl", "overlap")
        for nfe in [nfe for nfe in steps if nfe in (1, 2)] or steps
        for rows in [part.select(data=data, metric=metric, nfe=nfe)]
    }
    columns: list[Column] = [(part.label(method), Number(where={"method": method})) for method in methods]
    sentences = []
    for plain, other in [(plain, other) for plain in methods for other in methods if other.startswith(f"{plain}-")]:
        first, second = part.label(plain), part.label(other)
        columns.append((f"{second} − {first}", partial(_difference, plain, other)))
        counts: dict[str, list[bool]] = {}
        for (_, metric, nfe), line in lines.items():
            if mean := _gap(line.rows, plain, other):
                name, sign = ("KL", -1) if metric == "kl" else (metric, 1)
                counts.setdefault(f"{name} at NFE {nfe}", []).append(sign * mean.mean > 0)
        words = comma(f"{name} in {sum(better)} of {len(better)}" for name, better in counts.items())
        sentences += [f"{second} is better than {first}: {words} densities."] * bool(counts)
    corner = ["Density", "of the exact law"]
    return build(corner, list(lines.values()), columns, "\n".join(sentences), title=title)


def _gap(rows: Sequence[Row], plain: str, other: str) -> SeedMean | None:
    """Mean over seeds of (second - first method) on the same seed, with its error; None without a common seed."""
    first, second = ({row.seed: row.value for row in rows if row.method == method} for method in (plain, other))
    return mean_of(second[seed] - first[seed] for seed in first if seed in second)


def _difference(plain: str, other: str, line: Line) -> str:
    digits = measure(line.rows[0].metric).digits if line.rows else 0
    return write(_gap(line.rows, plain, other), f"+.{digits}f")


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
    columns = [(f"T = {wanted}", partial(_likelihood, wanted, wanted == steps[0])) for wanted in steps]
    gains = (f"{part.label(row.method)} {row.value:+.3f}" for row in part.select(metric="coordination_gain"))
    text = note("likelihood", part, truth=f"{truth[0].value:.3f}", rows=f"{truth[0].n:,}", gains=comma(gains))
    return build(["Method", "nats per row"], lines, columns, text)


def _likelihood(wanted: int, first: bool, line: Line) -> str:
    """The likelihood of T steps; one without T, as the objective, in the first column."""
    mean = mean_over_seeds([row for row in line.rows if _steps(row) in (wanted, first and None)], measured=True)
    return write(mean._replace(stderr=mean.stderr or None), ".3f", plain=True) if mean else ""


def _steps(row: Row) -> int | None:
    """T of `bound@T`, `iw@T,K` or the exact NLL of a T-step sampler; None without one."""
    numbers = str(row.convention).partition("@")[2]
    return int(numbers.partition(",")[0]) if numbers else row.nfe
