"""Generated blocks: ours are current, stale ones are found, faulty markers refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from emoe.reporting.docs import BLOCKS, BlockError, main, render
from emoe.reporting.results import Row, RunInfo, record

ROOT = Path(__file__).parents[2]
PAGES = [
    path
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if "<!-- generated:" in path.read_text()
]
RUN = RunInfo(
    command="emoe toy", commit="0123456789abcdef-dirty", device="a GPU", torch="2", python="3",
    date="2025-01-01T00:00:00Z", wall_s=3.0,
)  # fmt: skip


def block(name: str, content: str = "") -> str:
    return f"<!-- generated:{name} -->\n{content}<!-- /generated:{name} -->\n"


TOY = "# Title\n\n" + "".join(block(f"toy-{name}") for name in ("validity", "overlap", "source", "gaps", "exact"))


def toy(method: str, metric: str, value: float, **changes: object) -> Row:
    fields = dict(task="toy", data="8-modes", method=method, recipe=f"toy-8modes-{method}", seed=0, nfe=1, n=2500)
    return Row(**(fields | dict(metric=metric, value=value) | changes))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Results of two methods with two seeds, and exact laws from which one sample is 1 point off."""
    rows = [toy(m, "overlap", v - 10 + s, seed=s) for m, v in (("vadd", 92.8), ("emoe", 87.0)) for s in (0, 1)]
    for method, value in (("vadd", 92.8), ("emoe", 87.0)):
        for seed in (0, 1):
            off = 1.0 if (method, seed) == ("vadd", 0) else 0.1
            rows.append(toy(method, "validity", value + seed, seed=seed))
            rows.append(toy(method, "validity", value + seed - off, seed=seed, convention="exact", n=None))
    record(tmp_path / "results" / "toy.json", RUN, rows)
    return tmp_path / "results"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_generated_blocks_are_current(path):
    """Fails when results/ or the text changed without `python -m emoe.reporting.docs`."""
    fresh, stale = render(path.read_text(encoding="utf-8"), ROOT / "results")
    assert not stale and fresh == path.read_text(encoding="utf-8"), "run `python -m emoe.reporting.docs`"


def test_blocks_of_the_toy(folder):
    page, stale = render(TOY + "The end.\n", folder)
    assert page.startswith("# Title\n\n<!-- generated:toy-validity -->\n\n| 8-modes | NFE 1 |") and len(stale) == 5
    assert page.endswith("<!-- /generated:toy-exact -->\nThe end.\n") and render(page, folder) == (page, [])
    assert render(page.replace("87.5", "97.5"), folder)[1] == ["toy-validity", "toy-gaps"]
    assert "- VADD on 8-modes at NFE 1: validity 93.3 ±0.5, the paper reports 91.8: +1.5 points (overlap 83.3)." in page
    assert (
        "- E-MoE on 8-modes at NFE 1: validity 87.5 ±0.5, the paper reports 94.4: −6.9 points (overlap 77.5)." in page
    )
    assert (
        "Made by `emoe toy` at commit `0123456789ab-dirty` on a GPU (torch 2, Python 3): validity from 2 seeds" in page
    )
    # sqrt(91.8 * 8.2 / 2500) = 0.549 points
    assert "in 4 comparisons: 1.8 standard errors (VADD on 8-modes, seed 0, NFE 1: 92.80 % of 2,500 samples" in page


def test_blocks_without_numbers_name_the_command(tmp_path):
    for name, make in BLOCKS.items():
        assert make(tmp_path).startswith(
            ("*No numbers here yet: run `", "*No figures here yet: run `emoe reproduce ")
        ), name
    assert "`emoe reproduce text --size text-tiny`" in BLOCKS["text-tiny-design"](tmp_path)


