"""Binary images: pixels and labels as published, fixed splits, batches kept small in memory, pictures."""

from __future__ import annotations

import gzip
import hashlib
import itertools
import os
import re
import struct
import subprocess
import sys
from importlib.resources import files as resources
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import emoe
from emoe.cli import main
from emoe.config import ConfigError, from_dict, override, to_dict
from emoe.domains.base import DataError, DomainConfig, ShuffledRows
from emoe.domains.images import (
    Digits,
    DigitsConfig,
    Images,
    MNISTConfig,
    as_images,
    files,
    pack_rows,
    pictures,
    unpack_rows,
    write_packed,
)
from emoe.domains.images.data import DIGITS, PACKED, pad
from emoe.experiment import Experiment


@pytest.fixture(scope="module")
def digits() -> Digits:
    return DigitsConfig().build(0)


@pytest.fixture
def tiny_root(tmp_path, monkeypatch) -> Path:
    """Files like the published ones with 20 and 7 images of random grey values, entered in the table."""
    draw = np.random.default_rng(3)
    root = tmp_path / "data"
    (root / "mnist").mkdir(parents=True)
    for images, labels, n in (
        (files.TRAIN_IMAGES, files.TRAIN_LABELS, 20),
        (files.TEST_IMAGES, files.TEST_LABELS, 7),
    ):
        greys = draw.integers(256, size=(n, 28, 28))
        greys[0, 0, :4] = [0, 127, 128, 255]
        for name, values in ((images, greys), (labels, draw.integers(10, size=n))):
            publish(root / "mnist" / name, values, monkeypatch)
    return root


def publish(path: Path, values: np.ndarray, monkeypatch) -> None:
    """Write an IDX file and make it the published one of its name."""
    content = struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape) + values.astype(np.uint8).tobytes()
    zipped = gzip.compress(content, mtime=0)
    sums = [hashlib.sha256(x).hexdigest() for x in (zipped, content)]
    monkeypatch.setitem(files.KNOWN, path.name, files.Known(len(zipped), sums[0], len(content), sums[1]))
    path.with_name(f"{path.name}.gz").write_bytes(zipped)


# --- digits


def test_digits_are_those_of_scikit_learn():
    source = pytest.importorskip("sklearn.datasets").load_digits()
    with np.load(DIGITS, allow_pickle=False) as archive:
        assert np.array_equal(np.unpackbits(archive["bits"], axis=1), source.data >= 8)
        assert np.array_equal(archive["labels"], source.target)
    assert DIGITS.stat().st_size < 20_000
    assert resources("emoe.domains.images").joinpath("digits.npz").is_file()


def test_digits_are_split_by_class(digits):
    assert (digits.task, digits.name, digits.side) == ("digits", "digits", 8)
    assert (digits.space.size, digits.space.mask_id, digits.space.length) == (3, 2, 64)
    assert digits.rows.shape == (1_497, 64) and digits.test_rows.shape == (300, 64)
    assert digits.rows.dtype == digits.test_rows.dtype == torch.uint8
    assert set(digits.rows.unique().tolist()) == {0, 1}
    assert digits.test_labels.bincount().tolist() == [30] * 10
    assert digits.labels.bincount().tolist() == [148, 152, 147, 153, 151, 152, 151, 149, 144, 150]
    with np.load(DIGITS, allow_pickle=False) as archive:
        whole = [*zip(map(bytes, archive["bits"]), archive["labels"].tolist(), strict=True)]
    halves = [
        [*zip(map(bytes, pack_rows(rows)), labels.tolist(), strict=True)]
        for rows, labels in ((digits.rows, digits.labels), (digits.test_rows, digits.test_labels))
    ]
    assert sorted(halves[0] + halves[1]) == sorted(whole)  # nothing lost, labels still with their images
    trained = {image for image, _ in halves[0]}
    assert sum(image in trained for image, _ in halves[1]) == 12  # as the docstring says


def test_the_seed_does_not_change_the_data(digits):
    other = DigitsConfig().build(7)
    assert torch.equal(other.rows, digits.rows) and torch.equal(other.test_rows, digits.test_rows)
    # The split is a part of the benchmark: another one would make results incomparable.
    digest = hashlib.sha256(digits.test_rows.numpy().tobytes() + digits.test_labels.numpy().tobytes()).hexdigest()
    assert digest[:16] == "7f865be121215f49"


