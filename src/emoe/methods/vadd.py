"""VADD: a Gaussian latent shared by the sequence, with a recognition network (Eq. 4)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from emoe.backbones.base import BackboneConfig
from emoe.config import option
from emoe.diffusion.categorical import gaussian_kl
from emoe.diffusion.masking import subs
from emoe.methods.base import MaskedDiffusion, MaskedDiffusionConfig
from emoe.ramps import Linear, Ramp
from emoe.rng import Rng
from emoe.types import Denoised, Inference, TokenSpace, Wants, Weighed


@dataclass(frozen=True, kw_only=True)
class VADDConfig(MaskedDiffusionConfig, kind="vadd"):
    """Options of VADD."""

    latent: int = option(8, doc="size Z of the Gaussian latent", low=1)
    kl_weight: Ramp = option(Linear(start=0.001, end=1.0, share=0.3), doc="KL weight lambda over training", low=0)
    elbo_weighted: bool = option(
        False, doc="put -alpha'/(1-alpha) on the KL too, as VADD publishes it; false: as the E-MoE paper prints it"
    )

    def wants(self) -> Wants:
        """A latent vector and an encoder of mean and log standard deviation."""
        return Wants(cond=self.latent, encoder=2 * self.latent)

    def build(self, space: TokenSpace, backbone: BackboneConfig) -> VADD:
        """Make the method."""
        return VADD(self, space, backbone)


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

    def infer(
        self,
        x0: Int[Tensor, "B L"],
        xt: Int[Tensor, "B L"],
        t: Float[Tensor, " B"],
        knobs: Mapping[str, Tensor],
        rng: Rng,
    ) -> Inference:
        """z = mean + std * noise from the encoder's Gaussian, which sees x0, t and the mask pattern of xt."""
        mean, log_std, _, log_x_theta = self._posterior(x0, xt, t, rng)
        return Inference(log_x_theta, gaussian_kl(mean, log_std))

    def weigh(self, x0: Int[Tensor, "B L"], xt: Int[Tensor, "B L"], t: Float[Tensor, " B"], rng: Rng) -> Weighed:
        """log N(z; 0, I) - log N(z; mean, std^2) for z = mean + std * noise."""
        mean, log_std, noise, log_x_theta = self._posterior(x0, xt, t, rng)
        z = mean + log_std.exp() * noise
        return Weighed(log_x_theta, (0.5 * (noise.square() - z.square()) + log_std).sum(-1))

    def _posterior(
        self, x0: Int[Tensor, "B L"], xt: Int[Tensor, "B L"], t: Float[Tensor, " B"], rng: Rng
    ) -> tuple[Float[Tensor, "B Z"], Float[Tensor, "B Z"], Float[Tensor, "B Z"], Float[Tensor, "B L V"]]:
        """Mean, log standard deviation and noise of a draw, and log p(x0 | xt, z) under it."""
        mean, log_std = self.encoder(x0, t, xt == self.space.mask_id).chunk(2, dim=-1)
        noise = self._noise(mean, rng)
        logits = self.backbone(xt, t, cond=mean + log_std.exp() * noise).logits
        return mean, log_std, noise, subs(logits, xt, self.space.mask_id)

    def denoise(self, xt: Int[Tensor, "B L"], t: Float[Tensor, " B"], rng: Rng) -> Denoised:
        """z ~ N(0, I), then one factorised step."""
        like = torch.empty(len(xt), self.config.latent, device=xt.device, dtype=next(self.parameters()).dtype)
        z = self._noise(like, rng)
        return Denoised(subs(self.backbone(xt, t, cond=z).logits, xt, self.space.mask_id), z)

    @staticmethod
    def _noise(like: Float[Tensor, "B Z"], rng: Rng) -> Float[Tensor, "B Z"]:
        return torch.randn(like.shape, generator=rng.stream("latent"), device=like.device, dtype=like.dtype)
