"""Checkpoints under kills, full disks, damage and attacks: whole, or refused, or the one before."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Server
from torch import Tensor

from emoe import files as storage
from emoe.engine import checkpoint
from emoe.files import NewerSchemaError, StorageError

Groups = dict[str, dict[str, Tensor]]
FILES = ("ema.safetensors", "model.safetensors", "optim.safetensors", "manifest.json")


def make_state(seed: int) -> Groups:
    draw = torch.Generator().manual_seed(seed)
    weight = torch.randn(7, 5, generator=draw)
    return {
        "model": {
            "weight": weight,
            "tied": weight,
            "transposed": weight.t(),
            "slice": weight[2:4],
            "half": torch.randn(3, 4, generator=draw).to(torch.bfloat16),
            "scalar": torch.randn((), generator=draw, dtype=torch.float64),
            "odd": torch.tensor([0.0, -0.0, float("nan"), float("inf"), 1e-45]),
            "empty": torch.zeros(0, 3),
            "flags": torch.tensor([True, False, True]),
        },
        "optim": {"step": torch.tensor(seed), "moment": torch.randn(6, generator=draw)},
        "ema": {"weight": weight.clone() + 1},
    }


def save(root: Path, step: int, keep: int = 3, **options: Any) -> Path:
    return checkpoint.save(root, step, make_state(step), {"seed": step, "lr": 0.1}, keep, **options)


def assert_state(saved: checkpoint.Checkpoint | None, step: int) -> None:
    assert saved is not None and saved.step == step and saved.meta == {"seed": step, "lr": 0.1}
    wanted = make_state(step)
    assert saved.tensors.keys() == wanted.keys()
    for group, tensors in wanted.items():  # equal bytes: dtypes, shapes, nan and -0 too
        assert checkpoint.to_bytes(saved.tensors[group]) == checkpoint.to_bytes(tensors), group


def steps(root: Path) -> list[int]:
    return sorted(int(folder.name.removeprefix("step-")) for folder in root.glob("step-*"))


def leftovers(root: Path) -> list[str]:
    return [entry.name for entry in root.iterdir() if entry.name.startswith(".tmp")]


def forge(folder: Path, name: str, data: bytes, **changes: Any) -> Path:
    """A folder as an attacker would make it: every hash is right, only the contents are not."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(data)
    entry = {"group": "model", "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    content = {"schema": checkpoint.SCHEMA, "step": 1, "files": {name: entry}, "meta": {}}
    storage.write_sealed(folder / checkpoint.MANIFEST, content | changes)
    return folder


def test_what_is_loaded_has_the_same_bits_and_equal_states_have_equal_files(tmp_path: Path) -> None:
    path = save(tmp_path / "a", 1234)
    assert path.name == "step-000001234" and checkpoint.latest(tmp_path / "a") == path
    assert_state(checkpoint.load(path), 1234)
    turned = {group: dict(reversed(members.items())) for group, members in reversed(make_state(1234).items())}
    second = checkpoint.save(tmp_path / "b", 1234, turned, {"lr": 0.1, "seed": 1234}, 2)
    assert sorted(entry.name for entry in path.iterdir()) == sorted(FILES)
    assert all((path / name).read_bytes() == (second / name).read_bytes() for name in FILES)


def test_files_respect_a_limit(tmp_path: Path) -> None:
    assert_state(checkpoint.load(save(tmp_path / "small", 1, max_file_bytes=400)), 1)
    big = {f"layer.{i}": torch.full((100,), float(i)) for i in range(40)} | {"huge": torch.zeros(3000)}
    path = checkpoint.save(tmp_path, 1, {"model": big}, {}, 2, max_file_bytes=2000)
    files = sorted(path.glob("model-*.safetensors"))
    assert len(files) > 10 and files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert [file.stat().st_size > 2000 for file in files].count(True) == 1
    assert checkpoint.load(path).tensors["model"].keys() == big.keys()


def test_loaded_tensors_are_writable_and_groups_load_alone(tmp_path: Path) -> None:
    path = save(tmp_path, 3)
    weights = checkpoint.load(path, groups=["ema"]).tensors
    assert set(weights) == {"ema"}
    weights["ema"]["weight"].add_(1)
    assert_state(checkpoint.load(path), 3)
    (path / "optim.safetensors").unlink()  # nor are the files of other groups looked at
    opened = checkpoint.load_latest(tmp_path, groups=["model", "ema"])
    assert opened is not None and set(opened.tensors) == {"model", "ema"} and opened.meta["seed"] == 3
    assert checkpoint.latest(tmp_path) is checkpoint.latest(tmp_path / "absent") is None
    assert checkpoint.load_latest(tmp_path / "absent") is None
    with pytest.raises(StorageError, match=r"no checkpoint can be read: .*lacks optim.safetensors"):
        checkpoint.load_latest(tmp_path)


def test_the_newest_stay_and_damaged_ones_do_not_count(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step, keep=9)
    for step in (2, 3, 4):
        (tmp_path / f"step-{step:09d}" / "manifest.json").write_bytes(b"")
    save(tmp_path, 5, keep=2)
    assert steps(tmp_path) == [1, 2, 3, 4, 5]  # valid: 1 and 5
    save(tmp_path, 6, keep=2)
    assert steps(tmp_path) == [5, 6]
    before = [(entry.name, entry.stat().st_mtime_ns) for entry in tmp_path.glob("step-000000006/*")]
    checkpoint.save(tmp_path, 6, make_state(99), {}, 2)  # a valid one of the same step is left alone
    assert before == [(entry.name, entry.stat().st_mtime_ns) for entry in tmp_path.glob("step-000000006/*")]


def test_damaged_later_steps_never_push_out_the_new_one(tmp_path: Path) -> None:
    for step in (1, 7, 8):
        path = save(tmp_path, step, keep=9)
    for step in (7, 8):  # same size, so a look at sizes alone takes them for valid
        flip(tmp_path / f"step-{step:09d}" / "optim.safetensors", 900)
    for step in (2, 3, 4):
        save(tmp_path, step, keep=2)
        assert_state(checkpoint.load_latest(tmp_path), step)
    assert steps(tmp_path) == [3, 4, 7, 8]
    save(tmp_path, 8, keep=2)  # reached again: the damaged folder is replaced
    assert_state(checkpoint.load(path), 8)


def test_sweep_spares_a_living_writer(tmp_path: Path, server: Server) -> None:
    dead = server.start("", None)
    server.wait(dead)
    for pid in (dead, os.getppid(), os.getpid()):
        (tmp_path / f".tmp-5-{pid}").mkdir()
    storage.prepare(tmp_path)
    assert leftovers(tmp_path) == [f".tmp-5-{os.getppid()}"]


SAVE = """
import resource
from pathlib import Path
from test_checkpoint import StorageError, save
unlimited = resource.RLIM_INFINITY
resource.setrlimit(resource.RLIMIT_FSIZE, (arguments.get("limit", unlimited), unlimited))
try:
    save(Path(arguments["root"]), 2)
except StorageError as error:
    resource.setrlimit(resource.RLIMIT_FSIZE, (unlimited, unlimited))
    print(error)
    code = error.exit_code
"""


@pytest.mark.parametrize("stage", [*FILES, "before-manifest", "before-rename", "after-rename"])
def test_a_kill_at_every_stage_of_a_save(stage: str, server: Server, tmp_path: Path) -> None:
    save(tmp_path, 1)
    assert server.wait(server.start(SAVE, {"root": str(tmp_path)}, EMOE_FAULT=f"save:{stage}")) == 137
    survivor = 2 if stage == "after-rename" else 1
    assert steps(tmp_path) == [1, 2][:survivor]
    assert len(leftovers(tmp_path)) == (0 if stage == "after-rename" else 1)
    assert_state(checkpoint.load_latest(tmp_path), survivor)
    save(tmp_path, 3)
    assert not leftovers(tmp_path)
    assert_state(checkpoint.load_latest(tmp_path), 3)


def test_a_file_size_limit_at_each_file_is_a_storage_error(server: Server, tmp_path: Path) -> None:
    sizes = sorted(entry.stat().st_size for entry in save(tmp_path, 1).iterdir())
    for size in [10, *sizes]:  # too small for anything, then for each of the four files
        pid = server.start(SAVE, {"root": str(tmp_path), "limit": size - 1})
        assert server.wait(pid) == 5
        assert str(tmp_path) in server.text(pid) and "bytes needed" in server.text(pid)
        assert steps(tmp_path) == [1] and not leftovers(tmp_path)
        assert_state(checkpoint.load_latest(tmp_path), 1)


def test_a_file_in_place_of_the_folder(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    root.write_text("not a folder")
    for attempt in (lambda: save(root, 1), lambda: storage.prepare(root)):
        with pytest.raises(StorageError, match="checkpoints"):
            attempt()
    with pytest.raises(TypeError):
        checkpoint.save(tmp_path, 1, make_state(1), {"bad": object()}, 2)
    assert list(tmp_path.iterdir()) == [root]


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(bytes(data))


def test_one_flipped_bit_is_never_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    draw = random.Random(0)
    files = sorted(path.iterdir())
    for trial in range(60):  # every file in turn, the manifest too
        victim = files[trial % len(files)]
        bit = draw.randrange(victim.stat().st_size * 8)
        flip(victim, bit)
        with pytest.raises(StorageError, match=victim.name):
            checkpoint.load(path)
        caplog.clear()
        assert_state(checkpoint.load_latest(tmp_path), 1)
        assert "skipped" in caplog.text and victim.name in caplog.text
        flip(victim, bit)
    assert_state(checkpoint.load_latest(tmp_path), 2)


@pytest.mark.parametrize("name", FILES)
def test_truncated_files_fall_back(tmp_path: Path, name: str) -> None:
    older = save(tmp_path, 1)
    for left in (0, 1, 7, 100, -1):
        newer = save(tmp_path, 2)
        assert_state(checkpoint.load(newer), 2)  # the damaged folder is replaced
        (newer / name).write_bytes((newer / name).read_bytes()[:left])
        assert checkpoint.latest(tmp_path) == older
        assert_state(checkpoint.load_latest(tmp_path), 1)
        with pytest.raises(StorageError, match=name):
            checkpoint.load(newer)


def test_missing_files_are_named_and_extra_ones_ignored(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    (path / "notes.txt").write_text("hello")
    assert_state(checkpoint.load(path), 1)
    for missing, message in ((FILES[:1], "lacks ema.safetensors;"), (FILES[1:], "manifest.json")):
        for name in missing:
            (path / name).unlink()
        with pytest.raises(StorageError, match=message):
            checkpoint.load(path)


def test_a_newer_schema_is_refused_and_not_skipped(tmp_path: Path) -> None:
    save(tmp_path, 1)
    data = checkpoint.to_bytes({})
    newer = forge(tmp_path / "step-000000002", "model.safetensors", data, schema=checkpoint.SCHEMA + 1)
    for attempt in (
        lambda: checkpoint.load(newer),
        lambda: checkpoint.load_latest(tmp_path),
        lambda: checkpoint.latest(tmp_path),
        lambda: save(tmp_path, 2),
    ):
        with pytest.raises(NewerSchemaError, match="update emoe"):
            attempt()
    assert newer.exists()


class Payload:
    def __init__(self, canary: Path):
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.canary),)


def test_pickles_are_never_run(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    plain = pickle.dumps(Payload(canary))
    torch.save(Payload(canary), tmp_path / "model.pt")
    zipped, harmless = (tmp_path / "model.pt").read_bytes(), checkpoint.to_bytes({"x": torch.zeros(1)})
    for index, data in enumerate((plain, zipped, harmless)):
        for name in ("model.safetensors", "model.pt", "../model.safetensors", "model.safetensors\n"):
            folder = forge(tmp_path / f"root{index}" / "step-000000001", name, data)
            if data is harmless and name == "model.safetensors":
                continue
            for load, path in ((checkpoint.load, folder), (checkpoint.load_latest, folder.parent)):
                with pytest.raises(StorageError, match="never loaded"):
                    load(path)
    assert not canary.exists()
    pickle.loads(plain)  # the payload does work where pickles are trusted
    assert canary.exists()


def crafted(header: bytes, body: bytes = b"", length: int | None = None) -> bytes:
    return (len(header) if length is None else length).to_bytes(8, "little") + header + body


BEYOND = json.dumps({"a": {"dtype": "F32", "shape": [2**38], "data_offsets": [0, 2**40]}}).encode()
ATTACKS = {
    "empty file": b"",
    "header length of 8 EiB": crafted(b"{}", length=2**63),
    "header that is no JSON": crafted(b"{{{{"),
    "deep nesting": crafted(b'{"a":' * 100_000),
    "beyond the end": crafted(BEYOND, bytes(4)),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_malformed_tensor_files_are_refused(tmp_path: Path, attack: str) -> None:
    folder = forge(tmp_path / "step-000000001", "model.safetensors", ATTACKS[attack])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(StorageError, match="model.safetensors"):
        checkpoint.load(folder)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024


@pytest.mark.parametrize(
    "changes",
    [{"files": []}, {"files": {"a.safetensors": {}}}, {"step": "x"}, {"meta": 3}, {"schema": "1"}, {"step": None}],
)
def test_malformed_manifests_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = forge(tmp_path / "step-000000001", "model.safetensors", checkpoint.to_bytes({}), **changes)
    with pytest.raises(StorageError, match="manifest"):
        checkpoint.load(folder)
