"""`emoe verify`: does a method still do what it says? Checks a checkpoint, or random tiny models, against exact laws.

Whoever changes a method runs this to see what broke. Every check is statistical or numerical and says what it saw.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from emoe.backbones.transformer import TransformerConfig
from emoe.evaluation.pools import draw_pool
from emoe.exact import chain_law, exact_nll
from emoe.methods.base import MaskedDiffusion, MaskedDiffusionConfig
from emoe.methods.emoe import EMoE, EMoEConfig
from emoe.methods.mdlm import MDLMConfig
from emoe.methods.vadd import VADDConfig
from emoe.rng import Rng, derive_seed
from emoe.routing.routes import carried, carries
from emoe.types import Convention, Gate, TokenSpace

TINY: dict[str, MaskedDiffusionConfig] = {
    "mdlm": MDLMConfig(),
    "vadd": VADDConfig(latent=1),
    "emoe": EMoEConfig(experts=2),
}
SIGMAS = 4.5  # how far a mean of draws may lie from what it should be, in standard errors
DRAWS = 400
STRAIGHT_THROUGH = ("top-k", "selected", "all")
TEMPERATURES = (1.0, 0.1)  # of the relaxation: where training begins and where it ends
MOST_ROUTES = 4_096  # of all blocks but the last, for the exact gradient of one row
VIMCO_GROUPS = 8  # independent references of VIMCO's bound, whose spread gives their error
TABLE = 2**20  # entries of a table of (draws of the others, routes) behind each of them


@dataclass(frozen=True)
class Check:
    """One line of the table."""

    name: str
    passed: bool
    seen: str


def tiny_method(kind: str, seed: int) -> MaskedDiffusion:
    """A random model small enough to enumerate (V = 3, L = 2, D = 2), whose latent matters."""
    backbone = TransformerConfig(width=8, heads=2, hidden=16, time_size=4)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "verify", kind))
        method = TINY[kind].build(TokenSpace(3, 2, 2), backbone)
        for name, p in method.named_parameters():
            if "norm" not in name:
                nn.init.normal_(p, std=0.7)  # far from an untrained network: routes and tokens that are not uniform
    assert isinstance(method, MaskedDiffusion)
    return method.double().eval()


def verify(
    method: MaskedDiffusion, rows: Int[Tensor, "n L"], *, steps: tuple[int, ...] = (1, 2, 4), seed: int = 0
) -> Iterator[Check]:
    """All checks of a method whose law can be computed (see `emoe.exact`).

    Args:
        method: The method.
        rows: Clean rows at which likelihoods are checked, each by itself.
        steps: Numbers of steps T.
        seed: Seed of all draws.
    """
    for count in steps:
        law = chain_law(method, count)
        total = law.sum().item()
        yield Check(f"probabilities sum to one, T = {count}", abs(total - 1) < 1e-5, f"1 {total - 1:+.1e}")
        yield sampler_check(method, law, count, seed)
        nll = exact_nll(law, rows, mask_id=method.space.mask_id)
        yield from bound_checks(method, rows, nll, count, seed)
    yield kl_check(method, rows, seed)
    if isinstance(method, EMoE):
        yield from gradient_checks(method, rows, seed)


def sampler_check(method: MaskedDiffusion, law: Float[Tensor, "..."], steps: int, seed: int) -> Check:
    """Chi-square of 50,000 samples against the law; cells with fewer than 5 expected are merged."""
    space = method.space
    samples = draw_pool(method, 50_000, steps, derive_seed(seed, "verify"), batch=10_000).samples
    places = samples - (samples > space.mask_id).long()
    radix = (space.size - 1) ** torch.arange(space.length - 1, -1, -1)
    counts = torch.bincount((places * radix).sum(-1), minlength=law.numel()).double()
    expected = law.flatten() / law.sum() * len(samples)
    order = expected.argsort(descending=True)
    cut = max(1, int((expected >= 5).sum()))
    seen = torch.cat([counts[order][:cut], counts[order][cut:].sum(0, keepdim=True)])
    wanted = torch.cat([expected[order][:cut], expected[order][cut:].sum(0, keepdim=True)])
    if wanted[-1] < 5:
        seen, wanted = seen[:-1], wanted[:-1]
    statistic, freedom = ((seen - wanted) ** 2 / wanted).sum(), max(1, len(wanted) - 1)
    p = torch.special.gammaincc(torch.tensor(freedom / 2).double(), statistic / 2).item()
    return Check(
        f"samples follow the law, T = {steps}", p > 1e-4, f"chi-square p = {p:.2g}, {freedom} degrees of freedom"
    )


def bound_checks(
    method: MaskedDiffusion, rows: Int[Tensor, "n L"], nll: Float[Tensor, " n"], steps: int, seed: int
) -> Iterator[Check]:
    """bound@T >= exact NLL at every row; iw@T,16 between the two on average."""
    device = next(method.parameters()).device
    bound = _draws(method, rows.to(device), Convention("bound", steps), seed)
    slack = (bound.mean(0) - nll) / (bound.std(0) / math.sqrt(len(bound)) + 1e-9)
    least = (bound.mean(0) - nll).min().item()
    yield Check(
        f"bound@{steps} >= exact NLL at each of {len(rows)} rows",
        slack.min().item() > -SIGMAS,
        f"mean NLL {nll.mean():.4f}, mean bound {bound.mean():.4f}, least gap {least:+.4f}",
    )
    tight = _draws(method, rows.to(device), Convention("iw", steps, 16), seed)
    error = math.hypot(_error(bound), _error(tight)) + 1e-9
    between = tight.mean() < bound.mean() + SIGMAS * error and tight.mean() > nll.mean() - SIGMAS * error
    yield Check(f"exact NLL <= iw@{steps},16 <= bound@{steps} on average", bool(between), f"mean iw {tight.mean():.4f}")


@torch.no_grad()
def kl_check(method: MaskedDiffusion, rows: Int[Tensor, "n L"], seed: int) -> Check:
    """The KL of posterior and prior two ways: as the method computes it, and as the mean of -log p(z)/q(z)."""
    device = next(method.parameters()).device
    x0 = rows.to(device).repeat(DRAWS, 1)
    xt, t = torch.full_like(x0, method.space.mask_id), method.told(torch.ones(len(x0), device=device), None)
    knobs = {name: torch.ones((), device=device) for name in method.ramps}
    direct = method.infer(x0, xt, t, knobs, Rng(derive_seed(seed, "kl"), device=device)).kl.double()
    drawn = -method.weigh(x0, xt, t, Rng(derive_seed(seed, "ratio"), device=device)).log_ratio.double()
    error = math.hypot(direct.std().item(), drawn.std().item()) / math.sqrt(len(x0)) + 1e-6
    gap = (direct.mean() - drawn.mean()).item()
    seen = f"{direct.mean():.4f} and {drawn.mean():.4f} nats"
    return Check("KL of the latent, computed and as a mean of log ratios", abs(gap) < SIGMAS * error, seen)


def gradient_checks(method: EMoE, rows: Int[Tensor, "n L"], seed: int) -> Iterator[Check]:
    """How far the training gradient of the routers is from the exact one (see `claimed`), at all masks and t = 1/2.

    Straight-through gradients are known to be biased, and so are ratios of few draws: the numbers are recorded, and
    fail only if they are not finite. Each of the rows is taken by itself, four of a tiny model and one of a larger;
    load balance is left out.
    """
    config = method.config
    count = route_count(method)
    routers = [p for name, p in method.backbone.named_parameters() if "router" in name.split(".")]
    rows = rows[: max(1, 16 // count)].to(next(method.parameters()).device)
    kind = f"{config.estimator}, {config.draws} draws:"
    if config.estimator == "pathwise":
        kind = "straight-through" if config.gradient in STRAIGHT_THROUGH else config.gradient
    why = f"{count:,} routes are too many to enumerate" if count > MOST_ROUTES else ""
    why = why if routers else "no parameter is a router's"
    if config.estimator == "vimco" and not why and (every := all_routes(method)) > MOST_ROUTES:
        why = f"the bound of {config.draws} draws needs a table of {every:,} routes"
    if config.mean_below:
        why = "mean_below leaves some rows no routes to enumerate"
    if config.free_nats:
        why = "free_nats counts the KL by what the whole batch spends"
    for tau in TEMPERATURES if config.gradient != "none" else (None,):
        name = f"{kind} gradient" + ("" if tau is None else f", relax_tau {tau:g}")
        if why:
            yield Check(name, True, f"skipped: {why}")
            continue
        t = torch.full((1,), 0.5, device=rows.device)
        masks = torch.full_like(rows[:1], method.space.mask_id)
        found = [gradient_gap(method, x0, masks, t, routers, relax_tau=tau or 1.0, seed=seed) for x0 in rows.split(1)]
        cosine, bias = (sum(values) / len(found) for values in zip(*((f.cosine, f.bias) for f in found), strict=True))
        error = math.hypot(*(f.error for f in found)) / len(found)
        seen = f"recorded; cosine {cosine:.2f}, relative bias {bias:.2f} ±{error:.2f}"
        if len(found) > 1:
            seen += f"; worst of {len(found)} rows {min(f.cosine for f in found):.2f}, {max(f.bias for f in found):.2f}"
        yield Check(name, math.isfinite(cosine) and math.isfinite(bias), seen)


@dataclass(frozen=True)
class GradientGap:
    """Mean of drawn gradients against the exact one."""

    cosine: float
    bias: float  # |mean - exact| / |exact|
    error: float  # sqrt(E |mean - its expectation|^2) / |exact|: what `bias` would be without a bias


@torch.enable_grad()
def gradient_gap(
    method: EMoE,
    x0: Int[Tensor, "1 L"],
    xt: Int[Tensor, "1 L"],
    t: Float[Tensor, " 1"],
    parameters: Sequence[Tensor],
    *,
    relax_tau: float,
    groups: int = 10,
    each: int = 400,
    seed: int = 0,
) -> GradientGap:
    """Compare the training gradient of one row with that of the objective its estimator claims (see `claimed`).

    Args:
        method: The method.
        x0: The clean row.
        xt: The same row with masks.
        t: Its time.
        parameters: What the gradient is taken of.
        relax_tau: Temperature of the relaxation.
        groups: Independent means, whose spread gives the error.
        each: Draws in each of them.
        seed: Seed of the draws.
    """
    knobs = {name: torch.ones((), device=x0.device) for name in method.ramps}
    knobs["relax_tau"] = torch.tensor(relax_tau, device=x0.device)
    references = claimed_gradients(method, x0, xt, t, parameters, seed=seed)
    exact = references.mean(0)
    rng = Rng(derive_seed(seed, "gradient", relax_tau), device=x0.device)
    drawn = []
    for group in range(groups):
        rows = [value.repeat_interleave(max(1, each // method.config.draws), 0) for value in (x0, xt, t)]
        out = method.objective(rows[0], rows[1], rows[2], knobs, rng.at(group))
        drawn.append(flat_gradient(out.loss.mean(), parameters))
    means = torch.stack(drawn)
    mean, size = means.mean(0), exact.norm().item()
    cosine = torch.dot(mean, exact).item() / (mean.norm().item() * size) if size and mean.any() else math.nan
    noise = math.hypot(spread(means), spread(references))
    return GradientGap(cosine, (mean - exact).norm().item() / size if size else math.nan, noise / (size or math.nan))


@torch.enable_grad()
def claimed_gradients(
    method: EMoE,
    x0: Int[Tensor, "1 L"],
    xt: Int[Tensor, "1 L"],
    t: Float[Tensor, " 1"],
    parameters: Sequence[Tensor],
    *,
    seed: int = 0,
) -> Float[Tensor, "G N"]:
    """Gradient of `claimed` as a vector: exact and one (G = 1), or for VIMCO some whose mean it is."""
    count = VIMCO_GROUPS if method.config.estimator == "vimco" else 1
    found = []
    for group in range(count):
        generator = torch.Generator(device=x0.device).manual_seed(derive_seed(seed, "claimed", group))
        found.append(flat_gradient(claimed(method, x0, xt, t, generator), parameters))
    return torch.stack(found)


def claimed(
    method: EMoE,
    x0: Int[Tensor, "1 L"],
    xt: Int[Tensor, "1 L"],
    t: Float[Tensor, " 1"],
    generator: torch.Generator | None = None,
) -> Float[Tensor, ""]:
    """A number whose gradient the method's estimator claims to follow at one row, with all ramps at 1.

    Pathwise and leave-one-out: w(t) E_q[masked NLL] + beta KL(q || p). Wake-sleep: -beta log sum_z p(z) exp(f / beta)
    for network and prior, KL(p(z | x0, xt) || q) for the posterior (f and beta as in `emoe.routing.estimators`).
    VIMCO: its bound of K draws, of which K - 1 are drawn (`generator`) and one is summed over all routes.
    """
    routes = enumerate_routes(method, x0, xt, t)
    weight = method.config.schedule.elbo_weight(t).double()
    knobs = {name: torch.ones((), device=x0.device) for name in method.ramps}
    beta = method.kl_weight(t, knobs).double().expand_as(weight)
    if method.config.estimator == "wake-sleep":
        return (routes.evidence(weight, beta) - routes.score(weight, beta)).sum()
    if method.config.estimator == "vimco":
        assert generator is not None
        return _many_draw_bound(routes, weight, beta, method.config.draws, generator)
    recon, kl = routes.terms()
    return (weight * recon + beta * kl).sum()


def _many_draw_bound(
    routes: Routes,
    weight: Float[Tensor, " 1"],
    beta: Float[Tensor, " 1"],
    draws: int,
    generator: torch.Generator,
) -> Float[Tensor, ""]:
    """Its gradient is on average that of -E over z_1..z_K ~ q of B = beta log 1/K sum_k exp(f_k / beta + r_k - s_k).

    B is symmetric, so the gradient is K E[sum over z_K of grad q(z_K) B] + E[grad B]: only K - 1 routes are drawn.
    """
    log_q, log_p, log_x = (table[0] for table in routes.tables())
    value = weight / beta * log_x + log_p - log_q
    tuples = max(1, TABLE // len(log_q))
    others = torch.multinomial(log_q.detach().exp(), tuples * (draws - 1), replacement=True, generator=generator)
    rest = value[others.view(tuples, draws - 1)].logsumexp(1)
    bound = beta * (torch.logaddexp(rest[:, None], value) - math.log(draws))  # (tuples, R)
    q = log_q.exp()
    return -(draws * q * bound.detach() + q.detach() * bound).sum(1).mean()


@dataclass(frozen=True)
class Routes:
    """The latent of B rows (x0, xt): the R routes z_<D of all blocks but the last, and what the last does after each.

    Given the others, routes of the last block are independent over positions; they are kept as distributions.
    Everything is in float64 and can be differentiated.
    """

    log_q: Float[Tensor, "B R"]  # log q(z_<D | x0, xt)
    log_own: Float[Tensor, "B R"]  # the same of positions that carry alone: what the posterior itself chooses
    log_p: Float[Tensor, "B R"]  # log p(z_<D | xt)
    kl: Float[Tensor, "B R"]  # KL_route along z (Eq. 8) of all blocks that are drawn
    last_q: Float[Tensor, "B R L E"]  # log q(z_D^l = e | z_<D, x0, xt)
    last_p: Float[Tensor, "B R L E"]
    last_own: Float[Tensor, " L"]  # 1 where a position carries in the last block
    token: Float[Tensor, "B R L E"]  # log p(x0^l | xt, z_<D, z_D^l = e) where l is masked, else 0
    summed: bool  # whether training sums the last block out instead of drawing it

    def terms(self) -> tuple[Float[Tensor, " B"], Float[Tensor, " B"]]:
        """E over z ~ q of the masked NLL, and KL(q || p)."""
        nll = -self._log_x() if self.summed else -(self.last_q.exp() * self.token).sum((-2, -1))
        share = self.log_q.exp()
        return (share * nll).sum(-1), (share * self.kl).sum(-1)

    def evidence(self, weight: Float[Tensor, " B"], beta: Float[Tensor, " B"]) -> Float[Tensor, " B"]:
        """-beta log sum_z p(z) exp(f / beta), f = weight * log p(x0 | xt, z); -log p(x0 | xt) if both are 1.

        A last block that is summed has no z of its own: there log p(x0 | xt, z_<D) is the mixture's.
        """
        return -beta * self._joint(weight / beta)[0].logsumexp(-1)

    def score(self, weight: Float[Tensor, " B"], beta: Float[Tensor, " B"]) -> Float[Tensor, " B"]:
        """E over z ~ p(z) exp(f / beta) / sum, held fixed, of log q(z): the posterior's share of wake-sleep."""
        joint, last = self._joint(weight / beta)
        log_own = self.log_own
        if last is not None:
            log_own = log_own + (last.softmax(-1).detach() * self.last_q * self.last_own[:, None]).sum((-2, -1))
        return (joint.softmax(-1).detach() * log_own).sum(-1)

    def tables(self) -> tuple[Float[Tensor, "B N"], Float[Tensor, "B N"], Float[Tensor, "B N"]]:
        """log q(z), log p(z) and log p(x0 | xt, z) of all routes that are drawn, N = R, or R * E^L with the last."""
        if self.summed:
            return self.log_q, self.log_p, self._log_x()
        length, experts = self.token.shape[2:]
        each = _digits(experts, length, self.token.device)  # (E^L, L)
        place = torch.arange(length, device=each.device)
        q, p, x = (one[:, :, place, each].sum(-1) for one in (self.last_q, self.last_p, self.token))
        return (self.log_q[..., None] + q).flatten(1), (self.log_p[..., None] + p).flatten(1), x.flatten(1)

    def _log_x(self) -> Float[Tensor, "B R"]:
        """log p(x0 | xt, z_<D) with the last block summed out."""
        return (self.last_p + self.token).logsumexp(-1).sum(-1)

    def _joint(self, scale: Float[Tensor, " B"]) -> tuple[Float[Tensor, "B R"], Float[Tensor, "B R L E"] | None]:
        """log p(z_<D) + scale * log p(x0 | xt, z), summed over a drawn last block; and that block's terms."""
        if self.summed:
            return self.log_p + scale[:, None] * self._log_x(), None
        last = self.last_p + scale[:, None, None, None] * self.token
        return self.log_p + last.logsumexp(-1).sum(-1), last


