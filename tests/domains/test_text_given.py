"""Text to be completed: what holes mean, how long a text may be, and which files are read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from emoe.config import ConfigError
from emoe.domains.base import DataError
from emoe.domains.text import PrepareConfig
from emoe.domains.text.data import TextConfig
from emoe.domains.text.prepare import prepare
from emoe.types import TokenSpace

pytest.importorskip("tokenizers")

WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] the cat sees a bird . ##s _ { 2 }".split()
PAD, UNK, CLS, SEP, M, THE, CAT, SEES, A, BIRD, DOT, S, LINE, OPEN, TWO, CLOSE = range(len(WORDS))
LENGTH = 8
SPACE = TokenSpace(size=len(WORDS), mask_id=M, length=LENGTH)


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TextConfig]:
    """The same lines in both packings."""
    root = tmp_path_factory.mktemp("given")
    (root / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    (root / "train.txt").write_text("the cat sees a bird.\n" * 20)
    (root / "test.txt").write_text("a bird sees the cat.\n" * 10)
    configs = {}
    for packing in ("chunks", "wrap"):
        config, files = PrepareConfig(length=LENGTH, packing=packing, jobs=1), [root / "train.txt", root / "test.txt"]
        configs[packing] = TextConfig(path=str(prepare(root / packing, root / "vocab.txt", files, config=config).path))
    return configs


@pytest.fixture
def text(sets: dict[str, TextConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TextConfig:
    monkeypatch.chdir(tmp_path)
    return sets["chunks"]


@pytest.mark.parametrize(
    ("source", "row"),
    [
        ("The cat", [THE, CAT, M, M, M, M, M, M]),  # continued
        ("the [MASK] sees a bird. [CLS] a", [THE, M, SEES, A, BIRD, DOT, CLS, A]),
        ("the{3}birds.", [THE, M, M, M, BIRD, S, DOT, M]),
        ("{2}cat{0} a {1}.", [M, M, CAT, A, M, DOT, M, M]),
        ("the ___ bird.", [THE, M, M, M, M, M, BIRD, DOT]),
        ("___ a bird. [CLS]", [M, M, M, M, A, BIRD, DOT, CLS]),
        ("the cat_______", [THE, CAT, M, M, M, M, M, M]),
        ("the dog __ {} 2", [THE, UNK, LINE, LINE, OPEN, CLOSE, TWO, M]),  # two underscores are text
        ("[SEP][PAD][UNK] cat", [SEP, PAD, UNK, CAT, M, M, M, M]),
        ("", [M] * LENGTH),
    ],
)
def test_holes_of_a_text(text: TextConfig, source: str, row: list[int]) -> None:
    assert text.read_given(source, SPACE).tolist() == [row]


def test_rows_of_a_wrapped_set_begin_as_its_rows_do(sets: dict[str, TextConfig]) -> None:
    assert sets["wrap"].read_given("the cat", SPACE).tolist() == [[CLS, THE, CAT, M, M, M, M, M]]
    assert sets["wrap"].read_given("the ___ .", SPACE).tolist() == [[CLS, THE, M, M, M, M, M, DOT]]
    assert (sets["wrap"].build(0).rows[:, 0] == CLS).all()


def test_files_of_texts_and_of_tokens(text: TextConfig) -> None:
    Path("holes.TXT").write_text("\ufeffthe [MASK]\n\n  \na ___ cat\n", encoding="utf-8")
    expected = [[THE] + [M] * 7, [A, M, M, M, M, M, M, CAT]]
    assert text.read_given("holes.TXT", SPACE).tolist() == expected
    np.save("rows.npy", np.where(np.array(expected) == M, -1, expected))
    assert text.read_given("rows.npy", SPACE).tolist() == expected


@pytest.mark.parametrize(
    ("source", "kind", "fragment"),
    [
        ("the cat sees a bird. the cat sees", ConfigError, "takes 9 tokens with its holes, but a row has 8; shorten"),
        ("a{8}", ConfigError, "given: 'a{8}': takes 9 tokens"),
        ("___ cat ___", ConfigError, "has more than one ___, which stands for all the room that is left; write {N}"),
        ("none.txt", DataError, "none.txt: does not exist; --given takes a text, or a .txt file"),
        ("long.txt", DataError, "long.txt: line 3: takes 9 tokens"),
        ("blank.txt", DataError, "blank.txt: holds no text"),
        ("latin.txt", DataError, "latin.txt: cannot be read as text"),
        ("folder.txt", DataError, "folder.txt: is a folder"),
    ],
)
def test_texts_that_are_refused(text: TextConfig, source: str, kind: type[Exception], fragment: str) -> None:
    Path("long.txt").write_text("the cat\n\na{8}\n")
    Path("blank.txt").write_text("\n \n")
    Path("latin.txt").write_bytes("d\xe9j\xe0 vu".encode("latin-1"))
    Path("folder.txt").mkdir()
    with pytest.raises(kind) as caught:
        text.read_given(source, SPACE)
    assert fragment in str(caught.value)


def test_rows_are_written_as_text(text: TextConfig) -> None:
    rows = text.read_given("the cats sees a bird. [CLS]", SPACE)
    assert text.has_words and text.write(rows) == ["the cats sees a bird. [CLS]"]
    assert len(text.completion_figure(rows, rows, rows[None].repeat(1, 2, 1), SPACE).axes) == 3
    with pytest.raises(ConfigError, match="ink: is for images, but 'text' has none"):
        text.read_given("the cat", SPACE, ink="dark")
