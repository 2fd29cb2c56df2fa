"""Tables of the studies of the latent (`emoe reproduce held-out` and `scaling`), for the console and for docs."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from emoe.evaluation.grid import DATA, METHODS, REFERENCES, measure
from emoe.evaluation.readme import results_block, source_of
from emoe.evaluation.results import Results, Row, SeedMean, mean_over_seeds
from emoe.evaluation.tables import markdown_table

Lines = list[list[str]]

# Models of the study of row lengths: name -> recipe and what is changed in it.
VARIANTS: dict[str, tuple[str, dict[str, str]]] = {
    "mdlm": ("ties-mdlm", {}),
    "vadd": ("ties-vadd", {}),
    "paper": ("ties-emoe", {}),
    "plus": ("ties-emoe-plus", {}),
    "wake-sleep-row": ("ties-emoe-plus", {"method.credit": "row"}),
    "all-carry": ("ties-emoe-plus", {"method.carriers": "all"}),
    "straight-through-spread": ("ties-emoe", {"method.carriers": "spread", "method.last-block": "summed"}),
}
DEPTHS = {2: 2, 4: 3, 8: 4, 16: 4, 32: 6, 64: 6}  # length of a row -> blocks of the network
RECIPE_DEPTH = 4  # of the recipes ties-*, whose names do not say it
PLACE = ("domain.family", "domain.length", "domain.symbols", "backbone.depth")  # no part of a variant
SHOWN = (1, 2)  # NFE in the table of held-out densities
HEALTH = ("coordination_gain", "least_usage_entropy", "effective_draws", "dead_experts")


class Place(NamedTuple):
    """Where a variant was trained: a family of ties (with its number of symbols, if unusual) and a length."""

    family: str
    length: int


def default_depth(length: int) -> int:
    """Blocks of the network for rows of a length: those of the next length that `DEPTHS` has, or of its last."""
    return next((depth for known, depth in DEPTHS.items() if known >= length), max(DEPTHS.values()))


def words_of(recipe: str) -> tuple[str, dict[str, str]]:
    """`toy-8modes-emoe train.steps=50` as the recipe's name and the changed fields; values may hold spaces."""
    name, *words = _split(recipe)
    return name, {field: value for field, _, value in (word.partition("=") for word in words)}


@functools.cache
def _split(recipe: str) -> list[str]:
    return re.split(r"\s+(?=[\w.-]+=)", recipe)


def place_of(data: str) -> Place:
    """`pairs-L16`, or `pairs-L16-S4` for an unusual number of symbols."""
    family, length, symbols = re.fullmatch(r"(\w+)-L(\d+)(-S\d+)?", data).groups("")  # type: ignore[union-attr]
    return Place(family + symbols, int(length))


def variant_of(recipe: str) -> tuple[str, dict[str, str]]:
    """The variant behind a recipe's name, and what was changed besides; neither data nor depth."""
    name, fields = words_of(recipe)
    left = {field: value for field, value in fields.items() if field not in PLACE}
    fitting = [
        (len(settings), variant, settings)
        for variant, (base, settings) in VARIANTS.items()
        if base == name and settings.items() <= left.items()
    ]
    _, variant, settings = max(fitting, default=(0, name, {}), key=lambda found: found[0])
    return variant, {field: value for field, value in left.items() if field not in settings}


def as_words(fields: Mapping[str, str]) -> str:
    """Changed fields as they are typed."""
    return " ".join(f"{field}={value}" for field, value in fields.items())


def cell(mean: SeedMean | None, digits: int, *, sign: str = "") -> str:
    """`87.6 ±0.6`, mean and standard error over seeds; a dash where nothing was measured."""
    if mean is None:
        return "—"
    error = "" if mean.stderr is None else f"\N{NO-BREAK SPACE}±{mean.stderr:.{digits}f}"
    return f"{mean.mean:{sign}.{digits}f}{error}".replace("-", "−")


