"""Tables of the studies of binary images (`emoe reproduce mnist` and `digits`), for the console, files and docs."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from emoe.evaluation.grid import DATA, METHODS, REFERENCES, Cell, Column, Grid, Line, measure
from emoe.evaluation.latent_blocks import as_words, cell, words_of
from emoe.evaluation.paper import paper_value
from emoe.evaluation.readme import generator, results_block, source_of
from emoe.evaluation.results import Results, Row, SeedMean, mean_over_seeds
from emoe.evaluation.tables import grid_markdown, markdown_table

TASKS = ("mnist", "digits")
SHOWN = ("frechet", "coverage", "confidence", "precision", "recall")  # over NFE
REACHED = "reached"  # in a recipe's name: the step of a run that was measured before its end
DIGITS = 4  # decimals of bits per dimension
STEPS = 200_000  # of the paper's budget
STEP_DATA, STEP_RIVAL = "mnist-step-gpu", "vdm, eager"  # as `benchmarks/step_time.py` records them
STEP_COMMAND = "python benchmarks/step_time.py --task mnist --record"
PAPER = {"mnist": "binarized-mnist"}  # `data` of our rows -> that of the paper's numbers
KINDS = ("objective", "nelbo", "bound", "iw")  # order of the columns
FIGURES = {
    "samples.png": "the first 16 samples of each method at each number of network calls",
    "curves.png": "Frechet distance, coverage and confidence against the number of network calls",
    "film.gif": "a sampling run of E-MoE with the expert of every position, block by block",
}


class Model(NamedTuple):
    """A method as one recipe makes it; `own` is what was changed in this recipe, but not in all of them."""

    method: str
    own: str
    step: int | None = None  # of a run that was measured before its end

    @property
    def label(self) -> str:
        """`E-MoE`, `E-MoE train.steps=200`, or `E-MoE, step 5,000`."""
        name = " ".join(filter(None, (METHODS.get(self.method, self.method), self.own)))
        return name if self.step is None else f"{name}, step {self.step:,}"


def data_of(results: Results) -> list[str]:
    """Data sets that models were measured on, the known ones first."""
    found = {row.data for row in results.rows if row.method not in REFERENCES}
    return [name for name in DATA if name in found] + sorted(found - set(DATA))


def common_changes(results: Results) -> dict[str, str]:
    """Fields that were changed alike in all recipes: said once, not in every name."""
    changes = [words_of(name)[1] for name in {str(row.recipe) for row in _models(results)}]
    first = changes[0] if changes else {}
    shared = {name: text for name, text in first.items() if all(one.get(name) == text for one in changes)}
    return {name: text for name, text in shared.items() if name != REACHED}


def models(results: Results, data: str) -> dict[Model, list[Row]]:
    """The rows of models on a data set by method and recipe, in the order of `METHODS`.

    Of a run that was measured several times on its way only the last measurement is shown.
    """
    part = results.only(data=data)
    common = common_changes(part)
    groups: dict[Model, list[Row]] = {}
    for row in _furthest(_models(part)):
        name, fields = words_of(str(row.recipe))
        step = fields.pop(REACHED, None)
        own = as_words({field: text for field, text in fields.items() if field not in common})
        usual = name == f"{row.task}-{row.method}"
        model = Model(row.method, own if usual else f"({name}) {own}".strip(), None if step is None else int(step))
        groups.setdefault(model, []).append(row)
    order = list(METHODS)
    place = {model: order.index(model.method) if model.method in order else len(order) for model in groups}
    return dict(sorted(groups.items(), key=lambda item: (place[item[0]], item[0].label)))


def reference_name(recipe: str) -> str:
    """The recipe of real data beside a model: what was changed in the data, and in the judge's with them, is told."""
    return _reference(words_of(recipe)[1])


def _reference(fields: Mapping[str, str]) -> str:
    changed = {field: text for field, text in fields.items() if field.startswith("domain.")}
    return " ".join(filter(None, ("reference", as_words(changed))))


def real_data(results: Results, data: str) -> list[Row]:
    """Rows of real data that fit the models of a data set; where these differ in the data, the usual ones."""
    part = results.only(data=data)
    return part.select(method="data", recipe=_reference(common_changes(part)))


def _models(results: Results) -> list[Row]:
    return [row for row in results.rows if row.method not in REFERENCES and row.recipe is not None]


def _furthest(rows: Iterable[Row]) -> list[Row]:
    """Rows without those of an earlier step of the same run; a run without a step in its name is at its end."""
    rows = list(rows)
    places = [words_of(str(row.recipe)) for row in rows]
    steps = [float(fields.pop(REACHED, "inf")) for _, fields in places]
    runs = [(name, *sorted(fields.items()), row.seed) for (name, fields), row in zip(places, rows, strict=True)]
    last: dict[tuple[object, ...], float] = {}
    for run, step in zip(runs, steps, strict=True):
        last[run] = max(step, last.get(run, 0.0))
    return [row for row, run, step in zip(rows, runs, steps, strict=True) if step == last[run]]


