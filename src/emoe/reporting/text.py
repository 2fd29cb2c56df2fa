"""Tables of the study of text (`emoe reproduce text`).

Generative perplexity is never printed without the entropy of the samples beside it, and no model is marked as the best:
repetitive text has a low perplexity. Every likelihood stands under its name.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from emoe.reporting.cells import DASH, MINUS, Column, Line, Number, Stack, names, over, reported
from emoe.reporting.paper import paper_numbers
from emoe.reporting.render import markdown
from emoe.reporting.results import Results, Row
from emoe.reporting.table import Table, build, conventions_of, models, note, repeat, span, steps_of

SETTINGS = ("paper", "duo")  # of perplexities
ALIVE_USAGE, ALIVE_KL = 1.0, 0.02  # nats; a block above both has routes that vary and depend on the text
EQUAL_ENTROPY = 0.05  # nats between samples whose perplexities are compared
Measured = partial(Number, measured=True)
Plain = partial(Number, error=False)


class Variant(NamedTuple):
    """Another way to draw the routes of E-MoE with the same weights."""

    name: str  # in the convention of a row
    label: str
    paper: str  # its name among the paper's numbers, which may have none of it
    settings: dict[str, str] = {}


GREEDY = Variant("route_tau=0", "greedy routes", "greedy", {"method.route-tau": "0"})
AVERAGED = Variant("mean_below=0.7", "averaged routes", "averaged")  # of version 0.1, as recorded
VARIANTS = {variant.name: variant for variant in (GREEDY, AVERAGED)}


def in_setting(setting: str, variant: str | None = None) -> str:
    """The convention of a perplexity: the setting that tokens are counted in, and the variant of sampling."""
    return setting if variant is None else f"{setting} {variant}"


class Spec(NamedTuple):
    """A table before it is written."""

    lines: Sequence[Line]
    columns: Sequence[Column]
    values: dict[str, str] = {}  # of the note


def data_of(results: Results) -> list[str]:
    """Data sets that models were trained on."""
    return sorted({row.data for row in results.models.rows if not row.metric.startswith("zero_shot_")})


def _blocks(line: Line) -> list[Line]:
    """A line for each routed block and for `all` of them, with the numbers logged at the end of training."""
    logged = [(int(str(row.convention)[5:]), row) for row in line.rows if str(row.convention).startswith("step ")]
    last = {row.metric: step for step, row in sorted(logged, key=lambda entry: entry[0])}
    groups: dict[str, list[Row]] = {}
    for row in (row for step, row in logged if step == last[row.metric]):
        metric, _, block = row.metric.replace("train_kl", "kl_per_token").partition("/block")
        groups.setdefault(block or "all", []).append(dataclasses.replace(row, metric=metric, convention=None))
    order = sorted(groups, key=lambda block: (block == "all", len(block), block))
    return [dataclasses.replace(line, labels=(line.labels[0], block), rows=groups[block]) for block in order]


def _eval_lm(rows: Results) -> Line:
    """The evaluation language model that scored last: scores of an earlier one were replaced by its own."""
    scores = rows.select(method="judge")
    last = max(scores, key=lambda row: rows.runs[row.run].when, default=None)
    own = [row for row in scores if last and row.recipe == last.recipe]
    return Line((rows.label("judge"),), own, "judge", reference=True)


def _eval_lm_note(rows: Results) -> str:
    """How far to trust the evaluation language model: its perplexity of the test rows beside that of the AR row."""
    exact, lm = Number("ppl", {"convention": "exact"}).mean, _eval_lm(rows)
    own, step = exact(lm), Number("judge_step").mean(lm)
    if own is None:
        return ""
    text = f"The judge's own perplexity of the test rows is {own.mean:.2f}"
    if baseline := next((mean for line in models(rows) if line.method == "ar" and (mean := exact(line))), None):
        relation = "below" if own.mean < baseline.mean else "not below"
        text += f", {relation} that of the AR row, {baseline.mean:.2f}"
    if step:
        text += f"; kept from step {step.mean:,.0f}, where the loss of its own validation rows was lowest"
    return f"{text}."


def perplexity(setting: str) -> Stack:
    """Generative perplexity, below it the entropy of the samples, and the paper's pair."""
    ppl = Measured("gen_ppl", {"convention": setting}, ".1f")
    return Stack([ppl, Plain("entropy", {"convention": None}, prefix="H ")], "{:.1f}, H {:.2f}")


