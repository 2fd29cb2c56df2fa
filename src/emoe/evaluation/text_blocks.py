"""Tables of the study of text (`emoe reproduce text`), for the console, files and docs.

Generative perplexity is never printed without the entropy of the samples beside it, and no model is marked as the best:
repetitive text has a low perplexity. Every likelihood stands under its name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from emoe.evaluation.grid import METHODS, REFERENCES
from emoe.evaluation.image_blocks import Model, common_changes, mean_of
from emoe.evaluation.latent_blocks import as_words, cell, words_of
from emoe.evaluation.paper import paper_value
from emoe.evaluation.readme import generator, results_block, source_of
from emoe.evaluation.results import Results, Row, SeedMean, load_once
from emoe.evaluation.tables import markdown_table

TASK = "text"
COMMANDS = {"text": "emoe reproduce text", "text-tiny": "emoe reproduce text --size text-tiny"}  # by names of files
SETTINGS = ("paper", "duo")
CONVENTIONS = ("exact", "nelbo", "objective", "bound", "iw")  # order of the columns
FAMILIES = ("news-small", "lm1b")  # recipes beside which the paper's numbers stand
TRAINING = ("train.", "optim.")  # fields of such recipes that may be changed
BLOCK = re.compile(r"/block(\d+)$")
LATENT = {
    "usage_entropy": "entropy of usage",
    "routing_entropy": "entropy of the posterior",
    "prior_entropy": "entropy of the prior",
    "route_kl": "route KL",
}
FIGURES = {
    "gen-ppl.png": "generative perplexity, entropy and MAUVE against the number of network calls",
    "latent.png": "the latent in the course of training: usage and route KL by block, both terms of the loss",
}
ALIVE_USAGE, ALIVE_KL = 1.0, 0.02  # nats; a block above both has routes that vary and say something of the text
EQUAL_ENTROPY = 0.05  # nats between samples whose perplexities are compared
DASH = "—"
STEP_DATA = "news-small-step-gpu"  # as `benchmarks/step_time.py` records it
STEP_COMMAND = "python benchmarks/step_time.py --task news-small --set FOLDER --methods all --record"
NEWS_STEPS = 7_500  # of the news-small recipes

Table = tuple[list[str], list[list[str]]]


class Variant(NamedTuple):
    """Another way to sample with the same weights of E-MoE: what is changed in its routes."""

    name: str  # in the convention of a row
    label: str
    settings: dict[str, str]
    least: int  # network calls from which on it makes a difference
    paper: str  # its name among the paper's numbers, which may have none of it
    line: str  # in figures


GREEDY = Variant("route_tau=0", "greedy routes", {"method.route-tau": "0"}, 1, "greedy", ":")
AVERAGED = Variant("mean_below=0.7", "averaged routes", {"method.mean-below": "0.7"}, 2, "averaged", "--")
VARIANTS = {variant.name: variant for variant in (GREEDY, AVERAGED)}


def files_of(size: str) -> str:
    """How the names of files and blocks begin: recipes of a size for a CPU have their own, all others share theirs."""
    return size if size in COMMANDS else TASK


# --- Which rows --------------------------------------------------------------------------------------------------


def text_rows(results: Results) -> Results:
    """The rows of models and of held-out text."""
    return results.only(task=TASK)


def _is_model(row: Row) -> bool:
    return row.method not in REFERENCES and row.method != "judge" and row.recipe is not None


def _models(results: Results) -> Results:
    return results.only(method={row.method for row in results.rows if _is_model(row)})


def data_of(results: Results) -> list[str]:
    """Data sets that models were trained on."""
    return sorted({row.data for row in results.rows if _is_model(row) and not row.metric.startswith("zero_shot_")})


def models(results: Results, data: str | None = None) -> dict[Model, list[Row]]:
    """Rows of models by method and recipe, in the order of `METHODS`; changes that all recipes share are left out."""
    part = _models(results if data is None else results.only(data=data))
    common = common_changes(part)
    families = {words_of(str(row.recipe))[0].removesuffix(f"-{row.method}") for row in part.rows}
    groups: dict[Model, list[Row]] = {}
    for row in part.rows:
        name, fields = words_of(str(row.recipe))
        own = as_words({field: text for field, text in fields.items() if field not in common})
        usual = name.endswith(f"-{row.method}") and len(families) == 1
        groups.setdefault(Model(row.method, own if usual else f"({name}) {own}".strip()), []).append(row)
    order = list(METHODS)
    place = {model.method: order.index(model.method) if model.method in order else len(order) for model in groups}
    return dict(sorted(groups.items(), key=lambda item: (place[item[0].method], item[0])))


def paper_of(
    rows: Sequence[Row], metric: str, nfe: int | None = None, *, variant: str | None = None, method: str | None = None
) -> float | None:
    """The paper's number on LM1B beside these rows of a model, where its recipe is one for such a table.

    A shorter or otherwise trained run of the recipe is one too; another network or method is not.

    Args:
        rows: Of one model.
        metric: Which number.
        nfe: At how many network calls.
        variant: Of sampling, such as greedy routes.
        method: Whose number; that of the rows if None.
    """
    recipes = [words_of(name) for name in {str(row.recipe) for row in rows}]
    usual = [name.startswith(FAMILIES) and all(field.startswith(TRAINING) for field in own) for name, own in recipes]
    if not usual or not all(usual):
        return None
    return paper_value("lm1b", "lm1b", method or rows[0].method, metric, nfe, variant=variant)


def judge_rows(results: Results, data: str) -> list[Row]:
    """Rows of the judge that scored last: scores of an earlier one were replaced by its own."""
    rows = results.select(data=data, method="judge")
    last = max(rows, key=lambda row: results.runs[row.run].when, default=None)
    return [] if last is None else [row for row in rows if row.recipe == last.recipe]


def settings_of(results: Results) -> list[str]:
    """Settings that perplexities were counted by."""
    found = {str(row.convention).partition(" ")[0] for row in results.select(metric="gen_ppl")}
    return [name for name in SETTINGS if name in found]


def steps_of(rows: Iterable[Row], metric: str) -> list[int]:
    """Numbers of network calls that a metric was measured at."""
    return sorted({row.nfe for row in rows if row.metric == metric and row.nfe is not None})


def conventions_of(rows: Iterable[Row], metric: str = "ppl") -> list[str]:
    """Names of likelihoods: exact, nelbo, objective, then bounds with rising T."""

    def key(name: str) -> tuple[int, list[int]]:
        kind, _, numbers = name.partition("@")
        place = CONVENTIONS.index(kind) if kind in CONVENTIONS else len(CONVENTIONS)
        return place, [int(text) for text in numbers.split(",") if text]

    return sorted({row.convention for row in rows if row.metric == metric and row.convention is not None}, key=key)


def in_setting(setting: str, variant: str | None = None) -> str:
    """The convention of a perplexity: how tokens are counted, and what was changed in the sampler."""
    return setting if variant is None else f"{setting} {variant}"


# --- Samples -----------------------------------------------------------------------------------------------------


def gen_ppl_table(results: Results, data: str, setting: str) -> Table:
    """Generative perplexity over NFE with the entropy of the samples, and the paper's numbers, in one cell."""
    groups, real = models(results, data), results.select(data=data, method="data")
    steps = steps_of((row for rows in groups.values() for row in rows), "gen_ppl")
    lines = []
    for model, rows in groups.items():
        cells = [_perplexity(rows, setting, nfe, None, paper=None) for nfe in steps]
        if any(text != DASH for text in cells):
            lines.append([model.label, *cells])
    if lines and real:
        value = _pair(mean_of(real, "gen_ppl", convention=setting), mean_of(real, "entropy"))
        if any("*(" in text for line in lines for text in line):
            value += f"\n*(H {paper_value('lm1b', 'lm1b', 'data', 'entropy', None):.2f})*"
        lines.append(["held-out text", *[value] * len(steps)])
    return [data, *(f"NFE {nfe}" for nfe in steps)], lines


