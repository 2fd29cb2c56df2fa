"""Tables: cells, the best of a column, references, conventions, the paper's numbers, Markdown, terminal and HTML."""

from __future__ import annotations

import pytest

from emoe.console import console_table
from emoe.reporting.cells import Line, Number, over, reported
from emoe.reporting.html import html_table
from emoe.reporting.results import Results, Row, RunInfo
from emoe.reporting.table import Table, build, mark_best, markdown, models, over_nfe, plain, print_metrics, sampled
from emoe.reporting.ties import across_data
from emoe.reporting.toy import toy_tables

RUN = RunInfo(command="c", commit="d", device="e", torch="2", python="3", date="2025-01-01T00:00:00Z", wall_s=1)


def row(method: str, value: float, **changes: object) -> Row:
    fields = dict(task="toy", data="8-modes", method=method, recipe=f"toy-8modes-{method}", seed=0, nfe=1)
    return Row(**(fields | dict(metric="validity", value=value, n=3000) | changes))


def toy_results(*more: Row) -> Results:
    rows = list(more)
    for metric, shift in (("validity", 0.0), ("overlap", -10.0)):
        for data in ("swiss-roll", "8-modes"):
            at = dict(data=data, metric=metric)
            for nfe in (1, 32):
                for method, value in (("mdlm", 40.0), ("emoe", 87.0)):
                    rows += [row(method, value + shift + s, seed=s, nfe=nfe, **at) for s in range(3)]
                rows.append(
                    row("ideal", 41.0 + shift, nfe=nfe, convention="exact", recipe="reference", seed=None, **at)
                )
            rows.append(row("data", 99.0, nfe=None, recipe="reference", **at))
    return Results().add(RUN, rows)


def toy_page(results: Results) -> str:
    return markdown(toy_tables(results))


def cells(text: str, label: str) -> list[str]:
    line = next(line for line in text.splitlines() if line.startswith(f"| {label} "))
    return [cell.strip().replace("\N{NO-BREAK SPACE}", " ") for cell in line.strip("|").split("|")][1:]


def test_the_toy_page_has_the_papers_shape() -> None:
    text = toy_page(toy_results())
    assert text.index("**Validity (%)**") < text.index("**Overlap (%)**")
    assert "| Method | 8-modes, NFE 1 | 32 | Swiss-roll, NFE 1 | 32 |" in text
    assert cells(text, "MDLM")[0] == "41.0 ±0.6<br>*(37.7)*" and cells(text, "VADD")[0] == "—<br>*(91.8)*"
    assert cells(text, "E-MoE")[0] == "**88.0** ±0.6<br>*(94.4)*"
    assert cells(text, "ideal factorised") == ["41.0"] * 4 and cells(text, "real data") == ["99.0"] * 4
    assert cells(text[text.index("**Overlap") :], "E-MoE")[0] == "**78.0** ±0.6"
    lines = [line.split("|")[1].strip() for line in text.splitlines()[4:9]]
    assert lines == ["MDLM", "VADD", "E-MoE", "ideal factorised", "real data"]
    assert (
        "3 seeds (0, 1, 2), 3,000 samples each. ±: standard error over seeds. *Italics*: the paper. **Bold**:" in text
    )
    assert "1 to 3 seeds (0, 1, 2)" in toy_page(toy_results(row("vadd", 90.0)))  # the note hides no missing seeds
    alone = toy_page(Results().add(RUN, [row("mine", 88.0, recipe="demo-mine")]))
    assert alone.endswith("Validity (%): 1 seed (0), 3,000 samples each.\n")


def test_ablations_have_rows_of_their_own_and_exact_laws_are_left_out() -> None:
    exact = [row("emoe", 1.0, convention="exact", seed=s) for s in range(2)]
    other = row("data", 1.0, nfe=None, recipe="reference domain.points=9")  # does not fit the models
    assert toy_page(toy_results(*exact, other)) == toy_page(toy_results())
    changed = toy_page(toy_results(row("emoe", 1.0, recipe="toy-8modes-emoe method.route-tau=0")))
    assert cells(changed, "E-MoE") == cells(toy_page(toy_results()), "E-MoE")
    assert cells(changed, "E-MoE method.route-tau=0") == ["1.0", "—", "—", "—"]
    assert cells(toy_page(toy_results(row("emoe", 1.0, recipe="demo-emoe"))), "E-MoE (demo-emoe)")[0] == "1.0"


def test_unknown_methods_have_a_line_with_their_own_label() -> None:
    mine = {"mine": {"label": "My method", "colour": "#123abc"}}
    results = toy_results(row("mine", 95.0))
    assert cells(toy_page(results), "mine") == ["**95.0**", "—", "—", "—"]
    assert cells(toy_page(results.add(RUN, [], mine)), "My method") == ["**95.0**", "—", "—", "—"]
    table = over_nfe(sampled(results), "validity")[0]
    page = html_table(table, results.colour)
    assert '<i class="key" style="background:#123abc"></i>My method</td><td class="best"><b>95.0</b>' in page


