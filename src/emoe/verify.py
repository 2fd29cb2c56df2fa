"""`emoe verify`: does a method still do what it says? Checks a checkpoint, or random tiny models, against exact laws.

Whoever changes a method runs this to see what broke. Every check is statistical or numerical and says what it saw.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from emoe.backbones.transformer import TransformerConfig
from emoe.evaluation.pools import draw_pool
from emoe.exact import chain_law, exact_nll
from emoe.methods.base import MaskedDiffusion, MaskedDiffusionConfig
from emoe.methods.emoe import EMoEConfig
from emoe.methods.mdlm import MDLMConfig
from emoe.methods.vadd import VADDConfig
from emoe.rng import Rng, derive_seed
from emoe.types import Convention, TokenSpace

TINY: dict[str, MaskedDiffusionConfig] = {
    "mdlm": MDLMConfig(),
    "vadd": VADDConfig(latent=1),
    "emoe": EMoEConfig(experts=2),
}
SIGMAS = 4.5  # how far a mean of draws may lie from what it should be, in standard errors
DRAWS = 400


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


@torch.no_grad()
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