def _perplexity(rows: Sequence[Row], setting: str, nfe: int, variant: str | None, *, paper: str | None) -> str:
    """`643.8 ±3.1`, below it `H 4.35`, and the paper's pair in italics."""
    ours = mean_of(rows, "gen_ppl", nfe=nfe, convention=in_setting(setting, variant))
    text = _pair(ours, mean_of(rows, "entropy", nfe=nfe, convention=variant))
    if ours is None:
        return DASH
    told = [paper_of(rows, metric, nfe, variant=paper) for metric in ("gen_ppl", "entropy")]
    return text + ("" if None in told else f"\n*({told[0]:.1f}, H {told[1]:.2f})*")


def _pair(perplexity: SeedMean | None, entropy: SeedMean | None) -> str:
    beside = DASH if entropy is None else f"{entropy.mean:.2f}"
    return DASH if perplexity is None else f"{cell(perplexity, 1)}\nH {beside}"


def mauve_table(results: Results, data: str) -> Table:
    """MAUVE over NFE; the error is the spread over seeds of k-means, as in the paper."""
    groups = models(results, data)
    steps = steps_of((row for rows in groups.values() for row in rows), "mauve")
    lines = []
    for model, rows in groups.items():
        cells = []
        for nfe in steps:
            text = _mauve(rows, nfe, None)
            told = paper_of(rows, "mauve", nfe)
            cells.append(text if told is None or text == DASH else f"{text}\n*({told:.2f})*")
        if any(text != DASH for text in cells):
            lines.append([model.label, *cells])
    return [data, *(f"NFE {nfe}" for nfe in steps)], lines


