"""The results contract: strict files, merging, means over seeds, styles of methods, provenance."""

from __future__ import annotations

import json
import math
import multiprocessing
import re
import subprocess
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from emoe.figures.base import CYCLE
from emoe.reporting import provenance
from emoe.reporting.provenance import describe_machine, git_commit, source_commit
from emoe.reporting.recipes import paper_numbers
from emoe.reporting.results import IDENTITY, Results, ResultsError, Row, RunInfo, mean_over_seeds, method_rank, record

ROOT = Path(__file__).parents[2]
STYLE = {"label": "My method", "colour": "#123abc"}


def run(date: str = "2025-01-01T00:00:00Z", **changes: object) -> RunInfo:
    fields = dict(command="make toy", commit="abc", device="cpu", torch="2", python="3.11", date=date, wall_s=1.5)
    return RunInfo(**(fields | changes))


def row(**changes: object) -> Row:
    fields = dict(task="toy", data="8-modes", method="emoe", recipe="toy-emoe", seed=0, nfe=1, metric="validity")
    return Row(**(fields | dict(value=87.6, stderr=0.6, n=3000) | changes))


def test_a_file_round_trips_byte_for_byte(tmp_path):
    rows = [row(seed=seed, nfe=nfe) for seed in (1, 0) for nfe in (None, 32, 4)]
    Results().add(run(), rows).save(tmp_path / "a.json")
    Results.load(tmp_path / "a.json").save(tmp_path / "b.json")
    Results().add(run(), rows[::-1]).save(tmp_path / "c.json")
    first = (tmp_path / "a.json").read_bytes()
    assert first == (tmp_path / "b.json").read_bytes() == (tmp_path / "c.json").read_bytes()
    lines = [json.loads(line.rstrip(",")) for line in first.decode().splitlines() if '"validity"' in line]
    assert [line["nfe"] for line in lines] == [None, 4, 32] * 2 and b'"methods"' not in first
    Results().save(tmp_path / "empty.json")
    assert Results.load(tmp_path / "empty.json").rows == []


@pytest.mark.parametrize("path", sorted((ROOT / "results").glob("t*y.json")), ids=lambda path: path.name)
def test_recorded_files_are_saved_as_they_are(path, tmp_path):
    Results.load(path).save(tmp_path / path.name)
    assert (tmp_path / path.name).read_bytes() == path.read_bytes()


# Text of a file | what is put in its place | fragment of the message.
FAULTS = """
"value": 2.0 | "value": NaN | rows[1].value: must be a finite number, got nan
"value": 2.0 | "value": "2" | rows[1].value: expected whole number or number, got '2'
"seed": 1, | "seed": true, | rows[1].seed: expected whole number or none, got True
"seed": 1, | "seed": 0, | rows[1]: the same task
"seed": 1, | "seed": 1, "colour": "red", | rows[1].colour: unknown field of Row
"nfe": 1, "metric": "validity", "convention": null, "value": 2.0 | "nfe": 1 | rows[1].metric: missing
"rows": [ | "rows": [3, | rows[0]: expected the fields of Row, got 3
"run": "2025 | "run": "x2025 | is not among the runs
2025-01-01T | today | .date: expected an ISO date
#123abc | red | methods['x'].colour: expected #rrggbb
My method |   | methods['x'].label: expected text that is not empty
"methods": { | "more": { | expected objects "runs" and perhaps "methods", a list "rows", no other keys
"runs": { | "runs": {"a": 1, "a": 2, | not valid JSON: a key occurs twice
"rows": [ | <<<<<<< HEAD | not valid JSON
"""


