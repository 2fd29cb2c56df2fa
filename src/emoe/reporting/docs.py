"""Generated blocks of README, docs and pages of results, with numbers from `results/*.json`.

A block is everything between the lines `<!-- generated:NAME -->` and `<!-- /generated:NAME -->`. Run
`python -m emoe.reporting.docs` to bring all blocks and pages up to date, or with `--check` to list stale files.
"""

from __future__ import annotations

import argparse
import functools
import re
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from emoe.files import replace_file
from emoe.reporting import images, text, ties, toy
from emoe.reporting.results import Results, ResultsError
from emoe.reporting.table import Table, markdown

COMMAND = "python -m emoe.reporting.docs"
MARKERS = re.compile(
    r"^(?P<fence>```|~~~).*?^(?P=fence)"
    r"|^<!-- generated:(?P<name>[\w-]+) -->\n(?P<content>.*?)^<!-- /generated:(?P=name) -->$"
    r"|^<!-- /?generated:[\w-]+ -->$",
    re.MULTILINE | re.DOTALL,
)
load = functools.cache(Results.load)  # many blocks read one file
Block = Callable[[Path], str]  # folder of results -> content


class BlockError(ValueError):
    """Markers that do not pair up, or a block with an unknown name."""


def block(make: Callable[..., str | list[Table]], *files: str, command: str = "") -> Block:
    """Return a block made of results files; without the files it names the command that writes them."""

    def write(folder: Path) -> str:
        paths = [folder / f"{file}.json" for file in files]
        content = make(*map(load, paths)) if all(path.exists() for path in paths) else ""
        nothing = f"*No numbers here yet: run `{command or f'emoe reproduce {files[0]}'}`.*"
        return (markdown(content) if isinstance(content, list) else content) or nothing

    return write


checks = partial(text.text_tables, "checks")
BLOCKS: dict[str, Block] = {
    "toy-exact": block(toy.exact_tables, "toy"),
    "mnist-bpd": block(images.bpd_tables, "mnist"),
    "likelihood-table": block(toy.likelihood_tables, "likelihood"),
    "held-out-table": block(toy.held_out_tables, "held-out"),
    "scaling-table": block(ties.scaling_tables, "scaling"),
    "scaling-health": block(ties.health_tables, "scaling"),
    "text-checks": block(checks, "text"),
    "text-tiny-checks": block(checks, "text-tiny", command="emoe reproduce text --size text-tiny"),
}
PAGES: dict[str, Callable[[Results], list[Table]]] = {  # whole pages below results/, each of the file of its name
    "toy": toy.toy_tables,
    "mnist": images.image_tables,
    "digits": images.image_tables,
    "text": text.all_tables,
    "text-tiny": text.all_tables,
}


def render(page: str, folder: Path, blocks: Mapping[str, Block] = BLOCKS) -> str:
    """Return a Markdown text with all its blocks regenerated from a folder of results."""

    def fresh(match: re.Match[str]) -> str:
        name, line = match["name"], page.count("\n", 0, match.start()) + 1
        if match["fence"]:
            return match[0]  # a marker inside a code fence is an example of a marker
        if not name or MARKERS.search(match["content"]):
            raise BlockError(f"line {line}: {match[0].splitlines()[0]} does not pair up")
        if name not in blocks:
            raise BlockError(f"line {line}: no block {name!r}; known: {', '.join(sorted(blocks))}")
        content = blocks[name](folder).strip("\n")
        return f"<!-- generated:{name} -->\n\n{content}\n\n<!-- /generated:{name} -->"

    return MARKERS.sub(fresh, page)


def main(arguments: Sequence[str] | None = None) -> int:
    """Update or check all blocks; return the exit code."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=main.__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a file is out of date")
    parser.add_argument("--root", type=Path, default=Path(), help="folder of README.md, docs/ and results/")
    options = parser.parse_args(arguments)
    load.cache_clear()
    results, own, stale = options.root / "results", options.root / "research" / "tables.py", False
    blocks = BLOCKS | (runpy.run_path(str(own))["BLOCKS"] if own.exists() else {})  # of this repository
    files = [*sorted((options.root / "docs").rglob("*.md")), *sorted(results.glob("*.md"))]
    for path in [options.root / "README.md", *files]:
        source = path.with_suffix(".json")
        try:
            page = path.read_text(encoding="utf-8")
            if path.parent == results and path.stem in PAGES and source.exists():
                fresh = markdown(PAGES[path.stem](load(source)))
            else:
                fresh = render(page, results, blocks)
        except (OSError, BlockError, ResultsError) as error:
            print(f"{path}: {error}", file=sys.stderr)
            return 2
        if fresh != page:
            stale = True
            print(f"{path} {'is out of date' if options.check else 'updated'}")
            if not options.check:
                replace_file(path, fresh)
    if options.check and stale:
        print(f"run `{COMMAND}` to bring them up to date")
    return int(options.check and stale)


if __name__ == "__main__":
    sys.exit(main())
