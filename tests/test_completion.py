"""Completion: what is read as a given row or image, what is kept, what comes out, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, PngImagePlugin
from small import TOY as SMALL
from small import UNET, Settings, trained

from emoe.config import ConfigError
from emoe.domains.base import DataError, Ink
from emoe.domains.images import DigitsConfig, MNISTConfig
from emoe.domains.rows import RowsConfig
from emoe.domains.toy import ToyConfig
from emoe.runs.run import Completion, Run, check_beginnings, prepare
from emoe.types import TokenSpace

DIGITS, MNIST = (TokenSpace(size=3, mask_id=2, length=side**2) for side in (8, 32))
TOY = TokenSpace(size=51, mask_id=50, length=2)
SHORT: Settings = {"train.steps": 3, "eval.batch": 7}


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """E-MoE with a small UNet."""
    return trained("rows-emoe", tmp_path_factory.mktemp("runs") / "digits", UNET | SHORT)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """E-MoE on points of the plane."""
    return trained("toy-8modes-emoe", tmp_path_factory.mktemp("runs") / "toy", SMALL | SHORT)


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything happens in an empty folder."""
    monkeypatch.chdir(tmp_path)


def glyph(side: int = 8) -> np.ndarray:
    """An image whose border is paper: 0 and 1."""
    bits = np.zeros((side, side), np.uint8)
    bits[1:-1, 1:-1] = np.random.default_rng(side).integers(2, size=(side - 2, side - 2))
    bits[2, 2], bits[2, 3] = 0, 1
    return bits


def save(path: str, bits: np.ndarray, *, ink: str = "dark", mode: str = "L") -> str:
    """Write ink as black on white or as white on black."""
    grey = Image.fromarray(np.where(bits == (1 if ink == "light" else 0), 255, 0).astype(np.uint8))
    grey.convert(mode).save(path)
    return path


def read(path: str, *, ink: Ink = "auto", config: DigitsConfig | MNISTConfig | None = None) -> np.ndarray:
    row = (config or DigitsConfig()).read_given(path, MNIST if config else DIGITS, ink=ink)
    assert row.dtype == torch.long
    return row.numpy().reshape(2 * (32 if config else 8,))


@pytest.mark.parametrize(("ink", "other"), [("dark", "light"), ("light", "dark")])
def test_pngs_of_every_mode_give_the_same_pixels(ink: Ink, other: Ink) -> None:
    bits = glyph()
    for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"):
        if mode == "I;16":
            Image.fromarray(np.where(bits == (ink == "light"), 65535, 0).astype(np.uint16)).save("x.png")
        else:
            save("x.png", bits, ink=ink, mode=mode)
        assert np.array_equal(read("x.png"), bits) and np.array_equal(read("x.png", ink=ink), bits), mode
        assert np.array_equal(read("x.png", ink=other), 1 - bits), mode


def test_pixels_are_cut_at_half_and_transparent_ones_are_paper() -> None:
    greys = np.zeros((8, 8), np.uint8)
    greys[3, 2:6] = [127, 128, 1, 255]
    for name, shown in {"light.png": greys, "dark.png": 255 - greys}.items():
        Image.fromarray(shown).save(name)
        assert np.argwhere(read(name)).tolist() == [[3, 3], [3, 5]]
    for colour in (0, 255):  # the colour under transparent pixels says nothing
        layers = np.full((8, 8, 4), colour, np.uint8)
        for opaque in (glyph(), np.zeros((8, 8), np.uint8)):
            layers[..., 3] = 255 * opaque
            Image.fromarray(layers).save("x.png")
            assert np.array_equal(read("x.png"), opaque)


def test_images_without_a_margin_get_one() -> None:
    bits = glyph(28)
    save("x.png", bits)
    row = read("x.png", config=MNISTConfig())
    assert np.array_equal(row[2:-2, 2:-2], bits) and row.sum() == bits.sum()
    save("mask.png", bits, ink="light")
    kept = MNISTConfig().read_keep("mask.png", MNIST).numpy().reshape(32, 32)
    assert np.array_equal(kept[2:-2, 2:-2], bits == 1) and kept.sum() == bits.sum() + 32**2 - 28**2
    save("y.png", whole := glyph(32))
    assert np.array_equal(read("y.png", config=MNISTConfig()), whole)


