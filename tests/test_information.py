"""Where the latent's nats go."""

from __future__ import annotations

from pathlib import Path

import pytest

from emoe.cli import main
from emoe.reporting.results import Results
from emoe.studies.information import curves, mean_end


def test_the_command_records_every_block_and_position(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["reproduce", "information", "--runs", str(tmp_path / "runs"), "--results", str(tmp_path), "--quiet"]
    small = ["--train.steps=4", "--train.batch=4", "--backbone.width=8", "--backbone.hidden=8", "--eval.samples=20"]
    assert main([*words, *small, "--domain.points=50", "--train.log-every=1", "--device", "cpu"]) == 0
    rows = [row for row in Results.load(tmp_path / "information.json").rows if row.metric.startswith("route_kl/")]
    by_recipe = {row.recipe: {r.metric for r in rows if r.recipe == row.recipe} for row in rows}
    assert sorted(map(len, by_recipe.values())) == [8, 8, 12]  # 4 positions; the plus recipes sum the last of 3 blocks
    assert (tmp_path / "figures" / "information.png").stat().st_size > 5_000
    assert "positions code in turn" in capsys.readouterr().out


def test_a_curve_is_read_and_its_end_is_a_mean(tmp_path: Path) -> None:
    lines = [f'{{"step": {step}, "route_kl_at/block2": [{step}, 1.0], "loss": 3}}' for step in range(1, 21)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines), encoding="utf-8")
    found = curves(tmp_path)
    assert list(found) == [2] and found[2][0] == (1, [1, 1.0])
    assert mean_end(found[2]) == [15.5, 1.0]
