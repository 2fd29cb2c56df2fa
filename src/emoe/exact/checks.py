"""`emoe verify`: samplers, bounds and KL of a trained model, or of random tiny ones, against exact laws."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from emoe.backbones.transformer import TransformerConfig
from emoe.config import ConfigError, hint
from emoe.exact.laws import chain_law, check_chain, exact_nll
from emoe.methods.base import Method, MethodConfig
from emoe.rng import Rng, derive_seed
from emoe.runs.sampling import draw
from emoe.types import Likelihood, TokenSpace

SIGMAS = 4.5  # largest distance of a mean of draws from its expectation, in standard errors
ROUNDING = 1e-5  # relative error of networks in single precision
DRAWS = 400
TINY = TokenSpace(size=3, mask_id=2, length=2)


class Check(NamedTuple):
    """One line of the table."""

    name: str
    passed: bool
    seen: str


def tiny_methods(only: str | None = None, seed: int = 0) -> dict[str, Method]:
    """Make random models small enough to enumerate (V = 3, L = 2, D = 2), one for each kind that has an exact law."""
    methods, backbone = {}, TransformerConfig(width=8, heads=2, hidden=16, time_size=4)
    for kind in MethodConfig.known_kinds():
        kind_config: Any = MethodConfig.resolve(kind)
        config = kind_config().tiny()
        if list(backbone.unsupported(config.needs())):
            continue
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(seed, "verify", kind))
            method = config.build(TINY, backbone)
            for name, p in method.named_parameters():
                if "norm" not in name:
                    nn.init.normal_(p, std=0.7)  # far from an untrained network: routes and tokens not uniform
        if method.chain_schedule is not None:
            methods[kind] = method.double().eval()
    if only is not None and only not in methods:
        raise ConfigError(f"method: {only!r} has no exact law{hint(only, list(methods))}")
    return methods if only is None else {only: methods[only]}


def verify(
    method: Method, rows: Int[Tensor, "n L"], *, steps: tuple[int, ...] = (1, 2, 4), seed: int = 0
) -> Iterator[Check]:
    """Run all checks of a method for T in `steps`; raise a `ConfigError` if it has no computable law."""
    check_chain(method)
    for count in steps:
        law = chain_law(method, count)
        total = law.sum().item()
        yield Check(f"probabilities sum to one, T = {count}", abs(total - 1) < ROUNDING, f"1 {total - 1:+.1e}")
        yield sampler_check(method, law, count, seed)
        nll = exact_nll(law, rows, mask_id=method.space.mask_id)
        yield from bound_checks(method, rows, nll, count, seed)
    if method.has_latent:
        yield kl_check(method, rows, seed)


def sampler_check(method: Method, law: Float[Tensor, "..."], steps: int, seed: int) -> Check:
    """Compare 50,000 samples with the law by chi-square; cells with fewer than 5 expected are merged."""
    space = method.space
    samples = draw(method, 50_000, steps, seed=derive_seed(seed, "verify"), batch=10_000).samples
    symbols = samples - (samples > space.mask_id).long()
    radix = (space.size - 1) ** torch.arange(space.length - 1, -1, -1)
    counts = torch.bincount((symbols * radix).sum(-1), minlength=law.numel()).double()
    expected = law.flatten() / law.sum() * len(samples)
    often = expected >= 5
    observed, wanted = (torch.cat([x[often], x[~often].sum(0, keepdim=True)]) for x in (counts, expected))
    if wanted[-1] < 5:
        observed, wanted = observed[:-1], wanted[:-1]
    statistic, freedom = ((observed - wanted) ** 2 / wanted).sum(), max(1, len(wanted) - 1)
    p = torch.special.gammaincc(torch.tensor(freedom / 2).double(), statistic / 2).item()
    seen = f"chi-square p = {p:.2g}, {freedom} degrees of freedom"
    return Check(f"samples follow the law, T = {steps}", p > 1e-4, seen)


def bound_checks(
    method: Method, rows: Int[Tensor, "n L"], nll: Float[Tensor, " n"], steps: int, seed: int
) -> Iterator[Check]:
    """Check bound@T >= exact NLL at every row, and iw@T,16 between the two on average."""
    bound = _draws(method, rows, Likelihood("bound", steps), seed)
    allowed = SIGMAS * bound.std(0) / math.sqrt(len(bound)) + ROUNDING * nll.abs().clamp(min=1)
    gap = bound.mean(0) - nll
    seen = f"mean NLL {nll.mean():.4f}, mean bound {bound.mean():.4f}, least gap {gap.min():+.4f}"
    yield Check(f"bound@{steps} >= exact NLL at each of {len(rows)} rows", bool((gap > -allowed).all()), seen)
    tight = _draws(method, rows, Likelihood("iw", steps, 16), seed)
    error = SIGMAS * math.hypot(_error(bound), _error(tight)) + ROUNDING * float(nll.abs().mean().clamp(min=1))
    between = tight.mean() < bound.mean() + error and tight.mean() > nll.mean() - error
    yield Check(f"exact NLL <= iw@{steps},16 <= bound@{steps} on average", bool(between), f"mean iw {tight.mean():.4f}")


@torch.no_grad()
def kl_check(method: Method, rows: Int[Tensor, "n L"], seed: int) -> Check:
    """Compare the method's KL of posterior and prior with the mean of log q(z) - log p(z)."""
    device = next(method.parameters()).device
    x0 = rows.to(device).repeat(DRAWS, 1)
    # bound@1 - iw@1,1 on equal draws is KL - (log q(z) - log p(z)): at T = 1 both have all masks and reveal all.
    names = Likelihood("bound", 1), Likelihood("iw", 1, 1)
    bound, one_draw = (method.nll(x0, name, Rng(seed, device=device)) for name in names)
    gap = bound - one_draw
    error = gap.std().item() / math.sqrt(len(gap)) + ROUNDING
    seen = f"mean difference {gap.mean():+.4f} nats, standard error {error:.4f}"
    passed = abs(gap.mean().item()) < SIGMAS * error
    return Check("KL of the latent, computed and as a mean of log ratios", passed, seen)


def _draws(method: Method, rows: Int[Tensor, "n L"], likelihood: Likelihood, seed: int) -> Float[Tensor, "K n"]:
    """Draw a likelihood many times for each row; rows are shuffled, because times are stratified over a batch."""
    device = next(method.parameters()).device
    many = rows.to(device).repeat(DRAWS, 1)
    order = torch.randperm(len(many), generator=torch.Generator().manual_seed(derive_seed(seed, "order"))).to(device)
    values = torch.empty(len(many), dtype=torch.float64, device=device)
    values[order] = method.nll(many[order], likelihood, Rng(derive_seed(seed, likelihood), device=device)).double()
    return values.view(DRAWS, len(rows)).cpu()


def _error(draws: Float[Tensor, "K n"]) -> float:
    return draws.std(0).square().mean().sqrt().item() / math.sqrt(draws.numel())