def test_fresh_rows_are_test_rows_without_repetition(digits):
    rows = digits.fresh(300, 0)
    assert rows.dtype == torch.long
    assert sorted(map(bytes, pack_rows(rows))) == sorted(map(bytes, pack_rows(digits.test_rows)))
    assert torch.equal(digits.fresh(40, 0), digits.fresh(40, 0))
    assert not torch.equal(digits.fresh(40, 0), digits.fresh(40, 1))
    some = Images(
        "x", digits.rows, torch.arange(64, dtype=torch.uint8).repeat(10, 1) + torch.arange(10)[:, None].byte()
    )
    assert len(some.fresh(9, 5).unique(dim=0)) == 9
    with pytest.raises(DataError, match=r"digits: 301 rows .* test split has 300; .*--rows 300"):
        digits.fresh(301, 0)


# --- MNIST


def test_threshold_margin_and_labels(tiny_root):
    domain = MNISTConfig(root=str(tiny_root)).build(0)
    assert (domain.task, domain.name, domain.side, domain.space.length) == ("mnist", "mnist", 32, 1_024)
    greys = {name: files.read_idx(tiny_root / "mnist" / f"{name}.gz") for name in files.ORIGINAL}
    for rows, labels, image_file, label_file in (
        (domain.rows, domain.labels, files.TRAIN_IMAGES, files.TRAIN_LABELS),
        (domain.test_rows, domain.test_labels, files.TEST_IMAGES, files.TEST_LABELS),
    ):
        images = as_images(rows)
        assert rows.dtype == torch.uint8 and labels.dtype == torch.long
        assert np.array_equal(images[:, 2:30, 2:30], greys[image_file] / 255 > 0.5)
        assert images.sum() == images[:, 2:30, 2:30].sum()
        assert labels.tolist() == greys[label_file].tolist()
    assert as_images(domain.rows)[0, 2, 2:6].tolist() == [0, 0, 1, 1]

    inner = MNISTConfig(root=str(tiny_root), side=28, points=5).build(0)
    assert (inner.name, inner.side) == ("mnist-28", 28)
    assert len(inner.rows) == len(inner.labels) == 5 and len(inner.test_rows) == 7
    assert torch.equal(torch.from_numpy(pad(inner.rows.numpy())), domain.rows[:5])


def test_unzipped_and_damaged_files(tiny_root):
    config = MNISTConfig(root=str(tiny_root))
    rows = config.build(0).rows
    path = tiny_root / "mnist" / f"{files.TRAIN_IMAGES}.gz"
    content = gzip.decompress(path.read_bytes())
    path.unlink()
    (tiny_root / files.TRAIN_IMAGES).write_bytes(content)
    assert torch.equal(config.build(0).rows, rows)
    (tiny_root / files.TRAIN_IMAGES).write_bytes(content[:-1] + bytes([content[-1] ^ 255]))
    with pytest.raises(DataError, match="sha256 is"):
        config.build(0)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        (files.TRAIN_IMAGES, (20, 28, 27), r"has shape \(20, 28, 27\), not \(N, 28, 28\)"),
        (files.TEST_LABELS, (8,), r"has shape \(8,\), not one label an image"),
    ],
)
def test_files_that_do_not_fit_together(tiny_root, monkeypatch, name, shape, message):
    publish(tiny_root / "mnist" / name, np.zeros(shape), monkeypatch)
    with pytest.raises(DataError, match=f"{name}.gz: {message}"):
        MNISTConfig(root=str(tiny_root)).build(0)


def test_missing_data_says_what_to_do(tmp_path, monkeypatch):
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte\[\.gz\].*" + re.escape(str(tmp_path))):
        MNISTConfig(root=str(tmp_path)).build(0)
    with pytest.raises(DataError, match="binarized_mnist_train"):
        MNISTConfig(root=str(tmp_path), variant="static").build(0)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.delenv("EMOE_DATA", raising=False)
    with pytest.raises(DataError, match="no data folder is named.*emoe data mnist"):
        MNISTConfig().build(0)


