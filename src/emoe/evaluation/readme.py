"""Generated blocks of README and docs: numbers in prose come from `results/`, never from a keyboard.

A block is everything between the lines `<!-- generated:NAME -->` and `<!-- /generated:NAME -->`. Run
`python -m emoe.evaluation.readme` to bring all blocks up to date, or with `--check` to learn which are stale.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from emoe.evaluation.files import write_atomically
from emoe.evaluation.grid import DATA, METHODS, table_rows, toy_grid
from emoe.evaluation.results import Results, ResultsError, RunInfo
from emoe.evaluation.tables import markdown_table, seeds_and_samples, toy_note, toy_table

Generator = Callable[[Path], str]
GENERATORS: dict[str, Generator] = {}
_MARK = re.compile(r"<!-- (/?)generated:([A-Za-z0-9_-]+) -->")
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
    now, then = blocks(render(text, results_dir)), blocks(text)
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
            names = stale_blocks(text, options.root / "results")
            fresh = render(text, options.root / "results")
        except (OSError, BlockError, ResultsError) as error:
            print(f"{path}: {error}", file=sys.stderr)
            return 2
        stale += len(names)
        for name in names:
            print(f"{path}: {name} {'is out of date' if options.check else 'updated'}")
        if names and not options.check:
            write_atomically(path, fresh)
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
            return make(Results.load(path))

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
    lines = []
    for data in sorted({row.data for row in results.select(metric="step_ms")}):
        run = results.runs[results.select(metric="step_ms", data=data)[0].run]
        cells = []
        for method in ("mdlm", "vadd", "emoe"):
            (step,) = results.select(metric="step_ms", data=data, method=method)
            (ratio,) = results.select(metric="step_ratio_to_mdlm", data=data, method=method)
            cells.append(f"{step.value:.2f} ms ({ratio.value:.2f}x)")
        lines.append([f"{run.device}, torch {run.torch}", *cells])
    return markdown_table(["One training step", "MDLM", "VADD", "E-MoE"], lines)


@results_block("likelihood-table", "likelihood")
def likelihood_table(results: Results) -> str:
    """Objective, bounds and exact NLL of the demo's models against the number of steps, in nats per row."""
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
    runs = {(run.commit[:12], run.device) for run in results.runs.values()}
    source = "; ".join(f"commit `{commit}` on {device}" for commit, device in sorted(runs))
    table = markdown_table(
        ["Method", "nats per row", *(f"T = {t}" for t in steps)], lines, align="ll" + "r" * len(steps)
    )
    return (
        f"{table}\nThe data's own law has {truth.value:.3f} nats on the same {truth.n:,} held-out rows. Coordination "
        f"gain in nats per token: {said}. Made by `emoe reproduce likelihood`, {source}."
    )


if __name__ == "__main__":
    sys.exit(main())
