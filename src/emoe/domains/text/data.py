"""The domain of text: rows of tokens of a prepared set, read from the disk as they are needed."""

from __future__ import annotations

import functools
import hashlib
import json
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import torch
from jaxtyping import Float, Int, Integer, UInt16
from torch import Tensor

from emoe.config import option
from emoe.domains.base import DataError, Domain, DomainConfig, ShuffledRows
from emoe.domains.text.prepare import MANIFEST, SCHEMA
from emoe.domains.text.reading import SPLITS
from emoe.domains.text.tokens import Fault, Vocabulary, read_vocabulary
from emoe.domains.text.work import TOKEN
from emoe.domains.toy.figures import blank, save, truth_first
from emoe.rng import derive_seed
from emoe.types import Measurement, TokenSpace

HeldOut = Literal["auto", "valid", "test"]
REPEATED = 4  # tokens of a repetition
SHOWN, WIDTH, LINES = 6, 80, 5  # samples of a pool in a picture, characters of a line, lines of a sample
AGAIN = "prepare it again: emoe data prepare"


@dataclass(frozen=True, kw_only=True)
class TextConfig(DomainConfig, kind="text"):
    """Text that `emoe data prepare` made into rows of tokens; the seed plays no role."""

    path: str = option(doc="folder of a set that emoe data prepare wrote")
    held_out: HeldOut = option("auto", doc="rows to evaluate with: valid, test, or auto: test where there is one")
    verify: bool = option(True, doc="compare the files with their checksums when they are opened")

    def conflicts(self) -> Iterator[str]:
        """A split that is not known."""
        if self.held_out not in get_args(HeldOut):
            yield f"held_out: {self.held_out!r} is not known; allowed: {', '.join(get_args(HeldOut))}"

    def build(self, seed: int) -> Text:
        """Open and check the set."""
        return Text(self)


class Text(Domain):
    """Rows of tokens that stay on the disk: the system keeps in memory what is used and what fits."""

    task: ClassVar[str] = "text"

    def __init__(self, config: TextConfig):
        folder = Path(config.path)
        self.name, self.manifest = folder.resolve().name, read_manifest(folder)
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
        self.fresh_rows = len(self.test_rows)
        self._folder = folder

    @functools.cached_property
    def vocabulary(self) -> Vocabulary:
        """The words of the set's tokenizer."""
        told = self.manifest["tokenizer"]
        try:
            found = read_vocabulary(self._folder / told["file"])
        except Fault as fault:
            raise DataError(str(fault)) from None
        if found.sha256 != told["sha256"]:
            raise DataError(f"{found.path}: is not the tokenizer the set was made with; {AGAIN}")
        return found

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
        """How varied the tokens of a sample are, as a mean over the samples.

        `entropy`: -sum_v c_v / L log(c_v / L) in nats, c_v the count of token v in the row. `distinct_1`,
        `distinct_2`: different tokens, or pairs of neighbours, in percent of all. `repetition`: runs of four tokens
        that the row had before, in percent of all. Good text has neither the highest nor the lowest values: compare
        with `measure` of held-out rows.
        """
        rows = samples.cpu()
        found = {"entropy": unigram_entropy(rows), "distinct_1": distinct(rows, 1)}
        if rows.shape[1] > 1:
            found["distinct_2"] = distinct(rows, 2)
        if rows.shape[1] >= REPEATED:
            found["repetition"] = 100 - distinct(rows, REPEATED)
        return [_mean(name, values) for name, values in found.items()]

    def picture(self, pools: Mapping[str, Int[Tensor, "_n L"]], path: Path, *, title: str = "") -> None:
        """The first samples of each pool as text; the beginning of each."""
        pools = truth_first(pools)
        figure, panels = blank(1, len(pools), title=title)
        figure.set_size_inches(4.2 * len(pools), 0.11 * SHOWN * (LINES + 1) + (0.6 if title else 0.4))
        for panel, (name, rows) in zip(panels[0], pools.items(), strict=True):
            texts = ["\n".join(textwrap.wrap(text, WIDTH)[:LINES]) for text in self.decode(rows[:SHOWN])]
            told = "\n\n".join(texts).replace("$", r"\$")  # a pair of them would be a formula
            shown = panel.text(0.01, 0.99, told, va="top", fontsize=6, family="monospace", transform=panel.transAxes)
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
        raise DataError(f"{folder}: {what}; --domain.path takes a folder that emoe data prepare wrote")
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


def unigram_entropy(rows: Int[Tensor, "n L"]) -> Float[Tensor, " n"]:
    """Entropy in nats of the tokens of each row: the mean over its positions of log(L / count of the token there)."""
    length = rows.shape[1]
    counts = torch.stack([(row[:, None] == row).sum(1) for row in rows]) if len(rows) else rows
    return (length / counts.double()).log().mean(1)


def distinct(rows: Int[Tensor, "n L"], size: int) -> Float[Tensor, " n"]:
    """Different runs of `size` tokens in each row, in percent of its L - size + 1 runs."""
    runs = rows.unfold(1, size, 1)
    found = [len(torch.unique(row, dim=0)) for row in runs]
    return 100 * torch.tensor(found, dtype=torch.float64) / runs.shape[1]


def _mean(name: str, values: Float[Tensor, " n"]) -> Measurement:
    n = len(values)
    return Measurement(name, float(values.mean()), float(values.std() / n**0.5) if n > 1 else None, n)
