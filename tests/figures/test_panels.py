"""Panels of pools: exact histograms and mosaics, the order of pools, masked cells."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from emoe.figures.base import save
from emoe.figures.panels import as_images, heat_maps, histogram, histogram_grid, image_lines, mosaic, texts
from emoe.types import TokenSpace


def test_histogram_drops_nothing_but_masks() -> None:
    shares = histogram(np.array([[0, 0], [0, 0], [49, 3], [50, 50]]), 50)
    assert shares[0, 0] == 0.5 and shares[49, 3] == 0.25 and shares.sum() == 0.75
    coarse = histogram(np.array([[0, 999], [999, 0]]), 1_000)
    assert coarse.shape == (128, 128) and coarse[0, 127] == coarse[127, 0] == 0.5


def test_grid_of_histograms_leaves_missing_cells_blank(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).integers(50, size=(100, 2))
    figure = histogram_grid({"MDLM": {"NFE 1": rows, "NFE 2": rows}, "E-MoE": {"NFE 2": rows}}, 50, title="x")
    assert [len(axis.images) for axis in figure.axes] == [1, 1, 0, 1]
    assert [axis.get_title() for axis in figure.axes] == ["NFE 1", "NFE 2", "", ""]
    save(figure, tmp_path / "deep" / "grid.png")
    assert 5_000 < (tmp_path / "deep" / "grid.png").stat().st_size < 120_000


def test_a_mosaic_puts_images_line_by_line() -> None:
    images = np.zeros((3, 2, 2), np.uint8)
    images[0, 0, 1], images[1, 1, 0], images[2] = 1, 2, 1
    _ = np.nan  # lines between images, and where one is missing
    expected = [
        [_, _, _, _, _, _, _],
        [_, 0, 1, _, 0, 0, _],
        [_, 0, 0, _, 0.5, 0, _],
        [_, _, _, _, _, _, _],
        [_, 1, 1, _, _, _, _],
        [_, 1, 1, _, _, _, _],
        [_, _, _, _, _, _, _],
    ]
    np.testing.assert_array_equal(mosaic(images, 2).filled(np.nan), expected)
    assert mosaic(images, 4, 2).shape == (7, 13)


def test_rows_as_square_images() -> None:
    assert as_images(torch.arange(8).reshape(2, 4)).tolist() == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    with pytest.raises(ValueError, match="rows of 8 pixels are no square images"):
        as_images(torch.zeros(1, 8, dtype=torch.long))


def test_heat_maps_lines_of_images_and_texts() -> None:
    (axis,) = heat_maps({"x": torch.arange(200).reshape(100, 2)}, TokenSpace(size=200, mask_id=3, length=2)).axes
    assert axis.images[0].get_array().shape == (64, 2) and axis.images[0].get_array().mask.sum() == 1
    (axis,) = image_lines(np.zeros((2, 3, 4, 4), np.uint8), {"given": 0, "kept": 1}).axes
    assert axis.images[0].get_array().shape == (11, 16) and list(axis.get_xticks()) == [2.5, 7.5]
    (axis,) = texts({"x": ["a $5$ note", *"bcdefgh"]}).axes
    assert axis.texts[0].get_text().split("\n\n") == [r"a \$5\$ note", *"bcdef"]
