"""Results as small JSON files: rows of numbers, each with the run (command, commit, machine) behind it.

`results/<task>.json` holds `{"runs": {id: run}, "rows": [row, ...]}`. Separate runs merge into one file.
Everything that prints a number of ours (tables, README, reports) reads these files and nothing else.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import operator
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from emoe.evaluation.machine import describe_machine as describe_machine
from emoe.files import locked, replace_file

T = TypeVar("T")
IDENTITY = ("task", "data", "method", "recipe", "seed", "nfe", "metric", "convention")
_identity: Callable[[object], tuple[Any, ...]] = operator.attrgetter(*IDENTITY)


class ResultsError(ValueError):
    """Results that break the contract: one line per fault, with the file, the place and the key."""

    exit_code = 3


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """What made a set of rows. `RunInfo(command=..., wall_s=..., **describe_machine())` fills it in."""

    command: str
    commit: str
    device: str
    torch: str
    python: str
    date: str  # ISO 8601 with a time zone
    wall_s: float | int

    def __post_init__(self) -> None:
        faults = _faults(type(self), vars(self))
        if not faults:
            try:
                zone = datetime.fromisoformat(self.date).tzinfo
            except ValueError:
                zone = None
            if zone is None:
                faults = [f"date: expected an ISO date and time with a zone, got {self.date!r}"]
        _raise(faults, "run")

    @property
    def when(self) -> datetime:
        """The date as a moment in time, so that runs can be ordered."""
        return datetime.fromisoformat(self.date)

    @property
    def id(self) -> str:
        """A short name that depends on nothing but the run: its day and 8 hex digits."""
        key = "\0".join((self.command, self.commit, self.device, self.date))
        return f"{self.when.astimezone(UTC):%Y%m%d}-{hashlib.sha256(key.encode()).hexdigest()[:8]}"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One number. `recipe`, `seed` and `nfe` are None where they mean nothing, as for real data."""

    run: str = ""  # filled in by `Results.add`
    task: str
    data: str
    method: str
    recipe: str | None
    seed: int | None
    nfe: int | None
    metric: str
    convention: str | None = None  # which bound or estimate a likelihood is: objective, bound@T, nelbo, iw@T,K, exact
    value: float | int
    stderr: float | int | None = None
    n: int | None = None

    def __post_init__(self) -> None:
        _raise(_faults(type(self), vars(self)), "row")

    @property
    def identity(self) -> tuple[Any, ...]:
        """What a newer row must agree in to replace this one."""
        return _identity(self)


class SeedMean(NamedTuple):
    """Mean over seeds, its standard error (None for a single seed) and the number of seeds."""

    mean: float
    stderr: float | None
    seeds: int


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _faults(cls: type, data: Mapping[str, Any]) -> list[str]:
    """Check names, types and finiteness of the values of a dataclass; `key: what is wrong` for each fault."""
    hints = _hints(cls)
    faults = [f"{key}: unknown key" for key in data if key not in hints]
    faults += [f"{key}: missing" for key in hints if key not in data]
    for key, hint in hints.items():
        kinds = typing.get_args(hint) or (hint,)
        value = data.get(key)
        if key not in data or (value is None and type(None) in kinds):
            continue
        if isinstance(value, bool) or not isinstance(value, kinds):
            names = [{int: "a whole number", float: "a number", str: "text"}.get(kind, "null") for kind in kinds]
            faults.append(f"{key}: expected {' or '.join(dict.fromkeys(names))}, got {value!r}")
        elif isinstance(value, float) and not math.isfinite(value):
            faults.append(f"{key}: must be finite, got {value}")
    return faults


def _raise(faults: list[str], where: str) -> None:
    if faults:
        raise ResultsError("\n".join(f"{where}.{fault}" for fault in faults))


def _build(cls: type[T], data: Any, place: str, faults: list[str]) -> T | None:
    """Make a run or a row from JSON; when that fails, note why in `faults`."""
    found = _faults(cls, data) if isinstance(data, dict) else [f"expected an object, got {data!r}"]
    if not found:
        try:
            return cls(**data)
        except ResultsError as error:
            found = [line.partition(".")[2] for line in str(error).splitlines()]
    faults.extend(f"{place}.{fault}" for fault in found)
    return None


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """JSON keeps the last of two equal keys silently; in a merged file that would hide a lost run."""
    tree = dict(pairs)
    if len(tree) < len(pairs):
        raise ResultsError(f"a key occurs twice in the object that begins with {pairs[0][0]!r}")
    return tree


def _line(item: RunInfo | Row) -> str:
    return json.dumps(dataclasses.asdict(item), ensure_ascii=False, allow_nan=False)