def mean_of(
    rows: Iterable[Row], metric: str, *, nfe: int | None = None, convention: str | None = None
) -> SeedMean | None:
    """Mean over seeds of a number; the error of a single seed is that of its own measurement."""
    found = [row for row in rows if (row.metric, row.nfe, row.convention) == (metric, nfe, convention)]
    mean = mean_over_seeds(found)
    return mean._replace(stderr=found[0].stderr) if mean is not None and len(found) == 1 else mean


def conventions_of(rows: Iterable[Row]) -> list[str]:
    """Conventions of bits per dimension: the objective, then bounds with rising T."""

    def key(name: str) -> tuple[int, list[int]]:
        kind, _, numbers = name.partition("@")
        return KINDS.index(kind) if kind in KINDS else len(KINDS), [int(text) for text in numbers.split(",") if text]

    return sorted({row.convention for row in rows if row.metric == "bpd" and row.convention is not None}, key=key)


def bpd_lines(results: Results, data: str) -> tuple[list[str], list[list[str]]]:
    """Header and cells: parameters, the paper's number, and ours under every convention; the coordination gain.

    Where all recipes are the package's own, methods of the paper that are not measured have a line too.
    """
    found = models(results, data)
    names = conventions_of(row for rows in found.values() for row in rows)
    plain = data in PAPER and not common_changes(results.only(data=data))
    lines = []
    for model, rows in found.items():
        paper = functools.partial(_paper, data, model.method) if plain and not model.own else _nothing
        size = [_millions(rows, metric, paper(metric)) for metric in ("params", "params_active")]
        cells = [cell(mean_of(rows, "bpd", convention=name), DIGITS) for name in names]
        gain = cell(mean_of(rows, "coordination_gain", convention="bound@1"), DIGITS, sign="+")
        lines.append([model.label, *size, *[_three(paper("bpd"))] * (data in PAPER), *cells, gain])
    measured = {model.method for model in found if not model.own}
    for method in [name for name in METHODS if plain and name not in measured]:
        if _paper(data, method, "bpd") is not None:
            size = [_millions([], metric, _paper(data, method, metric)) for metric in ("params", "params_active")]
            lines.append([METHODS[method], *size, _three(_paper(data, method, "bpd")), *["—"] * (len(names) + 1)])
    told = ["parameters", "active", *["paper"] * (data in PAPER)]
    return [DATA.get(data, data), *told, *names, "coordination gain"], lines


def _paper(data: str, method: str, metric: str) -> float | None:
    return paper_value("mnist", PAPER[data], method, metric, None)


def _nothing(metric: str) -> None:
    return None


def _three(value: float | None) -> str:
    return "—" if value is None else f"*{value:.3f}*"


def _millions(rows: Sequence[Row], metric: str, paper: float | None) -> str:
    """`2.07M`, with the paper's number below it."""
    mean = mean_of(rows, metric)
    ours = "—" if mean is None else f"{mean.mean / 1e6:.2f}M"
    return ours + ("" if paper is None else f"\n*({paper / 1e6:.2f}M)*")


def nfe_grid(results: Results, data: str, metric: str) -> Grid:
    """A metric of samples over NFE for all models, and for real data."""
    groups = models(results, data)
    steps = sorted({row.nfe for rows in groups.values() for row in rows if row.metric == metric and row.nfe})
    lines = []
    for model, rows in groups.items():
        means = [mean_of(rows, metric, nfe=nfe) for nfe in steps]
        if any(mean is not None for mean in means):
            lines.append(Line(model.label, None, tuple(map(_grid_cell, means))))
    real = mean_of(real_data(results, data), metric)
    if real is not None and steps:
        lines.append(Line("data", None, (_grid_cell(real),) * len(steps)))
    return Grid(metric, tuple(Column(data, nfe) for nfe in steps), tuple(lines))


def _grid_cell(mean: SeedMean | None) -> Cell:
    return Cell() if mean is None else Cell(mean.mean, mean.stderr)


def bpd_note(results: Results, data: str) -> str:
    """What the columns are, and how much stands behind them."""
    rows = [row for row in _models(results.only(data=data)) if row.metric == "bpd"]
    weighted = sorted({row.n for row in rows if str(row.convention).startswith("iw") and row.n})
    others = sorted({row.n for row in rows if not str(row.convention).startswith("iw") and row.n})
    counts = [f"{_numbers(others)} test images"] * bool(others)
    counts += [f"`iw` on {_numbers(weighted)}"] * bool(weighted)
    told = (
        "Bits per dimension, nats / (L ln 2), each under its name: `objective` is the training objective, which bounds "
        "nothing where there is a latent; `nelbo` (without a latent), `bound@T` and `iw@T,K` are upper bounds of the "
        "NLL of the sampler, of T steps for the latter two. Coordination gain in nats per pixel."
    )
    if data in PAPER:
        told += " *Italics*: the paper, whose table does not name a convention."
    return f"{told} {'; '.join(counts)}. {_made(results.only(data=data))}"


