"""Tables of results: cells, winners, yardsticks, conventions and formats."""

from __future__ import annotations

import builtins

import pytest

from emoe.console import console_table, plain_table
from emoe.evaluation.grid import best_places, metric_grid, toy_grid
from emoe.evaluation.results import Results, ResultsError, Row, RunInfo
from emoe.evaluation.tables import (
    grid_markdown,
    markdown_table,
    print_grid,
    toy_note,
    toy_table,
    toy_tables,
)

RUN = RunInfo(command="c", commit="d", device="e", torch="2", python="3", date="2025-01-01T00:00:00Z", wall_s=1)


def row(method: str, value: float, **changes: object) -> Row:
    fields = dict(task="toy", data="8-modes", method=method, recipe=f"toy-8modes-{method}", seed=0, nfe=1)
    return Row(**(fields | dict(metric="validity", value=value, n=3000) | changes))


def toy_results() -> Results:
    rows = []
    for metric, shift in (("validity", 0.0), ("overlap", -10.0)):
        for nfe in (1, 32):
            for data in ("swiss-roll", "8-modes"):
                for method, value in (("mdlm", 40.0), ("emoe", 87.0)):
                    rows += [
                        row(method, value + shift + s, seed=s, nfe=nfe, data=data, metric=metric) for s in range(3)
                    ]
                rows.append(
                    row(
                        "ideal",
                        41.0 + shift,
                        nfe=nfe,
                        data=data,
                        metric=metric,
                        convention="exact",
                        seed=None,
                    )
                )
        rows += [row("data", 99.0, nfe=None, data=data, metric=metric) for data in ("8-modes", "swiss-roll")]
    return Results().add(RUN, rows)


def cells(table: str, label: str) -> list[str]:
    line = next(line for line in table.splitlines() if line.startswith(f"| {label} "))
    return [cell.strip().replace("\N{NO-BREAK SPACE}", " ") for cell in line.strip("|").split("|")][1:]


def test_the_toy_table_has_the_papers_shape():
    table = toy_table(toy_results(), "validity")
    assert table.splitlines()[0] == "| Method | 8-modes, NFE 1 | 32 | Swiss-roll, NFE 1 | 32 |"
    assert cells(table, "MDLM")[0] == "41.0 ±0.6<br>*(37.7)*"
    assert cells(table, "E-MoE")[0] == "**88.0** ±0.6<br>*(94.4)*"
    assert cells(table, "VADD")[0] == "—<br>*(91.8)*"
    assert cells(table, "ideal factorised") == ["41.0"] * 4
    assert cells(table, "real data") == ["99.0"] * 4
    assert [line.split("|")[1].strip() for line in table.splitlines()[2:]] == [
        "MDLM",
        "VADD",
        "E-MoE",
        "ideal factorised",
        "real data",
    ]


def test_overlap_stands_beside_validity():
    text = toy_tables(toy_results())
    assert text.index("**Validity (%)**") < text.index("**Overlap (%)**")
    assert cells(text[text.index("**Overlap") :], "E-MoE")[0] == "**78.0** ±0.6"
    assert "3 seeds (0, 1, 2); 3,000 samples each" in text


def test_a_split_table_names_its_density_in_the_corner():
    first, second = toy_table(toy_results(), split=True).split("\n\n")
    assert first.startswith("| 8-modes | NFE 1 | NFE 32 |") and second.startswith("| Swiss-roll | NFE 1 | NFE 32 |")


def test_seeds_can_be_chosen_and_one_seed_has_no_error():
    table = toy_table(toy_results(), "validity", seeds=[1])
    assert cells(table, "E-MoE")[0] == "**88.0**<br>*(94.4)*"
    assert cells(table, "real data")[0] == "99.0"
    note = toy_note(toy_results(), "validity", seeds=[1])
    assert "1 seed (1)" in note and "±" not in note


def test_the_note_does_not_hide_missing_seeds():
    results = toy_results().add(RUN, [row("vadd", 90.0)])
    assert "1 to 3 seeds (0, 1, 2)" in toy_note(results, "validity")


