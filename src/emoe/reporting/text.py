"""Tables of the study of text (`emoe reproduce text`).

Generative perplexity is never printed without the entropy of the samples beside it, and no model is marked as the best:
repetitive text has a low perplexity. Every likelihood stands under its name.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from emoe.reporting.cells import DASH, MINUS, Column, Line, Number, Reported, Stack, names, over
from emoe.reporting.paper import paper_value
from emoe.reporting.render import markdown
from emoe.reporting.results import Results, Row
from emoe.reporting.table import Table, TableSpec, build, conventions_of, models, note, repeat, span, steps_of

TASK = "text"
SETTINGS = ("paper", "duo")  # of perplexities
LATENT = {
    "usage_entropy": "entropy of usage",
    "routing_entropy": "entropy of the posterior",
    "prior_entropy": "entropy of the prior",
}
ALIVE_USAGE, ALIVE_KL = 1.0, 0.02  # nats; a block above both has routes that vary and depend on the text
EQUAL_ENTROPY = 0.05  # nats between samples whose perplexities are compared
Measured = partial(Number, measured=True)


class Variant(NamedTuple):
    """Another way to draw the routes of E-MoE with the same weights."""

    name: str  # in the convention of a row
    label: str
    settings: dict[str, str]
    least: int  # network calls from which on it makes a difference
    paper: str  # its name among the paper's numbers, which may have none of it
    line: str  # in figures


GREEDY = Variant("route_tau=0", "greedy routes", {"method.route-tau": "0"}, 1, "greedy", ":")
AVERAGED = Variant("mean_below=0.7", "averaged routes", {"method.mean-below": "0.7"}, 2, "averaged", "--")
VARIANTS = {variant.name: variant for variant in (GREEDY, AVERAGED)}


def in_setting(setting: str, variant: str | None = None) -> str:
    """The convention of a perplexity: the setting that tokens are counted in, and the variant of sampling."""
    return setting if variant is None else f"{setting} {variant}"


class Part(NamedTuple):
    """The rows of one table: of a data set, with perplexities in one setting."""

    rows: Results
    data: str
    setting: str = ""


# --- Rows ------------------------------------------------------------------------------------------------------------


def data_of(results: Results) -> list[str]:
    """Data sets that models were trained on."""
    return sorted({row.data for row in results.models.rows if not row.metric.startswith("zero_shot_")})


def _parts(results: Results) -> list[Part]:
    return [Part(results.only(data=data), data) for data in data_of(results)]


def _settings(results: Results, most: int = len(SETTINGS)) -> list[Part]:
    parts = []
    for part in _parts(results):
        present = {str(row.convention).partition(" ")[0] for row in part.rows.select(metric="gen_ppl")}
        parts += [part._replace(setting=name) for name in [name for name in SETTINGS if name in present][:most]]
    return parts


def _elsewhere(results: Results) -> list[Part]:
    data = {row.data for row in results.rows if row.metric.startswith("zero_shot_")}
    return [Part(results.only(data=name), name) for name in sorted(data)]


def _models(part: Part, metric: str, **fields: object) -> list[Line]:
    """The models that have a number, to be compared with the paper's on LM1B."""
    return [line for line in models(part.rows, "lm1b") if line.where(metric=metric, **fields).rows]


def _in_variant(line: Line, variant: Variant, setting: str) -> Line:
    """The rows of another way to sample as if it were the plain one."""
    plain: dict[str | None, str | None] = {in_setting(setting, variant.name): setting, variant.name: None}
    rows = [dataclasses.replace(row, convention=plain[row.convention]) for row in line.rows if row.convention in plain]
    return dataclasses.replace(line, labels=(f"{line.label}, {variant.label}",), rows=rows, variant=variant.paper)


def _blocks(line: Line) -> list[Line]:
    """A line for each routed block and for `all` of them, with the numbers logged at the end of training."""
    logged = [(int(str(row.convention)[5:]), row) for row in line.rows if str(row.convention).startswith("step ")]
    last = {row.metric: step for step, row in sorted(logged, key=lambda entry: entry[0])}
    groups: dict[str, list[Row]] = {}
    for row in (row for step, row in logged if step == last[row.metric]):
        metric, _, block = row.metric.replace("train_kl", "kl_per_token").partition("/block")
        groups.setdefault(block or "all", []).append(dataclasses.replace(row, metric=metric, convention=None))
    order = sorted(groups, key=lambda block: (block == "all", len(block), block))
    return [dataclasses.replace(line, labels=(line.label, block), rows=groups[block]) for block in order]


