"""Step times of two source trees, turn by turn in one call, on rows of random tokens.

    git archive 6076d38 src | tar -x -C .baseline
    PYTHONPATH=src python benchmarks/versions.py .baseline/src src lm1b-mdlm lm1b-emoe news-small-emoe

For each recipe every tree gets a process of its own, which waits while the others work. All processes start together,
so they must fit on the device. Times on shared machines are noisy: compare the medians of one command.
`--call` also times network calls and draws outside training, of E-MoE against MDLM at LM1B size.
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


class Worker:
    """A process that steps a recipe of one source tree."""

    def __init__(self, tree: str, recipe: str):
        command = [sys.executable, __file__, "--work", recipe]
        environment = os.environ | {"PYTHONPATH": tree}
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def read(self) -> Any:
        """The next line of its output."""
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def run(self, steps: int) -> float:
        """Milliseconds of a step."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        return float(self.read())

    def close(self) -> None:
        """End the process."""
        self.process.communicate()


def call_times(rows: int, nfe: int) -> dict[str, list[float]]:
    """Milliseconds of a network call and of a whole draw outside training, at LM1B size in bf16, turn by turn."""
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
                    inputs = method.prior(ReverseStep(x, t, reveal), Rng(number, device=device))
                    method.backbone(x, t, **inputs)
                torch.cuda.synchronize()
            if turn:
                times.setdefault(f"{name}, call", []).append(100 * (time.perf_counter() - start))
            for kind in ("plain", "reveal-first"):
                pool = draw(method, rows, nfe, seed=turn, sampler=SamplerConfig(kind=kind), precision="bf16")
                if turn:
                    times.setdefault(f"{name}, draw, {kind}", []).append(1000 * pool.seconds)
    return times


def report(times: dict[str, list[float]], path: str | None, wall_s: float) -> None:
    """Print medians; record them as rows of the task benchmark."""
    from emoe.reporting.provenance import describe_machine
    from emoe.reporting.results import Row, RunInfo, record

    rows = []
    for name, values in times.items():
        recipe, _, what = name.partition(", ")
        middle, error = statistics.median(values), statistics.stdev(values) / len(values) ** 0.5
        print(f"{name:<44}{middle:>10.3f} ms ± {error:.3f}", flush=True)
        rows.append(
            Row(
                task="benchmark", data="versions-gpu", method=what, recipe=recipe, seed=0, nfe=None, metric="time_ms",
                value=round(middle, 4), stderr=round(error, 4), n=len(values),
            )
        )  # fmt: skip
    if path:
        import torch

        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        record(path, RunInfo(command=" ".join(sys.argv), wall_s=round(wall_s, 1), **describe_machine(device)), rows)


def main() -> None:
    """Compare recipe after recipe."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="two source trees, then recipes")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--alone", nargs="*", default=[], help="recipes of the second tree only")
    parser.add_argument("--call", action="store_true", help="also times of calls and draws outside training")
    parser.add_argument("--record", help="results file")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args.work)
        return
    began, times = time.monotonic(), dict[str, list[float]]()
    trees = {"before": args.names[0], "after": args.names[1]}
    groups = {recipe: {name: Worker(tree, recipe) for name, tree in trees.items()} for recipe in args.names[2:]}
    groups |= {recipe: {"after": Worker(trees["after"], recipe)} for recipe in args.alone}
    for recipe, workers in groups.items():
        for name, worker in workers.items():
            print(f"{recipe}, {name}: {worker.read()}, {time.monotonic() - began:.0f} s", flush=True)
    for recipe, workers in groups.items():
        for _ in range(args.rounds):
            for name, worker in workers.items():
                times.setdefault(f"{recipe}, {name}", []).append(worker.run(args.steps))
        for worker in workers.values():
            worker.close()
    report(times, args.record, time.monotonic() - began)
    if args.call:
        calls = {f"lm1b-{name}": values for name, values in call_times(250, 8).items()}
        report(calls, args.record, time.monotonic() - began)


if __name__ == "__main__":
    main()
