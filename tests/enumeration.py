"""Plain enumeration of tiny models in float64: every row, every mask pattern, every route; slow and obvious.

Nothing here calls the package's process, objective or samplers: only the network, with routes forced on it.
Letters as in `emoe.types`, and: C clean rows, S rows with masks, X mask patterns, R routes.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from emoe.backbones.base import Backbone
from emoe.methods.emoe import EMoE
from emoe.methods.masked import MaskedDiffusion
from emoe.types import Gate

ALPHA = 1e-3  # chance that a statistical test fails although nothing is wrong, if its seed were random


def all_rows(symbols: Iterable[int], length: int) -> Tensor:
    """Every row of `length` symbols, in lexicographic order."""
    return torch.tensor(list(itertools.product(list(symbols), repeat=length)), dtype=torch.long)


def single(time: float) -> float:
    """A time as the network gets it from the sampler, in single precision."""
    return float(np.float32(time))


class Prediction(NamedTuple):
    """Token logits of every position, and router logits and gates by block."""

    logits: Tensor
    route_logits: tuple[Tensor, ...]
    gates: tuple[Gate, ...]


def predict(backbone: Backbone, x: Tensor, t: Tensor, **inputs: Any) -> Prediction:
    """One network call and its logits."""
    out = backbone(x, t, **inputs)
    return Prediction(backbone.read(out.h), out.route_logits, out.gates)


def gauss_legendre(low: float, high: float, nodes: int) -> list[tuple[float, float]]:
    """Nodes and weights of a quadrature on [low, high]; the weights sum to high - low."""
    x, w = np.polynomial.legendre.leggauss(nodes)
    return [(low + (high - low) * (a + 1) / 2, (high - low) * b / 2) for a, b in zip(x, w, strict=True)]


@dataclass(frozen=True)
class Terms:
    """The terms of an objective at one time, for each clean row, mask pattern and route."""

    prob: Tensor  # (C, X) q(xt | x0)
    log_q: Tensor  # (C, X, R) log q(z | x0, xt)
    log_p: Tensor  # (C, X, R) log p(z | xt)
    nll: Tensor  # (C, X, R) -sum over masked l of log p(x0^l | xt, z)
    path_kl: Tensor  # (C, X, R) sum over blocks and positions of the routers' KL along z

    def recon(self) -> Tensor:
        """E over xt and z ~ q of the masked NLL, for each clean row."""
        return torch.einsum("cx,cxr,cxr->c", self.prob, self.log_q.exp(), self.nll)

    def kl(self) -> Tensor:
        """E over xt of KL(q(z | x0, xt) || p(z | xt)) between whole routes, for each clean row."""
        return torch.einsum("cx,cxr,cxr->c", self.prob, self.log_q.exp(), self.log_q - self.log_p)

    def moment(self, recon_weight: float, kl_weight: float, power: int) -> Tensor:
        """E over xt and z of (weighted NLL + weighted KL along z) ** power, for each clean row."""
        value = (recon_weight * self.nll + kl_weight * self.path_kl) ** power
        return torch.einsum("cx,cxr,cxr->c", self.prob, self.log_q.exp(), value)


class Enumeration:
    """A method's exact distributions, by running its network on every row with every route."""

    def __init__(self, method: MaskedDiffusion):
        space = method.space
        self.method, self.size, self.mask_id, self.length = method, space.size, space.mask_id, space.length
        self.symbols = [v for v in range(space.size) if v != space.mask_id]
        self.clean = all_rows(self.symbols, space.length)
        self.states = all_rows(range(space.size), space.length)
        self.patterns = all_rows([0, 1], space.length).bool()
        self.blocks = method.backbone.routed_blocks
        experts = method.config.experts if self.blocks else 1
        grid = all_rows(range(experts), self.blocks * space.length)
        self.routes = grid.view(len(grid), self.blocks, space.length)

    def index(self, rows: Tensor) -> Tensor:
        """Number of each row in `states`."""
        radix = self.size ** torch.arange(self.length - 1, -1, -1)
        return (rows * radix).sum(-1)

    def counts(self, rows: Tensor) -> Tensor:
        """Frequency of each row of `states`."""
        return torch.bincount(self.index(rows), minlength=len(self.states))

    def read(self, rows: Tensor, t: float) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Run every row with every route.

        Returns:
            log_route (B, R), the log-probability of each route under the routers; log_token (B, R, L, V), the head's
            prediction of every position as if it were masked; the routers' log-probabilities (B, R, L, E) by block.
        """
        batch, count = len(rows), len(self.routes)
        x = rows.repeat_interleave(count, 0)
        z = self.routes.repeat(batch, 1, 1)
        gates = [Gate(z[:, d, :, None], torch.ones(*z[:, d].shape, 1, dtype=torch.float64)) for d in range(self.blocks)]
        times, route = torch.full((len(x),), t, dtype=torch.float64), (lambda d, logits: gates[d])
        out = predict(self.method.backbone, x, times, route=route if self.blocks else None)
        log_rho = [torch.log_softmax(logits, -1) for logits in out.route_logits]
        log_route = torch.zeros(len(x), dtype=torch.float64)
        for d in range(self.blocks):
            log_route = log_route + log_rho[d].gather(-1, z[:, d, :, None]).sum((1, 2))
        allowed = torch.log_softmax(out.logits[..., self.symbols], -1)
        log_token = torch.full(out.logits.shape, -math.inf, dtype=torch.float64)
        log_token = log_token.index_copy(-1, torch.tensor(self.symbols), allowed)
        shape = (batch, count, self.length, -1)
        return log_route.view(batch, count), log_token.view(shape), [block.view(shape) for block in log_rho]

    def component(self, t: float, alpha_s: float, alpha_t: float) -> tuple[Tensor, Tensor]:
        """log p(z | xt) (S, R) and p(x_s | x_t, z) (S, R, S) for all pairs of states."""
        log_route, log_token, _ = self.read(self.states, t)
        reveal = (alpha_s - alpha_t) / (1 - alpha_t)
        move = torch.zeros_like(log_token)  # p(x_s^l | x_t, z)
        for s, state in enumerate(self.states.tolist()):
            for position, symbol in enumerate(state):
                if symbol == self.mask_id:
                    move[s, :, position] = reveal * log_token[s, :, position].exp()
                    move[s, :, position, self.mask_id] = 1 - reveal
                else:
                    move[s, :, position, symbol] = 1.0
        joint = torch.ones(len(self.states), len(self.routes), len(self.states), dtype=torch.float64)
        for position in range(self.length):
            joint = joint * move[:, :, position, self.states[:, position]]
        return log_route, joint

    def step(self, t: float, alpha_s: float, alpha_t: float) -> Tensor:
        """p(x_s | x_t) = sum over z of p(z | x_t) p(x_s | x_t, z), a matrix (x_t, x_s) over all states (Eq. 5)."""
        log_route, joint = self.component(t, alpha_s, alpha_t)
        return torch.einsum("tr,trs->ts", log_route.exp(), joint)

    def alpha(self, t: float) -> float:
        """The schedule's alpha, exactly 1 at t = 0."""
        return 1.0 if t == 0 else float(self.method.config.schedule.alpha(torch.tensor(t, dtype=torch.float64)))

    @torch.no_grad()
    def law(self, steps: int, start: list[int] | None = None) -> Tensor:
        """Law over all states after the T-step chain from `start` (all masks if not given) (Algo. 2)."""
        law = torch.zeros(len(self.states), dtype=torch.float64)
        law[self.index(torch.tensor(start or [self.mask_id] * self.length))] = 1
        for i in range(steps, 0, -1):
            law = law @ self.step(single(i / steps), self.alpha((i - 1) / steps), self.alpha(i / steps))
        return law

    def nll(self, steps: int) -> Tensor:
        """-log p(x0) of the T-step chain, for each clean row."""
        return -self.law(steps)[self.index(self.clean)].log()

    def terms(self, t: float, alpha: float | None = None) -> Terms:
        """Everything an objective needs at time t, with gradients; alpha is the schedule's unless given."""
        alpha = self.alpha(t) if alpha is None else alpha
        flags = self.patterns.double()
        prob = (flags * (1 - alpha) + (1 - flags) * alpha).prod(-1)
        patterns, prob = self.patterns[prob > 0], prob[prob > 0]
        clean, count = len(self.clean), len(patterns)
        xt = torch.where(patterns, self.mask_id, self.clean[:, None])  # (C, X, L)
        rows, index = xt.flatten(0, 1).unique(dim=0, return_inverse=True)
        index = index.view(clean, count)
        log_p, log_token, prior = self.read(rows, t)
        log_q, _, post = self.read(self.clean, t)
        log_q, post = log_q[:, None].expand(-1, count, -1), [q[:, None] for q in post]
        chosen = self.clean[:, None, None, :, None].expand(clean, count, len(self.routes), self.length, 1)
        log_x0 = log_token[index].gather(-1, chosen).squeeze(-1)  # (C, X, R, L)
        path_kl = torch.zeros_like(log_q)
        for q, p in zip(post, prior, strict=True):
            path_kl = path_kl + (q.exp() * (q - p[index])).sum((-2, -1))
        nll = -(log_x0 * patterns[None, :, None]).sum(-1)
        return Terms(prob.expand(clean, -1), log_q, log_p[index], nll, path_kl)

    def bound(self, steps: int) -> Tensor:
        """The bound of Prop. 3.1 on -log p(x0) of the T-step chain, for each clean row (Eq. 6, 37)."""
        total = torch.zeros(len(self.clean), dtype=torch.float64)
        for i in range(1, steps + 1):
            alpha_s, alpha_t = self.alpha((i - 1) / steps), self.alpha(i / steps)
            terms = self.terms(single(i / steps), alpha_t)
            total = total + (alpha_s - alpha_t) / (1 - alpha_t) * terms.recon() + terms.kl()
        return total


