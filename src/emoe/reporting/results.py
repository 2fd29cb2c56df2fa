"""Results as small JSON files: rows of numbers, each with the run (command, commit, machine) behind it.

`results/<task>.json` holds `{"runs": {id: run}, "rows": [row, ...]}` and, optionally, `"methods": {name: {"label",
"colour"}}`. All printed numbers come from these files.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from emoe.config import Config, ConfigError, convert
from emoe.figures.base import CYCLE
from emoe.files import locked, replace_file

Styles = Mapping[str, Mapping[str, str]]  # {"label": ..., "colour": ...} by method
IDENTITY = ("task", "data", "method", "recipe", "seed", "nfe", "metric", "convention")
REFERENCES = ("ideal", "data", "judge")  # measured beside the models, but no models


class ResultsError(ConfigError):
    """Results that break the contract: one line per fault, with the file, the position and the key."""

    exit_code = 3


class _Record(Config):
    """A config of JSON values that a results file contains."""

    def __post_init__(self) -> None:
        try:
            super().__post_init__()
        except ConfigError as error:
            raise ResultsError(error.problems) from None


@dataclass(frozen=True, kw_only=True)
class RunInfo(_Record):
    """The command and machine behind rows: `RunInfo(command=..., wall_s=..., **describe_machine(device))`."""

    command: str
    commit: str
    device: str
    torch: str
    python: str
    date: str  # ISO 8601 with a time zone
    wall_s: int | float

    def conflicts(self) -> Iterator[str]:
        try:
            zone = self.when.tzinfo
        except ValueError:
            zone = None
        if zone is None:
            yield f"date: expected an ISO date and time with a zone, got {self.date!r}"

    @property
    def when(self) -> datetime:
        """The date as a `datetime`."""
        return datetime.fromisoformat(self.date)

    @property
    def id(self) -> str:
        """A short name: the day and 8 hex digits of a hash."""
        key = "\0".join((self.command, self.commit, self.device, self.date))
        return f"{self.when.astimezone(UTC):%Y%m%d}-{hashlib.sha256(key.encode()).hexdigest()[:8]}"


@dataclass(frozen=True, kw_only=True)
class Row(_Record):
    """One number. `recipe`, `seed` and `nfe` are None where they do not apply, as for real data."""

    run: str = ""  # filled in by `Results.add`
    task: str
    data: str
    method: str
    recipe: str | None
    seed: int | None
    nfe: int | None
    metric: str
    convention: str | None = None  # kind of bound or estimate of a likelihood: objective, bound@T, nelbo, iw@T,K, exact
    value: int | float
    stderr: int | float | None = None
    n: int | None = None

    identity = property(attrgetter(*IDENTITY))  # a newer row with the same one replaces this row


@dataclass(frozen=True, kw_only=True)
class MethodStyle(_Record):
    """Label and colour of a method in every table and figure."""

    label: str
    colour: str  # #rrggbb

    def conflicts(self) -> Iterator[str]:
        if not self.label.strip():
            yield f"label: expected text that is not empty, got {self.label!r}"
        if not re.fullmatch("#[0-9a-fA-F]{6}", self.colour):
            yield f"colour: expected #rrggbb, got {self.colour!r}"


@functools.cache
def known_methods() -> dict[str, MethodStyle]:
    """Return the methods of this package and the references, in the order of tables."""
    styles = json.loads(Path(__file__).with_name("methods.json").read_bytes())
    return {name: MethodStyle(**style) for name, style in styles.items()}


def method_rank(method: str) -> tuple[float, str]:
    """Return the sort key of a method: the known ones in their order, then unknown ones by name, references last."""
    order = list(known_methods())
    return order.index(method) if method in order else len(order) - len(REFERENCES) - 0.5, method


def select(rows: Iterable[Row], **filters: Any) -> list[Row]:
    """Return rows that fit all filters; a filter is a value of the field, or a list, tuple or set of values."""
    wanted = {key: value if isinstance(value, list | tuple | set) else (value,) for key, value in filters.items()}
    return [row for row in rows if all(getattr(row, key) in values for key, values in wanted.items())]


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse equal keys, of which JSON keeps the last silently: in a merged file that would hide a lost run."""
    tree = dict(pairs)
    if len(tree) < len(pairs):
        raise ResultsError(f"a key occurs twice in the object that begins with {pairs[0][0]!r}")
    return tree


