"""Generated blocks: what they say, when they are stale, and that ours are current."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from emoe.evaluation.readme import GENERATORS, BlockError, blocks, main, markdown_files, render, stale_blocks
from emoe.evaluation.results import Row, RunInfo, record
from emoe.evaluation.text_blocks import NEWS_STEPS
from emoe.recipes import get_recipe

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


# --- Exact laws, and two equal bits -------------------------------------------------------------------------------


def toy_row(method: str, metric: str, value: float, **changes: object) -> Row:
    fields = dict(task="toy", data="8-modes", method=method, recipe=f"toy-8modes-{method}", seed=0, nfe=1)
    return Row(**(fields | dict(metric=metric, value=value) | changes))


def exact_and_sampled() -> list[Row]:
    """Two seeds of three methods at two NFE; samples lie 1 point off at one place and 0.1 at all others."""
    rows = []
    for method, base in (("mdlm", 40.0), ("emoe", 90.0), ("emoe-plus", 95.0)):
        for seed in (0, 1):
            for nfe in (1, 32):
                at = dict(seed=seed, nfe=nfe)
                exact = {"validity": base + 2 * seed, "overlap": base - 10, "nll": 5 + seed / 10, "kl": 0.5 + seed / 10}
                rows += [toy_row(method, name, value, convention="exact", **at) for name, value in exact.items()]
                off = 1.0 if (method, seed, nfe) == ("emoe", 0, 32) else 0.1
                rows.append(toy_row(method, "validity", exact["validity"] + off, n=2500, stderr=0.6, **at))
    return rows


def made(tmp_path: Path, name: str, rows: list[Row], *, task: str = "toy") -> str:
    record(tmp_path / "results" / f"{task}.json", run(), rows)
    return blocks(render(block(name), tmp_path / "results"))[name].replace("\N{NO-BREAK SPACE}", " ")


def test_exact_laws_have_a_table_per_density(tmp_path):
    # Neither an ablation nor the demo's model is averaged in, nor are the yardsticks.
    others = [
        toy_row("emoe", "validity", 1.0, convention="exact", recipe="toy-8modes-emoe method.route-tau=0"),
        toy_row("emoe", "validity", 2.0, convention="exact", recipe="demo-emoe"),
        toy_row("ideal", "validity", 3.0, convention="exact", recipe="reference"),
        toy_row("vadd", "validity", 75.0, convention="exact", data="swiss-roll", recipe="toy-swissroll-vadd"),
    ]
    said = made(tmp_path, "toy-exact", exact_and_sampled() + others)
    assert "| 8-modes | of the exact law | NFE 1 | NFE 32 |" in said
    assert "| MDLM | Validity (%) | 41.0 ±1.0 | 41.0 ±1.0 |" in said
    assert "| E-MoE | Validity (%) | 91.0 ±1.0 | 91.0 ±1.0 |" in said
    assert "| E-MoE+ | Overlap (%) | 85.0 ±0.0 | 85.0 ±0.0 |" in said
    assert "| E-MoE | NLL (nats per row) | 5.050 ±0.050 | 5.050 ±0.050 |" in said
    assert "| E-MoE+ | KL(data \\|\\| model) (nats) | 0.550 ±0.050 | 0.550 ±0.050 |" in said
    roll = said[said.index("| Swiss-roll | of the exact law | NFE 1 |") :]
    assert "| VADD | Validity (%) | 75.0 |" in roll and "| VADD | NLL (nats per row) | — |" in roll
    assert "ideal" not in said and said.index("| 8-modes") < said.index("| Swiss-roll")
    # sqrt(90 * 10 / 2500) = 0.6 points, of which one point is 1.7.
    assert (
        "Largest distance between sampled and exact validity in 12 comparisons: 1.7 standard errors "
        "(E-MoE on 8-modes, seed 0, NFE 32: 91.00 % of 2,500 samples, 90.00 % of the law)."
    ) in said


def test_the_distance_counts_the_error_of_a_drawn_law(tmp_path):
    law = toy_row("vadd", "validity", 90.0, convention="exact", stderr=0.8)
    said = made(tmp_path, "toy-exact", [law, toy_row("vadd", "validity", 95.0, n=2500)])
    assert "in 1 comparisons: 5.0 standard errors" in said  # 5 / hypot(0.6, 0.8)


def test_no_exact_laws_and_no_samples_are_said_plainly(tmp_path):
    rows = exact_and_sampled()
    assert "No sampled validity" in made(tmp_path, "toy-exact", [row for row in rows if row.convention])
    sampled = [row for row in rows if not row.convention] + [toy_row("ideal", "validity", 3.0, convention="exact")]
    said = made(tmp_path / "other", "toy-exact", sampled)
    assert said.strip() == "*No numbers here yet: run `emoe reproduce toy --exact`.*"


def test_two_bits_stand_beside_the_models_and_do_not_mix(tmp_path):
    def bits(value: float, convention: str, method: str = "emoe", **more: object) -> Row:
        fields = dict(task="likelihood", data="two-bits", method=method, recipe=None, seed=None, nfe=None)
        return Row(**(fields | dict(metric="nll", convention=convention, value=value) | more))

    rows = [bits(0.6931, "exact", "data")]
    for weight, name, least in (("1", "objective", 0.2312), ("1/t", "objective, KL/t", 0.3467)):
        mine = dict(recipe=f"two-bits-weight-{weight}")
        rows.append(bits(least, name, **mine))
        for steps in (1, 2, 16):
            rows += [bits(1 + steps, f"bound@{steps}", **mine), bits(2 + steps, "exact", nfe=steps, **mine)]
    models = [toy_row("data", "nll", 4.4, convention="exact", nfe=None, n=10)]
    models += [toy_row(m, "nll", 4.5, convention="objective", nfe=None) for m in ("mdlm", "vadd", "emoe")]
    models += [toy_row(m, "nll", 4.6, convention="exact", nfe=1) for m in ("mdlm", "vadd", "emoe")]
    said = made(tmp_path, "two-bits", rows + models, task="likelihood")
    assert "| minimised | in theory | bound@1 | bound@2 | bound@16 | exact NLL, T = 1 |" in said
    assert "| KL × 1 | **0.231** | log(2) / 3 = 0.231 | 2.000 | 3.000 | 17.000 | 3.000 | 4.000 | 18.000 |" in said
    assert "| KL × 1/t (VADD as published) | **0.347** | log(2) / 2 = 0.347 | 2.000 |" in said
    assert "The entropy of the data is 0.693 nats." in said and "commit `0123456789ab-dirty` on a GPU" in said
    table = made(tmp_path, "likelihood-table", [], task="likelihood")
    assert "| E-MoE | objective | 4.500 |" in table and "law has 4.400 nats" in table
    assert "17.000" not in table and "T = 2" not in table
    assert "run `emoe reproduce likelihood --only two-bits`" in made(
        tmp_path / "b", "two-bits", models, task="likelihood"
    )


def test_searches_and_information_render_from_their_files(tmp_path: Path) -> None:
    block = "<!-- generated:{0} -->\n<!-- /generated:{0} -->\n"
    text = "".join(block.format(name) for name in ("search-toy-vadd", "information", "route-limit"))
    assert render(text, tmp_path).count("No numbers here yet") == 3
    (tmp_path / "search").mkdir()
    settings = {"optim.lr": "1e-3", "method.kl-weight": '{"kind": "linear", "start": 4.0, "end": 1.0, "share": 0.6}'}
    outcome = {"task": {"domain.density": "moons"}, "seed": 10}
    trials = [
        {"settings": settings, "status": "done", "outcomes": [outcome],
         "metrics": {"kl@1": {"mean": 0.1234, "stderr": 0.01}, "overlap@1": None}},
        {"settings": {}, "status": "failed", "outcomes": [outcome], "metrics": {"kl@1": None, "overlap@1": None}},
    ]  # fmt: skip
    made = {"commit": "0123456789abcdef", "device": "a GPU", "torch": "2", "python": "3"}
    ranking = {"base": "toy-8modes-vadd", "rank": ["kl@1", "overlap@1"], "made": made, "trials": trials}
    (tmp_path / "search" / "toy-vadd.json").write_text(json.dumps(ranking), encoding="utf-8")
    found = render(text, tmp_path)
    assert "| lr 1e-3, kl-weight 4 → 1 over 60% | 0.123 ±0.010 | — |" in found
    assert "| **base** (failed) | — | — |" in found and "over moons (seed 10)" in found and "`0123456789ab`" in found


def test_times_of_a_step_on_images(tmp_path: Path) -> None:
    results, text = tmp_path / "results", block("mnist-steps") + block("toy-steps")
    common = dict(task="benchmark", seed=0, nfe=None, metric="step_ms", n=20)
    toy = Row(**common, data="toy-step-gpu", method="mdlm", recipe="toy-8modes-mdlm", value=1.5)
    ratio = dataclasses.replace(toy, metric="step_ratio_to_mdlm", value=1.0)
    record(results / "benchmark.json", run(), [toy, ratio])
    assert "No times here yet" in render(text, results)
    rows = [
        Row(**common, data="mnist-step-gpu", method=method, recipe="r", value=value, stderr=0.01)
        for method, value in (("mdlm", 3.0), ("emoe", 6.0), ("mdlm, eager", 15.0), ("vdm, eager", 21.0))
    ]
    record(results / "benchmark.json", run(), rows)
    shown = render(text, results)
    assert "| MDLM | 3.00 ±0.01 | 10.0 | 7.0x |" in shown and "| E-MoE | 6.00 ±0.01 | 20.0 | 3.5x |" in shown
    assert "| MDLM, eager | 15.00 ±0.01 | 50.0 | 1.4x |" in shown
    assert "| VDM UNet, eager | 21.00 ±0.01 | — | 1.0x |" in shown
    assert "1.50 ms" in shown and "3.00 ms" not in shown  # the toy's table has the toy's times only


def test_times_of_a_step_on_text(tmp_path: Path) -> None:
    results, text = tmp_path / "results", block("text-steps")
    common = dict(task="benchmark", seed=0, nfe=None, metric="step_ms", n=4, stderr=0.1)
    images = Row(**common, data="mnist-step-gpu", method="mdlm", recipe="mnist-mdlm", value=3.0)
    record(results / "benchmark.json", run(), [images])
    assert "No times here yet" in render(text, results)
    rows = [
        Row(**common, data="news-small-step-gpu", method=method, recipe=f"news-small-{method}", value=value)
        for method, value in (("ar", 16.0), ("emoe", 32.0), ("mdlm", 8.0))
    ]
    record(results / "benchmark.json", run(), rows)
    shown = render(text, results)
    assert "| MDLM | 8.0 ±0.10 | 1.0 |\n| E-MoE | 32.0 ±0.10 | 4.0 |\n| AR | 16.0 ±0.10 | 2.0 |" in shown
    assert "all 3 together 7 minutes" in shown
    assert get_recipe("news-small-mdlm").train.steps == NEWS_STEPS