def test_blocks_of_step_times(tmp_path):
    common = dict(task="benchmark", seed=0, nfe=None, metric="step_ms", n=20, stderr=0.01, recipe="r")
    times = {"mdlm": 3.0, "emoe": 6.0, "mdlm, eager": 15.0, "vdm, eager": 21.0}
    rows = [Row(**common, data="mnist-step-gpu", method=method, value=value) for method, value in times.items()]
    rows += [
        Row(**common, data="news-small-step-gpu", method=method, value=value)
        for method, value in (("ar", 16.0), ("mdlm", 8.0))
    ]
    record(tmp_path / "benchmark.json", RUN, rows)
    mnist, text = (BLOCKS[f"{name}-steps"](tmp_path) for name in ("mnist", "text"))
    assert "| MDLM | 3.00 ±0.01 | 10.0 | 7.0x |" in mnist and "| MDLM, eager | 15.00 ±0.01 | 50.0 | 1.4x |" in mnist
    assert "| VDM UNet, eager | 21.00 ±0.01 | — | 1.0x |" in mnist
    assert "| MDLM | 8.0 ±0.01 | 1.0 |\n| AR | 16.0 ±0.01 | 2.0 |" in text and "together 3 minutes" in text
    assert "run `python benchmarks/step_time.py" in BLOCKS["step-variants"](tmp_path)


def test_a_search_shows_ramps_and_failures(tmp_path):
    settings = {"optim.lr": "1e-3", "method.kl-weight": '{"kind": "linear", "start": 4.0, "end": 1.0, "share": 0.6}'}
    outcome = {"task": {"domain.density": "moons"}, "seed": 10}
    metrics = {"kl@1": {"mean": -0.1234, "stderr": 0.01}, "overlap@1": None}
    trials = [
        {"settings": settings, "status": "done", "outcomes": [outcome], "metrics": metrics},
        {"settings": {}, "status": "failed", "outcomes": [outcome], "metrics": {"kl@1": None, "overlap@1": None}},
    ]
    made = {"commit": "0123456789abcdef", "device": "a GPU", "torch": "2", "python": "3"}
    ranking = {"base": "toy-8modes-vadd", "rank": ["kl@1", "overlap@1"], "made": made, "trials": trials}
    (tmp_path / "search").mkdir()
    (tmp_path / "search" / "toy-vadd.json").write_text(json.dumps(ranking), encoding="utf-8")
    text = BLOCKS["search-toy-vadd"](tmp_path)
    assert "| lr 1e-3, kl-weight 4 → 1 over 60% | -0.123 ±0.010 | — |" in text
    assert "| **base** (failed) | — | — |" in text and "over moons (seed 10)" in text and "`0123456789ab`" in text


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("\n<!-- generated:toy-source -->\n", "line 2: .* does not pair up"),
        ("<!-- /generated:toy-source -->\n", "line 1: .* does not pair up"),
        ("<!-- generated:toy-source -->\n<!-- /generated:toy-gaps -->\n", "line 1: .* does not pair up"),
        (block("toy-source", "<!-- generated:toy-gaps -->\n"), "line 1: .* does not pair up"),
        (block("toy-sauce"), "no block 'toy-sauce'; known: .*toy-source"),
        (block("toy-validity"), "needs toy-overlap in the same file"),
    ],
)
def test_faulty_markers_are_refused(tmp_path, page, message):
    with pytest.raises(BlockError, match=message):
        render(page, tmp_path)


def test_examples_of_markers_are_left_alone(tmp_path):
    page = "```\n<!-- generated:NAME -->\n```\nthe mark `<!-- generated:NAME -->` opens a block\n"
    assert render(page, tmp_path) == (page, [])


def test_the_command(folder, capsys):
    root = folder.parent
    assert main(["--root", str(root)]) == 2 and "README.md" in capsys.readouterr().err
    (root / "docs" / "deep").mkdir(parents=True)
    (root / "README.md").write_text(TOY)
    (root / "docs" / "deep" / "page.md").write_text(block("toy-source"))
    assert main(["--root", str(root), "--check"]) == 1
    out = capsys.readouterr().out
    assert "README.md: toy-gaps is out of date" in out and "page.md: toy-source is out of date" in out
    assert (root / "README.md").read_text() == TOY
    assert main(["--root", str(root)]) == 0 and main(["--root", str(root), "--check"]) == 0
    (root / "README.md").write_text(block("nothing"))
    assert main(["--root", str(root)]) == 2 and "no block 'nothing'" in capsys.readouterr().err