@dataclass
class Results:
    """Rows in the order of the file, their runs, and method styles; `add` and `merge` change them in place."""

    rows: list[Row] = field(default_factory=list)
    runs: dict[str, RunInfo] = field(default_factory=dict)
    methods: dict[str, MethodStyle] = field(default_factory=dict)

    @classmethod
    def load(cls, path: str | Path) -> Results:
        """Read a file strictly; every fault is reported with the file, the position and the key."""
        try:
            tree = json.loads(Path(path).read_text(encoding="utf-8"), object_pairs_hook=_no_duplicates)
        except ValueError as error:
            raise ResultsError(f"{path}: not valid JSON: {error}") from None
        tree = {"methods": {}} | tree if isinstance(tree, dict) else {}
        if {key: type(value) for key, value in tree.items()} != {"methods": dict, "runs": dict, "rows": list}:
            raise ResultsError(f'{path}: expected objects "runs" and perhaps "methods", a list "rows", no other keys')
        records: dict[str, dict[Any, Any]] = {"runs": {}, "methods": {}, "rows": {}}
        faults, first = list[str](), dict[tuple[Any, ...], int]()
        for part, kind in (("runs", RunInfo), ("methods", MethodStyle), ("rows", Row)):
            for key, data in tree[part].items() if part != "rows" else enumerate(tree[part]):
                try:
                    records[part][key] = convert(kind, data, {})
                except ConfigError as error:
                    faults += [f"{part}[{key!r}]{line}" for line in error.problems]
        for index, row in records["rows"].items():
            if row.run not in tree["runs"]:
                faults.append(f"rows[{index}].run: {row.run!r} is not among the runs")
            if first.setdefault(row.identity, index) != index:
                faults.append(f"rows[{index}]: the same {', '.join(IDENTITY)} as rows[{first[row.identity]}]")
        if faults:
            raise ResultsError([f"{path}: {fault}" for fault in faults[:20]])
        return cls(_ordered(records["rows"].values()), records["runs"], records["methods"])

    def add(self, run_info: RunInfo, rows: Iterable[Row], methods: Styles | None = None) -> Results:
        """Add the rows of one run, and labels and colours of methods."""
        styles = {name: MethodStyle(**style) for name, style in (methods or {}).items()}
        own = [dataclasses.replace(row, run=run_info.id) for row in rows]
        return self.merge(Results(own, {run_info.id: run_info}, styles))

    def merge(self, other: Results) -> Results:
        """Add other results. Of two rows or styles with the same identity the one of the newer run stays."""
        runs = self.runs | other.runs
        when = {name: run.when.timestamp() for name, run in runs.items()}
        older, newer = sorted((self, other), key=lambda part: max((when[name] for name in part.runs), default=0.0))
        self.methods = older.methods | newer.methods
        rows = {row.identity: row for row in sorted([*self.rows, *other.rows], key=lambda row: when[row.run])}
        self.rows = _ordered(rows.values())
        self.runs = {name: runs[name] for name in sorted({row.run for row in self.rows})}
        return self

    def save(self, path: str | Path) -> None:
        """Write the file atomically, a line per row; equal results give equal bytes."""
        dump = functools.partial(json.dumps, default=vars, ensure_ascii=False, allow_nan=False)
        runs, styles = (
            ",\n".join(f"  {json.dumps(name)}: {dump(record)}" for name, record in sorted(records.items()))
            for records in (self.runs, self.methods)
        )
        rows = ",\n".join(f"  {dump(row)}" for row in self.rows)
        methods = f',\n "methods": {{\n{styles}\n }}' if styles else ""
        replace_file(path, f'{{\n "runs": {{\n{runs}\n }},\n "rows": [\n{rows}\n ]{methods}\n}}\n')

    def select(self, **filters: Any) -> list[Row]:
        return select(self.rows, **filters)

    def only(self, **filters: Any) -> Results:
        """Return the results that fit all filters (see `select`)."""
        return self.of(self.select(**filters))

    def of(self, rows: Iterable[Row]) -> Results:
        """Return results of some of these rows."""
        rows = list(rows)
        used = {row.run for row in rows}
        return Results(rows, {name: run for name, run in self.runs.items() if name in used}, self.methods)

    @property
    def models(self) -> Results:
        """The rows of models: neither references nor rows without a recipe."""
        return self.of(row for row in self.rows if row.method not in REFERENCES and row.recipe is not None)

    @property
    def seeds(self) -> list[int]:
        return sorted({row.seed for row in self.rows if row.seed is not None})

    def label(self, method: str) -> str:
        """Return the name of a method in tables and figures."""
        styles = known_methods() | self.methods
        return styles[method].label if method in styles else method

    def colour(self, method: str) -> str:
        """Return the colour of a method; an unknown method gets one that no known method has."""
        styles = known_methods() | self.methods
        if method in styles:
            return styles[method].colour
        free = [colour for colour in CYCLE if colour not in {style.colour for style in known_methods().values()}]
        unknown = sorted({row.method for row in self.rows} - set(known_methods()) | {method})
        return free[unknown.index(method) % len(free)]


def _ordered(rows: Iterable[Row]) -> list[Row]:
    """Sort rows as in files: None before any value, and numbers as numbers."""
    return sorted(rows, key=lambda row: [(value is not None, value) for value in row.identity])


class SeedMean(NamedTuple):
    """Mean over seeds and its standard error, None for a single seed."""

    mean: float
    stderr: float | None


def mean_over_seeds(rows: Iterable[Row], *, measured: bool = False) -> SeedMean | None:
    """Return the mean of rows that differ in the seed alone; with `measured` a single row keeps its own error."""
    rows = list(rows)
    for key in IDENTITY:
        values = sorted({str(getattr(row, key)) for row in rows})
        if key != "seed" and len(values) > 1:
            raise ResultsError(f"a mean over seeds needs one {key}, found {', '.join(values)}")
    if len(rows) == 1 and measured:
        return SeedMean(float(rows[0].value), rows[0].stderr)
    return mean_of(float(row.value) for row in rows)


def mean_of(values: Iterable[float]) -> SeedMean | None:
    """Return mean and standard error of numbers; None without numbers."""
    values = list(values)
    if len(values) < 2:
        return SeedMean(values[0], None) if values else None
    return SeedMean(statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values)))


def record(path: str | Path, run_info: RunInfo, rows: Iterable[Row], methods: Styles | None = None) -> Results:
    """Merge the rows of a run into a file, which need not exist; several processes may do so at once."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path.parent):
        results = (Results.load(path) if path.exists() else Results()).add(run_info, rows, methods)
        results.save(path)
    return results
