"""Step times of several source trees, turn by turn in one command, on rows of random tokens.

    git archive 6076d38 src | tar -x -C .baseline
    python benchmarks/versions.py before=.baseline/src after=src news-small-mdlm mnist-emoe@after --calls

Each recipe and tree gets a process of its own. All processes start together, so they must fit on the device; then each
works while the others wait. Times on shared machines are noisy: compare the medians of one command.
`--calls` times network calls and whole draws outside training, of E-MoE against MDLM at LM1B size in bf16.
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
from collections.abc import Callable
from typing import Any

SPACES = {"lm1b": (30_522, 103, 128), "news": (30_522, 103, 128), "mnist": (3, 2, 1024), "toy": (51, 50, 2)}
ROWS, NFE = 250, 8  # of the draws that are timed
Times = dict[str, float]  # what -> milliseconds


def stepping(recipe: str, batch: int | None) -> Callable[[int], Times]:
    """Build a training step; return a function that runs a number of them."""
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
    symbols = torch.tensor([v for v in range(space.size) if v != space.mask_id])
    shape = 8, batch or train.batch, space.length
    rows = symbols[torch.randint(len(symbols), shape, generator=torch.Generator().manual_seed(0))].to(device)
    options: dict[str, Any] = {"optim": experiment.optim, "train": train}
    if "train" not in inspect.signature(Stepper).parameters:  # trees up to version 0.1
        options = {"optim": experiment.optim, "total": train.steps, "ema": train.ema}
        options |= {"precision": train.precision, "graph": train.cuda_graph}
    stepper = Stepper(method, lambda step: rows[step % 8], method.ramps, **options, rng=Rng(0, device=device))
    step = 0

    def run(count: int) -> Times:
        nonlocal step
        start = time.perf_counter()
        for _ in range(count):
            stepper(step)
            step += 1
        if device.type == "cuda":
            torch.cuda.synchronize()
        return {"step": 1000 * (time.perf_counter() - start) / count}

    run(6)
    return run


def calling() -> Callable[[int], Times]:
    """Build MDLM and E-MoE at LM1B size; return a function that times network calls and draws of both."""
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
    x = torch.full((ROWS, space.length), space.mask_id, device=device)
    t, reveal = torch.ones(ROWS, device=device), x == space.mask_id

    @torch.no_grad()
    def run(count: int) -> Times:
        times = {}
        for name, method in methods.items():
            with torch.autocast("cuda", torch.bfloat16):
                torch.cuda.synchronize()
                start = time.perf_counter()
                for number in range(count):
                    inputs = method.prior(ReverseStep(x, t, reveal), Rng(number, device=device))
                    method.backbone(x, t, **inputs)
                torch.cuda.synchronize()
            times[f"{name}, network call"] = 1000 * (time.perf_counter() - start) / count
            for kind in ("plain", "reveal-first"):
                pool = draw(method, ROWS, NFE, seed=0, sampler=SamplerConfig(kind=kind), precision="bf16")
                times[f"{name}, call of a {kind} draw"] = 1000 * pool.seconds / NFE
            torch.cuda.empty_cache()
        return times

    run(2)
    return run


def work(what: str, batch: int | None) -> None:
    """Run a worker process: report readiness, then run as many steps as each line of the input asks for."""
    import torch

    run = calling() if what == "calls" else stepping(what, batch)
    memory = torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else 0.0
    print(json.dumps({"memory_gb": round(memory, 1)}), flush=True)
    for line in sys.stdin:
        print(json.dumps(run(int(line))), flush=True)


class Worker:
    """A process that runs a recipe with one source tree."""

    def __init__(self, tree: str, what: str, batch: int | None):
        command = [sys.executable, __file__, "--work", what, *(["--batch", str(batch)] if batch else [])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([tree, os.environ.get("PYTHONPATH", "")])}
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def read(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def run(self, count: int) -> Times:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{count}\n")
        self.process.stdin.flush()
        return dict(self.read())

    def close(self) -> None:
        self.process.communicate()


def report(what: str, tree: str, turns: list[Times], record_path: str | None, wall_s: float) -> None:
    """Print medians; record them as rows of the task benchmark."""
    from emoe.reporting.provenance import describe_machine
    from emoe.reporting.results import Row, RunInfo, record

    rows = []
    for name in turns[0]:
        values = [times[name] for times in turns]
        middle, error = statistics.median(values), statistics.stdev(values) / len(values) ** 0.5
        print(f"{what}, {tree}, {name:<40}{middle:>10.3f} ms ± {error:.3f}", flush=True)
        fields: dict[str, Any] = {"method": f"{tree}, {name}", "recipe": what, "seed": 0, "nfe": None}
        fields |= {"value": round(middle, 4), "stderr": round(error, 4), "n": len(values)}
        rows.append(Row(task="benchmark", data="versions-gpu", metric="time_ms", **fields))
    if record_path:
        import torch

        machine = describe_machine("cuda" if torch.cuda.is_available() else "cpu")
        record(record_path, RunInfo(command=" ".join(sys.argv), wall_s=round(wall_s, 1), **machine), rows)


def main() -> None:
    """Start everything, then work turn by turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="NAME=TREE for each source tree, then recipes: RECIPE[@NAME,NAME]")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, help="rows of a step; default: the recipe's")
    parser.add_argument("--calls", action="store_true", help="time calls and draws too, of the last tree")
    parser.add_argument("--record", help="results file")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args.work, args.batch)
        return
    began = time.monotonic()
    trees = dict(name.split("=", 1) for name in args.names if "=" in name)
    tasks = [("calls", [*trees][-1])] * args.calls
    for name in args.names:
        if "=" not in name:
            recipe, _, some = name.partition("@")
            tasks += [(recipe, tree) for tree in (some.split(",") if some else trees)]
    workers = {(what, tree): Worker(trees[tree], what, args.batch) for what, tree in tasks}
    for (what, tree), worker in workers.items():
        print(f"{what}, {tree}: {worker.read()}, {time.monotonic() - began:.0f} s", flush=True)
    for what in dict.fromkeys(what for what, _ in tasks):
        own = {tree: worker for (name, tree), worker in workers.items() if name == what}
        turns = [{tree: worker.run(args.steps) for tree, worker in own.items()} for _ in range(args.rounds)]
        for tree, worker in own.items():
            worker.close()
            report(what, tree, [turn[tree] for turn in turns], args.record, time.monotonic() - began)


if __name__ == "__main__":
    main()
