"""Runs and the one way to draw: equal rows from every entrance, what opening reads, devices, hashes of data."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small import TOY, trained

import emoe
from emoe.config import ConfigError
from emoe.domains.text.data import TextConfig
from emoe.engine import checkpoint
from emoe.methods.base import SamplerConfig
from emoe.runs.pretrained import release
from emoe.runs.run import Run
from emoe.runs.sampling import draw
from emoe.runs.train import load_run, pick_device


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """E-MoE on points of the plane, whose sampler and batch are not the usual ones."""
    settings = TOY | {"train.steps": 4, "train.ema": 0.9, "eval.batch": 7, "eval.nfe": [2, 4]}
    settings |= {"eval.sampler.kind": "reveal-first", "eval.sampler.nucleus": 0.9}
    return trained("toy-8modes-emoe", tmp_path_factory.mktemp("runs") / "run", settings)


def test_every_entrance_draws_the_same_rows(run: Run) -> None:
    sampler = SamplerConfig(kind="reveal-first", nucleus=0.9)
    expected = draw(run.method.train(), 20, 4, seed=3, batch=7, sampler=sampler)
    assert run.method.training and not run.method.eval().training
    pool = run.pool(20, 4, seed=3)
    assert torch.equal(run.sample(20, 4, seed=3), expected.samples) and torch.equal(pool.samples, expected.samples)
    assert torch.equal(emoe.load_run(run.path, device="cpu").sample(20, 4, seed=3), expected.samples)
    assert (pool.nfe, pool.calls) == (4, expected.calls) and pool.calls < 4  # rows that are done are left out
    assert run.default_nfe == 2 and torch.equal(run.sample(5), run.sample(5, 2, seed=0))
    for other in (run.sample(20, 4, seed=4), draw(run.method, 20, 4, seed=3, batch=20, sampler=sampler).samples):
        assert not torch.equal(other, expected.samples)
    given = torch.tensor([[3, -1]] * 9)
    drawn = run.sample(9, 4, given=given.numpy())
    assert (drawn[:, 0] == 3).all() and torch.equal(drawn, run.sample(9, 4, given=given.where(given >= 0, 50).tolist()))


def test_draws_that_are_refused(run: Run) -> None:
    for arguments, message in (
        ({"n": 0, "nfe": 1}, "n: must be >= 1"),
        ({"n": 1, "nfe": 0}, "nfe: must be >= 1"),
        ({"n": 2, "nfe": 1, "given": torch.zeros(3, 2).long()}, "given: expected 2 rows of 2 tokens, got 3"),
        ({"n": 1, "nfe": 1, "given": torch.full((1, 2), 51)}, "given: tokens must be in 0..50"),
    ):
        with pytest.raises(ConfigError, match=message):
            draw(run.method, **arguments)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="given: expected whole numbers of shape"):
        run.sample(1, 1, given=[[1, 2, 3]])


def test_looking_at_a_run_reads_no_data(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the data were read")

    monkeypatch.setattr(type(run.experiment.domain), "build", refuse)
    opened, again = (load_run(run.path, device="cpu") for _ in range(2))
    assert opened == again and hash(opened) == hash(again) and len({opened, again}) == 1
    assert repr(opened) == f"Run('{run.path}', emoe, step 4)" and opened != "run"
    assert Run(run.path, run.experiment, run.method, 3) != opened
    assert opened.device.type == "cpu" and opened.sample(2).shape == (2, 2)
    with pytest.raises(AssertionError, match="were read"):
        opened.domain  # noqa: B018


def test_opening_reads_no_state_of_the_optimiser(run: Run, tmp_path: Path) -> None:
    shutil.copytree(run.path, tmp_path / "run")
    for path in (tmp_path / "run").glob("checkpoints/*/optim.safetensors"):
        path.unlink()
    assert torch.equal(load_run(tmp_path / "run", device="cpu").sample(5), run.sample(5))
    assert release(tmp_path / "run", tmp_path / "out", name="x").parameters > 0
    with pytest.raises(RuntimeError, match="lacks optim.safetensors"):
        trained(run.experiment, tmp_path / "run", {}, resume=True)


def test_numbers_of_a_run(run: Run) -> None:
    bound = run.nll(likelihood="bound@1")
    assert bound.n == 2_000 and bound.stderr is not None and 5 < bound.value < 9
    assert run.nll(np.array([[1, 2]]), "iw@1,4").n == 1
    rows = run.evaluate(nfe=[1], samples=30)
    assert {row.nfe for row in rows} == {1} and {"validity", "overlap", "network_calls"} <= {row.metric for row in rows}
    xt = torch.tensor([[50, 3], [50, 50]])
    for routes in ("greedy", "drawn"):
        log = run.log_probs(xt, routes=routes, seed=2)  # type: ignore[arg-type]
        assert log.shape == (2, 2, 51) and torch.allclose(log.exp().sum(-1), torch.ones(2, 2))
        assert log[0, 1, 3] == 0 and (log[..., 50] == -torch.inf).all()


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device().type == pick_device("cpu").type == "cpu"
    with pytest.raises(ConfigError, match="device: 'cuda:1' was asked for, but torch sees no GPU; allowed here: cpu"):
        pick_device("cuda:1")
    with pytest.raises(ConfigError, match="device: 'tpu' is not known; allowed: auto, cpu, cuda, cuda:N"):
        pick_device("tpu")


def test_text_is_hashed_once_and_with_the_same_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = np.where(np.arange(96).reshape(12, 8) % 7 == 4, 7, np.arange(96).reshape(12, 8) % 7).astype("<u2").tobytes()
    entry: dict[str, Any] = {"rows": 12, "sha256": hashlib.sha256(data).hexdigest()}
    manifest = {"schema": 1, "size": 9, "length": 8, "special": {"mask": 4}}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest | {"splits": {"train": entry, "test": entry}}))
    for name in ("train", "test"):
        (tmp_path / f"{name}.bin").write_bytes(data)
    verified, other = (TextConfig(path=str(tmp_path), verify=verify).build(0) for verify in (True, False))
    assert other.sha256 == entry["sha256"]
    monkeypatch.setattr(hashlib, "sha256", None)
    assert verified.sha256 == entry["sha256"]


def test_a_checkpoint_holds_the_hash_of_the_rows(run: Run) -> None:
    saved = checkpoint.load_latest(run.path / "checkpoints", groups=())
    assert saved is not None and saved.tensors == {}
    assert saved.meta["data"] == hashlib.sha256(run.domain.rows.numpy().tobytes()).hexdigest()
