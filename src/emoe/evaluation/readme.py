"""Generated blocks of README and docs: numbers in prose come from `results/`, never from a keyboard.

A block is everything between the lines `<!-- generated:NAME -->` and `<!-- /generated:NAME -->`. Run
`python -m emoe.evaluation.readme` to bring all blocks up to date, or with `--check` to learn which are stale.
"""

from __future__ import annotations

import argparse
import importlib
import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from emoe.evaluation.grid import DATA, METHODS, REFERENCES, measure, plain_recipe, table_rows, toy_grid
from emoe.evaluation.results import Results, ResultsError, Row, RunInfo, load_once, mean_over_seeds
from emoe.evaluation.tables import markdown_table, seeds_and_samples, toy_note, toy_table
from emoe.files import replace_file

Generator = Callable[[Path], str]
GENERATORS: dict[str, Generator] = {}
_MARK = re.compile(r"<!-- (/?)generated:([A-Za-z0-9_-]+) -->")
# Modules beside this one that register further blocks.
BLOCKS = ("search_blocks", "latent_blocks", "estimator_blocks", "image_blocks", "text_blocks")
# Samples that repeat one good mode raise validity; only overlap shows it, so the two appear together.
_TOGETHER = {"toy-validity": "toy-overlap"}


class BlockError(ValueError):
    """Markers that do not pair up, or a block nobody knows how to make."""


def generator(name: str) -> Callable[[Generator], Generator]:
    """Register a function of the results folder as the maker of the block `name`."""

    def register(function: Generator) -> Generator:
        GENERATORS[name] = function
        return function

    return register


def render(text: str, results_dir: str | Path) -> str:
    """The text of a Markdown file with all its generated blocks made anew."""
    for module in BLOCKS:
        importlib.import_module(f"emoe.evaluation.{module}")
    out: list[str] = []
    names: list[str] = []
    inside = ""
    fenced = False
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        # A marker shown inside a code fence is an example of a marker.
        fenced ^= not inside and line.lstrip().startswith(("```", "~~~"))
        mark = None if fenced else _MARK.fullmatch(line.strip())
        if mark is None:
            if not inside:
                out.append(line)
            continue
        closing, name = bool(mark[1]), mark[2]
        if closing != bool(inside) or (closing and name != inside):
            raise BlockError(f"line {number}: {line.strip()} does not pair up" + f" with {inside}" * bool(inside))
        if not closing:
            if name not in GENERATORS:
                raise BlockError(f"line {number}: no block {name!r}; known: {', '.join(sorted(GENERATORS))}")
            out += [line, "\n", GENERATORS[name](Path(results_dir)).strip("\n"), "\n\n"]
        else:
            out.append(line)
        inside = "" if closing else name
        names.append(name)
    if inside:
        raise BlockError(f"the block {inside} is never closed")
    for first, second in _TOGETHER.items():
        if first in names and second not in names:
            raise BlockError(f"the block {first} needs {second} in the same file")
    return "".join(out)


def blocks(text: str) -> dict[str, str]:
    """Name -> present content of the generated blocks of a text whose markers pair up."""
    found = re.finditer(r"^<!-- generated:([\w-]+) -->\n(.*?)^<!-- /generated:\1 -->", text, re.MULTILINE | re.DOTALL)
    return {match[1]: match[2] for match in found}


def stale_blocks(text: str, results_dir: str | Path) -> list[str]:
    """Names of the blocks that differ from what the results say."""
    return _changed(text, render(text, results_dir))


def _changed(text: str, fresh: str) -> list[str]:
    now, then = blocks(fresh), blocks(text)
    return [name for name in now if now[name] != then.get(name)]


def markdown_files(root: str | Path) -> list[Path]:
    """The files that may hold blocks: README.md and everything under docs/."""
    root = Path(root)
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