def test_images_that_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    save("large.png", glyph(9))
    Image.fromarray(np.zeros((8, 16), np.uint8)).save("wide.png")
    Image.fromarray(np.zeros((8, 8), np.uint8)).save("x.jpg")
    noise = np.random.default_rng(0).integers(256, size=(8, 8), dtype=np.uint8)
    Image.fromarray(noise).save("whole.png")
    Path("cut.png").write_bytes(Path("whole.png").read_bytes()[:60])
    Path("text.png").write_text("no image")
    Path("folder.png").mkdir()
    for name, fragment in {
        "large.png": "large.png: is 9 x 9 pixels, but the model's images are 8 x 8; resize it",
        "wide.png": "is 16 x 8 pixels",
        "x.jpg": "x.jpg: is no PNG image; save it as one of 8 x 8 pixels",
        "cut.png": "cut.png: cannot be read, damaged or cut off",
        "text.png": "text.png: is no PNG image",
        "folder.png": "is a folder",
        "none.png": "does not exist",
    }.items():
        with pytest.raises(DataError) as caught:
            DigitsConfig().read_given(name, DIGITS)
        assert fragment in str(caught.value)
    with pytest.raises(DataError, match="the model's images are 32 x 32 or 28 x 28"):
        MNISTConfig().read_given("large.png", MNIST)

    # An image that claims to be huge is refused by its header, before anything is unpacked.
    def unpack(*_: object) -> None:
        raise AssertionError("unpacked")

    Image.new("L", (3000, 3000)).save("huge.png")
    monkeypatch.setattr(PngImagePlugin.PngImageFile, "load", unpack)
    with pytest.raises(DataError, match="is 3000 x 3000 pixels"):
        DigitsConfig().read_given("huge.png", DIGITS)


def test_regions_of_an_image() -> None:
    def kept(text: str) -> np.ndarray:
        return DigitsConfig().read_keep(text, DIGITS).numpy().reshape(8, 8)

    parts = {"top-half": np.s_[:4], "bottom-half": np.s_[4:], "left-half": np.s_[:, :4], "right-half": np.s_[:, 4:]}
    for name, part in {**parts, "centre": np.s_[2:6, 2:6]}.items():
        expected = np.zeros((8, 8), bool)
        expected[part] = True
        assert np.array_equal(kept(name), expected), name
    assert np.array_equal(kept("border"), ~kept("centre")) and not kept("none").any()
    assert kept("0-9,20").flatten().nonzero()[0].tolist() == [*range(10), 20]
    save("mask.png", glyph(), ink="light")
    assert np.array_equal(kept("mask.png"), glyph() == 1)
    for text, fragment in {
        "top-hlaf": "'top-hlaf' is not known; did you mean 'top-half'?",
        "all": "all leaves nothing to fill in",
        "60-64": "'60-64' is outside 0..63",
        "9-3": "'9-3' is outside",
        "1,,2": "'1,,2' is not known",
    }.items():
        with pytest.raises(ConfigError) as caught:
            kept(text)
        assert caught.value.problems[0].startswith("keep: ") and fragment in str(caught.value)


def test_rows_are_read_from_words_and_files() -> None:
    config, space = RowsConfig(path="x.npy"), TokenSpace(size=6, mask_id=5, length=3)
    for text in ("1,?,4", "1 ? 4", "1;;4", "1,-1,4", " 1, ,4"):
        assert config.read_given(text, space).tolist() == [[1, 5, 4]], text
    Path("a.csv").write_text("first,second,third\n0,?,2\n\n?,?,?\n-1,,4\n")
    assert config.read_given("a.csv", space).tolist() == [[0, 5, 2], [5, 5, 5], [5, 5, 4]]
    Path("b.csv").write_text("?,?,?\n1,2,?\n")  # no header
    assert len(config.read_given("b.csv", space)) == 2
    np.save("c.npy", np.array([[0, -1, 2], [3, 4, -1]], np.int8))
    assert config.read_given("c.npy", space).tolist() == [[0, 5, 2], [3, 4, 5]]
    np.save("d.npy", np.array([0.0, np.nan, 2.0]))
    assert config.read_given("d.npy", space).tolist() == [[0, 5, 2]]
    assert DigitsConfig().read_given(" ".join("01?0" * 16), DIGITS).tolist() == [[0, 1, 2, 0] * 16]


