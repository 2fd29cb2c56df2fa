"""Text to rows: exact rows, splits kept apart, bounded slices, kills, full disks and bad files."""

from __future__ import annotations

import bz2
import functools
import gzip
import io
import json
import lzma
import os
import resource
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import emoe
from emoe.cli import main
from emoe.domains.base import DataError
from emoe.domains.text import PrepareConfig
from emoe.domains.text.prepare import prepare
from emoe.domains.text.reading import Source, find_sources, is_text, slices, split_of, style_of
from emoe.domains.text.tokens import Encoder, detokenise, read_vocabulary
from emoe.files import RunBusy, run_lock

pytest.importorskip("tokenizers")

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh", "##x", "##y", ".", "[", "]", "mask"]
UNK, CLS, MASK = 1, 2, 4
A, B, C, D, E, F = range(5, 11)
X = WORDS.index("##x")


@pytest.fixture
def vocab(tmp_path: Path) -> Path:
    return write(tmp_path / "vocab.txt", "\n".join(WORDS) + "\n")


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


TRAIN = "A b ax\n\n  c zz \nd\n"  # capitals are lowered, "zz" is unknown, lines are stripped
STREAM = [A, B, A, X, CLS, C, UNK, CLS, D, CLS]


@pytest.mark.parametrize("pack", [bytes, gzip.compress, lzma.compress, bz2.compress])
def test_rows_of_both_packings(tmp_path, vocab, pack):
    """Of plain text, and of packed files, which are told by their content."""
    train, test = write(tmp_path / "x.txt", pack(TRAIN.encode())), write(tmp_path / "y.txt", "a b c d e\n")
    files = {"train": [train], "test": [test]}
    done = prepare(tmp_path / "set", vocab, **files, config=config())
    assert rows(done.path, "train") == [STREAM[:4], STREAM[4:8]]
    assert rows(done.path, "test") == [[A, B, C, D]]
    entry = done.manifest["splits"]["train"]
    assert entry["tokens"] == 10 and entry["dropped"] == 2 and entry["lines"] == 3 and entry["documents"] == 2
    assert entry["unknown"] == 1 and entry["unknown_share"] == 0.1
    assert done.manifest["special"] == {"pad": 0, "unk": UNK, "cls": CLS, "sep": 3, "mask": MASK}
    assert done.manifest["size"] == len(WORDS) and done.manifest["tokenizer"]["lowercase"] is True
    assert sorted(path.name for path in tmp_path.iterdir()) == ["set", "vocab.txt", "x.txt", "y.txt"]  # no leftovers
    assert sorted(content(done.path)) == ["manifest.json", "test.bin", "train.bin", "vocab.txt"]
    wrap = prepare(tmp_path / "wrap", vocab, **files, config=config(length=5, packing="wrap"))
    assert rows(wrap.path, "train") == [[CLS, *STREAM[i : i + 3], CLS] for i in (0, 3, 6)]
    assert rows(wrap.path, "test") == [[CLS, A, B, C, CLS], [CLS, D, E, CLS, CLS]]
    assert wrap.manifest["splits"]["train"]["dropped"] == 1


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
    left, mask, right, stop = map(WORDS.index, ["[", "mask", "]", "."])
    expected = [[A, left, mask, right, B, left, UNK, right], [A, X, UNK, D, stop, UNK]]
    for vocabulary in both:
        assert [*Encoder(vocabulary)(["a [MASK] b [CLS]", "Ax éé d. 中"])] == expected
    cased = read_vocabulary(write(tmp_path / "cased" / "vocab.txt", "[UNK]\n[CLS]\n[MASK]\na\nA\n"))
    assert not cased.lowercase and [*Encoder(cased)(["a A"])] == [[3, 4]]


texts = st.lists(st.text("ab c\r", max_size=9), max_size=30).map("\n".join)


@given(texts, st.integers(16, 60))
@settings(max_examples=60, deadline=None)
def test_slices_hold_every_line_once_in_order(tmp_path_factory, text, size):
    whole = (text + "\na").encode()
    path = write(tmp_path_factory.mktemp("slices") / "x.txt", whole)
    source = Source(path, "train", "none")
    parts = list(slices(source, size, lambda _: None))
    lines = [line for part in parts for line in part.text.split(b"\n") if line.strip()]
    assert lines == [line for line in whole.split(b"\n") if line.strip()]
    for part in parts:
        assert len(part.text) <= size and whole[part.offset : part.offset + len(part.text)] == part.text
        assert part.line == 1 + whole.count(b"\n", 0, part.offset)
    assert source.size == len(whole) == path.stat().st_size


