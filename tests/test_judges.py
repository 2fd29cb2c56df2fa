"""Judges of text: perplexities by hand, exact NLL of our own runs, Hugging Face's own loss, MAUVE's extremes."""

from __future__ import annotations

import dataclasses
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
from emoe.domains.text.prepare import PrepareConfig, prepare
from emoe.engine.trainer import TrainConfig
from emoe.evaluation.pools import count_calls
from emoe.experiment import Experiment
from emoe.judges import (
    SETTINGS,
    Comparison,
    HFJudge,
    Judge,
    RunJudge,
    Scores,
    Setting,
    counted_tokens,
    fill,
    mauve,
    score,
    score_tokens,
)
from emoe.methods.ar import ARConfig
from emoe.methods.mdlm import MDLMConfig
from emoe.rng import Rng
from emoe.runs import Run, train
from emoe.types import Convention

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh", "."]
END = "<|endoftext|>"


def make_set(root: Path, words: list[str], seed: int = 0) -> Path:
    """A prepared set of rows of 8 tokens."""
    pytest.importorskip("tokenizers")
    root.mkdir(exist_ok=True)
    (root / "vocab.txt").write_text("\n".join(words) + "\n")
    draw = np.random.default_rng(seed)
    for name, count in (("train", 60), ("test", 40)):
        lines = (" ".join(draw.choice([*"abcdefgh", "."], 9)) for _ in range(count))
        (root / f"{name}.txt").write_text("\n".join(lines) + "\n")
    files = [root / "train.txt", root / "test.txt"]
    return prepare(root / "set", root / "vocab.txt", files, config=PrepareConfig(length=8, jobs=1)).path


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Text:
    return TextConfig(path=str(make_set(tmp_path_factory.mktemp("text") / "a", WORDS))).build(0)


# --- settings


class Table(Judge):
    """Three tokens a, b, c = 0, 1, 2 of which each depends on the one before it alone; c may be the end."""

    name, sha256, dtype, pooling = "table", "0", "float64", "last"
    first = (0.5, 0.3, 0.2)
    after = ((0.1, 0.6, 0.3), (0.8, 0.1, 0.1), (0.25, 0.25, 0.5))

    def __init__(self, end: int | None = None, context: int = 100):
        self.end, self.context = end, context

    def encode(self, text, rows, *, special=True):
        return rows.tolist()

    def nll(self, tokens: Tensor, *, start: bool) -> Tensor:
        assert tokens.shape[1] <= self.context
        found = -torch.tensor(self.after).double().log()[tokens[:, :-1], tokens[:, 1:]]
        first = -torch.tensor(self.first).double().log()[tokens[:, :1]]
        return torch.cat([first if start else torch.full_like(first, math.nan), found], 1)

    def features(self, text, rows):
        return torch.nn.functional.one_hot(rows, 20).double().mean(1)


A, B, C = range(3)


def test_perplexity_of_three_tokens_by_hand():
    texts = [[A, B, C], [B, A]]
    product = 0.5 * 0.6 * 0.1 * 0.3 * 0.8
    found = score_tokens(Table(), texts, "paper")
    assert found.counted.tolist() == [3, 2] and found.dropped == found.cut == 0
    assert found.perplexity().value == pytest.approx(product ** (-1 / 5))
    assert found.perplexity().n == 2
    # Without the first token, and with the first end after the shorter text: 0.3 is p(c | a).
    found = score_tokens(Table(end=C), texts, "duo")
    assert found.counted.tolist() == [2, 2]
    assert found.perplexity().value == pytest.approx((0.6 * 0.1 * 0.8 * 0.3) ** (-1 / 4))


