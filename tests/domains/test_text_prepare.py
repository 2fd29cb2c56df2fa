"""Text to rows: exact rows, splits kept apart, bounded slices, kills, full disks and bad files."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import multiprocessing
import os
import re
import resource
import signal
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import emoe
from emoe.cli import main
from emoe.config import ConfigError, from_dict
from emoe.domains.base import DataError
from emoe.domains.text import detokenise
from emoe.domains.text.prepare import PrepareConfig, prepare
from emoe.domains.text.reading import Source, find_sources, is_text, slices, split_of
from emoe.domains.text.tokens import Encoder, read_vocabulary

pytest.importorskip("tokenizers")

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh", "##x", "##y", ".", "[", "]", "mask"]
UNK, CLS, MASK = 1, 2, 4
A, B, C, D, E, F = range(5, 11)
X = WORDS.index("##x")


@pytest.fixture
def vocab(tmp_path: Path) -> Path:
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(WORDS) + "\n", encoding="utf-8")
    return path


def write(path: Path, text: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def rows(out: Path, split: str) -> list[list[int]]:
    manifest = json.loads((out / "manifest.json").read_bytes())
    return np.fromfile(out / f"{split}.bin", "<u2").reshape(-1, manifest["length"]).tolist()


def content(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.iterdir()}


def config(**changes: object) -> PrepareConfig:
    return PrepareConfig(**({"length": 4, "jobs": 1} | changes))


# --- rows


TRAIN = "A b ax\n\n  c zz \nd\n"  # capitals are lowered, "zz" is unknown, lines are stripped
STREAM = [A, B, A, X, CLS, C, UNK, CLS, D, CLS]


def test_chunks_are_the_stream_in_rows_and_drop_the_tail(tmp_path, vocab):
    train, test = write(tmp_path / "x.txt", TRAIN), write(tmp_path / "y.txt", "a b c d e\n")
    done = prepare(tmp_path / "set", vocab, train=[train], test=[test], config=config())
    assert rows(done.path, "train") == [STREAM[:4], STREAM[4:8]]
    assert rows(done.path, "test") == [[A, B, C, D]]
    told = done.manifest["splits"]["train"]
    assert told["tokens"] == 10 and told["dropped"] == 2 and told["lines"] == 3 and told["documents"] == 2
    assert told["unknown"] == 1 and told["unknown_share"] == 0.1
    assert done.manifest["special"] == {"pad": 0, "unk": UNK, "cls": CLS, "sep": 3, "mask": MASK}
    assert done.manifest["size"] == len(WORDS) and done.manifest["tokenizer"]["lowercase"] is True
    assert sorted(path.name for path in tmp_path.iterdir()) == ["set", "vocab.txt", "x.txt", "y.txt"]  # no leftovers
    assert sorted(content(done.path)) == ["manifest.json", "test.bin", "train.bin", "vocab.txt"]


def test_wrap_puts_cls_at_both_ends(tmp_path, vocab):
    train, test = write(tmp_path / "x.txt", TRAIN), write(tmp_path / "y.txt", "a b c d e\n")
    done = prepare(tmp_path / "set", vocab, train=[train], test=[test], config=config(length=5, packing="wrap"))
    assert rows(done.path, "train") == [[CLS, *STREAM[i : i + 3], CLS] for i in (0, 3, 6)]
    assert rows(done.path, "test") == [[CLS, A, B, C, CLS], [CLS, D, E, CLS, CLS]]
    assert done.manifest["splits"]["train"]["dropped"] == 1


def test_the_index_says_where_each_file_begins(tmp_path, vocab):
    files = [
        write(tmp_path / name, text)
        for name, text in (("1-train", "a b\n"), ("2-train", "c\nd\n"), ("test", "a b c d\n"))
    ]
    done = prepare(tmp_path / "set", vocab, files, config=config())
    assert [item["starts"] for item in done.manifest["inputs"]] == [{"train": 0}, {"train": 3}, {"test": 0}]
    assert [Path(item["path"]).name for item in done.manifest["inputs"]] == ["1-train", "2-train", "test"]


@pytest.mark.parametrize("pack", [bytes, gzip.compress, lzma.compress, bz2.compress])
def test_packed_files_are_told_by_their_content(tmp_path, vocab, pack):
    train, test = write(tmp_path / "train.any", pack(TRAIN.encode())), write(tmp_path / "test.any", "a b c d\n")
    done = prepare(tmp_path / "set", vocab, [train, test], config=config())
    assert rows(done.path, "train") == [STREAM[:4], STREAM[4:8]]


def test_special_words_in_a_text_are_plain_text_whatever_the_tokenizer_file(tmp_path, vocab):
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    model = Tokenizer(models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    model.normalizer, model.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    model.add_special_tokens(["[MASK]", "[CLS]"])
    model.enable_truncation(3)
    model.enable_padding(length=9)
    model.save(str(tmp_path / "tokenizer.json"))
    both = [read_vocabulary(vocab), read_vocabulary(tmp_path / "tokenizer.json")]
    assert both[0].words == both[1].words and both[0].special == both[1].special
    lines = ["a [MASK] b [CLS]", "Ax éé d. 中"]
    left, mask, right, stop = map(WORDS.index, ["[", "mask", "]", "."])
    expected = [[A, left, mask, right, B, left, UNK, right], [A, X, UNK, D, stop, UNK]]
    assert Encoder(both[0])(lines) == Encoder(both[1])(lines) == expected


def test_cased_vocabularies_keep_capitals(tmp_path):
    path = write(tmp_path / "vocab.txt", "[UNK]\n[CLS]\n[MASK]\na\nA\n")
    vocabulary = read_vocabulary(path)
    assert not vocabulary.lowercase and Encoder(vocabulary)(["a A"]) == [[3, 4]]


# --- slices


texts = st.lists(st.text("ab c\r", max_size=9), max_size=30).map("\n".join)


@given(texts, st.integers(16, 60))
@settings(max_examples=60, deadline=None)
def test_slices_hold_every_line_once_in_order(tmp_path_factory, text, size):
    path = write(tmp_path_factory.mktemp("slices") / "x.txt", text + "\na")
    source = Source(path, "train", "none")
    parts = list(slices(source, size, lambda _: None))
    lines = [line for part in parts for line in part.text.split(b"\n") if line.strip()]
    assert lines == [line for line in (text + "\na").encode().split(b"\n") if line.strip()]
    assert all(len(part.text) <= size for part in parts)
    whole = (text + "\na").encode()
    for part in parts:
        assert whole[part.offset : part.offset + len(part.text)] == part.text
        assert part.line == 1 + whole.count(b"\n", 0, part.offset)
    assert source.size == len(whole) == path.stat().st_size


def corpus(count: int = 300) -> str:
    draw = np.random.default_rng(5)
    documents = ("\n".join(" ".join(draw.choice(list("abcdefgh"), 9)) for _ in range(3)) for _ in range(count))
    return "\n\n".join(documents) + "\n"


def test_split_by_hash_keeps_documents_whole_and_does_not_hang_on_slices_or_processes(tmp_path, vocab):
    text = write(tmp_path / "x.txt", corpus())
    made = [
        prepare(tmp_path / f"set{i}", vocab, [text], config=config(split=(0.2, 0.1), seed=seed, **more))
        for i, (seed, more) in enumerate(
            [(0, {}), (0, {"slice_bytes": 500}), (0, {"jobs": 2, "slice_bytes": 700}), (1, {})]
        )
    ]
    assert [(done.made, done.kept) for done in made[:1]] == [(1, 0)] and made[2].made > 20
    assert content(made[0].path) == content(made[1].path) == content(made[2].path)
    assert rows(made[0].path, "test") != rows(made[3].path, "test")
    counts = {name: split["documents"] for name, split in made[0].manifest["splits"].items()}
    assert sum(counts.values()) == 300 and 40 <= counts["valid"] <= 80 and 15 <= counts["test"] <= 45
    assert all(split["lines"] == 3 * split["documents"] for split in made[0].manifest["splits"].values())


def test_lines_are_documents_where_no_line_is_empty(tmp_path, vocab):
    text = write(tmp_path / "x.txt", corpus().replace("\n\n", "\n"))
    done = prepare(tmp_path / "set", vocab, [text], config=config(split=(0.1, 0.1)))
    assert sum(split["documents"] for split in done.manifest["splits"].values()) == 900


def test_preparing_needs_no_torch():
    script = "import emoe.domains.text.prepare, sys; assert 'torch' not in sys.modules"
    environment = os.environ | {"PYTHONPATH": str(Path(emoe.__file__).parents[1])}
    assert subprocess.run([sys.executable, "-c", script], env=environment, timeout=60).returncode == 0


# --- splits by name


@pytest.mark.parametrize(
    "name, split",
    [
        ("news.en-00042-of-00100", "train"),
        ("heldout-monolingual/news.en.heldout-00007-of-00050.gz", "test"),
        ("allsides-train-00.txt.xz", "train"),
        ("wiki.valid.tokens", "valid"),
        ("1b_benchmark.dev.tokens.gz", "valid"),
        ("test/part-1.txt", "test"),
        ("train/valid.txt", "valid"),
        ("contest.txt", None),
    ],
)
def test_names_tell_the_split(name, split):
    assert split_of(name) == split


def test_names_tell_what_is_text():
    names = ["a.txt", "a.txt.gz", "a.tokens.xz", "a", "news.en-00001-of-00100", "news.en.heldout-00000-of-00050"]
    assert all(map(is_text, names))
    assert not any(map(is_text, ["README", "a.md", ".a.txt", "a.json", "x.json.gz", "news.en-00000-of-00100"]))


def test_folders_are_sorted_by_their_names_and_tell_what_is_left_out(tmp_path, vocab):
    folder = tmp_path / "data"
    for name in ("b-train.txt", "a-train.txt", "valid.txt", "test.txt", "README.md"):
        write(folder / name, "a b c d\n")
    (folder / "test.txt").write_text("d c b a\n")
    (folder / "valid.txt").write_text("b a b a\n")
    told: list[str] = []
    found = find_sources({None: [folder]}, "auto", told.append)
    assert [(source.path.name, source.split) for source in found] == [
        ("a-train.txt", "train"), ("b-train.txt", "train"), ("valid.txt", "valid"), ("test.txt", "test")
    ]  # fmt: skip
    assert told == [f"{folder}: 1 files are no text by their names and are left out"]
    found = find_sources({"train": [folder]}, "auto", told.append)
    assert {source.split for source in found} == {"train"} and len(found) == 2
    assert any("is left out of train, its name says test" in line for line in told)


def test_splits_that_share_a_file_are_refused(tmp_path):
    one, two = write(tmp_path / "a.txt", "a b"), write(tmp_path / "b.txt", "a b")
    with pytest.raises(Exception, match=r"a.txt: is given in train and in test"):
        find_sources({"train": [one], "test": [tmp_path / "." / "a.txt"]}, "auto", print)
    with pytest.raises(
        Exception, match=r"b.txt: has the same content as .*a.txt, but one is in test and the other in train"
    ):
        find_sources({"train": [one], "test": [two]}, "auto", print)


# --- archives


def pack(path: Path, members: dict[str, bytes], kind: bytes = tarfile.REGTYPE) -> Path:
    with tarfile.open(path, "w:gz" if path.name.endswith("gz") else "w") as archive:
        for name, data in members.items():
            entry = tarfile.TarInfo(name)
            entry.type, entry.size = kind, len(data) if kind == tarfile.REGTYPE else 0
            entry.linkname = "/etc/passwd"
            archive.addfile(entry, io.BytesIO(data))
    return path


def test_the_billion_word_archive_is_streamed_with_its_own_splits(tmp_path, vocab):
    top = "1-billion-word-language-modeling-benchmark-r13output"
    packed = gzip.compress(b"a b c\n")
    path = pack(
        tmp_path / "benchmark.tar.gz",
        {
            f"{top}/README": b"read me",
            f"{top}/training-monolingual.tokenized.shuffled/news.en-00001-of-00100": b"a , b\n",
            f"{top}/training-monolingual.tokenized.shuffled/news.en-00002-of-00100": b"c 'd e\n",
            f"{top}/heldout-monolingual.tokenized.shuffled/news.en-00000-of-00100": b"h h h h\n",
            f"{top}/heldout-monolingual.tokenized.shuffled/news.en.heldout-00000-of-00050": b"f f f\n",
            f"{top}/heldout-monolingual.tokenized.shuffled/news.en.heldout-00001-of-00050.gz": packed,
        },
    )  # fmt: skip
    told: list[str] = []
    done = prepare(tmp_path / "set", vocab, [path], config=config(), note=told.append)
    assert rows(done.path, "test") == [[F, F, F, CLS], [A, B, C, CLS]]
    assert rows(done.path, "train") == [[A, UNK, B, CLS], [C, UNK, D, E]]
    assert done.manifest["inputs"][0]["detokenise"] == ["lm1b"]
    assert any("2 members" in line for line in told)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["benchmark.tar.gz", "set", "vocab.txt"]


@pytest.mark.parametrize(
    "name, kind, told",
    [
        ("../train.txt", tarfile.REGTYPE, "points outside the archive"),
        ("/tmp/train.txt", tarfile.REGTYPE, "points outside the archive"),
        ("train.txt", tarfile.SYMTYPE, "is no plain file"),
        ("train.txt", tarfile.CHRTYPE, "is no plain file"),
        ("readme.md", tarfile.REGTYPE, "holds no text"),
    ],
)
def test_unsafe_archives_are_refused(tmp_path, vocab, name, kind, told):
    path = pack(tmp_path / "x.tar", {name: b"a b\n"}, kind)
    with pytest.raises(DataError, match=told):
        prepare(tmp_path / "set", vocab, [path], config=config(split=(0.5, 0)))
    assert not (tmp_path / "set").exists()


# --- detokenising


@pytest.mark.parametrize(
    "before, after",
    [
        ('" I did n\'t , " she said . ', '"I did n\'t," she said. '),
        ("It 's 5 . 5 ; no : yes !", "It's 5. 5; no: yes!"),
        ("Really ? ?", "Really??"),
        ("( see http : / / a . b / c )", "(see http://a . b/c)"),
        ("[ sic ] costs $ 5 or £ 4 .", "[sic] costs $5 or £4."),
        ("He said ' no ' twice .", "He said 'no' twice."),
        ("a - b", "a - b"),
    ],
)
def test_lm1b_spacing_is_undone_as_the_field_does(before, after):
    assert detokenise.lm1b(before) == after


def test_styles_are_told_by_names():
    assert detokenise.wikitext("1 @,@ 000 well @-@ known 2 @.@ 5") == "1,000 well-known 2.5"
    names = ["x/news.en-00001-of-00100", "news.en.heldout-00000-of-00050.gz", "wiki.train.tokens.gz", "news.txt"]
    assert list(map(detokenise.style_of, names)) == ["lm1b", "lm1b", "wikitext", "none"]


# --- kills, changes and full disks


RUN = """
import os, signal, sys, time
from pathlib import Path
from emoe.domains.text.prepare import PrepareConfig, prepare
folder, stop, jobs, slow = Path(sys.argv[1]), *map(int, sys.argv[2:])
count = 0
def progress(*_):
    global count
    count += 1
    if count == stop:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(slow)