def main(arguments: Sequence[str] | None = None) -> int:
    """Update or check all blocks; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m emoe.evaluation.readme", description=main.__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a block is out of date")
    parser.add_argument("--root", type=Path, default=Path(), help="folder of README.md, docs/ and results/")
    options = parser.parse_args(arguments)
    stale = 0
    for path in markdown_files(options.root):
        try:
            text = path.read_text(encoding="utf-8")
            fresh = render(text, options.root / "results")
        except (OSError, BlockError, ResultsError) as error:
            print(f"{path}: {error}", file=sys.stderr)
            return 2
        names = _changed(text, fresh)
        stale += len(names)
        for name in names:
            print(f"{path}: {name} {'is out of date' if options.check else 'updated'}")
        if names and not options.check:
            replace_file(path, fresh)
    if options.check and stale:
        print("run `python -m emoe.evaluation.readme` to bring them up to date")
    return int(options.check and stale > 0)


def results_block(name: str, task: str) -> Callable[[Callable[[Results], str]], Callable[[Results], str]]:
    """Register a function of the results of a task; without results the block says so plainly."""

    def register(make: Callable[[Results], str]) -> Callable[[Results], str]:
        def from_folder(folder: Path) -> str:
            path = folder / f"{task}.json"
            if not path.exists():
                return f"*No numbers here yet: `{folder.name}/{path.name}` does not exist.*"
            return make(load_once(path))

        generator(name)(from_folder)
        return make

    return register


@results_block("toy-validity", "toy")
def toy_validity(results: Results) -> str:
    """The validity table."""
    return f"{toy_table(results, 'validity', split=True)}\n{toy_note(results, 'validity')}"


@results_block("toy-overlap", "toy")
def toy_overlap(results: Results) -> str:
    """The overlap table."""
    return f"{toy_table(results, 'overlap', split=True)}\n{toy_note(results, 'overlap')}"


@results_block("toy-source", "toy")
def toy_source(results: Results) -> str:
    """One line: which commands, commits and devices made the tables, with which seeds and sample counts."""
    rows = {metric: table_rows(results, metric) for metric in ("validity", "overlap")}
    used = {row.run for group in rows.values() for row in group}
    groups: dict[tuple[str, ...], list[RunInfo]] = {}
    for run in (results.runs[name] for name in sorted(used)):
        groups.setdefault((run.commit, run.device, run.torch, run.python), []).append(run)
    made = []
    for (commit, device, torch, python), runs in groups.items():
        commands = list(dict.fromkeys(run.command for run in runs))
        said = ", ".join(f"`{command}`" for command in commands[:3])
        said += f" and {len(commands) - 3} more commands" if len(commands) > 3 else ""
        # 12 digits name a commit beyond doubt, and the mark of a changed tree must survive the cut.
        short = commit[:12] + "-dirty" * commit.endswith("-dirty")
        made.append(f"{said} at commit `{short}` on {device} (torch {torch}, Python {python})")
    samples = [f"{metric} from {', '.join(seeds_and_samples(group))}" for metric, group in rows.items() if group]
    return f"Made by {'; '.join(made)}: {'; '.join(samples)}."


@results_block("toy-gaps", "toy")
def toy_gaps(results: Results) -> str:
    """How far VADD and E-MoE are from the paper at one network call, in points, with the sign."""
    validity, overlap = toy_grid(results, "validity"), toy_grid(results, "overlap")
    shared = {
        (line.method, column): cell
        for line in overlap.lines
        for column, cell in zip(overlap.columns, line.cells, strict=True)
    }
    sentences = []
    for line in validity.lines:
        for column, cell in zip(validity.columns, line.cells, strict=True):
            if line.method not in ("vadd", "emoe") or column.nfe != 1 or cell.paper is None:
                continue
            head = f"- {METHODS[line.method]} on {DATA.get(column.data, column.data)} at NFE 1:"
            if cell.value is None:
                sentences.append(f"{head} not measured; the paper reports a validity of {cell.paper:.1f}.")
                continue
            error = "" if cell.stderr is None else f" ±{cell.stderr:.1f}"
            gap = f"{round(cell.value, 1) - cell.paper:+.1f}".replace("-", "−")
            beside = shared.get((line.method, column))
            value = beside.value if beside else None
            also = "overlap not measured" if value is None else f"overlap {value:.1f}"
            ours = f"validity {cell.value:.1f}{error}"
            sentences.append(f"{head} {ours}, the paper reports {cell.paper:.1f}: {gap} points ({also}).")
    return "\n".join(sentences) or "No VADD or E-MoE at NFE 1 to compare."


@results_block("toy-steps", "benchmark")
def toy_steps(results: Results) -> str:
    """Time of a training step of each toy method, and its ratio to MDLM's in the same run."""
    sets = sorted({row.data for row in results.select(metric="step_ms") if row.data.startswith("toy-")})
    order = [name for name in METHODS if any(results.select(metric="step_ms", method=name, data=data) for data in sets)]
    lines = []
    for data in sets:
        run = results.runs[results.select(metric="step_ms", data=data)[0].run]
        cells = []
        for method in order:
            found = [
                results.select(metric=name, data=data, method=method) for name in ("step_ms", "step_ratio_to_mdlm")
            ]
            cells.append(f"{found[0][0].value:.2f} ms ({found[1][0].value:.2f}x)" if all(found) else "—")
        lines.append([f"{run.device}, torch {run.torch}", *cells])
    return markdown_table(["One training step", *(METHODS[name] for name in order)], lines)


