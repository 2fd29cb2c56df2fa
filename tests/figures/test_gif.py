"""The animation of a sampling run shows what was sampled, and the experts of every step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from emoe.backbones.layers import RouterConfig
from emoe.backbones.unet import UNetConfig
from emoe.figures import gif
from emoe.figures.base import CYCLE
from emoe.figures.gif import MASK, Frame, Recorder, write_gif
from emoe.methods.emoe import EMoEConfig
from emoe.rng import Rng
from emoe.types import StepEvent, TokenSpace


def colours(path: Path, frame: int) -> set[str]:
    """Colours of more than a few pixels of a frame."""
    with Image.open(path) as image:
        image.seek(frame)
        shades, counts = np.unique(np.asarray(image.convert("RGB")).reshape(-1, 3), axis=0, return_counts=True)
    return {f"#{bytes(shade.tolist()).hex()}" for shade, count in zip(shades, counts, strict=True) if count > 20}


def test_it_shows_what_was_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    backbone = UNetConfig(channels=8, hidden=8, time_size=4, time_hidden=8, groups=2, router=RouterConfig(std=0.5))
    method = EMoEConfig(t_low=1 / 64, experts=3).build(TokenSpace(3, MASK, 64), backbone).eval()
    recorder, gates = Recorder(3, 8), []

    def on_step(event: StepEvent) -> None:
        recorder(event)
        gates.append([gate.expert[..., 0] for gate in event.latent])

    rows = method.sample(torch.full((3, 64), MASK), 5, Rng(0), on_step=on_step)
    frames = recorder.frames
    assert len(frames) == 6 and (frames[0].images == MASK).all() and frames[0].experts == ()
    assert np.array_equal(frames[-1].images.reshape(3, -1), rows)
    for frame, drawn in zip(frames[1:], gates, strict=True):
        assert [maps.shape[1] for maps in frame.experts] == [4, 2, 2, 2, 4]
        for maps, expert in zip(frame.experts, drawn, strict=True):
            assert np.array_equal(maps.reshape(3, -1), expert.numpy())

    path, small = tmp_path / "new" / "sampling.gif", tmp_path / "small.gif"
    write_gif(frames, 3, path)
    with Image.open(path) as image:
        assert image.n_frames == 6
    assert {"#ffffff", "#000000", *CYCLE[:3]} <= colours(path, 5)
    assert "#7f7f7f" in colours(path, 0) - colours(path, 5)  # nothing is masked in the end
    monkeypatch.setattr(gif, "LARGEST", path.stat().st_size - 1)
    write_gif(frames, 3, small)
    assert small.stat().st_size < path.stat().st_size


def test_no_routes_and_many_experts(tmp_path: Path) -> None:
    masked = np.full((2, 8, 8), MASK, np.uint8)
    maps = np.arange(32, dtype=np.uint8).reshape(2, 4, 4)
    for number, last in ((0, Frame(np.zeros_like(masked))), (32, Frame(masked, (maps,)))):
        write_gif([Frame(masked), last], number, tmp_path / f"{number}.gif")
        with Image.open(tmp_path / f"{number}.gif") as image:
            assert image.n_frames == 2
    assert len(colours(tmp_path / "32.gif", 1)) > 32  # all experts differ
