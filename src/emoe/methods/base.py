"""The interface of methods: all that engine, evaluation and tools call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from emoe.backbones.base import Backbone, BackboneConfig
from emoe.config import Config, ConfigError, Family, option
from emoe.diffusion.head import has_room, total_and_target
from emoe.diffusion.masking import log_chosen, subs
from emoe.diffusion.schedule import Schedule
from emoe.ramps import Ramp
from emoe.rng import Rng
from emoe.types import Likelihood, Loss, Mixture, Needs, OnStep, PerRow, PerToken, Positions, Ramps, Tokens, TokenSpace

LATE = 10**9  # a step at which every ramp has reached its end


@dataclass(frozen=True, kw_only=True)
class SamplerConfig(Config):
    """The sampler of masked diffusion methods."""

    kind: Literal["plain", "reveal-first"] = option(
        "plain",
        doc="plain: logits of all positions; reveal-first: of revealed positions only, the same law with less work",
    )
    nucleus: float = option(
        1.0, doc="probability of the most likely symbols that tokens are drawn from; 1: all, the model", above=0, high=1
    )


PLAIN = SamplerConfig()


@dataclass(frozen=True, kw_only=True)
class MethodConfig(Family, package="emoe.methods", shared=("base", "masked")):
    """Options that all methods have."""

    method: ClassVar[type[Method]]  # set by `class Name(Method, config=NameConfig)`

    head_chunk: int = option(
        0, doc="positions whose logits the loss computes at a time, to save memory where V is large; 0: all", low=0
    )
    head_share: float = option(
        1.0,
        doc="with head_chunk, from 64 rows on: share of positions with room for logits in training; a step with more "
        "masked positions is refused",
        above=0,
        high=1,
    )

    def conflicts(self) -> Iterator[str]:
        if self.head_share < 1 and not self.head_chunk:
            yield "head_share: has no effect without head_chunk; use 1"

    def needs(self) -> Needs:
        """Return the features that its backbone must support."""
        return Needs()

    def variant(self) -> tuple[str, str]:
        """Return suffixes of the method's name in results and of its label, such as ("-vimco", " (VIMCO)")."""
        return "", ""

    def tiny(self) -> MethodConfig:
        """Return the same method with a latent that is small enough to enumerate."""
        return self

    def allowed_nfe(self, wanted: Iterable[int], length: int) -> tuple[int, ...]:
        """Return those of the wanted numbers of network calls that a sampler of rows of this length can make."""
        return tuple(wanted)

    def build(self, space: TokenSpace, backbone: BackboneConfig) -> Method:
        """Make the method with its networks."""
        return self.method(self, space, backbone)


