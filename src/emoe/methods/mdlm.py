"""MDLM: the factorised baseline, without a latent (Eq. 3, 22)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from emoe.backbones.base import BackboneConfig
from emoe.diffusion.masking import subs
from emoe.methods.base import MaskedDiffusion, MaskedDiffusionConfig
from emoe.rng import Rng
from emoe.types import Denoised, Inference, TokenSpace, Weighed


@dataclass(frozen=True, kw_only=True)
class MDLMConfig(MaskedDiffusionConfig, kind="mdlm"):
    """MDLM has no options of its own."""

    def conflicts(self) -> Iterator[str]:
        """What cannot go together."""
        yield from super().conflicts()
        if self.step_aware:
            yield "step_aware: has no meaning without a latent; use false"

    def build(self, space: TokenSpace, backbone: BackboneConfig) -> MDLM:
        """Make the method."""
        return MDLM(self, space, backbone)


class MDLM(MaskedDiffusion):
    """One factorised reverse step per network call."""

    has_latent = False

    def __init__(self, config: MDLMConfig, space: TokenSpace, backbone: BackboneConfig):
        super().__init__(config, space, ramps={})
        self.backbone = backbone.build(space, config.wants())

    def infer(
        self,
        x0: Int[Tensor, "B L"],
        xt: Int[Tensor, "B L"],
        t: Float[Tensor, " B"],
        knobs: Mapping[str, Tensor],
        rng: Rng,
    ) -> Inference:
        """There is no latent: the posterior pass is the prior pass, the KL is 0."""
        out = self.predict(x0, xt, xt, t)
        return Inference(out.log_x_theta, torch.zeros_like(t), log_token=out.log_token)

    def denoise(self, xt: Int[Tensor, "B L"], t: Float[Tensor, " B"], rng: Rng) -> Denoised:
        """p(x_s | x_t) of Eq. 3."""
        return Denoised(subs(self.backbone(xt, t).logits, xt, self.space.mask_id))

    def prior(self, xt: Int[Tensor, "B L"], rng: Rng) -> dict[str, Any]:
        """There is no latent."""
        return {}

    def weigh(self, x0: Int[Tensor, "B L"], xt: Int[Tensor, "B L"], t: Float[Tensor, " B"], rng: Rng) -> Weighed:
        """Nothing to draw: the weight is 1."""
        out = self.predict(x0, xt, xt, t)
        return Weighed(out.log_x_theta, torch.zeros_like(t), out.log_token)