def test_the_mask_may_be_any_symbol_and_only_images_have_ink() -> None:
    with pytest.raises(ConfigError, match="ink: is for .*, but 'toy' has none"):
        ToyConfig(density="8-modes").read_given("1,?", TOY, ink="dark")
    space = TokenSpace(size=4, mask_id=1, length=2)
    assert ToyConfig(density="8-modes").read_given("3,?", space).tolist() == [[3, 1]]
    with pytest.raises(ConfigError, match=r"holds 1\.0, but tokens are 0\.\.3 but 1"):
        ToyConfig(density="8-modes").read_given("3,1", space)


@pytest.mark.parametrize(
    ("source", "kind", "fragment"),
    [
        ("12,50", ConfigError, "given: '12,50': line 1, column 2 holds 50.0, but tokens are 0..49; write ?"),
        ("1,2,?", ConfigError, "has shape (1, 3); rows of 2 tokens are needed"),
        (" ", ConfigError, "holds no rows"),
        ("1,2-", ConfigError, "line 1, column 2 holds '2-', neither a token nor ?"),
        ("twelve", ConfigError, "'twelve' is neither a .npy or .csv file nor a row such as 12,?"),
        ("words.csv", DataError, "words.csv: line 2, column 1 holds 'x', neither a token nor ?"),
        ("large.csv", DataError, "large.csv: line 3, column 2 holds 50.0, but tokens are 0..49"),
        ("real.npy", DataError, "real.npy: row 0, column 1 (counted from 0) holds 0.5, not a whole number"),
        ("text.npy", DataError, "text.npy: holds values of type <U1"),
        ("cube.npy", DataError, "has shape (1, 1, 2); rows of 2 tokens are needed"),
    ],
)
def test_rows_that_are_refused(source: str, kind: type[Exception], fragment: str) -> None:
    Path("words.csv").write_text("1,2\nx,3\n")
    Path("large.csv").write_text("a,b\n1,2\n3,50\n")
    for name, values in {"real": [[1, 0.5]], "text": [["a", "b"]], "cube": [[[1, 2]]]}.items():
        np.save(f"{name}.npy", np.array(values))
    with pytest.raises(kind) as caught:
        ToyConfig(density="8-modes").read_given(source, TOY)
    assert fragment in str(caught.value)


def test_what_is_wanted() -> None:
    config = ToyConfig(density="8-modes")
    rows, given = prepare(TOY, config, ["12,?", "?,?", "3,4"], keep="none")
    assert rows.tolist() == [[12, 50], [50, 50], [3, 4]] and (given == 50).all()
    rows, given = prepare(TOY, config, np.array([[1, 2], [3, 4]]), keep=np.array([[True, False], [False, True]]))
    assert given.tolist() == [[1, 50], [50, 4]]
    assert prepare(TOY, config, torch.tensor([7, -1]))[1].tolist() == [[7, 50]]
    np.save("x.npy", np.array([[5, -1]]))
    assert prepare(TOY, config, Path("x.npy"))[1].tolist() == [[5, 50]]
    for given_rows, keep, fragment in (
        ("12,13", None, "given: nothing to fill in, in row 0 all tokens are given; say with --keep"),
        (["?,1", "12,13"], None, "nothing to fill in, in row 1"),
        ("12,13", "0-1", "nothing to fill in, in row 0 all tokens stay"),
        ("12,?", "1", "keep: position 1 is to stay, but given row 0 has no token there"),
        ("12,?", "top-half", "keep: 'top-half' is not known; write positions such as 0-9,20, or none"),
        (np.array([1.0, 2.0]), None, "given: expected whole numbers of shape (m, 2)"),
        (np.array([1, 2, 3]), None, "given: expected whole numbers of shape (m, 2), got (1, 3)"),
        (np.array([1, 51]), None, "given: tokens must be in 0..50 (-1 or 50 where one is wanted)"),
        (np.array([1, 2]), np.array([1, 0]), "keep: expected booleans of shape (2,) or (1, 2)"),
    ):
        with pytest.raises(ConfigError) as caught:
            prepare(TOY, config, given_rows, keep=keep)
        assert fragment in str(caught.value)
    check_beginnings(torch.tensor([[1, 50], [50, 50]]), TOY)
    with pytest.raises(ConfigError, match="continue: row 1 has a hole"):
        check_beginnings(torch.tensor([[1, 50], [50, 2]]), TOY)


