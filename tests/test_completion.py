"""Completion: what is read as a given row or image, what is kept, what comes out, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, PngImagePlugin

from emoe.cli import main
from emoe.completion import Completion, complete, fill_in, prepare
from emoe.config import ConfigError
from emoe.domains.base import DataError
from emoe.domains.images import DigitsConfig, MNISTConfig
from emoe.domains.images.given import named_regions
from emoe.domains.rows import RowsConfig
from emoe.domains.toy import ToyConfig
from emoe.evaluation.evaluate import evaluate_likelihood, fresh_count
from emoe.runs import Run, load_run
from emoe.types import Convention, TokenSpace

UNET = "--backbone unet --backbone.channels 8 --backbone.hidden 8 --backbone.time-size 8 --backbone.time-hidden 16 "
UNET += "--backbone.groups 4"
SMALL = "--backbone.width 8 --backbone.hidden 16 --backbone.heads 2 --backbone.time-size 8 --domain.points 200"
BASIC = "--train.steps 3 --train.batch 8 --eval.batch 7 --quiet --device cpu"
DIGITS, MNIST = (TokenSpace(size=3, mask_id=2, length=side**2) for side in (8, 32))
BOUND = Convention.parse("bound@1")
TOY = TokenSpace(size=51, mask_id=50, length=2)

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs of a few steps: digits with a small UNet, and points of the plane."""
    root = tmp_path_factory.mktemp("runs")
    words = {"digits": f"train rows-emoe --domain digits {UNET}", "toy": f"train toy-8modes-emoe {SMALL}"}
    for name, start in words.items():
        assert main(f"{start} --run {root / name} {BASIC}".split()) == 0
    return {name: root / name for name in words}


@pytest.fixture(scope="module")
def digits(folders: dict[str, Path]) -> Run:
    return load_run(folders["digits"], device="cpu")