def _mauve(rows: Sequence[Row], nfe: int, variant: str | None) -> str:
    mean, spread = (mean_of(rows, name, nfe=nfe, convention=variant) for name in ("mauve", "mauve_spread"))
    if mean is None:
        return DASH
    error = "" if spread is None else f"\N{NO-BREAK SPACE}±{spread.mean:.2f}"
    return f"{mean.mean:.2f}{error}"


def collapse_table(results: Results, data: str, setting: str) -> Table:
    """E-MoE with drawn and with other routes, and MDLM: perplexity, entropy and MAUVE at every NFE of the ablation."""
    groups = models(results, data)
    names = {in_setting(setting, name): variant for name, variant in VARIANTS.items()}
    steps = steps_of((row for rows in groups.values() for row in rows if row.convention in names), "gen_ppl")
    lines = []
    for model, rows in groups.items():
        measured = {row.convention for row in rows if row.metric == "gen_ppl"}
        found = [variant for name, variant in names.items() if name in measured]
        if not found and model.method != "mdlm":
            continue
        told = "route_tau=1" if found else "collapse-reference"
        label = f"{model.label}, drawn routes" if found else model.label
        lines.append([label, *(_collapse(rows, setting, nfe, None, told) for nfe in steps)])
        for variant in found:
            cells = [_collapse(rows, setting, nfe, variant.name, variant.paper) for nfe in steps]
            lines.append([f"{model.label}, {variant.label}", *cells])
    return [data, *(f"NFE {nfe}" for nfe in steps)], lines if steps else []


def _collapse(rows: Sequence[Row], setting: str, nfe: int, variant: str | None, paper: str) -> str:
    text, mauve = _perplexity(rows, setting, nfe, variant, paper=paper), _mauve(rows, nfe, variant)
    if mauve == DASH:
        return text
    first, *rest = text.split("\n*(")
    return "\n*(".join([f"{first}\nMAUVE {mauve}", *rest])


# --- Likelihoods -------------------------------------------------------------------------------------------------


