"""Options of studies: frozen dataclasses whose fields hold a line of help and a range, for parsers and for Python."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from emoe.config import ConfigError
from emoe.experiment import Experiment, customise
from emoe.recipes import all_recipes, get_recipe

LARGEST_SEED = 2**63 - 1


def flag(default: Any, help: str, **limits: Any) -> Any:  # noqa: A002 - the word of argparse
    """A field of options with one line of help.

    Args:
        default: Its default.
        help: The line.
        limits: `low` and `high` of a number or of each element of a tuple, `allowed` values; `recorded=False` for what
            changes no number and is left out of the command in results; `positional`; `repeat` for an option that may
            be given several times; `hidden` from parsers.
    """
    return field(default=default, metadata={"help": help, **limits})


def folder(path: str, help: str = "folder of the run folders") -> Any:  # noqa: A002
    """A field for a folder or a file."""
    return flag(Path(path), help, recorded=False)


def hidden() -> Any:
    """A folder that another option decides."""
    return flag(Path(), "", recorded=False, hidden=True)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options that all studies have."""

    command: ClassVar[str]  # in results, such as "reproduce toy"
    reserved: ClassVar[Mapping[str, str]] = {}  # fields of recipes that the study sets -> the option for them

    runs: Path = folder("runs")
    results: Path = folder("results", "folder of results, tables and figures")
    device: str = flag("auto", "auto, cpu, cuda, cuda:N", recorded=False)
    jobs: int = flag(0, "runs at once; 0: several on a GPU, one for each core on a CPU", low=0, high=64, recorded=False)
    budget: float | None = flag(
        None, "minutes after which training is stopped and saved; the same command continues", low=0, recorded=False
    )
    quiet: bool = flag(False, "no progress", recorded=False)
    settings: Mapping[str, str] = field(default_factory=dict, metadata={"help": "fields of all recipes"})

    def __post_init__(self) -> None:
        problems = [problem for option in dataclasses.fields(self) for problem in self._problems(option)]
        for name in self.settings:
            if option := self.reserved.get(name.replace("_", "-")):
                problems.append(f"{name}: the study sets it; use --{option}")
        if problems:
            raise ConfigError(problems)

    def _problems(self, option: dataclasses.Field[Any]) -> Iterator[str]:
        """Faults of one option, which begin with its name."""
        value, limits, name = getattr(self, option.name), option.metadata, option.name.replace("_", "-")
        low, high, allowed = (limits.get(key) for key in ("low", "high", "allowed"))
        if value == () != option.default:
            yield f"{name}: give at least one"
        for item in value if isinstance(value, tuple) else (value,):
            if allowed and item is not None and item not in allowed:
                yield f"{name}: {item!r} is not known; allowed: {', '.join(allowed)}"
            elif low is not None and item is not None and not item >= low:
                yield f"{name}: must be >= {low}, got {item}"
            elif high is not None and item is not None and not item <= high:
                yield f"{name}: must be <= {high}, got {item}"

    def command_line(self) -> str:
        """The command for the record: options that differ from their defaults and can change a number."""
        words = ["emoe", *self.command.split()]
        for option in dataclasses.fields(self):
            value, metadata = getattr(self, option.name), option.metadata
            if option.name == "settings" or value == option.default or not metadata.get("recorded", True):
                continue
            values = value if metadata.get("repeat") else [value]
            for item in values:
                text = ",".join(map(str, item)) if isinstance(item, tuple) else str(item)
                name = [] if metadata.get("positional") else [f"--{option.name.replace('_', '-')}"]
                words += name if item is True else [*name, text]
        return shlex.join([*words, *(word for name, text in self.settings.items() for word in (f"--{name}", text))])


def recipe_experiments(
    prefix: str, methods: Iterable[str], seeds: Iterable[int], settings: Mapping[str, str]
) -> list[Experiment]:
    """The recipes `PREFIX-METHOD` with settings, seed by seed; equal ones once."""
    experiments = []
    for seed in seeds:
        for method in methods:
            try:
                recipe = get_recipe(f"{prefix}-{method}")
            except ConfigError:
                known = [name.removeprefix(f"{prefix}-") for name in all_recipes() if name.startswith(f"{prefix}-")]
                raise ConfigError([f"methods: {method!r} is not known; allowed: {', '.join(known)}"]) from None
            experiments.append(customise(recipe, {**settings, "seed": str(seed)}))
    return list(dict.fromkeys(experiments))