@pytest.fixture(scope="module")
def toy(folders: dict[str, Path]) -> Run:
    return load_run(folders["toy"], device="cpu")


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Everything happens in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs a command in this process: (exit code, standard output, standard error)."""

    def run(*words: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([str(word) for word in words])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return run


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


# --- images that are read


@pytest.mark.parametrize("ink", ["dark", "light"])
@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"])
def test_pngs_of_every_mode_give_the_same_pixels(mode: str, ink: str) -> None:
    bits = glyph()
    if mode == "I;16":
        values = np.where(bits == (ink == "light"), 65535, 0)
        Image.fromarray(values.astype(np.uint16)).save("x.png")
    else:
        save("x.png", bits, ink=ink, mode=mode)
    for asked in ("auto", ink):
        row = DigitsConfig().read_given("x.png", DIGITS, ink=asked)
        assert row.dtype == torch.long and np.array_equal(row.numpy().reshape(8, 8), bits)
    other = {"dark": "light", "light": "dark"}[ink]
    inverted = DigitsConfig().read_given("x.png", DIGITS, ink=other)
    assert np.array_equal(inverted.numpy().reshape(8, 8), 1 - bits)


def test_pixels_are_cut_at_half_as_the_data_are() -> None:
    greys = np.zeros((8, 8), np.uint8)
    greys[3, 2:6] = [127, 128, 1, 255]
    Image.fromarray(greys).save("light.png")
    Image.fromarray(255 - greys).save("dark.png")
    for name in ("light.png", "dark.png"):
        row = DigitsConfig().read_given(name, DIGITS)
        assert row.nonzero()[:, 1].tolist() == [3 * 8 + 3, 3 * 8 + 5]


@pytest.mark.parametrize("colour", [0, 255])
def test_transparent_pixels_are_paper(colour: int) -> None:
    bits = glyph()
    layers = np.zeros((8, 8, 4), np.uint8)
    layers[..., :3] = colour  # the colour under transparent pixels says nothing
    layers[..., 3] = 255 * bits
    Image.fromarray(layers).save("x.png")
    assert np.array_equal(DigitsConfig().read_given("x.png", DIGITS).numpy().reshape(8, 8), bits)
    layers[..., 3] = 0
    Image.fromarray(layers).save("x.png")
    assert DigitsConfig().read_given("x.png", DIGITS).sum() == 0


def test_images_without_a_margin_get_one() -> None:
    bits = glyph(28)
    save("x.png", bits)
    row = MNISTConfig().read_given("x.png", MNIST).numpy().reshape(32, 32)
    assert np.array_equal(row[2:-2, 2:-2], bits) and row.sum() == bits.sum()
    save("mask.png", bits, ink="light")
    kept = MNISTConfig().read_keep("mask.png", MNIST).numpy().reshape(32, 32)
    assert np.array_equal(kept[2:-2, 2:-2], bits == 1) and kept.sum() == bits.sum() + 32**2 - 28**2
    save("y.png", whole := glyph(32))
    assert np.array_equal(MNISTConfig().read_given("y.png", MNIST).numpy().reshape(32, 32), whole)


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

    for name, part in {
        "top-half": np.s_[:4, :],
        "bottom-half": np.s_[4:, :],
        "left-half": np.s_[:, :4],
        "right-half": np.s_[:, 4:],
        "centre": np.s_[2:6, 2:6],
    }.items():
        expected = np.zeros((8, 8), bool)
        expected[part] = True
        assert np.array_equal(kept(name), expected), name
    assert np.array_equal(kept("border"), ~kept("centre")) and not kept("none").any()
    assert kept("0-9,20").flatten().nonzero()[0].tolist() == [*range(10), 20]
    save("mask.png", glyph(), ink="light")
    assert np.array_equal(kept("mask.png"), glyph() == 1)
    assert set(named_regions(8)) == {"top-half", "bottom-half", "left-half", "right-half", "centre", "border"}


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("top-hlaf", "'top-hlaf' is not known; did you mean 'top-half'?"),
        ("all", "all leaves nothing to fill in"),
        ("60-64", "'60-64' is outside 0..63"),
        ("9-3", "'9-3' is outside"),
        ("3-", "'3-' is not known"),
        ("", "'' is not known"),
        ("1,,2", "'1,,2' is not known"),
    ],
)
def test_regions_that_are_refused(text: str, fragment: str) -> None:
    with pytest.raises(ConfigError) as caught:
        DigitsConfig().read_keep(text, DIGITS)
    assert caught.value.problems[0].startswith("keep: ") and fragment in str(caught.value)


# --- rows that are read


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


def test_the_mask_may_be_any_symbol() -> None:
    space = TokenSpace(size=4, mask_id=1, length=2)
    assert ToyConfig(density="8-modes").read_given("3,?", space).tolist() == [[3, 1]]
    with pytest.raises(ConfigError, match=r"holds 1\.0, but tokens are 0\.\.3 but 1"):
        ToyConfig(density="8-modes").read_given("3,1", space)


@pytest.mark.parametrize(
    ("source", "kind", "fragment"),
    [
        ("12,50", ConfigError, "given: '12,50': line 1, column 2 holds 50.0, but tokens are 0..49; write ?"),
        ("12,-2", ConfigError, "holds -2.0, but tokens are 0..49"),
        ("1,2,?", ConfigError, "has shape (1, 3); rows of 2 tokens are needed"),
        (" ", ConfigError, "holds no rows"),
        ("1,2-", ConfigError, "line 1, column 2 holds '2-', neither a token nor ?"),
        ("twelve", ConfigError, "'twelve' is neither a .npy or .csv file nor a row such as 12,?"),
        ("none.csv", DataError, "none.csv: does not exist"),
        ("ragged.csv", DataError, "ragged.csv: line 3 has 1 values, but line 1 has 2"),
        ("words.csv", DataError, "words.csv: line 2, column 1 holds 'x', neither a token nor ?"),
        ("large.csv", DataError, "large.csv: line 3, column 2 holds 50.0, but tokens are 0..49"),
        ("real.npy", DataError, "real.npy: row 0, column 1 (counted from 0) holds 0.5, not a whole number"),
        ("text.npy", DataError, "text.npy: holds values of type <U1"),
        ("cube.npy", DataError, "has shape (1, 1, 2); rows of 2 tokens are needed"),
        ("empty.npy", DataError, "holds no rows"),
        ("pickle.npy", DataError, "pickles can run code and are not opened"),
    ],
)
def test_rows_that_are_refused(source: str, kind: type[Exception], fragment: str) -> None:
    Path("ragged.csv").write_text("1,2\n\n3\n")
    Path("words.csv").write_text("1,2\nx,3\n")
    Path("large.csv").write_text("a,b\n1,2\n3,50\n")
    for name, values in {"real": [[1, 0.5]], "text": [["a", "b"]], "cube": [[[1, 2]]]}.items():
        np.save(f"{name}.npy", np.array(values))
    np.save("empty.npy", np.zeros((0, 2), int))
    np.save("pickle.npy", np.array([[{}, 1]], dtype=object))
    with pytest.raises(kind) as caught:
        ToyConfig(density="8-modes").read_given(source, TOY)
    assert fragment in str(caught.value)


def test_only_pictures_have_ink() -> None:
    with pytest.raises(ConfigError, match="ink: is for images, but 'toy' has none"):
        ToyConfig(density="8-modes").read_given("1,?", TOY, ink="dark")


# --- what is kept


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


# --- what comes out


def test_kept_tokens_stay_and_all_others_are_drawn(digits: Run) -> None:
    save("a.png", first := glyph())
    save("b.png", second := np.pad(np.ones((6, 6), np.uint8), 1), ink="light")
    found = complete(digits, ["a.png", "b.png"], 5, 3, keep="left-half", ink="auto")
    assert isinstance(found, Completion) and found.nfe == 3
    assert found.samples.shape == (2, 5, 64) and found.pool.shape == (10, 64)
    assert torch.equal(found.pool[5:], found.samples[1]) and int(found.samples.max()) == 1
    assert np.array_equal(found.rows.numpy().reshape(2, 8, 8)[0], first)
    images = found.samples.numpy().reshape(2, 5, 8, 8)
    assert (images[0, :, :, :4] == first[:, :4]).all() and (images[1, :, :, :4] == second[:, :4]).all()
    assert np.array_equal(found.kept.numpy().reshape(2, 8, 8)[1], np.arange(8) < 4 + np.zeros((8, 1)))
    assert len(np.unique(images[0].reshape(5, -1), axis=0)) == 5  # draws differ, across batches of 7 too
    again = digits.complete(["a.png", "b.png"], 5, 3, keep="left-half")
    assert torch.equal(again.samples, found.samples)
    assert not torch.equal(digits.complete(["a.png", "b.png"], 5, 3, 1, keep="left-half").samples, found.samples)


def test_a_sampler_that_changes_what_is_given_is_found_out(toy: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, given = prepare(TOY, toy.experiment.domain, "12,?")
    honest = type(toy.method).sample

    def careless(self: object, *args: object, **options: object) -> torch.Tensor:
        return honest(self, *args, **options).clone().index_fill_(1, torch.tensor([0]), 3)

    monkeypatch.setattr(type(toy.method), "sample", careless)
    with pytest.raises(AssertionError, match="changed tokens that were given"):
        fill_in(toy, rows, given, 2, 1)


@pytest.mark.parametrize(("n", "nfe", "name"), [(0, 1, "n"), (1, 0, "nfe")])
def test_numbers_below_one_are_refused(toy: Run, n: int, nfe: int, name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: must be >= 1"):
        toy.complete("12,?", n, nfe)


# --- the command


def test_images_from_the_command_line(folders: dict[str, Path], digits: Run, command: Command) -> None:
    save("a.png", glyph())
    save("b.png", glyph(), ink="light")
    run = folders["digits"]
    words = ["--given", "a.png", "b.png", "--keep", "top-half", "--n", 3, "--nfe", 2, "--device", "cpu"]
    code, out, err = command("sample", run, *words, "--out", "x", "--picture", "p/x.png", "--json")
    assert code == 0 and "x.npy: 6 rows, NFE 2" in err
    told, pool = json.loads(out), np.load("x.npy")
    assert told["out"] == "x.npy" and pool.shape == (6, 64)
    assert np.array_equal(pool.reshape(6, 8, 8)[:, :4], np.broadcast_to(glyph()[:4], (6, 4, 8)))
    assert np.array_equal(
        told["given"], np.where(np.arange(64) < 32, glyph().flatten().astype(int), -1)[None].repeat(2, 0)
    )
    assert torch.equal(torch.from_numpy(pool), digits.complete(["a.png", "b.png"], 3, 2, keep="top-half").pool)
    picture = Image.open("p/x.png").convert("L")
    assert picture.width > 2 * picture.height and len(np.unique(np.asarray(picture))) > 3  # paper, mask, margin, ink
    code, out, _ = command("sample", run, "--given", "a.png", "--given", "b.png", *words[3:], "--json")
    assert code == 0 and json.loads(out)["samples"] == pool.tolist()
    code, out, _ = command("sample", run, "--given", "a.png", "--keep", "none", "--ink", "light", "--n", 1)
    assert code == 0 and len(out.split()) == 64


def test_rows_from_the_command_line(folders: dict[str, Path], command: Command) -> None:
    run = folders["toy"]
    code, out, _ = command("sample", run, "--given", "12,?", "?,7", "--n", 2, "--picture", "x.png", "--device", "cpu")
    lines = [[int(word) for word in line.split()] for line in out.splitlines()]
    assert code == 0 and [line[0] for line in lines[:2]] == [12, 12] and [line[1] for line in lines[2:]] == [7, 7]
    assert Path("x.png").stat().st_size > 1000
    Path("rows.csv").write_text("1,2\n3,4\n")
    code, out, _ = command("sample", run, "--given", "rows.csv", "--keep", "1", "--n", 1, "--json")
    told = json.loads(out)
    assert code == 0 and told["given"] == [[-1, 2], [-1, 4]] and [row[1] for row in told["samples"]] == [2, 4]
    code, out, _ = command("sample", run, "--given=-1,5", "--n", 1)
    assert code == 0 and out.split()[1] == "5"


@pytest.mark.parametrize(
    ("words", "code", "fragments"),
    [
        ("--keep 0", 2, ["keep: says what is done with given rows; add --given FILE"]),
        ("--ink dark", 2, ["ink: says what is done with given rows"]),
        ("--given 1,? --ink grey", 2, ["ink: 'grey' is not known", "allowed: auto, dark, light"]),
        ("--given 1,? --ink dark", 2, ["ink: is for images, but 'toy' has none"]),
        ("--given 1,2", 2, ["nothing to fill in", "--keep"]),
        ("--given 1,2 --keep all", 2, ["keep: all leaves nothing to fill in"]),
        ("--given 1,50", 2, ["given: '1,50': line 1, column 2 holds 50.0, but tokens are 0..49"]),
        ("--given 1,2,3", 2, ["rows of 2 tokens are needed"]),
        ("--given none.csv", 3, ["none.csv: does not exist"]),
        ("--given", 2, ["--given: expected at least one argument"]),
        ("--given 1,? --data-root x", 2, ["data-root: the data of this run come from no such folder; leave it out"]),
    ],
)
def test_refused_by_the_command(
    words: str, code: int, fragments: list[str], folders: dict[str, Path], command: Command
) -> None:
    found = command("sample", folders["toy"], "--device", "cpu", *words.split())
    assert found[0] == code and not found[1] and found[2].count("\n") == 1
    assert all(fragment in found[2] for fragment in fragments), found[2]


def test_domains_with_few_fresh_rows(folders: dict[str, Path], digits: Run, toy: Run, command: Command) -> None:
    """Digits has 300 test rows: pictures and likelihoods take what there is, more on request is refused."""
    run = folders["digits"]
    code, _, _ = command("sample", run, "--n", 4, "--picture", "x.png", "--out", "x", "--device", "cpu")
    assert code == 0 and Path("x.png").stat().st_size > 1000
    for rows, count in ((None, 300), (40, 40)):
        found = evaluate_likelihood(digits.method, digits.domain, digits.experiment, [BOUND], rows=rows)
        assert {row.n for row in found if row.metric == "nll"} == {count}
    with pytest.raises(DataError, match="301 rows .* --rows 300"):
        evaluate_likelihood(digits.method, digits.domain, digits.experiment, [BOUND], rows=301)
    assert fresh_count(digits.domain, 1_000) == 300 and fresh_count(toy.domain, 1_000) == 1_000
