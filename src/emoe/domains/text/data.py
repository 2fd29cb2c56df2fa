"""The domain of text: rows of tokens of a prepared set, read from the disk as they are needed."""

from __future__ import annotations

import functools
import hashlib
import json
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import torch
from jaxtyping import Int, Integer, UInt16
from torch import Tensor

from emoe.config import option
from emoe.domains.base import DataError, Domain, DomainConfig, Ink, ShuffledRows
from emoe.domains.text.given import AGAIN, find_vocabulary, read_texts
from emoe.domains.text.metrics import KnownRows, measure_rows
from emoe.domains.text.prepare import MANIFEST, SCHEMA
from emoe.domains.text.reading import SPLITS
from emoe.domains.text.tokens import Vocabulary
from emoe.domains.text.work import TOKEN
from emoe.domains.toy.figures import blank, save, truth_first
from emoe.rng import derive_seed
from emoe.types import Measurement, TokenSpace

HeldOut = Literal["auto", "valid", "test"]
SHOWN, WIDTH, LINES = 6, 80, 5  # samples of a pool in a picture, characters of a line, lines of a sample
_PLACES: dict[str, Path] = {}  # path in a config -> where the set lies on this machine


@contextmanager
def sets_at(places: Mapping[str, str | Path]) -> Iterator[None]:
    """Let sets lie elsewhere for a while: path in a config -> folder on this machine.

    A config keeps its path and a set the name of that path, so that a run is the same one wherever its data lie.
    """
    before = dict(_PLACES)
    _PLACES.update({path: Path(folder) for path, folder in places.items()})
    try:
        yield
    finally:
        _PLACES.clear()
        _PLACES.update(before)


@dataclass(frozen=True, kw_only=True)
class TextConfig(DomainConfig, kind="text"):
    """Text that `emoe data prepare` made into rows of tokens; the seed plays no role."""

    has_words: ClassVar[bool] = True

    path: str = option(doc="folder of a set that emoe data prepare wrote", neutral=True)
    held_out: HeldOut = option("auto", doc="rows to evaluate with: valid, test, or auto: test where there is one")
    verify: bool = option(True, doc="compare the files with their checksums when they are opened")

    def conflicts(self) -> Iterator[str]:
        """A split that is not known."""
        if self.held_out not in get_args(HeldOut):
            yield f"held_out: {self.held_out!r} is not known; allowed: {', '.join(get_args(HeldOut))}"

    @property
    def folder(self) -> Path:
        """Where the set lies: at `path`, unless `sets_at` says otherwise."""
        return _PLACES.get(self.path, Path(self.path))

    def build(self, seed: int) -> Text:
        """Open and check the set."""
        return Text(self)

    def read_given(self, source: str, space: TokenSpace, *, ink: Ink = "auto") -> Int[Tensor, "m L"]:
        """Texts with holes (see `emoe.domains.text.given`), as they are or in a .txt file; or tokens in .npy, .csv."""
        if ink != "auto" or Path(source).suffix.lower() in (".npy", ".csv"):
            return super().read_given(source, space, ink=ink)
        return read_texts(source, self.folder, read_manifest(self.folder), space)

    def write(self, rows: Integer[Tensor, "n L"]) -> list[str]:
        """Rows as text, special tokens by their names."""
        vocabulary = find_vocabulary(self.folder, read_manifest(self.folder))
        return [vocabulary.decode(row) for row in rows.tolist()]

    def draw_completions(
        self, rows: Int[Tensor, "m L"], given: Int[Tensor, "m L"], samples: Int[Tensor, "m n L"], space: TokenSpace,
        path: Path,
    ) -> None:  # fmt: skip
        """The texts as they were given, what was kept, and completions, side by side."""
        count = samples.shape[1]
        pools = {
            "given": rows.repeat_interleave(count, 0),
            "kept": given.repeat_interleave(count, 0),
            "completions": samples.flatten(0, 1),
        }
        draw_texts({name: self.write(pool[:SHOWN]) for name, pool in pools.items()}, path)


