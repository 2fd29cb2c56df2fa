"""Feed-forward experts behind a gate: a plain reference and two faster forms of the same function.

Names carry shapes: N rows (batch times positions), K model width, F hidden width, E experts.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as nnf

from emoe.diffusion.head import product_dtype
from emoe.kernels import compiled, compiled_always
from emoe.types import Gate

Dispatch = Literal["auto", "loop", "grouped", "dense", "sliced"]
Activation = Literal["gelu", "gelu-tanh"]
LARGE = 256  # width from which on a GPU is quicker with grouped products than with all experts everywhere


class RoutedExperts(nn.Module):
    """E two-layer MLPs of which a gate picks one for each position.

    out = sum_j weight_j * expert_j(x). With a straight-through gate the values are (1, 0, ...): the first expert is
    the output, the others only give the gradient of their weight, so they run without a gradient of their own.

    `dispatch`: "loop" and "sliced" sort rows by expert and run each expert on its slice (the reference, any precision);
    "grouped" sorts rows and runs grouped matrix products; "dense" computes all experts everywhere, which pays in
    training where they are small. "auto" takes grouped where such products exist and pay, dense in training on a GPU,
    and sliced otherwise.

    `activation`: "gelu" is exact, "gelu-tanh" the approximation 0.5 u (1 + tanh(sqrt(2 / pi) (u + 0.044715 u^3))).
    """

    def __init__(
        self, width: int, hidden: int, experts: int, dispatch: Dispatch = "auto", activation: Activation = "gelu"
    ):
        super().__init__()
        self.experts, self.dispatch = experts, dispatch
        self.approximate = "tanh" if activation == "gelu-tanh" else "none"
        self.w_in = nn.Parameter(_uniform(experts, width, hidden, fan_in=width))
        self.b_in = nn.Parameter(_uniform(experts, hidden, fan_in=width))
        self.w_out = nn.Parameter(_uniform(experts, hidden, width, fan_in=hidden))
        self.b_out = nn.Parameter(_uniform(experts, width, fan_in=hidden))
        self._cast: tuple[Any, tuple[Tensor, Tensor]] | None = None

    def train(self, mode: bool = True) -> RoutedExperts:
        """Switch between training and evaluation, and drop the weights that were cast for evaluation."""
        self._cast = None
        return super().train(mode)

    def forward(self, x: Float[Tensor, "B P K"], gate: Gate) -> Float[Tensor, "_B P K"]:
        """Run the gate's experts on x, K times for each row if the gate holds K draws."""
        if gate.draws > 1:
            return self._shared(x, gate)
        rows = x.reshape(-1, x.shape[-1])
        expert, weight = gate.expert.flatten(0, 1), gate.weight.flatten(0, 1)
        path = self._path(x)
        if path == "dense":
            out = _all_experts(rows, expert, weight, self.w_in, self.b_in, self.w_out, self.b_out, self.approximate)
            return out.view_as(x)
        run = self._grouped if path == "grouped" else self._sliced
        first = run(rows, expert[:, 0])
        if not (torch.is_grad_enabled() and weight.requires_grad):
            return first.view_as(x)  # its weight is 1
        with torch.no_grad():
            others = [run(rows, expert[:, j]) for j in range(1, expert.shape[1])]
        return _weighted(weight, first, *others).view_as(x)

    def _shared(self, x: Float[Tensor, "B P K"], gate: Gate) -> Float[Tensor, "_B P K"]:
        """Run every expert once on x, and mix their outputs for each of several draws.

        All weights of a gate may have a gradient here, those of value 0 too; the experts get that of the value alone.
        """
        rows_ENK = x.reshape(1, -1, x.shape[-1]).expand(self.experts, -1, -1)
        hidden = nnf.gelu(torch.baddbmm(self.b_in[:, None], rows_ENK, self.w_in), approximate=self.approximate)
        every_ENK = torch.baddbmm(self.b_out[:, None], hidden, self.w_out)
        every_BPEK = every_ENK.view(self.experts, *x.shape).permute(1, 2, 0, 3)
        mix = gate.weight.new_zeros(*gate.expert.shape[:2], self.experts).scatter(-1, gate.expert, gate.weight)
        mix_BPDE = mix.unflatten(0, (len(x), gate.draws)).transpose(1, 2).to(x.dtype)
        return (mix_BPDE @ every_BPEK).transpose(1, 2).flatten(0, 1)

    def _path(self, x: Tensor) -> str:
        if self.dispatch != "auto":
            return self.dispatch
        dtype = product_dtype(x)
        aligned = all(size * dtype.itemsize % 16 == 0 for size in self.w_in.shape[1:])
        if not x.is_cuda:
            return "grouped" if aligned and dtype in (torch.float32, torch.bfloat16) else "sliced"
        # Grouped products of half precision are one kernel from Hopper on; elsewhere they wait for the host.
        one_kernel = aligned and dtype == torch.bfloat16 and torch.cuda.get_device_capability(x.device)[0] >= 9
        if not torch.is_grad_enabled():
            return "grouped" if one_kernel else "sliced"
        return "grouped" if one_kernel and self.w_in.shape[1] >= LARGE else "dense"

    def _sliced(self, rows_NK: Float[Tensor, "N K"], expert: Int[Tensor, " N"]) -> Float[Tensor, "N K"]:
        """Sort rows by expert and run each expert on its slice, which may be empty. The host waits for the sizes."""
        order = self._order(expert)
        slices = rows_NK[order].split(torch.bincount(expert, minlength=self.experts).tolist())
        parts = []
        for part, w_in, b_in, w_out, b_out in zip(slices, self.w_in, self.b_in, self.w_out, self.b_out, strict=True):
            hidden = nnf.gelu(torch.addmm(b_in, part, w_in), approximate=self.approximate)
            parts.append(torch.addmm(b_out, hidden, w_out))
        return torch.empty_like(rows_NK).index_copy(0, order, torch.cat(parts).to(rows_NK.dtype))

    def _grouped(self, rows_NK: Float[Tensor, "N K"], expert: Int[Tensor, " N"]) -> Float[Tensor, "N K"]:
        """Sort rows by expert, then run one grouped product per layer; every group may be empty."""
        order = self._order(expert)
        sorted_expert = expert[order]
        # where each expert's rows end; counting them by bincount would wait for the GPU, which a CUDA graph cannot
        experts = torch.arange(self.experts, device=expert.device)
        ends = torch.searchsorted(sorted_expert, experts, right=True).to(torch.int32)
        w_in, w_out = self._weights(product_dtype(rows_NK))
        hidden = _grouped_mm(_Permute.apply(rows_NK, order), w_in, ends)
        hidden = _BiasedGelu.apply(hidden, self.b_in, sorted_expert, self.approximate)
        out = _grouped_mm(hidden, w_out, ends)
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        if not torch.is_grad_enabled():
            return _restored(out, self.b_out, expert, inverse)
        # The bias of each row's expert as a product, whose backward pass is far cheaper than that of indexing.
        bias = nnf.one_hot(sorted_expert, self.experts).to(self.b_out.dtype) @ self.b_out
        return _Permute.apply(out + bias, inverse)

    def _order(self, expert: Int[Tensor, " N"]) -> Int[Tensor, " N"]:
        """Sort rows by expert. A GPU sorts by radix, so short keys take an eighth of the time."""
        return (expert.to(torch.uint8) if self.experts <= 256 else expert).argsort(stable=True)

    def _weights(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cast both matrices; outside training once, and again after they have changed."""
        weights = self.w_in, self.w_out
        if self.training or torch.is_grad_enabled():
            return weights[0].to(dtype), weights[1].to(dtype)
        key = dtype, [(w.data_ptr(), w._version) for w in weights]
        if self._cast is None or self._cast[0] != key:
            self._cast = key, (weights[0].to(dtype), weights[1].to(dtype))
        return self._cast[1]


@compiled
def _weighted(weight: Float[Tensor, "N k"], *outs: Float[Tensor, "N K"]) -> Float[Tensor, "N K"]:
    """Return sum_j w_j out_j."""
    total = weight[:, :1] * outs[0]
    for j in range(1, len(outs)):
        total = total + weight[:, j : j + 1] * outs[j]
    return total


@compiled
def _all_experts(
    rows_NK: Float[Tensor, "N K"],
    expert: Int[Tensor, "N k"],
    weight: Float[Tensor, "N k"],
    w_in: Float[Tensor, "E K F"],
    b_in: Float[Tensor, "E F"],
    w_out: Float[Tensor, "E F K"],
    b_out: Float[Tensor, "E K"],
    approximate: str,
) -> Float[Tensor, "N K"]:
    """Return sum_e w_e (h_e W_e + b_e) = [w_1 h_1, ..., w_E h_E] [W_1; ...; W_E] + w b: gates multiply hidden layers.

    All experts run on all rows, as two matrix products; weights of 0 leave no gradient in an expert.
    """
    experts, width, hidden = w_in.shape
    mix_NE = (expert[..., None] == torch.arange(experts, device=expert.device)).to(weight.dtype)
    mix_NE = (mix_NE * weight[..., None]).sum(1)
    w_in_KEF = w_in.transpose(0, 1).reshape(width, experts * hidden)
    h_NEF = nnf.gelu(torch.addmm(b_in.flatten(), rows_NK, w_in_KEF), approximate=approximate).view(-1, experts, hidden)
    mixed = (h_NEF * mix_NE[..., None].to(h_NEF.dtype)).flatten(1)
    return mixed @ w_out.view(experts * hidden, width) + mix_NE @ b_out


def _uniform(*shape: int, fan_in: int) -> Tensor:
    """Draw the default initialisation of a linear layer, U(-1/sqrt(fan_in), 1/sqrt(fan_in)), for each expert."""
    bound = 1 / math.sqrt(fan_in)
    return torch.empty(shape).uniform_(-bound, bound)


def _grouped_mm(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    out = nnf.grouped_mm(rows.to(product_dtype(rows)), weight, offs=ends)  # autocast does not know grouped products
    if out.requires_grad:  # the backward pass refuses the zero strides of an expanded gradient
        out.register_hook(Tensor.contiguous)
    return out


@compiled_always
def _restored(out: Tensor, bias: Tensor, expert: Tensor, inverse: Tensor) -> Tensor:
    """Restore the order of sorted rows and add the bias of each row's expert, in the precision of the rows."""
    return (out[inverse] + bias[expert]).to(out.dtype)


class _BiasedGelu(torch.autograd.Function):
    """gelu(u_n + b_expert(n)) for rows u (N, F) and bias (E, F); the backward pass computes the sum again."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, bias: Tensor, expert: Tensor, approximate: str) -> Tensor:
        ctx.save_for_backward(u, bias, expert)
        ctx.approximate = approximate
        return _biased_gelu(u, bias, expert, approximate)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        u, bias, expert = ctx.saved_tensors
        du = _biased_gelu_slope(u, bias, expert, dy, ctx.approximate)
        member = expert == torch.arange(len(bias), device=expert.device)[:, None]
        return du, (member.to(du.dtype) @ du).to(bias.dtype), None, None


@compiled_always
def _biased_gelu(u: Tensor, bias: Tensor, expert: Tensor, approximate: str) -> Tensor:
    return nnf.gelu(u + bias[expert], approximate=approximate).to(u.dtype)


@compiled_always
def _biased_gelu_slope(u: Tensor, bias: Tensor, expert: Tensor, dy: Tensor, approximate: str) -> Tensor:
    z = u + bias[expert]
    return torch.ops.aten.gelu_backward(dy.to(z.dtype), z, approximate=approximate).to(u.dtype)


class _Permute(torch.autograd.Function):
    """rows[order] for a permutation: the backward is a gather too, not a scatter."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return rows[order]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (order,) = ctx.saved_tensors
        return torch.empty_like(grad).index_copy_(0, order, grad), None