def nfe_note(results: Results, data: str) -> str:
    """How many samples, and what the row of real data is."""
    part = results.only(data=data)
    drawn = sorted({row.n for row in _models(part) if row.metric == "ink" and row.n})
    words = [f"{_numbers(drawn)} samples for each NFE"] * bool(drawn)
    words += ["**bold**: best model of a column"] * any(nfe_grid(results, data, metric).best() for metric in SHOWN)
    real = sorted(row.n for row in real_data(results, data) if row.metric == "pixel_tv" and row.n)
    if real:
        words.append(
            f"real data: {_numbers(real)} training images in place of samples, for confidence the test images "
            "(so it does not depend on NFE)"
        )
    accuracy = mean_of(real_data(results, data), "judge_accuracy")
    words += [] if accuracy is None else [f"the judge gets {accuracy.mean:.1f} % of the test images right"]
    return f"{'; '.join(words)}. {_made(part)}"


def _numbers(counts: Sequence[int]) -> str:
    """`300`, or `300 to 500` where rows differ; nothing without rows."""
    return " to ".join(dict.fromkeys(f"{count:,}" for count in (*counts[:1], *counts[-1:])))


def _made(results: Results) -> str:
    seeds = sorted({row.seed for row in results.rows if row.seed is not None})
    common = as_words(common_changes(results))
    errors = "standard errors over seeds" if len(seeds) > 1 else "standard errors of the measurement"
    told = f"Seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}; {errors}."
    return f"{told}{f' All with `{common}`.' if common else ''} Made at {source_of(results)}."


def bpd_markdown(results: Results) -> str:
    """Bits per dimension, a table for each data set."""
    parts = []
    for data in data_of(results):
        header, lines = bpd_lines(results, data)
        parts.append(f"{markdown_table(header, lines)}\n{bpd_note(results, data)}\n")
    return "\n".join(parts)


def nfe_markdown(results: Results) -> str:
    """Measures of samples over NFE: a table for each data set and metric."""
    parts = []
    for data in data_of(results):
        grids = [nfe_grid(results, data, metric) for metric in SHOWN]
        tables = [f"**{measure(g.metric).label}**\n\n{grid_markdown(g)}" for g in grids if g.lines]
        parts += [*tables, f"{nfe_note(results, data)}\n"] * bool(tables)
    return "\n".join(parts)


def image_tables(results: Results, task: str) -> str:
    """All tables of a task as one Markdown text: `results/mnist.md`."""
    results = results.only(task=task)
    return f"**Bits per dimension**\n\n{bpd_markdown(results)}\n{nfe_markdown(results)}"


def _register(task: str) -> None:
    empty = f"*No numbers here yet: run `emoe reproduce {task}`.*"

    @results_block(f"{task}-bpd", task)
    def bpd(results: Results) -> str:
        return bpd_markdown(results.only(task=task)) or empty

    @results_block(f"{task}-nfe", task)
    def nfe(results: Results) -> str:
        return nfe_markdown(results.only(task=task)) or empty

    @generator(f"{task}-figures")
    def figures(folder: Path) -> str:
        here = [name for name in FIGURES if (folder / "figures" / f"{task}-{name}").exists()]
        shown = [f"![{FIGURES[name]}](../{folder.name}/figures/{task}-{name})" for name in here]
        return "\n\n".join(shown) or f"*No figures here yet: run `emoe reproduce {task}`.*"


for _task in TASKS:
    _register(_task)


@results_block("mnist-steps", "benchmark")
def mnist_steps(results: Results) -> str:
    """Time of a training step on MNIST, what the paper's budget takes, and how it compares with the rival's."""
    rows = results.select(metric="step_ms", data=STEP_DATA)
    if not rows:
        return f"*No times here yet: run `{STEP_COMMAND}`.*"
    rival = next((row.value for row in rows if row.method == STEP_RIVAL), None)
    lines = []
    for row in rows:
        name, _, more = row.method.partition(", ")
        label = "VDM UNet, eager" if row.method == STEP_RIVAL else ", ".join(filter(None, (METHODS[name], more)))
        minutes = "—" if row.method == STEP_RIVAL else f"{row.value * STEPS / 60_000:.1f}"
        error = "" if row.stderr is None else f" ±{row.stderr:.2f}"
        lines.append([label, f"{row.value:.2f}{error}", minutes, "—" if rival is None else f"{rival / row.value:.1f}x"])
    header = ["MNIST, 64 images a step", "ms per step", f"minutes for {STEPS:,} steps", "speed against the VDM UNet"]
    note = f"Medians of turns within one process, {rows[0].n} each. Made at {source_of(results.only(data=STEP_DATA))}."
    return f"{markdown_table(header, lines)}\n{note}\n"
