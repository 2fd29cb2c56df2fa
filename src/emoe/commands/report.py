"""`emoe report`: results as an HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from emoe.commands import args
from emoe.config import ConfigError

if TYPE_CHECKING:
    from emoe.reporting.results import Results


@args.command("emoe report")
def report(
    results: Path = Path("results/toy.json"),
    *,
    out: Path | None = None,
    picture: Annotated[tuple[Path, ...], args.REPEATED] = (),
    run: Annotated[tuple[Path, ...], args.REPEATED] = (),
    title: str = "E-MoE results",
) -> int:
    """Write a self-contained HTML report from a results file or a run folder that was evaluated.

    Args:
        results: results file or run folder
        out: where the report goes; default: beside the results, ending in .html
        picture: an image to show; may be given several times
        run: a run folder whose curves are shown; may repeat
        title: heading

    Examples:
        emoe report results/toy.json --run runs/a --picture results/figures/toy-summary.png
    """
    if (results / "experiment.json").exists():
        run, results = (results, *run), results / "eval.json"
    origin = f"emoe eval {results.parent}" if results.name == "eval.json" else "emoe reproduce toy"
    problems = [f"results: {results} does not exist; make it with: {origin}"] * (not results.exists())
    problems += [f"picture: {path} does not exist" for path in picture if not path.is_file()]
    problems += [f"run: {path} is no run folder" for path in run if not (path / "experiment.json").exists()]
    if problems:
        raise ConfigError(problems)
    from emoe.reporting.html import write_page

    out = out or results.with_suffix(".html")
    captions = {path: path.stem.replace("-", " ") for path in picture}
    write_page(out, title, read_results(results), pictures=captions, runs=run)
    print(out)
    return 0


def read_results(path: Path) -> Results:
    """A results file, empty if there is none yet; a broken one is refused like any other bad argument."""
    from emoe.reporting.results import Results, ResultsError

    try:
        return Results.load(path) if path.exists() else Results()
    except ResultsError as error:
        raise ConfigError(str(error).splitlines()) from None
