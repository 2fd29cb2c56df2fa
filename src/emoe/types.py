"""Values that the parts of the package exchange, and the letters of their shapes.

Letters: B batch, L length, V symbols (the mask included), t time in (0, 1], h training step, D routed blocks,
P positions routed in a block (L in a transformer), E experts, k experts in a gate, Z latent size, K width of features.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxtyping import Bool, Float, Int
from torch import Tensor

Tokens = Int[Tensor, "B L"]
Positions = Bool[Tensor, "B L"]
PerRow = Float[Tensor, " B"]
PerToken = Float[Tensor, "B L"]
Logits = Float[Tensor, "B L V"]
RouterLogits = Float[Tensor, "B P E"]
Latents = Float[Tensor, "B Z"] | None  # a latent vector for each row, or none
Ramps = Mapping[str, Tensor]  # values of a method's ramps at a step


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
class Needs:
    """What a method needs from a backbone; building fails with a message for each need that is not supported."""

    experts: int = 0  # experts per block; 0 = one dense MLP
    cond: int = 0  # size Z of a latent vector added to every position; 0 = none
    marks: bool = False  # a learned embedding of marked positions (the mask pattern)
    encoder: int = 0  # outputs of a recognition encoder of the same size; 0 = none
    causal: bool = False  # each position attends to itself and earlier ones only; `extend` with a cache
    time: bool = False  # logits that depend on the time t
    attend: bool = False  # `attend` and `positions` in `forward`, and `extend` with a cache; no time

    def names(self) -> frozenset[str]:
        return frozenset(name for name, value in vars(self).items() if value)


@dataclass(frozen=True)
class Gate:
    """The experts of each position and their weights. The first one is executed.

    With straight-through gradients the weights have the values (1, 0, ..., 0) and the gradients of the relaxed
    weights. The backbone drops the batch rows before `keep_from`: a paired route drops the clean half after its last
    router, since nothing reads it afterwards. With `draws` = K the gate holds K choices for each remaining row, one
    after the other; rows are repeated from this block on.
    """

    expert: Int[Tensor, "B P k"]
    weight: Float[Tensor, "B P k"]
    keep_from: int = 0
    draws: int = 1


Route = Callable[[int, RouterLogits], Gate]
"""A route policy: (block d, router logits) -> Gate. Posterior, prior and ablations are policies, not code paths."""


@dataclass(frozen=True)
class Noised:
    """The draws of lines 3-4 of Algo. 1, and their weight in the loss."""

    x0: Tokens
    xt: Tokens
    t: PerRow
    scored: Positions  # tokens whose NLL counts: all masked ones, or the set R that a step reveals
    weight: PerRow  # of that NLL: w(t), or T a_i, or T for a set R

    def repeated(self, draws: int) -> Noised:
        """Repeat every row `draws` times, one after the other."""
        if draws == 1:
            return self
        return Noised(*(rows.repeat_interleave(draws, dim=0) for rows in vars(self).values()))


class Features(NamedTuple):
    """Result of one network call: features (the input of `Backbone.read`), router logits and gates by block."""

    h: Float[Tensor, "B L K"]
    route_logits: tuple[Float[Tensor, "_B _P E"], ...] = ()
    gates: tuple[Gate, ...] = ()


@dataclass(frozen=True)
class Loss:
    """The loss of a training step and its log (0- or 1-dimensional tensors).

    `valid` is false for a step that must not be applied, for the reason given in `refusal`.
    """

    total: Float[Tensor, ""]
    log: Mapping[str, Tensor] = field(default_factory=dict)
    valid: Bool[Tensor, ""] | None = None
    refusal: str = ""


@dataclass(frozen=True)
class StepEvent:
    """A reverse step of a sampler: x after the step, the revealed positions and the drawn latent.

    The latent is a tuple of gates, a latent vector, or None without a latent. Rows that a step did not run have
    expert -1 or a vector of zeros; if it ran none, there is no latent.
    """

    step: int
    time: float
    x: Tokens
    revealed: Positions
    latent: Any


OnStep = Callable[[StepEvent], None]


class Mixture(NamedTuple):
    """p(x0 | xt) = sum_r w_r prod_l p_r(x0^l) with R components, in logarithms and float64, SUBS applied."""

    log_weight: Float[Tensor, "B R"]
    log_token: Float[Tensor, "B R L V"]


@dataclass(frozen=True)
class Likelihood:
    """The meaning of a likelihood; a value without it means nothing.

    - `objective`: E over t ~ U(0, 1] of w(t) * masked NLL + 1 * KL. **Not a bound** of the NLL for a method with a
      latent: it can fall below the entropy of the data.
    - `bound@T`: Prop. 3.1 (Eq. 6) with T * KL. An upper bound of the NLL of the T-step sampler.
    - `iw@T,K`: the same with K importance-weighted draws per step; tighter, and for K to infinity the bound of Lemma 1
      for the mixture itself: the exact NLL for T = 1, above it for T > 1.
    - `nelbo`: the continuous-time bound of Eq. 22, only without a latent.
    - `exact`: the NLL itself, by enumeration, or by the chain rule where a method predicts token after token.
    """

    kind: str
    steps: int = 0
    draws: int = 0

    @classmethod
    def parse(cls, text: str) -> Likelihood:
        """Parse `objective`, `nelbo`, `bound@4`, `iw@4,64` or `exact`."""
        match = re.fullmatch(r"(objective|nelbo|exact)|(bound)@([1-9]\d{0,5})|(iw)@([1-9]\d{0,5}),([1-9]\d{0,5})", text)
        if match is None:
            raise ValueError(f"{text!r} is no likelihood; allowed: objective, nelbo, bound@T, iw@T,K")
        plain, bound, steps, iw, iw_steps, draws = match.groups()
        return cls(plain or bound or iw, int(steps or iw_steps or 0), int(draws or 0))

    def __str__(self) -> str:
        return self.kind + {"bound": f"@{self.steps}", "iw": f"@{self.steps},{self.draws}"}.get(self.kind, "")

    @property
    def bounds(self) -> str:
        """The quantity that it bounds, in words."""
        return {
            "objective": "not a bound",
            "nelbo": "bounds the NLL of the continuous-time sampler",
            "bound": f"bounds the NLL of the {self.steps}-step sampler",
            "iw": f"bounds the NLL of the {self.steps}-step sampler, with {self.draws} draws",
            "exact": "the NLL itself",
        }[self.kind]


@dataclass(frozen=True)
class Measurement:
    """One number that a metric reports, with its standard error and sample count (None where it is exact)."""

    metric: str
    value: float
    stderr: float | None
    n: int | None