def _eval_lm(part: Part) -> Line:
    """The evaluation language model that scored last: scores of an earlier one were replaced by its own."""
    rows = part.rows.select(method="judge")
    last = max(rows, key=lambda row: part.rows.runs[row.run].when, default=None)
    rows = [row for row in rows if last and row.recipe == last.recipe]
    return Line((part.rows.label("judge"),), rows, "judge", reference=True)


# --- Tables ----------------------------------------------------------------------------------------------------------


def perplexity(setting: str) -> Stack:
    """Generative perplexity, below it the entropy of the samples, and the paper's pair."""
    ppl = Measured("gen_ppl", {"convention": setting}, ".1f")
    return Stack([ppl, Number("entropy", {"convention": None}, prefix="H ", error=False)], "{:.1f}, H {:.2f}")


MAUVE = Number("mauve", {"convention": None}, spread="mauve_spread")  # over seeds of k-means, as in the paper


def gen_ppl_table(part: Part) -> TableSpec:
    """Generative perplexity over NFE."""
    rows, data, setting = part
    lines = _models(part, "gen_ppl", convention=setting)
    steps = steps_of(lines, "gen_ppl")
    real = Line(("held-out text",), repeat(rows.select(method="data"), steps), "data", reference=True)
    beside = any(line.reported("gen_ppl", nfe) for line in lines for nfe in steps)
    entropy = f"\n*(H {paper_value('lm1b', 'lm1b', 'data', 'entropy', None):.2f})*" * beside

    def with_entropy(cell: Callable[[Line], str], line: Line) -> str:
        return cell(line) + entropy * line.reference

    columns = over("nfe", "NFE {}", steps, perplexity(setting))
    columns = [(heading, partial(with_entropy, cell)) for heading, cell in columns]
    samples = span(row.n for row in rows.models.select(metric="gen_ppl", convention=setting))
    text = note("text-gen-ppl", rows, setting=setting, samples=samples, judge=eval_lm_note(part))
    return TableSpec([data], lines + [real] * bool(real.rows), columns, text)


def mauve_table(part: Part) -> TableSpec:
    """MAUVE over NFE."""
    lines, lm = _models(part, "mauve", convention=None), _eval_lm(part)
    pca, share = (Number(name).mean(lm) for name in ("pca_dimensions", "pca_share"))
    features = (
        f"Features of the judge, {pca.mean:.0f} principal components of the held-out rows "
        f"({share.mean:.1f} % of their variance)."
        if pca and share
        else ""
    )
    samples = span(row.n for row in part.rows.select(metric="mauve", convention=None))
    columns = over("nfe", "NFE {}", steps_of(lines, "mauve"), Stack([MAUVE], "{:.2f}"))
    return TableSpec([part.data], lines, columns, note("text-mauve", part.rows, samples=samples, features=features))


def collapse_table(part: Part) -> TableSpec:
    """E-MoE with drawn and with other routes, and MDLM: perplexity, entropy and MAUVE at every NFE of the ablation."""
    lines, others = list[Line](), list[Line]()
    for line in _models(part, "gen_ppl"):
        variants = (_in_variant(line, variant, part.setting) for variant in VARIANTS.values())
        own = [variant for variant in variants if variant.where(metric="gen_ppl").rows]
        if own:
            lines.append(dataclasses.replace(line, labels=(f"{line.label}, drawn routes",), variant="route_tau=1"))
        elif line.method == "mdlm":
            lines.append(dataclasses.replace(line, variant="collapse-reference"))
        lines, others = lines + own, others + own
    cell = perplexity(part.setting)
    if any(line.where(metric="mauve").rows for line in lines):
        cell = Stack([*cell.numbers, dataclasses.replace(MAUVE, prefix="MAUVE ")], cell.paper)
    averaged = names("notes")["text-averaged"] * any(line.variant == AVERAGED.paper for line in others)
    columns = over("nfe", "NFE {}", steps_of(others, "gen_ppl"), cell)
    return TableSpec([part.data], lines, columns, note("text-collapse", part.rows, averaged=averaged))


