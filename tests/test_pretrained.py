"""Released weights: close to the run's, loaded without its data, refused when a byte or a tensor is wrong."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import Server
from safetensors.torch import load
from small import TRANSFORMER, UNET, Settings, trained
from torch import Tensor

import emoe
from emoe import files as storage
from emoe.config import ConfigError
from emoe.domains.base import DataError
from emoe.domains.images import classifier
from emoe.engine import checkpoint
from emoe.files import NewerSchemaError, StorageError
from emoe.runs.pretrained import PACKAGED, find, from_pretrained, release, released
from emoe.runs.run import Run
from emoe.runs.train import load_run
from emoe.types import TokenSpace

SHORT: Settings = {"train.steps": 5, "eval.samples": 20, "eval.nfe": [1, 2], "eval.batch": 10}
ROUNDING = {"fp16": 2.0**-11, "bf16": 2.0**-8}  # |w - rounded w| <= ROUNDING * |w|, half a unit of the last digit


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """E-MoE with a tiny UNet and a moving average."""
    settings = UNET | SHORT | {"name": "digits-tiny", "train.ema": 0.5, "backbone.router.std": 0.5}
    return trained("rows-emoe", tmp_path_factory.mktemp("runs") / "x", settings)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """MDLM on a file of rows, without a moving average."""
    folder = tmp_path_factory.mktemp("secret")
    np.save(folder / "rows.npy", np.random.default_rng(0).integers(5, size=(60, 4)))
    settings = TRANSFORMER | SHORT | {"domain.path": str(folder / "rows.npy"), "name": "rows-tiny"}
    return trained("rows-mdlm", folder / "run", settings)


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Names are looked up in an empty folder, and nowhere else but in the package."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EMOE_WEIGHTS", raising=False)
    monkeypatch.setenv("EMOE_COMMIT", "abc123")
    return tmp_path


@pytest.fixture
def copy(digits: Run, empty_folder: Path) -> Path:
    """A release that a test may damage."""
    return release(digits.path, "out").path


def refused(
    kind: type[Exception], message: str, call: Callable[..., object], *arguments: object, **options: Any
) -> None:
    with pytest.raises(kind, match=message):
        call(*arguments, **options)


def forge(folder: Path, data: bytes) -> None:
    """Other bytes in place of the weights, with a config that vouches for them."""
    (folder / "model.safetensors").write_bytes(data)
    config = storage.read_sealed(folder / "config.json", 2)
    config["file"] |= {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    storage.write_sealed(folder / "config.json", config)


def log_probabilities(run: Run) -> Tensor:
    """Of rows of which about half is masked; clean positions are left out."""
    space = run.method.space
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(space.size, (6, space.length), generator=draw)
    x[torch.rand(x.shape, generator=draw) < 0.5] = space.mask_id
    return run.log_probs(x)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_release_is_the_run_up_to_rounding(digits: Run, rows: Run, precision: Any) -> None:
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[precision]
    for run in (digits, rows):
        written = release(run.path, "out", precision=precision)
        opened = from_pretrained(written.path)
        largest = {}
        for name, weight in run.method.state_dict().items():
            got = opened.method.state_dict()[name]
            assert got.dtype == torch.float32 and torch.equal(got, weight.to(dtype).float()), name
            assert ((got - weight).abs() <= ROUNDING[precision] * weight.abs() + 2.0**-25).all(), name
            largest[name] = (got - weight).abs().max().item()
        assert written.rounding == max(largest.values()) > 0 and largest[written.tensor] == written.rounding
        assert written.parameters == sum(weight.numel() for weight in run.method.state_dict().values())
        assert (written.path / "model.safetensors").stat().st_size < written.size
        assert 2 * written.parameters < written.size < 2 * written.parameters + 30_000
    # MDLM draws no latent, so its probabilities are as close as its weights are.
    off = (log_probabilities(opened).exp() - log_probabilities(rows).exp()).abs().max()
    assert 0 < off < 20 * ROUNDING[precision]


def test_a_release_holds_the_moving_average_where_there_is_one(digits: Run, rows: Run) -> None:
    names = {run.experiment.name: release(run.path, "out").path for run in (digits, rows)}
    raw = load_run(digits.path, device="cpu", weights="model").method.state_dict()
    average = digits.method.state_dict()
    got = from_pretrained(names["digits-tiny"]).method.state_dict()
    assert all(torch.equal(got[name], average[name].half().float()) for name in raw)
    assert any(not torch.equal(got[name], raw[name].half().float()) for name in raw)
    assert from_pretrained(names["digits-tiny"], weights="ema").step == 5
    refused(ConfigError, "holds no 'model'; allowed: auto, ema", from_pretrained, names["digits-tiny"], weights="model")
    refused(ConfigError, "holds no 'ema'; allowed: auto, model", from_pretrained, names["rows-tiny"], weights="ema")
    refused(ConfigError, "without a moving average; allowed: auto, model", load_run, rows.path, weights="ema")


def test_a_config_says_what_the_weights_are(digits: Run, copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    data = (copy / "model.safetensors").read_bytes()
    assert config["file"].pop("sha256") == hashlib.sha256(data).hexdigest()
    assert config["file"] == {"name": "model.safetensors", "size": len(data)}
    assert (config["schema"], config["name"], config["step"], config["weights"]) == (2, "digits-tiny", 5, "ema")
    assert (config["precision"], config["licence"], config["commit"]) == ("fp16", "Apache-2.0", "abc123")
    assert config["space"] == {"size": 3, "mask_id": 2, "length": 64}
    opened, again = from_pretrained(copy), emoe.from_pretrained(str(copy), device="cpu")
    assert (opened.name, opened.step, opened.licence, opened.path) == ("digits-tiny", 5, "Apache-2.0", copy)
    assert opened.experiment == digits.experiment and not opened.method.training
    assert sorted(file.name for file in copy.iterdir()) == ["config.json", "model.safetensors"]
    assert isinstance(again, Run) and again == opened and torch.equal(opened.sample(30, 2), again.sample(30, 2))


def test_a_model_works_where_its_data_are_not(rows: Run, tmp_path: Path) -> None:
    shutil.copytree(rows.path, "run")
    experiment = Path("run/experiment.json")
    experiment.write_text(experiment.read_text().replace(str(rows.path.parent), "nowhere"))
    opened = load_run("run", device="cpu")
    assert torch.equal(opened.sample(7, 3), rows.sample(7, 3))
    folder = release("run", "out").path
    assert "nowhere" not in (folder / "config.json").read_text()  # the file's name is kept, its folder is not
    released_model = from_pretrained(folder)
    assert released_model.method.space == TokenSpace(size=6, mask_id=5, length=4)
    assert released_model.sample(7, 3).shape == (7, 4)
    for run in (opened, released_model):
        with pytest.raises(DataError, match=r"rows\.npy"):
            run.domain  # noqa: B018
    moved = from_pretrained(folder, settings={"domain.path": str(rows.path.parent / "rows.npy")})
    assert torch.equal(moved.domain.rows, rows.domain.rows) and {row.nfe for row in moved.evaluate()} == {1, 2}
    np.save(tmp_path / "other.npy", np.arange(30).reshape(10, 3) % 5)
    other = from_pretrained(folder, settings={"domain.path": "other.npy"})
    with pytest.raises(ConfigError, match="length=3.* but rows-tiny has .*length=4"):
        other.domain  # noqa: B018


def test_names_are_searched_in_order(digits: Run, rows: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release(digits.path, tmp_path / "a", name="one")
    release(rows.path, tmp_path / "b", name="one")
    release(rows.path, tmp_path / "b", name="two")
    (tmp_path / "b" / ".tmp-three-1").mkdir()
    (tmp_path / "b" / "four").mkdir()
    monkeypatch.setenv("EMOE_WEIGHTS", os.pathsep.join(["a", "missing", "b"]))
    assert {"one": Path("a/one"), "two": Path("b/two")}.items() <= released().items()
    assert {"three", "four", ".tmp-three-1"}.isdisjoint(released())
    assert from_pretrained("one").name == "one" and from_pretrained("one").method.space.length == 64
    assert from_pretrained("two").method.space.length == 4
    for opener in (from_pretrained, load_run):
        message = (
            r"nobody is no run folder(.|\n)*nor is it a released model .*; there are: .*one.*two.*\(in a, missing, b"
        )
        refused(ConfigError, message, opener, "nobody")
    # A path that exists comes before a name.
    shutil.copytree("b/one", "one")
    assert from_pretrained("one").method.space.length == 4 and from_pretrained("./one").method.space.length == 4
    (tmp_path / "two").mkdir()
    assert find("two") is None
    refused(ConfigError, r"nor is it a released model \(no config\.json\)", from_pretrained, "two")
    assert find("../b/two") is None and find("nowhere") is None
    refused(ConfigError, r"is a run folder, not a release; open it with emoe\.load_run", from_pretrained, digits.path)
    Path("model.pt").touch()
    refused(ConfigError, r"model\.pt is a file; .*pickles are never loaded", from_pretrained, "model.pt")


def test_load_run_opens_releases_too(rows: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    release(rows.path, "out", name="own")
    monkeypatch.setenv("EMOE_WEIGHTS", "out")
    for name in ("own", "out/own"):
        opened = load_run(name, device="cpu", domain=rows.domain)
        assert opened.eval_file is None and opened.licence == "Apache-2.0" and opened.domain is rows.domain
        assert torch.equal(opened.sample(3, seed=5), from_pretrained("own").sample(3, seed=5))
    assert rows.eval_file == rows.path / "eval.json" and rows.licence is None


def test_damaged_and_missing_files_and_pickles_are_refused(copy: Path) -> None:
    model = copy / "model.safetensors"
    for path in (copy / "config.json", model):
        whole = path.read_bytes()
        for position in (0, len(whole) // 50, len(whole) // 2, len(whole) - 1):
            data = bytearray(whole)
            data[position] ^= 1
            path.write_bytes(data)
            refused(StorageError, "SHA-256 does not match; get the release again", from_pretrained, copy)
        path.write_bytes(whole)
    for data in (pickle.dumps([1]), b"PK\x03\x04" + bytes(30)):  # with a config that vouches for them
        forge(copy, data)
        refused(StorageError, "pickles and other formats are never loaded", from_pretrained, copy)
    model.unlink()
    refused(StorageError, r"model\.safetensors: cannot be read .No such file", from_pretrained, copy)


def test_wrong_settings_and_tensors_are_named(copy: Path) -> None:
    greedy = from_pretrained(copy, settings={"method.route-tau": "0"})
    assert greedy.experiment.name == "digits-tiny method.route-tau=0"
    assert not torch.equal(greedy.sample(30, 1), from_pretrained(copy).sample(30, 1))
    message, narrow = r"does not fit(.|\n)*size mismatch(.|\n)*and \d+ more", {"backbone.channels": "4"}
    refused(ConfigError, message, from_pretrained, copy, settings=narrow)
    name = next(iter(from_pretrained(copy).method.state_dict()))
    whole = load((copy / "model.safetensors").read_bytes())
    cases = {
        f'Missing .*"{name}"': {key: value for key, value in whole.items() if key != name},
        'Unexpected .*"foreign.weight"': whole | {"foreign.weight": torch.ones(2)},
        f"size mismatch for {name}": whole | {name: whole[name][..., :-1]},
    }
    for message, tensors in cases.items():
        forge(copy, checkpoint.to_bytes(tensors))
        refused(ConfigError, f"does not fit the model of its config(.|\n)*{message}", from_pretrained, copy)


def test_other_schemas_and_foreign_configs_are_refused(copy: Path) -> None:
    config = storage.read_sealed(copy / "config.json", 2)
    storage.write_sealed(copy / "config.json", config | {"schema": 3})
    refused(NewerSchemaError, "has schema 3, this version reads up to 2; update emoe", from_pretrained, copy)
    for broken in ({"space": {"size": 0, "mask_id": 0, "length": 1}}, {"file": None}, {"step": []}):
        storage.write_sealed(copy / "config.json", config | broken)
        refused(StorageError, "is no config of a release", from_pretrained, copy)
    storage.write_sealed(copy / "config.json", config | {"experiment": config["experiment"] | {"colour": "red"}})
    refused(ConfigError, r"config\.json: colour: unknown field", from_pretrained, copy)


def test_unfinished_runs_need_a_word(rows: Run, tmp_path: Path) -> None:
    path = tmp_path / "run"
    shutil.copytree(rows.path, path)
    text = (path / "experiment.json").read_text()
    (path / "experiment.json").write_text(text.replace('"steps": 5', '"steps": 6'))
    refused(ConfigError, "is at step 5 of 6; finish it with: .*--resume, or add --unfinished", release, path, "out")
    assert not Path("out").exists()
    assert from_pretrained(release(path, "out", unfinished=True).path).step == 5
    shutil.rmtree(path / "checkpoints")
    refused(ConfigError, "has no checkpoint yet", release, path, "out", name="none", unfinished=True)
    refused(ConfigError, "is no run folder", release, tmp_path, "out")


def test_names_that_cannot_be_given(digits: Run, rows: Run, tmp_path: Path) -> None:
    for name in ("", "../x", "a/b", ".hidden", "a b", "x\n"):
        refused(ConfigError, "cannot name a folder; give one: --name", release, digits.path, "out", name=name)
    release(digits.path, "out")
    refused(ConfigError, "exists already", release, digits.path, "out")
    shutil.copytree(rows.path, tmp_path / "changed")
    file = tmp_path / "changed" / "experiment.json"
    file.write_text(file.read_text().replace('"rows-tiny"', '"rows-mdlm train.steps=5"'))
    refused(ConfigError, r"'rows-mdlm train\.steps=5', which cannot name a folder", release, "changed", "out")
    assert release(tmp_path / "changed", "out", name="v0.1_a-b").name == "v0.1_a-b"


def poison(run: Run, name: str, folder: Path, value: float) -> Path:
    """A copy of a run with one number of a tensor replaced."""
    shutil.copytree(run.path, folder)
    saved = checkpoint.load_latest(folder / "checkpoints")
    assert saved is not None
    saved.tensors["model"][name].view(-1)[0] = value
    shutil.rmtree(folder / "checkpoints")
    checkpoint.save(folder / "checkpoints", saved.step, saved.tensors, saved.meta, keep=2)
    return folder


def test_weights_that_cannot_be_rounded_are_named(rows: Run, tmp_path: Path) -> None:
    name = next(iter(rows.method.state_dict()))
    large = poison(rows, name, tmp_path / "large", 1e5)
    refused(ConfigError, f"{name} has weights too large for fp16; use --precision bf16", release, large, "out")
    assert release(large, "out", precision="bf16").tensor == name
    bad = poison(rows, name, tmp_path / "nan", float("nan"))
    refused(ConfigError, f"{name} is not finite", release, bad, "out", name="nan")


def test_a_kill_leaves_no_half_of_a_release(rows: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMOE_WEIGHTS", "out")
    script = "from emoe.runs.pretrained import release; release(*arguments)"
    with Server(tmp_path) as server:
        pid = server.start(script, [str(rows.path), str(Path("out").resolve())], EMOE_FAULT="save:config.json")
        assert server.wait(pid) == 137, server.text(pid)
    (left,) = Path("out").iterdir()
    assert left.name.startswith(".tmp-rows-tiny-") and "rows-tiny" not in released()
    release(rows.path, "out")  # which also clears what was left
    assert [entry.name for entry in Path("out").iterdir()] == ["rows-tiny"] and from_pretrained("rows-tiny").step == 5


def test_released_models_of_the_package_load_and_sample() -> None:
    files = [path for folder in (PACKAGED, classifier.FOLDER) for path in folder.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 16e6
    folders = [folder for folder in sorted(PACKAGED.iterdir()) if folder.is_dir()]
    assert {folder.name: folder for folder in folders} == released()  # nothing but models, each of them whole
    unfinished = (PACKAGED / "README.md").read_text(encoding="utf-8").partition("## Unfinished")[2]
    for folder in folders:
        opened = from_pretrained(folder.name)
        assert opened.name == folder.name and opened.path == folder
        finished = opened.step == opened.experiment.train.steps
        assert finished != (f"`{folder.name}`" in unfinished), (
            f"weights/README.md tells whether {folder.name} is finished"
        )
        space = opened.method.space
        drawn = opened.sample(3, 2)
        assert drawn.shape == (3, space.length) and (drawn != space.mask_id).all() and drawn.max() < space.size
        chances = log_probabilities(opened).exp()
        assert chances.isfinite().all() and torch.allclose(chances.sum(-1), torch.ones(()), atol=1e-4)
