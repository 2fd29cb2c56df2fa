"""Tables of the study of text (`emoe reproduce text`).

Generative perplexity is never printed without the entropy of the samples beside it, and no model is marked as the best:
repetitive text has a low perplexity. Every likelihood stands under its name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from emoe.reporting.cells import DASH, MINUS, Column, Line, Measured, Millions, Number, Plain, over, reported
from emoe.reporting.notes import note, span
from emoe.reporting.recipes import paper_numbers
from emoe.reporting.results import Results, Row, select
from emoe.reporting.table import Table, build, conventions_of, models, steps_of

SETTINGS = ("paper", "duo")  # of perplexities
# Other ways to draw routes, in conventions; the latter of version 0.1.
GREEDY, AVERAGED = "route_tau=0", "mean_below=0.7"
VARIANTS = {GREEDY: "greedy routes", AVERAGED: "averaged routes"}
ALIVE_USAGE, ALIVE_KL = 1.0, 0.02  # nats; a block above both has routes that vary and depend on the text
EQUAL_ENTROPY = 0.05  # nats between samples whose perplexities are compared
MAUVE = Number("mauve", {"convention": None}, error="mauve_spread")  # over seeds of k-means, as in the paper
Spec = tuple[Sequence[Line], Sequence[Column], dict[str, Any]]  # lines, columns, values of the note
GAIN = Measured("coordination_gain", {"convention": "bound@1"}, "+.3f")


def in_setting(setting: str, variant: str | None = None) -> str:
    """Return the convention of a perplexity: the setting that tokens are counted in, and the variant of sampling."""
    return setting if variant is None else f"{setting} {variant}"


def likelihood(prefix: str = "") -> Number:
    """Return a cell of the perplexity, below it nats per token."""
    return Measured(f"{prefix}ppl", form=".2f", below=[Measured(f"{prefix}nll_token", form=".4f")])


class TextTables:
    """The tables of one data set, with its perplexities in one setting; a method for each entry of `TABLES`."""

    def __init__(self, rows: Results, setting: str):
        self.rows, self.setting = rows, setting
        entropy = Plain("entropy", {"convention": None}, prefix="H ")
        self.perplexity = Measured("gen_ppl", {"convention": setting}, ".1f", below=[entropy], paper="{:.1f}, H {:.2f}")
        # The evaluation LM that scored last: scores of an earlier one were replaced.
        last = sorted(rows.select(method="judge"), key=lambda row: rows.runs[row.run].when)[-1:]
        own = rows.select(method="judge", recipe=[row.recipe for row in last])
        self.eval_lm = Line((rows.label("judge"),), own, "judge", reference=True)

    def values(self) -> dict[str, str]:
        """Return values for notes: the setting, and test perplexities of the evaluation LM and the AR model."""
        exact = Plain("ppl", {"convention": "exact"}, ".2f")
        ar = [exact(line) for line in models(self.rows) if line.method == "ar" and self.eval_lm.rows]
        step = Plain("judge_step", form=",.0f")(self.eval_lm)
        return {"setting": self.setting, "lm_ppl": exact(self.eval_lm), "ar_ppl": "".join(ar[:1]), "lm_step": step}

    def gen_ppl(self) -> Spec:
        rows, lines = self.rows, models(self.rows, metric="gen_ppl", convention=self.setting)
        real = Line(("held-out text",), rows.select(method="data"), "data", reference=True)
        entropy = f"\n*(H {paper_numbers()['lm1b', 'data', 'entropy', None, None]:.2f})*"
        beside = entropy * any(line.paper for line in lines)

        def cell(line: Line) -> str:
            return self.perplexity(line) + beside * line.reference

        columns = over("nfe", "NFE {}", steps_of(rows.models.select(metric="gen_ppl")), cell)
        samples = span(row.n for row in rows.models.select(metric="gen_ppl", convention=self.setting))
        return lines + [real] * bool(real.rows), columns, {"samples": samples}

    def mauve(self) -> Spec:
        rows = self.rows.select(metric="mauve", convention=None)
        columns = over("nfe", "NFE {}", steps_of(rows), replace(MAUVE, paper="{:.2f}"))
        values = {
            "samples": span(row.n for row in rows),
            "components": Plain("pca_dimensions", form=".0f")(self.eval_lm),
            "share": Plain("pca_share", form=".1f")(self.eval_lm),
        }
        return models(self.rows, metric="mauve", convention=None), columns, values

    def collapse(self) -> Spec:
        """E-MoE with drawn and with other routes, and MDLM, at every NFE of the ablation."""
        lines = []
        for line in models(self.rows, metric="gen_ppl"):
            own = [self._in_variant(line, variant) for variant in VARIANTS]
            own = [variant for variant in own if variant.where(metric="gen_ppl").rows]
            if own:
                lines.append(replace(line, labels=(f"{line.labels[0]}, drawn routes",), variant="route_tau=1"))
            elif line.method == "mdlm":
                lines.append(replace(line, variant="collapse-reference"))
            lines += own
        cell = self.perplexity
        if any(line.where(metric="mauve").rows for line in lines):
            cell = replace(cell, below=[*cell.below, replace(MAUVE, prefix="MAUVE ")])
        averaged = "Averaged routes" if any(line.variant == AVERAGED for line in lines) else ""
        conventions = [in_setting(self.setting, variant) for variant in VARIANTS]
        steps = steps_of(self.rows.select(metric="gen_ppl", convention=conventions))
        return lines, over("nfe", "NFE {}", steps, cell), {"averaged": averaged}

    def _in_variant(self, line: Line, variant: str) -> Line:
        """Return a line whose rows of a variant have the conventions of plain sampling."""
        plain: dict[str | None, str | None] = {in_setting(self.setting, variant): self.setting, variant: None}
        rows = [replace(row, convention=plain[row.convention]) for row in select(line.rows, convention=[*plain])]
        return replace(line, labels=(f"{line.labels[0]}, {VARIANTS[variant]}",), rows=rows, variant=variant)

    def likelihood(self) -> Spec:
        lines = models(self.rows, metric="ppl")
        lines += [self.eval_lm] * bool(lines and self.eval_lm.where(metric="ppl").rows)
        columns = over("convention", "{}", conventions_of(self.rows.select(metric="ppl")), likelihood())
        columns = [("paper", reported("ppl", ".2f")), *columns, ("coordination gain", GAIN)]
        return lines, columns, {}

    def zero_shot(self) -> Spec:
        conventions = conventions_of(self.rows.models.select(metric="zero_shot_ppl"))
        return models(self.rows), over("convention", "{}", conventions, likelihood("zero_shot_")), {}

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
        """Three checks: blocks in use, a gain over a factorised step, lower perplexity than MDLM at few calls."""
        everyone = models(self.rows)
        lines = [line for line in everyone if self.setting and any(one.labels[1] != "all" for one in _blocks(line))]
        columns: list[Column] = [("half of the blocks in use", _alive), ("coordination gain above 0", _gain)]
        for mdlm in [line for line in everyone if line.method == "mdlm"][:1]:
            for nfe in steps_of(self.rows.models.select(metric="gen_ppl"))[:2]:
                cell = partial(self._against, mdlm.where(nfe=nfe))
                columns += over("nfe", "below MDLM at NFE {}, equal H", [nfe], cell)
        return lines, columns, {}

    def _against(self, mdlm: Line, line: Line) -> str:
        """Compare perplexities with MDLM; no verdict if entropies differ or perplexities are within two errors."""
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
    """Return a line for each routed block and for `all` of them, with the numbers logged at the end of training."""
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
    """Return the tables of one kind, one for each data set and, of perplexities alone, each setting."""
    tables = []
    for data in sorted({row.data for row in results.rows if row.task == "text"}):
        rows = results.only(task="text", data=data)
        measured = {str(row.convention).partition(" ")[0] for row in rows.select(metric="gen_ppl")}
        settings = [setting for setting in SETTINGS if setting in measured] or [""]
        for setting in settings if name == "gen-ppl" else settings[:1]:
            tables_of = TextTables(rows, setting)
            lines, columns, values = TABLES[name][1](tables_of)
            corner = [data, "block"][: len(lines[0].labels)] if lines else []
            text = "\n".join([note(f"text-{name}", rows, **tables_of.values(), **values), note("text", rows)])
            tables += build(corner, lines, columns, text)
    return tables


def all_tables(results: Results) -> list[Table]:
    """Return the tables of `results/text.md`, with their kinds as titles."""
    titles = {name: f"**{heading}**" for name, (heading, _) in TABLES.items()}
    return [replace(table, title=title) for name, title in titles.items() for table in text_tables(name, results)]
