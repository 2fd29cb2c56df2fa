"""Evaluation LMs: perplexities by hand, exact NLL of own runs, Hugging Face's own loss, MAUVE's extremes."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from emoe.backbones.dit import DiTConfig
from emoe.config import ConfigError
from emoe.domains.text.data import Text, TextConfig
from emoe.engine.fit import TrainConfig
from emoe.evaluation.eval_lm import EvalLM, HuggingFaceLM, RunLM, fill, import_extra, open_eval_lm
from emoe.evaluation.gen_ppl import SETTINGS, Scores, Setting, counted_tokens, score, score_tokens
from emoe.experiment import Experiment
from emoe.methods.ar import ARConfig
from emoe.methods.base import MethodConfig
from emoe.methods.mdlm import MDLMConfig
from emoe.rng import Rng
from emoe.runs.run import Run
from emoe.runs.train import train
from emoe.studies.scores import mauve
from emoe.types import Likelihood

END = "<|endoftext|>"
A, B, C = range(3)


@pytest.fixture(scope="module")
def text(sets: Path) -> Text:
    return TextConfig(path=str(sets / "set")).build(0)


# --- Settings


class Table(EvalLM):
    """Three tokens a, b, c = 0, 1, 2 of which each depends on the one before it alone; c may be the end."""

    kind, name, sha256, dtype, pooling = "table", "table", "0", "float64", "mean"
    first = (0.5, 0.3, 0.2)
    after = ((0.1, 0.6, 0.3), (0.8, 0.1, 0.1), (0.25, 0.25, 0.5))

    def __init__(self, end: int | None = None, context: int = 100):
        self.end, self.context = end, context

    def encode(self, text, rows):
        return rows.tolist()

    def nll(self, tokens: Tensor, *, start: bool) -> Tensor:
        assert tokens.shape[1] <= self.context
        later = -torch.tensor(self.after).double().log()[tokens[:, :-1], tokens[:, 1:]]
        first = -torch.tensor(self.first).double().log()[tokens[:, :1]]
        return torch.cat([first if start else torch.full_like(first, math.nan), later], 1)

    def features(self, text, rows):
        raise NotImplementedError


def test_perplexity_of_three_tokens_by_hand():
    texts = [[A, B, C], [B, A]]
    paper = score_tokens(Table(), texts, "paper")
    assert paper.counted.tolist() == [3, 2] and paper.perplexity().n == 2
    assert paper.perplexity().value == pytest.approx((0.5 * 0.6 * 0.1 * 0.3 * 0.8) ** (-1 / 5))
    # Without the first token, and with the first end after the shorter text: 0.3 is p(c | a).
    duo = score_tokens(Table(end=C), texts, "duo")
    assert duo.counted.tolist() == [2, 2]
    assert duo.perplexity().value == pytest.approx((0.6 * 0.1 * 0.8 * 0.3) ** (-1 / 4))


def test_ends_and_filling():
    """The filling counts once, unless the text has an end of its own; ends count up to the second."""
    ids, lengths = fill([[A, B, A, A, A], [A, B], [A, C, B], [A, C, B, C], [C, A], []], C)
    assert ids[2].tolist() == [A, C, B, C, C] and lengths.tolist() == [5, 2, 3, 4, 2, 0]
    assert counted_tokens(ids, lengths, C, SETTINGS["duo"]).long().tolist() == [
        [0, 1, 1, 1, 1],  # the longest has no filling
        [0, 1, 1, 0, 0],  # the first of the filling
        [0, 1, 1, 0, 0],  # the end inside, and what is behind it
        [0, 1, 1, 0, 0],  # the second end does not count
        [0, 1, 0, 0, 0],  # an end in front is not scored, as no first token is
        [0, 0, 0, 0, 0],
    ]
    assert counted_tokens(ids, lengths, C, SETTINGS["paper"]).sum(1).tolist() == lengths.tolist()
    assert counted_tokens(ids, lengths, None, SETTINGS["duo"]).sum(1).tolist() == [4, 1, 2, 3, 1, 0]


def test_samples_that_are_cut_dropped_or_read_in_windows():
    texts = [[A] * 200, *([[A, B]] * 18)]
    duo = score_tokens(Table(end=C, context=300), texts, "duo")
    assert len(duo.nll) == 16 and duo.counted[:2].tolist() == [127, 2]
    assert len(score_tokens(Table(end=C), texts[:5], "duo").nll) == 5  # all fit in one call
    assert score_tokens(Table(context=300), texts, "paper").counted.sum() == 236
    long = score_tokens(Table(context=4), [[A, B, A, B, A, B], [A, B, A]], "paper")
    parts = score_tokens(Table(), [[A, B, A, B], [A, B], [A, B, A]], "paper")
    assert long.counted.tolist() == [6, 3] and long.nll.sum() == pytest.approx(parts.nll.sum().item())
    unstarted = score_tokens(Table(context=4), [[A, B, A, B, A, B], [A, B, A]], Setting(start=False))
    assert unstarted.counted.tolist() == [4, 2]  # the first of each window is not scored


def test_the_standard_error_is_that_of_other_draws():
    """The delta method against the spread of perplexities of many pools."""
    generator = torch.Generator().manual_seed(0)
    counted = torch.randint(20, 60, (2000, 100), generator=generator)
    nll = counted * (3 + 0.4 * torch.randn(2000, 100, generator=generator, dtype=torch.float64))
    pools = [Scores(a, m).perplexity() for a, m in zip(nll, counted, strict=True)]
    spread = np.std([pool.value for pool in pools])
    assert np.mean([pool.stderr for pool in pools]) == pytest.approx(spread, rel=0.05)
    assert Scores(nll[0, :1], counted[0, :1]).perplexity().stderr is None


# --- Own runs


def experiment(text: Text, method: MethodConfig) -> Experiment:
    small = {"width": 8, "depth": 2, "heads": 2, "hidden": 16, "cond_size": 4, "time_size": 4, "dropout": 0.1}
    backbone, train = DiTConfig(causal=method.needs().causal, **small), TrainConfig(steps=2, batch=4)
    return Experiment(name="lm", domain=text.config, backbone=backbone, method=method, train=train)


@pytest.fixture
def run(text: Text, scramble) -> Run:
    config = experiment(text, ARConfig())
    run = Run(Path("somewhere/lm"), config, scramble(config.build_method(text.space).double().eval(), 3), 0)
    run.domain = text
    return run


def test_a_run_scores_rows_as_the_sum_of_its_log_probabilities(text, run, monkeypatch):
    lm, rows = RunLM(run), text.fresh(9, 0)
    expected = torch.zeros(9, 8, dtype=torch.float64)
    with torch.no_grad():
        for position in range(8):  # each token from a row that holds nothing of what follows
            given = torch.cat([torch.full((9, 1), 4), rows[:, :position]], 1)
            logits = run.method.backbone.read(run.method.backbone(given, torch.zeros(9)).h)[:, -1]
            expected[:, position] = -logits.log_softmax(-1)[torch.arange(9), rows[:, position]]
        hidden = run.method.backbone(torch.cat([torch.full((9, 1), 4), rows[:, :-1]], 1), torch.zeros(9)).h
    assert expected.std() > 0.3  # the predictions differ
    assert torch.allclose(lm.nll(rows), expected, atol=1e-12)
    assert torch.allclose(lm.features(text, rows), hidden.float().mean(1))
    paper = score(lm, text, rows)
    assert torch.allclose(paper.nll, expected.sum(1)) and paper.counted.tolist() == [8] * 9
    assert torch.allclose(paper.nll, run.method.nll(rows, Likelihood("exact"), Rng(0)).double())
    assert paper.perplexity().value == pytest.approx(expected.mean().exp().item())
    assert torch.allclose(score(lm, text, rows, "duo").nll, expected[:8, 1:].sum(1))  # a call of 8, no first token
    monkeypatch.setattr("emoe.evaluation.eval_lm.LOGITS", 1)  # a row a call
    lm = RunLM(run)
    assert torch.allclose(lm.nll(rows), expected) and torch.allclose(lm.features(text, rows), hidden.float().mean(1))


def test_a_run_folder(text, tmp_path):
    train(experiment(text, ARConfig()), tmp_path / "ar", device="cpu", callbacks=())
    lm, again = (open_eval_lm(tmp_path / "ar", device="cpu") for _ in range(2))
    manifest = lm.describe()
    assert lm.sha256 == again.sha256 and (lm.dtype, lm.context) == ("float32", 8)
    assert [manifest[name] for name in ("kind", "name", "step", "trained_on")] == ["run", "ar", 2, "set"]
    with torch.no_grad():
        again.backbone.head.bias += 1e-3
    assert RunLM(again.run).sha256 != lm.sha256


def test_runs_that_are_refused(text, run, sets, tmp_path):
    mdlm = experiment(text, MDLMConfig())
    other = Run(Path("somewhere"), mdlm, mdlm.build_method(text.space), 0)
    other.domain = text
    with pytest.raises(ConfigError, match="eval-lm: somewhere holds 'mdlm', .* no exact NLL; give a run of 'ar'"):
        RunLM(other)
    strange = TextConfig(path=str(sets / "strange")).build(0)  # as many words
    with pytest.raises(ConfigError, match="eval-lm: lm was trained with another tokenizer than that of strange"):
        score(RunLM(run), strange, strange.fresh(2, 0))
    with pytest.raises(ConfigError, match="nothing does not exist; give the folder of a run of 'ar' or of a Hugging"):
        open_eval_lm(tmp_path / "nothing")


# --- Hugging Face


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory) -> Path:
    """A random GPT-2 of two layers with 16 positions, and a tokenizer of words and characters."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install emoe[judge]")
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: i for i, word in enumerate([END, "?", *"abcdefghCLSx", "[", "]", ".", "the"])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"the|\S"), "removed", invert=True)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=END, bos_token=END)
    torch.manual_seed(0)
    sizes = {"vocab_size": len(words), "n_positions": 16, "n_embd": 8, "n_layer": 2, "n_head": 2}
    config = transformers.GPT2Config(**sizes, initializer_range=0.7, bos_token_id=0, eos_token_id=0)
    folder = tmp_path_factory.mktemp("lm") / "tiny"
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def own_loss(lm: HuggingFaceLM, ids: Sequence[int]) -> float:
    """The sum over all tokens but the first, from transformers' own loss: a mean, in single precision."""
    row = torch.tensor([ids])
    return lm.model(row, labels=row).loss.item() * (len(ids) - 1)


