"""Generated tables of what was tried on the latent: searches (`results/search/*.json`), route limit, information."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from emoe.evaluation.grid import DATA, METHODS, measure
from emoe.evaluation.readme import generator, results_block
from emoe.evaluation.results import Results
from emoe.evaluation.tables import markdown_table

SEARCHES = (
    "toy-estimators",
    "toy-annealing",
    "toy-weighting",
    "toy-proper",
    "toy-draws",
    "toy-vadd",
    "toy-vadd-2",
    "toy-vadd-3",
    "ties-probe",
    "ties-64",
)


def search_table(ranking: dict[str, Any]) -> str:
    """All trials of a search, best first, with mean ± standard error over its tasks and seeds."""
    names = ranking["rank"]
    lines = []
    for trial in ranking["trials"]:
        cells = []
        for name in names:
            found = trial["metrics"].get(name)
            digits = measure(name.partition("@")[0]).digits
            cells.append("—" if found is None else f"{found['mean']:.{digits}f}" + _error(found["stderr"], digits))
        label = short_label(trial["settings"]) + ("" if trial["status"] == "done" else f" ({trial['status']})")
        lines.append([label, *cells])
    tasks = list(dict.fromkeys(_task(outcome) for trial in ranking["trials"] for outcome in trial["outcomes"]))
    made = ranking["made"]
    commits = "commit " + ", ".join(f"`{_short(commit)}`" for commit in made.get("commits", [made["commit"]]))
    table = markdown_table(["Trial", *names], lines, align="l" + "r" * len(names))
    return (
        f"{table}\nBase: `{ranking['base']}`; mean ± standard error over {', '.join(tasks)}. Made by `emoe sweep` at "
        f"{commits} on {made['device']} (torch {made['torch']}, Python {made['python']})."
    )


@results_block("step-variants", "benchmark")
def step_variants(results: Results) -> str:
    """Time of a training step of every way to learn the latent, over that of the paper's reading in the same run."""
    rows = results.select(metric="step_ms", data="toy-step-gpu")
    (base,) = [row for row in rows if row.method == "emoe"]
    lines = [
        [METHODS.get(row.method, row.method), f"{row.value:.2f}", f"{row.value / base.value:.2f}x"]
        for row in sorted(rows, key=lambda row: row.value)
        if row.run == base.run
    ]
    run = results.runs[base.run]
    table = markdown_table(["One training step of 512 rows", "ms", "over E-MoE"], lines)
    return f"{table}\nMade by `{run.command}` at commit `{_short(run.commit)}` on {run.device} (torch {run.torch})."


@generator("route-limit")
def route_limit(folder: Path) -> str:
    """The best route code beside what was learned, at one network call: exact laws, means over seeds."""
    files = [folder / f"{name}.json" for name in ("route-limit", "toy")]
    missing = [path.name for path in files if not path.exists()]
    if missing:
        return f"*No numbers here yet: `{folder.name}/{missing[0]}` does not exist.*"
    limit, toy = (Results.load(path) for path in files)
    lines = []
    for data, said in list(DATA.items())[:2]:
        for method in ("limit", "emoe-plus", "vadd-plus", "vadd", "emoe", "mdlm"):
            found = (limit if method == "limit" else toy).only(data=data, method=method, nfe=1, convention="exact")
            cells = []
            for metric in ("validity", "overlap", "kl"):
                mean = found.mean_over_seeds(metric=metric)
                digits = measure(metric).digits
                cells.append("—" if mean is None else f"{mean.mean:.{digits}f}" + _error(mean.stderr, digits))
            if any(cell != "—" for cell in cells):
                lines.append([said, {"limit": "*best route code*", **METHODS}[method], *cells])
    header = ["Density", "", *(measure(name).label for name in ("validity", "overlap", "kl"))]
    return (
        markdown_table(header, lines, align="llrrr")
        + "\nOne network call, exact laws, mean ± standard error over seeds."
    )


@generator("information")
def information(folder: Path) -> str:
    """Nats that the blocks carry at the end of training, and what they buy at one network call."""
    path = folder / "information.json"
    if not path.exists():
        return f"*No numbers here yet: `{folder.name}/{path.name}` does not exist.*"
    results = Results.load(path)
    lines = []
    for recipe in sorted({str(row.recipe) for row in results.select(metric="ties")}):
        mine = results.only(recipe=recipe)
        nats: dict[str, float] = {}
        for row in mine.rows:
            if row.metric.startswith("route_kl/"):
                block = row.metric.split("/")[1]
                nats[block] = nats.get(block, 0.0) + row.value
        (ties,), (coverage,) = (mine.select(metric=name, nfe=1) for name in ("ties", "coverage"))
        by_block = " + ".join(f"{nats[block]:.2f}" for block in sorted(nats))
        lines.append(
            [_way(recipe), f"{sum(nats.values()):.2f}", by_block, f"{ties.value:.1f}" + _error(ties.stderr, 1),
             f"{coverage.value:.1f}"]
        )  # fmt: skip
    header = ["How the latent is learned", "nats per row", "by block", "ties at NFE 1 (%)", "coverage (%)"]
    runs = {(_short(run.commit), run.device) for run in results.runs.values()}
    source = "; ".join(f"commit `{commit}` on {device}" for commit, device in sorted(runs))
    return f"{markdown_table(header, lines, align='lrrrr')}\nMade by `emoe reproduce information`, {source}."


def _way(recipe: str) -> str:
    if not recipe.startswith("ties-emoe-plus"):
        return "the paper's reading"
    return "E-MoE+, all positions carry" if "carriers=all" in recipe else "E-MoE+, positions code in turn"


def _short(commit: str) -> str:
    return commit[:12] + "-dirty" * commit.endswith("-dirty")


def short_label(settings: dict[str, str]) -> str:
    """Changed fields without their family's name; ramps as `4 → 1 over 60%`."""
    words = []
    for name, text in settings.items():
        if text.startswith("{"):
            ramp = json.loads(text)
            text = f"{ramp['start']:g} → {ramp['end']:g} over {ramp.get('share', 1):.0%}"
        words.append(f"{name.rpartition('.')[2]} {text}")
    return ", ".join(words) or "**base**"


def _task(outcome: dict[str, Any]) -> str:
    said = ", ".join(outcome["task"].values())
    return f"{said} (seed {outcome['seed']})" if said else f"seed {outcome['seed']}"


def _error(stderr: float | None, digits: int) -> str:
    return "" if stderr is None else f" ±{stderr:.{digits}f}"


def _register(name: str) -> None:
    @generator(f"search-{name}")
    def block(folder: Path) -> str:
        path = folder / "search" / f"{name}.json"
        if not path.exists():
            return f"*No numbers here yet: `{folder.name}/search/{path.name}` does not exist.*"
        return search_table(json.loads(path.read_text(encoding="utf-8")))


for _name in SEARCHES:
    _register(_name)
