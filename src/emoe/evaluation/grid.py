"""What a table of results holds before it is written in any format: lines, columns, and who is best."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from emoe.evaluation.paper import paper_rows, paper_value
from emoe.evaluation.results import Results, ResultsError, Row, SeedMean, mean_over_seeds

METHODS = {
    "mdlm": "MDLM",
    "sedd": "SEDD",
    "bd3lm": "BD3-LM",
    "vadd": "VADD",
    "vadd-plus": "VADD+",
    "emoe": "E-MoE",
    "emoe-plus": "E-MoE+",
    "emoe-aware": "E-MoE, step-aware",
    "ar": "AR",
}
REFERENCES = {"ideal": "ideal factorised", "data": "real data"}
DATA = {
    "8-modes": "8-modes",
    "swiss-roll": "Swiss-roll",
    "binarized-mnist": "binarized MNIST",
    "mnist": "binarized MNIST",
    "mnist-static": "static MNIST",
    "mnist-28": "binarized MNIST, 28 x 28",
    "mnist-static-28": "static MNIST, 28 x 28",
    "digits": "digits, 8 x 8",
    "lm1b": "LM1B",
}


class Measure(NamedTuple):
    """How a metric is printed: its name, decimals, and which direction is better (None: neither)."""

    label: str
    digits: int
    better: Literal["high", "low"] | None


MEASURES = {
    "validity": Measure("Validity (%)", 1, "high"),
    "overlap": Measure("Overlap (%)", 1, "high"),
    "pair_overlap": Measure("Pair overlap (%)", 1, "high"),
    "ties": Measure("Ties kept (%)", 1, "high"),
    "rows_valid": Measure("Valid rows (%)", 1, "high"),
    "coverage": Measure("Coverage (%)", 1, "high"),
    "mauve": Measure("MAUVE (%)", 2, "high"),
    "entropy": Measure("Entropy (nats)", 2, None),
    "nll": Measure("NLL (nats per row)", 3, None),
    "kl": Measure("KL(data || model) (nats)", 3, "low"),
    "coordination_gain": Measure("Coordination gain (nats per token)", 3, "high"),
    "bpd": Measure("Bits per dimension", 3, None),
    "ppl": Measure("Perplexity", 2, None),
    "gen_ppl": Measure("Generative perplexity", 1, "low"),
    "judge_ppl": Measure("The judge's perplexity of held-out rows", 1, None),
    "mauve_spread": Measure("Spread of MAUVE over k-means seeds (%)", 2, None),
    "frechet": Measure("Frechet distance", 2, "low"),
    "frechet_real": Measure("Frechet distance between halves of the real data", 2, None),
    # Noise can have a high precision, and one digit repeated a high confidence: neither has a winner.
    "precision": Measure("Precision (%)", 1, None),
    "recall": Measure("Recall (%)", 1, "high"),
    "density": Measure("Density (%)", 1, None),
    "confidence": Measure("Confidence of the judge (%)", 1, None),
    "class_entropy": Measure("Entropy of classes (nats)", 3, None),
    "class_tv": Measure("Distance of classes (%)", 1, "low"),
    "judge_accuracy": Measure("Accuracy of the judge (%)", 1, None),
    "ink": Measure("Ink (%)", 2, None),
    "distinct": Measure("Distinct samples (%)", 1, "high"),
    "distinct_1": Measure("Distinct tokens (%)", 1, None),
    "distinct_2": Measure("Distinct pairs of tokens (%)", 1, None),
    "distinct_3": Measure("Distinct runs of three tokens (%)", 1, None),
    "repetition": Measure("Repeated runs of four tokens (%)", 1, None),
    "pool_distinct_1": Measure("Distinct tokens in the pool (%)", 2, None),
    "pool_distinct_2": Measure("Distinct pairs of tokens in the pool (%)", 1, None),
    "pool_distinct_3": Measure("Distinct runs of three tokens in the pool (%)", 1, None),
    "duplicates": Measure("Duplicates (%)", 1, None),
    "copied": Measure("Copied training rows (%)", 2, None),
    "pixel_tv": Measure("Distance of pixels (%)", 2, "low"),
    "params": Measure("Parameters", 0, None),
    "params_active": Measure("Active parameters", 0, None),
    "step_ms": Measure("Time per step (ms)", 2, "low"),
}


def measure(metric: str) -> Measure:
    """How to print a metric; one that is not known gets two decimals and no winner."""
    return MEASURES.get(metric, Measure(metric, 2, None))


class Column(NamedTuple):
    """A data set and a number of network calls."""

    data: str
    nfe: int | None


@dataclass(frozen=True)
class Cell:
    """Our mean over seeds, its standard error, and the paper's figure, each where there is one."""

    value: float | None = None
    stderr: float | None = None
    paper: float | None = None