def corpus(count: int = 300) -> str:
    draw = np.random.default_rng(5)
    documents = ("\n".join(" ".join(draw.choice(list("abcdefgh"), 9)) for _ in range(3)) for _ in range(count))
    return "\n\n".join(documents) + "\n"


def test_split_by_hash_keeps_documents_whole_and_does_not_hang_on_slices_or_processes(tmp_path, vocab):
    text = write(tmp_path / "x.txt", corpus())
    sets = []
    for more in ({}, {"slice_bytes": 500}, {"jobs": 2, "slice_bytes": 700}, {"seed": 1}):
        sets.append(prepare(tmp_path / str(len(sets)), vocab, [text], config=config(split=(0.2, 0.1), **more)))
    assert (sets[0].made, sets[0].kept) == (1, 0) and sets[2].made > 20
    assert content(sets[0].path) == content(sets[1].path) == content(sets[2].path)
    assert rows(sets[0].path, "test") != rows(sets[3].path, "test")
    counts = {name: split["documents"] for name, split in sets[0].manifest["splits"].items()}
    assert sum(counts.values()) == 300 and 40 <= counts["valid"] <= 80 and 15 <= counts["test"] <= 45
    assert all(split["lines"] == 3 * split["documents"] for split in sets[0].manifest["splits"].values())
    write(text, corpus().replace("\n\n", "\n"))  # lines are documents where no line is empty
    done = prepare(tmp_path / "lines", vocab, [text], config=config(split=(0.1, 0.1)))
    assert sum(split["documents"] for split in done.manifest["splits"].values()) == 900


def test_preparing_needs_no_torch():
    script = "import emoe.domains.text.prepare, sys; assert 'torch' not in sys.modules"
    environment = os.environ | {"PYTHONPATH": str(Path(emoe.__file__).parents[1])}
    assert subprocess.run([sys.executable, "-c", script], env=environment, timeout=60).returncode == 0


def test_names_say_the_split_the_style_and_what_is_text():
    splits = {
        "news.en-00042-of-00100": "train",
        "heldout-monolingual/news.en.heldout-00007-of-00050.gz": "test",
        "allsides-train-00.txt.xz": "train",
        "1b_benchmark.dev.tokens.gz": "valid",
        "test/part-1.txt": "test",
        "train/valid.txt": "valid",
        "contest.txt": None,
    }
    assert {name: split_of(name) for name in splits} == splits
    names = ["a.txt", "a.txt.gz", "a.tokens.xz", "a", "news.en-00001-of-00100", "news.en.heldout-00000-of-00050"]
    assert all(map(is_text, names))
    assert not any(map(is_text, ["README", "a.md", ".a.txt", "a.json", "x.json.gz", "news.en-00000-of-00100"]))
    names = ["x/news.en-00001-of-00100", "news.en.heldout-00000-of-00050.gz", "wiki.train.tokens.gz", "news.txt"]
    assert list(map(style_of, names)) == ["lm1b", "lm1b", "wikitext", "none"]


def test_folders_are_sorted_and_splits_kept_apart(tmp_path):
    folder = tmp_path / "data"
    for name in ("b-train.txt", "a-train.txt", "valid.txt", "test.txt", "READ.md"):
        write(folder / name, name)
    notes = list[str]()
    sources = find_sources({None: [folder]}, "auto", notes.append)
    assert [source.path.name for source in sources] == ["a-train.txt", "b-train.txt", "valid.txt", "test.txt"]
    assert [source.split for source in sources] == ["train", "train", "valid", "test"]
    left_out = "files are no text of a wanted split by their names and are left out"
    assert notes == [f"{folder}: 1 {left_out}"]
    sources = find_sources({"train": [folder]}, "auto", notes.append)
    assert {source.split for source in sources} == {"train"} and len(sources) == 2
    assert notes[1:] == [f"{folder}: 3 {left_out}"]
    one, two = write(tmp_path / "a.txt", "a b"), write(tmp_path / "b.txt", "a b")
    with pytest.raises(DataError, match=r"a.txt: is given in train and in test"):
        find_sources({"train": [one], "test": [tmp_path / "." / "a.txt"]}, "auto", print)
    with pytest.raises(DataError, match=r"b.txt: has the same content as .*a.txt, but one is in test and the other in"):
        find_sources({"train": [one], "test": [two]}, "auto", print)


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
    train, test = (f"{top}/{name}-monolingual.tokenized.shuffled/news.en" for name in ("training", "heldout"))
    members = {
        f"{top}/README": b"read me",
        f"{train}-00001-of-00100": b"a , b\n",
        f"{train}-00002-of-00100": b"c 'd e\n",
        f"{test}-00000-of-00100": b"h h h h\n",
        f"{test}.heldout-00000-of-00050": b"f f f\n",
        f"{test}.heldout-00001-of-00050.gz": gzip.compress(b"a b c\n"),
    }
    notes = list[str]()
    path = pack(tmp_path / "benchmark.tar.gz", members)
    done = prepare(tmp_path / "set", vocab, [path], config=config(), note=notes.append)
    assert rows(done.path, "test") == [[F, F, F, CLS], [A, B, C, CLS]]
    assert rows(done.path, "train") == [[A, UNK, B, CLS], [C, UNK, D, E]]
    assert done.manifest["inputs"][0]["detokenise"] == ["lm1b"] and notes == [
        f"{path}: 2 files are no text of a wanted split by their names and are left out"
    ]