@pytest.mark.parametrize("fault", FAULTS.strip().splitlines())
def test_a_faulty_file_is_refused_with_the_position(tmp_path, fault):
    path = tmp_path / "toy.json"
    record(path, run(), [row(), row(seed=1, value=2.0, n=7)], {"x": STYLE})
    old, new, message = fault.split(" | ")
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(ResultsError, match=re.escape(message)) as caught:
        Results.load(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_records_are_checked_when_they_are_made():
    with pytest.raises(ResultsError, match="value: must be a finite number, got nan"):
        row(value=math.nan)
    with pytest.raises(ResultsError, match="date: expected an ISO date"):
        run(date="2025-01-01")
    assert run().id == run(wall_s=9.0).id and re.fullmatch(r"20250101-[0-9a-f]{8}", run().id)
    assert len({run().id, run(command="other").id, run(commit="d").id, run(device="gpu").id}) == 4


def test_newer_rows_replace_older_ones_and_unused_runs_go():
    old, new = run("2025-01-01T00:00:00Z"), run("2025-01-02T00:00:00+00:00")
    for first, second in ((old, new), (new, old)):
        results = Results().add(first, [row(value=1.0 if first is old else 2.0)])
        results.merge(Results().add(second, [row(value=1.0 if second is old else 2.0)]))
        assert [item.value for item in results.rows] == [2.0] and list(results.runs) == [new.id]
    others = [replace(row(), **{key: 7 if key in ("seed", "nfe") else "other"}) for key in IDENTITY]
    assert len(Results().add(old, [row(), *others]).rows) == 9  # each part of the identity counts
    kept = Results().add(old, [row(), row(seed=1)]).add(new, [row(value=3.0)])
    assert sorted(kept.runs) == sorted([old.id, new.id]) and len(kept.rows) == 2


def test_styles_of_methods_are_kept_and_the_newest_wins(tmp_path):
    old, new = run("2025-01-01T00:00:00Z"), run("2025-01-02T00:00:00Z")
    path = tmp_path / "a.json"
    record(path, old, [row(method="mine")], {"mine": STYLE, "other": STYLE})
    record(path, new, [row(method="mine", seed=1)], {"mine": STYLE | {"label": "Mine, again"}})
    results = Results.load(path).merge(Results().add(old, [row(seed=3)], {"mine": STYLE}))
    assert results.only(method="mine").label("mine") == "Mine, again" and results.colour("other") == "#123abc"


def test_labels_and_colours_of_methods_in_recorded_rows():
    results = Results().add(run(), [row(method=name) for name in ("zeta", "emoe", "alpha", "mdlm", "data")])
    assert sorted({row.method for row in results.rows}, key=method_rank) == ["mdlm", "emoe", "alpha", "zeta", "data"]
    assert (results.label("emoe-plus"), results.colour("emoe-plus")) == ("E-MoE+", "#e15759")
    assert (results.label("alpha"), results.label("ideal")) == ("alpha", "ideal factorised")
    unknown, known = (
        {results.colour(name) for name in names} for names in (("alpha", "zeta"), ("mdlm", "vadd", "emoe"))
    )
    assert len(unknown) == 2 and unknown <= set(CYCLE) - known


def test_rows_are_selected_by_values_and_collections():
    results = Results().add(run(), [row(seed=seed, nfe=nfe) for seed in range(3) for nfe in (1, 2)])
    assert len(results.select(nfe=1)) == 3 and len(results.select(nfe=(1, 2), seed=[0, 2])) == 4
    assert results.select(method="mdlm") == [] and results.seeds == [0, 1, 2]
    results.add(run(), [row(method="data"), row(recipe=None)])
    assert len(results.models.rows) == 6


def test_a_mean_over_seeds():
    rows = [row(seed=seed, value=value) for seed, value in enumerate((1.0, 2.0, 6.0))]
    mean, stderr = mean_over_seeds(rows)
    assert mean == 3.0 and stderr == pytest.approx(math.sqrt(7.0 / 3.0))
    assert mean_over_seeds(rows[:1]) == (1.0, None) and mean_over_seeds(rows[:1], measured=True) == (1.0, 0.6)
    assert mean_over_seeds([]) is None
    with pytest.raises(ResultsError, match="needs one nfe, found 1, 2"):
        mean_over_seeds([*rows, row(nfe=2)])


def record_five(path: Path, seed: int) -> None:
    for nfe in range(5):
        record(path, run(), [row(seed=seed, nfe=nfe)])


def test_processes_that_record_at_once_lose_nothing(tmp_path):
    path = tmp_path / "deep" / "toy.json"
    with ProcessPoolExecutor(4, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(record_five, [path] * 4, range(4)))
    assert {(item.seed, item.nfe) for item in Results.load(path).rows} == {(s, n) for s in range(4) for n in range(5)}


def test_the_commit_says_when_the_source_differs_and_is_asked_for_once(tmp_path, monkeypatch, request):
    source = tmp_path / "src" / "emoe" / "provenance.py"
    source.parent.mkdir(parents=True)
    source.write_text("1\n")
    monkeypatch.delenv("EMOE_COMMIT", raising=False)
    monkeypatch.setattr(provenance, "__file__", str(source))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    request.addfinalizer(git_commit.cache_clear)

    def git(*words: str) -> str:
        name = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        return subprocess.run(["git", "-C", tmp_path, *name, *words], check=True, capture_output=True, text=True).stdout

    def commit() -> str:
        git_commit.cache_clear()
        return source_commit()

    assert commit() == "unknown"
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "one")
    head = git("rev-parse", "HEAD").strip()
    (tmp_path / "notes.txt").write_text("outside src/")
    assert commit() == head
    source.write_text("2\n")
    assert source_commit() == head and commit() == f"{head}-dirty"
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "site-packages" / "provenance.py"))
    (tmp_path / "site-packages").mkdir()
    assert commit() == "unknown"
    monkeypatch.setenv("EMOE_COMMIT", "feedbeef")
    info = RunInfo(command="x", wall_s=0, **describe_machine("cpu"))
    assert info.commit == source_commit() == "feedbeef" and re.fullmatch(r"cpu \(\d+ cores\)", info.device)


def test_the_papers_numbers():
    numbers = paper_numbers()
    assert numbers["8-modes", "emoe", "validity", 1, None] == 94.4 and all(map(math.isfinite, numbers.values()))
    assert numbers["binarized-mnist", "vadd", "bpd", None, None] == 0.064
    assert numbers["lm1b", "emoe", "gen_ppl", 1, "route_tau=0"] == 1079.5
    assert ("8-modes", "emoe", "overlap", 1, None) not in numbers
