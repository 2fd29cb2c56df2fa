"""Generated blocks of README, docs and pages of results: numbers in prose come from `results/*.json`.

A block is everything between the lines `<!-- generated:NAME -->` and `<!-- /generated:NAME -->`. Run
`python -m emoe.reporting.docs` to bring all blocks up to date, or with `--check` to list which are stale.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from emoe.files import replace_file
from emoe.reporting import images, latent, likelihood, steps, summary, text, ties, toy
from emoe.reporting.cells import names
from emoe.reporting.render import markdown
from emoe.reporting.results import Results, ResultsError, load_once
from emoe.reporting.table import Table

COMMANDS = {
    "benchmark": "python benchmarks/step_time.py --record",
    "scaling-64": "emoe reproduce scaling",
    "text-tiny": "emoe reproduce text --size text-tiny",
}
SEARCHES = (
    "toy-estimators", "toy-annealing", "toy-weighting", "toy-proper", "toy-draws", "toy-vadd", "toy-vadd-2",
    "toy-vadd-3", "ties-probe", "ties-64",
)  # fmt: skip
_BLOCK = re.compile(
    r"^(?P<fence>```|~~~).*?^(?P=fence)"
    r"|^<!-- generated:(?P<name>[\w-]+) -->\n(?P<content>.*?)^<!-- /generated:(?P=name) -->$"
    r"|^<!-- /?generated:[\w-]+ -->$",
    re.MULTILINE | re.DOTALL,
)


class BlockError(ValueError):
    """Markers that do not pair up, or a block with an unknown name."""


def _block(make: Callable[..., str | list[Table]], *files: str) -> Callable[[Path], str]:
    """A block made of results files; without numbers it names the command that measures them."""

    def block(folder: Path) -> str:
        paths = [folder / f"{file}.json" for file in files]
        content = make(*map(load_once, paths)) if all(path.exists() for path in paths) else ""
        command = COMMANDS.get(files[0], f"emoe reproduce {files[0]}")
        return (markdown(content) if isinstance(content, list) else content) or _nothing("numbers", command)

    return block


def _search(name: str, folder: Path) -> str:
    path = folder / "search" / f"{name}.json"
    if not path.exists():
        return _nothing("numbers", "emoe sweep")
    return markdown([latent.search_table(json.loads(path.read_text(encoding="utf-8")))])


def _figures(study: str, folder: Path) -> str:
    """The figures that are there, and the page of samples."""
    captions = {f"{study}-{name}": caption for name, caption in names("figures").items()}
    shown = [
        f"![{caption}](../{folder.name}/figures/{name})"
        for name, caption in captions.items()
        if (folder / "figures" / name).exists()
    ]
    page = f"{study}-samples.md"
    if (folder / page).exists():
        shown.append(f"Samples of all methods side by side: [{page}](../{folder.name}/{page}).")
    return "\n\n".join(shown) or _nothing("figures", COMMANDS.get(study, f"emoe reproduce {study}"))


def _nothing(what: str, command: str) -> str:
    return f"*No {what} here yet: run `{command}`.*"


BLOCKS: dict[str, Callable[[Path], str]] = {
    "summary": _block(summary.summary, "toy", "mnist", "text"),
    "toy-source": _block(toy.source, "toy"),
    "toy-gaps": _block(toy.gaps, "toy"),
    "toy-exact": _block(toy.exact_tables, "toy"),
    "toy-steps": _block(steps.toy_steps, "benchmark"),
    "mnist-steps": _block(steps.mnist_steps, "benchmark"),
    "text-steps": _block(steps.text_steps, "benchmark"),
    "step-variants": _block(steps.step_variants, "benchmark"),
    "likelihood-table": _block(likelihood.likelihood_tables, "likelihood"),
    "two-bits": _block(likelihood.two_bits, "likelihood"),
    "held-out-table": _block(latent.held_out_tables, "held-out"),
    "estimator-table": _block(latent.estimator_tables, "estimators"),
    "information": _block(latent.information_tables, "information"),
    "route-limit": _block(latent.route_limit, "route-limit", "toy"),
    "mnist-bpd": _block(images.bpd_tables, "mnist"),
    "mnist-figures": partial(_figures, "mnist"),
    "text-checks": _block(partial(text.text_tables, "checks"), "text"),
    "text-tiny-checks": _block(partial(text.text_tables, "checks"), "text-tiny"),
    **{f"search-{name}": partial(_search, name) for name in SEARCHES},
    **{f"{file}-table": _block(ties.scaling_tables, file) for file in ("scaling", "scaling-64")},
    **{f"{file}-health": _block(ties.health_tables, file) for file in ("scaling", "scaling-64")},
}
# Whole pages below results/, made of the file of the same name.
PAGES: dict[str, Callable[[Results], str]] = {
    "toy": toy.toy_page,
    "mnist": partial(images.image_page, task="mnist"),
    "digits": partial(images.image_page, task="digits"),
    "text": text.text_page,
    "text-tiny": text.text_page,
}


def render(page: str, folder: Path) -> tuple[str, list[str]]:
    """A Markdown text with all its blocks made anew from a folder of results, and the names of those that changed."""
    stale: list[str] = []

    def fresh(match: re.Match[str]) -> str:
        name, line = match["name"], page.count("\n", 0, match.start()) + 1
        if match["fence"]:
            return match[0]  # a marker inside a code fence is an example of a marker
        if not name or _BLOCK.search(match["content"]):
            raise BlockError(f"line {line}: {match[0].splitlines()[0]} does not pair up")
        if name not in BLOCKS:
            raise BlockError(f"line {line}: no block {name!r}; known: {', '.join(sorted(BLOCKS))}")
        content = BLOCKS[name](folder).strip("\n")
        text = f"<!-- generated:{name} -->\n\n{content}\n\n<!-- /generated:{name} -->"
        stale.extend([name] * (text != match[0]))
        return text

    text = _BLOCK.sub(fresh, page)
    return text, stale


def main(arguments: Sequence[str] | None = None) -> int:
    """Update or check all blocks; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m emoe.reporting.docs", description=main.__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a block is out of date")
    parser.add_argument("--root", type=Path, default=Path(), help="folder of README.md, docs/ and results/")
    options = parser.parse_args(arguments)
    stale = 0
    pages = [*sorted((options.root / "docs").rglob("*.md")), *sorted((options.root / "results").glob("*.md"))]
    for path in [options.root / "README.md", *pages]:
        try:
            page = path.read_text(encoding="utf-8")
            fresh, changed = render(page, options.root / "results")
            source = path.with_suffix(".json")
            if path.parent.name == "results" and path.stem in PAGES and source.exists():
                fresh, changed = (text := PAGES[path.stem](load_once(source))), [path.stem] * (text != page)
        except (OSError, BlockError, ResultsError) as error:
            print(f"{path}: {error}", file=sys.stderr)
            return 2
        stale += len(changed)
        for name in changed:
            print(f"{path}: {name} {'is out of date' if options.check else 'updated'}")
        if changed and not options.check:
            replace_file(path, fresh)
    if options.check and stale:
        print("run `python -m emoe.reporting.docs` to bring them up to date")
    return int(options.check and stale > 0)


if __name__ == "__main__":
    sys.exit(main())
