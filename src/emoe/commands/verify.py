"""`emoe verify`: methods against laws computed by enumeration."""

from __future__ import annotations

from json import dumps
from typing import Any

from emoe.commands.args import Command
from emoe.commands.values import Seed


def verify(
    run: str | None = None, *, method: str | None = None, seed: Seed = 0, device: str = "cpu", json: bool = False
) -> int:
    """Check a trained run, or random tiny models of each method, against laws computed by enumeration.

    Probabilities, samplers, bounds and KL. Exits 1 if a check fails.

    Args:
        run: run folder of a model small enough to enumerate (the toy); else tiny ones
        method: only this kind of tiny model, such as mdlm, vadd or emoe
        seed: seed of models and draws

    Examples:
        emoe verify
        emoe verify runs/toy
        emoe verify --method emoe --seed 3
    """
    import torch

    from emoe.exact import checks
    from emoe.runs.train import load_run

    if run is not None:
        opened = load_run(run, device=device)
        cases = {run: (opened.method, opened.domain.fresh(20, seed))}
    else:
        rows = torch.cartesian_prod(*[torch.arange(2)] * 2)
        cases = {f"tiny {kind}": (tiny, rows) for kind, tiny in checks.tiny_methods(method, seed).items()}
    lines: list[dict[str, Any]] = []
    for name, (model, rows) in cases.items():
        for check in checks.verify(model, rows, seed=seed):
            lines.append({"model": name, "check": check.name, "passed": check.passed, "seen": check.seen})
            if not json:
                print(f"{name}: {check.name}: {'ok' if check.passed else 'FAILED'} ({check.seen})", flush=True)
    passed = sum(line["passed"] for line in lines)
    print(dumps(lines, indent=1) if json else f"{passed} of {len(lines)} checks passed")
    return int(passed < len(lines))


main = Command("emoe verify", verify)