@dataclass(frozen=True)
class Line:
    """A method (under one convention) across the columns."""

    method: str
    convention: str | None
    cells: tuple[Cell, ...]

    @property
    def reference(self) -> bool:
        """Whether the row is a yardstick and not a model; it takes no part in the contest for the best."""
        return self.method in REFERENCES

    @property
    def label(self) -> str:
        """The method's name as printed."""
        return (METHODS | REFERENCES).get(self.method, self.method)


@dataclass(frozen=True)
class Grid:
    """A table before it is written in any format."""

    metric: str
    columns: tuple[Column, ...]
    lines: tuple[Line, ...]

    @property
    def conventions(self) -> bool:
        """Whether the rows need a column that says which bound or estimate they are."""
        return any(line.convention is not None for line in self.lines if not line.reference)

    def split(self) -> list[Grid]:
        """A grid for every data set."""
        parts = []
        for data in dict.fromkeys(column.data for column in self.columns):
            places = [place for place, column in enumerate(self.columns) if column.data == data]
            lines = (replace(line, cells=tuple(line.cells[place] for place in places)) for line in self.lines)
            parts.append(Grid(self.metric, tuple(self.columns[place] for place in places), tuple(lines)))
        return parts

    def best(self) -> set[tuple[int, int]]:
        """Places (line, column) of the best models; values that print alike share the honour."""
        rules = measure(self.metric)
        columns = (
            [
                round(line.cells[place].value or 0.0, rules.digits)
                if line.cells[place].value is not None and not line.reference
                else None
                for line in self.lines
            ]
            for place in range(len(self.columns))
        )
        return best_places(columns, rules.better)


def best_places(columns: Iterable[list[float | None]], better: str | None) -> set[tuple[int, int]]:
    """(row, column) of the best values of every column in which at least two values compete."""
    places = set()
    for column, values in enumerate(columns):
        known = [value for value in values if value is not None]
        if better is not None and len(known) > 1:
            top = max(known) if better == "high" else min(known)
            places |= {(row, column) for row, value in enumerate(values) if value == top}
    return places


def toy_grid(results: Results, metric: str = "validity", *, seeds: Collection[int] | None = None) -> Grid:
    """The grid of the paper's toy table, from samples as in the paper; see `metric_grid`."""
    return metric_grid(sampled(results), "toy", metric, seeds=seeds)


def sampled(results: Results) -> Results:
    """Rows measured on samples, as the paper has them, and the yardsticks; those of exact laws left out."""
    return results.only(convention=None).merge(results.only(method=tuple(REFERENCES)))


