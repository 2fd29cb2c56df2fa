"""Functions compiled for a GPU: each compiles as a whole, and nothing is compiled elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import emoe
from emoe import kernels

# In a process of its own: here every function is wrapped to check shapes, which a compiler cannot trace.
SCRIPT = """
import torch
from emoe.backbones import attention, base, dit, layers, unet
from emoe.diffusion import categorical, head, masking, times
from emoe.routing import experts, latent, routes
from emoe.types import Needs, TokenSpace

torch.manual_seed(0)
def normal(*shape):
    return torch.randn(shape).requires_grad_()

h, weight, shift, scale = normal(2, 6, 8), normal(8), normal(2, 1, 8), normal(2, 1, 8)
angle = torch.rand(6, 2)
logits, other, noise = normal(2, 6, 4), normal(2, 6, 4), torch.randn(2, 6, 4)
route = torch.randint(4, (2, 6))
pair = torch.tensor([[0, 1], [3, 2], [2, 0]])
sizes = unet.UNetConfig(channels=8, hidden=8, time_size=8, time_hidden=8, groups=2)
net = sizes.build(TokenSpace(length=16, size=3, mask_id=2), Needs(marks=True))
for p in net.parameters():
    p.data.add_(0.05 * torch.randn_like(p))
image = normal(2, 8, 4, 4)
cases = {
    dit.normed: [(h, weight), (h, weight, shift, scale, torch.bfloat16), (h, weight, None, None, torch.float32)],
    dit.added: [(h, normal(2, 6, 8), scale), (h, normal(2, 6, 8), None)],
    attention.rotated: [(normal(2, 6, 3, 3, 4), angle.cos(), angle.sin())],
    layers._shaped: [(logits, normal(4), normal(4), 1e-5, 5.0), (logits, None, None, 0.0, 5.0)],
    base.token_logits: [(logits, 4), (logits, 2)],
    layers.time_features: [(torch.rand(5), 6)],
    masking._masked_where: [(route, torch.rand(2, 6, dtype=torch.float64), torch.tensor([0.3, 0.9]), 4)],
    masking.subs: [(normal(2, 6, 5), torch.randint(5, (2, 6)), 3)],
    masking.log_chosen: [(logits, route), (normal(2, 6, 20), route)],
    categorical.gumbel_from_uniform: [(torch.rand(3, 4, dtype=torch.float64),)],
    times._in_strata: [(torch.rand(9, dtype=torch.float64), 5, 0.0), (torch.rand(4, dtype=torch.float64), 2, 1e-3)],
    routes._relaxed: [(logits, noise, torch.tensor(0.5), 2), (logits, noise, 0.5, 4), (logits, noise, 0.5, 1)],
    routes._perturbed: [(logits, torch.rand(2, 6, 4, dtype=torch.float64), 0.5)],
    latent._stats: [(logits, other, route, (6,)), (logits, other, route, (4, 2))],
    experts._weighted: [(normal(3, 2), normal(3, 8), normal(3, 8)), (normal(3, 2), normal(3, 8))],
    experts._all_experts: [
        (normal(3, 8), pair, normal(3, 2), normal(4, 8, 5), normal(4, 5), normal(4, 5, 8), normal(4, 8), "none")
    ],
    experts._biased_gelu: [(normal(3, 5), normal(4, 5), pair[:, 0], kind) for kind in ("none", "tanh")],
    experts._biased_gelu_slope: [(normal(3, 5), normal(4, 5), pair[:, 0], torch.randn(3, 5), "tanh")],
    experts._restored: [(normal(3, 5), normal(4, 5), pair[:, 0], torch.tensor([2, 0, 1]))],
    head._read: [(normal(3, 20), torch.tensor([0, 4, 19])), (normal(3, 20).bfloat16(), torch.tensor([0, 4, 19]))],
    head._by_logits: [(normal(3, 20), torch.tensor([0, 4, 19]), torch.rand(3), torch.rand(3), torch.rand(3))],
    unet.UNet.embed: [(net, torch.randint(3, (2, 16)), torch.rand(2, 16) > 0.5)],
    unet.Residual.forward: [
        (net.blocks[0].residual, image, normal(2, 16)), (net.blocks[6].residual, normal(2, 16, 4, 4), None)
    ],
    unet.halved: [(net.down[0], image)],
    unet.doubled: [(net.up[0], image, normal(2, 8, 8, 8))],
}

def flat(value):
    return [value] if isinstance(value, torch.Tensor) else list(value)

for function, calls in cases.items():
    plain = function.__wrapped__
    whole = torch.compile(plain, backend="aot_eager", dynamic=False, fullgraph=True)
    for args in calls:
        actual, wanted = flat(whole(*args)), flat(plain(*args))
        leaves = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.requires_grad]
        if leaves:
            slopes = [torch.randn_like(value, dtype=torch.float32) for value in wanted]
            for values in (actual, wanted):
                total = sum((v * s).sum() for v, s in zip(values, slopes) if v.requires_grad)
                values.extend(torch.autograd.grad(total, leaves, allow_unused=True))
        for a, b in zip(actual, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
print("all", len(cases))
"""


def test_each_compiles_as_a_whole_to_the_same_function() -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(emoe.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout == "all 25\n", done.stderr[-2000:]


def test_the_list_above_is_complete() -> None:
    marked = [
        path.name for path in Path(emoe.__file__).parent.rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines() if line.strip().startswith("@compiled")
    ]  # fmt: skip
    assert len(marked) == 25


def test_a_cpu_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("compiled on a CPU")

    monkeypatch.setattr(torch, "compile", refuse)
    monkeypatch.setattr(kernels, "enabled", lambda: True)
    twice = kernels.compiled(lambda x: 2 * x)
    assert torch.equal(twice(torch.ones(2, requires_grad=True)), torch.full((2,), 2.0))
