"""Figures of the study of text, and its page of samples."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape as escape_html
from pathlib import Path
from typing import Any

from emoe.domains.text.data import Text
from emoe.reporting.cells import Line, Number, measure
from emoe.reporting.recipes import all_with, as_typed, common, parse
from emoe.reporting.results import Results, Row, method_rank
from emoe.reporting.table import models, steps_of
from emoe.reporting.text import SETTINGS, VARIANTS, data_of, in_setting
from emoe.studies.text_files import Archive, PoolKey

SHOWN = 2  # samples of each method at each NFE
_SIGNS = re.compile(r"([\\`*_{}\[\]()#+\-.!|~$])")


def escape(text: str) -> str:
    """Text that Markdown shows as it is."""
    return _SIGNS.sub(r"\\\1", escape_html(text, quote=False))


def samples_page(
    groups: Sequence[tuple[Text | None, Sequence[Archive]]], tables: str = "text.md", count: int = SHOWN
) -> str:
    """The first samples of every pool, side by side for each NFE; empty where there are none, or no words for them.

    `tables` is the page that has their numbers.
    """
    parts = []
    everything = [archive for text, archives in groups if text is not None for archive in archives]
    shared = common(parse(archive.manifest["recipe"]).changes for archive in everything)
    for text, archives in groups:
        if text is None:
            continue
        order = sorted(archives, key=_place)
        keys = sorted({key.nfe for archive in order for key in archive.keys()})
        for nfe in keys:
            lines = [f"## {escape(text.name)}, NFE {nfe}\n"]
            for archive in order:
                for key in (PoolKey(nfe), *(PoolKey(nfe, name) for name in VARIANTS)):
                    if archive.rows(key):
                        shown = text.decode(archive.tokens(key)[:count])
                        lines += [f"**{_title(archive, key, shared)}**\n", *(f"- {escape(one)}" for one in shown), ""]
            parts.append("\n".join(lines))
    if not parts:
        return ""
    told = (
        f"# Samples\n\nThe first {count} of each pool, not chosen, by the moving average of the weights; special "
        f"tokens by their names. A low generative perplexity can hide repetition: read them beside `{tables}`."
        f"{all_with(shared)}\n"
    )
    return "\n".join([told, *parts])


def with_earlier(page: str, earlier: str) -> str:
    """A page of samples, and what an earlier one has of pools that are not here; all of it only if both began alike.

    Pools stay where they were drawn. What is said of all of them at the beginning, such as fields that were changed in
    each, must hold for the earlier ones too.
    """
    (head, new), (before, old) = _taken_apart(page), _taken_apart(earlier)
    if head != before:
        return page
    sections = sorted({**old, **new}, key=_section_place)
    parts = [head]
    for section in sections:
        parts += [section, *({**old.get(section, {}), **new.get(section, {})}).values()]
    return "".join(parts).rstrip("\n") + "\n"


def _taken_apart(page: str) -> tuple[str, dict[str, dict[tuple[str, int], str]]]:
    """What comes before the sections; for each heading its titles, numbered if they are equal, and what they head."""
    head, *sections = re.split(r"^(?=## )", page.rstrip("\n") + "\n\n", flags=re.MULTILINE)
    found = {}
    for section in sections:
        heading, *entries = re.split(r"^(?=\*\*)", section, flags=re.MULTILINE)
        titles = [entry.partition("\n")[0] for entry in entries]
        found[heading] = {(title, titles[:i].count(title)): entries[i] for i, title in enumerate(titles)}
    return head, found


def _section_place(heading: str) -> tuple[str, int]:
    data, _, nfe = heading.strip().rpartition(", NFE ")
    return data, int(nfe)


def _place(archive: Archive) -> tuple[float, str, int]:
    return method_rank(archive.manifest["method"]), archive.manifest["recipe"], archive.manifest["seed"]


def _title(archive: Archive, key: PoolKey, shared: Mapping[str, str]) -> str:
    told = archive.manifest
    changed = as_typed({name: text for name, text in parse(told["recipe"]).changes.items() if name not in shared})
    words = [Results().label(told["method"]), f"({changed})" if changed else ""]
    words += [f"seed {told['seed']}" if told["seed"] else "", VARIANTS[key.variant].label if key.variant else ""]
    return escape(", ".join(filter(None, words)))


def _figure(width: float, height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    picture = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(picture)
    return picture


def _save(picture: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(path, dpi=120)


def curves(results: Results, path: Path) -> bool:
    """Generative perplexity with the entropy of the samples beside it, and MAUVE, over NFE; False without numbers."""
    panels = {"gen_ppl": SETTINGS[0], "entropy": None, "mauve": None}
    sets = [data for data in data_of(results) if results.select(data=data, metric="gen_ppl")]
    if not sets:
        return False
    picture = _figure(4.0 * len(panels), 3.4 * len(sets))
    for line, data in zip(picture.subplots(len(sets), len(panels), squeeze=False), sets, strict=True):
        part = results.only(data=data)
        groups, real = models(part), Line((), part.select(method="data"))
        for panel, (metric, setting) in zip(line, panels.items(), strict=True):
            for model in groups:
                for variant in (None, *VARIANTS.values()):
                    changed, label, style = None, model.label, "-"
                    if variant is not None:
                        changed, label, style = variant.name, f"{model.label}, {variant.label}", variant.line
                    name = in_setting(setting, changed) if setting else changed
                    _line(panel, model, metric, name, label, results.colour(model.method), style)
            level = Number(metric, {"convention": setting}).mean(real)
            if level is not None:
                panel.axhline(level.mean, color="0.4", linestyle="--", linewidth=1, label="held-out text")
            steps = steps_of(groups, metric)
            panel.set_xscale("log", base=2)
            panel.set_yscale("log" if metric == "gen_ppl" else "linear")
            panel.set(title=f"{data}: {measure(metric).label}", xlabel="NFE", xticks=steps,
                      xticklabels=list(map(str, steps)))  # fmt: skip
            panel.grid(color="0.92")
    _legend(picture)
    _save(picture, path)
    return True


def _line(panel: Any, model: Line, metric: str, convention: str | None, label: str, colour: str, style: str) -> None:
    line, number = model.where(convention=convention), Number(metric, measured=True)
    means = [(nfe, mean) for nfe in steps_of([line], metric) if (mean := number.at(nfe=nfe).mean(line)) is not None]
    if means:
        panel.errorbar(
            [nfe for nfe, _ in means], [mean.mean for _, mean in means], yerr=[mean.stderr or 0.0 for _, mean in means],
            marker="o", markersize=3.5, linewidth=1.2, capsize=2, label=label, color=colour, linestyle=style,
        )  # fmt: skip


def _legend(picture: Any) -> None:
    found = [panel.get_legend_handles_labels() for panel in picture.axes]
    handles = {name: line for lines, names in found for line, name in zip(lines, names, strict=True)}
    if handles:
        picture.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=5, fontsize=8, frameon=False)


def training_points(rows: Iterable[Row], metric: str) -> list[tuple[int, float]]:
    """(step, mean over seeds) of a number that training logged."""
    points: dict[int, list[float]] = {}
    for row in rows:
        if row.metric == metric and str(row.convention).startswith("step "):
            points.setdefault(int(str(row.convention).removeprefix("step ")), []).append(float(row.value))
    return [(step, math.fsum(values) / len(values)) for step, values in sorted(points.items())]


def blocks_of(rows: Iterable[Row]) -> list[int]:
    """Routed blocks of a model."""
    return sorted({int(found[1]) for row in rows if (found := re.search(r"/block(\d+)$", row.metric))})


def latent_curves(results: Results, path: Path) -> bool:
    """Over training: usage entropy and route KL of every block, and both terms of the loss; False without a latent."""
    found = [
        (data, model.label, model.rows)
        for data in data_of(results)
        for model in models(results.only(data=data))
        if any(value for _, value in training_points(model.rows, "train_kl"))
    ]
    if not found:
        return False
    picture = _figure(12.0, 2.8 * len(found))
    names = {"usage_entropy": "entropy of usage (nats)", "route_kl": "route KL (nats per position)"}
    for line, (data, label, rows) in zip(picture.subplots(len(found), 3, squeeze=False), found, strict=True):
        for panel, (metric, title) in zip(line[:2], names.items(), strict=True):
            for block in blocks_of(rows):
                _course(panel, rows, f"{metric}/block{block}", f"block {block}", f"C{(block - 1) % 10}")
            panel.set_title(f"{label}: {title}", fontsize=9)
            if not blocks_of(rows):
                panel.set_axis_off()
                panel.set_title("")
        for metric, name, colour in (("train_recon", "reconstruction", "0.3"), ("train_kl", "KL", "C3")):
            _course(line[2], rows, metric, name, colour)
        line[2].set_title(f"{label} on {data}: terms of the loss (nats per token)", fontsize=9)
        for panel in line:
            panel.set_xlabel("training step", fontsize=8)
            panel.grid(color="0.92")
            if panel.get_legend_handles_labels()[0]:
                panel.legend(fontsize=7)
    _save(picture, path)
    return True


def _course(panel: Any, rows: Sequence[Row], metric: str, label: str, colour: str) -> None:
    points = training_points(rows, metric)
    if points:
        panel.plot(*zip(*points, strict=True), marker=".", markersize=3, linewidth=1.2, label=label, color=colour)
