"""Time of a training step of each method against MDLM's, interleaved in one process.

    ./run emoe --version && PYTHONPATH=src .venv/bin/python benchmarks/step_time.py --record
    ... --task mnist --data-root data --rival FOLDER
    ... --task news-small --set sets/news --methods all
    ... --task mnist --data-root data --methods mdlm --profile kernels.txt

Times on shared machines are noisy: methods take turns, round after round, and the ratio of medians is what counts.
`--rival` is a checkout of addtt/variational-diffusion-models, whose UNet the paper's was derived from: a training step
of it in eager mode, as its trainer runs it, with the paper's channels and about as many blocks.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch

from emoe.engine.arithmetic import arithmetic
from emoe.engine.stepper import WARMUP_STEPS, Stepper
from emoe.experiment import customise
from emoe.recipes import get_recipe
from emoe.reporting.provenance import describe_machine
from emoe.reporting.results import Row, RunInfo, record
from emoe.rng import Rng
from emoe.runs.train import pick_device

Methods = dict[str, tuple[str, dict[str, str]]]  # name in the table -> end of a recipe's name and changed fields
TOY: Methods = {
    "mdlm": ("mdlm", {}),
    "vadd": ("vadd", {}),
    "vadd-plus": ("vadd-plus", {}),
    "emoe": ("emoe", {}),
    "emoe-vimco": ("emoe-vimco", {}),
    "emoe-vimco, wake-sleep": ("emoe-vimco", {"method.compare.estimator": "wake-sleep"}),
    "emoe-vimco, 4 draws": ("emoe-vimco", {"method.compare.draws": "4"}),
    "emoe-vimco, 2 draws": ("emoe-vimco", {"method.compare.draws": "2"}),
    "emoe-vimco, 2 draws, last block drawn": (
        "emoe-vimco",
        {"method.compare.draws": "2", "method.compare.sum-last": "false"},
    ),
}
IMAGES: Methods = {
    "mdlm": ("mdlm", {}),
    "vadd": ("vadd", {}),
    "emoe": ("emoe", {}),
    "emoe-floor": ("emoe-floor", {}),
    "mdlm, eager": ("mdlm", {"train.cuda-graph": "false"}),
    "mdlm, eager, tf32": ("mdlm", {"train.cuda-graph": "false", "train.precision": "tf32"}),
}
TEXT: Methods = {name: (name, {}) for name in ("mdlm", "ar", "sedd", "bd3lm", "vadd", "emoe", "emoe-free-nats")}
TASKS = {"toy": ("toy-8modes-", TOY), "mnist": ("mnist-", IMAGES), "news-small": ("news-small-", TEXT)}
RIVAL = "vdm, eager"


def stepper_of(name: str, device: torch.device, settings: dict[str, str]) -> Callable[[int], None]:
    """Return the training step of a recipe, to be called with step numbers."""
    experiment = customise(get_recipe(name), settings)
    domain = experiment.domain.build(0)
    method = experiment.build_method(domain.space).to(device)
    train = experiment.train
    batches, options = domain.batches(train.batch, 0, device=device), {"optim": experiment.optim, "train": train}
    stepper = Stepper(method, batches, method.ramps, **options, rng=Rng(0, device=device))

    def step(number: int) -> None:
        with arithmetic(train.precision):
            stepper(number)

    return step


def _zeroed(module: torch.nn.Module) -> torch.nn.Module:
    for parameter in module.parameters():
        torch.nn.init.zeros_(parameter)
    return module


def rival_step(folder: Path, device: torch.device, *, batch: int = 64, side: int = 32) -> Callable[[int], None]:
    """Return a step of the VDM UNet on grey images: noise prediction, Adam, clipping, moving average; eager, TF32."""
    sys.path.insert(0, str(folder))
    helpers = ModuleType("utils")  # the network needs one function of a file whose imports are many
    helpers.zero_init = _zeroed  # type: ignore[attr-defined]
    sys.modules["utils"] = helpers
    from vdm_unet import UNetVDM  # type: ignore[import-not-found]

    sizes = {"embedding_dim": 72, "n_blocks": 3, "n_attention_heads": 1, "norm_groups": 8, "input_channels": 1}
    flags = {"attention_everywhere": False, "use_fourier_features": False}
    net = UNetVDM(SimpleNamespace(**sizes, **flags, dropout_prob=0.0, gamma_min=-13.3, gamma_max=5.0)).to(device)
    average = [p.detach().clone() for p in net.parameters()]
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-4, weight_decay=0.01, betas=(0.9, 0.99))
    x = torch.randn(batch, 1, side, side, device=device)

    def step(_: int) -> None:
        gamma = -13.3 + 18.3 * torch.rand(batch, device=device)
        noise = torch.randn_like(x)
        spread = torch.sigmoid(gamma)[:, None, None, None]
        z = (1 - spread).sqrt() * x + spread.sqrt() * noise
        loss = (net(z, gamma) - noise).square().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        torch._foreach_lerp_(average, [p.detach() for p in net.parameters()], 1e-4)

    return step


def kernels_of(step: Callable[[int], None], first: int, count: int = 5) -> str:
    """List the kernels of a step, the longest first: microseconds of a step, calls, microseconds of a call, name.

    Times of kernels that ran beside each other overlap: they add up to more than a step takes.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for number in range(count):
            step(first + number)
        torch.cuda.synchronize()
    ordered = sorted(profiler.key_averages(), key=lambda kernel: -kernel.device_time_total)
    lines = [f"{sum(kernel.device_time_total for kernel in ordered) / count:10.1f} us in all"]
    for kernel in ordered:
        each = kernel.device_time_total / kernel.count
        lines.append(
            f"{kernel.device_time_total / count:10.1f}{kernel.count / count:8.1f}{each:10.2f}  {kernel.key[:110]}"
        )
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=int, default=30, help="turns of each method")
    parser.add_argument("--steps", type=int, default=0, help="steps per turn; default 5 on a CPU, 100 on a GPU")
    parser.add_argument("--task", choices=TASKS, default="toy")
    parser.add_argument("--methods", default="mdlm;vadd;emoe", help="names, separated by ;  all = all of them")
    parser.add_argument("--data-root", help="where MNIST is")
    parser.add_argument("--set", help="with --task news-small: folder of the prepared text")
    parser.add_argument("--rival", type=Path, help="with --task mnist: checkout of the VDM UNet to time beside")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="on a GPU: write which kernels a step runs")
    parser.add_argument("--record", metavar="FILE", nargs="?", const="results/benchmark.json", help="record the rows")
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error("--rounds: at least 2 turns are needed for a standard error")
    if args.profile and pick_device(args.device).type != "cuda":
        parser.error("--profile: needs a GPU")
    return args


