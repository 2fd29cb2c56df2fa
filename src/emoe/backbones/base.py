"""The interface of backbones, and counts of their parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as nnf

from emoe.config import Family
from emoe.diffusion.masking import NEG_INF
from emoe.kernels import compiled
from emoe.routing.experts import RoutedExperts
from emoe.types import Features, Latents, Needs, PerRow, Positions, Route, Tokens, TokenSpace


def at_least_single(x: Float[Tensor, "*N"]) -> Float[Tensor, "*N"]:
    """Return x in single or double precision."""
    return x if x.dtype == torch.float64 else x.float()


@compiled
def token_logits(scores: Float[Tensor, "*B L S"], mask_id: int) -> Float[Tensor, "*B L V"]:
    """Insert the mask's column at -inf into scores of all other symbols; in at least single precision."""
    scores = at_least_single(scores)
    mask = torch.full_like(scores[..., :1], NEG_INF)
    return torch.cat([scores[..., :mask_id], mask, scores[..., mask_id:]], dim=-1)


class Backbone(nn.Module, ABC):
    """A map of tokens to features to logits, without an objective. NFE counts its calls.

    The features of a position decide its logits, so logits can be computed for some positions only (`read`).
    """

    head: nn.Linear  # features to the logits of all V symbols, or of all but the mask
    mask_id: int
    routed_blocks: int  # D, the number of blocks that ask a route policy for experts; 0 if dense
    routes_tokens: ClassVar[bool] = True  # every routed block routes each token: P = L
    local_last_block: ClassVar[bool] = True  # a route in the last block changes nothing but its own position
    has_mask_output: ClassVar[bool] = True  # the head has an output for the mask, which is never used

    @abstractmethod
    def forward(
        self,
        x: Tokens,
        t: PerRow,
        *,
        cond: Latents = None,
        marks: Positions | None = None,
        route: Route | None = None,
    ) -> Features:
        """Return features of every position, and router logits and gates by block.

        Args:
            x: Tokens, the mask among them.
            t: Time of each row.
            cond: A latent vector for each row, if the method needs one.
            marks: Positions that get a learned embedding, if the method needs it.
            route: Route policy, called once per routed block in order.
        """

    def read(self, h: Float[Tensor, "*B K"]) -> Float[Tensor, "*B V"]:
        """Return logits of features at any positions, in at least single precision, the mask's column at -inf."""
        if not self.has_mask_output:
            return token_logits(self.head(h), self.mask_id)
        return at_least_single(nnf.linear(h, *self.head_weights()))

    def head_weights(self) -> tuple[Float[Tensor, "V K"], Float[Tensor, " V"]]:
        """Return W and b of `read`, logits = W h + b; the mask's entry of b is -inf."""
        weight, bias, mask = self.head.weight, self.head.bias, self.mask_id
        if bias is None:
            bias = weight.new_zeros(len(weight))
        if self.has_mask_output:
            return weight, bias.masked_fill(torch.arange(len(bias), device=bias.device) == mask, NEG_INF)
        weight = torch.cat([weight[:mask], weight.new_zeros(1, weight.shape[1]), weight[mask:]])
        return weight, torch.cat([bias[:mask], bias.new_full((1,), NEG_INF), bias[mask:]])

    def grouped(self, values: Float[Tensor, "*N P"], groups: int) -> Float[Tensor, "*N G"]:
        """Sum over the positions of a block that lie in one of G coarser ones."""
        return values


@dataclass(frozen=True, kw_only=True)
class BackboneConfig(Family, package="emoe.backbones", shared=("base", "layers", "attention")):
    """Sizes of a network. `supports` names the features of `Needs` that it has."""

    supports: ClassVar[frozenset[str]] = frozenset()

    def build(self, space: TokenSpace, needs: Needs) -> Backbone:
        """Make the denoiser."""
        raise NotImplementedError

    def build_encoder(self, space: TokenSpace, needs: Needs) -> nn.Module:
        """Make the recognition encoder: (x0, t, marks) -> (B, needs.encoder)."""
        raise NotImplementedError

    def unsupported(self, needs: Needs) -> Iterator[str]:
        """Yield one line for each need that this backbone does not support."""
        for name in sorted(needs.names() - self.supports):
            have = ", ".join(sorted(self.supports)) or "none"
            yield f"backbone: {self.kind!r} has no {name!r}, which the method needs; it supports: {have}"


def total_parameters(module: nn.Module) -> int:
    """Return the number of trainable parameters."""
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


def active_parameters(module: nn.Module) -> int:
    """Return the number of parameters that one position uses: of each set of experts, one."""
    routed = [part for part in module.modules() if isinstance(part, RoutedExperts)]
    idle = sum(total_parameters(part) * (part.experts - 1) // part.experts for part in routed)
    return total_parameters(module) - idle