def likelihood(prefix: str = "") -> Stack:
    """Perplexity, below it nats per token."""
    return Stack([Measured(f"{prefix}ppl", form=".2f"), Measured(f"{prefix}nll_token", form=".4f")])


def likelihood_table(part: Part) -> TableSpec:
    """Test perplexity and nats per token of each model under each of its names; the evaluation LM's below."""
    lines, lm = _models(part, "ppl"), _eval_lm(part)
    lines += [lm] * bool(lines and lm.where(metric="ppl").rows)
    columns: list[Column] = [
        ("paper", Reported("ppl", ".2f")),
        *over("convention", "{}", conventions_of(lines, "ppl"), likelihood()),
        ("coordination gain", Measured("coordination_gain", {"convention": "bound@1"}, "+.3f")),
    ]
    return TableSpec([part.data], lines, columns, note("text-likelihood", part.rows, judge=eval_lm_note(part)))


def zero_shot_table(part: Part) -> TableSpec:
    """Likelihoods of text from elsewhere."""
    lines = models(part.rows)
    columns = over("convention", "{}", conventions_of(lines, "zero_shot_ppl"), likelihood("zero_shot_"))
    return TableSpec([part.data], lines, columns, note("text-zero-shot", part.rows))


def design_table(part: Part) -> TableSpec:
    """Passes per training and sampling step, parameters and time, all of them counted or measured."""
    count, millions = (
        partial(Number, form="g", error=False),
        partial(Number, form=".2f", unit="M", per=1e6, error=False),
    )
    columns: list[Column] = [
        ("passes per training step", Stack([count("passes_train")], "{:g}")),
        ("through the mean block", count("passes_block")),
        ("calls per sampling step", Stack([count("calls_step")], "{:g}")),
        ("parameters", Stack([millions("params")], "{:.1f}M")),
        ("active", Stack([millions("params_active")], "{:.1f}M")),
        ("training step (ms)", Measured("step_ms", form=".1f")),
        ("training (s)", Measured("train_s", form=".0f")),
    ]
    return TableSpec([part.data], _models(part, "passes_train"), columns, note("text-design", part.rows))


def latent_table(part: Part) -> TableSpec:
    """By block, over the last twentieth of training: usage, routing entropy of both sides, route KL."""
    number = partial(Number, form=".4f", error=False)
    total, kl = Stack([number("kl_per_token")], "{:.2f}"), number("route_kl")
    lines = []
    for line in models(part.rows, "lm1b"):
        blocks = _blocks(line)
        latent = len(blocks) > 1 or any(
            row.value for block in blocks for row in block.where(metric="kl_per_token").rows
        )
        lines += [block for block in blocks if latent and (block.labels[1] != "all" or total(block) != DASH)]
    columns: list[Column] = [(heading, number(name)) for name, heading in LATENT.items()]
    columns.append(("route KL", lambda line: total(line) if line.labels[1] == "all" else kl(line)))
    return TableSpec([part.data, "block"], lines, columns, note("text-latent", part.rows), align="lr")


def checks_table(part: Part) -> TableSpec:
    """Three questions to a latent: blocks in use, a gain over a factorised step, MDLM beaten at few calls."""
    everyone = models(part.rows, "lm1b")
    lines = [line for line in everyone if any(block.labels[1] != "all" for block in _blocks(line))]

    def alive(line: Line) -> str:
        ends = [[Number(name).mean(block) for name in ("usage_entropy", "route_kl")] for block in _blocks(line)]
        known = [(usage.mean, kl.mean) for usage, kl in ends if usage and kl]
        count = sum(usage > ALIVE_USAGE and kl > ALIVE_KL for usage, kl in known)
        return _verdict(2 * count >= len(known), f"{count} of {len(known)}") if known else DASH

    def gain(line: Line) -> str:
        mean = Number("coordination_gain", {"convention": "bound@1"}).mean(line)
        return DASH if mean is None else _verdict(mean.mean > 0, f"{mean.mean:+.3f}")

    columns: list[Column] = [("half of the blocks in use", alive), ("coordination gain above 0", gain)]
    for mdlm in [line for line in everyone if line.method == "mdlm"][:1]:
        for nfe in steps_of(lines, "gen_ppl")[:2]:
            columns.append((f"below MDLM at NFE {nfe}, equal H", partial(_against, mdlm, part.setting, nfe)))
    return TableSpec([part.data], lines, columns, note("text-checks", part.rows, setting=part.setting))


