"""Time of a training step of each toy method against MDLM's, interleaved in one process.

    ./run emoe --version && PYTHONPATH=src .venv/bin/python benchmarks/step_time.py --record

Times on shared machines are noisy: methods take turns, round after round, and the ratio of medians is what counts.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from emoe.engine.stepper import WARMUP_STEPS, Stepper
from emoe.evaluation.results import Row, RunInfo, describe_machine, record
from emoe.experiment import customise
from emoe.recipes import get_recipe
from emoe.rng import Rng
from emoe.runs import pick_device

METHODS: dict[str, tuple[str, dict[str, str]]] = {  # name in the table -> recipe of 8-modes and changed fields
    "mdlm": ("mdlm", {}),
    "vadd": ("vadd", {}),
    "emoe": ("emoe", {}),
    "emoe-plus": ("emoe-plus", {}),
    "emoe-plus, wake-sleep": ("emoe-plus", {"method.estimator": "wake-sleep"}),
    "emoe-plus, 4 draws": ("emoe-plus", {"method.draws": "4"}),
    "emoe-plus, 2 draws": ("emoe-plus", {"method.draws": "2"}),
    "emoe-plus, 4 draws, last block drawn": ("emoe-plus", {"method.draws": "4", "method.last-block": "drawn"}),
    "emoe-plus, 2 draws, last block drawn": ("emoe-plus", {"method.draws": "2", "method.last-block": "drawn"}),
    "emoe, leave-one-out, 2 draws": (
        "emoe",
        {"method.estimator": "leave-one-out", "method.gradient": "none", "method.draws": "2"},
    ),
    "vadd-plus": ("vadd-plus", {}),
    "emoe, last block summed": ("emoe", {"method.last-block": "summed"}),
    "emoe, reinmax": ("emoe", {"method.gradient": "reinmax"}),
    "emoe, gumbel-rao": ("emoe", {"method.gradient": "gumbel-rao"}),
}


def stepper_of(name: str, device: torch.device, settings: dict[str, str]) -> Stepper:
    """The training step of a recipe, ready to be called with step numbers."""
    experiment = customise(get_recipe(name), settings)
    domain = experiment.domain.build(0)
    method = experiment.build_method(domain.space).to(device)
    train = experiment.train
    torch.set_float32_matmul_precision("highest" if train.precision == "fp32" else "high")
    return Stepper(
        method, domain.batches(train.batch, 0, device=device), method.ramps, experiment.optim,
        total=train.steps, rng=Rng(0, device=device), ema=train.ema, precision=train.precision, graph=train.cuda_graph,
    )  # fmt: skip


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=int, default=30, help="turns of each method")
    parser.add_argument("--steps", type=int, default=0, help="steps per turn; default 5 on a CPU, 100 on a GPU")
    parser.add_argument(
        "--methods", default="mdlm;vadd;emoe;emoe-plus", help="names, separated by ;  all = all of them"
    )
    parser.add_argument("--record", metavar="FILE", nargs="?", const="results/benchmark.json", help="record the rows")
    args = parser.parse_args()
    device = pick_device(args.device)
    count = args.steps or (100 if device.type == "cuda" else 5)
    began = time.monotonic()
    names = list(METHODS) if args.methods == "all" else ["mdlm", *(n for n in args.methods.split(";") if n != "mdlm")]
    chosen = {name: METHODS[name] for name in names}
    steppers = {
        name: stepper_of(f"toy-8modes-{recipe}", device, settings) for name, (recipe, settings) in chosen.items()
    }
    done = dict.fromkeys(chosen, 0)
    times: dict[str, list[float]] = {name: [] for name in chosen}
    for turn in range(-1, args.rounds):
        for method, step in steppers.items():
            start = time.perf_counter()
            for _ in range(count if turn >= 0 else WARMUP_STEPS + 1):
                step(done[method])
                done[method] += 1
            if device.type == "cuda":
                torch.cuda.synchronize()
            if turn >= 0:
                times[method].append(1000 * (time.perf_counter() - start) / count)
    info = RunInfo(
        command="python benchmarks/step_time.py", wall_s=round(time.monotonic() - began, 1), **describe_machine(device)
    )
    rows = []
    base = statistics.median(times["mdlm"])
    print(f"{info.device}, torch {info.torch}, {torch.get_num_threads()} threads")
    print(f"{'method':<38}{'ms/step':>10}{'x MDLM':>9}")
    for method, values in times.items():
        middle = statistics.median(values)
        print(f"{method:<38}{middle:>10.3f}{middle / base:>9.2f}")
        kind = "gpu" if device.type == "cuda" else "cpu"
        common = dict(task="benchmark", data=f"toy-step-{kind}", method=method, seed=0)
        common["recipe"] = customise(get_recipe(f"toy-8modes-{chosen[method][0]}"), chosen[method][1]).name
        error = statistics.stdev(values) / len(values) ** 0.5
        rows += [
            Row(**common, nfe=None, metric="step_ms", value=round(middle, 4), stderr=round(error, 4), n=len(values)),
            Row(**common, nfe=None, metric="step_ratio_to_mdlm", value=round(middle / base, 3), n=len(values)),
        ]
    if args.record:
        record(args.record, info, rows)


if __name__ == "__main__":
    main()