# Densities that no setting was chosen on


def held_out_settings(results: Results) -> dict[str, Results]:
    """The exact measures of held-out densities, apart for everything but the density that was changed in recipes."""
    found: dict[str, set[str]] = {}
    for row in results.select(convention="exact"):
        fields = words_of(str(row.recipe))[1]
        label = as_words({field: value for field, value in fields.items() if field != "domain.density"})
        found.setdefault(label, set()).add(str(row.recipe))
    return {label: results.only(recipe=recipes, convention="exact") for label, recipes in sorted(found.items())}


def pairs_of(methods: Iterable[str]) -> list[tuple[str, str]]:
    """(method, the same with -plus) for all that are there in both forms."""
    methods = list(methods)
    return [(name, f"{name}-plus") for name in methods if f"{name}-plus" in methods]


def gap(results: Results, pair: tuple[str, str], data: str, metric: str, nfe: int) -> SeedMean | None:
    """Mean over seeds of (second - first) on the same seed, with its standard error; None without a common seed."""
    one, other = (
        {row.seed: row.value for row in results.select(method=method, data=data, metric=metric, nfe=nfe)}
        for method in pair
    )
    gaps = [other[seed] - one[seed] for seed in one if seed in other]
    if not gaps:
        return None
    mean = math.fsum(gaps) / len(gaps)
    spread = math.fsum((value - mean) ** 2 for value in gaps)
    return SeedMean(mean, math.sqrt(spread / (len(gaps) - 1) / len(gaps)) if len(gaps) > 1 else None, len(gaps))


def held_out_lines(results: Results) -> tuple[list[str], Lines, list[str]]:
    """Header and cells of the table of one setting, and sentences: in how many densities the plus recipe is better.

    KL is better low, overlap high; what counts is the mean over seeds of the difference on the same seed.
    """
    methods = [name for name in METHODS if results.select(method=name)]
    steps = sorted({row.nfe for row in results.rows if row.nfe is not None})
    steps = [nfe for nfe in steps if nfe in SHOWN] or steps
    names = sorted({row.data for row in results.rows})
    pairs = pairs_of(methods)
    header = ["Density", "of the exact law", *(METHODS[name] for name in methods)]
    header += [f"{METHODS[plus]} − {METHODS[plain]}" for plain, plus in pairs]
    lines = []
    for data in names:
        for metric in ("kl", "overlap"):
            for nfe in steps:
                digits, same = measure(metric).digits, results.only(data=data, metric=metric, nfe=nfe)
                means = [cell(same.mean_over_seeds(method=name), digits) for name in methods]
                gaps = [cell(gap(same, pair, data, metric, nfe), digits, sign="+") for pair in pairs]
                lines.append([DATA.get(data, data), f"{measure(metric).label}, NFE {nfe}", *means, *gaps])
    said = []
    for pair in pairs:
        counts = []
        for metric, name, sign in (("kl", "KL", -1), ("overlap", "overlap", 1)):
            for nfe in steps:
                gaps_seen = [gap(results, pair, data, metric, nfe) for data in names]
                seen = [found.mean for found in gaps_seen if found is not None]
                if seen:
                    counts.append(f"{name} at NFE {nfe} in {sum(sign * mean > 0 for mean in seen)} of {len(seen)}")
        if counts:
            said.append(f"{METHODS[pair[1]]} is better than {METHODS[pair[0]]}: {', '.join(counts)} densities.")
    return header, lines, said


