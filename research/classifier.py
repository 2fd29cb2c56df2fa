"""Train a classifier of real digits, whose features and probabilities measure generated ones.

    python research/classifier.py digits OUT.safetensors

The weights in `emoe.domains.images.classifiers` were made with this script, one CPU thread and seed 0. Orders, shifts,
dropout and initial weights come from one generator on the CPU: equal seeds give equal weights on one kind of CPU.
Elsewhere they differ by rounding, which training magnifies, so that numbers of two classifiers do not compare.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import safetensors.torch
import torch
from jaxtyping import Float, Integer
from torch import Tensor
from torch.nn import functional as F

from emoe.domains.images import DigitsConfig, MNISTConfig
from emoe.domains.images.classifier import Classifier
from emoe.rng import derive_seed

BATCH = 64
SHOWN = 30_000  # rows shown in all, at least
EPOCHS = 3  # at least
PEAK, DECAY = 3e-3, 0.01  # learning rate, after a tenth of the steps; it falls to 0 on a half cosine
DROPOUT = 0.3  # of the pooled maps and of the features
SHIFTED = 0.3  # share of rows that are moved by up to a pixel each way
VARIANCE = 100.0  # total variance of the features of training rows


def initialise(classifier: Classifier, generator: torch.Generator) -> None:
    """Draw weights uniformly within sqrt(6 / fan in) (He), within sqrt(1 / fan in) for the classes; biases 0."""
    for layer in (classifier.first, classifier.second, classifier.hidden, classifier.head):
        bound = math.sqrt((1 if layer is classifier.head else 6) / layer.weight[0].numel())
        draw = torch.rand(layer.weight.shape, generator=generator)
        with torch.no_grad():
            layer.weight.copy_((2 * draw - 1) * bound)
            layer.bias.zero_()


def shift(images: Float[Tensor, "b 1 s s"], moves: Integer[Tensor, "b 2"]) -> Float[Tensor, "b 1 s s"]:
    """Move every image by -1, 0 or 1 pixels down and across; the edge is blank."""
    padded = F.pad(images[:, 0], (1, 1, 1, 1))
    positions = torch.arange(1, images.shape[-1] + 1) - moves[:, :, None]
    rows = torch.arange(len(images))[:, None, None]
    return padded[rows, positions[:, 0, :, None], positions[:, 1, None, :]][:, None]


def drop(values: Float[Tensor, "b M"], generator: torch.Generator) -> Float[Tensor, "b M"]:
    """Apply dropout with a generator."""
    return values * (torch.rand(values.shape, generator=generator) >= DROPOUT) / (1 - DROPOUT)


def train(
    rows: Integer[Tensor, "N L"], labels: Integer[Tensor, " N"], side: int, *, seed: int = 0, shown: int = SHOWN
) -> Classifier:
    """Train with AdamW on the cross-entropy; some rows are shifted by a pixel, with dropout after each part."""
    generator = torch.Generator().manual_seed(derive_seed(seed, "images", "judge"))
    classifier = Classifier(side)
    initialise(classifier, generator)
    images, labels = rows.float().reshape(-1, 1, side, side), labels.long()
    epochs = max(EPOCHS, math.ceil(shown / len(rows)))
    total, step = epochs * math.ceil(len(rows) / BATCH), 0
    optimiser = torch.optim.AdamW(classifier.parameters(), lr=PEAK, weight_decay=DECAY)
    for _ in range(epochs):
        for picked in torch.randperm(len(rows), generator=generator).split(BATCH):
            moves = torch.randint(-1, 2, (len(picked), 2), generator=generator)
            moves *= torch.rand(len(picked), 1, generator=generator) < SHIFTED
            step += 1
            optimiser.param_groups[0]["lr"] = PEAK * ramp(step / total)
            maps = classifier.maps(shift(images[picked], moves))
            active = classifier.activations(drop(maps, generator))
            loss = F.cross_entropy(classifier.head(drop(active, generator)), labels[picked])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    classifier.requires_grad_(False)
    variance = classifier.read(rows[:10_000])[0].var(0, correction=0).sum().item()
    classifier.scale.fill_(math.sqrt(variance / VARIANCE) if variance > 0 else 1.0)
    return classifier


def ramp(done: float) -> float:
    """Return the share of the peak learning rate after this share of the steps."""
    return done / 0.1 if done < 0.1 else 0.5 * (1 + math.cos(math.pi * (done - 0.1) / 0.9))


def main(words: list[str]) -> int:
    """Train on mnist or digits and write the weights."""
    if len(words) != 2 or words[0] not in ("mnist", "digits"):
        print(__doc__)
        return 2
    torch.set_num_threads(1)
    domain = (MNISTConfig() if words[0] == "mnist" else DigitsConfig()).build(0)
    assert domain.labels is not None and domain.test_labels is not None
    classifier = train(domain.rows, domain.labels, domain.side)
    hits = classifier.hits(domain.test_rows, domain.test_labels)
    safetensors.torch.save_file(classifier.state_dict(), Path(words[1]))
    print(f"{words[1]}: {100 * hits.double().mean():.2f} % of {len(hits):,} test images right")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
