"""Judges of text: a language model that did not make the samples says how likely they are, and gives their features.

- `HFJudge` is any causal language model in a local Hugging Face folder, such as GPT-2 large. Samples are decoded to
  text and split into the judge's own tokens. It needs the extra `judge`.
- `RunJudge` is one of our own autoregressive runs, on the tokens of the samples themselves: its NLL is exact.

Generative perplexity is exp(NLL / tokens) over all samples together (Eq. 41). What counts as a token differs between
codes, by a good deal for short texts, so there are settings with names, see `Setting`. A judge's perplexity of held-out
text says how far to trust it, and is given beside every value. MAUVE compares the features of samples with those of
held-out rows.

What can be gamed: perplexity by repetition and by short, common phrases (compare at equal entropy, see
`emoe.domains.text.metrics`); both by text made to please this judge (never train on, or select by, its output).
Compare only what one judge has said under one setting: the manifest of each result tells.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import math
import statistics
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as nnf

from emoe.backbones.dit import DiT
from emoe.config import ConfigError
from emoe.domains.base import DataError
from emoe.domains.text.data import Text
from emoe.evaluation.evaluate import fresh_count
from emoe.rng import derive_seed
from emoe.runs import Run, Weights, load_run, pick_device
from emoe.types import Measurement

Pooling = Literal["last", "mean"]
ROWS = 2_000  # held-out rows, and rows of MAUVE on each side
LOGITS = 2**28  # numbers in the logits of one call, at most
MAUVE_SEEDS = (1, 2, 3)
SCALING = 5.0  # of divergences in MAUVE
SUFFIXES = (".safetensors", ".json", ".txt", ".bpe", ".model")  # files that decide what a Hugging Face model says


# --- Settings ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a generative perplexity counts.

    Attributes:
        name: What results are called by.
        start: The first token of a sample is scored too, given the judge's start token.
        max_length: Tokens of the judge that are kept of a sample; None: all.
        group: Samples of a call of the judge; what does not fill a last call is dropped, unless all fit in one.
        ends: All samples are filled up with the judge's end token to the length of the longest, and end tokens count
            where they are the first of their sample.
        special: Special tokens such as [CLS] stay in the text, by their names.
    """

    name: str
    start: bool
    max_length: int | None = None
    group: int = 1
    ends: bool = False
    special: bool = True

    def __post_init__(self) -> None:
        if self.group < 1 or (self.max_length is not None and self.max_length < 1):
            raise ValueError(f"a length and a group are at least 1, got {self.max_length} and {self.group}")


SETTINGS: dict[str, Setting] = {
    one.name: one
    for one in (
        # The formula of the paper: all M tokens are scored and counted, and nothing is cut.
        Setting(name="paper", start=True),
        # The code of DUO, on which the paper builds: at most 128 tokens, the first not scored, but the first end.
        Setting(name="duo", start=False, max_length=128, group=8, ends=True),
    )
}


def get_setting(setting: str | Setting) -> Setting:
    """A setting by its name.

    Raises:
        ConfigError: There is none of that name.
    """
    if isinstance(setting, Setting):
        return setting
    if setting not in SETTINGS:
        raise ConfigError([f"setting: {setting!r} is not known; allowed: {', '.join(SETTINGS)}"])
    return SETTINGS[setting]


# --- Judges ------------------------------------------------------------------------------------------------------


class Judge(ABC):
    """A language model that scores tokens from left to right. Nothing it gives has a gradient."""

    name: str
    sha256: str  # of all that decides what it says
    dtype: str
    context: int  # tokens it scores at a time
    end: int | None = None  # the token that ends texts, if it has one
    pooling: Pooling

    @abstractmethod
    def encode(self, text: Text, rows: Int[Tensor, "n L"], *, special: bool = True) -> list[list[int]]:
        """The judge's tokens of each row, with special tokens of the row or without."""

    @abstractmethod
    def nll(self, tokens: Int[Tensor, "B W"], *, start: bool) -> Float[Tensor, "B W"]:
        """-log p(token | those before it in the row) in nats, on the CPU, for W up to `context`.

        With `start` the first token has the judge's start token before it. Without, its value means nothing.
        """

    @abstractmethod
    def features(self, text: Text, rows: Int[Tensor, "n L"]) -> Float[Tensor, "n F"]:
        """What MAUVE compares, on the CPU: last hidden states, at the last token or as a mean, see `pooling`."""

    def describe(self) -> dict[str, Any]:
        """The judge's part of a manifest."""
        kind = {"HFJudge": "hugging-face", "RunJudge": "run"}.get(type(self).__name__, type(self).__name__)
        return {
            "kind": kind, "name": self.name, "sha256": self.sha256, "dtype": self.dtype, "context": self.context,
            "pooling": self.pooling,
        }  # fmt: skip