class Results:
    """The runs and rows of a task. `add` and `merge` change the object and return it."""

    def __init__(self) -> None:
        self.runs: dict[str, RunInfo] = {}
        self._rows: dict[tuple[Any, ...], Row] = {}
        self._sorted: list[Row] | None = None  # tables ask many times

    @property
    def rows(self) -> list[Row]:
        """All rows in the order in which they are saved."""
        if self._sorted is None:
            # None sorts before any value, and numbers sort as numbers.
            order = sorted(self._rows, key=lambda identity: [(v is not None, v or 0) for v in identity])
            self._sorted = [self._rows[identity] for identity in order]
        return list(self._sorted)

    @classmethod
    def load(cls, path: str | Path) -> Results:
        """Read a file strictly; every fault is reported with the file, the place and the key."""
        try:
            tree = json.loads(Path(path).read_text(encoding="utf-8"), object_pairs_hook=_no_duplicates)
        except (json.JSONDecodeError, UnicodeDecodeError, ResultsError) as error:
            raise ResultsError(f"{path}: not valid JSON: {error}") from None
        faults: list[str] = []
        if not isinstance(tree, dict) or set(tree) != {"runs", "rows"}:
            raise ResultsError(f'{path}: expected an object with the keys "runs" and "rows" and no others')
        if not isinstance(tree["runs"], dict) or not isinstance(tree["rows"], list):
            raise ResultsError(f'{path}: expected "runs" to be an object and "rows" to be a list')
        results = cls()
        for name, data in tree["runs"].items():
            run = _build(RunInfo, data, f"{path}: runs[{name!r}]", faults)
            if run is not None:
                results.runs[name] = run
        for index, data in enumerate(tree["rows"]):
            place = f"{path}: rows[{index}]"
            row = _build(Row, data, place, faults)
            if row is None:
                continue
            if row.run not in tree["runs"]:
                faults.append(f"{place}.run: {row.run!r} is not among the runs")
            if row.identity in results._rows:
                faults.append(f"{place}: the same {', '.join(IDENTITY)} as an earlier row")
            results._rows[row.identity] = row
        if faults:
            raise ResultsError("\n".join(faults[:20]))
        return results

    def add(self, run_info: RunInfo, rows: Iterable[Row]) -> Results:
        """Take in the rows of one run."""
        other = Results()
        other.runs[run_info.id] = run_info
        other._rows = {row.identity: dataclasses.replace(row, run=run_info.id) for row in rows}
        return self.merge(other)

    def merge(self, other: Results) -> Results:
        """Take in other results. Of two rows of one identity the one whose run is younger stays."""
        runs = self.runs | other.runs
        for identity, row in other._rows.items():
            mine = self._rows.get(identity)
            if mine is None or runs[mine.run].when <= runs[row.run].when:
                self._rows[identity] = row
        self._sorted = None
        used = {row.run for row in self._rows.values()}
        self.runs = {name: runs[name] for name in sorted(used)}
        return self

    def save(self, path: str | Path) -> None:
        """Write the file whole or not at all, a line per row; equal results give equal bytes."""
        runs = ",\n".join(f"  {json.dumps(name)}: {_line(self.runs[name])}" for name in sorted(self.runs))
        rows = ",\n".join(f"  {_line(row)}" for row in self.rows)
        replace_file(path, f'{{\n "runs": {{\n{runs}\n }},\n "rows": [\n{rows}\n ]\n}}\n')

    def select(self, **filters: Any) -> list[Row]:
        """Rows that fit all filters; a filter is a value of the field, or a list, tuple or set of values."""
        unknown = set(filters) - {field.name for field in dataclasses.fields(Row)}
        if unknown:
            raise ResultsError(f"no such field of a row: {', '.join(sorted(unknown))}")
        wanted = {k: v if isinstance(v, list | tuple | set | frozenset) else (v,) for k, v in filters.items()}
        rows = self.rows
        for key, values in wanted.items():
            rows = [row for row in rows if getattr(row, key) in values]
        return rows

    def only(self, **filters: Any) -> Results:
        """The part of these results that fits all filters (see `select`)."""
        part = Results()
        part._sorted = self.select(**filters)
        part._rows = {row.identity: row for row in part._sorted}
        used = {row.run for row in part._sorted}
        part.runs = {name: run for name, run in self.runs.items() if name in used}
        return part

    def mean_over_seeds(self, **filters: Any) -> SeedMean | None:
        """Mean and standard error over the seeds of the one quantity that the filters fit (see `select`)."""
        return mean_over_seeds(self.select(**filters))


def mean_over_seeds(rows: Iterable[Row]) -> SeedMean | None:
    """Mean and standard error of rows that differ in nothing but the seed; None without rows."""
    rows = list(rows)
    for key in IDENTITY:
        found = sorted({str(getattr(row, key)) for row in rows})
        if key != "seed" and len(found) > 1:
            raise ResultsError(f"a mean over seeds needs one {key}, found {', '.join(found)}")
    if not rows:
        return None
    values = [float(row.value) for row in rows]
    mean = math.fsum(values) / len(values)
    spread = math.fsum((value - mean) ** 2 for value in values)
    stderr = math.sqrt(spread / (len(values) - 1) / len(values)) if len(values) > 1 else None
    return SeedMean(mean, stderr, len(values))


def load_once(path: Path) -> Results:
    """`Results.load` for those who only read: a file that has not changed since is not read again."""
    found = path.stat()
    return _load(path, found.st_mtime_ns, found.st_size)


@functools.lru_cache(maxsize=8)
def _load(path: Path, changed_ns: int, size: int) -> Results:
    return Results.load(path)


def record(path: str | Path, run_info: RunInfo, rows: Iterable[Row]) -> Results:
    """Merge the rows of a run into a file, which need not exist; several processes may do so at once."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path.parent):
        results = (Results.load(path) if path.exists() else Results()).add(run_info, rows)
        results.save(path)
    return results
