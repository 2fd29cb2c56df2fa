"""The values that travel between the parts, and the letters their shapes are written in.

Letters: B batch, L length, V symbols (the mask included), t time in (0, 1], h training step, D routed blocks,
P positions routed in a block (L in a transformer), E experts, k experts that take part in a gate, Z latent size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True)
class TokenSpace:
    """Rows of `length` integers in 0..size-1, of which `mask_id` is the mask m."""

    size: int
    mask_id: int
    length: int

    def __post_init__(self) -> None:
        if not 0 <= self.mask_id < self.size or self.length < 1:
            raise ValueError(f"not a token space: {self}")


@dataclass(frozen=True)
class Wants:
    """What a method asks of a backbone; a name that the backbone does not support is refused when it is built."""

    experts: int = 0  # experts per block; 0 = one dense MLP
    cond: int = 0  # size Z of a latent vector added to every position; 0 = none
    marks: bool = False  # a learned embedding of marked positions (the mask pattern)
    encoder: int = 0  # outputs of a recognition encoder of the same size; 0 = none
    causal: bool = False  # each position sees itself and earlier ones alone; `extend` with a cache
    time: bool = False  # logits that depend on the time t
    head_chunk: int = 0  # positions whose logits are made at a time, by `features` and `head_weights`; 0 = all
    attend: bool = False  # `attend`, `positions` and `first` in `forward`, and `extend` with a cache; no time

    def names(self) -> frozenset[str]:
        """Names of the features in use."""
        return frozenset(name for name, value in vars(self).items() if value)


@dataclass(frozen=True)
class Gate:
    """Which experts a position runs and with which weights. The first one is executed.

    With straight-through gradients the weights have the values (1, 0, ..., 0) and the gradients of the relaxed
    weights. `keep_from` tells the backbone to drop the batch rows before it: a paired route drops the clean half
    once its last router has spoken, since nothing downstream reads it. `draws` = K says that the gate holds K choices
    for each row that the router read and `keep_from` keeps, one after the other; rows are repeated from here on.
    `mixed` says that the weights are meant as they are: all experts with a weight run, and what they give is added up.
    """

    expert: Int[Tensor, "B P k"]
    weight: Float[Tensor, "B P k"]
    keep_from: int = 0
    draws: int = 1
    mixed: bool = False


Route = Callable[[int, Float[Tensor, "B P E"]], Gate]
"""A route policy: (block d, router logits) -> Gate. Posterior, prior and ablations are policies, not code paths."""


@dataclass(frozen=True)
class BackboneOut:
    """Token logits (the mask column at -inf) and, block by block, the router logits and gates."""

    logits: Float[Tensor, "B L V"]
    route_logits: tuple[Float[Tensor, "_B _P E"], ...] = ()
    gates: tuple[Gate, ...] = ()


@dataclass(frozen=True)
class Inference:
    """Result of the posterior pass (Algo. 1, lines 5-8)."""

    log_x_theta: Float[Tensor, "B L V"] | None  # log p(x0 | xt, z), SUBS applied; None if `log_token` is all there is
    kl: Float[Tensor, " B"]  # KL(q(z | x0, xt) || p(z | xt)), nats per sequence, whatever training makes of it
    aux: Float[Tensor, ""] | None = None  # auxiliary loss already weighted (load balance), outside any bound
    log: Mapping[str, Tensor] = field(default_factory=dict)
    train_kl: Float[Tensor, " B"] | None = None  # what the training loss counts in its place
    log_token: Float[Tensor, "B L"] | None = None  # log p(x0^l | xt, z), 0 where xt is clean; None: see log_x_theta


@dataclass(frozen=True)
class Objective:
    """What the training loss of a batch is made of, row by row, in nats per sequence."""

    loss: Float[Tensor, " B"]  # what is minimised; its value may mean nothing where only its gradient counts
    recon: Float[Tensor, " B"]  # w(t) * masked NLL
    kl: Float[Tensor, " B"]
    aux: Float[Tensor, ""] | None = None
    log: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Weighed:
    """One draw z ~ q(z | x0, xt) with its importance weight."""

    log_x_theta: Float[Tensor, "B L V"] | None  # log p(x0 | xt, z), SUBS applied; None if `log_token` is all there is
    log_ratio: Float[Tensor, " B"]  # log p(z | xt) - log q(z | x0, xt)
    log_token: Float[Tensor, "B L"] | None = None  # log p(x0^l | xt, z), 0 where xt is clean; None: see log_x_theta


@dataclass(frozen=True)
class Denoised:
    """Result of the prior pass (Algo. 2, lines 3-4): one network call."""

    log_x_theta: Float[Tensor, "B L V"]
    latent: Any = None  # gates, z or None; for traces and pictures


@dataclass(frozen=True)
class Loss:
    """What a training step minimises, and what it logs (0- or 1-dimensional tensors)."""

    total: Float[Tensor, ""]
    log: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class StepEvent:
    """What a sampler shows of a reverse step: x after it, the positions it revealed and the latent it drew.

    Samplers that leave rows out of their calls show no latent.
    """

    step: int
    time: float
    x: Int[Tensor, "B L"]
    revealed: Bool[Tensor, "B L"]
    latent: Any


@dataclass(frozen=True)
class Convention:
    """Which number a likelihood is; a value without its convention means nothing.

    - `objective`: E over t ~ U(0, 1] of w(t) * masked NLL + 1 * KL. What papers report. **Not a bound** of the NLL for
      a method with a latent: it can fall below the entropy of the data.
    - `bound@T`: Prop. 3.1 (Eq. 6) with T * KL. An upper bound of the NLL of the T-step sampler.
    - `iw@T,K`: the same with K importance-weighted draws per step; tighter, and for K to infinity the bound of Lemma 1
      for the mixture itself: the exact NLL for T = 1, above it for T > 1.
    - `nelbo`: the continuous-time bound of Eq. 22, only where there is no latent.
    - `exact`: the NLL itself, by enumeration, or by the chain rule where a method predicts token after token.
    """

    kind: str
    steps: int = 0
    draws: int = 0

    @classmethod
    def parse(cls, text: str) -> Convention:
        """`objective`, `nelbo`, `bound@4` or `iw@4,64`."""
        found = re.fullmatch(r"(objective|nelbo|exact)|(bound)@([1-9]\d{0,5})|(iw)@([1-9]\d{0,5}),([1-9]\d{0,5})", text)
        if found is None:
            raise ValueError(f"{text!r} is no likelihood; allowed: objective, nelbo, bound@T, iw@T,K")
        plain, bound, steps, iw, iw_steps, draws = found.groups()
        return cls(plain or bound or iw, int(steps or iw_steps or 0), int(draws or 0))

    def __str__(self) -> str:
        if self.kind == "iw":
            return f"iw@{self.steps},{self.draws}"
        return f"bound@{self.steps}" if self.kind == "bound" else self.kind

    @property
    def bounds(self) -> str:
        """What the number bounds, in words."""
        return {
            "objective": "not a bound",
            "nelbo": "bounds the NLL of the continuous-time sampler",
            "bound": f"bounds the NLL of the {self.steps}-step sampler",
            "iw": f"bounds the NLL of the {self.steps}-step sampler, with {self.draws} draws",
            "exact": "the NLL itself",
        }[self.kind]


@dataclass(frozen=True)
class Measurement:
    """One number a metric reports, with its standard error and sample count (None where it is exact)."""

    metric: str
    value: float
    stderr: float | None
    n: int | None