def exact_terms(
    method: EMoE, x0: Int[Tensor, "B L"], xt: Int[Tensor, "B L"], t: Float[Tensor, " B"]
) -> tuple[Float[Tensor, " B"], Float[Tensor, " B"]]:
    """Both parts of the training objective, summed over all routes instead of drawn; they can be differentiated.

    E over z ~ q(z | x0, xt) of the masked NLL, and of KL_route along z (Eq. 8), in nats per row and float64.
    """
    return enumerate_routes(method, x0, xt, t).terms()


def enumerate_routes(method: EMoE, x0: Int[Tensor, "B L"], xt: Int[Tensor, "B L"], t: Float[Tensor, " B"]) -> Routes:
    """Run both passes along every route of all blocks but the last, R = E^(L (D - 1)) of them for each row.

    Options count as in training: `carriers`, `last_block`, `kl_positions`, `mask_aware`; not `free_nats`, `mean_below`.
    """
    batch, length = x0.shape
    config, blocks = method.config, method.backbone.routed_blocks - 1
    count, summed = route_count(method), config.last_block == "summed"
    z = _digits(config.experts, length * blocks, x0.device).view(count, blocks, length, 1)
    z = z.repeat(2 * batch, 1, 1, 1)  # [x0; xt], each row with every route

    def forced(block: int, logits: Float[Tensor, "N L E"]) -> Gate:
        return Gate(z[:, block], torch.ones_like(z[:, block], dtype=logits.dtype))

    masked = xt == method.space.mask_id
    marks = torch.cat([masked, torch.zeros_like(masked)]) if config.mask_aware else None
    logits, route_logits = method.backbone.forward_last(
        torch.cat([x0, xt]).repeat_interleave(count, 0),
        method.told(torch.cat([t, t]), None).repeat_interleave(count),
        marks=None if marks is None else marks.repeat_interleave(count, 0),
        route=forced,
    )
    coding = max(1, blocks) if config.carriers == "spread" else None
    rows = batch * count
    hidden = masked.repeat_interleave(count, 0).double()
    counted = hidden if config.kl_positions == "masked" else torch.ones_like(hidden)
    log_q, log_own, log_p, kl = (torch.zeros(rows, dtype=torch.float64, device=x0.device) for _ in range(4))
    for block, both in enumerate(route_logits):
        clean, p = torch.log_softmax(both.double(), -1).chunk(2)
        q = carried(clean, p, block, coding)
        own = torch.ones(length, dtype=torch.float64, device=x0.device)
        own = own if coding is None else carries(block, coding, length, x0.device).double()
        if block < blocks or not summed:
            kl = kl + ((q.exp() * (q - p)).sum(-1) * counted).sum(-1)
        if block < blocks:
            chosen_q, chosen_p = (one.gather(-1, z[:rows, block]).squeeze(-1) for one in (q, p))
            log_q, log_p = log_q + chosen_q.sum(-1), log_p + chosen_p.sum(-1)
            log_own = log_own + (chosen_q * own).sum(-1)
    chosen = x0.repeat_interleave(count, 0)[None, ..., None].expand(config.experts, -1, -1, 1)
    token = torch.log_softmax(logits[:, rows:].double(), -1).gather(-1, chosen).squeeze(-1) * hidden  # (E, N, L)
    log_q, log_own, log_p, kl = (one.view(batch, count) for one in (log_q, log_own, log_p, kl))
    last_q, last_p, last_x = (one.unflatten(0, (batch, count)) for one in (q, p, token.permute(1, 2, 0)))
    return Routes(log_q, log_own, log_p, kl, last_q, last_p, own, last_x, summed)