@results_block("held-out-table", "held-out")
def held_out_table(results: Results) -> str:
    """Exact KL and overlap on densities that no setting was chosen on, a table for each setting that was run."""
    parts = []
    settings = held_out_settings(results)
    if not settings:
        return "*No numbers here yet: run `emoe reproduce held-out`.*"
    for label, part in settings.items():
        header, lines, said = held_out_lines(part)
        table = markdown_table(header, lines, align="ll" + "r" * (len(header) - 2))
        parts += [f"With `{label}`:\n"] * (len(settings) > 1) + [table, *said]
    exact = results.only(convention="exact")
    seeds = ", ".join(map(str, sorted({row.seed for row in exact.rows if row.seed is not None})))
    told = f"`{next(iter(settings))}`, " if len(settings) == 1 and next(iter(settings)) else ""
    note = f"Mean ± standard error over seeds ({seeds}); differences are between runs of the same seed."
    return "\n".join([*parts, f"{note} Made by `emoe reproduce held-out`, {told}{source_of(exact)}."])


# Rows of tied symbols of growing length


def common_changes(results: Results) -> dict[str, str]:
    """Fields that were changed alike in all models, beyond what their variants are: said once, not in every name."""
    changes = [variant_of(recipe)[1] for recipe in {str(row.recipe) for row in _models(results)}]
    first = changes[0] if changes else {}
    return {name: text for name, text in first.items() if all(other.get(name) == text for other in changes)}


def by_variant(results: Results) -> dict[tuple[Place, str], list[Row]]:
    """The rows of models on tied symbols, by place and variant.

    A variant's name holds what was changed in it but not in all models. The depth is part of it only where the same
    one was trained at the same place with several depths, and then only if it is not the usual one.
    """
    rows, common = _models(results), common_changes(results)
    labels: dict[str, str] = {}
    depths: dict[tuple[Place, str], set[int]] = {}
    for row in rows:
        variant, changes = variant_of(str(row.recipe))
        own = {name: text for name, text in changes.items() if name not in common}
        labels[str(row.recipe)] = " ".join(filter(None, (variant, as_words(own))))
        depths.setdefault((place_of(row.data), labels[str(row.recipe)]), set()).add(_depth(row))
    several = any(len(found) > 1 for found in depths.values())
    groups: dict[tuple[Place, str], list[Row]] = {}
    for row in rows:
        place, label = place_of(row.data), labels[str(row.recipe)]
        if several and _depth(row) != default_depth(place.length):
            label += f" backbone.depth={_depth(row)}"
        groups.setdefault((place, label), []).append(row)
    return groups


def _models(results: Results) -> list[Row]:
    return [row for row in results.select(task="ties") if row.method not in REFERENCES]


def _depth(row: Row) -> int:
    return int(words_of(str(row.recipe))[1].get("backbone.depth", RECIPE_DEPTH))


def mean_of(rows: Sequence[Row], metric: str, nfe: int | None = None) -> SeedMean | None:
    """Mean over seeds of one metric among the rows of a variant."""
    return mean_over_seeds(row for row in rows if (row.metric, row.nfe) == (metric, nfe))


def ordered_variants(labels: Iterable[str]) -> list[str]:
    """Labels in the order of `VARIANTS`, those with further changes after their own variant."""
    order = list(VARIANTS)

    def key(label: str) -> tuple[int, str]:
        first = label.partition(" ")[0]
        return (order.index(first) if first in order else len(order)), label

    return sorted(set(labels), key=key)


def chances(results: Results) -> dict[Place, float]:
    """Percent of ties that the best factorised model keeps in one step, where it is recorded."""
    rows = results.select(task="ties", method="ideal", metric="ties", nfe=1)
    return {place_of(row.data): float(row.value) for row in rows}


def scaling_lines(results: Results) -> tuple[list[str], Lines]:
    """Header and cells: ties kept at NFE 1 and, in parentheses, coverage; lines of family and variant, columns of L."""
    groups, chance = by_variant(results), chances(results)
    lengths = sorted({place.length for place, _ in groups})
    lines: Lines = []
    for family in sorted({place.family for place, _ in groups}):
        for label in ordered_variants(label for place, label in groups if place.family == family):
            cells = []
            for length in lengths:
                rows = groups.get((Place(family, length), label), [])
                ties, coverage = mean_of(rows, "ties", 1), mean_of(rows, "coverage", 1)
                cells.append(cell(ties, 1) + (f" ({coverage.mean:.1f})" if coverage else ""))
            lines.append([family, label, *cells])
        levels = [chance.get(Place(family, length)) for length in lengths]
        lines.append([family, "chance", *("—" if level is None else f"{level:.1f}" for level in levels)])
    return ["Ties", "Variant", *(f"L = {length}" for length in lengths)], lines


