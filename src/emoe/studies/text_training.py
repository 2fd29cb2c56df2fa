"""What the study of text reads from a run's training: passes of its networks, and the latent over the steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from emoe.domains.text.data import Text
from emoe.engine.metricslog import read_metrics
from emoe.evaluation.pools import count_calls
from emoe.rng import Rng, derive_seed
from emoe.runs import Run
from emoe.types import Measurement

POINTS = 20  # of the course of training
ROWS = 4  # of the batch that passes are counted with
TERMS = {"loss": "train_loss", "recon": "train_recon", "kl": "train_kl"}
BY_BLOCK = {"post_entropy": "routing_entropy", "prior_entropy": "prior_entropy", "route_kl": "route_kl"}


class Tokens:
    """Tokens that entered modules."""

    def __init__(self) -> None:
        self.count = 0


@contextmanager
def tokens_into(modules: Iterable[nn.Module]) -> Iterator[Tokens]:
    """Count rows times positions of the first input of every call of some modules."""
    found = Tokens()

    def hook(_: nn.Module, inputs: tuple[Any, ...], __: object) -> None:
        rows, positions = inputs[0].shape[:2]
        found.count += rows * positions

    with ExitStack() as stack:
        for module in modules:
            stack.callback(module.register_forward_hook(hook).remove)
        yield found


@torch.no_grad()
def network_passes(run: Run, text: Text) -> dict[str, float]:
    """Forward passes, counted by hooks on a batch of B training rows of L tokens.

    - `passes_train`: tokens that enter the backbone (and an encoder, if there is one) in a training step, over B * L.
      [x0; xt] of E-MoE makes 2, and so does [xt ; x0] of BD3-LM, whose rows are twice as long.
    - `passes_block`: the same for the blocks inside, in the mean. Above the former where draws of a row part.
    - `calls_step`: network calls of a sampler, over the steps it was asked for.
    """
    method, experiment = run.method, run.experiment
    device = next(method.parameters()).device
    rows = text.rows[:ROWS].long().to(device)
    last, total = experiment.train.steps - 1, experiment.train.steps
    knobs = {name: torch.tensor(ramp(last, total), device=device) for name, ramp in method.ramps.items()}
    encoder: nn.Module | None = getattr(method, "encoder", None)
    networks: list[nn.Module] = [method.backbone.counted, *([] if encoder is None else [encoder])]
    trunks = [getattr(network, "trunk", network) for network in networks]
    blocks = [block for trunk in trunks for block in getattr(trunk, "blocks", [])]
    depth = len(getattr(trunks[0], "blocks", [])) or 1
    rng = Rng(derive_seed(experiment.seed, "passes"), device=device)
    with tokens_into(networks) as entered, tokens_into(blocks) as inside:
        method(rows, knobs, rng)
    # As few steps as the sampler can make: one in each block, one for each token, or two.
    steps = text.space.length if experiment.method.kind == "ar" else getattr(method, "blocks", 2)
    with count_calls(method.backbone) as count:
        method.sample(1, steps, rng)
    found = {"passes_train": entered.count / rows.numel(), "calls_step": count.calls / steps}
    return found | ({"passes_block": inside.count / depth / rows.numel()} if blocks else {})


def training_rows(run: Path, points: int = POINTS) -> list[tuple[int, Measurement]]:
    """(step, number) for the terms of the loss and, by block, for what the routers do, at about `points` points.

    A point is the mean of the lines logged since the one before. The entropy of usage is that of the mean usage: of the
    aggregate posterior, up to the draws of a batch.
    """
    records = read_metrics(run / "metrics.jsonl")
    size = max(1, math.ceil(len(records) / points))
    found = []
    for start in range(0, len(records), size):
        part = records[start : start + size]
        step = int(part[-1]["step"])
        found += [(step, Measurement(name, value, None, len(part))) for name, value in _means(part).items()]
    return found


def _means(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Means of some log lines, under the names of results; what is not finite is left out."""
    found: dict[str, float] = {}
    for key in records[-1]:
        name, slash, block = key.partition("/")
        values = [record[key] for record in records if key in record]
        if name == "usage":
            found[f"usage_entropy/{block}"] = _entropy(torch.tensor(values, dtype=torch.float64).mean(0))
        elif key in TERMS:
            found[TERMS[key]] = math.fsum(values) / len(values)
        elif slash and name in BY_BLOCK:
            found[f"{BY_BLOCK[name]}/{block}"] = math.fsum(values) / len(values)
    return {name: value for name, value in found.items() if math.isfinite(value)}


def _entropy(shares: Tensor) -> float:
    return max(0.0, -float(torch.special.xlogy(shares, shares).sum()))
