"""The mixture that routes can express, fitted directly."""

from __future__ import annotations

from pathlib import Path

import torch

from emoe.cli import main
from emoe.exact import kl_data_model
from emoe.reporting.results import Results
from emoe.studies.route_limit import fit_routes


def test_updates_never_lower_the_likelihood() -> None:
    law = torch.rand(6, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    law /= law.sum()
    kl = [kl_data_model(law, fit_routes(law, 2, seed=1, updates=updates)) for updates in (0, 1, 2, 5, 20, 100)]
    assert all(later <= earlier + 1e-12 for earlier, later in zip(kl, kl[1:], strict=False))
    assert kl[-1] < 0.5 * kl[0]


def test_one_expert_is_the_product_of_marginals_and_enough_of_them_are_exact() -> None:
    law = torch.eye(4, dtype=torch.float64) / 4
    single = fit_routes(law, 1, seed=0)
    torch.testing.assert_close(single, torch.full((4, 4), 1 / 16, dtype=torch.float64), rtol=0, atol=1e-9)
    several = fit_routes(law, 4, seed=0)
    assert abs(several.sum().item() - 1) < 1e-9
    assert kl_data_model(law, several) < 1e-6


def test_the_command_writes_rows(tmp_path: Path) -> None:
    words = ["reproduce", "route-limit", "--seeds", "0", "--experts", "2", "--results", str(tmp_path), "--quiet"]
    assert main(words) == 0
    rows = Results.load(tmp_path / "route-limit.json").rows
    assert {row.metric for row in rows} == {"validity", "overlap", "kl"} and len(rows) == 6
    assert all(row.method == "limit" and row.convention == "exact" for row in rows)
