"""Binary images: pixels and labels as published, fixed splits, batches kept small in memory, figures."""

from __future__ import annotations

import gzip
import hashlib
import re
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from emoe.evaluation.evaluate import evaluate_likelihood

from emoe.cli import main
from emoe.config import ConfigError, from_dict, override, to_dict
from emoe.domains.base import DataError, DomainConfig, ShuffledRows
from emoe.domains.images import Digits, DigitsConfig, MNISTConfig, as_images, files, pack_rows, unpack_rows
from emoe.domains.images.data import DIGITS, pad
from emoe.experiment import Experiment
from emoe.runs import load_run
from emoe.types import Convention

SIZES = {"channels": 8, "hidden": 8, "time-size": 8, "time-hidden": 16, "groups": 4}
UNET = [f"--backbone.{name}={size}" for name, size in SIZES.items()]


@pytest.fixture(scope="module")
def digits() -> Digits:
    return DigitsConfig().build(0)


@pytest.fixture
def tiny_root(tmp_path, monkeypatch) -> Path:
    """Files like the published ones with 20 and 7 images of random grey values, entered in the table."""
    draw = np.random.default_rng(3)
    root = tmp_path / "data"
    (root / "mnist").mkdir(parents=True)
    for (images, labels), n in ((files.TRAIN, 20), (files.TEST, 7)):
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


def test_digits_are_split_by_class(digits):
    assert (digits.task, digits.name, digits.side) == ("digits", "digits", 8)
    assert (digits.space.size, digits.space.mask_id, digits.space.length) == (3, 2, 64)
    assert digits.rows.shape == (1_497, 64) and digits.rows.dtype == digits.test_rows.dtype == torch.uint8
    assert digits.test_labels.bincount().tolist() == [30] * 10
    with np.load(DIGITS, allow_pickle=False) as archive:
        whole = [*zip(map(bytes, archive["bits"]), archive["labels"].tolist(), strict=True)]
    halves = [
        [*zip(map(bytes, pack_rows(rows)), labels.tolist(), strict=True)]
        for rows, labels in ((digits.rows, digits.labels), (digits.test_rows, digits.test_labels))
    ]
    assert sorted(halves[0] + halves[1]) == sorted(whole)  # nothing lost, labels still with their images
    trained = {image for image, _ in halves[0]}
    assert sum(image in trained for image, _ in halves[1]) == 12  # as the docstring says
    assert torch.equal(DigitsConfig().build(7).test_rows, digits.test_rows)


def test_fresh_rows_are_test_rows_without_repetition(digits):
    rows = digits.fresh(300, 0)
    assert rows.dtype == torch.long
    assert sorted(map(bytes, pack_rows(rows))) == sorted(map(bytes, pack_rows(digits.test_rows)))
    assert torch.equal(digits.fresh(40, 0), rows[:40]) and not torch.equal(digits.fresh(40, 1), rows[:40])
    with pytest.raises(DataError, match=r"digits: 301 rows .* held-out split has 300; .*--rows 300"):
        digits.fresh(301, 0)


# --- MNIST


def test_threshold_margin_and_labels(tiny_root):
    domain = MNISTConfig(root=str(tiny_root)).build(0)
    assert (domain.task, domain.name, domain.side, domain.space.length) == ("mnist", "mnist", 32, 1_024)
    greys = {name: files.read_idx(tiny_root / "mnist" / f"{name}.gz") for name in files.ORIGINAL}
    for rows, labels, names in (
        (domain.rows, domain.labels, files.TRAIN),
        (domain.test_rows, domain.test_labels, files.TEST),
    ):
        images = as_images(rows)
        assert rows.dtype == torch.uint8 and labels.dtype == torch.long
        assert np.array_equal(images[:, 2:30, 2:30], greys[names[0]] / 255 > 0.5)
        assert images.sum() == images[:, 2:30, 2:30].sum()
        assert labels.tolist() == greys[names[1]].tolist()
    assert as_images(domain.rows)[0, 2, 2:6].tolist() == [0, 0, 1, 1]

    inner = MNISTConfig(root=str(tiny_root), side=28, points=5).build(0)
    assert (inner.name, inner.side) == ("mnist-28", 28)
    assert len(inner.rows) == len(inner.labels) == 5 and len(inner.test_rows) == 7
    assert torch.equal(pad(inner.rows), domain.rows[:5])
    features = ("frechet", "coverage", "confidence", "judge_accuracy")  # 28 x 28 are read with their margin
    both = [
        {item.metric: item for item in pool}
        for pool in (inner.measure(inner.test_rows.long()), domain.measure(pad(inner.test_rows).long()))
    ]
    assert all(both[0][name] == both[1][name] for name in features)


