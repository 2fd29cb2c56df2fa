"""Tables of the studies of binary images (`emoe reproduce mnist` and `digits`)."""

from __future__ import annotations

from emoe.reporting.cells import Column, Line, Measured, Millions, Number, data_name, data_of, measure, over, reported
from emoe.reporting.recipes import common_changes, comparable, paper_methods, reference_name
from emoe.reporting.render import markdown
from emoe.reporting.results import Results, method_rank
from emoe.reporting.table import Table, build, conventions_of, models, note, span, steps_of, with_note

SHOWN = ("frechet", "coverage", "confidence", "precision", "recall")  # over NFE
KINDS = ("objective", "nelbo", "bound", "iw")  # order of the columns


def bpd_tables(results: Results) -> list[Table]:
    """Parameters, bits per dimension under every convention, and coordination gain; also of the paper's methods."""
    tables = []
    for data in data_of(results):
        part = results.only(data=data)
        lines, paper = models(part), comparable(part.models.rows)
        for method in sorted(paper_methods() - {line.method for line in lines if line.paper}, key=method_rank):
            line = Line((part.label(method),), (), method, paper=paper)
            lines += [line] * (line.reported("bpd") is not None)
        columns: list[Column] = [
            ("parameters", Millions("params", paper="{:.2f}M")),
            ("active", Millions("params_active", paper="{:.2f}M")),
            *[("paper", reported("bpd", ".3f"))] * bool(paper),
            *over("convention", "{}", conventions_of(lines, "bpd", KINDS), Measured("bpd", form=".4f")),
            ("coordination gain", Measured("coordination_gain", {"convention": "bound@1"}, "+.4f")),
        ]
        counts = []
        for form, weighted in (("{} test images", False), ("`iw` on {}", True)):
            rows = part.models.select(metric="bpd")
            if count := span(row.n for row in rows if str(row.convention).startswith("iw") == weighted):
                counts.append(form.format(count))
        tables += build([data_name(data)], lines, columns, note("images-bpd", part, counts="; ".join(counts)))
    return tables


def nfe_tables(results: Results) -> list[Table]:
    """Measures of samples over NFE, a table for each data set and metric; the last of a data set has the note."""
    tables = []
    for data in data_of(results):
        part = results.only(data=data)
        own, real = [table for metric in SHOWN for table in nfe_table(part, metric)], real_data(part)
        drawn = span(row.n for row in part.models.select(metric="ink"))
        words = [f"{drawn} samples for each NFE"] * bool(drawn)
        if any(cell.startswith("**") for table in own for row in table.rows for cell in row):
            words.append("**bold**: best model of a column")
        if images := span(row.n for row in real.where(metric="pixel_tv").rows):
            words.append(
                f"real data: {images} training images in place of samples, for confidence the test images "
                "(so it does not depend on NFE)"
            )
        if accuracy := Number("judge_accuracy").mean(real):
            words.append(f"the judge gets {accuracy.mean:.1f} % of the test images right")
        tables += with_note(own, note("images-nfe", part, words="; ".join(words)))
    return tables


def nfe_table(part: Results, metric: str) -> list[Table]:
    """A metric of samples over NFE for all models of a data set, and for real data."""
    lines, real = models(part, metric=metric), real_data(part).where(metric=metric)
    columns = over("nfe", "NFE {}", steps_of(lines, metric), Measured(metric))
    title, corner = f"**{measure(metric).label}**", [data_name(data) for data in data_of(part)]
    return build(corner, lines + [real] * bool(real.rows), columns, title=title, better=measure(metric).better)


def real_data(part: Results) -> Line:
    """Real data that fit the models of a data set; where these differ in the data, the usual ones."""
    rows = part.select(method="data", recipe=reference_name(common_changes(part.models.rows)))
    return Line((part.label("data"),), rows, "data", reference=True)


def image_page(results: Results) -> str:
    """`results/mnist.md` and `results/digits.md`."""
    return f"**Bits per dimension**\n\n{markdown([*bpd_tables(results), *nfe_tables(results)])}"
