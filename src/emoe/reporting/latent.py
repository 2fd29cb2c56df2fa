"""Tables of the studies of the latent: held-out densities, searches, estimators, the route limit, information."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Sequence
from typing import Any

from emoe.reporting.cells import Column, Line, Number, data_name, measure, write
from emoe.reporting.recipes import as_typed, parse
from emoe.reporting.results import Results, Row, SeedMean, mean_of, methods_of
from emoe.reporting.table import Table, TableSpec, build, comma, note, short_commit, steps_of

# First words of the names of estimators, in the order of tables and colours.
FAMILIES = ("top-2", "all", "selected", "reinmax", "gumbel-rao", "leave-one-out", "vimco", "wake-sleep")
BASELINE = "top-2 tau 1"
STATES = ("early", "middle")


def held_out_tables(results: Results) -> list[Table]:
    """Exact KL and overlap on densities that no setting was chosen on, a table for each setting that was run."""
    exact = results.only(convention="exact")
    settings: dict[str, set[str | None]] = {}
    for row in exact.rows:
        changes = {field: value for field, value in parse(row.recipe).changes.items() if field != "domain.density"}
        settings.setdefault(as_typed(changes), set()).add(row.recipe)
    titles = {setting: f"With `{setting}`:" * (len(settings) > 1) for setting in sorted(settings)}
    tables = [_held_out(exact.only(recipe=settings[setting]), title) for setting, title in titles.items()]
    if tables:
        only = "".join(f"`{setting}`, " for setting in settings if setting and len(settings) == 1)
        text = note("held-out", exact, numbers=comma(exact.seeds), only=only)
        tables[-1] = dataclasses.replace(tables[-1], note="\n".join(filter(None, (tables[-1].note, text))))
    return tables


def _held_out(part: Results, title: str) -> Table:
    """One setting; the note counts the densities where a plus recipe is better: KL lower, overlap higher."""
    methods = methods_of(part.rows)
    steps = steps_of([Line((), part.rows)])
    lines = {
        (data, metric, nfe): Line(
            (data_name(data), f"{measure(metric).label}, NFE {nfe}"),
            part.select(data=data, metric=metric, nfe=nfe),
        )
        for data in sorted({row.data for row in part.rows})
        for metric in ("kl", "overlap")
        for nfe in [nfe for nfe in steps if nfe in (1, 2)] or steps
    }
    columns: list[Column] = [(part.label(method), Number(where={"method": method})) for method in methods]
    sentences = []
    pairs = [(plain, other) for plain in methods for other in methods if other.startswith(f"{plain}-")]
    for plain, plus in pairs:
        first, second = part.label(plain), part.label(plus)
        columns.append((f"{second} − {first}", functools.partial(_difference, plain, plus)))
        counts: dict[str, list[bool]] = {}
        for (_, metric, nfe), line in lines.items():
            if mean := gap(line.rows, plain, plus):
                name, sign = ("KL", -1) if metric == "kl" else (metric, 1)
                counts.setdefault(f"{name} at NFE {nfe}", []).append(sign * mean.mean > 0)
        words = comma(f"{name} in {sum(better)} of {len(better)}" for name, better in counts.items())
        sentences += [f"{second} is better than {first}: {words} densities."] * bool(counts)
    corner = ["Density", "of the exact law"]
    return TableSpec(corner, list(lines.values()), columns, "\n".join(sentences), title, align="ll").build()


def gap(rows: Sequence[Row], plain: str, plus: str) -> SeedMean | None:
    """Mean over seeds of (second - first method) on the same seed, with its error; None without a common seed."""
    first, second = ({row.seed: row.value for row in rows if row.method == method} for method in (plain, plus))
    return mean_of(second[seed] - first[seed] for seed in first if seed in second)


def _difference(plain: str, plus: str, line: Line) -> str:
    digits = measure(line.rows[0].metric).digits if line.rows else 0
    return write(gap(line.rows, plain, plus), f"+.{digits}f")


def estimator_order(name: str) -> tuple[int, list[float], str]:
    """Sorts estimators by family, then by their numbers, then by their further words."""
    family = name.partition(" ")[0]
    rank = FAMILIES.index(family) if family in FAMILIES else len(FAMILIES)
    return rank, [float(number) for number in re.findall(r"[\d.]+", name.removeprefix(family))], name


def estimator_tables(results: Results) -> list[Table]:
    """Bias, cosine, spread and cost of the gradients of every estimator, a table for each state of the model."""
    specs = []
    cost = next(iter(results.select(metric="step_ratio", recipe=BASELINE)), None)
    text = note("estimators", results, baseline=BASELINE.replace("tau", "τ"), n=cost.n if cost else 0)
    for state in STATES if results.select(metric="bias") else ():
        routers, others = ({"convention": f"{state}, {part}"} for part in ("routers", "others"))
        named = {str(row.recipe) for row in results.rows if str(row.convention).startswith(f"{state}, ")}
        names = sorted(named, key=estimator_order)
        lines = [Line((name.replace("tau", "τ"),), results.select(recipe=name)) for name in names]
        number = functools.partial(Number, form=".2f", measured=True, plain=True)
        columns = [
            ("bias", number("bias", routers)),
            ("cosine", number("cosine", routers)),
            ("std per call", number("std", routers)),
            ("SNR per call", number("snr", routers)),
            ("cosine with ∇ −log p(x0 | xt)", number("likelihood_cosine", routers)),
            ("bias, other parameters", number("bias", others)),
            ("step cost", Number("step_ratio", form=".1f", unit="×")),
        ]
        nll, kl = (results.select(recipe=state, metric=metric)[0].value for metric in ("nll", "kl"))
        title = f"**{state.capitalize()}**: exact NLL of one step {nll:.2f} nats, KL(q ‖ p) {kl:.2f} nats."
        specs.append(TableSpec(["Estimator"], lines, columns, text * (state == STATES[-1]), title))
    return build(*specs)


def route_limit(limit: Results, toy: Results) -> list[Table]:
    """The best route code and trained models at one network call: exact laws, means over seeds."""
    results = Results().merge(limit).merge(toy).only(nfe=1, convention="exact")
    lines = [
        Line((data_name(data), "*best route code*" if method == "limit" else results.label(method)), rows)
        for data in ("8-modes", "swiss-roll")
        for method in ("limit", "emoe-plus", "vadd-plus", "vadd", "emoe", "mdlm")
        if (rows := results.select(data=data, method=method))
    ]
    columns = [(measure(metric).label, Number(metric, plain=True)) for metric in ("validity", "overlap", "kl")]
    return build(TableSpec(["Density", ""], lines, columns, note("route-limit", results), align="ll"))


def information_tables(results: Results) -> list[Table]:
    """Nats of the blocks at the end of training, and ties kept at one network call."""

    def label(recipe: str) -> str:
        name, changes = parse(recipe)
        if name not in ("ties-emoe-plus", "ties-emoe-wake-sleep"):
            return "the paper's reading"
        everywhere = changes.keys() & {"method.carriers", "method.compare.in-turn"}
        return f"E-MoE+, {'all positions carry' if everywhere else 'positions code in turn'}"

    def nats(line: Line) -> list[float]:
        blocks: dict[str, float] = {}
        for row in line.rows:
            if row.metric.startswith("route_kl/"):
                block = row.metric.split("/")[1]
                blocks[block] = blocks.get(block, 0.0) + row.value
        return [blocks[block] for block in sorted(blocks)]

    recipes = sorted({str(row.recipe) for row in results.select(metric="ties")})
    lines = [Line((label(recipe),), results.select(recipe=recipe)) for recipe in recipes]
    columns: list[Column] = [
        ("nats per row", lambda line: f"{sum(nats(line)):.2f}"),
        ("by block", lambda line: " + ".join(f"{value:.2f}" for value in nats(line))),
        ("ties at NFE 1 (%)", Number("ties", {"nfe": 1}, measured=True, plain=True)),
        ("coverage (%)", Number("coverage", {"nfe": 1})),
    ]
    return build(TableSpec(["How the latent is learned"], lines, columns, note("information", results)))


def search_table(ranking: dict[str, Any]) -> Table:
    """All trials of a search (`results/search/*.json`), best first, with mean ± standard error over tasks and seeds."""
    names, info = ranking["rank"], ranking["made"]
    forms = [f".{measure(name.partition('@')[0]).digits}f" for name in names]
    rows, tasks = list[list[str]](), dict[str, None]()
    for trial in ranking["trials"]:
        label = short_label(trial["settings"]) + f" ({trial['status']})" * (trial["status"] != "done")
        means = [mean and SeedMean(mean["mean"], mean["stderr"]) for mean in map(trial["metrics"].get, names)]
        rows.append([label, *(write(mean, form, plain=True) for mean, form in zip(means, forms, strict=True))])
        for outcome in trial["outcomes"]:
            task, seed = comma(outcome["task"].values()), f"seed {outcome['seed']}"
            tasks[f"{task} ({seed})" if task else seed] = None
    commits = comma(f"`{short_commit(commit)}`" for commit in info.get("commits", [info["commit"]]))
    values = {**info, "base": ranking["base"], "tasks": comma(tasks), "commits": commits}
    return Table(["Trial", *names], rows, note=note("search", Results(), **values))


def short_label(settings: dict[str, str]) -> str:
    """Changed fields without their family's name; ramps as `4 → 1 over 60%`."""
    words = []
    for name, text in settings.items():
        if text.startswith("{"):
            ramp = json.loads(text)
            text = f"{ramp['start']:g} → {ramp['end']:g} over {ramp.get('share', 1):.0%}"
        words.append(f"{name.rpartition('.')[2]} {text}")
    return comma(words) or "**base**"
