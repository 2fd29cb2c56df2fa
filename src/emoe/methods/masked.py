"""Algorithms 1 and 2 for any mixture of factorised steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from emoe.backbones.layers import dropout_from
from emoe.config import ConfigError, option
from emoe.diffusion.categorical import AT_ONCE, draw_categorical, top_p
from emoe.diffusion.masking import draw_revealed, mask_tokens, subs
from emoe.diffusion.schedule import LinearSchedule, Schedule
from emoe.diffusion.times import grid, stratified_times, weighted_times
from emoe.methods.base import PLAIN, Method, MethodConfig, SamplerConfig
from emoe.rng import Rng
from emoe.types import Features, Likelihood, Loss, Mixture, Noised, OnStep, PerRow, Positions, Ramps, StepEvent, Tokens


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
    greedy: bool = False  # the most likely latent instead of a draw


@runtime_checkable
class Latent(Protocol):
    """z ~ q(z | x0, xt) of N rows, with the two quantities that bounds need."""

    def kl(self) -> Float[Tensor, " N"]:
        """Return KL(q(z | x0, xt) || p(z | xt)) in nats."""

    def log_ratio(self) -> Float[Tensor, " N"]:
        """Return log p(z | xt) - log q(z | x0, xt) of the drawn z."""


@dataclass(frozen=True)
class NoLatent:
    """A single component: KL and log ratio are 0."""

    rows: Float[Tensor, " N"]

    def kl(self) -> Float[Tensor, " N"]:
        return torch.zeros_like(self.rows)

    log_ratio = kl


@dataclass(frozen=True)
class Inferred:
    """Result of the posterior pass (Algo. 1, lines 5-8)."""

    log_token: Float[Tensor, "N L"]  # log p(x0^l | xt, z), 0 where nothing is scored
    latent: Latent
    aux: Float[Tensor, ""] | None = None  # auxiliary loss, already weighted, outside any bound
    train_kl: Float[Tensor, " N"] | None = None  # counted in training instead of the KL
    log: Mapping[str, Tensor] = field(default_factory=dict)


class MaskedDiffusion(Method):
    """Masked diffusion whose reverse step is a mixture of factorised steps (Eq. 4-6, Algo. 1-2).

    A concrete method has up to three hooks: `noise` (lines 3-4 of Algo. 1), `infer` (lines 5-8) and `prior` (line 3 of
    Algo. 2). One that compares several draws of z in training also overrides `objective`.
    """

    def noise(self, x0: Tokens, rng: Rng, likelihood: Likelihood | None = None) -> Noised:
        """Draw t, one per row and stratified over the batch, and x_t ~ q(x_t | x_0) (Algo. 1, lines 3-4).

        In training t ~ U(t_low, 1] with weight w(t). For bound@T and iw@T,K a step i uniform in 1..T with t = i / T and
        weight T a_i, a_i = (alpha_{i-1} - alpha_i) / (1 - alpha_i) (Eq. 37); for other likelihoods t ~ U(0, 1].
        """
        schedule, low = self.config.schedule, self.config.t_low if likelihood is None else 0.0
        t = stratified_times(len(x0), rng, low)
        steps = 0 if likelihood is None else likelihood.steps
        t, weight = weighted_times(schedule, t if likelihood is None else t.double(), steps)
        xt = mask_tokens(x0, schedule.alpha(t), self.space.mask_id, rng.stream("mask"))
        return Noised(x0, xt, t.float(), xt == self.space.mask_id, weight)

    def infer(self, noised: Noised, ramp: Ramps, rng: Rng) -> Inferred:
        """Run the posterior pass (Algo. 1, lines 5-8) with one draw of z. Without a latent it is the prior pass."""
        inputs = self.prior(ReverseStep(noised.xt, noised.t, noised.scored), rng)
        return Inferred(self.predict(noised, noised.xt, noised.t, **inputs)[0], NoLatent(noised.t))

    def prior(self, step: ReverseStep, rng: Rng) -> dict[str, Any]:
        """Return inputs of the network beside x_t and t: z ~ p(z | x_t), or its policy (Algo. 2, line 3)."""
        return {}

    def kl_weight(self, noised: Noised, ramp: Ramps) -> Tensor:
        """Return the weight of the KL in the training loss."""
        return ramp.get("kl_weight", torch.zeros_like(noised.t))

    def predict(
        self, noised: Noised, rows: Int[Tensor, "M L"], t: Float[Tensor, " M"], **inputs: Any
    ) -> tuple[Float[Tensor, "N L"], Features]:
        """Return log p(x0^l | xt, z) at scored positions and the result of one network call, on rows that end with x_t.

        With K draws per row in a gate, N = B * K.
        """
        out: Features = self.backbone(rows, t, **inputs)
        noised = noised.repeated(len(out.h) // len(noised.x0))
        return self.log_token(out.h, noised.xt, noised.x0, noised.scored), out

    def objective(self, noised: Noised, ramp: Ramps, rng: Rng) -> tuple[PerRow, PerRow, PerRow, Inferred]:
        """Return for each row recon + weight * KL, recon = w(t) * masked NLL, the KL; and the posterior pass."""
        out = self.infer(noised, ramp, rng)
        recon, kl = noised.weight * -out.log_token.sum(-1), out.latent.kl()
        counted = kl if out.train_kl is None else out.train_kl
        return recon + self.kl_weight(noised, ramp) * counted, recon, kl, out

    def forward(self, x0: Tokens, ramp: Ramps, rng: Rng) -> Loss:
        """Return the mean over rows of [w(t) * masked NLL + weight * KL] / L (Algo. 1; Eq. 6, 9), plus aux.

        Both are sums over the sequence in nats; dividing only one of them by L would collapse the latent.
        """
        noised = self.noise(x0, rng)
        with dropout_from(self, rng.stream("dropout")):
            *rows, out = self.objective(noised, ramp, rng)
        total, recon, kl = (value.mean() / self.space.length for value in rows)
        log = {"recon": recon, "kl": kl, **out.log}
        if out.aux is not None:
            log["aux"] = out.aux
            total = total + out.aux
        return self.as_loss(total, log, noised.scored, draws=len(out.log_token) // len(x0))

    @property
    def chain_schedule(self) -> Schedule:
        return self.config.schedule

    def likelihoods(self) -> tuple[str, ...]:
        return "objective", "bound@1", "bound@4", "iw@1,16" if self.has_latent else "nelbo"

    @torch.no_grad()
    def nll(self, x0: Tokens, likelihood: Likelihood, rng: Rng) -> PerRow:
        """Draw (t, xt, z) once per row; see docs/likelihood.md.

        objective, nelbo: w(t) * masked NLL (+ KL). bound@T (Eq. 6): T * [a_i * masked NLL + KL]. iw@T,K: T * -log of
        the mean over z_k ~ q of p(z_k | xt) / q(z_k | x0, xt) * prod over l in R of p(x0^l | xt, z_k), with a drawn set
        R of positions that the step reveals.
        """
        if likelihood.kind not in ("objective", "nelbo", "bound", "iw"):
            raise ConfigError(f"likelihood: {likelihood} is not estimated by draws")
        if likelihood.kind == "nelbo" and self.has_latent:
            raise ConfigError(
                "likelihood: nelbo is defined without a latent only (its KL grows with the steps); use bound@T"
            )
        steps, draws = likelihood.steps, likelihood.draws
        noised = self.noise(x0, rng, likelihood)
        if draws:  # R: each masked position with probability a_i = weight / T
            chance = (noised.weight / steps)[:, None]
            revealed = draw_revealed(noised.xt, chance, self.space.mask_id, rng.stream("reveal"))
            noised = replace(noised, scored=revealed).repeated(draws)
        out = self.infer(noised, self.final_ramp(x0.device), rng)
        nll = -out.log_token.sum(-1).double()
        if draws:
            log_weight = (out.latent.log_ratio().double() - nll).view(-1, draws)
            return steps * (math.log(draws) - log_weight.logsumexp(-1))
        return noised.weight * nll + (0 if likelihood.kind == "nelbo" else max(steps, 1) * out.latent.kl().double())

    @torch.no_grad()
    def components(self, xt: Tokens, t: float, *, seed: int = 0) -> Mixture:
        """Return one component, the factorised step of Eq. 3; a method with a latent overrides it."""
        step = ReverseStep(xt, torch.full((len(xt),), t, device=xt.device), xt == self.space.mask_id)
        out = self.backbone(xt, step.t, **self.prior(step, Rng(seed, device=xt.device)))
        log_token = subs(self.backbone.read(out.h).double(), xt, self.space.mask_id)
        return Mixture(log_token.new_zeros(len(xt), 1), log_token[:, None])

    @torch.no_grad()
    def log_probs(self, xt: Tokens, rng: Rng, *, greedy: bool = False) -> Float[Tensor, "B L V"]:
        """Return log p(x0 | xt, z) for one latent per row; the time is the share of masked positions."""
        masked = xt == self.space.mask_id
        step = ReverseStep(xt, masked.float().mean(1).clamp(min=1 / self.space.length), masked, greedy)
        out = self.backbone(xt, step.t, **self.prior(step, rng))
        return subs(self.backbone.read(out.h), xt, self.space.mask_id)

    def check_sampler(self, sampler: SamplerConfig) -> None:
        """Every sampler is supported."""

    @torch.no_grad()
    def sample(
        self, x: Tokens, nfe: int, rng: Rng, *, sampler: SamplerConfig = PLAIN, on_step: OnStep | None = None
    ) -> Tokens:
        """Run Algo. 2 from x on the grid t_i = i / T with a fresh latent at every step.

        "plain" runs all rows and draws a token at every position; "reveal-first" runs only rows with revealed positions
        and draws tokens at these positions. Both have the same law; their noise is laid out differently.
        """
        mask_id, plain = self.space.mask_id, sampler.kind == "plain"
        for step in grid(self.config.schedule, nfe):
            rng.at(step.number)
            reveal = draw_revealed(x, step.reveal, mask_id, rng.stream("reveal"))
            run: Any = slice(None) if plain else reveal.any(-1).nonzero().squeeze(-1)
            rows, part, latent = x[run], reveal[run], None
            if len(rows):
                t = torch.full((len(rows),), step.time, device=x.device)
                inputs = self.prior(ReverseStep(rows, t, part), rng)
                out: Features = self.backbone(rows, t, **inputs)
                latent = out.gates or inputs.get("cond")
                if plain:
                    log_x = top_p(subs(self.backbone.read(out.h), x, mask_id), sampler.nucleus)
                    x = torch.where(reveal, draw_categorical(log_x, rng.stream("token")), x)
                else:
                    logits = (top_p(self.backbone.read(h), sampler.nucleus) for h in out.h[part].split(AT_ONCE))
                    tokens = [draw_categorical(some, rng.stream("token")) for some in logits]
                    x = x.masked_scatter(reveal, torch.cat(tokens))
            if on_step is not None:
                latent = latent if plain else _of_all_rows(latent, run, len(x))
                on_step(StepEvent(step.number, step.time, x, reveal, latent))
        return x


def _of_all_rows(latent: Any, run: Int[Tensor, " n"], count: int) -> Any:
    """Extend the latent of the rows `run` to `count` rows; the others get expert -1, or zeros."""

    def spread(values: Tensor, other: int) -> Tensor:
        rows = values.new_full((count, *values.shape[1:]), other)
        rows[run] = values
        return rows

    if isinstance(latent, tuple):
        return tuple(replace(gate, expert=spread(gate.expert, -1), weight=spread(gate.weight, 0)) for gate in latent)
    return None if latent is None else spread(latent, 0)
