"""Numbers from the training log of a run, and passes of its networks in a training step."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from emoe.engine.metricslog import read_metrics
from emoe.reporting.results import Results, Row
from emoe.rng import Rng, derive_seed
from emoe.runs.run import Run
from emoe.runs.sampling import count_calls
from emoe.studies.stages import Stage, Trained
from emoe.types import Measurement

LAST_RECORDS = 10  # of the log, whose mean describes the end of training
POINTS = 20  # of the course of training
ROWS = 4  # of the batch that passes are counted with
UNUSED = 0.1  # share of an even share below which an expert counts as dead
TERMS = {"loss": "train_loss", "recon": "train_recon", "kl": "train_kl"}  # key of the log -> metric
BY_BLOCK = {"post_entropy": "routing_entropy", "prior_entropy": "prior_entropy", "route_kl": "route_kl"}

Record = Mapping[str, Any]


def routing_stage(trained: Trained) -> Stage:
    """The routing at the end of training; no rows without routes."""

    def records() -> list[dict[str, Any]]:
        return read_metrics(trained.path / "metrics.jsonl")[-LAST_RECORDS:]

    def done(results: Results) -> bool:
        return trained.recorded(results, metric="dead_experts") or not any(
            key.startswith("usage/") for key in records()[-1]
        )

    return Stage("routing", done, lambda: [trained.row(item) for item in routing_at_end(records())])


def routing_at_end(records: Sequence[Record]) -> list[Measurement]:
    """Means over log records.

    route_kl/blockD: mean route KL in nats per position.
    usage_entropy/blockD: entropy in nats of the mean usage of the block's experts, at most log E: of the aggregate
        posterior. least_usage_entropy is the least of them.
    dead_experts: experts whose mean usage is below 1 / (10 E), over all blocks; n is the number of all experts.
    effective_draws: how many of the K draws count, where draws are compared.
    """
    items, entropies, dead, total = list[Measurement](), list[float](), 0, 0
    for key in [key for key in (records[-1] if records else {}) if key.startswith("usage/")]:
        block = key.removeprefix("usage/")
        usage = mean_usage(records, key)
        entropies.append(_entropy(usage))
        dead += sum(share < UNUSED / len(usage) for share in usage)
        total += len(usage)
        items += _mean(records, f"route_kl/{block}")
        items.append(Measurement(f"usage_entropy/{block}", entropies[-1], None, len(records)))
    if entropies:
        items.append(Measurement("least_usage_entropy", min(entropies), None, len(records)))
        items.append(Measurement("dead_experts", dead, None, total))
    return items + _mean(records, "effective_draws")


def course_stage(trained: Trained) -> Stage:
    """The terms of the loss and the routing over training, with the step as the convention."""

    def run() -> list[Row]:
        records = read_metrics(trained.path / "metrics.jsonl")
        return [trained.row(item, convention=f"step {step}") for step, item in course(records)]

    return Stage("training", lambda results: trained.recorded(results, metric="train_loss"), run)


def course(records: Sequence[Record], points: int = POINTS) -> list[tuple[int, Measurement]]:
    """(step, number) at about `points` points, each the mean of the records since the one before.

    The entropy of usage is that of the mean usage: of the aggregate posterior, up to the draws of a batch.
    """
    size = max(1, math.ceil(len(records) / points))
    parts = [records[start : start + size] for start in range(0, len(records), size)]
    return [(int(part[-1]["step"]), item) for part in parts for item in _course_point(part)]


def _course_point(records: Sequence[Record]) -> list[Measurement]:
    items = []
    for key in records[-1]:
        name, slash, block = key.partition("/")
        if name == "usage":
            value = _entropy(mean_usage(records, key))
            items.append(Measurement(f"usage_entropy/{block}", value, None, len(records)))
        elif key in TERMS or (slash and name in BY_BLOCK):
            metric = TERMS.get(key) or f"{BY_BLOCK[name]}/{block}"
            value = math.fsum(record[key] for record in records if key in record) / sum(
                key in record for record in records
            )
            items.append(Measurement(metric, value, None, len(records)))
    return [item for item in items if math.isfinite(item.value)]


def mean_usage(records: Sequence[Record], key: str) -> list[float]:
    """Mean share of each expert over the records."""
    shares = [record[key] for record in records if key in record]
    return [math.fsum(column) / len(shares) for column in zip(*shares, strict=True)]


def _mean(records: Sequence[Record], key: str) -> list[Measurement]:
    values = [float(record[key]) for record in records if key in record and math.isfinite(record[key])]
    return [Measurement(key, math.fsum(values) / len(values), None, len(values))] if values else []


def _entropy(shares: Iterable[float]) -> float:
    return max(0.0, -math.fsum(share * math.log(share) for share in shares if share > 0))


# --- Passes ----------------------------------------------------------------------------------------------------------


def passes_stage(trained: Trained) -> Stage:
    """Network passes of a training step and of a sampling step."""
    return trained.stage("passes", "passes_train", lambda: network_passes(trained.run))


@torch.no_grad()
def network_passes(run: Run) -> dict[str, float]:
    """Forward passes, counted by hooks on a batch of B training rows of L tokens.

    - `passes_train`: tokens that enter the networks of the method (backbone and, if there is one, encoder) in a
      training step, over B * L. [x0; xt] of E-MoE makes 2, and so does [xt ; x0] of BD3-LM, whose rows are twice as
      long.
    - `passes_block`: the same for their blocks, in the mean. Above the former where draws of a row diverge.
    - `calls_step`: network calls of a sampler over the steps it was asked for, which are as few as it can make.
    """
    method, length = run.method, run.method.space.length
    rows = run.domain.rows[:ROWS].long().to(run.device)
    rng = Rng(derive_seed(run.experiment.seed, "passes"), device=run.device)
    blocks = [block for network in method.children() for block in _blocks(network)]
    with _tokens_into(method.children()) as entered, _tokens_into(blocks) as inside:
        method(rows, method.final_ramp(run.device), rng)
    steps = min(run.experiment.method.allowed_nfe(range(1, length + 1), length))
    with count_calls(method.backbone) as count:
        method.sample(torch.full((1, length), method.space.mask_id, device=run.device), steps, rng)
    passes = {"passes_train": entered[0] / rows.numel(), "calls_step": count.calls / steps}
    depth = len(_blocks(method.backbone))
    return passes | ({"passes_block": inside[0] / depth / rows.numel()} if depth else {})


def _blocks(network: nn.Module) -> list[nn.Module]:
    """The blocks of a transformer; none of other networks."""
    return [block for name, part in network.named_modules() if name.endswith("blocks") for block in part.children()]


@contextlib.contextmanager
def _tokens_into(modules: Iterable[nn.Module]) -> Iterator[list[int]]:
    """Count rows times positions of the first input of every call of some modules."""
    total = [0]

    def count(_: nn.Module, inputs: tuple[Any, ...], __: object) -> None:
        total[0] += inputs[0].shape[0] * inputs[0].shape[1]

    with contextlib.ExitStack() as stack:
        for module in modules:
            stack.callback(module.register_forward_hook(count).remove)
        yield total
