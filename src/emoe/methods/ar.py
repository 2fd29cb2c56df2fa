"""AR: the autoregressive baseline, one token after the other from left to right."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as nnf

from emoe.backbones.layers import dropout_from
from emoe.config import ConfigError
from emoe.diffusion.categorical import draw_categorical
from emoe.methods.base import PLAIN, Method, MethodConfig, SamplerConfig
from emoe.rng import Rng
from emoe.types import Likelihood, Loss, Needs, OnStep, PerRow, PerToken, Ramps, StepEvent, Tokens


@dataclass(frozen=True, kw_only=True)
class ARConfig(MethodConfig, kind="ar"):
    """AR has no options of its own."""

    def conflicts(self) -> Iterator[str]:
        if self.head_share < 1:
            yield "head_share: has no effect without masks, since every position is predicted; use 1"

    def needs(self) -> Needs:
        return Needs(causal=True)

    def allowed_nfe(self, wanted: Iterable[int], length: int) -> tuple[int, ...]:
        """One call per token."""
        return (length,)


class AR(Method, config=ARConfig):
    """p(x) = prod over l of p(x^l | x^<l).

    The network reads the row shifted right by one, with the mask symbol, which no clean row holds, as the token before
    the first: (m, x^0, ..., x^{L-2}). Its output at l is p(x^l | x^<l), also for l = 0, so that the sum over all L
    tokens is the NLL of the whole row.
    """

    label, colour = "AR", "#79706e"
    backbone: Any  # a causal one, with `extend`

    def token_nll(self, x0: Tokens) -> PerToken:
        """-log p(x^l | x^<l) of every token, in nats. One network call."""
        shifted = torch.cat([torch.full_like(x0[:, :1], self.space.mask_id), x0[:, :-1]], 1)
        h = self.backbone(shifted, torch.zeros(len(x0), device=x0.device)).h
        if self.config.head_chunk:
            total, chosen = self.scores(h, x0, torch.ones_like(x0, dtype=torch.bool))
            return total - chosen
        logits = self.backbone.read(h)
        return nnf.cross_entropy(logits.flatten(0, 1), x0.flatten(), reduction="none").view(x0.shape)

    def forward(self, x0: Tokens, ramp: Ramps, rng: Rng) -> Loss:
        with dropout_from(self, rng.stream("dropout")):
            total = self.token_nll(x0).mean()
        return Loss(total, {"loss": total})

    def likelihoods(self) -> tuple[str, ...]:
        return ("exact",)

    @torch.no_grad()
    def nll(self, x0: Tokens, likelihood: Likelihood, rng: Rng) -> PerRow:
        """Return `exact`, the NLL of each row by the chain rule; nothing is drawn. There is no other likelihood."""
        if likelihood.kind != "exact":
            raise ConfigError(f"likelihood: 'ar' has no {likelihood}; ask for exact, the NLL itself")
        return self.token_nll(x0).double().sum(-1)

    @torch.no_grad()
    def sample(
        self, x: Tokens, nfe: int, rng: Rng, *, sampler: SamplerConfig = PLAIN, on_step: OnStep | None = None
    ) -> Tokens:
        """Draw token after token in float64, with a cache of keys and values; one network call per token, given or not.

        Given tokens must come first in their row: then the others are drawn from p(others | given) exactly.
        """
        length, mask_id = self.space.length, self.space.mask_id
        if nfe != length:
            raise ConfigError(f"nfe: 'ar' needs one call per token: {length}, got {nfe}")
        wanted = x == mask_id
        if (wanted[:, :-1] & ~wanted[:, 1:]).any():
            raise ConfigError(
                "given: 'ar' continues rows; given tokens must come first, since a token is drawn without knowing "
                "those to its right; for gaps take a masked diffusion method"
            )
        x, cache, token = x.clone(), self.backbone.new_cache(), torch.full_like(x[:, :1], mask_id)
        for position in range(length):
            left = length - position
            rng.at(left)
            logits = self.backbone.extend(token, cache)[:, 0]
            new = wanted[:, position]
            x[:, position] = torch.where(new, draw_categorical(logits, rng.stream("token")), x[:, position])
            token = x[:, position : position + 1]
            if on_step is not None:
                revealed = torch.zeros_like(wanted)
                revealed[:, position] = new
                on_step(StepEvent(left, left / length, x.clone(), revealed, None))
        return x
