"""Generative perplexity: exp(NLL / tokens) of samples under an evaluation language model (Eq. 41).

Implementations count different tokens, which matters for short texts, so every number has a named `Setting`. Samples
with repetitions and common phrases have a low perplexity: compare at equal entropy, see `emoe.domains.metrics`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from emoe.config import ConfigError
from emoe.domains.text.data import Text
from emoe.evaluation.eval_lm import EvalLM, fill
from emoe.types import Measurement


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Tokens that are counted."""

    start: bool  # score also the first token of a sample, given the start token of the language model
    max_length: int | None = None  # most tokens of a sample; None: all
    group: int = 1  # samples of a call; those that do not fill a last call are dropped, unless all fit in one
    ends: bool = False  # pad samples with the end token, which counts if it is the first of its sample


SETTINGS = {
    # The formula of the paper: all M tokens are scored and counted, and nothing is cut.
    "paper": Setting(start=True),
    # The code of DUO, on which the paper builds: at most 128 tokens, without the first, with the first end.
    "duo": Setting(start=False, max_length=128, group=8, ends=True),
}


@dataclass(frozen=True)
class Scores:
    """NLL in nats and number of counted tokens of each sample that was not dropped."""

    nll: Float[Tensor, " n"]
    counted: Int[Tensor, " n"]

    def perplexity(self, metric: str = "gen_ppl") -> Measurement:
        """exp(R) with R = sum_i a_i / sum_i m_i for the NLL a_i and the m_i counted tokens of sample i.

        The standard error is that of another draw of n samples, by the delta method for a ratio and an exponential:
        exp(R) * sqrt(n / (n - 1) * sum_i (a_i - R m_i)^2) / sum_i m_i.
        """
        n, total = len(self.nll), int(self.counted.sum())
        if not total:
            raise ValueError("no token of the samples counts, so they have no perplexity")
        ratio = self.nll.sum().item() / total
        if not math.isfinite(ratio):
            raise ValueError("the evaluation LM gives some tokens probability 0, so the samples have no perplexity")
        value, error = math.exp(ratio), None
        if n > 1:
            residual = (self.nll - ratio * self.counted).square().sum().item()
            error = value * math.sqrt(n / (n - 1) * residual) / total
        return Measurement(metric, value, error, n)


def score(lm: EvalLM, text: Text, rows: Int[Tensor, "n L"], setting: Setting | str = "paper") -> Scores:
    """NLL of samples without masks under an evaluation LM in a setting."""
    rows = rows.cpu()
    if not len(rows):
        raise ValueError("there are no samples to score")
    if (rows == text.space.mask_id).any():
        raise ValueError("some samples still hold masks; finish sampling before scoring")
    return score_tokens(lm, lm.encode(text, rows), setting)


def score_tokens(lm: EvalLM, tokens: Sequence[Sequence[int]], setting: Setting | str = "paper") -> Scores:
    """`score` of samples that are tokens of the language model.

    Texts longer than its context are read in windows of that length, each as a text of its own.
    """
    if isinstance(setting, str):
        if setting not in SETTINGS:
            raise ConfigError([f"setting: {setting!r} is not known; allowed: {', '.join(SETTINGS)}"])
        setting = SETTINGS[setting]
    ids, lengths = fill([row[: setting.max_length] for row in tokens], 0 if lm.end is None else lm.end)
    group = min(setting.group, len(tokens))
    n = len(tokens) // group * group
    nll, counts = torch.zeros(n, dtype=torch.float64), torch.zeros(n, dtype=torch.long)
    for first in range(0, ids.shape[1], lm.context):
        part = ids[:n, first : first + lm.context]
        counted = counted_tokens(part, lengths[:n] - first, lm.end, setting)
        some = counted.any(1)
        if some.any():
            values = lm.nll(part[some], start=setting.start)
            nll[some] += torch.where(counted[some], values, 0.0).sum(1)
        counts += counted.sum(1)
    return Scores(nll, counts)


def counted_tokens(
    tokens: Int[Tensor, "n W"], lengths: Int[Tensor, " n"], end: int | None, setting: Setting
) -> Bool[Tensor, "n W"]:
    """The tokens that a setting counts, of rows that are padded with `end`.

    These are the tokens of the text; with `setting.ends` all that are not `end`, and the first `end` of the row, which
    is the first of the padding, unless the text has an end of its own. The first token counts only with a start.
    """
    if setting.ends and end is not None:
        is_end = tokens == end
        counted = ~is_end | (is_end.cumsum(1) == 1)
    else:
        counted = torch.arange(tokens.shape[1]) < lengths[:, None]
    if not setting.start:
        counted[:, :1] = False
    return counted
