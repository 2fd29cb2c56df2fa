"""Evaluation language models (LMs), which score samples of other models and compute features of them.

- `RunLM` is a run of `ar` of this package, on the tokens of the samples themselves; its NLL is exact.
- `HuggingFaceLM` is any causal language model in a local Hugging Face folder, such as GPT-2 large. Samples are decoded
  to text and split into its own tokens. It needs the extra `judge`.

Compare only numbers of one LM under one setting (see `emoe.evaluation.gen_ppl`). Its perplexity of held-out text shows
how reliable it is. Never train on its scores, nor select a model by them.
"""

from __future__ import annotations

import hashlib
import importlib
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as nnf
from torch.nn.utils.rnn import pad_sequence

from emoe.config import ConfigError
from emoe.domains.base import DataError, Domain
from emoe.domains.text.data import Text
from emoe.runs.run import Run
from emoe.runs.train import load_run, pick_device

LOGITS = 2**28  # numbers in the logits of one call, at most
SUFFIXES = (".safetensors", ".json", ".txt", ".bpe", ".model")  # files that decide what a Hugging Face model computes
PACKAGES = {"mauve": "mauve-text", "faiss": "faiss-cpu"}  # names of modules on the package index


class EvalLM(ABC):
    """A language model that scores tokens from left to right, without gradients."""

    kind: ClassVar[str]  # in manifests
    name: str
    sha256: str  # of weights and tokenizer
    dtype: str
    context: int  # most tokens in a call
    end: int | None = None  # the token that ends texts, if there is one
    pooling: ClassVar[str]  # hidden states that are features: last, mean

    @abstractmethod
    def encode(self, text: Text, rows: Int[Tensor, "n L"]) -> list[list[int]]:
        """The tokens of each row in the vocabulary of the LM."""

    @abstractmethod
    def nll(self, tokens: Int[Tensor, "B W"], *, start: bool) -> Float[Tensor, "B W"]:
        """-log p(token | earlier tokens of the row) in nats, on the CPU, for W up to `context`.

        With `start` the start token precedes the first token; otherwise the first value is meaningless.
        """

    @abstractmethod
    def features(self, text: Text, rows: Int[Tensor, "n L"]) -> Float[Tensor, "n F"]:
        """Features for MAUVE: last hidden states, on the CPU."""

    def describe(self) -> dict[str, Any]:
        """Entries of a manifest."""
        return {name: getattr(self, name) for name in ("kind", "name", "sha256", "dtype", "context", "pooling")}