def test_nll_is_the_loss_of_transformers(gpt2):
    lm = HuggingFaceLM(gpt2, device="cpu")
    lm.model.double()
    texts = lm.tokenizer(["the cat", "a b c d e f g h", "b"], add_special_tokens=False)["input_ids"]
    assert [len(ids) for ids in texts] == [4, 8, 1] and lm.context == 16 and lm.start == lm.end == 0
    paper = score_tokens(lm, texts, "paper")
    assert paper.nll.tolist() == pytest.approx([own_loss(lm, [0, *ids]) for ids in texts], rel=1e-6)
    assert paper.nll.std() > 1 and paper.counted.tolist() == [4, 8, 1]
    duo = score_tokens(lm, texts, "duo")  # the filling's first end counts, but for the longest
    expected = [own_loss(lm, [*texts[0], 0]), own_loss(lm, texts[1]), own_loss(lm, [*texts[2], 0])]
    assert duo.nll.tolist() == pytest.approx(expected, rel=1e-6) and duo.counted.tolist() == [4, 7, 1]


def test_rows_are_decoded_and_split_anew(gpt2, text):
    lm = HuggingFaceLM(gpt2, device="cpu")
    rows = torch.tensor([[2, 5, 6, 2, 6, 5, 6, 14]])  # [CLS] the a [CLS] a the a.
    assert "".join(lm.tokenizer.convert_ids_to_tokens(lm.encode(text, rows)[0])) == "[CLS]thea[CLS]athea."
    long = score(lm, text, torch.full((2, 8), 2))  # 40 tokens, in three windows
    assert long.counted.tolist() == [40, 40] and long.nll.isfinite().all()
    with torch.no_grad():
        ids = torch.tensor(lm.encode(text, rows))
        hidden = lm.model(ids, output_hidden_states=True).hidden_states[-1]
    assert torch.allclose(lm.features(text, rows), hidden[:, -1], atol=1e-6)


