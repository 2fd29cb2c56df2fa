"""The page of results: one file, nothing loaded, nothing unescaped, the best highlighted, curves as pictures."""

from __future__ import annotations

import base64
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from emoe.cli import main
from emoe.reporting.html import write_page
from emoe.reporting.results import Results, Row, RunInfo

EVIL = "<script>alert('x')</script> & \"quotes\""
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
VOID = {"meta", "img", "br"}


class Page(HTMLParser):
    """Tags with their attributes; every one is closed."""

    def __init__(self, path: Path):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.open += [tag] * (tag not in VOID)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def results(task: str) -> Results:
    versions = dict(commit="c0ffee", device="a GPU", torch="2", python="3")
    info = RunInfo(command=f"emoe {EVIL}", date="2025-01-01T00:00:00Z", wall_s=1, **versions)
    same = dict(task=task, data="8-modes", seed=0, n=9)
    rows = [
        Row(**same, method=method, recipe=f"{task}-{method}", nfe=nfe, metric=metric, value=value)
        for method, value in (("emoe", 90.0), ("mine", 95.0))
        for metric in ("validity", "overlap")
        for nfe in (1, 2)
    ]
    return Results().add(info, rows, {"mine": {"label": EVIL, "colour": "#123abc"}})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with a training log that a crash cut, and an evaluation."""
    folder = tmp_path / "run"
    results("toy").save(folder / "eval.json")
    (folder / "experiment.json").write_text('{"name": "toy-x", "seed": 0, "method": {"kind": "emoe"}}')
    lines = [f'{{"step": {step}, "loss": {3 / step}, "kl": 0.0}}' for step in (1, 2, 3)]
    (folder / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 4, "lo']))
    return folder


@pytest.mark.parametrize("task", ["toy", "of-ones-own"])
def test_the_page_needs_nothing_else_and_all_text_is_escaped(task, run, tmp_path):
    picture = tmp_path / "a.png"
    picture.write_bytes(PNG)
    path = tmp_path / "out" / "page.html"
    write_page(path, EVIL, results(task), pictures={picture: EVIL}, runs=[run])
    assert [entry.name for entry in path.parent.iterdir()] == ["page.html"]
    text, page = path.read_text(), Page(path)
    assert "<script" not in text and text.count("&lt;script&gt;") >= 6 and EVIL in unescape(text)
    assert not {tag for tag, _ in page.tags} & {"script", "link", "iframe", "object", "a"}
    assert all((attrs.get("src") or "data:").startswith("data:") for _, attrs in page.tags)
    policy = next(attrs["content"] for tag, attrs in page.tags if tag == "meta" and "http-equiv" in attrs)
    assert policy == "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    images = [str(attrs["src"]).partition(",") for tag, attrs in page.tags if tag == "img"]
    assert len(images) == 3 and {head for head, *_ in images} == {"data:image/png;base64"}  # NFE, picture, training
    assert PNG in [base64.b64decode(data) for *_, data in images]
    assert (
        text.count("<b>Validity (%)</b>") == 1
        and ">8-modes<" in text
        and "c0ffee" in text
        and "a GPU; torch 2, Python 3" in text
    )
    assert ("factorised step draws each of them alone" in text) == (task == "toy")
    assert text.count('<td class="best"><b>95.0</b></td>') == 4 and 'style="background:#123abc"' in text
    assert "prefers-color-scheme: dark" in text


def test_the_command_takes_a_results_file_or_a_run(run, tmp_path, capsys):
    assert main(["report", str(run)]) == 0 and capsys.readouterr().out == f"{run / 'eval.html'}\n"
    assert sum(tag == "img" for tag, _ in Page(run / "eval.html").tags) == 2
    results("toy").save(tmp_path / "toy.json")
    assert main(["report", str(tmp_path / "toy.json"), "--run", str(tmp_path / "none")]) == 2
    (run / "eval.json").unlink()
    assert main(["report", str(run)]) == 2 and f"make it with: emoe eval {run}" in capsys.readouterr().err