def main() -> None:
    """Measure and print a table."""
    args = arguments()
    device = pick_device(args.device)
    count = args.steps or (100 if device.type == "cuda" else 5)
    began = time.monotonic()
    prefix, methods = TASKS[args.task]
    names = list(methods) if args.methods == "all" else ["mdlm", *(n for n in args.methods.split(";") if n != "mdlm")]
    where = {"domain.root": args.data_root} if args.data_root else {"domain.path": args.set} if args.set else {}
    chosen = {name: (prefix + methods[name][0], methods[name][1] | where) for name in names}
    steppers: dict[str, Callable[[int], None]] = {
        name: stepper_of(recipe, device, settings) for name, (recipe, settings) in chosen.items()
    }
    if args.rival:
        steppers[RIVAL] = rival_step(args.rival, device)
    done = dict.fromkeys(steppers, 0)
    times: dict[str, list[float]] = {name: [] for name in steppers}
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
    command = f"python benchmarks/step_time.py --task {args.task}" + (" --rival FOLDER" if args.rival else "")
    info = RunInfo(command=command, wall_s=round(time.monotonic() - began, 1), **describe_machine(device))
    rows = []
    base = statistics.median(times["mdlm"])
    print(f"{info.device}, torch {info.torch}, {torch.get_num_threads()} threads")
    print(f"{'method':<38}{'ms/step':>10}{'x MDLM':>9}")
    for method, values in times.items():
        middle = statistics.median(values)
        print(f"{method:<38}{middle:>10.3f}{middle / base:>9.2f}")
        kind = "gpu" if device.type == "cuda" else "cpu"
        common = dict(task="benchmark", data=f"{args.task}-step-{kind}", method=method, seed=0)
        if method in chosen:
            common["recipe"] = customise(get_recipe(chosen[method][0]), chosen[method][1]).name
        else:
            common["recipe"] = "reference"
        error = statistics.stdev(values) / len(values) ** 0.5
        rows += [
            Row(**common, nfe=None, metric="step_ms", value=round(middle, 4), stderr=round(error, 4), n=len(values)),
            Row(**common, nfe=None, metric="step_ratio_to_mdlm", value=round(middle / base, 3), n=len(values)),
        ]
    if args.profile:
        pages = [f"{method}: {kernels_of(step, done[method])}" for method, step in steppers.items()]
        args.profile.write_text("\n\n".join(pages) + "\n", encoding="utf-8")
    if args.record:
        record(args.record, info, rows)


if __name__ == "__main__":
    main()
