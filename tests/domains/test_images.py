"""Binary images: pixels and labels as published, fixed splits, files and their download, figures."""

from __future__ import annotations

import gzip
import hashlib
import re
import struct
import urllib.request
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from small import UNET

from emoe.cli import main
from emoe.config import ConfigError
from emoe.domains.base import DataError
from emoe.domains.images import Digits, DigitsConfig, MNISTConfig, as_images, files
from emoe.experiment import Experiment


@pytest.fixture(scope="module")
def digits() -> Digits:
    return DigitsConfig().build(0)


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


@pytest.fixture
def small(monkeypatch) -> dict[str, bytes]:
    """A table in which the published files have 20 and 7 images of random grey values; name -> gzipped content."""
    draw, contents = np.random.default_rng(3), {}
    for (images, labels), n in ((files.ORIGINAL[:2], 20), (files.ORIGINAL[2:], 7)):
        greys = draw.integers(256, size=(n, 28, 28))
        greys[0, 0, :4] = [0, 127, 128, 255]
        for name, values in ((images, greys), (labels, draw.integers(10, size=n))):
            head = struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape)
            content = head + values.astype(np.uint8).tobytes()
            contents[f"{name}.gz"] = gzip.compress(content, mtime=0)
            for file, data in ((name, content), (f"{name}.gz", contents[f"{name}.gz"])):
                monkeypatch.setitem(files.KNOWN, file, (len(data), hashlib.sha256(data).hexdigest()))
    return contents


@pytest.fixture
def tiny_root(tmp_path, small) -> Path:
    for name, content in small.items():
        write(tmp_path / "data" / "mnist" / name, content)
    return tmp_path / "data"


def test_digits_are_those_of_scikit_learn_split_by_class(digits):
    assert (digits.task, digits.name, digits.side) == ("digits", "digits", 8)
    assert (digits.space.size, digits.space.mask_id, digits.space.length) == (3, 2, 64)
    assert digits.rows.shape == (1_497, 64) and digits.rows.dtype == digits.test_rows.dtype == torch.uint8
    assert digits.test_labels.bincount().tolist() == [30] * 10
    train = torch.column_stack([digits.rows, digits.labels]).tolist()
    test = torch.column_stack([digits.test_rows, digits.test_labels]).tolist()
    assert sum(row[:64] in [other[:64] for other in train] for row in test) == 12  # as the docstring says
    assert torch.equal(DigitsConfig().build(7).test_rows, digits.test_rows)
    source = pytest.importorskip("sklearn.datasets").load_digits()
    assert sorted(train + test) == sorted(np.column_stack([source.data >= 8, source.target]).tolist())


def test_threshold_margin_and_labels(tiny_root):
    domain = MNISTConfig(root=str(tiny_root)).build(0)
    assert (domain.task, domain.name, domain.side, domain.space.length) == ("mnist", "mnist", 32, 1_024)
    greys, labels, test_greys, test_labels = (files.read_idx(tiny_root / f"mnist/{x}.gz") for x in files.ORIGINAL)
    for rows, images in ((domain.rows, greys), (domain.test_rows, test_greys)):
        assert rows.dtype == torch.uint8
        assert np.array_equal(as_images(rows), np.pad(images / 255 > 0.5, ((0, 0), (2, 2), (2, 2))))
    assert np.array_equal(domain.labels, labels) and np.array_equal(domain.test_labels, test_labels)
    assert as_images(domain.rows)[0, 2, 2:6].tolist() == [0, 0, 1, 1]

    inner = MNISTConfig(root=str(tiny_root), side=28, points=5).build(0)
    assert (inner.name, inner.side) == ("mnist-28", 28)
    assert len(inner.rows) == len(inner.labels) == 5 and len(inner.test_rows) == 7
    assert np.array_equal(np.pad(as_images(inner.rows), ((0, 0), (2, 2), (2, 2))), as_images(domain.rows[:5]))
    with pytest.raises(ConfigError, match="side: must be 28 or 32, got 30"):
        MNISTConfig(side=30)
    features = ("frechet", "coverage", "confidence", "judge_accuracy")  # 28 x 28 are read with their margin
    pools = inner.measure(inner.test_rows.long()), domain.measure(domain.test_rows.long())
    small, large = ([item for item in pool if item.metric in features] for pool in pools)
    assert small == large and len(small) == 4