def likelihood_table(results: Results, data: str) -> Table:
    """Test perplexity and nats per token of each model under each of its names; the judge's below."""
    groups = models(results, data)
    judge = judge_rows(results, data)
    names = conventions_of([*(row for rows in groups.values() for row in rows), *judge])
    lines = []
    for model, rows in groups.items():
        told = paper_of(rows, "ppl")
        gain = cell(mean_of(rows, "coordination_gain", convention="bound@1"), 3, sign="+")
        cells = [_likelihood(rows, name, "") for name in names]
        if any(text != DASH for text in cells):
            lines.append([model.label, DASH if told is None else f"*{told:.2f}*", *cells, gain])
    if judge and lines:
        cells = [_likelihood(judge, name, "") for name in names]
        lines.append(["the judge (other text)", DASH, *cells, DASH])
    return [data, "paper", *names, "coordination gain"], lines


def _likelihood(rows: Sequence[Row], convention: str, prefix: str) -> str:
    ppl, nats = (mean_of(rows, f"{prefix}{name}", convention=convention) for name in ("ppl", "nll_token"))
    return DASH if ppl is None else f"{cell(ppl, 2)}\n{cell(nats, 4)}"


def zero_shot_table(results: Results, data: str) -> Table:
    """Likelihoods of text from elsewhere; `data` is that text."""
    part = results.only(data=data)
    groups = models(part, data)
    names = conventions_of((row for rows in groups.values() for row in rows), "zero_shot_ppl")
    lines = [
        [model.label, *(_likelihood(rows, name, "zero_shot_") for name in names)] for model, rows in groups.items()
    ]
    return [data, *names], lines


def zero_shot_data(results: Results) -> list[str]:
    """Sets that were only read."""
    return sorted({row.data for row in results.rows if row.metric.startswith("zero_shot_")})


# --- Design and latent -------------------------------------------------------------------------------------------


def design_table(results: Results, data: str) -> Table:
    """Passes per training and sampling step, parameters and time, all of them counted or measured."""
    lines = []
    for model, rows in models(results, data).items():
        passes = [mean_of(rows, name) for name in ("passes_train", "passes_block", "calls_step")]
        if passes[0] is None:
            continue
        counts = [
            _number(passes[0], paper_of(rows, "passes_train")),
            _number(passes[1], None),
            _number(passes[2], paper_of(rows, "calls_step")),
        ]
        sizes = [_millions(rows, metric) for metric in ("params", "params_active")]
        times = [cell(mean_of(rows, "step_ms"), 1), cell(mean_of(rows, "train_s"), 0)]
        lines.append([model.label, *counts, *sizes, *times])
    header = [
        data, "passes per training step", "through the mean block", "calls per sampling step", "parameters", "active",
        "training step (ms)", "training (s)",
    ]  # fmt: skip
    return header, lines


def _number(mean: SeedMean | None, paper: float | None) -> str:
    text = DASH if mean is None else f"{mean.mean:g}"
    return text if paper is None else f"{text}\n*({paper:g})*"


def _millions(rows: Sequence[Row], metric: str) -> str:
    mean, told = mean_of(rows, metric), paper_of(rows, metric)
    text = DASH if mean is None else f"{mean.mean / 1e6:.2f}M"
    return text if told is None else f"{text}\n*({told / 1e6:.1f}M)*"


def training_points(rows: Iterable[Row], metric: str) -> list[tuple[int, float]]:
    """(step, mean over seeds) of a number that training logged."""
    points: dict[int, list[float]] = {}
    for row in rows:
        if row.metric == metric and str(row.convention).startswith("step "):
            points.setdefault(int(str(row.convention).removeprefix("step ")), []).append(float(row.value))
    return [(step, math.fsum(values) / len(values)) for step, values in sorted(points.items())]


def blocks_of(rows: Iterable[Row]) -> list[int]:
    """Routed blocks of a model."""
    return sorted({int(found[1]) for row in rows if (found := BLOCK.search(row.metric))})