def route_count(method: EMoE) -> int:
    """E^(L (D - 1)): routes of all blocks but the last."""
    return int(method.config.experts ** (method.space.length * (method.backbone.routed_blocks - 1)))


def all_routes(method: EMoE) -> int:
    """Routes that training draws: those of the last block too, unless they are summed out."""
    summed = method.config.last_block == "summed"
    return route_count(method) * (1 if summed else int(method.config.experts**method.space.length))


def _digits(base: int, length: int, device: torch.device) -> Int[Tensor, "N length"]:
    """All rows of `length` numbers below `base`."""
    radix = base ** torch.arange(length, device=device)
    return torch.arange(base**length, device=device)[:, None] // radix % base


def spread(means: Float[Tensor, "G N"]) -> float:
    """sqrt(E |mean of the rows - its expectation|^2); 0 for a single row."""
    return math.sqrt(means.var(0).sum().item() / len(means)) if len(means) > 1 else 0.0


def flat_gradient(value: Float[Tensor, ""], parameters: Sequence[Tensor]) -> Float[Tensor, " N"]:
    """Gradient of all parameters as one vector in float64, zero where there is none."""
    found = torch.autograd.grad(value, parameters, allow_unused=True)
    each = [torch.zeros_like(p) if g is None else g for g, p in zip(found, parameters, strict=True)]
    return torch.cat([one.flatten() for one in each]).double()


def _draws(
    method: MaskedDiffusion, rows: Int[Tensor, "n L"], convention: Convention, seed: int
) -> Float[Tensor, "K n"]:
    """Many draws of a likelihood for each row; rows are shuffled so that strata of time do not stick to rows."""
    rng = Rng(derive_seed(seed, convention), device=rows.device)
    many = rows.repeat(DRAWS, 1)
    order = torch.randperm(len(many), generator=torch.Generator().manual_seed(derive_seed(seed, "order"))).to(
        rows.device
    )
    values = torch.empty(len(many), dtype=torch.float64, device=rows.device)
    values[order] = method.nll_bound(many[order], convention, rng)
    return values.view(DRAWS, len(rows)).cpu()


def _error(draws: Float[Tensor, "K n"]) -> float:
    return draws.std(0).square().mean().sqrt().item() / math.sqrt(draws.numel())
