"""Files of MNIST: checksums, folders and download."""

from __future__ import annotations

import functools
import gzip
import hashlib
import http.server
import io
import re
import struct
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from emoe.cli import main
from emoe.domains.base import DataError
from emoe.domains.images import files
from emoe.domains.images.files import KNOWN, ORIGINAL, Known


def idx(values: np.ndarray) -> bytes:
    head = b"\0\0\x08" + bytes([values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape)
    return head + values.astype(np.uint8).tobytes()


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


@pytest.fixture
def small(monkeypatch) -> dict[str, bytes]:
    """A table in which the four files are tiny; name -> gzipped content."""
    contents = {}
    for number, name in enumerate(ORIGINAL):
        content = idx(np.arange(24).reshape(2, 3, 4) + number)
        zipped = contents[f"{name}.gz"] = gzip.compress(content, mtime=0)
        sums = [hashlib.sha256(x).hexdigest() for x in (zipped, content)]
        monkeypatch.setitem(KNOWN, name, Known(len(zipped), sums[0], len(content), sums[1]))
    return contents


def test_only_the_published_files_are_read(tmp_path, small):
    name = ORIGINAL[1]
    zipped = write(tmp_path / f"{name}.gz", small[f"{name}.gz"])
    plain = write(tmp_path / name, gzip.decompress(small[f"{name}.gz"]))
    for path in (zipped, plain):
        assert np.array_equal(files.read_idx(path), np.arange(1, 25).reshape(2, 3, 4))
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
    name, root = ORIGINAL[1], tmp_path / "data"
    order = [root / name, root / f"{name}.gz", root / "mnist" / name, root / "mnist" / f"{name}.gz"]
    for path in order:  # later ones are preferred
        write(path, b"")
        assert files.find(root, [name]) == {name: path}
    with pytest.raises(DataError) as caught:
        files.find(root)
    text = str(caught.value)
    assert all((f"{missing}[.gz]" in text) == (missing != name) for missing in ORIGINAL)
    words = (str(root / "mnist"), "--data-root", "--domain.root", "EMOE_DATA", "emoe data mnist")
    assert all(word in text for word in words)
    with pytest.raises(DataError, match="no data folder is named"):
        files.find(None)


def test_the_data_root(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EMOE_DATA", raising=False)
    assert files.data_root() is None
    (tmp_path / "data").mkdir()
    assert files.data_root().resolve() == tmp_path / "data"
    monkeypatch.setenv("EMOE_DATA", str(tmp_path / "env"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert files.data_root() == tmp_path / "env" and files.data_root("~/given") == tmp_path / "given"


# --- downloads, from a server on this machine


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def mirror(tmp_path, monkeypatch) -> Iterator[Path]:
    """A folder that the address of the mirror serves."""
    folder = tmp_path / "served"
    folder.mkdir()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.setattr(files, "MIRROR", f"http://127.0.0.1:{server.server_port}/")
        monkeypatch.setattr(urllib.request, "_opener", urllib.request.build_opener(urllib.request.ProxyHandler({})))
        yield folder
        server.shutdown()
        thread.join()


def left(root: Path) -> list[str]:
    return sorted(path.name for path in root.rglob("*") if path.is_file())


@pytest.mark.parametrize("content", [None, b"", b"<html>", b"x" * 200_000], ids=["404", "nothing", "a page", "long"])
def test_a_download_of_something_else_leaves_nothing(tmp_path, mirror, small, content):
    path = mirror / f"{ORIGINAL[0]}.gz"
    if content is None:
        message = r"cannot be downloaded .*404.*put train-images-idx3-ubyte\.gz, .* by hand"
    else:
        write(path, content)
        message = r"not the published file \([\d,]+ bytes in place of \d+\); .* by hand"
    with pytest.raises(DataError, match=message):
        files.download_mnist(tmp_path / "data")
    write(path, bytes(len(small[path.name])))
    with pytest.raises(DataError, match="another sha256"):
        files.download_mnist(tmp_path / "data")
    assert left(tmp_path / "data") == []


class Line(io.BytesIO):
    """A connection that breaks off after its content."""

    def read(self, size: int | None = -1) -> bytes:
        if block := super().read(size):
            return block
        raise TimeoutError("timed out")


def test_without_a_network_or_a_folder(tmp_path, monkeypatch, small):
    for line in (Line(b""), Line(b"x" * 10)):
        monkeypatch.setattr(urllib.request, "urlopen", lambda url, timeout, line=line: line)
        with pytest.raises(DataError, match=r"cannot be downloaded .*\(timed out\).*by hand"):
            files.download_mnist(tmp_path)
        assert left(tmp_path) == []
    with pytest.raises(DataError, match="cannot be made .*; choose another --data-root"):
        files.download_mnist(write(tmp_path / "file", b""))


def test_the_command_downloads_checks_and_mends(tmp_path, mirror, small, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EMOE_DATA", raising=False)
    for name, content in small.items():
        write(mirror / name, content)

    def said(*words: str) -> tuple[str, str]:
        capsys.readouterr()
        assert main(["data", "mnist", *words]) == 0
        return capsys.readouterr()

    out, err = said()  # without a folder being named: ./data, where it is found
    assert out.startswith("data/mnist: 4 files downloaded")
    assert {path.name: path.read_bytes() for path in (tmp_path / "data" / "mnist").iterdir()} == small
    assert [line.split()[0] for line in err.splitlines()] == list(small)
    assert "data: all 4 files of MNIST are there and checked; nothing to download" in said()[0]
    (tmp_path / "data" / "mnist" / f"{ORIGINAL[2]}.gz").write_bytes(b"damaged")
    out, err = said("--quiet")
    assert "1 files downloaded" in out and "all 4 checked" in out and not err
    out, _ = said("--data-root", str(tmp_path / "my data"))
    assert f"--data-root '{tmp_path / 'my data'}'" in out and left(tmp_path / "my data") == sorted(small)
    monkeypatch.setenv("EMOE_DATA", str(tmp_path / "env"))
    assert said()[0].startswith(str(tmp_path / "env"))