def metric_grid(results: Results, task: str, metric: str, *, seeds: Collection[int] | None = None) -> Grid:
    """Means over seeds of a metric for all methods of a task.

    Args:
        results: Where the rows come from.
        task: toy, mnist or lm1b.
        metric: The metric to show.
        seeds: Seeds to average over; None for all that are there.

    Returns:
        A line for every method that has rows or that the paper reports. Where rows name a convention, each
        convention has its own line and so has the paper, whose convention is not ours to guess.
    """
    rows = results.select(task=task, metric=metric)
    paper = [row for row in paper_rows() if (row["task"], row["metric"], row["variant"]) == (task, metric, None)]
    columns = _columns([(row.data, row.nfe) for row in rows if row.method not in REFERENCES])
    columns = columns or _columns([(row["data"], row["nfe"]) for row in paper])
    named = any(row.convention is not None for row in rows if row.method not in REFERENCES)
    lines = []
    order = list(METHODS) + sorted({row.method for row in rows} - set(METHODS) - set(REFERENCES)) + list(REFERENCES)
    for method in order:
        ours = [row for row in rows if row.method == method]
        found = sorted({row.convention for row in ours}, key=lambda name: (name is not None, name))
        # The paper's figures belong beside its own settings: the recipes of the task with no field changed.
        recipes = {str(row.recipe) for row in ours or rows if row.method not in REFERENCES}
        comparable = any(name.startswith(f"{task}-") and " " not in name for name in recipes) or not recipes
        figures = tuple(paper_value(task, c.data, method, metric, c.nfe) if comparable else None for c in columns)
        reported = any(figure is not None for figure in figures)
        for convention in found or ([None] if reported and not named else []):
            same = [row for row in ours if row.convention == convention]
            means = [_mean(same, column, seeds) for column in columns]
            beside = figures if not named else (None,) * len(columns)
            lines.append(Line(method, convention, tuple(map(_cell, means, beside))))
        if reported and named:
            lines.append(Line(method, "paper", tuple(Cell(paper=figure) for figure in figures)))
    return Grid(metric, columns, tuple(lines))


def _columns(found: list[tuple[str, int | None]]) -> tuple[Column, ...]:
    order = list(DATA) + sorted({data for data, _ in found} - set(DATA))
    return tuple(Column(*pair) for pair in sorted(set(found), key=lambda pair: (order.index(pair[0]), pair[1] or 0)))


def _cell(mean: SeedMean | None, paper: float | None) -> Cell:
    return Cell(paper=paper) if mean is None else Cell(mean.mean, mean.stderr, paper)


def _mean(rows: list[Row], column: Column, seeds: Collection[int] | None) -> SeedMean | None:
    """Mean of one cell over the rows of a method under one convention."""
    rows = plain_recipe([row for row in rows if row.data == column.data])
    fitting = [row for row in rows if row.nfe == column.nfe]
    if rows and rows[0].method in REFERENCES:
        # A yardstick holds for any seed and, if it was measured without a number of steps, for any number.
        fitting = fitting or [row for row in rows if row.nfe is None]
    elif seeds is not None:
        fitting = [row for row in fitting if row.seed in seeds]
    return mean_over_seeds(fitting)


def plain_recipe(rows: list[Row]) -> list[Row]:
    """Of the rows of one method on one data set, those of its main recipe: ablations stay out of a mean.

    The main recipe is the only one there is or, among several, the one whose name begins with the task's name
    and ends in the method's (`toy-8modes-emoe`; neither `demo-emoe` nor `toy-8modes-emoe method.route-tau=0`).
    """
    recipes = sorted({str(row.recipe) for row in rows})
    if len(recipes) < 2:
        return rows
    task, method = rows[0].task, rows[0].method
    ours = [name for name in recipes if name.startswith(f"{task}-")] or recipes
    plain = [name for name in ours if name.partition(" ")[0].endswith(f"-{method}")]
    # A changed field is a further word of the name: the recipe with the fewest of them is the one that was changed.
    fewest = min((name.count(" ") for name in plain), default=0)
    plain = [name for name in plain if name.count(" ") == fewest]
    if method in REFERENCES:  # the same beside every recipe it was measured with: take one of them
        plain = ours[:1]
    if len(plain) != 1:
        raise ResultsError(f"cannot tell the main recipe of {method} from {', '.join(recipes)}")
    return [row for row in rows if str(row.recipe) == plain[0]]


def table_rows(results: Results, metric: str, task: str = "toy") -> list[Row]:
    """The rows that a grid of the metric is made from: those of the main recipes, references included."""
    rows = sampled(results).select(task=task, metric=metric)
    groups = {(row.method, row.data) for row in rows}
    return [row for key in sorted(groups) for row in plain_recipe([r for r in rows if (r.method, r.data) == key])]