def latent_table(results: Results, data: str) -> Table:
    """By block, over the last twentieth of training: usage, routing entropy of both sides, route KL."""
    lines = []
    for model, rows in models(results, data).items():
        for block in blocks_of(rows):
            ends = [training_points(rows, f"{name}/block{block}")[-1:] for name in LATENT]
            lines.append([model.label, str(block), *(f"{end[0][1]:.4f}" if end else DASH for end in ends)])
        total = training_points(rows, "train_kl")[-1:]
        if total and (blocks_of(rows) or total[0][1]):
            told = paper_of(rows, "kl_per_token")
            text = f"{total[0][1]:.4f}" + ("" if told is None else f"\n*({told:.2f})*")
            lines.append([model.label, "all", DASH, DASH, DASH, text])
    return [data, "block", *LATENT.values()], lines


def checks_table(results: Results, data: str, setting: str) -> Table:
    """What a latent is for, yes or no: blocks in use, a gain over a factorised step, MDLM beaten at few calls."""
    groups = models(results, data)
    mdlm = [rows for model, rows in groups.items() if model.method == "mdlm"]
    latent = {model: rows for model, rows in groups.items() if blocks_of(rows)}
    steps = steps_of((row for rows in latent.values() for row in rows), "gen_ppl")[:2] if mdlm else []
    lines = [
        [model.label, _alive(rows), _gain(rows), *(_against(rows, mdlm[0], setting, nfe) for nfe in steps)]
        for model, rows in latent.items()
    ]
    told = [f"below MDLM at NFE {nfe}, equal H" for nfe in steps]
    return [data, "half of the blocks in use", "coordination gain above 0", *told], lines


def _alive(rows: Sequence[Row]) -> str:
    """How many blocks have routes that vary and say something of the text, at the end of training."""
    ends = [
        [training_points(rows, f"{name}/block{block}")[-1:] for name in ("usage_entropy", "route_kl")]
        for block in blocks_of(rows)
    ]
    found = [(usage[0][1], kl[0][1]) for usage, kl in ends if usage and kl]
    alive = sum(usage > ALIVE_USAGE and kl > ALIVE_KL for usage, kl in found)
    return _verdict(2 * alive >= len(found), f"{alive} of {len(found)}") if found else DASH


def _gain(rows: Sequence[Row]) -> str:
    mean = mean_of(rows, "coordination_gain", convention="bound@1")
    return DASH if mean is None else _verdict(mean.mean > 0, f"{mean.mean:+.3f}".replace("-", "\N{MINUS SIGN}"))


def _against(rows: Sequence[Row], other: Sequence[Row], setting: str, nfe: int) -> str:
    """Perplexities of two models' samples and how far apart their entropies are.

    No verdict where entropies are too far apart, or perplexities within two standard errors.
    """
    pairs = [
        (mean_of(part, "gen_ppl", nfe=nfe, convention=setting), mean_of(part, "entropy", nfe=nfe))
        for part in (rows, other)
    ]
    (ours, entropy), (theirs, level) = pairs
    if ours is None or theirs is None or entropy is None or level is None:
        return DASH
    apart = entropy.mean - level.mean
    factor = _factor(theirs.mean / ours.mean, rows, other, nfe)
    told = f"{ours.mean:.1f} against {theirs.mean:.1f}\n{factor}\nH {apart:+.3f}".replace("-", "\N{MINUS SIGN}")
    if abs(apart) > EQUAL_ENTROPY:
        return f"not at equal H\n{told}"
    if abs(ours.mean - theirs.mean) <= 2 * math.hypot(ours.stderr or 0.0, theirs.stderr or 0.0):
        return f"level: {told}"
    return _verdict(ours.mean < theirs.mean, told)


