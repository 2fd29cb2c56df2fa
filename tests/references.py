"""Plain references: distributions of the process as probabilities, the masked likelihood, and the DiT in formulas."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from emoe.backbones.dit import DiT
from emoe.diffusion.masking import log_chosen, reveal_probability


def forward_distribution(x: Tensor, keep: float, mask_id: int, size: int) -> Tensor:
    """q(x_t^l | x_s^l) = Cat(keep * x_s + (1 - keep) * m) of Eq. 1 and 12, as probabilities (B, L, V) in float64."""
    stay = torch.nn.functional.one_hot(x, size).double() * keep
    stay[..., mask_id] += 1 - keep
    return stay


def reverse_distribution(log_x_theta: Tensor, xt: Tensor, alpha_s: float, alpha_t: float, mask_id: int) -> Tensor:
    """p(x_s^l | x_t) of Eq. 2-3 and 13-14 as probabilities (B, L, V).

    A masked position keeps the mask with probability (1 - alpha_s) / (1 - alpha_t) and takes the tokens of x_theta
    with the remaining probability; a clean one stays.
    """
    reveal = reveal_probability(alpha_s, alpha_t)
    masked = (xt == mask_id)[..., None]
    probs = torch.where(masked, reveal * log_x_theta.exp(), log_x_theta.exp())
    probs[..., mask_id] += masked[..., 0].to(probs.dtype) * (1 - reveal)
    return probs


def masked_nll(log_x_theta: Tensor, x0: Tensor) -> Tensor:
    """-sum over masked l of log <x_theta^l, x_0^l> (the sum of Eq. 17 and 19), nats per row.

    Clean positions contribute exactly 0, because SUBS copies them.
    """
    return -log_chosen(log_x_theta, x0).sum(-1)


def tweedie_distribution(log_s: Tensor, xt: Tensor, sigma_s: float, sigma_t: float, mask_id: int) -> Tensor:
    """p(x_s^l | x_t) of SEDD's analytic step as probabilities (B, L, V), in its authors' notation.

    With d = sigma_t - sigma_s: [exp(-d Q) s]_y * exp(d Q)(x_t, y), Q the generator of the absorbing process.
    At a masked position this is (e^d - 1) s_y for a symbol and 1 - (e^d - 1) sum_y s_y for the mask (at least 0, and
    then normalised); a clean one stays. sigma_s = 0 is the last step: the mask's probability is removed.
    """
    d = sigma_t - sigma_s
    s = log_s.double().exp()
    staggered = math.exp(d) * s
    staggered[..., mask_id] += (1 - math.exp(d)) * s.sum(-1)
    one_hot = torch.nn.functional.one_hot(xt, log_s.shape[-1]).double()
    masked = (xt == mask_id)[..., None]
    transition = math.exp(-d) * one_hot + torch.where(masked, 1 - math.exp(-d), 0.0)
    probs = (staggered * transition).clamp(min=0)
    if sigma_s == 0:
        probs[..., mask_id] = 0
    return probs / probs.sum(-1, keepdim=True)


# --- The DiT -----------------------------------------------------------------------------------------------------


def _norm(u: Tensor, weight: Tensor) -> Tensor:
    centred = u - u.mean(-1, keepdim=True)
    return weight * centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def _gelu(u: Tensor) -> Tensor:
    return 0.5 * u * (1 + torch.tanh(math.sqrt(2 / math.pi) * (u + 0.044715 * u**3)))


def turn(u: Tensor, positions: Tensor, base: float) -> Tensor:
    """Pairs (u_r, u_{r + R}) of (B, L, H, C) as complex numbers, times exp(i position base^(-2r / C))."""
    pairs = u.shape[-1] // 2
    frequency = torch.tensor([base ** (-2 * r / u.shape[-1]) for r in range(pairs)], dtype=torch.float64)
    turned = torch.complex(u[..., :pairs], u[..., pairs:]) * torch.exp(1j * positions[:, None, None] * frequency)
    return torch.cat([turned.real, turned.imag], -1)


def dit_logits(
    network: DiT,
    x: Tensor,
    sigma: Tensor,
    *,
    cond: Tensor | None = None,
    experts: Tensor | None = None,
    attend: Tensor | None = None,
) -> Tensor:
    """Logits over all symbols, the mask's as the head gives it; `experts` (B, L) run in every block."""
    config, weights = network.trunk.config, {k.removeprefix("trunk."): v for k, v in network.state_dict().items()}

    def linear(name: str, u: Tensor) -> Tensor:
        return u @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", torch.zeros(1).double())

    def silu(u: Tensor) -> Tensor:
        return u / (1 + torch.exp(-u))

    rows, length = x.shape
    heads, size = config.heads, config.width // config.heads
    positions = torch.arange(length).double()
    if not config.causal:
        half = config.time_size // 2
        angle = sigma[:, None] * torch.tensor([10_000 ** (-i / half) for i in range(half)], dtype=torch.float64)
        c = linear("time.2", silu(linear("time.0", torch.cat([angle.sin(), angle.cos()], -1))))
        if cond is not None:
            c = c + linear("latent.4", silu(linear("latent.2", silu(linear("latent.0", cond)))))
        c = silu(c)[:, None]
    h = weights["token.weight"][x]
    for d in range(config.depth):
        name = f"blocks.{d}."
        zero, one = torch.zeros(rows, 1, config.width).double(), torch.ones(rows, 1, config.width).double()
        parts = [zero, zero, one] * 2 if config.causal else linear(name + "adaln", c).split(config.width, -1)
        u = _norm(h, weights[name + "attention_norm.weight"]) * (1 + parts[1]) + parts[0]
        q, k, v = (part.view(rows, length, heads, size) for part in linear(name + "attention.qkv", u).chunk(3, -1))
        q, k = turn(q, positions, config.rotary_base), turn(k, positions, config.rotary_base)
        scores = torch.einsum("blhc,bmhc->bhlm", q, k) / math.sqrt(size)
        if attend is not None:
            scores = scores.masked_fill(~attend, -torch.inf)
        mixed = torch.einsum("bhlm,bmhc->blhc", torch.softmax(scores, -1), v).reshape(rows, length, -1)
        h = h + parts[2] * linear(name + "attention.out", mixed)
        u = _norm(h, weights[name + "mlp_norm.weight"]) * (1 + parts[4]) + parts[3]
        if experts is None:
            out = linear(name + "mlp.2", _gelu(linear(name + "mlp.0", u)))
        else:
            w_in, b_in, w_out, b_out = (weights[f"{name}mlp.experts.{p}"] for p in ("w_in", "b_in", "w_out", "b_out"))
            hidden = _gelu(torch.einsum("blk,blkf->blf", u, w_in[experts]) + b_in[experts])
            out = torch.einsum("blf,blfk->blk", hidden, w_out[experts]) + b_out[experts]
        h = h + parts[5] * out
    h = _norm(h, weights["norm.weight"])
    if not config.causal:
        shift, scale = linear("adaln", c).chunk(2, -1)
        h = h * (1 + scale) + shift
    return linear("head", h)