class RunLM(EvalLM):
    """A run of a causal network of this package, such as method `ar`: exact NLL of the tokens of the samples.

    The network reads the mask symbol and then the row, so its output at l is p(x^l | x^<l), also for l = 0. Special
    tokens are tokens like any other, and no token ends a text. Features are the mean over positions: the last hidden
    state of a small network mostly predicts the next token.
    """

    kind, pooling = "run", "mean"

    def __init__(self, run: Run):
        method = run.experiment.method
        if not method.needs().causal:
            raise ConfigError(f"eval-lm: {run.path} holds {method.kind!r}, which has no exact NLL; give a run of 'ar'")
        self.run, self.backbone, self.space = run, run.method.backbone, run.method.space
        self.name, self.context = run.path.name, self.space.length
        self.dtype = str(next(self.backbone.parameters()).dtype).removeprefix("torch.")
        self.sha256 = _hash_state(self.backbone)
        self._scored: tuple[Tensor, Tensor] | None = None  # the last tokens, and their NLL

    def encode(self, text: Text, rows: Int[Tensor, "n L"]) -> list[list[int]]:
        """The rows themselves; a ConfigError if the LM was trained on other tokens."""
        self._check(text)
        tokens: list[list[int]] = rows.tolist()
        return tokens

    @torch.no_grad()
    def nll(self, tokens: Int[Tensor, "B W"], *, start: bool = True) -> Float[Tensor, "B W"]:
        """See `EvalLM.nll`; the mask symbol always precedes the first token.

        Settings differ in which tokens they count, so the NLL of the last tokens is stored.
        """

        def score(part: Int[Tensor, "b W"]) -> Float[Tensor, "b W"]:
            logits = self.backbone.read(self._hidden(part)).flatten(0, 1)
            return nnf.cross_entropy(logits, part.flatten(), reduction="none").view(part.shape).double()

        if self._scored is None or not torch.equal(self._scored[0], tokens):
            self._scored = tokens.clone(), _in_parts(score, tokens, self.space.size, self.run.device)
        return self._scored[1].clone()

    @torch.no_grad()
    def features(self, text: Text, rows: Int[Tensor, "n L"]) -> Float[Tensor, "n F"]:
        self._check(text)
        width = self.backbone.head_weights()[0].shape[1]
        return _in_parts(lambda part: self._hidden(part).float().mean(1), rows, width, self.run.device)

    def describe(self) -> dict[str, Any]:
        experiment = self.run.experiment
        trained = Path(getattr(experiment.domain, "path", experiment.domain.kind or "")).name
        return super().describe() | {"recipe": experiment.name, "step": self.run.step, "trained_on": trained}

    def _hidden(self, tokens: Int[Tensor, "B W"]) -> Float[Tensor, "B W K"]:
        shifted = nnf.pad(tokens[:, :-1], (1, 0), value=self.space.mask_id)
        return self.backbone(shifted, torch.zeros(len(tokens), device=tokens.device)).h

    def _check(self, text: Text) -> None:
        same = (self.space.size, self.space.mask_id) == (text.space.size, text.space.mask_id)
        try:
            own, other = _tokenizer_of(self.run.domain), _tokenizer_of(text)
        except DataError:  # the text of the LM is not on this machine
            own = other = None
        if not same or (own and other and own != other):
            problem = f"{self.name} was trained with another tokenizer than that of {text.name}"
            raise ConfigError([f"eval-lm: {problem}; train one on it"])


