"""E-MoE: the experts that the backbone picks, per token and block, are a discrete latent (Section 3).

One router read on the clean sequence is the posterior, on the noisy one the prior. Training runs both in one call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from emoe.backbones.base import BackboneConfig
from emoe.config import option
from emoe.diffusion.masking import subs
from emoe.methods.base import MaskedDiffusion, MaskedDiffusionConfig
from emoe.ramps import Constant, Exponential, Ramp
from emoe.rng import Rng
from emoe.routing.kl import load_balance, route_kl, routing_entropy, usage
from emoe.routing.routes import Gradient, draw, paired, sharpened
from emoe.types import BackboneOut, Denoised, Inference, TokenSpace, Wants, Weighed


@dataclass(frozen=True, kw_only=True)
class EMoEConfig(MaskedDiffusionConfig, kind="emoe"):
    """Options of E-MoE; the defaults are the paper's reading."""

    experts: int = option(8, doc="experts E per block", low=1)
    top_k: int = option(2, doc="relaxed weights that are kept and get a gradient", low=1)
    gradient: Gradient = option("top-k", doc="which straight-through weights get a gradient")
    relax_tau: Ramp = option(
        Exponential(start=1.0, end=0.1), doc="temperature of the Gumbel-softmax; shapes gradients only", above=0
    )
    kl_weight: Ramp = option(Constant(value=1.0), doc="weight of the route KL, summed over blocks and positions", low=0)
    kl_positions: Literal["all", "masked"] = option("all", doc="positions whose route KL is counted in training")
    balance: float = option(0.0, doc="weight of the Switch load-balancing loss", low=0)
    mask_aware: bool = option(False, doc="show the posterior which positions are masked, by a learned embedding")
    route_tau: float = option(1.0, doc="sharpening of the prior when sampling; 1 = the model, 0 = greedy", low=0)

    def conflicts(self) -> Iterator[str]:
        """A gate cannot keep more weights than there are experts."""
        if self.top_k > self.experts:
            yield f"top_k: must be in 1..experts = {self.experts}, got {self.top_k}"

    def wants(self) -> Wants:
        """Routed experts, and marks if the posterior is to see the mask pattern."""
        return Wants(experts=self.experts, marks=self.mask_aware)

    def build(self, space: TokenSpace, backbone: BackboneConfig) -> EMoE:
        """Make the method."""
        return EMoE(self, space, backbone)


class EMoE(MaskedDiffusion):
    """p(x_s | x_t) = sum over routes z of p(z | x_t) p(x_s | x_t, z) (Eq. 5)."""

    config: EMoEConfig

    def __init__(self, config: EMoEConfig, space: TokenSpace, backbone: BackboneConfig):
        super().__init__(config, space, ramps={"relax_tau": config.relax_tau, "kl_weight": config.kl_weight})
        self.backbone = backbone.build(space, config.wants())

    def kl_weight(self, t: Float[Tensor, " B"], knobs: Mapping[str, Tensor]) -> Tensor:
        """The weight of KL_route, 1 in the paper's experiments (App. B.1)."""
        return knobs["kl_weight"]

    def infer(
        self,
        x0: Int[Tensor, "B L"],
        xt: Int[Tensor, "B L"],
        t: Float[Tensor, " B"],
        knobs: Mapping[str, Tensor],
        rng: Rng,
    ) -> Inference:
        """Both passes of Algo. 1 as one call on [x0; xt]: the clean half draws z, both halves run it.

        Router logits of the clean half are the posterior, those of the noisy half along the same z the prior.
        """
        out, post, prior = self._both_passes(x0, xt, t, knobs["relax_tau"], rng)
        kl = route_kl(post, prior)
        train_kl = None
        if self.config.kl_positions == "masked":
            train_kl = route_kl(post, prior, (xt == self.space.mask_id).to(kl.dtype)).sum(-1)
        log_x_theta = subs(out.logits, xt, self.space.mask_id)
        log = self._log(kl, post, prior, out)
        return Inference(log_x_theta, kl.sum(-1), self._balance(post, out), log, train_kl)

    def weigh(self, x0: Int[Tensor, "B L"], xt: Int[Tensor, "B L"], t: Float[Tensor, " B"], rng: Rng) -> Weighed:
        """log p(z | xt) - log q(z | x0): both routers' log-probabilities of the drawn z, over blocks and positions."""
        out, post, prior = self._both_passes(x0, xt, t, 1.0, rng)
        ratio = torch.zeros(len(x0), device=x0.device, dtype=post[0].dtype)
        for gate, post_d, prior_d in zip(out.gates, post, prior, strict=True):
            drawn = gate.expert[: len(x0), :, :1]
            difference = torch.log_softmax(prior_d, -1) - torch.log_softmax(post_d, -1)
            ratio = ratio + difference.gather(-1, drawn).squeeze(-1).sum(-1)
        return Weighed(subs(out.logits, xt, self.space.mask_id), ratio)

    def _both_passes(
        self,
        x0: Int[Tensor, "B L"],
        xt: Int[Tensor, "B L"],
        t: Float[Tensor, " B"],
        relax_tau: Tensor | float,
        rng: Rng,
    ) -> tuple[BackboneOut, tuple[Tensor, ...], tuple[Tensor, ...]]:
        """One call on [x0; xt]: what the network says, posterior logits and prior logits, block by block."""
        posterior = draw(rng.stream("route"), relax_tau, top_k=self.config.top_k, gradient=self.config.gradient)
        masked = xt == self.space.mask_id
        out = self.backbone(
            torch.cat([x0, xt]),
            torch.cat([t, t]),
            marks=torch.cat([masked, torch.zeros_like(masked)]) if self.config.mask_aware else None,
            route=paired(posterior, self.backbone.routed_blocks),
        )
        post, prior = zip(*(logits.chunk(2) for logits in out.route_logits), strict=True)
        return out, post, prior

    def denoise(self, xt: Int[Tensor, "B L"], t: Float[Tensor, " B"], rng: Rng) -> Denoised:
        """z ~ p(z | xt) drawn block by block within the one network call (Algo. 2)."""
        out = self.backbone(xt, t, route=sharpened(rng.stream("route"), self.config.route_tau))
        return Denoised(subs(out.logits, xt, self.space.mask_id), out.gates)

    def _balance(self, post: tuple[Tensor, ...], out: BackboneOut) -> Tensor | None:
        if not self.config.balance:
            return None
        losses = [load_balance(logits, gate) for logits, gate in zip(post, out.gates, strict=True)]
        return self.config.balance * torch.stack(losses).mean()

    @torch.no_grad()
    def _log(
        self, kl: Float[Tensor, "B D"], post: tuple[Tensor, ...], prior: tuple[Tensor, ...], out: BackboneOut
    ) -> dict[str, Tensor]:
        """Route KL (nats per position), routing entropy of both sides and expert usage, for each block.

        Gates of a paired pass hold the posterior's choices twice (the last one once), so means over them are right.
        """
        log = {}
        for d, gate in enumerate(out.gates):
            log[f"route_kl/block{d + 1}"] = kl[:, d].mean() / post[d].shape[1]
            log[f"post_entropy/block{d + 1}"] = routing_entropy(post[d])
            log[f"prior_entropy/block{d + 1}"] = routing_entropy(prior[d])
            log[f"usage/block{d + 1}"] = usage(gate, self.config.experts)
        return log
