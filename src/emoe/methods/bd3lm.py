"""BD3-LM: blocks of tokens from left to right, masked diffusion inside each (Arriola et al. 2025).

Differences from the authors' program: training uses t ~ U(t_low, 1] without their clipped noise schedules, starts from
scratch instead of from an MDLM, and masks the first token like any other; sampling uses the fixed grid t_i = i / T
with T calls per block instead of first-hitting times.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from emoe.backbones.base import BackboneConfig
from emoe.backbones.layers import dropout_from
from emoe.config import ConfigError, option
from emoe.diffusion.categorical import draw_categorical
from emoe.diffusion.masking import draw_revealed, mask_tokens, subs
from emoe.diffusion.schedule import LinearSchedule, Schedule
from emoe.diffusion.times import grid, stratified_times, weighted_times
from emoe.methods.base import PLAIN, Method, MethodConfig, SamplerConfig
from emoe.rng import Rng
from emoe.types import Likelihood, Loss, Needs, OnStep, PerRow, Ramps, StepEvent, Tokens, TokenSpace


@dataclass(frozen=True, kw_only=True)
class BD3LMConfig(MethodConfig, kind="bd3lm"):
    """Options of BD3-LM."""

    block: int = option(16, doc="tokens in a block; must divide the length of a row", low=1)
    schedule: Schedule = option(LinearSchedule(), doc="masking schedule alpha_t inside a block")
    t_low: float = option(0.0, doc="smallest training time; bounds the 1/t weight", low=0, high=0.5)

    def needs(self) -> Needs:
        return Needs(attend=True)

    def allowed_nfe(self, wanted: Iterable[int], length: int) -> tuple[int, ...]:
        """The same number of calls for every block."""
        return tuple(nfe for nfe in wanted if nfe % (length // self.block) == 0)


def block_mask(length: int, block: int) -> Bool[Tensor, "M M"]:
    """Return which position (row) of [xt ; x0], M = 2L, attends to which (column).

    With b(l) = floor(l / block): xt at l attends to xt of its own block and x0 of earlier blocks, b(k) < b(l); x0 at l
    to x0 of its own and earlier blocks, b(k) <= b(l), and to no xt.
    """
    number = torch.arange(length) // block
    query, key = number[:, None], number[None]
    noisy = torch.cat([key == query, key < query], 1)
    clean = torch.cat([torch.zeros(length, length, dtype=torch.bool), key <= query], 1)
    return torch.cat([noisy, clean])


class BD3LM(Method, config=BD3LMConfig):
    """p(x) = prod over blocks b of p(x_b | x_<b), each factor a masked diffusion of the block (N = L / block of them).

    Training is one pass over [xt ; x0] with the attention of `block_mask`: block b is predicted from its noisy self and
    clean earlier blocks, for all blocks at once. Each block has a time of its own, which the network does not see. With
    block = L it is MDLM; with block = 1 and one step per block it is autoregressive.
    """

    label, colour = "BD3-LM", "#9c755f"
    attend: Tensor
    positions: Tensor
    backbone: Any  # one that has `attend` and `extend`

    def __init__(self, config: BD3LMConfig, space: TokenSpace, backbone: BackboneConfig):
        if space.length % config.block:
            fits = ", ".join(str(size) for size in range(1, space.length + 1) if space.length % size == 0)
            raise ConfigError(
                f"method.block: must divide the length {space.length}, got {config.block}; allowed: {fits}"
            )
        super().__init__(config, space, backbone)
        self.blocks = space.length // config.block
        self.register_buffer("attend", block_mask(space.length, config.block), persistent=False)
        self.register_buffer("positions", torch.arange(space.length).repeat(2), persistent=False)

    def block_nll(self, x0: Tokens, xt: Tokens) -> Float[Tensor, "B N"]:
        """-sum over masked l of log p(x0^l | xt_b, x0_<b) in each block b, in nats. One network call."""
        both, t = torch.cat([xt, x0], 1), torch.zeros(len(x0), device=x0.device)
        h = self.backbone(both, t, attend=self.attend, positions=self.positions).h[:, : self.space.length]
        return -self.log_token(h, xt, x0, xt == self.space.mask_id).unflatten(1, (self.blocks, -1)).sum(-1)

    def times(self, rows: int, rng: Rng, low: float = 0.0) -> Float[Tensor, "B N"]:
        """Draw a time for each block, one in each of rows * blocks equal strata."""
        return stratified_times(rows * self.blocks, rng, low).view(rows, self.blocks)

    def mask(self, x0: Tokens, t: Float[Tensor, "B N"], rng: Rng) -> Tokens:
        """Mask each block with the alpha of its own time."""
        keep = self.config.schedule.alpha(t).flatten()
        blocks = mask_tokens(x0.reshape(len(keep), -1), keep, self.space.mask_id, rng.stream("mask"))
        return blocks.view(x0.shape)

    def forward(self, x0: Tokens, ramp: Ramps, rng: Rng) -> Loss:
        """Mean over rows of sum over blocks of w(t_b) * masked NLL, divided by L."""
        t = self.times(len(x0), rng, self.config.t_low)
        xt = self.mask(x0, t, rng)
        with dropout_from(self, rng.stream("dropout")):
            nll = self.block_nll(x0, xt)
        total = (self.config.schedule.elbo_weight(t) * nll).sum(-1).mean() / self.space.length
        return self.as_loss(total, {}, xt == self.space.mask_id)

    def likelihoods(self) -> tuple[str, ...]:
        return "bound@1", "bound@4", "nelbo"

    @torch.no_grad()
    def nll(self, x0: Tokens, likelihood: Likelihood, rng: Rng) -> PerRow:
        """Draw (t_b, xt_b) once for each block of each row, and sum over blocks; nats per row.

        nelbo: w(t_b) * masked NLL, t_b ~ U(0, 1], bounds the NLL in the limit of many steps per block. bound@T:
        T * a_i * masked NLL (see `weighted_times`) bounds the NLL of the sampler with T steps **in each block**.
        """
        if likelihood.kind not in ("nelbo", "bound"):
            raise ConfigError(f"likelihood: 'bd3lm' has no {likelihood}; ask for nelbo or bound@T (T steps per block)")
        t, weight = weighted_times(self.config.schedule, self.times(len(x0), rng).double(), likelihood.steps)
        return (weight * self.block_nll(x0, self.mask(x0, t, rng)).double()).sum(-1)

    @torch.no_grad()
    def sample(
        self, x: Tokens, nfe: int, rng: Rng, *, sampler: SamplerConfig = PLAIN, on_step: OnStep | None = None
    ) -> Tokens:
        """Fill blocks from left to right, each by a T-step reverse chain; `nfe` = T * L / block network calls in all.

        Keys and values of finished blocks are cached, which is exact, because they never attend to later ones. For the
        same reason a block ignores tokens that are given in later blocks.
        """
        size, mask_id = self.config.block, self.space.mask_id
        if nfe < 1 or nfe % self.blocks:
            allowed = ", ".join(str(k * self.blocks) for k in (1, 2, 3))
            raise ConfigError(
                f"nfe: 'bd3lm' makes the same number of calls for each of its {self.space.length} / {size} = "
                f"{self.blocks} blocks, so it must be one of {allowed}, ...; got {nfe}"
            )
        x, cache = x.clone(), self.backbone.new_cache()
        for number in range(self.blocks):
            chain = rng.fork("block", number)  # every chain moves its streams to steps T..1
            block = slice(number * size, (number + 1) * size)
            for step in grid(self.config.schedule, nfe // self.blocks):
                chain.at(step.number)
                old = x[:, block]
                log_x_theta = subs(self._read_block(x, block, cache), old, mask_id)
                reveal = draw_revealed(old, step.reveal, mask_id, chain.stream("reveal"))
                x[:, block] = torch.where(reveal, draw_categorical(log_x_theta, chain.stream("token")), old)
                if on_step is not None:
                    revealed = torch.zeros_like(x, dtype=torch.bool)
                    revealed[:, block] = reveal
                    left = (self.blocks - number - 1) * (nfe // self.blocks) + step.number
                    on_step(StepEvent(left, step.time, x.clone(), revealed, None))
        return x

    def _read_block(self, x: Tokens, block: slice, cache: Any) -> Float[Tensor, "B S V"]:
        """Return logits of a block given those before it. One network call.

        The block before it enters the cache with its first call, on [finished ; noisy]: the finished half attends to
        itself and earlier blocks, the noisy half to everything.
        """
        start = cache.length  # all blocks but the last finished one are in the cache
        number = torch.arange(block.stop, device=x.device) // self.config.block
        attend = number[start:, None] >= number
        return self.backbone.extend(x[:, start : block.stop], cache, attend=attend, keep=block.start - start)
