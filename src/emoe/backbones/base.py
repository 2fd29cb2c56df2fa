"""What a backbone is, what it may be asked for, and how its parameters are counted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from emoe.config import Family
from emoe.routing.experts import RoutedExperts
from emoe.types import BackboneOut, Gate, Route, TokenSpace, Wants


class Backbone(nn.Module, ABC):
    """A network from noisy rows to token logits; the only calls that count as function evaluations (NFE)."""

    routed_blocks: int  # D, the number of blocks that ask a route policy for experts; 0 if dense
    routes_tokens: ClassVar[bool] = True  # every routed block routes each token by itself: P = L
    reads_time: bool = True  # the logits depend on t, not on the row alone

    @property
    def counted(self) -> nn.Module:
        """The module whose every call is one function evaluation, by whichever method the network is asked.

        A backbone that can be asked otherwise than by `forward` names the part that all ways pass through.
        """
        return self

    @abstractmethod
    def forward(
        self,
        x: Int[Tensor, "B L"],
        t: Float[Tensor, " B"],
        *,
        cond: Float[Tensor, "B Z"] | None = None,
        marks: Bool[Tensor, "B L"] | None = None,
        route: Route | None = None,
    ) -> BackboneOut:
        """Token logits of every position, and what the routers said.

        Args:
            x: Tokens, the mask among them.
            t: Time of each row.
            cond: A latent vector for each row, where the method wants one.
            marks: Positions that get a learned mark, where the method wants it.
            route: Route policy, called once per routed block in order.
        """

    def features(
        self,
        x: Int[Tensor, "B L"],
        t: Float[Tensor, " B"],
        *,
        cond: Float[Tensor, "B Z"] | None = None,
        marks: Bool[Tensor, "B L"] | None = None,
        route: Route | None = None,
    ) -> tuple[Float[Tensor, "_B L K"], tuple[Float[Tensor, "_B _P E"], ...], tuple[Gate, ...]]:
        """What `read` turns into logits, position by position; router logits and gates as in `BackboneOut`.

        A backbone has the two of them only where `forward` is `read` of `features` and logits of a position need
        the features of that position alone: then logits can be had for a part of the positions, or part by part.
        """
        raise NotImplementedError(f"{type(self).__name__} does not part its features from its head")

    def read(self, h: Float[Tensor, "*B K"]) -> Float[Tensor, "*B V"]:
        """Logits of features at any positions, the mask's column at -inf."""
        raise NotImplementedError(f"{type(self).__name__} does not part its features from its head")

    def head_weights(self) -> tuple[Float[Tensor, "V K"], Float[Tensor, " V"]]:
        """W and b of `read`, logits = W h + b; the mask's entry of b is -inf."""
        raise NotImplementedError(f"{type(self).__name__} does not part its features from its head")

    @property
    def has_features(self) -> bool:
        """Whether there are `features`, `read` and `head_weights`."""
        return type(self).features is not Backbone.features

    def grouped(self, values: Float[Tensor, "*N P"], groups: int) -> Float[Tensor, "*N G"]:
        """Sums over positions that belong together, for positions of any block or tokens; P = G stays as it is.

        A backbone whose blocks route coarser and finer positions says how they lie in each other.
        """
        if values.shape[-1] != groups:
            raise ValueError(f"{type(self).__name__} cannot put {values.shape[-1]} positions into {groups} groups")
        return values

    def forward_last(
        self, x: Int[Tensor, "B L"], t: Float[Tensor, " B"], *, marks: Bool[Tensor, "B L"] | None = None, route: Route
    ) -> tuple[Float[Tensor, "E _B L V"], tuple[Float[Tensor, "_B L E"], ...]]:
        """Token logits under every expert of the last routed block, and the router logits of all blocks.

        Entry [e, :, l] is what `forward` says of position l if that block gives it expert e. A backbone has this
        method only where a route in the last block changes nothing but its own position's logits. All that comes
        before runs once, with the routes of `route`, which is asked for every block but the last.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot run every expert of its last block")

    def new_cache(self) -> Any:
        """An empty cache for `extend`."""
        raise NotImplementedError(f"{type(self).__name__} has no cache")

    def extend(
        self,
        x_new: Int[Tensor, "B N"],
        cache: Any,
        *,
        attend: Bool[Tensor, "N M"] | None = None,
        keep: int | None = None,
        last: int | None = None,
    ) -> Float[Tensor, "B _N V"]:
        """Logits of N tokens that follow those in a cache, of which the first `keep` go into the cache.

        Args:
            x_new: The tokens, the mask among them.
            cache: What `new_cache` gave.
            attend: Which new position sees which of the M = old + N; None: itself and all before, if causal.
            keep: How many of the new positions the cache takes in; None: all.
            last: How many of the new positions, from the end, are given logits; None: all.
        """
        raise NotImplementedError(f"{type(self).__name__} has no cache")


@dataclass(frozen=True, kw_only=True)
class BackboneConfig(Family, package="emoe.backbones"):
    """Sizes of a network. `supports` names the features of `Wants` it can give."""

    supports: ClassVar[frozenset[str]] = frozenset()

    def build(self, space: TokenSpace, wants: Wants) -> Backbone:
        """Make the denoiser."""
        raise NotImplementedError

    def build_encoder(self, space: TokenSpace, wants: Wants) -> nn.Module:
        """Make the recognition encoder: (x0, t, marks) -> (B, wants.encoder)."""
        raise NotImplementedError

    def refusals(self, wants: Wants) -> Iterator[str]:
        """One line for each wanted feature that this backbone lacks."""
        for name in sorted(wants.names() - self.supports):
            have = ", ".join(sorted(self.supports)) or "none"
            yield f"backbone: {self.kind!r} has no {name!r}, which the method needs; it supports: {have}"


def total_parameters(module: nn.Module) -> int:
    """Number of trainable parameters."""
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


def active_parameters(module: nn.Module) -> int:
    """Parameters that one position uses: of each set of experts, one."""
    idle = 0
    for part in module.modules():
        if isinstance(part, RoutedExperts):
            idle += sum(p.numel() for p in part.parameters()) * (part.experts - 1) // part.experts
    return total_parameters(module) - idle
