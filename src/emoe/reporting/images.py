"""Tables of the studies of binary images (`emoe reproduce mnist` and `digits`)."""

from __future__ import annotations

import dataclasses
from functools import partial

from emoe.reporting.cells import Column, Line, Number, Reported, Stack, data_name, data_order, measure, over
from emoe.reporting.paper import comparable, paper_rows
from emoe.reporting.recipes import common_changes, reference_name
from emoe.reporting.render import markdown
from emoe.reporting.results import Results, method_rank
from emoe.reporting.table import Table, TableSpec, build, conventions_of, models, note, repeat, span, steps_of

SHOWN = ("frechet", "coverage", "confidence", "precision", "recall")  # over NFE
KINDS = ("objective", "nelbo", "bound", "iw")  # order of the columns
PAPER = {"mnist": "binarized-mnist"}  # data set of ours -> of the paper


def data_of(results: Results) -> list[str]:
    """Data sets that models were measured on."""
    return data_order(row.data for row in results.models.rows)


def bpd_tables(results: Results) -> list[Table]:
    """Bits per dimension, a table for each data set."""
    return build(*(bpd_table(results.only(data=data), data) for data in data_of(results)))


def bpd_table(part: Results, data: str) -> TableSpec:
    """Parameters, bits per dimension under every convention, and the coordination gain, with the paper's numbers.

    Methods of the paper that are not measured have a line too, beside recipes that the paper's numbers compare with.
    """
    lines, rows, paper = models(part, PAPER.get(data, "")), part.models.rows, PAPER.get(data, "")
    others = {row["method"] for row in paper_rows()} - {line.method for line in lines if line.paper}
    beside = comparable(rows, paper) if paper else None
    unmeasured = [Line((part.label(name),), (), name, paper=beside) for name in sorted(others, key=method_rank)]
    lines += [line for line in unmeasured if line.reported("bpd") is not None]
    millions, bits = partial(Number, form=".2f", unit="M", per=1e6, error=False), partial(Number, measured=True)
    columns: list[Column] = [
        ("parameters", Stack([millions("params")], "{:.2f}M")),
        ("active", Stack([millions("params_active")], "{:.2f}M")),
        *[("paper", Reported("bpd", ".3f"))] * bool(paper),
        *over("convention", "{}", conventions_of(lines, "bpd", KINDS), bits("bpd", form=".4f")),
        ("coordination gain", bits("coordination_gain", {"convention": "bound@1"}, "+.4f")),
    ]
    counts = {"{} test images": False, "`iw` on {}": True}
    bpd = [row for row in rows if row.metric == "bpd"]
    counted = [
        (form, span(row.n for row in bpd if str(row.convention).startswith("iw") == iw)) for form, iw in counts.items()
    ]
    words = "; ".join(form.format(number) for form, number in counted if number)
    italics = "*Italics*: the paper, whose table does not name a convention." * bool(paper)
    return TableSpec([data_name(data)], lines, columns, note("images-bpd", part, counts=words, paper=italics))


def nfe_tables(results: Results) -> list[Table]:
    """Measures of samples over NFE, a table for each data set and metric; the last of a data set has the note."""
    tables = []
    for data in data_of(results):
        part = results.only(data=data)
        own = build(*(nfe_table(part, metric) for metric in SHOWN))
        tables += own[:-1] + [dataclasses.replace(table, note=_nfe_note(part, own)) for table in own[-1:]]
    return tables


def nfe_table(part: Results, metric: str) -> TableSpec:
    """A metric of samples over NFE for all models of a data set, and for real data."""
    lines = [line for line in models(part) if steps_of([line], metric)]
    steps, real = steps_of(lines, metric), real_data(part).where(metric=metric)
    lines += [dataclasses.replace(real, rows=repeat(real.rows, steps))] * bool(real.rows)
    columns = over("nfe", "NFE {}", steps, Number(metric, measured=True))
    title, corner = f"**{measure(metric).label}**", [data_name(data) for data in data_of(part)]
    return TableSpec(corner, lines, columns, title=title, better=measure(metric).better)


def real_data(part: Results) -> Line:
    """Real data that fit the models of a data set; where these differ in the data, the usual ones."""
    rows = part.select(method="data", recipe=reference_name(common_changes(part.models.rows)))
    return Line((part.label("data"),), rows, "data", reference=True)


def _nfe_note(part: Results, tables: list[Table]) -> str:
    real = real_data(part)
    drawn, images = (
        span(row.n for row in line.where(metric=metric).rows)
        for line, metric in ((Line((), part.models.rows), "ink"), (real, "pixel_tv"))
    )
    accuracy = Number("judge_accuracy").mean(real)
    best = any(cell.startswith("**") for table in tables for row in table.rows for cell in row)
    words = {
        f"{drawn} samples for each NFE": drawn,
        "**bold**: best model of a column": best,
        f"real data: {images} training images in place of samples, for confidence the test images (so it does not "
        "depend on NFE)": images,
        f"the judge gets {accuracy.mean if accuracy else 0:.1f} % of the test images right": accuracy,
    }
    return note("images-nfe", part, words="; ".join(text for text, shown in words.items() if shown))


def image_page(results: Results, task: str) -> str:
    """`results/mnist.md` and `results/digits.md`."""
    results = results.only(task=task)
    return f"**Bits per dimension**\n\n{markdown(bpd_tables(results))}\n{markdown(nfe_tables(results))}"