config = PrepareConfig(length=4, jobs=jobs, split=(0.2, 0.1), slice_bytes=600)
prepare(folder / "set", folder / "vocab.txt", [folder / "x.txt"], config=config, on_progress=progress)
"""


def start(folder: Path, stop: int, jobs: int, *, slow: bool = False, **options: Any) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(Path(emoe.__file__).parents[1])}
    words = [sys.executable, "-c", RUN, str(folder), str(stop), str(jobs), str(int(slow))]
    return subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True, **options)


def run(folder: Path, stop: int, jobs: int, **options: Any) -> tuple[int, str]:
    """Exit code and errors of a process that prepares; it is killed after so many slices."""
    process = start(folder, stop, jobs, **options)
    return (lambda errors: (process.returncode, errors))(process.communicate(timeout=120)[1])


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_killed_run_goes_on_and_ends_with_the_same_bytes(tmp_path, vocab, jobs):
    text = write(tmp_path / "x.txt", corpus())
    shared = {"split": (0.2, 0.1), "slice_bytes": 600}
    expected = prepare(tmp_path / "whole", vocab, [text], config=config(**shared))
    assert run(tmp_path, 9, jobs)[0] == -signal.SIGKILL and not (tmp_path / "set").exists()
    parts = tmp_path / ".set.parts"
    assert len(list(parts.glob("*.json"))) >= 9
    victim = sorted(parts.glob("*.bin"))[0]
    victim.write_bytes(victim.read_bytes()[:-2])  # a part that a power cut left short
    again = prepare(tmp_path / "set", vocab, [text], config=config(**shared))
    assert 8 <= again.kept < expected.made and again.kept + again.made == expected.made
    assert content(again.path) == content(expected.path)
    assert not parts.exists()


def test_a_changed_file_is_told_and_its_old_parts_are_not_used(tmp_path, vocab):
    text = write(tmp_path / "x.txt", corpus())
    assert run(tmp_path, 9, 1)[0] == -signal.SIGKILL
    changed = corpus().replace("a", "b", 5)
    write(text, changed)
    told: list[str] = []
    shared = config(split=(0.2, 0.1), slice_bytes=600)
    done = prepare(tmp_path / "set", vocab, [text], config=shared, note=told.append)
    assert [line.partition(":")[2].split(";")[0] for line in told] == [" changed since the last run"]
    assert 0 < done.kept < 9  # only what is the same
    whole = prepare(tmp_path / "whole", vocab, [text], config=shared)
    assert content(done.path) == content(whole.path)


def test_a_full_disk_leaves_no_set_and_can_go_on(tmp_path, vocab):
    write(tmp_path / "x.txt", corpus(2000))

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    for jobs in (1, 2):
        _, errors = run(tmp_path, -1, jobs, preexec_fn=limit)  # the parts fit, train.bin does not
        assert "StorageError" in errors and "set: the disk is full" in errors, errors
        assert "run the same command again" in errors
        assert not (tmp_path / "set").exists() and not (tmp_path / ".set.draft").exists()
    assert run(tmp_path, -1, 1)[0] == 0 and (tmp_path / "set" / "manifest.json").exists()


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_disk_that_fills_while_parts_are_written(tmp_path, vocab, jobs):
    write(tmp_path / "x.txt", corpus(10))
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))  # noqa: E731
    code, errors = run(tmp_path, -1, jobs, preexec_fn=limit)
    assert code == 1 and "StorageError" in errors and "the disk is full" in errors, errors
    left = [path.name for path in (tmp_path / ".set.parts").iterdir()]
    assert not [name for name in left if ".bin" in name], "a torn part stayed"


def test_a_worker_that_dies_is_an_error_and_the_same_command_goes_on(tmp_path, vocab):
    text = write(tmp_path / "x.txt", corpus())
    shared = {"split": (0.2, 0.1), "slice_bytes": 600}

    def kill(*_: object) -> None:
        for child in multiprocessing.active_children():
            child.kill()

    with pytest.raises(DataError, match="x.txt: a worker process died at line .* for lack of memory; run the same"):
        prepare(tmp_path / "set", vocab, [text], config=config(jobs=2, **shared), on_progress=kill)
    assert not (tmp_path / "set").exists()
    again = prepare(tmp_path / "set", vocab, [text], config=config(jobs=2, **shared))
    assert again.kept > 0
    assert content(again.path) == content(prepare(tmp_path / "whole", vocab, [text], config=config(**shared)).path)


def test_workers_end_when_the_run_is_killed(tmp_path, vocab):
    write(tmp_path / "x.txt", corpus())
    process = start(tmp_path, -1, 2, slow=True)
    workers: list[psutil.Process] = []
    while len(workers) < 2:  # the timeout of the test ends a loop without workers
        children = psutil.Process(process.pid).children()
        workers = [child for child in children if "spawn_main" in str(child.as_dict(["cmdline"])["cmdline"])]
    process.kill()
    process.communicate()
    assert not psutil.wait_procs(workers, timeout=30)[1]


def test_a_set_is_prepared_by_one_run_at_a_time(tmp_path, vocab):
    import fcntl

    text = write(tmp_path / "x.txt", corpus(20))
    (tmp_path / ".set.parts").mkdir()
    with (tmp_path / ".set.parts" / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(DataError, match="another run prepares this set"):
            prepare(tmp_path / "set", vocab, [text], config=config(split=(0.2, 0.2)))


def test_a_set_that_is_there_is_left_alone(tmp_path, vocab):
    text = write(tmp_path / "x.txt", corpus(50))
    shared = config(split=(0.2, 0.2))
    first = prepare(tmp_path / "set", vocab, [text], config=shared)
    before = (tmp_path / "set" / "train.bin").stat().st_mtime_ns
    again = prepare(tmp_path / "set", vocab, [text], config=shared)
    assert (again.made, again.kept) == (0, 0) and again.manifest == first.manifest
    assert (tmp_path / "set" / "train.bin").stat().st_mtime_ns == before
    for other in (config(split=(0.2, 0.2), length=5), config(split=(0.2, 0.3))):
        with pytest.raises(DataError, match=r"set: holds something else; choose another --out"):
            prepare(tmp_path / "set", vocab, [text], config=other)
    write(text, corpus(51))
    with pytest.raises(DataError, match="holds something else"):
        prepare(tmp_path / "set", vocab, [text], config=shared)
    assert content(tmp_path / "set")["train.bin"]


# --- bad inputs


GOOD = corpus(40).encode()
LATE = GOOD.count(b"\n") + 2
BAD = {
    "empty": (b"", r"x.txt: is empty"),
    "blank": (b" \n\n \n", r"x.txt: is empty, it holds no line of text"),
    "latin-1": (b"a b\nc d\ncaf\xe9 a\n", r"x.txt: line 3, byte 11 is not UTF-8 \(invalid continuation byte: 0xe9\)"),
    "utf-16": ("a b\nc".encode("utf-16-le"), r"x.txt: line 1, byte 1 holds a zero byte"),
    "late": (GOOD + b"a\n\xff\n", rf"line {LATE}, byte {len(GOOD) + 2:,} is not UTF-8"),
    "cut gzip": (gzip.compress(GOOD)[:-9], r"x.txt: cannot be read, damaged or cut off"),
    "cut xz": (lzma.compress(GOOD)[:-9], r"x.txt: cannot be read, damaged or cut off"),
    "damaged gzip": (gzip.compress(GOOD)[:40] + b"??" + gzip.compress(GOOD)[42:], r"cannot be read, damaged"),
    "one long line": (b"a b " * 1000, r"line 1 is longer than 2,000 bytes.*fold"),
    "short": (b"a\n", r"train: \d tokens do not fill one row of 4"),
}


@pytest.mark.parametrize("case, jobs", [*((case, 1) for case in BAD), ("latin-1", 2), ("cut gzip", 2)])
def test_bad_files_are_named_with_a_remedy(tmp_path, vocab, case, jobs):
    data, told = BAD[case]
    bad, test = write(tmp_path / "x.txt", data), write(tmp_path / "test.txt", "a b c d e\n")
    with pytest.raises(DataError, match=told):
        prepare(tmp_path / "set", vocab, train=[bad], test=[test], config=config(slice_bytes=2000, jobs=jobs))
    assert not (tmp_path / "set").exists() and not (tmp_path / ".set.draft").exists()


def test_bytes_that_are_no_text_can_be_replaced(tmp_path, vocab):
    bad, test = write(tmp_path / "x.txt", b"a \xff b c d\n"), write(tmp_path / "test.txt", b"\xef\xbb\xbfa b c d\r\n")
    done = prepare(tmp_path / "set", vocab, train=[bad], test=[test], config=config(encoding_errors="replace"))
    assert rows(done.path, "train") == [[A, B, C, D]]  # the tokenizer drops the mark
    assert rows(done.path, "test") == [[A, B, C, D]]  # and a byte order mark is none of the text


def test_a_file_that_changes_while_it_is_read(tmp_path):
    source = Source(write(tmp_path / "x.txt", corpus()), "train", "none")
    parts = slices(source, 500, print)
    next(parts)
    with source.path.open("ab") as file:
        file.write(b"more\n")
    with pytest.raises(Exception, match="changed while it was read"):
        list(parts)


BAD_VOCABULARIES = {
    "no mask": ("vocab.txt", "[UNK]\n[CLS]\na\n", r"has no \[MASK\]"),
    "twice": ("vocab.txt", "[UNK]\n[CLS]\n[MASK]\na\na\n", r"line 5 repeats 'a'"),
    "too large": ("vocab.txt", "[UNK]\n[CLS]\n[MASK]\n" + "\n".join(map(str, range(65_536))), "stored in 16 bits"),
    "not utf-8": ("vocab.txt", b"[UNK]\n\xff\n", "cannot be read"),
    "no json": ("tokenizer.json", "{", "is no tokenizer.json"),
    "another model": ("tokenizer.json", '{"model": {"type": "BPE", "vocab": {}}}', "holds a BPE model; only WordPiece"),
    "none": ("vocabulary.txt", "a", "holds neither tokenizer.json nor vocab.txt"),
}


@pytest.mark.parametrize("case", BAD_VOCABULARIES)
def test_bad_vocabularies_are_named_with_a_remedy(tmp_path, case):
    name, text, told = BAD_VOCABULARIES[case]
    write(tmp_path / "bert" / name, text)
    with pytest.raises(DataError, match=told):
        prepare(tmp_path / "set", tmp_path / "bert", [write(tmp_path / "x.txt", "a")], config=config(split=(0.5, 0)))


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"length": 2}, "length: must be >= 3"),
        ({"packing": "wrapped"}, "packing: got 'wrapped'; did you mean 'wrap'?"),
        ({"split": (0.1,)}, "split: give two shares"),
        ({"split": (0.0, 0.0)}, "split: give two shares"),
        ({"split": (0.9, 0.1)}, "split: must be >= 0 and <= 0.5"),
        ({"detokenise": "moses"}, "detokenise: got 'moses'; allowed: auto, lm1b, none, wikitext"),
        ({"encoding_errors": "ignore"}, "encoding_errors: got 'ignore'"),
    ],
)
def test_bad_settings(changes, told):
    with pytest.raises(ConfigError, match=re.escape(told)):
        from_dict(PrepareConfig, changes)


# --- the command


def test_the_command_from_end_to_end(tmp_path, vocab, capfd):
    write(tmp_path / "data" / "train.txt", corpus())
    write(tmp_path / "data" / "valid.txt.gz", gzip.compress(b"a b c d e f\n"))
    words = ["data", "prepare", str(tmp_path / "data"), "--tokenizer", str(vocab), "--length", "4"]
    assert main([*words, "--out", str(tmp_path / "set"), "--jobs", "2"]) == 0
    said = capfd.readouterr().out
    assert "valid: 1 rows of 4 tokens, 1 documents" in said and "--domain text --domain.path" in said
    assert rows(tmp_path / "set", "valid") == [[A, B, C, D]]
    assert main([*words, "--out", str(tmp_path / "set")]) == 0
    assert "is there already, nothing to do" in capfd.readouterr().out


@pytest.mark.parametrize(
    "words, code, told",
    [
        (["x.txt"], 2, "split: nothing is held out; give --valid or --test, or shares: --split 0.005,0.005"),
        ([], 2, "inputs: none are given"),
        (["test.txt"], 2, "train: no file is for training by its name"),
        (["x.txt", "--packing", "wraps"], 2, "did you mean 'wrap'?"),
        (["x.txt", "--split", "0.5"], 2, "split: give two shares"),
        (["x.txt", "--length", "long"], 2, "length: expected whole number"),
        (["nowhere.txt"], 3, "nowhere.txt: does not exist"),
        (["x.txt", "--split", "0.1,0.1", "--tokenizer", "nowhere"], 3, "nowhere: does not exist"),
        (["x.txt", "--spilt", "0.1"], 2, "did you mean"),
    ],
)
def test_wrong_words_are_a_line_and_an_exit_code(tmp_path, vocab, monkeypatch, capfd, words, code, told):
    monkeypatch.chdir(tmp_path)
    write(Path("x.txt"), corpus(5))
    write(Path("test.txt"), "a b c d")
    assert main(["data", "prepare", "--out", "set", "--tokenizer", "vocab.txt", *words]) == code
    said = capfd.readouterr().err
    assert told in said and "Traceback" not in said
    assert not Path("set").exists()


def test_without_the_library_the_remedy_is_told(tmp_path, vocab, monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    text = write(tmp_path / "x.txt", corpus(5))
    assert main(["data", "prepare", str(text), "--out", str(tmp_path / "set"), "--tokenizer", str(vocab)]) == 2
    assert "tokenizers: the package is missing; pip install emoe[text]" in capfd.readouterr().err


# --- published files


def test_the_held_out_billion_words(tmp_path, data_root):
    names = ["lm1b-small/news.en.heldout-00000-of-00050", "tokenizers/bert-base-uncased/vocab.txt"]
    root = data_root(names)
    test = root / f"{names[0]}.gz"
    train = write(tmp_path / "train.txt", "A sentence to train on, which fills a row of twelve tokens.\n")
    shared = {"length": 12, "packing": "wrap", "jobs": 2, "slice_bytes": 1 << 18}
    done = prepare(tmp_path / "set", root / names[1], train=[train], test=[test], config=config(**shared))
    told = done.manifest["splits"]["test"]
    assert (told["lines"], told["documents"]) == (6075, 6075) and done.manifest["size"] == 30_522
    assert done.manifest["special"] == {"pad": 0, "unk": 100, "cls": 101, "sep": 102, "mask": 103}
    assert done.manifest["inputs"][1]["sha256"].startswith("7c7c60f7")
    found = np.array(rows(done.path, "test"))
    assert (found[:, [0, -1]] == 101).all() and found.shape == (told["tokens"] // 10, 12)
    assert not np.isin(found, [0, 102, 103]).any()
    lines = gzip.decompress(test.read_bytes()).decode().splitlines()
    encoder = Encoder(read_vocabulary(root / names[1]))
    stream = [token for ids in encoder([detokenise.lm1b(line) for line in lines[:50]]) for token in [*ids, 101]]
    assert found[:, 1:-1].ravel()[: len(stream)].tolist() == stream