class HuggingFaceLM(EvalLM):
    """A causal language model in a Hugging Face folder: `config.json`, safetensors and a tokenizer.

    Nothing is downloaded, no code of the folder is run, and no pickle is loaded. The start token is the model's `bos`,
    or its `eos` if it has none; for GPT-2 both are <|endoftext|>. Features are those of `mauve-text`: the last hidden
    state at the last token. A folder without such a model is a ConfigError.
    """

    kind, pooling, dtype = "hugging-face", "last", "float32"

    def __init__(self, folder: str | Path, *, device: str = "auto"):
        library, path = import_extra("transformers"), Path(folder)
        if not (path / "config.json").is_file():
            raise ConfigError([f"eval-lm: {path} holds no config.json; give the folder of a Hugging Face model"])
        if not any(path.glob("*.safetensors")):
            raise ConfigError([f"eval-lm: {path} holds no .safetensors; convert the weights, nothing else is loaded"])
        options = {"local_files_only": True, "trust_remote_code": False}
        library.utils.logging.disable_progress_bar()
        try:
            self.tokenizer = library.AutoTokenizer.from_pretrained(str(path), **options)
            self.model, loaded = library.AutoModelForCausalLM.from_pretrained(
                str(path), use_safetensors=True, dtype=torch.float32, output_loading_info=True, **options
            )
        except (OSError, ValueError, KeyError, TypeError, RuntimeError, ImportError) as error:
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ConfigError([f"eval-lm: {path} cannot be opened as a causal language model ({first})"]) from None
        # Missing weights would be drawn at random, with only a warning.
        if faults := sorted(map(str, [*loaded["missing_keys"], *loaded["mismatched_keys"]])):
            raise ConfigError([f"eval-lm: {path} lacks weights ({', '.join(faults[:3])}); give a whole copy"])
        self.model.to(pick_device(device)).eval().requires_grad_(False)
        self.name, self.sha256 = path.resolve().name, _hash_folder(path)
        self.context = int(getattr(self.model.config, "max_position_embeddings", None) or 1024)
        self.end = self.tokenizer.eos_token_id
        self.start = self.end if self.tokenizer.bos_token_id is None else self.tokenizer.bos_token_id

    def encode(self, text: Text, rows: Int[Tensor, "n L"]) -> list[list[int]]:
        """Tokens of the decoded rows, with special tokens as text; none are added."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about texts longer than the context, which are read in windows
            encoded = self.tokenizer(text.decode(rows), add_special_tokens=False, verbose=False)["input_ids"]
        return [list(map(int, ids)) for ids in encoded]

    @torch.no_grad()
    def nll(self, tokens: Int[Tensor, "B W"], *, start: bool) -> Float[Tensor, "B W"]:
        """See `EvalLM.nll`. Tokens to the right change nothing, so rows may be filled up with any token."""
        if start and self.start is None:
            raise ConfigError([f"setting: {self.name} has no start token; use a setting that does not score the first"])

        def score(part: Int[Tensor, "b W"]) -> Float[Tensor, "b W"]:
            given, target = part[:, :-1], part[:, 1:]
            if start:
                given, target = torch.cat([part.new_full((len(part), 1), self.start), given], 1), part
            nll = part.new_zeros(len(part), 0).double()
            if given.shape[1]:
                logits = self.model(given, use_cache=False).logits.transpose(1, 2)
                nll = nnf.cross_entropy(logits, target, reduction="none").double()
            return nll if start else nnf.pad(nll, (1, 0), value=math.nan)

        return _in_parts(score, tokens, self.model.config.vocab_size, self.model.device)

    @torch.no_grad()
    def features(self, text: Text, rows: Int[Tensor, "n L"]) -> Float[Tensor, "n F"]:
        """See `EvalLM.features`; an empty text is the start token alone, or token 0."""
        parts = []
        tokens = [ids[: self.context] or [self.start or 0] for ids in self.encode(text, rows)]
        size = _batch(max(map(len, tokens), default=1), self.model.config.vocab_size)
        for first in range(0, len(tokens), size):
            ids, lengths = fill(tokens[first : first + size], self.end or 0)
            out = self.model(ids.to(self.model.device), use_cache=False, output_hidden_states=True)
            parts.append(out.hidden_states[-1].float().cpu()[torch.arange(len(ids)), lengths - 1])
        return torch.cat(parts)


def open_eval_lm(folder: str | Path, *, device: str = "auto") -> EvalLM:
    """An evaluation LM by its folder: a run, which has an `experiment.json`, or a Hugging Face model."""
    path = Path(folder)
    if not path.is_dir():
        raise ConfigError(
            f"eval-lm: {path} does not exist; give the folder of a run of 'ar' or of a Hugging Face model"
        )
    if (path / "experiment.json").is_file():
        return RunLM(load_run(path, device=device))
    return HuggingFaceLM(path, device=device)


def import_extra(module: str) -> Any:
    """Import a package of the extra `judge`; a ConfigError if it is not installed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about deprecated uses of one such package in another
            return importlib.import_module(module)
    except ImportError as error:
        name = error.name or module
        raise ConfigError(f"{PACKAGES.get(name, name)}: the package is missing; pip install emoe[judge]") from None


def fill(tokens: Sequence[Sequence[int]], end: int) -> tuple[Int[Tensor, "n W"], Int[Tensor, " n"]]:
    """Lists of tokens as rows, padded on the right with `end`; and their lengths."""
    rows = [torch.tensor(ids, dtype=torch.long) for ids in tokens]
    return pad_sequence(rows, batch_first=True, padding_value=end), torch.tensor([len(row) for row in rows])


def _batch(length: int, size: int) -> int:
    return max(1, LOGITS // max(1, length * size))


def _in_parts(function: Callable[[Tensor], Tensor], tokens: Int[Tensor, "B W"], size: int, device: Any) -> Tensor:
    """Results of a function of rows, of `size` numbers per token, computed in parts on a device, on the CPU."""
    parts = tokens.split(_batch(tokens.shape[1], size))
    return torch.cat([function(part.to(device)).cpu() for part in parts])


def _tokenizer_of(domain: Domain) -> str | None:
    """The checksum of the tokenizer of a text."""
    sha256: str | None = getattr(domain, "manifest", {}).get("tokenizer", {}).get("sha256")
    return sha256


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
