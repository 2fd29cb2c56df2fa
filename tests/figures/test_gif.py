"""The animation of a sampling run shows what was sampled, and the experts of every step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from emoe.backbones.unet import UNetConfig
from emoe.figures.base import CYCLE
from emoe.figures.gif import EXPERTS, GAP, GROUND, MASK, Frame, Recorder, encode, palette, tile, write_gif
from emoe.methods.emoe import EMoEConfig
from emoe.rng import Rng
from emoe.types import StepEvent, TokenSpace


def test_it_shows_what_was_sampled(tmp_path: Path) -> None:
    torch.manual_seed(0)
    backbone = UNetConfig(channels=8, hidden=8, time_size=4, time_hidden=8, groups=2, router_std=0.5)
    method = EMoEConfig(t_low=1 / 64, experts=3).build(TokenSpace(3, MASK, 64), backbone).eval()
    recorder, gates = Recorder(3, 8), []

    def on_step(event: StepEvent) -> None:
        recorder(event)
        gates.append([gate.expert[..., 0] for gate in event.latent])

    rows = method.sample(3, 5, Rng(0), on_step=on_step)
    frames = recorder.frames
    assert len(frames) == 6 and (frames[0].images == MASK).all() and frames[0].experts == ()
    assert np.array_equal(frames[-1].images.reshape(3, -1), rows)
    for frame, drawn in zip(frames[1:], gates, strict=True):
        assert [maps.shape[1] for maps in frame.experts] == [4, 2, 2, 2, 4]
        for maps, expert in zip(frame.experts, drawn, strict=True):
            assert np.array_equal(maps.reshape(3, -1), expert.numpy())

    data = encode(frames, 3, 2)
    path = tmp_path / "new" / "sampling.gif"
    write_gif(frames, 3, path, largest=len(data))
    assert path.stat().st_size <= len(data)
    with Image.open(path) as image:
        assert image.n_frames == 6
        image.seek(5)
        page = np.asarray(image.convert("RGB")).reshape(-1, 3)
    colours = {tuple(colour) for colour in page.tolist()}
    known = np.array(palette(3)).reshape(-1, 3)
    used = {EXPERTS + int(expert) for maps in frames[-1].experts for expert in np.unique(maps)}
    assert {tuple(known[number].tolist()) for number in used | {0, 1}} <= colours
    assert tuple(known[MASK].tolist()) not in colours  # nothing is masked in the end


def test_no_routes_and_many_experts(tmp_path: Path) -> None:
    masked = np.full((2, 8, 8), MASK, np.uint8)
    maps = np.arange(32, dtype=np.uint8).reshape(2, 4, 4)
    for number, last in ((0, Frame(np.zeros_like(masked))), (32, Frame(masked, (maps,)))):
        write_gif([Frame(masked), last], number, tmp_path / "x.gif")
        with Image.open(tmp_path / "x.gif") as image:
            assert image.n_frames == 2
    for experts in (len(CYCLE), 32):
        assert len({*zip(*[iter(palette(experts)[3 * EXPERTS :])] * 3, strict=True)}) == experts  # all differ
    with pytest.raises(ValueError, match="at most 240 experts"):
        write_gif([Frame(masked)], 241, tmp_path / "no.gif")
    with pytest.raises(ValueError, match="no frames"):
        write_gif([], 3, tmp_path / "no.gif")


def test_tiles() -> None:
    cells = np.stack([np.array([[0, 1], [1, 0]]), np.full((2, 2), 5)]).astype(np.uint8)
    grid = tile(cells, 4)
    assert grid.shape == (8 + GAP, 8 + GAP)
    assert grid[:4, :4].tolist() == [[0, 0, 1, 1], [0, 0, 1, 1], [1, 1, 0, 0], [1, 1, 0, 0]]
    assert (grid[:4, 4 + GAP :] == 5).all() and (grid[4:] == GROUND).all() and (grid[:4, 4 : 4 + GAP] == GROUND).all()