@dataclass(frozen=True)
class Routes:
    """The latent of B rows (x0, xt) as E-MoE's training defines it, for each of R drawn routes."""

    log_q: Tensor  # (B, R) log q(z | x0, xt)
    log_own: Tensor  # (B, R) its part from positions whose turn it is
    log_p: Tensor  # (B, R) log p(z | xt)
    log_x: Tensor  # (B, R) log p(x0 | xt, z) of the masked positions

    def elbo(self, weight: float, beta: float) -> Tensor:
        """E_q[weight * NLL] + beta KL(q || p), for each row."""
        return (self.log_q.exp() * (beta * (self.log_q - self.log_p) - weight * self.log_x)).sum(-1)


def turns_of(method: EMoE) -> list[list[int]]:
    """Positions that choose their own route, block by block."""
    length, blocks, compare = method.space.length, method.backbone.routed_blocks, method.config.compare
    if compare is None or not compare.in_turn:
        return [list(range(length))] * blocks
    return [[position for position in range(length) if position % max(1, blocks - 1) == d] for d in range(blocks)]


def routes_of(method: EMoE, x0: Tensor, xt: Tensor, t: float) -> Routes:
    """Run the network with all routes. A summed last block is log sum over z_D of p(z_D | z_<D, xt) p(x0 | xt, z)."""
    exact, own, compare = Enumeration(method), turns_of(method), method.config.compare
    summed = compare is not None and compare.sum_last
    rows, index = torch.cat([x0, xt]).unique(dim=0, return_inverse=True)
    clean, noisy = index.chunk(2)
    _, log_token, log_rho = exact.read(rows, t)
    z = exact.routes.expand(len(x0), *exact.routes.shape)  # (B, R, D, L)
    log_q, log_own, log_p, last = (torch.zeros(z.shape[:2]).double() for _ in range(4))
    for d, rho in enumerate(log_rho):
        q, p = (rho[side].gather(-1, z[:, :, d, :, None]).squeeze(-1) for side in (clean, noisy))  # (B, R, L)
        if summed and d == exact.blocks - 1:
            last = p.sum(-1)
            continue
        turn = torch.tensor([position in own[d] for position in range(exact.length)])
        log_q, log_p = log_q + torch.where(turn, q, p).sum(-1), log_p + p.sum(-1)
        log_own = log_own + (q * turn).sum(-1)
    chosen = x0[:, None, :, None].expand(-1, z.shape[1], -1, 1)
    log_x = (log_token[noisy].gather(-1, chosen).squeeze(-1) * (xt == exact.mask_id)[:, None]).sum(-1)
    if summed:
        inner = method.config.experts**exact.length  # routes of the last block vary fastest
        log_x = (last + log_x).unflatten(1, (-1, inner)).logsumexp(-1)
        log_q, log_own, log_p = (one.unflatten(1, (-1, inner))[..., 0] for one in (log_q, log_own, log_p))
    return Routes(log_q, log_own, log_p, log_x)


