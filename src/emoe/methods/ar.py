"""AR: the autoregressive baseline, one token after the other from left to right."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as nnf

from emoe.backbones.base import BackboneConfig
from emoe.backbones.layers import dropout_from
from emoe.config import ConfigError
from emoe.diffusion.categorical import draw_categorical
from emoe.diffusion.chunks import total_and_target
from emoe.diffusion.masking import start_rows
from emoe.methods.base import Method, MethodConfig
from emoe.rng import Rng
from emoe.types import Convention, Loss, StepEvent, TokenSpace, Wants


@dataclass(frozen=True, kw_only=True)
class ARConfig(MethodConfig, kind="ar"):
    """AR has no options of its own."""

    def conflicts(self) -> Iterator[str]:
        """What cannot go together."""
        if self.head_share < 1:
            yield "head_share: has no meaning without masks, since every position is predicted; use 1"

    def wants(self) -> Wants:
        """A causal network with a cache."""
        return Wants(causal=True, head_chunk=self.head_chunk)

    def build(self, space: TokenSpace, backbone: BackboneConfig) -> AR:
        """Make the method."""
        if lines := list(backbone.refusals(self.wants())):
            raise ConfigError(lines)
        return AR(self, space, backbone)


class AR(Method):
    """p(x) = prod over l of p(x^l | x^<l).

    The network reads the row shifted right by one, with the mask symbol, which no clean row holds, as the token before
    the first: (m, x^0, ..., x^{L-2}). Its output at l is p(x^l | x^<l), also for l = 0, so that the sum over all L
    tokens is the NLL of the whole row.
    """

    conventions: ClassVar[tuple[str, ...]] = ("exact",)

    def __init__(self, config: ARConfig, space: TokenSpace, backbone: BackboneConfig):
        super().__init__()
        self.config, self.space, self.ramps = config, space, {}
        self.backbone = backbone.build(space, config.wants())

    def token_nll(self, x0: Int[Tensor, "B L"]) -> Float[Tensor, "B L"]:
        """-log p(x^l | x^<l) of every token, in nats. One network call."""
        shifted = torch.cat([torch.full_like(x0[:, :1], self.space.mask_id), x0[:, :-1]], 1)
        t = torch.zeros(len(x0), device=x0.device)
        if self.config.head_chunk:
            h, _, _ = self.backbone.features(shifted, t)
            total, chosen = total_and_target(h, *self.backbone.head_weights(), x0, self.config.head_chunk)
            return total - chosen
        logits = self.backbone(shifted, t).logits
        return nnf.cross_entropy(logits.flatten(0, 1), x0.flatten(), reduction="none").view(x0.shape)

    def forward(self, x0: Int[Tensor, "B L"], knobs: Mapping[str, Tensor], rng: Rng) -> Loss:
        """Mean NLL in nats per token."""
        with dropout_from(self, rng.stream("dropout")):
            total = self.token_nll(x0).mean()
        return Loss(total, {"loss": total})

    @torch.no_grad()
    def nll_bound(self, x0: Int[Tensor, "B L"], convention: Convention, rng: Rng) -> Float[Tensor, " B"]:
        """`exact`, the NLL of each row by the chain rule; nothing is drawn. There is no other convention."""
        if convention.kind != "exact":
            raise ConfigError([f"likelihood: 'ar' has no {convention}; it knows the NLL itself, ask for exact"])
        return self.token_nll(x0).double().sum(-1)

    @torch.no_grad()
    def sample(
        self,
        n: int,
        steps: int,
        rng: Rng,
        *,
        given: Int[Tensor, "n L"] | None = None,
        on_step: Callable[[StepEvent], None] | None = None,
    ) -> Int[Tensor, "n L"]:
        """Draw token after token in float64, with a cache of keys and values; one network call per token, given or not.

        Given tokens must come first in their row, each row with as many as it likes: then the rest is drawn from
        p(rest | given) exactly. Tokens to the right of a mask cannot be given: p(x^l | x^<l) does not know of them.
        """
        length, mask_id = self.space.length, self.space.mask_id
        if steps != length:
            raise ConfigError([f"nfe: 'ar' needs one call per token: steps = {length}, got {steps}"])
        x = start_rows(given, n, self.space, next(self.parameters()).device)
        wanted = x == mask_id
        if (wanted[:, :-1] & ~wanted[:, 1:]).any():
            raise ConfigError(
                [
                    "given: 'ar' continues rows; given tokens must come first, since a token is drawn without knowing "
                    "those to its right; for gaps take a masked diffusion method"
                ]
            )
        cache, token = self.backbone.new_cache(), torch.full_like(x[:, :1], mask_id)
        for place in range(length):
            left = length - place
            rng.at(left)
            logits = self.backbone.extend(token, cache)[:, 0]
            new = wanted[:, place]
            x[:, place] = torch.where(new, draw_categorical(logits, rng.stream("token")), x[:, place])
            token = x[:, place : place + 1]
            if on_step is not None:
                revealed = torch.zeros_like(wanted)
                revealed[:, place] = new
                on_step(StepEvent(left, left / length, x.clone(), revealed, None))
        return x