def test_ends_and_filling():
    """The filling counts once, unless the text has an end of its own; ends count up to the second."""
    ids, lengths = fill([[A, B, A, A, A], [A, B], [A, C, B], [A, C, B, C], [C, A], []], C)
    assert ids[2].tolist() == [A, C, B, C, C] and lengths.tolist() == [5, 2, 3, 4, 2, 0]
    duo = counted_tokens(ids, lengths, C, SETTINGS["duo"]).long().tolist()
    assert duo == [
        [0, 1, 1, 1, 1],  # the longest has no filling
        [0, 1, 1, 0, 0],  # the first of the filling
        [0, 1, 1, 0, 0],  # the end inside, and what is behind it
        [0, 1, 1, 0, 0],  # the second end does not count
        [0, 1, 0, 0, 0],  # an end in front is not scored, as no first token is
        [0, 0, 0, 0, 0],
    ]
    paper = counted_tokens(ids, lengths, C, SETTINGS["paper"]).sum(1)
    assert paper.tolist() == lengths.tolist()
    # A judge without an end: all tokens but the first.
    assert counted_tokens(ids, lengths, None, SETTINGS["duo"]).sum(1).tolist() == [4, 1, 2, 3, 1, 0]


def test_what_is_cut_and_dropped():
    texts = [[A] * 200, *([[A, B]] * 18)]
    found = score_tokens(Table(end=C, context=300), texts, "duo")
    assert (found.cut, found.dropped, len(found.nll)) == (1, 3, 16)
    assert found.counted[:2].tolist() == [127, 2]
    assert score_tokens(Table(end=C), texts[:5], "duo").dropped == 0  # all fit in one call
    found = score_tokens(Table(context=300), texts, "paper")
    assert (found.cut, found.dropped, found.counted.sum()) == (0, 0, 236)


def test_texts_longer_than_the_context_are_read_in_windows():
    found = score_tokens(Table(context=4), [[A, B, A, B, A, B], [A, B, A]], "paper")
    again = score_tokens(Table(), [[A, B, A, B], [A, B], [A, B, A]], "paper")
    assert found.windows == 2 and found.counted.tolist() == [6, 3]
    assert found.nll.sum() == pytest.approx(again.nll.sum().item())
    plain = dataclasses.replace(SETTINGS["duo"], max_length=None)
    found = score_tokens(Table(context=4), [[A, B, A, B, A, B], [A, B, A]], plain)
    assert found.counted.tolist() == [4, 2]  # the first of each window is not scored


def test_standard_error_is_that_of_other_draws():
    """The delta method against the spread of perplexities of many pools."""
    generator = torch.Generator().manual_seed(0)
    counted = torch.randint(20, 60, (2000, 100), generator=generator)
    nll = counted * (3 + 0.4 * torch.randn(2000, 100, generator=generator, dtype=torch.float64))
    pools = [Scores(a, m).perplexity() for a, m in zip(nll, counted, strict=True)]
    spread = np.std([pool.value for pool in pools])
    assert np.mean([pool.stderr for pool in pools]) == pytest.approx(spread, rel=0.05)
    assert Scores(nll[0, :1], counted[0, :1]).perplexity().stderr is None


def test_settings_and_samples_that_cannot_be(text):
    with pytest.raises(ConfigError, match="setting: 'mine' is not known; allowed: paper, duo"):
        score_tokens(Table(), [[A]], "mine")
    with pytest.raises(ValueError, match="at least 1"):
        Setting(name="x", start=True, group=0)
    with pytest.raises(ValueError, match="some samples still hold masks"):
        score(Table(), text, torch.full((2, 8), 4))
    with pytest.raises(ValueError, match="no samples"):
        score(Table(), text, torch.zeros(0, 8, dtype=torch.long))
    with pytest.raises(ValueError, match="no token of the samples counts"):
        score_tokens(Table(end=C), [[A], [B]], "duo").perplexity()
    with pytest.raises(ValueError, match="impossible"):
        Scores(torch.tensor([math.inf]).double(), torch.tensor([3])).perplexity()


# --- our own runs


def experiment(text: Text, method=None, **sizes) -> Experiment:
    folder = str(text._folder)
    small = {"width": 8, "depth": 2, "heads": 2, "hidden": 16, "cond_size": 4, "time_size": 4, "dropout": 0.1}
    method = method or ARConfig()
    return Experiment(
        name="judge",
        domain=TextConfig(path=folder),
        backbone=DiTConfig(causal=method.wants().causal, **(small | sizes)),
        method=method,
        train=TrainConfig(steps=2, batch=4),
    )


