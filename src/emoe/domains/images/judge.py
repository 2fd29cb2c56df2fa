"""A small classifier of real digits, whose features and class probabilities measure generated ones.

It is trained on the binary training rows and their labels by a fixed recipe: orders, shifts, dropout and initial
weights come from one generator on the CPU, whatever the device, and never from the global state. Two trainings with
one seed on one CPU give equal weights; on another device they differ by rounding, which training magnifies, so a
judge is kept in a file once it is made, and that of MNIST comes with the package. Numbers of different judges are close
but not the same: compare only what one judge has measured.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol, runtime_checkable

import safetensors
import safetensors.torch
import torch
from jaxtyping import Float, Integer
from torch import Tensor, nn
from torch.nn import functional as F

from emoe.rng import derive_seed
from emoe.types import TokenSpace

CLASSES = 10
FEATURES = 64
SPREAD = 100.0  # total variance of the features of training rows
CHANNELS = (16, 32)
BATCH = 64
SEEN = 30_000  # rows shown in all, at least
EPOCHS = 3  # at least
PEAK = 3e-3  # learning rate, after a tenth of the steps; it falls to 0 on a half cosine
DECAY = 0.01
DROPOUT = 0.3  # of the pooled maps and of the features
SHIFTED = 0.3  # share of rows that are moved by up to a pixel each way
FINE = 8  # up to this side pictures are halved once only: a quarter of 8 pixels leaves nothing of a digit's place
# Part of the names of cached files; the first number goes up whenever the code below changes what is trained.
RECIPE = f"1 {CHANNELS} {FEATURES} {SPREAD} {BATCH} {SEEN} {EPOCHS} {PEAK} {DECAY} {DROPOUT} {SHIFTED} {FINE}"

PACKAGED = Path(__file__).with_name("judges")  # one judge for everyone, where the data are everyone's

Progress = Callable[[int, int], None]
"""Called with (steps done, steps in all)."""


@runtime_checkable
class Pictures(Protocol):
    """What is asked of a domain: square binary pictures as rows, some to train on and some held out."""

    @property
    def side(self) -> int:
        """Rows have side * side pixels."""

    @property
    def space(self) -> TokenSpace:
        """Which token is the mask."""

    @property
    def rows(self) -> Tensor:
        """Training rows (N, L)."""

    @property
    def labels(self) -> Tensor | None:
        """Their digits (N,), if known."""

    @property
    def test_rows(self) -> Tensor:
        """Held-out rows (M, L)."""

    @property
    def test_labels(self) -> Tensor | None:
        """Their digits (M,), if known."""


class Judge(nn.Module):
    """Two convolutions with ReLU and 2x2 pooling (only the second has it up to side 8), 64 features, 10 classes.

    Features are divided by `scale`, so that those of the training rows have a total variance of 100 and squared
    distances read as percent of it, whatever size the network gave its activations.
    """

    scale: Float[Tensor, ""]

    def __init__(self, side: int):
        super().__init__()
        if side < 4 or side % 4:
            raise ValueError(f"side: the judge halves pictures twice and needs a multiple of 4, got {side}")
        self.side = side
        self.halved = side if side <= FINE else side // 2  # after the first convolution
        first, second = CHANNELS
        # skip_init: the usual initialisation would draw from the global state.
        self.first = nn.utils.skip_init(nn.Conv2d, 1, first, 3, padding=1)
        self.second = nn.utils.skip_init(nn.Conv2d, first, second, 3, padding=1)
        self.hidden = nn.utils.skip_init(nn.Linear, second * (self.halved // 2) ** 2, FEATURES)
        self.head = nn.utils.skip_init(nn.Linear, FEATURES, CLASSES)
        self.register_buffer("scale", torch.ones(()))

    def initialise(self, generator: torch.Generator) -> None:
        """Weights uniform within sqrt(6 / fan in) (He), within sqrt(1 / fan in) for the classes; biases 0."""
        for layer in (self.first, self.second, self.hidden, self.head):
            bound = math.sqrt((1 if layer is self.head else 6) / layer.weight[0].numel())
            draw = torch.rand(layer.weight.shape, generator=generator)
            with torch.no_grad():
                layer.weight.copy_((2 * draw - 1) * bound)
                layer.bias.zero_()

    def maps(self, images: Float[Tensor, "b 1 s s"]) -> Float[Tensor, "b M"]:
        """What the convolutions make of pictures."""
        hidden = F.relu(self.first(images))
        if self.halved < self.side:
            hidden = F.max_pool2d(hidden, 2)
        return F.max_pool2d(F.relu(self.second(hidden)), 2).flatten(1)

    def activations(self, maps: Float[Tensor, "b M"]) -> Float[Tensor, "b 64"]:
        """The layer before the classes, not divided by the scale."""
        return F.relu(self.hidden(maps))

    @torch.no_grad()
    def read(
        self, rows: Integer[Tensor, "n L"], *, batch: int = 1_000
    ) -> tuple[Float[Tensor, "n 64"], Float[Tensor, "n 10"]]:
        """Features and class probabilities of rows, in float64 on the CPU."""
        device = self.scale.device
        features, probabilities = [], []
        for part in rows.split(batch):
            active = self.activations(self.maps(_images(part.to(device), self.side)))
            features.append((active / self.scale).cpu().double())
            probabilities.append(self.head(active).cpu().double().softmax(1))
        return torch.cat(features), torch.cat(probabilities)

    def features(self, rows: Integer[Tensor, "n L"]) -> Float[Tensor, "n 64"]:
        """The 64 features of every row."""
        return self.read(rows)[0]

    def probabilities(self, rows: Integer[Tensor, "n L"]) -> Float[Tensor, "n 10"]:
        """p(digit | row)."""
        return self.read(rows)[1]


def _images(rows: Integer[Tensor, "b L"], side: int) -> Float[Tensor, "b 1 s s"]:
    return rows.float().reshape(len(rows), 1, side, side)


def _shifted(images: Float[Tensor, "b 1 s s"], moves: Integer[Tensor, "b 2"]) -> Float[Tensor, "b 1 s s"]:
    """Every picture moved by -1, 0 or 1 pixels down and across; what comes in is blank."""
    side = images.shape[-1]
    padded = F.pad(images[:, 0], (1, 1, 1, 1))
    places = torch.arange(1, side + 1, device=images.device) - moves[:, :, None]
    each = torch.arange(len(images), device=images.device)[:, None, None]
    return padded[each, places[:, 0, :, None], places[:, 1, None, :]][:, None]


def _dropped(values: Float[Tensor, "b M"], generator: torch.Generator) -> Float[Tensor, "b M"]:
    """Dropout by a generator of the CPU."""
    kept = torch.rand(values.shape, generator=generator) >= DROPOUT
    return values * kept.to(values.device) / (1 - DROPOUT)


def train_judge(
    rows: Integer[Tensor, "N L"],
    labels: Integer[Tensor, " N"],
    side: int,
    *,
    device: torch.device | str = "cpu",
    seed: int = 0,
    on_progress: Progress | None = None,
) -> Judge:
    """Train a judge: AdamW on the cross-entropy, some rows shifted by a pixel, dropout after each part.

    Args:
        rows: Binary pictures, 1 is ink.
        labels: Their digits.
        side: Rows have side * side pixels; a multiple of 4.
        device: Where to train.
        seed: Seed of everything random.
        on_progress: Called after every step.
    """
    if not len(rows):
        raise ValueError("there are no rows to train a judge on")
    generator = torch.Generator().manual_seed(derive_seed(seed, "images", "judge"))
    judge = Judge(side)
    judge.initialise(generator)
    judge.to(device)
    rows, labels = rows.to(device=device, dtype=torch.uint8), labels.to(device=device, dtype=torch.long)
    epochs = max(EPOCHS, math.ceil(SEEN / len(rows)))
    total = epochs * math.ceil(len(rows) / BATCH)
    optimiser = torch.optim.AdamW(judge.parameters(), lr=PEAK, weight_decay=DECAY)
    step = 0
    for _ in range(epochs):
        for picked in torch.randperm(len(rows), generator=generator).split(BATCH):
            moves = torch.randint(-1, 2, (len(picked), 2), generator=generator)
            moves *= torch.rand(len(picked), 1, generator=generator) < SHIFTED
            picked = picked.to(device)
            optimiser.param_groups[0]["lr"] = PEAK * _ramp((step + 1) / total)
            maps = judge.maps(_shifted(_images(rows[picked], side), moves.to(device)))
            active = judge.activations(_dropped(maps, generator))
            loss = F.cross_entropy(judge.head(_dropped(active, generator)), labels[picked])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            step += 1
            if on_progress is not None:
                on_progress(step, total)
    judge.requires_grad_(False)
    variance = judge.features(rows[:10_000]).var(0, correction=0).sum().item()
    judge.scale.fill_(math.sqrt(variance / SPREAD) if variance > 0 else 1.0)
    return judge


def _ramp(done: float) -> float:
    """Share of the peak learning rate when this share of the steps is done."""
    return done / 0.1 if done < 0.1 else 0.5 * (1 + math.cos(math.pi * (done - 0.1) / 0.9))


_judges: dict[tuple[str, str], Judge] = {}


def judge_for(domain: Pictures, device: torch.device | str = "cpu", *, on_progress: Progress | None = None) -> Judge:
    """The judge of a domain's training rows: from this process, the package, the cache folder, or trained now.

    Files lie in `$EMOE_CACHE/judges`, by default `~/.cache/emoe/judges`, and are named by a hash of rows, labels and
    recipe. One that cannot be read or does not fit is ignored and written anew; a folder that cannot be written to
    is no error.

    Raises:
        ValueError: The domain has no labels.
    """
    if domain.labels is None:
        raise ValueError("labels: this data has none to train a judge on; name data with labels")
    key = judge_key(domain.rows, domain.labels, domain.side)
    place = (key, str(torch.device(device)))
    if place not in _judges:
        judge = load_judge(PACKAGED / f"{key}.safetensors", key, domain.side)
        judge = judge or load_judge(cache_file(key), key, domain.side)
        if judge is None:
            judge = train_judge(domain.rows, domain.labels, domain.side, device=device, on_progress=on_progress)
            save_judge(judge, cache_file(key), key)
        _judges[place] = judge.to(device)
    return _judges[place]


def judge_key(rows: Integer[Tensor, "N L"], labels: Integer[Tensor, " N"], side: int) -> str:
    """A hash of what a judge is made from: rows, labels and recipe."""
    digest = hashlib.blake2b(f"{RECIPE} {side} {tuple(rows.shape)}".encode(), digest_size=16)
    digest.update(rows.cpu().to(torch.uint8).numpy().tobytes())
    digest.update(labels.cpu().to(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def cache_file(key: str) -> Path:
    """Where the judge of a key is kept."""
    root = os.environ.get("EMOE_CACHE")
    folder = Path(root) if root else Path(os.path.expanduser("~")) / ".cache" / "emoe"
    return folder / "judges" / f"{key}.safetensors"


def _seal(weights: dict[str, Tensor], key: str) -> dict[str, str]:
    """What a file says of itself: the key and a checksum. One entry, since the format does not keep an order."""
    digest = hashlib.blake2b(key.encode(), digest_size=16)
    for name in sorted(weights):
        digest.update(name.encode() + weights[name].numpy().tobytes())
    return {"judge": f"{key} {digest.hexdigest()}"}


def save_judge(judge: Judge, path: Path, key: str) -> bool:
    """Write a judge to a temporary file and rename it; False if the folder cannot be written to."""
    weights = {name: value.detach().cpu().contiguous() for name, value in judge.state_dict().items()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _temporary(path) as draft:
            safetensors.torch.save_file(weights, draft, _seal(weights, key))
            os.replace(draft, path)
    except (OSError, safetensors.SafetensorError):  # the library has an error of its own for a full disk
        return False
    return True


@contextlib.contextmanager
def _temporary(path: Path) -> Iterator[str]:
    """A new file beside `path`, gone afterwards unless it was renamed."""
    handle, draft = tempfile.mkstemp(prefix=".judge-", dir=path.parent)
    os.close(handle)
    try:
        yield draft
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(draft)


def load_judge(path: Path, key: str, side: int) -> Judge | None:
    """The judge in a file, on the CPU; None if there is none, or it is damaged or made from something else."""
    judge = Judge(side)
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            about = file.metadata()
            weights = {name: file.get_tensor(name) for name in file.keys()}
    except (OSError, safetensors.SafetensorError):
        return None
    wanted = {name: (value.shape, value.dtype) for name, value in judge.state_dict().items()}
    fits = {name: (value.shape, value.dtype) for name, value in weights.items()} == wanted
    if not fits or about != _seal(weights, key):
        return None
    judge.load_state_dict(weights)
    return judge.requires_grad_(False)