def test_folders_without_a_model(gpt2, tmp_path):
    from safetensors.torch import load_file, save_file

    with pytest.raises(ConfigError, match="holds no config.json; give the folder of a Hugging Face model"):
        HuggingFaceLM(tmp_path)
    (tmp_path / "config.json").write_text((gpt2 / "config.json").read_text())
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(ConfigError, match="holds no .safetensors; convert the weights"):
        HuggingFaceLM(tmp_path)
    for path in gpt2.glob("tokenizer*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = load_file(gpt2 / "model.safetensors")
    del weights["transformer.h.1.mlp.c_fc.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks weights \(transformer.h.1.mlp.c_fc.weight\)"):
        HuggingFaceLM(tmp_path, device="cpu")
    # Code of a folder is never run.
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    config = json.loads((gpt2 / "config.json").read_text()) | {"model_type": "evil"}
    config["auto_map"] = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="cannot be opened as a causal language model"):
        HuggingFaceLM(tmp_path, device="cpu")
    assert not (tmp_path / "ran").exists()


def test_a_missing_package_names_its_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"transformers: the package is missing; pip install emoe\[judge\]"):
        open_eval_lm(tmp_path)


# --- MAUVE


def clouds(shift: float, n: int = 200) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, 6, generator=generator), torch.randn(n, 6, generator=generator) + shift


def test_mauve_of_equal_and_of_distant_sets():
    try:
        library = import_extra("mauve")
    except ConfigError as error:
        pytest.skip(str(error))
    first, second = clouds(0)
    same = mauve(first, second)
    assert len(same) == 3 and min(same) > 0.9 and 0 < np.std(same) < 0.1
    own = library.compute_mauve(p_features=first.double().numpy(), q_features=second.double().numpy(), seed=2)
    assert same[1] == pytest.approx(own.mauve) and mauve(first, first) == pytest.approx([1] * 3, abs=1e-3)
    assert np.mean(mauve(*clouds(10))) < 0.02 and np.mean(mauve(*clouds(1))) < np.mean(same) - 0.1
    with pytest.raises(ValueError, match="at least 4 rows"):
        mauve(first[:3], second)
    with pytest.raises(ValueError, match="not finite"):
        mauve(first * math.inf, second)
