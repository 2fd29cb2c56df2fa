"""Ratios of probabilities of the absorbing process ("concrete scores"): their loss and the analytic reverse step.

With alpha = e^-sigma the ratio of x with a masked position set to y, and x itself, is r * p(x0^l = y | clean tokens),
where r = alpha / (1 - alpha) = 1 / (e^sigma - 1). A network predicts s_y for all y (Lou et al. 2024, SEDD).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from emoe.diffusion.categorical import draw_categorical
from emoe.diffusion.masking import NEG_INF, reveal_probability
from emoe.diffusion.times import grid_times
from emoe.rng import Rng
from emoe.types import StepEvent

AT_ONCE = 4096  # positions whose scores are looked at in float64 at a time

LogScore = Callable[[Int[Tensor, "B L"], Float[Tensor, " B"]], Float[Tensor, "B L V"]]
"""(x_t, t) -> log s: one network call, one NFE."""


def log_scale(sigma: Float[Tensor, " B"], size: int) -> Float[Tensor, " B"]:
    """log(e^sigma - 1) + log(V - 1): what is taken off the network's output, whose mean is then about 0."""
    return torch.log(torch.expm1(sigma)) + math.log(size - 1)


def log_score(
    logits: Float[Tensor, "B L V"], xt: Int[Tensor, "B L"], sigma: Float[Tensor, " B"]
) -> Float[Tensor, "B L V"]:
    """log s = network - log(e^sigma - 1) - log(V - 1), and 0 at the current token."""
    scaled = logits - log_scale(sigma, logits.shape[-1])[:, None, None].to(logits.dtype)
    return scaled.scatter(-1, xt[..., None], 0.0)


def score_entropy(
    log_total: Float[Tensor, "B L"], log_target: Float[Tensor, "B L"], sigma: Float[Tensor, " B"]
) -> Float[Tensor, "B L"]:
    """sum_y s_y - r log s_x0 + r (log r - 1) of a masked position, r = 1 / (e^sigma - 1); y is any symbol but the mask.

    Zero if s is r at x0 and zero elsewhere, positive otherwise. Written with c = sum_y s_y / r and x_theta = s / (r c)
    it is r [-log x_theta(x0) + (c - 1 - log c)], which is how it is computed: the terms of size r log r cancel.

    Args:
        log_total: log sum_y s_y.
        log_target: log s_x0.
        sigma: Noise of each row.
    """
    log_r = -torch.log(torch.expm1(sigma))[:, None].to(log_total.dtype)
    return log_r.exp() * (torch.exp(log_total - log_r) - 1 - (log_target - log_r))


def tweedie_distribution(
    log_s: Float[Tensor, "B L V"], xt: Int[Tensor, "B L"], sigma_s: float, sigma_t: float, mask_id: int
) -> Float[Tensor, "B L V"]:
    """p(x_s^l | x_t) of the analytic step as probabilities, in the words of its authors; reference of `tweedie_step`.

    With d = sigma_t - sigma_s: [exp(-d Q) s]_y * exp(d Q)(x_t, y), Q the generator of the absorbing process.
    At a masked position this is (e^d - 1) s_y for a symbol and 1 - (e^d - 1) sum_y s_y for the mask (at least 0, and
    then the sum is brought back to 1); a clean one stays. sigma_s = 0 is the last step: the mask's part is removed.
    """
    d = sigma_t - sigma_s
    s = log_s.double().exp()
    staggered = math.exp(d) * s
    staggered[..., mask_id] += (1 - math.exp(d)) * s.sum(-1)
    here = torch.nn.functional.one_hot(xt, log_s.shape[-1]).double()
    masked = (xt == mask_id)[..., None]
    transition = math.exp(-d) * here + torch.where(masked, 1 - math.exp(-d), 0.0)
    probs = (staggered * transition).clamp(min=0)
    if sigma_s == 0:
        probs[..., mask_id] = 0
    return probs / probs.sum(-1, keepdim=True)


def tweedie_step(
    log_s: Float[Tensor, "B L V"],
    xt: Int[Tensor, "B L"],
    alpha_s: float,
    alpha_t: float,
    mask_id: int,
    *,
    reveal: torch.Generator,
    token: torch.Generator,
) -> tuple[Int[Tensor, "B L"], Bool[Tensor, "B L"]]:
    """Draw x_s from `tweedie_distribution`, and say which positions were revealed.

    (e^d - 1) r is a = (alpha_s - alpha_t) / (1 - alpha_t), so a masked position is revealed with probability
    min(1, a c), c = sum_y s_y / r, and then takes y with probability s_y / sum s. alpha_s = 1 reveals all.
    """
    is_mask = torch.arange(log_s.shape[-1], device=log_s.device) == mask_id

    def over(positions: Bool[Tensor, "B L"], value: Callable[[Tensor], Tensor]) -> Tensor:
        # Some positions at a time: in float64 all B * L * V numbers would be most of a step's work and memory.
        parts = log_s[positions].split(AT_ONCE)
        return torch.cat([value(part.double().masked_fill(is_mask, NEG_INF)) for part in parts])

    u = torch.rand(xt.shape, generator=reveal, device=xt.device, dtype=torch.float64)
    revealed = xt == mask_id
    if alpha_s < 1:
        r = alpha_t / (1 - alpha_t)
        a = float(reveal_probability(alpha_s, alpha_t))
        chance = a / r * over(revealed, lambda part: part.logsumexp(-1)).exp()
        revealed = revealed.masked_scatter(revealed, u[revealed] < chance)
    return xt.masked_scatter(revealed, over(revealed, lambda part: draw_categorical(part, token))), revealed


@torch.no_grad()
def analytic(
    log_scores: LogScore,
    x: Int[Tensor, "B L"],
    alpha: Callable[[float], float],
    steps: int,
    rng: Rng,
    *,
    mask_id: int,
    on_step: Callable[[StepEvent], None] | None = None,
) -> Int[Tensor, "B L"]:
    """Run the analytic (Tweedie) sampler from x on the grid t_i = i / T; tokens that are given stay.

    The last step goes from t_1 = 1 / T to 0 and is the denoiser, with the mask's probability removed: exactly `steps`
    network calls. The authors' program makes `steps` analytic steps down to t = 1e-5 and one more call there, the
    denoiser, which almost never has a mask left: its `steps` are our `steps` + 1 on a slightly other grid.
    """
    times = grid_times(steps)
    for i in range(steps, 0, -1):
        rng.at(i)
        log_s = log_scores(x, torch.full((len(x),), times[i], device=x.device))
        alpha_s = 1.0 if i == 1 else alpha(times[i - 1])
        x, revealed = tweedie_step(
            log_s, x, alpha_s, alpha(times[i]), mask_id, reveal=rng.stream("reveal"), token=rng.stream("token")
        )
        if on_step is not None:
            on_step(StepEvent(i, times[i], x, revealed, None))
    return x
