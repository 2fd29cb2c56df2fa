"""Tables of the toy from samples, of exact laws and of likelihoods: `emoe reproduce toy`, `held-out`, `likelihood`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from emoe.reporting.cells import DASH, Line, Number, data_name, data_of, measure, over
from emoe.reporting.grid import main_rows, metric_tables, sampled, seeds_and_samples
from emoe.reporting.recipes import as_typed, parse, without
from emoe.reporting.render import markdown
from emoe.reporting.results import Results, Row, methods_of, select
from emoe.reporting.table import Table, build, comma, note, steps_of, with_note

METRICS = ("validity", "overlap")  # samples that repeat one good mode raise validity; only overlap shows it
KINDS = {"objective": "objective", "bound@T": "bound@", "iw@T,16": "iw@", "exact": "exact"}  # label -> begin of a name


def toy_page(results: Results) -> str:
    """`results/toy.md`: the paper's tables with our numbers, from samples as in the paper, densities side by side."""
    results, tables = sampled(results), []
    for metric in METRICS:
        if parts := metric_tables(results, "toy", metric):
            table, label = side_by_side(parts), measure(metric).label
            cells = [cell for row in table.rows for cell in row[1:]]
            words = ["mean ± standard error over seeds"] * any("±" in cell for cell in cells)
            words += seeds_and_samples(main_rows(results, task="toy", metric=metric))
            words += ["*(italics)*: the paper"] * any("*(" in cell for cell in cells)
            words += ["**bold**: best model of a column"] * any(cell.startswith("**") for cell in cells)
            words += [f"{DASH}: not measured"] * any(cell.startswith(DASH) for cell in cells)
            table.title, table.note = f"**{label}**", f"{label}: {'; '.join(words)}."
            tables.append(table)
    return markdown(tables)


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
    return Table(header, list(rows.values()))


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
    for law in select(exact, metric="validity"):
        row = sampled.get(replace(law, convention=None).identity)
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
        setting = as_typed(without(parse(row.recipe).changes, ["domain.density"]))
        settings.setdefault(setting, set()).add(row.recipe)
    tables = []
    for setting, recipes in sorted(settings.items()):
        tables += _held_out_table(exact.only(recipe=recipes), f"With `{setting}`:" * (len(settings) > 1))
    only = "".join(f"`{setting}`, " for setting in settings if setting and len(settings) == 1)
    for table in tables[-1:]:
        table.note = f"{table.note}\n{note('held-out', exact, only=only)}".strip()
    return tables


def _held_out_table(part: Results, title: str) -> list[Table]:
    """One setting; the note counts the densities where an extension of a method is better: KL lower, overlap higher."""
    methods, steps, rows = methods_of(part.rows), steps_of([Line((), part.rows)]), list(part.rows)
    columns = [(part.label(method), Number(where={"method": method})) for method in methods]
    pairs = [(plain, other) for plain in methods for other in methods if other.startswith(f"{plain}-")]
    for plain, other in pairs:  # differences between runs of the same seed, as rows of a method of their own
        values = {(row.data, row.seed, row.nfe, row.metric): row.value for row in part.select(method=plain)}
        name = f"{part.label(other)} − {part.label(plain)}"
        columns.append((name, Number(where={"method": name}, form="+")))
        for row in part.select(method=other):
            if (value := values.get((row.data, row.seed, row.nfe, row.metric))) is not None:
                rows.append(replace(row, method=name, value=row.value - value))
    lines = [
        Line((data_name(data), f"{measure(metric).label}, NFE {nfe}"), select(rows, data=data, metric=metric, nfe=nfe))
        for data in sorted({row.data for row in part.rows})
        for metric in ("kl", "overlap")
        for nfe in [nfe for nfe in steps if nfe in (1, 2)] or steps
    ]
    sentences = []
    for (plain, other), (_, number) in zip(pairs, columns[len(methods) :], strict=True):
        counts: dict[str, list[bool]] = {}
        for line in lines:
            if mean := number.mean(line):
                metric, nfe = line.rows[0].metric, line.rows[0].nfe
                better = mean.mean < 0 if metric == "kl" else mean.mean > 0
                counts.setdefault(f"{'KL' if metric == 'kl' else metric} at NFE {nfe}", []).append(better)
        words = comma(f"{name} in {sum(better)} of {len(better)}" for name, better in counts.items())
        sentences += [f"{part.label(other)} is better than {part.label(plain)}: {words} densities."] * bool(counts)
    return build(["Density", "of the exact law"], lines, columns, "\n".join(sentences), title=title)


def likelihood_tables(results: Results) -> list[Table]:
    """Objective, bounds and exact NLL of the demo's models against the number of steps, in nats per row."""
    part = results.only(task="toy")
    nll = part.only(metric="nll")
    steps, truth = steps_of([Line((), nll.rows)]), nll.select(method="data")
    if not truth or not steps:
        return []

    def at_steps(row: Row) -> Row:
        """The NFE is T of `bound@T`, `iw@T,K` or a T-step sampler; the objective, which has none, goes first."""
        numbers = str(row.convention).partition("@")[2].split(",")
        return replace(row, nfe=int(numbers[0] or row.nfe or steps[0]), stderr=row.stderr or None)

    lines = [
        Line((part.label(method), label), [at_steps(row) for row in rows if str(row.convention).startswith(kind)])
        for method in ("mdlm", "vadd", "emoe")
        for rows in [nll.select(method=method)]
        for label, kind in KINDS.items()
    ]
    number = Number(form=".3f", measured=True, plain=True)
    columns = over("nfe", "T = {}", steps, lambda line: number(line) if line.rows else "")
    gains = (f"{part.label(row.method)} {row.value:+.3f}" for row in part.select(metric="coordination_gain"))
    text = note("likelihood", part, truth=f"{truth[0].value:.3f}", rows=f"{truth[0].n:,}", gains=comma(gains))
    return build(["Method", "nats per row"], lines, columns, text)