def routes_bound(method: EMoE, steps: int) -> Tensor:
    """bound@T of every clean row, by all mask patterns and drawn routes."""
    exact = Enumeration(method)
    total, count = torch.zeros(len(exact.clean)).double(), len(exact.patterns)
    x0, pattern = exact.clean.repeat_interleave(count, 0), exact.patterns.repeat(len(exact.clean), 1)
    for i in range(1, steps + 1):
        alpha_s, alpha_t = exact.alpha((i - 1) / steps), exact.alpha(i / steps)
        prob = torch.where(pattern, 1 - alpha_t, alpha_t).prod(-1)
        routes = routes_of(method, x0, torch.where(pattern, exact.mask_id, x0), single(i / steps))
        value = prob * routes.elbo((alpha_s - alpha_t) / (1 - alpha_t), 1.0)
        total = total + value.view(-1, count).sum(1)
    return total


def chi_square(counts: Tensor, probs: Tensor) -> float:
    """p-value of the counts under a law; cells with fewer than 5 expected are merged, impossible ones must be empty."""
    counts, probs = counts.double().flatten(), probs.double().flatten()
    assert counts[probs == 0].sum() == 0, "an impossible outcome was drawn"
    order = probs[probs > 0].argsort(descending=True)
    observed, expected = counts[probs > 0][order], probs[probs > 0][order] / probs.sum() * counts.sum()
    cut = int((expected >= 5).sum())
    while cut > 1 and 0 < expected[cut:].sum() < 5:
        cut -= 1
    if cut < len(expected):
        observed = torch.cat([observed[:cut], observed[cut:].sum(0, keepdim=True)])
        expected = torch.cat([expected[:cut], expected[cut:].sum(0, keepdim=True)])
    assert len(expected) > 1 and expected.min() >= 5, "too few draws for a chi-square test"
    return float(stats.chi2.sf(((observed - expected) ** 2 / expected).sum().item(), len(expected) - 1))


