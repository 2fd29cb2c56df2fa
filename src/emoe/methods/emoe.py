"""E-MoE: the experts that the backbone picks, per token and block, are a discrete latent (Section 3).

One router read on the clean sequence is the posterior, on the noisy one the prior. Training runs both in one call.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from emoe.backbones.base import Backbone, BackboneConfig
from emoe.config import ConfigError, option
from emoe.diffusion.masking import subs
from emoe.methods.base import MaskedDiffusion, MaskedDiffusionConfig, Predicted, log_token_of
from emoe.ramps import Constant, Exponential, Ramp
from emoe.rng import Rng
from emoe.routing.estimators import effective_draws, leave_one_out, vimco, wake_sleep, wake_sleep_weights
from emoe.routing.kl import Compared, compare, load_balance, route_kl, routing_entropy, usage_shortfall
from emoe.routing.routes import Gradient, Redraw, averaging, carried, carries, draw, paired, sharpened
from emoe.types import Denoised, Gate, Inference, Objective, TokenSpace, Wants, Weighed

Estimator = Literal["pathwise", "wake-sleep", "vimco", "leave-one-out"]
DEAD_USAGE, DEAD_KL = 0.1, 1e-4  # nats: entropy of a block's usage, and route KL per position, below which it is dead
ESTIMATORS = {"wake-sleep": wake_sleep, "vimco": vimco, "leave-one-out": leave_one_out}


@dataclass(frozen=True, kw_only=True)
class EMoEConfig(MaskedDiffusionConfig, kind="emoe"):
    """Options of E-MoE; the defaults are the paper's reading."""

    experts: int = option(8, doc="experts E per block", low=1)
    top_k: int = option(2, doc="relaxed weights that are kept and get a gradient", low=1)
    gradient: Gradient = option(
        "top-k", doc="gradient of a drawn route: straight-through weights, or another estimator"
    )
    relax_tau: Ramp = option(
        Exponential(start=1.0, end=0.1), doc="temperature of the Gumbel-softmax; shapes gradients only", above=0
    )
    estimator: Estimator = option(
        "pathwise",
        doc="how the posterior learns: through the gates, or by comparing draws (with gradient none: only so)",
    )
    draws: int = option(1, doc="routes K drawn from the posterior for each row and step, in one batched call", low=1)
    redraw: Redraw = option("all", doc="where draws of a row differ: all routes, one block, or a quarter of positions")
    credit: Literal["row", "position"] = option(
        "row", doc="what a comparison of draws judges: the row as a whole, or each position (of the coarsest block)"
    )
    carriers: Literal["all", "spread"] = option(
        "all", doc="positions whose routes the posterior chooses: all in every block, or each in one block, in turn"
    )
    mean_below: float = option(
        0.0,
        doc="share of masks at or below which a row draws no routes, but runs the mean of all experts; 0: never",
        low=0,
        high=1,
    )
    last_block: Literal["drawn", "summed"] = option(
        "drawn", doc="last block in training: its route is drawn, or all E are summed out (the sampler always draws)"
    )
    kl_weight: Ramp = option(Constant(value=1.0), doc="weight of the route KL, summed over blocks and positions", low=0)
    elbo_power: Ramp = option(
        Constant(value=0.0),
        doc="p of a further factor w(t)^p on the KL; 1: draws compare likelihoods, not powers",
        low=0,
    )
    kl_positions: Literal["all", "masked"] = option("all", doc="positions whose route KL is counted in training")
    free_nats: float = option(
        0.0, doc="nats per row up to which the route KL of a block is not counted in training", low=0
    )
    free_every: int = option(1, doc="blocks with free nats: 1 = all, n = the first and every n-th after it", low=1)
    balance: float = option(0.0, doc="weight of the balance loss", low=0)
    balance_form: Literal["switch", "floor"] = option(
        "switch", doc="balance loss: Switch's, or how far the entropy of a block's usage is below `usage_floor`"
    )
    usage_floor: float = option(1.5, doc="entropy of a block's usage below which the balance loss acts, in nats", low=0)
    mask_aware: bool = option(False, doc="show the posterior which positions are masked, by a learned embedding")
    route_tau: float = option(1.0, doc="sharpening of the prior when sampling; 1 = the model, 0 = greedy", low=0)

    def conflicts(self) -> Iterator[str]:
        """What cannot go together."""
        yield from super().conflicts()
        if self.head_chunk and self.last_block == "summed":
            yield "head_chunk: summing the last block needs all logits at once; use 0, or last_block drawn"
        if self.top_k > self.experts:
            yield f"top_k: must be in 1..experts = {self.experts}, got {self.top_k}"
        if self.estimator == "pathwise" and self.gradient == "none":
            yield "gradient: none leaves the posterior without a signal; choose one, or another estimator"
        if self.mean_below and self.last_block == "summed":
            yield "mean_below: does not go with a last block that is summed out; use 0, or last_block drawn"
        if self.mean_below and self.estimator != "pathwise":
            yield f"mean_below: leaves {self.estimator} rows without draws to compare; use 0"
        if self.estimator != "pathwise":
            if self.draws < 2:
                yield f"draws: {self.estimator} compares draws and needs at least 2, got {self.draws}"
            if self.kl_positions != "all" or self.free_nats:
                yield f"{'free_nats' if self.free_nats else 'kl_positions'}: has no meaning with {self.estimator}"

    def wants(self) -> Wants:
        """Routed experts, and marks if the posterior is to see the mask pattern."""
        return Wants(experts=self.experts, marks=self.mask_aware, head_chunk=self.head_chunk, time=self.step_aware)

    def build(self, space: TokenSpace, backbone: BackboneConfig) -> EMoE:
        """Make the method."""
        return EMoE(self, space, backbone)


