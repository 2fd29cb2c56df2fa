"""A results file or a run as one self-contained HTML page: tables, curves, pictures and their origin."""

from __future__ import annotations

import base64
import html
import io
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from string import Template

from emoe.engine.metricslog import read_metrics
from emoe.figures.curves import Curve, Panel, draw
from emoe.files import replace_file
from emoe.reporting import images, text, ties, toy
from emoe.reporting.cells import NBSP, Line, data_of, names
from emoe.reporting.notes import comma, span
from emoe.reporting.results import Results
from emoe.reporting.table import Table, over_nfe, printed, sampled

FORMATS = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp", b"<svg": "svg+xml"}
ORIGIN = ("Command", "Commit", "Machine", "Date (wall time)", "Seeds", "Samples")
TRAINING = {"loss": "Training loss (nats per token)", "kl": "KL of the latent (nats per token)"}


def write_page(
    path: Path, title: str, results: Results, *, pictures: Mapping[Path, str] | None = None, runs: Sequence[Path] = ()
) -> None:
    """Write the page, with pictures (file -> caption) and training curves of run folders."""
    tasks, origin = list(dict.fromkeys(row.task for row in results.rows)), []
    for name, run in results.runs.items():
        own = results.only(run=name)
        machine, when = f"{run.device}; torch {run.torch}, Python {run.python}", f"{run.date} ({run.wall_s:,.0f} s)"
        counts = span(row.n for row in own.rows)
        origin.append([f"`{run.command}`", f"`{run.commit}`", machine, when, comma(own.seeds), counts])
    sections = {
        "": "".join(_prose(task, "before") for task in tasks),
        "Results": "".join(_results(results.only(task=task), task) for task in tasks),
        "Pictures": "".join(_picture(file.read_bytes(), caption) for file, caption in (pictures or {}).items()),
        "Training": _figure(_training(results, runs), "training"),
        "How to read the numbers": "".join(_prose(task, "after") for task in tasks),
        "Where the numbers come from": _card(html_table(Table(ORIGIN, origin), results.colour)),
    }
    body = "".join(f"<h2>{name}</h2>\n" * bool(name) + section for name, section in sections.items() if section)
    page = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    replace_file(path, page.substitute(title=html.escape(title), body=body))


def _prose(task: str, part: str) -> str:
    return "".join(f"<p>{inline(paragraph)}</p>\n" for paragraph in names("pages").get(task, {}).get(part, ()))


def _card(body: str, title: str = "", note: str = "") -> str:
    head, tail = f"<h3>{inline(title)}</h3>" * bool(title), f'<p class="note">{inline(note)}</p>' * bool(note)
    return f'<div class="card">{head}{body}{tail}</div>\n'


def _picture(data: bytes, caption: str) -> str:
    kind = next((name for magic, name in FORMATS.items() if data.startswith(magic)), None)
    if kind is None:
        raise ValueError(f"not a PNG, JPEG, GIF, WebP or SVG picture: {caption}")
    source, alt = f"data:image/{kind};base64,{base64.b64encode(data).decode()}", html.escape(caption)
    return _card(f'<figure><img src="{source}" alt="{alt}"><figcaption>{inline(caption)}</figcaption></figure>')


def _results(part: Results, task: str) -> str:
    """Return the tables of a task, side by side where the window is wide enough, and curves of those over NFE."""
    tables = [table for make in TABLES.get(task, (_over_nfe, toy.exact_tables)) for table in make(part)]
    cards = (_card(html_table(table, part.colour), table.title, table.note) for table in tables)
    figure = _figure((_panel(table, part.colour) for table in tables), task)
    return f'<div class="beside">\n{"".join(cards)}</div>\n{figure}'


def _over_nfe(part: Results) -> list[Table]:
    """Return all known metrics of samples over NFE, by data set."""
    parts = [sampled(part).only(data=data) for data in data_of(part)]
    return [table for own in parts for metric in names("metrics") for table in over_nfe(own, metric)]


