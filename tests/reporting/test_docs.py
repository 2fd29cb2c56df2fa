"""Generated blocks: ours are current, stale ones are found, faulty markers refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from emoe.reporting.docs import BLOCKS, BlockError, main, render
from emoe.reporting.results import Row, RunInfo, record

ROOT = Path(__file__).parents[2]
RUN = RunInfo(
    command="emoe toy", commit="0123456789abcdef-dirty", device="a GPU", torch="2", python="3",
    date="2025-01-01T00:00:00Z", wall_s=3.0,
)  # fmt: skip


def block(name: str, content: str = "") -> str:
    return f"<!-- generated:{name} -->\n{content}<!-- /generated:{name} -->\n"


TOY = "# Title\n\n" + "".join(block(f"toy-{name}") for name in ("source", "gaps", "exact"))


def toy(method: str, metric: str, value: float, **changes: object) -> Row:
    fields = dict(task="toy", data="8-modes", method=method, recipe=f"toy-8modes-{method}", seed=0, nfe=1, n=2500)
    return Row(**(fields | dict(metric=metric, value=value) | changes))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Results of two methods with two seeds, and exact laws from which one sample is 1 point off."""
    rows = []
    for method, value in (("vadd", 92.8), ("emoe", 87.0)):
        for seed in (0, 1):
            off = 1.0 if (method, seed) == ("vadd", 0) else 0.1
            rows.append(toy(method, "overlap", value - 10 + seed, seed=seed))
            rows.append(toy(method, "validity", value + seed, seed=seed))
            rows.append(toy(method, "validity", value + seed - off, seed=seed, convention="exact", n=None))
    record(tmp_path / "results" / "toy.json", RUN, rows)
    return tmp_path / "results"


def test_generated_blocks_are_current(capsys):
    """Fails when results/ or the text changed without `python -m emoe.reporting.docs`."""
    assert main(["--root", str(ROOT), "--check"]) == 0, capsys.readouterr().out


def test_blocks_of_the_toy(folder):
    page, stale = render(TOY + "The end.\n", folder)
    assert page.startswith("# Title\n\n<!-- generated:toy-source -->\n\nMade by `emoe toy` at") and len(stale) == 3
    assert page.endswith("<!-- /generated:toy-exact -->\nThe end.\n") and render(page, folder) == (page, [])
    assert render(page.replace("87.5", "97.5"), folder)[1] == ["toy-gaps"]
    gaps = {"VADD": "93.3 ±0.5, the paper reports 91.8: +1.5 points (overlap 83.3).",
            "E-MoE": "87.5 ±0.5, the paper reports 94.4: −6.9 points (overlap 77.5)."}  # fmt: skip
    assert all(f"- {label} on 8-modes at NFE 1: validity {gap}" in page for label, gap in gaps.items())
    assert "at commit `0123456789ab-dirty` on a GPU (torch 2, Python 3): validity from 2 seeds" in page
    # sqrt(91.8 * 8.2 / 2500) = 0.549 points
    assert "in 4 comparisons: 1.8 standard errors (VADD on 8-modes, seed 0, NFE 1: 92.80 % of 2,500 samples" in page


def test_blocks_without_numbers_name_the_command(tmp_path):
    for name, make in BLOCKS.items():
        assert make(tmp_path).startswith("*No numbers here yet: run `"), name
    assert "`emoe reproduce text --size text-tiny`" in BLOCKS["text-tiny-checks"](tmp_path)


def test_the_block_of_step_times(tmp_path):
    common = dict(task="benchmark", data="mnist-step-gpu", seed=0, nfe=None, metric="step_ms", recipe="r")
    times = {"mdlm": 3.0, "emoe": 6.0, "mdlm, eager": 15.0, "vdm, eager": 21.0}
    rows = [Row(**common, method=method, value=value, stderr=0.01, n=20) for method, value in times.items()]
    record(tmp_path / "benchmark.json", RUN, rows)
    text = BLOCKS["mnist-steps"](tmp_path)
    assert "| MDLM | 3.00 ±0.01 | 10.0 | 7.0x |" in text and "| MDLM, eager | 15.00 ±0.01 | 50.0 | 1.4x |" in text
    assert "| VDM UNet, eager | 21.00 ±0.01 | — | 1.0x |" in text


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("\n<!-- generated:toy-source -->\n", "line 2: .* does not pair up"),
        ("<!-- /generated:toy-source -->\n", "line 1: .* does not pair up"),
        ("<!-- generated:toy-source -->\n<!-- /generated:toy-gaps -->\n", "line 1: .* does not pair up"),
        (block("toy-source", "<!-- generated:toy-gaps -->\n"), "line 1: .* does not pair up"),
        (block("toy-sauce"), "no block 'toy-sauce'; known: .*toy-source"),
    ],
)
def test_faulty_markers_are_refused(tmp_path, page, message):
    with pytest.raises(BlockError, match=message):
        render(page, tmp_path)


def test_examples_of_markers_are_left_alone(tmp_path):
    page = "```\n<!-- generated:NAME -->\n```\nthe mark `<!-- generated:NAME -->` opens a block\n"
    assert render(page, tmp_path) == (page, [])


def test_the_command(folder, capsys):
    root, page = folder.parent, folder / "toy.md"
    assert main(["--root", str(root)]) == 2 and "README.md" in capsys.readouterr().err
    (root / "docs" / "deep").mkdir(parents=True)
    (root / "README.md").write_text(TOY)
    (root / "docs" / "deep" / "page.md").write_text(block("toy-source"))
    page.write_text("old")
    assert main(["--root", str(root), "--check"]) == 1
    out = capsys.readouterr().out
    assert "README.md: toy-gaps is out of date" in out and "page.md: toy-source is out of date" in out
    assert (root / "README.md").read_text() == TOY and page.read_text() == "old"
    assert main(["--root", str(root)]) == 0 and main(["--root", str(root), "--check"]) == 0
    assert page.read_text().startswith("**Validity (%)**")
    (root / "README.md").write_text(block("study"))
    assert main(["--root", str(root)]) == 2 and "no block 'study'" in capsys.readouterr().err
    (root / "research").mkdir()
    (root / "research" / "tables.py").write_text("BLOCKS = {'study': lambda folder: 'one-off'}")
    assert main(["--root", str(root)]) == 0 and "one-off" in (root / "README.md").read_text()