@dataclass(frozen=True)
class Passes:
    """Both passes of Algo. 1 for K draws of each row; N = B * K rows, the draws of a row one after the other."""

    out: Predicted
    post: tuple[Float[Tensor, "N _P E"], ...]  # posterior logits of the drawn blocks
    prior: tuple[Float[Tensor, "N _P E"], ...]
    routes: tuple[Int[Tensor, "N _P"], ...]  # the drawn experts
    learned: tuple[Tensor, ...]  # 1 where a position carries: where the posterior is one of its own
    summed: Float[Tensor, "N P E"] | None = None  # prior logits of a last block that is summed out

    @property
    def log_x_theta(self) -> Float[Tensor, "N L V"] | None:
        """See `Predicted`."""
        return self.out.log_x_theta


class EMoE(MaskedDiffusion):
    """p(x_s | x_t) = sum over routes z of p(z | x_t) p(x_s | x_t, z) (Eq. 5)."""

    config: EMoEConfig

    def __init__(self, config: EMoEConfig, space: TokenSpace, backbone: BackboneConfig):
        ramps = {"relax_tau": config.relax_tau, "kl_weight": config.kl_weight, "elbo_power": config.elbo_power}
        super().__init__(config, space, ramps)
        self.backbone = backbone.build(space, config.wants())
        if config.last_block == "summed" and self.backbone.routed_blocks < 2:
            raise ConfigError(["last_block: summed leaves a network of one routed block nothing to draw; use drawn"])
        if config.last_block == "summed" and type(self.backbone).forward_last is Backbone.forward_last:
            raise ConfigError([f"last_block: {backbone.kind} cannot sum its last block (no forward_last); use drawn"])
        if config.kl_positions == "masked" and not self.backbone.routes_tokens:
            raise ConfigError(
                [f"kl_positions: {backbone.kind} routes squares of pixels, which are not masked as one; use all"]
            )

    def kl_weight(self, t: Float[Tensor, " B"], knobs: Mapping[str, Tensor]) -> Tensor:
        """The weight of KL_route, 1 in the paper's experiments (App. B.1), times w(t)^p with an `elbo_power` p."""
        weight = knobs["kl_weight"]
        if self.config.elbo_power == Constant(value=0.0):
            return weight
        return weight * self.config.schedule.elbo_weight(t) ** knobs["elbo_power"]

    def step_kl_weight(self, steps: Float[Tensor, " B"], knobs: Mapping[str, Tensor]) -> Tensor:
        """The same times T^p; with p = 1 the loss is a draw of bound@T."""
        return knobs["kl_weight"] * steps ** knobs["elbo_power"]

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
        passes = self._both_passes(x0, xt, t, knobs["relax_tau"], rng)
        found = compare(passes.post, passes.prior, passes.routes)
        return Inference(passes.log_x_theta, found.kl.sum(-1), self._balance(found, passes), self._log(found, passes),
                         self._train_kl(found.kl, passes, xt, t), passes.out.log_token)  # fmt: skip

    def objective(
        self,
        x0: Int[Tensor, "B L"],
        xt: Int[Tensor, "B L"],
        t: Float[Tensor, " B"],
        knobs: Mapping[str, Tensor],
        rng: Rng,
        steps: Float[Tensor, " B"] | None = None,
    ) -> Objective:
        """The loss over K draws of z from the posterior; one draw with pathwise gradients is Algo. 1 itself."""
        config = self.config
        if config.estimator == "pathwise" and config.draws == 1:
            return super().objective(x0, xt, t, knobs, rng, steps)
        told = self.told(t, steps)
        passes = self._both_passes(x0, xt, told, knobs["relax_tau"], rng, draws=config.draws)
        found, beta = compare(passes.post, passes.prior, passes.routes), self.kl_weight_of(t, steps, knobs)
        log_token = log_token_of(passes.out, x0.repeat_interleave(config.draws, dim=0))
        f = self.recon_weight(t, steps)[:, None, None] * log_token.unflatten(0, (len(x0), config.draws))
        recon, kl_row = -f.sum(-1).mean(1), found.kl.sum(-1).view(len(x0), -1).mean(1)
        log = self._log(found, passes)
        if config.estimator == "pathwise":
            many = (value.repeat_interleave(config.draws, dim=0) for value in (xt, told))
            counted = self._train_kl(found.kl, passes, *many)
            loss = recon + beta * (kl_row if counted is None else counted.view(len(x0), -1).mean(1))
        else:
            r, s = (value.unflatten(0, (len(x0), config.draws)) for value in self._log_routes(passes))
            f = self.backbone.grouped(f, r.shape[-1])
            if config.credit == "row":
                f, r, s = (value.sum(-1, keepdim=True) for value in (f, r, s))
            beta_BKG = beta[:, None, None] if beta.ndim else beta
            surrogate = ESTIMATORS[config.estimator](f, r, s, beta_BKG)
            loss = (recon + beta * kl_row).detach() + (surrogate - surrogate.detach())
            log["effective_draws"] = effective_draws(wake_sleep_weights(f, r, s, beta_BKG))
        return Objective(loss, recon, kl_row, self._balance(found, passes), log)

    def weigh(self, x0: Int[Tensor, "B L"], xt: Int[Tensor, "B L"], t: Float[Tensor, " B"], rng: Rng) -> Weighed:
        """log p(z | xt) - log q(z | x0): both routers' log-probabilities of the drawn z, over blocks and positions."""
        passes = self._both_passes(x0, xt, t, 1.0, rng)
        r, s = self._log_routes(passes)
        return Weighed(passes.log_x_theta, (r - s).sum(-1), passes.out.log_token)

    def _both_passes(
        self,
        x0: Int[Tensor, "B L"],
        xt: Int[Tensor, "B L"],
        t: Float[Tensor, " B"],
        relax_tau: Tensor | float,
        rng: Rng,
        draws: int = 1,
    ) -> Passes:
        """One call on [x0; xt]; with `last_block` summed the last router is the prior alone and nothing is drawn there.

        Summed: log p(x^l | xt, z_<D) = log sum_e p(z_D^l = e | z_<D, xt) p(x^l | xt, z_<D, e).
        """
        config, summed = self.config, self.config.last_block == "summed"
        coding = max(1, self.backbone.routed_blocks - 1) if config.carriers == "spread" else None
        blocks = self.backbone.routed_blocks - summed
        coded = self.coded(xt) if config.mean_below else None
        generator = rng.stream("route")
        posterior = draw(
            generator, relax_tau, top_k=config.top_k, gradient=config.gradient, draws=draws, redraw=config.redraw,
            blocks=blocks,
        )  # fmt: skip
        masked = xt == self.space.mask_id
        gates: list[Gate] = []

        def keep(block: int, logits: Tensor) -> Gate:
            gates.append(posterior(block, logits))
            return gates[-1]

        rows, times = torch.cat([x0, xt]), torch.cat([t, t])
        marks = torch.cat([masked, torch.zeros_like(masked)]) if config.mask_aware else None
        route = paired(keep, blocks, coding, coded)
        target, many = (value.repeat_interleave(draws, dim=0) if draws > 1 else value for value in (x0, xt))
        last = None
        if summed:
            each, route_logits = self.backbone.forward_last(rows, times, marks=marks, route=route)
            last = route_logits[-1]
            mixed = _mixture(each, last, self.space.mask_id)
            out = Predicted(subs(mixed, many, self.space.mask_id), None, route_logits)
        else:
            out = self.predict(target, many, rows, times, marks=marks, route=route)
        post, prior, learned = [], [], []
        for d in range(blocks):
            clean, noisy = out.route_logits[d].chunk(2)
            clean = carried(clean, noisy, d, coding, coded)
            again = draws if d == 0 and draws > 1 else 1
            post.append(clean.repeat_interleave(again, dim=0) if again > 1 else clean)
            prior.append(noisy.repeat_interleave(again, dim=0) if again > 1 else noisy)
            positions = clean.shape[1]
            learned.append(
                clean.new_ones(positions) if coding is None
                else carries(d, coding, positions, clean.device).to(clean.dtype)
            )  # fmt: skip
        routes = tuple(gate.expert[..., 0] for gate in gates)
        return Passes(out, tuple(post), tuple(prior), routes, tuple(learned), last)

    def _log_routes(self, passes: Passes) -> tuple[Float[Tensor, "N G"], Float[Tensor, "N G"]]:
        """log p and log q of the drawn routes at each position of the coarsest block, summed over blocks.

        Where a position does not carry, q is p. Wake-sleep has a term for each of them, of which that of p suffices;
        score functions need the gradient of what was drawn from, whichever it is.
        """
        pairs: list[tuple[Tensor, Tensor]] = []
        for post, prior, route, learned in zip(passes.post, passes.prior, passes.routes, passes.learned, strict=True):
            r, s = (torch.log_softmax(one, -1).gather(-1, route[..., None]).squeeze(-1) for one in (prior, post))
            fixed = s.detach() if self.config.estimator == "wake-sleep" else s
            pairs.append((r, learned * s + (1 - learned) * fixed))
        groups = min(r.shape[-1] for r, _ in pairs)  # positions of the coarsest block
        pairs = [(self.backbone.grouped(r, groups), self.backbone.grouped(s, groups)) for r, s in pairs]
        return torch.stack([r for r, _ in pairs]).sum(0), torch.stack([s for _, s in pairs]).sum(0)

    def denoise(self, xt: Int[Tensor, "B L"], t: Float[Tensor, " B"], rng: Rng) -> Denoised:
        """z ~ p(z | xt) drawn block by block within the one network call (Algo. 2)."""
        out = self.backbone(xt, t, **self.prior(xt, rng))
        return Denoised(subs(out.logits, xt, self.space.mask_id), out.gates)

    def prior(self, xt: Int[Tensor, "B L"], rng: Rng) -> dict[str, Any]:
        """The policy that draws each route from the router, sharpened by `route_tau`; or means, see `mean_below`."""
        route = sharpened(rng.stream("route"), self.config.route_tau)
        return {"route": averaging(route, self.coded(xt)) if self.config.mean_below else route}

    def coded(self, xt: Int[Tensor, "B L"]) -> Bool[Tensor, " B"]:
        """Which rows draw routes: those with a share of masks above `mean_below`, if that is not 0."""
        share = (xt == self.space.mask_id).double().mean(1)
        return (share > self.config.mean_below) | (self.config.mean_below == 0)

    def _train_kl(
        self, kl: Float[Tensor, "N D"], passes: Passes, xt: Int[Tensor, "N L"], told: Float[Tensor, " N"]
    ) -> Float[Tensor, " N"] | None:
        """What the training loss counts in place of the KL: masked positions only, or blocks beyond their free nats."""
        if self.config.kl_positions == "masked":
            kl = route_kl(passes.post, passes.prior, (xt == self.space.mask_id).to(kl.dtype))
        elif not self.config.free_nats:
            return None
        floor = self.config.free_nats * (torch.arange(kl.shape[1], device=kl.device) % self.config.free_every == 0)
        # The floor is on the mean over the batch: on each row it would also free rows that need no nats.
        if not self.config.step_aware:
            over = (kl.mean(0) > floor).to(kl.dtype)
            return (kl * over).sum(-1)
        # Of samplers with more than two steps nothing is free: they would pay for it at every step.
        few = (told < self.told(told, torch.full_like(told, 3.0))).to(kl.dtype)[:, None]
        free = few * ((kl * few).sum(0) / few.sum().clamp(min=1) <= floor).to(kl.dtype)
        return (kl * (1 - free)).sum(-1)

    def _balance(self, found: Compared, passes: Passes) -> Tensor | None:
        if not self.config.balance:
            return None
        if self.config.balance_form == "switch":
            return self.config.balance * load_balance(found.chance, found.used).mean()
        chance = found.chance
        if passes.summed is not None:
            chance = torch.cat([chance, torch.softmax(passes.summed, -1).mean((0, 1))[None]])
        return self.config.balance * usage_shortfall(chance, self.config.usage_floor).mean()

    def health(self, log: Mapping[str, Any]) -> str | None:
        """Whether the routers are dead: all blocks run one expert each, or no route tells anything of x0.

        By the drawn blocks of a log line: the entropy of the usage (of the posterior, over rows and positions) is below
        0.1 nats in each, or the mean KL of posterior and prior is below 1e-4 nats per position in each.
        """
        blocks = [name.rpartition("/block")[2] for name in log if name.startswith("route_kl/block")]
        if not blocks or self.config.experts == 1:
            return None
        shares = [[float(share) for share in log[f"usage/block{block}"]] for block in blocks]
        entropy = [-sum(share * math.log(share) for share in some if share > 0) for some in shares]
        kl = [float(log[f"route_kl/block{block}"]) for block in blocks]
        where = f"in each of the blocks {', '.join(blocks)}" if len(blocks) > 1 else f"in block {blocks[0]}"
        if all(nats < DEAD_USAGE for nats in entropy):
            told = f"one expert does nearly all the work {where} (entropy of usage at most {max(entropy):.2g} nats)"
        elif all(nats < DEAD_KL for nats in kl):
            told = f"routes tell nothing of the clean row {where} (KL at most {max(kl):.2g} nats per position)"
        else:
            return None
        return (
            f"the routers are dead: {told}; try method.balance, a ramp of method.kl_weight, or another method.estimator"
        )

    def _log(self, found: Compared, passes: Passes) -> dict[str, Tensor]:
        """Route KL (mean over positions and at each), routing entropy of both sides, expert usage; by drawn block.

        Of a block that is summed out: entropy and mean of the prior's probabilities. Positions that are no tokens, but
        squares of hundreds of pixels, are not listed one by one: a log of 200,000 steps would outweigh its checkpoint.
        """
        sizes = [post.shape[1] for post in passes.post]
        kl = found.kl.detach().mean(0)
        log: dict[str, Tensor] = {}
        for d, (size, at) in enumerate(zip(sizes, found.kl_at.detach().split(sizes, dim=1), strict=True)):
            block = f"block{d + 1}"
            log[f"route_kl/{block}"] = kl[d] / size
            if self.backbone.routes_tokens:
                log[f"route_kl_at/{block}"] = at.mean(0)
            log[f"post_entropy/{block}"], log[f"prior_entropy/{block}"] = found.post_entropy[d], found.prior_entropy[d]
            log[f"usage/{block}"] = found.used[d]
        if passes.summed is not None:
            last, prior = len(passes.post) + 1, passes.summed.detach()
            log[f"prior_entropy/block{last}"] = routing_entropy(prior)
            log[f"usage/block{last}"] = torch.softmax(prior, -1).mean((0, 1))
        return log


def _mixture(each: Float[Tensor, "E N L V"], router: Float[Tensor, "N L E"], mask_id: int) -> Float[Tensor, "N L V"]:
    """log sum_e rho_e softmax(logits_e), with any number in the mask's column (its -inf would give no gradient)."""
    is_mask = torch.arange(each.shape[-1], device=each.device) == mask_id
    log_token = torch.log_softmax(each, -1).masked_fill(is_mask, 0.0)
    return torch.logsumexp(torch.log_softmax(router, -1).permute(2, 0, 1)[..., None] + log_token, 0)
