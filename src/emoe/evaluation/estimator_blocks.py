"""The generated table of `emoe reproduce estimators`: bias, spread and cost of gradients of the latent."""

from __future__ import annotations

import re

from emoe.evaluation.readme import results_block
from emoe.evaluation.results import Results, Row
from emoe.evaluation.tables import markdown_table

# First words of the names of estimators, in the order of tables and colours.
FAMILIES = ("top-2", "all", "selected", "reinmax", "gumbel-rao", "leave-one-out", "vimco", "wake-sleep")
BASELINE = "top-2 tau 1"
STATES = ("early", "middle")


def estimator_order(name: str) -> tuple[int, list[float], str]:
    """Sorts estimators by family, then by their numbers, then by what else they say."""
    family = name.partition(" ")[0]
    place = FAMILIES.index(family) if family in FAMILIES else len(FAMILIES)
    numbers = [float(number) for number in re.findall(r"[\d.]+", name.removeprefix(family))]
    return place, numbers, name


@results_block("estimator-table", "estimators")
def estimator_table(results: Results) -> str:
    """A table for each state of the model: relative bias, cosine, spread and cost of every estimator."""
    if not results.select(metric="bias"):
        return "*No numbers here yet: run `emoe reproduce estimators`.*"
    costs = {row.recipe: row.value for row in results.select(metric="step_ratio")}
    parts = []
    for state in STATES:
        found = {
            (row.recipe, row.metric, row.convention): row
            for row in results.rows
            if row.convention is not None and row.convention.startswith(f"{state}, ")
        }
        names = sorted({str(name) for name, _, _ in found}, key=estimator_order)
        lines = []
        for name in names:
            own = {metric: found[name, metric, f"{state}, routers"] for metric in ("bias", "cosine", "std", "snr")}
            other = found[name, "bias", f"{state}, others"]
            likelihood = found[name, "likelihood_cosine", f"{state}, routers"]
            lines.append(
                [
                    name.replace("tau", "τ"),
                    _with_error(own["bias"]),
                    f"{own['cosine'].value:.2f}",
                    f"{own['std'].value:.2f}",
                    f"{own['snr'].value:.2f}",
                    f"{likelihood.value:.2f}",
                    _with_error(other),
                    f"{costs[name]:.1f}×" if name in costs else "—",
                ]
            )
        nll, kl = (results.select(recipe=state, metric=metric)[0].value for metric in ("nll", "kl"))
        header = [
            "Estimator", "bias", "cosine", "std per call", "SNR per call", "cosine with ∇ −log p(x0 | xt)",
            "bias, other parameters", "step cost",
        ]  # fmt: skip
        table = markdown_table(header, lines, align="l" + "r" * (len(header) - 1))
        parts.append(
            f"**{state.capitalize()}**: exact NLL of one step {nll:.2f} nats, KL(q ‖ p) {kl:.2f} nats.\n\n{table}"
        )
    (cost,) = results.select(metric="step_ratio", recipe=BASELINE)
    runs = sorted({(run.commit[:12] + "-dirty" * run.commit.endswith("-dirty"), run.device)
                   for run in results.runs.values()})  # fmt: skip
    source = "; ".join(f"commit `{commit}` on {device}" for commit, device in runs)
    note = (
        "Gradients of the routers' parameters, unless said otherwise, relative to the size of the exact gradient of "
        "what each estimator claims to follow. ± is what the bias would read without one. Step cost: a step of the "
        f"8-modes model with a batch of 128 on the CPU, over that of {BASELINE.replace('tau', 'τ')}, medians of "
        f"{cost.n} interleaved rounds. Made by `emoe reproduce estimators`, {source}."
    )
    return "\n".join([*parts, note])


def _with_error(row: Row) -> str:
    return f"{row.value:.2f} ±{row.stderr or 0:.2f}"
