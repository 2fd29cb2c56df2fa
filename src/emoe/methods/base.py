"""What a method is, and Algo. 1-2 for any mixture of factorised reverse steps."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from emoe.backbones.base import Backbone, BackboneConfig
from emoe.backbones.layers import dropout_from
from emoe.config import Config, ConfigError, Family, option
from emoe.diffusion.chunks import masked_total_and_target
from emoe.diffusion.masking import log_chosen, mask_tokens, reveal_probability, start_rows, subs
from emoe.diffusion.samplers import ancestral, cached, reveal_first
from emoe.diffusion.schedule import LinearSchedule, Schedule
from emoe.diffusion.times import few_step_counts, step_counts, stratified_times
from emoe.kernels import compiled
from emoe.ramps import Constant, Ramp
from emoe.rng import Rng
from emoe.types import (
    Convention,
    Denoised,
    Inference,
    Loss,
    Objective,
    StepEvent,
    TokenSpace,
    Wants,
    Weighed,
)

Out = TypeVar("Out")
NEVER = Constant(value=0.0)


@dataclass(frozen=True, kw_only=True)
class MethodConfig(Family, package="emoe.methods"):
    """Options of a method; those that all of them have."""

    head_chunk: int = option(
        0, doc="positions whose logits the loss makes at a time, to save memory where V is large; 0: all", low=0
    )
    head_share: float = option(
        1.0,
        doc="with head_chunk, from 64 rows on: share of positions that logits are made for in training, masked ones, "
        "which must not be more (such a step is refused)",
        above=0,
        high=1,
    )

    def conflicts(self) -> Iterator[str]:
        """What cannot go together."""
        if self.head_share < 1 and not self.head_chunk:
            yield "head_share: has no meaning without head_chunk; use 1"

    def wants(self) -> Wants:
        """What it needs of a backbone."""
        return Wants(head_chunk=self.head_chunk)

    def build(self, space: TokenSpace, backbone: BackboneConfig) -> Method:
        """Make the method with its networks."""
        raise NotImplementedError


class Method(nn.Module, ABC):
    """All that engine, evaluation and tools ever call.

    `ramps` are the numbers that depend on the training step; the engine evaluates them and hands them to `forward`
    as 0-dimensional tensors under the same names.
    """

    space: TokenSpace
    backbone: Backbone
    ramps: Mapping[str, Ramp]

    @abstractmethod
    def forward(self, x0: Int[Tensor, "B L"], knobs: Mapping[str, Tensor], rng: Rng) -> Loss:
        """Loss of a batch of clean rows, in nats per token."""

    def read_masked(
        self, h: Float[Tensor, "N L K"], x0: Int[Tensor, "N L"], masked: Bool[Tensor, "N L"]
    ) -> tuple[Float[Tensor, "N L"], Float[Tensor, "N L"]]:
        """log sum_y e^a_y and a_x0 of the head's logits a, for a loss that reads them at masked positions.

        With `head_chunk`, and in training with `head_share`: likelihoods may have more masks.
        """
        config: Any = self.config  # each method has one of its own kind
        share = config.head_share if self.training else 1.0
        return masked_total_and_target(h, *self.backbone.head_weights(), x0, masked, share, config.head_chunk)

    def refusals(self) -> str | None:
        """Which steps the method itself refuses, by a loss that is not finite, with what to change; None if none."""
        share = getattr(self.config, "head_share", 1.0)
        if share == 1:
            return None
        return f"Batches with more than {share:g} of their positions masked are refused, too: raise method.head_share."

    def health(self, log: Mapping[str, Any]) -> str | None:
        """What ails the method by the numbers of one log line, with what to try; None if nothing does."""
        return None

    @abstractmethod
    def nll_bound(self, x0: Int[Tensor, "B L"], convention: Convention, rng: Rng) -> Float[Tensor, " B"]:
        """One Monte-Carlo draw of a named likelihood for each row, in nats per row (see `Convention`).

        Its mean over draws is the quantity; a convention that the method does not have raises `ConfigError`.
        """

    @abstractmethod
    def sample(
        self,
        n: int,
        steps: int,
        rng: Rng,
        *,
        given: Int[Tensor, "n L"] | None = None,
        on_step: Callable[[StepEvent], None] | None = None,
    ) -> Int[Tensor, "n L"]:
        """Draw n rows with `steps` network calls.

        Args:
            n: Number of rows.
            steps: Number of function evaluations.
            rng: Random streams; equal streams give equal samples.
            given: Rows with the mask where tokens are wanted; all other tokens stay fixed (infilling).
            on_step: Called after every reverse step.
        """


@dataclass(frozen=True, kw_only=True)
class SamplerConfig(Config):
    """How masked diffusion methods draw; all kinds have the same law, see `emoe.diffusion.samplers`."""

    kind: Literal["plain", "cached", "reveal-first"] = option(
        "plain", doc="plain; cached: unchanged rows are not run again; reveal-first: the head reads what is revealed"
    )
    nucleus: float = option(
        1.0,
        doc="probability of the most likely symbols that tokens are drawn from; 1 = all, the model",
        above=0,
        high=1,
    )


@dataclass(frozen=True, kw_only=True)
class MaskedDiffusionConfig(MethodConfig):
    """Options that all masked diffusion methods share."""

    schedule: Schedule = option(LinearSchedule(), doc="masking schedule alpha_t")
    t_low: float = option(0.0, doc="smallest training time; bounds the 1/t weight", low=0, high=0.5)
    step_aware: bool = option(
        False, doc="tell the network how many steps the sampler takes, not the time; train on bound@T of many T at once"
    )
    few_steps: Ramp = option(
        NEVER,
        doc="with step_aware: share of rows that are trained for one or two steps alone, where a latent is worth most",
        low=0,
        high=1,
    )

    def conflicts(self) -> Iterator[str]:
        """What cannot go together."""
        yield from super().conflicts()
        if self.few_steps != NEVER and not self.step_aware:
            yield "few_steps: has no meaning without step_aware; use 0"


@dataclass(frozen=True)
class Predicted:
    """What a call of the network says of x0 given xt, under the latents it was handed; N rows."""

    log_x_theta: Float[Tensor, "N L V"] | None  # log p(x0 | xt, z), SUBS applied; None with `head_chunk`
    log_token: Float[Tensor, "N L"] | None  # of the symbols of x0 alone, 0 where xt is clean; None without
    route_logits: tuple[Float[Tensor, "_M _P E"], ...] = ()


def log_token_of(out: Predicted | Inference | Weighed, x0: Int[Tensor, "N L"]) -> Float[Tensor, "N L"]:
    """log p(x0^l | xt, z) at every position, 0 where xt is clean."""
    if out.log_token is not None:
        return out.log_token
    assert out.log_x_theta is not None
    return log_chosen(out.log_x_theta, x0)


@compiled
def _row_losses(
    log_token: Float[Tensor, "B L"], weight: Float[Tensor, " B"], kl: Float[Tensor, " B"], kl_weight: Tensor
) -> tuple[Float[Tensor, " B"], Float[Tensor, " B"]]:
    """w(t) * masked NLL + weight * KL of each row, and the first of the two."""
    recon = weight * -log_token.sum(-1)
    return recon + kl_weight * kl, recon


@compiled
def _per_token(
    loss: Float[Tensor, " B"], recon: Float[Tensor, " B"], kl: Float[Tensor, " B"], length: int
) -> tuple[Float[Tensor, ""], Float[Tensor, ""], Float[Tensor, ""]]:
    """Means over rows, divided by L."""
    return loss.mean() / length, recon.mean() / length, kl.mean() / length


class MaskedDiffusion(Method):
    """Masked diffusion whose reverse step is a mixture of factorised steps (Eq. 4-6, Algo. 1-2).

    A concrete method gives two functions: `infer`, the posterior pass of training, and `denoise`, the prior pass of
    sampling. `weigh` is a third one, for importance-weighted likelihoods, and `objective` a fourth one, where the
    gradient needs more than one draw; `prior` a fifth one, for the sampler that reveals first. The rest is here and is
    not overridden.
    """

    has_latent: ClassVar[bool] = True

    def __init__(self, config: MaskedDiffusionConfig, space: TokenSpace, ramps: Mapping[str, Ramp]):
        super().__init__()
        self.config, self.space = config, space
        self.ramps = {**ramps, "few_steps": config.few_steps} if config.few_steps != NEVER else ramps

    @abstractmethod
    def infer(
        self,
        x0: Int[Tensor, "B L"],
        xt: Int[Tensor, "B L"],
        t: Float[Tensor, " B"],
        knobs: Mapping[str, Tensor],
        rng: Rng,
    ) -> Inference:
        """Posterior pass (Algo. 1, lines 5-8): log p(x0 | xt, z) and KL(q || p) for z ~ q(z | xt, x0).

        t is what the network is told (see `told`), here, in `denoise` and in `weigh`.
        """

    @abstractmethod
    def denoise(self, xt: Int[Tensor, "B L"], t: Float[Tensor, " B"], rng: Rng) -> Denoised:
        """Prior pass (Algo. 2, lines 3-4): log p(x0 | xt, z) for z ~ p(z | xt). One network call."""

    def weigh(self, x0: Int[Tensor, "B L"], xt: Int[Tensor, "B L"], t: Float[Tensor, " B"], rng: Rng) -> Weighed:
        """One draw z ~ q(z | xt, x0) and log p(z | xt) - log q(z | xt, x0), for importance-weighted bounds."""
        raise ConfigError([f"likelihood: {type(self).__name__} gives no importance weights, so it has no iw@T,K"])

    def prior(self, xt: Int[Tensor, "B L"], rng: Rng) -> dict[str, Any]:
        """What `denoise` hands to the network beside (xt, t): a latent z ~ p(z | xt), or a policy that draws it."""
        name = type(self).__name__
        raise ConfigError([f"sampler.kind: {name} has no prior(), which reveal-first needs; use plain"])

    @property
    def reads_time(self) -> bool:
        """Whether `denoise` depends on t, through the network or otherwise."""
        return self.backbone.reads_time and not self.config.step_aware

    def predict(
        self, x0: Int[Tensor, "N L"], xt: Int[Tensor, "N L"], rows: Int[Tensor, "M L"], t: Tensor, **inputs: Any
    ) -> Predicted:
        """One call of the network on `rows`, which may be more than xt, and what it says of x0 given xt."""
        mask_id = self.space.mask_id
        if not self.config.head_chunk:
            out = self.backbone(rows, t, **inputs)
            return Predicted(subs(out.logits, xt, mask_id), None, out.route_logits)
        h, route_logits, _ = self.backbone.features(rows, t, **inputs)
        masked = xt == mask_id
        total, chosen = self.read_masked(h, x0, masked)
        return Predicted(None, torch.where(masked, chosen - total, 0.0), route_logits)

    def kl_weight(self, t: Float[Tensor, " B"], knobs: Mapping[str, Tensor]) -> Tensor:
        """Weight of the latent's KL in the training objective; a method with a latent says which."""
        return torch.zeros_like(t)

    def step_kl_weight(self, steps: Float[Tensor, " B"], knobs: Mapping[str, Tensor]) -> Tensor:
        """The same with `step_aware`: T, since a sampler of T steps pays at each of them (Eq. 6)."""
        return steps

    def training_times(
        self, count: int, knobs: Mapping[str, Tensor], rng: Rng
    ) -> tuple[Float[Tensor, " B"], Float[Tensor, " B"] | None]:
        """Of each row t ~ U(t_low, 1], and None; with `step_aware` t = i / T for i uniform in 1..T, and T."""
        aware = self.config.step_aware
        low, stream = 0.0 if aware else self.config.t_low, rng.stream("time", shared=True)
        t = stratified_times(count, stream, low=low, rank=rng.rank, world=rng.world)
        if not aware:
            return t, None
        stream = rng.stream("steps")
        steps = step_counts(count, self.space.length, stream)
        if self.config.few_steps != NEVER:
            steps = few_step_counts(steps, knobs["few_steps"], stream)
        return (t * steps).ceil().clamp(min=1) / steps, steps

    def told(self, t: Float[Tensor, " B"], steps: Float[Tensor, " B"] | None) -> Float[Tensor, " B"]:
        """What the network reads in the place of the time, in a step of a sampler of T steps.

        The time t; with `step_aware` log T / log L: 0 for one step, 1 for L or more, and where no sampler is meant.
        """
        if not self.config.step_aware:
            return t
        if steps is None:
            return torch.ones_like(t)
        return (steps.log() / math.log(max(2, self.space.length))).clamp(0, 1)

    def kl_weight_of(
        self, t: Float[Tensor, " B"], steps: Float[Tensor, " B"] | None, knobs: Mapping[str, Tensor]
    ) -> Tensor:
        """Weight of the KL of rows at t, or in a step of a sampler of `steps` steps."""
        return self.kl_weight(t, knobs) if steps is None else self.step_kl_weight(steps, knobs)

    def recon_weight(self, t: Float[Tensor, " B"], steps: Float[Tensor, " B"] | None) -> Float[Tensor, " B"]:
        """Weight of the masked NLL: w(t), or T a_i for the step i = t T of a sampler of T steps (Eq. 37)."""
        schedule = self.config.schedule
        if steps is None:
            return schedule.elbo_weight(t)
        before = (t - 1 / steps).clamp(min=0)
        alpha_s = torch.where(before == 0, 1.0, schedule.alpha(before))
        return steps * torch.as_tensor(reveal_probability(alpha_s, schedule.alpha(t)))

    def forward(self, x0: Int[Tensor, "B L"], knobs: Mapping[str, Tensor], rng: Rng) -> Loss:
        """One step of Algo. 1: mean over rows of [w(t) * masked NLL + weight * KL] / L (Eq. 6, 9), plus aux.

        Reconstruction and KL are both sums over the sequence in nats and are divided by L together: dividing only
        one of them changes the balance and collapses the latent.
        """
        t, steps = self.training_times(len(x0), knobs, rng)
        xt = mask_tokens(x0, self.config.schedule.alpha(t), self.space.mask_id, rng.stream("mask"))
        with dropout_from(self, rng.stream("dropout")):
            out = self.objective(x0, xt, t, knobs, rng, steps)
        total, recon, kl = _per_token(out.loss, out.recon, out.kl, self.space.length)
        log = {"recon": recon, "kl": kl, **out.log}
        if out.aux is not None:
            log["aux"] = out.aux
            total = total + out.aux
        return Loss(total, {"loss": total, **log})

    def objective(
        self,
        x0: Int[Tensor, "B L"],
        xt: Int[Tensor, "B L"],
        t: Float[Tensor, " B"],
        knobs: Mapping[str, Tensor],
        rng: Rng,
        steps: Float[Tensor, " B"] | None = None,
    ) -> Objective:
        """w(t) * masked NLL + weight * KL for one draw of the latent, whose gradient is that of the loss.

        A method whose gradient takes more than that (several draws, score functions) overrides it.
        """
        out = self.infer(x0, xt, self.told(t, steps), knobs, rng)
        kl = out.kl if out.train_kl is None else out.train_kl
        weights = self.recon_weight(t, steps), self.kl_weight_of(t, steps, knobs)
        loss, recon = _row_losses(log_token_of(out, x0), weights[0], kl, weights[1])
        return Objective(loss, recon, out.kl, out.aux, out.log)

    @torch.no_grad()
    def nll_bound(self, x0: Int[Tensor, "B L"], convention: Convention, rng: Rng) -> Float[Tensor, " B"]:
        """One draw of (t, xt, z) per row, times stratified over the batch; nats per row.

        objective, nelbo: w(t) * masked NLL (+ KL), t ~ U(0, 1]. bound@T (Eq. 6): T * [a_i * masked NLL + KL] for a step
        i uniform in 1..T, with a_i = (alpha_{i-1} - alpha_i) / (1 - alpha_i) (Eq. 37). iw@T,K: see `_weighted_step`.
        """
        self._check(convention)
        schedule, steps = self.config.schedule, convention.steps
        u = stratified_times(len(x0), rng.stream("time", shared=True), rank=rng.rank, world=rng.world).double()
        if steps:
            i = (u * steps).ceil().clamp(1, steps)
            t, alpha_s = i / steps, torch.where(i == 1, 1.0, schedule.alpha((i - 1) / steps))
            reveal = torch.as_tensor(reveal_probability(alpha_s, schedule.alpha(t)))
        else:
            t, reveal = u, schedule.elbo_weight(u)
        xt = mask_tokens(x0, schedule.alpha(t), self.space.mask_id, rng.stream("mask"))
        told = self.told(t.float(), torch.full_like(t, steps).float() if steps else None)
        if convention.kind == "iw":
            return steps * self._weighted_step(x0, xt, told, reveal, convention.draws, rng)
        knobs = {name: torch.ones((), device=x0.device) for name in self.ramps}  # they shape gradients, not values
        out = self.infer(x0, xt, told, knobs, rng)
        weight = {"objective": 1, "nelbo": 0, "bound": steps}[convention.kind]
        nll = -log_token_of(out, x0).sum(-1).double()
        return max(steps, 1) * reveal * nll + weight * out.kl.double()

    def _weighted_step(
        self,
        x0: Int[Tensor, "B L"],
        xt: Int[Tensor, "B L"],
        told: Float[Tensor, " B"],
        reveal: Float[Tensor, " B"],
        draws: int,
        rng: Rng,
    ) -> Float[Tensor, " B"]:
        """-log (1/K) sum_k [p(z_k | xt) / q(z_k | x0, xt)] * prod over l in R of p(x0^l | xt, z_k), z_k ~ q.

        R, the masked positions that this step reveals, is drawn like the sampler draws it. The K draws are one call.
        """
        u = torch.rand(x0.shape, generator=rng.stream("reveal"), device=x0.device, dtype=torch.float64)
        revealed = (xt == self.space.mask_id) & (u < reveal[:, None])
        many = [value.repeat_interleave(draws, dim=0) for value in (x0, xt, told, revealed)]
        out = self.weigh(many[0], many[1], many[2], rng)
        log_token = log_token_of(out, many[0]).double()
        log_weight = out.log_ratio.double() + torch.where(many[3], log_token, 0.0).sum(-1)
        return math.log(draws) - log_weight.view(-1, draws).logsumexp(-1)

    def _check(self, convention: Convention) -> None:
        if convention.kind not in ("objective", "nelbo", "bound", "iw"):
            raise ConfigError([f"likelihood: {convention} is not estimated by draws"])
        if convention.kind == "nelbo" and self.has_latent:
            raise ConfigError(
                ["likelihood: nelbo is defined without a latent only (its KL grows with the steps); use bound@T"]
            )
        if convention.steps and float(self.config.schedule.alpha(torch.ones(1))) > 0:
            kind = self.config.schedule.kind
            raise ConfigError(
                [f"likelihood: {convention} needs all tokens masked at t = 1; schedule {kind!r} keeps some"]
            )

    @torch.no_grad()
    def sample(
        self,
        n: int,
        steps: int,
        rng: Rng,
        *,
        given: Int[Tensor, "n L"] | None = None,
        on_step: Callable[[StepEvent], None] | None = None,
        sampler: SamplerConfig | None = None,
    ) -> Int[Tensor, "n L"]:
        """Algo. 2 from all masks, or from `given` tokens.

        With a `sampler` of another kind than plain no row takes more than `steps` network calls, and most take fewer.
        """
        sampler = sampler or SamplerConfig()
        self._check_sampler(sampler)
        x = start_rows(given, n, self.space, next(self.parameters()).device)
        chain = (x, self.config.schedule, steps, rng)
        mask_id, nucleus = self.space.mask_id, sampler.nucleus
        if sampler.kind == "reveal-first":
            draft = self._in_a_sampler(self._draft, steps)
            return reveal_first(draft, self.backbone.read, *chain, mask_id=mask_id, nucleus=nucleus, on_step=on_step)
        draw = cached if sampler.kind == "cached" else ancestral
        denoise = self._in_a_sampler(self.denoise, steps)
        return draw(denoise, *chain, mask_id=mask_id, nucleus=nucleus, on_step=on_step)

    def _in_a_sampler(self, network: Callable[[Tensor, Tensor, Rng], Out], steps: int) -> Callable[..., Out]:
        """`network` as a sampler of `steps` steps calls it: with the time, of which it is told what it is to read."""

        def called(xt: Int[Tensor, "B L"], t: Float[Tensor, " B"], rng: Rng) -> Out:
            return network(xt, self.told(t, torch.full_like(t, steps)), rng)

        return called

    def _draft(self, xt: Int[Tensor, "B L"], t: Float[Tensor, " B"], rng: Rng) -> Float[Tensor, "B L K"]:
        return self.backbone.features(xt, t, **self.prior(xt, rng))[0]

    def _check_sampler(self, sampler: SamplerConfig) -> None:
        network = type(self.backbone).__name__
        if sampler.kind == "cached" and self.reads_time:
            raise ConfigError(
                [
                    f"sampler.kind: cached reuses a prediction at a later time, but this {network} reads the time; use "
                    "plain, or a dit with backbone.time_conditioning=false"
                ]
            )
        if sampler.kind == "reveal-first" and not self.backbone.has_features:
            raise ConfigError(
                [
                    f"sampler.kind: reveal-first reads single positions, which {network} cannot (no features and "
                    "read); use plain, or a dit"
                ]
            )