def test_each_convention_has_a_table_and_the_paper_is_not_beside_exact_laws() -> None:
    rows = [row("emoe", value, convention=name) for name, value in (("exact", 80.0), (None, 70.0))]
    samples, exact = over_nfe(Results().add(RUN, rows), "validity")
    assert (exact.title, samples.title) == ("**Validity (%)**, exact", "**Validity (%)**")
    assert exact.rows == [["E-MoE", "80.0"]] and ["E-MoE", "70.0\n*(94.4)*"] in samples.rows
    assert ["VADD", "—\n*(91.8)*"] in samples.rows


@pytest.mark.parametrize("recipe", ["demo-emoe", "toy-8modes-emoe train.steps=50"])
def test_the_paper_stays_away_from_changed_recipes(recipe: str) -> None:
    text = toy_page(Results().add(RUN, [row("emoe", 80.0, recipe=recipe)]))
    assert "*(" not in text and "80.0" in cells(text, "E-MoE")[0]


def test_lines_of_models_name_what_was_changed_in_one_recipe_but_not_in_all() -> None:
    rows = [row("emoe", 1.0, recipe="toy-a-emoe lr=1 steps=5"), row("mdlm", 1.0, recipe="toy-a-mdlm steps=5")]
    rows.append(row("x", 2.0))
    assert [line.labels for line in models(Results().add(RUN, rows[:2]))] == [("MDLM",), ("E-MoE lr=1",)]
    assert models(Results().add(RUN, rows))[-1].labels == ("x (toy-8modes-x)",)
    lines = models(Results().add(RUN, [row("emoe", 1.0), rows[1]]))
    assert [line.paper for line in lines] == ["", "8-modes"]


def test_the_best_of_a_column() -> None:
    rows = {"a": "1.0 | 3.0 ±0.1 | 5", "b": "2.00 | 3.0\n*(9)* | —", "ref": "9 | 9 | 9", "c": "— | 1.0 | —"}
    marked = {
        "high": {"a": "1.0 | **3.0** ±0.1 | 5", "b": "**2.00** | **3.0**\n*(9)* | —"},
        "low": {"a": "**1.0** | 3.0 ±0.1 | 5", "c": "— | **1.0** | —"},
        None: {},
    }
    lines = [Line((name,), reference=name == "ref") for name in rows]
    columns = [(f"{i}", lambda line, i=i: rows[line.labels[0]].split(" | ")[i]) for i in range(3)]
    for better, changed in marked.items():
        (table,) = build(["x"], lines, columns)
        mark_best(table, better)
        assert {name: " | ".join(cells) for name, *cells in table.rows} == rows | changed


def test_cells_are_written_from_rows() -> None:
    rows = [row("emoe", 1.5, stderr=0.25), row("emoe", 2.5, metric="entropy")]
    line = Line(("E-MoE",), rows, "emoe", paper="8-modes")
    assert Number("validity")(line) == "1.5"
    assert Number("validity", error="measured")(line) == "1.5\N{NO-BREAK SPACE}±0.2"
    assert Number("validity", form="+.2f", per=-10, unit=" k")(line) == "\N{MINUS SIGN}0.15 k"
    assert Number("validity", form="+")(line) == "+1.5"
    assert Number("validity", error="entropy")(line) == "1.5\N{NO-BREAK SPACE}±2.5"
    stack = Number("validity", below=[Number("entropy", prefix="H ")], paper="{:.1f}")
    assert [cell(line) for _, cell in over("nfe", "{}", (1, 2), stack)] == ["1.5\nH 2.50\n*(94.4)*", "—"]


def test_notes_explain_italics_only_where_there_are_some() -> None:
    lines, note = [Line(("x",), [row("emoe", 1.0)], "emoe", paper="8-modes")], "One.\n*Italics*: them.\nTwo."
    for cell, shown in ((Number("validity"), "One. Two."), (reported("validity", ".1f"), "One. *Italics*: them. Two.")):
        assert build(["a"], lines, over("nfe", "{}", [1], cell), note)[0].note == shown


def test_markdown_and_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert markdown([Table(["a", "b"], [["x|y", "1\n2"]])]) == "| a | b |\n|---|---:|\n| x\\|y | 1<br>2 |\n"
    print_metrics(sampled(toy_results()), "toy", ["overlap"])
    out = capsys.readouterr().out
    assert out.count("Overlap (%)") == 2 and "8-modes" in out and "78.0* ±0.6" in out
    assert plain("**87.6**\N{NO-BREAK SPACE}±0.6\n*(85.0)*") == "87.6* ±0.6\n(85.0)" and plain("A* `b`") == "A* b"
    console_table(["name [x]", "value"], [["long enough to be cut " * 8, "1.25 ±0.5\n(2)"]], title="T")
    drawn = capsys.readouterr().out
    assert "long enough to be cut " * 8 in drawn and "[x]" in drawn and "(2)" in drawn


def test_recipes_of_ties_without_their_data() -> None:
    names = {
        "ties-emoe domain.family=sums domain.length=8 train.steps=5": "ties-emoe train.steps=5",
        "ties-emoe-plus method.carriers=all": "ties-emoe-plus method.carriers=all",  # of schema 1
        "ties-emoe backbone.depth=6 domain.length=8": "ties-emoe backbone.depth=6",  # 4 is the usual depth
    }
    rows = [row("emoe", 1.0, task="ties", data="pairs-L8", recipe=recipe) for recipe in names]
    assert sorted(row.recipe for row in across_data(Results().add(RUN, rows)).rows) == sorted(names.values())