def _factor(factor: float, rows: Sequence[Row], other: Sequence[Row], nfe: int) -> str:
    """By how much the other's perplexity is larger; beside it the paper's factor, of E-MoE for all that have routes."""
    told = f"a factor of {factor:.2f}"
    papers = [paper_of(part, "gen_ppl", nfe, method=method) for part, method in ((rows, "emoe"), (other, "mdlm"))]
    if papers[0] is None or papers[1] is None:
        return told
    return f"{told} *({papers[1] / papers[0]:.2f})*"


def _verdict(holds: bool, told: str) -> str:
    return f"{'yes' if holds else 'no'}: {told}"


# --- Notes -------------------------------------------------------------------------------------------------------


def judge_note(results: Results, data: str) -> str:
    """How far to trust the judge: its perplexity of the test rows beside that of the AR row."""
    judge = judge_rows(results, data)
    own = mean_of(judge, "ppl", convention="exact")
    if own is None:
        return ""
    told = f"The judge's own perplexity of the test rows is {own.mean:.2f}"
    baseline = [
        mean
        for model, rows in models(results, data).items()
        if model.method == "ar" and (mean := mean_of(rows, "ppl", convention="exact")) is not None
    ]
    if baseline:
        relation = "below" if own.mean < baseline[0].mean else "not below"
        told += f", {relation} that of the AR row, {baseline[0].mean:.2f}"
    step = mean_of(judge, "judge_step")
    if step is not None:
        told += f"; kept from step {step.mean:,.0f}, where the loss of its own validation rows was lowest"
    return f"{told}."


def _made(results: Results, data: str) -> str:
    part = results.only(data=data)
    seeds = sorted({row.seed for row in _models(part).rows if row.seed is not None})
    common = as_words(common_changes(_models(part)))
    told = f"Seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"
    told += ": means, and where a row has several, errors are over these." if len(seeds) > 1 else "."
    return f"{told}{f' All with `{common}`.' if common else ''} Made at {source_of(part)}."


def _samples(results: Results, data: str, metric: str, convention: str | None = None) -> str:
    rows = results.select(data=data, metric=metric, convention=convention)
    counts = sorted({row.n for row in rows if row.n and row.nfe is not None})
    return " to ".join(dict.fromkeys(f"{count:,}" for count in (*counts[:1], *counts[-1:])))


ITALICS = (
    "*Italics*: the paper, on LM1B with networks four times as large, a million steps and GPT-2 large as the judge; "
    "compare shapes (its BD3-LM has blocks of 16, 8 and 4 tokens at NFE 8, 16 and 32)."
)


def gen_ppl_note(results: Results, data: str, setting: str) -> str:
    """What the cells are."""
    return (
        f"Setting `{setting}`. H: entropy of the tokens of a sample, in nats; low perplexity at low H is repetition. "
        f"{_samples(results, data, 'gen_ppl', setting)} samples for each NFE; errors over samples. "
        f"{judge_note(results, data)} {ITALICS} {_made(results, data)}"
    )


def mauve_note(results: Results, data: str) -> str:
    """What the cells are."""
    judge = {row.metric: row.value for row in judge_rows(results, data)}
    told = (
        f"MAUVE in percent, {_samples(results, data, 'mauve')} samples against as many held-out rows; ±: spread over "
        "three seeds of k-means, no error of having drawn these samples."
    )
    if "pca_dimensions" in judge:
        told += (
            f" Features of the judge, {judge['pca_dimensions']:.0f} principal components of the held-out rows "
            f"({judge['pca_share']:.1f} % of their variance)."
        )
    return f"{told} {ITALICS} {_made(results, data)}"


