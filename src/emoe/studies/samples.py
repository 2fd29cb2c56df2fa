"""The first samples of pools of text side by side, as a page of Markdown."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape as escape_html

from emoe.reporting.recipes import as_typed, common_changes, parse, without
from emoe.reporting.results import Results, method_rank
from emoe.reporting.text import VARIANTS
from emoe.studies.pools import Archive, PoolKey
from emoe.studies.stages import SHOWN

_SIGNS = re.compile(r"([\\`*_{}\[\]()#+\-.!|~$])")


def escape(text: str) -> str:
    """Escape text for Markdown."""
    return _SIGNS.sub(r"\\\1", escape_html(text, quote=False))


def samples_page(pools: Sequence[Archive], results: Results, tables: str) -> str:
    """For every text and NFE the first samples of each pool; `tables` is the page that has their numbers."""
    changes = common_changes(pool.manifest["recipe"] for pool in pools)
    everywhere = f" All with `{as_typed(changes)}`." if changes else ""
    parts = [
        f"# Samples\n\nThe first {SHOWN} of each pool, not chosen, by the moving average of the weights; special "
        f"tokens by their names. A low generative perplexity can hide repetition: read them beside `{tables}`."
        f"{everywhere}\n"
    ]
    order = sorted(pools, key=lambda pool: (method_rank(pool.manifest["method"]), pool.manifest["recipe"], pool.path))
    for data in sorted({pool.manifest["data"] for pool in pools}):
        own = [pool for pool in order if pool.manifest["data"] == data]
        for nfe in sorted({key.nfe for pool in own for key in pool.keys()}):
            lines = [f"## {escape(data)}, NFE {nfe}\n"]
            for pool in own:
                for key in [PoolKey(nfe), *(PoolKey(nfe, name) for name in VARIANTS)]:
                    if shown := pool.manifest["pools"].get(str(key), {}).get("shown", ()):
                        title = _title(pool, key, results, changes)
                        lines += [f"**{title}**\n", *(f"- {escape(text)}" for text in shown), ""]
            parts.append("\n".join(lines))
    return "\n".join(parts)


def _title(pool: Archive, key: PoolKey, results: Results, common: Mapping[str, str]) -> str:
    recipe, seed = parse(pool.manifest["recipe"]), pool.manifest["seed"]
    own = as_typed(without(recipe.changes, common))
    variant = VARIANTS[key.variant] if key.variant else ""
    words = [results.label(pool.manifest["method"]), f"({own})" * bool(own), f"seed {seed}" * bool(seed), variant]
    return escape(", ".join(filter(None, words)))
