"""Files of text: which belong to which split, and their content in slices of bounded size.

Compression (.gz, .xz, .bz2 or none) is recognised by the content, archives (.tar, .tar.gz, .tgz, .tar.xz) by the name.
They are read as streams; nothing is unpacked onto the disk. Nothing here imports torch.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import lzma
import re
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, Any, Literal

from emoe.domains import DataError, readable
from emoe.domains.text import Detokenise
from emoe.domains.text.tokens import Style

Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = ("train", "valid", "test")
WORDS: dict[str, Split] = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("valid", "validation", "val", "dev"), "valid"),
    **dict.fromkeys(("test", "heldout"), "test"),
}
PACKED = (".gz", ".xz", ".bz2")
TEXT = (".txt", ".text", ".tokens", ".raw", "")  # endings, once that of a packed file is removed
BLANK = re.compile(rb"\n[ \t\r]*\n")
BOM = b"\xef\xbb\xbf"
SHARD = re.compile(r"news\.en(\.heldout)?-(\d+)-of-(\d+)")  # of the One Billion Word benchmark

Note = Callable[[str], None]


@dataclass(eq=False)
class Source:
    """A file to read; `sha256` and all below are known once it was read to its end."""

    path: Path
    split: Split | None  # None: an archive whose members have splits by their names
    style: Detokenise
    sha256: str = ""
    size: int = 0
    styles: set[str] = field(default_factory=set)  # those that were used
    parts: list[Path] = field(default_factory=list)  # files of encoded slices, in order
    starts: dict[Split, int] = field(default_factory=dict)  # split -> its tokens before those of this file


@dataclass(frozen=True)
class Slice:
    """Whole lines of one text, in a size that fits in memory."""

    name: str  # of the file, and of the member in an archive
    split: Split
    style: Style
    text: bytes
    line: int  # number of the first line, from 1
    offset: int  # of its first byte in the unpacked text
    lone: bool  # every line is a document of its own; else empty lines separate documents
    cost: int  # bytes of the file that were read for it


def split_of(name: str) -> Split | None:
    """The split in the name of the file, or of the folders it lies in, the nearest first."""
    for part in reversed(PurePosixPath(name.replace("\\", "/")).parts):
        if shard := SHARD.match(part):
            return "test" if shard[1] else "train"
        for word in re.split(r"[^a-z]+", part.lower()):
            if word in WORDS:
                return WORDS[word]
    return None


def style_of(name: str) -> Style:
    """The style by the name of a file: shards of the One Billion Word benchmark and WikiText's `.tokens` are known."""
    base = name.replace("\\", "/").rpartition("/")[2].lower()
    if SHARD.match(base):
        return "lm1b"
    return "wikitext" if re.match(r"wiki\.(train|valid|test)\.(tokens|raw)", base) else "none"


def is_text(name: str) -> bool:
    """Whether the name of a file in a folder or an archive is that of a text to read."""
    base = PurePosixPath(name.replace("\\", "/")).name.lower()
    if shard := SHARD.match(base):  # news.en-00000-of-00100 holds the same sentences as the held-out shards
        return bool(shard[1]) or int(shard[2]) > 0
    stem = next((base.removesuffix(ending) for ending in PACKED if base.endswith(ending)), base)
    return not base.startswith((".", "readme", "license", "licence")) and PurePosixPath(stem).suffix in TEXT


def is_archive(path: Path) -> bool:
    """Whether a file has the name of a tar."""
    return re.search(r"\.(tar(\.\w+)?|tgz|txz|tbz2?)$", path.name.lower()) is not None


def find_sources(named: dict[Split | None, Sequence[Path]], style: Detokenise, note: Note) -> list[Source]:
    """All files to read: training first, each split in the given order, the files of a folder sorted by name.

    `named` has files and folders of the splits, and under None those whose names give the split.
    """
    sources: list[Source] = []
    for given, paths in named.items():
        for path in paths:
            if not path.exists():
                raise DataError(f"{path}: does not exist; check the path")
            if path.is_dir():
                files = sorted(file for file in path.rglob("*") if file.is_file())
                splits = [choose_split(str(file.relative_to(path)), given) for file in files]
                _count(path, splits, note)
                sources += [Source(file, split, style) for file, split in zip(files, splits, strict=True) if split]
            else:
                by_name = None if is_archive(path) else split_of(path.name) or "train"
                sources.append(Source(path, given or by_name, style))
    sources.sort(key=lambda source: SPLITS.index(source.split or "train"))
    _check_apart(sources)
    return sources


def choose_split(name: str, given: Split | None) -> Split | None:
    """The split of a file in a folder or an archive; None if its name is that of no text, or of another split."""
    by_name = split_of(name)
    if not is_text(name) or (given is not None and by_name not in (None, given)):
        return None
    return given or by_name or "train"