@pytest.mark.parametrize(
    "name, kind, message",
    [
        ("../train.txt", tarfile.REGTYPE, "points outside the archive"),
        ("/tmp/train.txt", tarfile.REGTYPE, "points outside the archive"),
        ("train.txt", tarfile.SYMTYPE, "is no plain file"),
        ("train.txt", tarfile.CHRTYPE, "is no plain file"),
        ("readme.md", tarfile.REGTYPE, "holds no text"),
    ],
)
def test_unsafe_archives_are_refused(tmp_path, vocab, name, kind, message):
    path = pack(tmp_path / "x.tar", {name: b"a b\n"}, kind)
    with pytest.raises(DataError, match=message):
        prepare(tmp_path / "set", vocab, [path], config=config(split=(0.5, 0)))
    assert not (tmp_path / "set").exists()


def test_spacing_is_undone_as_the_field_does():
    sentences = {
        '" I did n\'t , " she said . ': '"I did n\'t," she said. ',
        "It 's 5 . 5 ; no : yes !": "It's 5. 5; no: yes!",
        "Really ? ?": "Really??",
        "( see http : / / a . b / c )": "(see http://a . b/c)",
        "[ sic ] costs $ 5 or £ 4 .": "[sic] costs $5 or £4.",
        "He said ' no ' twice .": "He said 'no' twice.",
        "a - b": "a - b",
    }
    assert {text: detokenise(text, "lm1b") for text in sentences} == sentences
    assert detokenise("1 @,@ 000 well @-@ known 2 @.@ 5", "wikitext") == "1,000 well-known 2.5"


RUN = """
import os, signal, sys
from pathlib import Path
from emoe.domains.text import PrepareConfig
from emoe.domains.text.prepare import prepare
folder, stop, count = Path(sys.argv[1]), int(sys.argv[2]), 0
def progress(*_):
    global count
    count += 1
    if count == stop:
        os.kill(os.getpid(), signal.SIGKILL)
config = PrepareConfig(length=4, jobs=2, split=(0.2, 0.1), slice_bytes=600)
prepare(folder / "set", folder / "vocab.txt", [folder / "x.txt"], config=config, on_progress=progress)
"""
SHARED = {"split": (0.2, 0.1), "slice_bytes": 600}


def run(folder: Path, stop: int = -1, limit: int = -1) -> tuple[int, str]:
    """Prepare in a process that kills itself after `stop` slices and can write `limit` bytes: exit code and errors."""
    environment = os.environ | {"PYTHONPATH": str(Path(emoe.__file__).parents[1])}
    limited = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (limit, limit))
    words = [sys.executable, "-c", RUN, str(folder), str(stop)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, preexec_fn=limited, timeout=120)
    return done.returncode, done.stderr


@pytest.mark.parametrize("changed", [False, True])
def test_a_killed_run_goes_on_and_ends_with_the_same_bytes(tmp_path, vocab, changed):
    text = write(tmp_path / "x.txt", corpus())
    assert run(tmp_path, stop=9)[0] == -signal.SIGKILL and not (tmp_path / "set").exists()
    parts = tmp_path / ".set.parts"
    finished = [path for path in parts.iterdir() if len(path.name) == 64]
    finished[0].write_bytes(finished[0].read_bytes()[:-2])  # a part that a power cut left short
    write(text, corpus().replace("a", "b", 5 * changed))  # parts of an earlier text are not used
    again = prepare(tmp_path / "set", vocab, [text], config=config(**SHARED))
    whole = prepare(tmp_path / "whole", vocab, [text], config=config(**SHARED))
    assert 9 <= len(finished) and len(finished) - 2 <= again.kept < len(finished)
    assert again.kept + again.made == whole.made
    assert content(again.path) == content(whole.path) and not parts.exists()