def _verdict(holds: bool, text: str) -> str:
    return f"{'yes' if holds else 'no'}: {text}".replace("-", MINUS)


def _against(mdlm: Line, setting: str, nfe: int, line: Line) -> str:
    """Perplexities of samples of a model and of MDLM, and how far apart their entropies are.

    No verdict where entropies are too far apart, or perplexities within two standard errors.
    """
    ppl, entropy = (number.mean for number in perplexity(setting).at(nfe=nfe).numbers)
    ours, theirs, h, level = ppl(line), ppl(mdlm), entropy(line), entropy(mdlm)
    if ours is None or theirs is None or h is None or level is None:
        return DASH
    paper, rival = (one.reported("gen_ppl", nfe) for one in (dataclasses.replace(line, method="emoe"), mdlm))
    factor = f"a factor of {theirs.mean / ours.mean:.2f}" + (f" *({rival / paper:.2f})*" if paper and rival else "")
    text = f"{ours.mean:.1f} against {theirs.mean:.1f}\n{factor}\nH {h.mean - level.mean:+.3f}".replace("-", MINUS)
    if abs(h.mean - level.mean) > EQUAL_ENTROPY:
        return f"not at equal H\n{text}"
    if abs(ours.mean - theirs.mean) <= 2 * math.hypot(ours.stderr or 0.0, theirs.stderr or 0.0):
        return f"level: {text}"
    return _verdict(ours.mean < theirs.mean, text)


# --- Pages -----------------------------------------------------------------------------------------------------------


def eval_lm_note(part: Part) -> str:
    """How far to trust the evaluation language model: its perplexity of the test rows beside that of the AR row."""
    exact, lm = Number("ppl", {"convention": "exact"}).mean, _eval_lm(part)
    own, step = exact(lm), Number("judge_step").mean(lm)
    baseline = next((mean for line in models(part.rows) if line.method == "ar" and (mean := exact(line))), None)
    text = f"The judge's own perplexity of the test rows is {own.mean:.2f}" if own else ""
    if own and baseline:
        relation = "below" if own.mean < baseline.mean else "not below"
        text += f", {relation} that of the AR row, {baseline.mean:.2f}"
    if own and step:
        text += f"; kept from step {step.mean:,.0f}, where the loss of its own validation rows was lowest"
    return text and f"{text}."


def eval_lm_notes(results: Results) -> list[str]:
    """`eval_lm_note` of every data set that has one."""
    return [sentence for part in _parts(results.only(task=TASK)) if (sentence := eval_lm_note(part))]


# Name -> heading, table of a part, parts.
TABLES: dict[str, tuple[str, Callable[[Part], TableSpec], Callable[[Results], list[Part]]]] = {
    "checks": ("What holds", checks_table, partial(_settings, most=1)),
    "gen-ppl": ("Generative perplexity", gen_ppl_table, _settings),
    "mauve": ("MAUVE", mauve_table, _parts),
    "collapse": ("Switching the mixture off", collapse_table, partial(_settings, most=1)),
    "likelihood": ("Test perplexity under named likelihoods", likelihood_table, _parts),
    "zero-shot": ("Text from elsewhere", zero_shot_table, _elsewhere),
    "design": ("Passes, parameters, time", design_table, _parts),
    "latent": ("The latent by block", latent_table, _parts),
}


def text_tables(name: str, results: Results) -> list[Table]:
    """The tables of one kind, those without cells left out."""
    _, table, parts = TABLES[name]
    return build(*(table(part) for part in parts(results.only(task=TASK))))


def all_tables(results: Results) -> list[Table]:
    """All tables, their kinds as titles."""
    kinds = {heading: text_tables(name, results) for name, (heading, *_) in TABLES.items()}
    return [dataclasses.replace(table, title=heading) for heading, tables in kinds.items() for table in tables]


def text_page(results: Results) -> str:
    """`results/text.md`: all tables."""
    pages = {heading: markdown(text_tables(name, results)) for name, (heading, *_) in TABLES.items()}
    return "\n".join(f"## {heading}\n\n{text}" for heading, text in pages.items() if text)
