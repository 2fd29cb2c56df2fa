"""Tables of the toy from samples, of exact laws and of likelihoods: `emoe reproduce toy`, `held-out`, `likelihood`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations, product

from emoe.reporting.cells import DASH, Column, Line, Number, data_name, data_of, measure, over
from emoe.reporting.notes import comma, note, seeds_and_samples
from emoe.reporting.recipes import parse, with_changes, without
from emoe.reporting.results import Results, Row, select
from emoe.reporting.table import Table, build, models, over_nfe, sampled, steps_of, with_note

METRICS = ("validity", "overlap")  # samples that repeat one good mode raise validity; only overlap shows it
KINDS = {"objective": "objective", "bound@T": "bound@", "iw@T,16": "iw@", "exact": "exact"}  # label -> prefix


def toy_tables(results: Results) -> list[Table]:
    """Return the tables of `results/toy.md`: the paper's with our numbers, densities side by side."""
    part, tables = sampled(results).only(task="toy"), list[Table]()
    for metric in METRICS:
        if parts := over_nfe(part, metric):
            samples = seeds_and_samples(part.models.select(metric=metric))
            text = note("toy", part, metric=measure(metric).label, samples=samples)
            tables += with_note([side_by_side(parts)], text)
    return tables


def side_by_side(tables: Sequence[Table]) -> Table:
    """Return one table with the columns of all."""
    header = ["Method"]
    rows = {row[0]: [row[0]] for table in tables for row in table.rows}
    for table in tables:
        name, first, *others = table.header
        header += [f"{name}, {first}", *(heading.removeprefix("NFE ") for heading in others)]
        cells = {row[0]: row[1:] for row in table.rows}
        for label, row in rows.items():
            row += cells.get(label, [DASH] * (len(table.header) - 1))
    return Table(header, list(rows.values()), tables[0].title)


def exact_tables(results: Results) -> list[Table]:
    """Return metrics of exact laws, a table for each density, and the distance of samples from them."""
    exact, tables = results.only(task="toy", convention="exact").models, list[Table]()
    for data in data_of(exact):
        part = exact.only(data=data)
        lines = [
            Line((*line.labels, measure(metric).label), line.where(metric=metric).rows)
            for line in models(part)
            for metric in ("validity", "overlap", "nll", "kl")
        ]
        columns = over("nfe", "NFE {}", steps_of(part.rows), Number())
        tables += build([data_name(data), "of the exact law"], lines, columns)
    return with_note(tables, note("toy-exact", exact, distance=_largest_distance(results, exact.rows)))


def _largest_distance(results: Results, exact: Sequence[Row]) -> str:
    """Find the largest |sampled - exact validity| in standard errors, over every run and NFE that has both.

    The error is that of n independent samples of the exact law, sqrt(p (1 - p) / n), which stays above zero where all
    samples happen to be valid; that of an exact law whose latent was drawn is added in squares.
    """
    samples = {row.identity: row for row in results.select(task="toy", metric="validity", convention=None)}
    distances = []
    for law in select(exact, metric="validity"):
        row = samples.get(replace(law, convention=None).identity)
        if row is not None and row.n and 0 < law.value < 100:
            error = math.hypot(math.sqrt(law.value * (100 - law.value) / row.n), law.stderr or 0.0)
            distances.append((abs(row.value - law.value) / error, row, law))
    if not distances:
        return ""
    most, row, law = max(distances, key=lambda distance: distance[0])
    return (
        f"Largest distance between sampled and exact validity in {len(distances)} comparisons: {most:.1f} standard "
        f"errors ({results.label(row.method)} on {data_name(row.data)}, seed {row.seed}, NFE {row.nfe}: "
        f"{row.value:.2f} % of {row.n:,} samples, {law.value:.2f} % of the law)."
    )


def held_out_tables(results: Results) -> list[Table]:
    """Return a table of exact KL and overlap on densities that no setting was chosen on.

    For a method that extends another one there is a column of differences between runs of the same seed, and a sentence
    that counts the densities where it is better.
    """
    exact = results.only(convention="exact")
    part = exact.of(with_changes(row, without(parse(row.recipe).changes, ["domain.density"])) for row in exact.rows)
    variants, rows, gaps = models(part), list(part.rows), dict[str, Number]()
    for plain, other in permutations(variants, 2):
        changes = [parse(one.rows[0].recipe).changes for one in (plain, other)]
        if other.method.startswith(f"{plain.method}-") and changes[0] == changes[1]:
            name = f"{other.labels[0]} − {plain.labels[0]}"  # as the recipe of rows of their own
            gaps[name] = Number(where={"recipe": name}, form="+")
            values = {(row.data, row.seed, row.nfe, row.metric): row.value for row in plain.rows}
            for row in other.rows:
                if (value := values.get((row.data, row.seed, row.nfe, row.metric))) is not None:
                    rows.append(replace(row, recipe=name, value=row.value - value))
    steps, lines = steps_of(part.rows), list[Line]()
    for data, metric in product(data_of(part), ("kl", "overlap")):
        for nfe in [nfe for nfe in steps if nfe in (1, 2)] or steps:
            labels = data_name(data), f"{measure(metric).label}, NFE {nfe}"
            lines.append(Line(labels, select(rows, data=data, metric=metric, nfe=nfe)))
    sentences = []
    for name, gap in gaps.items():
        better: dict[str, list[bool]] = {}
        for line in lines:
            if mean := gap.mean(line):
                high = measure(line.rows[0].metric).better == "high"
                better.setdefault(line.labels[1], []).append((mean.mean > 0) == high)
        counts = "; ".join(f"{label}: {sum(wins)} of {len(wins)}" for label, wins in better.items())
        sentences.append(f"Densities where {name} is an improvement: {counts}.")
    columns: list[Column] = [(one.labels[0], Number(where={"recipe": one.rows[0].recipe})) for one in variants]
    text = "\n".join([*sentences, note("held-out", part)])
    return build(["Density", "of the exact law"], lines, [*columns, *gaps.items()], text)


def likelihood_tables(results: Results) -> list[Table]:
    """Return a table of objective, bounds and exact NLL of the demo's models against T, in nats per row."""
    part = results.only(task="toy")
    nll = part.only(metric="nll")
    steps, truth = steps_of(nll.rows), nll.select(method="data")
    if not truth or not steps:
        return []

    def at_steps(row: Row) -> Row:
        """Set the NFE to T of `bound@T` or `iw@T,K`; the objective has no T and goes first."""
        numbers = str(row.convention).partition("@")[2].split(",")
        return replace(row, nfe=int(numbers[0] or row.nfe or steps[0]), stderr=row.stderr or None)

    lines = [
        Line((*line.labels, label), [at_steps(row) for row in line.rows if str(row.convention).startswith(kind)])
        for line in models(nll)
        for label, kind in KINDS.items()
    ]
    number = Number(form=".3f", error="measured")
    columns = over("nfe", "T = {}", steps, lambda line: number(line) if line.rows else "")
    gains = comma(f"{part.label(row.method)} {row.value:+.3f}" for row in part.select(metric="coordination_gain"))
    text = note("likelihood", part, truth=f"{truth[0].value:.3f}", rows=f"{truth[0].n:,}", gains=gains)
    return build(["Method", "nats per row"], lines, columns, text)
