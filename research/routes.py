"""E-MoE along all routes, instead of drawn ones: exact terms of its objective, for the other files of this folder.

python research/two_bits.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from emoe.methods.emoe import EMoE
from emoe.routing.routes import each_expert
from emoe.types import Gate


@dataclass(frozen=True)
class Routes:
    """The latent of B rows (x0, xt): R = E^(L (D - 1)) routes z_<D of all blocks but the last, and the last after each.

    Given the others, routes of the last block are independent over positions. All is differentiable, in float64.
    """

    log_q: Float[Tensor, "B R"]  # log q(z_<D | x0, xt)
    log_p: Float[Tensor, "B R"]  # log p(z_<D | xt)
    kl: Float[Tensor, "B R"]  # route KL along z (Eq. 8) of all blocks that are drawn
    last_q: Float[Tensor, "B R L E"]  # log q(z_D^l = e | z_<D, x0, xt)
    last_p: Float[Tensor, "B R L E"]
    token: Float[Tensor, "B R L E"]  # log p(x0^l | xt, z_<D, z_D^l = e) where l is masked, else 0
    summed: bool  # whether training sums the last block out instead of drawing it

    def terms(self) -> tuple[Float[Tensor, " B"], Float[Tensor, " B"]]:
        """E over z ~ q of the masked NLL, and KL(q || p)."""
        nll = -self.log_x() if self.summed else -(self.last_q.exp() * self.token).sum((-2, -1))
        share = self.log_q.exp()
        return (share * nll).sum(-1), (share * self.kl).sum(-1)

    def evidence(self, weight: Float[Tensor, " B"], beta: Float[Tensor, " B"]) -> Float[Tensor, " B"]:
        """-beta log sum_z p(z) exp(f / beta), f = weight * log p(x0 | xt, z); -log p(x0 | xt) if both are 1."""
        return -beta * self._joint(weight / beta)[0].logsumexp(-1)

    def score(self, weight: Float[Tensor, " B"], beta: Float[Tensor, " B"]) -> Float[Tensor, " B"]:
        """E over z ~ p(z) exp(f / beta) / sum, held fixed, of log q(z): the posterior's share of wake-sleep."""
        joint, last = self._joint(weight / beta)
        log_q = self.log_q
        if last is not None:
            log_q = log_q + (last.softmax(-1).detach() * self.last_q).sum((-2, -1))
        return (joint.softmax(-1).detach() * log_q).sum(-1)

    def tables(self) -> tuple[Float[Tensor, "B N"], Float[Tensor, "B N"], Float[Tensor, "B N"]]:
        """log q(z), log p(z) and log p(x0 | xt, z) of all routes that are drawn, N = R, or R * E^L with the last."""
        if self.summed:
            return self.log_q, self.log_p, self.log_x()
        length, experts = self.token.shape[2:]
        each, position = digits(experts, length), torch.arange(length)
        q, p, x = (one[:, :, position, each].sum(-1) for one in (self.last_q, self.last_p, self.token))
        return (self.log_q[..., None] + q).flatten(1), (self.log_p[..., None] + p).flatten(1), x.flatten(1)

    def log_x(self) -> Float[Tensor, "B R"]:
        """log p(x0 | xt, z_<D) with the last block summed out."""
        return (self.last_p + self.token).logsumexp(-1).sum(-1)

    def _joint(self, scale: Float[Tensor, " B"]) -> tuple[Float[Tensor, "B R"], Float[Tensor, "B R L E"] | None]:
        """log p(z_<D) + scale * log p(x0 | xt, z), summed over a drawn last block; and that block's terms."""
        if self.summed:
            return self.log_p + scale[:, None] * self.log_x(), None
        last = self.last_p + scale[:, None, None, None] * self.token
        return self.log_p + last.logsumexp(-1).sum(-1), last


def enumerate_routes(method: EMoE, x0: Int[Tensor, "B L"], xt: Int[Tensor, "B L"], t: Float[Tensor, " B"]) -> Routes:
    """Run both passes along every route; `free_nats` and `compare.in_turn` do not count."""
    (batch, length), blocks, experts = x0.shape, method.backbone.routed_blocks - 1, method.config.experts
    count = experts ** (length * blocks)
    summed = method.config.compare is not None and method.config.compare.sum_last
    z = digits(experts, length * blocks).view(count, blocks, length, 1).repeat(2 * batch, 1, 1, 1)

    def forced(block: int, logits: Float[Tensor, "N L E"]) -> Gate:
        return Gate(z[:, block], torch.ones_like(z[:, block], dtype=logits.dtype))

    rows = torch.cat([x0, xt]).repeat_interleave(count, 0)  # [x0; xt], each row with every route
    out = method.backbone(rows, torch.cat([t, t]).repeat_interleave(count), route=each_expert(forced, blocks))
    logits = method.backbone.read(out.h).unflatten(0, (len(rows), experts))[batch * count :]
    masked = (xt == method.space.mask_id).repeat_interleave(count, 0)
    log_q, log_p, kl = (torch.zeros(batch * count, dtype=torch.float64) for _ in range(3))
    for block, both in enumerate(out.route_logits):
        q, p = torch.log_softmax(both.double(), -1).chunk(2)
        if block < blocks or not summed:
            kl = kl + (q.exp() * (q - p)).sum((-2, -1))
        if block < blocks:
            chosen = (one.gather(-1, z[: batch * count, block]).sum((-2, -1)) for one in (q, p))
            log_q, log_p = (total + more for total, more in zip((log_q, log_p), chosen, strict=True))
    wanted = x0.repeat_interleave(count, 0)[:, None, :, None].expand(-1, experts, -1, 1)
    token = torch.log_softmax(logits.double(), -1).gather(-1, wanted).squeeze(-1) * masked[:, None]
    return Routes(
        *(one.view(batch, count) for one in (log_q, log_p, kl)),
        *(one.unflatten(0, (batch, count)) for one in (q, p, token.transpose(1, 2))), summed,
    )  # fmt: skip


def digits(base: int, length: int) -> Int[Tensor, "N length"]:
    """All rows of `length` numbers below `base`."""
    return torch.arange(base**length)[:, None] // base ** torch.arange(length) % base


def flat_gradient(value: Float[Tensor, ""], parameters: Sequence[Tensor]) -> Float[Tensor, " N"]:
    """Gradient of all parameters as one vector in float64, zero where there is none."""
    gradients = torch.autograd.grad(value, parameters, allow_unused=True)
    each = [torch.zeros_like(p) if g is None else g for g, p in zip(gradients, parameters, strict=True)]
    return torch.cat([one.flatten() for one in each]).double()