class Method(nn.Module, ABC):
    """All that engine, evaluation and tools call. Nothing outside `methods/` asks which method it has.

    `class Name(Method, config=NameConfig)` registers the class that `NameConfig.build` makes. `ramps` are the numbers
    that depend on the training step; the engine passes their values to `forward` as 0-dimensional tensors.
    """

    label: ClassVar[str]  # in tables and legends
    colour: ClassVar[str]  # the same in every figure
    has_latent: ClassVar[bool] = False
    draws_components: bool = False  # whether `components` draws latents, because it cannot integrate over them
    config: Any  # a MethodConfig of its own kind
    space: TokenSpace
    backbone: Backbone
    ramps: Mapping[str, Ramp]

    def __init_subclass__(cls, *, config: type[MethodConfig] | None = None, **rest: Any) -> None:
        super().__init_subclass__(**rest)
        if config is not None:
            config.method = cls

    def __init__(
        self, config: Any, space: TokenSpace, backbone: BackboneConfig, ramps: Mapping[str, Ramp] | None = None
    ):
        super().__init__()
        self.config, self.space, self.ramps = config, space, dict(ramps or {})
        if lines := list(backbone.unsupported(config.needs())):
            raise ConfigError(lines)
        self.backbone = backbone.build(space, config.needs())

    @abstractmethod
    def forward(self, x0: Tokens, ramp: Ramps, rng: Rng) -> Loss:
        """Return the loss of a batch of clean rows, in nats per token."""

    @abstractmethod
    def nll(self, x0: Tokens, likelihood: Likelihood, rng: Rng) -> PerRow:
        """Draw a named likelihood once for each row, in nats per row.

        Its mean over draws is the quantity. A likelihood that the method does not have raises `ConfigError`.
        """

    @abstractmethod
    def sample(
        self, x: Tokens, nfe: int, rng: Rng, *, sampler: SamplerConfig = PLAIN, on_step: OnStep | None = None
    ) -> Tokens:
        """Fill the masks of x with at most `nfe` network calls per row; other tokens stay.

        Equal streams give equal rows. `on_step` is called after every reverse step.
        """

    def check_sampler(self, sampler: SamplerConfig) -> None:
        """Raise a `ConfigError` if the method cannot draw like this."""
        if sampler != PLAIN:
            raise ConfigError(f"sampler: {self.label} has a sampler of its own; use plain with nucleus 1")

    def log_probs(self, xt: Tokens, rng: Rng, *, greedy: bool = False) -> Float[Tensor, "B L V"]:
        """Return log p(x0 | xt, z) with z from the prior, or its most likely value; see `Run.log_probs`."""
        raise ConfigError(f"log_probs: {self.label} does not predict masked tokens independently")

    @abstractmethod
    def likelihoods(self) -> tuple[str, ...]:
        """Return names of the likelihoods worth printing, best known first."""

    def components(self, xt: Tokens, t: float, *, seed: int = 0) -> Mixture:
        """Return the exact law of one reverse step, p(x0 | xt), as a finite mixture.

        A continuous latent that cannot be integrated is drawn by `seed`.
        """
        raise ConfigError(f"exact: {self.label} has no exact law; ask for a bound instead")

    @property
    def chain_schedule(self) -> Schedule | None:
        """The masking schedule of a reverse chain whose steps are mixtures of factorised steps; None without one."""
        return None

    def collapse(self, record: Mapping[str, Any]) -> str | None:
        """Describe posterior collapse, with remedies, from a log record; None if there is none."""
        return None

    def final_ramp(self, device: torch.device) -> dict[str, Tensor]:
        """Return the values of the ramps after training."""
        return {name: torch.tensor(ramp(LATE, LATE), device=device) for name, ramp in self.ramps.items()}

    def scores(self, h: Float[Tensor, "B L K"], x0: Tokens, scored: Positions) -> tuple[PerToken, PerToken]:
        """Return log sum_y exp(a_y) and a_x0 of the logits a at scored positions, 0 elsewhere."""
        if self.config.head_chunk:
            weight, bias = self.backbone.head_weights()
            return total_and_target(h, weight, bias, x0, scored, self.config.head_chunk, self._room)
        logits = self.backbone.read(h)
        total, target = logits.logsumexp(-1), logits.gather(-1, x0[..., None]).squeeze(-1)
        return torch.where(scored, total, 0.0), torch.where(scored, target, 0.0)

    def log_token(self, h: Float[Tensor, "B L K"], xt: Tokens, x0: Tokens, scored: Positions) -> PerToken:
        """Return log x_theta(x0) at scored positions, which are masked in xt; 0 elsewhere."""
        if self.config.head_chunk:
            total, target = self.scores(h, x0, scored)
            return target - total
        log_x_theta = subs(self.backbone.read(h), xt, self.space.mask_id)
        return torch.where(scored, log_chosen(log_x_theta, x0), 0.0)

    def as_loss(self, total: Tensor, log: Mapping[str, Tensor], scored: Positions, draws: int = 1) -> Loss:
        """Return the loss of a step; it is not valid if the head has no room for all scored positions of all draws."""
        refusal = f"more than {self.config.head_share:g} of the positions are masked; raise method.head_share"
        return Loss(total, {"loss": total, **log}, has_room(scored, self._room, draws), refusal)

    @property
    def _room(self) -> float:
        return self.config.head_share if self.training else 1.0
