"""What a method is, and Algo. 1-2 for any mixture of factorised reverse steps."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from emoe.backbones.base import Backbone, BackboneConfig
from emoe.backbones.layers import dropout_from
from emoe.config import ConfigError, Family, option
from emoe.diffusion.masking import mask_tokens, masked_nll, reveal_probability
from emoe.diffusion.samplers import ancestral
from emoe.diffusion.schedule import LinearSchedule, Schedule
from emoe.diffusion.times import stratified_times
from emoe.ramps import Ramp
from emoe.rng import Rng
from emoe.types import Convention, Denoised, Inference, Loss, Objective, StepEvent, TokenSpace, Wants, Weighed


@dataclass(frozen=True, kw_only=True)
class MethodConfig(Family, package="emoe.methods"):
    """Options of a method."""

    def wants(self) -> Wants:
        """What it needs of a backbone."""
        return Wants()

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
class MaskedDiffusionConfig(MethodConfig):
    """Options that all masked diffusion methods share."""

    schedule: Schedule = option(LinearSchedule(), doc="masking schedule alpha_t")
    t_low: float = option(0.0, doc="smallest training time; bounds the 1/t weight", low=0, high=0.5)


class MaskedDiffusion(Method):
    """Masked diffusion whose reverse step is a mixture of factorised steps (Eq. 4-6, Algo. 1-2).

    A concrete method gives two functions: `infer`, the posterior pass of training, and `denoise`, the prior pass of
    sampling. `weigh` is a third one, for importance-weighted likelihoods, and `objective` a fourth one, where the
    gradient needs more than one draw. The rest is here and is not overridden.
    """

    has_latent: ClassVar[bool] = True

    def __init__(self, config: MaskedDiffusionConfig, space: TokenSpace, ramps: Mapping[str, Ramp]):
        super().__init__()
        self.config, self.space, self.ramps = config, space, ramps

    @abstractmethod
    def infer(
        self,
        x0: Int[Tensor, "B L"],
        xt: Int[Tensor, "B L"],
        t: Float[Tensor, " B"],
        knobs: Mapping[str, Tensor],
        rng: Rng,
    ) -> Inference:
        """Posterior pass (Algo. 1, lines 5-8): log p(x0 | xt, z) and KL(q || p) for z ~ q(z | xt, x0)."""

    @abstractmethod
    def denoise(self, xt: Int[Tensor, "B L"], t: Float[Tensor, " B"], rng: Rng) -> Denoised:
        """Prior pass (Algo. 2, lines 3-4): log p(x0 | xt, z) for z ~ p(z | xt). One network call."""

    def weigh(self, x0: Int[Tensor, "B L"], xt: Int[Tensor, "B L"], t: Float[Tensor, " B"], rng: Rng) -> Weighed:
        """One draw z ~ q(z | xt, x0) and log p(z | xt) - log q(z | xt, x0), for importance-weighted bounds."""
        raise ConfigError([f"likelihood: {type(self).__name__} gives no importance weights, so it has no iw@T,K"])

    def kl_weight(self, t: Float[Tensor, " B"], knobs: Mapping[str, Tensor]) -> Tensor:
        """Weight of the latent's KL in the training objective; a method with a latent says which."""
        return torch.zeros_like(t)

    def forward(self, x0: Int[Tensor, "B L"], knobs: Mapping[str, Tensor], rng: Rng) -> Loss:
        """One step of Algo. 1: mean over rows of [w(t) * masked NLL + weight * KL] / L (Eq. 6, 9), plus aux.

        Reconstruction and KL are both sums over the sequence in nats and are divided by L together: dividing only
        one of them changes the balance and collapses the latent.
        """
        t = stratified_times(
            len(x0), rng.stream("time", shared=True), low=self.config.t_low, rank=rng.rank, world=rng.world
        )
        xt = mask_tokens(x0, self.config.schedule.alpha(t), self.space.mask_id, rng.stream("mask"))
        with dropout_from(self, rng.stream("dropout")):
            out = self.objective(x0, xt, t, knobs, rng)
        length = self.space.length
        total = out.loss.mean() / length
        log = {"recon": out.recon.mean() / length, "kl": out.kl.mean() / length, **out.log}
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
    ) -> Objective:
        """w(t) * masked NLL + weight * KL for one draw of the latent, whose gradient is that of the loss.

        A method whose gradient takes more than that (several draws, score functions) overrides it.
        """
        out = self.infer(x0, xt, t, knobs, rng)
        recon = self.config.schedule.elbo_weight(t) * masked_nll(out.log_x_theta, x0)
        kl = out.kl if out.train_kl is None else out.train_kl
        return Objective(recon + self.kl_weight(t, knobs) * kl, recon, out.kl, out.aux, out.log)

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
        if convention.kind == "iw":
            return steps * self._weighted_step(x0, xt, t, reveal, convention.draws, rng)
        knobs = {name: torch.ones((), device=x0.device) for name in self.ramps}  # they shape gradients, not values
        out = self.infer(x0, xt, t.float(), knobs, rng)
        weight = {"objective": 1, "nelbo": 0, "bound": steps}[convention.kind]
        return max(steps, 1) * reveal * masked_nll(out.log_x_theta, x0).double() + weight * out.kl.double()

    def _weighted_step(
        self,
        x0: Int[Tensor, "B L"],
        xt: Int[Tensor, "B L"],
        t: Float[Tensor, " B"],
        reveal: Float[Tensor, " B"],
        draws: int,
        rng: Rng,
    ) -> Float[Tensor, " B"]:
        """-log (1/K) sum_k [p(z_k | xt) / q(z_k | x0, xt)] * prod over l in R of p(x0^l | xt, z_k), z_k ~ q.

        R, the masked positions that this step reveals, is drawn like the sampler draws it. The K draws are one call.
        """
        u = torch.rand(x0.shape, generator=rng.stream("reveal"), device=x0.device, dtype=torch.float64)
        revealed = (xt == self.space.mask_id) & (u < reveal[:, None])
        many = [value.repeat_interleave(draws, dim=0) for value in (x0, xt, t.float(), revealed)]
        out = self.weigh(many[0], many[1], many[2], rng)
        log_token = out.log_x_theta.gather(-1, many[0][..., None]).squeeze(-1).double()
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
    ) -> Int[Tensor, "n L"]:
        """Algo. 2 from all masks, or from `given` tokens."""
        device = next(self.parameters()).device
        x = torch.full((n, self.space.length), self.space.mask_id, device=device) if given is None else given.to(device)
        if x.shape != (n, self.space.length):
            raise ValueError(f"given: expected shape {(n, self.space.length)}, got {tuple(x.shape)}")
        if x.min() < 0 or x.max() >= self.space.size:
            raise ValueError(f"given: tokens must be in 0..{self.space.size - 1} ({self.space.mask_id} is the mask)")
        return ancestral(self.denoise, x, self.config.schedule, steps, rng, mask_id=self.space.mask_id, on_step=on_step)
