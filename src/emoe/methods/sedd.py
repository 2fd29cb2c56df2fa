"""SEDD: masked diffusion that learns ratios of probabilities by score entropy (Lou et al. 2024).

With alpha = e^-sigma the ratio of x with a masked position set to y, and x itself, is r * p(x0^l = y | clean tokens),
where r = alpha / (1 - alpha) = 1 / (e^sigma - 1). The network predicts s_y for all y ("concrete scores").
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from emoe.backbones.base import BackboneConfig
from emoe.backbones.layers import dropout_from
from emoe.config import ConfigError, option
from emoe.diffusion.categorical import AT_ONCE, draw_categorical
from emoe.diffusion.masking import NEG_INF, mask_tokens
from emoe.diffusion.schedule import LogLinearSchedule
from emoe.diffusion.times import GridStep, grid, stratified_times
from emoe.methods.base import PLAIN, Method, MethodConfig, SamplerConfig
from emoe.rng import Rng
from emoe.types import Likelihood, Logits, Loss, Needs, OnStep, PerRow, Positions, Ramps, StepEvent, Tokens, TokenSpace


@dataclass(frozen=True, kw_only=True)
class SEDDConfig(MethodConfig, kind="sedd"):
    """Options of SEDD with the absorbing process."""

    eps: float = option(
        1e-3, doc="share of tokens still clean at t = 1: sigma(t) = -log(1 - (1 - eps) t)", above=0, high=0.5
    )
    t_low: float = option(1e-3, doc="smallest training time; bounds the 1/t weight", low=0, high=0.5)

    def needs(self) -> Needs:
        return Needs(time=True)


class SEDD(Method, config=SEDDConfig):
    """Scores s_y of all symbols y at each masked position, in place of the probabilities of x0.

    Loss at time t: sigma'(t) * sum over masked l of [sum_y s_y - r log s_x0 + r (log r - 1)].
    Since sigma' r = -alpha' / (1 - alpha) = 1 / t, this is (1 / t) * sum over masked l of
    [-log x_theta(x0^l) + (c_l - 1 - log c_l)], with x_theta = s / sum s and c = sum_y s_y / r: MDLM's loss, and a
    penalty on scores whose sum is not the rate at which tokens are revealed.
    """

    label, colour = "SEDD", "#b07aa1"

    def __init__(self, config: SEDDConfig, space: TokenSpace, backbone: BackboneConfig):
        super().__init__(config, space, backbone)
        self.schedule = LogLinearSchedule(eps=config.eps)

    def sigma(self, t: PerRow) -> PerRow:
        """-log(1 - (1 - eps) t), in float64."""
        return -torch.log1p(-(1 - self.config.eps) * t.double())

    def log_score(self, xt: Tokens, t: PerRow) -> Logits:
        """log s = network - log(e^sigma - 1) - log(V - 1), and 0 at the current token; one network call."""
        logits = self.backbone.read(self.backbone(xt, t).h)
        scaled = logits - log_scale(self.sigma(t), self.space.size)[:, None, None].to(logits.dtype)
        return scaled.scatter(-1, xt[..., None], 0.0)

    def forward(self, x0: Tokens, ramp: Ramps, rng: Rng) -> Loss:
        """Return the mean over rows of the loss at t ~ U(t_low, 1], divided by L; its two parts are logged."""
        t = stratified_times(len(x0), rng, self.config.t_low)
        xt = mask_tokens(x0, self.schedule.alpha(t), self.space.mask_id, rng.stream("mask"))
        with dropout_from(self, rng.stream("dropout")):
            losses = self.score_loss(x0, xt, t)
        total, recon = (value.mean() / self.space.length for value in losses)
        return self.as_loss(total, {"recon": recon, "excess": total - recon}, xt == self.space.mask_id)

    def score_loss(self, x0: Tokens, xt: Tokens, t: PerRow) -> tuple[PerRow, PerRow]:
        """Return the loss of each row in nats, and its part (1 / t) * masked NLL of s / sum s."""
        masked = xt == self.space.mask_id
        total, target = self.scores(self.backbone(xt, t).h, x0, masked)
        sigma = self.sigma(t)
        scale = log_scale(sigma, self.space.size)[:, None].to(total.dtype)
        entropy = score_entropy(total - scale, target - scale, sigma)
        slope = ((1 - self.config.eps) * sigma.exp()).to(total.dtype)  # sigma'(t)
        loss = slope * torch.where(masked, entropy, 0.0).sum(-1)
        with torch.no_grad():
            recon = self.schedule.elbo_weight(t).to(total.dtype) * torch.where(masked, total - target, 0.0).sum(-1)
        return loss, recon

    def likelihoods(self) -> tuple[str, ...]:
        return ("nelbo",)

    @torch.no_grad()
    def nll(self, x0: Tokens, likelihood: Likelihood, rng: Rng) -> PerRow:
        """Return nelbo, the loss at t ~ U(0, 1] with times stratified over the batch, in nats per row.

        It bounds the NLL of the sampler's chain in the limit of many steps: from all masks at t = 1, symbols y appear
        at rates sigma' s_y. The posterior that the bound compares it with must start from all masks too, so a token is
        masked here with probability t, not (1 - eps) t as in training; both reveal x0 at the rate sigma' r = 1 / t.
        With the true ratios its mean over the data is their entropy.
        """
        if likelihood.kind != "nelbo":
            raise ConfigError(f"likelihood: sedd has nelbo only, the bound of its score entropy, not {likelihood}")
        t = stratified_times(len(x0), rng)
        xt = mask_tokens(x0, 1 - t, self.space.mask_id, rng.stream("mask"))
        return self.score_loss(x0, xt, t)[0].double()

    @torch.no_grad()
    def sample(
        self, x: Tokens, nfe: int, rng: Rng, *, sampler: SamplerConfig = PLAIN, on_step: OnStep | None = None
    ) -> Tokens:
        """Run the analytic (Tweedie) sampler on the grid t_i = i / T; its last step, from t_1 to 0, is the denoiser.

        The authors' program takes `steps` analytic steps from t = 1 to 1e-5 and then one denoising call there, at which
        almost no mask is left: steps + 1 calls.
        """
        for step in grid(self.schedule, nfe):
            rng.at(step.number)
            log_s = self.log_score(x, torch.full((len(x),), step.time, device=x.device))
            x, revealed = tweedie_step(log_s, x, step, self.space.mask_id, rng)
            if on_step is not None:
                on_step(StepEvent(step.number, step.time, x, revealed, None))
        return x


def log_scale(sigma: PerRow, size: int) -> PerRow:
    """log(e^sigma - 1) + log(V - 1), subtracted from the network's output, whose mean is then about 0."""
    return torch.log(torch.expm1(sigma)) + math.log(size - 1)


