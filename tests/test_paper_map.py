"""docs/paper_map.md: functions exist and cite their equation, tests exist, no equation is missing."""

from __future__ import annotations

import ast
import pkgutil
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAP = ROOT / "docs" / "paper_map.md"
WANTED = {f"Eq. {n}" for n in (*range(1, 16), 17, 19, 22, 39)} | {"Algo. 1", "Algo. 2"}


def rows(heading: str) -> list[list[str]]:
    """The cells of a table under a heading, its first two lines left out."""
    section = MAP.read_text("utf-8").split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines[2:]]


def citations(text: str) -> set[str]:
    """All citations of a docstring, ranges and lists expanded: "Eq. 2-3 and 14" is {"Eq. 2", "Eq. 3", "Eq. 14"}."""
    cited = set()
    for kind, numbers in re.findall(r"\b(Eq|Algo)\. (\d+(?:-\d+)?(?:(?:, | and )\d+(?:-\d+)?)*)", text):
        for first, last in re.findall(r"(\d+)(?:-(\d+))?", numbers):
            cited |= {f"{kind}. {n}" for n in range(int(first), int(last or first) + 1)}
    return cited


def has_test(name: str) -> bool:
    path, _, function = name.partition("::")
    file = ROOT / path
    if not file.is_file():
        return False
    tree = ast.parse(file.read_text("utf-8"))
    return any(isinstance(node, ast.FunctionDef) and node.name == function for node in ast.walk(tree))


EQUATIONS = rows("Equations and algorithms")
STEPS = rows("Steps of the proofs")


@pytest.mark.parametrize(("equation", "says", "function", "test"), EQUATIONS, ids=lambda cell: cell.split("::")[-1])
def test_function_cites_its_equation_and_has_its_test(equation: str, says: str, function: str, test: str):
    target = pkgutil.resolve_name(function)
    assert says and equation in citations(target.__doc__ or ""), f"the docstring of {function} does not cite {equation}"
    assert function.startswith("emoe.") and has_test(test), f"there is no test {test}"


@pytest.mark.parametrize(("step", "says", "test"), STEPS, ids=lambda cell: cell.split("::")[-1])
def test_step_of_a_proof_has_its_test(step: str, says: str, test: str):
    assert says and citations(step) and has_test(test), f"there is no test {test}"


def test_the_map_is_complete_and_citations_are_parsed_in_their_usual_forms():
    assert {row[0] for row in EQUATIONS} == WANTED
    equations = {f"Eq. {n}" for n in (2, 3, 13, 14, 16)}
    assert citations("x (Eq. 2-3 and 13-14, 16), Algo. 1-2") == equations | {"Algo. 1", "Algo. 2"}
    assert citations("Eq. 1 of 12, equation 5, Eq.7") == {"Eq. 1"}
    assert not has_test("tests/test_paper_map.py::test_of_nothing") and not has_test("tests/none.py::test_x")
