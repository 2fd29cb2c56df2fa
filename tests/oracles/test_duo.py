"""The package against numbers of DUO's own code on fixed inputs (`tests/data/duo.json` says how they were made).

DUO writes -1e6 for a logarithm of 0, this package -inf: both are null in the file. Its perplexity and entropy are sums
in single precision, here in double.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from references import reverse_distribution
from torch import Tensor

from emoe.diffusion.masking import subs
from emoe.domains.metrics import unigram_entropy
from emoe.evaluation.eval_lm import EvalLM
from emoe.evaluation.gen_ppl import SETTINGS, score_tokens

# `reverse_distribution` rounds the chance that a position stays masked to single precision.
CLOSE = {"rtol": 0, "atol": 6e-8}
DUO = json.loads((Path(__file__).parents[1] / "data" / "duo.json").read_text("utf-8"))


def double(rows: list) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def test_subs():
    stored = DUO["subs"]
    log_x_theta = subs(double(stored["logits"]), torch.tensor(stored["xt"]), stored["mask"])
    expected = [
        [[-math.inf if v is None else v for v in position] for position in row] for row in stored["log_x_theta"]
    ]
    assert torch.allclose(log_x_theta, double(expected), rtol=0, atol=1e-12)
    nulls = sum(v is None for row in stored["log_x_theta"] for at in row for v in at)
    assert nulls == log_x_theta.isinf().sum()


def test_reverse_step_of_a_prediction():
    stored, posterior = DUO["subs"], DUO["posterior"]
    xt, logits = torch.tensor(stored["xt"]), double(stored["logits"])
    for row, (s, t) in enumerate(zip(posterior["alpha_s"], posterior["alpha_t"], strict=True)):
        one = xt[row : row + 1]
        law = reverse_distribution(subs(logits[row : row + 1], one, stored["mask"]), one, s, t, stored["mask"])
        assert torch.allclose(law, double(posterior["predicted"][row : row + 1]), **CLOSE)


def test_reverse_step_of_the_data():
    """q(x_s | x_t, x_0): a prediction that is sure of x_0."""
    stored, mask = DUO["posterior"], DUO["subs"]["mask"]
    x0, xt = torch.tensor(stored["x0"]), torch.tensor(stored["xt"])
    sure = torch.nn.functional.one_hot(x0, 7).double().log()
    for row, (s, t) in enumerate(zip(stored["alpha_s"], stored["alpha_t"], strict=True)):
        law = reverse_distribution(sure[row : row + 1], xt[row : row + 1], s, t, mask)
        assert torch.allclose(law, double(stored["clean"][row : row + 1]), **CLOSE)


def test_entropy():
    stored = DUO["entropy"]
    entropy = unigram_entropy(torch.tensor(stored["rows"]))
    assert entropy.tolist() == pytest.approx(stored["each"], abs=1e-6)
    assert entropy.mean().item() == pytest.approx(stored["mean"], abs=1e-6)


def test_generative_perplexity():
    """Cut, filled up, counted and averaged as there; with long texts, ends inside and in front, a last call of 3."""
    stored, setting = DUO["gen_ppl"], SETTINGS["duo"]

    class Replay(EvalLM):
        """An evaluation LM with the numbers of DUO's GPT-2, for the rows that DUO gave it only."""

        kind, name, sha256, dtype, pooling = "replay", "replay", "", "float32", "last"
        context, end = 1024, stored["end"]

        def encode(self, text, rows):
            raise NotImplementedError

        features = encode

        def nll(self, tokens: Tensor, *, start: bool) -> Tensor:
            assert not start
            rows = [row[:128] + [self.end] * (128 - len(row)) for row in stored["tokens"]]
            indices = [next(i for i, row in enumerate(rows) if row == one) for one in tokens.tolist()]
            return torch.nn.functional.pad(double(stored["nll"])[indices], (1, 0), value=math.nan)

    assert (stored["max_length"], stored["group"]) == (setting.max_length, setting.group)
    scores = score_tokens(Replay(), stored["tokens"], setting)
    assert len(scores.nll) == stored["texts"] - 3 == len(stored["nll"])
    assert any(len(row) > 128 for row in stored["tokens"])
    assert scores.counted.sum() == stored["counted"]
    assert scores.perplexity().value == pytest.approx(stored["ppl"], rel=1e-5)