def test_a_full_disk_leaves_no_set_and_can_go_on(tmp_path, vocab):
    write(tmp_path / "x.txt", corpus(10))
    code, errors = run(tmp_path, limit=100)  # no part fits
    assert code == 1 and "StorageError" in errors and "cannot be written (File too large)" in errors, errors
    assert "run the same command again" in errors
    assert {path.name for path in (tmp_path / ".set.parts").iterdir()} == {"run.lock"}, "a torn part stayed"
    write(tmp_path / "x.txt", corpus(2000))
    _, errors = run(tmp_path, limit=20_000)  # the parts fit, train.bin does not
    assert "StorageError" in errors and "set: cannot be written" in errors, errors
    assert {path.name for path in tmp_path.iterdir()} == {"vocab.txt", "x.txt", ".set.parts"}
    assert run(tmp_path)[0] == 0 and (tmp_path / "set" / "manifest.json").exists()


def test_a_set_is_prepared_by_one_run_at_a_time_and_left_alone_when_it_is_there(tmp_path, vocab):
    text, shared = write(tmp_path / "x.txt", corpus(50)), config(split=(0.2, 0.2))
    busy = pytest.raises(RunBusy, match=".set.parts: in use by process .*; wait until it ends")
    with run_lock(tmp_path / ".set.parts"), busy:
        prepare(tmp_path / "set", vocab, [text], config=shared)
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


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_named_with_a_remedy(tmp_path, vocab, case):
    data, message = BAD[case]
    bad, test = write(tmp_path / "x.txt", data), write(tmp_path / "test.txt", "a b c d e\n")
    with pytest.raises(DataError, match=message):
        prepare(tmp_path / "set", vocab, train=[bad], test=[test], config=config(slice_bytes=2000))
    assert {path.name for path in tmp_path.iterdir()} <= {"x.txt", "test.txt", "vocab.txt", ".set.parts"}


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
    "no json": ("tokenizer.json", "{", "tokenizer.json: cannot be read, damaged or cut off .JSONDecodeError"),
    "another model": ("tokenizer.json", '{"model": {"type": "BPE", "vocab": {}}}', "holds a BPE model; only WordPiece"),
    "none": ("vocabulary.txt", "a", "holds neither tokenizer.json nor vocab.txt"),
}


@pytest.mark.parametrize("case", BAD_VOCABULARIES)
def test_bad_vocabularies_are_named_with_a_remedy(tmp_path, case):
    name, text, message = BAD_VOCABULARIES[case]
    write(tmp_path / "bert" / name, text)
    with pytest.raises(DataError, match=message):
        prepare(tmp_path / "set", tmp_path / "bert", [write(tmp_path / "x.txt", "a")], config=config(split=(0.5, 0)))


def test_the_command_from_end_to_end(tmp_path, vocab, capfd, monkeypatch):
    write(tmp_path / "data" / "train.txt", corpus())
    write(tmp_path / "data" / "valid.txt.gz", gzip.compress(b"a b c d e f\n"))
    words = ["data", "prepare", str(tmp_path / "data"), "--tokenizer", str(vocab), "--length", "4"]
    assert main([*words, "--out", str(tmp_path / "set"), "--jobs", "2"]) == 0
    said = capfd.readouterr().out
    assert "valid: 1 rows of 4 tokens, 1 documents" in said and "--domain text --domain.path" in said
    assert rows(tmp_path / "set", "valid") == [[A, B, C, D]]
    assert main([*words, "--out", str(tmp_path / "set")]) == 0
    assert "is there already, nothing to do" in capfd.readouterr().out
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert main([*words, "--out", str(tmp_path / "other")]) == 2
    assert "tokenizers: the package is missing; pip install emoe[text]" in capfd.readouterr().err


@pytest.mark.parametrize(
    "words, code, message",
    [
        ("x.txt", 2, "split: nothing is held out; give --valid or --test, or shares: --split 0.005,0.005"),
        ("x.txt --split 0.1", 2, "split: give two shares, of valid and of test, one of them above 0"),
        ("", 2, "inputs: none are given"),
        ("test.txt", 2, "train: no file is for training by its name"),
        ("x.txt --packing wraps", 2, "did you mean 'wrap'?"),
        ("nowhere.txt", 3, "nowhere.txt: does not exist"),
        ("x.txt --split 0.1,0.1 --tokenizer nowhere", 3, "nowhere: does not exist"),
    ],
)
def test_wrong_words_are_a_line_and_an_exit_code(tmp_path, vocab, monkeypatch, capfd, words, code, message):
    monkeypatch.chdir(tmp_path)
    write(Path("x.txt"), corpus(5))
    write(Path("test.txt"), "a b c d")
    assert main(["data", "prepare", "--out", "set", "--tokenizer", "vocab.txt", *words.split()]) == code
    said = capfd.readouterr().err
    assert message in said and "Traceback" not in said and not Path("set").exists()