def opened(text: Text, scramble, **sizes) -> Run:
    told = experiment(text, **sizes)
    method = told.build_method(text.space).double().eval()
    return Run(Path("somewhere/judge"), told, text, scramble(method, 3), 0)


def test_a_run_scores_rows_as_the_sum_of_its_log_probabilities(text, scramble):
    run = opened(text, scramble)
    judge, rows = RunJudge(run), text.fresh(9, 0)
    expected = torch.zeros(9, 8, dtype=torch.float64)
    with torch.no_grad():
        for place in range(8):  # each token from a row that holds nothing of what follows
            given = torch.cat([torch.full((9, 1), 4), rows[:, :place]], 1)
            logits = run.method.backbone(given, torch.zeros(9)).logits[:, -1]
            expected[:, place] = -logits.log_softmax(-1)[torch.arange(9), rows[:, place]]
    assert expected.std() > 0.3  # a model that has opinions
    assert torch.allclose(judge.nll(rows), expected, atol=1e-12)
    found = score(judge, text, rows)
    assert torch.allclose(found.nll, expected.sum(1)) and found.counted.tolist() == [8] * 9
    assert torch.allclose(found.nll, run.method.nll_bound(rows, Convention("exact"), Rng(0)).double())
    assert found.perplexity().value == pytest.approx(expected.mean().exp().item())
    later = score(judge, text, rows, "duo")  # a call of 8; the first token is read but not scored
    assert later.dropped == 1 and torch.allclose(later.nll, expected[:8, 1:].sum(1))


def test_scores_do_not_depend_on_the_batch(text, scramble, monkeypatch):
    run, rows = opened(text, scramble), text.fresh(9, 0)
    whole, features = RunJudge(run).nll(rows), RunJudge(run).features(text, rows)
    monkeypatch.setattr("emoe.judges.LOGITS", 1)
    judge = RunJudge(run)  # a new one: nothing is read twice
    assert torch.allclose(judge.nll(rows), whole) and torch.allclose(judge.features(text, rows), features)


def test_rows_are_read_once_for_all_settings(text, scramble):
    run, rows = opened(text, scramble), text.fresh(16, 0)
    judge = RunJudge(run)
    with count_calls(run.method.backbone) as count:
        first, second = score(judge, text, rows, "paper"), score(judge, text, rows, "duo")
        assert count.calls == 1
        changed = score(judge, text, rows.flip(0), "paper")
        assert count.calls == 2
    assert torch.allclose(changed.nll, first.nll.flip(0))
    assert torch.equal(second.nll, score(RunJudge(run), text, rows, "duo").nll) and (second.nll < first.nll).all()


def test_features_of_a_run(text, scramble):
    run, rows = opened(text, scramble), text.fresh(3, 0)
    shifted = torch.cat([torch.full((3, 1), 4), rows[:, :-1]], 1)
    with torch.no_grad():
        hidden = run.method.backbone.features(shifted, torch.zeros(3))[0].float()
    assert torch.allclose(RunJudge(run).features(text, rows), hidden.mean(1))
    assert torch.allclose(RunJudge(run, pooling="last").features(text, rows), hidden[:, -1])


def test_a_run_folder_as_a_judge(text, tmp_path):
    train(experiment(text), tmp_path / "ar", device="cpu", quiet=True)
    judge, again = (RunJudge(tmp_path / "ar", device="cpu") for _ in range(2))
    assert judge.sha256 == again.sha256 and judge.dtype == "float32" and judge.context == 8
    told = judge.describe()
    assert (told["kind"], told["name"], told["step"], told["trained_on"]) == ("run", "ar", 2, "set")
    # Hardly trained: about the uniform distribution over all words but the mask.
    assert score(judge, text, text.fresh(20, 0)).perplexity().value == pytest.approx(len(WORDS) - 1, rel=0.1)
    with torch.no_grad():
        again.backbone.head.bias += 1e-3
    assert RunJudge(again.run).sha256 != judge.sha256


