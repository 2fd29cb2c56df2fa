"""Notes below tables, and their words for seeds, samples and sources."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from string import Formatter

from emoe.reporting.cells import DASH, names
from emoe.reporting.recipes import as_typed, common_changes
from emoe.reporting.results import Results, Row


def note(name: str, results: Results, **values: object) -> str:
    """Return a note of `names.toml` with `values` and the seeds, common changes and sources of the models.

    Lines with a value that is empty or not measured are left out.
    """
    models = results.models
    words: dict[str, object] = {
        "seeds": comma(models.seeds),
        "errors": "over seeds" if len(models.seeds) > 1 else "of the measurement",
        "changes": as_typed(common_changes(row.recipe for row in models.rows)),
        "source": source_of(results),
    }
    words |= values
    lines = []
    for line in str(names("notes")[name]).splitlines():
        if all(words[field] not in ("", DASH) for _, field, _, _ in Formatter().parse(line) if field):
            lines.append(line.format_map(words))
    return "\n".join(lines)


def source_of(results: Results) -> str:
    """Return commits (12 digits, and the mark of a changed tree) and devices of all runs of results."""
    commits = {(re.sub(r"^(\w{12})\w*", r"\1", run.commit), run.device) for run in results.runs.values()}
    return "; ".join(f"commit `{commit}` on {device}" for commit, device in sorted(commits))


def seeds_and_samples(rows: Sequence[Row]) -> str:
    """Return `3 seeds (0, 1, 2), 3,000 samples each`, or `1 to 3 seeds` where cells differ."""
    number = span(Counter((row.data, row.method, row.recipe, row.nfe) for row in rows).values())
    seeds = comma(sorted({str(row.seed) for row in rows}))
    return f"{number} seed{'s' * (number != '1')} ({seeds}), {span(row.n for row in rows)} samples each"


def span(counts: Iterable[int | None]) -> str:
    """Return `300`, or `300 to 500` where counts differ; empty without counts."""
    known = sorted({count for count in counts if count})
    return " to ".join(dict.fromkeys(f"{count:,}" for count in (*known[:1], *known[-1:])))


def comma(values: Iterable[object]) -> str:
    """Return `0, 1, 2`."""
    return ", ".join(map(str, values))
