"""VADD: a Gaussian latent shared by the sequence, with a recognition network (Eq. 4)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from emoe.backbones.base import BackboneConfig
from emoe.config import option
from emoe.diffusion.categorical import each_component
from emoe.diffusion.masking import subs
from emoe.methods.masked import Inferred, MaskedDiffusion, MaskedDiffusionConfig, ReverseStep
from emoe.ramps import Linear, Ramp
from emoe.rng import Rng, derive_seed
from emoe.types import Mixture, Needs, Noised, PerRow, Ramps, Tokens, TokenSpace

NODES = {1: 2_000, 2: 60}  # points of the trapezoid rule in each dimension of a latent of that size
SAMPLES = 4_096  # latents drawn for all rows together where Z is too large for quadrature


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

    def needs(self) -> Needs:
        return Needs(cond=self.latent, encoder=2 * self.latent)  # mean and log standard deviation

    def variant(self) -> tuple[str, str]:
        return ("-plus", "+") if self.draws > 1 else ("", "")

    def tiny(self) -> VADDConfig:
        return replace(self, latent=1)


@dataclass(frozen=True)
class GaussianLatent:
    """z = mean + std * noise for N rows, with the prior N(0, I)."""

    mean: Float[Tensor, "N Z"]
    log_std: Float[Tensor, "N Z"]
    noise: Float[Tensor, "N Z"]

    @cached_property
    def z(self) -> Float[Tensor, "N Z"]:
        """The latent vectors."""
        return self.mean + self.log_std.exp() * self.noise

    def kl(self) -> Float[Tensor, " N"]:
        """KL(N(mean, std^2) || N(0, I)) = 1/2 sum (mean^2 + std^2 - 1 - 2 log std)."""
        return 0.5 * (self.mean.square() + (2 * self.log_std).exp() - 1 - 2 * self.log_std).sum(-1)

    def log_ratio(self) -> Float[Tensor, " N"]:
        """log N(z; 0, I) - log N(z; mean, std^2)."""
        return (0.5 * (self.noise.square() - self.z.square()) + self.log_std).sum(-1)


class VADD(MaskedDiffusion, config=VADDConfig):
    """p(x_s | x_t) = integral of p(x_s | x_t, z) N(z; 0, I) dz; a fresh z at every step (Eq. 4)."""

    label, colour, has_latent = "VADD", "#f28e2b", True

    def __init__(self, config: VADDConfig, space: TokenSpace, backbone: BackboneConfig):
        super().__init__(config, space, backbone, ramps={"kl_weight": config.kl_weight})
        self.encoder = backbone.build_encoder(space, config.needs())
        self.draws_components = config.latent not in NODES

    def kl_weight(self, noised: Noised, ramp: Ramps) -> Tensor:
        """lambda, or lambda * (-alpha' / (1 - alpha)) with `elbo_weighted`."""
        return ramp["kl_weight"] * noised.weight if self.config.elbo_weighted else ramp["kl_weight"]

    def infer(self, noised: Noised, ramp: Ramps, rng: Rng, draws: int = 1) -> Inferred:
        """Draw z from the encoder's Gaussian, which depends on x0, t and the mask pattern; `draws` times per row."""
        parameters = self.encoder(noised.x0, noised.t, noised.xt == self.space.mask_id)
        if draws > 1:
            parameters, noised = parameters.repeat_interleave(draws, dim=0), noised.repeated(draws)
        mean, log_std = parameters.chunk(2, dim=-1)
        latent = GaussianLatent(mean, log_std, self._noise(mean, rng))
        return Inferred(self.predict(noised, noised.xt, noised.t, cond=latent.z)[0], latent)

    def objective(self, noised: Noised, ramp: Ramps, rng: Rng) -> tuple[PerRow, PerRow, PerRow, Inferred]:
        """Return -beta log 1/K sum_k exp(f_k / beta) p(z_k) / q(z_k), f_k = w(t) log p(x0 | xt, z_k), for K draws.

        beta is the weight of the KL, at least 0.01 here. With beta = 1 at t = 1 it is the importance-weighted bound of
        Burda et al. (2016); with K = 1 its mean would be the objective itself, for any beta.
        """
        draws = self.config.draws
        if draws == 1:
            return super().objective(noised, ramp, rng)
        out = self.infer(noised, ramp, rng, draws)
        log_ratio, kl = (value.view(-1, draws) for value in (out.latent.log_ratio(), out.latent.kl()))
        recon = noised.weight[:, None] * -out.log_token.sum(-1).view(-1, draws)
        beta = self.kl_weight(noised, ramp).clamp(min=0.01)
        value = log_ratio - recon / (beta[:, None] if beta.ndim else beta)
        loss = -beta * (value.logsumexp(1) - math.log(draws))
        return loss, recon.mean(1), kl.mean(1), out

    def prior(self, step: ReverseStep, rng: Rng) -> dict[str, Any]:
        """z ~ N(0, I)."""
        like = torch.zeros(len(step.x), self.config.latent, device=step.x.device, dtype=next(self.parameters()).dtype)
        return {"cond": like if step.greedy else self._noise(like, rng)}

    @torch.no_grad()
    def components(self, xt: Tokens, t: float, *, seed: int = 0) -> Mixture:
        """Return points of a trapezoid rule if Z <= 2, else equally weighted latents; all rows share them."""
        size, rows = self.config.latent, len(xt)
        if self.draws_components:
            z = gaussian_points(max(1, SAMPLES // rows), size, derive_seed(seed, "exact", t))
            log_weight = z.new_full((len(z),), -math.log(len(z)))
        else:
            z, log_weight = gaussian_grid(size, NODES[size])
        z, parts = z.to(next(self.parameters())), []
        for x, number in each_component(xt, len(z), f"VADD has {len(z)} values of its latent"):
            out = self.backbone(x, torch.full((len(x),), t, device=x.device), cond=z[number])
            parts.append(subs(self.backbone.read(out.h).double(), x, self.space.mask_id))
        log_token = torch.cat(parts).unflatten(0, (rows, len(z)))
        return Mixture(log_weight.to(xt.device).expand(rows, -1), log_token)

    @staticmethod
    def _noise(like: Float[Tensor, "B Z"], rng: Rng) -> Float[Tensor, "B Z"]:
        return torch.randn(like.shape, generator=rng.stream("latent"), device=like.device, dtype=like.dtype)


def gaussian_grid(size: int, nodes: int) -> tuple[Float[Tensor, "R Z"], Float[Tensor, " R"]]:
    """Return points and log-weights of a trapezoid rule on [-9, 9]^Z for N(0, I), with `nodes` in each dimension."""
    x = torch.linspace(-9, 9, nodes, dtype=torch.float64)
    log_weight = torch.log_softmax(-x.square() / 2, 0)
    points = torch.cartesian_prod(*[x] * size).view(-1, size)
    return points, torch.cartesian_prod(*[log_weight] * size).view(-1, size).sum(-1)


def gaussian_points(count: int, size: int, seed: int) -> Float[Tensor, "R Z"]:
    """Map `count` scrambled Sobol points to N(0, I): each is a fair draw, together they are spread evenly."""
    uniform = torch.quasirandom.SobolEngine(size, scramble=True, seed=seed).draw(count, dtype=torch.float64)
    return torch.special.ndtri(uniform.clamp(1e-12, 1 - 1e-12))