def test_runs_that_cannot_judge(text, scramble, tmp_path):
    mdlm = experiment(text, MDLMConfig())
    run = Run(Path("somewhere"), mdlm, text, mdlm.build_method(text.space), 0)
    with pytest.raises(ConfigError, match="judge: somewhere holds 'mdlm', which has no exact NLL; give a run of 'ar'"):
        RunJudge(run)
    other = TextConfig(path=str(make_set(tmp_path / "b", [*WORDS[:-2], ".", "h"]))).build(0)  # as many words
    judge = RunJudge(opened(text, scramble))
    with pytest.raises(ConfigError, match="judge: judge was trained with another tokenizer than that of set"):
        score(judge, other, other.fresh(2, 0))
    with pytest.raises(ConfigError, match="cannot leave out special ones"):
        score(judge, text, text.fresh(2, 0), Setting(name="x", start=True, special=False))


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
    config = transformers.GPT2Config(
        vocab_size=len(words), n_positions=16, n_embd=8, n_layer=2, n_head=2, initializer_range=0.7,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("judge") / "tiny"
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def own_loss(judge: HFJudge, ids: Sequence[int]) -> float:
    """The sum over all tokens but the first, from transformers' own loss: a mean, in single precision."""
    row = torch.tensor([ids])
    return judge.model(row, labels=row).loss.item() * (len(ids) - 1)


def test_nll_is_the_loss_of_transformers(gpt2):
    judge = HFJudge(gpt2, device="cpu", dtype="float64")
    texts = judge.encode_texts(["the cat", "a b c d e f g h", "b"])
    assert [len(ids) for ids in texts] == [4, 8, 1] and judge.context == 16 and judge.start == judge.end == 0
    found = score_tokens(judge, texts, "paper")
    assert found.nll.tolist() == pytest.approx([own_loss(judge, [0, *ids]) for ids in texts], rel=1e-6)
    assert found.nll.std() > 1 and found.counted.tolist() == [4, 8, 1]
    found = score_tokens(judge, texts, "duo")  # the filling's first end counts, but for the longest
    expected = [own_loss(judge, [*texts[0], 0]), own_loss(judge, texts[1]), own_loss(judge, [*texts[2], 0])]
    assert found.nll.tolist() == pytest.approx(expected, rel=1e-6) and found.counted.tolist() == [4, 7, 1]


def test_rows_are_decoded_and_split_anew(gpt2, text):
    judge = HFJudge(gpt2, device="cpu")
    rows = torch.tensor([[2, 5, 6, 2, 7, 8, 9, 13]])  # [CLS] a b [CLS] c d e.
    words = judge.tokenizer.convert_ids_to_tokens(judge.encode(text, rows)[0])
    assert "".join(words) == "[CLS]ab[CLS]cde."
    assert judge.tokenizer.convert_ids_to_tokens(judge.encode(text, rows, special=False)[0]) == list("abcde.")
    dropped = score(judge, text, rows, Setting(name="plain", start=True, special=False))
    assert dropped.counted.tolist() == [6] and score(judge, text, rows).windows == 1
    long = score(judge, text, torch.full((2, 8), 2))  # 40 tokens
    assert long.windows == 3 and long.counted.tolist() == [40, 40] and long.nll.isfinite().all()


def test_features_are_last_hidden_states_of_whole_texts(gpt2, text):
    judge = HFJudge(gpt2, device="cpu")
    rows = torch.tensor([[2, 5, 6, 5, 7, 8, 9, 13], [5, 6, 7, 8, 9, 10, 11, 12]])
    found = judge.features(text, rows)
    for row, feature in zip(judge.encode(text, rows), found, strict=True):
        hidden = judge.model.transformer(torch.tensor([row])).last_hidden_state[0]
        assert torch.allclose(feature, hidden[-1], atol=1e-5)
    mean = HFJudge(gpt2, device="cpu", pooling="mean").features(text, rows)
    hidden = judge.model.transformer(torch.tensor([judge.encode(text, rows[1:])[0]])).last_hidden_state[0]
    assert torch.allclose(mean[1], hidden.mean(0), atol=1e-5)


def test_folders_that_hold_no_judge(gpt2, tmp_path):
    from safetensors.torch import load_file, save_file

    with pytest.raises(ConfigError, match="holds no config.json; give the folder of a Hugging Face model"):
        HFJudge(tmp_path)
    (tmp_path / "config.json").write_text((gpt2 / "config.json").read_text())
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(ConfigError, match="holds no .safetensors, and nothing else is loaded"):
        HFJudge(tmp_path)
    for path in gpt2.glob("tokenizer*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = load_file(gpt2 / "model.safetensors")
    del weights["transformer.h.1.mlp.c_fc.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks weights \(transformer.h.1.mlp.c_fc.weight\)"):
        HFJudge(tmp_path, device="cpu")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nothing of the kind"}))
    with pytest.raises(ConfigError, match="cannot be opened as a causal language model"):
        HFJudge(tmp_path, device="cpu")


def test_code_of_a_folder_is_never_run(gpt2, tmp_path):
    for path in gpt2.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    config = json.loads((gpt2 / "config.json").read_text()) | {"model_type": "evil"}
    config["auto_map"] = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="cannot be opened as a causal language model"):
        HFJudge(tmp_path, device="cpu")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("missing, package", [("transformers", "transformers"), ("mauve", "mauve-text")])
def test_what_to_install(missing, package, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ConfigError, match=rf"{package}: the package is missing; pip install emoe\[judge\]"):
        if missing == "mauve":
            mauve(torch.zeros(20, 2), torch.zeros(20, 2))
        else:
            HFJudge(tmp_path)


# --- MAUVE


def clouds(shift: float, n: int = 200) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, 6, generator=generator), torch.randn(n, 6, generator=generator) + shift


