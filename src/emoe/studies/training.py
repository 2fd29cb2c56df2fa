"""Numbers from the training log of a run, and passes of its networks in a training step."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from emoe.engine.metricslog import read_metrics
from emoe.evaluation.measure import rows_of
from emoe.reporting.results import Row
from emoe.rng import Rng, derive_seed
from emoe.runs.run import Run
from emoe.runs.sampling import record_calls
from emoe.studies.stages import Stage, Trained, numbers, stage
from emoe.types import Measurement

LAST_RECORDS = 10  # of the log, whose mean describes the end of training
POINTS = 20  # of a training curve
ROWS = 4  # of the batch that passes are counted with
UNUSED = 0.1  # share of an even share below which an expert counts as dead
# Keys of the log -> metrics, where their names differ; a key with a block keeps it.
NAMES = {"loss": "train_loss", "recon": "train_recon", "kl": "train_kl"}
NAMES |= {"usage": "usage_entropy", "post_entropy": "routing_entropy"}
CURVES = (*NAMES, "prior_entropy", "route_kl")
AT_END = ("usage", "route_kl", "effective_draws")

Record = Mapping[str, Any]


def means(records: Sequence[Record], keys: Collection[str]) -> list[Measurement]:
    """Finite means over log records.

    Of usage it is the entropy of the mean: of the aggregate posterior, up to the draws of a batch.
    """
    values = {}
    for key in records[-1] if records else ():
        name, slash, block = key.partition("/")
        if name in keys:
            column = [record[key] for record in records if key in record]
            value = _entropy(_mean_usage(column)) if name == "usage" else statistics.fmean(column)
            values[NAMES.get(name, name) + slash + block] = value
    return numbers({metric: value for metric, value in values.items() if math.isfinite(value)}, len(records))


def _mean_usage(usages: Iterable[Sequence[float]]) -> list[float]:
    return [statistics.fmean(column) for column in zip(*usages, strict=True)]


def _entropy(shares: Iterable[float]) -> float:
    return max(0.0, -math.fsum(share * math.log(share) for share in shares if share > 0))


def curves(trained: Trained) -> Stage:
    """Terms of the loss and the routing over training: about `POINTS` means of records, the step as the convention."""

    def run() -> list[Row]:
        records = read_metrics(trained.path / "metrics.jsonl")
        size = max(1, math.ceil(len(records) / POINTS))
        parts = [records[start : start + size] for start in range(0, len(records), size)]
        return rows_of(trained.fields(), {f"step {part[-1]['step']}": means(part, CURVES) for part in parts})

    wanted = {"recipe": trained.experiment.name, "seed": trained.experiment.seed, "metric": "train_loss"}
    return Stage("training", run, [wanted])


def routing_at_end(records: Sequence[Record]) -> list[Measurement]:
    """Means over log records.

    route_kl/blockD: mean route KL in nats per position.
    usage_entropy/blockD: entropy in nats of the mean usage of the block's experts, at most log E.
    least_usage_entropy: the least of them.
    dead_experts: experts whose mean usage is below 1 / (10 E), over all blocks; n is the number of all experts.
    effective_draws: how many of the K draws count, where draws are compared.
    """
    items = means(records, AT_END)
    keys = [key for key in (records[-1] if records else ()) if key.startswith("usage/")]
    if usages := [_mean_usage(record[key] for record in records if key in record) for key in keys]:
        items.append(Measurement("least_usage_entropy", min(map(_entropy, usages)), None, len(records)))
        dead = sum(share < UNUSED / len(usage) for usage in usages for share in usage)
        items.append(Measurement("dead_experts", dead, None, sum(map(len, usages))))
    return items


def routing(trained: Trained) -> list[Stage]:
    """The routing at the end of training; nothing without routes."""
    items = routing_at_end(read_metrics(trained.path / "metrics.jsonl")[-LAST_RECORDS:])
    return [stage("routing", trained.fields(), lambda: items, items[-1].metric)] if items else []


def passes(trained: Trained) -> Stage:
    """Network passes of a training step and of a sampling step."""
    return stage("passes", trained.fields(), lambda: numbers(network_passes(trained.run)), "passes_train")


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
    with record_calls(*method.children()) as entered, record_calls(*blocks) as inside:
        method(rows, method.final_ramp(run.device), rng)
    steps = min(run.experiment.method.allowed_nfe(range(1, length + 1), length))
    with record_calls(method.backbone) as calls:
        method.sample(torch.full((1, length), method.space.mask_id, device=run.device), steps, rng)
    passes = {"passes_train": _tokens(entered) / rows.numel(), "calls_step": len(calls) / steps}
    depth = len(_blocks(method.backbone))
    return passes | ({"passes_block": _tokens(inside) / depth / rows.numel()} if depth else {})


def _blocks(network: nn.Module) -> list[nn.Module]:
    """The blocks of a transformer; none of other networks."""
    return [block for name, part in network.named_modules() if name.endswith("blocks") for block in part.children()]


def _tokens(shapes: Iterable[torch.Size]) -> int:
    """Rows times positions of inputs."""
    return sum(shape[:2].numel() for shape in shapes)