def test_data_roots_of_the_command_line(tiny_root, tmp_path, monkeypatch, capsys):
    """A run goes on, and is opened, with the same rows from another folder; its name has no folder in it."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.delenv("EMOE_DATA", raising=False)
    words = "train rows-mdlm --domain mnist --domain.side 28 --backbone unet --run r --train.batch 2 --train.steps 1"
    sizes = [f"--{name}={value}" for name, value in UNET.items() if name.startswith("backbone.")]
    words = [*f"{words} --quiet --device cpu".split(), *sizes]
    assert main(words) == 3
    assert "looked in data, data/mnist; name the folder" in capsys.readouterr().err
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


def test_only_the_published_files_are_read(tmp_path, small):
    name = files.ORIGINAL[1]
    zipped = write(tmp_path / f"{name}.gz", small[f"{name}.gz"])
    plain = write(tmp_path / name, gzip.decompress(small[f"{name}.gz"]))
    for path in (zipped, plain):
        assert files.read_idx(path).shape == (20,) and files.read_idx(path).max() < 10
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        with pytest.raises(DataError, match=re.escape(str(path)) + ": sha256 is [0-9a-f]+, but .*emoe data mnist"):
            files.read_idx(path)
        path.write_bytes(content[:-1])
        with pytest.raises(DataError, match=r"bytes, but the published file has \d+; delete it and download it again"):
            files.read_idx(path)
        path.unlink()
        with pytest.raises(DataError, match="cannot be read, damaged or cut off .*; delete it and put a whole copy"):
            files.read_idx(path)


def test_finds_files_below_the_root_and_says_what_is_missing(tmp_path, monkeypatch):
    name, root = files.ORIGINAL[1], tmp_path / "data"
    order = [root / name, root / f"{name}.gz", root / "mnist" / name, root / "mnist" / f"{name}.gz"]
    for path in order:  # later ones are preferred
        write(path, b"")
        assert files.find(root, [name]) == {name: path}
    with pytest.raises(DataError) as caught:
        files.find(root)
    text = str(caught.value)
    assert all((f"{missing}[.gz]" in text) == (missing != name) for missing in files.ORIGINAL)
    words = (str(root / "mnist"), "--data-root", "--domain.root", "EMOE_DATA", "emoe data mnist")
    assert all(word in text for word in words)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert files.data_root("~/given") == tmp_path / "given"


@pytest.fixture
def mirror(tmp_path, monkeypatch) -> Path:
    """A folder in place of the address of the mirror."""
    monkeypatch.setattr(files, "MIRROR", f"{tmp_path.as_uri()}/served/")
    return tmp_path / "served"


def left(root: Path) -> list[str]:
    return sorted(path.name for path in root.rglob("*") if path.is_file())


@pytest.mark.parametrize("content", [None, b"", b"<html>", b"x" * 200_000], ids=["none", "nothing", "a page", "long"])
def test_a_download_of_something_else_leaves_nothing(tmp_path, mirror, small, content):
    name = f"{files.ORIGINAL[0]}.gz"
    if content is None:
        message = r"cannot be downloaded .*No such file.*put train-images-idx3-ubyte\.gz, .* by hand"
    else:
        write(mirror / name, content)
        message = r"not the published file \([\d,]+ bytes in place of [\d,]+\); .* by hand"
    with pytest.raises(DataError, match=message):
        files.download(tmp_path / "data" / name)
    write(mirror / name, bytes(len(small[name])))
    with pytest.raises(DataError, match="another sha256"):
        files.download(tmp_path / "data" / name)
    assert left(tmp_path / "data") == []


def test_without_a_network_or_a_folder(tmp_path, monkeypatch, small):
    monkeypatch.setattr(urllib.request, "urlopen", Mock(side_effect=TimeoutError("timed out")))
    with pytest.raises(DataError, match=r"cannot be downloaded .*\(timed out\).*by hand"):
        files.download(files.missing(tmp_path)[0])
    assert left(tmp_path) == []
    with pytest.raises(DataError, match="cannot be made .*; choose another --data-root"):
        files.download(files.missing(write(tmp_path / "file", b""))[0])


def test_the_command_downloads_checks_and_mends(tmp_path, mirror, small, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EMOE_DATA", raising=False)
    for name, content in small.items():
        write(mirror / name, content)

    def said(*words: str) -> str:
        assert main(["data", "mnist", *words]) == 0
        return capsys.readouterr().out

    assert said().startswith(
        "data/mnist: 4 files downloaded"
    )  # without a folder being named: ./data, where it is found
    assert {path.name: path.read_bytes() for path in (tmp_path / "data" / "mnist").iterdir()} == small
    assert "data: all 4 files of MNIST are there and checked; nothing to download" in said()
    (tmp_path / "data" / "mnist" / f"{files.ORIGINAL[2]}.gz").write_bytes(b"damaged")
    out = said("--quiet")
    assert "1 files downloaded" in out and "all 4 checked" in out
    out = said("--data-root", str(tmp_path / "my data"))
    assert f"--data-root '{tmp_path / 'my data'}'" in out and left(tmp_path / "my data") == sorted(small)
    monkeypatch.setenv("EMOE_DATA", str(tmp_path / "env"))
    assert said().startswith(str(tmp_path / "env"))


def test_real_data_come_first_in_a_figure(digits):
    pools = {"all masked": torch.full((64, 64), 2), "data": digits.fresh(100, 0)}
    data, masked = (axis.images[0].get_array() for axis in digits.figure(pools).axes)
    assert data.shape == masked.shape == (73, 73)
    assert set(masked.compressed()) == {0.5} and set(data.compressed()) == {0, 1}
