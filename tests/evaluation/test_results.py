"""The results contract: strict files, merging, means over seeds, provenance."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from emoe.evaluation import machine
from emoe.evaluation.paper import paper_rows, paper_value
from emoe.evaluation.results import Results, ResultsError, Row, RunInfo, describe_machine, load_once, record


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
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "b.json", "c.json"]
    lines = [line for line in first.decode().splitlines() if '"validity"' in line]
    assert len(lines) == len(rows) and all(json.loads(line.rstrip(",")) for line in lines)
    assert [item.nfe for item in Results.load(tmp_path / "a.json").rows][:3] == [None, 4, 32]


def test_a_file_is_read_once_until_it_changes(tmp_path):
    path = tmp_path / "a.json"
    record(path, run(), [row(seed=0)])
    first = load_once(path)
    assert load_once(path) is first and first.rows == Results.load(path).rows
    record(path, run(), [row(seed=1)])
    assert [one.seed for one in load_once(path).rows] == [0, 1]


def test_empty_results_can_be_saved(tmp_path):
    Results().save(tmp_path / "a.json")
    assert Results.load(tmp_path / "a.json").rows == []


def spoil(tree: dict, key: str, value: object) -> dict:
    tree["rows"][1][key] = value
    return tree


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tree: spoil(tree, "value", math.nan), r"rows\[1\]\.value: must be finite"),
        (lambda tree: spoil(tree, "stderr", math.inf), r"rows\[1\]\.stderr: must be finite"),
        (lambda tree: spoil(tree, "value", "87"), r"rows\[1\]\.value: expected a number"),
        (lambda tree: spoil(tree, "value", None), r"rows\[1\]\.value: expected a number"),
        (lambda tree: spoil(tree, "nfe", 1.5), r"rows\[1\]\.nfe: expected a whole number or null"),
        (lambda tree: spoil(tree, "seed", True), r"rows\[1\]\.seed: expected a whole number"),
        (lambda tree: spoil(tree, "colour", "red"), r"rows\[1\]\.colour: unknown key"),
        (lambda tree: spoil(tree, "run", "nobody"), r"rows\[1\]\.run: 'nobody' is not among the runs"),
        (lambda tree: spoil(tree, "seed", 0), r"rows\[1\]: the same task"),
        (lambda tree: tree["rows"][1].pop("metric") and tree, r"rows\[1\]\.metric: missing"),
        (lambda tree: tree["rows"].append(3) or tree, r"rows\[2\]\.expected an object, got 3"),
        (
            lambda tree: next(iter(tree["runs"].values())).update(date="today") or tree,
            r"runs\['.*'\]\.date: expected",
        ),
        (
            lambda tree: next(iter(tree["runs"].values())).pop("commit") and tree,
            r"runs\['.*'\]\.commit: missing",
        ),
        (lambda tree: tree | {"more": 1}, r'"runs" and "rows" and no others'),
        (lambda tree: tree | {"rows": {}}, r'"rows" to be a list'),
    ],
)
def test_a_faulty_file_is_refused_with_its_place(tmp_path, change, message):
    path = tmp_path / "toy.json"
    Results().add(run(), [row(), row(seed=1)]).save(path)
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(ResultsError, match=message) as caught:
        Results.load(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", '{"runs": {"a": 1, "a": 2}, "rows": []}', "<<<<<<< HEAD"])
def test_what_is_not_json_is_refused(tmp_path, text):
    (tmp_path / "toy.json").write_text(text)
    with pytest.raises(ResultsError, match=r"toy\.json: not valid JSON"):
        Results.load(tmp_path / "toy.json")


def test_a_row_is_checked_when_it_is_made():
    with pytest.raises(ResultsError, match=r"row\.value: must be finite"):
        row(value=math.nan)
    with pytest.raises(ResultsError, match=r"run\.date: expected an ISO date"):
        run(date="2025-01-01")


def test_newer_rows_replace_older_ones_and_unused_runs_go():
    old, new = run("2025-01-01T00:00:00Z"), run("2025-01-02T00:00:00+00:00")
    for first, second in ((old, new), (new, old)):
        results = Results().add(first, [row(value=1.0 if first is old else 2.0)])
        results.merge(Results().add(second, [row(value=1.0 if second is old else 2.0)]))
        assert [item.value for item in results.rows] == [2.0]
        assert list(results.runs) == [new.id]
    kept = Results().add(old, [row(), row(seed=1)]).add(new, [row(value=3.0)])
    assert sorted(kept.runs) == sorted([old.id, new.id]) and len(kept.rows) == 2


@pytest.mark.parametrize("key", ["task", "data", "method", "recipe", "metric", "convention", "seed", "nfe"])
def test_each_part_of_the_identity_counts(key):
    other = replace(row(), **{key: 7 if key in ("seed", "nfe") else "other"})
    assert len(Results().add(run(), [row(), other]).rows) == 2


def test_run_ids_are_short_and_deterministic():
    assert run().id == run(wall_s=9.0).id and re.fullmatch(r"20250101-[0-9a-f]{8}", run().id)
    assert len({run().id, run(command="other").id, run(commit="d").id, run(device="gpu").id}) == 4


def test_select_takes_values_and_collections():
    results = Results().add(run(), [row(seed=seed, nfe=nfe) for seed in range(3) for nfe in (1, 2)])
    assert len(results.select(nfe=1)) == 3 and len(results.select(nfe=(1, 2), seed=[0, 2])) == 4
    assert results.select(method="mdlm") == []
    with pytest.raises(ResultsError, match="no such field of a row: color"):
        results.select(color="red")


def test_mean_over_seeds():
    results = Results().add(run(), [row(seed=seed, value=value) for seed, value in enumerate((1.0, 2.0, 6.0))])
    mean, stderr, seeds = results.mean_over_seeds(metric="validity", nfe=1)
    assert (mean, seeds) == (3.0, 3) and stderr == pytest.approx(math.sqrt(7.0 / 3.0))
    assert results.mean_over_seeds(seed=0) == (1.0, None, 1)
    assert results.mean_over_seeds(nfe=5) is None
    results.add(run(), [row(nfe=2)])
    with pytest.raises(ResultsError, match="needs one nfe, found 1, 2"):
        results.mean_over_seeds(metric="validity")


def python(code: str, *words: str) -> subprocess.Popen[bytes]:
    """Start a fresh interpreter that finds this source tree."""
    source = str(Path(__file__).parents[2] / "src")
    return subprocess.Popen([sys.executable, "-c", code, *words], env=os.environ | {"PYTHONPATH": source})


def test_processes_that_record_at_once_lose_nothing(tmp_path):
    path = tmp_path / "deep" / "toy.json"
    code = f"""
