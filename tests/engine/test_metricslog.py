"""Lines of `metrics.jsonl`: on file at once, valid JSON, and each step exactly once after a kill."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from emoe.engine.metricslog import MetricsLog, read_metrics
from emoe.files import StorageError


def write(path: Path, first: int, last: int) -> None:
    with MetricsLog(path, first - 1) as log:
        for step in range(first, last + 1):
            log.write({"step": step, "loss": 1 / step})


def test_lines_are_on_file_at_once_and_valid_json(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path, 0) as log:
        values = {"a": math.nan, "b": math.inf, "c": -math.inf, "d": torch.tensor(0.5), "e": np.float32(2)}
        log.write({"step": 1, **values, "f": torch.tensor([1.0, math.inf]), "g": "text", "h": None, "i": True})
        line = path.read_text()
        log.sync()

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    assert json.loads(line, parse_constant=refuse)["a"] == "nan"
    (record,) = read_metrics(path)
    assert math.isnan(record["a"]) and record["b"] == math.inf and record["c"] == -math.inf
    assert [record[key] for key in "defghi"] == [0.5, 2.0, [1.0, "inf"], "text", None, True]
    with pytest.raises(ValueError, match="closed"):
        log.write({"step": 2})


@pytest.mark.parametrize("cut", [1, 5, 12, 25])
def test_after_a_kill_each_step_is_there_once(tmp_path: Path, cut: int) -> None:
    path, whole = tmp_path / "metrics.jsonl", tmp_path / "whole.jsonl"
    write(whole, 1, 9)
    write(path, 1, 6)
    path.write_bytes(path.read_bytes()[:-cut])  # torn in the middle of the last line
    assert [record["step"] for record in read_metrics(path)] == [1, 2, 3, 4, 5, 6][: 6 if cut == 1 else 5]
    write(path, 5, 9)  # a checkpoint of step 4
    assert path.read_bytes() == whole.read_bytes()
    write(path, 10, 9)  # nothing to drop
    assert path.read_bytes() == whole.read_bytes()


def test_a_restart_from_step_zero_empties_the_log(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n\xff\xfe garbage\n[3]\n{"loss": 1}\n{"step": 2')
    assert [record["step"] for record in read_metrics(path)] == [1]
    with MetricsLog(path, 0):
        pass
    assert path.read_bytes() == b"" and [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_log_that_cannot_be_written_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="metrics.jsonl"):
        MetricsLog(tmp_path / "file" / "metrics.jsonl", 0)
    if Path("/dev/full").exists():
        with MetricsLog(Path("/dev/full"), 0) as log, pytest.raises(StorageError, match="No space left"):
            log.write({"step": 1})