def test_ablations_stay_out_of_the_main_row():
    results = toy_results().add(RUN, [row("emoe", 1.0, recipe="toy-8modes-emoe-greedy", seed=s) for s in range(3)])
    assert cells(toy_table(results, "validity"), "E-MoE")[0].startswith("**88.0**")
    results.add(RUN, [row("emoe", 1.0, recipe="demo-emoe"), row("data", 1.0, nfe=None, recipe="demo-emoe")])
    assert cells(toy_table(results, "validity"), "E-MoE")[0].startswith("**88.0**")
    assert cells(toy_table(results, "validity"), "real data")[0] == "99.0"
    results.add(RUN, [row("mdlm", 1.0, recipe="toy-other-mdlm")])
    with pytest.raises(ResultsError, match="cannot tell the main recipe of mdlm from toy-8modes-mdlm, toy-other-mdlm"):
        toy_grid(results)


def test_yardsticks_measured_beside_several_recipes_count_once():
    results = toy_results().add(
        RUN, [row("data", 98.0, nfe=None, recipe="toy-1"), row("data", 97.0, nfe=None, recipe="toy-2")]
    )
    assert cells(toy_table(results, "validity"), "real data")[0] == "98.0"


def test_without_results_the_papers_numbers_remain():
    table = toy_table(Results(), "validity")
    assert cells(table, "E-MoE")[0] == "—<br>*(94.4)*" and len(cells(table, "E-MoE")) == 12


def test_unknown_methods_get_a_row_of_their_own():
    assert cells(toy_table(toy_results().add(RUN, [row("mine", 95.0)])), "mine") == [
        "**95.0**",
        "—",
        "—",
        "—",
    ]


def test_conventions_get_a_column_and_the_paper_a_line():
    fields = dict(task="mnist", data="binarized-mnist", recipe="mnist-emoe", metric="bpd", nfe=None)
    rows = [row("emoe", 0.0614, convention=name, **fields) for name in ("objective", "bound@64")]
    table = grid_markdown(metric_grid(Results().add(RUN, rows), "mnist", "bpd"))
    assert table.splitlines()[0] == "| Method | Convention | binarized MNIST |"
    assert "| E-MoE | bound@64 | 0.061 |" in table and "| E-MoE | objective | 0.061 |" in table
    assert "| E-MoE | paper | —<br>*(0.062)* |" in table


def test_the_best_of_a_column():
    columns = [[1.0, 2.0, None], [3.0, 3.0, 1.0], [5.0, None, None]]
    assert best_places(columns, "high") == {(1, 0), (0, 1), (1, 1)}
    assert best_places(columns, "low") == {(0, 0), (2, 1)}
    assert best_places(columns, None) == set()
    assert not any(toy_grid(toy_results()).lines[line].reference for line, _ in toy_grid(toy_results()).best())


def test_markdown_cells_cannot_break_the_table():
    assert markdown_table(["a", "b"], [["x|y", "1\n2"]]) == "| a | b |\n|---|---:|\n| x\\|y | 1<br>2 |\n"
    with pytest.raises(ValueError, match="a row of 1 cells under 2 columns"):
        markdown_table(["a", "b"], [["x"]])


def test_console_with_and_without_rich(capsys, monkeypatch):
    header, rows = ["name [x]", "value"], [["long enough to be cut " * 8, "1.25 ±0.5\n(2)"]]
    console_table(header, rows, title="T")
    drawn = capsys.readouterr().out
    assert "long enough to be cut " * 8 in drawn and "[x]" in drawn and "(2)" in drawn
    real = builtins.__import__

    def without_rich(name: str, *rest: object, **more: object) -> object:
        if name.startswith("rich"):
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without_rich)
    console_table(header, rows, title="T")
    assert capsys.readouterr().out == plain_table(header, rows, title="T")
    assert plain_table(["a", "b"], [["xx", "1"], ["y", "22"]]) == "a    b\n--  --\nxx   1\ny   22\n"


def test_a_grid_prints_one_table_per_density(capsys):
    print_grid(toy_grid(toy_results(), "overlap"))
    out = capsys.readouterr().out
    assert out.count("Overlap (%)") == 2 and "8-modes" in out and "78.0* ±0.6" in out


def test_the_paper_stays_away_from_settings_that_are_not_its_own():
    for recipe in ("demo-emoe", "toy-8modes-emoe train.steps=50"):
        table = toy_table(Results().add(RUN, [row("emoe", 80.0, recipe=recipe)]))
        assert "*(" not in table and "80.0" in cells(table, "E-MoE")[0]


def test_exact_rows_do_not_mix_with_sampled_ones():
    results = toy_results()
    before = toy_table(results, "validity")
    results.add(RUN, [row("emoe", 1.0, convention="exact"), row("emoe", 2.0, convention="exact", seed=1)])
    assert toy_table(results, "validity") == before
