"""Options of studies: frozen dataclasses whose fields hold a line of help and a range, for parsers and for Python."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from emoe.config import Config, ConfigError
from emoe.experiment import Experiment, customise
from emoe.recipes import all_recipes, get_recipe

LARGEST_SEED = 2**63 - 1


def flag(default: Any, doc: str, **limits: Any) -> Any:
    """A field of options with one line of help.

    `limits`: `low` and `high` of a number or of each element of a tuple; `allowed` values; `recorded=False` for options
    that change no number and are left out of the command in results; `positional`; `repeat` for an option that may be
    given several times; `hidden` from parsers.
    """
    return field(default=default, metadata={"doc": doc, **limits})


def hidden(default: Any) -> Any:
    """A field that is no option of a command."""
    return flag(default, "", hidden=True, recorded=False)


def seeds_flag(*seeds: int) -> Any:
    """A field for seeds."""
    return flag(seeds, "seeds", low=0, high=LARGEST_SEED)


@dataclass(frozen=True, kw_only=True)
class Options(Config):
    """Options that all studies have."""

    reserved: ClassVar[Mapping[str, str]] = {}  # fields of recipes that the study sets -> the option for them

    study: str = hidden("")
    only: str | None = hidden(None)
    runs: Path | None = flag(None, "folder of the run folders; default: runs/STUDY", recorded=False)
    results: Path = flag(Path("results"), "folder of results, tables and figures", recorded=False)
    device: str = flag("auto", "auto, cpu, cuda, cuda:N", recorded=False)
    jobs: int = flag(0, "runs at once; 0: several on a GPU, one for each core on a CPU", low=0, high=64, recorded=False)
    budget: float | None = flag(None, "minutes to train, then save; the same command continues", low=0, recorded=False)
    quiet: bool = flag(False, "no progress", recorded=False)
    settings: Mapping[str, str] = field(default_factory=dict, metadata={"doc": "fields of recipes", "recorded": False})

    def conflicts(self) -> Iterator[str]:
        """Empty options, values that are not allowed, and settings that the study itself sets."""
        for option in dataclasses.fields(self):
            value, allowed = getattr(self, option.name), option.metadata.get("allowed")
            if value == () != option.default:
                yield f"{option.name}: give at least one"
            for item in value if isinstance(value, tuple) else [value]:
                if allowed and item is not None and item not in allowed:
                    yield f"{option.name}: {item!r} is not known; allowed: {', '.join(allowed)}"
        for name in self.settings:
            if option_name := self.reserved.get(name.replace("_", "-")):
                yield f"{name}: the study sets it; use --{option_name}"

    @property
    def stem(self) -> str:
        """Prefix of the names of its files."""
        return self.study

    @property
    def run_folder(self) -> Path:
        """Folder of the run folders."""
        return self.runs or Path("runs") / self.stem

    @property
    def command(self) -> str:
        """The command without options."""
        return f"emoe {self.study}" if self.study in ("demo", "sweep") else f"emoe reproduce {self.study}"

    def command_line(self) -> str:
        """The command in results: options that differ from their defaults and can change a number."""
        words = self.command.split()
        for option in dataclasses.fields(self):
            value, metadata = getattr(self, option.name), option.metadata
            if value != option.default and metadata.get("recorded", True):
                for item in value if metadata.get("repeat") else [value]:
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
