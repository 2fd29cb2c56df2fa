"""SEDD: masked diffusion that learns ratios of probabilities by score entropy (Lou et al. 2024)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from emoe.backbones.base import BackboneConfig
from emoe.backbones.layers import dropout_from
from emoe.config import ConfigError, option
from emoe.diffusion.masking import mask_tokens, start_rows
from emoe.diffusion.schedule import LogLinearSchedule
from emoe.diffusion.score import analytic, log_scale, log_score, score_entropy
from emoe.diffusion.times import stratified_times
from emoe.methods.base import Method, MethodConfig
from emoe.rng import Rng
from emoe.types import Convention, Loss, StepEvent, TokenSpace, Wants


@dataclass(frozen=True, kw_only=True)
class SEDDConfig(MethodConfig, kind="sedd"):
    """Options of SEDD with the absorbing process."""

    eps: float = option(
        1e-3, doc="share of tokens still clean at t = 1: sigma(t) = -log(1 - (1 - eps) t)", above=0, high=0.5
    )
    t_low: float = option(1e-3, doc="smallest training time; bounds the 1/t weight", low=0, high=0.5)

    def wants(self) -> Wants:
        """A network that reads the time, since ratios depend on it."""
        return Wants(time=True, head_chunk=self.head_chunk)

    def build(self, space: TokenSpace, backbone: BackboneConfig) -> SEDD:
        """Make the method."""
        if lines := list(backbone.refusals(self.wants())):
            raise ConfigError(lines)
        return SEDD(self, space, backbone)


class SEDD(Method):
    """Scores s_y of all symbols y at each masked position, in place of the probabilities of x0.

    Loss at time t: sigma'(t) * sum over masked l of [sum_y s_y - r log s_x0 + r (log r - 1)], r = 1 / (e^sigma - 1).
    Since sigma' r = -alpha' / (1 - alpha) = 1 / t, this is (1 / t) * sum over masked l of
    [-log x_theta(x0^l) + (c_l - 1 - log c_l)], with x_theta = s / sum s and c = sum_y s_y / r: MDLM's loss, and a price
    for scores whose sum is not the rate at which tokens are revealed.
    """

    conventions: ClassVar[tuple[str, ...]] = ("nelbo",)

    def __init__(self, config: SEDDConfig, space: TokenSpace, backbone: BackboneConfig):
        super().__init__()
        self.config, self.space, self.ramps = config, space, {}
        self.schedule = LogLinearSchedule(eps=config.eps)
        self.backbone = backbone.build(space, config.wants())

    def sigma(self, t: Float[Tensor, " B"]) -> Float[Tensor, " B"]:
        """-log(1 - (1 - eps) t), in float64."""
        return -torch.log1p(-(1 - self.config.eps) * t.double())

    def log_score(self, xt: Int[Tensor, "B L"], t: Float[Tensor, " B"]) -> Float[Tensor, "B L V"]:
        """log s, 0 at the current token; one network call. At clean positions it means nothing."""
        return log_score(self.backbone(xt, t).logits, xt, self.sigma(t))

    def forward(self, x0: Int[Tensor, "B L"], knobs: Mapping[str, Tensor], rng: Rng) -> Loss:
        """Mean over rows of the loss at t ~ U(t_low, 1], divided by L; its two parts are logged apart."""
        t = stratified_times(
            len(x0), rng.stream("time", shared=True), low=self.config.t_low, rank=rng.rank, world=rng.world
        )
        xt = mask_tokens(x0, self.schedule.alpha(t), self.space.mask_id, rng.stream("mask"))
        with dropout_from(self, rng.stream("dropout")):
            loss, recon = self.score_loss(x0, xt, t)
        total, recon = (value.mean() / self.space.length for value in (loss, recon))
        return Loss(total, {"loss": total, "recon": recon, "excess": total - recon})

    def score_loss(
        self, x0: Int[Tensor, "B L"], xt: Int[Tensor, "B L"], t: Float[Tensor, " B"]
    ) -> tuple[Float[Tensor, " B"], Float[Tensor, " B"]]:
        """The loss of each row at its time, in nats, and the part of it that is (1 / t) * masked NLL of s / sum s."""
        total, target = self._total_and_target(x0, xt, t)
        sigma = self.sigma(t)
        scale = log_scale(sigma, self.space.size)[:, None].to(total.dtype)
        entropy = score_entropy(total - scale, target - scale, sigma)
        masked = xt == self.space.mask_id
        slope = ((1 - self.config.eps) * sigma.exp()).to(total.dtype)  # sigma'(t)
        loss = slope * torch.where(masked, entropy, 0.0).sum(-1)
        with torch.no_grad():
            recon = self.schedule.elbo_weight(t).to(total.dtype) * torch.where(masked, total - target, 0.0).sum(-1)
        return loss, recon

    def _total_and_target(
        self, x0: Int[Tensor, "B L"], xt: Int[Tensor, "B L"], t: Float[Tensor, " B"]
    ) -> tuple[Float[Tensor, "B L"], Float[Tensor, "B L"]]:
        """log sum_y e^a_y over all symbols but the mask, and a_x0, of the network's output a."""
        if self.config.head_chunk:
            h, _, _ = self.backbone.features(xt, t)
            return self.read_masked(h, x0, xt == self.space.mask_id)
        logits = self.backbone(xt, t).logits  # the mask's column is -inf
        return logits.logsumexp(-1), logits.gather(-1, x0[..., None]).squeeze(-1)

    @torch.no_grad()
    def nll_bound(self, x0: Int[Tensor, "B L"], convention: Convention, rng: Rng) -> Float[Tensor, " B"]:
        """nelbo: the loss at t ~ U(0, 1], one draw per row, times stratified over the batch; nats per row.

        It bounds the NLL of the sampler's chain in the limit of many steps: from all masks at t = 1, symbols y appear
        at rates sigma' s_y. The posterior that the bound compares it with must start from all masks too, so a token is
        masked here with probability t, not (1 - eps) t as in training; both reveal x0 at the rate sigma' r = 1 / t.
        With the true ratios its mean over the data is their entropy H. Training counts only masked shares m from
        (1 - eps) t_low to 1 - eps: with G(m) the mean entropy of x0 given x with a share m masked, the integral of
        the loss over [t_low, 1] is then G(1 - eps) - G((1 - eps) t_low), where G(0) = 0 and G(1) = H.
        """
        if convention.kind != "nelbo":
            raise ConfigError([f"likelihood: sedd has nelbo alone, the bound of its score entropy, not {convention}"])
        t = stratified_times(len(x0), rng.stream("time", shared=True), rank=rng.rank, world=rng.world)
        xt = mask_tokens(x0, 1 - t, self.space.mask_id, rng.stream("mask"))
        return self.score_loss(x0, xt, t)[0].double()

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
        """The analytic (Tweedie) sampler with exactly `steps` network calls, see `analytic`."""
        x = start_rows(given, n, self.space, next(self.parameters()).device)

        def alpha(t: float) -> float:
            return float(self.schedule.alpha(torch.tensor(t, dtype=torch.float64)))

        return analytic(self.log_score, x, alpha, steps, rng, mask_id=self.space.mask_id, on_step=on_step)