@pytest.fixture(scope="module")
def mauve_text() -> None:
    from emoe.judges import _load

    try:
        _load("mauve")
    except ConfigError as error:
        pytest.skip(str(error))


def test_mauve_of_equal_and_of_distant_sets(mauve_text):
    first, second = clouds(0)
    same = mauve(first, second)
    assert len(same.values) == 3 and same.clusters == 20
    assert same.mean > 0.9 and 0 < same.spread < 0.1
    assert mauve(first, first, seeds=(1,)).mean == pytest.approx(1, abs=1e-3)
    assert mauve(*clouds(10)).mean < 0.02
    assert mauve(*clouds(1)).mean < same.mean - 0.1
    assert mauve(first, second) == same  # nothing but the seeds decides
    with pytest.raises(ValueError, match="at least 4 rows"):
        mauve(first[:3], second)
    with pytest.raises(ValueError, match="not finite"):
        mauve(first * math.inf, second)


# --- pools


def test_a_pool_with_its_manifest(text, mauve_text, scramble):
    judge = RunJudge(opened(text, scramble))
    comparison = Comparison(judge, text, "duo", rows=24, seed=1)
    samples = torch.randint(5, 13, (30, 8), generator=torch.Generator().manual_seed(0))
    judged = comparison.measure(samples, nfe=4)
    found = {item.metric: item for item in judged.measurements}
    assert tuple(found) == Comparison.names
    assert found["gen_ppl"] == score(judge, text, samples, "duo").perplexity() and found["gen_ppl"].n == 24
    assert found["judge_ppl"].value == score(judge, text, comparison.held_out, "duo").perplexity().value
    assert found["mauve"].n == 24 and 0 < found["mauve"].value <= 100
    told = judged.manifest
    assert json.loads(json.dumps(told)) == told
    assert (told["nfe"], told["split"], told["packing"], told["data"]) == (4, "test", "chunks", "set")
    assert told["judge"]["sha256"] == judge.sha256 and told["judge"]["dtype"] == "float64"
    assert told["setting"]["name"] == "duo" and told["setting"]["special"] is True
    assert told["samples"] == {"rows": 30, "tokens": 24 * 7, "dropped": 6, "cut": 0, "windows": 1}
    assert told["mauve"]["seeds"] == [1, 2, 3] and len(told["mauve"]["values"]) == 3


def test_a_pool_without_mauve_and_a_small_set(text, scramble):
    comparison = Comparison(RunJudge(opened(text, scramble)), text)  # 2,000 rows are asked for, but there are fewer
    judged = comparison.measure(text.fresh(10, 3), seeds=())
    assert [item.metric for item in judged.measurements] == ["gen_ppl", "judge_ppl"]
    assert len(comparison.held_out) == text.fresh_rows and judged.manifest["mauve"] is None