def likelihood(prefix: str = "") -> Stack:
    """Perplexity, below it nats per token."""
    return Stack([Measured(f"{prefix}ppl", form=".2f"), Measured(f"{prefix}nll_token", form=".4f")])


MAUVE = Number("mauve", {"convention": None}, spread="mauve_spread")  # over seeds of k-means, as in the paper
GAIN = Measured("coordination_gain", {"convention": "bound@1"}, "+.3f")
MILLIONS = partial(Plain, form=".2f", unit="M", per=1e6)
DESIGN: list[Column] = [
    ("passes per training step", Stack([Plain("passes_train", form="g")], "{:g}")),
    ("through the mean block", Plain("passes_block", form="g")),
    ("calls per sampling step", Stack([Plain("calls_step", form="g")], "{:g}")),
    ("parameters", Stack([MILLIONS("params")], "{:.1f}M")),
    ("active", Stack([MILLIONS("params_active")], "{:.1f}M")),
    ("training step (ms)", Measured("step_ms", form=".1f")),
    ("training (s)", Measured("train_s", form=".0f")),
]


def gen_ppl_spec(rows: Results, setting: str) -> Spec:
    """Generative perplexity over NFE."""
    lines = models(rows, metric="gen_ppl", convention=setting)
    steps = steps_of(lines, "gen_ppl")
    real = Line(("held-out text",), repeat(rows.select(method="data"), steps), "data", reference=True)
    beside = any(line.where(nfe=nfe).reported("gen_ppl") for line in lines for nfe in steps)
    entropy = f"\n*(H {paper_numbers()['lm1b', 'data', 'entropy', None, None]:.2f})*" * beside

    def cell(line: Line) -> str:
        return perplexity(setting)(line) + entropy * line.reference

    samples = span(row.n for row in rows.models.select(metric="gen_ppl", convention=setting))
    values = {"setting": setting, "samples": samples, "judge": _eval_lm_note(rows)}
    return Spec(lines + [real] * bool(real.rows), over("nfe", "NFE {}", steps, cell), values)


def mauve_spec(rows: Results, setting: str) -> Spec:
    """MAUVE over NFE."""
    lines, lm = models(rows, metric="mauve", convention=None), _eval_lm(rows)
    features = ""
    if (pca := Number("pca_dimensions").mean(lm)) and (share := Number("pca_share").mean(lm)):
        features = f"Features of the judge, {pca.mean:.0f} principal components of the held-out rows "
        features += f"({share.mean:.1f} % of their variance)."
    samples = span(row.n for row in rows.select(metric="mauve", convention=None))
    columns = over("nfe", "NFE {}", steps_of(lines, "mauve"), Stack([MAUVE], "{:.2f}"))
    return Spec(lines, columns, {"samples": samples, "features": features})


def _in_variant(line: Line, variant: Variant, setting: str) -> Line:
    """The rows of another way to sample as if it were the plain one."""
    plain: dict[str | None, str | None] = {in_setting(setting, variant.name): setting, variant.name: None}
    rows = [dataclasses.replace(row, convention=plain[row.convention]) for row in line.rows if row.convention in plain]
    label = f"{line.labels[0]}, {variant.label}"
    return dataclasses.replace(line, labels=(label,), rows=rows, variant=variant.paper)


