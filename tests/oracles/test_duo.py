"""Ours against DUO's own code, by the numbers that it gave on fixed inputs (`tests/data/duo.json` says how).

DUO writes -1e6 for a logarithm of 0, we -inf: both are null in the file. Its perplexity and entropy are sums in single
precision, ours in double.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from emoe.diffusion.masking import reverse_distribution, subs
from emoe.domains.text.metrics import unigram_entropy
from emoe.judges import SETTINGS, Judge, score_tokens

# `reverse_distribution` rounds the chance that a position stays masked to single precision.
CLOSE = {"rtol": 0, "atol": 6e-8}
DUO = json.loads((Path(__file__).parents[1] / "data" / "duo.json").read_text("utf-8"))


def double(rows: list) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def test_subs():
    told = DUO["subs"]
    found = subs(double(told["logits"]), torch.tensor(told["xt"]), told["mask"])
    expected = [[[-math.inf if v is None else v for v in place] for place in row] for row in told["log_x_theta"]]
    assert torch.allclose(found, double(expected), rtol=0, atol=1e-12)
    assert sum(v is None for row in told["log_x_theta"] for place in row for v in place) == found.isinf().sum()


def test_reverse_step_of_a_prediction():
    told, posterior = DUO["subs"], DUO["posterior"]
    xt, logits = torch.tensor(told["xt"]), double(told["logits"])
    for row, (s, t) in enumerate(zip(posterior["alpha_s"], posterior["alpha_t"], strict=True)):
        one = xt[row : row + 1]
        found = reverse_distribution(subs(logits[row : row + 1], one, told["mask"]), one, s, t, told["mask"])
        assert torch.allclose(found, double(posterior["predicted"][row : row + 1]), **CLOSE)


def test_reverse_step_of_the_data():
    """q(x_s | x_t, x_0): a prediction that is sure of x_0."""
    told, mask = DUO["posterior"], DUO["subs"]["mask"]
    x0, xt = torch.tensor(told["x0"]), torch.tensor(told["xt"])
    sure = torch.nn.functional.one_hot(x0, 7).double().log()
    for row, (s, t) in enumerate(zip(told["alpha_s"], told["alpha_t"], strict=True)):
        found = reverse_distribution(sure[row : row + 1], xt[row : row + 1], s, t, mask)
        assert torch.allclose(found, double(told["clean"][row : row + 1]), **CLOSE)


def test_entropy():
    told = DUO["entropy"]
    found = unigram_entropy(torch.tensor(told["rows"]))
    assert found.tolist() == pytest.approx(told["each"], abs=1e-6)
    assert found.mean().item() == pytest.approx(told["mean"], abs=1e-6)


class Replay(Judge):
    """A judge that says what DUO's GPT-2 said, and only of the rows that DUO gave it."""

    name, sha256, dtype, pooling = "replay", "", "float32", "last"
    context, end = 1024, DUO["gen_ppl"]["end"]

    def encode(self, text, rows, *, special=True):
        raise NotImplementedError

    features = encode

    def nll(self, tokens: Tensor, *, start: bool) -> Tensor:
        assert not start
        known = [row[:128] for row in DUO["gen_ppl"]["tokens"]]
        known = torch.tensor([row + [self.end] * (128 - len(row)) for row in known])
        places = [next(i for i, row in enumerate(known) if torch.equal(row, one)) for one in tokens]
        said = double(DUO["gen_ppl"]["nll"])[places]
        return torch.nn.functional.pad(said, (1, 0), value=math.nan)


def test_generative_perplexity():
    """Cut, filled up, counted and averaged as there; with long texts, ends inside and in front, a last call of 3."""
    told, setting = DUO["gen_ppl"], SETTINGS["duo"]
    assert (told["max_length"], told["group"]) == (setting.max_length, setting.group)
    found = score_tokens(Replay(), told["tokens"], setting)
    assert found.dropped == 3 and len(found.nll) == told["texts"] - 3 == len(told["nll"])
    assert found.cut == sum(len(row) > 128 for row in told["tokens"]) > 0
    assert found.counted.sum() == told["counted"]
    assert found.perplexity().value == pytest.approx(told["ppl"], rel=1e-5)
