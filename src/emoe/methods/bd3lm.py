"""BD3-LM: blocks of tokens from left to right, masked diffusion inside each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from emoe.backbones.base import BackboneConfig
from emoe.backbones.layers import dropout_from
from emoe.config import ConfigError, option
from emoe.diffusion.masking import mask_tokens, masked_nll, reveal_probability, start_rows, subs
from emoe.diffusion.samplers import ancestral
from emoe.diffusion.schedule import LinearSchedule, Schedule
from emoe.diffusion.times import stratified_times
from emoe.methods.base import Method, MethodConfig
from emoe.rng import Rng
from emoe.types import Convention, Denoised, Loss, StepEvent, TokenSpace, Wants


@dataclass(frozen=True, kw_only=True)
class BD3LMConfig(MethodConfig, kind="bd3lm"):
    """Options of BD3-LM."""

    block: int = option(16, doc="tokens in a block; must divide the length of a row", low=1)
    schedule: Schedule = option(LinearSchedule(), doc="masking schedule alpha_t inside a block")
    t_low: float = option(0.0, doc="smallest training time; bounds the 1/t weight", low=0, high=0.5)

    def wants(self) -> Wants:
        """Attention of its own, and a cache of finished blocks."""
        return Wants(attend=True, head_chunk=self.head_chunk)

    def build(self, space: TokenSpace, backbone: BackboneConfig) -> BD3LM:
        """Make the method."""
        lines = list(backbone.refusals(self.wants()))
        if space.length % self.block:
            fits = ", ".join(str(size) for size in range(1, space.length + 1) if space.length % size == 0)
            lines.append(f"method.block: must divide the length {space.length}, got {self.block}; allowed: {fits}")
        if lines:
            raise ConfigError(lines)
        return BD3LM(self, space, backbone)


def block_mask(length: int, block: int) -> Bool[Tensor, "M M"]:
    """Which position (row) of [xt ; x0], M = 2L, sees which (column).

    With b(l) = floor(l / block): xt at l sees xt of its own block and x0 of earlier blocks, b(k) < b(l); x0 at l sees
    x0 of its own and earlier blocks, b(k) <= b(l), and no xt.
    """
    number = torch.arange(length) // block
    query, key = number[:, None], number[None]
    noisy = torch.cat([key == query, key < query], 1)
    clean = torch.cat([torch.zeros(length, length, dtype=torch.bool), key <= query], 1)
    return torch.cat([noisy, clean])


class BD3LM(Method):
    """p(x) = prod over blocks b of p(x_b | x_<b), each factor a masked diffusion of the block (N = L / block of them).

    Training is one pass over [xt ; x0], with positions 0..L-1 in both halves and the attention of `block_mask`, so that
    block b is predicted from its noisy self and clean earlier blocks, for all blocks at once. Each block has a time of
    its own; the network is told none. With block = L it is MDLM; with block = 1 and one step per block it is
    autoregressive.
    """

    conventions: ClassVar[tuple[str, ...]] = ("bound@1", "bound@4", "nelbo")
    attend: Tensor
    places: Tensor

    def __init__(self, config: BD3LMConfig, space: TokenSpace, backbone: BackboneConfig):
        super().__init__()
        self.config, self.space, self.ramps = config, space, {}
        self.blocks = space.length // config.block
        self.backbone = backbone.build(space, config.wants())
        self.register_buffer("attend", block_mask(space.length, config.block), persistent=False)
        self.register_buffer("places", torch.arange(space.length).repeat(2), persistent=False)

    def logits(self, xt: Int[Tensor, "B L"], x0: Int[Tensor, "B L"]) -> Float[Tensor, "B L V"]:
        """Logits of every xt^l given its block of xt and earlier blocks of x0. One network call."""
        both, t = torch.cat([xt, x0], 1), torch.zeros(len(x0), device=x0.device)
        out = self.backbone(both, t, attend=self.attend, positions=self.places, first=self.space.length)
        logits: Tensor = out.logits
        return logits

    def block_nll(self, x0: Int[Tensor, "B L"], xt: Int[Tensor, "B L"]) -> Float[Tensor, "B N"]:
        """-sum over masked l of log p(x0^l | xt_b, x0_<b) in each block b, in nats."""
        if self.config.head_chunk:
            both, t = torch.cat([xt, x0], 1), torch.zeros(len(x0), device=x0.device)
            network: Any = self.backbone  # one that has `attend`
            h, _, _ = network.features(both, t, attend=self.attend, positions=self.places)
            masked = xt == self.space.mask_id
            total, chosen = self.read_masked(h[:, : x0.shape[1]], x0, masked)
            return torch.where(masked, total - chosen, 0.0).unflatten(1, (self.blocks, -1)).sum(-1)
        log_x_theta = subs(self.logits(xt, x0), xt, self.space.mask_id)
        size = self.config.block
        return masked_nll(log_x_theta.reshape(-1, size, self.space.size), x0.reshape(-1, size)).view(len(x0), -1)

    def times(self, rows: int, rng: Rng, low: float = 0.0) -> Float[Tensor, "B N"]:
        """A time for each block, one in each of rows * blocks equal strata."""
        count, generator = rows * self.blocks, rng.stream("time", shared=True)
        return stratified_times(count, generator, low=low, rank=rng.rank, world=rng.world).view(rows, self.blocks)

    def mask(self, x0: Int[Tensor, "B L"], t: Float[Tensor, "B N"], rng: Rng) -> Int[Tensor, "B L"]:
        """Mask each block with the alpha of its own time."""
        keep = self.config.schedule.alpha(t).flatten()
        blocks = mask_tokens(x0.reshape(len(keep), -1), keep, self.space.mask_id, rng.stream("mask"))
        return blocks.view(x0.shape)

    def forward(self, x0: Int[Tensor, "B L"], knobs: Mapping[str, Tensor], rng: Rng) -> Loss:
        """Mean over rows of sum over blocks of w(t_b) * masked NLL, divided by L."""
        t = self.times(len(x0), rng, self.config.t_low)
        xt = self.mask(x0, t, rng)
        with dropout_from(self, rng.stream("dropout")):
            nll = self.block_nll(x0, xt)
        total = (self.config.schedule.elbo_weight(t) * nll).sum(-1).mean() / self.space.length
        return Loss(total, {"loss": total})

    @torch.no_grad()
    def nll_bound(self, x0: Int[Tensor, "B L"], convention: Convention, rng: Rng) -> Float[Tensor, " B"]:
        """One draw of (t_b, xt_b) for each block of each row, summed over blocks; nats per row.

        nelbo: w(t_b) * masked NLL, t_b ~ U(0, 1], bounds the NLL in the limit of many steps per block. bound@T:
        T * a_i * masked NLL for a step i uniform in 1..T, with a_i = (alpha_{i-1} - alpha_i) / (1 - alpha_i), bounds
        the NLL of the sampler with T steps **in each block**, which makes T * L / block network calls.
        """
        schedule, steps = self.config.schedule, convention.steps
        if convention.kind not in ("nelbo", "bound"):
            raise ConfigError(
                [f"likelihood: 'bd3lm' has no {convention}; ask for nelbo or bound@T (T steps per block)"]
            )
        if steps and float(schedule.alpha(torch.ones(1))) > 0:
            raise ConfigError(
                [f"likelihood: {convention} needs all tokens masked at t = 1; schedule {schedule.kind!r} keeps some"]
            )
        t = self.times(len(x0), rng).double()
        weight = schedule.elbo_weight(t)
        if steps:
            i = (t * steps).ceil().clamp(1, steps)
            t, alpha_s = i / steps, torch.where(i == 1, 1.0, schedule.alpha((i - 1) / steps))
            weight = steps * torch.as_tensor(reveal_probability(alpha_s, schedule.alpha(t)))
        return (weight * self.block_nll(x0, self.mask(x0, t, rng)).double()).sum(-1)

    @torch.no_grad()
    def sample(
        self,
        n: int,
        steps: int,
        rng: Rng,
        *,
        given: Int[Tensor, "n L"] | None = None,
        on_step: Callable[[StepEvent], None] | None = None,
        cached: bool = True,
    ) -> Int[Tensor, "n L"]:
        """Fill blocks from left to right, each by a T-step reverse chain on the grid t_i = i / T.

        `steps` = T * L / block network calls in all. `cached` keeps the keys and values of finished blocks, which is
        exact, because they never see later ones; false runs the network of training on whole rows, with the same
        draws. Given tokens stay fixed wherever they are. A block knows those of its own and of earlier blocks; it is
        not told of those in later blocks, so only a given prefix makes it a sampler of the model's conditional,
        and inside a block as much as in any masked diffusion.
        """
        size, length, mask_id = self.config.block, self.space.length, self.space.mask_id
        if steps < 1 or steps % self.blocks:
            allowed = ", ".join(str(k * self.blocks) for k in (1, 2, 3))
            raise ConfigError(
                [
                    f"nfe: 'bd3lm' makes the same number of calls for each of its {length} / {size} = {self.blocks} "
                    f"blocks, so steps must be one of {allowed}, ...; got {steps}"
                ]
            )
        x = start_rows(given, n, self.space, next(self.parameters()).device)
        each = steps // self.blocks
        denoise: Blocks = CachedBlocks(self) if cached else PlainBlocks(self)
        for number in range(self.blocks):
            start, end = number * size, (number + 1) * size
            told = None if on_step is None else _whole(on_step, x, start, (self.blocks - number - 1) * each)
            block = ancestral(
                denoise,
                x[:, start:end],
                self.config.schedule,
                each,
                rng.fork("block", number),  # every chain moves its streams to steps T..1
                mask_id=mask_id,
                on_step=told,
            )
            denoise.finish(block)
            x = torch.cat([x[:, :start], block, x[:, end:]], 1)
        return x


# --- Reverse steps of a block, given those before it -------------------------------------------------------------


class Blocks(Protocol):
    """A `Denoise` of the current block, which is told when a block is finished."""

    def __call__(self, xt: Int[Tensor, "B S"], t: Float[Tensor, " B"], rng: Rng) -> Denoised:
        """log p(x0_b | xt_b, x_<b): one network call."""
        ...

    def finish(self, block: Int[Tensor, "B S"]) -> None:
        """Go on to the next block."""
        ...


class PlainBlocks:
    """The reference: the network of training on [x ; x], whole rows at every step."""

    def __init__(self, method: BD3LM):
        self.method = method
        self.finished: list[Tensor] = []

    def __call__(self, xt: Int[Tensor, "B S"], t: Float[Tensor, " B"], rng: Rng) -> Denoised:
        """See `Blocks`. What stands in later blocks is not seen: masks here."""
        space, (rows, size), start = self.method.space, xt.shape, len(self.finished) * xt.shape[1]
        rest = xt.new_full((rows, space.length - start - size), space.mask_id)
        x = torch.cat([*self.finished, xt, rest], 1)
        return Denoised(subs(self.method.logits(x, x)[:, start : start + size], xt, space.mask_id))

    def finish(self, block: Int[Tensor, "B S"]) -> None:
        """See `Blocks`."""
        self.finished.append(block)


class CachedBlocks:
    """The current block alone, over the cache of finished ones.

    The block that was finished last enters the cache with the first call of the next one, on [finished ; noisy]: the
    finished half sees itself and earlier blocks, the noisy half everything. It takes no call of its own.
    """

    def __init__(self, method: BD3LM):
        self.method = method
        self.cache: Any = method.backbone.new_cache()
        self.fresh: Tensor | None = None  # finished, but not in the cache yet

    def __call__(self, xt: Int[Tensor, "B S"], t: Float[Tensor, " B"], rng: Rng) -> Denoised:
        """See `Blocks`."""
        size = xt.shape[1]
        new = xt if self.fresh is None else torch.cat([self.fresh, xt], 1)
        number = torch.arange(self.cache.length + new.shape[1], device=xt.device) // size
        attend = number[-new.shape[1] :, None] >= number
        keep, self.fresh = new.shape[1] - size, None
        logits = self.method.backbone.extend(new, self.cache, attend=attend, keep=keep, last=size)
        return Denoised(subs(logits, xt, self.method.space.mask_id))

    def finish(self, block: Int[Tensor, "B S"]) -> None:
        """See `Blocks`."""
        self.fresh = block


def _whole(
    on_step: Callable[[StepEvent], None], x: Int[Tensor, "B L"], start: int, later: int
) -> Callable[[StepEvent], None]:
    """Events of a block at `start` as events of its rows; `later` is the number of steps in later blocks."""

    def told(event: StepEvent) -> None:
        rows, revealed = x.clone(), torch.zeros_like(x, dtype=torch.bool)
        end = start + event.x.shape[1]
        rows[:, start:end], revealed[:, start:end] = event.x, event.revealed
        on_step(StepEvent(later + event.step, event.time, rows, revealed, event.latent))

    return told
