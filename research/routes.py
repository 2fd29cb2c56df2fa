"""E-MoE along all routes, instead of drawn ones: exact terms of its objective, for the other files of this folder.

python research/two_bits.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from emoe.methods.emoe import EMoE
from emoe.routing.routes import each_expert
from emoe.types import Gate


class Routes(NamedTuple):
    """All N routes z of B rows (x0, xt) that training draws, in float64 and differentiable.

    N = E^(L D), or E^(L (D - 1)) where training sums the last block out.
    """

    log_q: Float[Tensor, "B N"]  # log q(z | x0, xt)
    log_p: Float[Tensor, "B N"]  # log p(z | xt)
    log_x: Float[Tensor, "B N"]  # log p(x0 | xt, z) of the masked tokens

    def terms(self) -> tuple[Float[Tensor, " B"], Float[Tensor, " B"]]:
        """E over z ~ q of the masked NLL, and KL(q || p)."""
        q = self.log_q.exp()
        return -(q * self.log_x).sum(-1), (q * (self.log_q - self.log_p)).sum(-1)

    def joint(self, weight: Float[Tensor, " B"]) -> Float[Tensor, "B N"]:
        """log p(z) + f, f = weight * log p(x0 | xt, z)."""
        return self.log_p + weight[:, None] * self.log_x

    def evidence(self, weight: Float[Tensor, " B"]) -> Float[Tensor, " B"]:
        """-log sum_z p(z) exp(f); -log p(x0 | xt) with weight 1."""
        return -self.joint(weight).logsumexp(-1)

    def score(self, weight: Float[Tensor, " B"]) -> Float[Tensor, " B"]:
        """E over z ~ p(z) exp(f) / sum, without its gradient, of log q(z): the posterior's part of wake-sleep."""
        return (self.joint(weight).softmax(-1).detach() * self.log_q).sum(-1)


def enumerate_routes(method: EMoE, x0: Int[Tensor, "B L"], xt: Int[Tensor, "B L"], t: Float[Tensor, " B"]) -> Routes:
    """Run both passes along every route; `free_nats` and `compare.in_turn` are ignored."""
    (batch, length), blocks, experts = x0.shape, method.backbone.routed_blocks - 1, method.config.experts
    count = experts ** (length * blocks)  # routes of all blocks but the last
    z = digits(experts, length * blocks).view(count, blocks, length, 1).repeat(2 * batch, 1, 1, 1)

    def forced(block: int, logits: Float[Tensor, "N L E"]) -> Gate:
        return Gate(z[:, block], torch.ones_like(z[:, block], dtype=logits.dtype))

    rows = torch.cat([x0, xt]).repeat_interleave(count, 0)  # [x0; xt], each row with every route
    out = method.backbone(rows, torch.cat([t, t]).repeat_interleave(count), route=each_expert(forced, blocks))
    logits = method.backbone.read(out.h).unflatten(0, (len(rows), experts))[batch * count :]
    *others, last = [torch.log_softmax(both.double(), -1) for both in out.route_logits]
    chosen = sum(both.gather(-1, z[:, block]).sum((-2, -1)) for block, both in enumerate(others))
    masked = (xt == method.space.mask_id).repeat_interleave(count, 0)
    wanted = x0.repeat_interleave(count, 0)[:, None, :, None].expand(-1, experts, -1, 1)
    token = torch.log_softmax(logits.double(), -1).gather(-1, wanted).squeeze(-1) * masked[:, None]
    token = token.transpose(1, 2)  # of position l with expert e in the last block
    log_q, log_p = chosen.chunk(2)
    last_q, last_p = last.chunk(2)
    if method.config.compare is not None and method.config.compare.sum_last:
        log_x = (last_p + token).logsumexp(-1).sum(-1)
    else:  # given the other blocks, routes of the last one are independent over positions
        each = digits(experts, length)
        last_q, last_p, log_x = (part[:, torch.arange(length), each].sum(-1) for part in (last_q, last_p, token))
        log_q, log_p = log_q[:, None] + last_q, log_p[:, None] + last_p
    return Routes(*(part.reshape(batch, -1) for part in (log_q, log_p, log_x)))


def digits(base: int, length: int) -> Int[Tensor, "N length"]:
    """Return all rows of `length` numbers below `base`."""
    return torch.arange(base**length)[:, None] // base ** torch.arange(length) % base


def flat_gradient(value: Float[Tensor, ""], parameters: Sequence[Tensor]) -> Float[Tensor, " N"]:
    """Return the gradient of all parameters as one vector in float64, zero where there is none."""
    gradients = torch.autograd.grad(value, parameters, materialize_grads=True)
    return torch.cat([gradient.flatten() for gradient in gradients]).double()
