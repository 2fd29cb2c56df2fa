"""E-MoE: the experts that the backbone picks, per token and block, are a discrete latent z (Section 3).

Algorithm 1, one training step                              Algorithm 2, one reverse step
  3-4  t ~ U, x_t ~ q(x_t | x_0)           masked.noise       3  z ~ p(z | x_t)          prior
  5    q(z | x_0): router on x_0           infer              4  p(x_0 | x_t, z)         masked.sample
  6    z ~ q, Gumbel-softmax (Eq. 10-11)   infer              5  x_s ~ p(x_s | x_t, z)   masked.sample
  7    x_theta(x_t, z)                     infer
  8    p(z | x_t): router on x_t along z   infer
  9    w(t) NLL + KL (Eq. 9)               masked.forward
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from emoe.backbones.base import BackboneConfig
from emoe.config import ConfigError, option
from emoe.methods.masked import Inferred, MaskedDiffusion, MaskedDiffusionConfig, ReverseStep
from emoe.ramps import Constant, Exponential, Ramp
from emoe.rng import Rng
from emoe.routing import compare
from emoe.routing.compare import CompareConfig
from emoe.routing.latent import RouteLatent, describe_collapse, enumerate_routes
from emoe.routing.routes import draw, paired, sharpened
from emoe.types import Mixture, Needs, Noised, PerRow, Ramps, Tokens, TokenSpace


@dataclass(frozen=True, kw_only=True)
class EMoEConfig(MaskedDiffusionConfig, kind="emoe"):
    """Options of E-MoE; the defaults are the settings of the paper's toy experiments."""

    experts: int = option(8, doc="experts E per block", low=1)
    top_k: int = option(2, doc="relaxed weights that are kept and get a gradient", low=1)
    relax_tau: Ramp = option(
        Exponential(start=1.0, end=0.1), doc="temperature of the Gumbel-softmax; shapes gradients only", above=0
    )
    kl_weight: Ramp = option(Constant(value=1.0), doc="weight of the route KL, summed over blocks and positions", low=0)
    kl_time_power: Ramp = option(Constant(value=0.0), doc="p of a further factor w(t)^p on the KL", low=0)
    free_nats: float = option(
        0.0, doc="nats per row up to which the route KL of a block is not counted in training", low=0
    )
    free_every: int = option(1, doc="blocks with free nats: 1 = all, n = the first and every n-th after it", low=1)
    balance: float = option(0.0, doc="weight of the balance loss", low=0)
    usage_floor: float | None = option(
        None, doc="balance loss: nats by which the entropy of a block's usage is below this; none: Switch's", low=0
    )
    route_tau: float = option(1.0, doc="sharpening of the prior when sampling; 1 = the model, 0 = greedy", low=0)
    compare: CompareConfig | None = option(
        None, doc="learn the posterior by comparing several draws; none: through the gates (Eq. 10-11)"
    )

    def conflicts(self) -> Iterator[str]:
        yield from super().conflicts()
        if self.top_k > self.experts:
            yield f"top_k: must be in 1..experts = {self.experts}, got {self.top_k}"
        if self.compare is not None and self.compare.sum_last and self.head_chunk:
            yield "head_chunk: summing the last block needs all logits at once; use 0, or compare.sum_last false"
        if self.compare is not None and self.free_nats:
            yield "free_nats: has no effect with compare; use 0"

    def needs(self) -> Needs:
        return Needs(experts=self.experts)

    def variant(self) -> tuple[str, str]:
        """Name how the routes learn, if it is not the paper's way."""
        name = "free-nats" if self.free_nats else "floor" if self.balance and self.usage_floor is not None else ""
        name = name if self.compare is None else str(self.compare.estimator)
        labels = {"vimco": "VIMCO", "free-nats": "free nats", "floor": "usage floor"}
        return (f"-{name}", f" ({labels.get(name, name)})") if name else ("", "")

    def tiny(self) -> EMoEConfig:
        return replace(self, experts=2)


