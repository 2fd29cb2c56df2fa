"""VADD: a Gaussian latent shared by the sequence, with a recognition network (Eq. 4)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from emoe.backbones.base import BackboneConfig
from emoe.config import option
from emoe.diffusion.categorical import gaussian_kl
from emoe.diffusion.masking import subs
from emoe.methods.base import MaskedDiffusion, MaskedDiffusionConfig, Predicted, log_token_of
from emoe.ramps import Linear, Ramp
from emoe.rng import Rng
from emoe.routing.estimators import SMALLEST_BETA
from emoe.types import Denoised, Inference, Objective, TokenSpace, Wants, Weighed


@dataclass(frozen=True, kw_only=True)
class VADDConfig(MaskedDiffusionConfig, kind="vadd"):
    """Options of VADD."""

    latent: int = option(8, doc="size Z of the Gaussian latent", low=1)
    draws: int = option(
        1, doc="draws K of the latent for each row and step; above 1 their importance-weighted bound is trained", low=1
    )
    kl_weight: Ramp = option(Linear(start=0.001, end=1.0, share=0.3), doc="KL weight lambda over training", low=0)
    elbo_weighted: bool = option(
        False, doc="put -alpha'/(1-alpha) on the KL too, as VADD publishes it; false: as the E-MoE paper prints it"
    )

    def wants(self) -> Wants:
        """A latent vector and an encoder of mean and log standard deviation."""
        return Wants(cond=self.latent, encoder=2 * self.latent, head_chunk=self.head_chunk, time=self.step_aware)

    def build(self, space: TokenSpace, backbone: BackboneConfig) -> VADD:
        """Make the method."""
        return VADD(self, space, backbone)


@dataclass(frozen=True)
class Drawn:
    """Latents drawn from the encoder for N = B * K rows, the draws of a row one after the other."""

    mean: Float[Tensor, "N Z"]
    log_std: Float[Tensor, "N Z"]
    log_ratio: Float[Tensor, " N"]  # log N(z; 0, I) - log N(z; mean, std^2)
    out: Predicted


class VADD(MaskedDiffusion):
    """p(x_s | x_t) = integral of p(x_s | x_t, z) N(z; 0, I) dz; a fresh z at every step (Eq. 4)."""

    config: VADDConfig

    def __init__(self, config: VADDConfig, space: TokenSpace, backbone: BackboneConfig):
        super().__init__(config, space, ramps={"kl_weight": config.kl_weight})
        self.backbone = backbone.build(space, config.wants())
        self.encoder = backbone.build_encoder(space, config.wants())

    def kl_weight(self, t: Float[Tensor, " B"], knobs: Mapping[str, Tensor]) -> Tensor:
        """lambda, or lambda * (-alpha' / (1 - alpha)) with `elbo_weighted`."""
        weight = knobs["kl_weight"]
        return weight * self.config.schedule.elbo_weight(t) if self.config.elbo_weighted else weight

    def step_kl_weight(self, steps: Float[Tensor, " B"], knobs: Mapping[str, Tensor]) -> Tensor:
        """lambda * T."""
        return knobs["kl_weight"] * steps

    def infer(
        self,
        x0: Int[Tensor, "B L"],
        xt: Int[Tensor, "B L"],
        t: Float[Tensor, " B"],
        knobs: Mapping[str, Tensor],
        rng: Rng,
    ) -> Inference:
        """z = mean + std * noise from the encoder's Gaussian, which sees x0, t and the mask pattern of xt."""
        drawn = self._posterior(x0, xt, t, rng)
        kl = gaussian_kl(drawn.mean, drawn.log_std)
        return Inference(drawn.out.log_x_theta, kl, log_token=drawn.out.log_token)

    def objective(
        self,
        x0: Int[Tensor, "B L"],
        xt: Int[Tensor, "B L"],
        t: Float[Tensor, " B"],
        knobs: Mapping[str, Tensor],
        rng: Rng,
        steps: Float[Tensor, " B"] | None = None,
    ) -> Objective:
        """With K draws -beta log 1/K sum_k exp(f_k / beta) p(z_k) / q(z_k), f_k = w(t) log p(x0 | xt, z_k).

        beta is the weight of the KL, at least 0.01 here: with 1 at t = 1 it is the importance-weighted bound of Burda
        et al. (2016), and with K = 1 its mean would be the objective itself, for any beta.
        """
        draws = self.config.draws
        if draws == 1:
            return super().objective(x0, xt, t, knobs, rng, steps)
        drawn = self._posterior(x0, xt, self.told(t, steps), rng, draws)
        nll = -log_token_of(drawn.out, x0.repeat_interleave(draws, dim=0)).sum(-1).view(len(x0), draws)
        recon = self.recon_weight(t, steps)[:, None] * nll
        beta = self.kl_weight_of(t, steps, knobs).clamp(min=SMALLEST_BETA)
        value = drawn.log_ratio.view(len(x0), draws) - recon / (beta[:, None] if beta.ndim else beta)
        loss = -beta * (value.logsumexp(1) - math.log(draws))
        kl = gaussian_kl(drawn.mean, drawn.log_std).view(len(x0), draws).mean(1)
        return Objective(loss, recon.mean(1), kl, None, {})

    def weigh(self, x0: Int[Tensor, "B L"], xt: Int[Tensor, "B L"], t: Float[Tensor, " B"], rng: Rng) -> Weighed:
        """log N(z; 0, I) - log N(z; mean, std^2) for z = mean + std * noise."""
        drawn = self._posterior(x0, xt, t, rng)
        return Weighed(drawn.out.log_x_theta, drawn.log_ratio, drawn.out.log_token)

    def _posterior(
        self, x0: Int[Tensor, "B L"], xt: Int[Tensor, "B L"], t: Float[Tensor, " B"], rng: Rng, draws: int = 1
    ) -> Drawn:
        """The encoder's Gaussian and `draws` of it for each row, under which the network runs in one call."""
        mean, log_std = self.encoder(x0, t, xt == self.space.mask_id).chunk(2, dim=-1)
        if draws > 1:
            mean, log_std = mean.repeat_interleave(draws, dim=0), log_std.repeat_interleave(draws, dim=0)
            x0, xt, t = (value.repeat_interleave(draws, dim=0) for value in (x0, xt, t))
        noise = self._noise(mean, rng)
        z = mean + log_std.exp() * noise
        log_ratio = (0.5 * (noise.square() - z.square()) + log_std).sum(-1)
        return Drawn(mean, log_std, log_ratio, self.predict(x0, xt, xt, t, cond=z))

    def denoise(self, xt: Int[Tensor, "B L"], t: Float[Tensor, " B"], rng: Rng) -> Denoised:
        """z ~ N(0, I), then one factorised step."""
        prior = self.prior(xt, rng)
        return Denoised(subs(self.backbone(xt, t, **prior).logits, xt, self.space.mask_id), prior["cond"])

    def prior(self, xt: Int[Tensor, "B L"], rng: Rng) -> dict[str, Any]:
        """z ~ N(0, I)."""
        like = torch.empty(len(xt), self.config.latent, device=xt.device, dtype=next(self.parameters()).dtype)
        return {"cond": self._noise(like, rng)}

    @staticmethod
    def _noise(like: Float[Tensor, "B Z"], rng: Rng) -> Float[Tensor, "B Z"]:
        return torch.randn(like.shape, generator=rng.stream("latent"), device=like.device, dtype=like.dtype)
