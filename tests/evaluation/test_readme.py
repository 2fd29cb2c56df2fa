"""Generated blocks: what they say, when they are stale, and that ours are current."""

from __future__ import annotations

from pathlib import Path

import pytest

from emoe.evaluation.readme import GENERATORS, BlockError, blocks, main, markdown_files, render, stale_blocks
from emoe.evaluation.results import Row, RunInfo, record

ROOT = Path(__file__).parents[2]


def block(name: str, content: str = "") -> str:
    return f"<!-- generated:{name} -->\n{content}<!-- /generated:{name} -->\n"


ALL = "# Title\n\n" + "\n".join(block(name) for name in ("toy-validity", "toy-overlap", "toy-source", "toy-gaps"))


def run(**changes: object) -> RunInfo:
    fields = dict(command="emoe toy", commit="0123456789abcdef-dirty", device="a GPU", torch="2.1", python="3.11")
    return RunInfo(**(fields | dict(date="2025-01-01T00:00:00Z", wall_s=3.0) | changes))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [
        Row(
            task="toy",
            data=data,
            method=method,
            recipe=f"toy-{method}",
            seed=s,
            nfe=1,
            metric=m,
            value=v + s,
            n=n,
        )
        for data in ("8-modes", "swiss-roll")
        for method, value in (("vadd", 92.8), ("emoe", 87.0))
        for m, v, n in (("validity", value, 3000), ("overlap", value - 10, 20000))
        for s in (0, 1)
    ]
    record(tmp_path / "results" / "toy.json", run(), rows)
    return tmp_path / "results"


def test_generated_blocks_are_current():
    """Fails when results/ or the text changed without `python -m emoe.evaluation.readme`."""
    readme = ROOT / "README.md"
    assert readme.exists(), "README.md is missing"
    assert "toy-validity" in blocks(readme.read_text(encoding="utf-8")), "README.md has no toy-validity block"
    stale = {
        path.relative_to(ROOT).as_posix(): names
        for path in markdown_files(ROOT)
        if (names := stale_blocks(path.read_text(encoding="utf-8"), ROOT / "results"))
    }
    assert not stale, "run `python -m emoe.evaluation.readme`"


def test_render_keeps_the_text_around_and_settles(folder):
    once = render(ALL + "The end.\n", folder)
    assert once.startswith("# Title\n\n<!-- generated:toy-validity -->\n\n| 8-modes | NFE 1 |")
    assert once.endswith("<!-- /generated:toy-gaps -->\nThe end.\n")
    assert render(once, folder) == once and stale_blocks(once, folder) == []
    assert stale_blocks(once.replace("87.5", "97.5"), folder) == ["toy-validity", "toy-gaps"]


def test_the_gaps_are_signed_and_carry_the_overlap(folder):
    lines = blocks(render(ALL, folder))["toy-gaps"].split("\n")
    assert (
        "- VADD on 8-modes at NFE 1: validity 93.3 ±0.5, the paper reports 91.8: +1.5 points (overlap 83.3)." in lines
    )
    assert (
        "- E-MoE on 8-modes at NFE 1: validity 87.5 ±0.5, the paper reports 94.4: −6.9 points (overlap 77.5)." in lines
    )
    assert sum(line.startswith("- ") for line in lines) == 4


def test_the_source_is_one_line(folder):
    said = blocks(render(ALL, folder))["toy-source"].strip()
    assert said == (
        "Made by `emoe toy` at commit `0123456789ab-dirty` on a GPU (torch 2.1, Python 3.11): "
        "validity from 2 seeds (0, 1), 3,000 samples each; overlap from 2 seeds (0, 1), 20,000 samples each."
    )


def test_the_source_names_every_machine(folder):
    more = Row(
        task="toy",
        data="8-modes",
        method="mdlm",
        recipe="m",
        seed=0,
        nfe=1,
        metric="validity",
        value=1.0,
        n=5,
    )
    record(folder / "toy.json", run(device="a CPU", command="other"), [more])
    said = blocks(render(ALL, folder))["toy-source"]
    assert "on a GPU" in said and "`other` at commit `0123456789ab-dirty` on a CPU" in said
    assert said.strip().count("\n") == 0


def test_missing_results_are_said_plainly(tmp_path):
    text = render(ALL, tmp_path / "results")
    assert text.count("*No numbers here yet: `results/toy.json` does not exist.*") == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- generated:toy-source -->\n", "never closed"),
        ("<!-- /generated:toy-source -->\n", "line 1: .* does not pair up"),
        (
            "<!-- generated:toy-source -->\n<!-- /generated:toy-gaps -->\n",
            "line 2: .* does not pair up with toy-source",
        ),
        ("<!-- generated:toy-source -->\n<!-- generated:toy-gaps -->\n", "line 2: .* does not pair up"),
        (block("toy-sauce"), "no block 'toy-sauce'; known: .*toy-source"),
        (block("toy-validity"), "needs toy-overlap in the same file"),
    ],
)
def test_faulty_markers_are_refused(tmp_path, text, message):
    with pytest.raises(BlockError, match=message):
        render(text, tmp_path)


def test_examples_of_markers_are_left_alone(tmp_path):
    text = "```\n<!-- generated:NAME -->\n```\nthe mark `<!-- generated:NAME -->` opens a block\n"
    assert render(text, tmp_path) == text


def test_the_command(folder, capsys):
    root = folder.parent
    assert main(["--root", str(root)]) == 2 and "README.md" in capsys.readouterr().err
    (root / "docs" / "deep").mkdir(parents=True)
    (root / "README.md").write_text(ALL)
    (root / "docs" / "deep" / "page.md").write_text(block("toy-source"))
    assert main(["--root", str(root), "--check"]) == 1
    said = capsys.readouterr().out
    assert "README.md: toy-gaps is out of date" in said and "page.md: toy-source is out of date" in said
    assert (root / "README.md").read_text() == ALL
    assert main(["--root", str(root)]) == 0 and main(["--root", str(root), "--check"]) == 0
    (root / "README.md").write_text(block("nothing"))
    assert main(["--root", str(root)]) == 2 and "no block 'nothing'" in capsys.readouterr().err


def test_the_promised_blocks_are_registered():
    assert {"toy-validity", "toy-overlap", "toy-source", "toy-gaps"} <= set(GENERATORS)