@results_block("likelihood-table", "likelihood")
def likelihood_table(results: Results) -> str:
    """Objective, bounds and exact NLL of the demo's models against the number of steps, in nats per row."""
    results = results.only(task="toy")
    steps = sorted({row.nfe for row in results.select(metric="nll", convention="exact") if row.nfe is not None})
    lines = []
    for method in ("mdlm", "vadd", "emoe"):
        mine = {(row.convention, row.nfe): row for row in results.select(metric="nll", method=method)}
        wanted: dict[str, list[tuple[str | None, int | None]]] = {
            "objective": [("objective", None)],
            "bound@T": [(f"bound@{t}", None) for t in steps],
            "iw@T,16": [(f"iw@{t},16", None) for t in steps],
            "exact": [("exact", t) for t in steps],
        }
        for label, keys in wanted.items():
            cells = [mine[key] for key in keys if key in mine]
            texts = [f"{row.value:.3f}" + (f" ±{row.stderr:.3f}" if row.stderr else "") for row in cells]
            lines.append([METHODS[method], label, *texts, *[""] * (len(steps) - len(texts))])
    (truth,) = results.select(metric="nll", method="data", convention="exact")[:1]
    gains = results.select(metric="coordination_gain")
    said = ", ".join(f"{METHODS[row.method]} {row.value:+.3f}" for row in gains)
    table = markdown_table(
        ["Method", "nats per row", *(f"T = {t}" for t in steps)], lines, align="ll" + "r" * len(steps)
    )
    return (
        f"{table}\nThe data's own law has {truth.value:.3f} nats on the same {truth.n:,} held-out rows. Coordination "
        f"gain in nats per token: {said}. Made by `emoe reproduce likelihood`, {source_of(results)}."
    )


def source_of(results: Results) -> str:
    """Commits and devices of all runs behind results."""
    runs = {(run.commit[:12] + "-dirty" * run.commit.endswith("-dirty"), run.device) for run in results.runs.values()}
    return "; ".join(f"commit `{commit}` on {device}" for commit, device in sorted(runs))


@results_block("two-bits", "likelihood")
def two_bits(results: Results) -> str:
    """Two equal bits: what was minimised, and bounds and exact NLL of the same model, beside the entropy."""
    results = results.only(data="two-bits", metric="nll")
    if not results.rows:
        return "*No numbers here yet: run `emoe reproduce likelihood --only two-bits`.*"
    (entropy,) = results.select(method="data")
    names = {"objective": "KL × 1", "objective, KL/t": "KL × 1/t (VADD as published)"}
    models = [row for row in results.rows if row.convention in names]
    bounds = sorted({row.convention for row in results.rows if str(row.convention).startswith("bound@")}, key=_number)
    steps = sorted({row.nfe for row in results.select(method="emoe", convention="exact")}, key=_number)
    lines = []
    for model in models:
        values = {(row.convention, row.nfe): row.value for row in results.select(recipe=model.recipe, method="emoe")}
        share = 3 if model.convention == "objective" else 2
        lines.append(
            [
                names[str(model.convention)],
                f"**{model.value:.3f}**",
                f"log(2) / {share} = {math.log(2) / share:.3f}",
                *(f"{values[name, None]:.3f}" for name in bounds),
                *(f"{values['exact', t]:.3f}" for t in steps),
            ]
        )
    header = ["Objective", "minimised", "in theory", *map(str, bounds), *(f"exact NLL, T = {t}" for t in steps)]
    return (
        f"{markdown_table(header, lines)}\nThe entropy of the data is {entropy.value:.3f} nats. Nothing here is drawn; "
        f"bounds and NLL are those of the model that the minimisation found. Made by "
        f"`emoe reproduce likelihood --only two-bits`, {source_of(results)}."
    )