def _batch(length: int, symbols: int) -> int:
    return max(1, LOGITS // max(1, length * symbols))


class RunJudge(Judge):
    """One of our own runs of a causal network, such as method `ar`: NLL of the very tokens of the samples.

    The network reads the row shifted right by one behind the mask symbol, so that its output at l is p(x^l | x^<l),
    also for l = 0. Special tokens are tokens like any other, and no token ends a text.

    Features are the last hidden states. `mean` over the positions is the default: the last position of a network of
    this size mostly tells the next token, and it has not read the last one. `last` takes it anyway.

    Args:
        run: The run folder, the name of a released model, or an opened run.
        device: Where the run is opened: auto, cpu, cuda or cuda:N.
        weights: As in `load_run`.
        pooling: See above.
    """

    def __init__(
        self, run: str | Path | Run, *, device: str = "auto", weights: Weights = "auto", pooling: Pooling = "mean"
    ):
        opened = run if isinstance(run, Run) else load_run(run, device=device, weights=weights)
        backbone = opened.method.backbone
        if not opened.experiment.method.wants().causal or not isinstance(backbone, DiT):
            kind = opened.experiment.method.kind
            raise ConfigError([f"judge: {opened.path} holds {kind!r}, which has no exact NLL; give a run of 'ar'"])
        self.run, self.backbone, self.pooling = opened, backbone, pooling
        self.name, self.context = opened.path.name, opened.method.space.length
        self.dtype = str(next(backbone.parameters()).dtype).removeprefix("torch.")
        self.sha256 = _hash_state(backbone)
        self._read: tuple[Tensor, Tensor] | None = None  # tokens that were scored last, and their NLL

    def encode(self, text: Text, rows: Int[Tensor, "n L"], *, special: bool = True) -> list[list[int]]:
        """The rows as they are.

        Raises:
            ConfigError: The judge was trained on other tokens, or special tokens are to be left out.
        """
        self._check(text)
        if not special:
            raise ConfigError(["special: a judge of tokens cannot leave out special ones; keep them"])
        return [list(map(int, row)) for row in rows.tolist()]

    @torch.no_grad()
    def nll(self, tokens: Int[Tensor, "B W"], *, start: bool = True) -> Float[Tensor, "B W"]:
        """See `Judge.nll`; the mask symbol is before the first token in any case, as in training.

        Settings differ in what they count, so the same tokens come again: what was read last is not read twice.
        """
        if self._read is None or not torch.equal(self._read[0], tokens):
            found = []
            for part in tokens.split(_batch(tokens.shape[1], self.run.method.space.size)):
                part = part.to(next(self.backbone.parameters()).device)
                logits = self.backbone.read(self._hidden(part)).flatten(0, 1)
                nll = nnf.cross_entropy(logits, part.flatten(), reduction="none").view(part.shape)
                found.append(nll.double().cpu())
            self._read = tokens.clone(), torch.cat(found)
        return self._read[1].clone()

    @torch.no_grad()
    def features(self, text: Text, rows: Int[Tensor, "n L"]) -> Float[Tensor, "n F"]:
        """See `Judge.features`."""
        self._check(text)
        found = []
        for part in rows.split(_batch(rows.shape[1], self.backbone.trunk.config.width)):
            hidden = self._hidden(part.to(next(self.backbone.parameters()).device)).float()
            found.append((hidden.mean(1) if self.pooling == "mean" else hidden[:, -1]).cpu())
        return torch.cat(found)

    def describe(self) -> dict[str, Any]:
        """See `Judge.describe`; with the text it was trained on."""
        experiment = self.run.experiment
        trained = Path(getattr(experiment.domain, "path", experiment.domain.kind or "")).name
        return super().describe() | {"recipe": experiment.name, "step": self.run.step, "trained_on": trained}

    def _hidden(self, tokens: Int[Tensor, "B W"]) -> Float[Tensor, "B W K"]:
        shifted = nnf.pad(tokens[:, :-1], (1, 0), value=self.run.method.space.mask_id)
        return self.backbone.features(shifted, torch.zeros(len(tokens), device=tokens.device))[0]

    @functools.cached_property
    def _tokenizer(self) -> str | None:
        """The checksum of its tokenizer; None where its text is not here."""
        try:
            domain = self.run.domain
        except DataError:  # a released model without its data
            return None
        return domain.manifest.get("tokenizer", {}).get("sha256") if isinstance(domain, Text) else None

    def _check(self, text: Text) -> None:
        mine, other = self.run.method.space, text.space
        same = (mine.size, mine.mask_id) == (other.size, other.mask_id)
        told = text.manifest.get("tokenizer", {}).get("sha256")
        if not same or (self._tokenizer and told and self._tokenizer != told):
            raise ConfigError(
                [f"judge: {self.name} was trained with another tokenizer than that of {text.name}; train one on it"]
            )


class HFJudge(Judge):
    """A causal language model in a folder, as Hugging Face writes them: `config.json`, safetensors and a tokenizer.

    Nothing is fetched, no code of the folder is run, and no pickle is loaded. The start token is the model's `bos`, or
    where it has none its `eos`; for GPT-2 both are <|endoftext|>.

    Features are those of the `mauve-text` package by default: the last hidden state at the last token of the text.

    Args:
        folder: The model.
        device: auto, cpu, cuda or cuda:N.
        dtype: Precision of the weights.
        pooling: See above; `mean` is over the tokens of the text.

    Raises:
        ConfigError: `transformers` is missing, or the folder holds no such model.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        device: str = "auto",
        dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32",
        pooling: Pooling = "last",
    ):
        library, path = _load("transformers"), Path(folder)
        if not (path / "config.json").is_file():
            raise ConfigError([f"judge: {path} holds no config.json; give the folder of a Hugging Face model"])
        if not any(path.glob("*.safetensors")):
            raise ConfigError([f"judge: {path} holds no .safetensors, and nothing else is loaded; convert the weights"])
        options = {"local_files_only": True, "trust_remote_code": False}
        library.utils.logging.disable_progress_bar()
        try:
            self.tokenizer = library.AutoTokenizer.from_pretrained(str(path), **options)
            self.model, loaded = library.AutoModelForCausalLM.from_pretrained(
                str(path), use_safetensors=True, dtype=getattr(torch, dtype), output_loading_info=True, **options
            )
        except (OSError, ValueError, KeyError, TypeError, RuntimeError, ImportError) as error:
            told = str(error).strip().splitlines() or [type(error).__name__]
            raise ConfigError([f"judge: {path} cannot be opened as a causal language model ({told[0]})"]) from None
        # Weights that are missing would be drawn at random, with no more than a warning.
        if faults := sorted(map(str, [*loaded["missing_keys"], *loaded["mismatched_keys"]])):
            raise ConfigError([f"judge: {path} lacks weights ({', '.join(faults[:3])}); give a whole copy"])
        self.model.to(pick_device(device)).eval().requires_grad_(False)
        self.name, self.dtype, self.pooling = path.resolve().name, dtype, pooling
        self.sha256 = _hash_folder(path)
        self.context = int(getattr(self.model.config, "max_position_embeddings", None) or 1024)
        self.end = self.tokenizer.eos_token_id
        self.start = self.end if self.tokenizer.bos_token_id is None else self.tokenizer.bos_token_id

    def encode(self, text: Text, rows: Int[Tensor, "n L"], *, special: bool = True) -> list[list[int]]:
        """Tokens of the decoded rows, none of them added by the judge's tokenizer."""
        named = set(text.vocabulary.special.values())
        kept = [row if special else [token for token in row if token not in named] for row in rows.tolist()]
        return self.encode_texts([text.vocabulary.decode(row) for row in kept])

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokens of texts."""
        if not texts:
            return []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of texts that are longer than the context: those are cut here
            found = self.tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
        return [list(map(int, ids)) for ids in found]

    @torch.no_grad()
    def nll(self, tokens: Int[Tensor, "B W"], *, start: bool) -> Float[Tensor, "B W"]:
        """See `Judge.nll`. Tokens to the right change nothing, so that rows may be filled up at will."""
        if start and self.start is None:
            raise ConfigError([f"setting: {self.name} has no start token; use a setting that does not score the first"])
        found = []
        for part in tokens.split(_batch(tokens.shape[1], self.model.config.vocab_size)):
            part = part.to(self.model.device)
            first = part[:, :1].new_full((len(part), 1), self.start if start else 0)
            given = torch.cat([first, part[:, :-1]], 1) if start else part[:, :-1]
            scored = part.new_zeros(len(part), 0).double()
            if given.shape[1]:
                logits = self.model(given, use_cache=False).logits
                logits = logits if logits.dtype == torch.float64 else logits.float()
                wanted = part if start else part[:, 1:]
                scored = nnf.cross_entropy(logits.transpose(1, 2), wanted, reduction="none").double()
            found.append((scored if start else nnf.pad(scored, (1, 0), value=math.nan)).cpu())
        return torch.cat(found)

    @torch.no_grad()
    def features(self, text: Text, rows: Int[Tensor, "n L"]) -> Float[Tensor, "n F"]:
        """See `Judge.features`; an empty text is the start token alone, or token 0."""
        found = []
        tokens = [ids[: self.context] or [self.start or 0] for ids in self.encode(text, rows)]
        size = _batch(max(map(len, tokens), default=1), self.model.config.vocab_size)
        for first in range(0, len(tokens), size):
            part = tokens[first : first + size]
            ids, lengths = fill(part, self.end or 0)
            out = self.model(ids.to(self.model.device), use_cache=False, output_hidden_states=True)
            hidden = out.hidden_states[-1].float().cpu()
            if self.pooling == "last":
                found.append(hidden[torch.arange(len(part)), lengths - 1])
            else:
                inside = (torch.arange(ids.shape[1]) < lengths[:, None])[..., None]
                found.append((hidden * inside).sum(1) / lengths[:, None])
        return torch.cat(found)


def open_judge(folder: str | Path, *, device: str = "auto", text: Text | None = None) -> Judge:
    """A judge by its folder: one of our own runs, which has an `experiment.json`, or a Hugging Face model.

    Args:
        folder: The run or the model.
        device: auto, cpu, cuda or cuda:N.
        text: What a run is opened with where its own text is not here; the tokenizers are then not compared.

    Raises:
        ConfigError: The folder holds neither.
    """
    path = Path(folder)
    if not path.is_dir():
        raise ConfigError(
            [f"judge: {path} does not exist; give the folder of a run of 'ar' or of a Hugging Face model"]
        )
    if not (path / "experiment.json").is_file():
        return HFJudge(path, device=device)
    try:
        return RunJudge(path, device=device)
    except DataError:
        if text is None:
            raise
        return RunJudge(load_run(path, device=device, domain=text))


def _load(module: str) -> Any:
    """A package of the extra `judge`.

    Raises:
        ConfigError: It is not installed.
    """
    package = {"mauve": "mauve-text"}.get(module, module)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what these packages deprecate in each other is not ours to mend
            return importlib.import_module(module)
    except ImportError as error:
        missing = {"faiss": "faiss-cpu", "mauve": "mauve-text"}.get(error.name or "", error.name or package)
        raise ConfigError([f"{missing}: the package is missing; pip install emoe[judge]"]) from None


def _hash_state(module: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        flat = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {flat.dtype} {tuple(flat.shape)}\n".encode())
        digest.update(flat.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _hash_folder(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.iterdir() if path.is_file() and path.suffix in SUFFIXES):
        with path.open("rb") as file:
            digest.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()


# --- Generative perplexity ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scores:
    """NLL and number of counted tokens of each sample, in nats, and what was left out."""

    nll: Float[Tensor, " n"]
    counted: Int[Tensor, " n"]
    dropped: int = 0  # samples that did not fill a last call
    cut: int = 0  # samples that were longer than the setting allows
    windows: int = 1  # pieces that a sample was read in, since the judge's context is shorter

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
            raise ValueError("the judge holds some tokens for impossible, so the samples have no perplexity")
        value = math.exp(ratio)
        error = None
        if n > 1:
            rest = (self.nll - ratio * self.counted).square().sum().item()
            error = value * math.sqrt(n / (n - 1) * rest) / total
        return Measurement(metric, value, error, n)


def fill(tokens: Sequence[Sequence[int]], end: int) -> tuple[Int[Tensor, "n W"], Int[Tensor, " n"]]:
    """Lists of tokens as rows, filled up with `end` on the right to the longest; and their lengths."""
    lengths = torch.tensor([len(row) for row in tokens], dtype=torch.long)
    width = int(lengths.max()) if len(tokens) else 0
    rows = torch.full((len(tokens), width), end, dtype=torch.long)
    for row, ids in zip(rows, tokens, strict=True):
        row[: len(ids)] = torch.tensor(ids, dtype=torch.long)
    return rows, lengths


def counted_tokens(
    tokens: Int[Tensor, "n W"], lengths: Int[Tensor, " n"], end: int | None, setting: Setting
) -> Bool[Tensor, "n W"]:
    """Which tokens a setting counts, of rows that are filled up with `end`.

    Those of the text, or with `setting.ends` all that are not `end` and those from the first `end` on up to the next:
    of the filling thus its first token, unless the text had an end of its own. The first of a row only with a start.
    """
    if setting.ends and end is not None:
        is_end = tokens == end
        counted = ~is_end | (is_end.cumsum(1) == 1)
    else:
        counted = torch.arange(tokens.shape[1]) < lengths[:, None]
    if not setting.start:
        counted[:, :1] = False
    return counted


def score(judge: Judge, text: Text, rows: Int[Tensor, "n L"], setting: str | Setting = "paper") -> Scores:
    """NLL of samples under a judge, as a setting counts it.

    Texts longer than the judge's context are read in windows of that length, each as if it were a text of its own.

    Raises:
        ValueError: There are no samples, or some of them still hold masks.
    """
    setting, rows = get_setting(setting), rows.cpu()
    if not len(rows):
        raise ValueError("there are no samples to score")
    if (rows == text.space.mask_id).any():
        raise ValueError("some samples still hold masks; finish sampling before they are judged")
    return score_tokens(judge, judge.encode(text, rows, special=setting.special), setting)


def score_tokens(judge: Judge, tokens: Sequence[Sequence[int]], setting: str | Setting = "paper") -> Scores:
    """The same for samples that are the judge's tokens already."""
    setting = get_setting(setting)
    cut = 0 if setting.max_length is None else sum(len(row) > setting.max_length for row in tokens)
    ids, lengths = fill([row[: setting.max_length] for row in tokens], 0 if judge.end is None else judge.end)
    group = min(setting.group, len(tokens))
    kept = len(tokens) // group * group
    nll, counts = torch.zeros(kept, dtype=torch.float64), torch.zeros(kept, dtype=torch.long)
    windows = range(0, ids.shape[1], judge.context)
    for first in windows:
        part = ids[:kept, first : first + judge.context]
        counted = counted_tokens(part, lengths[:kept] - first, judge.end, setting)
        some = counted.any(1)
        if some.any():
            found = judge.nll(part[some], start=setting.start)
            nll[some] += torch.where(counted[some], found, 0.0).sum(1)
        counts += counted.sum(1)
    return Scores(nll, counts, len(tokens) - kept, cut, len(windows))


# --- MAUVE -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mauve:
    """MAUVE of each k-means seed, from 0 to 1, and the number of clusters."""

    values: tuple[float, ...]
    clusters: int

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return statistics.fmean(self.values)

    @property
    def spread(self) -> float | None:
        """Standard deviation over the seeds; None for a single one. It is no error of having drawn these samples."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None


def mauve(
    features_p: Float[Tensor, "n F"],
    features_q: Float[Tensor, "m F"],
    seeds: Sequence[int] = MAUVE_SEEDS,
    *,
    clusters: int | None = None,
    scaling: float = SCALING,
) -> Mauve:
    """MAUVE (Pillutla et al., 2021) of two sets of features, by the `mauve-text` package.

    Both sets are put into k-means clusters together, p and q are their shares, and the value is the area under
    (exp(-c KL(q | r)), exp(-c KL(p | r))) for the mixtures r of p and q, with c = `scaling`.

    Args:
        features_p: Of the samples.
        features_q: Of real rows, as many: the value depends on the sizes.
        seeds: Of k-means, which the value depends on more than one would like.
        clusters: Their number; default: a tenth of the smaller set.
        scaling: See above.

    Raises:
        ConfigError: The package is missing.
        ValueError: Too few rows, or features that are not finite.
    """
    if min(len(features_p), len(features_q)) < 4 or not seeds:
        raise ValueError("MAUVE needs at least 4 rows on each side, and a seed")
    points = [features.double().cpu().numpy() for features in (features_p, features_q)]
    if not all(np.isfinite(part).all() for part in points):
        raise ValueError("some features are not finite")
    library = _load("mauve")
    values, used = [], 0
    for seed in seeds:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = library.compute_mauve(
                p_features=points[0],
                q_features=points[1],
                num_buckets="auto" if clusters is None else clusters,
                mauve_scaling_factor=scaling,
                seed=seed,
                verbose=False,
            )
        values.append(float(found.mauve))
        used = int(found.num_buckets)
    return Mauve(tuple(values), used)


# --- Pools of samples --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Judged:
    """What a judge says of a pool of samples, and the manifest that makes it comparable."""

    measurements: list[Measurement]
    manifest: Mapping[str, Any]


class Comparison:
    """A judge, a setting and held-out rows: what pools of samples are compared with, read once for all of them.

    Args:
        judge: Who judges.
        text: Where the samples' tokens and the held-out rows come from.
        setting: Of the generative perplexity.
        rows: Held-out rows, or all where there are fewer.
        seed: Picks them.
    """

    names: ClassVar[tuple[str, ...]] = ("gen_ppl", "judge_ppl", "mauve", "mauve_spread")

    def __init__(self, judge: Judge, text: Text, setting: str | Setting = "paper", *, rows: int = ROWS, seed: int = 0):
        self.judge, self.text, self.setting, self.seed = judge, text, get_setting(setting), seed
        self.held_out = text.fresh(fresh_count(text, rows), derive_seed(seed, "held out"))

    @functools.cached_property
    def real(self) -> Scores:
        """What the judge says of the held-out rows."""
        return score(self.judge, self.text, self.held_out, self.setting)

    @functools.cached_property
    def real_features(self) -> Float[Tensor, "m F"]:
        """Their features."""
        return self.judge.features(self.text, self.held_out)

    def measure(
        self,
        samples: Int[Tensor, "n L"],
        *,
        nfe: int | None = None,
        seeds: Sequence[int] = MAUVE_SEEDS,
        features: Float[Tensor, "n F"] | None = None,
    ) -> Judged:
        """Judge a pool of samples.

        Args:
            samples: Rows without masks.
            nfe: Network calls that each took; for the manifest.
            seeds: Of MAUVE's k-means; none: no MAUVE. It takes as many samples as there are held-out rows, or of
                these as many as there are samples; the first ones.
            features: Of the samples, where they have been computed before.

        Returns:
            `gen_ppl` and `judge_ppl`, the same of the held-out rows; `mauve` and `mauve_spread`, mean and
            standard deviation over the seeds in percent.
        """
        found = score(self.judge, self.text, samples, self.setting)
        measured = [found.perplexity(), self.real.perplexity("judge_ppl")]
        manifest: dict[str, Any] = {
            "setting": dataclasses.asdict(self.setting),
            "judge": self.judge.describe(),
            "data": self.text.name,
            "split": self.text.held_out,
            "packing": self.text.manifest.get("packing"),
            "length": self.text.space.length,
            "tokenizer": self.text.manifest.get("tokenizer", {}).get("sha256"),
            "nfe": nfe,
            "seed": self.seed,
            "samples": {"rows": len(samples), "tokens": int(found.counted.sum())} | _left_out(found),
            "held_out": {"rows": len(self.held_out), "tokens": int(self.real.counted.sum())} | _left_out(self.real),
            "mauve": None,
        }
        if seeds:
            n = min(len(samples), len(self.held_out))
            part = self.judge.features(self.text, samples[:n].cpu()) if features is None else features[:n]
            result = mauve(part, self.real_features[:n], seeds)
            measured.append(Measurement("mauve", 100 * result.mean, None, n))
            if result.spread is not None:
                measured.append(Measurement("mauve_spread", 100 * result.spread, None, n))
            told = {"rows": n, "seeds": list(seeds), "clusters": result.clusters, "scaling": SCALING}
            manifest["mauve"] = told | {"values": list(result.values)}
        return Judged(measured, manifest)


def _left_out(scores: Scores) -> dict[str, int]:
    return {"dropped": scores.dropped, "cut": scores.cut, "windows": scores.windows}