class EMoE(MaskedDiffusion, config=EMoEConfig):
    """p(x_s | x_t) = sum over routes z of p(z | x_t) p(x_s | x_t, z) (Eq. 5)."""

    label, colour, has_latent = "E-MoE", "#59a14f", True

    def __init__(self, config: EMoEConfig, space: TokenSpace, backbone: BackboneConfig):
        names = ("relax_tau", "kl_weight", "kl_time_power")
        super().__init__(config, space, backbone, ramps={name: getattr(config, name) for name in names})
        if config.compare is not None and config.compare.sum_last:
            compare.check_sum_last(self.backbone, backbone.kind)

    def infer(self, noised: Noised, ramp: Ramps, rng: Rng) -> Inferred:
        """Both passes as one call on [x0; xt]: the clean half draws z, both halves run it (Algo. 1, lines 5-8).

        Router logits of the clean half are the posterior, those of the noisy half along the same z the prior.
        """
        if self.config.compare is not None:
            return self.inferred(*compare.both_passes(self, noised, rng, draws=1))
        posterior = draw(rng.stream("route"), ramp["relax_tau"], top_k=self.config.top_k)
        rows, times = torch.cat([noised.x0, noised.xt]), torch.cat([noised.t, noised.t])
        log_token, out = self.predict(noised, rows, times, route=paired(posterior, self.backbone.routed_blocks))
        post, prior = zip(*(logits.chunk(2) for logits in out.route_logits), strict=True)
        routes = tuple(gate.expert[-len(log_token) :, :, 0] for gate in out.gates)
        return self.inferred(log_token, RouteLatent(post, prior, routes))

    def objective(self, noised: Noised, ramp: Ramps, rng: Rng) -> tuple[PerRow, PerRow, PerRow, Inferred]:
        """With `compare` the loss over several draws of z."""
        if self.config.compare is None:
            return super().objective(noised, ramp, rng)
        log_token, latent = compare.both_passes(self, noised, rng, draws=self.config.compare.draws)
        beta = self.kl_weight(noised, ramp)
        loss, recon, kl, effective = compare.compare_draws(self, noised, log_token, latent, beta)
        return loss, recon, kl, self.inferred(log_token, latent, effective_draws=effective)

    def inferred(self, log_token: Float[Tensor, "N L"], latent: RouteLatent, **log: Tensor) -> Inferred:
        """Add the auxiliary loss, the KL beyond the free nats and the log to a posterior pass."""
        log = latent.log(by_position=self.backbone.routes_tokens) | log
        aux = self.config.balance * latent.imbalance(self.config.usage_floor) if self.config.balance else None
        return Inferred(log_token, latent, aux, self._beyond_free(latent.stats.kl), log)

    def kl_weight(self, noised: Noised, ramp: Ramps) -> Tensor:
        """The ramp's weight, 1 in the paper's experiments (App. B.1), times w(t)^p."""
        if self.config.kl_time_power == Constant(value=0.0):
            return ramp["kl_weight"]
        return ramp["kl_weight"] * noised.weight ** ramp["kl_time_power"]

    def _beyond_free(self, kl: Float[Tensor, "N D"]) -> Float[Tensor, " N"] | None:
        """Sum the KL of the blocks whose mean over the batch exceeds their free nats."""
        if not self.config.free_nats:
            return None
        free = self.config.free_nats * (torch.arange(kl.shape[1], device=kl.device) % self.config.free_every == 0)
        # The limit is on the mean over the batch: on each row it would also free rows that need no nats.
        return (kl * (kl.mean(0) > free).to(kl.dtype)).sum(-1)

    def prior(self, step: ReverseStep, rng: Rng) -> dict[str, Any]:
        """Draw each route from its router, sharpened by `route_tau` (Algo. 2, line 3)."""
        return {"route": sharpened(rng.stream("route"), 0.0 if step.greedy else self.config.route_tau)}

    def components(self, xt: Tokens, t: float, *, seed: int = 0) -> Mixture:
        """Return one component for each choice of routes in all blocks but the last, which is summed out."""
        if not self.backbone.local_last_block:
            raise ConfigError("exact: routes in the last block of this backbone move other positions; ask for a bound")
        return enumerate_routes(self, xt, t)

    def collapse(self, record: Mapping[str, Any]) -> str | None:
        return describe_collapse(record, self.config.experts)