class Text(Domain):
    """Rows of tokens that stay on the disk: the system keeps in memory what is used and what fits."""

    task: ClassVar[str] = "text"

    def __init__(self, config: TextConfig):
        folder = config.folder
        self.name = Path(config.path).name if config.path in _PLACES else folder.resolve().name
        self.manifest = read_manifest(folder)
        self.space = TokenSpace(
            size=self.manifest["size"], mask_id=self.manifest["special"]["mask"], length=self.manifest["length"]
        )
        splits = self.manifest["splits"]
        held = config.held_out
        if held == "auto":
            held = "test" if "test" in splits else "valid"
        for split in ("train", held):
            if split not in splits:
                raise DataError(f"{folder}: has no {split} rows, only {', '.join(splits)}; give --domain.held-out")
        self.rows, self.test_rows = (open_rows(folder, self.manifest, one, config.verify) for one in ("train", held))
        self.held_out, self.fresh_rows = held, len(self.test_rows)
        self._folder = folder
        if config.verify:
            self.sha256 = splits["train"]["sha256"]  # the file was hashed when it was opened

    @functools.cached_property
    def vocabulary(self) -> Vocabulary:
        """The words of the set's tokenizer."""
        return find_vocabulary(self._folder, self.manifest)

    def decode(self, rows: Integer[Tensor, "n L"]) -> list[str]:
        """Rows as text, special tokens by their names."""
        return [self.vocabulary.decode(row) for row in rows.tolist()]

    def fresh(self, n: int, seed: int) -> Int[Tensor, "n L"]:
        """`n` held-out rows, drawn by `seed` without replacement.

        Raises:
            DataError: There are fewer; repeating them would make errors look smaller than they are.
        """
        if n > len(self.test_rows):
            raise DataError(
                f"{self.name}: {n:,} rows that were not trained on are asked for, but there are "
                f"{len(self.test_rows):,}; ask for at most so many (emoe eval --rows {len(self.test_rows)})"
            )
        generator = torch.Generator().manual_seed(derive_seed("text", "fresh", seed))
        return self.test_rows[torch.randperm(len(self.test_rows), generator=generator)[:n]].long()

    def batches(
        self, batch: int, seed: int, *, device: torch.device | str = "cpu", rank: int = 0, world: int = 1
    ) -> Callable[[int], Int[Tensor, "B L"]]:
        """Training batches; only their own rows are read and copied to the device."""
        return MappedRows(self.rows, batch, seed, device=device, rank=rank, world=world)

    def measure(self, samples: Int[Tensor, "n L"], seed: int = 0) -> list[Measurement]:
        """How varied the samples are, in themselves and as a pool, and how many copy a training row.

        See `emoe.domains.text.metrics`. Compare with `measure` of as many held-out rows: none has a best value. Whether
        text is good takes a judge, see `emoe.judges`.
        """
        return measure_rows(samples, self._trained)

    @functools.cached_property
    def _trained(self) -> KnownRows:
        """The training rows, all of them read once to be looked up in."""
        return KnownRows(self.rows)

    def picture(self, pools: Mapping[str, Int[Tensor, "_n L"]], path: Path, *, title: str = "") -> None:
        """The first samples of each pool as text; the beginning of each."""
        draw_texts({name: self.decode(rows[:SHOWN]) for name, rows in truth_first(pools).items()}, path, title)


def draw_texts(pools: Mapping[str, list[str]], path: Path, title: str = "") -> None:
    """Texts of each pool in a panel of its own; the beginning of each."""
    figure, panels = blank(1, len(pools), title=title)
    figure.set_size_inches(4.2 * len(pools), 0.11 * SHOWN * (LINES + 1) + (0.6 if title else 0.4))
    for panel, (name, texts) in zip(panels[0], pools.items(), strict=True):
        told = "\n\n".join("\n".join(textwrap.wrap(text, WIDTH)[:LINES]) for text in texts)
        shown = panel.text(
            0.01, 0.99, told.replace("$", r"\$"),  # a pair of them would be a formula
            va="top", fontsize=6, family="monospace", transform=panel.transAxes,
        )  # fmt: skip
        shown.set_in_layout(False)
        panel.set_title(name, fontsize=9)
        panel.set_box_aspect(None)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # signs that the font lacks are drawn as boxes
        save(figure, path)


class MappedRows(ShuffledRows):
    """Batches of rows that lie on the disk, indexed there and copied to the device, B x L at a time."""

    def __init__(
        self,
        rows: Integer[Tensor, "N L"],
        batch: int,
        seed: int,
        *,
        device: torch.device | str = "cpu",
        rank: int = 0,
        world: int = 1,
    ):
        super().__init__(rows[:0], batch, seed, rank=rank, world=world)
        self.rows, self.device = rows, torch.device(device)

    def __call__(self, step: int) -> Int[Tensor, "B L"]:
        """Rows of step h for this rank."""
        found = super().__call__(step)
        return found if self.device.type == "cpu" else found.to(self.device)


def read_manifest(folder: Path) -> dict[str, Any]:
    """What a prepared set says of itself.

    Raises:
        DataError: No such folder, no set in it, or one of another version.
    """
    path = folder / MANIFEST
    if not path.is_file():
        what = "holds no prepared text" if folder.is_dir() else "does not exist"
        raise DataError(
            f"{folder}: {what}; --domain.path takes a folder that emoe data prepare wrote: "
            f"emoe data prepare FILES --tokenizer FILE --out {'DIR' if folder == Path() else folder}"
        )
    try:
        manifest = dict(json.loads(path.read_bytes()))
        if manifest["schema"] != SCHEMA:
            raise DataError(f"{path}: has schema {manifest['schema']!r}, this version reads {SCHEMA}; {AGAIN}")
        sizes = [manifest["size"], manifest["length"], manifest["special"]["mask"]]
        sizes += [manifest["splits"][name]["rows"] for name in manifest["splits"]]
        if not all(isinstance(size, int) and size >= 0 for size in sizes) or set(manifest["splits"]) - set(SPLITS):
            raise ValueError("sizes that cannot be")
    except DataError:
        raise
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read, damaged ({error!r}); {AGAIN}") from None
    return manifest


def open_rows(folder: Path, manifest: Mapping[str, Any], split: str, verify: bool) -> UInt16[Tensor, "N L"]:
    """Rows of a split, mapped into memory: nothing is read before it is used, but for the checksum.

    Raises:
        DataError: The file is missing or not the one that was written.
    """
    told = manifest["splits"][split]
    path, shape = folder / f"{split}.bin", (told["rows"], manifest["length"])
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            if size != shape[0] * shape[1] * TOKEN.itemsize:
                raise DataError(f"{path}: has {size:,} bytes, not those of {shape[0]:,} rows of {shape[1]}; {AGAIN}")
            if verify and hashlib.file_digest(file, "sha256").hexdigest() != told["sha256"]:
                raise DataError(f"{path}: is damaged, its sha256 is not that of {MANIFEST}; {AGAIN}")
        # Private pages: the file may be read-only, and nothing that is done to the tensor reaches it.
        return torch.from_numpy(np.memmap(path, TOKEN, mode="c", shape=shape))
    except OSError as error:
        raise DataError(f"{path}: cannot be opened ({error.strerror or error}); {AGAIN}") from None
