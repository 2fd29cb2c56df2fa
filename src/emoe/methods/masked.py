"""Algorithms 1 and 2 for any mixture of factorised reverse steps."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from emoe.backbones.layers import dropout_from
from emoe.config import ConfigError, option
from emoe.diffusion.categorical import draw_categorical
from emoe.diffusion.masking import draw_revealed, log_chosen, mask_tokens, subs
from emoe.diffusion.samplers import READ_AT_ONCE, OnStep, grid, top_p
from emoe.diffusion.schedule import LinearSchedule, Schedule
from emoe.diffusion.times import stratified_times, weighted_times
from emoe.methods.base import BUDGET, PLAIN, Method, MethodConfig, SamplerConfig
from emoe.rng import Rng
from emoe.types import Features, Gate, Likelihood, Logits, Loss, Mixture, Noised, PerRow, Positions, StepEvent, Tokens


@dataclass(frozen=True, kw_only=True)
class MaskedDiffusionConfig(MethodConfig):
    """Options that all masked diffusion methods share."""

    schedule: Schedule = option(LinearSchedule(), doc="masking schedule alpha_t")
    t_low: float = option(0.0, doc="smallest training time; bounds the 1/t weight", low=0, high=0.5)


class ReverseStep(NamedTuple):
    """A step of the sampler before its network call."""

    x: Tokens
    t: PerRow
    reveal: Positions  # positions that the step reveals
    nfe: int = 0  # steps of the chain; 0 outside a chain
    greedy: bool = False  # the most likely latent instead of a draw


@runtime_checkable
class Latent(Protocol):
    """z ~ q(z | x0, xt) for N rows, as far as a bound needs it."""

    def kl(self) -> Float[Tensor, " N"]:
        """KL(q(z | x0, xt) || p(z | xt)) in nats."""

    def log_ratio(self) -> Float[Tensor, " N"]:
        """log p(z | xt) - log q(z | x0, xt) of the z that was drawn."""


@dataclass(frozen=True)
class NoLatent:
    """A single component: KL and log ratio are 0."""

    rows: Float[Tensor, " N"]

    def kl(self) -> Float[Tensor, " N"]:
        """0 for every row."""
        return torch.zeros_like(self.rows)

    log_ratio = kl


class RowLoss(NamedTuple):
    """What a batch minimises, row by row, in nats per row."""

    loss: PerRow
    recon: PerRow  # w(t) * masked NLL
    kl: PerRow


@dataclass(frozen=True)
class Inferred:
    """Result of the posterior pass (Algo. 1, lines 5-8)."""

    log_token: Float[Tensor, "N L"]  # log p(x0^l | xt, z), 0 where nothing is scored
    latent: Latent
    aux: Float[Tensor, ""] | None = None  # auxiliary loss, already weighted, outside any bound
    train_kl: Float[Tensor, " N"] | None = None  # counted in training instead of the KL
    log: Mapping[str, Tensor] = field(default_factory=dict)
    rows: RowLoss | None = None  # in training, where it is not recon + weight * KL
    valid: Bool[Tensor, ""] | None = None


class MaskedDiffusion(Method):
    """Masked diffusion whose reverse step is a mixture of factorised steps (Eq. 4-6, Algo. 1-2).

    A concrete method has up to three hooks: `noise` (lines 3-4 of Algo. 1), `infer` (lines 5-8) and `prior` (line 3 of
    Algo. 2). The rest is here and is not overridden.
    """

    config: Any

    def noise(self, x0: Tokens, rng: Rng, likelihood: Likelihood | None = None) -> Noised:
        """Draw t, one per row and stratified over the batch, and x_t ~ q(x_t | x_0) (Algo. 1, lines 3-4).

        In training t ~ U(t_low, 1] with weight w(t). For bound@T and iw@T,K a step i uniform in 1..T with t = i / T and
        weight T a_i, a_i = (alpha_{i-1} - alpha_i) / (1 - alpha_i) (Eq. 37); for other likelihoods t ~ U(0, 1].
        """
        schedule, low = self.config.schedule, self.config.t_low if likelihood is None else 0.0
        t = stratified_times(len(x0), rng.stream("time", shared=True), low=low, rank=rng.rank, world=rng.world)
        steps = 0 if likelihood is None else likelihood.steps
        t, weight = weighted_times(schedule, t if likelihood is None else t.double(), steps)
        xt = mask_tokens(x0, schedule.alpha(t), self.space.mask_id, rng.stream("mask"))
        return Noised(x0, xt, t.float(), xt == self.space.mask_id, weight, float(max(steps, 1)))

    def infer(self, noised: Noised, ramp: Mapping[str, Tensor], rng: Rng) -> Inferred:
        """Posterior pass (Algo. 1, lines 5-8) with one draw of z. Without a latent it is the prior pass."""
        step = ReverseStep(noised.xt, noised.t, noised.scored)
        log_token, _, valid = self.predict(noised, noised.xt, noised.t, **self.prior(step, rng))
        return Inferred(log_token, NoLatent(noised.t), valid=valid)

    def infer_training(self, noised: Noised, ramp: Mapping[str, Tensor], rng: Rng) -> Inferred:
        """`infer` in training; a method that draws several z there overrides it."""
        return self.infer(noised, ramp, rng)

    def prior(self, step: ReverseStep, rng: Rng) -> dict[str, Any]:
        """Inputs of the network beside x_t and t: z ~ p(z | x_t), or a policy that draws it (Algo. 2, line 3)."""
        return {}

    def kl_weight(self, noised: Noised, ramp: Mapping[str, Tensor]) -> Tensor:
        """Weight of the KL in the training loss."""
        return ramp.get("kl_weight", torch.zeros_like(noised.t))

    def predict(
        self, noised: Noised, rows: Int[Tensor, "M L"], t: Float[Tensor, " M"], **inputs: Any
    ) -> tuple[Float[Tensor, "N L"], tuple[Tensor, ...], Bool[Tensor, ""] | None]:
        """One network call on `rows`, the last of which are x_t: log p(x0^l | xt, z) at scored positions.

        Also the router logits by block, and `Scores.valid`. With K draws per row in a gate, N = B * K.
        """
        out = self.backbone(rows, t, **inputs)
        if len(out.h) != len(noised.x0):
            noised = noised.repeated(len(out.h) // len(noised.x0))
        if self.config.head_chunk:
            scores = self.scores(out.h, noised.x0, noised.scored)
            return torch.where(noised.scored, scores.target - scores.total, 0.0), out.route_logits, scores.valid
        log_x_theta = subs(self.backbone.read(out.h), noised.xt, self.space.mask_id)
        return torch.where(noised.scored, log_chosen(log_x_theta, noised.x0), 0.0), out.route_logits, None

    def forward(self, x0: Tokens, ramp: Mapping[str, Tensor], rng: Rng) -> Loss:
        """One step of Algo. 1: mean over rows of [w(t) * masked NLL + weight * KL] / L (Eq. 6, 9), plus aux.

        Reconstruction and KL are both sums over the sequence in nats and are divided by L together: dividing only
        one of them changes the balance and collapses the latent.
        """
        noised = self.noise(x0, rng)
        with dropout_from(self, rng.stream("dropout")):
            out = self.infer_training(noised, ramp, rng)
        rows = out.rows
        if rows is None:
            kl = out.latent.kl()
            counted = kl if out.train_kl is None else out.train_kl
            recon = noised.weight * -out.log_token.sum(-1)
            rows = RowLoss(recon + self.kl_weight(noised, ramp) * counted, recon, kl)
        total, recon, kl = (value.mean() / self.space.length for value in rows)
        log = {"recon": recon, "kl": kl, **out.log}
        if out.aux is not None:
            log["aux"] = out.aux
            total = total + out.aux
        return Loss(total, {"loss": total, **log}, out.valid, self.refusal())

    @property
    def chain_schedule(self) -> Schedule:
        """The masking schedule."""
        schedule: Schedule = self.config.schedule
        return schedule

    # --- Likelihoods -----------------------------------------------------------------------------------------------

    def likelihoods(self) -> tuple[str, ...]:
        """The objective, bounds for few steps, and iw with a latent or nelbo without one."""
        return "objective", "bound@1", "bound@4", "iw@1,16" if self.has_latent else "nelbo"

    @torch.no_grad()
    def nll(self, x0: Tokens, likelihood: Likelihood, rng: Rng) -> PerRow:
        """One draw of (t, xt, z) per row, times stratified over the batch; nats per row.

        objective, nelbo: w(t) * masked NLL (+ KL). bound@T (Eq. 6): T * [a_i * masked NLL + KL]. iw@T,K: T * -log of
        the mean over z_k ~ q of p(z_k | xt) / q(z_k | x0, xt) * prod over l in R of p(x0^l | xt, z_k), where R, the set
        that the step reveals, is drawn like the sampler draws it. The K draws are one call.
        """
        self._check(likelihood)
        steps, draws = likelihood.steps, likelihood.draws
        noised = self.noise(x0, rng, likelihood)
        if draws:
            noised = self.revealed_only(noised, steps, rng).repeated(draws)
        out = self.infer(noised, self.final_ramp(x0.device), rng)
        nll = -out.log_token.sum(-1).double()
        if draws:
            log_weight = (out.latent.log_ratio().double() - nll).view(-1, draws)
            return steps * (math.log(draws) - log_weight.logsumexp(-1))
        return noised.weight * nll + (0 if likelihood.kind == "nelbo" else noised.kl_weight * out.latent.kl().double())

    def revealed_only(self, noised: Noised, steps: int, rng: Rng) -> Noised:
        """The same step with a drawn set R of revealed positions, each with probability a_i = weight / T."""
        u = torch.rand(noised.x0.shape, generator=rng.stream("reveal"), device=noised.x0.device, dtype=torch.float64)
        return dataclasses.replace(noised, scored=noised.scored & (u < (noised.weight / steps)[:, None]))

    def _check(self, likelihood: Likelihood) -> None:
        if likelihood.kind not in ("objective", "nelbo", "bound", "iw"):
            raise ConfigError(f"likelihood: {likelihood} is not estimated by draws")
        if likelihood.kind == "nelbo" and self.has_latent:
            raise ConfigError(
                "likelihood: nelbo is defined without a latent only (its KL grows with the steps); use bound@T"
            )

    @torch.no_grad()
    def components(
        self, xt: Tokens, t: float, *, budget: int = BUDGET, samples: int | None = None, seed: int = 0
    ) -> Mixture:
        """One component, the factorised step of Eq. 3; a method with a latent overrides it."""
        step = ReverseStep(xt, torch.full((len(xt),), t, device=xt.device), xt == self.space.mask_id)
        out = self.backbone(xt, step.t, **self.prior(step, Rng(seed, device=xt.device)))
        log_token = subs(self.backbone.read(out.h).double(), xt, self.space.mask_id)
        return Mixture(log_token.new_zeros(len(xt), 1), log_token[:, None])

    @torch.no_grad()
    def log_probs(self, xt: Tokens, rng: Rng, *, greedy: bool = False) -> Logits:
        """log p(x0 | xt, z) under one latent for each row; the time is the share of masked positions."""
        masked = xt == self.space.mask_id
        step = ReverseStep(xt, masked.float().mean(1).clamp(min=1 / self.space.length), masked, greedy=greedy)
        out = self.backbone(xt, step.t, **self.prior(step, rng))
        return subs(self.backbone.read(out.h), xt, self.space.mask_id)

    # --- Algorithm 2 -----------------------------------------------------------------------------------------------

    def check_sampler(self, sampler: SamplerConfig) -> None:
        """Every sampler is supported."""

    @torch.no_grad()
    def sample(
        self,
        x: Int[Tensor, "n L"],
        nfe: int,
        rng: Rng,
        *,
        sampler: SamplerConfig = PLAIN,
        on_step: OnStep | None = None,
    ) -> Int[Tensor, "n L"]:
        """Algo. 2 from x on the grid t_i = i / T with a fresh latent at every step.

        Whether a position is revealed does not depend on the network, so it is drawn first. "plain" runs all rows and
        draws a token at every position; "reveal-first" runs the rows of which something is revealed and draws tokens at
        these positions only. Both have the same law; their noise is laid out differently.
        """
        mask_id, all_rows = self.space.mask_id, sampler.kind == "plain"
        for step in grid(self.config.schedule, nfe):
            rng.at(step.number)
            reveal = draw_revealed(x, step.alpha_s, step.alpha_t, mask_id, rng.stream("reveal"))
            run = torch.ones_like(reveal[:, 0]) if all_rows else reveal.any(-1)
            latent: Any = None
            if all_rows or run.any():
                part = x if all_rows else x[run]
                t = torch.full((len(part),), step.time, device=x.device)
                inputs = self.prior(ReverseStep(part, t, reveal if all_rows else reveal[run], nfe), rng)
                out: Features = self.backbone(part, t, **inputs)
                latent = out.gates or inputs.get("cond")
                if all_rows:
                    log_x = top_p(subs(self.backbone.read(out.h), x, mask_id), sampler.nucleus)
                    x = torch.where(reveal, draw_categorical(log_x, rng.stream("token")), x)
                else:
                    at = out.h[reveal[run]].split(READ_AT_ONCE)
                    tokens = [
                        draw_categorical(top_p(self.backbone.read(h), sampler.nucleus), rng.stream("token")) for h in at
                    ]
                    x = x.masked_scatter(reveal, torch.cat(tokens))
            if on_step is not None:
                on_step(StepEvent(step.number, step.time, x, reveal, _of_all_rows(latent, run)))
        return x


def _of_all_rows(latent: Any, run: Bool[Tensor, " n"]) -> Any:
    """A latent with a row for each of the n rows; those that were not run have expert -1, or zeros."""
    if isinstance(latent, tuple):
        return tuple(Gate(_spread(gate.expert, run, -1), _spread(gate.weight, run, 0)) for gate in latent)
    return None if latent is None else _spread(latent, run, 0)


def _spread(values: Tensor, run: Bool[Tensor, " n"], other: int) -> Tensor:
    if len(values) == len(run):
        return values
    rows = values.new_full((len(run), *values.shape[1:]), other)
    rows[run] = values
    return rows