LIKELIHOOD_NOTE = (
    "Perplexity, below it nats per token. `exact` is the NLL itself. `nelbo` bounds it for the sampler with many steps "
    "(of BD3-LM: many in each block), `bound@T` and `iw@T,K` for that of T steps (of BD3-LM: T in each block). "
    "`objective` is what is trained with a latent, and **bounds nothing**: compare it with no other column. Errors are "
    "those of the draws for these rows. Coordination gain: nats per token by which `bound@1` is below the best "
    "factorised step. *Italics*: the paper, `nelbo` of MDLM and `exact` of AR on LM1B."
)
DESIGN_NOTE = (
    "Passes: tokens that enter the networks (VADD's encoder included) in a training step, over those of the batch; "
    "counted by hooks. Through the mean block they are more where draws are compared, which part in the first block. "
    "Active: parameters that one token uses when it is drawn. Times include the start of a run, its log and "
    "checkpoints. *Italics*: the paper, at its size."
)
LATENT_NOTE = (
    "Nats, means over the last twentieth of training. Usage is the share of positions that run each expert, that is, "
    "the aggregate posterior; at 0 one expert takes all. Route KL by block in nats per position; `all` is the KL of "
    "the latent in nats per token, of VADD too. *Italics*: the paper."
)

COLLAPSE_NOTE = "The same weights; greedy routes leave a factorised step. MAUVE and H see what a low perplexity hides."
AVERAGED_NOTE = (
    "Averaged routes are drawn while more than 70 % of a row is masked; below that its positions run the mean of all "
    "experts, so that such a call costs more."
)
CHECKS_NOTE = (
    f"A block is in use if the entropy of its usage is above {ALIVE_USAGE:g} nat and its route KL above {ALIVE_KL:g} "
    "nats per position. Perplexities are compared, setting `{setting}`, where the entropies H of the samples are "
    f"within {EQUAL_ENTROPY:g} nats; `level`: within two standard errors. *Italics*: the paper, of E-MoE."
)


# --- Pages -------------------------------------------------------------------------------------------------------


def _part(table: Table, note: str) -> str:
    """A table and what is said below it; what italics mean only where there are some."""
    header, lines = table
    if not any("*" in text for line in lines for text in line):
        note = re.sub(r"\*Italics\*: [^.]*\. ?", "", note)
    return f"{markdown_table(header, lines)}\n{note}\n" if lines else ""


def gen_ppl_markdown(results: Results) -> str:
    """Perplexities over NFE, a table for each data set and setting."""
    return "\n".join(
        part
        for data in data_of(results)
        for setting in settings_of(results.only(data=data))
        if (part := _part(gen_ppl_table(results, data, setting), gen_ppl_note(results, data, setting)))
    )


def mauve_markdown(results: Results) -> str:
    """MAUVE over NFE."""
    return "\n".join(
        part for data in data_of(results) if (part := _part(mauve_table(results, data), mauve_note(results, data)))
    )


def collapse_markdown(results: Results) -> str:
    """Drawn, greedy and averaged routes."""

    def note(table: Table) -> str:
        has_averages = any(line[0].endswith(AVERAGED.label) for line in table[1])
        return f"{COLLAPSE_NOTE} {AVERAGED_NOTE}" if has_averages else COLLAPSE_NOTE

    return "\n".join(
        part
        for data in data_of(results)
        for setting in settings_of(results.only(data=data))[:1]
        if (part := _part(table := collapse_table(results, data, setting), f"{note(table)} {_made(results, data)}"))
    )


def likelihood_markdown(results: Results) -> str:
    """Test perplexities under their names."""
    return "\n".join(
        part
        for data in data_of(results)
        if (
            part := _part(
                likelihood_table(results, data),
                f"{LIKELIHOOD_NOTE} {judge_note(results, data)} {_made(results, data)}",
            )
        )
    )


def zero_shot_markdown(results: Results) -> str:
    """Likelihoods of text from elsewhere."""
    return "\n".join(
        part
        for data in zero_shot_data(results)
        if (part := _part(zero_shot_table(results, data), f"Nothing was trained on this text. {_made(results, data)}"))
    )


