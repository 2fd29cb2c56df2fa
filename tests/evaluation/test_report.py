"""The report: one file, nothing loaded, nothing unescaped, the best highlighted."""

from __future__ import annotations

import base64
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from emoe.evaluation.curves import curves_html, read_curve, thin, ticks
from emoe.evaluation.grid import Cell
from emoe.evaluation.report import Beside, Curves, Picture, Table, Text, write_report
from emoe.evaluation.results import Results, Row, RunInfo
from emoe.evaluation.toy_report import toy_sections

EVIL = "<script>alert('x')</script> & \"quotes\""
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


class Page(HTMLParser):
    """Tags with their attributes, and the text of the page."""

    VOID = frozenset({"meta", "img", "br", "line", "circle", "polyline"})

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


def write(tmp_path: Path, *sections: object, title: str = "A title") -> tuple[str, Page]:
    path = tmp_path / "out" / "report.html"
    write_report(path, title, sections)
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert page.open == [], "every tag is closed"
    assert [entry.name for entry in path.parent.iterdir()] == ["report.html"]
    return text, page


def results() -> Results:
    rows = [
        Row(
            task="toy",
            data=data,
            method=m,
            recipe=f"toy-{m}",
            seed=s,
            nfe=nfe,
            metric=metric,
            value=v + s,
            n=3000,
        )
        for data in ("8-modes", "swiss-roll")
        for m, v in (("mdlm", 40.0), ("emoe", 87.0), ("ideal", 41.0))
        for nfe in (1, 2)
        for metric in ("validity", "overlap")
        for s in (0, 1)
    ]
    run = RunInfo(
        command=f"emoe {EVIL}",
        commit="c0ffee",
        device="a GPU",
        torch="2",
        python="3",
        date="2025-01-01T00:00:00Z",
        wall_s=60,
    )
    return Results().add(run, rows)


def full(tmp_path: Path) -> tuple[str, Page]:
    (tmp_path / "p.png").write_bytes(PNG)
    pictures = [Picture(tmp_path / "p.png", f"caption {EVIL}", f"alt {EVIL}"), Picture(PNG, "again")]
    curves = [Curves({"E-MoE": [(0, 3.0), (10, 1.0)], EVIL: [(0, 2.0), (10, 1.5)]}, EVIL, EVIL)]
    return write(tmp_path, *toy_sections(results(), pictures=pictures, curves=curves), title=f"Title {EVIL}")


def test_nothing_is_loaded_from_anywhere(tmp_path):
    text, page = full(tmp_path)
    assert "http://" not in text and "https://" not in text and "@import" not in text and "url(" not in text
    for tag, attributes in page.tags:
        assert tag not in ("script", "link", "iframe", "object", "base")
        assert not any(name.startswith("on") for name in attributes)
        assert "href" not in attributes and (attributes.get("src") or "data:").startswith("data:")
    policy = next(a["content"] for tag, a in page.tags if tag == "meta" and "http-equiv" in a)
    assert policy.startswith("default-src 'none'")


def test_all_text_is_escaped(tmp_path):
    text, page = full(tmp_path)
    assert "<script" not in text and text.count("&lt;script&gt;") >= 6
    assert EVIL in "".join(page.words)
    assert any(a.get("alt") == f"alt {EVIL}" for tag, a in page.tags if tag == "img")


def test_pictures_are_embedded(tmp_path):
    _, page = full(tmp_path)
    sources = [a["src"] for tag, a in page.tags if tag == "img"]
    assert len(sources) == 2
    for source in sources:
        head, _, data = source.partition(",")
        assert head == "data:image/png;base64" and base64.b64decode(data) == PNG
    with pytest.raises(ValueError, match="not a PNG, JPEG, GIF, WebP or SVG picture: bytes"):
        write(tmp_path, Picture(b"hello", ""))


def test_the_toy_report_says_what_it_must(tmp_path):
    text, page = full(tmp_path)
    words = " ".join(page.words)
    for part in (
        "Why few-step samples fall apart",
        "Validity (%), 8-modes",
        "Overlap (%), Swiss-roll",
        "How to read",
    ):
        assert part in words
    for part in (
        "ideal factorised",
        "c0ffee",
        "a GPU",
        "torch 2",
        "2 seeds (0, 1)",
        "3,000 samples",
        "(94.4)",
    ):
        assert part in words
    assert page.count("table") == 5 and page.count("h1") == 1
    assert "prefers-color-scheme: dark" in text and 'name="viewport"' in text


def test_the_best_of_a_column_is_highlighted_and_yardsticks_are_not(tmp_path):
    rows = [["a", Cell(1.0, 0.1), "3 s"], ["b", Cell(2.0, paper=9.0), "2 s"], ["ref", Cell(5.0), "1 s"]]
    text, _ = write(tmp_path, Table(["", "x", "y"], rows, better="high", reference=[2]))
    assert re.findall(r'<td class="best"><b>(.*?)</b>', text) == ["3 s", "2.0"]
    assert text.count('class="reference first-reference"') == 1 and "±0.1" in text and "(9.0)" in text
    text, _ = write(tmp_path, Table(["", "x", "y"], rows, better="low", reference=[2]))
    assert re.findall(r'<td class="best"><b>(.*?)</b>', text) == ["1.0", "2 s"]


def test_code_and_side_by_side(tmp_path):
    text, page = write(tmp_path, Beside([Text(["run `a < b`"], "T"), Table(["h"], [])]), Text(["end"]))
    assert "<code>a &lt; b</code>" in text and 'class="beside"' in text and page.count("th") == 1


def test_curves_drop_what_is_not_finite():
    chart = curves_html(Curves({"a": [(0, 1.0), (1, math.nan), (2, math.inf), (3, 2.0)], "empty": []}, "t", "y"))
    points = re.search(r'points="(.*?)"', chart)[1].split()
    assert len(points) == 2 and chart.count("<polyline") == 1 and "nan" not in chart
    assert "Nothing to draw" in curves_html(Curves({"a": [(0, math.nan)]}))
    assert "<polyline" in curves_html(Curves({"a": [(5, 2.0)]}))
    assert ">32</text>" in curves_html(Curves({"a": [(1, 1.0), (32, 2.0)]}, log_x=True))


def test_methods_keep_their_colour():
    alone, both = (
        curves_html(Curves({n: [(0, 1.0), (1, 2.0)] for n in names})) for names in (["E-MoE"], ["mine", "E-MoE"])
    )
    assert 'polyline class="s2"' in alone and re.findall(r'polyline class="(s\d)"', both) == ["s0", "s2"]


def test_thinning_and_ticks():
    points = [(x, 2.0 * x) for x in range(10_000)]
    few = thin(points)
    assert len(few) <= 300 and all(y == pytest.approx(2 * x) for x, y in few)
    assert ticks(0.0, 1.0) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert ticks(37.0, 99.0) == [40, 60, 80] and ticks(3.0, 3.0) and len(ticks(-1e-9, 1e-9)) > 1


def test_metrics_files_are_read(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [
        json.dumps({"step": 1, "loss": 2.5}),
        json.dumps({"step": 2, "time": 1}),
        "[]",
        '{"step": 3, "lo',
    ]
    path.write_text("\n".join(lines))
    assert read_curve(path, "loss") == [(1.0, 2.5)]