def test_packed_rows_travel(tiny_root, tmp_path):
    path = write_packed(tiny_root, tmp_path / "bag")
    assert [entry.name for entry in path.parent.iterdir()] == [PACKED]
    for side in (28, 32):
        there, here = (MNISTConfig(root=str(root), side=side).build(0) for root in (path.parent, tiny_root))
        for name in ("rows", "labels", "test_rows", "test_labels"):
            assert torch.equal(getattr(there, name), getattr(here, name))
            assert getattr(there, name).dtype == getattr(here, name).dtype
    first = path.read_bytes()
    assert write_packed(tiny_root, tmp_path / "bag").read_bytes() == first


def test_data_roots_of_the_command_line(tiny_root, tmp_path, monkeypatch, capsys):
    """A run goes on, and is opened, with the same rows from another folder; its name tells of no folder."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.delenv("EMOE_DATA", raising=False)
    sizes = {"channels": 8, "hidden": 8, "time-size": 8, "time-hidden": 16, "groups": 4}
    words = "train rows-mdlm --domain mnist --domain.side 28 --backbone unet --run r --train.batch 2 --train.steps 1"
    words = [*f"{words} --quiet --device cpu".split(), *(f"--backbone.{name}={size}" for name, size in sizes.items())]
    assert main(words) == 3
    assert "no data folder is named and ./data does not exist" in capsys.readouterr().err
    assert main([*words, "--data-root", str(tiny_root)]) == 0
    name = Experiment.load(Path("r/experiment.json")).name
    assert "domain.side=28" in name and "root" not in name and str(tmp_path) not in name
    assert main([*words, "--data-root", "x", "--domain.root", "y"]) == 2
    assert "data-root: is the same as --domain.root; give one of them" in capsys.readouterr().err
    assert main(["data", "pack", "--out", "bag", "--data-root", str(tiny_root)]) == 0
    assert "mnist-packed.npz: 0.0 MB; use it with --data-root bag" in capsys.readouterr().out
    tiny_root.rename(here / "elsewhere")
    sample = ["sample", "r", "--n", "2", "--picture", "x.png", "--out", "x", "--device", "cpu"]
    assert main(sample) == 3
    assert "--data-root" in capsys.readouterr().err
    assert main([*sample, "--data-root", "bag"]) == 0  # 7 test rows are enough for a picture
    assert np.load("x.npy").shape == (2, 784) and Path("x.png").stat().st_size > 1000
    assert main([*words, "--data-root", "bag", "--resume"]) == 0  # the rows are those it was started with
    Path("elsewhere").rename("data")
    capsys.readouterr()
    assert main(["sample", "r", "--n", "1", "--domain.root", "none", "--device", "cpu"]) == 0  # ./data is found


def test_packed_files_that_are_refused(tmp_path):
    path = tmp_path / PACKED
    good = {"train": np.zeros((4, 128), np.uint8), "test": np.zeros((2, 128), np.uint8)}
    good |= {"train_labels": np.zeros(4, np.uint8), "test_labels": np.zeros(2, np.uint8)}
    config = MNISTConfig(root=str(tmp_path))
    np.savez(path, **good)
    assert len(config.build(0).rows) == 4
    for changes, message in (
        ({"train": np.zeros((4, 98), np.uint8)}, r"train is uint8 of shape \(4, 98\), not uint8 of shape \(N, 128\)"),
        ({"test": np.zeros((2, 128))}, r"test is float64"),
        ({"test": np.zeros((0, 128), np.uint8)}, r"test is uint8 of shape \(0, 128\)"),
        ({"train_labels": np.zeros(3, np.uint8)}, "train_labels is uint8 of shape .*each of the 4 images"),
        ({"test_labels": np.full(2, 10, np.uint8)}, "test_labels is .* not a class 0..9"),
        ({"test_labels": np.array([None, None])}, "cannot be read.*allow_pickle"),
    ):
        np.savez(path, **(good | changes))
        with pytest.raises(DataError, match=re.escape(str(path)) + f": {message}.*; write it again"):
            config.build(0)
    np.savez(path, train=good["train"])
    with pytest.raises(DataError, match="cannot be read.*test"):
        config.build(0)
    np.savez(path, **good)
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(DataError, match="cannot be read"):
        config.build(0)
    with path.open("wb") as file:
        np.save(file, good["train"])
    with pytest.raises(DataError, match="a single array"):
        config.build(0)


def test_the_real_mnist(tmp_path, data_root):
    root = data_root(files.ORIGINAL)
    domain = MNISTConfig(root=str(root)).build(0)
    assert domain.rows.shape == (60_000, 1_024) and domain.test_rows.shape == (10_000, 1_024)
    assert domain.labels[:5].tolist() == [5, 0, 4, 1, 9] and domain.test_labels[:5].tolist() == [7, 2, 1, 0, 4]
    assert domain.labels.bincount().tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert domain.rows.sum(dtype=torch.long) == 6_221_431  # 13.2% of the 784 pixels
    path = write_packed(root, tmp_path)
    assert path.stat().st_size < 4_000_000
    carried = MNISTConfig(root=str(tmp_path)).build(0)
    for name in ("rows", "labels", "test_rows", "test_labels"):
        assert torch.equal(getattr(carried, name), getattr(domain, name))


def test_the_real_static_mnist(data_root):
    root = str(data_root(files.STATIC))
    domain = MNISTConfig(root=root, variant="static", side=28).build(0)
    assert domain.name == "mnist-static-28" and domain.labels is None and domain.test_labels is None
    assert domain.rows.shape == (50_000, 784) and domain.test_rows.shape == (10_000, 784)
    # Drawn with the grey values as probabilities, so the ink is the mean grey value of MNIST, 0.1307.
    assert domain.rows.float().mean().item() == pytest.approx(0.1307, abs=2e-3)
    padded = MNISTConfig(root=root, variant="static", points=100).build(0)
    assert padded.name == "mnist-static" and padded.rows.shape == (100, 1_024)


# --- configs


def test_configs_join_the_family():
    config = from_dict(DomainConfig, {"kind": "mnist", "variant": "static", "side": 28})
    assert config == MNISTConfig(variant="static", side=28) and from_dict(DomainConfig, to_dict(config)) == config
    assert override(MNISTConfig(), {"root": "x", "side": "28", "points": "9"}) == MNISTConfig(
        root="x", side=28, points=9
    )
    assert from_dict(DomainConfig, {"kind": "digits"}) == DigitsConfig()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"side": 30}, "side: must be 28 or 32, got 30"),
        ({"side": 64}, "side: must be >= 28 and <= 32, got 64"),
        ({"points": 1}, "points: must be >= 2, got 1"),
        ({"points": 60_001}, "points: threshold has 60,000 training rows; ask for at most so many"),
        ({"variant": "static", "points": 50_001}, "points: static has 50,000 training rows"),
        ({"variant": "grey"}, "variant: got 'grey'; allowed: static, threshold"),
    ],
)
def test_bad_configs(fields, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        from_dict(DomainConfig, {"kind": "mnist"} | fields)


def test_a_script_that_names_an_unknown_variant():
    config = MNISTConfig()
    assert list(config.conflicts()) == []
    object.__setattr__(config, "variant", "grey")  # the constructor's types are checked here, not in a user's script
    assert list(config.conflicts()) == ["variant: 'grey' is not known; allowed: threshold, static"]


# --- rows, batches and pictures


def test_batches_are_those_of_long_rows(digits):
    for rank, world in ((0, 1), (1, 2)):
        small = digits.batches(200, 3, rank=rank, world=world)
        large = ShuffledRows(digits.rows.long(), 200, 3, rank=rank, world=world)
        assert small.rows.dtype == torch.uint8 and large.rows.dtype == torch.long
        for step in (0, 7, 8, 40):  # 7 runs over the end of the first shuffle
            assert small(step).dtype == torch.long
            assert torch.equal(small(step), large(step))


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 5), st.sampled_from([8, 64, 784]), st.sampled_from([torch.uint8, torch.long]), st.integers(0, 9))
def test_packing_and_back(n, length, dtype, seed):
    rows = torch.randint(2, (n, length), generator=torch.Generator().manual_seed(seed)).to(dtype)
    packed = pack_rows(rows)
    assert packed.shape == (n, length // 8) and packed.dtype == np.uint8
    assert torch.equal(unpack_rows(packed), rows.byte())


def test_rows_that_cannot_be_packed_or_shown():
    with pytest.raises(ValueError, match="unmask"):
        pack_rows(torch.full((1, 8), 2))
    with pytest.raises(ValueError, match="whole bytes"):
        pack_rows(torch.zeros(1, 9, dtype=torch.long))
    with pytest.raises(ValueError, match="rows of 8 pixels are no square images"):
        as_images(torch.zeros(1, 8, dtype=torch.long))
    assert as_images(torch.arange(8).reshape(2, 4)).tolist() == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


def test_a_mosaic_puts_images_line_by_line():
    images = np.zeros((5, 3, 3), np.uint8)
    images[0, 0, 2], images[1, 1, 1], images[4] = 1, 2, 1
    shades = pictures.mosaic(images, 4)
    assert shades.shape == (17, 17)
    cells = {
        (i, j): shades[1 + 4 * i : 4 + 4 * i, 1 + 4 * j : 4 + 4 * j] for i, j in itertools.product(range(4), repeat=2)
    }
    assert cells[0, 0].tolist() == [[0, 0, 1], [0, 0, 0], [0, 0, 0]]
    assert cells[0, 1].tolist() == [[0, 0, 0], [0, 0.5, 0], [0, 0, 0]]
    assert (cells[1, 0] == 1).all() and cells[1, 1].mask.all()
    assert shades.mask[::4].all() and shades.mask[:, ::4].all()
    assert shades.count() == 5 * 9


@pytest.mark.parametrize(("n", "edge"), [(3, 4), (63, 4), (64, 8)])
def test_picture(tmp_path, digits, n, edge, monkeypatch):
    from matplotlib.image import imread

    edges = []
    mosaic = pictures.mosaic
    monkeypatch.setattr(pictures, "mosaic", lambda images, edge: edges.append(edge) or mosaic(images, edge))
    path = tmp_path / "new" / "x.png"
    masked = torch.full((n, 64), 2)
    digits.picture({"all masked": masked, "data": digits.fresh(100, 0)}, path, title="a title")
    assert edges == [edge, edge]
    image = imread(path)[..., :3]
    assert image.shape[1] > 1.5 * image.shape[0]  # two panels side by side
    data, samples = np.array_split(image, 2, axis=1)  # the ground truth comes first
    grey = [(abs(half - 0.5) < 0.03).all(-1).mean() for half in (data, samples)]
    black = [(half < 0.02).all(-1).mean() for half in (data, samples)]
    assert grey[0] < 0.01 < grey[1] and black[1] < 0.02 < black[0]
    with pytest.raises(ValueError, match="no pools"):
        digits.picture({}, path)


LIKELIHOOD = """
import dataclasses, torch
from emoe.domains.images import DigitsConfig
from emoe.evaluation.evaluate import evaluate_likelihood
from emoe.evaluation.likelihood import factorised_nll
from emoe.recipes import get_recipe
from emoe.runs import load_run, train
from emoe.types import Convention

torch.set_num_threads(1)
small = {"width": 8, "hidden": 16, "heads": 2, "time-size": 8, "depth": 1}
settings = {"backbone." + name: str(size) for name, size in small.items()} | {"train.steps": "2", "train.batch": "4"}
experiment = dataclasses.replace(get_recipe("rows-emoe"), domain=DigitsConfig())
train(experiment, "run", settings=settings, device="cpu", quiet=True)
run = load_run("run", device="cpu")
assert run.step == 2 and run.domain.rows.dtype == torch.uint8 and run.sample(3, 2).shape == (3, 64)
rows = evaluate_likelihood(run.method, run.domain, run.experiment, [Convention.parse("bound@1")], rows=20)
assert {row.metric for row in rows} == {"nll", "bpd", "ppl", "coordination_gain"}
assert {(row.task, row.data, row.n) for row in rows} == {("digits", "digits", 20)}
held_out = run.domain.fresh(300, 0)
assert factorised_nll(run.domain.rows, held_out, 3) == factorised_nll(run.domain.rows.long(), held_out, 3)
print("through")
"""


def test_trains_and_gets_likelihoods(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(Path(emoe.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", LIKELIHOOD]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.endswith("through\n"), done.stderr