def collapse_spec(rows: Results, setting: str) -> Spec:
    """E-MoE with drawn and with other routes, and MDLM: perplexity, entropy and MAUVE at every NFE of the ablation."""
    lines, others = list[Line](), list[Line]()
    for line in models(rows, metric="gen_ppl"):
        variants = (_in_variant(line, variant, setting) for variant in VARIANTS.values())
        own = [variant for variant in variants if variant.where(metric="gen_ppl").rows]
        if own:
            lines.append(dataclasses.replace(line, labels=(f"{line.labels[0]}, drawn routes",), variant="route_tau=1"))
        elif line.method == "mdlm":
            lines.append(dataclasses.replace(line, variant="collapse-reference"))
        lines, others = lines + own, others + own
    cell = perplexity(setting)
    if any(line.where(metric="mauve").rows for line in lines):
        cell = Stack([*cell.numbers, dataclasses.replace(MAUVE, prefix="MAUVE ")], cell.paper)
    averaged = names("notes")["text-averaged"] * any(line.variant == AVERAGED.paper for line in others)
    columns = over("nfe", "NFE {}", steps_of(others, "gen_ppl"), cell)
    return Spec(lines, columns, {"averaged": averaged})


def likelihood_spec(rows: Results, setting: str) -> Spec:
    """Test perplexity and nats per token of each model under each of its names; the evaluation LM's below."""
    lines, lm = models(rows, metric="ppl"), _eval_lm(rows)
    lines += [lm] * bool(lines and lm.where(metric="ppl").rows)
    columns = over("convention", "{}", conventions_of(lines, "ppl"), likelihood())
    columns = [("paper", reported("ppl", ".2f")), *columns, ("coordination gain", GAIN)]
    return Spec(lines, columns, {"judge": _eval_lm_note(rows)})


def zero_shot_spec(rows: Results, setting: str) -> Spec:
    """Likelihoods of text from elsewhere."""
    lines = models(rows)
    columns = over("convention", "{}", conventions_of(lines, "zero_shot_ppl"), likelihood("zero_shot_"))
    return Spec(lines, columns)


def design_spec(rows: Results, setting: str) -> Spec:
    """Passes per training and sampling step, parameters and time, all of them counted or measured."""
    return Spec(models(rows, metric="passes_train"), DESIGN)


def latent_spec(rows: Results, setting: str) -> Spec:
    """By block, over the last twentieth of training: usage, routing entropy of both sides, route KL."""
    total, kl = Stack([Plain("kl_per_token", form=".4f")], "{:.2f}"), Plain("route_kl", form=".4f")
    lines = []
    for line in models(rows):
        blocks = _blocks(line)
        latent = len(blocks) > 1 or any(
            row.value for block in blocks for row in block.where(metric="kl_per_token").rows
        )
        lines += [block for block in blocks if latent and (block.labels[1] != "all" or total(block) != DASH)]
    columns: list[Column] = [
        ("entropy of usage", Plain("usage_entropy", form=".4f")),
        ("entropy of the posterior", Plain("routing_entropy", form=".4f")),
        ("entropy of the prior", Plain("prior_entropy", form=".4f")),
        ("route KL", lambda line: total(line) if line.labels[1] == "all" else kl(line)),
    ]
    return Spec(lines, columns)


def checks_spec(rows: Results, setting: str) -> Spec:
    """Three questions to a latent: blocks in use, a gain over a factorised step, MDLM beaten at few calls."""
    everyone = models(rows)
    lines = [line for line in everyone if setting and any(block.labels[1] != "all" for block in _blocks(line))]
    columns: list[Column] = [("half of the blocks in use", _alive), ("coordination gain above 0", _gain)]
    for mdlm in [line for line in everyone if line.method == "mdlm"][:1]:
        for nfe in steps_of(lines, "gen_ppl")[:2]:
            cell = partial(_against, mdlm.where(nfe=nfe), perplexity(setting))
            columns += over("nfe", "below MDLM at NFE {}, equal H", [nfe], cell)
    return Spec(lines, columns, {"setting": setting})