def test_unzipped_and_damaged_files(tiny_root):
    config, name = MNISTConfig(root=str(tiny_root)), files.TRAIN[0]
    rows = config.build(0).rows
    path = tiny_root / "mnist" / f"{name}.gz"
    content = gzip.decompress(path.read_bytes())
    path.unlink()
    (tiny_root / name).write_bytes(content)
    assert torch.equal(config.build(0).rows, rows)
    (tiny_root / name).write_bytes(content[:-1] + bytes([content[-1] ^ 255]))
    with pytest.raises(DataError, match="sha256 is"):
        config.build(0)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        (files.TRAIN[0], (20, 28, 27), r"has shape \(20, 28, 27\), not \(N, 28, 28\)"),
        (files.TEST[1], (8,), r"has shape \(8,\), not one label an image"),
    ],
)
def test_files_that_do_not_fit_together(tiny_root, monkeypatch, name, shape, message):
    publish(tiny_root / "mnist" / name, np.zeros(shape), monkeypatch)
    with pytest.raises(DataError, match=f"{name}.gz: {message}"):
        MNISTConfig(root=str(tiny_root)).build(0)


def test_data_roots_of_the_command_line(tiny_root, tmp_path, monkeypatch, capsys):
    """A run goes on, and is opened, with the same rows from another folder; its name has no folder in it."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.delenv("EMOE_DATA", raising=False)
    words = "train rows-mdlm --domain mnist --domain.side 28 --backbone unet --run r --train.batch 2 --train.steps 1"
    words = [*f"{words} --quiet --device cpu".split(), *UNET]
    assert main(words) == 3
    assert "no data folder is named and ./data does not exist" in capsys.readouterr().err
    assert main([*words, "--data-root", str(tiny_root)]) == 0
    name = Experiment.load(Path("r/experiment.json")).name
    assert "domain.side=28" in name and "root" not in name and str(tmp_path) not in name
    assert main([*words, "--data-root", "x", "--domain.root", "y"]) == 2
    assert "data-root: is the same as --domain.root; give one of them" in capsys.readouterr().err
    tiny_root.rename(here / "elsewhere")
    sample = ["sample", "r", "--n", "2", "--picture", "x.png", "--out", "x", "--device", "cpu"]
    assert main(sample) == 3
    assert "--data-root" in capsys.readouterr().err
    assert main([*sample, "--data-root", "elsewhere"]) == 0  # 7 test rows are enough for a picture
    assert np.load("x.npy").shape == (2, 784) and Path("x.png").stat().st_size > 1000
    assert main([*words, "--data-root", "elsewhere", "--resume"]) == 0  # the rows are those it was started with
    Path("elsewhere").rename("data")
    assert main(["sample", "r", "--n", "1", "--domain.root", "none", "--device", "cpu"]) == 0  # ./data is found


def test_the_real_mnist(data_root):
    domain = MNISTConfig(root=str(data_root(files.ORIGINAL))).build(0)
    assert domain.rows.shape == (60_000, 1_024) and domain.test_rows.shape == (10_000, 1_024)
    assert domain.labels[:5].tolist() == [5, 0, 4, 1, 9] and domain.test_labels[:5].tolist() == [7, 2, 1, 0, 4]
    assert domain.rows.sum(dtype=torch.long) == 6_221_431  # 13.2% of the 784 pixels


# --- configs, rows, figures


def test_configs_join_the_family():
    config = from_dict(DomainConfig, {"kind": "mnist", "side": 28})
    assert config == MNISTConfig(side=28) and from_dict(DomainConfig, to_dict(config)) == config
    changed = override(MNISTConfig(), {"root": "x", "side": "28", "points": "9"})
    assert changed == MNISTConfig(root="x", side=28, points=9)
    assert from_dict(DomainConfig, {"kind": "digits"}) == DigitsConfig()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"side": 30}, "side: must be 28 or 32, got 30"),
        ({"side": 64}, "side: must be >= 28 and <= 32, got 64"),
        ({"points": 1}, "points: must be >= 2 and <= 60000, got 1"),
        ({"points": 60_001}, "points: must be >= 2 and <= 60000, got 60001"),
        ({"variant": "static"}, "variant: unknown field of MNISTConfig"),
    ],
)
def test_bad_configs(fields, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        from_dict(DomainConfig, {"kind": "mnist"} | fields)


def test_batches_are_those_of_long_rows(digits):
    for rank, world in ((0, 1), (1, 2)):
        small = digits.batches(200, 3, rank=rank, world=world)
        large = ShuffledRows(digits.rows.long(), 200, 3, rank=rank, world=world)
        assert small.rows.dtype == torch.uint8 and large.rows.dtype == torch.long
        for step in (0, 7, 8, 40):  # 7 runs over the end of the first shuffle
            assert small(step).dtype == torch.long
            assert torch.equal(small(step), large(step))


def test_packing_and_back():
    for n, length, dtype in ((0, 8, torch.uint8), (5, 64, torch.long), (3, 784, torch.uint8)):
        rows = torch.randint(2, (n, length), generator=torch.Generator().manual_seed(n)).to(dtype)
        packed = pack_rows(rows)
        assert packed.shape == (n, length // 8) and packed.dtype == np.uint8
        assert torch.equal(unpack_rows(packed), rows.byte())
    with pytest.raises(ValueError, match="unmask"):
        pack_rows(torch.full((1, 8), 2))
    with pytest.raises(ValueError, match="whole bytes"):
        pack_rows(torch.zeros(1, 9, dtype=torch.long))
    with pytest.raises(ValueError, match="rows of 8 pixels are no square images"):
        as_images(torch.zeros(1, 8, dtype=torch.long))
    assert as_images(torch.arange(8).reshape(2, 4)).tolist() == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


@pytest.mark.parametrize(("n", "edge"), [(3, 4), (63, 4), (64, 8)])
def test_picture(tmp_path, digits, n, edge):
    from matplotlib.image import imread

    path = tmp_path / "new" / "x.png"
    pools = {"all masked": torch.full((n, 64), 2), "data": digits.fresh(100, 0)}
    digits.picture(pools, path, title="a title")
    shown = [axis.images[0].get_array() for axis in digits.figure(pools).axes]
    assert [array.shape for array in shown] == [(edge * 9 + 1,) * 2] * 2
    image = imread(path)[..., :3]
    assert image.shape[1] > 1.5 * image.shape[0]  # two panels side by side
    data, samples = np.array_split(image, 2, axis=1)  # real data come first
    grey = [(abs(half - 0.5) < 0.03).all(-1).mean() for half in (data, samples)]
    black = [(half < 0.02).all(-1).mean() for half in (data, samples)]
    assert grey[0] < 0.01 < grey[1] and black[1] < 0.02 < black[0]
    with pytest.raises(ValueError, match="no pools"):
        digits.picture({}, path)


def test_trains_and_gets_likelihoods(tmp_path):
    words = ["train", "rows-mdlm", "--domain", "digits", "--backbone", "unet", *UNET, "--train.steps", "2"]
    words += ["--train.batch", "4", "--run", str(tmp_path / "run"), "--device", "cpu", "--quiet"]
    assert main(words) == 0
    run = load_run(tmp_path / "run", device="cpu")
    assert run.domain.rows.dtype == torch.uint8 and run.sample(3, 2).shape == (3, 64)
    rows = evaluate_likelihood(run.method, run.domain, run.experiment, [Convention.parse("bound@1")], rows=20)
    assert {row.metric for row in rows} == {"nll", "bpd", "ppl"}
    assert {(row.task, row.data, row.n) for row in rows} == {("digits", "digits", 20)}