TABLES: dict[str, Sequence[Callable[[Results], list[Table]]]] = {  # by task; all others as the toy
    "mnist": (images.image_tables,),
    "digits": (images.image_tables,),
    "text": (text.all_tables,),
    "ties": (ties.scaling_tables, ties.health_tables),
}


def _panel(table: Table, colour: Callable[[str], str]) -> Panel:
    """Return a table over NFE as curves, dashed for references; none if cells have several numbers."""
    single = not any("\n" in cell.partition("\n*(")[0] for row in table.rows for cell in row)
    steps = {column: int(name[4:]) for column, name in enumerate(table.header) if single and name.startswith("NFE ")}
    curves = {}
    for row, line in zip(table.rows, table.lines, strict=True):
        points = [(step, value) for column, step in steps.items() if (value := printed(row[column])) is not None]
        if line.method and len(points) > 1:
            curves[row[0]] = Curve(points, colour=colour(line.method), style="--" if line.reference else "-")
    return Panel(f"{table.title.strip('*')}, {table.header[0]}", curves)


def _training(results: Results, runs: Sequence[Path]) -> Iterable[Panel]:
    """Yield training curves of the loss of runs, and of the KL of those with a latent."""
    for key, title in TRAINING.items():
        curves = {}
        for run in runs:
            experiment = json.loads((run / "experiment.json").read_text(encoding="utf-8"))
            kind, records = experiment["method"]["kind"], read_metrics(run / "metrics.jsonl")
            points = [(record["step"], record[key]) for record in records if key in record]
            label = results.label(kind)
            label = f"{experiment['name']}, seed {experiment['seed']}" if label in curves else label
            if any(value for _, value in points):
                curves[label] = Curve(points, colour=results.colour(kind))
        yield Panel(title, curves, xlabel="training step", log_x=False)


def _figure(panels: Iterable[Panel], name: str) -> str:
    """Return panels as one picture, two in a row; without matplotlib a sentence."""
    shown = [panel for panel in panels if panel.curves]
    rows, file = [shown[start : start + 2] for start in range(0, len(shown), 2)], io.BytesIO()
    if not rows:
        return ""
    try:
        draw(rows, width=5.0).savefig(file)
        return _picture(file.getvalue(), f"Curves: {name}")
    except ImportError:
        return _card('<p class="note">Curves are left out: matplotlib is not installed.</p>')


def html_table(table: Table, colour: Callable[[str], str]) -> str:
    """Return a table in HTML, with the colours of methods."""
    head = "".join(f'<th scope="col">{inline(name)}</th>' for name in table.header)
    lines = []
    for number, row in enumerate(table.rows):
        line = table.lines[number] if table.lines else Line(())
        key = f'<i class="key" style="background:{colour(line.method)}"></i>' if line.method else ""
        cells = [_html_cell(cell, key * (column == 0)) for column, cell in enumerate(row)]
        lines.append(f'<tr class="{"reference" * line.reference}">{"".join(cells)}</tr>')
    kind, body = "numbers" if table.lines else "words", "\n".join(lines)
    return (
        f'<div class="scroll"><table class="{kind}"><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>'
    )


def _html_cell(cell: str, key: str) -> str:
    first, *below = cell.split("\n")
    value, error, size = first.partition(f"{NBSP}±")
    small = [f"±{size}"] * bool(error) + below
    kind = ' class="best"' if cell.startswith("**") else ""
    return f"<td{kind}>{key}{inline(value)}{''.join(f'<small>{inline(text)}</small>' for text in small)}</td>"


def inline(text: str) -> str:
    """Return inline Markdown as HTML, escaped."""
    text = html.escape(text)
    for pattern, tag in ((r"\*\*(.+?)\*\*", "b"), (r"\*(.+?)\*", "em"), (r"`([^`]+)`", "code")):
        text = re.sub(pattern, rf"<{tag}>\1</{tag}>", text)
    return text.replace("\n", "<br>")
