"""Step times of two source trees, turn by turn in one call, on rows of random tokens.

    git archive 6076d38 src | tar -x -C .baseline
    PYTHONPATH=src python benchmarks/versions.py .baseline/src src lm1b-mdlm lm1b-emoe news-small-emoe

For each recipe every tree gets a process of its own, which waits while the other one works. Times on shared machines
are noisy: compare the medians of one call. `--call` also times network calls outside training, of E-MoE against MDLM.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SPACES = {"lm1b": (30_522, 103, 128), "news": (30_522, 103, 128), "mnist": (3, 2, 1024), "toy": (51, 50, 2)}


def work(recipe: str) -> None:
    """A process of one tree: builds the training step, then runs as many steps as each line of its input says."""
    import torch

    from emoe.engine.stepper import Stepper
    from emoe.recipes import get_recipe
    from emoe.rng import Rng
    from emoe.types import TokenSpace

    experiment = get_recipe(recipe)
    train, space = experiment.train, TokenSpace(*SPACES[recipe.partition("-")[0]])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("highest" if train.precision == "fp32" else "high")
    torch.backends.cudnn.benchmark = True
    method = experiment.build_method(space).to(device)
    generator = torch.Generator().manual_seed(0)
    symbols = torch.tensor([v for v in range(space.size) if v != space.mask_id])
    rows = symbols[torch.randint(len(symbols), (8, train.batch, space.length), generator=generator)].to(device)
    options: dict[str, Any] = {"optim": experiment.optim, "train": train}
    if "train" not in inspect.signature(Stepper).parameters:  # trees up to version 0.1
        options = {"optim": experiment.optim, "total": train.steps, "ema": train.ema}
        options |= {"precision": train.precision, "graph": train.cuda_graph}
    rng = Rng(0, device=device)
    stepper = Stepper(method, lambda step: rows[step % 8], method.ramps, **options, rng=rng)
    step = 0

    def run(count: int) -> float:
        nonlocal step
        start = time.perf_counter()
        for _ in range(count):
            stepper(step)
            step += 1
        if device.type == "cuda":
            torch.cuda.synchronize()
        return 1000 * (time.perf_counter() - start) / count

    run(6)
    memory = torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else 0.0
    print(json.dumps({"memory_gb": round(memory, 1), "loss": float(stepper.loss.total)}), flush=True)
    for line in sys.stdin:
        print(json.dumps(run(int(line))), flush=True)


def call_times(rows: int, nfe: int) -> dict[str, float]:
    """Milliseconds of a network call and of a whole draw outside training, at LM1B size in bf16."""
    import torch

    from emoe.methods.base import SamplerConfig
    from emoe.methods.masked import ReverseStep
    from emoe.recipes import get_recipe
    from emoe.rng import Rng
    from emoe.runs.sampling import draw
    from emoe.types import TokenSpace

    device, space = torch.device("cuda"), TokenSpace(*SPACES["lm1b"])
    methods = {}
    for name in ("mdlm", "emoe"):
        methods[name] = get_recipe(f"lm1b-{name}").build_method(space).to(device).eval()
        for parameter in methods[name].parameters():
            parameter.data += 0.02 * torch.randn_like(parameter)  # routes that differ
    x = torch.full((rows, space.length), space.mask_id, device=device)
    times: dict[str, list[float]] = {}
    for turn in range(8):
        for name, method in methods.items():
            t, reveal = torch.ones(rows, device=device), x == space.mask_id
            with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
                torch.cuda.synchronize()
                start = time.perf_counter()
                for number in range(10):
                    inputs = method.prior(ReverseStep(x, t, reveal, nfe), Rng(number, device=device))
                    method.backbone(x, t, **inputs)
                torch.cuda.synchronize()
            if turn:
                times.setdefault(f"{name}, call", []).append(100 * (time.perf_counter() - start))
            for kind in ("plain", "reveal-first"):
                pool = draw(method, rows, nfe, seed=turn, sampler=SamplerConfig(kind=kind), precision="bf16")
                if turn:
                    times.setdefault(f"{name}, draw, {kind}", []).append(1000 * pool.seconds)
    return {name: statistics.median(values) for name, values in times.items()}


def compare(trees: list[Path], recipe: str, rounds: int, steps: int) -> None:
    """Print the medians of both trees and their ratio."""
    workers: list[Any] = []
    for tree in trees:
        environment = os.environ | {"PYTHONPATH": str(tree)}
        command = [sys.executable, __file__, "--work", recipe]
        workers.append(
            subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
    ready = [worker.stdout.readline() for worker in workers]
    times: list[list[float]] = [[] for _ in trees]
    for _ in range(rounds):
        for worker, values in zip(workers, times, strict=True):
            worker.stdin.write(f"{steps}\n")
            worker.stdin.flush()
            values.append(json.loads(worker.stdout.readline()))
    for worker in workers:
        worker.stdin.close()
        worker.wait()
    medians = [statistics.median(values) for values in times]
    notes = " ".join(line.strip() for line in ready)
    print(f"{recipe:<18}" + "".join(f"{m:>10.3f}" for m in medians) + f"{medians[-1] / medians[0]:>9.3f}  {notes}")
    sys.stdout.flush()


def main() -> None:
    """Compare recipe after recipe."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="two source trees, then recipes")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--call", action="store_true")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args.work)
        return
    if args.call:
        for name, value in call_times(250, 8).items():
            print(f"{name:<28}{value:>10.2f} ms", flush=True)
    for recipe in args.names[2:]:
        compare([Path(name) for name in args.names[:2]], recipe, args.rounds, args.steps)


if __name__ == "__main__":
    main()
