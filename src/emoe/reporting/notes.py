"""Notes below tables: sentences of `names.toml`, filled in with what is known of the rows behind a table."""

from __future__ import annotations

from collections.abc import Iterable

from emoe.reporting.cells import names
from emoe.reporting.recipes import all_with, common_changes
from emoe.reporting.results import Results


def note(name: str, results: Results, **values: object) -> str:
    """A note of `names.toml`; besides `values` it may use what is said of the models' seeds, changes and runs."""
    models = results.models
    several = len(models.seeds) > 1
    words = {
        "seeds": f"Seed{'s' * several} {comma(models.seeds)}",
        "errors": "over seeds" if several else "of the measurement",
        "over_seeds": ": means, and where a row has several, errors are over these." if several else ".",
        "changes": all_with(common_changes(models.rows)),
        "source": source_of(results),
    }
    return str(names("notes")[name]).format_map(words | values)


def source_of(results: Results) -> str:
    """Commits and devices of all runs behind results."""
    runs = sorted({(short_commit(run.commit), run.device) for run in results.runs.values()})
    return "; ".join(f"commit `{commit}` on {device}" for commit, device in runs)


def short_commit(commit: str) -> str:
    """12 digits name a commit beyond doubt; the mark of a changed tree must survive the cut."""
    return commit[:12] + "-dirty" * commit.endswith("-dirty")


def span(counts: Iterable[int | None]) -> str:
    """`300`, or `300 to 500` where counts differ; nothing without any."""
    known = sorted({count for count in counts if count})
    return " to ".join(dict.fromkeys(f"{count:,}" for count in (*known[:1], *known[-1:])))


def comma(values: Iterable[object]) -> str:
    """`0, 1, 2`."""
    return ", ".join(map(str, values))
