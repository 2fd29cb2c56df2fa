"""Results as small JSON files: rows of numbers, each with the run (command, commit, machine) behind it.

`results/<task>.json` holds `{"runs": {id: run}, "rows": [row, ...]}` and, optionally, `"methods": {name: {"label",
"colour"}}`. Separate runs merge into one file. Everything that prints a number reads these files and nothing else.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import re
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from emoe.files import locked, replace_file

T = TypeVar("T")
Styles = Mapping[str, Mapping[str, str]]  # {"label": ..., "colour": ...} by method
IDENTITY = ("task", "data", "method", "recipe", "seed", "nfe", "metric", "convention")
REFERENCES = ("ideal", "data", "judge")  # measured beside the models, but no models


class ResultsError(ValueError):
    """Results that break the contract: one line per fault, with the file, the position and the key."""

    exit_code = 3


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """The command and machine behind rows. `RunInfo(command=..., wall_s=..., **describe_machine())` fills it in."""

    command: str
    commit: str
    device: str
    torch: str
    python: str
    date: str  # ISO 8601 with a time zone
    wall_s: float | int

    def __post_init__(self) -> None:
        _check(self, "run")
        try:
            zone = self.when.tzinfo
        except ValueError:
            zone = None
        if zone is None:
            raise ResultsError(f"run.date: expected an ISO date and time with a zone, got {self.date!r}")

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
        _check(self, "row")

    @property
    def identity(self) -> tuple[Any, ...]:
        """What a newer row must agree in to replace this one."""
        return tuple(getattr(self, name) for name in IDENTITY)


@dataclass(frozen=True, kw_only=True)
class MethodStyle:
    """How a method is shown: one label and one colour in every table and figure."""

    label: str
    colour: str  # #rrggbb

    def __post_init__(self) -> None:
        _check(self, "method")
        if not self.label.strip():
            raise ResultsError("method.label: must not be empty")
        if not re.fullmatch(r"#[0-9a-fA-F]{6}", self.colour):
            raise ResultsError(f"method.colour: expected #rrggbb, got {self.colour!r}")


@functools.cache
def known_methods() -> dict[str, MethodStyle]:
    """The methods of this package and the references, in the order of tables."""
    text = resources.files("emoe.reporting").joinpath("methods.json").read_text(encoding="utf-8")
    return {name: MethodStyle(**style) for name, style in json.loads(text).items()}


def method_rank(method: str) -> float:
    """Sorts methods: the known ones in their order, then unknown ones, references last."""
    order = list(known_methods())
    return order.index(method) if method in order else len(order) - len(REFERENCES) - 0.5


def methods_of(rows: Iterable[Row]) -> list[str]:
    """The methods of rows in the order of tables."""
    return sorted({row.method for row in rows}, key=lambda method: (method_rank(method), method))


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _faults(cls: type, data: Mapping[str, Any]) -> list[str]:
    """Check names, types and finiteness of the values of a dataclass; `key: problem` for each fault."""
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


def _check(record: object, name: str) -> None:
    faults = _faults(type(record), vars(record))
    if faults:
        raise ResultsError("\n".join(f"{name}.{fault}" for fault in faults))


def _build(cls: type[T], data: Any, where: str, faults: list[str]) -> T | None:
    """Make a record from JSON; if that fails, append the reasons to `faults`."""
    problems = _faults(cls, data) if isinstance(data, dict) else [f"expected an object, got {data!r}"]
    if not problems:
        try:
            return cls(**data)
        except ResultsError as error:
            problems = [line.partition(".")[2] for line in str(error).splitlines()]
    faults.extend(f"{where}.{problem}" for problem in problems)
    return None


def _json(record: Any) -> str:
    return json.dumps(dataclasses.asdict(record), ensure_ascii=False, allow_nan=False)


class SeedMean(NamedTuple):
    """Mean over seeds and its standard error, None for a single seed."""

    mean: float
    stderr: float | None


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """JSON keeps the last of two equal keys silently; in a merged file that would hide a lost run."""
    tree = dict(pairs)
    if len(tree) < len(pairs):
        raise ResultsError(f"a key occurs twice in the object that begins with {pairs[0][0]!r}")
    return tree


class Results:
    """The runs, rows and method styles of a task. `add` and `merge` change the object and return it."""

    def __init__(self) -> None:
        self.runs: dict[str, RunInfo] = {}
        self.methods: dict[str, MethodStyle] = {}
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
        """Read a file strictly; every fault is reported with the file, the position and the key."""
        try:
            tree = json.loads(Path(path).read_text(encoding="utf-8"), object_pairs_hook=_no_duplicates)
        except (json.JSONDecodeError, UnicodeDecodeError, ResultsError) as error:
            raise ResultsError(f"{path}: not valid JSON: {error}") from None
        if not isinstance(tree, dict) or set(tree) - {"methods"} != {"runs", "rows"}:
            raise ResultsError(
                f'{path}: expected an object with "runs", "rows" and perhaps "methods", and no other keys'
            )
        methods = tree.get("methods", {})
        if not (isinstance(tree["runs"], dict) and isinstance(methods, dict) and isinstance(tree["rows"], list)):
            raise ResultsError(f'{path}: expected "runs" and "methods" to be objects and "rows" to be a list')
        faults: list[str] = []
        results = cls()
        runs = {name: _build(RunInfo, data, f"{path}: runs[{name!r}]", faults) for name, data in tree["runs"].items()}
        styles = {
            name: _build(MethodStyle, data, f"{path}: methods[{name!r}]", faults) for name, data in methods.items()
        }
        for index, data in enumerate(tree["rows"]):
            where = f"{path}: rows[{index}]"
            row = _build(Row, data, where, faults)
            if row is None:
                continue
            if row.run not in tree["runs"]:
                faults.append(f"{where}.run: {row.run!r} is not among the runs")
            if row.identity in results._rows:
                faults.append(f"{where}: the same {', '.join(IDENTITY)} as an earlier row")
            results._rows[row.identity] = row
        if faults:
            raise ResultsError("\n".join(faults[:20]))
        results.runs = {name: run for name, run in runs.items() if run}
        results.methods = {name: style for name, style in styles.items() if style}
        return results

    def add(self, run_info: RunInfo, rows: Iterable[Row], methods: Styles | None = None) -> Results:
        """Take in the rows of one run, and labels and colours of methods."""
        other = Results()
        other.runs[run_info.id] = run_info
        other._rows = {row.identity: dataclasses.replace(row, run=run_info.id) for row in rows}
        other.methods = {name: MethodStyle(**style) for name, style in (methods or {}).items()}
        return self.merge(other)

    def merge(self, other: Results) -> Results:
        """Take in other results. Of two rows or styles of one identity the one whose run is younger stays."""
        runs = self.runs | other.runs
        ours, theirs = (max((run.when for run in part.runs.values()), default=None) for part in (self, other))
        newer = ours is None or theirs is None or ours <= theirs
        self.methods = self.methods | other.methods if newer else other.methods | self.methods
        for identity, row in other._rows.items():
            present = self._rows.get(identity)
            if present is None or runs[present.run].when <= runs[row.run].when:
                self._rows[identity] = row
        self._sorted = None
        used = {row.run for row in self._rows.values()}
        self.runs = {name: runs[name] for name in sorted(used)}
        return self

    def save(self, path: str | Path) -> None:
        """Write the file whole or not at all, a line per row; equal results give equal bytes."""
        runs, styles = (
            ",\n".join(f"  {json.dumps(name)}: {_json(record)}" for name, record in sorted(records.items()))
            for records in (self.runs, self.methods)
        )
        rows = ",\n".join(f"  {_json(row)}" for row in self.rows)
        methods = f',\n "methods": {{\n{styles}\n }}' if styles else ""
        replace_file(path, f'{{\n "runs": {{\n{runs}\n }},\n "rows": [\n{rows}\n ]{methods}\n}}\n')

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
        return self.of(self.select(**filters))

    def of(self, rows: Iterable[Row]) -> Results:
        """Results of some of these rows."""
        part = Results()
        part._sorted, part.methods = list(rows), self.methods
        part._rows = {row.identity: row for row in part._sorted}
        used = {row.run for row in part._sorted}
        part.runs = {name: run for name, run in self.runs.items() if name in used}
        return part

    @property
    def models(self) -> Results:
        """The rows of models: neither references nor rows without a recipe."""
        return self.of(row for row in self.rows if row.method not in REFERENCES and row.recipe is not None)

    @property
    def seeds(self) -> list[int]:
        """The seeds behind the rows."""
        return sorted({row.seed for row in self.rows if row.seed is not None})

    def label(self, method: str) -> str:
        """The name of a method in tables and figures."""
        style = self.methods.get(method) or known_methods().get(method)
        return style.label if style else method

    def colour(self, method: str) -> str:
        """The colour of a method in figures; an unknown method gets one that no known method has."""
        style = self.methods.get(method) or known_methods().get(method)
        if style:
            return style.colour
        from emoe.figures.base import CYCLE

        free = [colour for colour in CYCLE if colour not in {known.colour for known in known_methods().values()}]
        unknown = sorted({row.method for row in self.rows} - set(known_methods()) | {method})
        return free[unknown.index(method) % len(free)]


def mean_over_seeds(rows: Iterable[Row], *, measured: bool = False) -> SeedMean | None:
    """Mean and standard error of rows that differ in nothing but the seed; None without rows.

    A single row has no error over seeds; if `measured`, it keeps that of its own measurement.
    """
    rows = list(rows)
    for key in IDENTITY:
        values = sorted({str(getattr(row, key)) for row in rows})
        if key != "seed" and len(values) > 1:
            raise ResultsError(f"a mean over seeds needs one {key}, found {', '.join(values)}")
    if len(rows) < 2:
        return SeedMean(float(rows[0].value), rows[0].stderr if measured else None) if rows else None
    return mean_of(float(row.value) for row in rows)


def mean_of(values: Iterable[float]) -> SeedMean | None:
    """Mean and standard error of numbers; None without numbers."""
    values = list(values)
    if not values:
        return None
    mean = math.fsum(values) / len(values)
    spread = math.fsum((value - mean) ** 2 for value in values)
    stderr = math.sqrt(spread / (len(values) - 1) / len(values)) if len(values) > 1 else None
    return SeedMean(mean, stderr)


def load_once(path: Path) -> Results:
    """`Results.load` for readers: a file that has not changed since is not read again."""
    status = path.stat()
    return _load(path, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=8)
def _load(path: Path, changed_ns: int, size: int) -> Results:
    return Results.load(path)


def record(path: str | Path, run_info: RunInfo, rows: Iterable[Row], methods: Styles | None = None) -> Results:
    """Merge the rows of a run into a file, which need not exist; several processes may do so at once."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path.parent):
        results = (Results.load(path) if path.exists() else Results()).add(run_info, rows, methods)
        results.save(path)
    return results