def score_entropy(log_total: Tensor, log_target: Tensor, sigma: PerRow) -> Float[Tensor, "B L"]:
    """sum_y s_y - r log s_x0 + r (log r - 1) of a masked position from log sum_y s_y and log s_x0, y not the mask.

    Zero if s is r = 1 / (e^sigma - 1) at x0 and zero elsewhere, positive otherwise. Written with c = sum_y s_y / r and
    x_theta = s / (r c) it is r [-log x_theta(x0) + (c - 1 - log c)]; computed so, the terms of size r log r cancel.
    """
    log_r = -torch.log(torch.expm1(sigma))[:, None].to(log_total.dtype)
    return log_r.exp() * (torch.exp(log_total - log_r) - 1 - (log_target - log_r))


def tweedie_step(log_s: Logits, xt: Tokens, step: GridStep, mask_id: int, rng: Rng) -> tuple[Tokens, Positions]:
    """Draw x_s by [exp(-d Q) s]_y * exp(d Q)(x_t, y), d = sigma_t - sigma_s; return it and the revealed positions.

    (e^d - 1) r is a = (alpha_s - alpha_t) / (1 - alpha_t), so a masked position is revealed with probability
    min(1, a c), c = sum_y s_y / r, and then takes y with probability s_y / sum s. The last step, a = 1, reveals all.
    """
    is_mask = torch.arange(log_s.shape[-1], device=log_s.device) == mask_id

    def at(positions: Positions, value: Callable[[Tensor], Tensor]) -> Tensor:
        # Some positions at a time: in float64 all B * L * V numbers would take most of a step's time and memory.
        parts = log_s[positions].split(AT_ONCE)
        return torch.cat([value(part.double().masked_fill(is_mask, NEG_INF)) for part in parts])

    u = torch.rand(xt.shape, generator=rng.stream("reveal"), device=xt.device, dtype=torch.float64)
    token, revealed = rng.stream("token"), xt == mask_id
    if step.reveal < 1:
        r = step.alpha / (1 - step.alpha)
        chance = step.reveal / r * at(revealed, lambda part: part.logsumexp(-1)).exp()
        revealed = revealed.masked_scatter(revealed, u[revealed] < chance)
    return xt.masked_scatter(revealed, at(revealed, lambda part: draw_categorical(part, token))), revealed