def _number(name: str | int | None) -> int:
    """The T of `bound@T`, or a number of steps, to sort by."""
    return int(str(name).rpartition("@")[2])


@results_block("toy-exact", "toy")
def toy_exact(results: Results) -> str:
    """Measures of the exact laws of the toy's models, a table per density, and how far samples lie from them."""
    found = [row for row in results.select(task="toy", convention="exact") if row.method not in REFERENCES]
    if not found:
        return "*No numbers here yet: run `emoe reproduce toy --exact`.*"
    groups = {
        (row.data, row.method): [r for r in found if (r.data, r.method) == (row.data, row.method)] for row in found
    }
    plain = {key: plain_recipe(rows) for key, rows in groups.items()}
    parts = []
    for data in _ordered({key[0] for key in plain}, DATA):
        steps = sorted({row.nfe for key, rows in plain.items() if key[0] == data for row in rows}, key=_number)
        lines = []
        for method in _ordered({key[1] for key in plain if key[0] == data}, METHODS):
            for metric in ("validity", "overlap", "nll", "kl"):
                cells = [
                    [row for row in plain[data, method] if (row.metric, row.nfe) == (metric, nfe)] for nfe in steps
                ]
                label = METHODS.get(method, method)
                lines.append([label, measure(metric).label, *(_mean(rows, metric) for rows in cells)])
        header = [DATA.get(data, data), "of the exact law", *(f"NFE {nfe}" for nfe in steps)]
        parts.append(markdown_table(header, lines, align="ll" + "r" * len(steps)))
    used = [row for rows in plain.values() for row in rows]
    seeds = sorted({row.seed for row in used if row.seed is not None})
    note = f"Mean ± standard error over seeds ({', '.join(map(str, seeds))})."
    return "\n".join([*parts, f"{note} {_largest_distance(results, used)}"])


def _ordered(names: set[str], known: Iterable[str]) -> list[str]:
    """Names in the order of the known ones, the others after them."""
    return [name for name in known if name in names] + sorted(names - set(known))


def _mean(rows: list[Row], metric: str) -> str:
    mean, digits = mean_over_seeds(rows), measure(metric).digits
    if mean is None:
        return "—"
    error = "" if mean.stderr is None else f"\N{NO-BREAK SPACE}±{mean.stderr:.{digits}f}"
    return f"{mean.mean:.{digits}f}{error}"


def _largest_distance(results: Results, exact: list[Row]) -> str:
    """The largest |sampled - exact validity| in standard errors, over every run and NFE that has both.

    The error is that of n independent samples of the exact law, sqrt(p (1 - p) / n), which stays above zero where all
    samples happen to be valid; that of an exact law whose latent was drawn is added in squares.
    """
    distances = []
    for law in (row for row in exact if row.metric == "validity"):
        same = dict(data=law.data, method=law.method, recipe=law.recipe, seed=law.seed, nfe=law.nfe)
        for row in results.select(task="toy", metric="validity", convention=None, **same):
            spread = law.value * (100 - law.value) / row.n if row.n else 0.0
            error = math.hypot(math.sqrt(max(spread, 0.0)), law.stderr or 0.0)
            if error > 0:
                distances.append((abs(row.value - law.value) / error, row, law))
    if not distances:
        return "No sampled validity stands beside these."
    most, row, law = max(distances, key=lambda found: found[0])
    return (
        f"Largest distance between sampled and exact validity in {len(distances)} comparisons: {most:.1f} standard "
        f"errors ({METHODS.get(row.method, row.method)} on {DATA.get(row.data, row.data)}, seed {row.seed}, NFE "
        f"{row.nfe}: {row.value:.2f} % of {row.n:,} samples, {law.value:.2f} % of the law)."
    )


if __name__ == "__main__":
    # Not this copy of the module: blocks register with the one that others import.
    sys.exit(importlib.import_module("emoe.evaluation.readme").main())