def _verdict(holds: bool, text: str) -> str:
    return f"{'yes' if holds else 'no'}: {text}".replace("-", MINUS)


def _alive(line: Line) -> str:
    ends = [[Number(name).mean(block) for name in ("usage_entropy", "route_kl")] for block in _blocks(line)]
    known = [usage.mean > ALIVE_USAGE and kl.mean > ALIVE_KL for usage, kl in ends if usage and kl]
    return _verdict(2 * sum(known) >= len(known), f"{sum(known)} of {len(known)}") if known else DASH


def _gain(line: Line) -> str:
    mean = GAIN.mean(line)
    return DASH if mean is None else _verdict(mean.mean > 0, f"{mean.mean:+.3f}")


def _against(mdlm: Line, cell: Stack, line: Line) -> str:
    """Perplexities of a model and MDLM; no verdict if entropies differ or perplexities are within two errors."""
    (ours, entropy), (theirs, level) = ([number.mean(one) for number in cell.numbers] for one in (line, mdlm))
    if ours is None or theirs is None or entropy is None or level is None:
        return DASH
    paper, rival = (one.reported("gen_ppl") for one in (dataclasses.replace(line, method="emoe"), mdlm))
    factor = f"a factor of {theirs.mean / ours.mean:.2f}" + (f" *({rival / paper:.2f})*" if paper and rival else "")
    apart = entropy.mean - level.mean
    text = f"{ours.mean:.1f} against {theirs.mean:.1f}\n{factor}\nH {apart:+.3f}".replace("-", MINUS)
    if abs(apart) > EQUAL_ENTROPY:
        return f"not at equal H\n{text}"
    if abs(ours.mean - theirs.mean) <= 2 * math.hypot(ours.stderr or 0.0, theirs.stderr or 0.0):
        return f"level: {text}"
    return _verdict(ours.mean < theirs.mean, text)


TABLES: dict[str, tuple[str, Callable[[Results, str], Spec]]] = {  # name -> heading, and table of a data set
    "checks": ("What holds", checks_spec),
    "gen-ppl": ("Generative perplexity", gen_ppl_spec),
    "mauve": ("MAUVE", mauve_spec),
    "collapse": ("Switching the mixture off", collapse_spec),
    "likelihood": ("Test perplexity under named likelihoods", likelihood_spec),
    "zero-shot": ("Text from elsewhere", zero_shot_spec),
    "design": ("Passes, parameters, time", design_spec),
    "latent": ("The latent by block", latent_spec),
}


def text_tables(name: str, results: Results) -> list[Table]:
    """The tables of one kind, one for each data set and, of perplexities alone, each setting."""
    tables = []
    for data in sorted({row.data for row in results.rows if row.task == "text"}):
        rows = results.only(task="text", data=data)
        measured = {str(row.convention).partition(" ")[0] for row in rows.select(metric="gen_ppl")}
        settings = [setting for setting in SETTINGS if setting in measured] or [""]
        for setting in settings if name == "gen-ppl" else settings[:1]:
            lines, columns, values = TABLES[name][1](rows, setting)
            corner = [data, "block"][: len(lines[0].labels)] if lines else []
            text = note(f"text-{name}", rows, **values)
            tables += build(corner, lines, columns, text, align="lr"[: len(corner)])
    return tables


def all_tables(results: Results) -> list[Table]:
    """All tables, their kinds as titles."""
    kinds = [(heading, text_tables(name, results)) for name, (heading, _) in TABLES.items()]
    return [dataclasses.replace(table, title=heading) for heading, tables in kinds for table in tables]


def text_page(results: Results) -> str:
    """`results/text.md`: all tables."""
    kinds = [(heading, text_tables(name, results)) for name, (heading, _) in TABLES.items()]
    return "\n".join(f"## {heading}\n\n{markdown(tables)}" for heading, tables in kinds if tables)
