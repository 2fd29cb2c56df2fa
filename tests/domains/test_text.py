"""The domain of text: rows stay on the disk, batches are those of rows in memory, damage is found."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from emoe.domains.base import DataError
from emoe.domains.text import PrepareConfig
from emoe.domains.text.data import Text, TextConfig
from emoe.domains.text.prepare import prepare
from emoe.domains.text.tokens import Vocabulary, read_vocabulary
from emoe.types import TokenSpace

tokenizers = pytest.importorskip("tokenizers")

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh", "##x", ".", ",", "'", "s", "$", "中"]
SPACE = TokenSpace(size=len(WORDS), mask_id=4, length=6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A prepared set of rows of 6 tokens."""
    root = tmp_path_factory.mktemp("text")
    (root / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    draw = np.random.default_rng(0)
    for name, count in (("train", 90), ("valid", 20), ("test", 30)):
        lines = (" ".join(draw.choice([*"abcdefgh", "ax", ".", "$"], 8)) for _ in range(count))
        (root / f"{name}.txt").write_text("\n".join(lines) + "\n")
    files = [root / f"{name}.txt" for name in ("train", "valid", "test")]
    return prepare(root / "set", root / "vocab.txt", files, config=PrepareConfig(length=6, jobs=1)).path


@pytest.fixture
def text(folder: Path) -> Text:
    return TextConfig(path=str(folder)).build(0)


def whole(folder: Path, split: str) -> torch.Tensor:
    return torch.from_numpy(np.fromfile(folder / f"{split}.bin", "<u2").astype(np.int64).reshape(-1, 6))


def test_the_set_as_a_domain(text, folder):
    assert text.space == SPACE
    assert text.name == "set" and text.task == "text" and text.fresh_rows == len(whole(folder, "test"))
    assert text.rows.dtype == torch.uint16 and torch.equal(text.rows.long(), whole(folder, "train"))
    valid = TextConfig(path=str(folder), held_out="valid").build(0)
    assert torch.equal(valid.test_rows.long(), whole(folder, "valid"))
    assert text.sha256 == hashlib.sha256((folder / "train.bin").read_bytes()).hexdigest()
    assert text.sha256 == TextConfig(path=str(folder), verify=False).build(0).sha256  # of the rows


def test_fresh_rows_are_held_out_rows_without_repetition(text, folder):
    drawn = text.fresh(text.fresh_rows, 1)
    assert sorted(drawn.tolist()) == sorted(whole(folder, "test").tolist())
    assert torch.equal(text.fresh(5, 1), drawn[:5]) and not torch.equal(text.fresh(5, 2), drawn[:5])
    with pytest.raises(DataError, match=r"set: 1,000 rows that were not trained on are asked for, but the held-out"):
        text.fresh(1000, 0)


def test_only_the_rows_of_a_batch_are_read(tmp_path):
    rows, length = 2_000_000, 128  # 512 MB that hold no block on the disk, apart from a last row of sevens
    splits = {split: {"rows": rows, "sha256": ""} for split in ("train", "test")}
    manifest = {"schema": 1, "size": 9, "length": length, "special": {"mask": 4}, "splits": splits}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    for split in splits:
        with (tmp_path / f"{split}.bin").open("wb") as file:
            file.seek((rows - 1) * length * 2)
            file.write(np.full(length, 7, "<u2").tobytes())
    text = TextConfig(path=str(tmp_path), verify=False).build(0)
    before = psutil.Process().memory_info().rss
    batches = text.batches(64, 0)
    for step in range(5):
        assert batches(step).shape == (64, 128)
    assert text.rows[-1].tolist() == [7] * 128
    assert psutil.Process().memory_info().rss - before < 100e6  # the order of the rows takes 16 MB


def test_what_is_done_to_rows_does_not_reach_the_file(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "set")
    for path in copy.iterdir():
        path.chmod(0o444)
    TextConfig(path=str(copy)).build(0).rows[0] = 5
    assert (copy / "train.bin").read_bytes() == (folder / "train.bin").read_bytes()


def hugging_face(pieces: list[str]) -> str:
    """BertTokenizer.decode: the WordPiece decoder of `tokenizers`, then clean_up_tokenization of `transformers`."""
    text = tokenizers.decoders.WordPiece(prefix="##", cleanup=True).decode(pieces)
    for old in (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're"):
        text = text.replace(old, old.strip())
    return text


PIECES = [*WORDS, "?", "!", "m", "t", "n", "ve", "re", "do", "not", "##", "##s", "##'", "5"]


@pytest.mark.parametrize("name", ["own", "bert"])
def test_decoding_of_random_rows_equals_that_of_the_library(name: str, data_root) -> None:
    vocabulary = Vocabulary(Path("vocab.txt"), "", tuple(PIECES), {})
    if name == "bert":
        file = "tokenizers/bert-base-uncased/vocab.txt"
        vocabulary = read_vocabulary(data_root([file]) / file)
    draw = np.random.default_rng(1)
    common = [i for i, word in enumerate(vocabulary.words) if word in {*PIECES, "the", "##ing", "it", "don"}]
    for number in range(3_000):
        ids = draw.integers(len(vocabulary.words), size=24)
        ids = np.where(draw.random(24) < 0.7, draw.choice(common, 24), ids) if number % 2 else ids
        assert vocabulary.decode(ids.tolist()) == hugging_face([vocabulary.words[i] for i in ids])


def test_picture_shows_any_text(text, tmp_path):
    rows = torch.full((7, 6), 18)  # dollars, which matplotlib could take for formulas
    rows[1] = 19  # and a sign that its font lacks
    text.picture({"samples": rows, "data": text.fresh(2, 0)}, tmp_path / "deep" / "p.png", title="x")
    assert (tmp_path / "deep" / "p.png").read_bytes().startswith(b"\x89PNG")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def change(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_bytes()) | changes))


