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
    xt, t = torch.full_like(x0, method.space.mask_id), torch.ones(len(x0), device=device)
    knobs = {name: torch.ones((), device=device) for name in method.ramps}
    direct = method.infer(x0, xt, t, knobs, Rng(derive_seed(seed, "kl"), device=device)).kl.double()
    drawn = -method.weigh(x0, xt, t, Rng(derive_seed(seed, "ratio"), device=device)).log_ratio.double()
    error = math.hypot(direct.std().item(), drawn.std().item()) / math.sqrt(len(x0)) + 1e-6
    gap = (direct.mean() - drawn.mean()).item()
    seen = f"{direct.mean():.4f} and {drawn.mean():.4f} nats"
    return Check("KL of the latent, computed and as a mean of log ratios", abs(gap) < SIGMAS * error, seen)


def gradient_checks(method: EMoE, rows: Int[Tensor, "n L"], seed: int) -> Iterator[Check]:
    """How far the training gradient of the routers is from the exact one, at all masks and t = 1/2.

    Straight-through gradients are known to be biased: the numbers are recorded, and fail only if they are not finite.
    Each of the rows is taken by itself, four of a tiny model and one of a larger; load balance is left out.
    """
    count = method.config.experts ** (method.space.length * (method.backbone.routed_blocks - 1))
    routers = [p for name, p in method.backbone.named_parameters() if "router" in name.split(".")]
    rows = rows[: max(1, 16 // count)].to(next(method.parameters()).device)
    kind = "straight-through" if method.config.gradient in STRAIGHT_THROUGH else method.config.gradient
    for tau in TEMPERATURES:
        name = f"{kind} gradient, relax_tau {tau:g}"
        if not routers or count > MOST_ROUTES:
            why = f"{count:,} routes are too many to enumerate" if routers else "no parameter is a router's"
            yield Check(name, True, f"skipped: {why}")
            continue
        t = torch.full((1,), 0.5, device=rows.device)
        found = [
            gradient_gap(method, x0, torch.full_like(x0, method.space.mask_id), t, routers, relax_tau=tau, seed=seed)
            for x0 in rows.split(1)
        ]
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
    """Compare gradients of w(t) * masked NLL + KL, the training objective of one row with weight 1.

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
    weight = method.config.schedule.elbo_weight(t)
    recon, kl = exact_terms(method, x0, xt, t)
    exact = _gradient((weight * recon + kl).sum(), parameters)
    knobs = {name: torch.ones((), device=x0.device) for name in method.ramps}
    knobs["relax_tau"] = torch.tensor(relax_tau, device=x0.device)
    rng = Rng(derive_seed(seed, "gradient", relax_tau), device=x0.device)
    drawn = []
    for group in range(groups):
        rows = [value.repeat_interleave(each, 0) for value in (x0, xt, t)]
        out = method.objective(rows[0], rows[1], rows[2], knobs, rng.at(group))
        drawn.append(_gradient(out.loss.mean(), parameters))
    means = torch.stack(drawn)
    mean, size = means.mean(0), exact.norm().item()
    cosine = torch.dot(mean, exact).item() / (mean.norm().item() * size) if size and mean.any() else math.nan
    noise = math.sqrt(means.var(0).sum().item() / groups)
    return GradientGap(cosine, (mean - exact).norm().item() / size if size else math.nan, noise / (size or math.nan))


def exact_terms(
    method: EMoE, x0: Int[Tensor, "B L"], xt: Int[Tensor, "B L"], t: Float[Tensor, " B"]
) -> tuple[Float[Tensor, " B"], Float[Tensor, " B"]]:
    """Both parts of the training objective, summed over all routes instead of drawn; they can be differentiated.

    E over z ~ q(z | x0, xt) of the masked NLL, and of KL_route along z (Eq. 8), in nats per row and float64. Routes of
    all blocks but the last are enumerated, R = E^(L (D - 1)) of them for each row; those of the last are independent
    over positions, and each position sums over its own.
    """
    batch, length = x0.shape
    experts, blocks = method.config.experts, method.backbone.routed_blocks - 1
    count = experts ** (length * blocks)
    digits = experts ** torch.arange(length * blocks, device=x0.device)
    routes = (torch.arange(count, device=x0.device)[:, None] // digits % experts).view(count, blocks, length, 1)
    z = routes.repeat(2 * batch, 1, 1, 1)  # [x0; xt], each row with every route

    def forced(block: int, logits: Float[Tensor, "N L E"]) -> Gate:
        return Gate(z[:, block], torch.ones_like(z[:, block], dtype=logits.dtype))

    masked = xt == method.space.mask_id
    marks = torch.cat([masked, torch.zeros_like(masked)]) if method.config.mask_aware else None
    logits, route_logits = method.backbone.forward_last(
        torch.cat([x0, xt]).repeat_interleave(count, 0),
        torch.cat([t, t]).repeat_interleave(count),
        marks=None if marks is None else marks.repeat_interleave(count, 0),
        route=forced,
    )
    post, prior = zip(*(torch.log_softmax(one.double(), -1).chunk(2) for one in route_logits), strict=True)
    rows = batch * count
    log_q = torch.zeros(rows, dtype=torch.float64, device=x0.device)
    for block in range(blocks):
        log_q = log_q + post[block].gather(-1, z[:rows, block]).sum((1, 2))
    hidden = masked.repeat_interleave(count, 0).double()
    counted = hidden if method.config.kl_positions == "masked" else torch.ones_like(hidden)
    kl = torch.zeros_like(log_q)
    for q, p in zip(post, prior, strict=True):
        kl = kl + ((q.exp() * (q - p)).sum(-1) * counted).sum(-1)
    chosen = x0.repeat_interleave(count, 0)[None, ..., None].expand(experts, -1, -1, 1)
    token = torch.log_softmax(logits[:, rows:].double(), -1).gather(-1, chosen).squeeze(-1)  # (E, N, L)
    recon = -torch.einsum("nle,enl,nl->n", post[-1].exp(), token, hidden)
    share = log_q.exp().view(batch, count)
    return (share * recon.view(batch, count)).sum(-1), (share * kl.view(batch, count)).sum(-1)


def _gradient(value: Float[Tensor, ""], parameters: Sequence[Tensor]) -> Float[Tensor, " N"]:
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
