"""Tables of the study of text (`emoe reproduce text`).

Generative perplexity is never printed without the entropy of the samples beside it, and no model is marked as the best:
repetitive text has a low perplexity. Every likelihood stands under its name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from emoe.reporting.cells import DASH, MINUS, Column, Line, Measured, Millions, Number, Plain, names, over, reported
from emoe.reporting.recipes import paper_numbers
from emoe.reporting.render import markdown
from emoe.reporting.results import Results, Row, select
from emoe.reporting.table import Table, build, conventions_of, models, note, span, steps_of

SETTINGS = ("paper", "duo")  # of perplexities
ALIVE_USAGE, ALIVE_KL = 1.0, 0.02  # nats; a block above both has routes that vary and depend on the text
EQUAL_ENTROPY = 0.05  # nats between samples whose perplexities are compared
MAUVE = Number("mauve", {"convention": None}, spread="mauve_spread")  # over seeds of k-means, as in the paper
Spec = tuple[Sequence[Line], Sequence[Column], dict[str, Any]]  # lines, columns, values of the note
GAIN = Measured("coordination_gain", {"convention": "bound@1"}, "+.3f")


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


def data_of(results: Results) -> list[str]:
    """Data sets that models were trained on."""
    return sorted({row.data for row in results.models.rows if not row.metric.startswith("zero_shot_")})


def likelihood(prefix: str = "") -> Number:
    """Perplexity, below it nats per token."""
    return Measured(f"{prefix}ppl", form=".2f", below=[Measured(f"{prefix}nll_token", form=".4f")])


class TextTables:
    """The tables of one data set, with its perplexities in one setting; a method for each entry of `TABLES`."""

    def __init__(self, rows: Results, setting: str):
        self.rows, self.setting = rows, setting
        entropy = Plain("entropy", {"convention": None}, prefix="H ")
        self.perplexity = Measured("gen_ppl", {"convention": setting}, ".1f", below=[entropy], paper="{:.1f}, H {:.2f}")
        # The evaluation language model that scored last: scores of an earlier one were replaced by its own.
        scores = rows.select(method="judge")
        last = max(scores, key=lambda row: rows.runs[row.run].when, default=None)
        own = [row for row in scores if last and row.recipe == last.recipe]
        self.judge = Line((rows.label("judge"),), own, "judge", reference=True)

    def judge_note(self) -> str:
        """How far to trust the evaluation language model: its perplexity of the test rows beside that of the AR row."""
        exact = Number("ppl", {"convention": "exact"}).mean
        own, step = exact(self.judge), Number("judge_step").mean(self.judge)
        if own is None:
            return ""
        text = f"The judge's own perplexity of the test rows is {own.mean:.2f}"
        for baseline in [mean for line in models(self.rows) if line.method == "ar" and (mean := exact(line))][:1]:
            relation = "below" if own.mean < baseline.mean else "not below"
            text += f", {relation} that of the AR row, {baseline.mean:.2f}"
        if step:
            text += f"; kept from step {step.mean:,.0f}, where the loss of its own validation rows was lowest"
        return f"{text}."

    def gen_ppl(self) -> Spec:
        setting, rows = self.setting, self.rows
        lines = models(rows, metric="gen_ppl", convention=setting)
        steps = steps_of(lines, "gen_ppl")
        real = Line(("held-out text",), rows.select(method="data"), "data", reference=True)
        beside = any(line.where(nfe=nfe).reported("gen_ppl") for line in lines for nfe in steps)
        entropy = f"\n*(H {paper_numbers()['lm1b', 'data', 'entropy', None, None]:.2f})*" * beside

        def cell(line: Line) -> str:
            return self.perplexity(line) + entropy * line.reference

        samples = span(row.n for row in rows.models.select(metric="gen_ppl", convention=setting))
        return lines + [real] * bool(real.rows), over("nfe", "NFE {}", steps, cell), {"samples": samples}

    def mauve(self) -> Spec:
        lines, features = models(self.rows, metric="mauve", convention=None), ""
        if (pca := Number("pca_dimensions").mean(self.judge)) and (share := Number("pca_share").mean(self.judge)):
            features = f"Features of the judge, {pca.mean:.0f} principal components of the held-out rows "
            features += f"({share.mean:.1f} % of their variance)."
        samples = span(row.n for row in self.rows.select(metric="mauve", convention=None))
        columns = over("nfe", "NFE {}", steps_of(lines, "mauve"), replace(MAUVE, paper="{:.2f}"))
        return lines, columns, {"samples": samples, "features": features}

    def collapse(self) -> Spec:
        """E-MoE with drawn and with other routes, and MDLM, at every NFE of the ablation."""
        lines, others = list[Line](), list[Line]()
        for line in models(self.rows, metric="gen_ppl"):
            own = [self._in_variant(line, variant) for variant in VARIANTS.values()]
            own = [variant for variant in own if variant.where(metric="gen_ppl").rows]
            if own:
                lines.append(replace(line, labels=(f"{line.labels[0]}, drawn routes",), variant="route_tau=1"))
            elif line.method == "mdlm":
                lines.append(replace(line, variant="collapse-reference"))
            lines, others = lines + own, others + own
        cell = self.perplexity
        if any(line.where(metric="mauve").rows for line in lines):
            cell = replace(cell, below=[*cell.below, replace(MAUVE, prefix="MAUVE ")])
        averaged = names("notes")["text-averaged"] * any(line.variant == AVERAGED.paper for line in others)
        return lines, over("nfe", "NFE {}", steps_of(others, "gen_ppl"), cell), {"averaged": averaged}

    def _in_variant(self, line: Line, variant: Variant) -> Line:
        """The rows of another way to sample as if it were the plain one."""
        plain: dict[str | None, str | None] = {in_setting(self.setting, variant.name): self.setting, variant.name: None}
        rows = [replace(row, convention=plain[row.convention]) for row in select(line.rows, convention=[*plain])]
        return replace(line, labels=(f"{line.labels[0]}, {variant.label}",), rows=rows, variant=variant.paper)

    def likelihood(self) -> Spec:
        lines = models(self.rows, metric="ppl")
        lines += [self.judge] * bool(lines and self.judge.where(metric="ppl").rows)
        columns = over("convention", "{}", conventions_of(lines, "ppl"), likelihood())
        columns = [("paper", reported("ppl", ".2f")), *columns, ("coordination gain", GAIN)]
        return lines, columns, {}

    def zero_shot(self) -> Spec:
        lines = models(self.rows)
        columns = over("convention", "{}", conventions_of(lines, "zero_shot_ppl"), likelihood("zero_shot_"))
        return lines, columns, {}

    def design(self) -> Spec:
        columns: list[Column] = [
            ("passes per training step", Plain("passes_train", form="g", paper="{:g}")),
            ("through the mean block", Plain("passes_block", form="g")),
            ("calls per sampling step", Plain("calls_step", form="g", paper="{:g}")),
            ("parameters", Millions("params", paper="{:.1f}M")),
            ("active", Millions("params_active", paper="{:.1f}M")),
            ("training step (ms)", Measured("step_ms", form=".1f")),
            ("training (s)", Measured("train_s", form=".0f")),
        ]
        return models(self.rows, metric="passes_train"), columns, {}

    def latent(self) -> Spec:
        total, kl = Plain("kl_per_token", form=".4f", paper="{:.2f}"), Plain("route_kl", form=".4f")
        lines = []
        for blocks in map(_blocks, models(self.rows)):
            if len(blocks) > 1 or any(row.value for block in blocks for row in block.where(metric="kl_per_token").rows):
                lines += [block for block in blocks if block.labels[1] != "all" or total(block) != DASH]
        columns: list[Column] = [
            ("entropy of usage", Plain("usage_entropy", form=".4f")),
            ("entropy of the posterior", Plain("routing_entropy", form=".4f")),
            ("entropy of the prior", Plain("prior_entropy", form=".4f")),
            ("route KL", lambda line: total(line) if line.labels[1] == "all" else kl(line)),
        ]
        return lines, columns, {}

    def checks(self) -> Spec:
        """Three questions to a latent: blocks in use, a gain over a factorised step, MDLM beaten at few calls."""
        everyone = models(self.rows)
        lines = [line for line in everyone if self.setting and any(one.labels[1] != "all" for one in _blocks(line))]
        columns: list[Column] = [("half of the blocks in use", _alive), ("coordination gain above 0", _gain)]
        for mdlm in [line for line in everyone if line.method == "mdlm"][:1]:
            for nfe in steps_of(lines, "gen_ppl")[:2]:
                cell = partial(self._against, mdlm.where(nfe=nfe))
                columns += over("nfe", "below MDLM at NFE {}, equal H", [nfe], cell)
        return lines, columns, {}

    def _against(self, mdlm: Line, line: Line) -> str:
        """Perplexities of a model and MDLM; no verdict if entropies differ or perplexities are within two errors."""
        numbers = (self.perplexity, *self.perplexity.below)
        (ours, entropy), (theirs, level) = ([number.mean(one) for number in numbers] for one in (line, mdlm))
        if ours is None or theirs is None or entropy is None or level is None:
            return DASH
        paper, rival = (one.reported("gen_ppl") for one in (replace(line, method="emoe"), mdlm))
        factor = f"a factor of {theirs.mean / ours.mean:.2f}" + (f" *({rival / paper:.2f})*" if paper and rival else "")
        apart = entropy.mean - level.mean
        text = f"{ours.mean:.1f} against {theirs.mean:.1f}\n{factor}\nH {apart:+.3f}".replace("-", MINUS)
        if abs(apart) > EQUAL_ENTROPY:
            return f"not at equal H\n{text}"
        if abs(ours.mean - theirs.mean) <= 2 * math.hypot(ours.stderr or 0.0, theirs.stderr or 0.0):
            return f"level: {text}"
        return _verdict(ours.mean < theirs.mean, text)


def _verdict(holds: bool, text: str) -> str:
    return f"{'yes' if holds else 'no'}: {text}".replace("-", MINUS)


def _alive(line: Line) -> str:
    ends = [[Number(name).mean(block) for name in ("usage_entropy", "route_kl")] for block in _blocks(line)]
    known = [usage.mean > ALIVE_USAGE and kl.mean > ALIVE_KL for usage, kl in ends if usage and kl]
    return _verdict(2 * sum(known) >= len(known), f"{sum(known)} of {len(known)}") if known else DASH


def _gain(line: Line) -> str:
    mean = GAIN.mean(line)
    return DASH if mean is None else _verdict(mean.mean > 0, f"{mean.mean:+.3f}")


def _blocks(line: Line) -> list[Line]:
    """A line for each routed block and for `all` of them, with the numbers logged at the end of training."""
    logged = [(int(str(row.convention)[5:]), row) for row in line.rows if str(row.convention).startswith("step ")]
    last = {row.metric: step for step, row in sorted(logged, key=lambda entry: entry[0])}
    groups: dict[str, list[Row]] = {}
    for row in (row for step, row in logged if step == last[row.metric]):
        metric, _, block = row.metric.replace("train_kl", "kl_per_token").partition("/block")
        groups.setdefault(block or "all", []).append(replace(row, metric=metric, convention=None))
    order = sorted(groups, key=lambda block: (block == "all", len(block), block))
    return [replace(line, labels=(line.labels[0], block), rows=groups[block]) for block in order]


TABLES: dict[str, tuple[str, Callable[[TextTables], Spec]]] = {  # name -> heading, and table of a data set
    "checks": ("What holds", TextTables.checks),
    "gen-ppl": ("Generative perplexity", TextTables.gen_ppl),
    "mauve": ("MAUVE", TextTables.mauve),
    "collapse": ("Switching the mixture off", TextTables.collapse),
    "likelihood": ("Test perplexity under named likelihoods", TextTables.likelihood),
    "zero-shot": ("Text from elsewhere", TextTables.zero_shot),
    "design": ("Passes, parameters, time", TextTables.design),
    "latent": ("The latent by block", TextTables.latent),
}


def text_tables(name: str, results: Results) -> list[Table]:
    """The tables of one kind, one for each data set and, of perplexities alone, each setting."""
    tables = []
    for data in sorted({row.data for row in results.rows if row.task == "text"}):
        rows = results.only(task="text", data=data)
        measured = {str(row.convention).partition(" ")[0] for row in rows.select(metric="gen_ppl")}
        settings = [setting for setting in SETTINGS if setting in measured] or [""]
        for setting in settings if name == "gen-ppl" else settings[:1]:
            tables_of = TextTables(rows, setting)
            lines, columns, values = TABLES[name][1](tables_of)
            corner = [data, "block"][: len(lines[0].labels)] if lines else []
            text = note(f"text-{name}", rows, setting=setting, judge=tables_of.judge_note(), **values)
            tables += build(corner, lines, columns, text, align="lr"[: len(corner)])
    return tables


def all_tables(results: Results) -> list[Table]:
    """All tables, their kinds as titles."""
    kinds = [(heading, text_tables(name, results)) for name, (heading, _) in TABLES.items()]
    return [replace(table, title=heading) for heading, tables in kinds for table in tables]


def text_page(results: Results) -> str:
    """`results/text.md`: all tables."""
    kinds = [(heading, text_tables(name, results)) for name, (heading, _) in TABLES.items()]
    return "\n".join(f"## {heading}\n\n{markdown(tables)}" for heading, tables in kinds if tables)