DAMAGE = {
    "flipped bit": (lambda set_: flip(set_ / "train.bin"), r"train.bin: is damaged, its sha256"),
    "flipped test bit": (lambda set_: flip(set_ / "test.bin"), r"test.bin: is damaged"),
    "cut": (lambda set_: os.truncate(set_ / "train.bin", 12), r"train.bin: has 12 bytes, not those of"),
    "no file": (lambda set_: (set_ / "train.bin").unlink(), r"train.bin: cannot be read"),
    "no manifest": (lambda set_: (set_ / "manifest.json").unlink(), r"holds no prepared text; --domain.path takes"),
    "cut manifest": (lambda set_: os.truncate(set_ / "manifest.json", 99), r"manifest.json: cannot be read, damaged"),
    "newer": (lambda set_: change(set_ / "manifest.json", schema=2), r"has schema 2, this version reads 1"),
    "nonsense": (lambda set_: change(set_ / "manifest.json", length="6"), r"manifest.json: cannot be read"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_named_with_a_remedy(folder, tmp_path, case):
    damage, message = DAMAGE[case]
    bad = shutil.copytree(folder, tmp_path / "set")
    damage(bad)
    with pytest.raises(DataError, match=message):
        TextConfig(path=str(bad)).build(0)


def test_sets_that_cannot_be_used(folder, tmp_path):
    with pytest.raises(DataError, match=r"nowhere: does not exist; --domain.path takes a folder"):
        TextConfig(path=str(tmp_path / "nowhere")).build(0)
    other = shutil.copytree(folder, tmp_path / "set")
    splits = json.loads((other / "manifest.json").read_bytes())["splits"]
    change(other / "manifest.json", splits={name: splits[name] for name in ("train", "test")})
    with pytest.raises(DataError, match=r"has no valid rows, only train, test"):
        TextConfig(path=str(other), held_out="valid").build(0)
    (other / "vocab.txt").write_text("[UNK]\n[CLS]\n[MASK]\n")
    bad = TextConfig(path=str(other))
    for use in (lambda: bad.build(0).decode(torch.zeros(1, 6, dtype=torch.long)), lambda: bad.read_given("a", SPACE)):
        with pytest.raises(DataError, match=r"vocab.txt: is not the tokenizer the set was made with; prepare it again"):
            use()