def design_markdown(results: Results) -> str:
    """Passes, parameters, time."""
    return "\n".join(
        part
        for data in data_of(results)
        if (part := _part(design_table(results, data), f"{DESIGN_NOTE} {_made(results, data)}"))
    )


def latent_markdown(results: Results) -> str:
    """The latent by block."""
    return "\n".join(
        part
        for data in data_of(results)
        if (part := _part(latent_table(results, data), f"{LATENT_NOTE} {_made(results, data)}"))
    )


def checks_markdown(results: Results) -> str:
    """What holds and what does not."""
    return "\n".join(
        part
        for data in data_of(results)
        for setting in settings_of(results.only(data=data))[:1]
        if (
            part := _part(
                checks_table(results, data, setting), f"{CHECKS_NOTE.format(setting=setting)} {_made(results, data)}"
            )
        )
    )


PARTS: dict[str, tuple[str, Callable[[Results], str]]] = {
    "checks": ("What holds", checks_markdown),
    "gen-ppl": ("Generative perplexity", gen_ppl_markdown),
    "mauve": ("MAUVE", mauve_markdown),
    "collapse": ("Switching the mixture off", collapse_markdown),
    "likelihood": ("Test perplexity under named likelihoods", likelihood_markdown),
    "zero-shot": ("Text from elsewhere", zero_shot_markdown),
    "design": ("Passes, parameters, time", design_markdown),
    "latent": ("The latent by block", latent_markdown),
}


def text_tables(results: Results) -> str:
    """All tables as one Markdown text: `results/text.md`."""
    results = text_rows(results)
    found = {title: make(results) for title, make in PARTS.values()}
    return "\n".join(f"## {title}\n\n{text}" for title, text in found.items() if text)


def _register(study: str) -> None:
    for part, (_, make) in PARTS.items():
        _register_table(study, part, make)

    @generator(f"{study}-figures")
    def figures(folder: Path) -> str:
        """The figures that are there, and the page of samples."""
        here = [name for name in FIGURES if (folder / "figures" / f"{study}-{name}").exists()]
        shown = [f"![{FIGURES[name]}](../{folder.name}/figures/{study}-{name})" for name in here]
        page = f"{study}-samples.md"
        if (folder / page).exists():
            shown.append(f"Samples of all methods side by side: [{page}](../{folder.name}/{page}).")
        return "\n\n".join(shown) or f"*No figures here yet: run `{COMMANDS[study]}`.*"


def _register_table(study: str, part: str, make: Callable[[Results], str]) -> None:
    @generator(f"{study}-{part}")
    def block(folder: Path) -> str:
        path = folder / f"{study}.json"
        found = make(text_rows(load_once(path))) if path.exists() else ""
        return found or f"*No numbers here yet: run `{COMMANDS[study]}`.*"


for _study in COMMANDS:
    _register(_study)


@results_block("text-steps", "benchmark")
def text_steps(results: Results) -> str:
    """Time of a training step of the news-small recipes, and what all of their steps take."""
    rows = results.select(metric="step_ms", data=STEP_DATA)
    if not rows:
        return f"*No times here yet: run `{STEP_COMMAND}`.*"
    order = list(METHODS)
    lines = []
    for row in sorted(rows, key=lambda row: order.index(row.method)):
        error = "" if row.stderr is None else f" ±{row.stderr:.2f}"
        minutes = f"{row.value * NEWS_STEPS / 60_000:.1f}"
        lines.append([METHODS[row.method], f"{row.value:.1f}{error}", minutes])
    together = sum(row.value for row in rows) * NEWS_STEPS / 60_000
    note = (
        f"Steps alone, all {len(rows)} together {together:.0f} minutes. Medians of turns within one process, "
        f"{rows[0].n} each. Made at {source_of(results.only(data=STEP_DATA))}."
    )
    header = ["news-small, 256 rows of 128 tokens a step", "ms per step", f"minutes for {NEWS_STEPS:,} steps"]
    return f"{markdown_table(header, lines)}\n{note}\n"
