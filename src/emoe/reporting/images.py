"""Tables of the studies of binary images (`emoe reproduce mnist` and `digits`)."""

from __future__ import annotations

from emoe.reporting.cells import Column, Measured, Millions, Number, data_name, data_of, over, reported
from emoe.reporting.notes import note, span
from emoe.reporting.results import Results, method_rank
from emoe.reporting.table import Table, build, conventions_of, models, over_nfe, reference, rivals, with_note

SHOWN = ("frechet", "coverage", "confidence", "precision", "recall")  # over NFE
KINDS = ("objective", "nelbo", "bound", "iw")  # order of the columns


def bpd_tables(results: Results) -> list[Table]:
    """Return tables of parameters, bits per dimension under every convention, and coordination gain."""
    tables = []
    for data in data_of(results):
        part = results.only(data=data)
        lines, rows = models(part), part.models.select(metric="bpd")
        conventions = conventions_of(rows, KINDS)
        lines = sorted([*lines, *rivals(part, lines, "bpd")], key=lambda line: method_rank(line.method))
        columns: list[Column] = [
            ("parameters", Millions("params", paper="{:.2f}M")),
            ("active", Millions("params_active", paper="{:.2f}M")),
            *[("paper", reported("bpd", ".3f"))] * any(line.paper for line in lines),
            *over("convention", "{}", conventions, Measured("bpd", form=".4f")),
            ("coordination gain", Measured("coordination_gain", {"convention": "bound@1"}, "+.4f")),
        ]
        weighted = [name for name in conventions if name.startswith("iw")]
        counts = {
            "images": span(row.n for row in rows if row.convention not in weighted),
            "weighted": span(row.n for row in rows if row.convention in weighted),
        }
        for table in build([data_name(data)], lines, columns, note("images-bpd", part, **counts)):
            table.title = "**Bits per dimension**"
            tables.append(table)
    return tables


def nfe_tables(results: Results) -> list[Table]:
    """Return metrics of samples over NFE, a table for each data set and metric; the last of a data set has the note."""
    tables = []
    for data in data_of(results):
        part = results.only(data=data)
        real, accuracy = reference(part, "data"), Number("judge_accuracy", form=".1f")
        values = {
            "samples": span(row.n for row in part.models.select(metric="ink")),
            "real": span(row.n for row in real.where(metric="pixel_tv").rows),
            "accuracy": accuracy(real) if real.where(metric="judge_accuracy").rows else "",
        }
        own = [table for metric in SHOWN for table in over_nfe(part, metric, "measured")]
        tables += with_note(own, note("images-nfe", part, **values))
    return tables


def image_tables(results: Results) -> list[Table]:
    """Return the tables of `results/mnist.md` and `results/digits.md`."""
    return [*bpd_tables(results), *nfe_tables(results)]