import sys
from emoe.evaluation.results import Row, RunInfo, record
for nfe in range(5):
    record({str(path)!r}, {run()!r}, [Row(**({vars(row())!r} | dict(seed=int(sys.argv[1]), nfe=nfe)))])
"""
    workers = [python(code, str(seed)) for seed in range(4)]
    assert [worker.wait(60) for worker in workers] == [0] * 4
    assert {(item.seed, item.nfe) for item in Results.load(path).rows} == {(s, n) for s in range(4) for n in range(5)}


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "toy.json"
    record(path, run(), [row()])
    before = path.read_bytes()

    def broken(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("emoe.files.os.replace", broken)
    with pytest.raises(OSError, match="disk full"):
        record(path, run(), [row(seed=1)])
    assert path.read_bytes() == before and [entry.name for entry in tmp_path.iterdir()] == ["toy.json"]


def test_the_machine_describes_itself(monkeypatch):
    monkeypatch.setenv("EMOE_COMMIT", "feedbeef")
    found = describe_machine("cpu")
    assert found["commit"] == "feedbeef" and re.fullmatch(r"cpu \(\d+ cores\)", found["device"])
    assert RunInfo(command="x", wall_s=0, **found).when.tzinfo is not None


def test_the_commit_says_when_the_source_differs(tmp_path, monkeypatch):
    monkeypatch.delenv("EMOE_COMMIT", raising=False)
    source = tmp_path / "src" / "emoe" / "machine.py"
    source.parent.mkdir(parents=True)
    source.write_text("1\n")
    monkeypatch.setattr(machine, "__file__", str(source))

    def git(*words: str) -> str:
        name = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        return subprocess.run(["git", "-C", tmp_path, *name, *words], check=True, capture_output=True, text=True).stdout

    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert machine.source_commit() == "unknown"
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "one")
    head = git("rev-parse", "HEAD").strip()
    (tmp_path / "notes.txt").write_text("outside src/")
    assert machine.source_commit() == head
    source.write_text("2\n")
    assert machine.source_commit() == f"{head}-dirty"
    monkeypatch.setattr(machine, "__file__", str(tmp_path / "site-packages" / "machine.py"))
    (tmp_path / "site-packages").mkdir()
    assert machine.source_commit() == "unknown"


def test_reading_results_needs_no_torch():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import emoe.evaluation.readme, emoe.evaluation.toy_report, emoe.evaluation.results as r\n"
        "assert r.describe_machine()['torch'] == 'none'\n"
    )
    assert python(code).wait(60) == 0


def test_the_papers_numbers():
    assert paper_value("toy", "8-modes", "emoe", "validity", 1) == 94.4
    assert paper_value("toy", "swiss-roll", "mdlm", "validity", 32) == 96.9
    assert paper_value("mnist", "binarized-mnist", "vadd", "bpd", None) == 0.064
    assert paper_value("lm1b", "lm1b", "emoe", "gen_ppl", 1) == 643.8
    assert paper_value("lm1b", "lm1b", "emoe", "gen_ppl", 1, variant="greedy") == 1079.5
    assert paper_value("lm1b", "lm1b", "ar", "mauve", 128) == 96.48
    assert paper_value("lm1b", "lm1b", "mdlm", "ppl", None) == 31.9
    assert paper_value("toy", "8-modes", "emoe", "overlap", 1) is None
    keys = [tuple(v for k, v in item.items() if k not in ("value", "std", "table")) for item in paper_rows()]
    assert len(keys) == len(set(keys)) and all(math.isfinite(item["value"]) for item in paper_rows())