def product_of_marginals(law: Tensor, size: int, length: int) -> Tensor:
    """The factorised law with the same marginals, over the same states."""
    table = law.view([size] * length)
    product = torch.ones_like(table)
    for position in range(length):
        others = [p for p in range(length) if p != position]
        marginal = table.sum(others) if others else table
        product = product * marginal.view([-1 if p == position else 1 for p in range(length)])
    return product.flatten()


def factorised_chain(law: Mapping[tuple[int, ...], float], steps: int) -> dict[tuple[int | None, ...], float]:
    """Law of the rows of the T-step chain whose conditionals are those of `law`, exact and factorised.

    A masked position (None) is revealed at t = i/T with probability 1/i. Rows that nothing fits are left out.
    """
    state: dict[tuple[int | None, ...], float] = {(None,) * len(next(iter(law))): 1.0}
    for i in range(steps, 0, -1):
        later: defaultdict[tuple[int | None, ...], float] = defaultdict(float)
        for row, mass in state.items():
            fitting = {r: p for r, p in law.items() if all(a in (None, b) for a, b in zip(row, r, strict=True))}
            options = []
            for position, token in enumerate(row):
                marginal: defaultdict[int, float] = defaultdict(float)
                for r, p in fitting.items():
                    marginal[r[position]] += p / sum(fitting.values())
                drawn = [(None, 1 - 1 / i), *((symbol, p / i) for symbol, p in marginal.items())]
                options.append(drawn if token is None else [(token, 1.0)] * bool(fitting))
            for chosen in itertools.product(*options):
                later[tuple(token for token, _ in chosen)] += mass * math.prod(p for _, p in chosen)
        state = {row: mass for row, mass in later.items() if mass}
    return state
