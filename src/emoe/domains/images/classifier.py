"""Small classifiers of real digits, whose features and class probabilities measure generated ones.

Their weights are in the package, so numbers of different machines compare. `research/classifier.py` trained them.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path

import safetensors.torch
import torch
from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor, nn
from torch.nn import functional as F

FOLDER = Path(__file__).with_name("classifiers")
SIDES = {"mnist": 32, "digits": 8}
BATCH = 1_000


class Classifier(nn.Module):
    """Two convolutions with ReLU and 2x2 pooling (only the second has it up to side 8), 64 features, 10 classes.

    Features are divided by `scale`, so that those of the training rows have a total variance of 100 and squared
    distances read as percent of it.
    """

    scale: Float[Tensor, ""]

    def __init__(self, side: int):
        super().__init__()
        self.side, self.pool = side, 1 if side <= 8 else 2
        # skip_init: the usual initialisation would draw from the global state.
        self.first = nn.utils.skip_init(nn.Conv2d, 1, 16, 3, padding=1)
        self.second = nn.utils.skip_init(nn.Conv2d, 16, 32, 3, padding=1)
        self.hidden = nn.utils.skip_init(nn.Linear, 32 * (side // self.pool // 2) ** 2, 64)
        self.head = nn.utils.skip_init(nn.Linear, 64, 10)
        self.register_buffer("scale", torch.ones(()))

    def maps(self, images: Float[Tensor, "b 1 s s"]) -> Float[Tensor, "b M"]:
        """Outputs of the convolutions."""
        hidden = F.max_pool2d(F.relu(self.first(images)), self.pool)
        return F.max_pool2d(F.relu(self.second(hidden)), 2).flatten(1)

    def activations(self, maps: Float[Tensor, "b M"]) -> Float[Tensor, "b 64"]:
        """The layer before the classes, not divided by the scale."""
        return F.relu(self.hidden(maps))

    @torch.no_grad()
    def read(self, rows: Integer[Tensor, "n L"]) -> tuple[Float[Tensor, "n 64"], Float[Tensor, "n 10"]]:
        """Features and class probabilities of rows, in float64 on the CPU; smaller images get an empty margin."""
        side = math.isqrt(rows.shape[1])
        margin = (self.side - side) // 2
        features, probabilities = [], []
        for part in rows.split(BATCH):
            images = part.to(self.scale.device).float().reshape(len(part), 1, side, side)
            active = self.activations(self.maps(F.pad(images, (margin,) * 4)))
            features.append((active / self.scale).cpu().double())
            probabilities.append(self.head(active).cpu().double().softmax(1))
        return torch.cat(features), torch.cat(probabilities)

    def hits(self, rows: Integer[Tensor, "n L"], labels: Int[Tensor, " n"]) -> Bool[Tensor, " n"]:
        """Which rows it classifies right."""
        return self.read(rows)[1].argmax(1) == labels.cpu()


@functools.lru_cache
def load_classifier(name: str, device: str = "cpu") -> Classifier:
    """A classifier of the package: mnist or digits."""
    classifier = Classifier(SIDES[name])
    classifier.load_state_dict(safetensors.torch.load_file(FOLDER / f"{name}.safetensors"))
    return classifier.requires_grad_(False).to(device)
