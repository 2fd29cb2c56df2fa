"""Generated blocks: ours are current, stale ones are found, faulty markers refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from emoe.reporting.docs import BLOCKS, BlockError, main, render
from emoe.reporting.results import Row, RunInfo, record

ROOT = Path(__file__).parents[2]
RUN = RunInfo(command="c", commit="d", device="e", torch="2", python="3", date="2025-01-01T00:00:00Z", wall_s=1)


def block(name: str, content: str = "") -> str:
    return f"<!-- generated:{name} -->\n{content}<!-- /generated:{name} -->\n"


PAGE = f"# Title\n\n{block('toy-exact')}{block('held-out-table')}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Results of two methods with two seeds, and exact laws from which one sample is 1 point off."""
    rows = []
    for method, value in (("vadd", 92.8), ("emoe", 87.0)):
        for seed in (0, 1):
            off = 1.0 if (method, seed) == ("vadd", 0) else 0.1
            same = dict(task="toy", data="8-modes", method=method, recipe=f"toy-8modes-{method}", seed=seed, nfe=1)
            rows.append(Row(**same, metric="validity", value=value + seed, n=2500))
            rows.append(Row(**same, metric="validity", value=value + seed - off, convention="exact"))
    record(tmp_path / "results" / "toy.json", RUN, rows)
    return tmp_path / "results"


def test_generated_blocks_are_current(capsys):
    """Fails when results/ or the text changed without `python -m emoe.reporting.docs`."""
    assert main(["--root", str(ROOT), "--check"]) == 0, capsys.readouterr().out


def test_blocks_are_made_anew_and_examples_of_markers_are_left_alone(folder):
    example = "```\n<!-- generated:NAME -->\n```\nthe mark `<!-- generated:NAME -->` opens a block\n"
    page = render(PAGE + example, folder)
    assert page.startswith("# Title\n\n<!-- generated:toy-exact -->\n\n| 8-modes | of the exact law | NFE 1 |")
    assert page.endswith(f"<!-- /generated:held-out-table -->\n{example}")
    assert render(page, folder) == page == render(page.replace("92.80 %", "97.5 %"), folder)
    # sqrt(91.8 * 8.2 / 2500) = 0.549 points
    assert "in 4 comparisons: 1.8 standard errors (VADD on 8-modes, seed 0, NFE 1: 92.80 % of 2,500 samples" in page


def test_blocks_without_numbers_name_the_command(tmp_path):
    for name, make in BLOCKS.items():
        assert make(tmp_path).startswith("*No numbers here yet: run `"), name
    assert "`emoe reproduce text --size text-tiny`" in BLOCKS["text-tiny-checks"](tmp_path)


FAULTS = {
    "\n<!-- generated:toy-exact -->\n": "line 2: .* does not pair up",
    "<!-- /generated:toy-exact -->\n": "line 1: .* does not pair up",
    "<!-- generated:toy-exact -->\n<!-- /generated:summary -->\n": "line 1: .* does not pair up",
    block("toy-exact", "<!-- generated:summary -->\n"): "line 1: .* does not pair up",
    block("toy-exakt"): "no block 'toy-exakt'; known: .*toy-exact",
}


@pytest.mark.parametrize("page", FAULTS)
def test_faulty_markers_are_refused(tmp_path, page):
    with pytest.raises(BlockError, match=FAULTS[page]):
        render(page, tmp_path)


def test_the_command(folder, capsys):
    root, page = folder.parent, folder / "toy.md"
    words = ["--root", str(root)]
    assert main(words) == 2 and "README.md" in capsys.readouterr().err
    (root / "docs" / "deep").mkdir(parents=True)
    (root / "README.md").write_text(PAGE)
    (root / "docs" / "deep" / "page.md").write_text(block("toy-exact"))
    page.write_text("old")
    assert main([*words, "--check"]) == 1
    out = capsys.readouterr().out
    assert "README.md is out of date" in out and "page.md is out of date" in out
    assert (root / "README.md").read_text() == PAGE and page.read_text() == "old"
    assert main(words) == 0 and main([*words, "--check"]) == 0
    assert page.read_text().startswith("**Validity (%)**")
    (root / "README.md").write_text(block("study"))
    assert main(words) == 2 and "no block 'study'" in capsys.readouterr().err
    (root / "research").mkdir()
    (root / "research" / "tables.py").write_text("BLOCKS = {'study': lambda folder: 'one-off'}")
    assert main(words) == 0 and "one-off" in (root / "README.md").read_text()