def test_kept_tokens_stay_and_all_others_are_drawn(digits: Run) -> None:
    save("a.png", first := glyph())
    save("b.png", second := np.pad(np.ones((6, 6), np.uint8), 1), ink="light")
    completion = digits.complete(["a.png", "b.png"], 5, 3, keep="left-half", ink="auto")
    assert isinstance(completion, Completion) and completion.nfe == 3
    assert completion.samples.shape == (2, 5, 64) and completion.pool.shape == (10, 64)
    assert torch.equal(completion.pool[5:], completion.samples[1]) and int(completion.samples.max()) == 1
    assert np.array_equal(completion.rows.numpy().reshape(2, 8, 8)[0], first)
    images = completion.samples.numpy().reshape(2, 5, 8, 8)
    assert (images[0, :, :, :4] == first[:, :4]).all() and (images[1, :, :, :4] == second[:, :4]).all()
    assert np.array_equal(completion.kept.numpy().reshape(2, 8, 8)[1], np.arange(8) < 4 + np.zeros((8, 1)))
    assert len(np.unique(images[0].reshape(5, -1), axis=0)) == 5  # draws differ, across batches of 7 too
    again = digits.complete(["a.png", "b.png"], 5, 3, keep="left-half")
    other = digits.complete(["a.png", "b.png"], 5, 3, seed=1, keep="left-half")
    assert torch.equal(again.samples, completion.samples) and len(again.texts) == 2 and len(again.texts[0]) == 5
    assert not torch.equal(other.samples, completion.samples)
    completion.picture("x.png")
    picture = np.asarray(Image.open("x.png").convert("L"))
    assert picture.shape[1] > 2 * picture.shape[0] and len(np.unique(picture)) > 3  # paper, mask, margin, ink


def test_rows_of_points_are_completed(toy: Run) -> None:
    completion = toy.complete(["12,?", "?,7"], 3)
    assert completion.nfe == toy.default_nfe == 1
    assert (completion.samples[0, :, 0] == 12).all() and (completion.samples[1, :, 1] == 7).all()
    assert completion.texts[1][2].split()[1] == "7"
    assert torch.equal(completion.pool, toy.sample(6, 1, given=completion.given.repeat_interleave(3, 0)))
    completion.picture("x.png")
    assert Path("x.png").stat().st_size > 1000


def test_a_sampler_that_changes_what_is_given_is_found_out(toy: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = type(toy.method).sample

    def careless(self: object, *args: object, **options: object) -> torch.Tensor:
        return honest(self, *args, **options).clone().index_fill_(1, torch.tensor([0]), 3)  # type: ignore[arg-type]

    monkeypatch.setattr(type(toy.method), "sample", careless)
    with pytest.raises(AssertionError, match="changed tokens that were given"):
        toy.complete("12,?", 2)
    for n, nfe, name in ((0, 1, "n"), (1, 0, "nfe")):
        with pytest.raises(ConfigError, match=f"^{name}: must be >= 1"):
            toy.complete("12,?", n, nfe)