def _count(path: Path, splits: Sequence[Split | None], note: Note) -> None:
    """Note how many files of a folder or an archive are left out; raise if it is all of them."""
    if left := splits.count(None):
        note(f"{path}: {left} files are no text of a wanted split by their names and are left out")
    if left == len(splits):
        known = f"{', '.join(TEXT[:-1])}, also packed as {', '.join(PACKED)}, or shards news.en-*"
        raise DataError(f"{path}: holds no text ({known}); name its files so")


def _check_apart(sources: Sequence[Source]) -> None:
    """Raise if a file is given twice, or if files of two splits have the same content."""
    sizes = Counter(source.path.stat().st_size for source in sources)
    by_path: dict[Path, Source] = {}
    by_content: dict[str, Source] = {}
    for source in sources:
        if (other := by_path.setdefault(source.path.resolve(), source)) is not source:
            where = "twice" if other.split == source.split else f"in {other.split} and in {source.split}"
            raise DataError(f"{source.path}: is given {where}; name it once")
        if sizes[source.path.stat().st_size] > 1:
            other = by_content.setdefault(sha256_of(source.path), source)
            if other.split != source.split:
                problem = f"one is in {source.split} and the other in {other.split}"
                raise DataError(f"{source.path}: has the same content as {other.path}, but {problem}; keep them apart")


def sha256_of(path: Path) -> str:
    """Checksum of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def slices(source: Source, size: int, note: Note) -> Iterator[Slice]:
    """The content of a file, in order; its hash and size are then known.

    A slice has at most `size` bytes and ends between documents where it can, else between lines.
    """
    path = source.path
    with readable(path, "give a whole copy"):
        before = path.stat()
        if not before.st_size:
            raise DataError(f"{path}: is empty; leave it out or give a whole copy")
        with path.open("rb") as file:
            for name, split, stream in _texts(source, _unpack(file), note):
                yield from _cut(name, split, source, stream, file, size)
        source.sha256, source.size, after = sha256_of(path), before.st_size, path.stat()
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise DataError(f"{path}: changed while it was read; run again when nothing writes to it")


def _unpack(stream: Any) -> Any:
    head = stream.peek(6)[:6]
    if head[:2] == b"\x1f\x8b":
        return gzip.GzipFile(fileobj=stream, mode="rb")
    if head == b"\xfd7zXZ\0":
        return lzma.LZMAFile(stream)
    return bz2.BZ2File(stream) if head[:3] == b"BZh" else stream


def _texts(source: Source, stream: Any, note: Note) -> Iterator[tuple[str, Split, Any]]:
    """(name, split, content) of the text, or of each text of an archive."""
    path = source.path
    if not is_archive(path):
        yield str(path), source.split or "train", stream
        return
    splits: list[Split | None] = []
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for member in archive:
            if member.isdir():
                continue
            if not member.isfile() or member.name.startswith("/") or ".." in PurePosixPath(member.name).parts:
                problem = "points outside the archive" if member.isfile() else "is no plain file"
                remedy = "such an archive is not read, pack the texts anew"
                raise DataError(f"{path}: member {member.name!r} {problem}; {remedy}")
            splits.append(split := choose_split(member.name, source.split))
            if split:
                yield f"{path}: {member.name}", split, _unpack(archive.extractfile(member))
    _count(path, splits, note)


def _cut(name: str, split: Split, source: Source, stream: Any, file: IO[bytes], size: int) -> Iterator[Slice]:
    """Slices of one text, which `stream` unpacks from `file`."""
    style = style_of(name) if source.style == "auto" else source.style
    source.styles.add(style)
    read, line, is_empty = file.tell(), 1, True
    text = stream.read(size)
    is_last = len(text) < size
    offset = len(BOM) if text.startswith(BOM) else 0
    text = text[offset:]
    lone = BLANK.search(text.strip()) is None
    while text:
        end = len(text) if is_last else _end(text, lone)
        if not end:
            problem = f"line {line} is longer than {size:,} bytes, so this is hardly text"
            raise DataError(f"{name}: {problem}; break it into lines first (fold -s -w 1000)")
        if text[:end].strip():
            is_empty = False
            before, read = read, file.tell()
            yield Slice(name, split, style, text[:end], line, offset, lone, read - before)
        line += text.count(b"\n", 0, end)
        offset += end
        rest = text[end:]
        text = rest + stream.read(size - len(rest))
        is_last = len(text) < size
    if is_empty:
        raise DataError(f"{name}: is empty, it holds no line of text; leave it out or give a whole copy")


def _end(text: bytes, lone: bool) -> int:
    """Where a slice ends: after the last empty line of its second half, else after its last line."""
    if not lone:
        last = max(text.rfind(mark, len(text) // 2) + len(mark) for mark in (b"\n\n", b"\n\r\n", b"\n \n"))
        if last > len(text) // 2:
            return last
    return text.rfind(b"\n") + 1