def health_lines(results: Results) -> tuple[list[str], Lines]:
    """Header and cells: what the latent does at the largest L of each family; variants without a latent are left out.

    In this order: coordination gain, the entropy of the least varied block's usage, effective draws, and experts that
    get less than a tenth of an even share, over all blocks.
    """
    groups = {key: rows for key, rows in by_variant(results).items() if any(row.metric in HEALTH for row in rows)}
    lines: Lines = []
    for family in sorted({place.family for place, _ in groups}):
        largest = max(place.length for place, _ in groups if place.family == family)
        for label in ordered_variants(label for place, label in groups if place == (family, largest)):
            rows = groups[Place(family, largest), label]
            gain, entropy, draws, dead = (mean_of(rows, metric) for metric in HEALTH)
            total = next((row.n for row in rows if row.metric == "dead_experts"), None)
            lost = "—" if dead is None else f"{dead.mean:.3g} of {total}"
            cells = [cell(gain, 3, sign="+"), cell(entropy, 2), cell(draws, 2), lost]
            lines.append([family, str(largest), label, *cells])
    header = ["Ties", "L", "Variant", "coordination gain", "least usage entropy", "effective draws", "dead experts"]
    return header, lines


@results_block("scaling-64-table", "scaling-64")
@results_block("scaling-table", "scaling")
def scaling_table(results: Results) -> str:
    """Ties kept in one step against the length of a row, for every family and variant."""
    results = results.only(task="ties")
    header, lines = scaling_lines(results)
    if not lines:
        return "*No numbers here yet: run `emoe reproduce scaling`.*"
    table = markdown_table(header, lines, align="ll" + "r" * (len(header) - 2))
    labels = ordered_variants(label for _, label in by_variant(results))
    return f"{table}\nTies kept at NFE 1 in percent; in parentheses coverage. {_what_they_are(labels)} {_made(results)}"


@results_block("scaling-64-health", "scaling-64")
@results_block("scaling-health", "scaling")
def scaling_health(results: Results) -> str:
    """Whether the latent is alive in the longest rows."""
    results = results.only(task="ties")
    header, lines = health_lines(results)
    if not lines:
        return "*No numbers here yet: run `emoe reproduce scaling`.*"
    table = markdown_table(header, lines, align="lrl" + "r" * len(HEALTH))
    return (
        f"{table}\nCoordination gain in nats per token; entropy in nats of the experts' usage in the block where it is "
        "least; experts with less than a tenth of an even share, over all blocks. Usage and draws are means of the "
        f"last lines of the training log. {_what_they_are(line[2] for line in lines)} {_made(results)}"
    )


def _what_they_are(labels: Iterable[str]) -> str:
    """Recipe and changes of the variants, for those who read a table."""
    told = []
    for name in dict.fromkeys(label.partition(" ")[0] for label in labels):
        recipe, settings = VARIANTS.get(name, (name, {}))
        told.append(f"{name} is `{' '.join(filter(None, (recipe, as_words(settings))))}`")
    return f"Variants: {', '.join(told)}."


def _made(results: Results) -> str:
    seeds = sorted({row.seed for row in results.rows if row.seed is not None})
    common = as_words(common_changes(results))
    changed = f" All with `{common}`." if common else ""
    return f"Seeds: {', '.join(map(str, seeds))}.{changed} Made by `emoe reproduce scaling`, {source_of(results)}."
