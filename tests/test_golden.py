"""Exact numbers of every method on every backbone: losses, log terms, likelihoods and samples of a short training.

They protect a refactoring: run with `EMOE_GOLDEN=exact` before and after on one machine, every number must be equal to
the last bit. By default numbers are compared within 1e-4 of the largest number of their kind, and one symbol in a
hundred may differ, because other processors round differently and training amplifies it.
`EMOE_GOLDEN=write` stores new ones.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from emoe.backbones.dit import DiTConfig
from emoe.backbones.layers import RouterConfig
from emoe.backbones.transformer import TransformerConfig
from emoe.backbones.unet import UNetConfig
from emoe.engine.stepper import Stepper
from emoe.experiment import Experiment
from emoe.methods.base import Method, SamplerConfig
from emoe.methods.masked import MaskedDiffusion
from emoe.recipes import get_recipe
from emoe.rng import Rng, derive_seed
from emoe.routing.compare import CompareConfig
from emoe.runs.pretrained import from_pretrained
from emoe.runs.sampling import draw
from emoe.runs.train import load_run
from emoe.types import Likelihood, TokenSpace

pytestmark = pytest.mark.golden
STORED = Path(__file__).parent / "golden" / "core.json"
MODE = os.environ.get("EMOE_GOLDEN", "close")
STEPS, ROWS, POOL = 12, 64, 64

TRANSFORMER = TransformerConfig(width=16, hidden=32, heads=2, time_size=16)
UNET = UNetConfig(channels=8, hidden=8, time_size=8, time_hidden=16, groups=4)
DIT = DiTConfig(
    width=16,
    depth=3,
    heads=2,
    hidden=32,
    cond_size=8,
    time_size=8,
    latent_hidden=8,
    dropout=0.1,
    router=RouterConfig(std=0.3, bias=False),
)
TOY = TokenSpace(size=9, mask_id=8, length=2)
ROW = TokenSpace(size=7, mask_id=6, length=6)
IMAGE = TokenSpace(size=3, mask_id=2, length=64)
TEXT = TokenSpace(size=21, mask_id=5, length=16)

# Name -> recipe whose method and optimiser are used, backbone, token space, changes of the method.
CASES: dict[str, tuple[str, Any, TokenSpace, dict[str, Any]]] = {
    "transformer/mdlm": ("toy-8modes-mdlm", TRANSFORMER, TOY, {}),
    "transformer/vadd": ("toy-8modes-vadd", TRANSFORMER, TOY, {}),
    "transformer/vadd-plus": ("toy-8modes-vadd-plus", TRANSFORMER, TOY, {}),
    "transformer/emoe": ("toy-8modes-emoe", TRANSFORMER, TOY, {}),
    "transformer/emoe-vimco": ("toy-8modes-emoe-plus", TRANSFORMER, TOY, {}),
    "transformer/emoe-wake-sleep": (
        "ties-emoe-plus", dataclasses.replace(TRANSFORMER, depth=4, router=RouterConfig(cap=3.0)), ROW, {}
    ),
    "transformer/emoe-leave-one-out": (
        "ties-emoe-plus", dataclasses.replace(TRANSFORMER, depth=3, router=RouterConfig(norm=True)), ROW,
        {"compare": CompareConfig(estimator="leave-one-out", draws=4, credit="position", in_turn=True)},
    ),
    "transformer/emoe-free-nats": ("toy-8modes-emoe", TRANSFORMER, ROW, {"free_nats": 0.05, "free_every": 2}),
    "unet/mdlm": ("digits-mdlm", UNET, IMAGE, {}),
    "unet/vadd": ("digits-vadd", UNET, IMAGE, {}),
    "unet/emoe": ("digits-emoe", UNET, IMAGE, {}),
    "unet/emoe-mnist": ("mnist-emoe", UNET, IMAGE, {}),
    "unet/emoe-floor": ("mnist-emoe-plus", UNET, IMAGE, {}),
    "unet/emoe-vimco": ("digits-emoe-plus", UNET, IMAGE, {}),
    "dit/mdlm": ("text-tiny-mdlm", DIT, TEXT, {}),
    "dit/mdlm-chunk": ("lm1b-mdlm", DIT, TEXT, {"head_chunk": 100}),
    "dit/vadd": ("text-tiny-vadd", DIT, TEXT, {}),
    "dit/vadd-chunk": ("news-small-vadd", DIT, TEXT, {"head_chunk": 100}),
    "dit/emoe": ("text-tiny-emoe", DIT, TEXT, {}),
    "dit/emoe-chunk": ("news-small-emoe", DIT, TEXT, {"head_chunk": 100}),
    "dit/emoe-free-nats": ("text-tiny-emoe-plus", DIT, TEXT, {}),
    "dit/emoe-free-nats-chunk": ("news-small-emoe-plus", DIT, TEXT, {"head_chunk": 100}),
    "dit/emoe-time": ("text-tiny-emoe", dataclasses.replace(DIT, time_conditioning=True), TEXT, {"route_tau": 0.5}),
    "dit/sedd": ("text-tiny-sedd", dataclasses.replace(DIT, time_conditioning=True), TEXT, {}),
    "dit/sedd-chunk": ("lm1b-sedd", dataclasses.replace(DIT, time_conditioning=True), TEXT, {"head_chunk": 100}),
    "transformer/sedd": ("text-tiny-sedd", TRANSFORMER, ROW, {}),
    "unet/sedd": ("text-tiny-sedd", UNET, IMAGE, {}),
    "dit/bd3lm": ("text-tiny-bd3lm", DIT, TEXT, {}),
    "dit/bd3lm-chunk": ("lm1b-bd3lm", DIT, TEXT, {"block": 4, "head_chunk": 100}),
    "dit/ar": ("text-tiny-ar", dataclasses.replace(DIT, causal=True), TEXT, {}),
    "dit/ar-chunk": ("lm1b-ar", dataclasses.replace(DIT, causal=True), TEXT, {"head_chunk": 100}),
}  # fmt: skip
NLL = ("objective", "nelbo", "bound@1", "bound@4", "iw@1,4", "iw@4,3", "exact")


def experiment_of(case: str) -> tuple[Experiment, TokenSpace]:
    recipe, backbone, space, changes = CASES[case]
    experiment = get_recipe(recipe)
    train = dataclasses.replace(experiment.train, steps=STEPS, batch=ROWS, precision="fp32", accumulate=1)
    method = dataclasses.replace(experiment.method, **changes)
    optim = dataclasses.replace(experiment.optim, lr=1e-2, warmup=0)
    return dataclasses.replace(experiment, backbone=backbone, method=method, train=train, optim=optim), space


def rows_of(space: TokenSpace) -> Tensor:
    """Rows whose neighbours tend to be equal."""
    generator = torch.Generator().manual_seed(3)
    symbols = torch.tensor([symbol for symbol in range(space.size) if symbol != space.mask_id])
    drawn = symbols[torch.randint(len(symbols), (4 * ROWS, space.length), generator=generator)]
    copy = torch.rand(drawn.shape, generator=generator) < 0.6
    return torch.where(copy, drawn[:, :1], drawn)


def sample(method: Method, nfe: int, kind: str, nucleus: float = 1.0) -> Tensor:
    return draw(method, POOL, nfe, seed=7, batch=48, sampler=SamplerConfig(kind=kind, nucleus=nucleus)).samples


def nll(method: Method, rows: Tensor, name: str) -> Tensor:
    return method.nll(rows, Likelihood.parse(name), Rng(derive_seed(5, name)))


def measured(case: str) -> dict[str, Any]:
    """Everything that is stored of a case; floats as hexadecimal text, which loses nothing."""
    experiment, space = experiment_of(case)
    rows = rows_of(space)
    method = experiment.build_method(space)
    stepper = Stepper(
        method, lambda step: rows[step % 4 * ROWS :][:ROWS], method.ramps, optim=experiment.optim,
        train=experiment.train, rng=Rng(derive_seed(0, "train")),
    )  # fmt: skip
    losses = []
    for step in range(STEPS):
        stepper(step)
        losses.append(stepper.loss.total.item().hex())
    log = {name: [x.hex() for x in value.double().flatten().tolist()] for name, value in stepper.loss.log.items()}
    method.eval()
    found: dict[str, Any] = {"losses": losses, "log": log, "nll": {}, "samples": {}}
    for name in NLL:
        try:
            found["nll"][name] = [x.hex() for x in nll(method, rows[:8], name).double().tolist()]
        except ValueError:
            continue
    kinds = ["plain"]
    if isinstance(method, MaskedDiffusion) and case.startswith("dit"):
        kinds.append("reveal-first")
    length, blocks = space.length, getattr(method, "blocks", 1)
    calls = (length,) if "/ar" in case else tuple(nfe * blocks for nfe in (1, 4))
    for kind in kinds:
        for nfe in calls:
            found["samples"][f"{kind}@{nfe}"] = [
                "".join(map(chr, (row + 97).tolist())) for row in sample(method, nfe, kind)
            ]
    if len(kinds) > 1:
        drawn = sample(method, 4, "plain", 0.8)
        found["samples"]["nucleus@4"] = ["".join(map(chr, (row + 97).tolist())) for row in drawn]
    return found


def as_numbers(texts: list[str]) -> list[float]:
    return [float.fromhex(text) for text in texts]


@pytest.mark.parametrize("case", CASES)
def test_numbers_are_the_stored_ones(case: str) -> None:
    found = measured(case)
    if MODE == "write":
        others = json.loads(STORED.read_text()) if STORED.exists() else {}
        STORED.write_text(json.dumps(others | {case: found}, indent=0, sort_keys=True) + "\n")
    wanted = json.loads(STORED.read_text())[case]
    if MODE == "exact":
        assert found == wanted
        return
    for name, rows in wanted["samples"].items():
        pairs = list(zip("".join(rows), "".join(found["samples"][name]), strict=True))
        assert sum(a == b for a, b in pairs) >= 0.99 * len(pairs), name
    for group in ({"losses": wanted["losses"]}, wanted["log"], wanted["nll"]):
        for name, values in group.items():
            seen = found["losses"] if name == "losses" else (found["log"] | found["nll"])[name]
            stored = as_numbers(values)
            scale = max(map(abs, stored), default=0.0)
            assert as_numbers(seen) == pytest.approx(stored, rel=1e-4, abs=1e-4 * max(scale, 0.1)), name


GOLDEN = STORED.parent


@pytest.mark.parametrize("name", json.loads((GOLDEN / "schema1" / "samples.json").read_text()))
def test_runs_of_the_first_schema_open_and_draw_the_same_rows(name: str) -> None:
    run = load_run(GOLDEN / "schema1" / name, device="cpu")
    for nfe, rows in json.loads((GOLDEN / "schema1" / "samples.json").read_text())[name].items():
        assert draw(run.method, 20, int(nfe), seed=3, batch=16).samples.tolist() == rows


@pytest.mark.parametrize("name", json.loads((GOLDEN / "released.json").read_text()))
def test_released_models_draw_the_same_images(name: str) -> None:
    """Nearly all pixels: sums over many channels end in other last bits on other processors."""
    run = from_pretrained(name, device="cpu")
    rows = torch.tensor(
        [[int(pixel) for pixel in row] for row in json.loads((GOLDEN / "released.json").read_text())[name]]
    )
    assert (draw(run.method, 3, 4).samples == rows).double().mean() > 0.98


def test_recipes_are_those_of_the_first_schema() -> None:
    for name, stored in json.loads((GOLDEN / "recipes.json").read_text()).items():
        if not name.endswith("-aware"):
            assert dataclasses.replace(get_recipe(name), name=name) == Experiment.from_tree(stored, 1), name
